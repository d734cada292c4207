//! The server under a service manager: notifications, the watchdog, inherited sockets; and the unit
//! files.

mod support;

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Pid, Signal};
use std::collections::{HashMap, HashSet};
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use support::nbd::Client;
use support::{PATIENCE, Server, UDM, has, needs_no_sandbox, report_skip, signal, text, udm, until};
use udm_wire::nbd::NbdCommand;

/// The next notification, as lines.
fn read_states(socket: &UnixDatagram) -> Vec<String> {
    let mut text = [0; 4096];
    let len = socket.recv(&mut text).unwrap();
    String::from_utf8_lossy(&text[..len]).lines().map(String::from).collect()
}

/// The next notification that is not of the watchdog.
fn news(socket: &UnixDatagram) -> Vec<String> {
    loop {
        let states = read_states(socket);
        if states != ["WATCHDOG=1"] {
            return states;
        }
    }
}

#[test]
fn the_manager_is_told_what_the_server_does_and_that_it_lives() {
    let folder = tempfile::tempdir().unwrap();
    let (conf, path) = (folder.path().join("udm.toml"), folder.path().join("notify"));
    fs::write(&conf, "[devices.a]\ntable = \"0 8 error\"\n").unwrap();
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut command = udm(&["serve"]);
    command.arg(&conf).env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "20000");
    let mut server = Server::start_by(command, &[], &[]);
    assert_eq!(news(&socket), ["READY=1", "STATUS=Serving 1 device"]);
    for _ in 0..3 {
        assert_eq!(read_states(&socket), ["WATCHDOG=1"]);
    }
    fs::write(&conf, "").unwrap();
    let before = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    signal(Pid::from_child(&server.child), Signal::HUP);
    let [begun, since, _] = &news(&socket)[..] else { panic!("not three lines") };
    let usec: i64 = since.strip_prefix("MONOTONIC_USEC=").unwrap().parse().unwrap();
    assert!(begun == "RELOADING=1" && usec >= before.tv_sec * 1_000_000 + before.tv_nsec / 1000);
    assert_eq!(news(&socket), ["READY=1", "STATUS=Serving 0 devices"]);
    signal(Pid::from_child(&server.child), Signal::TERM);
    assert_eq!(news(&socket)[0], "STOPPING=1");
    assert_eq!(until("its end", || server.child.try_wait().unwrap()).code(), Some(0));
    // The watchdog of another process gets no keep-alive.
    fs::write(&conf, "").unwrap();
    let mut command = udm(&["serve"]);
    command.arg(&conf).env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "1").env("WATCHDOG_PID", "1");
    let server = Server::start_by(command, &[], &[]);
    assert_eq!(read_states(&socket)[0], "READY=1");
    signal(Pid::from_child(&server.child), Signal::TERM);
    assert_eq!(read_states(&socket)[0], "STOPPING=1");
}

/// After an upgrade the manager supervises the new process, which sends the keep-alives, and applies
/// a changed file.
#[test]
fn the_manager_follows_an_upgrade() {
    let folder = tempfile::tempdir().unwrap();
    let (conf, path) = (folder.path().join("udm.toml"), folder.path().join("notify"));
    let pidfile = folder.path().join("pid");
    fs::write(&conf, "[devices.a]\ntable = \"0 8 error\"\n").unwrap();
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut command = udm(&["serve"]);
    command.arg(&conf).env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "20000");
    let mut server = Server::start_by(command, &[], &["--pidfile", pidfile.to_str().unwrap()]);
    assert_eq!(news(&socket), ["READY=1", "STATUS=Serving 1 device"]);
    server.upgrade(&[UDM]);
    let pid = server.pid().as_raw_nonzero();
    // The old process and the new one send theirs at the same time.
    let mut both = [news(&socket), news(&socket)];
    both.sort();
    assert_eq!(
        both,
        [vec![format!("MAINPID={pid}")], vec!["READY=1".into(), "STATUS=Serving 1 device".into()]]
    );
    assert_eq!(fs::read_to_string(&pidfile).unwrap(), format!("{pid}\n"));
    assert!(pings(&socket), "the new process lives");
    fs::write(&conf, "[devices.b]\ntable = \"0 8 error\"\n").unwrap();
    assert_eq!(server.says(&["reconfigure"]), "- a\n+ b\n= 0 unchanged\n");
    signal(server.pid(), Signal::TERM);
    assert_eq!(news(&socket)[0], "STOPPING=1");
    until("the end of the file", || (!pidfile.exists()).then_some(()));
}

