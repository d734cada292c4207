//! The old server: hands everything over to a new program, or goes on as it was.

use super::channel::{NewServerMessage, OldServerMessage, UpgradeChannel};
use super::state::{BlockDeviceState, ClientState, FrontEndNeeds, MachineState, ServerState, format_for};
use crate::log;
use crate::serve::args::ServeArgs;
use crate::serve::systemd;
use crate::serve::ublk::UblkDisks;
use crate::serve::vhost_user::{VhostUserDisk, VhostUserDisks};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::process::{Child, Command};
use tokio::sync::{mpsc, oneshot};
use udm_control::api::{UpgradeReport, UpgradeServerRequest};
use udm_control::error::VerbError;
use udm_control::http::socket::ControlSocket;
use udm_control::verbs::CancelToken;
use udm_control::verbs::handover::{
    HandedOverDevices, HandoverNeeds, check_handover, create_handed_over_devices, remove_devices_for_handover,
};
use udm_control::{DeviceRegistry, StateFolder};
use udm_core::errno::{EBUSY, EINVAL, EIO, EOPNOTSUPP, ETIMEDOUT};
use udm_dm::TargetError;
use udm_frontends::nbd::{DetachedNbdClient, InheritedListener, NbdHandover, NbdServer, NbdServerTls};
use udm_frontends::vhost_user::DetachedVhostUserFrontEnd;

/// How long the new program may take to start its cores, and to create all devices.
const START_MAX: Duration = Duration::from_secs(15);

/// How long a program that has failed may take to end before it is killed.
const END_MAX: Duration = Duration::from_secs(10);

/// How long clients in the handshake are waited for, before the pause.
const HANDSHAKE_MAX: Duration = Duration::from_secs(1);

/// The longest pause until no request is in flight.
const QUIESCE_MAX: Duration = Duration::from_secs(5);

/// Interval of looks at what is left, and of repeated requests to clients.
const LOOK_PAUSE: Duration = Duration::from_millis(1);
const REPEAT_LOOKS: u32 = 20;

/// Looks after which limits of requests per second are lifted. By then clients have got the message
/// and send no more, so that only what waits already passes at once.
const LOOKS_BEFORE_LIFT: u32 = 5;

/// Requests for upgrades, from the control socket.
pub(in crate::serve) struct UpgradeRequests(mpsc::Receiver<UpgradeRequest>);

type UpgradeRequest = (UpgradeServerRequest, oneshot::Sender<Result<UpgradeReport, VerbError>>);

impl UpgradeRequests {
    /// Accepts requests from `registry`.
    pub(in crate::serve) fn of(registry: &DeviceRegistry) -> UpgradeRequests {
        let (sender, requests) = mpsc::channel(1);
        registry.set_upgrades(sender);
        UpgradeRequests(requests)
    }
}

/// The parts of a running server.
#[derive(Clone, Copy)]
pub(in crate::serve) struct RunningServer<'a> {
    pub(in crate::serve) args: &'a ServeArgs,
    pub(in crate::serve) tls: Option<&'a NbdServerTls>,
    pub(in crate::serve) registry: &'a Arc<DeviceRegistry>,
    pub(in crate::serve) state_folder: Option<&'a Arc<StateFolder>>,
    pub(in crate::serve) server: &'a NbdServer,
    pub(in crate::serve) machines: &'a Arc<VhostUserDisks>,
    pub(in crate::serve) block_devices: &'a Arc<UblkDisks>,
    pub(in crate::serve) control: &'a ControlSocket,
}

