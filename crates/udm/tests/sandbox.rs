//! `--sandbox`: a restricted server serves as any other, over upgrades and restarts, and what runs
//! in its place can do little.

mod support;

use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;
use support::nbd::Client;
use support::{Server, UDM, has, needs_no_sandbox, report_skip, text, udm};
use udm_wire::nbd::NbdCommand;

/// The version of the kernel's Landlock; `None` without it. The test itself is not restricted.
fn landlock_version() -> Option<i32> {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing");
    let out = udm(&["serve", "--sandbox", "--port", "0", "--device", "x=mem:1M", "--tls", "require"])
        .arg("--tls-certificates")
        .arg(&missing)
        .env("UDM_SOCKET", folder.path().join("control"))
        .output()
        .unwrap();
    let said = text(&out.stderr);
    if said.contains("no Landlock") {
        report_skip("this kernel has no Landlock");
        return None;
    }
    assert!(said.contains("missing"), "{said}");
    let probe = "import ctypes; print(ctypes.CDLL(None).syscall(444, None, 0, 1))";
    let out = Command::new("python3").args(["-c", probe]).output().ok()?;
    text(&out.stdout).trim().parse().ok()
}

/// A restricted server of `disk` in `folder`; devices below `allowed` may be added.
fn serve_restricted(folder: &Path, options: &[&str]) -> Server {
    let (allowed, device) = (folder.join("allowed"), format!("d={}", folder.join("disk").display()));
    let mut all = vec!["--sandbox", "--sandbox-path", allowed.to_str().unwrap(), "--cores", "0,1"];
    all.extend(options);
    let mut command = udm(&["serve"]);
    command
        .current_dir(&allowed)
        .env("OUTSIDE", folder.join("outside"))
        .env("TESTER", std::process::id().to_string());
    Server::start_by(command, &[&device], &all)
}

/// Folders and files of a test.
fn prepare_files() -> tempfile::TempDir {
    let files = tempfile::tempdir().unwrap();
    for name in ["allowed", "outside"] {
        fs::create_dir(files.path().join(name)).unwrap();
        fs::write(files.path().join(name).join("file"), vec![7; 1 << 20]).unwrap();
    }
    fs::write(files.path().join("disk"), vec![1; 1 << 20]).unwrap();
    files
}

/// Every thread is restricted, also after upgrades, of which there are more than the kernel allows
/// layers of Landlock. Clients read and write, and verbs use the allowed files only.
#[test]
fn a_restricted_server_serves_and_is_upgraded() {
    if needs_no_sandbox("with options of their own") {
        return;
    }
    if landlock_version().is_none() {
        return;
    }
    let files = prepare_files();
    let mut server = serve_restricted(files.path(), &[]);
    let mut client = Client::connect(&server.nbd, "d");
    for round in 0..20 {
        assert_eq!(client.one(NbdCommand::Write, 0, 4096), 0, "round {round}");
        assert_eq!(client.one(NbdCommand::Flush, 0, 0), 0, "round {round}");
        for task in fs::read_dir(format!("/proc/{}/task", server.pid().as_raw_nonzero())).unwrap() {
            let status = fs::read_to_string(task.unwrap().path().join("status")).unwrap();
            assert!(status.contains("NoNewPrivs:\t1") && status.contains("Seccomp:\t2"), "{status}");
            let mine = |field: &str| {
                let value = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
                u64::from_str_radix(value.trim(), 16).unwrap()
            };
            // CAP_DAC_OVERRIDE, CAP_NET_BIND_SERVICE and CAP_IPC_LOCK.
            let few = 1 << 1 | 1 << 10 | 1 << 14;
            assert_eq!((mine("CapPrm:") & !few, mine("CapEff:") & !few), (0, 0), "{status}");
        }
        let report: Value = server.upgrade(&[UDM]);
        assert_eq!(report["clients"], 1, "{report}");
    }
    let table =
        |folder: &str| format!("0 2048 linear {} 0", files.path().join(folder).join("file").display());
    server.says(&["create", "a", "--table", &table("allowed")]);
    let why = server.refuses(&["create", "b", "--table", &table("outside")]);
    assert!(why.contains("Permission denied; --sandbox allows files"), "{why}");
    // The default place of a store is beside the disk.
    let why = server.refuses(&["snapshot", "create", "s", "--of", "d"]);
    assert!(why.contains("s.cow: Permission denied; --sandbox allows files"), "{why}");
    let store = files.path().join("allowed/s.cow").display().to_string();
    server.says(&["snapshot", "create", "s", "--of", "d", "--store", &store]);
    assert_eq!(client.one(NbdCommand::Write, 8192, 4096), 0);
    assert_eq!(Client::connect(&server.nbd, "s").one(NbdCommand::Read, 8192, 4096), 0);
}

/// What an attacker would do next. `do` prints a line for each step with its error, or `done`.
const ATTACK: &str = r#"
import ctypes, mmap, os, signal, socket, subprocess
out = open("result", "w")
libc = ctypes.CDLL(None, use_errno=True)
def do(name, step):
    try:
        step()
        said = "done"
    except OSError as error:
        said = os.strerror(error.errno)
    out.write(f"{name}: {said}\n")
