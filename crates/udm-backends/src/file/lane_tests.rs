//! Lanes on a real ring with injected results, as from a disk that fails.

use super::lane::FileLane;
use super::outcome::{FileRequestNextAction, RETRIES};
use super::request::{FileRequest, FileRequestStep};
use super::tests::{core, file_of, has_direct, open, skipped, uri};
use super::{FileDevice, OpenDisks};
use crate::testing::{bio_without_data, make_zeroed_segments};
use std::path::Path;
use tempfile::TempDir;
use udm_core::errno::{EAGAIN, EIO, ENOSPC};
use udm_core::{Batch, Bio, BioFlags, Device, Lane, Op, Sector, Sectors, Segments, Status};
use udm_runtime::{LocalCore, Ring, RingCompletion};

/// Returns an errno to inject, or `None` to keep the kernel's result. The argument is the request
/// of the operation, or `None` for a flush.
type FaultFn<'a> = Box<dyn FnMut(Option<&FileRequest>) -> Option<i32> + 'a>;

/// A lane and the function that injects results of its operations.
struct FaultyRing<'a> {
    core: LocalCore,
    lane: FileLane,
    fault: FaultFn<'a>,
}

impl<'a> FaultyRing<'a> {
    fn over(
        file: &FileDevice,
        fault: impl FnMut(Option<&FileRequest>) -> Option<i32> + 'a,
    ) -> FaultyRing<'a> {
        FaultyRing::on(0, file, fault)
    }

    /// Creates a lane that uses this descriptor.
    fn on(
        handle: usize,
        file: &FileDevice,
        fault: impl FnMut(Option<&FileRequest>) -> Option<i32> + 'a,
    ) -> FaultyRing<'a> {
        let mut core = core();
        let user = core.turn(|cx| Ring::of(cx).unwrap().user());
        let mut lane = FileLane::new(user, &file.disk, &file.handles[handle], file.limits());
        // Operations that the core executes itself cannot be changed.
        lane.shared.in_memory = false;
        FaultyRing { core, lane, fault: Box::new(fault) }
    }

    fn submit(&mut self, mut bio: Box<Bio>) {
        bio.start();
        let mut batch = vec![bio];
        self.core.turn(|cx| self.lane.submit(&mut batch, cx));
    }

    /// Runs one turn and changes the results of the completed operations.
    fn step(&mut self) -> Batch {
        let mut done = Batch::new();
        self.core.turn(|cx| {
            let mut finished = Vec::new();
            self.lane.user.take(&mut finished);
            for op in finished {
                let fault = (self.fault)(self.lane.slots.get(op.tag as usize));
                let result = fault.map_or(op.result, Err);
                self.lane.operation_done(RingCompletion { result, ..op }, cx);
            }
            self.lane.poll(&mut done, cx);
        });
        done.iter_mut().for_each(|bio| bio.finish());
        done
    }

    fn end(&mut self) -> Box<Bio> {
        for _ in 0..10_000 {
            if let Some(bio) = self.step().pop() {
                return bio;
            }
            self.core.park();
        }
        panic!("a request is missing");
    }

    fn run(&mut self, op: Op, flags: BioFlags, sector: u64) -> Status {
        let mut bio = bio_without_data(op, sector, if op == Op::Flush { 0 } else { 8 });
        bio.flags = flags;
        let len = if op.has_data() { 4096 } else { 0 };
        bio.data = if op.has_data() { make_zeroed_segments(4096, &[1024]) } else { Segments::new() };
        self.submit(bio);
        let bio = self.end();
        assert_eq!(bio.data.len(), len, "a bio comes back with its data");
        bio.status
    }
}

fn plain() -> BioFlags {
    BioFlags::empty()
}

fn is_at(slot: Option<&FileRequest>, step: FileRequestStep) -> bool {
    slot.is_some_and(|slot| slot.step == step)
}

