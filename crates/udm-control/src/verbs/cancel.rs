//! Calling a verb off while it waits.
//!
//! Contract: the device goes on as it was, active and with the table that was live, and the verb
//! ends with the reason that was given. Where the cores use the new state already it is too late,
//! and the verb ends as if nothing had been said. Creating and removing wait for nobody, and are
//! finished, but where they change other devices as well ([`udm_dm::Target::dependents`]), or where a
//! table reads or writes a store: a create that is called off has made nothing, a load has loaded
//! nothing, a removal has removed nothing.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use tokio::sync::Notify;
use udm_core::bugs::{self, Bug};
use udm_core::errno::EINTR;
use udm_dm::TargetError;

/// EINTR, with the reason.
#[must_use]
pub fn interrupted(why: &str) -> TargetError {
    VerbKind::Resume.interrupted(why)
}

/// The other end of a verb: ends its wait. Clones are the same.
#[derive(Clone, Default)]
pub struct CancelToken(Arc<CancelState>);

#[derive(Default)]
struct CancelState {
    why: OnceLock<TargetError>,
    said: Notify,
    /// What it is a part of: called off with that.
    whole: Option<CancelToken>,
}

impl CancelToken {
    /// Has the verb end with `why`, if it is not too late. The first reason stays.
    pub fn call(&self, why: TargetError) {
        if self.0.why.set(why).is_ok() {
            self.0.said.notify_one();
        }
    }

    /// For one step of several, which can be called off alone: the others go on.
    pub(crate) fn step(&self) -> CancelToken {
        if bugs::on(Bug::OneCallsOffAll) {
            return self.clone();
        }
        CancelToken(Arc::new(CancelState { whole: Some(self.clone()), ..CancelState::default() }))
    }

    /// What it was called with, if it was.
    pub(crate) fn reason(&self) -> Option<&TargetError> {
        self.0.why.get().or_else(|| self.0.whole.as_ref()?.reason())
    }

    /// Waits for [`CancelToken::call`]. For one at a time; who comes later is told as well.
    pub(super) async fn called(&self) -> TargetError {
        loop {
            if let Some(why) = self.reason() {
                return why.clone();
            }
            match &self.0.whole {
                None => self.0.said.notified().await,
                Some(whole) => tokio::select! {
                    () = self.0.said.notified() => {}
                    _ = Box::pin(whole.called()) => {}
                },
            }
        }
    }
}

/// Who waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VerbKind {
    Create,
    Suspend,
    Resume,
    Remove,
}

impl VerbKind {
    /// EINTR, with the reason and what has become of the device.
    pub fn interrupted(self, why: &str) -> TargetError {
        let so = match self {
            VerbKind::Create => "the device was not created",
            VerbKind::Suspend | VerbKind::Resume => "the device is active",
            VerbKind::Remove => "the device was not removed",
        };
        TargetError::errno(EINTR).because(format!("{why}; {so}"))
    }
}

/// The verbs that change one device: the one under way, and those that wait for their turn.
#[derive(Default)]
pub(crate) struct PendingVerbs(Mutex<Vec<(VerbKind, CancelToken)>>);

impl PendingVerbs {
    fn list(&self) -> MutexGuard<'_, Vec<(VerbKind, CancelToken)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// On the list until the answer is dropped.
    pub fn enter(&self, who: VerbKind, cancel_token: &CancelToken) -> PendingGuard<'_> {
        self.list().push((who, cancel_token.clone()));
        PendingGuard { pending: self, cancel_token: cancel_token.clone() }
    }

    /// True while a table is to become live.
    pub fn is_coming(&self) -> bool {
        self.list().iter().any(|(waiting, _)| matches!(waiting, VerbKind::Create | VerbKind::Resume))
    }

    /// Calls off every `who`.
    pub fn cancel(&self, who: VerbKind, why: &str) {
        for (_, cancel_token) in self.list().iter().filter(|(waiting, _)| *waiting == who) {
            cancel_token.call(who.interrupted(why));
        }
    }
}

/// A place on the list.
pub(crate) struct PendingGuard<'a> {
    pending: &'a PendingVerbs,
    cancel_token: CancelToken,
}

impl Drop for PendingGuard<'_> {
    fn drop(&mut self) {
        self.pending.list().retain(|(_, cancel_token)| !Arc::ptr_eq(&cancel_token.0, &self.cancel_token.0));
    }
}
