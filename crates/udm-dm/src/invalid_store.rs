//! What is kept of a store outside of it: that it must not be believed.
//!
//! A store that has lost a copy says so itself, in its header. When that can't be written, because
//! the disk under it is gone, the disk may be back later with a header that says nothing. So the
//! mark is put where somebody else keeps it, before the origin changes.

/// The mark of one store. Whoever looks up devices has it ([`crate::Resolver::mark`]).
pub trait InvalidStoreMark: Send + Sync {
    /// Why the store must not be believed, in words for a person; `None` when nothing is known
    /// against it. May block.
    fn why(&self) -> Option<String>;

    /// Marks the store: it has lost a copy, for this reason, and can't say so. Asked by a core, so
    /// it does not block: `done` is called when the mark lasts, or with why it does not, from any
    /// thread. From the call on [`InvalidStoreMark::why`] knows of it.
    fn set(&self, why: &str, done: Box<dyn FnOnce(Result<(), String>) + Send>);

    /// Forgets the mark: the store is about to be made anew. May block.
    ///
    /// # Errors
    /// Why it stays, in words for a person.
    fn clear(&self) -> Result<(), String>;
}