/// Serves requests for upgrades. Returns the process ID of the new server after the first one that
/// succeeds: this server has nothing left then.
pub(in crate::serve) async fn serve_upgrade_requests(
    mut requests: UpgradeRequests,
    running: RunningServer<'_>,
) -> u32 {
    loop {
        let Some((request, reply)) = requests.0.recv().await else { return std::future::pending().await };
        let done = running.upgrade(&request).await;
        match &done {
            Ok(report) => log::queue_stderr_text(&format!(
                "udm: upgraded: process {} serves, after a pause of {:.1} ms\n",
                report.pid,
                report.pause_ns as f64 / 1e6
            )),
            Err(error) => log::queue_stderr_text(&format!("udm: {error}\n")),
        }
        let pid = done.as_ref().ok().map(|report| report.pid);
        // The client may have gone.
        let _ = reply.send(done);
        if let Some(pid) = pid {
            return pid;
        }
    }
}

/// What this server has detached from itself.
#[derive(Default)]
struct DetachedParts {
    clients: Vec<DetachedNbdClient>,
    /// `None` before all machines are detached.
    machines: Option<Vec<VhostUserDisk>>,
    /// The block devices of ublk are paused.
    are_block_devices_paused: bool,
    devices: HandedOverDevices,
}

/// An error of the upgrade; the server goes on as it was.
fn refuse_upgrade(errno: i32, why: impl Into<String>) -> VerbError {
    VerbError::new("upgrade", TargetError::new(why).with_errno(errno))
}

/// The new program.
struct NewServer {
    child: Child,
    channel: Option<UpgradeChannel>,
    version: String,
}

