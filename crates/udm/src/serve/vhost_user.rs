//! The disks of virtual machines (`--vhost-user`).

use super::args::ServeArgs;
use anyhow::{Context, Result, bail};
use std::sync::Arc;
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
            let named = |text: String| format!("vhost-user {text}");
            if args.vhost_user[..at].iter().any(|other| other.path == disk.path) {
                bail!("vhost-user {}: the path is given twice: each disk has its own", disk.path.display());
            }
            if exports.get(&disk.name).is_none_or(|export| *export.name() != *disk.name) {
                bail!("vhost-user {}: there is no --device of that name, or it is not exported", disk.name);
            }
            let server = VhostUserServer::start(core_set, exports, &disk.name, &disk.path)
                .with_context(|| named(disk.path.display().to_string()))?;
            servers.push(server);
        }
        Ok(VhostUserDisks(servers))
    }

    /// Stops listening, and waits for the requests of all machines.
    pub(super) fn stop(self) {
        self.0.into_iter().for_each(VhostUserServer::stop);
    }
}
