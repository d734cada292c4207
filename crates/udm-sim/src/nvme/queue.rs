//! One connection of a host: bytes to and from the target, in pieces of any length.

use crate::model::Violation;
use crate::nbd::net::SimNetwork;
use crate::rng::SimRng;
use udm_wire::nvme::{
    Completion, ConnectCommand, ConnectData, DataPdu, InitializeRequest, InitializeResponse, NvmeCommand,
    PduHeader, PduLimits, PduType, encode_capsule_command,
};

/// Bytes of a host that the network takes before the target receives them.
const UP_MAX: usize = 64 << 10;

/// What a host receives.
#[derive(Debug)]
pub(super) enum Received {
    /// `ICResp`.
    Initialized,
    Response(Completion),
    /// The data of a command that has succeeded, with its identifier.
    Data(u16, Vec<u8>),
}

/// A connection of a host.
pub(super) struct HostQueue {
    pub(super) link: usize,
    out: Vec<u8>,
    input: Vec<u8>,
    limits: PduLimits,
    is_initialized: bool,
    next_id: u16,
}

impl HostQueue {
    /// A connection that sends `ICReq` and, behind it, the Connect command.
    pub(super) fn new(link: usize, connect: &ConnectCommand, data: &ConnectData) -> HostQueue {
        let request = InitializeRequest {
            version: 0,
            host_alignment: 0,
            header_digest: false,
            data_digest: false,
            max_r2t: 0,
        };
        let mut queue = HostQueue {
            link,
            out: request.encode().to_vec(),
            input: Vec::new(),
            limits: PduLimits {
                header_digest: false,
                data_digest: false,
                capsule_data_max: 16 << 10,
                data_max: 1 << 20,
            },
            is_initialized: false,
            next_id: 0,
        };
        queue.send(&connect.encode(0), &data.encode());
        queue
    }

    /// Queues a command with `data` in its capsule. Returns its identifier.
    pub(super) fn send(&mut self, command: &NvmeCommand, data: &[u8]) -> u16 {
        // Few commands are in flight, so an identifier is free again long before it is reused.
        self.next_id = self.next_id.wrapping_add(1);
        let mut bytes = *command.bytes();
        bytes[2..4].copy_from_slice(&self.next_id.to_le_bytes());
        let mut header = [0; 128];
        let len = (!data.is_empty()).then_some(data.len() as u32);
        let header_len =
            encode_capsule_command(&mut header, &NvmeCommand::from_bytes(bytes), len, &self.limits);
        self.out.extend_from_slice(&header[..header_len]);
        self.out.extend_from_slice(data);
        self.next_id
    }

    /// Gives bytes to the network, perhaps not all. Returns true if some were given.
    pub(super) fn flush(&mut self, net: &mut SimNetwork, chance: &mut SimRng) -> bool {
        let link = &mut net.links[self.link];
        let room = UP_MAX.saturating_sub(link.up.len()).min(self.out.len());
        let len = if room > 1 && chance.one_in(4) { chance.between(1, room as u64) as usize } else { room };
        link.up.extend(self.out.drain(..len));
        len > 0
    }

    /// Gives all bytes to the network. Returns true if there were some.
    pub(super) fn flush_all(&mut self, net: &mut SimNetwork) -> bool {
        let has_output = self.has_output();
        net.links[self.link].up.extend(self.out.drain(..));
        has_output
    }

    pub(super) fn has_output(&self) -> bool {
        !self.out.is_empty()
    }

    /// Takes bytes from the network. Returns false if the connection has ended.
    pub(super) fn fill(&mut self, net: &mut SimNetwork) -> bool {
        let link = &mut net.links[self.link];
        self.input.extend(link.down.drain(..));
        !(link.is_gone() || link.half_shut)
    }

    /// The next PDU, if it has arrived completely.
    pub(super) fn next(&mut self) -> Result<Option<Received>, Violation> {
        if !self.is_initialized {
            let Some(bytes) = self.input.first_chunk::<{ InitializeRequest::SIZE }>() else {
                return Ok(None);
            };
            InitializeResponse::decode(bytes).ok_or("expected ICResp")?;
            self.input.drain(..InitializeRequest::SIZE);
            self.is_initialized = true;
            return Ok(Some(Received::Initialized));
        }
        let Some(common) = self.input.first_chunk() else { return Ok(None) };
        let pdu = PduHeader::decode(common, &self.limits).map_err(|error| format!("a wrong PDU: {error}"))?;
        let len = pdu.header_len + pdu.data_len as usize;
        if self.input.len() < len {
            return Ok(None);
        }
        let bytes: Vec<u8> = self.input.drain(..len).collect();
        match pdu.kind {
            PduType::ResponseCapsule => {
                let completion = bytes[8..].first_chunk().ok_or("a short response")?;
                Ok(Some(Received::Response(Completion::decode(completion))))
            }
            PduType::ControllerData if pdu.is_success => {
                let data = DataPdu::decode(&bytes);
                Ok(Some(Received::Data(data.command, bytes[pdu.header_len..].to_vec())))
            }
            other => Err(format!("the target sends {other:?}")),
        }
    }
}
