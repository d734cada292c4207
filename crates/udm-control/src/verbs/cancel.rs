//! Cancellation of verbs that wait.
//!
//! Contract: if a verb is cancelled, the device stays active with its live table, and the verb
//! fails with the given reason. If the cores already use the new state, the cancellation comes too
//! late and has no effect.
//!
//! Create and remove wait only if they also change other devices ([`udm_dm::Target::partners`])
//! or if a table reads or writes a store. Otherwise they cannot be cancelled. A cancelled create
//! leaves no device, a cancelled load no table, a cancelled removal leaves the device as it was.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use tokio::sync::Notify;
use udm_core::errno::EINTR;
use udm_dm::TargetError;

/// EINTR with a reason.
#[must_use]
pub fn interrupted_error(why: &str) -> TargetError {
    CancellableVerbKind::Resume.interrupted(why)
}

/// Cancels a running verb. Clones cancel the same verb.
#[derive(Clone, Default)]
pub struct CancelToken(Arc<CancelState>);

#[derive(Default)]
struct CancelState {
    why: OnceLock<TargetError>,
    notify: Notify,
    /// Token of the whole verb, if this one is for a step: cancels the step too.
    parent: Option<CancelToken>,
}

impl CancelToken {
    /// Cancels the verb with the error `why`, unless it is too late. Only the first call counts.
    pub fn cancel(&self, why: TargetError) {
        if self.0.why.set(why).is_ok() {
            self.0.notify.notify_one();
        }
    }

    /// A token for one step of a verb. It cancels only this step; `self` cancels all steps.
    pub(crate) fn child(&self) -> CancelToken {
        CancelToken(Arc::new(CancelState { parent: Some(self.clone()), ..CancelState::default() }))
    }

    /// The error that the verb was cancelled with, if it was.
    pub(crate) fn reason(&self) -> Option<&TargetError> {
        self.0.why.get().or_else(|| self.0.parent.as_ref()?.reason())
    }

    /// Completes after [`CancelToken::cancel`]; at once if that was called before. Only one task
    /// may wait at a time.
    pub(super) async fn cancelled(&self) -> TargetError {
        loop {
            if let Some(why) = self.reason() {
                return why.clone();
            }
            match &self.0.parent {
                None => self.0.notify.notified().await,
                Some(parent) => tokio::select! {
                    () = self.0.notify.notified() => {}
                    _ = Box::pin(parent.cancelled()) => {}
                },
            }
        }
    }
}

/// Verb that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CancellableVerbKind {
    Create,
    Suspend,
    Resume,
    Remove,
}

impl CancellableVerbKind {
    /// EINTR with a reason and the state in which the device is left.
    pub fn interrupted(self, why: &str) -> TargetError {
        let so = match self {
            CancellableVerbKind::Create => "the device was not created",
            CancellableVerbKind::Suspend | CancellableVerbKind::Resume => "the device is active",
            CancellableVerbKind::Remove => "the device was not removed",
        };
        TargetError::errno(EINTR).because(format!("{why}; {so}"))
    }
}

/// The verbs of one device that run or are queued.
#[derive(Default)]
pub(crate) struct PendingVerbs(Mutex<Vec<(CancellableVerbKind, CancelToken)>>);

impl PendingVerbs {
    fn list(&self) -> MutexGuard<'_, Vec<(CancellableVerbKind, CancelToken)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a verb to the list until the guard is dropped.
    pub fn enter(&self, who: CancellableVerbKind, cancel_token: &CancelToken) -> PendingVerbGuard<'_> {
        self.list().push((who, cancel_token.clone()));
        PendingVerbGuard { pending: self, cancel_token: cancel_token.clone() }
    }

    /// True while a verb is making a table live.
    pub fn is_resuming(&self) -> bool {
        self.list()
            .iter()
            .any(|(waiting, _)| matches!(waiting, CancellableVerbKind::Create | CancellableVerbKind::Resume))
    }

    /// Cancels all verbs of kind `who`.
    pub fn cancel(&self, who: CancellableVerbKind, why: &str) {
        for (_, cancel_token) in self.list().iter().filter(|(waiting, _)| *waiting == who) {
            cancel_token.cancel(who.interrupted(why));
        }
    }
}

/// Entry in the list of [`PendingVerbs`]; removed when dropped.
pub(crate) struct PendingVerbGuard<'a> {
    pending: &'a PendingVerbs,
    cancel_token: CancelToken,
}

impl Drop for PendingVerbGuard<'_> {
    fn drop(&mut self) {
        self.pending.list().retain(|(_, cancel_token)| !Arc::ptr_eq(&cancel_token.0, &self.cancel_token.0));
    }
}
