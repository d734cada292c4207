//! Devices of the file whose disks come late.

use super::{ConfigDir, names};
use crate::support::{Server, UDM, until};
use std::fs;

fn served(server: &Server, expected: &[&str]) {
    until("the devices", || (names(server) == expected).then_some(()));
}

/// A disk that is not there keeps no other device from being served, and is served when it comes,
/// with the devices above it; also after an upgrade, and not once the file no longer has it.
#[test]
fn a_disk_that_comes_late_is_served() {
    let files = ConfigDir::new(
        "[devices.here]\ntable = \"null:1M\"\n\
         [devices.late]\ntable = \"0 16 linear late.img 0\"\n\
         [devices.top]\ntable = \"0 8 linear @late 8\"\n\
         [devices.later]\ntable = \"0 16 linear later.img 0\"\n\
         [devices.wrong]\ntable = \"0 16 linear\"\n",
    );
    let mut server = files.serve();
    assert_eq!(names(&server), ["here"]);
    let log = server.log();
    assert!(log.contains("udm: tried again until it can be created: late, later, top\n"), "{log}");
    assert!(log.contains("udm: wrong: linear: Invalid argument count"), "{log}");
    files.write("late.img", &"x".repeat(8192));
    served(&server, &["here", "late", "top"]);
    assert!(server.log().contains("udm: + late\n"), "{}", server.log());
    // A device that a verb has removed stays so, though others of the file are tried again.
    server.says(&["remove", "top"]);
    server.upgrade(&[UDM]);
    files.write("later.img", &"x".repeat(8192));
    served(&server, &["here", "late", "later"]);

    fs::remove_file(files.path("later.img")).unwrap();
    server.says(&["remove", "later"]);
    assert!(server.verb(&["reconfigure"]).status.code() == Some(1), "later.img is gone, and wrong is wrong");
    files.write("udm.toml", "[devices.here]\ntable = \"null:1M\"\n");
    server.says(&["reconfigure"]);
    files.write("later.img", &"x".repeat(8192));
    std::thread::sleep(std::time::Duration::from_millis(2500));
    assert_eq!(names(&server), ["here"]);
}
