//! Disks of this machine: what is refused everywhere, and block devices of a real kernel.
//!
//! The tests with a kernel run only if `UDM_TEST_KERNEL` is a folder with an unpacked kernel
//! package that has ublk (docs/internals/kernel-rows.md), and QEMU, busybox, cpio and xz are
//! installed; otherwise they report that they were skipped. udm runs in the emulated machine.

mod support;

use std::path::Path;
use support::guest::{GuestKernel, finish};
use support::{Server, UDM, has, text, udm};
use tempfile::TempDir;

/// In the order of their dependencies.
const MODULES: [&str; 8] =
    ["crc16", "crc32c_generic", "libcrc32c", "mbcache", "jbd2", "ext4", "xfs", "ublk_drv"];

/// Functions of the scripts. `serve` starts a server for devices and waits until it is ready;
/// `wakes` counts how often its threads were scheduled, without the kernel's workers for operations
/// that block, such as the flush of a file: the last one looks for work every 5 s. Threads that
/// helped at the start end 10 s later, and then the count is smaller.
const FUNCTIONS: &str = r#"
export UDM_STATE=/tmp/state UDM_SOCKET=/tmp/control UDM_LOG=info
dd if=/dev/zero of=/tmp/img bs=1M count=0 seek=64 2>/dev/null
LINEAR='0 131072 linear file:/tmp/img 0'
fail() { echo "FAILED: $*"; tail -n 9 /tmp/log; }
expect() { [ "$2" = "$3" ] || fail "$1: expected $3, found $2"; }
serve() {
  : > /tmp/log; udm serve --check-paths off "$@" 2>> /tmp/log & P=$!
  for i in $(seq 300); do
    grep -q '^udm: [a-z]* .* /dev/ublkb' /tmp/log && return
    kill -0 $P 2>/dev/null || break; sleep 0.1
  done
  fail "serve $*"
}
stop() { kill -$1 $P; wait $P; }
soon() { for s in $(seq 400); do eval "$1" && return; sleep 0.1; done; fail "not soon: $1"; }
logged() { grep -q "$1" /tmp/log || fail "not in the log: $1"; }
# Rounds of a load until `end_load`; `progress` waits for the next round that ends.
start_load() {
  echo 0 > /tmp/rounds
  (
    n=0
    while ! [ -e /tmp/end ]; do "$@" || echo "FAILED: $*"; n=$((n + 1)); echo $n > /tmp/rounds; done
  ) & LOAD=$!
}
progress() { R=$(cat /tmp/rounds); soon '[ $(cat /tmp/rounds) -gt $R ]'; }
end_load() { touch /tmp/end; wait $LOAD; }
copy_and_compare() {
  cp /mnt/a /mnt/b && sync && echo 3 > /proc/sys/vm/drop_caches && cmp /mnt/a /mnt/b && rm /mnt/b
}
start_copies() { dd if=/dev/urandom of=/mnt/a bs=1M count=8 2>/dev/null; sync; start_load copy_and_compare; }
wakes() {
  for t in /proc/$P/task/*; do grep -q iou-wrk $t/comm || cat $t/status; done |
    awk '/ctxt_switches/ { n += $2 } END { print n }'
}
"#;

fn kernel() -> Option<GuestKernel> {
    GuestKernel::find().filter(|kernel| has("xz") && kernel.has_module("ublk_drv"))
}

/// Runs a script in a machine, and checks that nothing in it failed.
fn run(kernel: &GuestKernel, programs: &[&str], script: &str) -> String {
    let folder = TempDir::new().unwrap();
    let programs = [&[UDM], programs].concat();
    let script = format!(
        "{FUNCTIONS}{script}\ncat /proc/kmsg > /tmp/kmsg & sleep 0.5\n\
         grep -iE 'i/o error|bug:|warning:|blocked for' /tmp/kmsg; echo FINISHED"
    );
    let mut qemu = kernel.machine(folder.path(), &MODULES, &programs, &script);
    // Files of the scripts are in the initramfs, which gets half of the memory.
    qemu.args(["-smp", "2", "-m", "1024"]);
    let mut output = String::new();
    for _ in 0..4 {
        output = finish(qemu.spawn().unwrap(), folder.path());
        // An emulated CPU may run into code that the kernel is just patching.
        if !output.contains("Oops: int3") {
            break;
        }
    }
    let bad = ["FAILED", "I/O error", "BUG:", "WARNING:", "blocked for"];
    assert!(output.contains("FINISHED") && !bad.iter().any(|bad| output.contains(bad)), "{output}");
    output
}

fn assert_lines(output: &str, lines: &[&str]) {
    for line in lines {
        assert!(output.contains(line), "no {line:?}: {output}");
    }
}

/// A file system with a verified load: its server is killed several times, ends in order while the
/// disk is mounted, and is replaced; the load sees no error. Afterwards the server sleeps, and its
/// end removes the block device.
#[test]
fn a_file_system_keeps_its_disk_over_killed_servers() {
    let Some(kernel) = kernel() else { return };
    let script = r#"
        again() { serve --device "disk=$LINEAR" --ublk disk --cores 0-1; }
        serve --device "disk=$LINEAR" --ublk disk=3 --cores 0-1
        Q=/sys/block/ublkb3/queue
        echo SEEN $(cat /sys/block/ublkb3/size $Q/write_cache $Q/fua $Q/logical_block_size $Q/max_sectors_kb)
        expect link $(readlink /dev/udm/disk) /dev/ublkb3
        mkfs.ext4 -q /dev/udm/disk && mount -t ext4 -o discard /dev/udm/disk /mnt || fail mkfs
        start_copies
        for life in $(seq 10); do
          progress; sleep 0.$((life * 7 + 10)); stop KILL; again
          logged '/dev/ublkb3 is taken over'
        done
        progress; stop TERM; expect status $? 0
        logged '/dev/ublkb3 is in use (a mount'
        [ -b /dev/ublkb3 ] && echo LEFT
        again; logged 'taken over'; progress
        end_load
        fstrim /mnt && echo TRIMMED; sync; umount /mnt || fail umount
        sleep 12; W=$(wakes); sleep 10; expect wake-ups $(wakes) $W; echo IDLE
        stop TERM; expect status $? 0
        [ -e /dev/ublkb3 ] || [ -e /dev/ublkc3 ] || [ -L /dev/udm/disk ] || echo GONE"#;
    let output = run(&kernel, &["mkfs.ext4"], script);
    assert_lines(&output, &["SEEN 131072 write back 1 512 512", "LEFT", "TRIMMED", "IDLE", "GONE"]);
}

/// XFS with fio as the load, which checks the checksum of each block: its server is killed ten
/// times and neither sees an error. `xfs_repair` finds nothing to repair.
#[test]
fn fio_on_xfs_verifies_over_killed_servers() {
    let Some(kernel) = kernel().filter(|_| has("fio") && has("mkfs.xfs")) else { return };
    let script = r#"
        dd if=/dev/zero of=/tmp/img bs=1M count=0 seek=512 2>/dev/null
        again() { serve --device 'disk=0 1048576 linear file:/tmp/img 0' --ublk disk --cores 0-1; }
        again; mkfs.xfs -q /dev/udm/disk && mount -t xfs /dev/udm/disk /mnt || fail mkfs
        load() {
          fio --name=load --directory=/mnt --numjobs=2 --size=1m --rw=randrw --bs=4k --iodepth=8 \
            --ioengine=libaio --direct=1 --verify=crc32c --verify_fatal=1 --minimal > /tmp/fio 2>&1 ||
            { tail -n 5 /tmp/fio; return 1; }
        }
        start_load load
        for life in $(seq 10); do
          progress; sleep 0.$((life * 7 + 10)); stop KILL; again; logged '/dev/ublkb0 is taken over'
        done
        progress; end_load; echo ROUNDS $(cat /tmp/rounds)
        fstrim /mnt && echo TRIMMED; umount /mnt || fail umount
        xfs_repair -n /dev/udm/disk > /tmp/repair 2>&1 && echo CLEAN || cat /tmp/repair
        stop TERM; expect status $? 0; ls /dev | grep '^ublk[bc]' || echo GONE"#;
    let output = run(&kernel, &["mkfs.xfs", "xfs_repair", "fio"], script);
    assert_lines(&output, &["ROUNDS", "TRIMMED", "CLEAN", "GONE"]);
}

/// Upgrades under load: a file system on a block device, an NBD client and a machine at once. None
/// of them sees an error, and programs that fail change nothing.
#[test]
fn a_block_device_stays_over_upgrades() {
    let Some(kernel) = kernel() else { return };
    let script = r#"
        serve --device "disk=$LINEAR" --device "v=0 131072 linear null:size=64M 0" --ublk disk=3 \
          --vhost-user v=/tmp/v --unix /tmp/n --cores 0-1
        mkfs.ext4 -q /dev/udm/disk && mount -t ext4 /dev/udm/disk /mnt || fail mkfs
        start_copies
        LONG='--rw randread --iodepth 4 --rate_iops 200 --time_based --runtime 120 --norandommap'
        udm bench --vhost-user /tmp/v $LONG > /tmp/machine 2>&1 & MACHINE=$!
        udm bench --nbd 'nbd+unix:///v?socket=/tmp/n' $LONG > /tmp/client 2>&1 & CLIENT=$!
        for i in $(seq 20); do
          progress
          case $i in
          5) udm upgrade /bin/cat 2> /tmp/refused && fail 'an upgrade by cat'; progress ;;
          9) cat > /tmp/bad <<BAD
#!/bin/sh
ulimit -n 24; exec /bin/udm "\$@"
BAD
             chmod 755 /tmp/bad; udm upgrade /tmp/bad 2> /tmp/refused && fail 'a bad upgrade'; progress ;;
          esac
          udm upgrade > /tmp/upgraded || fail upgrade; cat /tmp/upgraded
          P=$(awk '{ for (n = 1; n < NF; n++) if ($n == "process") print $(n + 1) + 0 }' /tmp/upgraded)
          taken="[ \$(grep -c '/dev/ublkb3 is taken over' /tmp/log) = $i ]"
          eval "$taken" || soon "$taken"
        done
        wait $MACHINE || { fail machine; cat /tmp/machine; }
        wait $CLIENT || { fail client; cat /tmp/client; }
        progress; end_load
        sync; umount /mnt || fail umount
        kill -TERM $P; soon '! [ -e /dev/ublkc3 ]'; [ -e /dev/ublkb3 ] || echo GONE"#;
    let output = run(&kernel, &["mkfs.ext4"], script);
    assert_lines(&output, &["GONE"]);
    assert_eq!(output.matches("serves 2 devices").count(), 20, "{output}");
    #[expect(clippy::print_stdout, reason = "the figures that the test is for")]
    output.lines().filter(|line| line.contains("after a pause")).for_each(|line| println!("{line}"));
}

/// What servers leave: the next server removes what nobody wants or uses, keeps what is in use, and
/// touches nothing of a server with another state folder.
#[test]
fn servers_clean_up_after_themselves_and_nobody_else() {
    let Some(kernel) = kernel() else { return };
    let script = r#"
        UDM_STATE=/tmp/other serve --device "other=$LINEAR" --ublk other=9; stop KILL
        serve --device "disk=$LINEAR" --ublk disk=4; stop KILL
        serve --device 'data=0 2048 linear mem:1M 0' --ublk data; logged '/dev/ublkb4 .* is removed'
        D=$(readlink /dev/udm/data)
        [ -e /dev/ublkc9 ] && [ -e /dev/udm/other ] && ! [ -e /dev/ublkc4 ] && echo REMOVED
        dd if=/dev/urandom of=/tmp/m bs=1M count=1 2>/dev/null
        dd if=/tmp/m of=$D bs=64k 2>/dev/null && cmp /tmp/m $D && echo SAME
        blkdiscard -o 4096 -l 8192 $D || fail blkdiscard
        sleep 1000 < $D & U=$!
        stop TERM; logged "$D is in use (process $U)"
        serve --device "disk=$LINEAR" --ublk disk; logged "$D .* process $U uses it"
        [ -b $D ] && echo KEPT
        stop TERM; serve --device 'data=0 2048 linear mem:1M 0' --ublk data; expect number $(readlink /dev/udm/data) $D
        logged "$D is taken over"
        kill $U; wait $U; stop TERM; ! [ -e $D ] && echo GONE
        udm serve --device "disk=$LINEAR" --ublk disk=9 2>&1 | grep '/dev/ublkb9 exists'
        udm serve --device "disk=$LINEAR" --ublk disk=4 2>> /tmp/log & O=$!
        soon '[ -b /dev/ublkb4 ]'; soon '[ -L /dev/udm/disk ]'
        UDM_SOCKET=/tmp/c2 udm serve --device 'disk=0 8 linear mem:1M 0' --ublk disk 2>&1 | grep "served by process $O"
        kill $O; wait $O
        UDM_STATE=/tmp/other serve --device "other=$LINEAR" --ublk other
        expect number $(readlink /dev/udm/other) /dev/ublkb9; stop TERM
        ls /dev | grep '^ublk[bc]'; ls /dev/udm | grep . || echo CLEAN"#;
    let output = run(&kernel, &[], script);
    assert_lines(
        &output,
        &["REMOVED", "SAME", "KEPT", "GONE", "ublkb9 exists", "served by process", "CLEAN"],
    );
    assert!(!output.contains("ublkb0\r\n") && !output.contains("ublkc"), "{output}");
}

/// The size follows the device if the kernel can change it, and otherwise the log says so. A server
/// of a suspended device ends in order, and a request that waits there is completed by the next
/// server. A read-only disk cannot be written.
#[test]
fn a_disk_follows_its_device() {
    let Some(kernel) = kernel() else { return };
    let script = r#"
        serve --device 'disk=0 2048 linear mem:4M 0' --ublk disk=1
        udm load disk --table '0 8192 linear mem:4M 0' && udm resume disk
        soon '[ $(cat /sys/block/ublkb1/size) = 8192 ] || grep -q "keeps its 2048 sectors" /tmp/log'
        echo SIZE $(cat /sys/block/ublkb1/size)
        udm remove disk 2>&1 | grep -q 'busy' && echo BUSY
        udm suspend disk; (dd if=/dev/ublkb1 of=/dev/null bs=4k count=1 iflag=direct 2>/dev/null; echo > /tmp/read) &
        sleep 0.5; [ -e /tmp/read ] && fail 'read of a suspended device'
        udm resume disk; soon '[ -e /tmp/read ]'; echo RESUMED
        udm suspend disk; stop TERM; expect status $? 0; ls /dev | grep '^ublk[bc]' || echo REMOVED
        serve --device "disk=$LINEAR" --ublk disk; udm suspend disk
        (dd if=/dev/zero of=/dev/udm/disk bs=64k count=1 oflag=direct 2>/dev/null && echo WRITTEN) & W=$!
        sleep 0.5; stop TERM; logged 'is in use (process'
        serve --device "disk=$LINEAR" --ublk disk; logged 'taken over'; wait $W; stop TERM
        serve --readonly --device "disk=$LINEAR" --ublk disk=2
        expect ro $(cat /sys/block/ublkb2/ro) 1
        dd if=/dev/zero of=/dev/ublkb2 bs=4k count=1 2>/dev/null && fail 'a write' || echo READONLY
        stop TERM"#;
    assert_lines(&run(&kernel, &[], script), &["BUSY", "RESUMED", "REMOVED", "WRITTEN", "READONLY"]);
}

/// Block devices of verbs: one that is in use stays over upgrades, renames, kills and orderly ends,
/// one that is not ends with its server, and that of a snapshot comes back with it. What is refused
/// changes nothing.
#[test]
fn block_devices_come_and_go() {
    let Some(kernel) = kernel() else { return };
    let script = r#"
        again() {
          serve --device "disk=$LINEAR" --device 'opt=0 2048 linear null:size=1M 0' --ublk opt=1 --cores 0-1
        }
        refused() { "$@" > /tmp/out 2>&1 && fail "not refused: $*"; cat /tmp/out; }
        listed() { udm ublk list > /tmp/list; grep "$1" /tmp/list || { fail "not listed: $1"; cat /tmp/list; }; }
        upgraded() {
          udm upgrade > /tmp/upgraded || fail upgrade
          P=$(awk '{ for (n = 1; n < NF; n++) if ($n == "process") print $(n + 1) + 0 }' /tmp/upgraded)
          soon "udm ublk list | grep -q '/dev/ublkb5  /dev/udm/$1'"
        }
        again
        expect path "$(udm ublk add disk --number 5 --queues 1)" /dev/ublkb5
        expect queues "$(ls /sys/block/ublkb5/mq)" 0
        expect link $(readlink /dev/udm/disk) /dev/ublkb5
        listed 'disk: /dev/ublkb5  /dev/udm/disk, 1 queue, added'
        listed 'opt: /dev/ublkb1  /dev/udm/opt, 2 queues, option of the server'
        refused udm ublk add disk; refused udm ublk add none; refused udm ublk remove opt
        udm snapshot create s --of disk || fail snapshot
        refused udm ublk add s --number 1; refused udm ublk add s --queues 3; refused udm ublk remove s
        mkfs.ext4 -q /dev/udm/disk && mount -t ext4 /dev/udm/disk /mnt || fail mkfs
        start_copies
        refused udm ublk remove disk; refused udm remove opt
        progress; upgraded disk; progress
        listed 'disk: /dev/ublkb5 .*added'
        udm rename disk data; soon '[ -L /dev/udm/data ]'; [ -L /dev/udm/disk ] && fail 'two links'
        upgraded data; progress; udm rename data disk; soon '[ -L /dev/udm/disk ]'
        stop KILL; again; logged '/dev/ublkb5 is taken over'; listed 'disk: /dev/ublkb5 .*added'; progress
        stop TERM; logged '/dev/ublkb5 is in use (a mount'; again; listed 'disk: /dev/ublkb5 .*added'; progress
        end_load; umount /mnt || fail umount
        udm ublk remove disk || fail remove; ls /dev/ublkb5 /dev/ublkc5 /dev/udm/disk 2>/dev/null && fail stays
        echo COME AND GO
        adds=''
        for i in 1 2 3 4; do (udm ublk add disk > /tmp/add$i 2>&1 && echo ADDED) & adds="$adds $!"; done
        wait $adds; listed 'disk: /dev/ublkb.*added'; udm ublk remove disk || fail remove
        udm ublk add disk --number 6; stop KILL; again; logged '/dev/ublkb6 of an earlier server was not in use'
        udm ublk add s --number 8; stop KILL; again; listed 's: /dev/ublkb8 .*added'
        stop TERM; [ -e /dev/ublkc8 ] && fail 'it is not in use'; again; listed 's: /dev/ublkb8 .*added'
        udm ublk remove s; stop KILL; again; [ -e /dev/ublkb8 ] && fail 'a removed one is back'; echo RETURNED
        udm ublk add disk --number 9; sleep 1000 < /dev/ublkb9 & U=$!
        sleep 1; refused udm ublk remove disk
        udm ublk remove disk --force || fail force; [ -e /dev/ublkb9 ] && fail 'it is removed'; echo FORCED
        kill $U; wait $U; soon '! [ -e /dev/ublkc9 ]'
        udm ublk add disk; stop TERM; expect status $? 0; ls /dev | grep '^ublk[bc]' || echo GONE"#;
    let output = run(&kernel, &["mkfs.ext4"], script);
    let said = [
        "udm: disk: it is /dev/ublkb5 already: Device or resource busy",
        "udm: none: no device of that name",
        "udm: opt: /dev/ublkb1 is one of the server's options, and ends with the server",
        "udm: s: /dev/ublkb1 exists: choose another number, or none",
        "udm: s: queues: expected 1 to 2, one per core",
        "udm: s: it has no block device",
        "udm: disk: /dev/ublkb5 is in use (a mount, swap or another device): end that first, or remove it",
        "udm: disk: /dev/ublkb9 is in use (process",
    ];
    assert_lines(&output, &said);
    assert_lines(&output, &["COME AND GO", "RETURNED", "FORCED", "GONE"]);
    assert_eq!(output.matches("ADDED").count(), 1, "one of those at once: {output}");
}

/// A user without privileges has a block device of its own, which ends with its server; the next
/// server creates it again with its number.
#[test]
fn a_user_without_privileges_has_a_disk() {
    let Some(kernel) = kernel() else { return };
    let script = r#"
        echo 'root:x:0:0::/:/bin/sh' > /etc/passwd; echo 'user:x:1000:1000::/tmp:/bin/sh' >> /etc/passwd
        chmod 1777 /tmp; chmod 666 /tmp/img
        echo 'exec udm serve --device "disk=$LINEAR" --ublk disk --socket /tmp/user/c --state /tmp/user 2> /tmp/user/log' > /tmp/run
        mkdir /tmp/user; chown 1000:1000 /tmp/user; export LINEAR
        su user -c 'exec sh /tmp/run'; grep 'no permission for /dev/ublk-control' /tmp/user/log
        chmod 666 /dev/ublk-control
        (while sleep 0.1; do chown 1000:1000 /dev/ublk[bc]* 2>/dev/null; done) & UDEV=$!
        start() { rm -f /tmp/user/log; su user -c 'exec sh /tmp/run' & P=$!; soon "grep -q '^udm: disk.*/dev/ublkb0' /tmp/user/log"; sleep 0.5; }
        start
        dd if=/dev/urandom of=/tmp/m bs=1M count=1 2>/dev/null; chmod 666 /tmp/m
        su user -c 'dd if=/tmp/m of=/dev/ublkb0 bs=64k 2>/dev/null && cmp /tmp/m -n 1048576 /dev/ublkb0' && echo SAME
        stop KILL; soon '! [ -e /dev/ublkb0 ]'; start
        su user -c 'cmp -n 1048576 /tmp/m /dev/ublkb0' && echo AGAIN
        stop TERM; expect status $? 0
        kill $UDEV; ls /dev | grep '^ublk[bc]' || echo GONE"#;
    let output = run(&kernel, &[], script);
    assert_lines(&output, &["no permission", "SAME", "AGAIN", "GONE"]);
}

