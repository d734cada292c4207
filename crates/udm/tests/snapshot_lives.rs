//! Persistent snapshots across restarts: servers started in any order, missing stores, disks that
//! other programs wrote, two servers, interrupted merges. A snapshot shows its instant, or reports
//! that it is invalid.

mod support;

use rustix::process::{Pid, Signal};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use support::nbd::Client;
use support::{Server, signal, text, udm, until};
use tempfile::TempDir;
use udm_wire::nbd::{CommandFlags, NbdCommand as Nbd};

const SIZE: u64 = 4 << 20;
const CHUNK: u64 = 4096;

/// The initial content of the disk.
const OLD: u8 = b'o';
/// The bytes that clients write.
const NEW: u8 = 1;

/// Disks, stores and a state folder that survive servers.
struct RestartFixture(TempDir);

impl RestartFixture {
    fn new() -> RestartFixture {
        let world = RestartFixture(tempfile::tempdir().unwrap());
        fs::write(world.path("disk.img"), vec![OLD; SIZE as usize]).unwrap();
        world
    }

    /// A fixture with an empty store.
    fn with_store(name: &str) -> RestartFixture {
        let world = RestartFixture::new();
        world.store(name);
        world
    }

    fn store(&self, name: &str) {
        fs::File::create(self.path(name)).unwrap().set_len(2 * SIZE).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Replaces `{name}` in `text` by the path of the file.
    fn table(&self, text: &str) -> String {
        text.replace('{', &format!("{}/", self.0.path().display())).replace('}', "")
    }

    fn options(&self, more: &[&str]) -> Vec<String> {
        let own = ["--state".to_owned(), self.path("state").display().to_string()];
        own.into_iter().chain(more.iter().map(|&option| option.to_owned())).collect()
    }

    fn serve(&self, devices: &[&str]) -> Server {
        self.serve_with(devices, &[])
    }

    fn serve_with(&self, devices: &[&str], more: &[&str]) -> Server {
        let devices: Vec<String> = devices.iter().map(|device| self.table(device)).collect();
        let devices: Vec<&str> = devices.iter().map(String::as_str).collect();
        let options = self.options(more);
        Server::start_with(&devices, &options.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// The error of a `udm serve` that does not start.
    fn refused(&self, devices: &[&str]) -> String {
        let mut command = udm(&["serve", "--unix", "-", "--cores", "0", "--run", "true"]);
        command.args(self.options(&[]));
        for device in devices {
            command.args(["--device", &self.table(device)]);
        }
        let out = command.output().unwrap();
        assert_eq!(out.status.code(), Some(1), "{}", text(&out.stderr));
        text(&out.stderr)
    }

    /// Writes the disk like another program.
    fn scribble(&self) {
        use std::os::unix::fs::FileExt;
        let file = fs::OpenOptions::new().write(true).open(self.path("disk.img")).unwrap();
        file.write_all_at(b"x", SIZE - 1).unwrap();
    }
}

/// Runs a function on drop.
struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// The device of `disk.img`.
const DISK: &str = "disk={disk.img}";
/// The same device if other servers may write it as well.
const SHARED: &str = "disk=file:{disk.img}?exclusive=off";

fn write(server: &Server, name: &str, chunk: u64) {
    assert_eq!(Client::connect(&server.nbd, name).one(Nbd::Write, chunk * CHUNK, CHUNK), 0);
}

fn read(server: &Server, name: &str) -> Vec<u8> {
    let mut client = Client::connect(&server.nbd, name);
    let mut all = Vec::new();
    for at in (0..SIZE).step_by(1 << 20) {
        client.ask(Nbd::Read, at, 1 << 20);
        let (_, error, data) = client.answer().unwrap();
        assert_eq!(error, 0, "{name} at {at}");
        all.extend(data);
    }
    all
}

/// Asserts that `name` is the instant at which only `chunks` were written.
fn is_instant(server: &Server, name: &str, chunks: &[u64]) {
    let all = read(server, name);
    for (chunk, data) in all.chunks(CHUNK as usize).enumerate() {
        let byte = if chunks.contains(&(chunk as u64)) { NEW } else { OLD };
        assert!(data.iter().all(|one| *one == byte), "{name}, chunk {chunk}: {} for {byte}", data[0]);
    }
}

/// Waits until the log has these words; it is written some time after the event.
fn logs(server: &Server, words: &[&str]) {
    let has_all = |log: &str| words.iter().all(|word| log.contains(word));
    until("lines of the log", || has_all(&server.log()).then_some(()));
}

/// Ends the server in a regular way.
fn end(mut server: Server) -> String {
    signal(Pid::from_child(&server.child), Signal::TERM);
    let status = until("the end of the server", || server.child.try_wait().unwrap());
    assert!(status.success(), "{}", server.log());
    server.log()
}

fn kill(mut server: Server) {
    server.child.kill().unwrap();
    server.child.wait().unwrap();
}

#[test]
fn what_was_made_by_name_comes_back_with_its_server() {
    let world = RestartFixture::new();
    let server = world.serve(&[DISK]);
    write(&server, "disk", 0);
    server.says(&["snapshot", "create", "monday", "--of", "disk"]);
    write(&server, "disk", 1);
    end(server);
    let server = world.serve(&[DISK]);
    write(&server, "disk", 2);
    is_instant(&server, "monday", &[0]);
    server.says(&["snapshot", "create", "tuesday", "--of", "disk"]);
    kill(server);
    let server = world.serve(&[DISK]);
    write(&server, "disk", 3);
    is_instant(&server, "monday", &[0]);
    is_instant(&server, "tuesday", &[0, 1, 2]);
    // Both snapshots know the changes since, so incremental backups continue.
    let changed = |words: &[&str]| server.says(&[&["snapshot", "diff"], words].concat());
    assert_eq!(changed(&["monday"]), format!("{CHUNK}\t{}\n", 3 * CHUNK));
    assert_eq!(changed(&["tuesday"]), format!("{}\t{CHUNK}\n", 3 * CHUNK));
    // The snapshots are removed with their stores, and after the last one the device is linear.
    server.says(&["snapshot", "remove", "monday", "tuesday"]);
    assert!(!world.path("monday.cow").exists() && !world.path("tuesday.cow").exists());
    assert!(server.says(&["table", "disk"]).contains("linear"));
    let log = end(server);
    assert!(!log.contains("WARN") && !log.contains("ERROR"), "{log}");
    assert_eq!(fs::read_dir(world.path("state/snapshots")).unwrap().count(), 0);
}

#[test]
fn a_disk_is_not_served_without_its_snapshot() {
    let world = RestartFixture::new();
    let server = world.serve(&[DISK]);
    server.says(&["snapshot", "create", "monday", "--of", "disk"]);
    write(&server, "disk", 0);
    end(server);
    fs::rename(world.path("monday.cow"), world.path("away")).unwrap();
    let output = world.refused(&[DISK]);
    let line = output.lines().next().unwrap();
    for word in
        ["disk.img has the snapshot monday", "monday.cow", "No such file", "udm snapshot remove monday"]
    {
        assert!(line.contains(word), "{output}");
    }
    // Other tables that could write the disk are refused too.
    let server = world.serve(&["other=mem:1M"]);
    for table in ["0 8 linear {disk.img} 8", "0 8192 snapshot-origin {disk.img}", "0 8 delay {disk.img} 0 0"]
    {
        let output = server.refuses(&["create", "d", "--table", &world.table(table)]);
        assert!(output.contains("has the snapshot monday"), "{output}");
    }
    let listed = server.says(&["snapshot", "list"]);
    assert!(
        listed.contains("not attached") && listed.contains("! monday: not attached: its store"),
        "{listed}"
    );
    // The store is back.
    fs::rename(world.path("away"), world.path("monday.cow")).unwrap();
    server.says(&["create", "disk", "--table", &world.table("0 8192 linear {disk.img} 0")]);
    write(&server, "disk", 1);
    is_instant(&server, "monday", &[]);
}

#[test]
fn a_snapshot_that_is_away_is_waited_for() {
    let world = RestartFixture::new();
    let server = world.serve(&[DISK]);
    server.says(&["snapshot", "create", "monday", "--of", "disk"]);
    end(server);
    fs::rename(world.path("monday.cow"), world.path("away")).unwrap();
    let back = world.path("away");
    let place = world.path("monday.cow");
    let returns = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        fs::rename(back, place).unwrap();
    });
    let server = world.serve_with(&[DISK], &["--lost-snapshots", "wait"]);
    returns.join().unwrap();
    logs(&server, &["waiting: disk: "]);
    write(&server, "disk", 0);
    is_instant(&server, "monday", &[]);
}

/// The second of two snapshots can be attached later than the first; the disk is the origin of
/// both.
#[test]
fn snapshots_that_come_one_by_one_have_their_origin() {
    let world = RestartFixture::new();
    let server = world.serve(&[DISK]);
    server.says(&["snapshot", "create", "monday", "--of", "disk"]);
    server.says(&["snapshot", "create", "tuesday", "--of", "disk"]);
    end(server);
    fs::rename(world.path("tuesday.cow"), world.path("away")).unwrap();
    let server = world.serve(&["other=mem:1M"]);
    let table = world.table("0 8192 linear {disk.img} 0");
    let output = server.refuses(&["create", "disk", "--table", &table]);
    assert!(output.contains("has the snapshot tuesday"), "{output}");
    fs::rename(world.path("away"), world.path("tuesday.cow")).unwrap();
    server.says(&["create", "disk", "--table", &table]);
    assert!(server.says(&["table", "disk"]).contains("snapshot-origin"));
    write(&server, "disk", 0);
    is_instant(&server, "monday", &[]);
    is_instant(&server, "tuesday", &[]);
    // A device over a part of the disk is no origin, as in the kernel; the log warns of it.
    server.says(&["create", "part", "--table", &world.table("0 8 linear {disk.img} 8")]);
    logs(&server, &["part: its writes to ", " are not copied for snapshots monday, tuesday: "]);
    server.says(&["remove", "part"]);
    server.says(&["snapshot", "remove", "monday", "tuesday"]);
    assert!(server.says(&["table", "disk"]).contains("linear"));
}

#[test]
fn a_snapshot_that_is_away_is_given_up_aloud() {
    let world = RestartFixture::new();
    let server = world.serve(&[DISK]);
    server.says(&["snapshot", "create", "monday", "--of", "disk"]);
    end(server);
    fs::rename(world.path("monday.cow"), world.path("away")).unwrap();
    let server = world.serve_with(&[DISK], &["--lost-snapshots", "give-up"]);
    logs(&server, &["monday: the snapshot in ", "is lost"]);
    write(&server, "disk", 0);
    kill(server);
    // The loss is permanent.
    fs::rename(world.path("away"), world.path("monday.cow")).unwrap();
    let server = world.serve(&[DISK]);
    let listed = server.says(&["snapshot", "list"]);
    assert!(listed.contains("! monday: lost: ") && listed.contains("given up"), "{listed}");
    let table = world.table("0 8192 snapshot {disk.img} {monday.cow} P 8");
    let output = server.refuses(&["create", "monday", "--table", &table]);
    assert!(output.contains("given up"), "{output}");
    server.says(&["snapshot", "remove", "monday"]);
    assert!(!world.path("monday.cow").exists(), "it was made for it");
    assert_eq!(server.says(&["snapshot", "list"]), "No snapshots found\n");
}

#[test]
fn devices_wait_for_snapshots_whatever_their_order() {
    let world = RestartFixture::with_store("a.cow");
    world.store("b.cow");
    let origin = "org=0 8192 snapshot-origin {disk.img}";
    let (a, b) = ("a=0 8192 snapshot {disk.img} {a.cow} P 8", "b=0 8192 snapshot {disk.img} {b.cow} P 8");
    let server = world.serve(&[a, b, origin]);
    write(&server, "a", 5);
    kill(server);
    let server = world.serve(&[origin, a, b]);
    write(&server, "org", 0);
    kill(server);
    // A merge must not write the disk before the other snapshot is attached.
    let server = world.serve(&["org=0 8192 snapshot-merge {disk.img} {a.cow} P 8", b]);
    until("the merge", || server.says(&["status", "org"]).contains(" 16/").then_some(()));
    is_instant(&server, "b", &[]);
    is_instant(&server, "org", &[5]);
    kill(server);
    let output = world.refused(&["org=0 8192 linear {disk.img} 0"]);
    assert!(output.contains("has the snapshot b in "), "{output}");
}

#[test]
fn a_file_is_served_in_an_order_that_loses_nothing() {
    let world = RestartFixture::with_store("s.cow");
    let conf = |lines: &str| {
        let text = format!("[serve]\nstate = \"state\"\n{lines}");
        fs::write(world.path("udm.toml"), text).unwrap();
    };
    let serve = || {
        let mut command = udm(&["serve"]);
        command.arg(world.path("udm.toml"));
        Server::start_by(command, &[], &[])
    };
    conf(
        "[devices.a]\ntable = \"0 8192 snapshot-origin disk.img\"\n\
         [devices.s]\ntable = \"0 8192 snapshot disk.img s.cow P 8\"\n",
    );
    let server = serve();
    write(&server, "a", 0);
    end(server);
    fs::rename(world.path("s.cow"), world.path("away")).unwrap();
    let server = serve();
    logs(&server, &["udm: s: ", "udm: a: ", "has the snapshot s"]);
    assert_eq!(server.says(&["ls"]), "No devices found\n");
    fs::rename(world.path("away"), world.path("s.cow")).unwrap();
    assert_eq!(server.says(&["reconfigure"]), "+ s\n+ a\n= 0 unchanged\n");
    write(&server, "a", 1);
    is_instant(&server, "s", &[]);
    kill(server);
    // The server itself creates the devices that wait for the store.
    fs::rename(world.path("s.cow"), world.path("away")).unwrap();
    let file = fs::read_to_string(world.path("udm.toml")).unwrap();
    fs::write(world.path("udm.toml"), file.replace("[serve]", "[serve]\nlost-snapshots = \"wait\"")).unwrap();
    let server = serve();
    fs::rename(world.path("away"), world.path("s.cow")).unwrap();
    until("the devices", || server.says(&["ls"]).contains("a\t").then_some(()));
    write(&server, "a", 2);
    is_instant(&server, "s", &[]);
}

#[test]
fn a_file_that_names_a_device_with_snapshots_takes_it_over() {
    let world = RestartFixture::new();
    let table = "0 8192 linear disk.img 0";
    let conf = |table: &str| {
        let text = format!("[serve]\nstate = \"state\"\n[devices.disk]\ntable = \"{table}\"\n");
        fs::write(world.path("udm.toml"), text).unwrap();
    };
    fs::write(world.path("udm.toml"), "[serve]\nstate = \"state\"\n").unwrap();
    let mut command = udm(&["serve"]);
    command.arg(world.path("udm.toml"));
    let server = Server::start_by(command, &[], &[]);
    server.says(&["create", "disk", "--table", &world.table("0 8192 linear {disk.img} 0")]);
    server.says(&["snapshot", "create", "monday", "--of", "disk"]);
    conf(table);
    assert_eq!(server.says(&["reconfigure"]), "~ disk: taken over, table\n= 0 unchanged\n");
    assert_eq!(server.says(&["reconfigure"]), "= 1 unchanged\n");
    write(&server, "disk", 0);
    is_instant(&server, "monday", &[]);
    conf("0 4096 linear disk.img 0");
    let out = server.verb(&["reconfigure"]);
    assert!(text(&out.stderr).contains("it has snapshots that were made by name"), "{}", text(&out.stderr));
}

#[test]
fn a_disk_that_another_program_wrote_is_found_out() {
    let world = RestartFixture::new();
    let server = world.serve(&[DISK]);
    server.says(&["snapshot", "create", "monday", "--of", "disk"]);
    write(&server, "disk", 0);
    end(server);
    // Reading or opening the disk does not invalidate the snapshot.
    fs::read(world.path("disk.img")).unwrap();
    let server = world.serve(&["d={disk.img}", "e=mem:1M"]);
    is_instant(&server, "monday", &[]);
    end(server);
    world.scribble();
    let server = world.serve(&[DISK]);
    logs(&server, &["monday: the snapshot in ", "was written without it"]);
    let listed = server.says(&["snapshot", "list"]);
    assert!(listed.contains("! monday: lost: "), "{listed}");
    end(server);
    // A user who knows that the store is valid can clear the mark.
    let state = world.path("state");
    let cow = world.path("monday.cow");
    let out = udm(&["cow", "clear-invalid"]).arg(&cow).arg("--state").arg(&state).output().unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    let server = world.serve(&[DISK]);
    assert!(server.says(&["snapshot", "list"]).contains("active"));
}

#[test]
fn a_snapshot_that_was_taken_away_is_checked_when_it_comes_back() {
    let world = RestartFixture::with_store("s.cow");
    let (origin, s) = ("org=0 8192 snapshot-origin {disk.img}", "s=0 8192 snapshot {disk.img} {s.cow} P 8");
    let table = world.table("0 8192 snapshot {disk.img} {s.cow} P 8");
    let server = world.serve(&[origin, s]);
    write(&server, "org", 0);
    server.says(&["remove", "s"]);
    logs(&server, &["s: no longer attached"]);
    // The disk was not written meanwhile.
    server.says(&["create", "s", "--table", &table]);
    write(&server, "org", 1);
    is_instant(&server, "s", &[]);
    server.says(&["remove", "s"]);
    write(&server, "org", 2);
    let output = server.refuses(&["create", "s", "--table", &table]);
    assert!(output.contains("was written without it"), "{output}");
    kill(server);
    // Another server knows about the write, and refuses the snapshot.
    let server = world.serve(&[origin]);
    let output = server.refuses(&["create", "s", "--table", &table]);
    assert!(output.contains("was written without it"), "{output}");
}

/// A store removed with --keep-store is checked when it is used again: its origin was written
/// since.
#[test]
fn a_store_that_is_kept_is_checked_when_it_comes_back() {
    let world = RestartFixture::new();
    let table = |store: &str| world.table(&format!("0 8192 snapshot {{disk.img}} {{{store}}} P 8"));
    let server = world.serve(&[DISK]);
    server.says(&["snapshot", "create", "s", "--of", "disk"]);
    server.says(&["snapshot", "create", "t", "--of", "disk"]);
    write(&server, "disk", 0);
    server.says(&["snapshot", "remove", "s", "--keep-store"]);
    assert!(server.says(&["snapshot", "list"]).contains("goes on without it"));
    write(&server, "disk", 1);
    let output = server.refuses(&["create", "x", "--table", &table("s.cow")]);
    assert!(output.contains("was written without it"), "{output}");
    end(server);
    // After a restart nothing waits for this store, and the other one can be given up as well.
    std::fs::rename(world.path("t.cow"), world.path("away")).unwrap();
    let server = world.serve(&[]);
    server.says(&["snapshot", "remove", "t", "--keep-store"]);
    let output = server.refuses(&["snapshot", "remove", "t", "--keep-store"]);
    assert!(output.contains("its origin does not wait for it: only its store can be removed"), "{output}");
    std::fs::rename(world.path("away"), world.path("t.cow")).unwrap();
    server.says(&["create", "disk", "--table", &world.table("0 8192 linear {disk.img} 0")]);
    write(&server, "disk", 2);
    let output = server.refuses(&["create", "x", "--table", &table("t.cow")]);
    assert!(output.contains("was written without it"), "{output}");
    server.says(&["snapshot", "remove", "s"]);
    server.says(&["snapshot", "remove", "t"]);
    assert!(!world.path("s.cow").exists() && !world.path("t.cow").exists());
}

/// The origin is written at any moment while the snapshot is attached again: the snapshot is
/// refused, or it has the copy.
#[test]
fn a_snapshot_that_comes_back_while_its_origin_is_written_is_never_wrong() {
    let (origin, s) = ("org=0 8192 snapshot-origin {disk.img}", "s=0 8192 snapshot {disk.img} {s.cow} P 8");
    for delay in (0..40).map(|step| Duration::from_micros(250 * step)) {
        let world = RestartFixture::with_store("s.cow");
        let server = world.serve(&[origin, s]);
        server.says(&["remove", "s"]);
        let mut client = Client::connect(&server.nbd, "org");
        let load = std::thread::spawn(move || {
            std::thread::sleep(delay);
            assert_eq!(client.one(Nbd::Write, 0, CHUNK), 0);
        });
        let table = world.table("0 8192 snapshot {disk.img} {s.cow} P 8");
        let out = server.verb(&["create", "s", "--table", &table]);
        load.join().unwrap();
        match out.status.success() {
            true => is_instant(&server, "s", &[]),
            false => assert!(text(&out.stderr).contains("was written without it"), "{}", text(&out.stderr)),
        }
    }
}

/// Another client clears the table that makes the disk an origin: the snapshot is not created, or
/// it is correct.
#[test]
fn a_snapshot_whose_origins_table_is_cleared_is_refused() {
    let world = RestartFixture::new();
    let server = world.serve(&[DISK]);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                server.http("POST", "/v1/devices/disk/clear", "");
            }
        });
        // Also if an assertion fails, because the scope waits for its thread.
        let _over = OnDrop(|| is_over.store(true, Ordering::Relaxed));
        let mut created = 0;
        for round in 0..60 {
            let out = server.verb(&["snapshot", "create", "s", "--of", "disk"]);
            if !out.status.success() {
                let output = text(&out.stderr);
                assert!(output.contains("somebody else has loaded or cleared a table"), "{output}");
                continue;
            }
            created += 1;
            let before = read(&server, "s");
            write(&server, "disk", round);
            assert!(read(&server, "s") == before, "round {round}: it is not the instant");
            // The server closes the device of a client with a delay.
            until("the removal", || server.verb(&["snapshot", "remove", "s"]).status.success().then_some(()));
        }
        assert!(created > 0, "none was made");
    });
}

