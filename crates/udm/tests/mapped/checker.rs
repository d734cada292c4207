//! `udm serve --check-paths`: failed paths are reinstated by checks, and a check that hangs delays
//! nobody.

use super::kill;
use crate::support::nbd::Client;
use crate::support::servers::Nbdkit;
use crate::support::{Server, has, text, udm, until};
use rustix::process::Signal;
use std::fs;

/// A server that checks paths every second.
fn server(devices: &[&str]) -> Server {
    Server::start_with(devices, &["--check-paths", "1"])
}

fn states(server: &Server, device: &str) -> Vec<String> {
    let status = server.says(&["status", device]);
    let words: Vec<&str> = status.split_whitespace().collect();
    words.windows(2).filter(|w| w[0].contains(':')).map(|w| w[1].to_owned()).collect()
}

fn come_to(server: &Server, device: &str, want: &[&str]) {
    until("paths in other states", || (states(server, device) == want).then_some(()));
}

#[test]
fn a_path_that_answers_again_is_reinstated_without_a_client() {
    let server = server(&[
        "a=0 2048 linear mem:1M 0",
        "b=0 2048 linear mem:1M 0",
        "m=0 2048 multipath 2 queue_mode bio 0 1 1 round-robin 0 2 1 @a 1 @b 1",
    ]);
    server.says(&["load", "b", "--table", "0 2048 error"]);
    server.says(&["resume", "b"]);
    let mut client = Client::connect(&server.nbd, "m");
    for sector in 0..4 {
        assert_eq!(client.read(sector), 0, "the other path serves it");
    }
    drop(client);
    assert_eq!(states(&server, "m"), ["A", "F"]);
    server.says(&["load", "b", "--table", "0 2048 linear mem:1M 0"]);
    server.says(&["resume", "b"]);
    come_to(&server, "m", &["A", "A"]);
    // A message fails a path that works.
    server.says(&["message", "m", "0", "fail_path @a"]);
    come_to(&server, "m", &["A", "A"]);
    until("what was logged", || {
        let log = server.log();
        let back = |path: &str| {
            log.contains(&format!("multipath: m: Reinstating path {path}): it answers: 2 of 2 paths up"))
        };
        let failed = log.contains("multipath: m: Failing path 254:1 (b): I/O error, Read at sector");
        (failed && back("254:1 (b") && back("254:0 (a")).then_some(())
    });
}

