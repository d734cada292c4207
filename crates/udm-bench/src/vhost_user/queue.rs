//! One queue of a vhost-user disk, with a buffer in shared memory for each request.

use super::poll_for;
use crate::connection::{ConnectionRequest, RequestConnection, WAIT};
use crate::load::FioLoadOptions;
use anyhow::{Context, Result, bail, ensure};
use memmap2::MmapMut;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;
use udm_core::Op;
use virtio_driver::{EventFd, QueueNotifier, VirtioBlkQueue, VirtioBlkTransport};

/// Descriptors of a request: header, data, status.
const DESCRIPTORS: u32 = 3;

/// The most entries of a ring that servers accept (QEMU's limit).
const RING_SIZE_MAX: u32 = 1024;

/// The size of a ring that holds `depth` requests.
///
/// # Errors
/// No ring is that long.
pub fn queue_size_for_depth(depth: u32) -> Result<u16> {
    let entries = u64::from(depth * DESCRIPTORS).next_power_of_two();
    ensure!(
        entries <= RING_SIZE_MAX.into(),
        "iodepth={depth}: at most {} over vhost-user",
        RING_SIZE_MAX / DESCRIPTORS
    );
    Ok(entries as u16)
}

/// A queue and the buffers of its requests.
pub struct VirtioBlkConnection {
    queue: VirtioBlkQueue<'static, u64>,
    kick: Box<dyn QueueNotifier>,
    call: Arc<EventFd>,
    buffers: MmapMut,
    /// The file of `buffers`.
    _memfd: OwnedFd,
    /// Bytes per buffer.
    block: usize,
    /// Requests have been added since the last flush.
    added: bool,
    poll: bool,
}

impl VirtioBlkConnection {
    /// Creates the connection of job number `job`. Writes carry `payload`. `transport` must live
    /// longer than the connection. The connection may `poll` instead of sleeping.
    ///
    /// # Errors
    /// The server refuses the memory, and errors of the system.
    #[expect(unsafe_code, reason = "the server needs the descriptor of the mapped file")]
    pub fn new(
        transport: &mut VirtioBlkTransport,
        job: usize,
        queue: VirtioBlkQueue<'static, u64>,
        load: &FioLoadOptions,
        payload: &[u8],
        poll: bool,
    ) -> Result<VirtioBlkConnection> {
        let block = load.block_bytes() as usize;
        let len = (block * load.iodepth as usize).next_multiple_of(4096);
        let memfd = memfd_create("udm-bench", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&memfd, len as u64)?;
        fcntl_add_seals(&memfd, SealFlags::SHRINK)?;
        // SAFETY: the file is this connection's own and cannot shrink. The server changes a buffer
        // only while its request is in flight; meanwhile this connection does not access it.
        let mut buffers = unsafe { MmapMut::map_mut(memfd.as_raw_fd()) }?;
        for buffer in buffers.chunks_exact_mut(block) {
            // Also touches each page, so that no fault is measured.
            let filled = payload.len().min(block);
            buffer[..filled].copy_from_slice(&payload[..filled]);
            buffer[filled..].fill(0);
        }
        transport
            .map_mem_region(buffers.as_ptr() as usize, len, memfd.as_raw_fd(), 0)
            .context("the server refuses the memory of the requests")?;
        let kick = transport.get_submission_notifier(job);
        let call = transport.get_completion_fd(job);
        Ok(VirtioBlkConnection { queue, kick, call, buffers, _memfd: memfd, block, added: false, poll })
    }

    /// Calls `done` for each completed request. Returns false if there is none.
    fn reap(&mut self, done: &mut impl FnMut(u64, i32)) -> bool {
        let mut some = false;
        for completion in self.queue.completions() {
            done(completion.context, -completion.ret);
            some = true;
        }
        some
    }

    /// Sleeps until the server notifies of completions, at most for `most`.
    fn sleep(&self, most: Duration) -> Result<()> {
        let mut fds = [PollFd::new(&*self.call, PollFlags::IN)];
        let most = Timespec { tv_sec: 0, tv_nsec: most.subsec_nanos().into() };
        match poll(&mut fds, Some(&most)) {
            Ok(0) | Err(Errno::INTR) => Ok(()),
            Ok(_) => self.call.read().map(drop).context("read the call descriptor"),
            Err(error) => Err(error).context("poll"),
        }
    }
}

impl RequestConnection for VirtioBlkConnection {
    fn has_room(&self) -> bool {
        true
    }

    fn put(&mut self, request: ConnectionRequest) -> Result<()> {
        let ConnectionRequest { op, cookie, offset, len } = request;
        let begin = cookie as usize * self.block;
        let buffer = &mut self.buffers[begin..begin + (len as usize).min(self.block)];
        match op {
            Op::Read => self.queue.read(offset, buffer, cookie),
            Op::Write => self.queue.write(offset, buffer, cookie),
            Op::Discard => self.queue.discard(offset, len.into(), cookie),
            op => bail!("{op:?}: not over vhost-user"),
        }?;
        self.added = true;
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        if std::mem::take(&mut self.added) && self.queue.avail_notif_needed() {
            self.kick.notify().context("write the kick descriptor")?;
        }
        Ok(())
    }

    fn replies(
        &mut self,
        most: Option<Duration>,
        _: impl Fn(u64) -> Option<(Op, u32)>,
        mut done: impl FnMut(u64, i32),
    ) -> Result<()> {
        if self.reap(&mut done) {
            return Ok(());
        }
        if self.poll {
            return poll_for(most, || self.reap(&mut done));
        }
        self.queue.set_used_notif_enabled(true);
        if !self.queue.completions().has_next() {
            self.sleep(most.map_or(WAIT, |most| most.min(WAIT)))?;
        }
        self.queue.set_used_notif_enabled(false);
        self.reap(&mut done);
        Ok(())
    }
}
