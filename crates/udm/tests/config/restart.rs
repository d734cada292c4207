//! After a kill and after a regular shutdown, the devices of the file are served again, with all
//! acknowledged writes.

use super::{ConfigDir, names};
use crate::support::nbd::Client;
use crate::support::servers::fio;
use crate::support::stamps::{StampedVolume, image};
use crate::support::{Server, has, signal, text, until};
use rustix::process::{Pid, Signal};
use serde_json::Value;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

const SECTORS: usize = 8192;

/// An origin, its persistent snapshot, and a device over the snapshot, in an order that is the
/// reverse of their dependencies.
const CONF: &str = "
[serve]
state = \"state\"
[devices.over]
table = \"0 8192 linear @snap 0\"
[devices.snap]
table = \"0 8192 snapshot disk store P 8\"
uuid = \"the-snapshot\"
[devices.disk]
table = \"0 8192 snapshot-origin disk\"
[devices.plain]
table = \"0 8192 linear plain 0\"
";

/// Loads all devices that are written, ends the server with `how` meanwhile, and returns its
/// status.
fn serve_until(files: &ConfigDir, volumes: &[(&str, StampedVolume)], seed: u64, how: Signal) -> Option<i32> {
    let mut server = files.serve();
    let answered = AtomicU64::new(0);
    let status = std::thread::scope(|scope| {
        for (i, (name, volume)) in volumes.iter().enumerate() {
            let (client, answered) = (Client::connect(&server.nbd, name), &answered);
            scope.spawn(move || volume.load(client, 0..SECTORS, seed + i as u64, answered));
        }
        until("a load", || (answered.load(Ordering::Relaxed) > 2000).then_some(()));
        signal(Pid::from_child(&server.child), how);
        until("the end of the server", || server.child.try_wait().unwrap())
    });
    status.code()
}

fn check(server: &Server, volumes: &[(&str, StampedVolume)]) {
    assert_eq!(names(server), ["disk", "over", "plain", "snap"]);
    assert!(server.says(&["info", "snap"]).contains("UUID: the-snapshot"));
    assert!(!server.says(&["status", "snap"]).contains("Invalid"));
    for (name, volume) in volumes {
        volume.settle(&server.nbd, name, 0..0);
    }
}

#[test]
fn after_a_kill_and_after_an_end_the_same_devices_have_what_was_acknowledged() {
    let files = ConfigDir::new(CONF);
    for name in ["disk", "plain"] {
        std::fs::write(files.path(name), image(SECTORS)).unwrap();
    }
    std::fs::File::create(files.path("store")).unwrap().set_len(SECTORS as u64 * 1024).unwrap();
    // The snapshot is written only through the device over it.
    let volumes = ["disk", "over", "plain"];
    let volumes: Vec<(&str, StampedVolume)> = volumes
        .iter()
        .enumerate()
        .map(|(i, name)| (*name, StampedVolume::new(SECTORS, (i as u64) << 40)))
        .collect();
    for (seed, how) in [(1, Signal::KILL), (2, Signal::TERM), (3, Signal::KILL)] {
        let status = serve_until(&files, &volumes, seed << 8, how);
        assert_eq!(status, (how == Signal::TERM).then_some(0), "{how:?}");
        let server = files.serve();
        check(&server, &volumes);
        assert_eq!(server.says(&["reconfigure"]), "= 4 unchanged\n");
    }
}

/// A snapshot of a disk and a device over it, in files of conf.d.
const BESIDE: [(&str, &str); 2] = [
    ("10-over.toml", "[devices.over]\ntable = \"0 131072 linear @snap 0\"\n"),
    ("20-snap.toml", "[devices.snap]\ntable = \"0 131072 snapshot disk store P 8\"\n"),
];

/// fio on the device's part of round `round`, with four jobs of one request each, so fio knows
/// which writes were acknowledged.
fn fio_on(files: &ConfigDir, server: &Server, device: &str, round: usize, how: &str) -> Command {
    let folder = files.path(&format!("{device}-{round}"));
    let _ = std::fs::create_dir(&folder);
    let offset = round * 32;
    let part =
        format!("--rw=randwrite --iodepth=1 --numjobs=4 --offset={offset}m --offset_increment=8m --size=8m");
    let mut fio = fio(server, device, &format!("{part} --randseed={round} --verify_fatal=1 {how}"));
    fio.current_dir(folder);
    fio
}

/// fio's check of a part that it wrote: true if all acknowledged data is present, and fio's
/// messages.
fn fio_finds(files: &ConfigDir, server: &Server, device: &str, round: usize) -> (bool, String) {
    let mut fio = fio_on(files, server, device, round, "--verify_only --verify_state_load=1");
    let out = fio.output().unwrap();
    (out.status.success(), text(&out.stdout) + &text(&out.stderr))
}

#[test]
fn fio_finds_what_it_was_told_is_written() {
    if !has("fio") || !has("timeout") {
        return;
    }
    let files = ConfigDir::new(
        "[serve]\nstate = \"state\"\n[devices.disk]\ntable = \"0 131072 snapshot-origin disk\"\n",
    );
    BESIDE.iter().for_each(|(name, text)| files.write(&format!("conf.d/{name}"), text));
    for (name, len) in [("disk", 64 << 20), ("store", 160 << 20)] {
        std::fs::File::create(files.path(name)).unwrap().set_len(len).unwrap();
    }
    for (round, how) in [Signal::KILL, Signal::TERM].into_iter().enumerate() {
        let mut server = files.serve();
        let load = |device| {
            let mut fio = fio_on(&files, &server, device, round, "--do_verify=0 --rate_iops=400");
            (device, fio.arg("--verify_state_save=1").spawn().unwrap())
        };
        let loads = ["disk", "over"].map(load);
        let answered = |device: &Value| device["served"]["write"]["requests"].as_u64().unwrap_or(0);
        until("a load", || {
            let stats: Value = serde_json::from_str(&server.http("GET", "/v1/stats", "").2).unwrap();
            let all = stats["devices"].as_array().unwrap().iter().filter(|device| answered(device) > 500);
            (all.count() == 2).then_some(())
        });
        signal(Pid::from_child(&server.child), how);
        let status = until("the end of the server", || server.child.try_wait().unwrap());
        assert_eq!(status.code(), (how == Signal::TERM).then_some(0), "{}", server.log());
        for (device, fio) in loads {
            let out = fio.wait_with_output().unwrap();
            assert!(!out.status.success(), "{how:?} {device}: nothing was cut off");
        }
        let server = files.serve();
        assert_eq!(names(&server), ["disk", "over", "snap"]);
        for (device, round) in (0..=round).flat_map(|round| [("disk", round), ("over", round)]) {
            let (is_there, output) = fio_finds(&files, &server, device, round);
            assert!(is_there, "{how:?} {device} {round}: {output}");
        }
    }
    // Proves that fio would detect missing data.
    std::fs::File::options().write(true).open(files.path("disk")).unwrap().set_len(0).unwrap();
    std::fs::File::options().write(true).open(files.path("disk")).unwrap().set_len(64 << 20).unwrap();
    let server = files.serve();
    assert!(!fio_finds(&files, &server, "disk", 0).0);
}
