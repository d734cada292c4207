//! Stores and logs of mirrors that udm wrote, opened by a real kernel, and the kernel's, opened by
//! udm.
//!
//! Runs only if `UDM_TEST_KERNEL` is a folder with an unpacked kernel package
//! (docs/internals/kernel-rows.md), and QEMU, busybox, cpio and dmsetup are installed; otherwise it
//! reports that it was skipped. The machine is emulated and takes a minute, so the test is not part
//! of every run.

mod support;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::guest::{GuestKernel, finish};
use support::{Server, has, text, until};
use tempfile::TempDir;

/// Bytes of an origin, of a store, and of a store that begins small and grows.
const ORIGIN: u64 = 8 << 20;
const STORE: u64 = 16 << 20;
const SMALL: u64 = 64 << 10;
const CHUNK: u64 = 4096;

/// In the order of their dependencies.
const MODULES: [&str; 3] = ["dm-mod", "dm-bufio", "dm-snapshot"];

/// A snapshot that udm created: three disks of the machine.
struct SnapshotCase {
    words: &'static str,
    /// The growth of the store.
    grows: &'static str,
    origin: PathBuf,
    store: PathBuf,
    /// The content of the snapshot, as udm read it.
    view: PathBuf,
}

fn image(folder: &Path, name: &str, bytes: u64) -> PathBuf {
    let path = folder.join(name);
    File::create(&path).unwrap().set_len(bytes).unwrap();
    path
}

/// Fills an origin with the number of each sector.
fn fill(path: &Path) {
    let file = File::options().write(true).open(path).unwrap();
    for sector in 0..ORIGIN / 512 {
        file.write_all_at(format!("{sector:015}\n").repeat(32).as_bytes(), sector * 512).unwrap();
    }
}

/// Runs qemu-io's commands on an export.
fn qemu_io(server: &Server, name: &str, commands: &[String]) {
    for some in commands.chunks(200) {
        let mut command = Command::new("qemu-io");
        command.args(["-f", "raw", &format!("nbd+unix:///{name}?socket={}", server.nbd.display())]);
        for each in some {
            command.args(["-c", each]);
        }
        let out = command.output().unwrap();
        let output = text(&out.stdout) + &text(&out.stderr);
        assert!(out.status.success() && !output.contains("failed"), "{name}: {output}");
    }
}

fn copy(server: &Server, name: &str, to: &Path) {
    let uri = format!("nbd+unix:///{name}?socket={}", server.nbd.display());
    let out = Command::new("nbdcopy").arg(uri).arg(to).output().unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
}

fn tables(case: &SnapshotCase) -> [String; 2] {
    let (sectors, origin, store) = (ORIGIN / 512, case.origin.display(), case.store.display());
    [
        format!("disk=0 {sectors} snapshot-origin {origin}"),
        format!("snap=0 {sectors} snapshot {origin} file:{store}{} {}", case.grows, case.words),
    ]
}

fn serve(case: &SnapshotCase) -> Server {
    Server::start(&tables(case).each_ref().map(String::as_str))
}

/// Creates a snapshot in a store that grows or not, causes the copy of `chunks` chunks, most by
/// writes of the origin and some by writes of the snapshot, and saves the snapshot's content.
fn make_case(
    folder: &Path,
    number: usize,
    words: &'static str,
    grows: &'static str,
    chunks: u64,
) -> SnapshotCase {
    let name = |prefix: &str| format!("{prefix}{number}");
    let case = SnapshotCase {
        words,
        grows,
        origin: image(folder, &name("origin"), ORIGIN),
        store: image(folder, &name("store"), if grows.is_empty() { STORE } else { SMALL }),
        view: folder.join(name("view")),
    };
    fill(&case.origin);
    let server = serve(&case);
    // A scattered order, so that records are in no order; 7 and 2048 have no common factor.
    let at = |n: u64| n * 7 % (ORIGIN / CHUNK) * CHUNK;
    let (own, others): (Vec<u64>, Vec<u64>) = (0..chunks).partition(|n| n % 5 == 0);
    let origin: Vec<String> =
        others.iter().map(|n| format!("write -q -P {} {} 512", n % 251, at(*n))).collect();
    let snap: Vec<String> = own.iter().map(|n| format!("write -q -P {} {} 4096", n % 251, at(*n))).collect();
    qemu_io(&server, "disk", &origin);
    qemu_io(&server, "snap", &snap);
    copy(&server, "snap", &case.view);
    assert!(!server.says(&["status", "snap"]).contains("Invalid"));
    server.says(&["remove", "snap", "disk"]);
    case
}

