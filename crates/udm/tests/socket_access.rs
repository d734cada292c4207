//! Who may connect to the sockets of a server, how many, and for how long.

mod support;

use std::io::{Read, Write};
use std::iter;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use support::nbd::{Client, dial};
use support::{ChildGuard, PATIENCE, Server, has, needs_no_sandbox, report_skip, text, udm, until};
use udm_wire::nbd::{GREETING_SIZE, NbdCommand};

#[test]
fn the_socket_is_open_to_those_who_are_named() {
    let own = rustix::process::getgid().as_raw().to_string();
    for (options, mode) in [
        (&[][..], 0o600),
        (&["--group", own.as_str()], 0o660),
        (&["--unix-mode", "666"], 0o666),
        (&["--unix-mode", "0640", "--group", own.as_str()], 0o640),
    ] {
        let server = Server::start_with(&["d=0 8 zero"], options);
        let socket = std::fs::metadata(&server.nbd).unwrap();
        assert_eq!(socket.permissions().mode() & 0o777, mode, "{options:?}");
        assert_eq!(socket.gid().to_string(), own);
        let control = std::fs::metadata(&server.socket).unwrap();
        assert_eq!(control.permissions().mode() & 0o777, 0o600, "{options:?}");
    }
}

#[test]
fn what_opens_no_socket_is_refused() {
    let folder = tempfile::TempDir::new().unwrap();
    let refused = |options: &[&str]| {
        let mut command = udm(&["serve", "--device", "d=0 8 zero", "--unix"]);
        command.arg(folder.path().join("n")).arg("--socket").arg(folder.path().join("c")).args(options);
        let out = command.env("UDM_STATE", folder.path().join("state")).output().unwrap();
        assert!(!out.status.success(), "{options:?}");
        text(&out.stderr)
    };
    for mode in ["60", "1666", "rw", "466"] {
        let why = refused(&["--unix-mode", mode]);
        assert!(why.contains("expected an octal number from 600 to 777"), "{why}");
    }
    for abstract_name in [["--vhost-user", "d=@m"], ["--vhost-user", "d=@"]] {
        let why = refused(&abstract_name);
        assert!(why.contains("abstract sockets have no permissions"), "{why}");
    }
    let file = folder.path().join("udm.toml");
    std::fs::write(&file, "[serve]\nunix = \"@nbd\"\n").unwrap();
    let out = udm(&["serve", "--check"]).arg(&file).output().unwrap();
    let why = text(&out.stderr);
    assert!(why.contains("udm.toml:2:8: serve: unix: abstract sockets have no permissions"), "{why}");
    let why = refused(&["--group", "no-such-group"]);
    assert_eq!(why, "udm: serve: group: there is no group no-such-group\n");
}