impl RunningServer<'_> {
    async fn upgrade(&self, request: &UpgradeServerRequest) -> Result<UpgradeReport, VerbError> {
        self.check(request)?;
        // A new program that does not know extended headers or packed rings finds out with the
        // state.
        let front_ends = FrontEndNeeds {
            block_devices: self
                .block_devices
                .handed_over()
                .iter()
                .any(BlockDeviceState::is_unknown_to_options),
            ..FrontEndNeeds::default()
        };
        let format = format_for(HandoverNeeds::of_registry(self.registry), front_ends);
        let mut new = NewServer::start(&find_new_program(request.program.as_deref())?, format).await?;
        let done = self.hand_over(&mut new).await;
        if done.is_err() {
            new.end().await;
        }
        done
    }

    /// Says what cannot be handed over.
    fn check(&self, request: &UpgradeServerRequest) -> Result<(), VerbError> {
        let encrypted = self.server.stats().tls;
        if encrypted > 0 && !request.disconnect_tls {
            let clients = if encrypted == 1 { "client is" } else { "clients are" };
            let why = format!(
                "{encrypted} {clients} connected with TLS, and the keys cannot be handed over: \
                 --disconnect-tls completes their requests in flight and closes their connections"
            );
            return Err(refuse_upgrade(EBUSY, why));
        }
        if self.args.run.is_some() {
            return Err(refuse_upgrade(EOPNOTSUPP, "the command of --run ends with its server"));
        }
        if self.args.unix.as_deref() == Some(Path::new("-")) {
            return Err(refuse_upgrade(
                EOPNOTSUPP,
                "the private folder of --unix - ends with its server: give a path",
            ));
        }
        if self.args.single || self.args.exit_with_parent {
            let why = "a server of --single or --exit-with-parent ends with the program that started it";
            return Err(refuse_upgrade(EOPNOTSUPP, why));
        }
        if self.args.vhost_user_fd.is_some() {
            return Err(refuse_upgrade(
                EOPNOTSUPP,
                "the machine of --fd ends its server when it disconnects",
            ));
        }
        if !self.args.nvme.is_empty() {
            let why =
                "NVMe hosts cannot be handed over: restart the server, and they reconnect by themselves";
            return Err(refuse_upgrade(EOPNOTSUPP, why));
        }
        if let Some(name) = self.block_devices.busy() {
            let why = format!("the block device of {name} is being added, taken over or removed: try again");
            return Err(refuse_upgrade(EBUSY, why));
        }
        check_handover(self.registry)
    }

    /// Hands everything over. After an error, this server serves as before.
    async fn hand_over(&self, new: &mut NewServer) -> Result<UpgradeReport, VerbError> {
        self.control.pause(true);
        self.server.pause_accepting();
        self.wait_for_handshakes().await;
        let begun = Instant::now();
        let mut parts = DetachedParts::default();
        let done = self.hand_over_state(new, &mut parts).await;
        if let Err(error) = done {
            // The new program detaches its snapshots before it ends, so it ends first.
            new.end().await;
            self.go_on(parts).await;
            return Err(error);
        }
        self.server.keep_socket_files(true);
        self.control.keep_file(true);
        self.machines.keep_files(true);
        let pid = new.child.id().unwrap_or_default();
        systemd::notify_systemd(&format!("MAINPID={pid}"));
        if let Err(error) = new.receive::<NewServerMessage>(START_MAX).await {
            tracing::warn!("upgrade: process {pid} has taken over, and does not say that it serves: {error}");
        }
        Ok(UpgradeReport {
            pid,
            version: std::mem::take(&mut new.version),
            devices: parts.devices.devices.len() as u64,
            clients: parts.clients.len() as u64,
            pause_ns: begun.elapsed().as_nanos() as u64,
        })
    }

    /// Waits for clients in the handshake. Those that are left are disconnected by the upgrade:
    /// they have sent no request.
    async fn wait_for_handshakes(&self) {
        let begun = Instant::now();
        while self.server.stats().handshakes > 0 && begun.elapsed() < HANDSHAKE_MAX {
            tokio::time::sleep(LOOK_PAUSE).await;
        }
    }

    /// Quiesces the server, sends its state and commits. What this server must take back after an
    /// error is in `parts`.
    async fn hand_over_state(&self, new: &mut NewServer, parts: &mut DetachedParts) -> Result<(), VerbError> {
        let begun = Instant::now();
        let say = |step: &str| tracing::debug!("upgrade: {step} after {:?}", begun.elapsed());
        self.registry.begin_shutdown();
        self.machines.begin_detach();
        self.detach_clients(&mut parts.clients).await?;
        say("clients detached");
        parts.machines = Some(self.machines.take_detached());
        self.pause_block_devices().await?;
        parts.are_block_devices_paused = true;
        let token = CancelToken::default();
        let removal = remove_devices_for_handover(self.registry, &token, &mut parts.devices);
        match tokio::time::timeout(QUIESCE_MAX, removal).await {
            Ok(done) => done?,
            Err(_) => {
                return Err(refuse_upgrade(
                    ETIMEDOUT,
                    "a device has requests in flight that do not complete",
                ));
            }
        }
        say("devices removed");
        self.state_folder.inspect(|folder| folder.hand_over_all());
        let listeners =
            self.server.handed_over_listeners().map_err(|e| refuse_upgrade(EIO, e.to_string()))?;
        let fds = self.descriptors(parts, &listeners);
        let fds =
            fds.map_err(|e| refuse_upgrade(EIO, format!("{e}: raise the limit on open files (ulimit -n)")))?;
        new.send_state(self.state(parts, &listeners), fds).await?;
        say("state sent");
        match new.receive(START_MAX).await? {
            NewServerMessage::Prepared => {}
            NewServerMessage::Failed(why) => {
                return Err(refuse_upgrade(EIO, format!("the new program: {why}")));
            }
            _ => return Err(refuse_upgrade(EIO, "the new program does not follow the protocol")),
        }
        say("new server prepared");
        new.send(OldServerMessage::Commit).await
    }

    /// Detaches all NBD clients, and waits for the requests of machines.
    async fn detach_clients(&self, clients: &mut Vec<DetachedNbdClient>) -> Result<(), VerbError> {
        let handover = NbdHandover::start(self.server);
        let begun = Instant::now();
        for look in 1_u32.. {
            clients.extend(handover.detached());
            let stats = self.server.stats();
            let served = stats.connections.saturating_sub(stats.handshakes);
            if served == 0 && stats.orphans == 0 && self.machines.running() == 0 {
                break;
            }
            if begun.elapsed() > QUIESCE_MAX {
                let left = served + stats.orphans + self.machines.running();
                let have = if left == 1 { "client has" } else { "clients have" };
                let why = format!("{left} {have} requests in flight that do not complete");
                return Err(refuse_upgrade(ETIMEDOUT, why));
            }
            if look == LOOKS_BEFORE_LIFT {
                self.registry.lift_throttles(true);
            }
            if look.is_multiple_of(REPEAT_LOOKS) {
                handover.repeat();
            }
            tokio::time::sleep(LOOK_PAUSE).await;
        }
        clients.extend(handover.detached());
        // Block devices may have requests that wait for a limit, too.
        self.registry.lift_throttles(true);
        Ok(())
    }

    /// Waits for the requests of block devices, and holds new ones.
    async fn pause_block_devices(&self) -> Result<(), VerbError> {
        let disks = Arc::clone(self.block_devices);
        match tokio::task::spawn_blocking(move || disks.pause()).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(refuse_upgrade(error.errno, error.text)),
            Err(error) => Err(refuse_upgrade(EIO, error.to_string())),
        }
    }

    fn state(&self, parts: &DetachedParts, listeners: &[InheritedListener]) -> ServerState {
        let block_devices = self.block_devices.handed_over();
        let mut machines = parts.machines.iter().flatten().filter_map(|disk| disk.front_end.as_ref());
        let front_ends = FrontEndNeeds {
            extended_clients: parts.clients.iter().any(|client| client.header_style.is_extended()),
            packed_rings: machines.any(DetachedVhostUserFrontEnd::has_packed_rings),
            block_devices: block_devices.iter().any(BlockDeviceState::is_unknown_to_options),
        };
        ServerState {
            format: format_for(HandoverNeeds::of_devices(&parts.devices), front_ends),
            pid: std::process::id(),
            removes_control_file: self.control.removes_file(),
            listeners: listeners.iter().map(|listener| listener.removes_file).collect(),
            machines: parts.machines.iter().flatten().map(MachineState::of).collect(),
            block_devices: Some(block_devices),
            devices: parts.devices.clone(),
            clients: parts.clients.iter().map(ClientState::of).collect(),
        }
    }

    /// Copies of the descriptors in the order of [`ServerState`].
    fn descriptors(
        &self,
        parts: &DetachedParts,
        listeners: &[InheritedListener],
    ) -> io::Result<Vec<OwnedFd>> {
        let mut all = vec![self.control.as_fd().try_clone_to_owned()?];
        for listener in listeners {
            all.push(listener.socket.try_clone()?);
        }
        for disk in parts.machines.iter().flatten() {
            all.extend(MachineState::clone_descriptors(disk)?);
        }
        for client in &parts.clients {
            all.push(client.socket.try_clone()?);
        }
        Ok(all)
    }

    /// Serves again after a failed upgrade.
    async fn go_on(&self, parts: DetachedParts) {
        self.registry.cancel_shutdown();
        if !parts.devices.devices.is_empty()
            && let Err(error) = create_handed_over_devices(self.registry, &parts.devices).await
        {
            tracing::error!("after a failed upgrade: {error}");
        }
        if parts.are_block_devices_paused {
            self.block_devices.resume();
        }
        match parts.machines {
            Some(machines) => self.machines.start_again(machines),
            None => self.machines.start_again_when_stopped(),
        }
        for client in parts.clients {
            let export = client.export.clone();
            if let Err(why) = self.server.attach_detached(client) {
                tracing::warn!("nbd: export {export:?}: a client is disconnected: {why}");
            }
        }
        self.server.resume_accepting();
        self.control.pause(false);
    }
}

