//! The 64-bit word that decides where bios go.

/// Flags, current group, next group and generation: one value of [`super::MultipathState::word`].
/// Groups count from 0 here and from 1 in printed text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::multipath) struct PackedMultipathState(pub(super) u64);

impl PackedMultipathState {
    /// Queue bios that find no path (`queue_if_no_path`).
    pub(in crate::multipath) const QUEUE_IF_NO_PATH: u64 = 1 << 0;
    /// The value of the flag before a suspend cleared it.
    pub(in crate::multipath) const SAVED: u64 = 1 << 1;
    /// Set from load until the first bio chooses a path; the second number of `status`.
    pub(in crate::multipath) const QUEUE_IO: u64 = 1 << 2;
    /// The current suspend hands bios back instead of failing them.
    pub(in crate::multipath) const NOFLUSH: u64 = 1 << 3;
    /// Bit positions of the group numbers: 12 bits each, 0 for none. A table has at most 1024
    /// groups.
    pub(super) const CURRENT: u32 = 8;
    pub(super) const NEXT: u32 = 20;
    pub(super) const GROUP: u64 = 0xfff;
    /// Bit position of the generation, the upper 32 bits. It wraps, so a lane misses a change only
    /// if exactly 2^32 changes happen between two batches.
    pub(super) const GENERATION: u32 = 32;

    /// The state after a load: no current group, `next` is tried first.
    pub(super) fn loaded(queue_if_no_path: bool, next: Option<usize>) -> PackedMultipathState {
        PackedMultipathState(PackedMultipathState::QUEUE_IO)
            .with(PackedMultipathState::QUEUE_IF_NO_PATH, queue_if_no_path)
            .with_next(next)
    }

    /// A word that differs from this one in every bit: the initial word of a new lane.
    pub(in crate::multipath) fn unseen(self) -> PackedMultipathState {
        PackedMultipathState(!self.0)
    }

    pub(in crate::multipath) fn has(self, flag: u64) -> bool {
        self.0 & flag != 0
    }

    pub(super) fn with(self, flag: u64, on: bool) -> PackedMultipathState {
        PackedMultipathState(if on { self.0 | flag } else { self.0 & !flag })
    }

    pub(super) fn group(self, shift: u32) -> Option<usize> {
        (((self.0 >> shift) & PackedMultipathState::GROUP) as usize).checked_sub(1)
    }

    pub(super) fn with_group(self, shift: u32, group: Option<usize>) -> PackedMultipathState {
        let number = group.map_or(0, |g| g as u64 + 1);
        PackedMultipathState((self.0 & !(PackedMultipathState::GROUP << shift)) | (number << shift))
    }

    /// The group in use.
    pub(in crate::multipath) fn current(self) -> Option<usize> {
        self.group(PackedMultipathState::CURRENT)
    }

    /// The group to try first, once.
    pub(in crate::multipath) fn next(self) -> Option<usize> {
        self.group(PackedMultipathState::NEXT)
    }

    pub(super) fn with_current(self, group: Option<usize>) -> PackedMultipathState {
        self.with_group(PackedMultipathState::CURRENT, group)
    }

    pub(super) fn with_next(self, group: Option<usize>) -> PackedMultipathState {
        self.with_group(PackedMultipathState::NEXT, group)
    }

    pub(in crate::multipath) fn generation(self) -> u32 {
        (self.0 >> PackedMultipathState::GENERATION) as u32
    }

    pub(super) fn moved(self) -> PackedMultipathState {
        PackedMultipathState(self.0.wrapping_add(1 << PackedMultipathState::GENERATION))
    }

    /// True if a bio without a path is queued and not failed. A no-flush suspend in bio mode saves
    /// and clears the flag; bios must stay queued during such a suspend too.
    pub(in crate::multipath) fn queueing(self) -> bool {
        self.has(PackedMultipathState::QUEUE_IF_NO_PATH)
            || (self.has(PackedMultipathState::SAVED) && self.has(PackedMultipathState::NOFLUSH))
    }

    /// The same, but for a suspended device it returns the value that applies after the resume.
    pub(in crate::multipath) fn queues_after_resume(self) -> bool {
        self.has(PackedMultipathState::QUEUE_IF_NO_PATH) || self.has(PackedMultipathState::SAVED)
    }
}
