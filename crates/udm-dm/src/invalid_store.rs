//! A mark outside of a snapshot store that says that the store is invalid.
//!
//! A store that has lost a copy records this in its own header. If the disk of the store has
//! failed, the header cannot be written. The disk may come back later with a header that still says
//! "valid". So the mark is saved elsewhere before the origin changes.

/// The mark of one store. The resolver of device names provides it
/// ([`crate::DeviceNameResolver::mark`]).
pub trait InvalidStoreMark: Send + Sync {
    /// The reason why the store is invalid, for a person; `None` if the store is not marked. May
    /// block.
    fn why(&self) -> Option<String>;

    /// Marks the store as invalid for the reason `why`: the store has lost a copy and cannot record
    /// this itself. Called by a core, so it does not block. `done` is called from any thread, when
    /// the mark is durable or with the reason why it is not. [`InvalidStoreMark::why`] returns the
    /// mark as soon as this call returns.
    fn set(&self, why: &str, done: Box<dyn FnOnce(Result<(), String>) + Send>);

    /// Removes the mark, because the store is about to be created again. May block.
    ///
    /// # Errors
    /// The reason why the mark stays, for a person.
    fn clear(&self) -> Result<(), String>;
}
