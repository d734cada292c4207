//! Control commands of the kernel's ublk driver: 80-byte io_uring commands to `/dev/ublk-control`.
//!
//! They block, some for a long time, and need a ring with entries of 128 bytes. So each user has a
//! small ring of its own on a thread that is no core. Every command has a time limit. If the kernel
//! does not answer within it, the buffer is leaked, because the kernel may still write there, and
//! the next command gets a new ring.

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};
use rustix::fs::{Mode, OFlags, open};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
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

/// A connection to the ublk driver, for one thread at a time.
pub struct UblkControl {
    file: OwnedFd,
    ring: Option<IoUring<squeue::Entry128, cqueue::Entry>>,
}

impl UblkControl {
    /// Opens `/dev/ublk-control`.
    ///
    /// # Errors
    /// ENOENT if the driver is not loaded, EACCES without permission, and errors of io_uring.
    pub fn open() -> io::Result<UblkControl> {
        let file = open(PATH, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let mut control = UblkControl { file, ring: None };
        control.ring = Some(new_ring()?);
        Ok(control)
    }

    /// Executes the command `code` with the 32 bytes `command`, and waits at most `limit`. The
    /// kernel reads and writes `buffer` (at most 65,535 bytes; empty if the command has none), and
    /// it is returned. The length and address in `command` are set here.
    ///
    /// # Errors
    /// The kernel's error; `TimedOut` if it does not answer; EINVAL for a buffer that is too long
    /// or a command that is not known to use only its buffer.
    pub fn execute(
        &mut self,
        code: u32,
        command: &[u8; COMMAND],
        buffer: Vec<u8>,
        limit: Duration,
    ) -> io::Result<Vec<u8>> {
        let Ok(len) = u16::try_from(buffer.len()) else { return Err(io::ErrorKind::InvalidInput.into()) };
        if code & 0xff > LAST {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut ring = match self.ring.take() {
            Some(ring) => ring,
            None => new_ring()?,
        };
        // Leaked if the kernel does not answer in time.
        let buffer = Box::leak(buffer.into_boxed_slice());
        let address = if len == 0 { 0 } else { buffer.as_mut_ptr() as u64 };
        let mut bytes = [0; 80];
        bytes[..COMMAND].copy_from_slice(command);
        bytes[LENGTH..LENGTH + 2].copy_from_slice(&len.to_ne_bytes());
        bytes[ADDRESS..ADDRESS + 8].copy_from_slice(&address.to_ne_bytes());
        let sqe = opcode::UringCmd80::new(Fd(self.file.as_raw_fd()), code).cmd(bytes).build();
        // SAFETY: the command points to `buffer`, which lives until the kernel has answered. The
        // file stays open until the ring, with its operations, is closed or the command is done.
        let queued = unsafe { ring.submission().push(&sqe) };
        debug_assert!(queued.is_ok(), "one command at a time");
        let result = wait(&mut ring, limit)?;
        self.ring = Some(ring);
        // SAFETY: leaked above with this address and length, and the kernel is done with it.
        let buffer = unsafe { Box::from_raw(std::ptr::from_mut(buffer)) };
        if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(buffer.into_vec()) }
    }
}

fn new_ring() -> io::Result<IoUring<squeue::Entry128, cqueue::Entry>> {
    IoUring::builder().build(2)
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
        UblkControl { file, ring: None }
    }

    #[test]
    fn an_error_of_the_kernel_comes_back() {
        let mut control = control();
        for _ in 0..2 {
            let error = control.execute(0x0000_7513, &[0; 32], vec![0; 8], Duration::from_secs(10));
            assert_eq!(error.unwrap_err().raw_os_error(), Some(libc::EOPNOTSUPP));
        }
    }

    #[test]
    fn commands_that_use_other_memory_are_refused() {
        let mut control = control();
        let mut refused = |code, len| {
            let error = control.execute(code, &[0; 32], vec![0; len], Duration::from_secs(10));
            assert_eq!(error.unwrap_err().kind(), io::ErrorKind::InvalidInput, "{code:#x} {len}");
        };
        refused(0xc020_7518, 16);
        refused(0xc020_7504, 1 << 16);
    }
}