/// A snapshot is removed under load, and the server is killed at once. Whatever was recorded before
/// the kill, missing copies are detected.
#[test]
fn a_snapshot_that_was_taken_away_under_load_is_never_believed() {
    let (origin, s) = ("org=0 8192 snapshot-origin {disk.img}", "s=0 8192 snapshot {disk.img} {s.cow} P 8");
    for delay in [0, 2, 10] {
        let world = RestartFixture::with_store("s.cow");
        let server = world.serve(&[origin, s]);
        let mut client = Client::connect(&server.nbd, "org");
        let load = std::thread::spawn(move || {
            for chunk in (0..SIZE / CHUNK).cycle() {
                let data = [NEW; CHUNK as usize];
                let sent = client.send(CommandFlags::empty(), Nbd::Write, chunk * CHUNK, CHUNK, &data);
                if sent.and_then(|_| client.answer()).is_err() {
                    break;
                }
            }
        });
        let removal = std::process::Command::new(support::UDM)
            .args(["remove", "s"])
            .env("UDM_SOCKET", &server.socket)
            .stderr(std::process::Stdio::null())
            .spawn();
        std::thread::sleep(Duration::from_millis(delay));
        kill(server);
        removal.unwrap().wait().unwrap();
        load.join().unwrap();
        let server = world.serve(&["none=mem:1M"]);
        let table = world.table("0 8192 snapshot {disk.img} {s.cow} P 8");
        let out = server.verb(&["create", "s", "--table", &table]);
        if out.status.success() {
            is_instant(&server, "s", &[]);
        } else {
            assert!(text(&out.stderr).contains("its origin"), "{}", text(&out.stderr));
        }
    }
}

