//! The zero target: `zero`. Reads return zeroes; writes and discards succeed and leave nothing.

use crate::bugs::{self, Bug};
use crate::error::TargetError;
use crate::target::{Target, TargetArgs, Used};
use std::sync::Arc;
use udm_core::{Batch, Bio, BioFlags, Cx, Lane, Limits, Op, OpenError, Sectors, Status};

struct Zero {
    len: Sectors,
}

/// Makes a zero target.
///
/// # Errors
/// `No arguments required`.
pub fn new(args: &mut TargetArgs<'_>) -> Result<Arc<dyn Target>, TargetError> {
    if !args.args.is_empty() {
        return Err(TargetError::new("zero: No arguments required").at(0));
    }
    Ok(Arc::new(Zero { len: args.len }))
}

impl Target for Zero {
    fn type_name(&self) -> &'static str {
        "zero"
    }

    fn open(&self, _cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, OpenError> {
        Ok(Box::new(ImmediateLane { end: zero, done: Batch::new() }))
    }

    fn table(&self) -> String {
        String::new()
    }

    fn limits(&self) -> Limits {
        // The kernel's zero target takes discards and no write-zeroes.
        Limits { request_stackable: false, max_write_zeroes: Sectors::ZERO, ..Limits::new(self.len) }
    }

    fn devices(&self) -> Vec<Used> {
        Vec::new()
    }
}

fn zero(bio: &mut Bio) -> Status {
    match bio.op {
        // Zeroes read ahead would only fill a cache (kernel).
        Op::Read if bio.flags.contains(BioFlags::RAHEAD) => Status::IoErr,
        Op::Read => {
            bio.data.fill(0);
            if bugs::on(Bug::ZeroesTooShort) {
                bio.data
                    .iter_mut()
                    .last()
                    .into_iter()
                    .for_each(|buf| buf.last_mut().into_iter().for_each(|b| *b = 1));
            }
            Status::Ok
        }
        Op::Write | Op::Discard | Op::Flush => Status::Ok,
        Op::WriteZeroes => Status::NotSupp,
    }
}

/// A lane with nothing below: each bio ends at once, as `end` says.
pub(crate) struct ImmediateLane {
    pub end: fn(&mut Bio) -> Status,
    pub done: Batch,
}

impl Lane for ImmediateLane {
    fn submit(&mut self, batch: &mut Batch, _cx: &mut Cx<'_>) {
        for bio in &mut *batch {
            bio.status = (self.end)(bio);
        }
        self.done.append(batch);
    }

    fn poll(&mut self, done: &mut Batch, _cx: &mut Cx<'_>) {
        done.append(&mut self.done);
    }
}
