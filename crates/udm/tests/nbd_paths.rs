//! NBD servers as disks and as paths: nbdkit and qemu-nbd below, fio and qemu-io above, and a
//! scripted server.

mod support;

use rustix::process::Signal;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::Ordering::SeqCst;
use std::thread::sleep;
use std::time::Duration;
use support::nbd::Client;
use support::servers::{Nbdkit, ScriptedServer, fio, request, serve_zeroes};
use support::{Server, has, text, until};
use tempfile::TempDir;
use udm_wire::nbd::{NbdCommand as Ask, NbdRequestHeader, SimpleReply};

fn ends_well(command: &mut Command) {
    let out = command.output().unwrap();
    assert!(out.status.success(), "{}{}", text(&out.stdout), text(&out.stderr));
}

fn qemu_io(server: &Server, device: &str, commands: &[&str]) -> String {
    let mut qemu_io = Command::new("qemu-io");
    qemu_io.args(["-f", "raw"]);
    let commands = commands.iter().flat_map(|&command| ["-c", command]);
    let out = qemu_io
        .args(commands)
        .arg(format!("nbd+unix:///{device}?socket={}", server.nbd.display()))
        .output()
        .unwrap();
    text(&out.stdout) + &text(&out.stderr)
}

/// Each operation reaches nbdkit, over both kinds of sockets, and the data is present after the end
/// of udm.
#[test]
fn a_disk_behind_nbdkit() {
    if !has("nbdkit") || !has("qemu-io") || !has("fio") {
        return;
    }
    let folder = TempDir::new().unwrap();
    let disk = folder.path().join("disk");
    std::fs::File::create(&disk).unwrap().set_len(32 << 20).unwrap();
    let path = disk.display().to_string();
    let nbdkit = Nbdkit::start(folder.path().join("n"), &["file", &path]);
    {
        let server = Server::start(&[&format!("d=0 65536 linear {} 0", nbdkit.uri())]);
        ends_well(&mut fio(&server, "d", "--rw=randwrite --size=8m --offset=8m --fsync=32"));
        let output = qemu_io(
            &server,
            "d",
            &[
                "write -P 5 4096 1M",
                "read -P 5 4096 1M",
                "write -f -P 6 100 300",
                "read -P 6 100 300",
                "write -z 8192 64k",
                "read -P 0 8192 64k",
                "discard 65536 64k",
                "read -P 0 65536 64k",
                "aio_write -P 9 4M 2M",
                "aio_flush",
                "read -P 9 4M 2M",
                "flush",
            ],
        );
        assert!(!output.contains("rror") && !output.contains("ailed"), "{output}");
    }
    let bytes = std::fs::read(&disk).unwrap();
    assert!(bytes[4 << 20..6 << 20].iter().all(|&byte| byte == 9));
    assert!(bytes[100..400].iter().all(|&byte| byte == 6) && bytes[4096..8192].iter().all(|&byte| byte == 5));
}

/// A hole at the server is reported as a hole.
#[test]
fn holes_pass_through() {
    if !has("nbdkit") || !has("nbdinfo") {
        return;
    }
    let folder = TempDir::new().unwrap();
    let nbdkit = Nbdkit::start(
        folder.path().join("n"),
        &["data", "data=@1048576 1*65536 @33554432 2*300000", "size=64M"],
    );
    let map = |uri: String| {
        let out = Command::new("nbdinfo").args(["--map", &uri]).output().unwrap();
        assert!(out.status.success(), "{}", text(&out.stderr));
        text(&out.stdout)
    };
    let below = map(nbdkit.uri());
    assert!(below.lines().count() > 3 && below.contains("hole"), "{below}");
    let server = Server::start(&[&format!("d=0 131072 linear {} 0", nbdkit.uri())]);
    assert_eq!(map(format!("nbd+unix:///d?socket={}", server.nbd.display())), below);
}