#[test]
fn two_servers_have_a_snapshot_one_after_the_other() {
    let world = RestartFixture::new();
    let first = world.serve(&[SHARED]);
    first.says(&["snapshot", "create", "monday", "--of", "disk"]);
    let output = world.refused(&[SHARED]);
    assert!(output.contains("another server has"), "{output}");
    end(first);
    let second = world.serve(&[DISK]);
    assert!(second.says(&["snapshot", "list"]).contains("active"));
}

/// `precious` is not the store that was created for the snapshot.
#[test]
fn only_the_store_that_was_made_is_removed() {
    let world = RestartFixture::new();
    let server = world.serve(&[DISK]);
    for name in ["s1", "s2"] {
        server.says(&["snapshot", "create", name, "--of", "disk"]);
    }
    fs::remove_file(world.path("s1.cow")).unwrap();
    fs::write(world.path("s1.cow"), "precious").unwrap();
    server.says(&["snapshot", "remove", "s1"]);
    assert_eq!(fs::read(world.path("s1.cow")).unwrap(), b"precious");
    // The snapshot's device has another store by now, and its first store is used by another
    // device.
    world.store("other.cow");
    server.says(&["load", "s2", "--table", &world.table("0 8192 snapshot {disk.img} {other.cow} P 8")]);
    server.says(&["resume", "s2"]);
    server.says(&["create", "keep", "--table", &world.table("0 8192 snapshot {disk.img} {s2.cow} P 8")]);
    server.says(&["snapshot", "remove", "s2"]);
    assert!(world.path("s2.cow").exists());
    write(&server, "disk", 0);
    is_instant(&server, "keep", &[]);
}

