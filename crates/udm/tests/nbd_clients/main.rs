//! The real program with external clients: qemu-io, libnbd's tools, fio, and the kernel's loop
//! device over nbdfuse.
//!
//! A test whose client is not installed is reported as ignored, with the reason in its name, and
//! never as passed.

mod bytes;
mod disks;
mod docs;
mod extended;
mod hot;
mod log;
mod paths;
mod server;
#[path = "../support/mod.rs"]
mod support;
mod unwritable;

use libtest_mimic::{Arguments, Failed, Trial};
use server::{Server, UDM, sh, sh_in, text};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

type Outcome = Result<(), Failed>;

fn main() {
    let args = Arguments::from_args();
    let tests = vec![
        trial("qemu_io_reads_and_writes", &["qemu-io"], qemu_io),
        trial("nbdinfo_describes_and_lists", &["nbdinfo"], nbdinfo),
        trial("nbdcopy_round_trip", &["nbdcopy"], nbdcopy),
        trial("fio_verifies_at_depth_32", &["fio"], fio_verify),
        trial("fio_verifies_while_paths_fail_and_tables_change", &["fio"], fio_under_change),
        trial("a_client_that_vanishes_leaks_nothing", &["fio", "nbdinfo"], killed_clients),
        trial("a_full_file_system_is_enospc", &["qemu-io", "mount", "@root"], full),
        trial(
            "a_file_system_over_nbdfuse",
            &["nbdfuse", "mkfs.ext4", "fsck.ext4", "losetup", "@root"],
            file_system,
        ),
        trial("a_killed_server_leaves_a_log", &["qemu-io"], log::a_killed_server_leaves_a_log),
        trial(
            "sqlite_survives_a_cut_at_every_flush",
            &["nbdfuse", "fuse2fs", "fusermount3", "mke2fs", "debugfs", "sqlite3", "@fuse"],
            log::sqlite_survives_a_cut_at_every_flush,
        ),
        trial("the_readme_does_what_it_says", &["nbdinfo", "fio", "qemu-io"], docs::readme),
        trial("the_tour_does_what_it_says", &["nbdinfo", "fio", "curl"], docs::tour),
        trial(
            "the_recipes_work_as_they_stand",
            &["qemu-io", "qemu-img", "nbdcopy", "curl", "nbdfuse", "fusermount3"],
            docs::recipes,
        ),
        trial("every_target_and_device_has_a_line_that_works", &["nbdinfo", "qemu-img"], docs::targets),
        trial("clones_are_made_as_described", &["qemu-img", "qemu-io"], docs::clone),
        trial("disks_move_as_described", &["qemu-io"], docs::moves),
        trial("images_are_served_as_described", &["qemu-img", "qemu-io", "nbdcopy", "python3"], docs::images),
        trial("paths_are_looked_after_as_described", &[], docs::multipath),
        trial(
            "snapshots_and_backups_as_they_are_described",
            &["nbdinfo", "nbdcopy", "qemu-io"],
            docs::snapshots,
        ),
        trial("a_disk_of_a_machine_is_served_as_described", &[], docs::vhost_user),
        trial("nvme_is_served_as_described", &[], docs::nvme),
        trial("a_server_is_upgraded_as_described", &[], docs::upgrade),
        trial("loads_are_measured_as_described", &[], docs::bench),
        trial("a_file_is_served_as_described", &[], docs::config),
        trial("limits_are_set_as_described", &["nbdcopy"], docs::throttle),
        trial("a_server_is_restricted_as_described", &[], docs::sandbox),
        trial("tls_is_set_up_as_described", &["nbdinfo", "openssl"], docs::tls),
        trial(
            "paths_that_fail_by_themselves_are_logged",
            &["fio"],
            paths::paths_that_fail_by_themselves_are_logged,
        ),
        trial("a_client_cannot_fill_the_log", &[], unwritable::bounded),
        trial("a_log_that_is_full_stops_nothing", &["fio"], unwritable::full),
        trial("a_log_that_is_closed_stops_nothing", &["fio"], unwritable::closed),
        trial("a_log_that_nobody_reads_stops_nothing", &["fio"], unwritable::unread),
        trial(
            "paths_over_two_nodes_of_one_disk",
            &["fio", "qemu-io", "losetup", "@root"],
            disks::two_nodes_of_one_disk,
        ),
        trial(
            "a_node_that_is_taken_away",
            &["fio", "qemu-io", "losetup", "@root"],
            disks::a_node_that_is_taken_away,
        ),
        trial(
            "a_node_that_loses_its_sectors",
            &["fio", "qemu-io", "losetup", "python3", "@root"],
            disks::a_node_that_loses_its_sectors,
        ),
        trial("paths_over_two_names_of_one_file", &["fio"], disks::two_names_of_one_file),
        trial("a_file_is_replaced_and_grows", &["qemu-io"], disks::a_file_is_replaced_and_grows),
        trial("a_path_that_was_cut_fails", &["qemu-io"], disks::a_path_that_was_cut_fails),
        trial(
            "a_killed_server_loses_nothing",
            &["fio", "qemu-io", "losetup", "@root"],
            disks::a_killed_server_loses_nothing,
        ),
        trial(
            "a_flush_that_failed_stays_failed",
            &["qemu-io", "nbdfuse", "fusermount3", "losetup", "@root"],
            disks::a_flush_that_failed_stays_failed,
        ),
        trial(
            "a_hung_file_system_holds_up_nobody_else",
            &["qemu-io", "nbdfuse", "fusermount3", "@fuse"],
            disks::a_hung_file_system_holds_up_nobody_else,
        ),
        trial(
            "requests_at_any_byte",
            &["qemu-io", "nbdfuse", "fusermount3", "@fuse"],
            bytes::requests_at_any_byte,
        ),
        trial("what_is_allocated", &["nbdinfo", "nbdcopy", "qemu-img", "qemu-io"], bytes::what_is_allocated),
        trial(
            "extended_headers_over_terabytes",
            &["nbdinfo", "nbdcopy", "@extended"],
            extended::requests_over_terabytes,
        ),
        trial("two_hot_clients_and_fourteen_idle_ones", &["fio"], hot::two_hot_and_fourteen_idle),
        trial("clients_move_all_the_time", &["fio", "nbdcopy", "qemu-io"], hot::moved_all_the_time),
        trial("an_idle_server_is_not_scheduled", &["nbdinfo", "qemu-io"], idle),
    ];
    libtest_mimic::run(&args, tests).exit();
}

