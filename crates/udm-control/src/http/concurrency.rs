//! How many requests may wait for storage at a time.
//!
//! Contract: verbs that may block run on threads beside the control thread, as many of a kind as
//! its gate lets through; those behind it wait for a while and are then refused with EBUSY. Kinds
//! do not wait for each other: loads that hang on their storage keep no message from failing the
//! path that hangs.

use super::error::ErrorResponse;
use crate::error::VerbError;
use axum::extract::FromRef;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use udm_core::errno::EBUSY;
use udm_dm::TargetError;

/// Threads for verbs that may block, over all kinds.
pub const BLOCKING_MAX: usize =
    LOADS_MAX + MESSAGES_MAX + CLEARS_MAX + RENAMES_MAX + METRICS_MAX + RECONFIGURES_MAX;

const LOADS_MAX: usize = 32;
const MESSAGES_MAX: usize = 16;
const CLEARS_MAX: usize = 8;
const RENAMES_MAX: usize = 4;
const METRICS_MAX: usize = 2;
/// Through the socket one at a time, and one that a signal asks for beside.
const RECONFIGURES_MAX: usize = 2;

/// How many clients wait for events, or listen to changes: each keeps its seat, and there are
/// others.
pub const WAITS_MAX: usize = super::server::CONNECTIONS_MAX / 2;

/// How many more of a kind may wait at its gate.
const WAITING_MAX: usize = 32;

/// How long they wait: longer than loads wait for one another.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// The gates of one server.
pub(super) struct ConcurrencyLimits {
    /// Creates and loads: they open devices.
    pub loads: ConcurrencyLimit,
    /// Messages: they may name a path.
    pub messages: ConcurrencyLimit,
    /// What closes devices.
    pub clears: ConcurrencyLimit,
    /// What moves marks in the state folder.
    pub renames: ConcurrencyLimit,
    /// Looks at all numbers: with thousands of devices they take a while.
    pub metrics: ConcurrencyLimit,
    /// What applies the server's file.
    pub reconfigures: ConcurrencyLimit,
    /// Places for those who wait for events, or listen.
    pub waits: Arc<Semaphore>,
}

/// The gate of one kind of verb.
pub(super) struct ConcurrencyLimit {
    what: &'static str,
    permits: Arc<Semaphore>,
    waiting: Semaphore,
}

impl ConcurrencyLimits {
    /// All open.
    pub fn new() -> Arc<ConcurrencyLimits> {
        Arc::new(ConcurrencyLimits {
            loads: ConcurrencyLimit::new("creates and loads", LOADS_MAX),
            messages: ConcurrencyLimit::new("messages", MESSAGES_MAX),
            clears: ConcurrencyLimit::new("clears", CLEARS_MAX),
            renames: ConcurrencyLimit::new("renames", RENAMES_MAX),
            metrics: ConcurrencyLimit::new("looks at all numbers", METRICS_MAX),
            reconfigures: ConcurrencyLimit::new("reconfigures", RECONFIGURES_MAX - 1),
            waits: Arc::new(Semaphore::new(WAITS_MAX)),
        })
    }
}

impl ConcurrencyLimit {
    fn new(what: &'static str, max: usize) -> ConcurrencyLimit {
        ConcurrencyLimit {
            what,
            permits: Arc::new(Semaphore::new(max)),
            waiting: Semaphore::new(WAITING_MAX),
        }
    }

    async fn enter(&self) -> Option<OwnedSemaphorePermit> {
        if let Ok(permit) = Arc::clone(&self.permits).try_acquire_owned() {
            return Some(permit);
        }
        let _waiting = self.waiting.try_acquire().ok()?;
        let permit = tokio::time::timeout(WAIT_MAX, Arc::clone(&self.permits).acquire_owned()).await;
        permit.ok()?.ok()
    }

    /// Runs `verb`, about the device `name`, on a thread where it may block. It comes to its end
    /// even when the client is gone.
    pub async fn run<T: Send + 'static>(
        &self,
        name: &str,
        verb: impl FnOnce() -> Result<T, VerbError> + Send + 'static,
    ) -> Result<T, ErrorResponse> {
        let Some(permit) = self.enter().await else {
            let why = format!("too many {} are under way: try again when some are done", self.what);
            return Err(VerbError::new(name, TargetError::errno(EBUSY).because(why)).into());
        };
        let done = tokio::task::spawn_blocking(move || {
            let done = verb();
            drop(permit);
            done
        });
        super::handlers::finished(done.await)
    }
}

/// What handlers share.
#[derive(Clone)]
pub(super) struct AppState {
    /// The devices.
    pub registry: Arc<crate::registry::Registry>,
    /// The gates.
    pub gates: Arc<ConcurrencyLimits>,
    /// When the server began.
    pub began: crate::stats::StartTime,
}

impl FromRef<AppState> for Arc<crate::registry::Registry> {
    fn from_ref(shared: &AppState) -> Self {
        Arc::clone(&shared.registry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_so_many_wait() {
        let gate = ConcurrencyLimit::new("loads", 1);
        let permit = gate.enter().await.unwrap();
        let mut waiting: Vec<_> = (0..WAITING_MAX).map(|_| Box::pin(gate.enter())).collect();
        for one in &mut waiting {
            assert!(tokio::time::timeout(Duration::from_millis(1), one).await.is_err());
        }
        assert!(gate.enter().await.is_none(), "refused at once");
        drop(permit);
        assert!(waiting.remove(0).await.is_some());
    }
}
