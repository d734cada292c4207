//! Blocking work on helper threads.

use std::thread;

/// Called exactly once with the result of the work, on any thread.
pub(crate) type ThreadResultCallback<R> = Box<dyn FnOnce(R) + Send>;

/// Runs `work` on a thread called `name` and calls `then` with its result. If the thread cannot be
/// started or `work` panics, calls `then` with `no_thread()`.
pub(crate) fn run_on_new_thread<R: 'static>(
    name: &str,
    then: ThreadResultCallback<R>,
    no_thread: fn() -> R,
    work: impl FnOnce() -> R + Send + 'static,
) {
    let guard = ThreadResultCallbackGuard { then: Some(then), no_thread };
    // If no thread can be started, the closure is dropped, and the drop of `guard` calls `then`.
    let _ = thread::Builder::new().name(name.into()).spawn(move || guard.reply(work()));
}

/// Calls `then` exactly once: with the result, or with `no_thread()` when dropped.
struct ThreadResultCallbackGuard<R> {
    then: Option<ThreadResultCallback<R>>,
    no_thread: fn() -> R,
}

impl<R> ThreadResultCallbackGuard<R> {
    fn reply(mut self, result: R) {
        if let Some(then) = self.then.take() {
            then(result);
        }
    }
}

impl<R> Drop for ThreadResultCallbackGuard<R> {
    fn drop(&mut self) {
        if let Some(then) = self.then.take() {
            then((self.no_thread)());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn somebody_is_told_whatever_happens() {
        let (tx, answers) = channel();
        let then = || {
            Box::new({
                let tx = tx.clone();
                move |n| tx.send(n).unwrap()
            })
        };
        run_on_new_thread("test", then(), || 0, || 1);
        assert_eq!(answers.recv(), Ok(1));
        drop(ThreadResultCallbackGuard { then: Some(then()), no_thread: || 2 });
        assert_eq!(answers.recv(), Ok(2));
    }
}
