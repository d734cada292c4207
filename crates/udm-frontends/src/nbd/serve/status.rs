//! `BLOCK_STATUS`: starts a query of the device on a thread, and builds the reply.

use super::{PendingNbdRequest, RequestStage};
use crate::nbd::block_status::{BlockStatusAnswer, BlockStatusQuery};
use crate::nbd::connection::AcceptedNbdConnection;
use crate::nbd::contexts::{BlockStatusExtent, MetaContext};
use crate::nbd::reply::{QueuedReply, ReplyForm};
use crate::nbd::request::DeviceBlockSize;
use std::any::Any;
use std::sync::Arc;
use udm_core::{BioFlags, Op, Sector, Sectors, Segments};
use udm_runtime::FrontCx;
use udm_wire::nbd::{
    CommandFlags, NbdRequestHeader, chunk_block_status_header, encode_block_status_descriptor,
};

/// Limit of runs of blocks in a reply, over all contexts. The client requests the rest separately.
const EXTENTS_MAX: usize = 512;

impl AcceptedNbdConnection {
    /// Starts a block-status query of the device.
    pub(super) fn query_block_status(&mut self, request: NbdRequestHeader, cx: &mut FrontCx<'_, '_>) {
        let Some((export, geometry)) = &self.export else {
            unreachable!("requests are taken from an export")
        };
        let blocks = DeviceBlockSize { size: udm_core::SECTOR_SIZE as u32 };
        let range = blocks.around(&(request.offset..request.offset + u64::from(request.len)));
        let key = self.pending.insert(PendingNbdRequest {
            request,
            op: Op::Read,
            flags: BioFlags::empty(),
            stage: RequestStage::BlockStatusQuery,
            blocks: geometry.block,
            start: range.start,
            len: range.end - range.start,
            piece: 0,
            charge: 0,
            since: self.now,
            front: Segments::new(),
            rest: Segments::new(),
            partial_blocks: None,
            answered: false,
        });
        let one = request.flags.contains(CommandFlags::REQ_ONE);
        self.block_status_worker.ask(BlockStatusQuery {
            device: export.device().clone(),
            from: Sector(range.start / udm_core::SECTOR_SIZE),
            len: Sectors::from_bytes(range.end - range.start),
            max: if one { 1 } else { EXTENTS_MAX / self.contexts.len().max(1) },
            contexts: Arc::clone(&self.contexts),
            core_set: self.core_set.clone(),
            core: cx.core(),
            connection: self.id,
            key,
            found: Vec::new(),
        });
    }

    /// Handles the answer to a block-status query. Returns true if it is for this connection.
    pub(in crate::nbd) fn on_block_status_answer(&mut self, message: &(dyn Any + Send)) -> bool {
        let Some(message) = message.downcast_ref::<BlockStatusAnswer>().filter(|l| l.connection == self.id)
        else {
            return false;
        };
        let Some(pending) =
            self.pending.get(message.key).filter(|p| p.stage == RequestStage::BlockStatusQuery)
        else {
            return false;
        };
        let (request, start) = (pending.request, pending.start);
        self.pending.remove(message.key);
        let bytes = encode_block_status_reply(&request, start, &message.found, &self.contexts);
        let mut data = self.reads.get(bytes.len());
        data.copy_from_slice(&bytes);
        let (cookie, offset) = (request.cookie, request.offset);
        self.tx.push(QueuedReply {
            cookie,
            error: 0,
            form: ReplyForm::Whole,
            offset,
            data: data.into(),
            charge: 0,
        });
        true
    }
}

/// Returns the reply to a `BLOCK_STATUS`: one chunk per context, for the requested range only.
/// `found` has the runs of each context. They begin at byte `start`, at or before the request's
/// offset.
fn encode_block_status_reply(
    request: &NbdRequestHeader,
    start: u64,
    found: &[Vec<BlockStatusExtent>],
    contexts: &[MetaContext],
) -> Vec<u8> {
    let mut out = Vec::new();
    for (i, (context, found)) in contexts.iter().zip(found).enumerate() {
        let mut runs: Vec<(u32, u32)> = Vec::new();
        let (mut at, end) = (start, request.offset + u64::from(request.len));
        for &(len, flags) in found {
            let next = at + len.bytes();
            let covered = next.min(end).saturating_sub(at.max(request.offset)) as u32;
            match runs.last_mut().filter(|last| last.1 == flags) {
                Some(last) => last.0 += covered,
                None if covered > 0 => runs.push((covered, flags)),
                None => {}
            }
            at = next;
        }
        let done = i + 1 == contexts.len();
        let head = chunk_block_status_header(request.cookie, context.id, runs.len() as u32, done);
        out.extend_from_slice(&head);
        runs.iter()
            .for_each(|(len, flags)| out.extend_from_slice(&encode_block_status_descriptor(*len, *flags)));
    }
    out
}
