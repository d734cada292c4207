//! What the file says is there again after a kill and after an end in good order, with all that
//! was acknowledged.

use super::{Files, names};
use crate::support::nbd::Client;
use crate::support::stamps::{Volume, image};
use crate::support::{Server, signal, until};
use rustix::process::{Pid, Signal};
use std::sync::atomic::{AtomicU64, Ordering};

const SECTORS: usize = 8192;

/// An origin, its persistent snapshot, and a device over the snapshot, in an order in which none
/// could be made.
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

/// Loads all devices that are written, ends the server by `how` in the middle, and what it ended
/// with.
fn serve_until(files: &Files, volumes: &[(&str, Volume)], seed: u64, how: Signal) -> Option<i32> {
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

fn check(server: &Server, volumes: &[(&str, Volume)]) {
    assert_eq!(names(server), ["disk", "over", "plain", "snap"]);
    assert!(server.says(&["info", "snap"]).contains("UUID: the-snapshot"));
    assert!(!server.says(&["status", "snap"]).contains("Invalid"));
    for (name, volume) in volumes {
        volume.settle(&server.nbd, name, 0..0);
    }
}

#[test]
fn after_a_kill_and_after_an_end_the_same_devices_have_what_was_acknowledged() {
    let files = Files::new(CONF);
    for name in ["disk", "plain"] {
        std::fs::write(files.path(name), image(SECTORS)).unwrap();
    }
    std::fs::File::create(files.path("store")).unwrap().set_len(SECTORS as u64 * 1024).unwrap();
    // What is written to the snapshot is written through the device over it.
    let volumes = ["disk", "over", "plain"];
    let volumes: Vec<(&str, Volume)> =
        volumes.iter().enumerate().map(|(i, name)| (*name, Volume::new(SECTORS, (i as u64) << 40))).collect();
    for (seed, how) in [(1, Signal::KILL), (2, Signal::TERM), (3, Signal::KILL)] {
        let status = serve_until(&files, &volumes, seed << 8, how);
        assert_eq!(status, (how == Signal::TERM).then_some(0), "{how:?}");
        let server = files.serve();
        check(&server, &volumes);
        assert_eq!(server.says(&["reconfigure"]), "= 4 unchanged\n");
    }
}
