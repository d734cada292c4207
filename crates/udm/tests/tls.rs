//! TLS on NBD: udm's server with libnbd's and QEMU's programs, udm's client with nbdkit and
//! qemu-nbd, and both with each other. The certificates are those of `udm-tls`.

mod support;

use rustix::process::Pid;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use support::{ChildGuard, Server, has, text, until};
use udm_tls::{TlsClientConfig, TlsServerConfig, TlsSession};
use udm_wire::nbd::{
    ClientFlags, ClientHandshakeMessage, ClientHandshakeMessageParser, ExportFlags, ExportInfoItem,
    ExportInfoRequest, GREETING_SIZE, HandshakeFlags, NbdOption, OPT_GO, OPT_STARTTLS, OptionReplyHeader,
    REP_ACK, REP_ERR_UNSUP, encode_client_flags, encode_nbd_server_greeting, put_export_info_reply,
    put_option_ack_reply, put_option_error_reply,
};

const SIZE: usize = 8 << 20;

fn certificates(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../udm-tls/tests/data").join(folder).canonicalize().unwrap()
}

/// A URI for libnbd and for udm.
fn uri(socket: &Path, export: &str, folder: &Path) -> String {
    format!("nbds+unix:///{export}?socket={}&tls-certificates={}", socket.display(), folder.display())
}

/// A server with TLS, whose disk is in memory.
fn server(options: &[&str]) -> Server {
    let folder = certificates("").display().to_string();
    let options = [&["--tls-certificates", folder.as_str()], options].concat();
    Server::start_with(&["disk=mem:8M"], &options)
}

fn run(program: &str, args: &[&str]) -> Output {
    Command::new(program).args(args).output().unwrap()
}

fn succeed(program: &str, args: &[&str]) -> String {
    let out = run(program, args);
    assert!(out.status.success(), "{program} {args:?}: {}", text(&out.stderr));
    text(&out.stdout)
}

/// Bytes that are different in each block.
fn pattern() -> Vec<u8> {
    (0..SIZE as u32 / 4).flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()).collect()
}

/// Writes a pattern through `uri` with nbdcopy, reads it again, and compares.
fn copy_there_and_back(folder: &Path, uri: &str) {
    let (from, to) = (folder.join("from"), folder.join("to"));
    fs::write(&from, pattern()).unwrap();
    succeed("nbdcopy", &[from.to_str().unwrap(), uri]);
    succeed("nbdcopy", &[uri, to.to_str().unwrap()]);
    assert!(fs::read(&from).unwrap() == fs::read(&to).unwrap(), "{uri}");
}

/// libnbd and QEMU write and read over TLS with certificates on both sides, with several
/// connections on two cores.
#[test]
fn libnbd_and_qemu_copy_over_tls() {
    if !["nbdcopy", "nbdinfo", "qemu-img"].iter().all(|program| has(program)) {
        return;
    }
    let server = server(&["--tls=require", "--tls-verify-peer", "--cores", "0,1"]);
    let data = certificates("");
    copy_there_and_back(server.folder.path(), &uri(&server.nbd, "disk", &data));
    assert!(succeed("nbdinfo", &["--list", &uri(&server.nbd, "", &data)]).contains("export=\"disk\""));
    let creds = format!("tls-creds-x509,id=t,endpoint=client,dir={}", data.display());
    let image = format!(
        "driver=nbd,server.type=unix,server.path={},export=disk,tls-creds=t,tls-hostname=localhost",
        server.nbd.display()
    );
    let raw = format!("driver=raw,file.filename={}", server.folder.path().join("from").display());
    succeed("qemu-img", &["compare", "--object", &creds, "--image-opts", &image, &raw]);
    assert!(server.log().contains("nbds+unix:///disk?socket="), "{}", server.log());
}