/// A path that an administrator failed is reinstated only by a command, whether it works or had
/// failed before.
#[test]
fn a_path_that_a_command_failed_stays_failed() {
    let server = server(&[
        "a=0 2048 linear mem:1M 0",
        "b=0 2048 linear mem:1M 0",
        "m=0 2048 multipath 2 queue_mode bio 0 1 1 round-robin 0 2 1 @a 1 @b 1",
    ]);
    server.says(&["multipath", "fail", "path", "a"]);
    server.says(&["message", "m", "0", "fail_path @b"]);
    // The other path is checked meanwhile, and is reinstated.
    come_to(&server, "m", &["F", "A"]);
    let paths = "hcil    dev dev_t pri dm_st  chk_st dev_st  held\n\
                 #:#:#:# a   254:0 1   failed undef  running by command\n\
                 #:#:#:# b   254:1 1   active ready  running\n";
    until(paths, || (server.says(&["multipath", "show", "paths"]) == paths).then_some(()));
    for held in ["/paths/0/held", "/maps/0/path_groups/0/paths/0/held"] {
        let list = if held.starts_with("/maps") { "maps" } else { "paths" };
        let json = server.says(&["multipath", "show", list, "json"]);
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(json.pointer(held), Some(&"by command".into()), "{json}");
    }
    let (status, _, body) = server.http("GET", "/v1/devices/m/status", "");
    assert!(status == 200 && body.contains("\"held\":\"by command\""), "{body}");
    // Neither checks nor a suspend and resume reinstate the path.
    server.says(&["suspend", "m"]);
    server.says(&["resume", "m"]);
    server.says(&["message", "m", "0", "fail_path @b"]);
    come_to(&server, "m", &["F", "A"]);
    server.says(&["multipath", "reinstate", "path", "a"]);
    assert_eq!(states(&server, "m"), ["A", "A"]);
    let log = server.log();
    for line in [
        "multipath: m: Failing path 254:0 (a): by command, and no check brings it back: 1 of 2 paths left",
        "multipath: m: Reinstating path 254:0 (a): by command: 2 of 2 paths up",
    ] {
        assert!(log.contains(line), "{log}");
    }
    let refused = |body| server.http("POST", "/v1/devices/m/path", body).2;
    assert!(refused(r#"{"path":"254:0","action":"hide"}"#).contains("hide: neither fail nor reinstate"));
    let output = refused(r#"{"path":"a","action":"fail"}"#);
    assert!(output.contains("error getting device a") && output.contains("or the folder"), "{output}");
    assert!(refused(r#"{"path":"253:9","action":"fail"}"#).contains("no path over device 253:9"));
}

/// A path is named as in a table: relative to the caller's folder, absolute, through a link, as a
/// URI, or by number. A suspended device without the path does not matter.
#[test]
fn a_command_names_a_path_as_a_table_does() {
    let server = server(&["low=0 2048 linear mem:1M 0"]);
    let folder = tempfile::tempdir().unwrap();
    let at = |word: &str| folder.path().join(word).display().to_string();
    for (name, as_well) in [("p0", "p1"), ("q0", "q1")] {
        fs::write(at(name), vec![3; 1 << 20]).unwrap();
        fs::hard_link(at(name), at(as_well)).unwrap();
    }
    std::os::unix::fs::symlink("p0", at("link")).unwrap();
    let here = |args: &[&str]| {
        let mut command = udm(args);
        command.env("UDM_SOCKET", &server.socket).current_dir(folder.path());
        let out = command.output().unwrap();
        (out.status.success(), text(&out.stderr))
    };
    let table = "0 2048 multipath 0 0 1 1 round-robin 0 2 1 p0 1 p1 1";
    assert_eq!(here(&["create", "m", "--table", table]), (true, String::new()));
    let other = "0 2048 multipath 2 queue_mode bio 0 1 1 round-robin 0 3 1 q0 1 q1 1 @low 1";
    assert_eq!(here(&["create", "n", "--table", other]), (true, String::new()));
    server.says(&["suspend", "n"]);
    let uri = format!("file://{}", at("p0"));
    for word in ["p0", "./p0", "link", &at("p0"), &at("link"), "file:p0", &uri, "253:1"] {
        for (action, is) in [("fail", "F"), ("reinstate", "A")] {
            let output = here(&["multipath", action, "path", word]);
            assert_eq!(output, (true, String::new()), "{action} {word}");
            assert_eq!(states(&server, "m"), [is, "A"], "{action} {word}");
        }
    }
    for word in ["../p0", "nosuch", "@nosuch", "253:99", "what:ever"] {
        let output = format!("udm: {word}: no multipath device has this path\n");
        assert_eq!(here(&["multipath", "fail", "path", word]), (false, output));
    }
    let (done, output) = here(&["multipath", "fail", "path", "q0"]);
    assert!(!done && output.contains("the device is suspended"), "{output}");
    server.says(&["resume", "n"]);
    assert!(here(&["multipath", "fail", "path", "@low"]).0);
    assert_eq!(states(&server, "n"), ["A", "A", "F"]);
}

/// A file is truncated and extended again: its paths fail, requests wait, and continue when a check
/// finds the file complete. No message is sent.
#[test]
fn requests_wait_for_a_file_that_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let (disk, same) = (folder.path().join("disk.img"), folder.path().join("same.img"));
    fs::write(&disk, vec![3; 1 << 20]).unwrap();
    fs::hard_link(&disk, &same).unwrap();
    let table = format!(
        "m=0 2048 multipath 1 queue_if_no_path 0 1 1 round-robin 0 2 1 file:{} 1 file:{} 1",
        disk.display(),
        same.display()
    );
    let server = server(&[&table]);
    let mut client = Client::connect(&server.nbd, "m");
    assert_eq!(client.write(2000), 0);
    let file = fs::File::options().write(true).open(&disk).unwrap();
    file.set_len(0).unwrap();
    client.ask_read(2000);
    come_to(&server, "m", &["F", "F"]);
    file.set_len(1 << 20).unwrap();
    assert_eq!(client.reply(), (2000 * 512, 0));
    come_to(&server, "m", &["A", "A"]);
}

/// The column of `show paths` with the reason why a path stays failed, per path.
fn held(server: &Server) -> String {
    server.says(&["multipath", "show", "paths", "raw", "format", "%t %T %W"])
}

/// A path whose file was truncated works at its beginning. It fails where data is missing, and
/// stays failed until the file has its size again.
#[test]
fn a_path_that_was_cut_is_not_reinstated() {
    let folder = tempfile::tempdir().unwrap();
    let [a, b] = ["a.img", "b.img"].map(|name| folder.path().join(name));
    for disk in [&a, &b] {
        fs::write(disk, vec![3; 1 << 20]).unwrap();
    }
    let table = format!("0 2048 multipath 0 0 1 1 round-robin 0 2 1 {} 1 {} 1", a.display(), b.display());
    let server = server(&[&format!("m={table}")]);
    let mut client = Client::connect(&server.nbd, "m");
    let file = fs::File::options().write(true).open(&b).unwrap();
    file.set_len(512 << 10).unwrap();
    for _ in 0..2 {
        assert_eq!(client.read(2000), 0, "the other path serves it");
    }
    let cut = "active ready \nfailed faulty it is shorter than the 1048576 bytes of the table\n";
    until(cut, || (held(&server) == cut).then_some(()));
    until("a line in the log", || {
        server.log().contains("b.img) stays failed: it is shorter than").then_some(())
    });
    assert_eq!(server.log().matches("stays failed").count(), 1, "{}", server.log());
    assert_eq!(states(&server, "m"), ["A", "F"]);
    file.set_len(1 << 20).unwrap();
    come_to(&server, "m", &["A", "A"]);
    assert_eq!(held(&server), "active ready \nactive ready \n");
}

/// A path that keeps failing is held back. The status says so, and the log says so once.
#[test]
fn a_path_that_is_held_back_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let conf = folder.path().join("mp.conf");
    let keys = [
        "polling_interval 1",
        "marginal_path_double_failed_time 60",
        "marginal_path_err_sample_time 120",
        "marginal_path_err_rate_threshold 10",
        "marginal_path_err_recheck_gap_time 50",
    ];
    fs::write(&conf, format!("defaults {{\n{}\n}}\n", keys.join("\n"))).unwrap();
    let devices = [
        "a=0 2048 linear mem:1M 0",
        "b=0 2048 linear mem:1M 0",
        "m=0 2048 multipath 2 queue_mode bio 0 1 1 round-robin 0 2 1 @a 1 @b 1",
    ];
    let server = Server::start_with(&devices, &["--multipath-conf", &conf.display().to_string()]);
    server.says(&["message", "m", "0", "fail_path @b"]);
    come_to(&server, "m", &["A", "A"]);
    server.says(&["message", "m", "0", "fail_path @b"]);
    let why = "failed delayed it failed twice within 60 s, and is watched for 1";
    until(why, || held(&server).contains(why).then_some(()));
    let line = "path 254:1 (b) stays failed: it failed twice within 60 s, and is watched for 120 s";
    until(line, || server.log().contains(line).then_some(()));
    assert_eq!(server.log().matches("stays failed").count(), 1, "{}", server.log());
    server.says(&["message", "m", "0", "reinstate_path @b"]);
    let ready = "active ready \nactive ready \n";
    until(ready, || (held(&server) == ready).then_some(()));
}

/// Another disk replaces the file of a path. The path is reinstated with the file that was opened,
/// and the other disk is never touched.
#[test]
fn a_path_whose_name_leads_elsewhere_comes_back_as_what_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let [a, b, other] = ["a.img", "b.img", "other.img"].map(|name| folder.path().join(name));
    fs::write(&a, vec![3; 1 << 20]).unwrap();
    fs::hard_link(&a, &b).unwrap();
    fs::write(&other, vec![9; 1 << 20]).unwrap();
    let table = format!("0 2048 multipath 0 0 1 1 round-robin 0 2 1 {} 1 {} 1", a.display(), b.display());
    let server = server(&[&format!("m={table}")]);
    let mut client = Client::connect(&server.nbd, "m");
    assert_eq!(client.read(0), 0);
    server.says(&["message", "m", "0", "fail_path 253:1"]);
    fs::rename(&other, &b).unwrap();
    come_to(&server, "m", &["A", "A"]);
    for sector in 0..8 {
        assert_eq!(client.write(sector), 0);
    }
    server.says(&["message", "m", "0", "fail_path 253:0"]);
    assert_eq!(client.write(100), 0, "through the other name");
    assert_ne!(fs::read(&a).unwrap()[100 * 512..101 * 512], [3; 512]);
    assert_eq!(fs::read(&b).unwrap(), vec![9; 1 << 20]);
}

/// A server that returns with another export, of another size or read-only, is not reinstated. It
/// is reinstated when the export is as before.
#[test]
fn a_server_with_another_export_is_not_reinstated() {
    if !has("nbdkit") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let [disk, other] = ["disk", "other"].map(|name| folder.path().join(name));
    fs::write(&disk, vec![3; 1 << 20]).unwrap();
    fs::write(&other, vec![9; 2 << 20]).unwrap();
    let [disk, other] = [disk, other].map(|path| path.display().to_string());
    let socket = folder.path().join("a");
    let mut a = Nbdkit::start(socket.clone(), &["file", &disk]);
    let b = Nbdkit::start(folder.path().join("b"), &["file", &disk]);
    let table = format!("m=0 2048 multipath 0 0 1 1 round-robin 0 2 1 {} 1 {} 1", a.uri(), b.uri());
    let server = server(&[&table]);
    let mut client = Client::connect(&server.nbd, "m");
    let others: [(&[&str], &str); 2] = [
        (&["file", &other], "its size was 1048576 bytes and is 2097152 now"),
        (&["-r", "file", &disk], "it was writable and is read-only now"),
    ];
    for (args, why) in others {
        a.kill();
        for _ in 0..2 {
            assert_eq!(client.read(0), 0, "the other path serves it");
        }
        a = Nbdkit::start(socket.clone(), args);
        let want = format!("failed faulty {why}\nactive ready \n");
        until(&want, || (held(&server) == want).then_some(()));
        let line = format!("stays failed: {why}");
        until(&line, || server.log().contains(&line).then_some(()));
        assert_eq!(server.log().matches(&line).count(), 1, "{}", server.log());
        a.kill();
        a = Nbdkit::start(socket.clone(), &["file", &disk]);
        come_to(&server, "m", &["A", "A"]);
        assert_eq!(held(&server), "active ready \nactive ready \n");
    }
}

#[test]
fn a_check_that_hangs_holds_up_nobody() {
    let mut server = server(&[
        "a=0 2048 linear mem:1M 0",
        "b=0 2048 linear mem:1M 0",
        "m=0 2048 multipath 2 queue_mode bio 0 1 1 round-robin 0 2 1 @a 1 @b 1",
    ]);
    // From here on the disk below does not answer.
    server.says(&["suspend", "b"]);
    server.says(&["message", "m", "0", "fail_path @b"]);
    std::thread::sleep(std::time::Duration::from_millis(2500));
    assert_eq!(states(&server, "m"), ["A", "F"], "the check has begun, and has no answer");
    server.says(&["suspend", "m"]);
    server.says(&["resume", "m"]);
    server.says(&["remove", "m"]);
    assert!(server.refuses(&["remove", "b"]).contains("busy"), "the check is under way there");
    server.says(&["resume", "b"]);
    until("a check that is over", || server.verb(&["remove", "b"]).status.success().then_some(()));
    server.says(&["create", "b", "--table", "0 2048 linear mem:1M 0"]);
    server.says(&[
        "create",
        "m",
        "--table",
        "0 2048 multipath 2 queue_mode bio 0 1 1 round-robin 0 2 1 @a 1 @b 1",
    ]);
    server.says(&["suspend", "b"]);
    server.says(&["message", "m", "0", "fail_path @b"]);
    std::thread::sleep(std::time::Duration::from_millis(2500));
    kill(&server.child, Signal::TERM);
    let status = until("the end", || server.child.try_wait().unwrap());
    assert!(status.success(), "{status}: {}", server.log());
    assert!(!server.log().contains("under way"), "{}", server.log());
}
