//! The NVMe/TCP target (`--nvme`).

use super::args::ServeArgs;
use super::nvme_peers::{NvmePeerServers, parse_reset_request};
use anyhow::{Context, Result, bail};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::Read;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use udm_backends::RemoteDisks;
use udm_control::{DeviceRegistry, api, nvme_target};
use udm_core::DeviceId;
use udm_frontends::nbd::{Exports, OpIoCounters};
use udm_frontends::nvme::{
    NvmeHostIoReport, NvmeHostSecrets, NvmeSecrets, NvmeServer, NvmeServerLimits, NvmeServerOptions,
    default_subsystem_nqn, instance_tag, random_instance_key,
};
use udm_runtime::ProcessCores;
use udm_wire::nvme::{AnaState, DhchapSecret, check_nqn};

/// The target, if there is one.
pub(super) struct NvmeTarget(Option<Arc<NvmeServer>>);

impl NvmeTarget {
    /// Listens on the addresses of `--nvme`. Other servers reach this one over the socket
    /// `control`.
    ///
    /// # Errors
    /// An address is not available, or a name is not valid.
    pub(super) fn start(
        args: &ServeArgs,
        core_set: &Arc<ProcessCores>,
        exports: &Arc<Exports>,
        control: &Path,
        remote_disks: &RemoteDisks,
    ) -> Result<NvmeTarget> {
        let Some(first) = args.nvme.first() else { return Ok(NvmeTarget(None)) };
        let machine = rustix::system::uname();
        let own_name = || default_subsystem_nqn(&[&machine.nodename().to_string_lossy(), &first.to_string()]);
        let clients = args.clients.server_limits();
        let mut options = NvmeServerOptions {
            subsystem: args.nvme_subsystem.clone().unwrap_or_else(own_name),
            allowed_hosts: (!args.nvme_hosts.is_empty()).then(|| args.nvme_hosts.clone()),
            // Any number: another server of the same subsystem begins elsewhere.
            last_controller: RandomState::new().build_hasher().finish() as u16 % 0xffef,
            quiesce_time_ms: args.nvme_quiesce_time * 1000,
            instance_key: random_instance_key().context("serve: nvme")?,
            secrets: read_secrets(args)?,
            limits: NvmeServerLimits {
                connections_max: clients.connections_max,
                peer_connections_max: clients.peer_connections_max,
                handshake_max: clients.handshake_max,
                core_bytes_max: clients.core_bytes_max,
                networks: clients.networks,
                ..NvmeServerLimits::default()
            },
            ..NvmeServerOptions::default()
        };
        if let Some(folder) = &args.nvme_peers {
            check_nqn(&options.subsystem).with_context(|| format!("serve: nvme: {:?}", options.subsystem))?;
            let tag = instance_tag(&options.instance_key);
            let joined =
                NvmePeerServers::join(folder, &options.subsystem, tag, control, core_set, remote_disks);
            let (peers, controllers) =
                joined.with_context(|| format!("serve: nvme-peers: {}", folder.display()))?;
            options.last_controller = controllers.start() - 1;
            options.controllers = controllers;
            options.peers = Some(Arc::new(peers));
        }
        let server = NvmeServer::start(core_set, exports, options, &args.nvme).context("serve: nvme")?;
        for setting in &args.nvme_ana {
            let NvmeAnaSetting { device, port, state } = setting;
            server.set_ana_state(*port, device.as_deref(), *state).context("serve: nvme-ana")?;
        }
        Ok(NvmeTarget(Some(Arc::new(server))))
    }

    /// Shows the target to users of the registry.
    pub(super) fn register_with(&self, registry: &DeviceRegistry) {
        if let Some(server) = &self.0 {
            registry.set_nvme_target(Arc::new(ServedNvmeTarget(Arc::downgrade(server))));
        }
    }

    /// A function for [`Exports::on_changed`].
    pub(super) fn change_hook(&self) -> impl Fn(DeviceId) + Send + Sync + use<> {
        let refresh = self.0.as_deref().map(NvmeServer::refresh_hook);
        move |device| {
            refresh.iter().for_each(|refresh| refresh(device));
        }
    }

