//! The program from the user's view: serving, dmsetup's verbs, errors with carets, exit statuses.

mod support;

use serde_json::Value;
use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;
use support::{Server, UDM, has, needs_no_sandbox, text, udm, until};

/// Runs `udm serve --run` over two small devices.
fn serve_run(command: &str) -> std::process::Output {
    let mut serve = udm(&["serve", "--cores", "0"]);
    serve.args(["--device", "my-disk=0 2048 linear mem:1M 0"]);
    serve.args(["--device", "top=0 1024 linear @my-disk 8\n1024 512 zero"]);
    serve.args(["--run", command]).env("UDM", UDM).output().unwrap()
}

#[test]
fn run_hands_over_where_things_are_and_returns_the_status() {
    if needs_no_sandbox("--run") {
        return;
    }
    let out = serve_run(
        "echo \"$uri $unixsocket $uri_my_disk $uri_top\"; ls -l $unixsocket $UDM_SOCKET | cut -c1-10; exit 7",
    );
    assert_eq!(out.status.code(), Some(7));
    let output = text(&out.stdout);
    let lines: Vec<_> = output.lines().collect();
    let words: Vec<_> = lines[0].split(' ').collect();
    let [uri, socket, disk, top] = words[..] else { panic!("{output}") };
    assert_eq!(uri, disk);
    assert_eq!(uri, format!("nbd+unix:///my-disk?socket={socket}"));
    assert_eq!(top, format!("nbd+unix:///top?socket={socket}"));
    assert_eq!(lines[1..], ["srw-------", "srw-------"]);
    assert!(
        !std::path::Path::new(socket).parent().unwrap().exists(),
        "the private folder goes with the server"
    );
    let ready = text(&out.stderr);
    assert_eq!(ready.lines().count(), 2, "a line an export: {ready}");
    assert!(ready.starts_with("udm: my-disk") && ready.contains(uri), "{ready}");
}

/// With any umask, others cannot replace the server's sockets.
#[test]
fn the_private_folder_is_private() {
    for umask in ["0", "022", "0777"] {
        let line = format!(
            "umask {umask}; exec {UDM} serve --cores 0 --device 'd=0 8 zero' \
             --run 'stat -c \"%a %u\" ${{unixsocket%/*}} ${{UDM_SOCKET%/*}}; id -u'"
        );
        let out = Command::new("sh").args(["-c", &line]).output().unwrap();
        let output = text(&out.stdout);
        let lines: Vec<_> = output.lines().collect();
        let [nbd, control, uid] = lines[..] else { panic!("{umask}: {output}{}", text(&out.stderr)) };
        assert_eq!((nbd, control), (&*format!("700 {uid}"), nbd), "umask {umask}");
    }
}

#[test]
fn verbs_inside_run_reach_the_private_socket() {
    if needs_no_sandbox("--run") {
        return;
    }
    let out = serve_run("$UDM ls && $UDM status && $UDM table && $UDM table top");
    assert!(out.status.success(), "{}", text(&out.stderr));
    let expected = "my-disk\t(254:0)\ntop\t(254:1)\n\
                  my-disk: 0 2048 linear \ntop: 0 1024 linear \ntop: 1024 512 zero \n\
                  my-disk: 0 2048 linear 253:0 0\ntop: 0 1024 linear 254:0 8\ntop: 1024 512 zero \n\
                  0 1024 linear 254:0 8\n1024 512 zero \n";
    assert_eq!(text(&out.stdout), expected);
}

#[test]
fn run_says_128_and_the_signal() {
    if needs_no_sandbox("--run") {
        return;
    }
    assert_eq!(serve_run("kill -TERM $$").status.code(), Some(143));
    assert_eq!(serve_run("kill -KILL $$").status.code(), Some(137));
}

