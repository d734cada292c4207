//! The chunks of a reply to a simulated client, structured or extended.

use super::model::UnansweredRequest;
use crate::model::Violation;
use udm_wire::nbd::{NbdCommand, ReplyChunk};

/// Handles a chunk of the reply to `asked`. Returns its error, or 0.
pub(super) fn handle_reply_chunk(
    asked: &mut UnansweredRequest,
    chunk: &ReplyChunk<'_>,
    context: Option<u32>,
) -> Result<u32, Violation> {
    let command = asked.request.command;
    let mut store_status = |of: u32, descriptors: Vec<(u64, u64)>| {
        if Some(of) != context || asked.status.is_some() {
            return Err(format!("a block status of context {of}, where {context:?} was agreed on"));
        }
        asked.status = Some(descriptors);
        Ok(0)
    };
    match *chunk {
        ReplyChunk::None => Ok(0),
        ReplyChunk::Data { offset, data } if command == NbdCommand::Read => {
            store_read_data(asked, offset, data.len(), |to| to.copy_from_slice(data))
        }
        ReplyChunk::Hole { offset, len } if command == NbdCommand::Read => {
            store_read_data(asked, offset, len as usize, |_| {})
        }
        ReplyChunk::BlockStatus { context: of, descriptors } if command == NbdCommand::BlockStatus => {
            store_status(of, descriptors.iter().map(|(len, flags)| (len.into(), flags.into())).collect())
        }
        ReplyChunk::BlockStatusExt { context: of, descriptors } if command == NbdCommand::BlockStatus => {
            store_status(of, descriptors.iter().collect())
        }
        ReplyChunk::Error { error, .. } => Ok(error),
        other => Err(format!("{other:?} in the answer to a {command:?}")),
    }
}

/// Copies `len` bytes of a read at `offset` of the export into the request.
fn store_read_data(
    asked: &mut UnansweredRequest,
    offset: u64,
    len: usize,
    fill: impl FnOnce(&mut [u8]),
) -> Result<u32, Violation> {
    let start = offset.checked_sub(asked.request.offset).map(|start| start as usize);
    let place = start.and_then(|start| asked.data.get_mut(start..start.checked_add(len)?));
    let Some(place) = place else { return Err(format!("data at {offset}+{len}, which was not asked for")) };
    fill(place);
    asked.have += len;
    Ok(0)
}
