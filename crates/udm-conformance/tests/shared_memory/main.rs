//! Requests with data in memory that another process shares with the server, on every device of the
//! list. The other process is this program, started again.
//!
//! The other process is honest, changes all bytes all the time, sends invalid requests, or exits
//! with requests in flight. The server serves, refuses, and continues.

mod front_end;
mod peer;

use front_end::SharedMemoryFrontEnd;
use libtest_mimic::{Arguments, Failed, Trial};
use peer::{DiskGeometry, SHARED};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use udm_conformance::{DEVICES_UNDER_TEST, DeviceUnderTest, InitialContent, WorldKind};
use udm_core::{CoreId, SharedMemoryMap};
use udm_runtime::{Runtime, RuntimeOptions};

const CHILD: &str = "--as-the-other-process";

fn main() {
    let words: Vec<String> = std::env::args().collect();
    if let [_, child, mode, numbers @ ..] = &words[..]
        && child == CHILD
    {
        let number = |i: usize| numbers[i].parse().expect("a number");
        return peer::run(mode, DiskGeometry { sectors: number(0), block: number(1), max: number(2) });
    }
    let args = Arguments::from_args();
    let (there, absent): (Vec<&DeviceUnderTest>, Vec<&DeviceUnderTest>) = DEVICES_UNDER_TEST
        .iter()
        .partition(|subject| subject.unmet_requirement(WorldKind::SharedRange).is_none());
    let mut trials: Vec<Trial> =
        there.into_iter().map(|subject| Trial::test(subject.name, move || serve(subject))).collect();
    let skip = |s: &DeviceUnderTest| {
        format!("{} (skipped: {})", s.name, s.unmet_requirement(WorldKind::SharedRange).unwrap_or_default())
    };
    trials.extend(absent.into_iter().map(|s| Trial::test(skip(s), || Ok(())).with_ignored_flag(true)));
    libtest_mimic::run(&args, trials).exit();
}

/// Waits until the front end has released `map`. Until then, a write of the peer that ended may
/// still reach the device, and the next peer would read its data.
fn wait_for_last_request(map: &Arc<SharedMemoryMap>) -> Result<(), Failed> {
    for _ in 0..2000 {
        if Arc::strong_count(map) == 1 {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Err("the front end still uses the memory of a peer that ended".into())
}

/// Runs all kinds of peers of one device, one after another, on one server.
fn serve(subject: &DeviceUnderTest) -> Result<(), Failed> {
    let made = subject.make(WorldKind::SharedRange);
    let spin_max = Duration::from_micros(20);
    let runtime = Runtime::start(&RuntimeOptions { cpus: vec![None; 2], poll: false, spin_max })?;
    let limits = made.device.limits();
    // A device that stores nothing or is read-only has no honest peer.
    let keeps = made.facts.fresh == InitialContent::Zeroes && !limits.read_only;
    let modes: &[&str] = if keeps {
        &["honest", "scribbling", "hostile", "vanishing", "honest"]
    } else {
        &["hostile", "vanishing", "hostile"]
    };
    let max = if limits.max_sectors.0 == 0 { 1 << 20 } else { limits.max_sectors.0 };
    for (n, mode) in modes.iter().enumerate() {
        let memfd = memfd_create("udm-shared", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC)?;
        ftruncate(&memfd, SHARED as u64)?;
        fcntl_add_seals(&memfd, SealFlags::SHRINK)?;
        let map = Arc::new(SharedMemoryMap::of_memfd(&memfd, SHARED)?);
        let (ours, theirs) = UnixStream::pair()?;
        let device = Arc::clone(&made.device);
        let memory = Arc::clone(&map);
        let make = move || Box::new(SharedMemoryFrontEnd::new(memory, ours.into(), device)) as _;
        runtime.attach(CoreId((n % 2) as u16), Box::new(make));
        let sectors = limits.size.0.min(4096);
        let numbers = [sectors, u64::from(limits.logical_block) / 512, max].map(|n| n.to_string());
        // The hostile peer gets the real size of the device. Otherwise the device is larger than
        // the peer knows and does not refuse requests at that size.
        let numbers = if *mode == "hostile" {
            [limits.size.0.to_string(), numbers[1].clone(), numbers[2].clone()]
        } else {
            numbers
        };
        let child = Command::new(std::env::current_exe()?)
            .arg(CHILD)
            .arg(mode)
            .args(numbers)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::from(memfd))
            .stderr(Stdio::piped())
            .output()?;
        if !child.status.success() {
            return Err(format!("{mode}: {}{}", child.status, String::from_utf8_lossy(&child.stderr)).into());
        }
        wait_for_last_request(&map)?;
    }
    // The peers must be completely removed; otherwise the server does not end.
    runtime.stop();
    if Arc::strong_count(&made.device) > 3 {
        return Err("the device is still in use".into());
    }
    Ok(())
}
