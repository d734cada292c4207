//! Files as disks, on a real file system and a real ring.

use super::{FileDevice, OpenDisks};
use crate::testing::{bio_without_data, make_zeroed_segments};
use proptest::prelude::*;
use rustix::fd::AsFd;
use rustix::fs::{FallocateFlags, Mode};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use tempfile::{NamedTempFile, TempDir};
use udm_core::{
    Batch, Bio, BioFlags, Buf, CoreId, Device, DeviceControlError, Lane, Limits, Op, Sector, Sectors,
    Segments, Status,
};
use udm_runtime::{CoreOptions, LocalCore, ProcessCores};
use udm_wire::uri::FileUri;

/// A core with a lane of the file.
pub(super) struct DiskUnderTest {
    pub(super) core: LocalCore,
    lane: Box<dyn Lane>,
    limits: Limits,
}

pub(super) fn core() -> LocalCore {
    LocalCore::attach(&ProcessCores::new(1).unwrap(), CoreId(0), CoreOptions::default()).unwrap()
}

/// The URI of `path` with default options.
pub(super) fn uri(path: &Path) -> FileUri {
    FileUri::new(path.into())
}

/// Opens a disk that no other device uses.
pub(super) fn open(path: &Path, direct: bool, readonly: bool) -> Result<FileDevice, DeviceControlError> {
    let uri = FileUri { direct: Some(direct), readonly, ..uri(path) };
    OpenDisks::default().open(&uri).map(|(_, file)| file)
}

impl DiskUnderTest {
    pub(super) fn open(path: &Path, direct: bool, readonly: bool) -> DiskUnderTest {
        DiskUnderTest::over(&open(path, direct, readonly).unwrap())
    }

    pub(super) fn over(file: &FileDevice) -> DiskUnderTest {
        let mut core = core();
        let lane = core.open(file).unwrap();
        DiskUnderTest { core, lane, limits: file.limits() }
    }

    pub(super) fn run_all(&mut self, mut batch: Batch) -> Batch {
        let (n, mut done) = (batch.len(), Batch::new());
        batch.iter_mut().for_each(|b| b.start());
        self.core.turn(|cx| self.lane.submit(&mut batch, cx));
        for _ in 0..100_000 {
            self.core.turn(|cx| self.lane.poll(&mut done, cx));
            if done.len() >= n {
                break;
            }
            self.core.park();
        }
        assert_eq!(done.len(), n, "requests are missing");
        done.iter_mut().for_each(|b| b.finish());
        done
    }

    pub(super) fn run(&mut self, bio: Box<Bio>) -> Box<Bio> {
        self.run_all(vec![bio]).pop().unwrap()
    }

    pub(super) fn op(&mut self, op: Op, flags: BioFlags, sector: u64, sectors: u64) -> Status {
        let mut bio = bio_without_data(op, sector, sectors);
        bio.flags = flags;
        if op.has_data() {
            bio.data = make_zeroed_segments(sectors as usize * 512, &[]);
        }
        self.run(bio).status
    }

    pub(super) fn read(&mut self, sector: u64, sectors: u64) -> Vec<u8> {
        let data = make_zeroed_segments(sectors as usize * 512, &[]);
        let bio = self.run(Bio::read(Sector(sector), Sectors(sectors), data));
        assert_eq!(bio.status, Status::Ok);
        let mut out = vec![0; bio.data.len()];
        bio.data.copy_to(&mut out);
        out
    }
}

pub(super) fn file_of(len: u64, byte: u8) -> NamedTempFile {
    filled(NamedTempFile::new().unwrap(), len, byte)
}

/// Creates such a file on a memory file system, if there is one.
pub(super) fn file_in_memory(len: u64, byte: u8) -> Option<NamedTempFile> {
    let file = NamedTempFile::new_in("/dev/shm")
        .ok()
        .filter(|file| super::inline_io::is_on_memory_filesystem(file.as_fd()));
    if file.is_none() {
        skipped("/dev/shm is no tmpfs");
    }
    Some(filled(file?, len, byte))
}

fn filled(file: NamedTempFile, len: u64, byte: u8) -> NamedTempFile {
    file.as_file().write_all_at(&vec![byte; len as usize], 0).unwrap();
    file.as_file().sync_all().unwrap();
    file
}

#[expect(clippy::print_stderr, reason = "a test that can't run here says so")]
pub(super) fn skipped(why: &str) {
    eprintln!("skipped: {why}");
}

