//! Helpers for the tests of this crate: a core without a ring, and data in pieces.

use udm_core::{Batch, Bio, Buf, CoreId, CoreLaneState, Device, Lane, Nanos, Op, Sector, Sectors, Segments};

/// A core with one lane and a clock that the test sets, for devices that need no ring.
pub(crate) struct SingleLaneTestCore {
    state: CoreLaneState,
    lane: Box<dyn Lane>,
    pub(crate) now: Nanos,
}

impl SingleLaneTestCore {
    pub(crate) fn over(device: &dyn Device) -> SingleLaneTestCore {
        SingleLaneTestCore::one_of(device, 1)
    }

    /// Creates the first of `cores` cores.
    pub(crate) fn one_of(device: &dyn Device, cores: usize) -> SingleLaneTestCore {
        let mut state = CoreLaneState::new(CoreId(0), cores, 1, None);
        let lane = device.open(&mut state.cx(Nanos(1))).unwrap();
        SingleLaneTestCore { state, lane, now: Nanos(1) }
    }

    /// Submits `batch` and returns the time at which the lane wants its next poll.
    pub(crate) fn submit(&mut self, mut batch: Batch) -> Nanos {
        batch.iter_mut().for_each(|bio| bio.start());
        let mut cx = self.state.cx(self.now);
        self.lane.submit(&mut batch, &mut cx);
        assert!(batch.is_empty());
        cx.wake()
    }

    /// Polls once. Returns the completed bios and the time at which the lane wants its next poll.
    pub(crate) fn poll(&mut self) -> (Batch, Nanos) {
        let mut done = Batch::new();
        let mut cx = self.state.cx(self.now);
        self.lane.poll(&mut done, &mut cx);
        done.iter_mut().for_each(|bio| bio.finish());
        (done, cx.wake())
    }

    /// Runs one bio that the device completes at once.
    pub(crate) fn run(&mut self, bio: Box<Bio>) -> Box<Bio> {
        self.submit(vec![bio]);
        self.poll().0.pop().unwrap()
    }
}

/// Returns `len` zeroed bytes in pieces. `cuts` gives the lengths of the first pieces; a length
/// that is too long is skipped. Each piece has its own slab, because pieces of one slab would be
/// joined again.
pub(crate) fn make_zeroed_segments(len: usize, cuts: &[usize]) -> Segments {
    let mut data = Segments::new();
    let mut left = len;
    for &cut in cuts {
        if cut < left {
            data.push(Buf::zeroed(cut));
            left -= cut;
        }
    }
    data.push(Buf::zeroed(left));
    data
}

/// A bio without data.
pub(crate) fn bio_without_data(op: Op, sector: u64, sectors: u64) -> Box<Bio> {
    let mut bio = Bio::new();
    (bio.op, bio.sector, bio.sectors) = (op, Sector(sector), Sectors(sectors));
    bio
}