/// A test that needs the programs in `needs`. `@root` stands for root, `@fuse` for /dev/fuse,
/// `@extended` for libnbd in Python with extended headers.
fn trial(name: &str, needs: &[&str], run: fn() -> Outcome) -> Trial {
    let there = |need: &&&str| match **need {
        "@root" => {
            rustix::process::getuid().is_root()
                && Path::new("/dev/loop0").exists()
                && Path::new("/dev/fuse").exists()
        }
        "@fuse" => fs::File::options().read(true).write(true).open("/dev/fuse").is_ok(),
        "@extended" => sh(extended::HAS_EXTENDED_HEADERS).is_ok(),
        program => sh(&format!("PATH=$PATH:/sbin:/usr/sbin command -v {program}")).is_ok(),
    };
    match needs.iter().find(|need| !there(need)) {
        None => Trial::test(name, run),
        Some(&"@fuse") => {
            Trial::test(format!("{name} (skipped: /dev/fuse can't be opened)"), run).with_ignored_flag(true)
        }
        Some(&"@root") => {
            Trial::test(format!("{name} (skipped: needs root, loop and fuse)"), run).with_ignored_flag(true)
        }
        Some(&"@extended") => {
            Trial::test(format!("{name} (skipped: needs libnbd 1.18 in Python)"), run).with_ignored_flag(true)
        }
        Some(missing) => {
            Trial::test(format!("{name} (skipped: {missing} is not installed)"), run).with_ignored_flag(true)
        }
    }
}