/// A port of this machine that is free now.
fn free_port() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// Another user of the group reads what the owner reads, and changes nothing.
#[test]
fn a_group_may_read_and_change_nothing() {
    if !rustix::process::getuid().is_root() || !has("curl") {
        report_skip("it needs root, to become another user, and curl");
        return;
    }
    const USER: u32 = 65534;
    let call = |server: &Server, group: u32, method: &str, path: &str| {
        std::fs::set_permissions(server.folder.path(), std::fs::Permissions::from_mode(0o711)).unwrap();
        let out = Command::new("curl")
            .args([
                "-s",
                "-o",
                "/dev/null",
                "-w",
                "%{http_code}",
                "-X",
                method,
                "-d",
                "{}",
                "--max-time",
                "20",
            ])
            .arg("--unix-socket")
            .arg(&server.socket)
            .arg(format!("http://udm{path}"))
            .uid(USER)
            .gid(group)
            .output()
            .unwrap();
        text(&out.stdout)
    };
    let mut server = Server::start_with(&["d=0 8 zero"], &["--control-group", "12345"]);
    let control = std::fs::metadata(&server.socket).unwrap();
    assert_eq!((control.permissions().mode() & 0o777, control.gid()), (0o660, 12345));
    for upgraded in [false, true] {
        for path in ["/v1/devices", "/v1/devices/d/table", "/metrics", "/openapi.json"] {
            assert_eq!(call(&server, 12345, "GET", path), "200", "{path}");
        }
        for (method, path) in [
            ("POST", "/v1/devices"),
            ("POST", "/v1/devices/d/suspend"),
            ("POST", "/v1/devices/d/throttle"),
            ("PUT", "/v1/devices/d/table"),
            ("DELETE", "/v1/devices/d"),
            ("POST", "/v1/upgrade"),
        ] {
            assert_eq!(call(&server, 12345, method, path), "403", "{method} {path}");
        }
        assert_eq!(call(&server, 54321, "GET", "/v1/devices"), "000", "no connection for another group");
        if !upgraded {
            server.upgrade(&[support::UDM]);
        }
    }
    assert!(server.says(&["ls"]).starts_with('d'));
    // Other users have some of the places, and the owner always finds one.
    let streams: Vec<_> = (0..150)
        .map(|_| {
            let mut curl = Command::new("curl");
            curl.args(["-s", "-N", "-o", "/dev/null", "--unix-socket"]).arg(&server.socket);
            curl.args(["--max-time", "50", "http://udm/v1/events"]).uid(USER).gid(12345);
            ChildGuard(curl.spawn().unwrap())
        })
        .collect();
    until("a reader without a place", || (call(&server, 12345, "GET", "/v1/devices") == "409").then_some(()));
    let own = || {
        Command::new("curl")
            .args(["-s", "-m", "1", "-N", "--unix-socket"])
            .arg(&server.socket)
            .arg("http://udm/v1/events")
            .output()
            .unwrap()
    };
    assert_eq!(own().status.code(), Some(28), "a stream of events until the time is over");
    assert!(server.says(&["ls"]).starts_with('d'));
    drop(streams);
    until("a place", || (call(&server, 12345, "GET", "/v1/devices") == "200").then_some(()));
    // Without a group, the permissions of the file alone let nobody in.
    let server = Server::start(&["d=0 8 zero"]);
    std::fs::set_permissions(&server.socket, std::fs::Permissions::from_mode(0o666)).unwrap();
    assert_eq!(call(&server, 12345, "GET", "/v1/devices"), "403");
}

