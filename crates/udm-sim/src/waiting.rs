//! Futures that a world lets go on when they are woken, in an order of its own.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// Is set when a future can go on.
struct WakeFlag(AtomicBool);

impl Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A future that goes on when it is woken.
pub(crate) struct WakeableFuture<T> {
    future: Pin<Box<dyn Future<Output = T>>>,
    woken: Arc<WakeFlag>,
}

impl<T> WakeableFuture<T> {
    pub(crate) fn new(future: impl Future<Output = T> + 'static) -> WakeableFuture<T> {
        WakeableFuture { future: Box::pin(future), woken: Arc::new(WakeFlag(AtomicBool::new(true))) }
    }

    /// Can it go on?
    pub(crate) fn is_woken(&self) -> bool {
        self.woken.0.load(Ordering::Relaxed)
    }

    /// Lets it go on.
    pub(crate) fn poll(&mut self) -> Poll<T> {
        self.woken.0.store(false, Ordering::Relaxed);
        let waker = Waker::from(self.woken.clone());
        self.future.as_mut().poll(&mut Context::from_waker(&waker))
    }
}
