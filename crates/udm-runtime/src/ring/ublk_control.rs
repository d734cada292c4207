//! Control commands of the kernel's ublk driver: 80-byte io_uring commands to `/dev/ublk-control`.
//!
//! They block, some for a long time, and need a ring with entries of 128 bytes. So each command has
//! a thread and a small ring of its own, both for this command only: the kernel's worker of a ring
//! lives as long as its thread, and would wake up every 5 s. Every command has a time limit. If the
//! kernel does not answer within it, the buffer is leaked, because the kernel may still write
//! there.

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

/// The device for control commands.
const PATH: &str = "/dev/ublk-control";

/// Bytes of a command (`struct ublksrv_ctrl_cmd`), and the offsets of the length and the address of
/// its buffer.
const COMMAND: usize = 32;
const LENGTH: usize = 6;
const ADDRESS: usize = 8;

/// The last command whose buffer is all the memory that the kernel uses. Later ones register memory
/// of the process.
const LAST: u32 = 0x17;

/// A connection to the ublk driver.
pub struct UblkControl {
    file: Arc<OwnedFd>,
}

impl UblkControl {
    /// Opens `/dev/ublk-control`.
    ///
    /// # Errors
    /// ENOENT if the driver is not loaded, EACCES without permission.
    pub fn open() -> io::Result<UblkControl> {
        let file = open(PATH, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        Ok(UblkControl { file: Arc::new(file) })
    }

    /// Executes the command `code` with the 32 bytes `command`, and waits at most `limit`. The
    /// kernel reads and writes `buffer` (at most 65,535 bytes; empty if the command has none), and
    /// it is returned. The length and address in `command` are set here.
    ///
    /// # Errors
    /// The kernel's error; `TimedOut` if it does not answer; EINVAL for a buffer that is too long
    /// or a command that is not known to use only its buffer; errors of io_uring.
    pub fn execute(
        &self,
        code: u32,
        command: &[u8; COMMAND],
        buffer: Vec<u8>,
        limit: Duration,
    ) -> io::Result<Vec<u8>> {
        if code & 0xff > LAST || buffer.len() > usize::from(u16::MAX) {
            return Err(Errno::INVAL.into());
        }
        let (file, command) = (Arc::clone(&self.file), *command);
        let (reply, answer) = sync_channel(1);
        let thread = std::thread::Builder::new().name("udm-ublk-command".into());
        thread.spawn(move || {
            // The caller waits for the answer.
            let _ = reply.send(run_command(&file, code, command, buffer, limit));
        })?;
        // Received before the thread ends: its end waits for the kernel's worker.
        answer.recv().unwrap_or_else(|_| Err(Errno::IO.into()))
    }
}

/// Runs one command on a new ring.
fn run_command(
    file: &OwnedFd,
    code: u32,
    command: [u8; COMMAND],
    buffer: Vec<u8>,
    limit: Duration,
) -> io::Result<Vec<u8>> {
    let mut ring: IoUring<squeue::Entry128, cqueue::Entry> = IoUring::builder().build(1)?;
    // Leaked if the kernel does not answer in time.
    let buffer = Box::leak(buffer.into_boxed_slice());
    let address = if buffer.is_empty() { 0 } else { buffer.as_mut_ptr() as u64 };
    let mut bytes = [0; 80];
    bytes[..COMMAND].copy_from_slice(&command);
    bytes[LENGTH..LENGTH + 2].copy_from_slice(&(buffer.len() as u16).to_ne_bytes());
    bytes[ADDRESS..ADDRESS + 8].copy_from_slice(&address.to_ne_bytes());
    let sqe = opcode::UringCmd80::new(Fd(file.as_raw_fd()), code).cmd(bytes).build();
    // SAFETY: the command points to `buffer`, which lives until the kernel has answered, or for
    // ever. The file is open until the command was submitted; then the kernel holds it.
    let queued = unsafe { ring.submission().push(&sqe) };
    debug_assert!(queued.is_ok(), "the only command");
    let result = wait(&mut ring, limit)?;
    // SAFETY: leaked above with this address and length, and the kernel is done with it.
    let buffer = unsafe { Box::from_raw(std::ptr::from_mut(buffer)) };
    if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(buffer.into_vec()) }
}

/// Submits, and waits for the only completion.
fn wait(ring: &mut IoUring<squeue::Entry128, cqueue::Entry>, limit: Duration) -> io::Result<i32> {
    let end = Instant::now() + limit;
    loop {
        let left = Timespec::from(end.saturating_duration_since(Instant::now()));
        let entered = ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&left));
        if let Some(cqe) = ring.completion().next() {
            return Ok(cqe.result());
        }
        match entered.map_err(|error| error.raw_os_error()) {
            Ok(_) | Err(Some(libc::EINTR | libc::ETIME | libc::EBUSY | libc::EAGAIN)) => {}
            Err(code) => return Err(io::Error::from_raw_os_error(code.unwrap_or(libc::EIO))),
        }
        if Instant::now() >= end {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file that knows no commands stands for the driver.
    fn control() -> UblkControl {
        let file = rustix::fs::memfd_create("ublk", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        UblkControl { file: Arc::new(file) }
    }

    #[test]
    fn an_error_of_the_kernel_comes_back() {
        let control = control();
        for _ in 0..2 {
            let error = control.execute(0x0000_7513, &[0; 32], vec![0; 8], Duration::from_secs(10));
            assert_eq!(error.unwrap_err().raw_os_error(), Some(libc::EOPNOTSUPP));
        }
    }

    #[test]
    fn commands_that_use_other_memory_are_refused() {
        let control = control();
        let refused = |code, len| {
            let error = control.execute(code, &[0; 32], vec![0; len], Duration::from_secs(10));
            assert_eq!(error.unwrap_err().raw_os_error(), Some(libc::EINVAL), "{code:#x} {len}");
        };
        refused(0xc020_7518, 16);
        refused(0xc020_7504, 1 << 16);
    }
}
