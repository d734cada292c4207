//! Path selectors: which path of a group a bio takes.
//!
//! A selector has two halves, as everything in udm. The [`Selector`] is shared by all cores: the paths' arguments, what is printed, and
//! where it needs one a number per path on its own cache line. The [`SelectorLane`] belongs to one core: the order of the usable
//! paths and whatever else needs no sharing. It is called once a batch, reads the shared numbers once, chooses for the whole batch
//! on its own copy and publishes the sum.
//!
//! On one core the sequence of choices is the kernel's. A selector knows its paths by their place in the group, from 0 in the table's order.
//! [`SELECTORS`] lists them all.

mod load;
mod queue_length;
mod round_robin;
mod service_time;

use std::sync::Arc;
use udm_core::{Batch, Bio, CoreId, Nanos, Sectors};

/// One line of the list of selectors.
pub struct SelectorType {
    /// Its name in tables; case counts.
    pub name: &'static str,
    /// Makes the selector of one group from its arguments, without paths; `None` when it refuses them.
    pub new: fn(args: &[String]) -> Option<Box<dyn Selector>>,
}

/// All path selectors.
pub const SELECTORS: &[SelectorType] = &[round_robin::TYPE, queue_length::TYPE, service_time::TYPE];

/// Why a path's arguments were refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArgFault {
    /// The kernel's words behind `<selector> ps: `.
    pub text: &'static str,
    /// Which of the path's arguments, from 0.
    pub arg: usize,
}

/// The half of a selector that the cores share, for one group of one table.
pub trait Selector: Send + Sync {
    /// Its name in tables.
    fn name(&self) -> &'static str;

    /// Takes the next path of the group. `cores` is the number of cores, for selectors that choose by core.
    ///
    /// # Errors
    /// When the arguments are wrong.
    fn add_path(&mut self, args: &[String], cores: usize) -> Result<(), ArgFault>;

    /// Its own arguments as `table` and `status` print them: their number and the words.
    fn args(&self) -> String {
        String::from("0")
    }

    /// How many words [`Selector::path_args`] has for each path.
    fn path_arg_count(&self) -> usize;

    /// The arguments of `path` as `table` prints them, defaults filled in.
    fn path_args(&self, path: usize) -> String;

    /// How many words [`Selector::path_info`] has for each path.
    fn path_info_count(&self) -> usize {
        0
    }

    /// What `status` prints behind a path's failure count.
    fn path_info(&self, path: usize) -> String {
        let _ = path;
        String::new()
    }

    /// The half for one core. All its paths are usable and in the table's order.
    fn lane(self: Arc<Self>, core: CoreId) -> Box<dyn SelectorLane>;
}

/// The half of a selector that belongs to one core.
pub trait SelectorLane {
    /// `path` can be used no more. It was usable.
    fn fail(&mut self, path: usize);

    /// `path` can be used again. It was not usable. Of several that returned since the last look the earliest comes first.
    fn reinstate(&mut self, path: usize);

    /// Gives each bio of `batch` to a usable path, of which there is at least one: appends it to that path's batch in `outs`, which are all
    /// empty, and empties `batch`. Each path that got any goes into `chosen`, once.
    fn select(&mut self, batch: &mut Batch, outs: &mut [Batch], chosen: &mut Vec<u32>, now: Nanos);

    /// `done` came back from `path`, well or not, `sectors` long in all. Called once a poll, not once a bio.
    fn end_io(&mut self, path: usize, done: &[Box<Bio>], sectors: Sectors, now: Nanos) {
        let _ = (path, done, sectors, now);
    }

    /// Tells the other cores what has changed. Called at the end of each poll, and by itself when the lane goes away.
    fn publish(&mut self) {}
}

/// The `repeat_count` argument that three selectors take, and none still uses: above 1 it is taken for 1, and 0 is kept for `table`.
fn repeat_count(selector: &str, word: &str) -> Result<u32, ArgFault> {
    match super::parse::number(word) {
        Some(n @ 0..=1) => Ok(n),
        Some(_) => {
            tracing::warn!("multipath {selector}: repeat_count > 1 is deprecated, using 1 instead");
            Ok(1)
        }
        None => Err(ArgFault { text: "invalid repeat count", arg: 0 }),
    }
}
