//! What threads beside the cores are asked for: a disk that is to grow, a mark that is to be kept
//! of a store that can't say itself that it has lost something.

use crate::environment::{SharedEnv, lock};
use udm_core::{GrowCallback, Nanos};
use udm_dm::InvalidStoreMark;

/// Is told when a mark is kept.
type MarkCallback = Box<dyn FnOnce(Result<(), String>) + Send>;

/// Something that a thread was asked for.
pub struct HelperRequest {
    /// When it is done.
    pub at: Nanos,
    /// Of which disk.
    pub disk: usize,
    /// What.
    pub what: HelperRequestKind,
}

/// See [`HelperRequest`].
pub enum HelperRequestKind {
    /// To become so many sectors long.
    Grow(u64, GrowCallback),
    /// To keep its mark.
    Mark(MarkCallback),
}

/// The mark of a store.
pub struct StoreMarkRecord {
    /// What the program said.
    why: String,
    /// The step in which it did.
    pub step: u64,
    /// It survives a power cut; where not, perhaps.
    pub lasts: bool,
}

/// The marks of the store on `disk`.
pub(crate) struct SimStoreMark {
    pub(crate) disk: usize,
    pub(crate) env: SharedEnv,
}

/// What stands before the reason of a mark where a table is refused for it.
pub(crate) const MARKED: &str = "marked: ";

impl InvalidStoreMark for SimStoreMark {
    fn why(&self) -> Option<String> {
        lock(&self.env).marks.get(&self.disk).map(|mark| format!("{MARKED}{}", mark.why))
    }

    fn set(&self, why: &str, done: MarkCallback) {
        let mut env = lock(&self.env);
        env.say(format!("disk {} is to be marked: {why}", self.disk));
        if env.dead {
            drop(env);
            return done(Err("the power is off".into()));
        }
        let mark = StoreMarkRecord { why: why.into(), step: env.step, lasts: false };
        env.marks.insert(self.disk, mark);
        let most = env.chance.pick(&[1, 100_000, 100_000_000]);
        let at = Nanos(env.now.0 + env.chance.below(most));
        env.asked.push(HelperRequest { at, disk: self.disk, what: HelperRequestKind::Mark(done) });
    }

    fn clear(&self) -> Result<(), String> {
        lock(&self.env).marks.remove(&self.disk);
        Ok(())
    }
}
