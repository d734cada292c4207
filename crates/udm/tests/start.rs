//! Starting a server: in the background, with a device instead of a table, and with wrong
//! arguments.

mod support;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use support::{Server, has, text, udm, until};

/// The command line of a server with private sockets in `folder`.
fn serve(folder: &Path, more: &[&str]) -> Command {
    let mut command = udm(&["serve", "--cores", "0", "--unix", "nbd.sock", "--socket", "udm.sock"]);
    command.args(more).current_dir(folder).stdout(Stdio::null());
    command.stderr(fs::File::create(folder.join("log")).unwrap());
    command
}

#[test]
fn fork_returns_when_the_devices_are_served() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let status = serve(at, &["--device", "d=mem:1M", "--fork", "--pidfile", "pid"]).status().unwrap();
    let pid = fs::read_to_string(at.join("pid")).unwrap();
    assert_eq!(status.code(), Some(0));
    // The server is ready already.
    let ls = udm(&["ls"]).env("UDM_SOCKET", at.join("udm.sock")).output().unwrap();
    assert_eq!(text(&ls.stdout), "d\t(254:0)\n", "{}", text(&ls.stderr));
    assert!(at.join("nbd.sock").exists());
    assert!(fs::read_to_string(at.join("log")).unwrap().starts_with("udm: d "));
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap();
    let field = |n: usize| stat.split_whitespace().nth(n).unwrap().to_owned();
    assert_eq!(
        (field(5), field(6)),
        (pid.trim().to_owned(), "0".into()),
        "a session without a terminal: {stat}"
    );
    assert!(Command::new("kill").arg(pid.trim()).status().unwrap().success());
    until("the end of the server", || (!at.join("nbd.sock").exists()).then_some(()));
    until("the end of its process ID", || (!at.join("pid").exists()).then_some(()));
}

/// Files that may not be what their user expects are served, and the log warns about them.
#[test]
fn odd_files_are_served_with_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    let [short, image, plain] = ["short", "image", "plain"].map(|name| folder.path().join(name));
    fs::write(&short, vec![0; 1_050_000]).unwrap();
    fs::write(&image, [&b"QFI\xfb\0\0\0\x03"[..], &[0; 65_528]].concat()).unwrap();
    fs::write(&plain, vec![0; 65_536]).unwrap();
    let devices = [("a", &short), ("b", &image), ("c", &plain)];
    let devices = devices.map(|(name, path)| format!("{name}={}", path.display()));
    let server = Server::start(&devices.each_ref().map(String::as_str));
    assert!(server.says(&["table", "a"]).starts_with("0 2050 linear"));
    // Lines of the log are written by a thread of its own.
    let log = until("both warnings", || Some(server.log()).filter(|log| log.contains("in format qcow2")));
    for words in [
        format!("{}: its last 400 bytes are not served, since blocks have 512 bytes: ", short.display()),
        format!("{}: begins like an image in format qcow2, and is served as it is: ", image.display()),
    ] {
        assert!(log.contains(&words), "{words:?} in {log}");
    }
    assert!(!log.contains(&format!("{}: ", plain.display())), "{log}");
}

/// A reader of standard error through a pipe, such as a shell's `$(...)` or ssh, gets the end of
/// file.
#[test]
fn fork_lets_go_of_a_pipe() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let mut command = serve(at, &["--device", "d=mem:1M", "--fork", "--pidfile", "pid"]);
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut errors = child.stderr.take().unwrap();
    let read = std::thread::spawn(move || {
        let mut output = String::new();
        std::io::Read::read_to_string(&mut errors, &mut output).map(|_| output)
    });
    assert!(child.wait().unwrap().success());
    until("the end of its errors", || read.is_finished().then_some(()));
    let output = read.join().unwrap().unwrap();
    assert!(output.starts_with("udm: d "), "{output}");
    let pid = fs::read_to_string(at.join("pid")).unwrap();
    assert!(Command::new("kill").arg(pid.trim()).status().unwrap().success());
    until("the end of the server", || (!at.join("pid").exists()).then_some(()));
}

#[test]
fn fork_returns_the_status_of_a_server_that_did_not_start() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let status = serve(at, &["--device", "d=missing.img", "--fork", "--pidfile", "pid"]).status().unwrap();
    assert_eq!(status.code(), Some(1));
    let output = fs::read_to_string(at.join("log")).unwrap();
    assert!(
        output.starts_with("udm: d: ") && output.contains("missing.img") && output.contains("No such file"),
        "{output}"
    );
    assert!(!at.join("pid").exists() && !at.join("nbd.sock").exists());
}