/// A client without TLS, without a certificate, or with one of another authority gets nothing, and
/// costs one line of the log; a client that is known is served meanwhile.
#[test]
fn strangers_are_refused_in_one_line() {
    if !has("nbdinfo") {
        return;
    }
    let server = server(&["--tls=require", "--tls-verify-peer"]);
    let refused = |uri: &str| {
        let out = run("nbdinfo", &["--size", uri]);
        assert!(!out.status.success(), "{uri}");
        text(&out.stderr)
    };
    let plain = format!("nbd+unix:///disk?socket={}", server.nbd.display());
    assert!(refused(&plain).contains("TLS"), "{}", refused(&plain));
    let said =
        format!("nbd: the client of user {} is disconnected: TLS: ", rustix::process::getuid().as_raw());
    for folder in ["stranger", "renewed"] {
        let before = server.log().lines().count();
        refused(&uri(&server.nbd, "disk", &certificates(folder)));
        until("the line", || (server.log().lines().count() > before).then_some(()));
        let log = server.log();
        let lines: Vec<&str> = log.lines().skip(before).collect();
        assert!(lines.len() == 1 && lines[0].contains(&said), "{lines:?}");
    }
    assert_eq!(succeed("nbdinfo", &["--size", &uri(&server.nbd, "disk", &certificates(""))]), "8388608\n");
    let why = server.refuses(&["create", "p", "--table", &format!("0 8 linear {plain} 0")]);
    assert!(why.contains("it requires TLS; write nbds: and tls-certificates=FOLDER"), "{why}");
}

/// A table over `nbds:` writes and reads; a copy with several connections moves between the cores.
#[test]
fn a_path_of_udm_uses_tls() {
    if !has("nbdcopy") {
        return;
    }
    let target = server(&["--tls=on", "--tls-verify-peer", "--cores", "0,1"]);
    let path = uri(&target.nbd, "disk", &certificates(""));
    let table = format!("d=0 16384 linear {path} 0");
    let user = Server::start_with(&[&table], &["--cores", "0,1"]);
    let through = format!("nbd+unix:///d?socket={}", user.nbd.display());
    copy_there_and_back(user.folder.path(), &through);
    // With --tls=on, a client without TLS is served too.
    assert_eq!(
        succeed("nbdinfo", &["--size", &format!("nbd+unix:///disk?socket={}", target.nbd.display())]),
        "8388608\n"
    );
    let refused = |folder: &str, more: &str| {
        let table = format!("0 8 linear {}{more} 0", uri(&target.nbd, "disk", &certificates(folder)));
        user.refuses(&["create", "x", "--table", &table])
    };
    for (folder, more, why) in [
        ("stranger", "", "UnknownIssuer"),
        ("", "&tls-hostname=other.example", "not valid for name"),
        ("renewed", "", "TLS: received fatal alert: CertificateRequired"),
    ] {
        let line = refused(folder, more);
        // The other lines show the place in the table.
        assert!(line.lines().next().is_some_and(|line| line.contains(why)), "{line}");
    }
}

/// udm's client uses the TLS of nbdkit and of qemu-nbd, which know it by its certificate.
#[test]
fn a_path_leads_to_nbdkit_and_qemu_nbd() {
    if !["nbdcopy", "nbdkit", "qemu-nbd"].iter().all(|program| has(program)) {
        return;
    }
    let folder = tempfile::TempDir::new().unwrap();
    let data = certificates("").display().to_string();
    fs::write(folder.path().join("img"), vec![0; SIZE]).unwrap();
    let (kit, qemu) = (folder.path().join("kit"), folder.path().join("qemu"));
    let start = |program: &str, args: &[&str], socket: &Path| {
        let mut command = Command::new(program);
        command.args(args).stdin(Stdio::null()).stdout(Stdio::null());
        let child = ChildGuard(command.spawn().unwrap());
        until("the server's socket", || UnixStream::connect(socket).ok());
        child
    };
    let certificates_arg = format!("--tls-certificates={data}");
    let kit_args = [
        "-f",
        "-U",
        kit.to_str().unwrap(),
        "--tls=require",
        &certificates_arg,
        "--tls-verify-peer",
        "memory",
        "8M",
    ];
    let _kit = start("nbdkit", &kit_args, &kit);
    let creds = format!("tls-creds-x509,id=t,endpoint=server,verify-peer=on,dir={data}");
    let img = folder.path().join("img");
    let qemu_args = [
        "--object",
        &creds,
        "--tls-creds",
        "t",
        "-t",
        "-e",
        "8",
        "-f",
        "raw",
        "-k",
        qemu.to_str().unwrap(),
        img.to_str().unwrap(),
    ];
    let _qemu = start("qemu-nbd", &qemu_args, &qemu);
    let tables = [&kit, &qemu].map(|socket| uri(socket, "", &certificates("")));
    let devices = [format!("k=0 16384 linear {} 0", tables[0]), format!("q=0 16384 linear {} 0", tables[1])];
    let user = Server::start_with(&devices.each_ref().map(String::as_str), &[]);
    for name in ["k", "q"] {
        copy_there_and_back(user.folder.path(), &format!("nbd+unix:///{name}?socket={}", user.nbd.display()));
    }
}

