//! A virtual machine: the front end and the driver of the crate `virtio-driver`, with three rings.
//!
//! The data of requests is in a memfd. The driver passes the addresses of data on and never uses
//! them, so `addresses` only names the memory: nothing reads or writes it.

use super::HANG;
use crate::{TestRequest, TestRequestResult, fill_buffer_with_stamps};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use udm_core::{BioFlags, Op, SECTOR_SIZE};
use virtio_driver::{
    EventFd, QueueNotifier, VhostUser, VirtioBlkConfig, VirtioBlkFeatureFlags, VirtioBlkQueue,
    VirtioBlkTransport, VirtioFeatureFlags,
};

/// Rings of a machine.
pub(super) const RINGS: usize = 3;

/// Entries of a ring, and the most that a request needs: header, data and status.
const RING_SIZE: u16 = 128;
const CHAIN_MAX: usize = 3;

/// Bytes of a region of memory. The regions have adjacent addresses, so a buffer that crosses a
/// border is in several pieces.
const REGION: usize = 1 << 20;

/// Bytes of data of a ring: twice the longest request of a case.
const RING_DATA: usize = 4 * REGION;

pub(super) struct VirtioTestMachine {
    /// Dropped before the transport, which has their memory.
    pub(super) rings: Vec<TestRing>,
    transport: Box<VirtioBlkTransport>,
}

/// A ring, with its part of the data.
pub(super) struct TestRing {
    queue: VirtioBlkQueue<'static, u64>,
    kick: Box<dyn QueueNotifier>,
    call: Arc<EventFd>,
    data: File,
    /// Offset of the part of this ring in `data`.
    start: u64,
    addresses: Vec<u8>,
    /// Bytes of the part that requests in the ring use.
    used: usize,
    /// Requests for which the ring has no room yet.
    waiting: VecDeque<(u64, TestRequest)>,
    pending: BTreeMap<u64, PendingRequest>,
    answers: BTreeMap<u64, TestRequestResult>,
    given: u64,
    collected: u64,
}

/// A request in the ring.
struct PendingRequest {
    request: TestRequest,
    /// Offset of its data in the part of the ring.
    at: usize,
    /// A flush follows the request, or the request is one.
    is_last_step: bool,
}

impl VirtioTestMachine {
    /// Connects to the server at `path`. The driver announces requests by event indices or flags,
    /// in split or packed rings.
    pub(super) fn new(path: &Path, has_event_index: bool, is_packed: bool) -> VirtioTestMachine {
        let mut features = VirtioFeatureFlags::VERSION_1;
        features.set(VirtioFeatureFlags::RING_EVENT_IDX, has_event_index);
        features.set(VirtioFeatureFlags::RING_PACKED, is_packed);
        let blk = VirtioBlkFeatureFlags::BLK_SIZE
            | VirtioBlkFeatureFlags::RO
            | VirtioBlkFeatureFlags::FLUSH
            | VirtioBlkFeatureFlags::MQ
            | VirtioBlkFeatureFlags::DISCARD
            | VirtioBlkFeatureFlags::WRITE_ZEROES;
        let path = path.to_str().expect("a path of text");
        let transport = VhostUser::new(path, features.bits() | blk.bits()).expect("a server");
        let mut transport: Box<VirtioBlkTransport> = Box::new(transport);
        let queues = VirtioBlkQueue::setup_queues(&mut *transport, RINGS, RING_SIZE).expect("three rings");
        let data: File = memfd_create("machine", MemfdFlags::CLOEXEC).expect("memory").into();
        data.set_len((RINGS * RING_DATA) as u64).expect("memory");
        let mut rings = Vec::new();
        for (index, mut queue) in queues.into_iter().enumerate() {
            queue.set_used_notif_enabled(true);
            let addresses = vec![0; RING_DATA];
            let start = index * RING_DATA;
            for at in (0..RING_DATA).step_by(REGION) {
                let address = addresses.as_ptr().addr() + at;
                let mapped = transport.map_mem_region(address, REGION, data.as_raw_fd(), (start + at) as i64);
                mapped.expect("a region");
            }
            rings.push(TestRing {
                queue,
                kick: transport.get_submission_notifier(index),
                call: transport.get_completion_fd(index),
                data: data.try_clone().expect("a descriptor"),
                start: start as u64,
                addresses,
                used: 0,
                waiting: VecDeque::new(),
                pending: BTreeMap::new(),
                answers: BTreeMap::new(),
                given: 0,
                collected: 0,
            });
        }
        VirtioTestMachine { rings, transport }
    }