/// EIO is a path error if no other block can be read, no error if the retry succeeds, and otherwise
/// a medium error.
#[test]
fn eio_asks_another_block_and_tries_once_more() {
    for direct in [false, true] {
        let file = file_of(1 << 20, 1);
        if direct && !has_direct(&file) {
            continue;
        }
        let file = open(file.path(), direct, false).unwrap();
        for op in [Op::Read, Op::Write] {
            let main = |slot: Option<&FileRequest>| {
                slot.is_some_and(|s| matches!(s.step, FileRequestStep::Data | FileRequestStep::Bounce))
            };
            let mut tries = 0;
            let mut disk = FaultyRing::over(&file, |slot| {
                tries += i32::from(main(slot));
                (main(slot) && tries == 1).then_some(EIO)
            });
            assert_eq!(disk.run(op, plain(), 3), Status::Ok, "once is nothing");
            // What the kernel answers for a block that is not in the page cache. What it keeps
            // there is for no test to decide.
            let uncached =
                |slot: Option<&FileRequest>| is_at(slot, FileRequestStep::Cached).then_some(EAGAIN);
            let mut disk = FaultyRing::over(&file, |slot| uncached(slot).or(main(slot).then_some(EIO)));
            assert_eq!(disk.run(op, plain(), 3), Status::Medium);
            let mut disk = FaultyRing::over(&file, |slot| {
                let probe = is_at(slot, FileRequestStep::Probe);
                uncached(slot).or((probe || main(slot)).then_some(EIO))
            });
            assert_eq!(disk.run(op, plain(), 3), Status::IoErr);
        }
    }
}

/// A file that is completely cached can be read even if its disk is gone. That proves nothing, so
/// it is a path error.
#[test]
fn a_block_from_the_page_cache_clears_no_path() {
    let file = file_of(1 << 20, 1);
    std::fs::read(file.path()).unwrap();
    let file = open(file.path(), false, false).unwrap();
    let (mut cached, mut probes) = (0, 0);
    let mut disk = FaultyRing::over(&file, |slot| {
        cached += i32::from(is_at(slot, FileRequestStep::Cached));
        probes += i32::from(is_at(slot, FileRequestStep::Probe));
        is_at(slot, FileRequestStep::Data).then_some(EIO)
    });
    assert_eq!(disk.run(Op::Read, plain(), 3), Status::IoErr);
    drop(disk);
    assert!(cached > 1 && probes == 0, "{cached} blocks tried, {probes} read");
}

#[test]
fn eagain_is_tried_again_and_not_for_ever() {
    let file = file_of(65536, 0);
    let file = open(file.path(), false, false).unwrap();
    let mut disk = FaultyRing::over(&file, |_| None);
    let mut bio = bio_without_data(Op::Read, 3, 2);
    bio.start();
    let lane = &mut disk.lane;
    let key = lane.slots.insert(FileRequest::new(bio, &lane.shared));
    disk.core.turn(|cx| {
        let mut memory = Segments::from(udm_core::Buf::zeroed(1024));
        for _ in 0..RETRIES {
            match lane.failed(key, EAGAIN, memory, cx) {
                FileRequestNextAction::Again(again) => memory = again,
                other => panic!("{other:?}"),
            }
        }
        assert!(matches!(lane.failed(key, EAGAIN, memory, cx), FileRequestNextAction::End(Status::Again)));
    });
    let mut bio = lane.slots.remove(key).bio;
    bio.finish();
    assert_eq!(bio.data.len(), 1024);
}

/// The kernel reports lost data only once. A later flush must not succeed.
#[test]
fn a_failed_flush_is_for_good_on_every_core_and_name() {
    let folder = TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("a"), vec![0; 65536]).unwrap();
    std::fs::hard_link(path("a"), path("b")).unwrap();
    let disks = OpenDisks::default();
    let named = |name: &str| disks.open(&uri(&path(name))).unwrap().1;
    let (a, b) = (named("a"), named("b"));
    let mut first = true;
    let mut failing =
        FaultyRing::over(&a, |slot| (slot.is_none() && std::mem::take(&mut first)).then_some(EIO));
    let mut other = FaultyRing::over(&b, |_| None);
    assert_eq!(other.run(Op::Flush, plain(), 0), Status::Ok);
    assert_eq!(failing.run(Op::Write, plain(), 0), Status::Ok);
    assert_eq!(failing.run(Op::Flush, plain(), 0), Status::Medium, "no other path may make this good");
    for disk in [&mut failing, &mut other] {
        assert_eq!(disk.run(Op::Flush, plain(), 0), Status::Medium);
        for op in [Op::Write, Op::WriteZeroes] {
            assert_eq!(disk.run(op, BioFlags::FUA, 0), Status::Medium);
            assert_eq!(disk.run(op, BioFlags::PREFLUSH, 0), Status::Medium);
            assert_eq!(disk.run(op, plain(), 0), Status::Ok, "what promises nothing goes on");
        }
        assert_eq!(disk.run(Op::Read, plain(), 0), Status::Ok);
    }
    drop((failing, other));
    let mut late = FaultyRing::over(&named("b"), |_| None);
    assert_eq!(late.run(Op::Flush, plain(), 0), Status::Medium, "a name opened later is the same disk");
    drop((a, b, late));
    let mut reopened = FaultyRing::over(&named("b"), |_| None);
    assert_eq!(reopened.run(Op::Flush, plain(), 0), Status::Ok, "closed and opened again");
}

