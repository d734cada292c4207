//! Devices that fail: each error is reported on exactly the affected requests, and all other data
//! is intact.
//!
//! The names of the tests are `FAULT.WORLD`. Without root, tests that need it are reported as
//! ignored, with the reason in the name.

use libtest_mimic::{Arguments, Failed, Trial};
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;
use udm_conformance::{
    CreatedDevice, DeviceTestRig, InitialContent, TestRequest, UnderlyingDevices, WorldKind,
    run_system_program,
};
use udm_core::errno::{EIO, ENOSPC};
use udm_core::{BioFlags, Op};

fn main() {
    let args = Arguments::from_args();
    let mut trials = Vec::new();
    let mut add = |name: &str, kinds: &[WorldKind], missing: Option<&str>, test: fn(WorldKind)| {
        for &kind in kinds {
            let name = format!("{name}.{}", kind.name());
            let name = missing.map_or(name.clone(), |why| format!("{name} (skipped: {why})"));
            let run = move || -> Result<(), Failed> {
                test(kind);
                Ok(())
            };
            trials.push(Trial::test(name, run).with_ignored_flag(missing.is_some()));
        }
    };
    let ring: Vec<_> = WorldKind::ALL.into_iter().filter(|kind| *kind != WorldKind::Stepped).collect();
    let root = (!rustix::process::getuid().is_root()).then_some("mounting needs root");
    add("error_fails_all_but_flushes", &WorldKind::ALL, None, error_target);
    add("dust_fails_its_bad_blocks", &WorldKind::ALL, None, dust);
    add("flakey_fails_all_while_down", &WorldKind::ALL, None, flakey_down);
    add("flakey_fails_writes_alone", &WorldKind::ALL, None, flakey_error_writes);
    add("flakey_drops_writes", &WorldKind::ALL, None, flakey_drop_writes);
    add("a_full_log_stops_no_writes", &WorldKind::ALL, None, full_log);
    add("a_file_that_was_cut", &ring, None, cut_file);
    add("a_full_file_system", &ring, root, full_file_system);
    libtest_mimic::run(&args, trials).exit();
}

fn rig(lines: &str, fresh: InitialContent, kind: WorldKind) -> DeviceTestRig {
    DeviceTestRig::over(CreatedDevice::table(UnderlyingDevices::new(), lines, fresh), kind)
}

/// The errno of a request of each kind.
fn errnos(rig: &mut DeviceTestRig, at: u64) -> Vec<(Op, i32)> {
    let ask = |op: Op| {
        let request = if op == Op::Flush { TestRequest::flush() } else { rig.request(op, at, 8) };
        rig.world.submit(1, vec![request]);
        (op, rig.world.collect(1)[0].errno)
    };
    [Op::Read, Op::Write, Op::Flush, Op::Discard].into_iter().map(ask).collect()
}

fn error_target(kind: WorldKind) {
    let mut rig = rig("0 4096 error", InitialContent::AlwaysZeroes, kind);
    for at in [0, 8, 4088] {
        let expected = [(Op::Read, EIO), (Op::Write, EIO), (Op::Flush, 0), (Op::Discard, EIO)];
        assert_eq!(errnos(&mut rig, at), expected);
    }
    rig.world.quiet();
    rig.end();
}

/// A read of a bad block fails. A write repairs the block, as a drive remaps a sector (kernel
/// `dm-dust`).
fn dust(kind: WorldKind) {
    let mut rig = rig("0 4096 dust /c0 24 512", InitialContent::Zeroes, kind);
    let writes: Vec<TestRequest> = (0..64).map(|i| rig.write(i * 8, 8)).collect();
    rig.run(0, writes);
    let bad = [3, 77, 200, 511];
    // Block numbers count on the disk, not on the mapped device.
    bad.iter().for_each(|sector| rig.message(&format!("addbadblock {}", sector + 24)));
    rig.verify(0, 0, 512);
    rig.message("enable");
    let hit = |request: &TestRequest| {
        bad.iter().any(|sector| (request.sector..request.sector + request.sectors).contains(sector))
    };
    for length in [1, 8, 64] {
        let reads: Vec<TestRequest> =
            (0..512 / length).map(|i| TestRequest::read(i * length, length)).collect();
        rig.run_with_failures(1, &reads, EIO, hit);
    }
    let writes: Vec<TestRequest> = bad.iter().map(|sector| rig.write(sector / 8 * 8, 8)).collect();
    rig.run(0, writes);
    rig.verify(1, 0, 512);
    rig.end();
}

fn flakey_down(kind: WorldKind) {
    let mut rig = rig("0 4096 flakey /c0 24 0 3600", InitialContent::Zeroes, kind);
    for at in [0, 4088] {
        let expected = [(Op::Read, EIO), (Op::Write, EIO), (Op::Flush, EIO), (Op::Discard, EIO)];
        assert_eq!(errnos(&mut rig, at), expected);
    }
    reload(&mut rig, "0 4096 linear /c0 24");
    rig.verify_all(0);
    rig.end();
}

fn reload(rig: &mut DeviceTestRig, lines: &str) {
    let device = rig.mapped.clone().expect("a mapped device");
    device.load(rig.ground.table(lines)).expect("a table that fits");
    let change = device.resume(std::sync::Arc::new(|| {})).expect("nothing else changes it");
    rig.world.change(change).expect("a resume");
}

