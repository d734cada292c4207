//! Calling a verb off while it waits.
//!
//! Contract: the device goes on as it was, active and with the table that was live, and the verb
//! ends with the reason that was given. Where the cores use the new state already it is too late,
//! and the verb ends as if nothing had been said. Creating and removing wait for nobody, and are
//! finished, but where they change other devices as well ([`udm_dm::Target::partners`]), or where a
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
    Waiting::Resume.interrupted(why)
}

/// The other end of a verb: ends its wait. Clones are the same.
#[derive(Clone, Default)]
pub struct CallOff(Arc<Inner>);

#[derive(Default)]
struct Inner {
    why: OnceLock<TargetError>,
    said: Notify,
    /// What it is a part of: called off with that.
    whole: Option<CallOff>,
}

impl CallOff {
    /// Has the verb end with `why`, if it is not too late. The first reason stays.
    pub fn call(&self, why: TargetError) {
        if self.0.why.set(why).is_ok() {
            self.0.said.notify_one();
        }
    }

    /// For one step of several, which can be called off alone: the others go on.
    pub(crate) fn step(&self) -> CallOff {
        if bugs::on(Bug::OneCallsOffAll) {
            return self.clone();
        }
        CallOff(Arc::new(Inner { whole: Some(self.clone()), ..Inner::default() }))
    }

    /// What it was called with, if it was.
    pub(crate) fn reason(&self) -> Option<&TargetError> {
        self.0.why.get().or_else(|| self.0.whole.as_ref()?.reason())
    }

    /// Waits for [`CallOff::call`]. For one at a time; who comes later is told as well.
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
pub(crate) enum Waiting {
    Create,
    Suspend,
    Resume,
    Remove,
}

impl Waiting {
    /// EINTR, with the reason and what has become of the device.
    pub fn interrupted(self, why: &str) -> TargetError {
        let so = match self {
            Waiting::Create => "the device was not created",
            Waiting::Suspend | Waiting::Resume => "the device is active",
            Waiting::Remove => "the device was not removed",
        };
        TargetError::errno(EINTR).because(format!("{why}; {so}"))
    }
}

/// The verbs that change one device: the one under way, and those that wait for their turn.
#[derive(Default)]
pub(crate) struct Pending(Mutex<Vec<(Waiting, CallOff)>>);

impl Pending {
    fn list(&self) -> MutexGuard<'_, Vec<(Waiting, CallOff)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// On the list until the answer is dropped.
    pub fn enter(&self, who: Waiting, off: &CallOff) -> Entered<'_> {
        self.list().push((who, off.clone()));
        Entered { pending: self, off: off.clone() }
    }

    /// True while a table is to become live.
    pub fn is_coming(&self) -> bool {
        self.list().iter().any(|(waiting, _)| matches!(waiting, Waiting::Create | Waiting::Resume))
    }

    /// Calls off every `who`.
    pub fn call_off(&self, who: Waiting, why: &str) {
        for (_, off) in self.list().iter().filter(|(waiting, _)| *waiting == who) {
            off.call(who.interrupted(why));
        }
    }
}

/// A place on the list.
pub(crate) struct Entered<'a> {
    pending: &'a Pending,
    off: CallOff,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.pending.list().retain(|(_, off)| !Arc::ptr_eq(&off.0, &self.off.0));
    }
}
