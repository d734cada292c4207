//! The disk that a name leads to: several names of one disk, changed names, and exclusive use.

use super::tests::{DiskUnderTest, LoopDevice, file_of, has_direct, skipped, uri};
use super::{FileDevice, OpenDisks};
use crate::DiskIdentity;
use crate::testing::make_zeroed_segments;
use std::path::Path;
use std::process::{Command, Stdio};
use tempfile::TempDir;
use udm_core::{Bio, BioFlags, Device, Op, Sector, Sectors, Status};
use udm_wire::uri::FileUri;

fn named(disks: &OpenDisks, uri: &FileUri) -> FileDevice {
    disks.open(uri).unwrap().1
}

fn refusal(disks: &OpenDisks, uri: &FileUri) -> (i32, String) {
    let e = disks.open(uri).err().unwrap();
    (e.errno, e.text)
}

#[test]
fn two_names_of_one_disk_are_two_devices_over_one() {
    let folder = TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("a"), vec![1; 65536]).unwrap();
    std::fs::hard_link(path("a"), path("b")).unwrap();
    std::fs::write(path("c"), vec![1; 65536]).unwrap();
    let disks = OpenDisks::default();
    let (one, a) = disks.open(&uri(&path("a"))).unwrap();
    let (same, b) = disks.open(&uri(&path("b"))).unwrap();
    let (other, _) = disks.open(&uri(&path("c"))).unwrap();
    assert!(one == same && one != other, "{one:?} {same:?} {other:?}");
    assert_ne!(a.id(), b.id(), "each can be a path");
    assert!(std::ptr::eq(&*a.disk, &*b.disk));
    assert!(
        std::ptr::eq(a.shared_disk_state().unwrap(), b.shared_disk_state().unwrap()),
        "a claim of one name covers the other"
    );
    assert!(!a.limits().private_cache, "a regular file has one page cache");
}

#[test]
fn a_name_that_leads_elsewhere_is_another_disk() {
    let folder = TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("a"), vec![1; 65536]).unwrap();
    let disks = OpenDisks::default();
    let (before, old) = disks.open(&uri(&path("a"))).unwrap();
    std::fs::write(path("new"), vec![2; 65536]).unwrap();
    std::fs::rename(path("new"), path("a")).unwrap();
    assert_ne!(disks.look(&uri(&path("a"))).unwrap(), before);
    let new = named(&disks, &uri(&path("a")));
    assert_eq!(DiskUnderTest::over(&new).read(0, 1), [2; 512]);
    assert_eq!(DiskUnderTest::over(&old).read(0, 1), [1; 512], "who has the old one keeps it");
}

#[test]
fn a_disk_may_grow_and_shrink_between_loads() {
    let file = file_of(65536, 1);
    let disks = OpenDisks::default();
    let device = named(&disks, &uri(file.path()));
    let mut disk = DiskUnderTest::over(&device);
    assert_eq!(disk.op(Op::Read, BioFlags::empty(), 128, 8), Status::IoErr);
    file.as_file().set_len(131072 + 100).unwrap();
    assert_eq!(device.limits().size, Sectors(128), "nobody has looked yet");
    disks.look(&uri(file.path())).unwrap();
    assert_eq!(device.limits().size, Sectors(256));
    assert_eq!(disk.op(Op::Write, BioFlags::empty(), 248, 8), Status::Ok, "an open lane sees it too");
    file.as_file().set_len(65536).unwrap();
    disks.look(&uri(file.path())).unwrap();
    assert_eq!(device.limits().size, Sectors(128));
    for op in [Op::Read, Op::Write] {
        assert_eq!(disk.op(op, BioFlags::empty(), 248, 8), Status::IoErr, "{op:?}");
    }
    assert_eq!(file.as_file().metadata().unwrap().len(), 65536);
    file.as_file().set_len(100).unwrap();
    let e = disks.look(&uri(file.path())).err().unwrap();
    assert_eq!((e.errno, e.text.ends_with(": shorter than a block (512 bytes)")), (22, true), "{}", e.text);
}

#[test]
fn one_disk_goes_one_way_with_respect_to_the_page_cache() {
    let file = file_of(65536, 1);
    if !has_direct(&file) {
        return;
    }
    let plain = uri(file.path());
    let with = |direct| FileUri { direct: Some(direct), ..uri(file.path()) };
    for (first, second, open) in [(true, false, "on"), (false, true, "off")] {
        let disks = OpenDisks::default();
        let device = named(&disks, &with(first));
        let path = file.path().display();
        let want =
            format!("{path}: open with direct={open} already, as {path}: all names of a disk need the same");
        assert_eq!(refusal(&disks, &with(second)), (16, want));
        assert_eq!(named(&disks, &plain).disk.direct.is_some(), first, "a plain name takes it as it is");
        drop(device);
        named(&disks, &with(second));
    }
}

