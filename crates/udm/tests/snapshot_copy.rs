//! `udm snapshot copy`: full and incremental backups are the instant, byte for byte.

mod support;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::nbd::Client;
use support::{Server, has, text, udm};
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

/// Checks an image by QEMU's own program, and returns what it reads as.
fn qcow2_content(image: &Path) -> Vec<u8> {
    let qemu_img = |args: &[&str]| {
        let out = Command::new("qemu-img").args(args).output().unwrap();
        assert!(out.status.success(), "{args:?}: {}{}", text(&out.stdout), text(&out.stderr));
    };
    let (image, raw) = (image.to_str().unwrap(), image.with_extension("raw"));
    qemu_img(&["check", "-f", "qcow2", image]);
    qemu_img(&["convert", "-f", "qcow2", "-O", "raw", image, raw.to_str().unwrap()]);
    fs::read(raw).unwrap()
}

/// Images in QEMU's format, in full and over a copy of an older snapshot in either format.
#[test]
fn qemu_reads_the_images() {
    if !has("qemu-img") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let disk = image(folder.path());
    let path = |name: &str| folder.path().join(name);
    let server = Server::start(&[&format!("disk={}", disk.display())]);
    let copy = |words: &[&str]| {
        let mut all = vec!["snapshot", "copy", "--format", "qcow2"];
        all.extend(words);
        server.says(&all);
    };
    let at = |name: &str| path(name).to_str().unwrap().to_owned();
    server.says(&["snapshot", "create", "monday", "--of", "disk", "--transient"]);
    copy(&["monday", &at("monday.qcow2")]);
    assert!(qcow2_content(&path("monday.qcow2")) == content(&server, "monday"));
    let bytes = fs::metadata(path("monday.qcow2")).unwrap().len();
    assert!((3 << 20..4 << 20).contains(&bytes), "holes take no space: {bytes} bytes");
    server.says(&["snapshot", "copy", "monday", &at("monday.img")]);

    // Data becomes zeroes in part of a cluster and in whole ones, and zeroes become data.
    let mut client = Client::connect(&server.nbd, "disk");
    for (command, offset, len) in [
        (NbdCommand::WriteZeroes, (8 << 20) + 4096, 4096),
        (NbdCommand::WriteZeroes, 9 << 20, 1 << 20),
        (NbdCommand::Write, 15 << 20, 512),
        (NbdCommand::Write, SIZE - 512, 512),
    ] {
        assert_eq!(client.one(command, offset, len), 0);
    }
    server.says(&["snapshot", "create", "tuesday", "--of", "disk", "--transient"]);
    let expected = content(&server, "tuesday");
    assert!(expected != content(&server, "monday"));
    for base in ["monday.qcow2", "monday.img"] {
        let over = format!("over-{base}.qcow2");
        copy(&["tuesday", "--since", "monday", "--backing", &at(base), &at(&over)]);
        assert!(qcow2_content(&path(&over)) == expected, "{base}");
        assert!(fs::metadata(path(&over)).unwrap().len() < 1 << 20, "only what has changed");
    }
    // Relative to the image, so that both can be moved.
    let moved = folder.path().join("moved");
    fs::create_dir(&moved).unwrap();
    for name in ["monday.qcow2", "over-monday.qcow2.qcow2"] {
        fs::rename(path(name), moved.join(name)).unwrap();
    }
    assert!(qcow2_content(&moved.join("over-monday.qcow2.qcow2")) == expected);
    fs::write(path("short"), "short").unwrap();
    for (words, why) in [
        (&["--since", "monday"][..], "--since monday: --backing FILE names its copy"),
        (
            &["--since", "monday", "--backing", &at("short")],
            "5 bytes, but tuesday has 16777216: not a copy of monday",
        ),
        (&["--since", "monday", "--backing", &at("none")], "none: No such file or directory"),
        (
            &["--since", "monday", "--backing", &at("monday.img"), "--format", "raw"],
            "--backing: only with --format qcow2",
        ),
    ] {
        let mut all = vec!["snapshot", "copy", "tuesday"];
        if !words.contains(&"--format") {
            all.extend(["--format", "qcow2"]);
        }
        all.extend(words);
        let new = at("new");
        all.push(&new);
        let said = server.refuses(&all);
        assert!(said.contains(why) && said.lines().count() == 1, "{words:?}: {said}");
        assert!(!path("new").exists());
    }
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