#[test]
fn a_merge_that_was_cut_goes_on_with_the_next_server() {
    let world = RestartFixture::new();
    let server = world.serve(&[DISK]);
    server.says(&["snapshot", "create", "monday", "--of", "disk"]);
    server.says(&["snapshot", "create", "tuesday", "--of", "disk"]);
    for chunk in 0..SIZE / CHUNK {
        write(&server, if chunk % 2 == 0 { "disk" } else { "monday" }, chunk);
    }
    let odd: Vec<u64> = (0..SIZE / CHUNK).filter(|chunk| chunk % 2 == 1).collect();
    server.says(&["snapshot", "merge", "monday", "--background"]);
    kill(server);
    let server = world.serve(&[DISK]);
    is_instant(&server, "disk", &odd);
    until("the end of the merge", || {
        server.says(&["table", "disk"]).contains("snapshot-origin").then_some(())
    });
    is_instant(&server, "disk", &odd);
    is_instant(&server, "tuesday", &[]);
    // It was made for the snapshot, and is removed after the table has changed.
    until("the end of the store", || (!world.path("monday.cow").exists()).then_some(()));
    end(server);
    let server = world.serve(&[DISK]);
    is_instant(&server, "disk", &odd);
    is_instant(&server, "tuesday", &[]);
}

