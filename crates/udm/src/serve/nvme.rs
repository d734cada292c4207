//! The NVMe/TCP target (`--nvme`).

use super::args::ServeArgs;
use anyhow::{Context, Result};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use udm_control::{DeviceRegistry, api, nvme_target};
use udm_core::DeviceId;
use udm_frontends::nbd::Exports;
use udm_frontends::nvme::{NvmeServer, NvmeServerLimits, NvmeServerOptions, default_subsystem_nqn};
use udm_runtime::ProcessCores;
use udm_wire::nvme::AnaState;

/// The target, if there is one.
pub(super) struct NvmeTarget(Option<Arc<NvmeServer>>);

impl NvmeTarget {
    /// Listens on the addresses of `--nvme`.
    ///
    /// # Errors
    /// An address is not available, or a name is not valid.
    pub(super) fn start(
        args: &ServeArgs,
        core_set: &Arc<ProcessCores>,
        exports: &Arc<Exports>,
    ) -> Result<NvmeTarget> {
        let Some(first) = args.nvme.first() else { return Ok(NvmeTarget(None)) };
        let machine = rustix::system::uname();
        let own_name = || default_subsystem_nqn(&[&machine.nodename().to_string_lossy(), &first.to_string()]);
        let clients = args.clients.server_limits();
        let options = NvmeServerOptions {
            subsystem: args.nvme_subsystem.clone().unwrap_or_else(own_name),
            allowed_hosts: (!args.nvme_hosts.is_empty()).then(|| args.nvme_hosts.clone()),
            // Any number: another server of the same subsystem begins elsewhere.
            last_controller: RandomState::new().build_hasher().finish() as u16 % 0xffef,
            limits: NvmeServerLimits {
                connections_max: clients.connections_max,
                peer_connections_max: clients.peer_connections_max,
                handshake_max: clients.handshake_max,
                core_bytes_max: clients.core_bytes_max,
                networks: clients.networks,
                ..NvmeServerLimits::default()
            },
        };
        let server = NvmeServer::start(core_set, exports, options, &args.nvme);
        Ok(NvmeTarget(Some(Arc::new(server.context("serve: nvme")?))))
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
        self.0.upgrade().map_or_else(Default::default, |server| describe(&server))
    }

    fn stats(&self) -> api::NvmeConnectionStats {
        let stats = self.0.upgrade().map(|server| server.stats()).unwrap_or_default();
        api::NvmeConnectionStats {
            hosts: stats.hosts as u64,
            controllers: stats.controllers as u64,
            connections: stats.connections as u64,
            accepted: stats.accepted,
            refused: stats.refused,
        }
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

fn describe(server: &NvmeServer) -> api::NvmeSubsystem {
    let subsystem = server.describe();
    let port = |(address, state): &(SocketAddr, AnaState)| api::NvmePort {
        address: address.to_string(),
        ana_state: ana_word(*state).to_owned(),
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
        }
    });
    let controllers = subsystem.controllers.into_iter().map(|one| api::NvmeController {
        cntlid: one.id,
        host_nqn: one.host,
        address: one.address.map(|address| address.to_string()),
        discovery: one.is_discovery,
        state: match (one.is_ended, one.is_enabled) {
            (true, _) => "ending",
            (false, true) => "live",
            (false, false) => "disabled",
        }
        .to_owned(),
        io_queues: one.io_queues as u64,
    });
    api::NvmeSubsystem {
        ports: subsystem.ports.iter().map(port).collect(),
        namespaces: namespaces.collect(),
        controllers: controllers.collect(),
        nqn: subsystem.nqn,
        serial: subsystem.serial,
    }
}