def call(*arguments):
    if libc.syscall(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "")
outside = os.environ["OUTSIDE"]
do("write allowed", lambda: open("new", "w").write("x"))
do("run a program", lambda: subprocess.check_call(["/bin/true"]))
do("read outside", lambda: open(outside + "/file"))
do("list outside", lambda: os.listdir(outside))
do("create outside", lambda: open(outside + "/new", "w"))
do("remove outside", lambda: os.unlink(outside + "/file"))
do("write /etc", lambda: open("/etc/udm-test", "w"))
do("write /proc", lambda: open("/proc/self/comm", "w"))
os.chmod("program", 0o755)
do("run an own program", lambda: subprocess.check_call(["./program"]))
do("netlink", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
do("packets", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
do("namespace", lambda: call(272, 0x10000000))
do("mount", lambda: call(165, b"none", b"/mnt", b"tmpfs", 0, None))
do("trace", lambda: call(101, 16, os.getppid(), 0, 0))
do("keys", lambda: call(250, 0, -3, 0, 0, 0))
do("user", lambda: call(105, 0))
do("type into a terminal", lambda: call(16, 0, 0x5412, b"x"))
do("set-user-ID", lambda: os.chmod("program", 0o4755))
do("owner", lambda: os.chown("program", 1, 1))
do("limits of others", lambda: call(302, int(os.environ["TESTER"]), 0, None, None))
do("raw packets", lambda: socket.socket(socket.AF_INET, 10))
do("MPTCP", lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262))
do("clone3", lambda: call(435, None, 0))
do("writable code", lambda: mmap.mmap(-1, 4096, prot=7))
do("signal", lambda: os.kill(int(os.environ["TESTER"]), 0))
do("listen", lambda: socket.create_server(("127.0.0.1", 0)))
out.close()
"#;

/// A program that is started in the place of the server has its restrictions.
#[test]
#[cfg(target_arch = "x86_64")]
fn what_runs_in_its_place_can_do_little() {
    if needs_no_sandbox("with options of their own") {
        return;
    }
    if !has("python3") {
        return;
    }
    let Some(version) = landlock_version() else { return };
    let files = prepare_files();
    // The arguments of the server follow the program: python runs the file `serve`.
    fs::write(files.path().join("allowed/serve"), ATTACK).unwrap();
    fs::copy("/bin/true", files.path().join("allowed/program")).unwrap();
    let server = serve_restricted(files.path(), &[]);
    server.refuses(&["upgrade", "/usr/bin/python3"]);
    let result = fs::read_to_string(files.path().join("allowed/result"))
        .unwrap_or_else(|_| panic!("{}", server.log()));
    let since =
        |first: i32, refused: &str| if version >= first { refused.to_owned() } else { "done".to_owned() };
    let (denied, forbidden) = ("Permission denied", "Operation not permitted");
    let expected = [
        ("write allowed", "done".to_owned()),
        ("run a program", "done".to_owned()),
        ("read outside", denied.to_owned()),
        ("list outside", denied.to_owned()),
        ("create outside", denied.to_owned()),
        ("remove outside", denied.to_owned()),
        ("write /etc", denied.to_owned()),
        ("write /proc", denied.to_owned()),
        ("run an own program", denied.to_owned()),
        ("netlink", forbidden.to_owned()),
        ("packets", forbidden.to_owned()),
        ("namespace", forbidden.to_owned()),
        ("mount", forbidden.to_owned()),
        ("trace", forbidden.to_owned()),
        ("keys", forbidden.to_owned()),
        ("user", forbidden.to_owned()),
        ("type into a terminal", forbidden.to_owned()),
        ("set-user-ID", forbidden.to_owned()),
        ("owner", forbidden.to_owned()),
        ("limits of others", forbidden.to_owned()),
        ("raw packets", forbidden.to_owned()),
        ("MPTCP", forbidden.to_owned()),
        ("clone3", "Function not implemented".to_owned()),
        ("writable code", forbidden.to_owned()),
        ("signal", since(6, forbidden)),
        ("listen", since(4, denied)),
    ];
    let expected: Vec<String> = expected.iter().map(|(name, said)| format!("{name}: {said}")).collect();
    assert_eq!(result.lines().collect::<Vec<_>>(), expected);
    assert_eq!(Client::connect(&server.nbd, "d").one(NbdCommand::Read, 0, 4096), 0);
}

/// Paths that do not exist, and options that exclude each other.
#[test]
fn what_cannot_be_restricted_is_refused() {
    if needs_no_sandbox("with options of their own") {
        return;
    }
    let said = |options: &[&str]| {
        text(&udm(&["serve", "--device", "x=mem:1M"]).args(options).output().unwrap().stderr)
    };
    let why = said(&["--port", "0", "--sandbox", "--sandbox-path", "/no/such"]);
    assert!(why.contains("udm: serve: sandbox: /no/such: no such file or folder"), "{why}");
    let why = said(&["--sandbox", "--run", "true"]);
    assert!(why.contains("cannot be used with"), "{why}");
    let why = said(&["--port", "0", "--sandbox-path", "/tmp"]);
    assert!(why.contains("--sandbox"), "{why}");
}