/// A read-only name and a writable name share the disk; the read-only one still refuses writes.
#[test]
fn a_name_for_reading_only_writes_nothing() {
    let file = file_of(65536, 1);
    for first in [true, false] {
        let disks = OpenDisks::default();
        let open = |readonly| named(&disks, &FileUri { readonly, ..uri(file.path()) });
        let (a, b) = (open(first), open(!first));
        let (mut a, mut b) = (DiskUnderTest::over(&a), DiskUnderTest::over(&b));
        let want = |readonly| if readonly { Status::ReadOnly } else { Status::Ok };
        assert_eq!(a.op(Op::Write, BioFlags::empty(), 0, 1), want(first));
        assert_eq!(b.op(Op::Write, BioFlags::empty(), 0, 1), want(!first));
    }
}

#[test]
fn a_block_device_goes_past_the_page_cache_and_is_had_alone() {
    let file = file_of(1 << 20, 7);
    let Some(device) = LoopDevice::over(file.path()) else { return skipped("no loop device available") };
    let path = Path::new(&device.0);
    let (ours, theirs) = (OpenDisks::default(), OpenDisks::default());
    let held = named(&ours, &uri(path));
    assert!(held.disk.direct.is_some() && !held.limits().private_cache);
    let DiskIdentity::Block { .. } = held.disk.identity else { panic!("{:?}", held.disk.identity) };
    let busy =
        format!("{}: in use: mounted, or open exclusively by another program (exclusive=off?)", device.0);
    assert_eq!(refusal(&theirs, &uri(path)), (16, busy));
    let _again = named(&ours, &uri(path));
    let shared = FileUri { exclusive: false, ..uri(path) };
    named(&theirs, &shared);
    named(&theirs, &FileUri { readonly: true, ..uri(path) });
    drop((held, _again));
    let kept = named(&theirs, &shared);
    let _claimed = named(&theirs, &uri(path));
    drop(kept);
    assert_eq!(refusal(&ours, &uri(path)).0, 16, "claimed by the second name");
}

#[test]
fn a_block_device_may_grow() {
    let file = file_of(1 << 20, 7);
    let Some(device) = LoopDevice::over(file.path()) else { return skipped("no loop device available") };
    let disks = OpenDisks::default();
    let uri = uri(Path::new(&device.0));
    let held = named(&disks, &uri);
    file.as_file().set_len(2 << 20).unwrap();
    let set = Command::new("losetup").args(["--set-capacity", &device.0]).status().unwrap();
    assert!(set.success());
    disks.look(&uri).unwrap();
    assert_eq!(held.limits().size, Sectors(4096));
    assert_eq!(DiskUnderTest::over(&held).op(Op::Write, BioFlags::empty(), 4088, 8), Status::Ok);
}

/// A mounted disk, or one with a mounted partition, cannot be opened for writing.
#[test]
fn a_mounted_disk_is_refused() {
    let folder = TempDir::new().unwrap();
    let image = folder.path().join("image");
    std::fs::File::create(&image).unwrap().set_len(8 << 20).unwrap();
    let quiet = |command: &mut Command| {
        let done = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
        done.is_ok_and(|status| status.success())
    };
    if !quiet(Command::new("mke2fs").args(["-q", "-F"]).arg(&image)) {
        return skipped("no mke2fs");
    }
    let Some(device) = LoopDevice::over(&image) else { return skipped("no loop device available") };
    let mount = folder.path().join("mnt");
    std::fs::create_dir(&mount).unwrap();
    if !quiet(Command::new("mount").arg(&device.0).arg(&mount)) {
        return skipped("nothing can be mounted");
    }
    let (errno, text) = refusal(&OpenDisks::default(), &uri(Path::new(&device.0)));
    assert!(quiet(Command::new("umount").arg(&mount)));
    assert!(errno == 16 && text.contains("in use: mounted"), "{text}");
    named(&OpenDisks::default(), &uri(Path::new(&device.0)));
}

/// Two nodes of one disk: data written through one is read through the other.
#[test]
fn two_nodes_of_one_disk_agree() {
    let file = file_of(1 << 20, 7);
    let (Some(one), Some(two)) = (LoopDevice::over(file.path()), LoopDevice::over(file.path())) else {
        return skipped("no two loop devices available");
    };
    let disks = OpenDisks::default();
    let (a, b) = (named(&disks, &uri(Path::new(&one.0))), named(&disks, &uri(Path::new(&two.0))));
    let (mut a, mut b) = (DiskUnderTest::over(&a), DiskUnderTest::over(&b));
    for round in 1..=4u8 {
        let (w, r) = if round % 2 == 0 { (&mut a, &mut b) } else { (&mut b, &mut a) };
        assert_eq!(r.read(0, 64), if round == 1 { vec![7; 32768] } else { vec![round - 1; 32768] });
        let mut data = make_zeroed_segments(32768, &[]);
        data.fill(round);
        assert_eq!(w.run(Bio::write(Sector(0), Sectors(64), data)).status, Status::Ok);
        assert_eq!(r.read(0, 64), vec![round; 32768]);
    }
}