/// Two servers of one file are two paths. One is killed and restarted repeatedly, then both, while
/// fio writes and verifies.
#[test]
fn servers_of_one_file_are_paths() {
    if !has("nbdkit") || !has("fio") {
        return;
    }
    let folder = TempDir::new().unwrap();
    let disk = folder.path().join("disk");
    std::fs::File::create(&disk).unwrap().set_len(32 << 20).unwrap();
    let path = disk.display().to_string();
    let mut servers = ["a", "b"].map(|name| Nbdkit::start(folder.path().join(name), &["file", &path]));
    let table = format!(
        "m=0 65536 multipath 1 queue_if_no_path 0 1 1 round-robin 0 2 1 {} 1 {} 1",
        servers[0].uri(),
        servers[1].uri()
    );
    let server = Server::start_with(&[&table], &["--check-paths", "1"]);
    let load =
        fio(&server, "m", "--rw=randrw --size=32m --time_based --runtime=8 --numjobs=1").spawn().unwrap();
    let status = || server.says(&["status", "m"]);
    let active = |count| until("paths", || (status().matches(" A ").count() == count).then_some(()));
    for round in 0..3 {
        // The letter of the group is counted too.
        active(3);
        servers[round % 2].kill();
        active(2);
        servers[round % 2].again();
    }
    active(3);
    servers.iter_mut().for_each(Nbdkit::kill);
    sleep(Duration::from_millis(300));
    servers.iter_mut().for_each(Nbdkit::again);
    let out = load.wait_with_output().unwrap();
    assert!(out.status.success(), "{}{}\n{}", text(&out.stdout), text(&out.stderr), server.log());
    active(3);
    let log = server.log();
    let count = |text| log.matches(text).count();
    assert_eq!(
        (count("Failing path"), count("Reinstating path"), count("connected again")),
        (5, 5, 5),
        "{log}"
    );
}

/// A flush through one path must cover the writes through the others; the server's flags say
/// whether it does.
#[test]
fn servers_whose_flush_is_of_one_connection() {
    if !has("nbdkit") {
        return;
    }
    let folder = TempDir::new().unwrap();
    let disk = folder.path().join("disk");
    std::fs::File::create(&disk).unwrap().set_len(32 << 20).unwrap();
    let path = disk.display().to_string();
    let args = ["--filter=multi-conn", "file", &path, "multi-conn-mode=disable"];
    let kits = ["a", "b"].map(|name| Nbdkit::start(folder.path().join(name), &args));
    let table = |word: &str| {
        let [a, b] = kits.each_ref().map(|kit| kit.uri() + word);
        format!("0 65536 multipath 0 0 1 1 round-robin 0 2 0 {a} {b}")
    };
    let server = Server::start(&["none=mem:1M"]);
    let output = server.refuses(&["create", "mp", "--table", &table("")]);
    for part in ["flushes the writes of its own connection only", "CAN_MULTI_CONN", "multi-conn=on"] {
        assert!(output.contains(part), "{output}");
    }
    server.says(&["create", "mp", "--table", &table("&multi-conn=on")]);
    assert_eq!(Client::connect(&server.nbd, "mp").write(0), 0);
    let [a, _] = &kits;
    server.says(&[
        "create",
        "one",
        "--table",
        &format!("0 65536 multipath 0 0 1 1 round-robin 0 1 0 {}", a.uri()),
    ]);
}

/// The same servers are restarted in turn, as an administrator does. A server that shuts down keeps
/// its connections and refuses requests until its clients have disconnected.
#[test]
fn servers_that_are_restarted_in_turn() {
    if !has("nbdkit") || !has("qemu-io") {
        return;
    }
    let folder = TempDir::new().unwrap();
    let disk = folder.path().join("disk");
    std::fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let path = disk.display().to_string();
    let mut servers = ["a", "b"].map(|name| Nbdkit::start(folder.path().join(name), &["file", &path]));
    let [a, b] = servers.each_ref().map(Nbdkit::uri);
    let table = format!("m=0 2048 multipath 0 0 1 1 round-robin 0 2 1 {a} 1 {b} 1");
    let server = Server::start_with(&[&table], &["--check-paths", "1", "--cores", "0,1"]);
    let status = || server.says(&["status", "m"]);
    let io = |n: usize| {
        for _ in 0..4 {
            let output =
                qemu_io(&server, "m", &[&format!("write -P {n} 0 64k"), &format!("read -P {n} 0 64k")]);
            assert!(output.matches(" ops; ").count() == 2, "{output}{}{}", status(), server.log());
        }
    };
    io(1);
    for round in 2..8 {
        let mut before = servers[round % 2].restart();
        io(round);
        // It ends when udm has noticed: only then the path has failed.
        until("the end of the one before", || before.try_wait().unwrap());
        // The letter of the group is counted too.
        until("paths", || (status().matches(" A ").count() == 3).then_some(()));
        io(round);
    }
    assert_eq!(server.log().matches("the server shuts down").count(), 6, "{}", server.log());
}

