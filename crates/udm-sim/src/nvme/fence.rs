//! When a host may repeat the unanswered writes of a lost association through another one.

/// The rule by which a host repeats writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryPolicy {
    /// After a Cross-Controller Reset; if it is refused, as [`RetryPolicy::Wait`].
    Reset,
    /// As [`RetryPolicy::Reset`], but the host takes a reset in progress for a complete one. This
    /// is how a target looks that answers before the requests have left the disk.
    EarlyReset,
    /// After two keep-alive timeouts and the quiesce time.
    Wait,
    /// At once, as Linux until TP8028. Writes may land late.
    AtOnce,
}