/// Stops one thread of a process until standard input ends.
const STILL: &str = "
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
tid = int(sys.argv[1])
for request in (0x4206, 0x4207):  # PTRACE_SEIZE, PTRACE_INTERRUPT
    if libc.ptrace(request, tid, None, None):
        print(os.strerror(ctypes.get_errno()), flush=True)
        sys.exit()
os.waitpid(tid, 0x40000000)  # __WALL
print('still', flush=True)
sys.stdin.read()
";

/// The ID of the thread with the name `name`.
fn thread(server: &Server, name: &str) -> String {
    let tasks =
        fs::read_dir(format!("/proc/{}/task", server.child.id())).unwrap().map(|task| task.unwrap().path());
    let mut called = tasks.filter(|task| fs::read_to_string(task.join("comm")).unwrap().trim() == name);
    called.next().unwrap().file_name().unwrap().to_str().unwrap().to_owned()
}

/// True if a keep-alive arrives within a time in which several are expected.
fn pings(socket: &UnixDatagram) -> bool {
    socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    let is_one = socket.recv(&mut [0; 64]).is_ok();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    is_one
}

/// True if a verb is answered within a short time.
fn answers(server: &Server) -> bool {
    let mut verb = udm(&["ls"]);
    let mut verb = verb.env("UDM_SOCKET", &server.socket).stdout(Stdio::null()).spawn().unwrap();
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(2) {
        if verb.try_wait().unwrap().is_some() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let _ = verb.kill();
    verb.wait().unwrap();
    false
}

/// While the control thread or a core is stopped, no keep-alive is sent.
#[test]
fn a_thread_that_is_stuck_is_not_called_alive() {
    if !has("python3") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut command = udm(&["serve"]);
    command.env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "20000");
    let server = Server::start_by(command, &["d=0 8 zero"], &[]);
    for name in ["main", "udm-core0"] {
        while read_states(&socket) != ["WATCHDOG=1"] {}
        let mut still = Command::new("python3");
        still.args(["-c", STILL, &thread(&server, name)]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut still = still.spawn().unwrap();
        let mut output = String::new();
        BufReader::new(still.stdout.take().unwrap()).read_line(&mut output).unwrap();
        if output != "still\n" {
            report_skip(&format!("no thread can be stopped here: {output}"));
            still.wait().unwrap();
            return;
        }
        // Discards the keep-alives sent before the stop, and one that was about to be sent.
        socket.set_nonblocking(true).unwrap();
        while socket.recv(&mut [0; 64]).is_ok() {}
        socket.set_nonblocking(false).unwrap();
        let is_told = pings(&socket) && pings(&socket);
        let is_answered = answers(&server);
        drop(still.stdin.take());
        still.wait().unwrap();
        assert!(!is_told, "{name} stands still");
        // The control thread serves verbs; the core does not.
        assert_eq!(is_answered, name != "main", "{name} stands still");
        assert_eq!(read_states(&socket), ["WATCHDOG=1"], "{name} goes on");
    }
}

/// A listening socket at `path`, which child processes inherit.
fn listen(path: &Path) -> UnixListener {
    let socket = UnixListener::bind(path).unwrap();
    fcntl_setfd(&socket, FdFlags::empty()).unwrap();
    socket
}

#[test]
fn sockets_that_were_opened_before_are_served_and_left() {
    if !has("bash") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("udm.toml"), "[devices.a]\ntable = \"0 8 zero\"\n").unwrap();
    let (control, nbd) = (listen(&at("control")), listen(&at("nbd")));
    // The descriptors get the numbers 3 and 4 with the help of a shell.
    let script = format!(
        "exec 3<&{} 4<&{}; LISTEN_PID=$$ LISTEN_FDS=2 LISTEN_FDNAMES=control:udm.socket exec {UDM} serve --cores 0 {}",
        control.as_raw_fd(),
        nbd.as_raw_fd(),
        at("udm.toml").display()
    );
    let serve = || {
        let mut bash = Command::new("bash");
        bash.args(["-c", &script]).env("UDM_STATE", at("state")).env_remove("UDM_SOCKET");
        bash.stdin(Stdio::null()).stderr(fs::File::create(at("log")).unwrap()).spawn().unwrap()
    };
    for round in 0..2 {
        if round == 1 {
            // As in the packaged file, `unix` is the path of the inherited socket.
            let conf = fs::read_to_string(at("udm.toml")).unwrap();
            let unix = format!("[serve]\nunix = \"{}\"\n", at("nbd").display());
            fs::write(at("udm.toml"), unix + &conf.replace("[serve]\n", "")).unwrap();
        }
        let mut child = serve();
        // A client that connects before the server is ready waits.
        let mut client = Client::connect(&at("nbd"), "a");
        assert_eq!(client.read(0), 0, "round {round}");
        let out = udm(&["exports"]).env("UDM_SOCKET", at("control")).output().unwrap();
        let uri = format!("nbd+unix:///a?socket={}", at("nbd").display());
        assert!(text(&out.stdout).contains(&uri), "{out:?} {}", fs::read_to_string(at("log")).unwrap());
        signal(Pid::from_child(&child), Signal::TERM);
        assert_eq!(until("its end", || child.try_wait().unwrap()).code(), Some(0));
        assert!(at("nbd").exists() && at("control").exists(), "they are not the server's");
    }
}

