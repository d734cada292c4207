//! What must not happen on a core: closing a file, which may write out, and hang.

use std::cell::Cell;
use std::marker::PhantomData;
use std::thread;

thread_local! {
    static CORES: Cell<usize> = const { Cell::new(0) };
}

/// Held by a core: the thread that made it is one.
pub(crate) struct CoreThreadGuard(PhantomData<*const ()>);

impl CoreThreadGuard {
    pub(crate) fn new() -> CoreThreadGuard {
        CORES.set(CORES.get() + 1);
        CoreThreadGuard(PhantomData)
    }
}

impl Drop for CoreThreadGuard {
    fn drop(&mut self) {
        CORES.set(CORES.get() - 1);
    }
}

/// Drops `what`; on the thread of a core it has a thread of its own do that. Who drops a device
/// last is decided by chance where a client leaves while its device is removed, so it is not enough
/// that the control side means to be last.
pub fn drop_blocking<T: Send + 'static>(what: T) {
    // A thread whose locals are gone already is at its end, and waits for nobody.
    if CORES.try_with(Cell::get).unwrap_or(0) > 0 {
        // Without a thread to be had it is dropped here after all.
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
        let (tell, told) = channel();
        let here = thread::current().id();
        drop_blocking(DropProbe(tell.clone()));
        assert_eq!(told.recv().unwrap(), here);
        let core = CoreThreadGuard::new();
        drop_blocking(DropProbe(tell.clone()));
        assert_ne!(told.recv().unwrap(), here);
        drop(core);
        drop_blocking(DropProbe(tell));
        assert_eq!(told.recv().unwrap(), here);
    }
}
