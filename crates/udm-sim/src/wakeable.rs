//! Futures and device transitions that the world continues after they are woken, in its own order.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use udm_dm::TransitionWakeFn;

/// Flag that is set when a future is woken.
struct WakeFlag(AtomicBool);

impl Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A future that is polled after it is woken.
pub(crate) struct WakeableFuture<T> {
    future: Pin<Box<dyn Future<Output = T>>>,
    woken: Arc<WakeFlag>,
}

impl<T> WakeableFuture<T> {
    pub(crate) fn new(future: impl Future<Output = T> + 'static) -> WakeableFuture<T> {
        WakeableFuture { future: Box::pin(future), woken: Arc::new(WakeFlag(AtomicBool::new(true))) }
    }

    /// True if the future was woken.
    pub(crate) fn is_woken(&self) -> bool {
        self.woken.0.load(Ordering::Relaxed)
    }

    /// Polls the future.
    pub(crate) fn poll(&mut self) -> Poll<T> {
        self.woken.0.store(false, Ordering::Relaxed);
        let waker = Waker::from(self.woken.clone());
        self.future.as_mut().poll(&mut Context::from_waker(&waker))
    }
}

/// Creates a flag that a device transition sets when it can continue.
pub(crate) fn create_transition_wake_flag() -> (Arc<AtomicBool>, TransitionWakeFn) {
    let woken = Arc::new(AtomicBool::new(true));
    let handle = woken.clone();
    (woken, Arc::new(move || handle.store(true, Ordering::Relaxed)))
}
