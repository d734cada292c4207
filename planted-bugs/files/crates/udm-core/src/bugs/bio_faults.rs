//! Operations of planted bugs on bios: lose them, or submit a copy of them.

use crate::{Batch, Bio, BioOwnerId, Buf, Op, Segments};

/// Leaks bios. Dropping a bio in flight would panic.
pub fn leak_bios(bios: impl IntoIterator<Item = Box<Bio>>) {
    for bio in bios {
        Box::leak(bio);
    }
}

/// Returns a copy of a bio, in flight like the original.
pub fn duplicate_bio(bio: &Bio) -> Box<Bio> {
    let mut data = Segments::new();
    for piece in &bio.data {
        let mut copy = Buf::zeroed(piece.len());
        copy.copy_from_slice(piece);
        data.push(copy);
    }
    let mut duplicate_bio = Bio::new();
    (duplicate_bio.op, duplicate_bio.flags, duplicate_bio.owner, duplicate_bio.cookie) =
        (bio.op, bio.flags, bio.owner, bio.cookie);
    (duplicate_bio.sector, duplicate_bio.sectors, duplicate_bio.started, duplicate_bio.data) =
        (bio.sector, bio.sectors, bio.started, data);
    duplicate_bio.start();
    duplicate_bio
}

thread_local! {
    /// Copies of writes to submit later: the device, the number of batches left, the copy.
    static ECHOES: std::cell::RefCell<Vec<(usize, u32, Box<Bio>)>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// Owner of the copies of writes.
const ECHO: BioOwnerId = BioOwnerId(u32::MAX);

/// Leaks all copies of writes that were not submitted yet.
pub(super) fn leak_scheduled_duplicate_writes() {
    ECHOES.with_borrow_mut(|all| leak_bios(all.drain(..).map(|echo| echo.2)));
}

/// Stores a copy of the first write of `bios`, to be submitted to `device` with its fourth batch
/// from now.
pub fn schedule_duplicate_write(device: usize, bios: &[Box<Bio>]) {
    if let Some(bio) = bios.iter().find(|bio| bio.op == Op::Write && bio.owner != ECHO) {
        let mut echo = duplicate_bio(bio);
        echo.owner = ECHO;
        ECHOES.with_borrow_mut(|all| all.push((device, 4, echo)));
    }
}

/// Removes and returns the copies that go to `device` with this batch.
pub fn take_due_duplicate_writes(device: usize) -> Vec<Box<Bio>> {
    ECHOES.with_borrow_mut(|all| {
        all.iter_mut().filter(|echo| echo.0 == device).for_each(|echo| echo.1 -= 1);
        let due: Vec<usize> = (0..all.len()).rev().filter(|i| all[*i].1 == 0).collect();
        due.into_iter().map(|i| all.swap_remove(i).2).collect()
    })
}

/// Removes completed copies of writes from `done`.
pub fn remove_duplicate_completions(done: &mut Batch) {
    done.retain_mut(|bio| {
        let echo = bio.owner == ECHO;
        if echo {
            bio.finish();
        }
        !echo
    });
}
