//! A reconfigure that is interrupted, and one with a step that fails late.

use super::{ConfigDir, reconfigure_partial};
use crate::support::nbd::Client;
use crate::support::servers::{ScriptedServer, request, serve_zeroes};
use crate::support::stamps::image;
use crate::support::{Server, text, udm, until};
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use udm_wire::nbd::{ExportFlags, NbdCommand as Nbd, SimpleReply};

/// An NBD server that holds back the first read until it is released.
struct HeldReadServer {
    puppet: ScriptedServer,
    reads: Arc<AtomicUsize>,
    gate: Arc<(Mutex<bool>, Condvar)>,
}

impl HeldReadServer {
    fn start() -> HeldReadServer {
        let (reads, gate) = (Arc::new(AtomicUsize::new(0)), Arc::new((Mutex::new(false), Condvar::new())));
        let (count, waits, was) = (Arc::clone(&reads), Arc::clone(&gate), AtomicBool::new(false));
        let act = move |_: usize, stream: &mut UnixStream| {
            let Some(first) = request(stream) else { return };
            if first.command == Nbd::Read && !was.swap(true, SeqCst) {
                count.fetch_add(1, SeqCst);
                let open = waits.0.lock().unwrap();
                drop(waits.1.wait_while(open, |open| !*open).unwrap());
            }
            let mut out = SimpleReply { error: 0, cookie: first.cookie }.encode().to_vec();
            out.resize(out.len() + first.len as usize, 0);
            if std::io::Write::write_all(stream, &out).is_ok() {
                serve_zeroes(stream);
            }
        };
        HeldReadServer { puppet: ScriptedServer::start(act), reads, gate }
    }

    fn release(&self) {
        *self.gate.0.lock().unwrap() = true;
        self.gate.1.notify_all();
    }
}

fn table(server: &Server, name: &str) -> String {
    server.says(&["table", name]).split(' ').take(2).collect::<Vec<_>>().join(" ")
}

/// Completed changes stay, a waiting change is cancelled, and later changes are not begun.
#[test]
fn a_client_that_hangs_up_while_storage_hangs() {
    let held = HeldReadServer::start();
    let conf = |sectors: u32| {
        let slow = held.puppet.uri();
        let one = |name: &str, on: &str| format!("[devices.{name}]\ntable = \"0 {sectors} linear {on} 0\"\n");
        one("a", "mem:1M") + &one("b", &slow) + &one("c", "mem:1M")
    };
    let files = ConfigDir::new(&conf(2048));
    let server = files.serve();
    let mut client = Client::connect(&server.nbd, "b");
    client.ask_read(0);
    until("a read that hangs", || (held.reads.load(SeqCst) == 1).then_some(()));
    files.write("udm.toml", &conf(1024));
    let mut verb = udm(&["reconfigure"]);
    verb.env("UDM_SOCKET", &server.socket).stdout(Stdio::null()).stderr(Stdio::null());
    let mut verb = verb.spawn().unwrap();
    let is_at_rest = || server.says(&["info", "b"]).contains("SUSPENDED");
    until("a device that comes to rest", || is_at_rest().then_some(()));
    assert!(verb.try_wait().unwrap().is_none(), "it waits for the storage");
    verb.kill().unwrap();
    verb.wait().unwrap();
    until("a device that goes on", || (!is_at_rest()).then_some(()));
    until("an empty slot", || (server.says(&["table", "--inactive", "b"]) == "\n").then_some(()));
    assert_eq!(["a", "b", "c"].map(|name| table(&server, name)), ["0 1024", "0 2048", "0 2048"]);
    assert_eq!(Client::connect(&server.nbd, "c").read(2000), 0);
    held.release();
    assert_eq!((client.error(), client.read(2000)), (0, 0), "its client has noticed nothing");
    // The next reconfigure makes the remaining changes.
    assert_eq!(server.says(&["reconfigure"]), "~ b: table\n~ c: table\n= 1 unchanged\n");
    assert_eq!(["a", "b", "c"].map(|name| table(&server, name)), ["0 1024"; 3]);
}

