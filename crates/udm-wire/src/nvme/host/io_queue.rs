//! The setup of an I/O queue: the connection is initialized, then the queue is connected.

use super::admin::{HostError, HostOptions, connect_command, connect_data};
use super::queue::{HostEvent, HostQueue, append_data_digest};

/// The identifier of the Connect command; it is free after the setup.
const CONNECT: u16 = 0;

/// An I/O queue that is being connected.
pub struct IoQueueSetup {
    queue: Option<HostQueue>,
    number: u16,
    entries: u16,
    controller: u16,
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
        (IoQueueSetup { queue: Some(queue), number, entries, controller }, out)
    }

    /// Takes bytes from the front of `input`; adds bytes to send to `out`. Returns the queue once
    /// it is connected: up to `entries - 1` commands may be in flight.
    ///
    /// # Errors
    /// The controller refuses the queue, or violates the protocol.
    pub fn take(
        &mut self,
        options: &HostOptions,
        input: &mut &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Option<HostQueue>, HostError> {
        let Some(queue) = &mut self.queue else { return Ok(None) };
        while let Some(event) = queue.take(input)? {
            match event {
                HostEvent::Initialized => {
                    let (mut header, command) =
                        ([0; 128], connect_command(self.number, self.entries, options.kato_ms));
                    let data = connect_data(options, self.controller).encode();
                    let len = queue.put_command(&mut header, CONNECT, &command);
                    out.extend_from_slice(&header[..len]);
                    out.extend_from_slice(&data);
                    if queue.has_data_digest() {
                        out.extend_from_slice(&append_data_digest(0, &data).to_le_bytes());
                    }
                }
                HostEvent::Completed { status, .. } if status.is_ok() => return Ok(self.queue.take()),
                HostEvent::Completed { status, .. } => {
                    return Err(HostError::Refused { what: "an I/O queue", status });
                }
                HostEvent::Data { .. } | HostEvent::ReadyToTransfer(_) => {}
            }
        }
        Ok(None)
    }
}
