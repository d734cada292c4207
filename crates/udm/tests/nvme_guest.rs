//! The NVMe/TCP target and a real kernel, which nobody here wrote. The tests run only if
//! `UDM_TEST_KERNEL` is a folder with an unpacked kernel package (docs/internals/kernel-rows.md).

mod support;

use std::fs;
use std::path::Path;
use std::process::Command;
use support::guest::{GuestKernel, finish, output};
use support::{Server, has, text, until};
use tempfile::TempDir;

/// The modules of a host, in the order of their dependencies; those that are built in are missing
/// from the package.
const HOST: [&str; 9] = [
    "failover",
    "net_failover",
    "virtio_net",
    "crc32c_generic",
    "nvme-keyring",
    "nvme-auth",
    "nvme-core",
    "nvme-fabrics",
    "nvme-tcp",
];

/// The modules of ext4, likewise.
const EXT4: [&str; 5] = ["libcrc32c", "crc16", "mbcache", "jbd2", "ext4"];

const HOST_NQN: &str = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-555555555555";
const SUBSYSTEM: &str = "nqn.2026-11.org.example:disks";

/// Sectors of a disk.
const SECTORS: u64 = (64 << 20) / 512;

/// A network, and a function that connects to a subsystem. QEMU forwards 10.0.2.2 to this machine.
const PRELUDE: &str = "\
    busybox ip link set lo up; busybox ip addr add 10.0.2.15/24 dev eth0; busybox ip link set eth0 up\n\
    connect() { echo \"transport=tcp,traddr=10.0.2.2,trsvcid=$1,nqn=$2,hostnqn=HOSTNQN,\
hostid=11111111-2222-4333-8444-555555555555,$3\" > /dev/nvme-fabrics && echo CONNECTED $2; }\n\
    find_disk() { for i in $(seq 100); do for b in /sys/block/nvme0n*; do [ \"$(cat $b/nsid 2>/dev/null)\" = $1 ] && \
D=${b##*/} && [ -e /dev/$D ] && return; done; sleep 0.1; done; echo FAILED: no namespace $1; }\n\
    kernel_log() { cat /proc/kmsg > /tmp/kmsg & sleep 0.5; cat /tmp/kmsg; }\n";

/// A machine with a network that runs `script`.
fn machine(kernel: &GuestKernel, folder: &Path, programs: &[&str], script: &str) -> Command {
    let modules = [&HOST[..], &EXT4[..]].concat();
    let script = format!("{}{script}", PRELUDE.replace("HOSTNQN", HOST_NQN));
    let mut qemu = kernel.machine(folder, &modules, programs, &script);
    qemu.args(["-smp", "2", "-netdev", "user,id=n", "-device", "virtio-net-pci,netdev=n"]);
    qemu
}

/// A server with a target for this subsystem, and its port, which is any if it is 0.
fn serve(devices: &[&str], port: u16) -> (Server, u16) {
    serve_with(devices, port, &[])
}

/// As [`serve`], with more options.
fn serve_with(devices: &[&str], port: u16, options: &[&str]) -> (Server, u16) {
    let address = format!("127.0.0.1:{port}");
    let target = ["--nvme", &address, "--nvme-subsystem", SUBSYSTEM, "--cores", "0,1"];
    let server = Server::start_with(devices, &[&target[..], options].concat());
    let port = until("the address of the target", || {
        let log = server.log();
        let (_, rest) = log.split_once("trsvcid=")?;
        rest.split(',').next()?.parse().ok()
    });
    (server, port)
}

fn find_kernel() -> Option<GuestKernel> {
    let kernel = GuestKernel::find()?;
    ["nvme-tcp", "virtio_net"].iter().all(|module| kernel.has_module(module)).then_some(kernel)
}