/// The program to start: `given`, or the file of this one, which may have been replaced.
fn find_new_program(given: Option<&str>) -> Result<PathBuf, VerbError> {
    let program = match given {
        Some(path) => PathBuf::from(path),
        None => {
            let own =
                std::env::current_exe().map_err(|e| refuse_upgrade(EIO, format!("/proc/self/exe: {e}")))?;
            // The kernel's mark of a file that was removed or replaced.
            let path = own.as_os_str().as_bytes();
            OsString::from_vec(path.strip_suffix(b" (deleted)").unwrap_or(path).to_vec()).into()
        }
    };
    if !program.is_absolute() {
        return Err(refuse_upgrade(EINVAL, format!("{}: expected an absolute path", program.display())));
    }
    Ok(program)
}

impl NewServer {
    /// Starts `program`, which must read `format`, with the arguments of this one, and waits until
    /// it is ready.
    async fn start(program: &Path, format: u32) -> Result<NewServer, VerbError> {
        let failed =
            |error: &dyn std::fmt::Display| refuse_upgrade(EIO, format!("{}: {error}", program.display()));
        let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
        let (own, theirs) = pair.map_err(|error| failed(&error))?;
        let mut arguments = std::env::args_os();
        let mut command = Command::new(program);
        command.arg0(arguments.next().unwrap_or_else(|| "udm".into()));
        let once = ["--fork", "--ready-on-stdout", "--take-over-on-stdin"];
        command.args(arguments.filter(|word| !once.iter().any(|one| word == one)));
        command.arg("--take-over-on-stdin").stdin(Stdio::from(theirs));
        for variable in ["WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"] {
            command.env_remove(variable);
        }
        let child = command.spawn().map_err(|error| failed(&error))?;
        // The child has the other end alone, so its end is seen.
        drop(command);
        let mut new = NewServer { child, channel: Some(UpgradeChannel::new(own)), version: String::new() };
        let why = match new.receive(START_MAX).await {
            Ok(NewServerMessage::Ready { version, formats }) if formats.contains(&format) => {
                new.version = version;
                return Ok(new);
            }
            Ok(NewServerMessage::Ready { version, .. }) => {
                format!("version {version} cannot read the state of this server (format {format})")
            }
            Ok(NewServerMessage::Failed(why)) => why,
            Ok(_) => "it does not follow the protocol".into(),
            Err(_) => "it did not get ready; the log has what it said".into(),
        };
        new.end().await;
        Err(failed(&why))
    }

