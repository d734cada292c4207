//! Servers that another program starts for itself: `--single` and `--exit-with-parent`.

mod support;

use rustix::process::{Pid, Signal, test_kill_process};
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use support::nbd::Client;
use support::{PATIENCE, UDM, has, signal, text, udm, until};
use udm_wire::nbd::NbdCommand;

/// Starts `udm serve --single` with `options`; returns it and the client's end of its socket.
fn start_single(options: &[&str]) -> (Child, UnixStream) {
    let (client, server) = UnixStream::pair().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let child = udm(&["serve", "--single", "--cores", "0"])
        .args(options)
        .env("UDM_STATE", folder.path().join("state"))
        .env_remove("UDM_SOCKET")
        .stdin(OwnedFd::from(server))
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    (child, client)
}

/// The only client is served, and the server ends with it, however it leaves.
#[test]
fn a_server_ends_with_its_only_client() {
    for is_polite in [true, false] {
        let (mut child, stream) = start_single(&["--device", "d=mem:1M"]);
        let mut client = Client::connect_on(stream, "d");
        assert_eq!(client.one(NbdCommand::Write, 0, 4096), 0);
        assert_eq!(client.one(NbdCommand::Read, 0, 4096), 0);
        assert!(child.try_wait().unwrap().is_none());
        if is_polite {
            client.head(NbdCommand::Disconnect, 0, 0).unwrap();
        }
        drop(client);
        assert!(child.wait().unwrap().success());
    }
    // A client that leaves without a word ends it too.
    let (mut child, stream) = start_single(&["--device", "d=mem:1M"]);
    drop(stream);
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_single_client_needs_a_socket() {
    for stdin in [Stdio::null(), Stdio::piped()] {
        let out = udm(&["serve", "--single", "--device", "d=mem:1M"]).stdin(stdin).output().unwrap();
        let why = text(&out.stderr);
        assert!(!out.status.success(), "{why}");
        assert!(why.starts_with("udm: serve: single: standard input is not a connected socket"), "{why}");
    }
}

/// libnbd starts a server with its socket as standard input.
#[test]
fn libnbd_starts_a_server_for_itself() {
    let has_libnbd =
        || Command::new("python3").args(["-c", "import nbd"]).output().is_ok_and(|out| out.status.success());
    if !has("python3") || !has_libnbd() {
        support::report_skip("it needs libnbd for Python");
        return;
    }
    let script = format!(
        "import nbd\nh = nbd.NBD()\nh.set_export_name('d')\n\
         h.connect_command(['{UDM}', 'serve', '-s', '--device', 'd=pattern:1M'])\n\
         assert h.get_size() == 1 << 20\nassert len(h.pread(4096, 0)) == 4096\nh.shutdown()\n"
    );
    let out = Command::new("python3").args(["-c", &script]).output().unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
}

/// The server ends in an orderly way when the program that started it is killed.
#[test]
fn a_server_ends_with_its_parent() {
    let folder = tempfile::tempdir().unwrap();
    let [nbd, control, pidfile] =
        ["n", "c", "pid"].map(|name| folder.path().join(name).display().to_string());
    let line = format!(
        "{UDM} serve --exit-with-parent --device d=mem:1M --unix {nbd} --socket {control} --pidfile {pidfile} & \
         echo started; wait"
    );
    let mut parent = Command::new("sh")
        .args(["-c", &line])
        .env("UDM_STATE", folder.path().join("state"))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(parent.stdout.take().unwrap());
    out.read_line(&mut String::new()).unwrap();
    let pid =
        until("a server", || fs::read_to_string(&pidfile).ok()?.trim().parse().ok().and_then(Pid::from_raw));
    let mut client = Client::connect(nbd.as_ref(), "d");
    assert_eq!(client.one(NbdCommand::Read, 0, 512), 0);
    let refused = udm(&["upgrade"]).env("UDM_SOCKET", &control).output().unwrap();
    assert!(text(&refused.stderr).contains("ends with the program that started it"));
    signal(Pid::from_child(&parent), Signal::KILL);
    parent.wait().unwrap();
    let mut rest = Vec::new();
    let _ = client.stream.read_to_end(&mut rest);
    until("the end of the server", || test_kill_process(pid).is_err().then_some(()));
    assert!(!fs::exists(&nbd).unwrap() && !fs::exists(&pidfile).unwrap(), "its files are removed");
}