/// A Linux host connects with and without digests, reads and writes with short and long requests,
/// and keeps a file system. It sees the identifiers and states that its drivers insist on.
#[test]
fn a_real_host_keeps_its_data() {
    let Some(kernel) = find_kernel() else { return };
    let folder = TempDir::new().unwrap();
    let image = folder.path().join("disk");
    fs::File::create(&image).unwrap().set_len(SECTORS * 512).unwrap();
    let disk = format!("disk=0 {SECTORS} linear {} 0", image.display());
    let (server, port) = serve(&[&disk, "second=null:size=16M,blocksize=4096"], 0);
    let script = format!(
        "\
        for digests in '' ,hdr_digest,data_digest; do\n\
          connect {port} {SUBSYSTEM} nr_io_queues=2,keep_alive_tmo=5$digests || kernel_log\n\
          find_disk 1; A=$D; find_disk 2; B=$D\n\
          cd /sys/class/nvme/nvme0\n\
          echo STATE $(cat state) queues $(cat queue_count) $(cat subsysnqn) model $(cat model)\n\
          Q=/sys/block/$A/queue\n\
          echo SIZES $(cat /sys/block/$A/size /sys/block/$B/size)\n\
          echo BLOCKS $(cat $Q/logical_block_size /sys/block/$B/queue/logical_block_size)\n\
          echo CACHE $(cat $Q/write_cache $Q/fua) LIMITS $(cat $Q/max_hw_sectors_kb $Q/write_zeroes_max_bytes)\n\
          echo ANA $(cat /sys/block/nvme0c*n*/ana_state) WWID $(cat /sys/block/$A/wwid)\n\
          dd if=/dev/urandom of=/tmp/a bs=1M count=8 2>/dev/null\n\
          for bs in 512 4096 16384 20480 1048576; do\n\
            n=$((8388608/bs)); [ $n -gt 300 ] && n=300\n\
            dd if=/tmp/a of=/dev/$A bs=$bs count=$n oflag=direct 2>/dev/null || echo FAILED\n\
            dd if=/dev/$A of=/tmp/b bs=$bs count=$n iflag=direct 2>/dev/null || echo FAILED\n\
            head -c $((bs*n)) /tmp/a > /tmp/c; cmp /tmp/b /tmp/c || echo FAILED $bs\n\
          done\n\
          busybox mke2fs /dev/$A > /dev/null; mount -t ext4 /dev/$A /mnt || echo FAILED mount\n\
          for i in 1 2 3; do cp /tmp/a /mnt/$i || echo FAILED; done\n\
          sync; echo 3 > /proc/sys/vm/drop_caches\n\
          for i in 1 2 3; do cmp /tmp/a /mnt/$i || echo FAILED; done\n\
          rm /mnt/1; fstrim /mnt && echo TRIMMED; umount /mnt\n\
          dd if=/tmp/a of=/dev/$A bs=1M oflag=direct 2>/dev/null\n\
          /bin/fallocate -z -n -o 1048576 -l 2097152 /dev/$A && echo ZEROED || echo FAILED\n\
          (head -c 1048576 /tmp/a; head -c 2097152 /dev/zero; tail -c 5242880 /tmp/a) > /tmp/c\n\
          dd if=/dev/$A of=/tmp/b bs=1M count=8 iflag=direct 2>/dev/null; cmp /tmp/b /tmp/c || echo FAILED\n\
          blkdiscard -o 0 -l 4194304 /dev/$A && echo DISCARDED || echo FAILED\n\
          cd /; echo 1 > /sys/class/nvme/nvme0/delete_controller\n\
          [ -e /dev/$A ] && echo FAILED: still there\n\
        done\n\
        kernel_log; echo FINISHED"
    );
    let machine = machine(&kernel, folder.path(), &["fallocate"], &script).spawn().unwrap();
    let output = finish(machine, folder.path());
    let all = format!("{output}{}", server.log());
    assert!(output.contains("FINISHED") && !output.contains("FAILED"), "{all}");
    assert!(!output.contains("I/O error") && !output.contains(" timeout"), "{all}");
    for (line, count) in [
        (&*format!("STATE live queues 3 {SUBSYSTEM} model udm"), 2),
        (&format!("SIZES {SECTORS} 32768"), 2),
        ("BLOCKS 512 4096", 2),
        ("CACHE write back 1 LIMITS 1024 1048576", 2),
        ("ANA optimized optimized WWID uuid.", 2),
        ("TRIMMED", 2),
        ("ZEROED", 2),
        ("DISCARDED", 2),
    ] {
        assert_eq!(output.matches(line).count(), count, "{line:?}: {all}");
    }
}

