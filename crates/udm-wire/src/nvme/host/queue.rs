//! The host's end of a queue: the PDUs of a controller, checked against the commands in flight.
//!
//! Bytes may be cut anywhere, and none of them is trusted. Data must be in the range that its
//! command asked for, in order and without gaps. A controller has one R2T of a command open at a
//! time, because the host asks for that limit, and asks for each byte of a write once. A violation
//! ends the connection.

use super::command::{HostCommand, HostData};
use crate::nvme::{
    Completion, DataPdu, InitializeRequest, InitializeResponse, NvmeStatus, PduHeader, PduHeaderError,
    PduLimits, PduType, TermRequest, encode_capsule_command, encode_h2c_data, verify_header_digest,
};

/// Bytes of a header at most, with its digest and padding: the data offset is one byte.
const HEADER_MAX: usize = 256;
/// Bytes of the headers of data PDUs, R2T and responses without a digest.
const SHORT_SIZE: usize = 24;
/// The least value of MAXH2CDATA (*TCP* 3.6.2.3).
const H2C_DATA_MIN: u32 = 4096;

/// Digests that a host asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct HostDigests {
    /// Of headers.
    pub header: bool,
    /// Of data.
    pub data: bool,
}

/// The reason why a connection to a controller cannot be used any more; prints as one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HostProtocolError {
    /// A header is wrong.
    #[error("{0}")]
    Header(#[from] PduHeaderError),
    /// A PDU violates the protocol.
    #[error("{0}")]
    Violation(&'static str),
    /// The controller reports a fatal error of this host.
    #[error("the controller ended the connection: fatal error {0} at byte {1} of a PDU")]
    Terminated(u16, u32),
}

/// An event of a queue.
#[derive(Debug, PartialEq, Eq)]
pub enum HostEvent<'a> {
    /// The connection is initialized: commands may be sent.
    Initialized,
    /// Data of a read. Its digest is not checked yet: the read must not complete before
    /// [`HostEvent::Completed`].
    Data {
        /// The command.
        id: u16,
        /// Offset in the data of the command.
        at: u32,
        /// The bytes, at least one.
        bytes: &'a [u8],
    },
    /// The controller wants data of a write. It is within the write, and follows the last range.
    ReadyToTransfer(DataPdu),
    /// A command is complete; its identifier is free.
    Completed {
        /// The command.
        id: u16,
        /// Its result.
        result: u64,
        /// Its status.
        status: NvmeStatus,
    },
}

/// A command in flight.
#[derive(Clone, Copy, Debug, Default)]
struct CommandInFlight {
    is_active: bool,
    /// Bytes that the controller must send, and has sent.
    read: u32,
    received: u32,
    /// Bytes that the controller may ask for, and has asked for.
    write: u32,
    requested: u32,
    /// The host has not sent all data of the last R2T.
    is_transferring: bool,
}

/// The data of a PDU that is being received.
#[derive(Clone, Copy, Debug)]
struct IncomingData {
    id: u16,
    /// Bytes that are missing; then the digest.
    left: u32,
    digest: Option<u32>,
    is_success: bool,
}

/// The host's end of a queue.
pub struct HostQueue {
    limits: PduLimits,
    asked: HostDigests,
    is_initialized: bool,
    /// The longest data of an H2CData PDU in bytes.
    max_h2c_data: u32,
    commands: Vec<CommandInFlight>,
    in_flight: usize,
    /// The header that is being received, and the number of its bytes.
    header: [u8; HEADER_MAX],
    have: usize,
    incoming: Option<IncomingData>,
}

impl HostQueue {
    /// A queue on a new connection, for commands with identifiers below `commands`.
    #[must_use]
    pub fn new(asked: HostDigests, commands: u16) -> HostQueue {
        let limits =
            PduLimits { header_digest: false, data_digest: false, capsule_data_max: 0, data_max: u32::MAX };
        HostQueue {
            limits,
            asked,
            is_initialized: false,
            max_h2c_data: H2C_DATA_MIN,
            commands: vec![CommandInFlight::default(); usize::from(commands)],
            in_flight: 0,
            header: [0; HEADER_MAX],
            have: 0,
            incoming: None,
        }
    }

    /// The first bytes of the connection.
    #[must_use]
    pub fn initialize(&self) -> [u8; InitializeRequest::SIZE] {
        let HostDigests { header: header_digest, data: data_digest } = self.asked;
        InitializeRequest { version: 0, host_alignment: 0, header_digest, data_digest, max_r2t: 0 }.encode()
    }

    /// Number of commands in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// True if a digest must follow data that the host sends.
    #[must_use]
    pub fn has_data_digest(&self) -> bool {
        self.limits.data_digest
    }

    /// The longest data of an H2CData PDU in bytes.
    #[must_use]
    pub fn max_h2c_data(&self) -> u32 {
        self.max_h2c_data
    }

