//! Lanes of devices that answer at once: each bio is served in `submit` and comes back from the next `poll`.

use udm_core::{Batch, Bio, Cx, Lane, Status};

/// What such a device does with one request. It never waits.
pub(crate) trait Serve {
    /// Serves `bio`, of which it may change the data only, and says how it ended.
    fn serve(&mut self, bio: &mut Bio) -> Status;
}

/// The lane of a device that answers at once.
pub(crate) struct ReadyLane<S> {
    serve: S,
    ready: Batch,
}

impl<S: Serve> ReadyLane<S> {
    pub(crate) fn new(serve: S) -> ReadyLane<S> {
        ReadyLane { serve, ready: Batch::new() }
    }
}

impl<S: Serve> Lane for ReadyLane<S> {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        for bio in batch.iter_mut() {
            let status = self.serve.serve(bio);
            bio.end_with(status);
        }
        hand_over(batch, &mut self.ready);
        // What is ready needs a poll, and no event of the outside will bring one.
        cx.wake_at(cx.now);
    }

    fn poll(&mut self, done: &mut Batch, _cx: &mut Cx<'_>) {
        hand_over(&mut self.ready, done);
    }
}

/// Moves all of `from` behind what `to` holds: by a swap where `to` is empty, which it is in nearly all calls, so that a batch
/// costs the same whatever its length, and both keep their room.
pub(crate) fn hand_over(from: &mut Batch, to: &mut Batch) {
    if to.is_empty() {
        std::mem::swap(from, to);
    } else {
        to.append(from);
    }
}