/// qemu-nbd accepts one client at a time by default, and a plugin of nbdkit may not support
/// multi-conn.
#[test]
fn a_server_for_one_connection() {
    if !has("nbdkit") || !has("qemu-io") || !has("fio") {
        return;
    }
    let folder = TempDir::new().unwrap();
    let args = ["--filter=multi-conn", "memory", "16M", "multi-conn-mode=disable"];
    let nbdkit = Nbdkit::start(folder.path().join("n"), &args);
    let server = Server::start_with(&[&format!("d=0 32768 linear {} 0", nbdkit.uri())], &["--cores", "0,1"]);
    let jobs = "--rw=randwrite --numjobs=4 --size=2m --offset_increment=2m --offset=8m --fsync=64";
    ends_well(&mut fio(&server, "d", jobs));
    // Several clients, so that both cores have some.
    for pattern in 1..6 {
        let output = qemu_io(
            &server,
            "d",
            &[&format!("write -P {pattern} 0 64k"), &format!("read -P {pattern} 0 64k")],
        );
        assert!(!output.contains("rror") && !output.contains("ailed"), "{output}");
    }
}

/// If a server violates the protocol, its requests fail with one log line, and the next connection
/// works.
#[test]
fn servers_that_lie() {
    if !has("qemu-io") {
        return;
    }
    type BadReply = fn(&mut UnixStream);
    let lies: [(BadReply, &str); 6] = [
        (|stream| assert!(request(stream).is_some()), "the server closed the connection"),
        (
            |stream| {
                let _ = request(stream);
                let _ = stream.write_all(&[0xaa; 64]);
                let _ = stream.read(&mut [0]);
            },
            "bad reply magic",
        ),
        (
            |stream| {
                let _ = request(stream);
                let _ = stream.write_all(&SimpleReply { error: 0, cookie: 77 << 32 }.encode());
                let _ = stream.read(&mut [0]);
            },
            "a reply to no request",
        ),
        (
            |stream| {
                let Some(request) = request(stream) else { return };
                let _ = stream.write_all(&udm_wire::nbd::chunk_none(request.cookie));
                let _ = stream.read(&mut [0]);
            },
            "nobody agreed on",
        ),
        (
            // Half of the data of a read.
            |stream| {
                let Some(request) = request(stream) else { return };
                let _ = stream.write_all(&SimpleReply { error: 0, cookie: request.cookie }.encode());
                let _ = stream.write_all(&[7; 2048]);
            },
            "the server closed the connection",
        ),
        (
            // The same reply twice.
            |stream| {
                let Some(request) = request(stream) else { return };
                let mut out = SimpleReply { error: 0, cookie: request.cookie }.encode().to_vec();
                out.resize(out.len() + request.len as usize, 0);
                let _ = stream.write_all(&out.repeat(2));
                let _ = stream.read(&mut [0]);
            },
            "a reply to no request",
        ),
    ];
    for (lie, want) in lies {
        // The first connection is that of the block-status worker; the second one violates the
        // protocol; later ones are correct.
        let puppet = ScriptedServer::start(
            move |number, stream| if number == 1 { lie(stream) } else { serve_zeroes(stream) },
        );
        let server = Server::start(&[&format!("d=0 2048 linear {} 0", puppet.uri())]);
        // The lane connects at the first request; a read that is too early is refused.
        let _ = qemu_io(&server, "d", &["read 0 4096"]);
        until("a connection that serves", || {
            sleep(Duration::from_millis(50));
            qemu_io(&server, "d", &["read -P 0 0 4096"]).contains("read 4096/4096").then_some(())
        });
        // The log is written some time later.
        let log = until("one line for the loss and one for the return", || {
            Some(server.log()).filter(|log| log.matches(&puppet.uri()).count() >= 2)
        });
        assert!(log.contains(want), "{want}: {log}");
        assert_eq!(log.matches(&puppet.uri()).count(), 2, "{log}");
    }
}

/// A server that returns with another size is rejected until it has its old size again.
#[test]
fn a_server_that_comes_back_as_another() {
    if !has("qemu-io") {
        return;
    }
    let puppet = ScriptedServer::start(|number, stream| {
        if number == 1 { assert!(request(stream).is_some()) } else { serve_zeroes(stream) }
    });
    let server = Server::start(&[&format!("d=0 2048 linear {} 0", puppet.uri())]);
    let read = || qemu_io(&server, "d", &["read -P 0 0 4096"]).contains("read 4096/4096");
    *puppet.size.lock().unwrap() = 2 << 20;
    assert!(!read());
    until("a server that was asked twice", || {
        assert!(!read());
        sleep(Duration::from_millis(50));
        (puppet.connections.load(SeqCst) >= 4).then_some(())
    });
    *puppet.size.lock().unwrap() = 1 << 20;
    until("the server as it was", || {
        sleep(Duration::from_millis(50));
        read().then_some(())
    });
    assert_eq!(server.log().matches(&puppet.uri()).count(), 2, "{}", server.log());
}

