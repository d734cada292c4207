//! The io_uring itself: the unsafe part of the runtime.
//!
//! Contract, on which each SAFETY note below relies: an [`RingOpKernelArgs`] is boxed and lives in
//! the ring's table from `push` until its completion was reaped or the ring gave up and leaked it.
//! It owns the file, the bytes and the pointer lists of its submission, and nothing accesses them
//! in between.

use super::op::RingOp;
use io_uring::squeue::Flags;
use io_uring::types::{Fd, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use udm_core::Segments;

/// Number of reads and writes of files that one system call submits. The kernel plugs the block
/// device during the call: the device sees the first request when the last one is prepared.
/// Measured with direct I/O at depth 32: with all 32 in a call, a disk does 0.7 to 0.8 of the
/// requests that it does with 4; with 1 in a call, no more than with 4.
const FILE_BATCH: u32 = 4;

/// How long a new ring waits for locked memory. The kernel returns the memory of a closed ring
/// late, so the limit of a user may be reached for a moment, as when a server is started again.
const MEMORY_WAIT_MAX: Duration = Duration::from_secs(1);
const MEMORY_PAUSE: Duration = Duration::from_millis(10);

/// User data of cancel requests: no operation has this number.
const NOBODY: u64 = u64::MAX;

/// One operation as the kernel sees it.
#[derive(Default)]
pub(super) struct RingOpKernelArgs {
    op: Option<RingOp>,
    iov: Vec<libc::iovec>,
    msg: Option<libc::msghdr>,
}

/// A completion: the entry, and the result of the system call (negative errno).
pub(super) struct Cqe {
    pub(super) user_data: u64,
    pub(super) result: i32,
}

impl RingOpKernelArgs {
    /// Takes the operation and lays out its pointers.
    pub(super) fn fill(&mut self, op: RingOp) {
        self.iov.clear();
        self.msg = None;
        let message = matches!(op, RingOp::Recv { .. } | RingOp::Send { .. });
        if let RingOp::Read { data, .. }
        | RingOp::Write { data, .. }
        | RingOp::Recv { data, .. }
        | RingOp::Send { data, .. }
        | RingOp::Ublk { data, .. } = &op
        {
            self.iov.extend(
                data.ranges()
                    .take(RingOp::MAX_PIECES)
                    .map(|(start, len)| libc::iovec { iov_base: start.cast(), iov_len: len }),
            );
        }
        if message && self.iov.len() != 1 {
            // SAFETY: all zeroes is a valid msghdr: null pointers and zero lengths.
            let mut msg: libc::msghdr = unsafe { std::mem::zeroed() };
            msg.msg_iov = self.iov.as_mut_ptr();
            msg.msg_iovlen = self.iov.len() as _;
            self.msg = Some(msg);
        }
        self.op = Some(op);
    }

    /// Takes the memory out of a completed operation; the entry can be filled again.
    pub(super) fn take_data(&mut self) -> Segments {
        match self.op.take() {
            Some(
                RingOp::Read { data, .. }
                | RingOp::Write { data, .. }
                | RingOp::Recv { data, .. }
                | RingOp::Send { data, .. }
                | RingOp::Ublk { data, .. },
            ) => data,
            _ => Segments::new(),
        }
    }

    /// Moves the operation and its memory to a simulated kernel.
    pub(super) fn lend(&mut self) -> Option<RingOp> {
        self.op.take()
    }

    /// Takes the operation back from a simulated kernel.
    pub(super) fn give_back(&mut self, op: RingOp) {
        self.op = Some(op);
    }

    /// True for a read or write of a file.
    fn is_file_op(&self) -> bool {
        matches!(self.op, Some(RingOp::Read { .. } | RingOp::Write { .. }))
    }

    /// See [`RingOp::is_endless`].
    pub(super) fn is_endless(&self) -> bool {
        self.op.as_ref().is_some_and(RingOp::is_endless)
    }

    /// True for a send, the only operation that can be quick.
    pub(super) fn is_send(&self) -> bool {
        matches!(self.op, Some(RingOp::Send { .. }))
    }

    /// Number of bytes that are passed to the kernel.
    pub(super) fn bytes(&self) -> u32 {
        self.iov.iter().map(|v| v.iov_len as u32).sum()
    }

    /// Builds the submission, with pointers into this entry. A `quick` send does not wait for room,
    /// and posts a completion only if it was short or failed.
    fn build(&mut self, quick: bool) -> squeue::Entry {
        let raw = |fd: &Arc<OwnedFd>| Fd(fd.as_raw_fd());
        let (ptr, len) = match self.iov.first() {
            Some(v) => (v.iov_base.cast::<u8>(), v.iov_len as u32),
            None => (std::ptr::null_mut(), 0),
        };
        let single = self.iov.len() == 1;
        let count = self.iov.len() as u32;
        match self.op.as_ref().expect("an entry is filled before it is pushed") {
            RingOp::Read { fd, offset, cached, .. } => {
                let flags = if *cached { libc::RWF_NOWAIT } else { 0 };
                if single {
                    opcode::Read::new(raw(fd), ptr, len).offset(*offset).rw_flags(flags).build()
                } else {
                    opcode::Readv::new(raw(fd), self.iov.as_ptr(), count)
                        .offset(*offset)
                        .rw_flags(flags)
                        .build()
                }
            }
            RingOp::Write { fd, offset, dsync, .. } => {
                let flags = if *dsync { libc::RWF_DSYNC } else { 0 };
                if single {
                    opcode::Write::new(raw(fd), ptr, len).offset(*offset).rw_flags(flags).build()
                } else {
                    opcode::Writev::new(raw(fd), self.iov.as_ptr(), count)
                        .offset(*offset)
                        .rw_flags(flags)
                        .build()
                }
            }
            RingOp::Fsync { fd, data_only } => {
                let flags = if *data_only { FsyncFlags::DATASYNC } else { FsyncFlags::empty() };
                opcode::Fsync::new(raw(fd)).flags(flags).build()
            }
            RingOp::Fallocate { fd, mode, offset, len } => {
                opcode::Fallocate::new(raw(fd), *len).offset(*offset).mode(*mode).build()
            }
            RingOp::Connect { fd, to } => {
                opcode::Connect::new(raw(fd), to.as_ptr().cast(), to.addr_len()).build()
            }
            RingOp::Recv { fd, .. } => match &mut self.msg {
                None => opcode::Recv::new(raw(fd), ptr, len).build(),
                Some(msg) => opcode::RecvMsg::new(raw(fd), std::ptr::from_mut(msg)).build(),
            },
            RingOp::Send { fd, whole, .. } => {
                let wait = if quick { libc::MSG_DONTWAIT } else { 0 };
                // Without MSG_WAITALL, a short quick send would post no completion.
                let all = if quick || *whole { libc::MSG_WAITALL } else { 0 };
                let flags = libc::MSG_NOSIGNAL | all | wait;
                let sqe = match &self.msg {
                    None => opcode::Send::new(raw(fd), ptr, len).flags(flags).build(),
                    Some(msg) => opcode::SendMsg::new(raw(fd), msg).flags(flags as u32).build(),
                };
                if quick { sqe.flags(Flags::SKIP_SUCCESS) } else { sqe }
            }
            RingOp::Ublk { queue, code, command, .. } => {
                let mut command = *command;
                // The kernel refuses a command without an address.
                let fits = single && len as usize >= queue.io_bytes_max();
                let address = if fits { ptr as u64 } else { 0 };
                command[8..].copy_from_slice(&address.to_ne_bytes());
                opcode::UringCmd16::new(Fd(queue.raw_fd()), *code).cmd(command).build()
            }
        }
    }
}

fn is_out_of_memory(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENOMEM)
}