fn flakey_error_writes(kind: WorldKind) {
    let mut rig = rig("0 4096 linear /c0 24", InitialContent::Zeroes, kind);
    let write = rig.write(0, 64);
    rig.one(0, write);
    reload(&mut rig, "0 4096 flakey /c0 24 0 3600 1 error_writes");
    for at in [0, 32] {
        let expected = [(Op::Read, 0), (Op::Write, EIO), (Op::Flush, EIO), (Op::Discard, EIO)];
        assert_eq!(errnos(&mut rig, at), expected);
    }
    rig.verify_all(0);
    rig.end();
}

/// Dropped writes report success, and reads return the old content.
fn flakey_drop_writes(kind: WorldKind) {
    let mut rig = rig("0 4096 linear /c0 24", InitialContent::Zeroes, kind);
    let write = rig.write(0, 64);
    rig.one(0, write);
    reload(&mut rig, "0 4096 flakey /c0 24 0 3600 1 drop_writes");
    for at in [0, 32] {
        assert!(errnos(&mut rig, at).iter().all(|(_, errno)| *errno == 0));
    }
    rig.verify_all(0);
    rig.end();
}

/// A full log ends the logging and fails no write (kernel `dm-log-writes`).
fn full_log(kind: WorldKind) {
    let mut rig = rig("0 4096 log-writes /c0 mem:128K", InitialContent::Zeroes, kind);
    for round in 0..4 {
        let writes = (0..64).map(|i| rig.write(i * 16, 16)).collect();
        rig.run(round % 2, writes);
        rig.one(0, TestRequest::flush());
        let write = rig.write(2000, 8).with(BioFlags::FUA);
        rig.one(1, write);
    }
    let status = rig.mapped.as_ref().expect("a mapped device").status_text();
    assert!(status.contains("logging_disabled"), "{status}");
    rig.verify_all(0);
    rig.end();
}

/// A file is truncated under a device: requests to the lost part fail, the rest is served. A read
/// does not extend the file again.
fn cut_file(kind: WorldKind) {
    let mut ground = UnderlyingDevices::new();
    let path = ground.file(2 << 20);
    let lines = format!("0 4096 linear {} 0", path.display());
    let mut rig = DeviceTestRig::over(CreatedDevice::table(ground, &lines, InitialContent::Zeroes), kind);
    let writes = (0..64).map(|i| rig.write(i * 64, 64)).collect();
    rig.run(0, writes);
    rig.one(0, TestRequest::flush());
    let file = std::fs::File::options().write(true).open(&path).expect("the file");
    file.set_len(1 << 20).expect("a cut");
    let reads: Vec<TestRequest> = (0..512).map(|i| TestRequest::read(i * 8, 8)).collect();
    rig.run_with_failures(1, &reads, EIO, |read| read.sector >= 2048);
    rig.run_with_failures(0, &[TestRequest::read(2040, 16)], EIO, |_| true);
    assert_eq!(file.metadata().expect("the file").len(), 1 << 20);
    file.set_len(2 << 20).expect("a longer file");
    // The truncated part now reads as zeroes.
    rig.model.done(&TestRequest::new(Op::WriteZeroes, 2048, 2048));
    rig.verify_all(1);
    rig.end();
}

/// A mounted tmpfs of 1 MiB.
struct SmallTmpfs {
    folder: TempDir,
}

impl SmallTmpfs {
    fn mount() -> SmallTmpfs {
        let folder = TempDir::new().expect("a folder");
        let path = folder.path().display().to_string();
        run_system_program("mount", &["-t", "tmpfs", "-o", "size=1M", "tmpfs", &path]);
        SmallTmpfs { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

impl Drop for SmallTmpfs {
    fn drop(&mut self) {
        let path: &Path = self.folder.path();
        // Lazy, because a failed test may have left a file open.
        let _ =
            Command::new("umount").arg("-l").arg(path).env("PATH", "/sbin:/usr/sbin:/bin:/usr/bin").status();
    }
}

/// A sparse file on a full file system: writes without space fail with ENOSPC, nothing else fails.
/// Once there is space again, writes are served. Virtio has no such error: EIO.
fn full_file_system(kind: WorldKind) {
    let full = if matches!(kind, WorldKind::VhostUser | WorldKind::Nvme) { EIO } else { ENOSPC };
    let small = SmallTmpfs::mount();
    let path = small.path("disk");
    std::fs::File::create(&path).and_then(|file| file.set_len(4 << 20)).expect("a sparse file");
    let lines = format!("0 8192 linear {} 0", path.display());
    let mut rig = DeviceTestRig::over(
        CreatedDevice::table(UnderlyingDevices::new(), &lines, InitialContent::Zeroes),
        kind,
    );
    let mut failed = Vec::new();
    for i in 0..64 {
        let write = rig.write(i * 128, 128);
        rig.world.submit(0, vec![write.clone()]);
        let answer = rig.world.collect(0).remove(0);
        if answer.errno == full {
            rig.model.may_have_written(&write);
            failed.push(write);
        } else {
            rig.set_verdict(&write, &answer);
        }
    }
    assert!(
        (40..56).contains(&failed.len()),
        "{} of 64 writes of 64 KiB found no room in 1 MiB",
        failed.len()
    );
    rig.verify_all(1);
    rig.one(0, TestRequest::flush());
    // Blocks that are already allocated can be written again.
    let again = rig.write(0, 128);
    rig.one(1, again);
    // A discard frees space.
    for i in 0..8 {
        rig.one(0, TestRequest::new(Op::Discard, i * 128, 128));
    }
    for old in failed.iter().take(4) {
        let write = rig.write(old.sector, old.sectors);
        rig.one(1, write);
    }
    rig.verify_all(0);
    rig.end();
}
