//! Replies of a server, in chunks that other replies may separate, and invalid replies.

use crate::rng::SimRng;
use crate::stamp;
use std::collections::VecDeque;
use udm_core::{Op, SECTOR_SIZE};
use udm_wire::nbd::{
    CommandFlags, ExportFlags, NbdCommand, NbdRequestHeader, SimpleReply, chunk_data_header, chunk_hole,
    chunk_none, put_error_chunk_with_text,
};

/// Bytes in a sector.
const SECTOR: usize = SECTOR_SIZE as usize;

/// The pieces of a reply.
pub(super) type ReplyPieces = VecDeque<Vec<u8>>;

/// Returns the bytes of sectors with these stamps.
fn encode_stamped_sectors(stamps: &[u64]) -> Vec<u8> {
    let mut out = vec![0; stamps.len() * SECTOR];
    out.chunks_exact_mut(SECTOR)
        .zip(stamps)
        .for_each(|(sector, stamp)| stamp::fill_sector_with_stamp(sector, *stamp));
    out
}

/// Returns the reply to `request`: an error, or the data of a read from `stamps`.
pub(super) fn build_reply_pieces(
    request: &NbdRequestHeader,
    error: u32,
    stamps: &[u64],
    structured: bool,
    c: &mut SimRng,
) -> ReplyPieces {
    let NbdRequestHeader { cookie, command, .. } = *request;
    let reads = command == NbdCommand::Read;
    if !structured || (!reads && c.one_in(2)) {
        let mut out = SimpleReply { error, cookie }.encode().to_vec();
        if reads && error == 0 {
            out.extend(encode_stamped_sectors(stamps));
        }
        return ReplyPieces::from([out]);
    }
    let mut pieces = Vec::new();
    if reads && (error == 0 || c.one_in(2)) {
        pieces = split_read_into_chunks(request, stamps, c);
    }
    let mut end = Vec::new();
    if error != 0 {
        // Some data may be sent before the error.
        pieces.truncate(c.below(pieces.len() as u64 + 1) as usize);
        put_error_chunk_with_text(&mut end, cookie, error, "no");
    } else {
        end.extend(chunk_none(cookie));
    }
    pieces.push(end);
    pieces.into()
}

/// Returns the data of a read, split anywhere and in any order. Zeroes are sometimes unreachable.
fn split_read_into_chunks(request: &NbdRequestHeader, stamps: &[u64], c: &mut SimRng) -> Vec<Vec<u8>> {
    let all = encode_stamped_sectors(stamps);
    let (mut pieces, mut at) = (Vec::new(), 0);
    while at < all.len() {
        let left = (all.len() - at) as u64;
        let n = if c.one_in(3) { c.between(1, left) } else { left } as usize;
        let (offset, data) = (request.offset + at as u64, &all[at..at + n]);
        pieces.push(if data.iter().all(|byte| *byte == 0) && c.one_in(2) {
            chunk_hole(request.cookie, offset, n as u32, false).to_vec()
        } else {
            let mut piece = chunk_data_header(request.cookie, offset, n as u32, false).to_vec();
            piece.extend(data);
            piece
        });
        at += n;
    }
    for i in (1..pieces.len()).rev() {
        pieces.swap(i, c.below(i as u64 + 1) as usize);
    }
    pieces
}

/// Returns an invalid reply to `request`, and whether it is a reply sent twice. `before` is the
/// cookie of an earlier reply.
pub(super) fn forged_reply(
    request: &NbdRequestHeader,
    before: Option<u64>,
    structured: bool,
    c: &mut SimRng,
) -> (Vec<u8>, bool) {
    let NbdRequestHeader { cookie, command, offset, len, .. } = *request;
    let reads = command == NbdCommand::Read && structured;
    let simple = |cookie| SimpleReply { error: 0, cookie }.encode().to_vec();
    let kind = c.below(8);
    let lie = match kind {
        0 => simple(cookie | 1 << 63),
        1..3 => simple(before.unwrap_or(cookie ^ 1 << 40)),
        3 => vec![c.any() as u8 & 0x3f; 64],
        4 if reads => {
            let mut out = chunk_data_header(cookie, offset + len, 512, false).to_vec();
            out.extend([0; 512]);
            out
        }
        5 if reads => {
            let twice = chunk_hole(cookie, offset, len as u32, false);
            [twice, twice].concat()
        }
        6 if reads => {
            // Only a part of the data, and then the end of the reply.
            let mut out = chunk_hole(cookie, offset, len as u32 / 2, false).to_vec();
            out.extend(chunk_none(cookie));
            out
        }
        7 if reads => simple(cookie),
        _ if !structured => chunk_hole(cookie, offset, 512, true).to_vec(),
        _ => simple(cookie | 1 << 62),
    };
    (lie, matches!(kind, 1..3) && before.is_some())
}

/// The operation of a request on a disk, its sectors, and whether it must not be cached. `has` are
/// the flags of the export.
pub(super) fn op_of(request: &NbdRequestHeader, has: ExportFlags) -> (Op, (u64, u64), bool) {
    let op = match request.command {
        NbdCommand::Read => Op::Read,
        NbdCommand::Write => Op::Write,
        NbdCommand::WriteZeroes => Op::WriteZeroes,
        NbdCommand::Trim => Op::Discard,
        _ => Op::Flush,
    };
    let durable = request.flags.contains(CommandFlags::FUA) || !has.contains(ExportFlags::SEND_FLUSH);
    (op, (request.offset / 512, (request.offset + request.len) / 512), durable)
}
