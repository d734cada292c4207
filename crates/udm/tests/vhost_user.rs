//! Disks of virtual machines: a small machine whose server is killed, and a real kernel.

#[path = "../../udm-frontends/tests/vhost_user/driver.rs"]
#[allow(dead_code, reason = "the front end's tests use all of it")]
mod driver;
mod support;

use driver::{DATA, TestMachine, message};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::collections::HashMap;
use std::fs;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use support::guest::{GuestKernel, finish, output};
use support::{Server, UDM, has, text, udm, until};
use tempfile::TempDir;
use udm_wire::virtio::VirtioFeatures;

const READ: u32 = 0;
const WRITE: u32 = 1;

/// The modules of ext4; those that are built in are missing from the package.
const EXT4: [&str; 6] = ["libcrc32c", "crc32c_generic", "crc16", "mbcache", "jbd2", "ext4"];

/// Blocks of 4 KiB of the disk.
const BLOCKS: u64 = 512;
const BLOCK: usize = 4096;
/// Places for the data of requests in flight.
const PLACES: usize = 30;

fn serve(image: &Path, delay: u32, socket: &Path) -> Server {
    let sectors = BLOCKS * 8;
    let table = format!("disk=0 {sectors} delay {} 0 0 {} 0 {delay}", image.display(), image.display());
    Server::start_with(&[&table], &["--vhost-user", &format!("disk={}", socket.display())])
}

fn block(number: u64, version: u64) -> Vec<u8> {
    [number, version].map(u64::to_ne_bytes).concat().repeat(BLOCK / 16)
}

/// A machine that writes all the time.
struct WritingTestMachine {
    machine: TestMachine,
    rng: SmallRng,
    /// Completed versions.
    written: Vec<u64>,
    version: u64,
    places: Vec<usize>,
    /// Block, version and place of each request, by ring and head.
    in_flight: HashMap<(usize, u16), (u64, u64, usize)>,
}

impl WritingTestMachine {
    fn add(&mut self) {
        let Some(place) = self.places.pop() else { return };
        let number = loop {
            let number = self.rng.random_range(0..BLOCKS);
            if self.in_flight.values().all(|(other, ..)| *other != number) {
                break number;
            }
        };
        self.version += 1;
        let at = DATA + place * BLOCK;
        self.machine.write(at, &block(number, self.version));
        let ring = self.rng.random_range(0..2);
        let old = self.machine.avail(ring);
        let head = self.machine.add(ring, WRITE, number * 8, &[(at, BLOCK)], &[]);
        self.machine.kick(ring, old);
        self.in_flight.insert((ring, head), (number, self.version, place));
    }

    /// Takes what is complete.
    fn reap(&mut self) {
        for ring in 0..2 {
            while let Some((head, written)) = self.machine.take_used(ring) {
                let (number, version, place) = self.in_flight.remove(&(ring, head)).expect("completed twice");
                let status = self.machine.read((self.machine.status_at(ring, head), 1));
                assert_eq!((written, status), (1, vec![0]), "block {number}");
                self.written[number as usize] = version;
                self.places.push(place);
            }
        }
    }
}

/// Servers that are killed and upgraded under load: the machine reconnects after a kill, and stays
/// connected over an upgrade. Every request completes once, and every block has its last
/// acknowledged version.
#[test]
fn a_machine_survives_servers_that_are_killed_and_upgraded() {
    let folder = TempDir::new().unwrap();
    let (image, socket) = (folder.path().join("disk"), folder.path().join("vhost.sock"));
    fs::File::create(&image).unwrap().set_len(BLOCKS * BLOCK as u64).unwrap();
    let mut server = serve(&image, 10, &socket);
    let mut machine = TestMachine::new(&socket, 2);
    machine.negotiate(VirtioFeatures::EVENT_IDX | VirtioFeatures::INDIRECT_DESC);
    machine.create_inflight();
    machine.reconnect(&socket);
    let mut load = WritingTestMachine {
        machine,
        rng: SmallRng::seed_from_u64(7),
        written: vec![0; BLOCKS as usize],
        version: 0,
        places: (0..PLACES).collect(),
        in_flight: HashMap::new(),
    };
    let mut submitted_again = 0;
    for round in 0..24 {
        for _ in 0..load.rng.random_range(1..200) {
            load.add();
            load.reap();
            std::thread::sleep(Duration::from_micros(load.rng.random_range(0..800)));
        }
        if round % 2 == 0 {
            server.upgrade(&[UDM]);
        } else {
            server.kill();
            load.reap();
            submitted_again += load.in_flight.len();
            server = serve(&image, 10, &socket);
            load.machine.reconnect(&socket);
        }
        until("requests of the last life", || {
            load.reap();
            load.in_flight.is_empty().then_some(())
        });
        for number in 0..BLOCKS {
            let at = DATA + PLACES * BLOCK;
            assert_eq!(load.machine.request(0, READ, number * 8, &[], &[(at, BLOCK)]).0, 0);
            let version = load.written[number as usize];
            let expected = if version == 0 { vec![0; BLOCK] } else { block(number, version) };
            assert!(load.machine.read((at, BLOCK)) == expected, "round {round}: block {number}");
        }
    }
    assert!(submitted_again > 0, "no request was in flight when its server was killed");
}

