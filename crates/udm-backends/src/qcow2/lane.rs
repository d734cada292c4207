//! The data path of a qcow2 image on one core.
//!
//! A request is cut at the extents of the map. Parts with plain data are bios to the lane of their
//! file; their number is bounded by a pool. Zeroes are written by the core, within its budget. A
//! compressed cluster is a job for the thread of the image; the core copies from the reply.

use super::clusters::{ClusterReply, CompressedClusterQueue};
use super::parts::{PartKey, RequestTable};
use crate::read_only::{advance_copies, immediate_status_of_read_only};
use std::collections::VecDeque;
use std::sync::Arc;
use udm_core::{
    Batch, BioOwnerId, BioPool, Cx, Lane, Op, SECTOR_SIZE, SLICE_MAX, Segments, Status, move_batch,
};
use udm_wire::qcow2::{DiskExtent, DiskExtentMap};

/// Maximum number of parts that lanes of files have at a time.
const FILE_PARTS_MAX: usize = 512;

/// Maximum number of compressed clusters in flight: at most 32 MiB of replies.
const CLUSTERS_MAX: usize = 16;

pub(super) struct Qcow2Lane {
    map: Arc<DiskExtentMap>,
    files: Vec<FileOfLane>,
    clusters: Option<CompressedClusterQueue>,
    /// Parts that wait for a cluster: the first byte in it, and the data to fill; by free slot.
    waiting_clusters: Vec<Option<(PartKey, usize, Segments)>>,
    clusters_in_flight: usize,
    replies: Vec<ClusterReply>,
    requests: RequestTable,
    pool: BioPool,
    owner: BioOwnerId,
    /// Parts that the core fills itself.
    fills: VecDeque<MemoryFill>,
    ready: Batch,
}

struct FileOfLane {
    lane: Box<dyn Lane>,
    cluster_bits: u32,
    batch: Batch,
    done: Batch,
}

/// A part that the core fills, from a cluster or with zeroes.
struct MemoryFill {
    key: PartKey,
    data: Segments,
    done: usize,
    /// The cluster, and the byte in it at which the part begins.
    from: Option<(Arc<[u8]>, usize)>,
}

impl Qcow2Lane {
    pub(super) fn new(
        map: Arc<DiskExtentMap>,
        children: Vec<Box<dyn Lane>>,
        cluster_bits: Vec<u32>,
        clusters: Option<CompressedClusterQueue>,
        cx: &mut Cx<'_>,
    ) -> Qcow2Lane {
        let files = children.into_iter().zip(cluster_bits);
        let files = files.map(|(lane, cluster_bits)| FileOfLane {
            lane,
            cluster_bits,
            batch: Batch::new(),
            done: Batch::new(),
        });
        Qcow2Lane {
            map,
            files: files.collect(),
            clusters,
            waiting_clusters: (0..CLUSTERS_MAX).map(|_| None).collect(),
            clusters_in_flight: 0,
            replies: Vec::new(),
            requests: RequestTable::default(),
            pool: BioPool::new(FILE_PARTS_MAX),
            owner: cx.new_owner(),
            fills: VecDeque::new(),
            ready: Batch::new(),
        }
    }

    /// Starts parts of the requests as far as the bounds allow. Each request has a turn, so one
    /// that waits for clusters does not delay the others.
    fn start_parts(&mut self) {
        for _ in 0..self.requests.unfinished.len() {
            let Some(index) = self.requests.unfinished.pop_front() else { break };
            if !self.start_parts_of(index) {
                self.requests.unfinished.push_back(index);
            }
            if self.pool.available() == 0 {
                break;
            }
        }
    }

    /// Starts the parts of one request. Returns false if a bound stopped it.
    fn start_parts_of(&mut self, index: usize) -> bool {
        while let Some(range) = self.requests.next_range(index, &self.map) {
            match range.extent {
                DiskExtent::Zeroes => {
                    let (key, data, _) = self.requests.start_part(index, range.len);
                    self.fills.push_back(MemoryFill { key, data, done: 0, from: None });
                }
                DiskExtent::Plain { file, sector } => {
                    let Some(mut child) = self.pool.get() else { return false };
                    let (key, data, parent) = self.requests.start_part(index, range.len);
                    (child.op, child.flags, child.owner) = (Op::Read, parent.flags, self.owner);
                    (child.sector, child.sectors) = (sector, range.len);
                    (child.cookie, child.started) = (key.to_u64(), parent.started);
                    child.data = data;
                    child.start();
                    self.files[usize::from(file)].batch.push(child);
                }
                DiskExtent::Compressed { file, cluster } => {
                    let Some(slot) = self.waiting_clusters.iter().position(Option::is_none) else {
                        return false;
                    };
                    let size = 1_u64 << self.files[usize::from(file)].cluster_bits;
                    let from = (range.start.0 * SECTOR_SIZE % size) as usize;
                    let (key, data, _) = self.requests.start_part(index, range.len);
                    self.waiting_clusters[slot] = Some((key, from, data));
                    self.clusters_in_flight += 1;
                    let queue = self.clusters.as_ref().expect("an image with compressed clusters");
                    queue.send(file, cluster, slot as u64);
                }
            }
        }
        true
    }