    /// Writes the header of `command` to the front of `out` and returns its length. The command is
    /// in flight from now on. Data in the capsule must follow, and its digest.
    ///
    /// # Panics
    /// If `id` is in use or too large.
    pub fn put_command(&mut self, out: &mut [u8; 128], id: u16, command: &HostCommand) -> usize {
        let slot = &mut self.commands[usize::from(id)];
        assert!(!slot.is_active, "identifier {id} is in use");
        let (mut read, mut write, mut capsule) = (0, 0, None);
        match command.data {
            HostData::None => {}
            HostData::Read(len) => read = len,
            HostData::InCapsule(len) => capsule = Some(len),
            HostData::Write(len) => write = len,
        }
        *slot = CommandInFlight { is_active: true, read, write, ..CommandInFlight::default() };
        self.in_flight += 1;
        encode_capsule_command(out, &command.encode(id), capsule, &self.limits)
    }

    /// Writes the header of data for the controller to the front of `out` and returns its length.
    /// `is_last` tells that nothing follows for this R2T.
    pub fn put_data(&mut self, out: &mut [u8; 128], data: &DataPdu, is_last: bool) -> usize {
        self.commands[usize::from(data.command)].is_transferring &= !is_last;
        encode_h2c_data(out, data, is_last, &self.limits)
    }

