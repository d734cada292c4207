//! A well-behaved caller of one lane: it turns requests into bios and checks each completed bio.
//!
//! The rule ([`udm_core::Bio`]): each bio completes exactly once. All of its fields except the
//! status and the bytes of a read are as submitted, on success and on error. Its memory is complete
//! and in order.

use crate::{TestRequest, TestRequestResult, fill_buffer_with_stamps};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::collections::HashMap;
use std::sync::Arc;
use udm_core::{
    Batch, Bio, BioFlags, BioOwnerId, Buf, Cx, Device, DeviceControlError, Lane, Nanos, Op, OwnWork,
    SECTOR_SIZE, Sector, Sectors, Segments, SharedMemoryMap, SharedRange,
};

/// The content of read buffers before the read.
const DIRT: u8 = 0xee;

/// Added to cookies, to check that all 64 bits are kept.
const COOKIES: u64 = 0xc001_0000_0000_0000;

/// A lane and its requests in flight.
pub struct LaneDriver {
    lane: Box<dyn Lane>,
    owner: BioOwnerId,
    batch: Batch,
    done: Batch,
    sent: HashMap<u64, SubmittedBioState>,
    next: u64,
    foreign: bool,
}

/// The submitted state of a bio.
struct SubmittedBioState {
    op: Op,
    flags: BioFlags,
    sector: Sector,
    sectors: Sectors,
    started: Nanos,
    memory: Vec<(usize, usize)>,
    bytes: Vec<u8>,
}

impl LaneDriver {
    /// Opens the lane of `device`. If `foreign` is set, the memory of requests is shared by a
    /// memfd.
    ///
    /// # Errors
    /// The error of the device.
    pub fn open(
        device: &Arc<dyn Device>,
        foreign: bool,
        cx: &mut Cx<'_>,
    ) -> Result<LaneDriver, DeviceControlError> {
        let lane = device.open(cx)?;
        let (batch, done) = (Batch::new(), Batch::new());
        Ok(LaneDriver { lane, owner: cx.new_owner(), batch, done, sent: HashMap::new(), next: 0, foreign })
    }

    /// Number of requests in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.sent.len()
    }

    /// Whether the lane has required work of its own.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.lane.own_work() == OwnWork::Required
    }

    /// Adds requests to the next batch. Their tags count from 0 over the life of the driver.
    pub fn give(&mut self, requests: Vec<TestRequest>, now: Nanos) {
        for request in requests {
            let mut bio = Bio::new();
            bio.op = request.op;
            bio.flags = request.flags;
            bio.owner = self.owner;
            bio.sector = Sector(request.sector);
            bio.sectors = Sectors(request.sectors);
            bio.cookie = COOKIES | self.next;
            bio.started = now;
            bio.data = if self.foreign {
                allocate_request_memfd(&request)
            } else {
                allocate_request_memory(&request)
            };
            let sent = SubmittedBioState {
                op: bio.op,
                flags: bio.flags,
                sector: bio.sector,
                sectors: bio.sectors,
                started: now,
                memory: list_data_address_ranges(&bio.data),
                bytes: if bio.op == Op::Write { copy_segments_to_vec(&bio.data) } else { Vec::new() },
            };
            self.sent.insert(bio.cookie, sent);
            self.next += 1;
            bio.start();
            self.batch.push(bio);
        }
    }

    /// Submits the batch and polls once. Returns whether a request moved. Appends answers with
    /// their tags.
    pub fn turn(&mut self, answers: &mut Vec<(u64, TestRequestResult)>, cx: &mut Cx<'_>) -> bool {
        let moved = !self.batch.is_empty();
        if moved {
            self.lane.submit(&mut self.batch, cx);
            assert!(self.batch.is_empty(), "submit left bios in the batch");
        }
        let mut done = std::mem::take(&mut self.done);
        self.lane.poll(&mut done, cx);
        let came = !done.is_empty();
        for mut bio in done.drain(..) {
            bio.finish();
            answers.push(self.home(&bio));
        }
        self.done = done;
        moved || came
    }

    /// Checks a completed bio.
    fn home(&mut self, bio: &Bio) -> (u64, TestRequestResult) {
        let Some(sent) = self.sent.remove(&bio.cookie) else {
            panic!("a bio that is not in flight came back, or its cookie changed: {bio:?}");
        };
        let what = format!("{:?} at {} +{}, {}", sent.op, sent.sector, sent.sectors, bio.status);
        assert_eq!(bio.op, sent.op, "{what}: op");
        assert_eq!(bio.flags, sent.flags, "{what}: flags");
        assert_eq!(bio.owner, self.owner, "{what}: owner");
        assert_eq!((bio.sector, bio.sectors), (sent.sector, sent.sectors), "{what}: range");
        assert_eq!(bio.started, sent.started, "{what}: started");
        assert!(
            list_data_address_ranges(&bio.data) == sent.memory,
            "{what}: its memory came back in another order or shape"
        );
        if sent.op == Op::Write {
            assert!(copy_segments_to_vec(&bio.data) == sent.bytes, "{what}: the data of a write was changed");
        }
        let errno = bio.status.errno();
        let data =
            if errno == 0 && bio.op == Op::Read { copy_segments_to_vec(&bio.data) } else { Vec::new() };
        (bio.cookie - COOKIES, TestRequestResult { errno, data })
    }
}

