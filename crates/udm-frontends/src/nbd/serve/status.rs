//! `BLOCK_STATUS`: starts a query of the device on a thread, and builds the reply. With extended
//! headers, a client may ask about some of its contexts, which a payload names.

use super::{PendingNbdRequest, RequestStage};
use crate::nbd::block_status::{BlockStatusAnswer, BlockStatusQuery};
use crate::nbd::connection::AcceptedNbdConnection;
use crate::nbd::contexts::{BlockStatusExtent, MetaContext};
use crate::nbd::reply::{QueuedReply, ReplyForm};
use crate::nbd::request::{DeviceBlockSize, check_request};
use std::any::Any;
use std::sync::Arc;
use udm_core::{BioFlags, DeviceId, Op, Sector, Sectors, Segments};
use udm_runtime::FrontCx;
use udm_wire::nbd::{
    AnsweredRequest, BlockStatusPayload, CommandFlags, EINVAL, NbdHeaderStyle, NbdRequestHeader,
    chunk_block_status_header, encode_block_status_descriptor, encode_extended_block_status_descriptor,
    extended_chunk_block_status_header,
};

/// Limit of runs of blocks in a reply, over all contexts. The client requests the rest separately.
const EXTENTS_MAX: usize = 512;

impl AcceptedNbdConnection {
    /// Starts a block-status query about the contexts that `payload` names. `request` is the one
    /// that announced the payload.
    pub(super) fn query_named_contexts(
        &mut self,
        mut request: NbdRequestHeader,
        payload: &Segments,
        cx: &mut FrontCx<'_, '_>,
    ) {
        let Some((_, geometry)) = &self.export else { unreachable!("requests are taken from an export") };
        let bytes: Vec<u8> = payload.iter().flat_map(|piece| piece.iter().copied()).collect();
        request.flags -= CommandFlags::PAYLOAD_LEN;
        let query = BlockStatusPayload::decode(&bytes).ok_or(EINVAL).and_then(|query| {
            request.len = query.len;
            let contexts = select_contexts(&self.contexts, &query.contexts).ok_or(EINVAL)?;
            check_request(&request, geometry, self.header_style, contexts.len())?;
            Ok(contexts)
        });
        match query {
            Ok(contexts) => self.query_block_status(request, contexts.into(), cx),
            Err(error) => self.answer(&request, error, Segments::new(), 0, None),
        }
    }

    /// Starts a block-status query of the device.
    pub(super) fn query_block_status(
        &mut self,
        request: NbdRequestHeader,
        contexts: Arc<[MetaContext]>,
        cx: &mut FrontCx<'_, '_>,
    ) {
        let Some((export, geometry)) = &self.export else {
            unreachable!("requests are taken from an export")
        };
        let blocks = DeviceBlockSize { size: udm_core::SECTOR_SIZE as u32 };
        let range = blocks.around(&(request.offset..request.offset + request.len));
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
        let topic = *self.status_topic.get_or_insert_with(DeviceId::new);
        cx.subscribe(topic);
        self.block_status_worker.ask(BlockStatusQuery {
            device: export.device().clone(),
            from: Sector(range.start / udm_core::SECTOR_SIZE),
            len: Sectors::from_bytes(range.end - range.start),
            max: if one { 1 } else { EXTENTS_MAX / contexts.len().max(1) },
            contexts,
            core_set: self.core_set.clone(),
            core: cx.core(),
            topic,
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
        let bytes = match self.header_style {
            NbdHeaderStyle::Extended => encode_extended_block_status_reply(&request, start, message),
            _ => encode_block_status_reply(&request, start, message),
        };
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

/// Returns the contexts with these ids, in this order; `None` if an id is unknown or repeated.
fn select_contexts(chosen: &[MetaContext], ids: &[u32]) -> Option<Vec<MetaContext>> {
    let is_repeated = ids.iter().enumerate().any(|(nth, id)| ids[..nth].contains(id));
    let find = |id: &u32| chosen.iter().find(|context| context.id == *id).cloned();
    if is_repeated { None } else { ids.iter().map(find).collect() }
}

/// Returns the runs in `found` that are in the requested range, as bytes and flags. `found` begins
/// at byte `start`, at or before the request's offset.
fn clip_to_request(request: &NbdRequestHeader, start: u64, found: &[BlockStatusExtent]) -> Vec<(u64, u32)> {
    let mut runs: Vec<(u64, u32)> = Vec::new();
    let (mut at, end) = (start, request.offset + request.len);
    for &(len, flags) in found {
        let next = at + len.bytes();
        let covered = next.min(end).saturating_sub(at.max(request.offset));
        match runs.last_mut().filter(|last| last.1 == flags) {
            Some(last) => last.0 += covered,
            None if covered > 0 => runs.push((covered, flags)),
            None => {}
        }
        at = next;
    }
    runs
}

/// Returns the structured reply to a `BLOCK_STATUS`: one chunk per context, for the requested range
/// only. Its length has 32 bits.
fn encode_block_status_reply(request: &NbdRequestHeader, start: u64, answer: &BlockStatusAnswer) -> Vec<u8> {
    let mut out = Vec::new();
    for (i, (context, found)) in answer.contexts.iter().zip(&answer.found).enumerate() {
        let (runs, done) = (clip_to_request(request, start, found), i + 1 == answer.contexts.len());
        let head = chunk_block_status_header(request.cookie, context.id, runs.len() as u32, done);
        out.extend_from_slice(&head);
        for (len, flags) in runs {
            out.extend_from_slice(&encode_block_status_descriptor(len as u32, flags));
        }
    }
    out
}

/// As [`encode_block_status_reply`], with extended headers.
fn encode_extended_block_status_reply(
    request: &NbdRequestHeader,
    start: u64,
    answer: &BlockStatusAnswer,
) -> Vec<u8> {
    let answered = AnsweredRequest { cookie: request.cookie, offset: request.offset };
    let mut out = Vec::new();
    for (i, (context, found)) in answer.contexts.iter().zip(&answer.found).enumerate() {
        let (runs, done) = (clip_to_request(request, start, found), i + 1 == answer.contexts.len());
        let head = extended_chunk_block_status_header(answered, context.id, runs.len() as u32, done);
        out.extend_from_slice(&head);
        for (len, flags) in runs {
            out.extend_from_slice(&encode_extended_block_status_descriptor(len, flags.into()));
        }
    }
    out
}