/// What a user may write wrongly, and a machine without the driver.
#[test]
fn disks_that_cannot_be_served_are_refused() {
    let folder = TempDir::new().unwrap();
    let refused = |disks: &[&str]| {
        let mut command = udm(&["serve", "--device", "disk=null:1G", "--device", "more=null:1G"]);
        command.args(disks.iter().flat_map(|disk| ["--ublk", disk]));
        let out = command.arg("--socket").arg(folder.path().join("c")).output().unwrap();
        assert!(!out.status.success());
        text(&out.stderr)
    };
    for bad in ["=3", "disk=x", "disk=1048576", "disk="] {
        let why = refused(&[bad]);
        assert!(why.contains("expected NAME"), "{why}");
    }
    assert!(refused(&["other"]).contains("ublk other: there is no --device of that name"));
    assert!(refused(&["disk", "disk"]).contains("ublk disk: the device is given twice"));
    assert!(refused(&["disk=7", "more=7"]).contains("ublk more: the number 7 is given twice"));
    if !Path::new("/dev/ublk-control").exists() {
        let why = refused(&["disk"]);
        assert!(
            why.contains("ublk disk: there is no /dev/ublk-control") && why.contains("modprobe"),
            "{why}"
        );
        assert_eq!(why.lines().count(), 1, "{why}");
    }
}