/// The successor of a server has a certificate of another authority: after the line about the end
/// of the first, one more says so, and one that the right certificate is back.
#[test]
fn a_path_says_what_is_wrong_with_a_certificate() {
    if !has("nbdkit") {
        return;
    }
    let folder = tempfile::TempDir::new().unwrap();
    let socket = folder.path().join("kit");
    let start = |certificates: &Path| {
        let _ = fs::remove_file(&socket);
        let mut kit = Command::new("nbdkit");
        kit.args(["-f", "-U"]).arg(&socket).arg("--tls=require").arg("--tls-certificates").arg(certificates);
        let child = ChildGuard(kit.args(["memory", "8M"]).stderr(Stdio::null()).spawn().unwrap());
        until("the server's socket", || UnixStream::connect(&socket).ok());
        child
    };
    let mut kit = start(&certificates(""));
    let path = uri(&socket, "", &certificates(""));
    let table = format!("d=0 16384 multipath 0 0 1 1 round-robin 0 1 0 {path}");
    let user = Server::start_with(&[&table], &["--check-paths", "1"]);
    let lines = || {
        user.log().lines().filter(|line| line.contains(" WARN nbds")).map(str::to_owned).collect::<Vec<_>>()
    };
    for round in 1..=2 {
        drop(kit);
        kit = start(&certificates("stranger"));
        until("the reason", || user.log().matches("UnknownIssuer").nth(round - 1).map(drop));
        drop(kit);
        kit = start(&certificates(""));
        until("the path", || user.log().matches(": connected again").nth(round - 1).map(drop));
    }
    let said = lines();
    let count = |words: &str| said.iter().filter(|line| line.contains(words)).count();
    assert_eq!(
        (count("TLS: invalid peer certificate: UnknownIssuer"), count(": connected again")),
        (2, 2),
        "{said:#?}"
    );
    assert!(said.len() <= 10, "a line for each reason: {said:#?}");
    drop(kit);
}

/// Sends the start of a handshake up to STARTTLS, with `more` bytes after it.
fn ask_for_tls(socket: &Path, more: &[u8]) -> UnixStream {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(std::time::Duration::from_secs(20))).unwrap();
    stream.read_exact(&mut [0; GREETING_SIZE]).unwrap();
    let mut out = encode_client_flags(ClientFlags::FIXED_NEWSTYLE).to_vec();
    NbdOption::StartTls.encode(&mut out);
    out.extend_from_slice(more);
    stream.write_all(&out).unwrap();
    stream
}

/// A TLS session with the server at `socket`, after its handshake.
fn shake(socket: &Path) -> (UnixStream, TlsSession) {
    let mut stream = ask_for_tls(socket, b"");
    let mut header = [0; 20];
    stream.read_exact(&mut header).unwrap();
    let header = OptionReplyHeader::decode(&header).unwrap();
    assert_eq!((header.option, header.reply), (OPT_STARTTLS, REP_ACK));
    let mut session = TlsClientConfig::load(&certificates(""), "localhost").unwrap().session().unwrap();
    let mut room = vec![0; 1 << 16];
    loop {
        let mut out = Vec::new();
        session.take_output(&mut out);
        stream.write_all(&out).unwrap();
        if !session.is_handshaking() {
            return (stream, session);
        }
        let n = stream.read(&mut room).unwrap();
        assert!(n > 0);
        session.receive(&mut &room[..n]).unwrap();
    }
}

/// Bytes that arrive together with STARTTLS may be another's: the connection ends.
#[test]
fn bytes_after_starttls_end_the_connection() {
    let server = server(&["--tls=on"]);
    let mut list = Vec::new();
    NbdOption::List.encode(&mut list);
    let mut answer = Vec::new();
    ask_for_tls(&server.nbd, &list).read_to_end(&mut answer).unwrap();
    assert!(answer.is_empty(), "{answer:?}");
    until("the line", || server.log().contains("bytes after STARTTLS").then_some(()));
    // Bytes that are no TLS after the answer end it as well.
    let mut stream = ask_for_tls(&server.nbd, b"");
    stream.read_exact(&mut [0; 20]).unwrap();
    stream.write_all(&list).unwrap();
    let _ = stream.read_to_end(&mut answer);
    until("the line", || server.log().contains("disconnected: TLS: ").then_some(()));
    shake(&server.nbd);
}