/// A write with FUA fails as a write, which concerns no other request, or as a sync.
#[test]
fn a_failed_fua_write_is_a_failed_sync_only_when_data_was_lost() {
    let is_fua =
        |slot: Option<&FileRequest>| is_at(slot, FileRequestStep::Data) && slot.is_some_and(|s| s.is_fua());
    let is_first = |slot: Option<&FileRequest>| is_fua(slot) && slot.is_some_and(|s| !s.retried_without_fua);
    let is_witness =
        |slot: Option<&FileRequest>| slot.is_some_and(|s| matches!(s.step, FileRequestStep::Witness(_)));
    for errno in [EIO, ENOSPC] {
        let file = file_of(65536, 1);
        let file = open(file.path(), false, false).unwrap();
        let mut disk = FaultyRing::over(&file, |slot| is_fua(slot).then_some(errno));
        let status = disk.run(Op::Write, BioFlags::FUA, 0);
        assert!(status != Status::Ok && (errno != ENOSPC || status == Status::NoSpace), "{status}");
        assert_eq!(disk.run(Op::Flush, plain(), 0), Status::Ok, "no sync has failed");
        // A full file system that has room a moment later.
        let mut disk = FaultyRing::over(&file, |slot| is_first(slot).then_some(errno));
        assert_eq!(disk.run(Op::Write, BioFlags::FUA, 0), Status::Ok);
        assert_eq!(disk.run(Op::Flush, plain(), 0), Status::Ok, "no sync has failed");
        // The lost data may belong to other requests: the write proves nothing either way.
        for write_works in [false, true] {
            let file = open(file_of(65536, 1).path(), false, false).unwrap();
            let mut disk = FaultyRing::over(&file, |slot| {
                let fails = if write_works { is_first(slot) } else { is_fua(slot) };
                (fails || is_witness(slot)).then_some(errno)
            });
            assert_eq!(disk.run(Op::Write, BioFlags::FUA, 0), Status::Medium);
            assert_eq!(disk.run(Op::Flush, plain(), 0), Status::Medium);
        }
    }
}

/// While one core checks whether data was lost, no sync of another core through the same descriptor
/// is confirmed.
#[test]
fn a_flush_beside_a_doubted_write_waits_for_the_answer() {
    for lost in [false, true] {
        let file = file_of(65536, 1);
        let file = open(file.path(), false, false).unwrap();
        let mut retried_without_fua = FaultyRing::over(&file, |slot| {
            let slot = slot?;
            let witness = matches!(slot.step, FileRequestStep::Witness(_));
            ((witness && lost) || (slot.is_fua() && !slot.retried_without_fua)).then_some(EIO)
        });
        let mut quick = FaultyRing::over(&file, |_| None);
        let mut write = bio_without_data(Op::Write, 0, 8);
        (write.flags, write.data) = (BioFlags::FUA, make_zeroed_segments(4096, &[]));
        retried_without_fua.submit(write);
        quick.submit(bio_without_data(Op::Flush, 0, 0));
        while quick.lane.held.is_empty() {
            assert!(quick.step().is_empty(), "the other one has yet to end");
            quick.core.park();
        }
        let want = if lost { Status::Medium } else { Status::Ok };
        assert_eq!((retried_without_fua.end().status, quick.end().status), (want, want));
    }
}

