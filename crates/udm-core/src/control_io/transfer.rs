//! The state of a run: which bios may be sent next, and which have completed.

use crate::{Batch, Bio, Device, DeviceControlError, Status, errno};

/// Maximum bytes in flight. A longer bio is sent when no other is in flight.
const BYTES_MAX: u64 = 1 << 20;

/// Maximum bios in flight.
const BIOS_MAX: usize = 256;

/// The bios of one [`super::ControlIo::run`]. Its driver has a lane of the device. It submits the
/// bios from [`ControlIoBatch::next`] and passes completed bios to
/// [`ControlIoBatch::add_completed`], until [`ControlIoBatch::is_over`].
pub struct ControlIoBatch {
    /// Bios to be sent, in reverse order.
    waiting: Batch,
    /// Completed bios by index; `None` while a bio waits or is in flight.
    completed: Vec<Option<Box<Bio>>>,
    in_flight: usize,
    bytes: u64,
}

impl ControlIoBatch {
    /// Creates a transfer of `bios` to `device`. Bios that the device cannot accept complete at
    /// once with an error.
    #[must_use]
    pub fn new(device: &dyn Device, bios: Batch) -> ControlIoBatch {
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
        ControlIoBatch { waiting, completed, in_flight: 0, bytes: 0 }
    }

    /// The next bio to send, if one more may be in flight.
    #[expect(clippy::should_implement_trait, reason = "not an iterator: more may follow after None")]
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

    /// Takes a completed bio.
    pub fn add_completed(&mut self, bio: Box<Bio>) {
        self.in_flight -= 1;
        self.bytes -= bio.data.len() as u64;
        let place = bio.cookie as usize;
        debug_assert!(self.completed[place].is_none(), "a bio completed twice: {bio:?}");
        self.completed[place] = Some(bio);
    }

    /// Sends no more bios: waiting bios complete with [`Status::IoErr`].
    pub fn cancel(&mut self) {
        for mut bio in self.waiting.drain(..) {
            bio.end_with(Status::IoErr);
            let place = bio.cookie as usize;
            self.completed[place] = Some(bio);
        }
    }

    /// Number of bios in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// True if all bios have completed.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.waiting.is_empty() && self.in_flight == 0
    }

    /// Returns the bios in their original order.
    ///
    /// # Panics
    /// If the transfer is not over.
    #[must_use]
    pub fn finish(self) -> Batch {
        self.completed.into_iter().map(|bio| bio.expect("all bios have completed")).collect()
    }

    /// Error of a run if the program ends.
    #[must_use]
    pub fn shutdown_error() -> DeviceControlError {
        DeviceControlError::new(errno::ESHUTDOWN, "the program is shutting down")
    }

    /// Error of a run if the device does not answer.
    #[must_use]
    pub fn timeout_error() -> DeviceControlError {
        DeviceControlError::new(errno::ETIMEDOUT, "the store does not answer")
    }
}