/// A record of another user is not acted on, because that user may not open the disks that it
/// names. The disk waits for the snapshot all the same.
#[test]
fn a_record_of_another_user_is_waited_for_and_not_trusted() {
    if !rustix::process::geteuid().is_root() {
        return support::report_skip("only root can give files away");
    }
    let world = RestartFixture::new();
    let server = world.serve(&[DISK]);
    server.says(&["snapshot", "create", "monday", "--of", "disk"]);
    end(server);
    let records =
        || fs::read_dir(world.path("state/snapshots")).unwrap().map(|record| record.unwrap().path());
    let give_to =
        |user: u32| records().for_each(|record| std::os::unix::fs::chown(record, Some(user), None).unwrap());
    give_to(65534);
    let why = world.refused(&[DISK]);
    assert!(
        why.contains("the snapshot monday") && why.contains("which is recorded by another user"),
        "{why}"
    );
    assert_eq!(records().count(), 1);
    give_to(0);
    let server = world.serve(&[DISK]);
    is_instant(&server, "monday", &[]);
}

/// The NBD server of the store stops. The mark for the missing copy is stored elsewhere.
#[test]
fn a_store_on_a_server_is_marked_elsewhere() {
    let world = RestartFixture::with_store("store.img");
    let low = tempfile::tempdir().unwrap();
    let socket = low.path().join("low.sock");
    let serve_low = || {
        let mut command = udm(&["serve", "--cores", "0", "--device"]);
        command.arg(world.table("st={store.img}")).arg("--unix").arg(&socket);
        let child = command.arg("--socket").arg(low.path().join("control")).spawn().unwrap();
        until("the server of the store", || std::os::unix::net::UnixStream::connect(&socket).ok());
        child
    };
    let s = format!("s=0 8192 snapshot {{disk.img}} nbd+unix:///st?socket={} P 8", socket.display());
    let origin = "org=0 8192 snapshot-origin {disk.img}";
    let mut store = serve_low();
    let server = world.serve(&[origin, &s]);
    write(&server, "org", 0);
    store.kill().unwrap();
    store.wait().unwrap();
    write(&server, "org", 2);
    assert!(server.says(&["status", "s"]).contains("Invalid"));
    end(server);
    let _ = fs::remove_file(&socket);
    let mut store = serve_low();
    let output = world.refused(&[origin, &s]);
    assert!(output.contains("has lost a copy"), "{output}");
    store.kill().unwrap();
    store.wait().unwrap();
}

