//! What experiments compare udm with, and what they put below it.

pub(crate) mod one_lock;
pub(super) mod paced;
pub(super) mod two_queues;