/// A host learns of a new size and of a new device while it is connected. nvme-cli, if it is
/// installed, reads the discovery log and all that it knows of the controller.
/// The error log is left out: Wireshark 4.0 expects 66 bytes in an entry of 64.
#[test]
fn a_real_host_sees_changes() {
    let Some(kernel) = find_kernel() else { return };
    let folder = TempDir::new().unwrap();
    let (server, port) = serve(&["disk=0 32768 linear null:1G 0"], 0);
    let programs: &[&str] = if has("nvme") { &["nvme"] } else { &[] };
    let script = format!(
        "\
        connect {port} {SUBSYSTEM} nr_io_queues=1,keep_alive_tmo=5; find_disk 1; A=$D\n\
        if [ -x /bin/nvme ]; then\n\
          nvme discover -t tcp -a 10.0.2.2 -s {port} -q {HOST_NQN} -I 11111111-2222-4333-8444-555555555555; nvme id-ctrl /dev/nvme0; nvme id-ns /dev/$A\n\
          nvme ana-log /dev/nvme0; nvme smart-log /dev/nvme0; nvme list-ns /dev/nvme0\n\
          nvme ns-descs /dev/$A; nvme fw-log /dev/nvme0\n\
          nvme flush /dev/$A; nvme get-feature /dev/nvme0 -f 7\n\
        fi\n\
        echo SIZE $(cat /sys/block/$A/size)\n\
        for i in $(seq 300); do [ $(cat /sys/block/$A/size) = 65536 ] && break; sleep 0.1; done\n\
        echo SIZE $(cat /sys/block/$A/size)\n\
        find_disk 2; echo NEW $(cat /sys/block/$D/size)\n\
        echo 1 > /sys/class/nvme/nvme0/delete_controller\n\
        connect {port} {SUBSYSTEM} nr_io_queues=2,keep_alive_tmo=5,hdr_digest,data_digest; find_disk 1\n\
        for bs in 4k 256k 1M; do\n\
          dd if=/dev/urandom of=/dev/$D bs=$bs count=2 oflag=direct 2>/dev/null || echo FAILED\n\
          dd if=/dev/$D of=/dev/null bs=$bs count=2 iflag=direct 2>/dev/null || echo FAILED\n\
        done\n\
        kernel_log; echo FINISHED"
    );
    let capture = folder.path().join("capture");
    let mut qemu = machine(&kernel, folder.path(), programs, &script);
    qemu.arg("-object").arg(format!("filter-dump,id=f,netdev=n,file={}", capture.display()));
    let running = qemu.spawn().unwrap();
    until("the first size", || output(folder.path()).contains("SIZE 32768").then_some(()));
    server.says(&["load", "disk", "--table", "0 65536 linear null:1G 0"]);
    server.says(&["resume", "disk"]);
    server.says(&["create", "new", "--table", "0 2048 linear mem:1M 0"]);
    let refused = server.refuses(&["upgrade"]);
    assert!(refused.contains("NVMe hosts cannot be handed over"), "{refused}");
    let output = finish(running, folder.path());
    let all = format!("{output}{}", server.log());
    for line in ["SIZE 32768", "SIZE 65536", "NEW 2048", "FINISHED"] {
        assert!(output.contains(line), "no {line:?}: {all}");
    }
    assert!(!output.contains("FAILED"), "{all}");
    if !programs.is_empty() {
        let lines = [
            "Discovery Log Number of Records 2",
            "ANA LOG",
            "Smart Log",
            "nn        : 1024",
            "NVMe Flush: success",
        ];
        for line in lines {
            assert!(output.contains(line), "no {line:?}: {all}");
        }
    }
    if has("tshark") {
        check_capture(&capture, port);
    }
}

