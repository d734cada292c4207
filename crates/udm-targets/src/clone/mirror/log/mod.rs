//! The write-intent log of a mirror (the kernel's `disk` log): which regions may differ in the two
//! devices after a crash. A mirror that continues copies only these.
//!
//! ```text
//!  write:  lock its blocks ──► region dirty in the log? ── yes ──► source, then destination
//!                              └─ no ─► log: bit 0, flush ─► dirty ─► try again
//!
//!  clean:  copied, and not used for a second ─► mark as being cleaned ─► no block locked?
//!          ─► flush source and destination ─► still marked? ─► log: bit 1
//! ```
//!
//! * [`load`]: the log is read and checked when a table is loaded. [`writer`]: the writes of the
//!   log, by lanes and by the task. [`task`]: regions become clean.
//!
//! The rules:
//!
//! * **A write goes to a device only if its regions are dirty in the log,** durably. This holds for
//!   a mirror whose destination has failed, too, so that it can continue later.
//! * **A region becomes clean** after both devices were flushed, with no write of it since. A write
//!   takes the lock of its blocks and then reads the flags; the task changes the flags and then
//!   reads the locks. So one of them sees the other. A write that finds a region being cleaned
//!   takes the mark away.
//! * **One write of the log at a time.** The map of the log in memory is changed only by its
//!   holder.
//! * **If the log cannot be written,** writes of clean regions wait, as in the kernel with
//!   `handle_errors`: until the owner of the mirror has made sure that nobody continues from this
//!   log ([`MirrorLog::abandon`]). With `keep_log` they fail.

pub(super) mod load;
pub(super) mod task;
pub(super) mod writer;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use udm_core::{Sectors, SharedDiskState, Status, WaitQueue, interleave};
use udm_dm::target::ResolvedDevice;
use udm_wire::mirror_log::{HEADERS_LEN, MirrorLogHeader, MirrorLogLayout, UNIT_LEN};

/// Regions per word of flags: a flag for dirty and one for being cleaned.
const REGIONS_PER_FLAGS: u64 = 32;

/// Values of the state.
const WORKS: u8 = 0;
const FAILED: u8 = 1;
const ABANDONED: u8 = 2;

/// The log of a live mirror. A table that is loaded over the mirror takes it over.
pub(super) struct MirrorLog {
    pub device: ResolvedDevice,
    header: MirrorLogHeader,
    headers: [u8; HEADERS_LEN],
    layout: MirrorLogLayout,
    /// Per region: dirty, durably; and being cleaned.
    flags: Box<[AtomicU64]>,
    /// Regions that were written since the task looked last.
    used: Box<[AtomicU64]>,
    /// The regions that are clean in the log, or will be by the write in flight. Changed only by
    /// the holder of the right to write.
    clean: Box<[AtomicU64]>,
    /// Number of dirty regions.
    dirty: AtomicU64,
    /// A lane or the task writes the log.
    writing: AtomicBool,
    state: AtomicU8,
    failure: Mutex<Option<Status>>,
    /// No table uses the log any more.
    ended: AtomicBool,
    /// Woken when regions became dirty, so that the task cleans them later.
    pub task_queue: Arc<WaitQueue>,
    /// Kept alive so that other tables find this log.
    _owner: Arc<MirrorOfLog>,
}

