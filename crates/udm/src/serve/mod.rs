//! `udm serve`: serves devices to NBD clients until a signal comes or the command of `--run` ends.
//!
//! The calling thread becomes the control thread: it has the signals, the control socket and the
//! supervisor of `--run`. The cores are threads of their own. There is no periodic timer: a server
//! without requests sleeps. A separate thread supervises the end of the server and receives the
//! second signal, because the others may be stuck (`shutdown`).

mod args;
mod child;
mod client_limits;
pub mod descriptors;
mod inherited_sockets;
mod metrics_port;
mod nvme;
mod nvme_peers;
mod one_client;
mod path_maintenance;
mod ready;
mod reload;
mod report;
mod sandbox;
mod shutdown;
mod socket_access;
mod sockets;
mod supervisor;
mod systemd;
mod tls;
mod ublk;
mod until_end;
mod upgrade;
mod vhost_user;

use crate::config;
use crate::output::{count_noun, print_to_stdout};
use crate::table_arg::{DeviceTableArg, TableArg};
use crate::verbs::read_table;
use anyhow::{Context, Result, bail};
use args::LostSnapshotsArg;
pub use args::{ServeArgs, VhostUserDiskArg};
use clap::FromArgMatches;
use metrics_port::MetricsPort;
use one_client::{exit_with_parent, take_single_client};
pub use ready::spawn_daemon_until_ready;
use reload::ReloadableConfig;
use shutdown::SignalReceiver;
use sockets::ServerSockets;
use std::collections::VecDeque;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
pub use supervisor::{is_supervisor, run_supervisor};
use tls::{load_server_tls, proves_clients, warn_about_open_port};
use ublk::UblkDisks;
use udm_backends::{BackendDeviceRegistry, RemoteDisks};
use udm_control::exports::{DeviceExporter, ExportOptions};
use udm_control::http::{self, socket::ControlSocket};
use udm_control::{DeviceRegistry, StateFolder, verbs};
use udm_core::Device;
use udm_frontends::nbd::{Exports, NbdServer, NbdServerTls};
use udm_frontends::ublk::set_io_flusher;
use udm_object::ObjectClient;
use udm_runtime::{CoreOptions, Runtime, RuntimeOptions};
use until_end::run_until_end;
use upgrade::{RunningServer, TakeOver};
use vhost_user::VhostUserDisks;

/// Maximum number of cores without `--cores`; a server shares its machine with other programs.
const CORES_DEFAULT_MAX: usize = 8;

/// Pause between two attempts to create a device whose snapshot cannot be attached yet.
const WAIT_STEP: Duration = Duration::from_secs(1);

/// Pause between two attempts to remove devices, and between checks for the end of the cores,
/// during a shutdown.
const PAUSE: Duration = Duration::from_millis(5);