/// Wireshark decodes each PDU of a capture and finds no malformed one.
fn check_capture(capture: &Path, port: u16) {
    let packets = |filter: &str| {
        let decode = format!("tcp.port=={port},nvme-tcp");
        let mut tshark = Command::new("tshark");
        let out = tshark.arg("-r").arg(capture).args(["-d", &decode, "-Y", filter]).output().unwrap();
        assert!(out.status.success(), "{}", text(&out.stderr));
        text(&out.stdout)
    };
    // Not the data of writes: packets that the emulated network sends twice hide it.
    for kind in [0x00, 0x01, 0x04, 0x05, 0x07, 0x09] {
        assert!(!packets(&format!("nvme-tcp.type == {kind}")).is_empty(), "no PDU of type {kind}");
    }
    let wrong = packets("nvme-tcp && (_ws.malformed || _ws.expert.severity == error)");
    assert!(wrong.is_empty(), "{wrong}");
}

/// A host proves that it knows its secret, on all its queues, and asks the target for its own. With
/// a wrong secret it does not connect. It sees a change of an ANA state within a second.
#[test]
fn a_real_host_authenticates_itself_and_sees_ana_states() {
    const SECRET: &str = "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:";
    const OTHER: &str = "DHHC-1:02:d4gmzh5i0I3npDMWAmJX/nAvAw7ioKmS2w44ceutFeObYDFG/r6zOB3UW0FLzevsI7XDJg==:";
    let Some(kernel) = find_kernel() else { return };
    if !kernel.has_module("nvme-auth") {
        return;
    }
    let folder = TempDir::new().unwrap();
    let file = |name: &str, secret: &str| {
        let path = folder.path().join(name);
        fs::write(&path, format!("{secret}\n")).unwrap();
        format!("{HOST_NQN}={}", path.display())
    };
    let (host, controller) = (file("host", SECRET), file("controller", OTHER));
    let secrets = ["--nvme-dhchap-secret", &host, "--nvme-dhchap-ctrl-secret", &controller];
    let (server, port) = serve_with(&["disk=mem:64M"], 0, &secrets);
    let script = format!(
        "\
        connect {port} {SUBSYSTEM} nr_io_queues=2,keep_alive_tmo=5 && echo FAILED: no secret\n\
        connect {port} {SUBSYSTEM} nr_io_queues=2,keep_alive_tmo=5,dhchap_secret={OTHER} && echo FAILED: wrong\n\
        connect {port} {SUBSYSTEM} nr_io_queues=2,keep_alive_tmo=5,dhchap_secret={SECRET},dhchap_ctrl_secret={SECRET} \
          && echo FAILED: wrong controller\n\
        for ctrl in '' ,dhchap_ctrl_secret={OTHER}; do\n\
          connect {port} {SUBSYSTEM} nr_io_queues=2,keep_alive_tmo=5,dhchap_secret={SECRET}$ctrl || kernel_log\n\
          find_disk 1; C=$(echo /sys/class/nvme/nvme*)\n\
          echo STATE $(cat $C/state) queues $(cat $C/queue_count)\n\
          dd if=/dev/urandom of=/tmp/a bs=1M count=4 2>/dev/null\n\
          dd if=/tmp/a of=/dev/$D bs=64k oflag=direct 2>/dev/null || echo FAILED write\n\
          dd if=/dev/$D of=/tmp/b bs=64k count=64 iflag=direct 2>/dev/null; cmp /tmp/a /tmp/b || echo FAILED\n\
          [ -n \"$ctrl\" ] || echo 1 > $C/delete_controller\n\
        done\n\
        A=/sys/block/nvme0c*n1/ana_state; [ -e $A ] || A=$(ls /sys/block/nvme*c*n1/ana_state)\n\
        B=; for i in $(seq 1000); do\n\
          N=$(cat $A); [ \"$N\" = \"$B\" ] || echo ANA: $N; B=$N; [ $N = persistent-loss ] && break; sleep 0.02\n\
        done\n\
        kernel_log; echo FINISHED"
    );
    let capture = folder.path().join("capture");
    let mut qemu = machine(&kernel, folder.path(), &[], &script);
    qemu.arg("-object").arg(format!("filter-dump,id=f,netdev=n,file={}", capture.display()));
    let running = qemu.spawn().unwrap();
    let shows =
        |state: &str| output(folder.path()).lines().any(|line| line.trim_end() == format!("ANA: {state}"));
    until("the first state", || output(folder.path()).contains("ANA: optimized").then_some(()));
    for state in ["non-optimized", "inaccessible", "persistent-loss"] {
        let begun = std::time::Instant::now();
        server.says(&["nvme", "ana", "disk", state]);
        until("a state", || shows(state).then_some(()));
        let took = begun.elapsed();
        assert!(took < std::time::Duration::from_secs(1), "{state}: {took:?}");
    }
    let output = finish(running, folder.path());
    let all = format!("{output}{}", server.log());
    assert!(output.contains("FINISHED") && !output.contains("FAILED"), "{all}");
    assert_eq!(output.matches("STATE live queues 3").count(), 2, "{all}");
    assert!(!all.contains(&SECRET[10..]) && !all.contains(&OTHER[10..]), "a secret is in a log: {all}");
    if has("tshark") {
        check_capture(&capture, port);
    }
}

