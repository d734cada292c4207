//! qcow2 images as read-only devices of tables, read by other programs.

mod support;

use std::fs;
use std::path::Path;
use std::process::Command;
use support::{Server, has, text, udm};
use tempfile::TempDir;

/// Runs a command line, which must succeed, in `folder`. Returns its output.
fn run(folder: &Path, line: &str) -> String {
    let words: Vec<&str> = line.split(' ').filter(|word| !word.is_empty()).collect();
    let out = Command::new(words[0]).args(&words[1..]).current_dir(folder).output().unwrap();
    assert!(out.status.success(), "{line}: {}", text(&out.stderr));
    text(&out.stdout)
}

/// An image of 8 MiB with data, zeroes and gaps over a compressed base.
fn images(folder: &Path) {
    let bytes: Vec<u8> = (0..4_u32 << 20).map(|n| (n / 700) as u8 ^ n as u8).collect();
    fs::write(folder.join("raw"), bytes).unwrap();
    run(folder, "qemu-img convert -c -f raw -O qcow2 raw base.qcow2");
    run(folder, "qemu-img create -q -f qcow2 -F qcow2 -b base.qcow2 disk.qcow2 8M");
    for command in ["write -P 7 1M 200k", "write -z 2M 1M", "write -P 9 6M 64k"] {
        let mut qemu_io = Command::new("qemu-io");
        qemu_io.args(["-f", "qcow2", "-c", command, "disk.qcow2"]).current_dir(folder);
        assert!(qemu_io.output().unwrap().status.success(), "{command}");
    }
}

fn uri(server: &Server, name: &str) -> String {
    format!("nbd+unix:///{name}?socket={}", server.nbd.display())
}

fn image_uri(folder: &Path) -> String {
    format!("file:{}?format=qcow2&backing=allow", folder.join("disk.qcow2").display())
}

#[test]
fn an_image_is_served_as_qemu_reads_it() {
    if !["qemu-img", "qemu-io", "nbdcopy", "nbdinfo"].iter().all(|program| has(program)) {
        return;
    }
    let folder = TempDir::new().unwrap();
    let folder = folder.path();
    images(folder);
    let server = Server::start(&[&format!("d={}", image_uri(folder))]);
    run(folder, "qemu-img convert -f qcow2 -O raw disk.qcow2 want");
    run(folder, &format!("nbdcopy {} got", uri(&server, "d")));
    assert!(
        fs::read(folder.join("want")).unwrap() == fs::read(folder.join("got")).unwrap(),
        "the data differs"
    );
    // Data and zeroes are where QEMU sees them.
    let map = run(folder, &format!("nbdinfo --map {}", uri(&server, "d")));
    let seen: Vec<(u64, u64, bool)> = map.lines().map(map_line).collect();
    let qemu: serde_json::Value =
        serde_json::from_str(&run(folder, "qemu-img map -f qcow2 --output=json disk.qcow2")).unwrap();
    let mut wanted: Vec<(u64, u64, bool)> = Vec::new();
    for extent in qemu.as_array().unwrap() {
        let [start, len] = ["start", "length"].map(|name| extent[name].as_u64().unwrap());
        let is_zero = extent["zero"].as_bool().unwrap();
        match wanted.last_mut() {
            Some(last) if last.2 == is_zero => last.1 += len,
            _ => wanted.push((start, len, is_zero)),
        }
    }
    assert_eq!(seen, wanted, "{map}");
    let out = Command::new("qemu-io")
        .args(["-f", "qcow2", "-c", "write 0 512"])
        .arg(folder.join("base.qcow2"))
        .output()
        .unwrap();
    assert!(!out.status.success() && text(&out.stderr).contains("lock"), "{}", text(&out.stderr));
    assert!(run(folder, &format!("nbdinfo {}", uri(&server, "d"))).contains("is_read_only: true"));
}

/// A line of `nbdinfo --map`: offset, length, and whether it is zeroes.
fn map_line(line: &str) -> (u64, u64, bool) {
    let words: Vec<&str> = line.split_whitespace().collect();
    (words[0].parse().unwrap(), words[1].parse().unwrap(), words[2].parse::<u32>().unwrap() & 2 != 0)
}

/// Machines write to snapshots over one image.
#[test]
fn snapshots_over_an_image_take_writes() {
    if !["qemu-img", "qemu-io", "nbdcopy"].iter().all(|program| has(program)) {
        return;
    }
    let folder = TempDir::new().unwrap();
    let folder = folder.path();
    images(folder);
    run(folder, "qemu-img convert -f qcow2 -O raw disk.qcow2 want");
    let machine = |name: &str| {
        let store = folder.join(format!("{name}.cow"));
        fs::File::create(&store).unwrap().set_len(16 << 20).unwrap();
        format!("{name}=0 16384 snapshot {} {} P 8", image_uri(folder), store.display())
    };
    let server = Server::start(&[&machine("vm1"), &machine("vm2")]);
    let write = Command::new("qemu-io")
        .args(["-f", "raw", "-c", "write -P 77 3M 64k", "-c", "read -P 7 1M 200k", &uri(&server, "vm1")])
        .output()
        .unwrap();
    assert!(write.status.success() && !text(&write.stdout).contains("failed"), "{}", text(&write.stdout));
    let mut want = fs::read(folder.join("want")).unwrap();
    for (name, is_written) in [("vm2", false), ("vm1", true)] {
        if is_written {
            want[3 << 20..(3 << 20) + (64 << 10)].fill(77);
        }
        run(folder, &format!("nbdcopy {} {name}.got", uri(&server, name)));
        assert!(fs::read(folder.join(format!("{name}.got"))).unwrap() == want, "{name} differs");
    }
}

#[test]
fn an_image_that_is_refused_says_why_in_one_line() {
    if !has("qemu-img") {
        return;
    }
    let folder = TempDir::new().unwrap();
    let folder = folder.path();
    run(folder, "qemu-img create -q -f qcow2 -o extended_l2=on sub.qcow2 8M");
    run(folder, "qemu-img create -q -f qcow2 plain.qcow2 8M");
    let refused = |table: &str| {
        let out = udm(&["serve", "--unix", "-", "--cores", "0", "--device", table]).output().unwrap();
        assert_eq!(out.status.code(), Some(1));
        text(&out.stderr)
    };
    let sub = format!("d=file:{}?format=qcow2", folder.join("sub.qcow2").display());
    let why = refused(&sub);
    assert!(why.lines().count() == 1 && why.contains("qemu-img convert"), "{why}");
    // A table that is longer than the disk.
    let long = format!("d=0 16385 linear file:{}?format=qcow2 0", folder.join("plain.qcow2").display());
    let why = refused(&long);
    assert!(why.contains("too small for target: start=0, len=16385, dev_size=16384"), "{why}");
}