/// An error reply ESHUTDOWN of a server is a path error, so another path is used.
#[test]
fn a_server_that_ends_blames_the_path() {
    let puppet = ScriptedServer::start(|_, stream| {
        while let Some(NbdRequestHeader { cookie, .. }) = request(stream) {
            let _ = stream.write_all(&SimpleReply { error: 108, cookie }.encode());
        }
    });
    let groups = format!("round-robin 0 1 1 {} 1 round-robin 0 1 1 mem:1M 1", puppet.uri());
    let server = Server::start(&[&format!("m=0 2048 multipath 0 0 2 1 {groups}")]);
    let mut client = support::nbd::Client::connect(&server.nbd, "m");
    assert_eq!((client.read(0), client.write(0)), (0, 0));
    let output = server.says(&["status", "m"]);
    assert!(output.contains("253:0 F 1"), "{output}");
}

/// A server that never answers or refuses causes one line, within the time limit.
#[test]
fn a_table_whose_server_is_not_there() {
    let folder = TempDir::new().unwrap();
    let server = Server::start(&[]);
    let missing = folder.path().join("nobody");
    let table = |path: &Path| format!("0 2048 linear nbd+unix:///?socket={} 0", path.display());
    let output = server.refuses(&["create", "x", "--table", &table(&missing)]);
    assert!(output.contains("No such file or directory"), "{output}");
    let closed = folder.path().join("closed");
    let listener = UnixListener::bind(&closed).unwrap();
    let closing = std::thread::spawn(move || drop(listener.accept()));
    let output = server.refuses(&["create", "x", "--table", &table(&closed)]);
    assert!(output.contains("closed the connection"), "{output}");
    closing.join().unwrap();
    let output = server.refuses(&["create", "x", "--table", "0 2048 linear nbd://127.0.0.1:1/ 0"]);
    assert!(output.contains("refused"), "{output}");
    assert_eq!(server.says(&["ls"]).trim(), "No devices found");
}

/// A server that is stopped keeps its connections and sends nothing. With a deadline its path
/// fails, reads go to another path, and a write that it has waits until it continues.
#[test]
fn a_path_that_goes_silent() {
    if !has("nbdkit") {
        return;
    }
    let folder = TempDir::new().unwrap();
    let disk = folder.path().join("disk");
    std::fs::write(&disk, vec![7; 1 << 20]).unwrap();
    let path = disk.display().to_string();
    let nbdkits = ["a", "b"].map(|name| Nbdkit::start(folder.path().join(name), &["file", &path]));
    let [a, b] = [0, 1].map(|i: usize| nbdkits[i].uri());
    let table = format!("mp=0 2048 multipath 0 0 1 1 round-robin 0 2 1 {a} 1 {b} 1");
    let server = Server::start_with(&[&table], &["--path-deadline", "0.3"]);
    let watch = |name: &str| -> u64 {
        let all: serde_json::Value = serde_json::from_str(&server.says(&["status", "mp", "--json"])).unwrap();
        all[0]["paths"][0]["watch"][name].as_u64().unwrap()
    };
    let mut client = Client::connect(&server.nbd, "mp");
    (0..2).for_each(|sector| assert_eq!(client.read(sector), 0));
    nbdkits[0].signal(Signal::STOP);
    // The paths take turns: one write and one read go to the silent path.
    (0..2).for_each(|sector| client.ask(Ask::Write, sector * 512, 512));
    (2..4).for_each(|sector| client.ask(Ask::Read, sector * 512, 512));
    let reads = (0..3).map(|_| client.answer().unwrap()).filter(|(_, error, data)| {
        assert_eq!(*error, 0);
        *data == [7; 512]
    });
    assert_eq!(reads.count(), 2);
    until("the write's deadline", || (watch("waiting") == 1).then_some(()));
    assert_eq!((watch("given_up"), watch("late")), (1, 0));
    assert!(server.log().contains("silent for 300ms"), "{}", server.log());
    nbdkits[0].signal(Signal::CONT);
    assert_eq!(client.error(), 0, "the write is through");
    until("the late answer", || (watch("late") == 1).then_some(()));
    assert_eq!(watch("waiting"), 0);
}
