//! Files and block devices under the real program: the disk that a name leads to, two nodes of one
//! disk, and the data after a kill.

use crate::server::{Server, UDM, sh, text};
use crate::{Outcome, check, folder_with_image, quote, two_paths};
use libtest_mimic::Failed;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);

/// A loop device, detached on drop.
struct LoopDevice(String);

impl LoopDevice {
    fn over(file: &Path) -> Result<LoopDevice, Failed> {
        Ok(LoopDevice(sh(&format!("losetup --find --show '{}'", file.display()))?.trim().into()))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = sh(&format!("losetup --detach {}", self.0));
    }
}

/// An export as a file, through nbdfuse; unmounted on drop.
struct FuseMount {
    child: Child,
    file: PathBuf,
}

impl FuseMount {
    fn over(uri: &str, file: PathBuf, bytes: u64) -> Result<FuseMount, Failed> {
        fs::File::create(&file)?;
        let child = Command::new("nbdfuse").arg(&file).arg(uri).stdin(Stdio::null()).spawn()?;
        let fuse = FuseMount { child, file };
        let begin = Instant::now();
        while fs::metadata(&fuse.file)?.len() != bytes {
            check(begin.elapsed() < LIMIT, "nbdfuse does not come up")?;
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(fuse)
    }

    fn signal(&self, signal: rustix::process::Signal) -> Outcome {
        Ok(rustix::process::kill_process(rustix::process::Pid::from_child(&self.child), signal)?)
    }
}

impl Drop for FuseMount {
    fn drop(&mut self) {
        let _ = self.signal(rustix::process::Signal::CONT);
        let _ = sh(&format!("fusermount3 -uz '{}'", self.file.display()));
        let begin = Instant::now();
        while self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            if begin.elapsed() > LIMIT {
                let _ = self.child.kill();
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Runs qemu-io's commands on an export; returns their output, and fails if they fail.
fn io(server: &Server, export: &str, commands: &[&str]) -> Result<String, Failed> {
    let commands: String = commands.iter().map(|c| format!(" -c {}", quote(c))).collect();
    sh(&format!("qemu-io -f raw{commands} '{}' 2>&1", server.uri(export)))
}

/// fio writes, flushes and reads back block after block, for some seconds and during `meanwhile`.
fn fio_over(server: &Server, export: &str, meanwhile: impl FnOnce() -> Outcome) -> Outcome {
    let mut fio = server.command("fio");
    fio.args(["--name=verify", "--ioengine=nbd", "--rw=randwrite", "--bs=4k", "--iodepth=16", "--fsync=32"]);
    fio.args(["--size=8M", "--verify=crc32c", "--verify_fatal=1", "--verify_backlog=64", "--numjobs=2"]);
    fio.args(["--offset_increment=8M", "--time_based", "--runtime=60", "--group_reporting"]);
    fio.arg(format!("--uri={}", server.uri(export)));
    let mut fio = fio.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
    std::thread::sleep(Duration::from_millis(500));
    let outcome = meanwhile();
    std::thread::sleep(Duration::from_millis(500));
    let early = fio.try_wait()?;
    // fio verifies everything that it has written up to the signal.
    rustix::process::kill_process(rustix::process::Pid::from_child(&fio), rustix::process::Signal::INT)?;
    let out = text(&fio.wait_with_output()?.stdout);
    outcome?;
    check(early.is_none(), &format!("fio ended by itself:\n{out}"))?;
    // All reads are verification; "total=" counts reads, then writes.
    check(out.contains("err= 0") && out.contains("total=") && !out.contains("total=0,"), &out)
}

/// Reloads the table and fails and reinstates a path, ten times.
fn change(server: &Server, table: &str) -> Outcome {
    for i in 0..10 {
        let path = format!("253:{}", i % 2);
        server.udm(&["message", "mp", "0", "fail_path", &path])?;
        server.udm(&["load", "mp", "--table", table])?;
        server.udm(&["message", "mp", "0", "reinstate_path", &path])?;
        server.udm(&["resume", "mp"])?;
    }
    Ok(())
}

/// Two nodes of one disk, each of which could have its own page cache: no stale and no lost data,
/// and those caches are never used.
pub fn two_nodes_of_one_disk() -> Outcome {
    let folder = folder_with_image(16 << 20);
    let image = folder.path().join("disk.img");
    let (a, b) = (LoopDevice::over(&image)?, LoopDevice::over(&image)?);
    let over = |a: &str, b: &str| format!("0 32768 multipath 0 0 1 1 round-robin 0 2 1 {a} 1 {b} 1");
    let table = over(&a.0, &b.0);
    let server = Server::start(folder.path(), &[&format!("mp={table}")])?;
    fio_over(&server, "mp", || change(&server, &table))?;
    io(&server, "mp", &["write -P 0x42 0 16M", "flush"])?;
    check(fs::read(&image)?.iter().all(|&byte| byte == 0x42), "the disk lacks what was flushed")?;
    let alone = format!("'{UDM}' serve --device 'mp={table}' --unix - --run true");
    let output = format!("{:?}", sh(&alone).err());
    check(output.contains("in use: mounted, or open exclusively by another program"), &output)?;
    let cached = format!("file:{}?direct=off", a.0);
    let refusal = |name: &str, table: &str| {
        let output = server.udm(&["create", name, "--table", table]).err();
        output.map_or_else(String::new, |output| format!("{output:?}"))
    };
    let output = refusal("two", &format!("0 8 linear {cached} 0"));
    check(output.contains("open with direct=on already"), &output)?;
    server.udm(&["remove", "mp"])?;
    let output = refusal("mp", &over(&cached, &b.0));
    check(output.contains("has a page cache of its own (other paths would read stale data"), &output)?;
    server.stop()
}

/// A node is removed under load. While it is open, the kernel keeps it. Once no path uses it, it is
/// gone, and no table can use it until it exists again.
pub fn a_node_that_is_taken_away() -> Outcome {
    let folder = folder_with_image(16 << 20);
    let image = folder.path().join("disk.img");
    let (a, b) = (LoopDevice::over(&image)?, LoopDevice::over(&image)?);
    let over = |nodes: &[&str]| {
        let paths: Vec<_> = nodes.iter().map(|node| format!("{node} 1")).collect();
        format!(
            "0 32768 multipath 1 queue_if_no_path 0 1 1 round-robin 0 {} 1 {}",
            nodes.len(),
            paths.join(" ")
        )
    };
    let (both, one) = (over(&[&a.0, &b.0]), over(&[&a.0]));
    let server = Server::start(folder.path(), &[&format!("mp={both}")])?;
    let live = |table: &str| -> Outcome {
        server.udm(&["load", "mp", "--table", table])?;
        server.udm(&["resume", "mp"]).map(drop)
    };
    fio_over(&server, "mp", || {
        sh(&format!("losetup --detach {}", b.0))?;
        std::thread::sleep(Duration::from_millis(300));
        live(&one)?;
        let output = format!("{:?}", server.udm(&["load", "mp", "--table", &both]).err());
        check(output.contains("too small for target") || output.contains("error getting device"), &output)?;
        check(server.udm(&["table", "mp"])?.contains("round-robin 0 1 1"), "the live table is another")?;
        sh(&format!("losetup {} '{}'", b.0, image.display()))?;
        live(&both)?;
        std::thread::sleep(Duration::from_millis(300));
        Ok(())
    })?;
    io(&server, "mp", &["write -P 0x43 0 16M", "flush"])?;
    check(fs::read(&image)?.iter().all(|&byte| byte == 0x43), "the disk lacks what was flushed")?;
    let status = server.udm(&["status", "mp"])?;
    check(status.contains("253:0 A 0"), &status)?;
    server.stop()
}

/// Limits a loop device to the given number of bytes of its file; 0 removes the limit.
const LIMIT_SIZE: &str = "import fcntl, sys; node = open(sys.argv[1], 'rb+', buffering=0); info = bytearray(232); \
                          fcntl.ioctl(node, 0x4c05, info); info[32:40] = int(sys.argv[2]).to_bytes(8, 'little'); \
                          fcntl.ioctl(node, 0x4c04, bytes(info))";

/// A node loses nearly all of its sectors under load: its path fails, the other path gets all
/// requests, and the path is used again once the sectors are back.
pub fn a_node_that_loses_its_sectors() -> Outcome {
    let folder = folder_with_image(16 << 20);
    let image = folder.path().join("disk.img");
    let (a, b) = (LoopDevice::over(&image)?, LoopDevice::over(&image)?);
    let device =
        format!("mp=0 32768 multipath 1 queue_if_no_path 0 1 1 round-robin 0 2 1 {} 1 {} 1", a.0, b.0);
    let server = Server::start_checking(folder.path(), &[&device])?;
    let path_is = |state: &str| -> Outcome {
        let begin = Instant::now();
        while !server.udm(&["status", "mp"])?.contains(&format!("253:1 {state} ")) {
            check(begin.elapsed() < LIMIT, &format!("its path does not become {state}"))?;
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    };
    let show = |bytes: u64| sh(&format!("python3 -c \"{LIMIT_SIZE}\" {} {bytes}", b.0)).map(drop);
    fio_over(&server, "mp", || {
        show(512)?;
        path_is("F")?;
        // Checks of its first block succeed meanwhile.
        std::thread::sleep(Duration::from_millis(2500));
        check(server.udm(&["status", "mp"])?.contains("253:1 F "), "it is used, and is cut short")?;
        show(0)?;
        path_is("A")
    })?;
    io(&server, "mp", &["write -P 0x44 0 16M", "flush"])?;
    check(fs::read(&image)?.iter().all(|&byte| byte == 0x44), "the disk lacks what was flushed")?;
    server.stop()
}

/// Hard links are paths to one file, with one page cache.
pub fn two_names_of_one_file() -> Outcome {
    for options in ["", "?direct=on"] {
        let folder = folder_with_image(16 << 20);
        two_paths(&folder);
        let table = format!(
            "0 32768 multipath 0 0 1 1 round-robin 0 2 1 file:disk.img{options} 1 file:same.img{options} 1"
        );
        let server = Server::start(folder.path(), &[&format!("mp={table}")])?;
        fio_over(&server, "mp", || change(&server, &table))?;
        let other = if options.is_empty() { "on" } else { "off" };
        let mixed = format!("0 8 linear file:disk.img?direct={other} 0");
        let output = format!("{:?}", server.udm(&["create", "two", "--table", &mixed]).err());
        check(output.contains("all names of a disk need the same"), &output)?;
        server.stop()?;
    }
    Ok(())
}

/// A file that replaces another is used from the next load on; a file that grew is larger then.
pub fn a_file_is_replaced_and_grows() -> Outcome {
    let folder = folder_with_image(1 << 20);
    let path = |name: &str| folder.path().join(name);
    let server = Server::start(folder.path(), &["d=0 2048 linear disk.img 0"])?;
    let all = |name: &str, byte: u8| -> Result<bool, Failed> {
        Ok(fs::read(path(name))?[..1 << 20].iter().all(|&b| b == byte))
    };
    io(&server, "d", &["write -P 1 0 1M", "flush"])?;
    fs::hard_link(path("disk.img"), path("old.img"))?;
    fs::write(path("new.img"), vec![9; 1 << 20])?;
    fs::rename(path("new.img"), path("disk.img"))?;
    io(&server, "d", &["write -P 2 0 1M", "flush"])?;
    check(all("old.img", 2)? && all("disk.img", 9)?, "a live table uses what it was loaded with")?;
    server.udm(&["load", "d", "--table", "0 2048 linear disk.img 0"])?;
    server.udm(&["resume", "d"])?;
    io(&server, "d", &["read -P 9 0 1M", "write -P 3 0 1M", "flush"])?;
    check(all("old.img", 2)? && all("disk.img", 3)?, "writes went to the file that was replaced")?;
    let status = server.udm(&["table", "d"])?;
    check(status.contains("linear 253:1 0"), &status)?;
    fs::OpenOptions::new().write(true).open(path("disk.img"))?.set_len(4 << 20)?;
    server.udm(&["load", "d", "--table", "0 8192 linear disk.img 0"])?;
    server.udm(&["resume", "d"])?;
    io(&server, "d", &["read -P 3 0 1M", "write -P 4 3M 1M", "flush", "read -P 4 3M 1M"])?;
    check(
        fs::read(path("disk.img"))?[3 << 20..].iter().all(|&b| b == 4),
        "the new end lacks what was written",
    )?;
    server.stop()
}

/// A path whose file was truncated fails. The other path serves all data, and no client notices.
pub fn a_path_that_was_cut_fails() -> Outcome {
    let folder = folder_with_image(1 << 20);
    let path = |name: &str| folder.path().join(name);
    fs::write(path("disk.img"), vec![7; 1 << 20])?;
    fs::copy(path("disk.img"), path("copy.img"))?;
    let table = "0 2048 multipath 0 0 1 1 round-robin 0 2 1 disk.img 1 copy.img 1";
    let server = Server::start(folder.path(), &[&format!("mp={table}")])?;
    fs::OpenOptions::new().write(true).open(path("copy.img"))?.set_len(4096)?;
    let reads = ["read -P 7 512k 4k"; 8];
    io(&server, "mp", &reads)?;
    let status = server.udm(&["status", "mp"])?;
    check(status.contains("253:0 A 0") && status.contains("253:1 F 1"), &status)?;
    server.udm(&["message", "mp", "0", "reinstate_path", "copy.img"])?;
    io(&server, "mp", &["write -P 8 512k 4k"; 4])?;
    check(fs::metadata(path("copy.img"))?.len() == 4096, "a write made the file longer again")?;
    let status = server.udm(&["status", "mp"])?;
    check(status.contains("253:0 A 0") && status.contains("253:1 F 2"), &status)?;
    server.stop()
}

/// Acknowledged data is present after a kill, and the disk can be opened again at once.
pub fn a_killed_server_loses_nothing() -> Outcome {
    let folder = folder_with_image(16 << 20);
    let image = folder.path().join("disk.img");
    let (a, b) = (LoopDevice::over(&image)?, LoopDevice::over(&image)?);
    let table = format!("0 32768 multipath 0 0 1 1 round-robin 0 2 1 {} 1 {} 1", a.0, b.0);
    for round in 1..=5u8 {
        let run = folder.path().join(format!("run{round}"));
        fs::create_dir(&run)?;
        let server = Server::start(&run, &[&format!("mp={table}")])?;
        let at = u64::from(round) << 20;
        if round > 1 {
            io(&server, "mp", &[&format!("read -P {} {} 1M", round - 1, at - (1 << 20))])?;
        }
        // The second fio is writing when the server is killed; its data may or may not be present.
        let busy = server
            .command("fio")
            // One process, so that the kill below ends all of it.
            .args(["--name=busy", "--thread", "--ioengine=nbd", "--rw=randwrite", "--bs=4k", "--iodepth=16"])
            .args(["--offset=8M", "--size=8M", "--time_based", "--runtime=60"])
            .arg(format!("--uri={}", server.uri("mp")))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        std::thread::sleep(Duration::from_millis(300));
        io(&server, "mp", &[&format!("write -P {round} {at} 1M"), "flush"])?;
        // Dropping the server is a kill -9.
        drop(server);
        let mut busy = busy?;
        busy.kill()?;
        busy.wait()?;
        let data = fs::read(&image)?;
        let (from, to) = (at as usize, (at as usize) + (1 << 20));
        check(data[from..to].iter().all(|&byte| byte == round), "what was flushed is not on the disk")?;
    }
    Ok(())
}

/// The kernel reports a failed writeback once; udm reports it for good, because a disk that works
/// again does not restore lost data.
pub fn a_flush_that_failed_stays_failed() -> Outcome {
    let folder = folder_with_image(1 << 20);
    let (inner, outer) = (folder.path().join("inner"), folder.path().join("outer"));
    fs::create_dir(&inner)?;
    fs::create_dir(&outer)?;
    let image = folder.path().join("disk.img");
    let table = format!("bad=0 2048 multipath 0 0 1 1 round-robin 0 1 1 {} 1", image.display());
    let below = Server::start(&inner, &[&table])?;
    let fuse = FuseMount::over(&below.uri("bad"), folder.path().join("fuse"), 1 << 20)?;
    let node = LoopDevice::over(&fuse.file)?;
    let path = format!("file:{}?direct=off", node.0);
    // One node twice: a flush that fails as a path error is sent again on the other path.
    let table = format!("mp=0 2048 multipath 0 0 1 1 round-robin 0 2 1 {path} 1 {path} 1");
    let above = Server::start(&outer, &[&table])?;
    for sync in ["flush", "write -f -P 2 0 4k"] {
        io(&above, "mp", &["write -P 1 0 64k", "flush"])?;
        below.udm(&["message", "bad", "0", "fail_path", "253:0"])?;
        let output = io(&above, "mp", &["write -P 2 0 64k", sync]).err();
        check(output.is_some(), &format!("{sync}: of what can't be written it succeeds"))?;
        below.udm(&["message", "bad", "0", "reinstate_path", "253:0"])?;
        check(
            fs::read(&image)?[..4096].iter().all(|&byte| byte == 1),
            "the disk has what could not be written",
        )?;
        let status = above.udm(&["status", "mp"])?;
        check(status.matches(" A 0").count() >= 2, &format!("no path is to blame: {status}"))?;
        for commands in [&["flush"][..], &["write -f -P 3 64k 4k"], &["write -P 3 64k 4k", "flush"]] {
            check(
                io(&above, "mp", commands).is_err(),
                &format!("{commands:?} is made good by trying again"),
            )?;
        }
        above.udm(&["remove", "mp"])?;
        above.udm(&["create", "mp", "--table", table.trim_start_matches("mp=")])?;
        io(&above, "mp", &["write -P 4 0 64k", "flush"])?;
        check(fs::read(&image)?[..65536].iter().all(|&byte| byte == 4), "opened again it does not write")?;
    }
    above.stop()?;
    drop((node, fuse));
    below.stop()
}

/// A file system that hangs delays only requests for it.
pub fn a_hung_file_system_holds_up_nobody_else() -> Outcome {
    let folder = folder_with_image(1 << 20);
    let (inner, outer) = (folder.path().join("inner"), folder.path().join("outer"));
    fs::create_dir(&inner)?;
    fs::create_dir(&outer)?;
    let image = folder.path().join("disk.img");
    let below = Server::start(&inner, &[&format!("d=0 2048 linear {} 0", image.display())])?;
    let fuse = FuseMount::over(&below.uri("d"), folder.path().join("fuse"), 1 << 20)?;
    let file = fuse.file.display().to_string();
    let table = format!(
        "mp=0 2048 multipath 0 0 1 1 round-robin 0 2 1 {file} 1 file:{}?exclusive=off 1",
        image.display()
    );
    let above = Server::start(&outer, &[&table, "z=0 8 zero"])?;
    let table = format!("0 8 linear {file} 0");
    let mut hung = above.command(UDM);
    hung.args(["create", "h", "--table", &table]).env("UDM_SOCKET", outer.join("udm.sock"));
    fuse.signal(rustix::process::Signal::STOP)?;
    // The kernel answers from its cache for a second.
    std::thread::sleep(Duration::from_millis(1200));
    let mut hung = hung.stderr(Stdio::null()).spawn()?;
    std::thread::sleep(Duration::from_millis(300));
    let others = || -> Outcome {
        let begin = Instant::now();
        for i in 0..3 {
            above.udm(&["ls"])?;
            above.udm(&["create", &format!("more{i}"), "--table", "0 8 linear mem:1M 0"])?;
            above.udm(&["status"])?;
            above.udm(&["message", "mp", "0", "fail_path", &file])?;
            above.udm(&["message", "mp", "0", "reinstate_path", &file])?;
            above.udm(&["message", "mp", "0", "fail_path", "253:0"])?;
            io(&above, "z", &["read -P 0 0 4k"])?;
            io(&above, "mp", &["read -P 0 0 4k"])?;
        }
        check(begin.elapsed() < LIMIT / 2, "others were held up")
    };
    let outcome = others();
    let ended = hung.try_wait()?;
    // Even a killed server does not end while the file system hangs.
    fuse.signal(rustix::process::Signal::CONT)?;
    outcome?;
    check(ended.is_none(), "what was to hang did not")?;
    check(hung.wait()?.success(), "it went on and failed")?;
    above.stop()?;
    drop(fuse);
    below.stop()
}