/// Two servers over one disk are two paths of one device. One is killed and started again several
/// times: the host sees no error, and no data is lost.
#[test]
fn a_real_host_keeps_its_data_over_two_paths() {
    let Some(kernel) = find_kernel() else { return };
    let folder = TempDir::new().unwrap();
    let image = folder.path().join("disk");
    fs::File::create(&image).unwrap().set_len(SECTORS * 512).unwrap();
    let disk = format!("disk=0 {SECTORS} linear file:{}?exclusive=off 0", image.display());
    let mut paths = [serve(&[&disk], 0), serve(&[&disk], 0)];
    let [first, second] = paths.each_ref().map(|(_, port)| *port);
    let script = format!(
        "\
        for port in {first} {second}; do\n\
          connect $port {SUBSYSTEM} nr_io_queues=2,keep_alive_tmo=5,reconnect_delay=1,ctrl_loss_tmo=60\n\
        done\n\
        find_disk 1\n\
        for i in $(seq 50); do [ $(ls -d /sys/block/nvme0c*n* | grep -c .) = 2 ] && break; sleep 0.1; done\n\
        echo PATHS $(ls -d /sys/block/nvme0c*n* | grep -c .)\n\
        for i in $(seq 24); do\n\
          dd if=/dev/urandom of=/tmp/a bs=1M count=2 2>/dev/null\n\
          dd if=/tmp/a of=/dev/$D bs=64k seek=$((i*32)) oflag=direct 2>/dev/null || echo FAILED write\n\
          dd if=/dev/$D of=/tmp/b bs=64k skip=$((i*32)) count=32 iflag=direct 2>/dev/null || echo FAILED read\n\
          cmp /tmp/a /tmp/b || echo FAILED $i\n\
          echo ROUND $i; sleep 0.3\n\
        done\n\
        kernel_log; echo FINISHED"
    );
    let running = machine(&kernel, folder.path(), &[], &script).spawn().unwrap();
    for life in 1..6 {
        until("rounds", || output(folder.path()).contains(&format!("ROUND {}", life * 4)).then_some(()));
        let (server, port) = &mut paths[life % 2];
        let port = *port;
        server.kill();
        std::thread::sleep(std::time::Duration::from_millis(500));
        paths[life % 2] = serve(&[&disk], port);
    }
    let output = finish(running, folder.path());
    for line in ["PATHS 2", "ROUND 24", "FINISHED"] {
        assert!(output.contains(line), "no {line:?}: {output}");
    }
    assert!(!output.contains("FAILED") && !output.contains("I/O error"), "{output}");
    assert!(output.contains("Successfully reconnected"), "{output}");
}