    /// Takes bytes from the front of `input` up to the next event; `None` if all are taken.
    ///
    /// # Errors
    /// The controller violates the protocol. The queue must not be used any more.
    pub fn take<'a>(&mut self, input: &mut &'a [u8]) -> Result<Option<HostEvent<'a>>, HostProtocolError> {
        loop {
            if self.incoming.is_some() {
                match self.take_data(input)? {
                    Some(event) => return Ok(Some(event)),
                    None if self.incoming.is_some() => return Ok(None),
                    None => continue,
                }
            }
            let Some(header) = self.take_header(input)? else { return Ok(None) };
            if let Some(event) = self.handle_header(&header)? {
                return Ok(Some(event));
            }
        }
    }

    /// Collects the bytes of a header; `None` if some are missing.
    fn take_header(&mut self, input: &mut &[u8]) -> Result<Option<PduHeader>, HostProtocolError> {
        if !self.fill_header(input, PduHeader::SIZE) {
            return Ok(None);
        }
        let mut common = [0; PduHeader::SIZE];
        common.copy_from_slice(&self.header[..PduHeader::SIZE]);
        let header = PduHeader::decode(&common, &self.limits)?;
        if !self.fill_header(input, header.header_len) {
            return Ok(None);
        }
        self.have = 0;
        Ok(Some(header))
    }

    /// Fills the header up to `len` bytes. Returns false if some are missing.
    fn fill_header(&mut self, input: &mut &[u8], len: usize) -> bool {
        let n = len.saturating_sub(self.have).min(input.len());
        let (taken, rest) = input.split_at(n);
        self.header[self.have..self.have + n].copy_from_slice(taken);
        (self.have, *input) = (self.have + n, rest);
        self.have >= len
    }

    fn handle_header<'a>(&mut self, header: &PduHeader) -> Result<Option<HostEvent<'a>>, HostProtocolError> {
        let violation = |what| Err(HostProtocolError::Violation(what));
        if header.kind == PduType::ControllerTermRequest {
            let TermRequest { error, at } = TermRequest::decode(&self.header);
            return Err(HostProtocolError::Terminated(error, at));
        }
        if !self.is_initialized {
            return match header.kind {
                PduType::InitializeResponse => self.handle_initialize_response().map(Some),
                _ => violation("expected ICResp"),
            };
        }
        if self.limits.header_digest && !verify_header_digest(&self.header[..SHORT_SIZE + 4]) {
            return violation("wrong header digest");
        }
        match header.kind {
            PduType::ControllerData => self.begin_data(header).map(|()| None),
            PduType::ReadyToTransfer => self.handle_r2t().map(Some),
            PduType::ResponseCapsule => self.handle_response().map(Some),
            PduType::InitializeResponse => violation("a second ICResp"),
            _ => violation("a PDU that only a host sends"),
        }
    }

    fn handle_initialize_response<'a>(&mut self) -> Result<HostEvent<'a>, HostProtocolError> {
        let mut bytes = [0; InitializeRequest::SIZE];
        bytes.copy_from_slice(&self.header[..InitializeRequest::SIZE]);
        let violation = |what| Err(HostProtocolError::Violation(what));
        let Some(response) = InitializeResponse::decode(&bytes) else { return violation("wrong ICResp") };
        if response.controller_alignment > 31 || response.max_h2c_data < H2C_DATA_MIN {
            return violation("wrong parameters in ICResp");
        }
        if response.controller_alignment > 0 {
            return violation("the controller needs aligned data (CPDA), which udm does not send");
        }
        let got = HostDigests { header: response.header_digest, data: response.data_digest };
        if got != self.asked {
            return violation("digests are not as asked for");
        }
        (self.limits.header_digest, self.limits.data_digest) = (got.header, got.data);
        self.max_h2c_data = response.max_h2c_data / 4 * 4;
        self.is_initialized = true;
        Ok(HostEvent::Initialized)
    }

    fn command(&mut self, id: u16) -> Result<&mut CommandInFlight, HostProtocolError> {
        let command = self.commands.get_mut(usize::from(id)).filter(|command| command.is_active);
        command.ok_or(HostProtocolError::Violation("an identifier of no command in flight"))
    }

    fn begin_data(&mut self, header: &PduHeader) -> Result<(), HostProtocolError> {
        let violation = |what| Err(HostProtocolError::Violation(what));
        let DataPdu { command: id, offset, len, .. } = DataPdu::decode(&self.header);
        if len != header.data_len {
            return violation("the lengths of a C2HData PDU differ");
        }
        let has_digest = header.has_data_digest;
        let command = self.command(id)?;
        if offset != command.received || len > command.read - command.received {
            return violation("data outside the range that was asked for");
        }
        command.received += len;
        let is_success = header.is_success;
        if is_success && (!header.is_last || command.received < command.read) {
            return violation("success before the last data");
        }
        if header.is_last && command.received < command.read {
            return violation("the last data, and some is missing");
        }
        let digest = has_digest.then_some(0);
        self.incoming = Some(IncomingData { id, left: len, digest, is_success });
        Ok(())
    }

    /// Takes data of the current PDU. `None` if bytes are missing, or if the PDU has ended.
    fn take_data<'a>(&mut self, input: &mut &'a [u8]) -> Result<Option<HostEvent<'a>>, HostProtocolError> {
        let Some(incoming) = &mut self.incoming else { return Ok(None) };
        let id = incoming.id;
        if incoming.left > 0 {
            if input.is_empty() {
                return Ok(None);
            }
            let n = (incoming.left as usize).min(input.len());
            let (bytes, rest) = input.split_at(n);
            *input = rest;
            let command = &self.commands[usize::from(id)];
            let at = command.received - incoming.left;
            incoming.left -= n as u32;
            incoming.digest = incoming.digest.map(|crc| crc32c::crc32c_append(crc, bytes));
            if incoming.left == 0 && incoming.digest.is_none() && !incoming.is_success {
                self.incoming = None;
            }
            return Ok(Some(HostEvent::Data { id, at, bytes }));
        }
        if let Some(digest) = incoming.digest {
            if !self.fill_header(input, 4) {
                return Ok(None);
            }
            self.have = 0;
            if self.header[..4] != digest.to_le_bytes() {
                return Err(HostProtocolError::Violation("wrong data digest"));
            }
        }
        let is_success = self.incoming.take().is_some_and(|incoming| incoming.is_success);
        if !is_success {
            return Ok(None);
        }
        self.end_command(id);
        Ok(Some(HostEvent::Completed { id, result: 0, status: NvmeStatus::SUCCESS }))
    }

    fn handle_r2t<'a>(&mut self) -> Result<HostEvent<'a>, HostProtocolError> {
        let violation = |what| Err(HostProtocolError::Violation(what));
        let data = DataPdu::decode(&self.header);
        let command = self.command(data.command)?;
        if command.is_transferring {
            return violation("an R2T before the data of the last one was sent");
        }
        let is_in_range = data.offset == command.requested && data.len <= command.write - command.requested;
        if data.len == 0 || !is_in_range {
            return violation("an R2T outside the data of its command");
        }
        command.requested += data.len;
        command.is_transferring = true;
        Ok(HostEvent::ReadyToTransfer(data))
    }

    fn handle_response<'a>(&mut self) -> Result<HostEvent<'a>, HostProtocolError> {
        let mut bytes = [0; Completion::SIZE];
        bytes.copy_from_slice(&self.header[8..SHORT_SIZE]);
        let Completion { result, id, status, .. } = Completion::decode(&bytes);
        let command = self.command(id)?;
        if command.is_transferring {
            return Err(HostProtocolError::Violation("a completion before the data of its R2T was sent"));
        }
        let is_whole = command.received == command.read && command.requested == command.write;
        if status.is_ok() && !is_whole {
            return Err(HostProtocolError::Violation("success, and data is missing"));
        }
        self.end_command(id);
        Ok(HostEvent::Completed { id, result, status })
    }

    fn end_command(&mut self, id: u16) {
        self.commands[usize::from(id)].is_active = false;
        self.in_flight -= 1;
    }
}

/// Adds `bytes` to the CRC-32C of the data before them; 0 before the first.
#[must_use]
pub fn append_data_digest(crc: u32, bytes: &[u8]) -> u32 {
    crc32c::crc32c_append(crc, bytes)
}