/// The submission and completion queues.
pub(super) struct Uring {
    ring: IoUring,
    /// The kernel is Linux 6.1 or later.
    modern: bool,
    /// Number of reads and writes of files that were queued since the last system call.
    file_ops: u32,
}

impl Uring {
    /// Creates a ring of `entries` submissions.
    ///
    /// # Errors
    /// The error of the system. ENOMEM only if the user's limit of locked memory is still reached
    /// after [`MEMORY_WAIT_MAX`].
    pub(super) fn new(entries: u32) -> io::Result<Uring> {
        let begun = Instant::now();
        loop {
            match Uring::try_new(entries) {
                Err(e) if is_out_of_memory(&e) && begun.elapsed() < MEMORY_WAIT_MAX => {
                    std::thread::sleep(MEMORY_PAUSE);
                }
                made => return made,
            }
        }
    }

    fn try_new(entries: u32) -> io::Result<Uring> {
        // The kernel processes completions when this thread enters it, instead of interrupting the
        // thread (Linux 6.1). Older kernels, and seccomp filters that know only the first flags,
        // get a plain ring.
        let modern = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_cqsize(entries * 8)
            .build(entries);
        match modern {
            Ok(ring) => Ok(Uring { ring, modern: true, file_ops: 0 }),
            // An older ring needs as much memory.
            Err(e) if is_out_of_memory(&e) => Err(e),
            Err(_) => {
                let ring = IoUring::builder().setup_cqsize(entries * 8).build(entries)?;
                Ok(Uring { ring, modern: false, file_ops: 0 })
            }
        }
    }

    /// True if sends may be quick: the kernel reports how much a send has sent before it would have
    /// to wait (Linux 6.1).
    pub(super) fn supports_quick_send(&self) -> bool {
        self.modern
    }

