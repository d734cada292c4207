//! A virtual machine with a real kernel whose disk is a snapshot over multipath. It runs only if
//! `UDM_TEST_KERNEL` is a folder with an unpacked kernel package (docs/internals/kernel-rows.md),
//! and QEMU, busybox, cpio, fio and nbdkit are installed; otherwise it reports that it was skipped.

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use support::guest::{GuestKernel, copy_with_libraries, finish, link_commands, output};
use support::servers::Nbdkit;
use support::{Server, UDM, has, text, until};
use tempfile::TempDir;

/// The modules of ext4; those that are built in are missing from the package.
const EXT4: [&str; 6] = ["libcrc32c", "crc32c_generic", "crc16", "mbcache", "jbd2", "ext4"];

/// Sizes in sectors: the image, and what the disk grows by.
const SECTORS: u64 = 128 << 11;
const GROWTH: u64 = 8 << 11;

/// Rounds of the load, each with a fio of 4 jobs. In each round the server is upgraded or killed.
const ROUNDS: usize = 40;

/// What the root file system of the snapshot runs.
const INIT: &str = r#"#!/bin/sh
mount -t devtmpfs d /dev; mount -t proc p /proc; mount -t sysfs s /sys; mount -t tmpfs t /tmp
Q=/sys/block/vda/queue
echo PACKED $(cut -c 35 /sys/block/vda/device/features).
echo SEEN $(cat /sys/block/vda/size) $(cat /sys/block/vda/serial) $(cat $Q/write_cache) queues $(ls /sys/block/vda/mq | grep -c .)
for i in $(seq ROUNDS); do
  fio --name=load --directory=/data --numjobs=4 --size=1m --rw=randrw --bs=4k --iodepth=8 \
    --ioengine=libaio --direct=1 --verify=crc32c --verify_fatal=1 --minimal > /tmp/fio 2>&1 ||
    { echo FAILED; tail -n 5 /tmp/fio; }
  echo ROUND $i
done
for i in $(seq 300); do [ $(cat /sys/block/vda/size) = GROWN ] && break; sleep 0.1; done
echo SIZE $(cat /sys/block/vda/size)
dd if=/dev/urandom of=/tmp/a bs=1M count=4 2>/dev/null
dd if=/tmp/a of=/dev/vda bs=1M seek=130 oflag=direct 2>/dev/null || echo FAILED
dd if=/dev/vda of=/tmp/b bs=1M skip=130 count=4 iflag=direct 2>/dev/null
cmp /tmp/a /tmp/b && echo GROWTH IS WRITTEN
sync; cat /proc/kmsg > /tmp/kmsg & sleep 0.5
grep -i error /tmp/kmsg
echo FINISHED; poweroff -f
"#;

/// The files of the machine, and the servers of its two paths.
struct MachineHost {
    folder: TempDir,
    paths: [Nbdkit; 2],
    /// The disk has its second size.
    is_grown: bool,
}