    /// The addresses with the name of the subsystem, for users.
    pub(super) fn addresses(&self) -> Vec<String> {
        let address = |server: &Arc<NvmeServer>| {
            let line = |at: &std::net::SocketAddr| {
                format!("nvme traddr={},trsvcid={},nqn={}", at.ip(), at.port(), server.subsystem())
            };
            server.bound().iter().map(line).collect::<Vec<_>>()
        };
        self.0.iter().flat_map(address).collect()
    }
}

/// The target as the registry sees it: it ends with [`NvmeTarget`].
struct ServedNvmeTarget(Weak<NvmeServer>);

impl nvme_target::NvmeTarget for ServedNvmeTarget {
    fn describe(&self) -> api::NvmeSubsystem {
        self.0.upgrade().map_or_else(Default::default, |server| describe_nvme_subsystem(&server))
    }

    fn set_ana_state(&self, request: &api::SetNvmeAnaStateRequest) -> Result<(), String> {
        let Some(server) = self.0.upgrade() else { return Err("the server stops".to_owned()) };
        let port = request.port.as_deref().map(parse_port).transpose()?;
        let state = parse_ana_state(&request.state)?;
        server.set_ana_state(port, request.device.as_deref(), state).map_err(|error| error.to_string())
    }

    fn reset_controller(
        &self,
        request: &api::ResetNvmeControllerRequest,
    ) -> Result<nvme_target::NvmeResetProgress, String> {
        let Some(server) = self.0.upgrade() else { return Err("the server stops".to_owned()) };
        if request.subsystem != server.subsystem() {
            return Err(format!("its subsystem is {}", server.subsystem()));
        }
        let reset = parse_reset_request(request).ok_or("a number is not hexadecimal")?;
        let reset = server.reset_own_controller(&reset)?;
        Ok(Box::new(move || reset.is_done()))
    }

    fn stats(&self) -> api::NvmeConnectionStats {
        let stats = self.0.upgrade().map(|server| server.stats()).unwrap_or_default();
        api::NvmeConnectionStats {
            hosts: stats.hosts as u64,
            controllers: stats.controllers as u64,
            connections: stats.connections as u64,
            accepted: stats.accepted,
            refused: stats.refused,
            late_quiesces: stats.late_quiesces,
        }
    }

    fn host_reports(&self) -> Vec<NvmeHostIoReport> {
        self.0.upgrade().map(|server| server.host_reports()).unwrap_or_default()
    }
}

/// The words of nvmetcli for ANA states.
const fn ana_word(state: AnaState) -> &'static str {
    match state {
        AnaState::Optimized => "optimized",
        AnaState::NonOptimized => "non-optimized",
        AnaState::Inaccessible => "inaccessible",
        AnaState::PersistentLoss => "persistent-loss",
        AnaState::Change => "change",
    }
}

/// The state that users may set with this word. The state `change` is not one of them: a host whose
/// path stays in it resets the controller.
fn parse_ana_state(word: &str) -> Result<AnaState, String> {
    const STATES: [AnaState; 4] =
        [AnaState::Optimized, AnaState::NonOptimized, AnaState::Inaccessible, AnaState::PersistentLoss];
    let known = STATES.iter().copied().find(|state| ana_word(*state) == word);
    known.ok_or_else(|| {
        let words = STATES.map(ana_word).join(", ");
        format!("{word:?} is no ANA state: expected {words}")
    })
}

fn parse_port(word: &str) -> Result<SocketAddr, String> {
    word.parse().map_err(|_| format!("{word:?} is no port: expected ADDRESS:PORT, as of --nvme"))
}

/// A value of `--nvme-ana`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NvmeAnaSetting {
    /// `None` for all.
    device: Option<String>,
    /// `None` for all.
    port: Option<SocketAddr>,
    state: AnaState,
}

/// Parses a value of `--nvme-ana`.
pub(super) fn parse_ana_setting(word: &str) -> Result<NvmeAnaSetting, String> {
    let (place, state) = word.rsplit_once('=').ok_or("expected DEVICE[@ADDRESS:PORT]=STATE")?;
    let (device, port) = match place.rsplit_once('@') {
        Some((device, port)) => (device, Some(parse_port(port)?)),
        None => (place, None),
    };
    if device.is_empty() {
        return Err("expected DEVICE[@ADDRESS:PORT]=STATE: a device, or * for all".into());
    }
    let device = (device != "*").then(|| device.to_owned());
    Ok(NvmeAnaSetting { device, port, state: parse_ana_state(state)? })
}