#[test]
fn a_signal_reaches_the_command_and_ends_the_server() {
    if needs_no_sandbox("--run") {
        return;
    }
    let mut serve = udm(&["serve", "--device", "d=0 8 zero", "--run", "exec sleep 1000"]);
    let mut child = serve.stderr(Stdio::piped()).spawn().unwrap();
    // The line on standard error reports readiness.
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stderr.take().unwrap()), &mut line)
        .unwrap();
    Command::new("kill").arg("-TERM").arg(child.id().to_string()).status().unwrap();
    let status = until("the end of the server", || child.try_wait().unwrap());
    assert_eq!(status.code(), Some(143));
}

/// Not only the shell ends: its children would continue without a server.
#[test]
fn a_signal_ends_all_that_the_command_started() {
    if needs_no_sandbox("--run") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let command = "sleep 1000 & setsid sleep 1001 & echo $! > pid; sleep 1002; echo not reached";
    let mut serve = udm(&["serve", "--device", "d=0 8 zero", "--run", command]);
    let mut child = serve.current_dir(folder.path()).stderr(Stdio::null()).spawn().unwrap();
    let below = |pid: u32| {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        let lists = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("children")).ok());
        lists
            .flat_map(|l| l.split_whitespace().map(|p| p.parse().unwrap()).collect::<Vec<u32>>())
            .collect::<Vec<_>>()
    };
    let running = until("the command's processes", || {
        let shell: Vec<u32> = below(child.id()).iter().flat_map(|&supervisor| below(supervisor)).collect();
        let all: Vec<u32> = shell.iter().flat_map(|&pid| below(pid)).collect();
        (all.len() == 3 && folder.path().join("pid").exists()).then_some(all)
    });
    Command::new("kill").arg("-TERM").arg(child.id().to_string()).status().unwrap();
    let status = until("the end of the server", || child.try_wait().unwrap());
    assert_eq!(status.code(), Some(143));
    assert!(!running.iter().any(is_running), "{running:?}");
}

/// True if the process exists and has not ended.
fn is_running(pid: &u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !stat.is_empty() && !stat.contains(") Z ")
}

/// All processes of the command end with a server that is killed, and the server's private folder
/// is removed.
#[test]
fn a_killed_server_takes_its_command_along() {
    if needs_no_sandbox("--run") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let temporary = folder.path().join("tmp");
    fs::create_dir(&temporary).unwrap();
    let command = "sleep 1000 & echo $! > 1; (setsid sleep 1001 & echo $! > 2); test -S $unixsocket && echo $$ > 3; sleep 1002";
    let mut serve = udm(&["serve", "--device", "d=0 8 zero", "--run", command]);
    serve.current_dir(folder.path()).env("TMPDIR", &temporary).stderr(Stdio::null());
    let mut child = serve.spawn().unwrap();
    let running = until("the command's processes", || {
        let read = |n: u32| fs::read_to_string(folder.path().join(n.to_string())).ok()?.trim().parse().ok();
        let pids: Vec<u32> = (1..=3).map_while(read).collect();
        (pids.len() == 3).then_some(pids)
    });
    let is_empty = || fs::read_dir(&temporary).unwrap().next().is_none();
    assert!(!is_empty(), "the private folder");
    child.kill().unwrap();
    child.wait().unwrap();
    until("the end of all", || (!running.iter().any(is_running) && is_empty()).then_some(()));
}

#[test]
fn a_server_raises_its_limit_on_files_and_not_its_commands() {
    let script = format!(
        "ulimit -Sn 200; ulimit -Hn 4000; exec {UDM} serve --device 'd=0 8 zero' --run 'ulimit -n; grep open.files /proc/$PPID/limits'"
    );
    let out = Command::new("sh").args(["-c", &script]).env("UDM", UDM).output().unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    let output = text(&out.stdout);
    let words: Vec<_> = output.split_whitespace().collect();
    assert_eq!((words[0], words[4], words[5]), ("200", "4000", "4000"), "{output}");
}

#[test]
fn a_small_stack_is_enough() {
    let script = format!("ulimit -s 64; exec {UDM} serve --device 'd=0 8 zero' --run '{UDM} ls'");
    let out = Command::new("sh").args(["-c", &script]).output().unwrap();
    assert_eq!(
        (text(&out.stdout).as_str(), out.status.code()),
        ("d\t(254:0)\n", Some(0)),
        "{}",
        text(&out.stderr)
    );
}