/// A table that can be loaded but not resumed: its device keeps the old table.
#[test]
fn a_resume_that_fails_is_said_and_the_rest_is_done() {
    let both = "[devices.disk]\ntable = \"0 2048 snapshot-origin disk\"\n\
                [devices.snap]\ntable = \"0 2048 snapshot disk store P 8\"\n";
    let conf = |plain: u32, twin: &str| {
        format!(
            "{both}[devices.plain]\ntable = \"0 {plain} linear mem:1M 0\"\n[devices.twin]\ntable = \"{twin}\"\n"
        )
    };
    let files = ConfigDir::new(&conf(2048, "0 2048 linear mem:1M 0"));
    std::fs::write(files.path("disk"), image(2048)).unwrap();
    std::fs::File::create(files.path("store")).unwrap().set_len(4 << 20).unwrap();
    let server = files.serve();
    let mut client = Client::connect(&server.nbd, "twin");
    // The store belongs to another snapshot and is in use, which is detected at the resume.
    files.write("udm.toml", &conf(1024, "0 2048 snapshot disk store P 8"));
    for done in ["~ plain: table\n= 2 unchanged\n", "= 3 unchanged\n"] {
        let (output, failed) = reconfigure_partial(&server);
        assert_eq!(output, done);
        let why =
            "udm: twin: Unable to perform snapshot handover until source is suspended.: Invalid argument\n";
        assert!(failed.starts_with(why), "{failed}");
        assert_eq!(failed.lines().count(), 2, "{failed}");
        assert!(server.says(&["info", "twin"]).contains("State:             ACTIVE"));
        assert_eq!(server.says(&["table", "--inactive", "twin"]), "\n");
        assert_eq!((table(&server, "twin"), table(&server, "plain")), ("0 2048".into(), "0 1024".into()));
        assert_eq!((client.write(7), client.read(2000)), (0, 0));
    }
    files.write("udm.toml", &conf(1024, "0 1024 linear mem:1M 0"));
    assert_eq!(server.says(&["reconfigure"]), "~ twin: table\n= 3 unchanged\n");
}

/// The settings of a device in the file do not apply to another device that later gets its name.
#[test]
fn who_may_write_is_of_the_device_and_not_of_its_name() {
    let one =
        |name: &str, on: &str| format!("[devices.{name}]\ntable = \"0 16 linear {on} 0\"\nreadonly = true\n");
    let files = ConfigDir::new(&(one("a", "mem:1M") + &one("b", "missing")));
    let server = files.serve();
    server.says(&["rename", "a", "c"]);
    for name in ["a", "b"] {
        server.says(&["create", name, "--table", "0 16 linear mem:1M 0"]);
    }
    let read_only = |name: &str| Client::connect(&server.nbd, name).flags.contains(ExportFlags::READ_ONLY);
    assert_eq!(["a", "b", "c"].map(read_only), [false, false, true]);
}

/// A device of the file is renamed to a name that is about to be created: it is not changed into
/// the new device.
#[test]
fn a_device_of_the_file_is_not_taken_for_another_one() {
    let held = HeldReadServer::start();
    let conf = |sectors: u32, more: &str| {
        let slow = held.puppet.uri();
        let one = |name: &str, table: &str| format!("[devices.{name}]\ntable = \"{table}\"\n");
        one("a", "0 2048 linear mem:1M 0") + &one("b", &format!("0 {sectors} linear {slow} 0")) + more
    };
    let files = ConfigDir::new(&conf(2048, ""));
    let server = files.serve();
    let mut client = Client::connect(&server.nbd, "b");
    client.ask_read(0);
    until("a read that hangs", || (held.reads.load(SeqCst) == 1).then_some(()));
    files.write("udm.toml", &conf(1024, "[devices.d]\ntable = \"0 16 linear mem:1M 0\"\n"));
    let mut verb = udm(&["reconfigure"]);
    verb.env("UDM_SOCKET", &server.socket).stdout(Stdio::piped()).stderr(Stdio::piped());
    let verb = verb.spawn().unwrap();
    until("a device that comes to rest", || server.says(&["info", "b"]).contains("SUSPENDED").then_some(()));
    server.says(&["rename", "a", "d"]);
    held.release();
    let out = verb.wait_with_output().unwrap();
    assert_eq!(client.error(), 0);
    let failed = text(&out.stderr);
    let why = "udm: d: another device of the file has that name by now: Device or resource busy\n";
    assert!(failed.starts_with(why), "{failed}");
    assert_eq!(text(&out.stdout), "~ b: table\n= 1 unchanged\n");
    assert_eq!(table(&server, "d"), "0 2048");
    // The next reconfigure finds the name as it is.
    assert_eq!(server.says(&["reconfigure"]), "+ a\n~ d: table\n= 1 unchanged\n");
    assert_eq!(["a", "b", "d"].map(|name| table(&server, name)), ["0 2048", "0 1024", "0 16"]);
}
