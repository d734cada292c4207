//! Devices that earlier servers left: some are taken over, the others are removed.

use super::device_link::remove_links_to;
use super::driver::{UblkCommandError, UblkDriver};
use super::openers::{BlockDeviceUse, look_at_block_device};
use rustix::io::Errno;
use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};
use udm_wire::ublk::{UblkDeviceInfo, UblkDeviceState, UblkOwner};

/// The folder with an entry `ublkcN` for each device.
const CLASS: &str = "/sys/class/ublk-char";

/// How long the kernel may take to end the devices of a server that was killed.
const END_PATIENCE: Duration = Duration::from_secs(10);

/// Pause between two looks at such a device.
const END_PAUSE: Duration = Duration::from_millis(20);

/// Numbers of all devices.
fn list_ublk_device_numbers() -> Vec<u32> {
    let entries = fs::read_dir(CLASS).into_iter().flatten().flatten();
    let number = |entry: fs::DirEntry| entry.file_name().to_str()?.strip_prefix("ublkc")?.parse().ok();
    let mut numbers: Vec<u32> = entries.filter_map(number).collect();
    numbers.sort_unstable();
    numbers
}

/// The devices with a mark of udm, and their marks. Devices of others are not visible or have no
/// such mark.
fn marked_devices(driver: &UblkDriver) -> Vec<(UblkOwner, UblkDeviceInfo)> {
    let infos = list_ublk_device_numbers().into_iter().filter_map(|number| driver.info(number).ok());
    infos.filter_map(|info| Some((UblkOwner::decode(info.mark)?, info))).collect()
}

/// Finds the device of `owner` that an earlier server left, after that server has ended.
///
/// # Errors
/// A server that still runs serves the device.
pub(super) fn find_own_device(driver: &UblkDriver, owner: UblkOwner) -> io::Result<Option<UblkDeviceInfo>> {
    let mut own = marked_devices(driver).into_iter().filter(|(mark, _)| *mark == owner);
    let Some((_, info)) = own.next() else { return Ok(None) };
    let info = wait_for_end(driver, info)?;
    match info.state {
        UblkDeviceState::Live => {
            let (number, pid) = (info.number, info.server_pid);
            Err(io::Error::other(format!("/dev/ublkb{number} is served by process {pid}: end it first")))
        }
        _ => Ok(Some(info)),
    }
}

/// Waits until the kernel has noticed that the device's server has ended.
fn wait_for_end(driver: &UblkDriver, mut info: UblkDeviceInfo) -> Result<UblkDeviceInfo, UblkCommandError> {
    let end = Instant::now() + END_PATIENCE;
    while info.state == UblkDeviceState::Live && Instant::now() < end && is_ending(info.server_pid) {
        std::thread::sleep(END_PAUSE);
        info = driver.info(info.number)?;
    }
    Ok(info)
}

/// True if process `pid` has ended or is about to.
fn is_ending(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/status")).map_or(true, |status| is_ending_status(&status))
}

/// The same, from `/proc/PID/status`: its memory is gone, or SIGKILL is pending.
fn is_ending_status(status: &str) -> bool {
    const KILL: u64 = 1 << 8;
    let is_killed = |line: &str| {
        let set = line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:"));
        set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).is_some_and(|set| set & KILL != 0)
    };
    !status.lines().any(|line| line.starts_with("VmSize:")) || status.lines().any(is_killed)
}

/// Prepares the take-over of a device whose server has ended. The kernel may still be closing its
/// files.
///
/// # Errors
/// The kernel's error.
pub(super) fn start_recovery(driver: &UblkDriver, info: &UblkDeviceInfo) -> Result<(), UblkCommandError> {
    let end = Instant::now() + END_PATIENCE;
    loop {
        match driver.start_recovery(info) {
            Err(error) if error.errno() == Some(Errno::BUSY) && Instant::now() < end => {
                std::thread::sleep(END_PAUSE);
            }
            // The last server was killed before it fetched, so the device is prepared already.
            Err(error) if error.errno() == Some(Errno::INVAL) => return Ok(()),
            done => return done,
        }
    }
}

/// Those of `names` whose devices earlier servers with the state folder `folder` left, and that
/// somebody uses: their requests wait for a server. Blocks while the kernel ends a device.
#[must_use]
pub fn find_names_in_use<'a>(folder: &Path, names: &[&'a str]) -> Vec<&'a str> {
    if list_ublk_device_numbers().is_empty() {
        return Vec::new();
    }
    let Ok(driver) = UblkDriver::open() else { return Vec::new() };
    let marked = marked_devices(&driver);
    let is_left_in_use = |name: &&str| {
        let owner = UblkOwner::new(folder.as_os_str().as_encoded_bytes(), name);
        let Some((_, info)) = marked.iter().find(|(mark, _)| *mark == owner) else { return false };
        let ended = wait_for_end(&driver, *info).is_ok_and(|info| info.state == UblkDeviceState::Quiesced);
        ended && matches!(look_at_block_device(info.number), BlockDeviceUse::Used(_))
    };
    names.iter().copied().filter(is_left_in_use).collect()
}

/// Removes the devices that earlier servers with the state folder `folder` left and that are not
/// of one of `names`. Devices in use are reported and stay. Devices of other programs and servers
/// are not touched. Blocks while the kernel ends a device.
pub fn remove_unwanted_devices(folder: &Path, names: &[&str]) {
    if list_ublk_device_numbers().is_empty() {
        return;
    }
    // Without permission there is no device that could be removed.
    let Ok(driver) = UblkDriver::open() else { return };
    let server = UblkOwner::new(folder.as_os_str().as_encoded_bytes(), "").server;
    let wanted: Vec<UblkOwner> =
        names.iter().map(|name| UblkOwner::new(folder.as_os_str().as_encoded_bytes(), name)).collect();
    for (mark, info) in marked_devices(&driver) {
        if mark.server != server || wanted.contains(&mark) {
            continue;
        }
        match wait_for_end(&driver, info) {
            Ok(info) if info.state != UblkDeviceState::Live => remove_device(&driver, &info),
            // It has a server, or is gone.
            Ok(_) | Err(_) => {}
        }
    }
}

fn remove_device(driver: &UblkDriver, info: &UblkDeviceInfo) {
    let number = info.number;
    if let BlockDeviceUse::Used(user) = look_at_block_device(number) {
        return tracing::warn!(
            "ublk: /dev/ublkb{number} of an earlier server has no server, and {user} uses it: \
             serve its device again with --ublk or `udm ublk add`, or end its use"
        );
    }
    match driver.stop_always(info).and_then(|()| driver.delete(info)) {
        Ok(()) => {
            remove_links_to(number);
            tracing::warn!("ublk: /dev/ublkb{number} of an earlier server was not in use and is removed");
        }
        Err(error) => tracing::warn!("ublk: /dev/ublkb{number} of an earlier server: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_ends_is_told_from_one_that_runs() {
        assert!(!is_ending(std::process::id() as i32) && is_ending(i32::MAX));
        let running = "Name:\tudm\nState:\tD (disk sleep)\nVmSize:\t 9 kB\nSigPnd:\t0000000000000000\n";
        assert!(!is_ending_status(running));
        assert!(is_ending_status(&running.replace("SigPnd:\t00000000000000", "ShdPnd:\t00000000000041")));
        assert!(!is_ending_status(&running.replace("SigPnd:\t00000000000000", "ShdPnd:\t00000000004000")));
        assert!(is_ending_status("Name:\tudm\nState:\tZ (zombie)\n"));
    }
}