#[test]
fn records_go_with_devices_that_are_renamed() {
    let world = RestartFixture::with_store("s.cow");
    let (lv, s) = ("lv=0 8192 linear {disk.img} 0", "s=0 8192 snapshot @lv {s.cow} P 8");
    let server = world.serve(&[lv, s, "org=0 8192 snapshot-origin @lv"]);
    server.says(&["rename", "lv", "vol"]);
    server.says(&["rename", "s", "snap"]);
    kill(server);
    let vol = "vol=0 8192 linear {disk.img} 0";
    let output = world.refused(&[vol, "org=0 8192 snapshot-origin @vol"]);
    assert!(output.contains("@vol has the snapshot snap in "), "{output}");
    let server =
        world.serve(&[vol, "org=0 8192 snapshot-origin @vol", "snap=0 8192 snapshot @vol {s.cow} P 8"]);
    write(&server, "org", 0);
    is_instant(&server, "snap", &[]);
}

#[test]
fn a_record_that_cannot_be_read_is_no_leave_to_write() {
    let world = RestartFixture::with_store("s.cow");
    let (origin, s) = ("org=0 8192 snapshot-origin {disk.img}", "s=0 8192 snapshot {disk.img} {s.cow} P 8");
    kill(world.serve(&[origin, s]));
    let record = |folder: &Path| fs::read_dir(folder).unwrap().next().unwrap().unwrap().path();
    fs::write(record(&world.path("state/snapshots")), "{").unwrap();
    let output = world.refused(&[origin]);
    assert!(output.contains("which snapshots there are is not known"), "{output}");
}