#[test]
fn a_control_socket_has_a_path_as_long_as_the_system_takes() {
    if needs_no_sandbox("--run") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for length in [100, 107, 108] {
        let path = folder.path().join("x".repeat(length - folder.path().as_os_str().len() - 1));
        let serve = udm(&["serve", "--device", "d=0 8 zero", "--run", "$UDM ls", "--socket"])
            .arg(&path)
            .env("UDM", UDM)
            .output()
            .unwrap();
        if length <= 107 {
            assert_eq!(text(&serve.stdout), "d\t(254:0)\n", "{length}: {}", text(&serve.stderr));
        } else {
            assert!(text(&serve.stderr).contains("has at most 107 bytes: give a shorter one"));
        }
    }
}

#[test]
fn a_server_cleans_up_behind_itself() {
    if needs_no_sandbox("--run") {
        return;
    }
    let mut server = Server::start(&["d=0 2048 linear mem:1M 0"]);
    assert!(server.nbd.exists());
    let second =
        udm(&["serve", "--device", "d=0 8 zero", "--unix", "-", "--socket"]).arg(&server.socket).output();
    let second = second.unwrap();
    assert_eq!(second.status.code(), Some(1));
    let output = text(&second.stderr);
    assert!(
        output.starts_with("udm: control socket ") && output.contains("another server answers there"),
        "{output}"
    );
    Command::new("kill").arg(server.child.id().to_string()).status().unwrap();
    let status = until("the end of the server", || server.child.try_wait().unwrap());
    assert_eq!(status.code(), Some(0));
    assert!(!server.nbd.exists() && !server.socket.exists());
}

#[test]
fn the_life_of_a_device() {
    let server = Server::start(&[]);
    assert_eq!(server.says(&["ls"]), "No devices found\n");
    assert_eq!(server.says(&["info"]), "No devices found\n");
    server.says(&["create", "d", "--uuid", "TEST-1", "--table", "0 2048 linear mem:1M 0"]);
    let info = "Name:              d\nState:             ACTIVE\nTables present:    LIVE\nOpen count:        0\n\
                Event number:      0\nMajor, minor:      254, 0\nNumber of targets: 1\nUUID: TEST-1\n\n";
    assert_eq!(server.says(&["info", "d"]), info);
    assert_eq!(server.says(&["info", "TEST-1"]), info, "by its uuid");

    server.says(&["load", "d", "--table", "0 1024 linear mem:1M 8\n1024 8 zero"]);
    assert_eq!(server.says(&["table", "d"]), "0 2048 linear 253:0 0\n", "a load changes nothing yet");
    assert_eq!(server.says(&["table", "d", "--inactive"]), "0 1024 linear 253:0 8\n1024 8 zero \n");
    assert!(server.says(&["info", "d"]).contains("LIVE & INACTIVE"));
    server.says(&["suspend", "d"]);
    server.says(&["suspend", "d"]);
    assert!(server.says(&["info", "d"]).contains("SUSPENDED"));
    // The kernel leaves messages to the target.
    assert_eq!(
        server.refuses(&["message", "d", "0", "x"]),
        "udm: d: Target type linear does not support messages: Invalid argument\n"
    );
    server.says(&["resume", "d"]);
    assert_eq!(server.says(&["table", "d"]), "0 1024 linear 253:0 8\n1024 8 zero \n");
    assert_eq!(server.says(&["table", "d", "--target", "zero"]), "1024 8 zero \n");

    server.says(&["reload", "d", "--table", "0 8 error"]);
    server.says(&["clear", "d"]);
    server.says(&["resume", "d"]);
    assert_eq!(server.says(&["status"]), "d: 0 1024 linear \nd: 1024 8 zero \n");

    server.says(&["create", "empty", "--notable"]);
    assert_eq!(server.says(&["table"]), "d: 0 1024 linear 253:0 8\nd: 1024 8 zero \nempty: \n");
    assert!(server.says(&["info", "empty"]).contains("Tables present:    None"));
    server.says(&["create", "top", "--table", "0 8 linear @d 0"]);
    let refused = server.refuses(&["remove", "d"]);
    assert_eq!(refused, "udm: d: it is open 1 times: Device or resource busy\n");
    assert_eq!(
        server.refuses(&["create", "d", "--notable"]),
        "udm: d: a device of that name exists: Device or resource busy\n"
    );
    server.says(&["remove", "top", "empty", "d"]);
    assert_eq!(server.says(&["ls"]), "No devices found\n");
    assert_eq!(
        server.refuses(&["status", "d"]),
        "udm: d: no device of that name: No such device or address\n"
    );
}