/// A table with more paths than open files are allowed is refused in one line with the limit, which
/// is the hard limit.
#[test]
fn too_many_paths_are_refused_with_the_limit() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let paths: Vec<_> = (0..200).map(|n| format!("p{n}")).collect();
    paths.iter().for_each(|path| fs::File::create(at.join(path)).unwrap().set_len(1 << 20).unwrap());
    let device = format!("m=0 2048 multipath 0 0 1 1 round-robin 0 200 0 {}", paths.join(" "));
    let serve = |limit: &str| {
        let script = format!("ulimit {limit} 150 && exec \"$0\" \"$@\"");
        let words = ["-c", &script, env!("CARGO_BIN_EXE_udm"), "serve", "--cores", "0", "--run", "true"];
        Command::new("/bin/sh").args(words).args(["--device", &device]).current_dir(at).output().unwrap()
    };
    let refused = serve("-n");
    let output = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{output}");
    let first = output.lines().next().unwrap();
    assert!(first.contains("the server may have 150 files open; raise the hard limit"), "{output}");
    assert!(first.ends_with("): Too many open files"), "{output}");
    let raised = serve("-Sn");
    assert!(raised.status.success(), "{}", text(&raised.stderr));
}

#[test]
fn nowhere_to_serve_is_wrong_usage() {
    let out = udm(&["serve", "--device", "d=0 8 zero"]).output().unwrap();
    assert_eq!(out.status.code(), Some(2));
    let output = text(&out.stderr);
    assert!(["--unix", "--port", "--run"].iter().all(|word| output.contains(word)), "{output}");
}

#[test]
fn a_device_alone_is_mapped_whole() {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("my disk.img");
    fs::File::create(&image).unwrap().set_len(3 << 20).unwrap();
    let image = format!("image={}", image.display());
    let server = Server::start(&["m=mem:1M", &image]);
    assert_eq!(server.says(&["table"]), "m: 0 2048 linear 253:0 0\nimage: 0 6144 linear 253:1 0\n");
}

/// A device can be given instead of a table, in verbs and in files.
#[test]
fn a_device_is_a_table_for_verbs_and_files_too() {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("disk.img");
    fs::File::create(&image).unwrap().set_len(3 << 20).unwrap();
    let file = folder.path().join("udm.toml");
    fs::write(&file, "[devices.a]\ntable = \"disk.img\"\n").unwrap();
    let server = Server::start_with(&[], &[file.to_str().unwrap()]);
    assert!(server.says(&["table", "a"]).starts_with("0 6144 linear "));
    server.says(&["create", "b", "--table", "null:1G"]);
    assert!(server.says(&["table", "b"]).starts_with("0 2097152 linear "));
    server.says(&["load", "b", "--table", "@a"]);
    server.says(&["resume", "b"]);
    assert!(server.says(&["table", "b"]).starts_with("0 6144 linear "));
    server.says(&["reload", "b", "--table", image.to_str().unwrap()]);
    assert!(server.says(&["table", "b", "--inactive"]).starts_with("0 6144 linear "));
    let refused = server.refuses(&["load", "b", "--table", "no.img"]);
    assert!(refused.contains("no.img: No such file or directory"), "{refused}");
    // The file matches the devices, so nothing is changed.
    assert_eq!(server.says(&["reconfigure"]), "= 1 unchanged\n");
}

/// The report of a server says where its verbs find it, with devices and without.
#[test]
fn a_server_names_its_control_socket() {
    for (device, begin) in [(Some("d=mem:1M"), "udm: d  1M  "), (None, "udm: no devices yet; ")] {
        let folder = tempfile::tempdir().unwrap();
        let mut options = vec!["--fork", "--pidfile", "pid"];
        options.extend(device.into_iter().flat_map(|device| ["--device", device]));
        let status = serve(folder.path(), &options).status().unwrap();
        let log = fs::read_to_string(folder.path().join("log")).unwrap();
        assert!(status.success(), "{log}");
        let socket = format!("control socket {}\n", folder.path().join("udm.sock").display());
        assert!(log.starts_with(begin) && log.ends_with(&socket), "{log}");
        let pid = fs::read_to_string(folder.path().join("pid")).unwrap();
        assert!(Command::new("kill").arg(pid.trim()).status().unwrap().success());
        until("the end of the server", || (!folder.path().join("pid").exists()).then_some(()));
    }
}

