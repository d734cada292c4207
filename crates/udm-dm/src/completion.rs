//! Completion of work that a message started and that cores have not finished yet.

use crate::error::TargetError;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use udm_core::errno::EIO;

type TargetMessageResult = Result<(), TargetError>;

#[derive(Default)]
struct TargetMessageCompletion {
    outcome: Mutex<Option<TargetMessageResult>>,
    ended: Condvar,
}

impl TargetMessageCompletion {
    fn lock(&self) -> MutexGuard<'_, Option<TargetMessageResult>> {
        self.outcome.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// The waiting end: reports the outcome of the work.
#[derive(Clone)]
pub struct TargetMessageWaitHandle(Arc<TargetMessageCompletion>);

/// The working end: sets the outcome. If it is dropped without an outcome, the outcome is EIO.
pub struct TargetMessageCompleter(Arc<TargetMessageCompletion>);

/// Creates the two ends of work that is not done yet.
#[must_use]
pub fn create_message_completion_pair() -> (TargetMessageCompleter, TargetMessageWaitHandle) {
    let shared = Arc::new(TargetMessageCompletion::default());
    (TargetMessageCompleter(Arc::clone(&shared)), TargetMessageWaitHandle(shared))
}

impl TargetMessageCompleter {
    /// Ends the work with `outcome`.
    pub fn end(self, outcome: TargetMessageResult) {
        *self.0.lock() = Some(outcome);
    }
}

impl Drop for TargetMessageCompleter {
    fn drop(&mut self) {
        let gone = || Err(TargetError::errno(EIO).because("the table was replaced before the work was done"));
        self.0.lock().get_or_insert_with(gone);
        self.0.ended.notify_all();
    }
}

impl TargetMessageWaitHandle {
    /// The outcome; `None` if the work has not ended.
    #[must_use]
    pub fn outcome(&self) -> Option<TargetMessageResult> {
        self.0.lock().clone()
    }

    /// Waits for the outcome, at most for `most`. Blocks, so only for threads that may block.
    #[must_use]
    pub fn wait(&self, most: Duration) -> Option<TargetMessageResult> {
        let end = Instant::now() + most;
        let mut outcome = self.0.lock();
        while outcome.is_none() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            outcome = self.0.ended.wait_timeout(outcome, left).unwrap_or_else(|e| e.into_inner()).0;
        }
        outcome.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_seen_and_so_is_a_promise_that_is_dropped() {
        let (completer, waits) = create_message_completion_pair();
        assert_eq!(waits.wait(Duration::from_millis(1)), None);
        let thread = std::thread::spawn({
            let waits = waits.clone();
            move || waits.wait(Duration::from_secs(60))
        });
        completer.end(Ok(()));
        assert_eq!(thread.join().unwrap(), Some(Ok(())));
        assert_eq!(waits.outcome(), Some(Ok(())));
        let (completer, waits) = create_message_completion_pair();
        drop(completer);
        assert_eq!(waits.wait(Duration::from_secs(60)).unwrap().unwrap_err().errno, EIO);
    }
}