#[test]
fn the_same_uri_is_the_same_device_and_keeps_its_number() {
    let server = Server::start(&[]);
    let file = server.folder.path().join("disk.img");
    let image = fs::File::create(&file).unwrap();
    image.set_len(1 << 20).unwrap();
    let link = server.folder.path().join("link.img");
    std::os::unix::fs::symlink(&file, &link).unwrap();
    let (file, link) = (file.display().to_string(), link.display().to_string());
    server.says(&[
        "create",
        "a",
        "--table",
        &format!("0 8 linear {file} 0\n8 8 linear file:{link} 8\n16 8 linear mem:1M 0"),
    ]);
    assert_eq!(server.says(&["table", "a"]), "0 8 linear 253:0 0\n8 8 linear 253:0 8\n16 8 linear 253:1 0\n");
    server.says(&["remove", "a"]);
    // A device below can be named by its number, although no table has it open any more.
    server.says(&["create", "b", "--table", "0 8 linear 253:1 0\n8 8 linear 253:0 0"]);
    assert_eq!(server.says(&["table", "b"]), "0 8 linear 253:1 0\n8 8 linear 253:0 0\n");
    let below: Value = serde_json::from_str(&server.says(&["table", "b", "--json"])).unwrap();
    assert_eq!(below[0]["devices"][0]["uri"], file.as_str());
    assert_eq!(below[0]["devices"][1]["uri"], "mem:1M");
    let output = server.refuses(&["load", "b", "--table", "0 8 linear 253:7 0"]);
    assert!(output.starts_with("udm: b: linear: Device lookup failed (no device has the number 253:7): No such device or address\n"), "{output}");
    let output = server.refuses(&["load", "b", "--table", "0 8 linear @b 0"]);
    assert!(
        output.starts_with("udm: b: linear: Device lookup failed (b is on top of b already)"),
        "{output}"
    );
}

/// A server with another current folder opens the caller's files, for tables from files, standard
/// input and the command line.
#[test]
fn relative_paths_count_from_the_callers_folder() {
    let server = Server::start(&[]);
    let folder = tempfile::tempdir().unwrap();
    let here = folder.path().canonicalize().unwrap();
    fs::File::create(here.join("disk.img")).unwrap().set_len(1 << 20).unwrap();
    fs::write(here.join("table"), "0 8 linear disk.img 0\n8 8 linear file:./disk.img?readonly=on 8\n")
        .unwrap();
    let call = |args: &[&str]| {
        let out = udm(args).env("UDM_SOCKET", &server.socket).current_dir(&here).output().unwrap();
        (out.status.success(), text(&out.stderr))
    };
    assert_eq!(call(&["create", "d", "table"]), (true, String::new()));
    let path = here.join("disk.img").display().to_string();
    let table: Value = serde_json::from_str(&server.says(&["table", "d", "--json"])).unwrap();
    assert_eq!(table[0]["devices"][1]["uri"], path.as_str());
    assert_eq!(table[0]["devices"][0]["uri"], format!("file:{path}?readonly=on"));
    let (_, output) = call(&["load", "d", "--table", "0 8 linear ./none 0"]);
    let none = here.join("none");
    let expected = format!(
        "udm: d: linear: Device lookup failed ({}): No such file or directory\n0 8 linear ./none 0\n           ^^^^^^\n",
        none.display()
    );
    assert_eq!(output, expected, "the mark is under what was written");
    let mp = "0 2048 multipath 0 0 1 1 round-robin 0 1 1 ./disk.img 1";
    assert!(call(&["create", "mp", "--table", mp]).0);
    assert_eq!(call(&["message", "mp", "0", "fail_path", "disk.img"]), (true, String::new()));
    assert!(server.says(&["status", "mp"]).contains(" F 1"));
    // Over HTTP the base folder is known only if the request gives it.
    let create = |folder: Value| {
        let body = serde_json::json!({"name": "h", "table": "0 8 linear disk.img 0", "folder": folder});
        server.http("POST", "/v1/devices", &body.to_string())
    };
    let (status, _, output) = create(Value::Null);
    assert!(
        status == 400 && output.contains("give an absolute path, or the folder that it counts from"),
        "{output}"
    );
    assert_eq!(create("relative".into()).0, 400);
    assert_eq!(create(here.to_str().unwrap().into()).0, 200);
}

