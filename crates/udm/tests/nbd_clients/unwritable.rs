//! A log that cannot be written: the server serves, verifies and ends as usual.

use super::server::{Server, text};
use super::{Outcome, check, folder_with_image, two_paths};
use libtest_mimic::Failed;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use std::fs;
use std::io::{PipeReader, Write, pipe};
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Number of connections: more than the log's queue has lines, and more than the listener has
/// slots.
const CONNECTS: usize = 1100;

/// Standard error is a full device: every write fails.
pub fn full() -> Outcome {
    serves_and_ends(Stdio::from(fs::File::options().write(true).open("/dev/full")?))
}

/// Standard error is a pipe without a reader: every write fails with EPIPE.
pub fn closed() -> Outcome {
    let (reader, writer) = pipe()?;
    drop(reader);
    serves_and_ends(Stdio::from(writer))
}

/// Standard error is a full pipe whose reader does not read: every write blocks for ever.
pub fn unread() -> Outcome {
    let (_reader, writer) = full_pipe()?;
    serves_and_ends(writer)
}

/// A client can cause log lines, but only a limited number.
pub fn bounded() -> Outcome {
    let folder = folder_with_image(1 << 20);
    let log = fs::File::create(folder.path().join("serve.log"))?;
    let server = Server::start_with(folder.path(), &["d=disk.img"], log.into(), "debug")?;
    for _ in 0..5000 {
        let mut client = UnixStream::connect(folder.path().join("nbd.sock"))?;
        // The server may have disconnected the client already.
        let _ = client.write_all(&[0xff; 64]);
    }
    let deadline = Instant::now() + Duration::from_secs(20);
    while !server.log().contains(" more like it: nbd") {
        check(Instant::now() < deadline, &format!("nothing says what was left out:\n{}", server.log()))?;
        std::thread::sleep(Duration::from_millis(50));
    }
    let (lines, bytes) = (server.log().lines().count(), server.log().len());
    check(lines < 300 && bytes < 64 << 10, &format!("{lines} lines, {bytes} bytes:\n{}", server.log()))?;
    server.stop()
}

fn full_pipe() -> Result<(PipeReader, Stdio), Failed> {
    let (reader, mut writer) = pipe()?;
    let flags = fcntl_getfl(&writer)?;
    fcntl_setfl(&writer, flags | OFlags::NONBLOCK)?;
    while writer.write(&[b'.'; 4096]).is_ok() {}
    while writer.write(b".").is_ok() {}
    fcntl_setfl(&writer, flags)?;
    Ok((reader, Stdio::from(writer)))
}

/// Runs a verified load and meanwhile causes log lines: invalid clients, paths that fail and are
/// reinstated.
fn serves_and_ends(stderr: Stdio) -> Outcome {
    let folder = folder_with_image(64 << 20);
    two_paths(&folder);
    let table = "0 131072 multipath 1 queue_if_no_path 0 1 1 queue-length 0 2 1 disk.img 1 same.img 1";
    let devices = [&format!("mp={table}"), "lw=0 8192 log-writes mem:4M mem:64K"];
    let server = Server::start_with(folder.path(), &devices, stderr, "debug")?;
    let fio = server
        .command("timeout")
        .args(
            "-k 5 60 fio --name=verify --ioengine=nbd --rw=randwrite --bs=4k --iodepth=32 --size=32M"
                .split(' '),
        )
        .args("--verify=crc32c --verify_fatal=1 --verify_backlog=256 --time_based --runtime=3".split(' '))
        .arg(format!("--uri={}", server.uri("mp")))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    for i in 0..CONNECTS {
        let mut client = UnixStream::connect(folder.path().join("nbd.sock"))?;
        // The server may have disconnected the client already.
        let _ = client.write_all(&[0xff; 64]);
        if i % 50 == 0 {
            server.udm(&["message", "mp", "0", "fail_path", "253:0"])?;
            server.udm(&["message", "mp", "0", "reinstate_path", "253:0"])?;
        }
    }
    let out = text(&fio.wait_with_output()?.stdout);
    check(out.contains("err= 0") && out.contains("write: IOPS"), &out)?;
    // A log-writes log that is full is reported, and its device continues without logging.
    let fill = "-k 5 60 fio --name=fill --ioengine=nbd --rw=write --bs=64k --size=4M --fsync=1".split(' ');
    let uri = format!("--uri={}", server.uri("lw"));
    let filled = server.command("timeout").args(fill).arg(uri).output()?;
    check(filled.status.success(), &text(&filled.stdout))?;
    server.udm(&["remove", "mp"])?;
    server.stop()
}
