//! What bugs do with bios: they lose them, have them land twice, or keep them.

use crate::{Batch, Bio, Buf, Op, OwnerId, Segments};

/// Loses bios, without the panic that dropping one in flight is.
pub fn leak_bios(bios: impl IntoIterator<Item = Box<Bio>>) {
    for bio in bios {
        Box::leak(bio);
    }
}

/// A copy of a bio, on its way too.
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
    /// Writes that are to land once more: on which device, after how many batches.
    static ECHOES: std::cell::RefCell<Vec<(usize, u32, Box<Bio>)>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// Who owns an echo.
const ECHO: OwnerId = OwnerId(u32::MAX);

/// Forgets them all.
#[cfg(feature = "seeded-bugs")]
pub(super) fn clear_echoes() {
    ECHOES.with_borrow_mut(|all| leak_bios(all.drain(..).map(|echo| echo.2)));
}

/// Remembers the first write of `bio_faults`: a copy of it will go to `device` again.
pub fn record_echo(device: usize, bios: &[Box<Bio>]) {
    if let Some(bio) = bios.iter().find(|bio| bio.op == Op::Write && bio.owner != ECHO) {
        let mut echo = duplicate_bio(bio);
        echo.owner = ECHO;
        ECHOES.with_borrow_mut(|all| all.push((device, 4, echo)));
    }
}

/// The copies that go to `device` with this batch.
pub fn take_echoes(device: usize) -> Vec<Box<Bio>> {
    ECHOES.with_borrow_mut(|all| {
        all.iter_mut().filter(|echo| echo.0 == device).for_each(|echo| echo.1 -= 1);
        let due: Vec<usize> = (0..all.len()).rev().filter(|i| all[*i].1 == 0).collect();
        due.into_iter().map(|i| all.swap_remove(i).2).collect()
    })
}

/// Takes the copies out of what came back.
pub fn drop_echoes(done: &mut Batch) {
    done.retain_mut(|bio| {
        let echo = bio.owner == ECHO;
        if echo {
            bio.finish();
        }
        !echo
    });
}
