//! Whether somebody uses a block device: a mount, swap, another device, or a process that has it
//! open.

use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;

/// What is known about the use of a block device.
pub(super) enum BlockDeviceUse {
    /// Nobody uses it, and nobody can claim it while this file is open. `None` if there is no such
    /// device, or no permission to open it.
    Free(Option<OwnedFd>),
    /// It is in use: the user, in words.
    Used(String),
}

/// Looks who uses `/dev/ublkbN`. Processes of other users are seen only by root. Sends no request
/// to the device, which may have no server.
pub(super) fn look_at_block_device(number: u32) -> BlockDeviceUse {
    let path = format!("/dev/ublkb{number}");
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let claim = match open(&path, flags, Mode::empty()) {
        Ok(claim) => Some(claim),
        Err(Errno::BUSY) => return BlockDeviceUse::Used("a mount, swap or another device".into()),
        Err(_) => None,
    };
    if let Some(user) = find_process_with_open(&path).or_else(|| find_loop_device_over(&path)) {
        return BlockDeviceUse::Used(user);
    }
    BlockDeviceUse::Free(claim)
}

/// Finds a process other than this one that has `path` open.
fn find_process_with_open(path: &str) -> Option<String> {
    let own = std::process::id().to_string();
    let entries = fs::read_dir("/proc").ok()?.flatten();
    let mut processes = entries.filter(|entry| {
        let name = entry.file_name();
        name.as_encoded_bytes().iter().all(u8::is_ascii_digit) && name != *own
    });
    processes.find_map(|process| {
        let mut files = fs::read_dir(process.path().join("fd")).ok()?.flatten();
        let has_open = files.any(|file| fs::read_link(file.path()).is_ok_and(|to| to == Path::new(path)));
        has_open.then(|| format!("process {}", process.file_name().display()))
    })
}

/// A loop device over `path`.
fn find_loop_device_over(path: &str) -> Option<String> {
    fs::read_dir("/sys/block").ok()?.flatten().find_map(|block| {
        let backing = fs::read_to_string(block.path().join("loop/backing_file")).ok()?;
        (backing.trim_end() == path).then(|| block.file_name().display().to_string())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_process_with_the_file_open_is_found() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().display().to_string();
        assert_eq!(find_process_with_open(&path), None, "this process does not count");
        let input = Stdio::from(file.reopen().unwrap());
        let mut child = Command::new("sleep").arg("60").stdin(input).spawn().unwrap();
        let found = find_process_with_open(&path);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(found, Some(format!("process {}", child.id())));
    }
}
