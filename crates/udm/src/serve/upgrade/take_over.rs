//! The new program: takes over from a server that waits at the other end of standard input.

use super::channel::{NewServerMessage, OldServerMessage, UpgradeChannel};
use super::state::{BlockDeviceState, FORMATS, MachineState, ServerState};
use crate::serve::inherited_sockets::InheritedSockets;
use crate::serve::reload::ReloadableConfig;
use crate::serve::vhost_user::VhostUserDisk;
use anyhow::{Context, Result, bail};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use udm_control::DeviceRegistry;
use udm_control::verbs::handover::create_handed_over_devices;
use udm_frontends::nbd::{InheritedListener, NbdServer};

/// How long the old server may take for a step, which waits for requests in flight.
const STEP_MAX: Duration = Duration::from_secs(60);

/// A server that takes over from another one.
pub(in crate::serve) struct TakeOver {
    channel: UpgradeChannel,
    state: ServerState,
    clients: Vec<OwnedFd>,
    machines: Vec<VhostUserDisk>,
    given: Option<InheritedSockets>,
}

impl TakeOver {
    /// Reports readiness on standard input and receives the state.
    ///
    /// # Errors
    /// The old server has ended or has given up.
    pub(in crate::serve) fn receive() -> Result<TakeOver> {
        let socket = rustix::io::dup(rustix::stdio::stdin()).context("serve: standard input")?;
        rustix::io::ioctl_fioclex(&socket).context("serve: standard input")?;
        let nothing = File::open("/dev/null").context("serve: /dev/null")?;
        rustix::stdio::dup2_stdin(&nothing).context("serve: standard input")?;
        let mut channel = UpgradeChannel::new(socket);
        let received = receive_state(&mut channel);
        let (mut state, fds) = received.inspect_err(|error| report_failure(&mut channel, error))?;
        let mut fds = fds.into_iter();
        let control = fds.next().context("upgrade: the control socket is missing")?;
        let listeners = fds.by_ref().zip(&state.listeners);
        let nbd =
            listeners.map(|(socket, &removes_file)| InheritedListener { socket, removes_file }).collect();
        let machine = |one: MachineState| {
            let name = one.device.clone();
            one.with_descriptors(&mut fds).with_context(|| format!("vhost-user {name}: its state is invalid"))
        };
        let machines = std::mem::take(&mut state.machines).into_iter().map(machine).collect::<Result<_>>()?;
        let given = InheritedSockets {
            control: Some(control.into()),
            nbd,
            removes_control_file: state.removes_control_file,
        };
        let clients = fds.collect();
        Ok(TakeOver { channel, state, clients, machines, given: Some(given) })
    }

    /// Creates the devices.
    ///
    /// # Errors
    /// A device cannot be created.
    pub(in crate::serve) async fn create_devices(
        &mut self,
        registry: &Arc<DeviceRegistry>,
        file: Option<ReloadableConfig>,
    ) -> Result<()> {
        if let Some((_, read)) = file {
            registry.set_config_reader(read);
        }
        create_handed_over_devices(registry, &self.state.devices).await.map_err(anyhow::Error::from)
    }

    /// The listening sockets, once.
    pub(in crate::serve) fn take_sockets(&mut self) -> InheritedSockets {
        self.given.take().unwrap_or_default()
    }

    /// The disks of machines, once.
    pub(in crate::serve) fn take_machines(&mut self) -> Vec<VhostUserDisk> {
        std::mem::take(&mut self.machines)
    }

    /// The block devices of ublk, once; `None` if they are those of the options.
    pub(in crate::serve) fn take_block_devices(&mut self) -> Option<Vec<BlockDeviceState>> {
        self.state.block_devices.take()
    }

    /// Reports an error to the old server, which goes on then.
    pub(in crate::serve) fn report_failure(&mut self, error: &anyhow::Error) {
        report_failure(&mut self.channel, error);
    }

    /// Reports that all is prepared, and waits until the old server has let go.
    ///
    /// # Errors
    /// The old server has ended or has given up: it may serve, so this one must not.
    pub(in crate::serve) fn commit(&mut self) -> Result<()> {
        self.channel.send(&NewServerMessage::Prepared)?;
        match self.channel.receive(STEP_MAX).context("upgrade: the other server has given up")? {
            OldServerMessage::Commit => Ok(()),
            OldServerMessage::State(_) => bail!("upgrade: the other server sends its state twice"),
        }
    }

    /// Serves the clients. Returns their number, and the process ID of the old server.
    pub(in crate::serve) fn attach_clients(&mut self, server: &NbdServer) -> (usize, u32) {
        let mut attached = 0;
        for (client, socket) in self.state.clients.drain(..).zip(self.clients.drain(..)) {
            let Some(client) = client.with_socket(socket) else { continue };
            let export = client.export.clone();
            match server.attach_detached(client) {
                Ok(()) => attached += 1,
                Err(why) => tracing::warn!("nbd: export {export:?}: a client is disconnected: {why}"),
            }
        }
        (attached, self.state.pid)
    }

    /// Reports that this server serves.
    pub(in crate::serve) fn report_serving(&mut self) {
        // The old server may have stopped waiting.
        let _ = self.channel.send(&NewServerMessage::Serving);
    }
}

fn receive_state(channel: &mut UpgradeChannel) -> Result<(ServerState, Vec<OwnedFd>)> {
    let version = env!("CARGO_PKG_VERSION").to_owned();
    channel.send(&NewServerMessage::Ready { version, formats: FORMATS.to_vec() })?;
    let state = match channel.receive(STEP_MAX).context("upgrade: the other server has given up")? {
        OldServerMessage::State(state) => *state,
        OldServerMessage::Commit => bail!("upgrade: the other server sends no state"),
    };
    if !FORMATS.contains(&state.format) {
        bail!("upgrade: the state has format {}, and this program reads {FORMATS:?}", state.format);
    }
    let fds = channel.receive_descriptors(state.descriptors()).context("upgrade: sockets")?;
    Ok((state, fds))
}

fn report_failure(channel: &mut UpgradeChannel, error: &anyhow::Error) {
    // The old server has ended, or finds the end of this one.
    let _ = channel.send(&NewServerMessage::Failed(format!("{error:#}")));
}