fn folder_with_image(bytes: u64) -> TempDir {
    let folder = TempDir::new().unwrap();
    fs::File::create(folder.path().join("disk.img")).unwrap().set_len(bytes).unwrap();
    folder
}

/// Two names of one image, which are two paths.
fn two_paths(folder: &TempDir) {
    fs::hard_link(folder.path().join("disk.img"), folder.path().join("same.img")).unwrap();
}

fn qemu_io() -> Outcome {
    let folder = folder_with_image(64 << 20);
    let run = "qemu-io -f raw -c 'write -P 0xa5 4k 1M' -c 'read -P 0xa5 4k 1M' -c 'read -P 0 0 4k' \
               -c 'write -f -P 0x5a 8M 64k' -c 'aio_write -P 1 16M 2M' -c aio_flush -c 'read -P 1 16M 2M' \
               -c 'write -z 16M 1M' -c 'read -P 0 16M 1M' -c 'discard 32M 8M' -c flush \"$uri\"";
    let out = sh_in(
        folder.path(),
        &format!(
            "'{UDM}' serve --device 'disk=0 65536 linear disk.img 8\n65536 65528 striped 2 8 disk.img 65544 disk.img 98312' --run {}",
            quote(run)
        ),
    );
    // The second line has a length that cannot be divided by the stripes; the table must be
    // refused.
    check(out.is_err(), "a striped line that does not divide was accepted")?;
    sh_in(
        folder.path(),
        &format!(
            "'{UDM}' serve --device 'disk=0 65536 linear disk.img 8\n65536 65520 striped 2 8 disk.img 65544 disk.img 98304' --run {}",
            quote(run)
        ),
    )?;
    let image = fs::read(folder.path().join("disk.img"))?;
    let at = |offset: usize| &image[offset + 4096..];
    check(at(4096)[..1 << 20].iter().all(|&b| b == 0xa5), "the image lacks what was written")?;
    check(at(8 << 20)[..65536].iter().all(|&b| b == 0x5a), "the image lacks the FUA write")
}

fn quote(command: &str) -> String {
    format!("'{}'", command.replace('\'', "'\\''"))
}

fn check(ok: bool, name: &str) -> Outcome {
    if ok { Ok(()) } else { Err(name.into()) }
}

fn nbdinfo() -> Outcome {
    let folder = folder_with_image(8 << 20);
    let out = sh_in(
        folder.path(),
        &format!(
            "'{UDM}' serve --device 'a=0 16384 linear disk.img 0' --device 'b=0 2048 zero' --readonly --unix - \
             --run 'nbdinfo --json $uri_a; nbdinfo --list \"nbd+unix:///?socket=$unixsocket\"'"
        ),
    )?;
    for expected in [
        "\"export-size\": 8388608",
        "\"is_read_only\": true",
        "\"can_multi_conn\": true",
        "export=\"b\"",
        "1048576",
    ] {
        check(out.contains(expected), &format!("no {expected} in:\n{out}"))?;
    }
    Ok(())
}

fn nbdcopy() -> Outcome {
    let folder = folder_with_image(48 << 20);
    sh_in(folder.path(), "head -c 50331648 /dev/urandom > source.img; ln disk.img same.img")?;
    let table = "0 98304 multipath 0 0 1 1 queue-length 0 2 1 disk.img 1 same.img 1";
    let out = sh_in(
        folder.path(),
        &format!(
            "'{UDM}' serve --device 'disk={table}' --run 'nbdcopy --flush source.img $uri && nbdcopy $uri copy.img' && \
             cksum < source.img && cksum < copy.img && cksum < disk.img"
        ),
    )?;
    let sums: Vec<&str> = out.lines().collect();
    check(sums.len() == 3 && sums.iter().all(|s| *s == sums[0]), &format!("checksums differ: {sums:?}"))
}