#[test]
fn options_stand_anywhere_in_a_message() {
    let server = Server::start(&["d=0 8 dust mem:1M 0 512"]);
    let socket = server.socket.to_str().unwrap();
    for args in [
        &["message", "d", "0", "addbadblock", "1", "--socket", socket][..],
        &["message", "--socket", socket, "d", "0", "removebadblock", "1"],
        &["message", "d", "--socket", socket, "0", "--", "addbadblock", "2"],
    ] {
        let out = udm(args).output().unwrap();
        assert!(out.status.success(), "{args:?}: {}", text(&out.stderr));
    }
    let output = server.refuses(&["message", "d", "0", "--", "--socket", "x"]);
    assert!(output.starts_with("udm: d: ") && output.ends_with("Invalid argument\n"), "{output}");
    // dust accepts messages while it is suspended, as in the kernel; multipath does not.
    server.says(&["suspend", "d"]);
    server.says(&["message", "d", "0", "addbadblock", "3"]);
    server.says(&["resume", "d"]);
}

#[test]
fn messages_reach_the_target() {
    let server = Server::start(&["mp=0 2048 multipath 0 0 1 1 round-robin 0 2 1 mem:1M 1 mem:2M 1"]);
    assert_eq!(
        server.says(&["table", "mp"]),
        "0 2048 multipath 0 0 1 1 round-robin 0 2 1 253:0 1 253:1 1 \n"
    );
    server.says(&["message", "mp", "0", "fail_path", "253:0"]);
    assert_eq!(server.says(&["status", "mp"]), "0 2048 multipath 2 1 0 0 1 1 E 0 2 0 253:0 F 1 253:1 A 0 \n");
    assert!(server.says(&["info", "mp"]).contains("Event number:      1"));
    server.says(&["message", "mp", "0", "reinstate_path", "mem:1M"]);
    let output = server.refuses(&["message", "mp", "0", "fail_path", "mem:3M"]);
    assert!(output.starts_with("udm: mp: ") && output.trim_end().lines().count() == 1, "{output}");
    let output = server.refuses(&["message", "mp", "99999", "fail_path", "253:0"]);
    assert_eq!(output, "udm: mp: Target message sector outside device.: Invalid argument\n");
    // A file that no table uses is no path of this device; a missing file is an error.
    let file = server.folder.path().join("p3");
    fs::File::create(&file).unwrap().set_len(1 << 20).unwrap();
    let output = server.refuses(&["message", "mp", "0", "fail_path", file.to_str().unwrap()]);
    assert!(output.ends_with("(no table uses it): Invalid argument\n"), "{output}");
    fs::remove_file(&file).unwrap();
    let output = server.refuses(&["message", "mp", "0", "fail_path", file.to_str().unwrap()]);
    assert!(output.ends_with(": No such file or directory\n"), "{output}");
    server.says(&["suspend", "mp"]);
    let output = server.refuses(&["message", "mp", "0", "fail_path", "253:0"]);
    assert_eq!(output, "udm: mp: the device is suspended: Device or resource busy\n");
    server.says(&["resume", "mp"]);
}