/// Returns whether files in the temporary directory support `O_DIRECT`.
pub(super) fn has_direct(file: &NamedTempFile) -> bool {
    let ok = open(file.path(), true, false).is_ok();
    if !ok {
        skipped("no direct I/O here");
    }
    ok
}

#[derive(Debug)]
struct RandomIo {
    write: bool,
    at: u64,
    n: u64,
    cuts: Vec<usize>,
    seed: u8,
    fua: bool,
}

fn request() -> impl Strategy<Value = RandomIo> {
    let cuts = proptest::collection::vec(1..5000usize, 0..3);
    (any::<(bool, u64, u64, u8, bool)>(), cuts).prop_map(|((write, at, n, seed, fua), cuts)| RandomIo {
        write,
        at,
        n,
        cuts,
        seed,
        fua,
    })
}

/// Compares random writes and reads, in pieces cut anywhere, with a vector.
fn as_a_vector(file: &NamedTempFile, direct: bool, requests: &[RandomIo]) {
    if direct && !has_direct(file) {
        return;
    }
    let mut disk = DiskUnderTest::open(file.path(), direct, false);
    let block = u64::from(disk.limits.logical_block) / 512;
    let mut model = vec![0u8; 2 << 20];
    for RandomIo { write, at, n, cuts, seed, fua } in requests {
        let sector = at % (4096 / block) * block;
        let sectors = ((n % 600) * block + block).min(4096 - sector);
        let range = (sector * 512) as usize..((sector + sectors) * 512) as usize;
        let data = make_zeroed_segments(range.len(), cuts);
        if *write {
            let bytes: Vec<u8> = (0..range.len()).map(|i| (i / 7) as u8 ^ seed).collect();
            let mut bio = Bio::write(Sector(sector), Sectors(sectors), data);
            bio.data.copy_from(&bytes);
            if *fua {
                bio.flags = BioFlags::FUA | BioFlags::PREFLUSH;
            }
            let bio = disk.run(bio);
            assert_eq!(bio.status, Status::Ok);
            model[range.clone()].copy_from_slice(&bytes);
            let mut back = vec![0; range.len()];
            assert_eq!(bio.data.copy_to(&mut back), range.len(), "a bio comes back with its data");
            assert_eq!(back, bytes);
        } else {
            let pieces = data.iter().map(|b| (b.addr(), b.len())).collect::<Vec<_>>();
            let bio = disk.run(Bio::read(Sector(sector), Sectors(sectors), data));
            assert_eq!(bio.status, Status::Ok);
            assert_eq!(bio.data.iter().map(|b| (b.addr(), b.len())).collect::<Vec<_>>(), pieces);
            let mut got = vec![0; range.len()];
            bio.data.copy_to(&mut got);
            assert!(got == model[range], "read of {sectors} at {sector}");
        }
    }
    let on_disk = std::fs::read(file.path()).unwrap();
    assert!(on_disk == model, "what is in the file");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]
    #[test]
    fn files_behave_as_vectors(
        direct: bool,
        requests in proptest::collection::vec(request(), 1..12),
    ) {
        as_a_vector(&file_of(2 << 20, 0), direct, &requests);
        if let Some(file) = file_in_memory(2 << 20, 0) {
            as_a_vector(&file, direct, &requests);
        }
    }
}

/// A list of more buffers than one operation takes needs several operations.
#[test]
fn more_pieces_than_one_operation_takes() {
    let file = file_of(1 << 20, 0);
    let mut disk = DiskUnderTest::open(file.path(), false, false);
    let mut data = Segments::new();
    for i in 0..2048u32 {
        let mut piece = Buf::zeroed(256);
        piece.fill((i % 251) as u8);
        data.push(piece);
    }
    let bio = disk.run(Bio::write(Sector(8), Sectors(1024), data));
    assert_eq!((bio.status, bio.data.iter().count()), (Status::Ok, 2048));
    let got = disk.read(8, 1024);
    assert!(got.chunks(256).enumerate().all(|(i, c)| c.iter().all(|&x| x == (i % 251) as u8)));
}

#[test]
fn more_requests_than_slots() {
    let file = file_of(4 << 20, 3);
    let mut disk = DiskUnderTest::open(file.path(), false, false);
    let bios = (0..3000).map(|i| Bio::read(Sector(i), Sectors(1), make_zeroed_segments(512, &[]))).collect();
    let done = disk.run_all(bios);
    assert!(done.iter().all(|b| b.status == Status::Ok && b.data.iter().all(|d| d.iter().all(|&x| x == 3))));
}