fn fio_verify() -> Outcome {
    let folder = folder_with_image(64 << 20);
    two_paths(&folder);
    let table = "0 131072 multipath 0 0 1 1 round-robin 0 2 1 disk.img 1 same.img 1";
    let fio = "fio --name=verify --ioengine=nbd --uri=$uri --rw=randwrite --bs=4k --iodepth=32 --numjobs=4 --size=12M \
               --offset_increment=16M --verify=crc32c --verify_fatal=1 --do_verify=1 --group_reporting";
    let out = sh_in(folder.path(), &format!("'{UDM}' serve --device 'disk={table}' --run '{fio}' 2>&1"))?;
    check(out.contains("err= 0"), &out)
}

/// Paths fail and are reinstated, also both at once, and the table is reloaded a hundred times,
/// while fio writes and verifies.
fn fio_under_change() -> Outcome {
    let folder = folder_with_image(64 << 20);
    two_paths(&folder);
    let table = "0 131072 multipath 1 queue_if_no_path 0 1 1 service-time 0 2 1 disk.img 1 same.img 1";
    let server = Server::start(folder.path(), &[&format!("mp={table}")])?;
    let mut fio = server
        .command("fio")
        .args("--name=verify --ioengine=nbd --rw=randwrite --bs=4k --iodepth=32 --numjobs=2 --size=16M --offset_increment=32M".split(' '))
        .args("--verify=crc32c --verify_fatal=1 --verify_backlog=256 --time_based --runtime=300 --group_reporting".split(' '))
        .arg(format!("--uri={}", server.uri("mp")))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let outcome = change_a_hundred_times(&server, table, &mut fio);
    // fio ends on the signal, after it has verified everything written so far.
    rustix::process::kill_process(rustix::process::Pid::from_child(&fio), rustix::process::Signal::INT)?;
    let out = text(&fio.wait_with_output()?.stdout);
    outcome?;
    // Reads after the signal have no line of their own, but are in the request counts.
    let issued = out.split_once("issued rwts: total=").and_then(|(_, counts)| {
        let (reads, rest) = counts.split_once(',')?;
        Some([reads, rest.split_once(',')?.0])
    });
    let both = issued.is_some_and(|counts| counts.iter().all(|n| n.parse().is_ok_and(|n: u64| n > 0)));
    check(out.contains("err= 0") && both, &out)?;
    server.stop()
}

fn change_a_hundred_times(server: &Server, table: &str, fio: &mut std::process::Child) -> Outcome {
    for i in 0..100 {
        let path = format!("253:{}", i % 2);
        server.udm(&["message", "mp", "0", "fail_path", &path])?;
        let both = i % 10 == 9;
        if both {
            server.udm(&["message", "mp", "0", "fail_path", &format!("253:{}", 1 - i % 2)])?;
        }
        if i % 3 == 0 {
            // Suspends without flush, while bios are held because both paths have failed.
            server.udm(&["load", "mp", "--table", table])?;
            server.udm(&["suspend", "--noflush", "mp"])?;
            server.udm(&["resume", "mp"])?;
        } else {
            server.udm(&["message", "mp", "0", "reinstate_path", &path])?;
            server.udm(&["load", "mp", "--table", table])?;
            server.udm(&["resume", "mp"])?;
        }
        let status = server.udm(&["status", "mp"])?;
        check(status.matches(" A ").count() >= 2, &format!("after reload {i}: {status}"))?;
        if let Some(status) = fio.try_wait()? {
            return Err(format!("fio ended after {i} reloads: {status}").into());
        }
    }
    Ok(())
}

/// fio is killed during its load, four times. Afterwards no client has the device open, and the
/// server still serves.
fn killed_clients() -> Outcome {
    let folder = folder_with_image(64 << 20);
    let server = Server::start(folder.path(), &["disk=0 131072 delay disk.img 0 5"])?;
    for rw in ["randread", "randwrite", "randrw", "write"] {
        let mut fio = server
            .command("fio")
            .args([
                "--name=gone",
                "--ioengine=nbd",
                "--bs=64k",
                "--iodepth=64",
                "--numjobs=4",
                "--thread",
                "--size=16M",
            ])
            .args([
                "--time_based",
                "--runtime=300",
                &format!("--rw={rw}"),
                &format!("--uri={}", server.uri("disk")),
            ])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        std::thread::sleep(Duration::from_millis(400));
        fio.kill()?;
        fio.wait()?;
    }
    // The device can be removed once no client uses it.
    let deadline = Instant::now() + Duration::from_secs(20);
    while let Err(busy) = server.udm(&["remove", "disk"]) {
        check(Instant::now() < deadline, &format!("still in use: {busy:?}"))?;
        std::thread::sleep(Duration::from_millis(50));
    }
    server.udm(&["create", "again", "--table", "0 131072 linear disk.img 0"])?;
    sh(&format!("nbdinfo '{}'", server.uri("again")))?;
    server.stop()
}

