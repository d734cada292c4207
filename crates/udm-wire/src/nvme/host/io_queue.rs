//! The setup of an I/O queue: the connection is initialized, then the queue is connected, and the
//! host authenticates itself on it if the controller asks.

use super::authentication::{AuthenticationStep, HostAuthentication};
use super::command::{HostCommand, HostData};
use super::connect::{connect_command, connect_data, needs_authentication};
use super::error::{HostError, check_status};
use super::options::HostOptions;
use super::queue::{HostEvent, HostQueue, append_data_digest};

/// The identifier of the commands of the setup; it is free after it.
const COMMAND: u16 = 0;

/// An I/O queue that is being connected.
pub struct IoQueueSetup {
    queue: Option<HostQueue>,
    number: u16,
    entries: u16,
    controller: u16,
    authentication: Option<HostAuthentication>,
    /// The message that is being received.
    message: Vec<u8>,
}

impl IoQueueSetup {
    /// Begins to connect queue `number`, at least 1, of `controller`, with `entries` entries, at
    /// least 2. Returns the first bytes to send too.
    #[must_use]
    pub fn begin(
        options: &HostOptions,
        controller: u16,
        number: u16,
        entries: u16,
    ) -> (IoQueueSetup, Vec<u8>) {
        let queue = HostQueue::new(options.digests, entries - 1);
        let out = queue.initialize().to_vec();
        let (authentication, message) = (None, Vec::new());
        (IoQueueSetup { queue: Some(queue), number, entries, controller, authentication, message }, out)
    }

    /// Takes bytes from the front of `input`; adds bytes to send to `out`. Returns the queue once
    /// it is connected: up to `entries - 1` commands may be in flight.
    ///
    /// # Errors
    /// The controller refuses the queue, violates the protocol, or does not accept the host.
    pub fn take(
        &mut self,
        options: &HostOptions,
        input: &mut &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Option<HostQueue>, HostError> {
        while let Some(queue) = &mut self.queue
            && let Some(event) = queue.take(input)?
        {
            let step = match event {
                HostEvent::Initialized => {
                    let command = connect_command(self.number, self.entries, options.kato_ms);
                    let data = connect_data(options, self.controller).encode();
                    append_setup_command(queue, &command, &data, out);
                    continue;
                }
                HostEvent::Data { at, bytes, .. } => {
                    let at = at as usize;
                    self.message[at..at + bytes.len()].copy_from_slice(bytes);
                    continue;
                }
                HostEvent::ReadyToTransfer(_) => continue,
                HostEvent::Completed { status, result, .. } => match &mut self.authentication {
                    Some(authentication) => {
                        check_status(status, "the authentication of an I/O queue")?;
                        authentication.next(options, &self.message)?
                    }
                    None => {
                        check_status(status, "an I/O queue")?;
                        let is_needed = needs_authentication(options, result)?;
                        let begun =
                            options.secrets.as_ref().filter(|_| is_needed).map(HostAuthentication::begin);
                        let (authentication, step) = begun.unzip();
                        self.authentication = authentication;
                        step.unwrap_or(AuthenticationStep::Done)
                    }
                },
            };
            match step {
                AuthenticationStep::Send(command, message) => {
                    append_setup_command(queue, &command, &message, out);
                }
                AuthenticationStep::Receive(command) => {
                    if let HostData::Read(len) = command.data {
                        self.message.clear();
                        self.message.resize(len as usize, 0);
                    }
                    append_setup_command(queue, &command, &[], out);
                }
                AuthenticationStep::Done => return Ok(self.queue.take()),
            }
        }
        Ok(None)
    }
}

fn append_setup_command(queue: &mut HostQueue, command: &HostCommand, data: &[u8], out: &mut Vec<u8>) {
    let mut header = [0; 128];
    let len = queue.put_command(&mut header, COMMAND, command);
    out.extend_from_slice(&header[..len]);
    out.extend_from_slice(data);
    if queue.has_data_digest() && !data.is_empty() {
        out.extend_from_slice(&append_data_digest(0, data).to_le_bytes());
    }
}