#[test]
fn holes_are_punched_and_blocks_kept() {
    let file = file_of(1 << 20, 7);
    let mut disk = DiskUnderTest::open(file.path(), false, false);
    if disk.limits.max_discard == Sectors::ZERO {
        return skipped("no holes on this file system");
    }
    let blocks = || {
        file.as_file().sync_all().unwrap();
        file.as_file().metadata().unwrap().blocks()
    };
    let full = blocks();
    assert_eq!(disk.op(Op::Discard, BioFlags::empty(), 0, 512), Status::Ok);
    let half = blocks();
    assert!(half + 400 <= full, "{full} blocks before, {half} after the discard");
    assert_eq!(disk.op(Op::WriteZeroes, BioFlags::NOUNMAP | BioFlags::FUA, 512, 512), Status::Ok);
    assert_eq!(blocks(), half, "blocks stay allocated");
    assert!(disk.read(512, 512).iter().all(|&x| x == 0));
    assert_eq!(disk.op(Op::WriteZeroes, BioFlags::empty(), 1024, 512), Status::Ok);
    assert!(blocks() + 400 <= half);
    assert!(disk.read(1024, 512).iter().all(|&x| x == 0));
    assert!(disk.read(1536, 512).iter().all(|&x| x == 7), "the rest is untouched");
    assert_eq!(file.as_file().metadata().unwrap().len(), 1 << 20);
}

/// A tmpfs of 1 MiB, unmounted when it is dropped.
struct SmallTmpfs(TempDir);

impl SmallTmpfs {
    fn mount() -> Option<SmallTmpfs> {
        let dir = TempDir::new().unwrap();
        let mut mount = std::process::Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=1M", "udm-test"]).arg(dir.path());
        let mounted = mount.stderr(std::process::Stdio::null()).status().is_ok_and(|s| s.success());
        mounted.then_some(SmallTmpfs(dir))
    }
}