    /// Submits the parts for files. Returns true if there were any.
    fn submit_parts(&mut self, cx: &mut Cx<'_>) -> bool {
        let mut submitted = false;
        for file in &mut self.files {
            if !file.batch.is_empty() {
                file.lane.submit(&mut file.batch, cx);
                submitted = true;
            }
        }
        submitted
    }

    fn poll_files(&mut self, cx: &mut Cx<'_>) {
        for index in 0..self.files.len() {
            let file = &mut self.files[index];
            file.lane.poll(&mut file.done, cx);
            let mut done = std::mem::take(&mut file.done);
            for mut child in done.drain(..) {
                child.finish();
                let (data, status) = (std::mem::take(&mut child.data), child.status);
                let key = PartKey::from_u64(child.cookie);
                self.pool.put(child);
                self.end_part(key, data, status);
            }
            self.files[index].done = done;
        }
    }

    fn take_clusters(&mut self, cx: &mut Cx<'_>) {
        let Some(queue) = &mut self.clusters else { return };
        if self.clusters_in_flight == 0 {
            return;
        }
        queue.take_and_wait(&mut self.replies, cx);
        let mut replies = std::mem::take(&mut self.replies);
        for reply in replies.drain(..) {
            self.clusters_in_flight -= 1;
            let waiting = self.waiting_clusters[reply.key as usize].take();
            let (key, from, data) = waiting.expect("a reply without a job");
            match reply.data {
                Ok(cluster) => {
                    let from = Some((cluster, from));
                    self.fills.push_back(MemoryFill { key, data, done: 0, from });
                }
                Err(status) => self.end_part(key, data, status),
            }
        }
        self.replies = replies;
    }

    /// Fills parts within the budget of the turn, and at least one piece.
    fn run_fills(&mut self, cx: &mut Cx<'_>) {
        let (requests, ready) = (&mut self.requests, &mut self.ready);
        advance_copies(&mut self.fills, cx, |mut fill| {
            let len = (fill.data.len() - fill.done).min(SLICE_MAX as usize);
            fill.advance(len);
            if fill.done < fill.data.len() {
                return (len as u64, Some(fill));
            }
            ready.extend(requests.end_part(fill.key, fill.data, Status::Ok));
            (len as u64, None)
        });
    }

    fn end_part(&mut self, key: PartKey, data: Segments, status: Status) {
        self.ready.extend(self.requests.end_part(key, data, status));
    }
}

impl MemoryFill {
    /// Fills the next `len` bytes.
    fn advance(&mut self, len: usize) {
        match &self.from {
            None => self.data.fill_at(self.done, len, 0),
            Some((cluster, from)) => {
                let at = from + self.done;
                self.data.copy_from_at(self.done, &cluster[at..at + len]);
            }
        }
        self.done += len;
    }
}

impl Lane for Qcow2Lane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        for mut bio in batch.drain(..) {
            match immediate_status_of_read_only(&bio, self.map.size()) {
                Some(status) => {
                    bio.end_with(status);
                    self.ready.push(bio);
                }
                None => self.requests.add(bio),
            }
        }
        self.start_parts();
        self.submit_parts(cx);
        self.run_fills(cx);
        if !self.ready.is_empty() {
            cx.wake_now();
        }
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        self.take_clusters(cx);
        self.poll_files(cx);
        if !self.requests.unfinished.is_empty() {
            let waits = self.clusters_in_flight > 0;
            self.start_parts();
            // Parts that were submitted after the poll of their lane may have completed at once.
            // Without jobs before, the lane does not wait for replies yet.
            if self.submit_parts(cx) || !waits && self.clusters_in_flight > 0 {
                cx.wake_now();
            }
        }
        self.run_fills(cx);
        move_batch(&mut self.ready, done);
    }
}
