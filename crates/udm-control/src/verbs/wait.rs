//! Runs a verb to its end without a reactor.

use crate::wait_hook;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

/// Runs `verb` to its end; the thread sleeps while it waits. A thread that is a core uses
/// [`block_on_verb_with_idle_fn`] instead.
pub fn block_on_verb<T>(verb: impl Future<Output = T>) -> T {
    // A spurious unpark costs only one extra poll.
    block_on_verb_with_idle_fn(verb, || {
        if !wait_hook::run_wait_hook() {
            thread::park();
        }
    })
}

/// Runs `verb` to its end and calls `turn` whenever the verb waits. For a thread that is a core,
/// `turn` runs a turn of the core, so that the lanes of this thread can answer.
pub fn block_on_verb_with_idle_fn<T>(verb: impl Future<Output = T>, mut turn: impl FnMut()) -> T {
    struct ThreadWaker(Thread);
    impl Wake for ThreadWaker {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(ThreadWaker(thread::current())));
    let mut verb = pin!(verb);
    loop {
        if let Poll::Ready(done) = verb.as_mut().poll(&mut Context::from_waker(&waker)) {
            return done;
        }
        turn();
    }
}