/// What the verbs refuse, in one line each; the device is served as before.
#[test]
fn verbs_that_cannot_be_done_are_refused() {
    let server = Server::start_with(&["disk=null:1G"], &["--cores", "0"]);
    assert_eq!(server.says(&["ublk", "list"]), "No device is a block device of this machine\n");
    assert_eq!(server.says(&["ublk", "list", "--json"]).trim(), "[]");
    for (words, why) in [
        (&["add", "none"][..], "none: no device of that name"),
        (&["remove", "none"], "none: no device of that name"),
        (&["remove", "disk"], "disk: it has no block device: No such file or directory"),
        (&["remove", "disk", "--force"], "disk: it has no block device"),
    ] {
        let said = server.refuses(&[&["ublk"], words].concat());
        assert!(said.contains(why) && said.lines().count() == 1, "{words:?}: {said}");
    }
    for (body, why) in [
        (r#"{"queues":0}"#, "queues: expected 1 to 1, one per core"),
        (r#"{"queues":2}"#, "queues: expected 1 to 1, one per core"),
        (r#"{"number":1048576}"#, "number: expected 0 to 1048575"),
        (r#"{"depth":3}"#, "unknown field"),
    ] {
        let (status, _, said) = server.http("POST", "/v1/devices/disk/ublk", body);
        // A sandbox is the first reason to refuse.
        assert!(status >= 400 && (said.contains(why) || said.contains("--sandbox")), "{body}: {said}");
    }
    if !Path::new("/dev/ublk-control").exists() {
        for _ in 0..2 {
            let said = server.refuses(&["ublk", "add", "disk", "--number", "3"]);
            let is_sandboxed = said.contains("disk: a server with --sandbox has no block devices");
            let is_missing =
                said.contains("disk: there is no /dev/ublk-control: load the driver with `modprobe");
            assert!((is_sandboxed || is_missing) && said.lines().count() == 1, "{said}");
        }
    }
    server.says(&["remove", "disk"]);
    let server = Server::start_with(&["a=null:1M", "b=null:1M"], &["--export", "a"]);
    let said = server.refuses(&["ublk", "add", "b"]);
    assert!(said.contains("b: it is not exported") || said.contains("--sandbox"), "{said}");
}
