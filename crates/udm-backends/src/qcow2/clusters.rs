//! Compressed clusters: a thread per image reads and inflates them, with a small cache.

use super::image_bytes::ImageBytes;
use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::inflate_flags::TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
use miniz_oxide::inflate::core::{DecompressorOxide, decompress};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use udm_core::{Cx, ReplyInbox, ReplySender, Status};
use udm_wire::qcow2::CompressedCluster;

/// Inflated bytes in the cache of an image, and clusters in it.
const CACHE_BYTES: usize = 8 << 20;
const CACHE_CLUSTERS_MAX: usize = 256;

/// A file with compressed clusters.
pub(super) struct ClusterFile {
    pub(super) bytes: Arc<dyn ImageBytes>,
    pub(super) name: String,
    pub(super) cluster_bits: u32,
}

/// The thread of an image. It ends when this and all lanes are dropped.
pub(super) struct ClusterReader(Sender<CompressedClusterRead>);

/// The access of a lane to the thread.
pub(super) struct CompressedClusterQueue {
    jobs: Sender<CompressedClusterRead>,
    inbox: ReplyInbox<ClusterReply>,
}

/// An inflated cluster, or the status of the failure.
pub(super) struct ClusterReply {
    /// As in [`CompressedClusterQueue::send`].
    pub(super) key: u64,
    /// All bytes of the cluster.
    pub(super) data: Result<Arc<[u8]>, Status>,
}

/// A cluster to read. Sends its reply when it is dropped, so each job is answered once.
struct CompressedClusterRead {
    file: u8,
    cluster: CompressedCluster,
    to: ReplySender<ClusterReply>,
    key: u64,
    result: Result<Arc<[u8]>, Status>,
}

impl Drop for CompressedClusterRead {
    fn drop(&mut self) {
        let data = std::mem::replace(&mut self.result, Err(Status::IoErr));
        self.to.send(ClusterReply { key: self.key, data });
    }
}

impl ClusterReader {
    /// Starts the thread for the files of an image.
    pub(super) fn start(files: Vec<ClusterFile>) -> io::Result<ClusterReader> {
        let (sender, jobs) = channel();
        let thread = ClusterThread { files, cache: VecDeque::new(), cached: 0, has_warned: false };
        thread::Builder::new().name("udm-qcow2".into()).spawn(move || thread.run(&jobs))?;
        Ok(ClusterReader(sender))
    }

    /// Opens the access of the lane that opens in this turn.
    pub(super) fn open(&self, cx: &mut Cx<'_>) -> CompressedClusterQueue {
        CompressedClusterQueue { jobs: self.0.clone(), inbox: ReplyInbox::open(cx) }
    }
}

impl CompressedClusterQueue {
    /// Asks for a cluster of file number `file`. The reply carries `key`.
    pub(super) fn send(&self, file: u8, cluster: CompressedCluster, key: u64) {
        let (to, result) = (self.inbox.sender(), Err(Status::IoErr));
        // If the thread has ended, the drop of the job answers it.
        let _ = self.jobs.send(CompressedClusterRead { file, cluster, to, key, result });
    }

    /// As [`ReplyInbox::take_and_wait`].
    pub(super) fn take_and_wait(&mut self, out: &mut Vec<ClusterReply>, cx: &mut Cx<'_>) {
        self.inbox.take_and_wait(out, cx);
    }
}

struct ClusterThread {
    files: Vec<ClusterFile>,
    /// The clusters used last, the latest at the end.
    cache: VecDeque<(u8, CompressedCluster, Arc<[u8]>)>,
    /// Bytes in the cache.
    cached: usize,
    has_warned: bool,
}

impl ClusterThread {
    fn run(mut self, jobs: &Receiver<CompressedClusterRead>) {
        while let Ok(mut job) = jobs.recv() {
            job.result = self.read(job.file, job.cluster);
        }
    }

    fn read(&mut self, file: u8, cluster: CompressedCluster) -> Result<Arc<[u8]>, Status> {
        let known = self.cache.iter().rposition(|(f, c, _)| (*f, *c) == (file, cluster));
        if let Some(found) = known.and_then(|at| self.cache.remove(at)) {
            let data = Arc::clone(&found.2);
            self.cache.push_back(found);
            return Ok(data);
        }
        let source = &self.files[usize::from(file)];
        let data = match read_cluster(&*source.bytes, source.cluster_bits, cluster) {
            Ok(data) => data,
            Err(error) => {
                if !self.has_warned {
                    self.has_warned = true;
                    let (name, offset) = (&source.name, cluster.range(source.cluster_bits).0);
                    tracing::warn!("{name}: the compressed cluster at byte {offset} can't be read: {error}");
                }
                let is_damaged = error.kind() == io::ErrorKind::InvalidData;
                return Err(if is_damaged { Status::Medium } else { Status::IoErr });
            }
        };
        self.cached += data.len();
        self.cache.push_back((file, cluster, Arc::clone(&data)));
        while self.cached > CACHE_BYTES || self.cache.len() > CACHE_CLUSTERS_MAX {
            let Some((_, _, oldest)) = self.cache.pop_front() else { break };
            self.cached -= oldest.len();
        }
        Ok(data)
    }
}

/// Reads and inflates one cluster: deflate data without a header (RFC 1951).
fn read_cluster(
    image: &dyn ImageBytes,
    cluster_bits: u32,
    cluster: CompressedCluster,
) -> io::Result<Arc<[u8]>> {
    let (offset, len) = cluster.range(cluster_bits);
    let mut input = vec![0; len];
    let mut have = 0;
    // The length is rounded up to sectors and may exceed the end of the file.
    while have < len {
        match image.read_at(&mut input[have..], offset + have as u64) {
            Ok(0) => break,
            Ok(n) => have += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    inflate(&input[..have], 1 << cluster_bits)
}

/// Inflates `input` to exactly `len` bytes. The input may have more bytes after its end.
fn inflate(input: &[u8], len: usize) -> io::Result<Arc<[u8]>> {
    let mut out = vec![0; len];
    let flags = TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
    let (status, _, written) = decompress(&mut DecompressorOxide::new(), input, &mut out, 0, flags);
    match status {
        TINFLStatus::Done | TINFLStatus::HasMoreOutput if written == len => Ok(out.into()),
        _ => {
            let text = format!("{written} of {len} bytes, {status:?}");
            Err(io::Error::new(io::ErrorKind::InvalidData, text))
        }
    }
}
