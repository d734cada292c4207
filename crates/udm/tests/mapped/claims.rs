//! Exclusive claims on a disk under any of its names.

use super::{Server, text};
use std::fs;
use tempfile::TempDir;

#[test]
fn a_log_is_one_devices_alone() {
    let folder = TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    fs::write(path("log"), vec![0; 1 << 20]).unwrap();
    fs::hard_link(path("log"), path("twin")).unwrap();
    let one = format!("one=0 8 log-writes mem:1M {}", path("log"));
    let server = Server::start(&[&one]);
    let create = |name: &str, log: &str| {
        server.verb(&["create", name, "--table", &format!("0 8 log-writes mem:1M {}", path(log))])
    };
    for log in ["log", "twin"] {
        let refused = create("two", log);
        let output = text(&refused.stderr);
        assert!(!refused.status.success() && output.starts_with("udm: two: "), "{output}");
        let reason = format!("254:0 uses {} exclusively", path(log));
        assert!(output.contains(&reason) && output.contains("Device or resource busy"), "{output}");
    }
    // The refused device leaves no trace, and the first device may claim its log again.
    assert_eq!(server.says(&["ls"]), "one\t(254:0)\n");
    server.says(&["reload", "one", "--table", &format!("0 8 log-writes mem:2M {}", path("twin"))]);
    server.says(&["resume", "one"]);
    server.says(&["remove", "one"]);
    assert!(create("two", "twin").status.success());
}

/// Two programs and one store: the second is refused until the first has ended.
#[test]
fn a_store_is_one_programs_alone() {
    let folder = TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    fs::write(path("image"), vec![7; 1 << 20]).unwrap();
    fs::write(path("store"), vec![0; 1 << 20]).unwrap();
    // The image and the store may be shared as files; the store may not be shared as a store.
    let shared = |name: &str| format!("file:{}?exclusive=off", path(name));
    let line = format!("0 2048 snapshot {} {} P 8", shared("image"), shared("store"));
    let first = Server::start(&[&format!("one={line}")]);
    let second = Server::start(&["other=mem:1M"]);
    let refused = second.verb(&["create", "two", "--table", &line]);
    let output = text(&refused.stderr);
    assert!(!refused.status.success() && output.contains("another program uses"), "{output}");
    first.says(&["remove", "one"]);
    assert!(second.verb(&["create", "two", "--table", &line]).status.success());
    let refused = first.verb(&["create", "one", "--table", &line]);
    assert!(!refused.status.success(), "{}", text(&refused.stderr));
}