/// Of two flushes in flight, the kernel reports a failure to one, for data that both cover.
#[test]
fn a_flush_that_overlaps_a_failed_one_is_not_believed() {
    for fails in [false, true] {
        let file = file_of(65536, 1);
        let file = open(file.path(), false, false).unwrap();
        let mut slow = FaultyRing::over(&file, |_| fails.then_some(EIO));
        let mut quick = FaultyRing::over(&file, |_| None);
        slow.submit(bio_without_data(Op::Flush, 0, 0));
        quick.submit(bio_without_data(Op::Flush, 0, 0));
        for _ in 0..10_000 {
            assert!(quick.step().is_empty(), "the other one has yet to end");
            if !quick.lane.held.is_empty() {
                break;
            }
            quick.core.park();
        }
        let want = if fails { Status::Medium } else { Status::Ok };
        assert_eq!((slow.end().status, quick.end().status), (want, want));
    }
}

/// Cores have separate descriptors, and the kernel reports to each. No core waits for another, and
/// a failure holds for all.
#[test]
fn flushes_of_two_cores_do_not_wait_for_each_other() {
    let file = file_of(65536, 1);
    let (_, file) = OpenDisks::new(2).open(&uri(file.path())).unwrap();
    assert_eq!(file.handles.len(), 2);
    let mut slow = FaultyRing::on(0, &file, |_| Some(EIO));
    let mut quick = FaultyRing::on(1, &file, |_| None);
    slow.submit(bio_without_data(Op::Flush, 0, 0));
    assert_eq!(quick.run(Op::Flush, plain(), 0), Status::Ok);
    assert_eq!(slow.end().status, Status::Medium);
    assert_eq!(quick.run(Op::Flush, plain(), 0), Status::Medium);
}

/// Flushes that are requested during a flush share the next one.
#[test]
fn flushes_are_put_together() {
    let file = file_of(65536, 1);
    let file = open(file.path(), false, false).unwrap();
    let count = std::cell::Cell::new(0);
    let mut disk = FaultyRing::over(&file, |slot| {
        count.set(count.get() + i32::from(slot.is_none()));
        None
    });
    for _ in 0..10 {
        disk.submit(bio_without_data(Op::Flush, 0, 0));
    }
    let mut ended = 0;
    while ended < 10 {
        disk.core.park();
        for bio in disk.step() {
            assert_eq!(bio.status, Status::Ok);
            ended += 1;
        }
    }
    assert_eq!(count.get(), 2, "the first, and the others");
    for op in [Op::Write, Op::WriteZeroes, Op::Discard] {
        assert_eq!(disk.run(op, BioFlags::PREFLUSH | BioFlags::FUA, 0), Status::Ok, "{op:?}");
    }
}

/// With direct I/O the kernel caches no data that could be lost. It is a path error, and another
/// path may work.
#[test]
fn a_failed_flush_past_the_page_cache_fails_the_path() {
    let file = file_of(65536, 1);
    if !has_direct(&file) {
        return;
    }
    let file = open(file.path(), true, false).unwrap();
    let mut first = true;
    let mut disk = FaultyRing::over(&file, |_| std::mem::take(&mut first).then_some(EIO));
    assert_eq!(disk.run(Op::Flush, plain(), 0), Status::IoErr);
    assert_eq!(disk.run(Op::Flush, plain(), 0), Status::Ok);
}