    /// The configuration of the disk, and the features in use.
    pub(super) fn config(&self) -> (VirtioBlkConfig, VirtioBlkFeatureFlags) {
        let features = VirtioBlkFeatureFlags::from_bits_truncate(self.transport.get_features());
        (self.transport.get_config().expect("a configuration"), features)
    }
}

impl TestRing {
    pub(super) fn submit(&mut self, requests: Vec<TestRequest>) {
        for request in requests {
            self.waiting.push_back((self.given, request));
            self.given += 1;
        }
        self.step();
    }

    pub(super) fn in_flight(&self) -> usize {
        (self.given - self.collected) as usize - self.answers.len()
    }

    /// Takes completed requests, and gives the ring those for which it has room.
    pub(super) fn step(&mut self) {
        let completed: Vec<_> = self.queue.completions().collect();
        let mut adds = false;
        for done in completed {
            adds |= self.complete(done.context, -done.ret);
        }
        while let Some((tag, request)) = self.waiting.pop_front() {
            if let Some(request) = self.add(tag, request) {
                self.waiting.push_front((tag, request));
                break;
            }
            adds = true;
        }
        if adds && self.queue.avail_notif_needed() {
            self.kick.notify().expect("a notification");
        }
    }

    /// Handles the end of a request or of the flush after it. Returns true if it added the flush.
    fn complete(&mut self, tag: u64, errno: i32) -> bool {
        let pending = self.pending.get_mut(&tag).expect("a request in flight");
        if errno == 0 && !std::mem::replace(&mut pending.is_last_step, true) {
            // As the kernel does it: virtio has no FUA.
            self.queue.flush(tag).expect("room for a flush");
            return true;
        }
        let PendingRequest { request, at, .. } = self.pending.remove(&tag).expect("a request in flight");
        let mut data = vec![0; if request.op == Op::Read && errno == 0 { request.data_len() } else { 0 }];
        self.data.read_exact_at(&mut data, self.start + at as u64).expect("data");
        if self.pending.is_empty() {
            self.used = 0;
        }
        assert!(self.answers.insert(tag, TestRequestResult { errno, data }).is_none(), "answered twice");
        false
    }

    /// Adds a request to the ring. Returns it if there is no room.
    fn add(&mut self, tag: u64, request: TestRequest) -> Option<TestRequest> {
        let len = request.data_len();
        let mut at = self.used.next_multiple_of(SECTOR_SIZE as usize);
        if let Some(cut) = request.cuts.first() {
            // The first piece ends at a border.
            at = (at + cut).next_multiple_of(REGION) - cut;
        }
        let is_full = (self.pending.len() + 1) * CHAIN_MAX > usize::from(RING_SIZE);
        if is_full || at + len > RING_DATA {
            assert!(!self.pending.is_empty(), "{request:?} is too long for a machine");
            return Some(request);
        }
        self.used = at + len;
        let offset = request.sector.checked_mul(SECTOR_SIZE).unwrap_or(u64::MAX - (SECTOR_SIZE - 1));
        // A read that does nothing must not find the data of an earlier one.
        let mut bytes = vec![0xee; len];
        if request.op == Op::Write {
            fill_buffer_with_stamps(offset, request.generation, &mut bytes);
        }
        self.data.write_all_at(&bytes, self.start + at as u64).expect("memory");
        let (queue, addresses) = (&mut self.queue, &mut self.addresses[at..at + len]);
        let range = request.sectors * SECTOR_SIZE;
        let added = match request.op {
            Op::Read => queue.read(offset, addresses, tag),
            Op::Write => queue.write(offset, addresses, tag),
            Op::Flush => queue.flush(tag),
            Op::Discard => queue.discard(offset, range, tag),
            Op::WriteZeroes => {
                queue.write_zeroes(offset, range, !request.flags.contains(BioFlags::NOUNMAP), tag)
            }
        };
        added.expect("room in the ring");
        let is_last_step = !(request.op.is_write() && request.flags.contains(BioFlags::FUA));
        self.pending.insert(tag, PendingRequest { request, at, is_last_step });
        None
    }

    /// Waits for all requests, by notifications alone.
    pub(super) fn collect(&mut self) -> Vec<TestRequestResult> {
        loop {
            self.step();
            if self.in_flight() == 0 {
                break;
            }
            let mut fds = [PollFd::new(&*self.call, PollFlags::IN)];
            let limit = Timespec { tv_sec: HANG.as_secs() as i64, tv_nsec: 0 };
            let count = poll(&mut fds, Some(&limit)).expect("a wait");
            assert_eq!(count, 1, "hung: {} requests, and no notification", self.in_flight());
            self.call.read().expect("a notification");
        }
        self.collected = self.given;
        std::mem::take(&mut self.answers).into_values().collect()
    }
}