impl MirrorLog {
    /// A log with these clean regions, in words of 64.
    fn new(
        device: ResolvedDevice,
        header: MirrorLogHeader,
        mut clean: Vec<u64>,
        owner: &Arc<MirrorOfLog>,
    ) -> MirrorLog {
        let (regions, mut dirty) = (header.regions, 0);
        // The last word has no bits of regions that do not exist.
        if let Some(last) = clean.last_mut().filter(|_| !regions.is_multiple_of(64)) {
            *last &= (1 << (regions % 64)) - 1;
        }
        let flags = (0..regions.div_ceil(REGIONS_PER_FLAGS)).map(|index| {
            let clean = (clean[index as usize / 2] >> (index % 2 * REGIONS_PER_FLAGS)) as u32;
            let left = (regions - index * REGIONS_PER_FLAGS).min(REGIONS_PER_FLAGS);
            let word = u64::from(!clean) & ((1 << left) - 1);
            dirty += u64::from(word.count_ones());
            AtomicU64::new(word)
        });
        let flags = flags.collect();
        MirrorLog {
            device,
            headers: header.encode(),
            layout: MirrorLogLayout::new(regions),
            header,
            flags,
            used: clean.iter().map(|_| AtomicU64::new(0)).collect(),
            clean: clean.into_iter().map(AtomicU64::new).collect(),
            dirty: AtomicU64::new(dirty),
            writing: AtomicBool::new(false),
            state: AtomicU8::new(WORKS),
            failure: Mutex::default(),
            ended: AtomicBool::new(false),
            task_queue: Arc::new(WaitQueue::new()),
            _owner: Arc::clone(owner),
        }
    }

    /// The words of the clean regions.
    pub(super) fn clean_words(&self) -> Vec<u64> {
        self.clean.iter().map(|word| word.load(Ordering::Acquire)).collect()
    }

    /// Number of regions that are dirty in the log.
    pub(super) fn dirty(&self) -> u64 {
        self.dirty.load(Ordering::Acquire)
    }

    /// True if a write may go to the devices: all of its regions are dirty in the log, durably. The
    /// caller has locked its blocks, or knows that nothing becomes clean any more.
    pub(super) fn permits(&self, regions: Range<u64>) -> bool {
        for region in regions {
            let (word, bit) = flags_of(region);
            let flags = &self.flags[word];
            // SeqCst: see the head of the module.
            let mut now = flags.load(Ordering::SeqCst);
            while now & bit != 0 && now & being_cleaned(bit) != 0 {
                interleave::mark_interleave_point();
                let without = now & !being_cleaned(bit);
                now = match flags.compare_exchange(now, without, Ordering::SeqCst, Ordering::SeqCst) {
                    Ok(_) => without,
                    Err(other) => other,
                };
            }
            if now & bit == 0 {
                return self.is_abandoned();
            }
            let (used, bit) = (&self.used[(region / 64) as usize], 1 << (region % 64));
            if used.load(Ordering::Relaxed) & bit == 0 {
                used.fetch_or(bit, Ordering::Relaxed);
            }
        }
        true
    }

    /// True if `region` is dirty in the log, durably.
    fn is_dirty(&self, region: u64) -> bool {
        let (word, bit) = flags_of(region);
        self.flags[word].load(Ordering::SeqCst) & bit != 0
    }