/// Both directions: 600 exceptions over three areas in a store that has grown, which the kernel
/// reads and extends; and a store with larger chunks, which the kernel merges.
#[test]
fn f22_a_real_kernel_takes_stores_that_udm_wrote() {
    let Some(kernel) = GuestKernel::find() else { return };
    if !["qemu-io", "nbdcopy"].iter().all(|tool| has(tool)) {
        return;
    }
    let folder = TempDir::new().unwrap();
    let filled = make_case(folder.path(), 0, "P 8", "?grow=64k", 600);
    let merged = make_case(folder.path(), 1, "PO 64", "", 300);
    let size = fs::metadata(&filled.store).unwrap().len();
    assert!(size > 600 * CHUNK, "it has grown to {size} bytes");
    let sectors = ORIGIN / 512;
    let script = format!(
        "for i in $(seq 50); do [ -b /dev/vdf ] && break; sleep 0.1; done\n\
         dmsetup --noudevsync create a --table '0 {sectors} snapshot /dev/vda /dev/vdb P 8'\n\
         echo \"KEPT $(dmsetup status a)\"; cmp /dev/dm-0 /dev/vdc && echo KEPT SAME\n\
         for n in 5 1000 2047; do echo KKKKKKKKKKKKKKK | dd of=/dev/dm-0 bs=4096 seek=$n conv=sync,fsync,notrunc 2>/dev/null; done\n\
         echo \"ADDED $(dmsetup status a)\"; dmsetup --noudevsync remove a\n\
         dmsetup --noudevsync create m --table '0 {sectors} snapshot-merge /dev/vdd /dev/vde PO 64'\n\
         for i in $(seq 300); do dmsetup status m; case \"$(dmsetup status m)\" in *' 128/32768 128'*) break;; esac; sleep 0.2; done\n\
         cmp /dev/dm-0 /dev/vdf && echo MERGED SEEN; dmsetup --noudevsync remove m\n\
         cmp /dev/vdd /dev/vdf && echo MERGED SAME"
    );
    let mut qemu = kernel.machine(folder.path(), &MODULES, &["dmsetup"], &script);
    for disk in [&filled, &merged].map(|case| [&case.origin, &case.store, &case.view]).as_flattened() {
        qemu.arg("-drive").arg(format!("file={},format=raw,if=virtio,cache=unsafe", disk.display()));
    }
    let output = finish(qemu.spawn().unwrap(), folder.path());
    // 600 records: the header, three areas, 600 chunks.
    let (used, areas) = ((2 + 600 + 600 / 256) * 8, (600 / 256 + 2) * 8);
    let status = |used: u64, areas: u64| format!("0 {sectors} snapshot {used}/{} {areas}", size / 512);
    for line in ["KEPT SAME", "MERGED SEEN", "MERGED SAME", &format!("KEPT {}", status(used, areas))] {
        assert!(output.contains(line), "no {line:?}: {output}");
    }
    // Back in udm: the kernel's changes are present, and nothing else has changed.
    let server = serve(&filled);
    let back = folder.path().join("back");
    copy(&server, "snap", &back);
    let (mut expected, found) = (fs::read(&filled.view).unwrap(), fs::read(back).unwrap());
    for chunk in [5, 1000, 2047] {
        let bytes = &mut expected[chunk * CHUNK as usize..][..CHUNK as usize];
        bytes.fill(0);
        bytes[..16].copy_from_slice(b"KKKKKKKKKKKKKKK\n");
    }
    let wrong = expected.iter().zip(&found).position(|(expected, found)| expected != found);
    assert_eq!((wrong, found.len()), (None, expected.len()), "{output}");
    let added = output.lines().find_map(|line| line.trim_end().strip_prefix("ADDED ")).unwrap_or_default();
    assert_eq!(server.says(&["status", "snap"]).trim_end(), added);
}

/// Sectors per region of the mirrors.
const REGION: u64 = 64;

/// Bytes of a region, and the number of regions.
const REGION_LEN: usize = REGION as usize * 512;
const REGIONS: usize = (ORIGIN / 512 / REGION) as usize;

/// A mirror with its log.
struct MirrorCase {
    source: PathBuf,
    destination: PathBuf,
    log: PathBuf,
}

impl MirrorCase {
    /// The source has data; the destination and the log are blank.
    fn new(folder: &Path, number: usize) -> MirrorCase {
        let name = |prefix: &str| format!("{prefix}{number}");
        let source = image(folder, &name("source"), ORIGIN);
        fill(&source);
        let destination = image(folder, &name("destination"), ORIGIN);
        MirrorCase { source, destination, log: image(folder, &name("log"), 64 << 10) }
    }

    fn disks(&self) -> [&PathBuf; 3] {
        [&self.source, &self.destination, &self.log]
    }

    /// Serves the mirror and waits until all is copied.
    fn copy(&self) -> Server {
        let (sectors, [source, destination, log]) = (ORIGIN / 512, self.disks().map(|path| path.display()));
        let table = format!("d=0 {sectors} mirror disk 2 file:{log} {REGION} 2 {source} 0 {destination} 0");
        let server = Server::start(&[&table]);
        let all = format!(" {REGIONS}/{REGIONS} ");
        until("a copy of all regions", || server.says(&["status", "d"]).contains(&all).then_some(()));
        server
    }

