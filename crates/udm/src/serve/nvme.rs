//! The NVMe/TCP target (`--nvme`).

use super::args::ServeArgs;
use anyhow::{Context, Result};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use udm_core::DeviceId;
use udm_frontends::nbd::Exports;
use udm_frontends::nvme::{NvmeServer, NvmeServerLimits, NvmeServerOptions, default_subsystem_nqn};
use udm_runtime::ProcessCores;

/// The target, if there is one.
pub(super) struct NvmeTarget(Option<NvmeServer>);

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
        Ok(NvmeTarget(Some(server.context("serve: nvme")?)))
    }

    /// A function for [`Exports::on_changed`].
    pub(super) fn change_hook(&self) -> impl Fn(DeviceId) + Send + Sync + use<> {
        let refresh = self.0.as_ref().map(NvmeServer::refresh_hook);
        move |device| {
            refresh.iter().for_each(|refresh| refresh(device));
        }
    }

    /// The addresses with the name of the subsystem, for users.
    pub(super) fn addresses(&self) -> Vec<String> {
        let address = |server: &NvmeServer| {
            let line = |at: &std::net::SocketAddr| {
                format!("nvme traddr={},trsvcid={},nqn={}", at.ip(), at.port(), server.subsystem())
            };
            server.bound().iter().map(line).collect::<Vec<_>>()
        };
        self.0.iter().flat_map(address).collect()
    }
}