/// Runs the server until its end; the exit status is that of the command of `--run`.
pub fn run(args: &ServeArgs) -> Result<ExitCode> {
    let Some(file) = &args.config else {
        sandbox::enter_sandbox(args, None, &[])?;
        return serve_in_tokio_runtime(args, None);
    };
    let loaded = config::load_config_files(file, &ServeArgs::command())?;
    let merged = ServeArgs::from_arg_matches(&loaded.merged(file)?)?;
    if let Some(device) = loaded.device_for_certificates()
        && !proves_clients(&merged)
    {
        let (file, name) = (file.display(), &device.name);
        bail!("{file}: devices.{name}: allow: a client proves its name only with tls and tls-verify-peer");
    }
    if args.check {
        load_server_tls(&merged).with_context(|| file.display().to_string())?;
        let devices = count_noun(loaded.devices.len() as u64, "device");
        print_to_stdout(&format!("{}: good, {devices}\n", file.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    sandbox::enter_sandbox(&merged, Some(file), &loaded.devices)?;
    serve_in_tokio_runtime(&merged, Some(loaded.reader(file)))
}

/// Serves the devices of `args` and of a file.
fn serve_in_tokio_runtime(args: &ServeArgs, file: Option<ReloadableConfig>) -> Result<ExitCode> {
    exit_with_parent(args)?;
    descriptors::raise_open_file_limit();
    if !args.ublk.is_empty() {
        set_io_flusher();
    }
    let control = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(http::BLOCKING_MAX)
        .build()
        .context("serve: control thread")?;
    let done = control.block_on(run_device_server(args, file));
    // A load that hangs on its storage must not keep the process alive.
    control.shutdown_background();
    done
}

async fn run_device_server(args: &ServeArgs, file: Option<ReloadableConfig>) -> Result<ExitCode> {
    let has_file = file.is_some();
    let maintenance = path_maintenance::maintenance_policy_from_args(args)?;
    let cores = Runtime::start(&runtime_options_from_args(args)).context("serve: cores")?;
    let core_set = Arc::clone(cores.core_set());
    let backends = BackendDeviceRegistry::new(core_set.len()).with_objects(Box::new(ObjectClient::default()));
    let remote_disks = Arc::clone(backends.remote_disks());
    let registry = DeviceRegistry::with_opener(core_set.clone(), core_set.len(), Box::new(backends));
    registry.set_maintenance(maintenance);
    let (queue_depth, nr_hw_queues) = (args.dm_mq_queue_depth, args.dm_mq_nr_hw_queues);
    registry.set_request_queues(udm_control::registry::RequestQueueParams { queue_depth, nr_hw_queues });
    registry.set_lost_snapshots(args.lost_snapshots.into());
    if args.sandboxed {
        registry.set_refused_file_advice(sandbox::ACCESS_ADVICE);
    }
    let state_folder = match args.state.open() {
        Ok(folder) => {
            folder.clean();
            registry.set_state_folder(Arc::clone(&folder));
            Some(folder)
        }
        Err(error) => {
            tracing::warn!("no state folder, so nothing survives a restart: {error:#}");
            None
        }
    };
    let exports = Arc::new(Exports::new());
    let options = ExportOptions { only: args.exports.clone(), read_only: args.readonly };
    registry.set_exporter(DeviceExporter::new(Arc::clone(&exports), options));

    let limit = Duration::from_secs(args.stop_timeout);
    let mut take_over = args.take_over_on_stdin.then(TakeOver::receive).transpose()?;
    let created = match (load_server_tls(args), &mut take_over) {
        (Err(error), _) => Err(error.context("serve")),
        (Ok(tls), Some(take_over)) => take_over.create_devices(&registry, file).await.map(|()| tls),
        (Ok(tls), None) => create_startup_devices(args, file, &registry).await.map(|()| tls),
    };
    let done = match created {
        Ok(tls) => {
            let reloads = has_file || tls.is_some();
            let mut signals = SignalReceiver::start(reloads).context("serve: signals")?;
            let parts = ServerParts {
                args,
                has_file,
                tls,
                registry: &registry,
                exports,
                cores: &cores,
                remote_disks: &remote_disks,
                state_folder: state_folder.as_ref(),
            };
            let done = run_listeners_until_shutdown(parts, take_over.as_mut(), &mut signals).await;
            let names = registry.all().iter().map(|m| (m.device.id(), m.device.name())).collect();
            signals.end_within(limit, &core_set, names);
            done
        }
        Err(error) => Err(error),
    };
    if let (Err(error), Some(take_over)) = (&done, &mut take_over) {
        take_over.report_failure(error);
    }
    // No step here needs its own time limit: at the limit the shutdown thread ends the program.
    registry.begin_shutdown();
    registry.lift_throttles(true);
    cores.end();
    let all_gone = tokio::time::timeout(limit, remove_devices_at_shutdown(&registry)).await.is_ok();
    let stopping = cores.stop_within(limit);
    while !stopping.is_over() {
        tokio::time::sleep(PAUSE).await;
    }
    if let Some(folder) = state_folder.filter(|_| all_gone) {
        // Nothing of this server can write any more.
        folder.detach_all();
    }
    done
}

/// The options of the cores.
fn runtime_options_from_args(args: &ServeArgs) -> RuntimeOptions {
    let cpus = match &args.cores {
        Some(list) => list.numbers().iter().copied().map(Some).collect(),
        None => {
            let cpus = std::thread::available_parallelism().map_or(1, usize::from);
            vec![None; cpus.min(CORES_DEFAULT_MAX)]
        }
    };
    RuntimeOptions { cpus, poll: args.poll, spin_max: CoreOptions::default().spin_max }
}

/// Creates the devices of the command line in their order, so that later ones can name earlier
/// ones. If a device waits for a snapshot that is not attached yet, the next devices are created
/// first.
async fn create_startup_devices(
    args: &ServeArgs,
    file: Option<ReloadableConfig>,
    registry: &Arc<DeviceRegistry>,
) -> Result<()> {
    let mut declared: Vec<&str> = args.devices.iter().map(|device| device.name.as_str()).collect();
    declared.extend(file.iter().flat_map(|(desired, _)| &desired.devices).map(|device| device.name.as_str()));
    // Before the devices that name them; after all, those that name other devices.
    verbs::clone::restore_clones(registry, &declared, false).await;
    let mut left: VecDeque<&DeviceTableArg> = args.devices.iter().collect();
    let (mut waited, mut is_reported) = (0, false);
    registry.set_starting(true);
    while let Some(device) = left.pop_front() {
        // All remaining devices wait, so no snapshot will be attached by creating another one.
        let is_last = waited > left.len();
        registry.set_starting(!is_last);
        let table = resolve_table_arg(&device.name, &device.table)?;
        match verbs::create_mapped_device(registry, &device.name, None, Some(&table)).await {
            Ok(()) => waited = 0,
            Err(error) if error.blocked && !is_last => {
                left.push_back(device);
                waited += 1;
            }
            Err(error) if error.blocked && args.lost_snapshots == LostSnapshotsArg::Wait => {
                if !std::mem::replace(&mut is_reported, true) {
                    tracing::warn!("waiting: {error}");
                }
                tokio::time::sleep(WAIT_STEP).await;
                left.push_front(device);
            }
            Err(error) => return Err(anyhow::anyhow!(error.with_table(&table))),
        }
    }
    registry.set_starting(false);
    verbs::clone::restore_clones(registry, &[], file.is_none()).await;
    let mut names: Vec<&str> = args.devices.iter().map(|device| device.name.as_str()).collect();
    let declared = match file {
        Some(file) => reload::create_config_file_devices(registry, file, &names).await?,
        None => Vec::new(),
    };
    names.extend(declared.iter().map(String::as_str));
    verbs::clone::restore_clones(registry, &[], true).await;
    verbs::snapshot::find_devices_bypassing_origin(registry).iter().for_each(|line| tracing::warn!("{line}"));
    match args.exports.iter().find(|export| !names.contains(&export.as_str())) {
        Some(missing) => bail!("{missing}: export: no --device of that name"),
        None => Ok(()),
    }
}

/// The text of the table of device `name`.
pub(crate) fn resolve_table_arg(name: &str, table: &TableArg) -> Result<String> {
    match table {
        TableArg::Text(text) | TableArg::Whole(text) => Ok(text.clone()),
        TableArg::File(file) => read_table(file).with_context(|| name.to_owned()),
    }
}

/// What a server consists of before it listens.
struct ServerParts<'a> {
    args: &'a ServeArgs,
    /// There is a configuration file.
    has_file: bool,
    tls: Option<NbdServerTls>,
    registry: &'a Arc<DeviceRegistry>,
    exports: Arc<Exports>,
    cores: &'a Runtime,
    remote_disks: &'a RemoteDisks,
    state_folder: Option<&'a Arc<StateFolder>>,
}

/// Starts the listeners, waits for the end, and stops the listeners. With `take_over`, uses the
/// sockets of another server and serves its clients.
async fn run_listeners_until_shutdown(
    parts: ServerParts<'_>,
    take_over: Option<&mut TakeOver>,
    signals: &mut SignalReceiver,
) -> Result<ExitCode> {
    let ServerParts { args, has_file, tls, registry, exports, cores, remote_disks, state_folder } = parts;
    let is_taken_over = take_over.is_some();
    let (mut take_over, given) = match take_over {
        Some(take_over) => {
            let given = take_over.take_sockets();
            (Some(take_over), given)
        }
        None => (None, inherited_sockets::take_inherited_sockets()?),
    };
    let mut sockets = ServerSockets::new(args, &given)?;
    if is_taken_over {
        // All of them are among the given ones.
        sockets.listen.clear();
    }
    let has_disks = args.has_disks();
    let single_client = take_single_client(args)?;
    if sockets.listen.is_empty() && given.nbd.is_empty() && !has_disks && single_client.is_none() {
        bail!(
            "serve: nowhere to serve: expected unix, port, vhost-user, ublk or nvme, in the file or on the command line"
        );
    }
    let socket = match given.control {
        Some(control) if is_taken_over => ControlSocket::taken_over(control, given.removes_control_file),
        Some(control) => ControlSocket::given(control),
        None => ControlSocket::bind(&sockets.control),
    };
    let socket = socket.with_context(|| format!("control socket {}", sockets.control.display()))?;
    let socket = socket.with_readers(args.control_group.is_some());
    if socket.removes_file() {
        socket_access::apply_control_access(args, &sockets.control).context("serve")?;
    }
    let metrics_port = MetricsPort::new(args, is_taken_over)?;
    let disks = match &mut take_over {
        Some(take_over) => take_over.take_machines(),
        None => VhostUserDisks::bind(args, &exports)?,
    };
    let (core_set, listen) = (cores.core_set(), &sockets.listen);
    let server = NbdServer::start_with(
        core_set,
        Arc::clone(&exports),
        args.clients.server_limits(),
        tls.clone(),
        listen,
        given.nbd,
        !is_taken_over,
    );
    let server = server.context("serve")?;
    if let Some(path) = sockets.unix.as_ref().filter(|_| !is_taken_over) {
        socket_access::apply_socket_access(args, path).context("serve")?;
    }
    if let Some(take_over) = &mut take_over {
        take_over.commit()?;
        server.keep_socket_files(false);
        socket.keep_file(false);
        disks.iter().for_each(|disk| disk.socket.keep_file(false));
    }
    let machines = Arc::new(VhostUserDisks::start(core_set, &exports, disks)?);
    registry.set_vhost_user_sockets(Arc::<VhostUserDisks>::clone(&machines));
    let restored = take_over.is_none().then(|| registry.take_awaited_ublk_disks());
    let block_devices = UblkDisks::start(args, core_set, &exports, restored)?;
    let nvme = nvme::NvmeTarget::start(args, core_set, &exports, &sockets.control, remote_disks)?;
    let (refresh_machines, refresh_disks) = (machines.change_hook(), block_devices.disks().change_hook());
    nvme.register_with(registry);
    let refresh_namespaces = nvme.change_hook();
    exports.on_changed(Arc::new(move |device| {
        refresh_machines(device);
        refresh_disks(device);
        refresh_namespaces(device);
    }));
    let _connected = args.vhost_user_fd.as_ref().map(|fd| machines.serve_connected(fd)).transpose()?;
    let exporter = registry.exporter().expect("set before");
    let requires_tls = tls.as_ref().is_some_and(|tls| tls.is_required);
    exporter.serves(sockets.addresses(&server), requires_tls, server.counts());
    let _pid = match take_over {
        Some(take_over) => {
            let (clients, old) = take_over.attach_clients(&server);
            server.resume_accepting();
            let pid = ready::write_pidfile(args);
            take_over.report_serving();
            block_devices.disks().take_over(old, take_over.take_block_devices(), args);
            report::print_taken_over(registry.all().len(), clients, old);
            pid?
        }
        None => {
            let addresses = [machines.addresses(), block_devices.disks().addresses()].concat();
            // A command of --run has it in its environment.
            let control = args.run.is_none().then_some(&*sockets.control);
            report::print_exports_to_stderr(&exporter.list(), &addresses, &nvme.addresses(), control);
            ready::write_pidfile_and_detach(args)?
        }
    };
    if let Some(client) = single_client {
        server.adopt(client).context("serve: single")?;
    }
    registry.set_ublk_disks(Arc::<UblkDisks>::clone(block_devices.disks()));
    systemd::notify_systemd_ready(registry.all().len());
    warn_about_open_port(args);

    let running = RunningServer {
        args,
        tls: tls.as_ref(),
        registry,
        state_folder,
        server: &server,
        machines: &machines,
        block_devices: block_devices.disks(),
        control: &socket,
    };
    let (done, is_upgraded) = run_until_end(running, metrics_port, has_file, cores, &sockets, signals).await;
    if !is_upgraded {
        systemd::notify_systemd_stopping();
    }
    verbs::cancel_all_pending_verbs(registry);
    drop(socket);
    // Their requests in flight are waited for with those of the other clients.
    drop(machines);
    // The kernel still reads and writes while it ends a disk.
    drop(block_devices);
    drop(nvme);
    server.stop();
    done
}

/// Removes all devices as soon as their clients have their replies; a device is removed after the
/// devices that use it.
async fn remove_devices_at_shutdown(registry: &Arc<DeviceRegistry>) {
    loop {
        for mapped in registry.all() {
            let _ = verbs::remove_mapped_device(registry, &mapped.device.name()).await;
        }
        if registry.all().is_empty() {
            return;
        }
        tokio::time::sleep(PAUSE).await;
    }
}