impl Drop for SmallTmpfs {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_file_system_is_no_space_and_zeroes_can_be_written() {
    let Some(fs) = SmallTmpfs::mount() else { return skipped("tmpfs can't be mounted") };
    let path = fs.0.path().join("disk");
    std::fs::File::create(&path).unwrap().set_len(4 << 20).unwrap();
    let mut disk = DiskUnderTest::open(&path, false, false);
    assert_eq!(disk.op(Op::Write, BioFlags::empty(), 0, 1024), Status::Ok);
    let mut data = make_zeroed_segments(1 << 20, &[4096]);
    data.fill(1);
    let bio = disk.run(Bio::write(Sector(2048), Sectors(2048), data));
    assert_eq!((bio.status, bio.data.len()), (Status::NoSpace, 1 << 20));
    assert_eq!(disk.op(Op::Discard, BioFlags::empty(), 2048, 2048), Status::Ok);
    // tmpfs has no ZERO_RANGE.
    let mut data = make_zeroed_segments(512 << 10, &[]);
    data.fill(9);
    assert_eq!(disk.run(Bio::write(Sector(0), Sectors(1024), data)).status, Status::Ok);
    let fd = rustix::fs::open(&path, rustix::fs::OFlags::RDWR, Mode::empty()).unwrap();
    let native = rustix::fs::fallocate(&fd, FallocateFlags::ZERO_RANGE, 0, 4096).is_ok();
    for at in [8, 8] {
        assert_eq!(disk.op(Op::WriteZeroes, BioFlags::NOUNMAP | BioFlags::FUA, at, 1000), Status::Ok);
    }
    if !native {
        let got = disk.read(0, 1024);
        let (before, rest) = got.split_at(8 * 512);
        let (zeroes, behind) = rest.split_at(1000 * 512);
        assert!(before.iter().chain(behind).all(|&x| x == 9), "only the range was written");
        assert!(zeroes.iter().all(|&x| x == 0));
    }
}

/// A loop device over a file, detached when it is dropped.
pub(super) struct LoopDevice(pub(super) String);

impl LoopDevice {
    pub(super) fn over(path: &Path) -> Option<LoopDevice> {
        let losetup =
            std::process::Command::new("losetup").args(["--find", "--show"]).arg(path).output().ok()?;
        let name = String::from_utf8(losetup.stdout).ok()?.trim().to_owned();
        (losetup.status.success() && !name.is_empty()).then_some(LoopDevice(name))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = std::process::Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

#[test]
fn block_devices() {
    let file = file_of(1 << 20, 7);
    let Some(device) = LoopDevice::over(file.path()) else { return skipped("no loop device is available") };
    for direct in [false, true] {
        let mut disk = DiskUnderTest::open(Path::new(&device.0), direct, false);
        assert_eq!((disk.limits.size, disk.limits.logical_block), (Sectors(2048), 512));
        assert_eq!(disk.limits.private_cache, !direct);
        assert_eq!(disk.read(2040, 8), vec![7; 4096]);
        let mut data = make_zeroed_segments(4096, &[100]);
        data.fill(9);
        let mut bio = Bio::write(Sector(1), Sectors(8), data);
        bio.flags = BioFlags::FUA;
        assert_eq!(disk.run(bio).status, Status::Ok);
        assert_eq!(disk.read(1, 8), vec![9; 4096]);
        assert_eq!(disk.op(Op::Flush, BioFlags::empty(), 0, 0), Status::Ok);
        for flags in [BioFlags::empty(), BioFlags::NOUNMAP] {
            assert_eq!(disk.op(Op::WriteZeroes, flags, 8, 8), Status::Ok);
            assert_eq!(disk.read(8, 8), vec![0; 4096]);
        }
        if disk.limits.max_discard > Sectors::ZERO {
            assert_eq!(disk.op(Op::Discard, BioFlags::empty(), 8, 8), Status::Ok);
        }
    }
}

/// Another program extends the file while it is opened, after its size was read.
#[test]
fn opening_a_file_that_grows_destroys_nothing() {
    let file = file_of(65536, 1);
    let before = rustix::fs::fstat(file.as_file()).unwrap();
    file.as_file().write_all_at(&vec![7; 4 << 20], 65536).unwrap();
    super::open::can_discard(file.as_file().as_fd(), &before);
    let now = std::fs::read(file.path()).unwrap();
    assert!(now.len() == (4 << 20) + 65536 && now[65536..].iter().all(|&byte| byte == 7));
}

#[test]
fn read_only_refuses_writes() {
    let file = file_of(4096, 1);
    let mut disk = DiskUnderTest::open(file.path(), false, true);
    assert!(disk.limits.read_only);
    for op in [Op::Write, Op::Discard, Op::WriteZeroes] {
        assert_eq!(disk.op(op, BioFlags::empty(), 0, 1), Status::ReadOnly);
    }
    assert_eq!(disk.op(Op::Flush, BioFlags::empty(), 0, 0), Status::Ok);
    assert!(disk.read(0, 8).iter().all(|&x| x == 1));
}

#[test]
fn flushes_and_ranges_beyond_the_end() {
    let file = file_of(4096 + 100, 1);
    let mut disk = DiskUnderTest::open(file.path(), false, false);
    assert_eq!(disk.limits.size, Sectors(8), "a part of a sector is left out");
    assert_eq!(disk.op(Op::Flush, BioFlags::empty(), 0, 0), Status::Ok);
    for op in [Op::Read, Op::Write, Op::Discard, Op::WriteZeroes] {
        assert_eq!(disk.op(op, BioFlags::empty(), 7, 2), Status::IoErr);
    }
    assert_eq!(file.as_file().metadata().unwrap().len(), 4096 + 100, "nothing grew");
}

#[test]
fn what_is_no_disk_is_refused() {
    let dir = TempDir::new().unwrap();
    let fifo = dir.path().join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)
        .unwrap();
    let socket = dir.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let empty = dir.path().join("empty");
    std::fs::File::create(&empty).unwrap();
    let text = |path: &Path| {
        let e = open(path, false, false).err().unwrap();
        (e.errno, e.text.strip_prefix(&format!("{}: ", path.display())).unwrap().to_owned())
    };
    let missing = dir.path().join("missing");
    assert_eq!(text(&missing), (2, "No such file or directory".into()));
    assert_eq!(text(&missing.join("below")), (2, "No such file or directory".into()));
    assert_eq!(text(&empty.join("below")), (20, "Not a directory".into()));
    let neither = |is: &str| (22, format!("neither a regular file nor a block device but {is}"));
    assert_eq!(text(dir.path()), neither("a directory"));
    assert_eq!(text(&fifo), neither("a FIFO"));
    assert_eq!(text(&socket), neither("a socket"));
    assert_eq!(text(Path::new("/dev/null")), neither("a character device"));
    assert_eq!(text(&empty), (22, "shorter than a block (512 bytes)".into()));
}
