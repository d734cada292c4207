//! Drops that may block, such as closing a file, which may write back data and hang.

use std::cell::Cell;
use std::marker::PhantomData;
use std::thread;

thread_local! {
    static CORES: Cell<usize> = const { Cell::new(0) };
}

/// Marks the thread as a core while it exists.
pub(crate) struct CoreThreadMarkGuard(PhantomData<*const ()>);

impl CoreThreadMarkGuard {
    pub(crate) fn new() -> CoreThreadMarkGuard {
        CORES.set(CORES.get() + 1);
        CoreThreadMarkGuard(PhantomData)
    }
}

impl Drop for CoreThreadMarkGuard {
    fn drop(&mut self) {
        CORES.set(CORES.get() - 1);
    }
}

/// Drops `what`; on a core thread, a helper thread drops it. If a client leaves while its device is
/// removed, either side may drop the last reference. So the control half cannot ensure that it is
/// last.
pub fn drop_blocking<T: Send + 'static>(what: T) {
    // If the thread's locals are destroyed, the thread is ending, and blocking is harmless.
    if CORES.try_with(Cell::get).unwrap_or(0) > 0 {
        // If no thread is available, `what` is dropped on the core.
        let _ = thread::Builder::new().name("udm-close".into()).spawn(move || drop(what));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Sender, channel};
    use std::thread::ThreadId;

    struct DropProbe(Sender<ThreadId>);

    impl Drop for DropProbe {
        fn drop(&mut self) {
            self.0.send(thread::current().id()).unwrap();
        }
    }

    #[test]
    fn a_core_drops_elsewhere_and_others_here() {
        let (tx, rx) = channel();
        let here = thread::current().id();
        drop_blocking(DropProbe(tx.clone()));
        assert_eq!(rx.recv().unwrap(), here);
        let core = CoreThreadMarkGuard::new();
        drop_blocking(DropProbe(tx.clone()));
        assert_ne!(rx.recv().unwrap(), here);
        drop(core);
        drop_blocking(DropProbe(tx));
        assert_eq!(rx.recv().unwrap(), here);
    }
}