/// An error is one line with the word at fault. The text is the same from the server and from
/// `serve` itself.
#[test]
fn bad_tables_show_the_word_to_blame() {
    let server = Server::start(&[]);
    let here = std::env::current_dir().unwrap();
    let cases = [
        (
            "0 8 linear mem: 0",
            "linear: Device lookup failed (mem: \"\" is not a size: a number, then K, M, G, T, P or E): Invalid argument",
            "           ^^^^",
        ),
        ("0 8 linear mem:1M", "linear: Invalid argument count: Invalid argument", "                 ^"),
        ("0 8 linear mem:1M x", "linear: Invalid device sector: Invalid argument", "                  ^"),
        ("0 8 zoo", "zoo: unknown target type: Invalid argument", "    ^^^"),
        (
            "0 8 linear ./none 0",
            &format!("linear: Device lookup failed ({}/none): No such file or directory", here.display()),
            "           ^^^^^^",
        ),
        (
            "0 x linear",
            "Invalid format on line 1 of table: LEN \"x\" is not a number of sectors: Invalid argument",
            "  ^",
        ),
        (
            "0 8 multipath 0 0 1 1 round-robin 0 1 1 mem:1M",
            "multipath: not enough path parameters: Invalid argument",
            "                                              ^",
        ),
    ];
    for (table, why, mark) in cases {
        let expected = format!("udm: bad: {why}\n{table}\n{mark}\n");
        assert_eq!(server.refuses(&["create", "bad", "--table", table]), expected);
        assert_eq!(server.says(&["ls"]), "No devices found\n", "nothing is left of it");
        let serve = udm(&["serve", "--unix", "-", "--cores", "0", "--device", &format!("bad={table}")])
            .output()
            .unwrap();
        assert_eq!(serve.status.code(), Some(1));
        assert_eq!(text(&serve.stderr), expected);
    }
    // The second of three lines.
    let output = server.refuses(&["create", "bad", "--table", "# two\n0 8 zero\n8 8 linear x\n"]);
    assert!(output.ends_with("\n8 8 linear x\n            ^\n"), "{output}");
}

#[test]
fn wrong_usage_is_2_and_wrong_names_are_refused() {
    for args in [&["frobnicate"][..], &["serve", "--device", "x"], &["serve", "--cores", "3-1"], &["remove"]]
    {
        assert_eq!(udm(args).output().unwrap().status.code(), Some(2), "{args:?}");
    }
    let server = Server::start(&[]);
    for name in ["a/b", "..", "control", &"x".repeat(128), ""] {
        let output = server.refuses(&["create", "--notable", "--", name]);
        assert!(output.ends_with(": Invalid argument\n") && output.lines().count() == 1, "{name}: {output}");
    }
    let nobody = udm(&["ls", "--socket", "/nonexistent/udm.sock"]).output().unwrap();
    assert_eq!(nobody.status.code(), Some(1));
    assert_eq!(
        text(&nobody.stderr),
        "udm: /nonexistent/udm.sock: can't reach udm serve: No such file or directory (start it, or name its control socket with --socket or $UDM_SOCKET)\n"
    );
}

#[test]
fn tables_come_from_files_and_standard_input() {
    let server = Server::start(&[]);
    let file = server.folder.path().join("table");
    fs::write(&file, "# a table\n0 8 zero\n").unwrap();
    server.says(&["create", "a", file.to_str().unwrap()]);
    assert_eq!(server.says(&["table", "a"]), "0 8 zero \n");
    let mut load = udm(&["load", "a"]);
    let load = load.env("UDM_SOCKET", &server.socket).stdin(fs::File::open(&file).unwrap()).output().unwrap();
    assert!(load.status.success());
    assert_eq!(server.says(&["table", "a", "--inactive"]), "0 8 zero \n");
    fs::write(&file, "0 8 zero\n".repeat(200_000)).unwrap();
    let output = server.refuses(&["load", "a", file.to_str().unwrap()]);
    assert!(output.contains("longer than 1048576 bytes"), "{output}");
}

