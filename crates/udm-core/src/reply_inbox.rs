//! Replies of helper threads to a lane.
//!
//! A lane that needs blocking work sends a job to a thread, with a [`ReplySender`]. The thread
//! sends its reply, and the lane is polled once. The lane must not miss a reply that arrives while
//! it looks, which the [`WaitQueue`] ensures.
//!
//! Price: an uncontended lock per poll of a lane with jobs, and per reply. A lane without jobs pays
//! nothing.

use crate::{Cx, WaitQueue, WaitQueueSubscription};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The replies to one lane.
pub struct ReplyInbox<T> {
    shared: Arc<SharedReplies<T>>,
    subscription: WaitQueueSubscription,
}

/// Sends replies to a lane, from any thread. After the end of the lane, replies are dropped with
/// the last sender.
pub struct ReplySender<T>(Arc<SharedReplies<T>>);

struct SharedReplies<T> {
    replies: Mutex<Vec<T>>,
    wait_queue: Arc<WaitQueue>,
}

impl<T> SharedReplies<T> {
    fn replies(&self) -> MutexGuard<'_, Vec<T>> {
        self.replies.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> ReplyInbox<T> {
    /// Creates an inbox for the lane that opens in this turn.
    pub fn open(cx: &mut Cx<'_>) -> ReplyInbox<T> {
        let wait_queue = Arc::new(WaitQueue::new());
        let subscription = wait_queue.subscribe(cx);
        ReplyInbox { shared: Arc::new(SharedReplies { replies: Mutex::default(), wait_queue }), subscription }
    }

    /// A sender for a job.
    #[must_use]
    pub fn sender(&self) -> ReplySender<T> {
        ReplySender(Arc::clone(&self.shared))
    }

    /// Moves the replies to the empty vector `out`, and asks for a poll when another one arrives. A
    /// lane with jobs calls this in each poll.
    pub fn take_and_wait(&mut self, out: &mut Vec<T>, cx: &mut Cx<'_>) {
        debug_assert!(out.is_empty(), "earlier replies would be lost");
        // The epoch is read before the look, so a later reply is noticed.
        let seen = self.subscription.epoch();
        std::mem::swap(out, &mut *self.shared.replies());
        self.subscription.wait(seen, cx);
    }
}

impl<T> Clone for ReplySender<T> {
    fn clone(&self) -> ReplySender<T> {
        ReplySender(Arc::clone(&self.0))
    }
}

impl<T> ReplySender<T> {
    /// Sends a reply and wakes the lane.
    pub fn send(&self, reply: T) {
        self.0.replies().push(reply);
        self.0.wait_queue.wake_up();
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;
    use crate::{CoreId, CoreLaneState, Nanos};

    #[test]
    fn replies_arrive_in_order_and_wake_the_lane() {
        let mut state = CoreLaneState::new(CoreId(0), 1, 0, None);
        let mut inbox = ReplyInbox::open(&mut state.cx(Nanos(5)));
        let sender = inbox.sender();
        let mut out = Vec::new();
        let mut cx = state.cx(Nanos(5));
        inbox.take_and_wait(&mut out, &mut cx);
        assert_eq!((out.len(), cx.wake()), (0, Nanos::NEVER));
        let other = sender.clone();
        std::thread::spawn(move || (1..=2).for_each(|n| other.send(n))).join().unwrap();
        let mut cx = state.cx(Nanos(5));
        inbox.take_and_wait(&mut out, &mut cx);
        assert_eq!(out, [1, 2]);
    }
}