    /// Registers `file` with the ring. No operation uses it, but the kernel releases it only after
    /// the last operation: `io_ring_exit_work` waits for all of them before `io_ring_ctx_free`.
    ///
    /// # Errors
    /// The error of the system; EBUSY if a file is registered already.
    pub(super) fn register_file(&self, file: &OwnedFd) -> io::Result<()> {
        self.ring.submitter().register_files(&[file.as_raw_fd()])
    }

    /// True if the kernel has all queued submissions, and all its completions are in the queue. A
    /// quick send without a completion has then succeeded.
    pub(super) fn is_flushed(&mut self) -> bool {
        let sq = self.ring.submission();
        sq.is_empty() && !sq.cq_overflow()
    }

    /// Queues `entry`; returns false if the submission queue is full.
    pub(super) fn push(&mut self, entry: &mut RingOpKernelArgs, user_data: u64, quick: bool) -> bool {
        let sqe = entry.build(quick).user_data(user_data);
        // SAFETY: the memory that the submission points to lives in `entry` until it is reaped (see
        // the module's contract).
        let queued = unsafe { self.ring.submission().push(&sqe) }.is_ok();
        self.file_ops += u32::from(queued && entry.is_file_op());
        queued
    }

    /// Queues a cancel of the operation `user_data`; returns false if the submission queue is full.
    /// The operation itself reports the outcome.
    pub(super) fn push_cancel(&mut self, user_data: u64) -> bool {
        let sqe = opcode::AsyncCancel::new(user_data).build().user_data(NOBODY);
        let sqe = if self.modern { sqe.flags(Flags::SKIP_SUCCESS) } else { sqe };
        // SAFETY: the submission points to nothing.
        unsafe { self.ring.submission().push(&sqe) }.is_ok()
    }

    pub(super) fn has_submissions(&mut self) -> bool {
        !self.ring.submission().is_empty()
    }

    /// True if a completion waits in the queue or in the kernel's overflow list, or if the kernel
    /// has deferred work that will post one. [`Uring::submit`] fetches the last two.
    pub(super) fn has_completions(&mut self) -> bool {
        let sq = self.ring.submission();
        let in_kernel = sq.taskrun() || sq.cq_overflow();
        drop(sq);
        in_kernel || !self.ring.completion().is_empty()
    }

    /// Enters the kernel without waiting, if there is a reason to.
    pub(super) fn submit(&mut self) {
        self.submit_file_batches();
        let (pending, work) = {
            let sq = self.ring.submission();
            (sq.len() as u32, sq.taskrun() || sq.cq_overflow())
        };
        if pending == 0 && !work {
            return;
        }
        const GETEVENTS: u32 = 1;
        self.enter(pending, if work { GETEVENTS } else { 0 });
    }

    /// If there are more than [`FILE_BATCH`] reads and writes of files, submits all operations but
    /// the last of them, in batches. The caller's system call submits the others.
    fn submit_file_batches(&mut self) {
        if std::mem::take(&mut self.file_ops) <= FILE_BATCH {
            return;
        }
        let pending = self.ring.submission().len() as u32;
        for _ in 1..pending.div_ceil(FILE_BATCH) {
            self.enter(FILE_BATCH, 0);
        }
    }

    /// Enters the kernel, which takes up to `count` operations.
    fn enter(&mut self, count: u32, flags: u32) {
        // SAFETY: no argument is passed; the entries pushed are valid by `push`.
        let entered = unsafe { self.ring.submitter().enter::<()>(count, 0, flags, None) };
        // After EBUSY or EAGAIN, completions must be reaped first. As after EINTR, the entries stay
        // queued for the next call.
        if let Err(e) = entered {
            debug_assert!(
                matches!(e.raw_os_error(), Some(libc::EBUSY | libc::EAGAIN | libc::EINTR)),
                "io_uring_enter: {e}"
            );
        }
    }

    /// Enters the kernel and sleeps until a completion or the end of `timeout`.
    pub(super) fn wait(&mut self, timeout: Option<Duration>) {
        self.submit_file_batches();
        let slept = match timeout {
            None => self.ring.submit_and_wait(1),
            Some(t) => {
                let ts = Timespec::from(t);
                self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&ts))
            }
        };
        if let Err(e) = slept {
            debug_assert!(
                matches!(e.raw_os_error(), Some(libc::EBUSY | libc::EAGAIN | libc::EINTR | libc::ETIME)),
                "io_uring_enter: {e}"
            );
        }
    }

    /// Appends the completions.
    pub(super) fn completions(&mut self, out: &mut Vec<Cqe>) {
        out.extend(self.ring.completion().map(|c| Cqe { user_data: c.user_data(), result: c.result() }));
    }

    /// Cancels all operations in flight.
    pub(super) fn cancel_all(&mut self) {
        let builder = io_uring::types::CancelBuilder::any();
        // A kernel without this call ends the operations when the ring is closed; the caller waits
        // for a limited time.
        let _ =
            self.ring.submitter().register_sync_cancel(Some(Timespec::from(Duration::from_secs(1))), builder);
    }
}