    /// True if all regions are clean in the log.
    fn has_clean_log(&self) -> bool {
        let log = fs::read(&self.log).unwrap();
        log[1024..][..REGIONS / 8].iter().all(|bits| *bits == 0xff)
    }

    /// Overwrites the begin of a region of the destination.
    fn mark(&self, region: usize) {
        let file = File::options().write(true).open(&self.destination).unwrap();
        file.write_all_at(&[9; 512], (region * REGION_LEN) as u64).unwrap();
    }

    /// The regions that differ.
    fn differences(&self) -> Vec<usize> {
        let [source, destination] = [&self.source, &self.destination].map(|path| fs::read(path).unwrap());
        let regions = source.chunks(REGION_LEN).zip(destination.chunks(REGION_LEN));
        regions.enumerate().filter(|(_, (a, b))| a != b).map(|(region, _)| region).collect()
    }
}

/// A kernel copies the regions that a killed udm left dirty, and no others; udm copies those that
/// the kernel could not copy, and no others.
#[test]
fn a_real_kernel_and_udm_continue_each_others_mirrors() {
    let modules = ["dm-mod", "dm-log", "dm-region-hash", "dm-mirror"];
    let Some(kernel) = GuestKernel::find().filter(|kernel| kernel.has_module("dm-mirror")) else { return };
    if !has("qemu-io") {
        return;
    }
    let folder = TempDir::new().unwrap();
    let [of_udm, of_kernel] = [0, 1].map(|number| MirrorCase::new(folder.path(), number));
    // Two regions are dirty at the kill. Their copies are wrong, as if the writes had not landed.
    let mut server = of_udm.copy();
    until("clean regions", || of_udm.has_clean_log().then_some(()));
    let writes = [3, 70].map(|region| format!("write -q -P 7 {} 4096", region * REGION_LEN));
    qemu_io(&server, "d", &writes);
    server.kill();
    [3, 70, 10].into_iter().for_each(|region| of_udm.mark(region));
    // The second half of the other source cannot be read.
    let (sectors, half) = (ORIGIN / 512, ORIGIN / 1024);
    let wait = |name: &str, count: usize| {
        format!(
            "for i in $(seq 300); do case \"$(dmsetup status {name})\" in *' {count}/{REGIONS} '*) break;; esac; \
             sleep 0.2; done; echo \"STATUS $(dmsetup status {name})\"\n"
        )
    };
    let script = format!(
        "for i in $(seq 50); do [ -b /dev/vdf ] && break; sleep 0.1; done\n\
         dmsetup --noudevsync create m --table '0 {sectors} mirror disk 2 /dev/vdc {REGION} 2 /dev/vda 0 /dev/vdb 0'\n\
         {}echo KKKKKKKKKKKKKKK | dd of=/dev/dm-0 bs=4096 seek={} conv=sync,fsync,notrunc\n\
         printf '0 {half} linear /dev/vdd 0\\n{half} {half} error\\n' | dmsetup --noudevsync create e\n\
         dmsetup --noudevsync create k --table '0 {sectors} mirror disk 2 /dev/vdf {REGION} 2 /dev/dm-1 0 /dev/vde 0 1 handle_errors'\n\
         {}dmsetup --noudevsync remove k\n",
        wait("m", REGIONS),
        200 * REGION_LEN / 4096,
        wait("k", REGIONS / 2),
    );
    let mut qemu = kernel.machine(folder.path(), &modules, &["dmsetup"], &script);
    for disk in [of_udm.disks(), of_kernel.disks()].as_flattened() {
        qemu.arg("-drive").arg(format!("file={},format=raw,if=virtio,cache=unsafe", disk.display()));
    }
    let output = finish(qemu.spawn().unwrap(), folder.path());
    let counts = [REGIONS, REGIONS / 2].map(|count| format!(" {count}/{REGIONS} "));
    let statuses: Vec<_> = output.lines().filter(|line| line.starts_with("STATUS ")).collect();
    assert!(
        statuses.iter().zip(&counts).filter(|(line, count)| line.contains(*count)).count() == 2,
        "{output}"
    );
    assert_eq!(of_udm.differences(), [10], "{output}");
    let lower = of_kernel.differences();
    assert_eq!(lower, (REGIONS / 2..REGIONS).collect::<Vec<_>>(), "{output}");
    // Back in udm.
    of_kernel.mark(20);
    drop((of_udm.copy(), of_kernel.copy()));
    assert_eq!((of_udm.differences(), of_kernel.differences()), (vec![10], vec![20]));
    let written = fs::read(&of_udm.destination).unwrap();
    assert!(written[200 * REGION_LEN..].starts_with(b"KKKKKKKKKKKKKKK\n"));
}
