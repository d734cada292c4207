//! The bios of one run on their way: which may go next, and which are home.

use crate::{Batch, Bio, Device, OpenError, Status, errno};

/// Bytes that may be in flight; a longer bio goes alone.
const BYTES_MAX: u64 = 1 << 20;

/// Bios that may be in flight.
const BIOS_MAX: usize = 256;

/// The bios of one [`super::ControlIo::run_task`]. Whoever drives it has a lane of the device: it sends
/// what [`ControlTransfer::next`] gives and brings back what comes home, until [`ControlTransfer::is_over`].
pub struct ControlTransfer {
    /// What is still to be sent, the last first.
    waiting: Batch,
    /// By place; `None` where a bio waits or is in flight.
    completed: Vec<Option<Box<Bio>>>,
    in_flight: usize,
    bytes: u64,
}

impl ControlTransfer {
    /// `bio_faults` for `device`. What it can't take is home already, with its error.
    #[must_use]
    pub fn new(device: &dyn Device, bios: Batch) -> ControlTransfer {
        let limits = device.limits();
        let mut completed = Vec::with_capacity(bios.len());
        let mut waiting = Vec::with_capacity(bios.len());
        for (place, mut bio) in bios.into_iter().enumerate() {
            bio.cookie = place as u64;
            let fits = bio.sectors <= limits.max_for(bio.op)
                && (!bio.op.has_data() || bio.data.len() as u64 == bio.sectors.bytes());
            let refusal = limits.check(bio.op, bio.sector, bio.sectors).err();
            match refusal.or((!fits).then_some(Status::Inval)) {
                Some(status) => {
                    bio.end_with(status);
                    completed.push(Some(bio));
                }
                None => {
                    completed.push(None);
                    waiting.push(bio);
                }
            }
        }
        waiting.reverse();
        ControlTransfer { waiting, completed, in_flight: 0, bytes: 0 }
    }

    /// The next bio to send, when one more may be in flight.
    #[expect(clippy::should_implement_trait, reason = "it is no iterator: more may come after None")]
    pub fn next(&mut self) -> Option<Box<Bio>> {
        let bytes = self.waiting.last()?.data.len() as u64;
        let full = self.in_flight >= BIOS_MAX || self.bytes + bytes > BYTES_MAX;
        if full && self.in_flight > 0 {
            return None;
        }
        self.in_flight += 1;
        self.bytes += bytes;
        self.waiting.pop()
    }

    /// Takes a bio that is home.
    pub fn add_completed(&mut self, bio: Box<Bio>) {
        self.in_flight -= 1;
        self.bytes -= bio.data.len() as u64;
        let place = bio.cookie as usize;
        debug_assert!(self.completed[place].is_none(), "a bio came home twice: {bio:?}");
        self.completed[place] = Some(bio);
    }

    /// Sends nothing more: what waits comes home as it is.
    pub fn cancel(&mut self) {
        for mut bio in self.waiting.drain(..) {
            bio.end_with(Status::IoErr);
            let place = bio.cookie as usize;
            self.completed[place] = Some(bio);
        }
    }

    /// How many bios are in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// True when all are home.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.waiting.is_empty() && self.in_flight == 0
    }

    /// The bios in the order in which they were given, from an errand that is over.
    ///
    /// # Panics
    /// When it is not over.
    #[must_use]
    pub fn finish(self) -> Batch {
        self.completed.into_iter().map(|bio| bio.expect("all are home")).collect()
    }

    /// What is said when the cores take nothing any more.
    #[must_use]
    pub fn shutdown_error() -> OpenError {
        OpenError::new(errno::ESHUTDOWN, "the program ends")
    }

    /// What is said of a device from which nothing comes home.
    #[must_use]
    pub fn timeout_error() -> OpenError {
        OpenError::new(errno::ETIMEDOUT, "the store does not answer")
    }
}