/// `udm bench` as the driver, which nobody here wrote: with and without polling, on this server and
/// on QEMU's.
#[test]
fn bench_measures_a_server() {
    let folder = TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let disk = |name: &str| format!("{name}={}", path(name));
    let options = ["--vhost-user", &disk("disk"), "--vhost-user", &disk("frozen"), "--cores", "0,1"];
    fs::File::create(path("file")).unwrap().set_len(64 << 20).unwrap();
    let frozen = format!("frozen=file:{}?readonly=on", path("file"));
    let server = Server::start_with(&["disk=mem:64M", &frozen], &options);
    let bench = |socket: &str, words: &str| {
        let mut command =
            udm(&["bench", "--vhost-user", &path(socket), "--json", "--bs=4k", "--number_ios=2000"]);
        command.args(words.split_whitespace()).output().unwrap()
    };
    let counts = |socket: &str, words: &str| {
        let out = bench(socket, words);
        assert!(out.status.success(), "{}{}", text(&out.stderr), server.log());
        let report: Value = serde_json::from_slice(&out.stdout).unwrap();
        ["read", "write", "trim"].map(|way| report["jobs"][0][way]["total_ios"].as_u64().unwrap())
    };
    assert_eq!(counts("disk", "--rw=randread --iodepth=32 --numjobs=2 --group_reporting"), [4000, 0, 0]);
    assert_eq!(counts("disk", "--rw=randwrite --iodepth=341 --poll"), [0, 2000, 0]);
    assert_eq!(counts("disk", "--rw=randtrim --iodepth=1"), [0, 0, 2000]);
    let packed = "--packed --rw=randrw --rwmixread=50 --iodepth=32 --numjobs=2 --group_reporting";
    assert_eq!(counts("disk", packed).iter().sum::<u64>(), 4000);
    assert_eq!(counts("disk", "--packed --rw=randwrite --iodepth=341 --poll"), [0, 2000, 0]);
    assert_eq!(counts("disk", "--packed --rw=randtrim --iodepth=1"), [0, 0, 2000]);
    assert_eq!(counts("frozen", "--rw=read --iodepth=4 --poll"), [2000, 0, 0]);
    if has("qemu-storage-daemon") {
        let mut qemu = Command::new("qemu-storage-daemon");
        qemu.args(["--blockdev", "driver=null-co,node-name=n,size=67108864"]).arg("--export").arg(format!(
            "type=vhost-user-blk,id=e,node-name=n,writable=on,addr.type=unix,addr.path={}",
            path("qemu")
        ));
        let mut qemu = qemu.spawn().unwrap();
        until("QEMU's server", || Path::new(&path("qemu")).exists().then_some(()));
        assert_eq!(counts("qemu", "--rw=randrw --rwmixread=100 --iodepth=32"), [2000, 0, 0]);
        qemu.kill().unwrap();
        qemu.wait().unwrap();
    }
    for (socket, words, why) in [
        ("disk", "--rw=read --iodepth=342", "iodepth=342: at most 341 over vhost-user"),
        ("disk", "--rw=write --verify=crc32c", "verify: not over vhost-user"),
        ("frozen", "--rw=write", "the device is read-only"),
        ("nobody", "--rw=read", "No such file or directory"),
    ] {
        let out = bench(socket, words);
        assert_eq!(out.status.code(), Some(1), "{words}");
        assert!(text(&out.stderr).contains(why), "{words}: {}", text(&out.stderr));
    }
}

