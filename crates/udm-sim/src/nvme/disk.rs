//! The disk of the world. A block is one number, its stamp, repeated over the block: the upper half
//! says which association has written it.

use crate::environment::lock_mutex;
use crate::model::Violation;
use crate::rng::SimRng;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use udm_core::{
    Batch, Bio, Cx, Device, DeviceControlError, DeviceId, Lane, Limits, Nanos, Op, Sectors, Status,
};

/// Bytes of a block.
pub(super) const BLOCK: usize = 512;

/// Stamp number `count` of an association.
pub(super) fn stamp(association: usize, count: u32) -> u64 {
    (association as u64 + 1) << 32 | u64::from(count)
}

/// The association of a stamp; `None` for the first content.
pub(super) fn association_of(stamp: u64) -> Option<usize> {
    (stamp >> 32).checked_sub(1).map(|association| association as usize)
}

/// The bytes of a block with this stamp.
pub(super) fn bytes_of(stamp: u64) -> Vec<u8> {
    stamp.to_le_bytes().repeat(BLOCK / 8)
}

/// The stamp of a block.
pub(super) fn stamp_of(bytes: &[u8]) -> Result<u64, Violation> {
    let first = bytes.first_chunk::<8>().ok_or("a block without bytes")?;
    match bytes.len() == BLOCK && bytes.chunks(8).all(|chunk| chunk == first) {
        true => Ok(u64::from_le_bytes(*first)),
        false => Err("a block has bytes of several writes".into()),
    }
}

/// Content of the disk, and the writes that may not land any more.
pub(super) struct DiskContent {
    pub(super) blocks: Vec<u64>,
    /// Associations of which the target has said that nothing lands any more.
    pub(super) fenced: BTreeSet<usize>,
    /// Stamps that a later, acknowledged write of their host has replaced.
    pub(super) replaced: BTreeSet<u64>,
    /// Requests that are at the disk.
    pub(super) in_flight: usize,
    /// Number of writes that have landed.
    pub(super) landed: u64,
    /// Longest time of a request; most are far shorter.
    pub(super) longest: Nanos,
    pub(super) chance: SimRng,
    pub(super) violation: Option<Violation>,
    pub(super) calm: bool,
}

impl DiskContent {
    pub(super) fn new(blocks: usize, longest: Nanos, chance: SimRng) -> DiskContent {
        DiskContent {
            blocks: vec![0; blocks],
            fenced: BTreeSet::new(),
            replaced: BTreeSet::new(),
            in_flight: 0,
            landed: 0,
            longest,
            chance,
            violation: None,
            calm: false,
        }
    }

    /// Draws when a request lands and when it completes.
    fn draw(&mut self, now: Nanos) -> (Nanos, Nanos) {
        let most = match self.chance.below(8) {
            _ if self.calm => 1000,
            0 => self.longest.0,
            1 | 2 => self.longest.0 / 20,
            _ => 200_000,
        };
        let completes = self.chance.between(1, most.max(2));
        (now + Nanos(self.chance.between(0, completes)), now + Nanos(completes))
    }

    fn land(&mut self, bio: &mut Bio, now: Nanos) {
        let first = bio.sector.0 as usize;
        for block in 0..bio.sectors.0 as usize {
            match bio.op {
                Op::Read => {
                    let stamp = bytes_of(self.blocks[first + block]);
                    bio.data.copy_from_at(block * BLOCK, &stamp);
                }
                Op::Write => {
                    let mut bytes = vec![0; BLOCK];
                    bio.data.copy_to_at(block * BLOCK, &mut bytes);
                    match stamp_of(&bytes) {
                        Ok(stamp) => self.write(first + block, stamp, now),
                        Err(wrong) => _ = self.violation.get_or_insert(wrong),
                    }
                }
                _ => {}
            }
        }
    }

    fn write(&mut self, block: usize, stamp: u64, now: Nanos) {
        self.landed += 1;
        self.blocks[block] = stamp;
        let is_fenced = association_of(stamp).is_some_and(|association| self.fenced.contains(&association));
        if is_fenced || self.replaced.contains(&stamp) {
            let why = if is_fenced { "the target has fenced its association" } else { "it was replaced" };
            let text = format!("write {stamp:#x} lands in block {block} at {} ns, but {why}", now.0);
            self.violation.get_or_insert(text);
        }
    }
}

/// The disk as a device.
pub(super) struct FencedDisk {
    id: DeviceId,
    content: Arc<Mutex<DiskContent>>,
}

impl FencedDisk {
    pub(super) fn new(content: &Arc<Mutex<DiskContent>>) -> FencedDisk {
        FencedDisk { id: DeviceId::new(), content: Arc::clone(content) }
    }
}

impl Device for FencedDisk {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, _: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        Ok(Box::new(FencedDiskLane { content: Arc::clone(&self.content), requests: Vec::new() }))
    }

    fn limits(&self) -> Limits {
        Limits::new(Sectors(lock_mutex(&self.content).blocks.len() as u64))
    }
}

struct DiskRequest {
    bio: Box<Bio>,
    lands: Option<Nanos>,
    completes: Nanos,
}

struct FencedDiskLane {
    content: Arc<Mutex<DiskContent>>,
    requests: Vec<DiskRequest>,
}

impl Lane for FencedDiskLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        let mut content = lock_mutex(&self.content);
        for bio in batch.drain(..) {
            let (lands, completes) = content.draw(cx.now());
            content.in_flight += 1;
            self.requests.push(DiskRequest { bio, lands: Some(lands), completes });
        }
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let now = cx.now();
        let mut content = lock_mutex(&self.content);
        for request in &mut self.requests {
            if request.lands.is_some_and(|at| at <= now) {
                request.lands = None;
                content.land(&mut request.bio, now);
            }
        }
        let is_complete = |request: &mut DiskRequest| request.completes <= now;
        for mut request in self.requests.extract_if(.., is_complete) {
            content.in_flight -= 1;
            request.bio.end_with(Status::Ok);
            done.push(request.bio);
        }
        let next = self.requests.iter().map(|request| request.lands.unwrap_or(request.completes)).min();
        next.into_iter().for_each(|at| cx.wake_at(at));
    }
}