/// The server's side of a TLS connection, by hand.
struct TlsServer(UnixStream, TlsSession);

impl TlsServer {
    /// Accepts a client, and performs the handshake of TLS.
    fn accept(listener: &UnixListener) -> TlsServer {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(&encode_nbd_server_greeting(HandshakeFlags::FIXED_NEWSTYLE)).unwrap();
        stream.read_exact(&mut [0; 4 + 16]).unwrap();
        let mut agreed = Vec::new();
        put_option_ack_reply(&mut agreed, OPT_STARTTLS);
        stream.write_all(&agreed).unwrap();
        let session = TlsServerConfig::load(&certificates(""), false).unwrap().session().unwrap();
        TlsServer(stream, session)
    }

    fn send(&mut self, plaintext: &[u8]) {
        self.1.write(plaintext);
        self.flush();
    }

    fn flush(&mut self) {
        let mut out = Vec::new();
        self.1.take_output(&mut out);
        self.0.write_all(&out).unwrap();
    }

    /// Receives plaintext; none at the end of the stream.
    fn receive(&mut self) -> Vec<u8> {
        let (mut room, mut plaintext) = ([0; 4096], vec![0; 1 << 17]);
        loop {
            let n = self.0.read(&mut room).unwrap();
            let (mut input, mut at) = (&room[..n], 0);
            while !input.is_empty() {
                self.1.receive(&mut input).unwrap();
                at += self.1.read(&mut plaintext[at..]);
            }
            self.flush();
            if n == 0 || at > 0 {
                plaintext.truncate(at);
                return plaintext;
            }
        }
    }

    /// Answers options until the client has chosen the export.
    fn export(&mut self, size: u64) {
        let mut parser = ClientHandshakeMessageParser::new();
        // They came before TLS.
        parser.next(&mut &[0; 4][..]).unwrap();
        loop {
            let (received, mut out) = (self.receive(), Vec::new());
            let mut input = &received[..];
            let mut is_chosen = false;
            while let Some(ClientHandshakeMessage::Option(option)) = parser.next(&mut input).unwrap() {
                if let NbdOption::Go(_) = option {
                    let flags =
                        ExportFlags::HAS_FLAGS | ExportFlags::SEND_FLUSH | ExportFlags::CAN_MULTI_CONN;
                    put_export_info_reply(&mut out, OPT_GO, &ExportInfoItem::Export { size, flags });
                    put_option_ack_reply(&mut out, OPT_GO);
                    is_chosen = true;
                } else {
                    put_option_error_reply(&mut out, option.number(), REP_ERR_UNSUP, "");
                }
            }
            self.send(&out);
            if is_chosen {
                return;
            }
        }
    }
}

/// A server whose TLS is broken in the middle has a write that it may still carry out. The write
/// waits until the connection is closed, and then goes to the other path.
#[test]
fn a_write_waits_for_the_end_of_a_connection_with_broken_tls() {
    let folder = tempfile::TempDir::new().unwrap();
    let socket = folder.path().join("broken");
    let listener = UnixListener::bind(&socket).unwrap();
    let good = server(&["--tls=require"]);
    let (ends, ended) = std::sync::mpsc::channel();
    let broken = std::thread::spawn(move || {
        // One connection asks for the properties, and one for each lane comes later.
        let mut first = TlsServer::accept(&listener);
        first.export(SIZE as u64);
        let mut second = TlsServer::accept(&listener);
        second.export(SIZE as u64);
        assert!(!second.receive().is_empty(), "a write");
        second.0.write_all(&[7; 200]).unwrap();
        ended.recv().unwrap();
    });
    let paths = [&socket, &good.nbd].map(|socket| uri(socket, "disk", &certificates("")));
    let table = format!(
        "mp=0 16384 multipath 0 0 2 1 round-robin 0 1 1 {} 1 round-robin 0 1 1 {} 1",
        paths[0], paths[1]
    );
    let user = Server::start_with(&[&table], &[]);
    let mut client = support::nbd::Client::connect(&user.nbd, "mp");
    client.ask(udm_wire::nbd::NbdCommand::Write, 0, 4096);
    until("broken TLS", || user.log().contains("TLS: ").then_some(()));
    assert!(user.log().contains("1 writes wait until"), "{}", user.log());
    ends.send(()).unwrap();
    assert_eq!(client.error(), 0, "{}", user.log());
    broken.join().unwrap();
    assert!(user.says(&["status", "mp"]).contains(" F "), "the path has failed");
}

