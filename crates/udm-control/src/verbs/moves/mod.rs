//! `udm move`: a live disk moves to another device, and its clients see a pause only.
//!
//! ```text
//!  linear OLD ─► mirror OLD NEW ─► all regions copied ─► switch ─────────────────► linear NEW
//!                writes go to both                       1 a write needs both
//!  record:       OLD, to NEW                             2 NEW is flushed
//!                                                        3 record: NEW      (the one moment)
//!                                                        4 the table is replaced
//! ```
//!
//! Until step 3 the old place has every acknowledged write, and from step 1 on the new one has,
//! too. So whichever place the record names after a kill or a power cut, nothing acknowledged is
//! lost. The mirror, and not a clone, is the way because it can be stopped at any moment, and
//! because the disk lives if the new place fails.
//!
//! * `start`, `stop`, `list`: the verbs. `job`: a move of this server. `step`: what a job does
//!   next. `continuation`: moves of earlier servers.
//! * `places`: where a disk is: the devices of tables, compared with the records of moves.
//!
//! A server that starts serves a disk from the place that the record names, whatever table of one
//! linear line its configuration has, and continues a move that was not done, with what its log
//! says. Other tables over an old place are refused.

mod continuation;
mod job;
mod list;
mod places;
mod start;
mod step;
mod stop;

pub(crate) use continuation::{continue_move, load_first_table};
pub(crate) use job::MoveJobs;
pub use job::{MoveJob, MovePoll};
pub(crate) use list::list_running_moves;
pub use list::{describe_move_by_name, list_moves};
pub(crate) use places::{check_old_places, redirect_to_current_place};
pub use start::start_move;
pub use step::{poll_move, run_move_step};
pub use stop::{forget_old_place, pause_move, stop_move};

use crate::error::VerbError;
use udm_dm::TargetError;

fn move_error(name: &str, errno: i32, why: impl Into<String>) -> VerbError {
    VerbError::new(name, TargetError::errno(errno).because(why))
}