/// A merge that failed and was continued is completed, and the origin gets its table back.
#[test]
fn a_merge_that_failed_and_went_on_has_its_end() {
    let world = RestartFixture::new();
    let server = world.serve(&[DISK, "st=null:size=8M,memory_backed=1,cache_size=1M"]);
    server.says(&["snapshot", "create", "monday", "--of", "disk", "--store", "@st"]);
    write(&server, "disk", 0);
    assert_eq!(Client::connect(&server.nbd, "monday").one(Nbd::Flush, 0, 0), 0);
    server.says(&["power", "st", "off"]);
    let out = server.verb(&["snapshot", "merge", "monday"]);
    assert!(!out.status.success());
    until("the failure", || server.says(&["status", "disk"]).contains("Merge failed").then_some(()));
    server.says(&["power", "st", "on"]);
    // An inactive table and a suspended device are left alone.
    server.says(&["load", "disk", "--table", &world.table("0 8192 linear {disk.img} 0")]);
    server.says(&["clear", "disk"]);
    server.says(&["suspend", "disk"]);
    server.says(&["resume", "disk"]);
    until("an origin", || server.says(&["table", "disk"]).contains("linear").then_some(()));
    is_instant(&server, "disk", &[]);
    server.says(&["snapshot", "create", "tuesday", "--of", "disk"]);
}

