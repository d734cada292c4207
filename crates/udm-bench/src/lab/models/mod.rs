//! The references of the experiments: multipath with one lock, request queues, and paths with a
//! fixed service time.

pub(crate) mod one_lock;
pub(super) mod paced_path;
pub(super) mod two_queues;