/// `allow` admits users of the Unix socket, as the kernel names them, also after a change of the
/// file.
#[test]
fn a_device_is_for_the_users_that_it_names() {
    if !has("nbdinfo") {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        report_skip("only root can be other users");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("udm.toml");
    let write = |users: &str| {
        let devices = "[devices.all]\ntable = \"0 8 zero\"\n[devices.some]\ntable = \"0 16 zero\"";
        std::fs::write(&file, format!("[serve]\nunix-mode = \"666\"\n{devices}\nallow = [{users}]\n"))
            .unwrap();
    };
    write("\"user:nobody\", \"user:4711\"");
    let server = Server::start_with(&[], &[file.to_str().unwrap()]);
    std::fs::set_permissions(server.folder.path(), std::fs::Permissions::from_mode(0o711)).unwrap();
    let ask = |user: u32, options: &[&str], export: &str| {
        let uri = format!("nbd+unix:///{export}?socket={}", server.nbd.display());
        let out = Command::new("nbdinfo").args(options).arg(&uri).uid(user).gid(user).output().unwrap();
        if out.status.success() { text(&out.stdout).trim().to_owned() } else { text(&out.stderr) }
    };
    let size = |user, export: &str| ask(user, &["--size"], export);
    for user in [65534, 4711] {
        assert_eq!((size(user, "some"), size(user, "all")), ("8192".into(), "4096".into()), "{user}");
    }
    // Not even root, who serves it, unless it is named.
    for user in [0, 1] {
        let refused = size(user, "some");
        assert!(refused.contains("no export named"), "{user}: {refused}");
        let list = ask(user, &["--list", "--json"], "");
        assert!(list.contains("\"all\"") && !list.contains("\"some\""), "{list}");
        let line = format!("nbd: export \"some\": the client of user {user} is not allowed to use it");
        until("the line", || server.log().contains(&line).then_some(()));
    }
    write("\"user:1\"");
    assert_eq!(server.says(&["reconfigure"]), "~ some: allow\n= 1 unchanged\n");
    assert_eq!(size(1, "some"), "8192");
    assert!(size(4711, "some").contains("no export named"));
    // Another table that fails does not open the old one to the clients of the new one.
    let declare = |table: &str, allow: &str| {
        let devices = "[devices.all]\ntable = \"0 8 zero\"\n[devices.some]\ntable =";
        std::fs::write(&file, format!("[serve]\nunix-mode = \"666\"\n{devices} \"{table}\"\n{allow}"))
            .unwrap();
    };
    declare("/nonexistent/public.img", "");
    assert!(!server.verb(&["reconfigure"]).status.success());
    assert_eq!((size(1, "some"), size(4711, "some").contains("no export named")), ("8192".into(), true));
    declare("0 24 zero", "allow = [\"user:4711\"]\n");
    server.says(&["reconfigure"]);
    assert_eq!((size(4711, "some"), size(1, "some").contains("no export named")), ("12288".into(), true));
    write("\"user:1\"");
    server.says(&["reconfigure"]);
    write("\"user:no-such-user\"");
    let why = server.refuses(&["reconfigure"]);
    assert!(why.contains("devices.some: allow: there is no user \"no-such-user\""), "{why}");
    assert_eq!(size(1, "some"), "8192", "the old list holds");
}

/// A snapshot that is made by name is for the clients of its origin: also after a change of the file,
/// an upgrade, and a kill.
#[test]
fn a_snapshot_is_for_the_users_of_its_origin() {
    if !has("nbdinfo") {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        report_skip("only root can be other users");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (file, disk, state) =
        (folder.path().join("udm.toml"), folder.path().join("disk"), folder.path().join("state"));
    std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let write = |users: &str| {
        let device = format!("[devices.d]\ntable = \"{}\"\nallow = [{users}]\n", disk.display());
        std::fs::write(&file, format!("[serve]\nunix-mode = \"666\"\n{device}")).unwrap();
    };
    write("\"user:1\"");
    let serve = || {
        let server = Server::start_with(&[], &[file.to_str().unwrap(), "--state", state.to_str().unwrap()]);
        std::fs::set_permissions(server.folder.path(), std::fs::Permissions::from_mode(0o711)).unwrap();
        server
    };
    let sees = |server: &Server, user: u32| {
        let uri = format!("nbd+unix:///s?socket={}", server.nbd.display());
        let out = Command::new("nbdinfo").args(["--size", &uri]).uid(user).gid(user).output().unwrap();
        out.status.success()
    };
    let users = |server: &Server| [1, 2].map(|user| sees(server, user));
    let mut server = serve();
    server.says(&["snapshot", "create", "s", "--of", "d"]);
    assert_eq!(users(&server), [true, false]);
    write("\"user:2\"");
    server.says(&["reconfigure"]);
    assert_eq!(users(&server), [false, true]);
    server.upgrade(&[support::UDM]);
    assert_eq!(users(&server), [false, true], "after an upgrade");
    write("\"user:1\"");
    server.says(&["reconfigure"]);
    assert_eq!(users(&server), [true, false], "the new server's snapshot follows too");
    server.kill();
    let server = serve();
    assert_eq!(users(&server), [true, false], "after a kill");
    write("\"user:2\"");
    server.says(&["reconfigure"]);
    assert_eq!(users(&server), [false, true]);
}

/// A client whose user is taken off the list is disconnected, also one of a snapshot of the device.
/// Its request in flight is answered. Others stay.
#[test]
fn a_client_that_is_not_allowed_any_more_is_disconnected() {
    let folder = tempfile::tempdir().unwrap();
    let [file, disk] = ["udm.toml", "disk"].map(|name| folder.path().join(name));
    std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let own = rustix::process::geteuid().as_raw();
    let write = |users: &str| {
        let table = |name: &str, table: &str| format!("[devices.{name}]\ntable = \"{table}\"\n");
        let (d, slow) = (table("d", disk.to_str().unwrap()), table("slow", "0 2048 delay @d 0 400"));
        let text = format!("{d}allow = [{users}]\n{slow}allow = [{users}]\n{}", table("all", "0 8 zero"));
        std::fs::write(&file, text).unwrap();
    };
    write(&format!("\"user:{own}\", \"user:4711\""));
    let mut server = Server::start_with(&[], &[file.to_str().unwrap()]);
    server.says(&["snapshot", "create", "s", "--of", "d"]);
    for upgraded in [false, true] {
        if upgraded {
            server.upgrade(&[support::UDM]);
        }
        let [mut device, mut snapshot, mut slow, mut all] =
            ["d", "s", "slow", "all"].map(|export| Client::connect(&server.nbd, export));
        write(&format!("\"user:{own}\""));
        server.says(&["reconfigure"]);
        for client in [&mut device, &mut snapshot, &mut slow, &mut all] {
            assert_eq!(client.read(0), 0, "a client that stays on the list stays connected");
        }
        slow.ask_read(1);
        write("\"user:4711\"");
        server.says(&["reconfigure"]);
        assert_eq!(slow.reply().1, 0, "the request in flight is answered");
        for client in [&mut device, &mut snapshot, &mut slow] {
            assert!(client.answer().is_err(), "disconnected");
        }
        assert_eq!(all.read(0), 0);
        let line = format!("the client of user {own} is disconnected from export \"s\": it is not allowed");
        until("the line", || server.log().contains(&line).then_some(()));
        write(&format!("\"user:{own}\", \"user:4711\""));
        server.says(&["reconfigure"]);
    }
}

/// One port on several addresses, before and after an upgrade; an address that was not named has
/// no listener.
#[test]
fn a_port_is_open_on_each_address_that_is_named() {
    let port = free_port().port();
    let options = ["--port", &port.to_string(), "--ipaddr", "127.0.0.1", "--ipaddr", "127.0.0.2"];
    let mut server = Server::start_with(&["d=0 8 zero"], &options);
    for upgraded in [false, true] {
        for (last, is_open) in [(1, true), (2, true), (3, false)] {
            let connected = TcpStream::connect(SocketAddr::from(([127, 0, 0, last], port)));
            assert_eq!(connected.is_ok(), is_open, "127.0.0.{last}");
            let Ok(mut stream) = connected else { continue };
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.read_exact(&mut [0; GREETING_SIZE]).unwrap();
        }
        if !upgraded {
            server.upgrade(&[support::UDM]);
        }
    }
}

/// `--metrics` answers with the metrics, to nothing else, and over an upgrade too.
#[test]
fn metrics_have_a_port_of_their_own() {
    if needs_no_sandbox("--run") {
        return;
    }
    let address = free_port().to_string();
    let mut server = Server::start_with(&["d=0 8 zero"], &["--metrics", &address]);
    let try_ask = |method: &str, path: &str| -> Option<String> {
        let mut stream = TcpStream::connect(&address).ok()?;
        stream.set_read_timeout(Some(PATIENCE)).ok()?;
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: udm\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{{}}"
        )
        .ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        Some(answer)
    };
    let ask = |method: &str, path: &str| try_ask(method, path).unwrap_or_default();
    for upgraded in [false, true] {
        let answer = until("metrics", || Some(ask("GET", "/metrics")).filter(|answer| !answer.is_empty()));
        assert!(
            answer.starts_with("HTTP/1.1 200") && answer.contains("udm_device_info{device=\"d\""),
            "{answer}"
        );
        for (method, path, status) in [
            ("GET", "/v1/devices", "404"),
            ("GET", "/openapi.json", "404"),
            ("POST", "/v1/devices/d/suspend", "403"),
            ("POST", "/metrics", "403"),
        ] {
            let answer = ask(method, path);
            assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{method} {path}: {answer}");
        }
        if !upgraded {
            // Nobody else can take the port while it changes hands.
            let has_ended = AtomicBool::new(false);
            let stolen = std::thread::scope(|scope| {
                let thief = scope.spawn(|| {
                    let mut tries = iter::repeat_with(|| TcpListener::bind(&address).is_ok());
                    tries.by_ref().take_while(|_| !has_ended.load(SeqCst)).any(|is_bound| is_bound)
                });
                server.upgrade(&[support::UDM]);
                until("the new server's answer", || try_ask("GET", "/metrics").map(drop));
                has_ended.store(true, SeqCst);
                thief.join().unwrap()
            });
            assert!(!stolen, "the port was free during the upgrade");
        }
    }
    let out =
        udm(&["serve", "--device", "d=0 8 zero", "--run", "true", "--metrics", &address]).output().unwrap();
    let why = text(&out.stderr);
    assert!(why.starts_with(&format!("udm: serve: metrics: {address}: Address already in use")), "{why}");
}

/// `--allow` admits TCP clients by their address. Those of the Unix socket are not affected.
#[test]
fn clients_come_from_networks_that_are_allowed() {
    for (allow, is_admitted) in [
        (&["192.0.2.0/24"][..], false),
        (&["192.0.2.0/24", "127.0.0.1"], true),
        (&["127.0.0.0/8"], true),
        (&["::/0"], false),
    ] {
        let port = free_port().port().to_string();
        let mut options = vec!["--port", port.as_str()];
        allow.iter().for_each(|network| options.extend(["--allow", network]));
        let server = Server::start_with(&["d=0 8 zero"], &options);
        let mut stream = TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        // A connection that was closed with nothing read may also be reset.
        let greeted = stream.read_exact(&mut [0; GREETING_SIZE]).is_ok();
        assert_eq!(greeted, is_admitted, "{allow:?}");
        Client::connect(&server.nbd, "d");
        if !is_admitted {
            let line = "nbd: a client at 127.0.0.1 is not allowed to connect";
            until("the line", || server.log().contains(line).then_some(()));
        }
    }
    for (network, why) in [("192.0.2.1/24", "expected 192.0.2.0/24"), ("here", "expected an address")] {
        let out =
            udm(&["serve", "--device", "d=0 8 zero", "--port", "0", "--allow", network]).output().unwrap();
        assert!(text(&out.stderr).contains(why), "{}", text(&out.stderr));
    }
}

/// The limits of the command line and of the file hold.
#[test]
fn clients_are_limited_in_number_and_time() {
    let options = ["--max-connections", "2", "--handshake-timeout", "1", "--idle-timeout", "1"];
    let server = Server::start_with(&["d=0 8 zero"], &options);
    // Who says nothing is disconnected before an export is chosen, and after it.
    let mut silent = dial(&server.nbd);
    let mut idle = Client::connect(&server.nbd, "d");
    let mut greeting = Vec::new();
    silent.read_to_end(&mut greeting).unwrap();
    assert_eq!(greeting.len(), GREETING_SIZE);
    assert_eq!(idle.stream.read(&mut [0]).unwrap(), 0);
    // A request whose data never comes is none.
    let mut half = Client::connect(&server.nbd, "d");
    half.head(NbdCommand::Write, 0, 4096).unwrap();
    half.stream.write_all(&[0; 100]).unwrap();
    assert_eq!(half.stream.read(&mut [0]).unwrap(), 0);
    // Three quarters of two are one client of a device.
    let mut first = Client::connect(&server.nbd, "d");
    let refused =
        Command::new("nbdinfo").arg(format!("nbd+unix:///d?socket={}", server.nbd.display())).output();
    if let Ok(refused) = refused {
        assert!(!refused.status.success(), "a second client: {}", text(&refused.stdout));
    }
    assert_eq!(first.one(NbdCommand::Read, 0, 512), 0, "the first client is served all the same");

    let file = server.folder.path().join("udm.toml");
    let toml = "[serve]\nmax-connections = 7\ncore-memory = \"32M\"\nidle-timeout = 0.5\n";
    std::fs::write(&file, format!("{toml}[devices.d]\ntable = \"0 8 zero\"\n")).unwrap();
    let out = udm(&["serve", "--check", file.to_str().unwrap()]).output().unwrap();
    assert!(text(&out.stderr).contains("serve: idle-timeout: not in 1..=3600"), "{}", text(&out.stderr));
    for (words, why) in [
        (["--max-connections", "0"], "expected a number from 1 to 1048576"),
        (["--core-memory", "1M"], "not in 16M..=1T"),
        (["--core-memory", "2x"], "is not a size"),
        (["--handshake-timeout", "0"], "not in 1..=3600"),
    ] {
        let out = udm(&["serve", "--device", "d=0 8 zero", "--unix", "-"]).args(words).output().unwrap();
        assert!(!out.status.success() && text(&out.stderr).contains(why), "{}", text(&out.stderr));
    }
}

/// The system probes idle TCP connections of clients, so a lost machine frees its place.
#[test]
fn idle_tcp_connections_are_probed() {
    if !has("ss") {
        return;
    }
    let port = free_port().port().to_string();
    let _server = Server::start_with(&["d=0 8 zero"], &["--port", &port]);
    let mut client = TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    client.read_exact(&mut [0; GREETING_SIZE]).unwrap();
    let timers = || {
        let out = Command::new("ss").args(["-tnoH", "sport", "=", &format!(":{port}")]).output().unwrap();
        text(&out.stdout)
    };
    // The timer of a retransmission may be shown before.
    until("a keepalive timer", || timers().contains("timer:(keepalive,").then_some(()));
}
