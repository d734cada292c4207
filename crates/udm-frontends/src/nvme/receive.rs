//! PDUs of the host become commands and data.

use super::queue::{NvmeQueue, QueuePhase};
use super::transmit::QueuedPdu;
use udm_core::Segments;
use udm_runtime::FrontCx;
use udm_wire::nvme::{
    DataPdu, FatalError, MAX_HEADER, NvmeCommand, NvmeStatus, PduHeader, PduHeaderError, PduType, SQE_SIZE,
    TermRequest, data_digest, verify_header_digest,
};

/// The part of the stream that is received next.
pub(super) enum Incoming {
    /// The header of a PDU.
    Pdu,
    /// Data of a PDU.
    Data { owner: DataOwner, len: u32, has_digest: bool },
    /// The digest after data.
    Digest { owner: DataOwner, data: Segments },
}

/// Whose data is received.
#[derive(Clone, Copy)]
pub(super) enum DataOwner {
    /// The command in this capsule.
    Capsule(NvmeCommand),
    /// The pending command of this key.
    Transfer(usize),
}

impl NvmeQueue {
    /// Takes a header, data, or a digest. Returns false if it has not arrived completely.
    pub(super) fn take_pdu(&mut self, cx: &mut FrontCx<'_, '_>) -> bool {
        match std::mem::replace(&mut self.incoming, Incoming::Pdu) {
            Incoming::Pdu => match self.take_header(cx) {
                Ok(is_taken) => is_taken,
                Err(error) => {
                    self.refuse(error, cx);
                    false
                }
            },
            Incoming::Data { owner, len, has_digest } => {
                let Some(data) = self.rx.payload(len as usize) else {
                    self.incoming = Incoming::Data { owner, len, has_digest };
                    return false;
                };
                match has_digest {
                    true => self.incoming = Incoming::Digest { owner, data },
                    false => self.data_arrived(owner, data, true, cx),
                }
                true
            }
            Incoming::Digest { owner, data } => {
                let Some(digest) = self.rx.header::<4>() else {
                    self.incoming = Incoming::Digest { owner, data };
                    return false;
                };
                let is_right = data_digest(data.iter().map(|buf| &buf[..])) == digest;
                self.data_arrived(owner, data, is_right, cx);
                true
            }
        }
    }

    fn take_header(&mut self, cx: &mut FrontCx<'_, '_>) -> Result<bool, PduHeaderError> {
        let limits = self.agreed.limits;
        let Some(common) = self.rx.peek(PduHeader::SIZE).and_then(|bytes| bytes.first_chunk()) else {
            return Ok(false);
        };
        let pdu = PduHeader::decode(common, &limits)?;
        if !matches!(pdu.kind, PduType::NvmeCommand | PduType::HostData | PduType::HostTermRequest) {
            let error = FatalError::SequenceError;
            return Err(PduHeaderError { error, at: 0, what: "unexpected kind of PDU" });
        }
        let Some(bytes) = self.rx.peek(pdu.header_len) else { return Ok(false) };
        let mut header = [0; MAX_HEADER];
        let len = bytes.len().min(MAX_HEADER);
        header[..len].copy_from_slice(&bytes[..len]);
        let own = usize::from(header[2]);
        if limits.header_digest
            && pdu.kind != PduType::HostTermRequest
            && !verify_header_digest(&header[..own + 4])
        {
            let error = FatalError::HeaderDigestError;
            return Err(PduHeaderError { error, at: 0, what: "wrong header digest" });
        }
        match pdu.kind {
            PduType::NvmeCommand => {
                if self.pending.len() >= usize::from(self.entries) {
                    let error = FatalError::SequenceError;
                    return Err(PduHeaderError {
                        error,
                        at: 0,
                        what: "more commands than the queue has entries",
                    });
                }
                self.rx.consume(pdu.header_len);
                let mut command = [0; SQE_SIZE];
                command.copy_from_slice(&header[PduHeader::SIZE..PduHeader::SIZE + SQE_SIZE]);
                let command = NvmeCommand::from_bytes(command);
                self.advance_sq_head();
                if pdu.data_len == 0 {
                    self.command_arrived(&command, None, cx);
                } else {
                    let owner = DataOwner::Capsule(command);
                    self.expect_data(owner, &pdu);
                }
            }
            PduType::HostData => {
                let data = DataPdu::decode(&header);
                let key = usize::from(data.tag);
                if data.len != pdu.data_len {
                    return Err(out_of_range(16, "the lengths of data differ"));
                }
                self.check_transfer(key, &data, pdu.is_last)?;
                self.rx.consume(pdu.header_len);
                self.expect_data(DataOwner::Transfer(key), &pdu);
            }
            _ => {
                let request = TermRequest::decode(&header);
                let host = self.link.association.host.clone();
                tracing::warn!(
                    "nvme: {host}: the host reports a fatal error {} at byte {}",
                    request.error,
                    request.at
                );
                self.die("the host has reported a fatal error");
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn expect_data(&mut self, owner: DataOwner, pdu: &PduHeader) {
        self.host_at = self.now;
        self.incoming = Incoming::Data { owner, len: pdu.data_len, has_digest: pdu.has_data_digest };
    }

    /// Checks that the host was asked for this data, and sends it in order (*TCP* 3.6.2.8).
    fn check_transfer(&self, key: usize, data: &DataPdu, is_last: bool) -> Result<(), PduHeaderError> {
        let pending = self.pending.get(key).filter(|pending| pending.is_transferring());
        let Some(pending) = pending.filter(|pending| pending.id == data.command) else {
            let error = FatalError::InvalidHeaderField;
            return Err(PduHeaderError { error, at: 10, what: "no data was asked for" });
        };
        if data.offset != pending.received {
            return Err(out_of_range(12, "data in a wrong order"));
        }
        let missing = pending.from_host - pending.received;
        if data.len > missing {
            return Err(out_of_range(16, "more data than was asked for"));
        }
        if is_last != (data.len == missing) {
            let error = FatalError::InvalidHeaderField;
            return Err(PduHeaderError { error, at: 1, what: "wrong end of data" });
        }
        Ok(())
    }

    fn data_arrived(&mut self, owner: DataOwner, data: Segments, is_right: bool, cx: &mut FrontCx<'_, '_>) {
        match owner {
            DataOwner::Capsule(command) if is_right => self.command_arrived(&command, Some(data), cx),
            DataOwner::Capsule(command) => {
                crate::nbd::return_buffers_to_pool(data, &mut self.writes);
                self.respond(command.id(), NvmeStatus::TRANSIENT_TRANSPORT_ERROR, 0);
            }
            DataOwner::Transfer(key) => self.transfer_arrived(key, data, is_right, cx),
        }
    }

    /// Ends the connection because of a wrong PDU, and reports it to the host.
    fn refuse(&mut self, error: PduHeaderError, cx: &mut FrontCx<'_, '_>) {
        tracing::warn!("nvme: {}: the connection is closed: {error}", self.link.association.host);
        let request = TermRequest { error: error.error as u16, at: error.at };
        let wrong = self.rx.unread();
        let pdu = request.encode_c2h(&wrong[..wrong.len().min(SQE_SIZE + PduHeader::SIZE)]);
        self.tx.push(QueuedPdu::Whole(pdu));
        if self.phase == QueuePhase::Serving {
            // It is sent, then the connection is closed.
            self.phase = QueuePhase::Draining;
            self.abandon_waiting(cx);
        }
    }
}

fn out_of_range(at: u32, what: &'static str) -> PduHeaderError {
    PduHeaderError { error: FatalError::DataOutOfRange, at, what }
}
