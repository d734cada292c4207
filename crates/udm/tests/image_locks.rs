//! A plain image has one program that writes it: a second server and QEMU's programs are refused,
//! and a server is refused while one of these writes.

mod support;

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::process::Command;
use support::{Server, has, text, udm, until};

#[test]
fn an_image_that_another_program_writes_is_refused() {
    if !["qemu-io", "qemu-nbd"].iter().all(|program| has(program)) {
        return;
    }
    let folder = tempfile::TempDir::new().unwrap();
    let image = folder.path().join("disk.img");
    File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let image = image.to_str().unwrap();
    let second = |device: &str| {
        let mut command = udm(&["serve", "--device", device, "--run", "true"]);
        let out = command.env("UDM_STATE", folder.path().join("state")).output().unwrap();
        (out.status.success(), text(&out.stderr))
    };
    let (plain, shared) = (format!("d={image}"), format!("d=file:{image}?exclusive=off"));
    let qemu = |command: &str| {
        let out = Command::new("qemu-io").args(["-f", "raw", "-c", command, image]).output().unwrap();
        (out.status.success(), text(&out.stderr))
    };

    let server = Server::start(&[&plain]);
    let (is_served, why) = second(&plain);
    assert!(!is_served && why.contains("in use: another program writes it"), "{why}");
    assert_eq!(why.lines().count(), 1, "{why}");
    let (has_written, why) = qemu("write 0 512");
    assert!(!has_written && why.contains("lock"), "{why}");
    assert!(second(&shared).0, "a server may be told to share the image");
    drop(server);
    assert!(qemu("write 0 512").0);

    let socket = folder.path().join("qemu");
    let mut other = Command::new("qemu-nbd");
    other.args(["-t", "-f", "raw", "-k", socket.to_str().unwrap(), image]);
    let mut other = other.spawn().unwrap();
    until("qemu-nbd", || UnixStream::connect(&socket).ok());
    let (is_served, why) = second(&plain);
    other.kill().unwrap();
    other.wait().unwrap();
    assert!(!is_served && why.contains("in use: another program writes it"), "{why}");
    assert!(second(&plain).0);
}
