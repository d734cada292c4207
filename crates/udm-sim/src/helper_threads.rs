//! Simulated work of helper threads: growing a disk, and recording that a snapshot store is invalid
//! if the store itself cannot be marked.

use crate::environment::{SharedEnv, lock_environment};
use udm_core::{GrowResultCallback, Nanos};
use udm_dm::InvalidStoreMark;

/// Callback for the result of recording a mark.
type InvalidStoreMarkCallback = Box<dyn FnOnce(Result<(), String>) + Send>;

/// A request to a helper thread.
pub struct HelperRequest {
    /// When the request completes.
    pub at: Nanos,
    /// Index of the disk.
    pub disk: usize,
    /// The kind of the request.
    pub what: BlockingHelperJob,
}

/// Kind of a request to a helper thread.
pub enum BlockingHelperJob {
    /// Grow the disk to this many sectors.
    Grow(u64, GrowResultCallback),
    /// Record the mark of the store.
    Mark(InvalidStoreMarkCallback),
}

/// The recorded mark of an invalid store.
pub struct InvalidStoreMarkRecord {
    /// Reason that the program gave.
    why: String,
    /// Step in which the program made the mark.
    pub step: u64,
    /// True if the mark survives a power cut; otherwise it may be lost.
    pub lasts: bool,
}

/// Access to the marks of the store on `disk`.
pub(crate) struct SimInvalidStoreMark {
    pub(crate) disk: usize,
    pub(crate) env: SharedEnv,
}

/// Prefix of the reason for which a table with a marked store is refused.
pub(crate) const MARKED: &str = "marked: ";

impl InvalidStoreMark for SimInvalidStoreMark {
    fn why(&self) -> Option<String> {
        lock_environment(&self.env).marks.get(&self.disk).map(|mark| format!("{MARKED}{}", mark.why))
    }

    fn set(&self, why: &str, done: InvalidStoreMarkCallback) {
        let mut env = lock_environment(&self.env);
        env.say(format!("disk {} is to be marked: {why}", self.disk));
        if env.dead {
            drop(env);
            return done(Err("the power is off".into()));
        }
        let mark = InvalidStoreMarkRecord { why: why.into(), step: env.step, lasts: false };
        env.marks.insert(self.disk, mark);
        let most = env.chance.pick(&[1, 100_000, 100_000_000]);
        let at = Nanos(env.now.0 + env.chance.below(most));
        env.asked.push(HelperRequest { at, disk: self.disk, what: BlockingHelperJob::Mark(done) });
    }

    fn clear(&self) -> Result<(), String> {
        lock_environment(&self.env).marks.remove(&self.disk);
        Ok(())
    }
}