/// A client of libnbd starts its own server through socket activation, and ends it. Such servers do
/// not use the default control socket.
#[test]
fn a_client_starts_a_server_for_itself() {
    if !has("nbdinfo") || !has("nbdcopy") {
        return;
    }
    let state = tempfile::tempdir().unwrap();
    let other = Server::start(&["d=mem:1M"]);
    let run = |words: &[&str]| {
        let mut client = Command::new(words[0]);
        client.args(&words[1..]).env("UDM_STATE", state.path()).env("UDM_SOCKET", &other.socket);
        client.output().unwrap()
    };
    let size = run(&["nbdinfo", "--size", "--", "[", UDM, "serve", "--device", "d=pattern:10M", "]"]);
    assert_eq!(text(&size.stdout), "10485760\n", "{}", text(&size.stderr));
    let copied = run(&["nbdcopy", "--", "[", UDM, "serve", "--device", "d=pattern:10M", "]", "null:"]);
    assert!(copied.status.success(), "{}", text(&copied.stderr));
    assert_eq!(other.says(&["ls"]), "d\t(254:0)\n");
}

fn units() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/systemd")
}

#[test]
fn the_units_are_good() {
    if !has("systemd-analyze") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut names = Vec::new();
    for unit in fs::read_dir(units()).unwrap() {
        let unit = unit.unwrap().path();
        let text = fs::read_to_string(&unit).unwrap();
        // The program under test.
        let text = text
            .replace("/usr/bin/udm", UDM)
            .replace("man:udm-serve(1) man:udm.toml(5)", "https://example.invalid");
        let copy = folder.path().join(unit.file_name().unwrap());
        fs::write(&copy, text).unwrap();
        names.push(copy);
    }
    assert_eq!(names.len(), 3);
    let out = Command::new("systemd-analyze").arg("verify").args(&names).output().unwrap();
    let output = text(&out.stdout) + &text(&out.stderr);
    // Messages about other units of this machine are ignored.
    let ours = |line: &&str| line.contains("udm");
    assert_eq!(output.lines().filter(ours).collect::<Vec<_>>(), Vec::<&str>::new());
}

/// Text between the name of a setting and the end of its line, for each line of the unit.
fn settings<'a>(unit: &'a str, name: &str) -> Vec<&'a str> {
    unit.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix('=')).collect()
}

/// The system calls that the filter of the unit allows, from systemd's own list of sets.
fn allowed_system_calls(unit: &str, list: &str) -> HashSet<String> {
    let mut sets: HashMap<&str, Vec<&str>> = HashMap::new();
    let mut set = "";
    for line in list.lines().filter(|line| !line.trim_start().starts_with('#')) {
        match line.starts_with('@') {
            true => set = line.trim(),
            false => sets.entry(set).or_default().push(line.trim()),
        }
    }
    fn expand(word: &str, sets: &HashMap<&str, Vec<&str>>, all: &mut HashSet<String>) {
        match sets.get(word) {
            Some(words) => words.iter().for_each(|word| expand(word, sets, all)),
            None => _ = all.insert(word.to_owned()),
        }
    }
    let mut allowed = HashSet::new();
    // systemd always allows this one.
    expand("@default", &sets, &mut allowed);
    for words in settings(unit, "SystemCallFilter") {
        let mut these = HashSet::new();
        let (denies, words) = words.strip_prefix('~').map_or((false, words), |words| (true, words));
        words.split_whitespace().for_each(|word| expand(word, &sets, &mut these));
        match denies {
            true => allowed.retain(|call| !these.contains(call)),
            false => allowed.extend(these),
        }
    }
    allowed
}