/// The command line that QEMU and libvirt expect of a back-end program.
#[test]
fn a_back_end_program_serves_a_file() {
    let folder = TempDir::new().unwrap();
    let (program, file) = (folder.path().join("vhost-user-blk"), folder.path().join("a disk"));
    std::os::unix::fs::symlink(UDM, &program).unwrap();
    fs::write(&file, block(1, 2)).unwrap();
    let run = |args: &[&str]| Command::new(&program).args(args).output().unwrap();
    let capabilities = text(&run(&["--print-capabilities"]).stdout);
    assert_eq!(capabilities, "{\"type\": \"block\", \"features\": [\"read-only\", \"blk-file\"]}\n");
    for wrong in [&[][..], &["--blk-file=x"], &["--fd=3"], &["--fd=3", "--socket-path=s", "--blk-file=x"]] {
        assert_eq!(run(wrong).status.code(), Some(2), "{wrong:?}");
    }
    let missing = run(&["--socket-path=s", "--blk-file=/dev/null/none"]);
    assert!(text(&missing.stderr).contains("/dev/null/none: Not a directory"), "{missing:?}");

    let reads = |machine: &mut TestMachine| {
        machine.start(VirtioFeatures::INDIRECT_DESC);
        assert_eq!(machine.request(0, READ, 0, &[], &[(DATA, BLOCK)]).0, 0);
        assert!(machine.read((DATA, BLOCK)) == block(1, 2));
    };
    // A listening socket: two machines, one after the other, and a disk that refuses writes.
    let socket = folder.path().join("s");
    let blk_file = format!("--blk-file={}", file.display());
    let mut command = Command::new(&program);
    command.arg(format!("--socket-path={}", socket.display())).args([&blk_file, "--read-only"]);
    // It needs no place for a control socket, and has none in common with others.
    command.env_remove("XDG_RUNTIME_DIR").env_remove("UDM_SOCKET");
    let mut child = command.spawn().unwrap();
    until("a socket", || socket.exists().then_some(()));
    let beside = folder.path().join("beside");
    let mut command = Command::new(&program);
    command.arg(format!("--socket-path={}", beside.display())).args([&blk_file, "--read-only"]);
    command.env_remove("XDG_RUNTIME_DIR").env_remove("UDM_SOCKET");
    let mut second = command.spawn().unwrap();
    until("another socket", || beside.exists().then_some(()));
    kill_process(Pid::from_child(&second), Signal::TERM).unwrap();
    assert!(second.wait().unwrap().success());
    for _ in 0..2 {
        let mut machine = TestMachine::new(&socket, 1);
        reads(&mut machine);
        assert_ne!(machine.request(0, WRITE, 0, &[(DATA, BLOCK)], &[]).0, 0, "it is read-only");
    }
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert!(child.wait().unwrap().success() && !socket.exists());

    // A connected socket: the program ends with the machine.
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", "exec \"$0\" --fd=9 \"$1\" 9<&0 0</dev/null"]).arg(&program).arg(&blk_file);
    let mut child = command.stdin(OwnedFd::from(theirs)).spawn().unwrap();
    drop(command);
    let mut machine = TestMachine::on(ours, 1);
    reads(&mut machine);
    assert_eq!(machine.request(0, WRITE, 0, &[(DATA, BLOCK)], &[]).0, 0);
    drop(machine);
    assert!(child.wait().unwrap().success());
}

/// What a user may write wrongly.
#[test]
fn disks_that_cannot_be_served_are_refused() {
    let folder = TempDir::new().unwrap();
    let socket = folder.path().join("v");
    let refused = |disks: &[&str]| {
        let mut command = udm(&["serve", "--device", "disk=null:1G"]);
        for disk in disks {
            command.args(["--vhost-user", disk]);
        }
        let out = command.arg("--socket").arg(folder.path().join("c")).output().unwrap();
        assert!(!out.status.success());
        text(&out.stderr)
    };
    let path = |name: &str| format!("{name}={}", socket.display());
    assert!(refused(&["disk"]).contains("expected NAME=PATH"));
    assert!(refused(&[&path("other")]).contains("there is no --device of that name"));
    assert!(refused(&[&path("disk"), &path("disk")]).contains("the path is given twice"));
    fs::write(&socket, "").unwrap();
    assert!(refused(&[&path("disk")]).contains("it exists and is not a socket"));
}

fn guest_disk(folder: &Path) -> PathBuf {
    let image = folder.join("disk");
    fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
    let out = Command::new("/sbin/mkfs.ext4").arg("-q").arg(&image).output().unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    image
}

#[test]
fn a_real_kernel_keeps_its_disk_over_killed_and_upgraded_servers() {
    check_real_kernel(false);
}

#[test]
fn a_real_kernel_with_packed_rings_keeps_its_disk() {
    check_real_kernel(true);
}