/// An error names its cause once, and has no errno if udm explains what is wrong.
#[test]
fn errors_say_a_thing_once() {
    let out = udm(&["serve", "--unix", "-", "--device", "d=nbd://127.0.0.1:1/"]).output().unwrap();
    let output = text(&out.stderr);
    assert_eq!(output.matches("Connection refused").count(), 1, "{output}");
    let server = Server::start(&["d=mem:1M"]);
    for (args, why) in [
        (&["reconfigure"][..], "the server was started without a file: udm serve FILE reads one\n"),
        (&["snapshot", "remove", "d"], "udm: d: it is not a snapshot\n"),
        (&["rename", "d", "254:7"], "would be taken for a device number\n"),
        (&["message", "d", "99999", "x"], "sector outside device.: Invalid argument\n"),
    ] {
        let output = server.refuses(args);
        assert!(output.ends_with(why), "{output}");
    }
    server.says(&["remove", "d"]);
    let output = server.refuses(&["remove", "d"]);
    assert_eq!(output, "udm: d: no device of that name: No such device or address\n");
}

/// Each mistake has a specific error text.
#[test]
fn mistakes_of_a_first_start_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |name: &str, bytes: &[u8]| {
        let file = folder.path().join(name);
        fs::write(&file, bytes).unwrap();
        let out = udm(&["serve", "--unix", "-"]).arg(&file).output().unwrap();
        assert_eq!(out.status.code(), Some(1), "{}", text(&out.stderr));
        text(&out.stderr)
    };
    let image = refused("disk.img", &[0; 4096]);
    assert!(image.contains("not a configuration file; a disk is served by --device NAME="), "{image}");
    let bare = refused("udm.toml", b"[serve]\nunix = nbd.sock\n");
    assert!(bare.contains("udm.toml:2:8: text as a value stands in quotes: \"nbd.sock\""), "{bare}");
}

#[test]
fn hints_are_right() {
    let refused = |device: &str| {
        let out = udm(&["serve", "--unix", "-", "--device"]).arg(device).output().unwrap();
        assert_eq!(out.status.code(), Some(1), "{device}: {}", text(&out.stderr));
        text(&out.stderr)
    };
    let commas = refused("d=0 8 linear file:x,direct=on,readonly=on 0");
    assert!(commas.contains("file:x?direct=on&readonly=on"), "{commas}");
    let scheme = refused("d=0 8 linear ndb:x 0");
    assert!(
        scheme.contains("file:, nbd:, nvme+tcp:, null:, mem:, pattern:, https:, s3:, gs: or az:"),
        "{scheme}"
    );
    let table = refused("d=linear /dev/null 0");
    assert!(table.contains("START \"linear\" is not a number of sectors"), "{table}");
    let null = refused("d=null:size=1M,zoned=1");
    assert!(null.contains("mbps") && null.contains("completion_nsec"), "{null}");
    let null = refused("d=null:size=1M,queue_mode=1");
    assert!(null.contains("multi-queue"), "{null}");
}

/// In a container without io_uring, `bench` works for a device that needs none. Everything else
/// reports what is missing and what to do.
#[test]
fn without_io_uring() {
    if !has("python3") {
        return;
    }
    // A seccomp filter: io_uring_setup, number 425 on every machine, fails with EPERM.
    const FILTER: &str = "
import ctypes, os, struct, sys
code = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7fff0000)]
filter = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *line) for line in code))
program = struct.pack('HxxxxxxQ', len(code), ctypes.addressof(filter))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()
os.execv(sys.argv[1], sys.argv[1:])
";
    let limited = |args: &[&str]| {
        let mut command = Command::new("timeout");
        command.args(["-k", "5", "60", "python3", "-c", FILTER, support::UDM]).args(args);
        command.stdin(Stdio::null()).output().unwrap()
    };
    for device in ["null:size=1G", "mem:1M", "d=0 2048 linear pattern:1M 0", "d=mem:1M"] {
        let out = limited(&["bench", "--device", device, "--number_ios", "1000", "--numjobs", "2"]);
        assert!(out.status.success(), "{device}: {}", text(&out.stderr));
        assert!(text(&out.stdout).contains("IOPS="), "{}", text(&out.stdout));
    }
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("disk.img");
    fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let image = image.display().to_string();
    for args in [vec!["bench", "--device", &image], vec!["serve", "--device", "d=mem:1M", "--unix", "-"]] {
        let out = limited(&args);
        assert_eq!(out.status.code(), Some(1));
        let output = text(&out.stderr);
        let words = ["io_uring is not available: Operation not permitted: ", "seccomp", "docker"];
        assert!(words.iter().all(|word| output.contains(word)), "{output}");
    }
}