    /// Runs a step with the channel on a thread that may block.
    async fn with_channel<T: Send + 'static>(
        &mut self,
        step: impl FnOnce(&mut UpgradeChannel) -> std::io::Result<T> + Send + 'static,
    ) -> Result<T, VerbError> {
        let gone = || refuse_upgrade(EIO, "the new program is gone");
        let mut channel = self.channel.take().ok_or_else(gone)?;
        let done = tokio::task::spawn_blocking(move || {
            let done = step(&mut channel);
            (done, channel)
        });
        let (done, channel) = done.await.map_err(|_| gone())?;
        self.channel = Some(channel);
        done.map_err(|error| {
            refuse_upgrade(EIO, format!("the new program ended, or does not answer: {error}"))
        })
    }

    async fn receive<M: DeserializeOwned + Send + 'static>(
        &mut self,
        timeout: Duration,
    ) -> Result<M, VerbError> {
        self.with_channel(move |channel| channel.receive(timeout)).await
    }

    async fn send(&mut self, message: impl Serialize + Send + 'static) -> Result<(), VerbError> {
        self.with_channel(move |channel| channel.send(&message)).await
    }

    async fn send_state(&mut self, state: ServerState, fds: Vec<OwnedFd>) -> Result<(), VerbError> {
        self.with_channel(move |channel| {
            channel.send(&OldServerMessage::State(Box::new(state)))?;
            channel.send_descriptors(&fds.iter().map(AsFd::as_fd).collect::<Vec<_>>())
        })
        .await
    }

    /// Closes the channel, by which the program learns that it must not serve, and waits for its
    /// end.
    async fn end(&mut self) {
        self.channel = None;
        if tokio::time::timeout(END_MAX, self.child.wait()).await.is_err() {
            let _ = self.child.kill().await;
        }
    }
}