/// Access to the missing part of a truncated file is a path error: other paths may still have it.
/// Writes do not extend the file, and when it has its old size again, all requests succeed.
#[test]
fn a_cut_file_gives_path_errors_until_it_is_whole_again() {
    for direct in [false, true] {
        let file = file_of(1 << 20, 1);
        if direct && !has_direct(&file) {
            continue;
        }
        let device = open(file.path(), direct, false).unwrap();
        let mut disk = FaultyRing::over(&device, |_| None);
        let mut before = FaultyRing::over(&device, |_| None);
        file.as_file().set_len(8192).unwrap();
        assert_eq!(disk.run(Op::Read, plain(), 0), Status::Ok);
        for sector in [16, 1024, 2040] {
            assert_eq!(disk.run(Op::Read, plain(), sector), Status::IoErr, "at {sector}");
        }
        let mut whole = Bio::read(Sector(0), Sectors(2048), make_zeroed_segments(1 << 20, &[]));
        whole.owner = udm_core::BioOwnerId(1);
        disk.submit(whole);
        let whole = disk.end();
        assert_eq!((whole.status, whole.data.len()), (Status::IoErr, 1 << 20));
        for op in [Op::Write, Op::WriteZeroes, Op::Discard] {
            for disk in [&mut disk, &mut before] {
                assert_eq!(disk.run(op, plain(), 1024), Status::IoErr, "{op:?}");
                assert_eq!(disk.run(op, plain(), 0), Status::Ok, "{op:?}");
            }
        }
        assert_eq!(file.as_file().metadata().unwrap().len(), 8192, "nothing grew");
        file.as_file().set_len(1 << 20).unwrap();
        assert_eq!(disk.run(Op::Write, plain(), 1024), Status::Ok);
        assert_eq!(disk.run(Op::Read, plain(), 2040), Status::Ok);
        file.as_file().set_len(0).unwrap();
        assert_eq!(disk.run(Op::Read, plain(), 1024), Status::IoErr, "nothing is left");
    }
}

/// udm does not look at the length of a file before each write. A read beyond the end finds out
/// that the file was truncated, and so does a write of the last block. Earlier writes make the file
/// longer again, and the gap reads as zeroes.
#[test]
fn a_write_before_the_cut_is_known_makes_the_file_longer() {
    let file = file_of(1 << 20, 1);
    let len = || file.as_file().metadata().unwrap().len();
    let device = open(file.path(), false, false).unwrap();
    let mut disk = FaultyRing::over(&device, |_| None);
    file.as_file().set_len(8192).unwrap();
    assert_eq!(disk.run(Op::Write, plain(), 1024), Status::Ok);
    assert_eq!(len(), 1032 * 512);
    let mut gap = Bio::read(Sector(512), Sectors(8), make_zeroed_segments(4096, &[]));
    gap.data.fill(7);
    gap.owner = udm_core::BioOwnerId(1);
    disk.submit(gap);
    let gap = disk.end();
    let mut bytes = [7; 4096];
    gap.data.copy_to(&mut bytes);
    assert_eq!((gap.status, bytes), (Status::Ok, [0; 4096]));
    assert_eq!(disk.run(Op::Read, plain(), 1536), Status::IoErr, "this read finds out");
    assert_eq!(disk.run(Op::Write, plain(), 1536), Status::IoErr);
    assert_eq!(len(), 1032 * 512);

    let file = file_of(1 << 20, 1);
    let device = open(file.path(), false, false).unwrap();
    let mut disk = FaultyRing::over(&device, |_| None);
    file.as_file().set_len(8192).unwrap();
    assert_eq!(disk.run(Op::Write, plain(), 2040), Status::IoErr, "this write finds out");
    assert_eq!(disk.run(Op::Write, plain(), 1024), Status::IoErr);
    assert_eq!(file.as_file().metadata().unwrap().len(), 8192);
}

/// A write after the end of a shrunken block device fails with "no space". That is a path error; a
/// full file system is not.
#[test]
fn no_space_behind_the_end_of_a_block_device_is_a_path_error() {
    let file = file_of(1 << 20, 1);
    let Some(device) = super::tests::LoopDevice::over(file.path()) else {
        return skipped("no loop device available");
    };
    let name = Path::new(&device.0);
    let mut disk = FaultyRing::over(&open(name, true, false).unwrap(), |_| None);
    file.as_file().set_len(65536).unwrap();
    let set = std::process::Command::new("losetup").arg("--set-capacity").arg(name).status().unwrap();
    assert!(set.success());
    for op in [Op::Write, Op::Read, Op::Write, Op::WriteZeroes] {
        assert_eq!(disk.run(op, plain(), 1024), Status::IoErr, "{op:?}");
        assert_eq!(disk.run(op, plain(), 0), Status::Ok, "{op:?}");
    }
    let file = file_of(65536, 1);
    let file = open(file.path(), false, false).unwrap();
    let mut disk = FaultyRing::over(&file, |slot| is_at(slot, FileRequestStep::Data).then_some(ENOSPC));
    assert_eq!(disk.run(Op::Write, plain(), 0), Status::NoSpace);
}