/// A Linux guest: a file system, discards, and writes that are verified while the server is killed
/// and upgraded several times.
fn check_real_kernel(is_packed: bool) {
    let Some(kernel) = GuestKernel::find() else { return };
    let folder = TempDir::new().unwrap();
    let (image, socket) = (guest_disk(folder.path()), folder.path().join("vhost.sock"));
    let sectors = (64 << 20) / 512;
    let serve = || {
        let table = format!("disk=0 {sectors} linear {} 0", image.display());
        Server::start_with(&[&table], &["--vhost-user", &format!("disk={}", socket.display())])
    };
    let mut server = serve();
    let script = "\
        echo PACKED $(cut -c 35 /sys/block/vda/device/features).\n\
        echo SEEN $(cat /sys/block/vda/size) $(cat /sys/block/vda/serial) $(cat /sys/block/vda/queue/write_cache)\n\
        mount -t ext4 -o discard /dev/vda /mnt\n\
        dd if=/dev/urandom of=/mnt/a bs=1M count=8 2>/dev/null; sync\n\
        for i in $(seq 40); do\n\
          cp /mnt/a /mnt/b || echo FAILED\n\
          sync; echo 3 > /proc/sys/vm/drop_caches\n\
          cmp /mnt/a /mnt/b || echo FAILED\n\
          echo ROUND $i\n\
        done\n\
        fstrim /mnt && echo TRIMMED; umount /mnt\n\
        blkdiscard -o 0 -l 4096 /dev/vda && echo DISCARDED; cat /proc/kmsg > /kmsg & sleep 0.5\n\
        grep -i 'error' /kmsg; echo FINISHED";
    let mut qemu = kernel.machine(folder.path(), &EXT4, &[], script);
    qemu.args([
        "-smp",
        "2",
        "-object",
        "memory-backend-memfd,id=m,size=256M,share=on",
        "-numa",
        "node,memdev=m",
    ]);
    qemu.arg("-chardev").arg(format!("socket,id=c,path={},reconnect=1", socket.display()));
    let packed = if is_packed { "on" } else { "off" };
    qemu.arg("-device").arg(format!("vhost-user-blk-pci,chardev=c,num-queues=2,packed={packed}"));
    let running = qemu.spawn().unwrap();
    for life in 1..10 {
        until("rounds", || output(folder.path()).contains(&format!("ROUND {}", life * 4)).then_some(()));
        if life % 2 == 0 {
            server.upgrade(&[UDM]);
        } else {
            server.kill();
            server = serve();
        }
    }
    let output = finish(running, folder.path());
    let packed = format!("PACKED {}.", u8::from(is_packed));
    for line in
        [&packed, &format!("SEEN {sectors} disk write back"), "ROUND 40", "TRIMMED", "DISCARDED", "FINISHED"]
    {
        assert!(output.contains(line), "no {line:?}: {output}");
    }
    assert!(!output.contains("FAILED") && !output.contains("I/O error"), "{output}");
}

/// A table that is replaced while a machine runs: the machine learns the new size.
#[test]
fn a_machine_learns_the_new_size_of_its_disk() {
    let folder = TempDir::new().unwrap();
    let socket = folder.path().join("vhost.sock");
    let disk = format!("disk={}", socket.display());
    let server = Server::start_with(&["disk=0 2048 linear null:1G 0"], &["--vhost-user", &disk]);
    let mut machine = TestMachine::new(&socket, 1);
    machine.start(VirtioFeatures::empty());
    let (back, theirs) = UnixStream::pair().unwrap();
    back.set_read_timeout(Some(support::PATIENCE)).unwrap();
    machine.tell(message::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]);
    assert_eq!(machine.request(0, READ, 2048, &[], &[(DATA, BLOCK)]).0, 1, "behind the end");
    server.says(&["load", "disk", "--table", "0 4096 linear null:1G 0"]);
    server.says(&["resume", "disk"]);
    (&back).read_exact(&mut [0; 12]).unwrap();
    assert_eq!(machine.config()[..8], 4096u64.to_le_bytes());
    assert_eq!(machine.request(0, READ, 2048, &[], &[(DATA, BLOCK)]).0, 0);
    let refused = server.refuses(&["remove", "disk"]);
    assert!(refused.contains("busy"), "{refused}");
    assert!(server.log().contains("vhost-user:"), "{}", server.log());
    drop(machine);
    until("the end of the session", || server.verb(&["remove", "disk"]).status.success().then_some(()));
}

/// A disk that does not answer does not keep the server from its end.
#[test]
fn a_hanging_disk_does_not_keep_the_server() {
    let folder = TempDir::new().unwrap();
    let socket = folder.path().join("vhost.sock");
    let disk = format!("disk={}", socket.display());
    let table = "disk=0 2048 delay null:1G 0 600000";
    let mut server = Server::start_with(&[table], &["--vhost-user", &disk, "--stop-timeout", "1"]);
    let mut machine = TestMachine::new(&socket, 1);
    machine.start(VirtioFeatures::empty());
    machine.add(0, READ, 0, &[], &[(DATA, BLOCK)]);
    machine.kick_always(0);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(machine.take_used(0), None, "the disk answers");
    let pid = rustix::process::Pid::from_child(&server.child);
    support::signal(pid, rustix::process::Signal::TERM);
    until("the end of the server", || server.child.try_wait().unwrap());
}
