//! The PDUs that a controller sends, whole or as a hostile one builds them.

use crate::rng::SimRng;
use crate::stamp;
use std::collections::VecDeque;
use udm_wire::nvme::{
    Completion, DataPdu, NvmeStatus, PduLimits, TermRequest, data_digest, encode_c2h_data,
    encode_capsule_response, encode_r2t, header_digest,
};

/// Bytes in a sector.
const SECTOR: usize = udm_core::SECTOR_SIZE as usize;
/// Bytes of a short header.
const SHORT: usize = 24;
const FLAG_LAST: u8 = 1 << 2;

/// PDUs that are sent in this order; those of other commands may come between them.
pub(super) type PduSequence = VecDeque<Vec<u8>>;

/// A completion.
pub(super) fn response(id: u16, result: u64, status: NvmeStatus, limits: &PduLimits) -> Vec<u8> {
    let mut header = [0; 128];
    let completion = Completion { result, sq_head: 0xffff, id, status };
    let len = encode_capsule_response(&mut header, &completion, limits);
    header[..len].to_vec()
}

/// An R2T.
pub(super) fn ready_to_transfer(data: &DataPdu, limits: &PduLimits) -> Vec<u8> {
    let mut header = [0; 128];
    let len = encode_r2t(&mut header, data, limits);
    header[..len].to_vec()
}

/// A C2HData PDU.
fn controller_data(
    data: &DataPdu,
    bytes: &[u8],
    (is_last, is_success): (bool, bool),
    limits: &PduLimits,
) -> Vec<u8> {
    let mut header = [0; 128];
    let len = encode_c2h_data(&mut header, data, is_success, 0, limits);
    if !is_last {
        header[1] &= !FLAG_LAST;
        if limits.header_digest {
            let digest = header_digest(&header[..SHORT]);
            header[SHORT..SHORT + 4].copy_from_slice(&digest);
        }
    }
    let mut pdu = header[..len].to_vec();
    pdu.extend_from_slice(bytes);
    if limits.data_digest {
        pdu.extend_from_slice(&data_digest([bytes]));
    }
    pdu
}

/// The bytes of sectors with these stamps.
pub(super) fn bytes_of(stamps: &[u64]) -> Vec<u8> {
    let mut bytes = vec![0; stamps.len() * SECTOR];
    for (sector, stamp) in bytes.chunks_exact_mut(SECTOR).zip(stamps) {
        stamp::fill_sector_with_stamp(sector, *stamp);
    }
    bytes
}

/// The answer to a command that brings `data`: in one or several PDUs, with a completion of its own
/// or, if `may_omit`, without one.
pub(super) fn data_answer(
    id: u16,
    data: &[u8],
    may_omit: bool,
    limits: &PduLimits,
    c: &mut SimRng,
) -> PduSequence {
    let mut pdus = PduSequence::new();
    let is_success = may_omit && c.one_in(2);
    let mut at = 0;
    while at < data.len() {
        let left = data.len() - at;
        let n = if left > 4 && c.one_in(3) { c.between(1, left as u64 / 4) as usize * 4 } else { left };
        let is_last = n == left;
        let head = DataPdu { command: id, tag: 0, offset: at as u32, len: n as u32 };
        pdus.push_back(controller_data(&head, &data[at..at + n], (is_last, is_last && is_success), limits));
        at += n;
    }
    if !is_success {
        pdus.push_back(response(id, 0, NvmeStatus::SUCCESS, limits));
    }
    pdus
}

/// An identifier beyond the entries of each queue: a smaller one may be that of a command that is
/// on its way to the target.
pub(super) const FREE_ID: u16 = 0x7777;

/// What a forged PDU is about.
pub(super) struct ForgedSubject<'a> {
    /// A command in flight.
    pub(super) id: u16,
    /// The data that the command reads; empty for another one.
    pub(super) reads: &'a [u8],
}

/// A PDU that violates the protocol or ends the authentication, so that a host must end the
/// association.
pub(super) fn forge(subject: &ForgedSubject<'_>, limits: &PduLimits, c: &mut SimRng) -> PduSequence {
    let ForgedSubject { id, reads } = *subject;
    let success = |id| response(id, 0, NvmeStatus::SUCCESS, limits);
    let r2t = |id, offset, len| ready_to_transfer(&DataPdu { command: id, tag: 7, offset, len }, limits);
    let len = reads.len() as u32;
    let data = |offset, len: u32, flags| {
        let head = DataPdu { command: id, tag: 0, offset, len };
        controller_data(&head, &vec![0xa5; len as usize], flags, limits)
    };
    let pdu = match c.below(11) {
        0 => success(FREE_ID),
        1 => r2t(FREE_ID, 0, 512),
        // Data of a read that is short, misplaced, or too long.
        2 if len > 4 => data(0, len - 4, (true, true)),
        3 if len > 4 => data(4, len - 4, (true, true)),
        4 => data(0, len + 4, (true, true)),
        // A success although data is missing.
        5 if len > 0 => success(id),
        // All data has come.
        6 => r2t(id, 0, 512),
        // The digest of the data, or of a header, is wrong.
        7 if limits.data_digest && len > 0 => {
            let head = DataPdu { command: id, tag: 0, offset: 0, len };
            let mut pdu = controller_data(&head, reads, (true, true), limits);
            let at = pdu.len() - 1 - c.below(u64::from(len)) as usize;
            pdu[at] ^= 0x10;
            pdu
        }
        8 if limits.header_digest => {
            let mut pdu = success(id);
            pdu[9] ^= 1;
            pdu
        }
        9 => TermRequest { error: 3, at: 8 }.encode_c2h(&[1, 2, 3]),
        // The host has to authenticate itself again, on a new association.
        10 => response(id, 0, NvmeStatus::AUTHENTICATION_REQUIRED, limits),
        // A PDU that only a host sends.
        _ => {
            let mut pdu = success(id);
            pdu[0] = 0x06;
            pdu
        }
    };
    PduSequence::from([pdu])
}