    /// The log says durably that `region` is dirty.
    fn set_dirty(&self, region: u64) {
        let (word, bit) = flags_of(region);
        if self.flags[word].fetch_or(bit, Ordering::SeqCst) & bit == 0 {
            self.dirty.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Marks a region as being cleaned.
    fn begin_cleaning(&self, region: u64) {
        let (word, bit) = flags_of(region);
        self.flags[word].fetch_or(being_cleaned(bit), Ordering::SeqCst);
    }

    /// Takes the mark away: the region stays dirty.
    fn cancel_cleaning(&self, region: u64) {
        let (word, bit) = flags_of(region);
        self.flags[word].fetch_and(!being_cleaned(bit), Ordering::SeqCst);
    }

    /// If the region is still being cleaned, it is no longer dirty: writes wait for the log.
    fn end_cleaning(&self, region: u64) -> bool {
        let (word, bit) = flags_of(region);
        let both = bit | being_cleaned(bit);
        let clean = self.flags[word].fetch_update(Ordering::SeqCst, Ordering::SeqCst, |now| {
            interleave::mark_interleave_point();
            (now & both == both).then_some(now & !both)
        });
        if clean.is_ok() {
            self.dirty.fetch_sub(1, Ordering::AcqRel);
        }
        clean.is_ok()
    }

    /// The dirty flags of 64 regions, and which of them were used since the last call.
    fn take_used(&self, word: usize) -> (u64, u64) {
        let half = |index: usize| {
            let flags = self.flags.get(index).map_or(0, |flags| flags.load(Ordering::SeqCst));
            flags & u64::from(u32::MAX)
        };
        let dirty = half(2 * word) | half(2 * word + 1) << REGIONS_PER_FLAGS;
        let used = match dirty {
            0 => 0,
            _ => self.used[word].swap(0, Ordering::Relaxed),
        };
        (dirty, used)
    }

    /// Sets or clears the bit of a region in the map of the log. For the holder.
    fn set_clean(&self, region: u64, is_clean: bool) {
        let (word, bit) = (&self.clean[(region / 64) as usize], 1 << (region % 64));
        match is_clean {
            true => word.fetch_or(bit, Ordering::AcqRel),
            false => word.fetch_and(!bit, Ordering::AcqRel),
        };
    }

    /// The bytes of a unit. For the holder.
    fn encode_unit(&self, unit: u64, out: &mut [u8; UNIT_LEN]) {
        let word = |index: u64| self.clean[index as usize].load(Ordering::Acquire);
        self.layout.encode_unit(unit, &self.headers, &word, out);
    }

    /// Takes the right to write.
    fn begin_write(&self) -> bool {
        interleave::mark_interleave_point();
        !self.writing.swap(true, Ordering::SeqCst)
    }

    /// Gives the right to write back. The caller wakes those who wait.
    fn end_write(&self) {
        self.writing.store(false, Ordering::Release);
    }

    /// True while the log is being written.
    pub(super) fn is_writing(&self) -> bool {
        self.writing.load(Ordering::SeqCst)
    }

    /// True if the log can be written.
    pub(super) fn works(&self) -> bool {
        self.state.load(Ordering::SeqCst) == WORKS
    }

    /// True if the log failed, and nobody has abandoned it.
    pub(super) fn has_failed(&self) -> bool {
        self.state.load(Ordering::SeqCst) == FAILED
    }

    fn is_abandoned(&self) -> bool {
        self.state.load(Ordering::SeqCst) == ABANDONED
    }

    /// The status with which the log failed.
    pub(super) fn failure(&self) -> Option<Status> {
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A write of the log failed. Returns true for the first failure.
    fn fail(&self, status: Status) -> bool {
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(status);
        self.state.compare_exchange(WORKS, FAILED, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Nobody continues from this log: writes no longer need it. The caller wakes those who wait.
    pub(super) fn abandon(&self) {
        self.state.store(ABANDONED, Ordering::SeqCst);
    }

    /// A table begins to use the log.
    pub(super) fn begin(&self) {
        self.ended.store(false, Ordering::Relaxed);
        let _ = self.state.compare_exchange(FAILED, WORKS, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// No table uses the log any more.
    pub(super) fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
    }

    /// The size of the log.
    pub(super) fn sectors(&self) -> Sectors {
        self.layout.sectors()
    }
}

/// The word with the flags of `region`, and its flag for dirty.
fn flags_of(region: u64) -> (usize, u64) {
    ((region / REGIONS_PER_FLAGS) as usize, 1 << (region % REGIONS_PER_FLAGS))
}

/// The flag for being cleaned beside a flag for dirty.
fn being_cleaned(bit: u64) -> u64 {
    bit << REGIONS_PER_FLAGS
}

/// The mirror with its log on a device, shared by all names of the device.
#[derive(Default)]
pub(super) struct MirrorOfLog(Mutex<Weak<MirrorLog>>);

impl MirrorOfLog {
    /// The mirror with its log on `device`.
    fn of(device: &ResolvedDevice) -> Arc<MirrorOfLog> {
        device.device.shared_disk_state().map(SharedDiskState::get_or_default).unwrap_or_default()
    }

    /// The log in use, if a table uses it or can use it.
    fn log(&self) -> Option<Arc<MirrorLog>> {
        let log = self.0.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
        log.filter(|log| !log.ended.load(Ordering::Relaxed))
    }

    fn set_log(&self, log: &Arc<MirrorLog>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(log);
    }
}