#[test]
fn exports_follow_the_devices() {
    let server = Server::start(&["a=0 2048 linear mem:1M 0"]);
    server.says(&["create", "b", "--table", "0 8 zero"]);
    let exports: Value = serde_json::from_str(&server.says(&["exports", "--json"])).unwrap();
    let names: Vec<_> =
        exports.as_array().unwrap().iter().map(|e| (e["name"].as_str(), e["size_bytes"].as_u64())).collect();
    assert_eq!(names, [(Some("a"), Some(1 << 20)), (Some("b"), Some(4096))]);
    if has("nbdinfo") {
        let uri = exports[1]["uris"][0].as_str().unwrap();
        let size = Command::new("nbdinfo").args(["--size", uri]).output().unwrap();
        assert_eq!(text(&size.stdout), "4096\n", "{}", text(&size.stderr));
    }
    // The core notices the disconnect of the earlier client with a delay.
    until("the device is free", || server.verb(&["remove", "b"]).status.success().then_some(()));
    assert!(!server.says(&["exports"]).contains("b\t"));
}

#[test]
fn versions_and_targets_need_no_server() {
    let targets = text(&udm(&["targets"]).env("XDG_RUNTIME_DIR", "/nonexistent").output().unwrap().stdout);
    assert!(targets.lines().any(|line| line == "multipath        v1.14.0"), "{targets}");
    let version = text(&udm(&["version"]).env("XDG_RUNTIME_DIR", "/nonexistent").output().unwrap().stdout);
    assert!(
        version.starts_with("Library version:   ") && version.contains("\nDriver version:    4."),
        "{version}"
    );
}

#[test]
fn man_pages_and_completions() {
    let folder = tempfile::tempdir().unwrap();
    for kind in ["man", "completions"] {
        let out = udm(&["generate", kind]).arg(folder.path().join(kind)).output().unwrap();
        assert!(out.status.success(), "{}", text(&out.stderr));
    }
    let page = fs::read_to_string(folder.path().join("man/udm-serve.1")).unwrap();
    assert!(
        page.contains("\\-\\-run") && page.contains(".SH EXAMPLES") || page.contains("Examples"),
        "{page}"
    );
    assert!(folder.path().join("man/udm.1").exists());
    let page = |name: &str| fs::read_to_string(folder.path().join("man").join(name)).unwrap();
    assert!(page("udm.toml.5").contains("\\fBpath\\-deadline\\fR\nSECONDS\n"), "{}", page("udm.toml.5"));
    assert!(page("udm-dmsetup.1").contains("\n.SH \"WHAT DIFFERS\"\n"), "{}", page("udm-dmsetup.1"));
    for name in ["udm.bash", "udm.fish", "_udm"] {
        assert!(fs::metadata(folder.path().join("completions").join(name)).unwrap().len() > 1000, "{name}");
    }
}

/// CPU time of a process, in ticks.
fn ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<_> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

/// CPU time and context switches of an idle server; they are printed, not asserted.
#[test]
#[expect(clippy::print_stdout, reason = "the test only prints figures")]
fn an_idle_server_sleeps() {
    let server = Server::start(&["d=0 2048 multipath 0 0 1 1 round-robin 0 1 1 mem:1M 1"]);
    let pid = server.child.id();
    let switches = || {
        let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        let status = threads.filter_map(|t| fs::read_to_string(t.ok()?.path().join("status")).ok());
        let count = |s: &str| {
            s.lines().find_map(|l| l.strip_prefix("voluntary_ctxt_switches:")?.trim().parse::<u64>().ok())
        };
        status.filter_map(|s| count(&s)).sum::<u64>()
    };
    let (cpu, slept) = (ticks(pid), switches());
    std::thread::sleep(Duration::from_secs(2));
    println!("idle for 2 s: {} ticks of CPU, {} wake-ups", ticks(pid) - cpu, switches() - slept);
}