fn full() -> Outcome {
    let folder = TempDir::new().unwrap();
    let mount = folder.path().join("small");
    fs::create_dir(&mount)?;
    sh(&format!("mount -t tmpfs -o size=1M udm-test '{}'", mount.display()))?;
    let run = || -> Outcome {
        fs::File::create(mount.join("disk.img"))?.set_len(64 << 20)?;
        let serve = "serve --device 'disk=0 131072 linear small/disk.img 0' --run";
        let out = sh_in(
            folder.path(),
            &format!("'{UDM}' {serve} 'qemu-io -f raw -c \"write -P 1 0 8M\" $uri 2>&1; true'"),
        )?;
        check(out.contains("No space left on device"), &out)?;
        // Requests within the limit still work.
        let out = sh_in(
            folder.path(),
            &format!(
                "'{UDM}' {serve} 'qemu-io -f raw -c \"discard 0 64M\" -c \"write -P 1 0 64k\" $uri 2>&1'"
            ),
        )?;
        check(out.contains("wrote 65536/65536"), &out)
    };
    let outcome = run();
    sh(&format!("umount '{}'", mount.display()))?;
    outcome
}

fn file_system() -> Outcome {
    let folder = folder_with_image(96 << 20);
    two_paths(&folder);
    let table = "0 196608 multipath 0 0 1 1 queue-length 0 2 1 disk.img 1 same.img 1";
    let script = "set -eu; PATH=$PATH:/sbin:/usr/sbin; mkdir fuse mnt; touch fuse/nbd; nbdfuse fuse/nbd \"$uri\" & fuse=$!
        i=0; until [ \"$(stat -c %s fuse/nbd 2>/dev/null)\" = 100663296 ]; do i=$((i+1)); [ $i -lt 200 ]; sleep 0.05; done
        loop=$(losetup -f --show fuse/nbd)
        clean() { umount mnt 2>/dev/null || true; losetup -d $loop 2>/dev/null || true; fusermount3 -u fuse/nbd 2>/dev/null || umount fuse/nbd || true; wait $fuse || true; }
        trap clean EXIT
        mkfs.ext4 -q $loop; mount $loop mnt
        for i in 1 2 3 4 5 6 7 8; do head -c 3000000 /dev/urandom > mnt/f$i; done
        cksum mnt/f* > sums; sync; umount mnt; mount $loop mnt; cksum mnt/f* | cmp - sums; rm mnt/f1 mnt/f5; umount mnt
        fsck.ext4 -fn $loop; echo all good";
    fs::write(folder.path().join("script"), script)?;
    let out = sh_in(folder.path(), &format!("'{UDM}' serve --device 'disk={table}' --run 'sh script 2>&1'"))?;
    check(out.contains("all good"), &out)
}

/// With an export open and no requests, the threads sleep without any context switch.
fn idle() -> Outcome {
    let folder = folder_with_image(8 << 20);
    let server = Server::start(folder.path(), &["disk=0 16384 linear disk.img 0"])?;
    let mut client = Command::new("qemu-io")
        .args(["-f", "raw", &server.uri("disk")])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()?;
    std::thread::sleep(Duration::from_millis(500));
    let before = server.switches()?;
    std::thread::sleep(Duration::from_secs(2));
    let switches = server.switches()? - before;
    drop(client.stdin.take());
    client.wait()?;
    check(switches <= 10, &format!("{switches} context switches in two idle seconds"))?;
    server.stop()
}
