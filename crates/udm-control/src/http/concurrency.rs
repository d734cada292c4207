//! Limits for requests that may wait for storage.
//!
//! Contract: verbs that may block run on their own threads, outside the control thread, at most a
//! fixed number per kind. Further ones wait for a while and then fail with EBUSY. Each kind has its
//! own limit: if loads hang on their storage, a message can still fail the path that hangs.

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
/// One through the socket, and one after a signal.
const RECONFIGURES_MAX: usize = 2;

/// Maximum number of clients that wait for events or read the event stream. Each keeps its
/// connection, and half of the connections stay free for others.
pub const WAITS_MAX: usize = super::server::CONNECTIONS_MAX / 2;

/// Maximum number of requests per kind that wait at the limit.
const WAITING_MAX: usize = 32;

/// Maximum wait at the limit; longer than the wait of loads for each other.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// The limits of one server.
pub(super) struct ConcurrencyLimits {
    /// Creates and loads, which open devices.
    pub loads: ConcurrencyLimit,
    /// Messages, which may name a path.
    pub messages: ConcurrencyLimit,
    /// Clears, which close devices.
    pub clears: ConcurrencyLimit,
    /// Renames, which move marks in the state folder.
    pub renames: ConcurrencyLimit,
    /// Reports on all devices, which take a while with thousands of them.
    pub metrics: ConcurrencyLimit,
    /// Changes by the configuration file.
    pub reconfigures: ConcurrencyLimit,
    /// Clients that wait for events or read the event stream.
    pub waits: Arc<Semaphore>,
}

/// The limit for one kind of verb.
pub(super) struct ConcurrencyLimit {
    what: &'static str,
    permits: Arc<Semaphore>,
    waiting: Semaphore,
}

impl ConcurrencyLimits {
    /// The limits, with nothing in use.
    pub fn new() -> Arc<ConcurrencyLimits> {
        Arc::new(ConcurrencyLimits {
            loads: ConcurrencyLimit::new("creates and loads", LOADS_MAX),
            messages: ConcurrencyLimit::new("messages", MESSAGES_MAX),
            clears: ConcurrencyLimit::new("clears", CLEARS_MAX),
            renames: ConcurrencyLimit::new("renames", RENAMES_MAX),
            metrics: ConcurrencyLimit::new("reports on all devices", METRICS_MAX),
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

    /// Runs `verb`, for the device `name`, on a thread that may block. The verb completes even if
    /// the client disconnects.
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
        super::handlers::flatten_join_result(done.await)
    }
}

/// State shared by the handlers.
#[derive(Clone)]
pub(super) struct AppState {
    /// The devices.
    pub registry: Arc<crate::registry::DeviceRegistry>,
    /// The concurrency limits.
    pub limits: Arc<ConcurrencyLimits>,
    /// Start of the server.
    pub began: crate::stats::StartTime,
}

impl FromRef<AppState> for Arc<crate::registry::DeviceRegistry> {
    fn from_ref(shared: &AppState) -> Self {
        Arc::clone(&shared.registry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_so_many_wait() {
        let limit = ConcurrencyLimit::new("loads", 1);
        let permit = limit.enter().await.unwrap();
        let mut waiting: Vec<_> = (0..WAITING_MAX).map(|_| Box::pin(limit.enter())).collect();
        for one in &mut waiting {
            assert!(tokio::time::timeout(Duration::from_millis(1), one).await.is_err());
        }
        assert!(limit.enter().await.is_none(), "refused at once");
        drop(permit);
        assert!(waiting.remove(0).await.is_some());
    }
}
