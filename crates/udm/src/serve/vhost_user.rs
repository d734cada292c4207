//! The disks of virtual machines (`--vhost-user`).

use super::args::ServeArgs;
use anyhow::{Context, Result, bail};
use std::sync::Arc;
use udm_core::DeviceId;
use udm_frontends::nbd::Exports;
use udm_frontends::vhost_user::VhostUserServer;
use udm_runtime::ProcessCores;

/// The servers of all disks.
pub(super) struct VhostUserDisks(Vec<VhostUserServer>);

impl VhostUserDisks {
    /// Listens for the machines of all disks.
    ///
    /// # Errors
    /// A device or a path is named twice, a device does not exist, or a path is not available.
    pub(super) fn start(
        args: &ServeArgs,
        core_set: &Arc<ProcessCores>,
        exports: &Arc<Exports>,
    ) -> Result<VhostUserDisks> {
        let mut servers = Vec::new();
        for (at, disk) in args.vhost_user.iter().enumerate() {
            if args.vhost_user[..at].iter().any(|other| other.path == disk.path) {
                bail!("vhost-user {}: the path is given twice: each disk has its own", disk.path.display());
            }
            if exports.get(&disk.name).is_none_or(|export| *export.name() != *disk.name) {
                bail!("vhost-user {}: there is no --device of that name, or it is not exported", disk.name);
            }
            let path = std::path::absolute(&disk.path);
            let server = path.and_then(|path| VhostUserServer::start(core_set, exports, &disk.name, &path));
            let server = server.with_context(|| format!("vhost-user {}", disk.path.display()))?;
            servers.push(server);
        }
        Ok(VhostUserDisks(servers))
    }

    /// A function for [`Exports::on_changed`].
    pub(super) fn change_hook(&self) -> impl Fn(DeviceId) + Send + Sync + use<> {
        let machines: Vec<_> = self.0.iter().map(VhostUserServer::refresh_handle).collect();
        move |device| machines.iter().for_each(|machine| machine.refresh_if_of(device))
    }

    /// Names and addresses of all disks.
    pub(super) fn addresses(&self) -> Vec<(&str, String)> {
        let address = |server: &VhostUserServer| format!("vhost-user:{}", server.path().display());
        self.0.iter().map(|server| (server.name(), address(server))).collect()
    }
}