/// For an origin that is no file, udm cannot detect foreign writes; the log warns of it.
#[test]
fn what_can_not_be_told_is_said() {
    let world = RestartFixture::with_store("s.cow");
    let devices = ["lv=0 8192 linear {disk.img} 0", "org=0 8192 snapshot-origin @lv"];
    let server = world.serve(&devices);
    let table = world.table("0 8192 snapshot @lv {s.cow} P 8");
    server.says(&["create", "s", "--table", &table]);
    server.says(&["remove", "s"]);
    server.says(&["create", "s", "--table", &table]);
    logs(&server, &["s: no longer attached", "whether that was written can't be told"]);
    write(&server, "org", 0);
    is_instant(&server, "s", &[]);
}

/// A snapshot that a table created is merged, and the server is killed. The table conflicts at the
/// start of the next server, and the merge continues nevertheless.
#[test]
fn a_cut_merge_of_a_snapshot_by_table_goes_on() {
    let world = RestartFixture::with_store("a.cow");
    let snapshot = "a=0 8192 snapshot {disk.img} {a.cow} P 8";
    let origin = "org=0 8192 snapshot-origin {disk.img}";
    let server = world.serve(&[origin, snapshot]);
    for chunk in 0..SIZE / CHUNK {
        write(&server, "org", chunk);
    }
    server.says(&["snapshot", "merge", "a", "--background"]);
    kill(server);
    // On a slow machine the merge may have ended by then.
    let is_cut = fs::read_dir(world.path("state/snapshots")).unwrap().next().is_some();
    if is_cut {
        let output = world.refused(&[snapshot]);
        assert!(output.contains("is being merged into"), "{output}");
    }
    let server = world.serve(&[origin]);
    until("the end of the merge", || {
        server.says(&["table", "org"]).contains("snapshot-origin").then_some(())
    });
    is_instant(&server, "org", &[]);
}

/// A snapshot that was handed over to another device is removed with that device, and the next
/// server knows it.
#[test]
fn what_was_taken_over_and_removed_is_let_go() {
    let world = RestartFixture::with_store("a.cow");
    let (origin, table) = ("org=0 8192 snapshot-origin {disk.img}", "0 8192 snapshot {disk.img} {a.cow} P 8");
    let server = world.serve(&[origin, &format!("a={table}")]);
    server.says(&["suspend", "a"]);
    server.says(&["create", "b", "--table", &world.table(table)]);
    server.says(&["remove", "b"]);
    logs(&server, &["b: no longer attached"]);
    write(&server, "org", 0);
    kill(server);
    let output = world.refused(&[&format!("a={table}")]);
    assert!(output.contains("was written without it"), "{output}");
}
