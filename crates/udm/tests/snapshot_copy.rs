//! `udm snapshot copy`: full and incremental backups are the instant, byte for byte.

mod support;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use support::nbd::Client;
use support::{Server, udm};
use udm_wire::nbd::NbdCommand;

const SIZE: u64 = 16 << 20;

/// Data at the begin, in the middle and at the end; holes between.
fn image(folder: &Path) -> PathBuf {
    let mut bytes = vec![0; SIZE as usize];
    for (at, len) in [(0, 5000), (8 << 20, 3 << 20), (SIZE as usize - 512, 512)] {
        bytes[at..at + len].iter_mut().enumerate().for_each(|(n, byte)| *byte = (n / 512 + 1) as u8);
    }
    let path = folder.join("disk.img");
    let file = fs::File::create(&path).unwrap();
    file.set_len(SIZE).unwrap();
    for at in (0..SIZE as usize).step_by(4096).filter(|&at| bytes[at..at + 4096].iter().any(|&b| b != 0)) {
        std::os::unix::fs::FileExt::write_all_at(&file, &bytes[at..at + 4096], at as u64).unwrap();
    }
    path
}

/// All bytes of `name`, by NBD.
fn content(server: &Server, name: &str) -> Vec<u8> {
    let mut client = Client::connect(&server.nbd, name);
    let mut read = |at| {
        client.ask(NbdCommand::Read, at, 1 << 20);
        let (_, error, data) = client.answer().unwrap();
        assert_eq!(error, 0);
        data
    };
    (0..SIZE).step_by(1 << 20).flat_map(&mut read).collect()
}

#[test]
fn a_copy_is_the_instant_in_full_and_since_another() {
    let folder = tempfile::tempdir().unwrap();
    let disk = image(folder.path());
    let copy = folder.path().join("backup");
    let copy = copy.to_str().unwrap();
    let server = Server::start(&[&format!("disk={}", disk.display())]);
    server.says(&["snapshot", "create", "monday", "--of", "disk", "--transient"]);
    let mut client = Client::connect(&server.nbd, "disk");
    assert_eq!(client.one(NbdCommand::Write, 1 << 20, 65536), 0);

    let output = server.says(&["snapshot", "copy", "monday", copy]);
    assert!(output.starts_with("copied ") && output.contains(" of 16.0MiB in "), "{output}");
    assert!(fs::read(copy).unwrap() == content(&server, "monday"));
    let blocks = fs::metadata(copy).unwrap().blocks() * 512;
    assert!(blocks < 6 << 20, "holes stay holes: {blocks} bytes");

    // What was data becomes zeroes, and what was zeroes data.
    assert_eq!(client.one(NbdCommand::WriteZeroes, 9 << 20, 1 << 20), 0);
    assert_eq!(client.one(NbdCommand::Write, 15 << 20, 512), 0);
    server.says(&["snapshot", "create", "tuesday", "--of", "disk", "--transient"]);
    assert_eq!(client.one(NbdCommand::Write, 2 << 20, 4096), 0);
    let since = ["snapshot", "copy", "tuesday", "--since", "monday", copy, "--json"];
    let report: serde_json::Value = serde_json::from_str(&server.says(&since)).unwrap();
    let copied = report["copied_bytes"].as_u64().unwrap();
    // Two writes and a range of zeroes, and what the origin did since.
    assert!((1 << 20..(1 << 20) + 256 * 1024).contains(&copied), "{report}");
    assert!(fs::read(copy).unwrap() == content(&server, "tuesday"));
    // The same again changes nothing: an interrupted copy is completed so.
    server.says(&since);
    assert!(fs::read(copy).unwrap() == content(&server, "tuesday"));
}

#[test]
fn what_is_no_copy_is_refused_and_no_file_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let disk = image(folder.path());
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let server = Server::start(&[&format!("disk={}", disk.display()), "other=mem:1M"]);
    server.says(&["snapshot", "create", "monday", "--of", "disk", "--transient"]);
    server.says(&["snapshot", "create", "else", "--of", "other", "--transient", "--store", "mem:2M"]);
    fs::write(path("short"), "short").unwrap();
    for (words, why) in [
        (vec!["monday", "short"], "the file exists: name another, or update a copy with --since OLD"),
        (vec!["monday", "--since", "monday", "short"], "5 bytes, but monday has 16777216"),
        (
            vec!["monday", "--since", "monday", "none"],
            "no such file: omit --since monday to copy all of monday",
        ),
        (vec!["monday", "--since", "sunday", "none"], "sunday"),
        (vec!["monday", "--since", "else", "none"], "it is of"),
        (vec!["disk", "none"], "disk"),
        (vec!["monday", "no/folder"], "No such file or directory"),
    ] {
        let mut args = vec!["snapshot".to_owned(), "copy".to_owned()];
        let last = words.len() - 1;
        args.extend(words[..last].iter().map(|word| (*word).to_owned()));
        args.push(path(words[last]));
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let output = server.refuses(&args);
        assert!(output.contains(why) && output.lines().count() == 1, "{args:?}: {output}");
    }
    assert_eq!(fs::read_to_string(path("short")).unwrap(), "short");
    let mut left: Vec<_> =
        fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["disk.img", "monday.cow", "short"]);
}

/// A copy that is ended leaves no file, and one under a name only when it is complete.
#[test]
fn a_copy_that_is_ended_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("backup");
    let slow = "slow=0 32768 delay pattern:16M 0 100";
    let server = Server::start(&[slow, "d=0 32768 linear @slow 0"]);
    server.says(&["snapshot", "create", "s", "--of", "d", "--transient", "--store", "mem:32M"]);
    let mut child = udm(&["snapshot", "copy", "s"])
        .arg(&copy)
        .args(["--socket", server.socket.to_str().unwrap()])
        .spawn()
        .unwrap();
    std::thread::sleep(std::time::Duration::from_millis(150));
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}