impl MachineHost {
    fn new() -> MachineHost {
        let folder = TempDir::new().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::File::create(at("store")).unwrap().set_len(256 << 20).unwrap();
        fs::File::create(at("more")).unwrap().set_len(GROWTH * 512).unwrap();
        let image = root_image(folder.path());
        let server = |name| Nbdkit::start(at(name), &["file", &image.display().to_string()]);
        let paths = ["a", "b"].map(server);
        MachineHost { folder, paths, is_grown: false }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The table of the disk: the snapshot, and more behind it.
    fn disk(&self) -> String {
        let more = self.at("more");
        match self.is_grown {
            false => format!("0 {SECTORS} linear @snap 0"),
            true => format!("0 {SECTORS} linear @snap 0\n{SECTORS} {GROWTH} linear {} 0", more.display()),
        }
    }

    fn serve(&self) -> Server {
        let [a, b] = self.paths.each_ref().map(Nbdkit::uri);
        let features = "1 queue_if_no_path 0 1 1 service-time 0 2 1";
        let devices = [
            format!("base=0 {SECTORS} multipath {features} {a} 1 {b} 1"),
            format!("snap=0 {SECTORS} snapshot @base {} P 8", self.at("store").display()),
            format!("disk={}", self.disk()),
        ];
        let socket = format!("disk={}", self.at("vhost.sock").display());
        let mut command = Command::new(UDM);
        command.arg("serve");
        let options = ["--check-paths", "1", "--cores", "0,1", "--vhost-user", &socket];
        Server::start_by(command, &devices.each_ref().map(String::as_str), &options)
    }

    fn boot(&self, kernel: &GuestKernel, is_packed: bool) -> Child {
        let script = "mount -t ext4 /dev/vda /mnt && exec switch_root /mnt /init\necho FAILED to boot";
        let mut qemu = kernel.machine(self.folder.path(), &EXT4, &[], script);
        qemu.args(["-smp", "4", "-object", "memory-backend-memfd,id=m,size=256M,share=on"]);
        let packed = if is_packed { "on" } else { "off" };
        let device = format!("vhost-user-blk-pci,chardev=c,num-queues=4,packed={packed}");
        qemu.args(["-numa", "node,memdev=m", "-device", &device]);
        qemu.arg("-chardev").arg(format!("socket,id=c,path={},reconnect=1", self.at("vhost.sock").display()));
        qemu.spawn().unwrap()
    }
}

/// An image with a root file system that runs [`INIT`].
fn root_image(folder: &Path) -> PathBuf {
    let (root, image) = (folder.join("disk"), folder.join("image"));
    for place in ["bin", "data", "dev", "proc", "sys", "tmp"] {
        fs::create_dir_all(root.join(place)).unwrap();
    }
    for program in ["busybox", "fio"] {
        copy_with_libraries(program, &root);
    }
    link_commands(&root);
    let init = INIT.replace("ROUNDS", &ROUNDS.to_string());
    fs::write(root.join("init"), init.replace("GROWN", &(SECTORS + GROWTH).to_string())).unwrap();
    fs::set_permissions(root.join("init"), fs::Permissions::from_mode(0o755)).unwrap();
    let mut mkfs = Command::new("/sbin/mkfs.ext4");
    let out = mkfs.arg("-q").arg("-d").arg(&root).arg(&image).arg("128M").output().unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    image
}

#[test]
fn a_machine_boots_from_a_snapshot_over_multipath() {
    check_boot(false);
}

#[test]
fn a_machine_with_packed_rings_boots_from_a_snapshot() {
    check_boot(true);
}

/// The machine boots from the snapshot and verifies its data, while its server is upgraded 20 times
/// and killed 20 times, paths fail and come back, the table is reloaded and the disk grows.
fn check_boot(is_packed: bool) {
    let Some(kernel) = GuestKernel::find() else { return };
    if !["fio", "nbdkit"].iter().all(|program| has(program)) {
        return;
    }
    let mut host = MachineHost::new();
    let mut server = host.serve();
    let mut machine = host.boot(&kernel, is_packed);
    for round in 1..=ROUNDS {
        until("a round", || {
            let output = output(host.folder.path());
            assert!(machine.try_wait().unwrap().is_none(), "the machine has ended: {output}");
            output.contains(&format!("ROUND {round}\r")).then_some(())
        });
        // A path is down from every fourth round to the next one, with an upgrade meanwhile. A
        // server that starts needs both.
        let path = &mut host.paths[round / 4 % 2];
        if round % 4 == 0 {
            path.kill();
        } else if path.child.is_none() {
            path.again();
        }
        if round == ROUNDS / 2 {
            host.is_grown = true;
            server.says(&["load", "disk", "--table", &host.disk()]);
            server.says(&["resume", "disk"]);
        }
        if round % 2 == 0 {
            let report = server.upgrade(&[UDM]);
            assert_eq!(report["devices"], 3, "{report}");
        } else {
            server.kill();
            server = host.serve();
        }
    }
    let output = finish(machine, host.folder.path());
    let seen = format!("SEEN {SECTORS} disk write back queues 4");
    let size = format!("SIZE {}", SECTORS + GROWTH);
    let packed = format!("PACKED {}.", u8::from(is_packed));
    for line in [&packed, &seen, &format!("ROUND {ROUNDS}"), &size, "GROWTH IS WRITTEN", "FINISHED"] {
        assert!(output.contains(line), "no {line:?}: {output}");
    }
    assert!(!output.contains("FAILED") && !output.contains("I/O error"), "{output}");
    // The image was not written to: the machine's writes are in the store.
    let out = Command::new("/sbin/e2fsck").arg("-fn").arg(host.at("image")).output().unwrap();
    assert!(out.status.success(), "{}", text(&out.stdout));
}
