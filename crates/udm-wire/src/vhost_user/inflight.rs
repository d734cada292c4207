//! The record of requests in flight (`vhost-user.rst`, "Inflight I/O tracking", split virtqueue).
//!
//! The front end keeps the memory while the back end is away. A back end that starts anew reads
//! which requests its predecessor had taken and not completed, and submits them again in their
//! order.
//!
//! An area has one part per ring: a header, then one entry per descriptor:
//!
//! ```text
//! header: features u64 | version u16 | desc_num u16 | last_batch_head u16 | used_idx u16
//! entry:  inflight u8 | padding [u8; 5] | next u16 | counter u64
//! ```

/// The version of the structures.
pub const INFLIGHT_VERSION: u16 = 1;

const HEADER: usize = 16;
const ENTRY: usize = 16;
/// Alignment of the parts of rings.
const ALIGN: usize = 64;

/// Byte offsets in an area for rings of `ring_size` entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InflightLayout {
    /// Number of entries of each ring.
    pub ring_size: u16,
}

impl InflightLayout {
    /// Offset of `version`.
    pub const VERSION: usize = 8;
    /// Offset of `desc_num`.
    pub const DESC_NUM: usize = 10;
    /// Offset of `last_batch_head`.
    pub const LAST_BATCH_HEAD: usize = 12;
    /// Offset of `used_idx`.
    pub const USED_IDX: usize = 14;

    /// Bytes of the part of one ring.
    #[must_use]
    pub const fn part_len(self) -> usize {
        (HEADER + ENTRY * self.ring_size as usize).next_multiple_of(ALIGN)
    }

    /// Offset of the entry of descriptor `head` in the part; `inflight` is its first byte.
    #[must_use]
    pub const fn entry(self, head: u16) -> usize {
        HEADER + ENTRY * head as usize
    }

    /// Offset of the entry's `next`.
    #[must_use]
    pub const fn entry_next(self, head: u16) -> usize {
        self.entry(head) + 6
    }

    /// Offset of the entry's `counter`.
    #[must_use]
    pub const fn entry_counter(self, head: u16) -> usize {
        self.entry(head) + 8
    }
}

/// The record of one descriptor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InflightEntry {
    /// The request that begins at this descriptor is in flight.
    pub is_inflight: bool,
    /// The entry that was completed before this one in the same batch.
    pub next: u16,
    /// Order in which requests were taken.
    pub counter: u64,
}

/// What a new back end does with a ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InflightRecovery {
    /// Heads of requests to submit again, in the order in which they were taken.
    pub resubmit: Vec<u16>,
    /// Entries of the last batch, which is complete: their marks are to be cleared.
    pub completed: Vec<u16>,
    /// Index of the next entry of the available ring. The base that the front end sends does not
    /// count the requests in flight.
    pub next_avail: u16,
    /// The next counter.
    pub next_counter: u64,
}

/// Returns what was in flight when the last back end ended.
///
/// `recorded_used` and `last_batch_head` are those of the record, `ring_used` is `idx` of the used
/// ring. If both indices differ, the last back end published a batch and ended before it cleared the
/// marks of the batch, so its requests are complete.
#[must_use]
pub fn recover_inflight_requests(
    entries: &[InflightEntry],
    recorded_used: u16,
    last_batch_head: u16,
    ring_used: u16,
) -> InflightRecovery {
    let batch = ring_used.wrapping_sub(recorded_used);
    let mut completed = Vec::new();
    let mut head = last_batch_head;
    // A record that is damaged may be longer or have a circle: at most the batch is followed.
    for _ in 0..usize::from(batch).min(entries.len()) {
        let Some(entry) = entries.get(usize::from(head)) else { break };
        completed.push(head);
        head = entry.next;
    }
    let mut resubmit: Vec<u16> = (0..entries.len() as u16)
        .filter(|head| entries[usize::from(*head)].is_inflight && !completed.contains(head))
        .collect();
    resubmit.sort_by_key(|head| entries[usize::from(*head)].counter);
    let next_counter = entries.iter().map(|entry| entry.counter).max().map_or(0, |max| max.wrapping_add(1));
    let next_avail = ring_used.wrapping_add(resubmit.len() as u16);
    InflightRecovery { resubmit, completed, next_avail, next_counter }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_is_that_of_the_specification() {
        let layout = InflightLayout { ring_size: 128 };
        assert_eq!((layout.part_len(), layout.entry(0), layout.entry(127)), (2112, 16, 2048));
        assert_eq!((layout.entry_next(1), layout.entry_counter(1)), (38, 40));
        assert_eq!(InflightLayout { ring_size: 1 }.part_len(), 64);
    }

    fn entry(is_inflight: bool, next: u16, counter: u64) -> InflightEntry {
        InflightEntry { is_inflight, next, counter }
    }

    #[test]
    fn requests_in_flight_are_submitted_again_in_their_order() {
        let entries = [entry(true, 0, 7), entry(false, 0, 9), entry(true, 0, 5), entry(true, 0, 6)];
        let recovery = recover_inflight_requests(&entries, 100, 0, 100);
        assert_eq!((recovery.resubmit, recovery.completed), (vec![2, 3, 0], vec![]));
        assert_eq!((recovery.next_avail, recovery.next_counter), (103, 10), "used and what is in flight");
    }

    /// The used ring was published, and the marks were not cleared.
    #[test]
    fn a_published_batch_is_complete() {
        let entries = [entry(true, 3, 1), entry(true, 0, 2), entry(true, 0, 3), entry(true, 0, 0)];
        let recovery = recover_inflight_requests(&entries, 65_535, 0, 1);
        assert_eq!((recovery.completed, recovery.resubmit), (vec![0, 3], vec![1, 2]));
        assert_eq!(recovery.next_avail, 3, "over the wrap");
    }

    /// A fresh record beside a ring that is in use: the caller sets the recorded index first
    /// (spdk 3766), and a damaged one does no harm.
    #[test]
    fn damaged_records_are_bounded() {
        let entries = [entry(true, 9, u64::MAX), entry(true, 1, 0)];
        let recovery = recover_inflight_requests(&entries, 0, 1, 40_000);
        assert_eq!(recovery.completed, [1, 1]);
        assert_eq!((recovery.resubmit, recovery.next_counter), (vec![0], 0));
        assert_eq!(recover_inflight_requests(&entries, 0, 77, 3).completed, Vec::<u16>::new());
        assert_eq!(recover_inflight_requests(&[], 0, 0, 5).next_avail, 5);
    }
}