/// A value of `--nvme-dhchap-secret`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NvmeSecretFile {
    host: String,
    pub(super) path: PathBuf,
}

/// Parses a value of `--nvme-dhchap-secret`.
pub(super) fn parse_secret_file(word: &str) -> Result<NvmeSecretFile, String> {
    match word.split_once('=') {
        Some((host, path)) if check_nqn(host).is_ok() && !path.is_empty() => {
            Ok(NvmeSecretFile { host: host.to_owned(), path: path.into() })
        }
        _ => Err("expected HOSTNQN=FILE: the name of a host, and a file with its secret".into()),
    }
}

/// Reads the secrets of all hosts.
fn read_secrets(args: &ServeArgs) -> Result<NvmeSecrets> {
    let mut secrets = NvmeSecrets::new();
    for file in &args.nvme_dhchap_secrets {
        let host = read_secret(&file.path)?;
        if secrets.insert(file.host.clone(), NvmeHostSecrets { host, controller: None }).is_some() {
            bail!("serve: nvme-dhchap-secret: {} has two secrets", file.host);
        }
    }
    for file in &args.nvme_dhchap_ctrl_secrets {
        let Some(host) = secrets.get_mut(&file.host) else {
            bail!(
                "serve: nvme-dhchap-ctrl-secret: {} has no --nvme-dhchap-secret, which it needs",
                file.host
            );
        };
        host.controller = Some(read_secret(&file.path)?);
    }
    Ok(secrets)
}

/// Reads a secret. No error contains a part of it.
fn read_secret(path: &Path) -> Result<DhchapSecret> {
    const SECRET_FILE_MAX: u64 = 4096;
    let place = || format!("serve: the secret in {}", path.display());
    let file = std::fs::File::open(path).with_context(place)?;
    let mut text = String::new();
    file.take(SECRET_FILE_MAX).read_to_string(&mut text).with_context(place)?;
    DhchapSecret::parse(&text).with_context(place)
}

fn describe_nvme_subsystem(server: &NvmeServer) -> api::NvmeSubsystem {
    let subsystem = server.describe();
    let ports: Vec<String> = subsystem.ports.iter().map(SocketAddr::to_string).collect();
    let ana = |(port, state): (&String, &AnaState)| api::NvmeAnaState {
        port: port.clone(),
        state: ana_word(*state).to_owned(),
    };
    let namespaces = subsystem.namespaces.into_iter().map(|one| {
        let nguid: String = one.uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        let groups = [&nguid[..8], &nguid[8..12], &nguid[12..16], &nguid[16..20], &nguid[20..]];
        api::NvmeNamespace {
            nsid: one.nsid,
            uuid: groups.join("-"),
            nguid,
            device: one.device,
            size_bytes: one.size,
            block_bytes: one.block,
            read_only: one.is_read_only,
            ana: ports.iter().zip(&one.ana_states).map(ana).collect(),
        }
    });
    let controllers = subsystem.controllers.into_iter().map(|one| api::NvmeController {
        cntlid: one.id,
        host_nqn: one.host,
        address: one.address.map(|address| address.to_string()),
        port: ports[one.port].clone(),
        discovery: one.is_discovery,
        state: match (one.is_ended, one.is_enabled) {
            (true, _) => "ending",
            (false, true) => "live",
            (false, false) => "disabled",
        }
        .to_owned(),
        io_queues: one.io_queues as u64,
    });
    let hosts = server.host_reports().into_iter().map(|one| {
        let sum = |of: fn(&OpIoCounters) -> u64| one.io.ops.iter().map(of).sum();
        api::NvmeHost {
            in_flight: one.io.in_flight,
            requests: sum(|op| op.requests),
            bytes: sum(|op| op.bytes),
            errors: sum(|op| op.errors),
            queues: one
                .queues
                .iter()
                .map(|&(queue, requests)| api::NvmeQueueStats { queue, requests })
                .collect(),
            host_nqn: one.host,
        }
    });
    api::NvmeSubsystem {
        hosts: hosts.collect(),
        namespaces: namespaces.collect(),
        controllers: controllers.collect(),
        ports: ports.iter().map(|address| api::NvmePort { address: address.clone() }).collect(),
        nqn: subsystem.nqn,
        serial: subsystem.serial,
    }
}