/// A server that is taken over can do little, and needs no system call that its unit forbids: over a
/// file and an NBD path, with snapshots, limits, changes and an upgrade.
#[test]
fn the_unit_allows_little_and_enough() {
    if !has("systemd-analyze") || !has("strace") {
        return;
    }
    let path = units().join("udm.service");
    let out = Command::new("systemd-analyze")
        .args(["security", "--offline=true", "--threshold=20", "--no-pager"])
        .arg(&path)
        .output()
        .unwrap();
    let report = text(&out.stdout);
    if report.is_empty() {
        report_skip("systemd-analyze cannot judge a file");
        return;
    }
    assert!(out.status.success(), "an exposure above 2.0:\n{report}");

    let list = Command::new("systemd-analyze").args(["syscall-filter", "--no-pager"]).output().unwrap();
    let allowed = allowed_system_calls(&fs::read_to_string(&path).unwrap(), &text(&list.stdout));
    assert!(allowed.contains("io_uring_enter") && allowed.contains("sched_setaffinity"));
    assert!(!allowed.contains("mount") && !allowed.contains("setrlimit") && !allowed.contains("bpf"));

    let folder = tempfile::tempdir().unwrap();
    let [disk, trace, pidfile] = ["disk", "trace", "pid"].map(|name| folder.path().join(name));
    fs::write(&disk, vec![1; 4 << 20]).unwrap();
    let mut traced = Command::new("strace");
    traced.args(["-f", "-qq", "-o"]).arg(&trace).args([UDM, "serve"]);
    let is_traceable = Command::new("strace").args(["-qq", "-o", "/dev/null", "true"]).status();
    if !is_traceable.is_ok_and(|status| status.success()) {
        report_skip("processes cannot be traced here");
        return;
    }
    let other = Server::start(&["far=mem:4M"]);
    if needs_no_sandbox("with options of its own") {
        return;
    }
    let sandbox = ["--sandbox", "--sandbox-path", folder.path().to_str().unwrap()];
    let options = [&["--cores", "0,1", "--pidfile", pidfile.to_str().unwrap()], &sandbox[..]].concat();
    let mut server = Server::start_by(traced, &[&format!("d={}", disk.display())], &options);
    let far = format!("nbd+unix:///far?socket={}", other.nbd.display());
    let near = disk.with_file_name("near");
    fs::write(&near, vec![1; 4 << 20]).unwrap();
    let table = format!("0 8192 multipath 0 0 1 1 round-robin 0 2 0 {} {far}", near.display());
    server.says(&["create", "m", "--table", &table]);
    server.says(&["snapshot", "create", "s", "--of", "d"]);
    server.says(&["throttle", "d", "iops=10000"]);
    for device in ["d", "m", "s"] {
        let mut client = Client::connect(&server.nbd, device);
        for (command, length) in [(NbdCommand::Write, 4096), (NbdCommand::Flush, 0), (NbdCommand::Read, 4096)]
        {
            assert_eq!(client.one(command, 0, length), 0, "{command:?} of {device}");
        }
        // Not every device has it.
        client.one(NbdCommand::Trim, 0, 4096);
    }
    server.says(&["suspend", "d"]);
    server.says(&["resume", "d"]);
    server.says(&["snapshot", "remove", "s"]);
    server.says(&["upgrade"]);
    // strace ends with all that it traces.
    let pid = fs::read_to_string(&pidfile).unwrap().trim().parse().ok().and_then(Pid::from_raw);
    signal(pid.unwrap(), Signal::TERM);
    server.child.wait().unwrap();
    let trace = fs::read_to_string(&trace).unwrap();
    let called = trace
        .lines()
        .filter_map(|line| line.split_whitespace().nth(1)?.split_once('(').map(|(call, _)| call));
    let called: HashSet<&str> =
        called.filter(|call| call.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')).collect();
    assert!(called.contains("io_uring_enter"), "{called:?}");
    let forbidden: Vec<&&str> = called.iter().filter(|call| !allowed.contains(**call)).collect();
    assert!(forbidden.is_empty(), "the unit forbids {forbidden:?}");
}