/// A server that sends a record byte by byte is given up at the deadline.
#[test]
fn a_server_that_drips_is_given_up() {
    let folder = tempfile::TempDir::new().unwrap();
    let socket = folder.path().join("drips");
    let listener = UnixListener::bind(&socket).unwrap();
    let user = Server::start(&[]);
    let drips = std::thread::spawn(move || {
        let TlsServer(mut stream, _) = TlsServer::accept(&listener);
        stream.read_exact(&mut [0; 5]).unwrap();
        // The head of a record of 16 KiB.
        stream.write_all(&[22, 3, 3, 64, 0]).unwrap();
        let begin = std::time::Instant::now();
        while stream.write_all(&[0]).is_ok() {
            assert!(begin.elapsed().as_secs() < 9, "the client still waits");
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    });
    let path = uri(&socket, "disk", &certificates(""));
    let why = user.refuses(&["create", "x", "--table", &format!("0 8 linear {path}&deadline=1s 0")]);
    assert!(why.contains("no answer within 1s"), "{why}");
    drips.join().unwrap();
}

/// SIGHUP reads new certificates for new connections; those that cannot be used are refused aloud
/// and change nothing.
#[test]
fn certificates_are_renewed_while_clients_are_connected() {
    let folder = tempfile::TempDir::new().unwrap();
    let put = |from: &str| {
        for name in ["server-cert.pem", "server-key.pem"] {
            fs::copy(certificates(from).join(name), folder.path().join(name)).unwrap();
        }
    };
    put("");
    let path = folder.path().to_str().unwrap();
    let server = Server::start_with(&["disk=mem:8M"], &["--tls=require", "--tls-certificates", path]);
    let hangup = || rustix::process::kill_process(server.pid(), rustix::process::Signal::HUP).unwrap();
    let (mut old, session) = shake(&server.nbd);
    assert_eq!(session.peer_names()[0], "disks");
    put("renewed");
    hangup();
    until("new certificates", || server.log().contains("are read again").then_some(()));
    assert_eq!(shake(&server.nbd).1.peer_names()[0], "renewed");
    fs::write(folder.path().join("server-key.pem"), "").unwrap();
    hangup();
    until("a refusal", || server.log().contains("the old certificates stay in use").then_some(()));
    assert_eq!(shake(&server.nbd).1.peer_names()[0], "renewed");
    old.set_nonblocking(true).unwrap();
    let still = old.read(&mut [0; 1]).unwrap_err();
    assert_eq!(still.kind(), std::io::ErrorKind::WouldBlock, "the first client is still connected");
}

/// An upgrade is refused while a client of TLS is connected, before anything is changed, unless its
/// connection may be closed.
#[test]
fn an_upgrade_says_that_tls_cannot_be_handed_over() {
    if !has("nbdinfo") {
        return;
    }
    let folder = certificates("").display().to_string();
    let options = ["--tls=on", "--tls-certificates", folder.as_str()];
    let mut server = Server::start_with(&["disk=null:8M"], &options);
    // A stranger in the handshake holds nothing up.
    let (_stranger, _) = shake(&server.nbd);
    server.upgrade(&[]);
    let (mut stream, mut session) = shake(&server.nbd);
    let mut go = Vec::new();
    NbdOption::Go(ExportInfoRequest { name: "disk".into(), infos: Vec::new() }).encode(&mut go);
    session.write(&go);
    let mut out = Vec::new();
    session.take_output(&mut out);
    stream.write_all(&out).unwrap();
    until("the client", || {
        server.http("GET", "/metrics", "").2.contains("udm_connections_tls 1").then_some(())
    });
    let why = server.refuses(&["upgrade"]);
    assert!(why.contains("1 client is connected with TLS"), "{why}");
    server.upgrade(&["--disconnect-tls"]);
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    let size = succeed("nbdinfo", &["--size", &uri(&server.nbd, "disk", &certificates(""))]);
    assert_eq!(size, "8388608\n");
}

/// `allow` in the file: for other clients a device does not exist, whatever they ask. A change of the
/// file and an upgrade keep to it.
#[test]
fn a_device_is_for_the_clients_that_it_names() {
    if !has("nbdinfo") {
        return;
    }
    let folder = tempfile::TempDir::new().unwrap();
    let file = folder.path().join("udm.toml");
    let write = |names: &str| {
        let pki = certificates("");
        let serve =
            format!("tls = \"require\"\ntls-certificates = \"{}\"\ntls-verify-peer = true", pki.display());
        let devices = "[devices.all]\ntable = \"0 8 zero\"\n[devices.some]\ntable = \"0 16 zero\"";
        fs::write(&file, format!("[serve]\n{serve}\n{devices}\nallow = [{names}]\n")).unwrap();
    };
    write("\"spiffe://example.org/alice\", \"carol\"");
    let mut server = Server::start_with(&[], &[file.to_str().unwrap()]);
    let size = |server: &Server, export: &str, folder: &str| {
        let out = run("nbdinfo", &["--size", &uri(&server.nbd, export, &certificates(folder))]);
        if out.status.success() { text(&out.stdout).trim().to_owned() } else { text(&out.stderr) }
    };
    assert_eq!((size(&server, "some", ""), size(&server, "all", "bob")), ("8192".into(), "4096".into()));
    let refused = size(&server, "some", "bob");
    assert!(refused.contains("no export named"), "{refused}");
    let own = rustix::process::getuid().as_raw();
    let line = format!("nbd: export \"some\": the client \"bob\" of user {own} is not allowed to use it");
    until("the line", || server.log().contains(&line).then_some(()));
    let list = succeed("nbdinfo", &["--list", "--json", &uri(&server.nbd, "", &certificates("bob"))]);
    assert!(list.contains("\"all\"") && !list.contains("\"some\""), "{list}");

    write("\"bob\"");
    assert_eq!(server.says(&["reconfigure"]), "~ some: allow\n= 1 unchanged\n");
    assert_eq!(size(&server, "some", "bob"), "8192");
    assert!(size(&server, "some", "").contains("no export named"));
    let report = until("clients that are gone", || {
        let out = server.verb(&["upgrade", "--json"]);
        out.status.success().then_some(out.stdout)
    });
    // The server ends with the test.
    let report: serde_json::Value = serde_json::from_slice(&report).unwrap();
    server.successor = report["pid"].as_i64().and_then(|pid| Pid::from_raw(pid.try_into().ok()?));
    server.child.wait().unwrap();
    assert!(size(&server, "some", "").contains("no export named"));
    assert_eq!(size(&server, "some", "bob"), "8192");

    // A name that is gone is out, even if the rest of the change fails.
    let content = fs::read_to_string(&file).unwrap();
    fs::write(&file, content.replace("0 16 zero", "0 16 linear /dev/null/none 0").replace("bob", "carol"))
        .unwrap();
    assert!(!server.verb(&["reconfigure"]).status.success());
    assert!(size(&server, "some", "bob").contains("no export named"));

    // Without certificates of clients, nobody could use it.
    fs::write(&file, "[devices.some]\ntable = \"0 16 zero\"\nallow = [\"bob\"]\n").unwrap();
    let out = support::udm(&["serve", "--check", file.to_str().unwrap()]).output().unwrap();
    assert!(text(&out.stderr).contains("devices.some: allow: a client proves its name only with tls"));
}

/// Options that do not fit together, and files that are missing, are refused in one line.
#[test]
fn bad_tls_options_are_refused() {
    let folder = tempfile::TempDir::new().unwrap();
    let refused = |options: &[&str]| {
        let mut command = support::udm(&["serve", "--device", "d=mem:1M", "--unix"]);
        command.arg(folder.path().join("n")).arg("--socket").arg(folder.path().join("c")).args(options);
        let out = command.env("UDM_STATE", folder.path().join("state")).output().unwrap();
        assert!(!out.status.success());
        text(&out.stderr)
    };
    let empty = folder.path().to_str().unwrap();
    for (options, why) in [
        (&["--tls=on"][..], "serve: tls: expected --tls-certificates"),
        (&["--tls-certificates", empty], "TLS is off; add --tls=on or --tls=require"),
        (&["--tls=require", "--tls-certificates", empty], "server-cert.pem: No such file or directory"),
    ] {
        let line = refused(options);
        assert!(line.contains(why) && line.lines().count() == 1, "{line}");
    }
    assert!(refused(&["--tls=always"]).contains("off, on, require"));
}