/// The memory of a request: its stamps for a write, [`DIRT`] for a read.
fn allocate_request_memory(request: &TestRequest) -> Segments {
    let mut data = Segments::new();
    let mut left = request.data_len();
    for &cut in request.cuts.iter().filter(|&&cut| cut > 0) {
        if cut < left {
            data.push(allocate_misaligned_buf(cut));
            left -= cut;
        }
    }
    if left > 0 {
        data.push(if data.is_empty() { Buf::zeroed(left) } else { allocate_misaligned_buf(left) });
    }
    fill_request_data(request, &mut data);
    data
}

/// The memory of a request in a memfd, with the same content.
fn allocate_request_memfd(request: &TestRequest) -> Segments {
    let mut data = Segments::new();
    let len = request.data_len();
    if len == 0 {
        return data;
    }
    // Space for pieces at odd addresses that are not adjacent.
    let room = (len + 16 * (request.cuts.len() + 2)).next_multiple_of(4096);
    let memfd =
        memfd_create("udm-conformance", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).expect("a memfd");
    ftruncate(&memfd, room as u64).expect("a memfd of that length");
    fcntl_add_seals(&memfd, SealFlags::SHRINK).expect("a seal");
    let map = Arc::new(SharedMemoryMap::of_memfd(&memfd, room).expect("sealed memory"));
    let (mut left, mut at) = (len, 0);
    for &cut in request.cuts.iter().filter(|&&cut| cut > 0) {
        if cut < left {
            data.push_shared(SharedRange::new(&map, at + 3, cut).expect("there is room"));
            at += cut + 5;
            left -= cut;
        }
    }
    let at = if data.is_empty() { 0 } else { at + 3 };
    data.push_shared(SharedRange::new(&map, at, left).expect("there is room"));
    fill_request_data(request, &mut data);
    data
}

fn fill_request_data(request: &TestRequest, data: &mut Segments) {
    if request.op == Op::Write {
        let mut bytes = vec![0; request.data_len()];
        fill_buffer_with_stamps(request.sector.wrapping_mul(SECTOR_SIZE), request.generation, &mut bytes);
        data.copy_from(&bytes);
    } else {
        data.fill(DIRT);
    }
}

/// A buffer of `len` bytes at an odd address, in its own slab, so that no pieces are adjacent.
fn allocate_misaligned_buf(len: usize) -> Buf {
    let mut buf = Buf::zeroed(len + 3);
    drop(buf.split_to(3));
    buf
}

/// Addresses and lengths of the data; adjacent ranges count as one.
fn list_data_address_ranges(data: &Segments) -> Vec<(usize, usize)> {
    let mut places: Vec<(usize, usize)> = Vec::new();
    for (start, bytes) in data.ranges().filter(|(_, bytes)| *bytes > 0) {
        match places.last_mut() {
            Some((addr, len)) if *addr + *len == start.addr() => *len += bytes,
            _ => places.push((start.addr(), bytes)),
        }
    }
    places
}

fn copy_segments_to_vec(data: &Segments) -> Vec<u8> {
    let mut bytes = vec![0; data.len()];
    data.copy_to(&mut bytes);
    bytes
}
