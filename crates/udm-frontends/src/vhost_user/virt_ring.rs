//! The device's side of a ring, of either kind.

use super::chain::{BrokenChainError, DescriptorChain};
use super::memory::GuestMemory;
use std::sync::Arc;
use udm_buf::SharedMemoryMap;

/// A part of a ring: a place in a mapping.
pub(super) type RingPart = (Arc<SharedMemoryMap>, usize);

/// The guest has broken the rules of the ring, so it cannot be used any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum BrokenRingError {
    #[error("the available ring has more entries than the ring")]
    TooManyAvailable,
    #[error("an entry of the available ring names no descriptor")]
    NoSuchDescriptor,
    #[error("more descriptors are available than the ring has")]
    TooManyDescriptors,
}

/// A split or packed ring, with its record of requests in flight if the front end keeps one. A
/// queue is made for one kind when it starts, so the data path has no branch for the kind.
///
/// A request has a *slot*, a number below [`VirtRing::slots`], from [`VirtRing::take`] to
/// [`VirtRing::publish`].
pub(super) trait VirtRing: Send + 'static {
    /// Number of slots.
    fn slots(&self) -> usize;

    /// True if a request is available. Costs one load.
    fn has_available(&self) -> bool;

    /// The most requests that can be taken now.
    ///
    /// # Errors
    /// The guest has broken the rules.
    fn available(&mut self) -> Result<usize, BrokenRingError>;

    /// Takes the next request, if there is one.
    ///
    /// # Errors
    /// The guest has broken the rules.
    fn take(&mut self) -> Result<Option<u16>, BrokenRingError>;

    /// Records the request that was taken last. Called before it starts.
    fn begin(&mut self, slot: u16);

    /// Takes the next request that an earlier back end has left, in their order. It is recorded.
    fn resubmit(&mut self) -> Option<u16>;

    /// Reads the buffers of the request that was taken last.
    ///
    /// # Errors
    /// The chain breaks the rules: it is used with nothing written.
    fn read_chain(
        &self,
        slot: u16,
        memory: &GuestMemory,
        chain: &mut DescriptorChain,
    ) -> Result<(), BrokenChainError>;

    /// Adds a completed request to the batch that is published next. `written` is the number of
    /// bytes that were written to its buffers.
    fn push_used(&mut self, slot: u16, written: u32);

    /// Publishes the batch, and then its end in the record. Returns true if the guest wants to be
    /// notified, and `None` if the batch is empty.
    fn publish(&mut self) -> Option<bool>;

    /// Tells the guest that it need not notify.
    fn suppress_notifications(&mut self);

    /// Asks the guest for a notification of the next request. Returns true if there is one already.
    fn request_notification(&mut self) -> bool;

    /// The number that `GET_VRING_BASE` replies with.
    fn base(&self) -> u32;
}
