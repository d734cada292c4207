//! `udm serve FILE`: the devices of the file are served, and changes of the file are applied.

#[path = "../support/mod.rs"]
mod support;

mod halfway;
mod late;
mod restart;

use rustix::process::{Pid, Signal};
use std::fs;
use std::path::PathBuf;
use support::maps::DirtyMapClient;
use support::nbd::Client;
use support::{Server, signal, text, udm, until};
use tempfile::TempDir;
use udm_wire::nbd::{
    ExportFlags, ExportInfoItem, ExportInfoRequest, INFO_DESCRIPTION, NbdCommand as Nbd, NbdOption,
    OptionReply,
};

/// A folder with a configuration file.
struct ConfigDir(TempDir);

impl ConfigDir {
    fn new(conf: &str) -> ConfigDir {
        let files = ConfigDir(tempfile::tempdir().unwrap());
        fs::create_dir(files.0.path().join("conf.d")).unwrap();
        files.write("udm.toml", conf);
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    /// Serves the file, with the sockets and the core of all tests.
    fn serve(&self) -> Server {
        let mut command = udm(&["serve"]);
        command.arg(self.path("udm.toml"));
        Server::start_by(command, &[], &[])
    }

    /// Output and status of `udm serve` with the file and more options.
    fn output(&self, options: &[&str]) -> (Option<i32>, String) {
        let out = udm(&["serve"]).arg(self.path("udm.toml")).args(options).output().unwrap();
        let output = text(&out.stdout) + &text(&out.stderr);
        (out.status.code(), output.replace(&self.0.path().display().to_string(), "F"))
    }
}

fn names(server: &Server) -> Vec<String> {
    let mut names: Vec<String> = server
        .says(&["ls"])
        .lines()
        .map(|line| line.split('\t').next().unwrap().to_owned())
        .filter(|name| name != "No devices found")
        .collect();
    names.sort();
    names
}

#[test]
fn what_the_file_says_is_served_and_the_command_line_wins() {
    let files = ConfigDir::new(
        "[serve]\nunix = \"nbd.sock\"\nsocket = \"control.sock\"\nstate = \"state\"\ncores = \"0\"\ncheck-paths = \"off\"\n\
         [devices.top]\ntable = \"0 16 linear @low 0\"\nuuid = \"u-1\"\n",
    );
    files.write("disk", &"x".repeat(8192));
    files.write("low.table", "# all of it\n0 16 linear disk 0\n");
    files.write("conf.d/low.toml", "[devices.low]\ntable-file = \"low.table\"\nreadonly = true\n");
    assert_eq!(files.output(&["--check"]), (Some(0), "F/udm.toml: good, 2 devices\n".into()));

    let mut child =
        udm(&["serve"]).arg(files.path("udm.toml")).stderr(std::process::Stdio::null()).spawn().unwrap();
    let (control, nbd) = (files.path("control.sock"), files.path("nbd.sock"));
    until("a server", || control.exists().then_some(()));
    until("its exports", || nbd.exists().then_some(()));
    let out = udm(&["info", "top"]).env("UDM_SOCKET", &control).output().unwrap();
    assert!(text(&out.stdout).contains("UUID: u-1"), "{out:?}");
    let flags = |name: &str| Client::connect(&nbd, name).flags.contains(ExportFlags::READ_ONLY);
    assert!(flags("low") && !flags("top"));
    assert_eq!(Client::connect(&nbd, "low").write(0), 1, "EPERM");
    let mut client = Client::connect(&nbd, "top");
    assert_eq!((client.write(1), client.one(Nbd::Flush, 0, 0)), (0, 0));
    drop(client);
    assert_eq!(fs::read(files.path("disk")).unwrap()[512], 1);
    signal(Pid::from_child(&child), Signal::TERM);
    assert_eq!(until("its end", || child.try_wait().unwrap()).code(), Some(0));
    assert!(!control.exists() && !nbd.exists());

    // The same file, with options of the command line taking precedence.
    let server = files.serve();
    assert!(server.nbd.exists() && !nbd.exists());
    assert_eq!(names(&server), ["low", "top"]);
}

#[test]
fn a_broken_file_is_shown_and_serves_nothing() {
    let files = ConfigDir::new("[serve]\nunix = \"s\"\nprot = 1\n");
    let output = "udm: F/udm.toml:3:1: serve: prot: unknown: see docs/config.md, or udm serve --help\nprot = 1\n^^^^\n";
    assert_eq!(files.output(&[]), (Some(1), output.into()));
    assert_eq!(files.output(&["--check"]), (Some(1), output.into()));
    files.write("udm.toml", "[devices.a]\ntable = \"0 8 error\"\n");
    let (status, output) = files.output(&["--socket", "s"]);
    let why = "udm: serve: nowhere to serve: expected unix, port, vhost-user, ublk or nvme, in the file or on the command line\n";
    assert_eq!((status, output.as_str()), (Some(1), why));
    let (status, output) = files.output(&["--unix", "s", "--device", "a=mem:1M"]);
    assert_eq!((status, output.as_str()), (Some(1), "udm: a: --device and the file have it both\n"));
    files.write("udm.toml", "[serve]\nipaddr = \"::1\"\nunix = \"s\"\n");
    let (status, output) = files.output(&[]);
    assert!(
        status == Some(1) && output.starts_with("udm: F/udm.toml: serve: ") && output.contains("--port"),
        "{output}"
    );
    let alone = udm(&["serve", "--check", "--unix", "s"]).output().unwrap();
    assert_eq!(alone.status.code(), Some(2));
}

const FIRST: &str = "
[devices.low]
table = \"0 2048 linear mem:1M 0\"
[devices.top]
table = \"0 2048 linear @low 0\"
[devices.old]
table = \"0 2048 linear mem:1M 0\"
";

const SECOND: &str = "
[devices.top]
table = \"0 1024 linear @new 0\"
[devices.new]
table = \"0 2048 linear mem:1M 0\"
[devices.low]
table = \"\"\"
# The same.
0  2048  linear  mem:1M  0
\"\"\"
";

/// The description of `export` in the list of exports, and in its informations.
fn descriptions(server: &Server, export: &str) -> [Option<String>; 2] {
    let mut client = DirtyMapClient::dial(&server.nbd);
    let infos = vec![INFO_DESCRIPTION];
    client.send(&NbdOption::List);
    client.send(&NbdOption::Info(ExportInfoRequest { name: export.into(), infos }));
    let (mut listed, mut said, mut acks) = (None, None, 0);
    while acks < 2 {
        match client.answer() {
            OptionReply::Ack => acks += 1,
            OptionReply::Server { name, description } if name == export => listed = Some(description),
            OptionReply::Server { .. } => {}
            OptionReply::Info(ExportInfoItem::Description(text)) => said = Some(text),
            OptionReply::Info(_) => {}
            other => panic!("{other:?}"),
        }
    }
    [listed, said]
}

#[test]
fn descriptions_reach_clients() {
    let device = |description: &str| format!("[devices.a]\ntable = \"0 8 zero\"\n{description}\n");
    let files = ConfigDir::new(&device("description = \"database of tenant 7\""));
    let mut server = files.serve();
    let is = |text: &str| [Some(text.to_owned()), Some(text.to_owned())];
    assert_eq!(descriptions(&server, "a"), is("database of tenant 7"));
    files.write("udm.toml", &device("description = \"Ännchens\""));
    assert_eq!(server.says(&["reconfigure"]), "~ a: description\n= 0 unchanged\n");
    assert_eq!(descriptions(&server, "a"), is("Ännchens"));
    server.upgrade(&[]);
    assert_eq!(descriptions(&server, "a"), is("Ännchens"));
    assert_eq!(server.says(&["reconfigure"]), "= 1 unchanged\n");
    files.write("udm.toml", &device(""));
    assert_eq!(server.says(&["reconfigure"]), "~ a: description\n= 0 unchanged\n");
    assert_eq!(descriptions(&server, "a"), [Some(String::new()), None]);
    files.write("udm.toml", &device(&format!("description = \"{}\"", "d".repeat(4097))));
    let output = server.refuses(&["reconfigure"]);
    assert!(output.contains("description: expected at most 4096 bytes without control"), "{output}");
}

#[test]
fn the_difference_is_shown_and_applied() {
    let files = ConfigDir::new(FIRST);
    let server = files.serve();
    server.says(&["create", "mine", "--table", "0 8 error"]);
    assert_eq!(server.says(&["reconfigure"]), "= 3 unchanged\n");
    files.write("udm.toml", SECOND);
    let difference = "- old\n+ new\n~ top: table\n= 1 unchanged\n";
    assert_eq!(server.says(&["reconfigure", "--dry-run"]), difference);
    assert_eq!(names(&server), ["low", "mine", "old", "top"]);
    assert_eq!(server.says(&["reconfigure"]), difference);
    assert_eq!(names(&server), ["low", "mine", "new", "top"]);
    assert_eq!(server.says(&["deps", "-o", "devname", "top"]), "1 dependencies\t: (new)\n");
    assert_eq!(server.says(&["reconfigure"]), "= 3 unchanged\n");
    // A device that a verb removed is created again; a device that a verb created is left alone.
    server.says(&["remove", "low"]);
    let json = server.says(&["reconfigure", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["changes"], serde_json::json!([{"name": "low", "change": "create", "error": null}]));
    assert_eq!(json["unchanged"], 2);
    files.write("udm.toml", "");
    assert_eq!(server.says(&["reconfigure"]), "- low\n- top\n- new\n= 0 unchanged\n");
    assert_eq!(names(&server), ["mine"]);
    // A device that a verb created belongs to the file once the file names it.
    files.write("udm.toml", "[serve]\nport = 1\n[devices.mine]\ntable = \"0 16 error\"");
    let output = server.says(&["reconfigure"]);
    assert_eq!(
        output,
        "~ mine: taken over, table\n= 0 unchanged\n! serve: port: changed, takes effect after a restart\n"
    );
    assert_eq!(server.says(&["table", "mine"]), "0 16 error \n");
    files.write("udm.toml", "");
    assert_eq!(server.says(&["reconfigure"]), "- mine\n= 0 unchanged\n");
}

#[test]
fn a_broken_file_changes_nothing() {
    let files = ConfigDir::new(FIRST);
    let server = files.serve();
    for broken in ["[devices.low]\ntable = \"0 8 lineal x 0\"", "[devices]\nlow = 1", "devices"] {
        files.write("udm.toml", broken);
        let output = server.refuses(&["reconfigure"]);
        assert!(output.starts_with("udm: reconfigure: ") && output.matches('\n').count() == 1, "{output}");
        assert!(output.contains("udm.toml"), "{output}");
    }
    fs::remove_file(files.path("udm.toml")).unwrap();
    assert!(server.refuses(&["reconfigure"]).contains("udm.toml: No such file or directory"));
    assert_eq!(names(&server), ["low", "old", "top"]);
    files.write("udm.toml", FIRST);
    assert_eq!(server.says(&["reconfigure"]), "= 3 unchanged\n");
    let without = Server::start(&["a=mem:1M"]);
    let why = "udm: reconfigure: the server was started without a file: udm serve FILE reads one\n";
    assert_eq!(without.refuses(&["reconfigure"]), why);
}

/// Standard output and standard error of a reconfigure that fails in part.
fn reconfigure_partial(server: &Server) -> (String, String) {
    let out = server.verb(&["reconfigure"]);
    assert_eq!(out.status.code(), Some(1));
    (text(&out.stdout), text(&out.stderr))
}

#[test]
fn what_can_not_be_done_is_said_and_the_rest_is_done() {
    let files = ConfigDir::new(FIRST);
    let server = files.serve();
    let client = Client::connect(&server.nbd, "old");
    let both = "[devices.low]\ntable = \"0 2048 linear mem:1M 0\"\nuuid = \"u\"\n\
                [devices.top]\ntable = \"0 2048 linear nothing 0\"\n[devices.new]\ntable = \"0 8 error\"\n";
    files.write("udm.toml", both);
    let (done, failed) = reconfigure_partial(&server);
    assert_eq!(done, "+ new\n= 0 unchanged\n");
    let failed: Vec<&str> = failed.lines().collect();
    assert_eq!(failed[0], "udm: low: uuid: a device keeps its uuid: remove it first");
    assert!(failed[1].starts_with("udm: old: ") && failed[1].contains("open"), "{}", failed[1]);
    assert!(failed[2].starts_with("udm: top: ") && failed[2].contains("nothing"), "{}", failed[2]);
    assert_eq!(failed[3..], ["udm: reconfigure: 3 of 4 changes could not be made"]);
    // No trace of the refused table is left, and the device keeps working.
    assert_eq!(server.says(&["table", "--inactive", "top"]), "\n");
    assert_eq!(Client::connect(&server.nbd, "top").write(0), 0);
    assert_eq!(names(&server), ["low", "new", "old", "top"]);
    // The next attempt.
    drop(client);
    files.write("udm.toml", &both.replace("nothing", "mem:1M").replace("uuid = \"u\"\n", ""));
    until("the end of the client", || {
        server.says(&["info", "old"]).contains("Open count:        0").then_some(())
    });
    assert_eq!(server.says(&["reconfigure"]), "- old\n~ top: table\n= 2 unchanged\n");
    // Devices with a change of another user in progress are left alone.
    files.write("udm.toml", &FIRST.replace("@low", "mem:1M").replace("2048", "1024"));
    server.says(&["suspend", "top"]);
    server.says(&["load", "low", "--table", "0 2048 error"]);
    let (done, failed) = reconfigure_partial(&server);
    assert_eq!(done, "- new\n+ old\n= 0 unchanged\n");
    assert!(failed.contains("udm: top: ") && failed.contains("it is suspended: resume it first"), "{failed}");
    assert!(failed.contains("a table waits in its inactive slot: resume or clear it first"), "{failed}");
    server.says(&["resume", "top", "low"]);
    assert_eq!(server.says(&["reconfigure"]), "~ low: table\n~ top: table\n= 1 unchanged\n");
}

#[test]
fn what_verbs_have_changed_stays_until_the_file_changes() {
    let files = ConfigDir::new("[devices.a]\ntable = \"0 8 error\"\n[devices.b]\ntable = \"0 8 error\"");
    let server = files.serve();
    server.says(&["load", "a", "--table", "0 16 error"]);
    server.says(&["resume", "a"]);
    server.says(&["rename", "b", "c"]);
    let output = server.says(&["reconfigure"]);
    let note = "! a: a verb has changed its table, which is left so\n! b: it has been renamed to c, and is left so\n";
    assert_eq!(output, format!("= 2 unchanged\n{note}"));
    assert_eq!(server.says(&["table", "a"]), "0 16 error \n");
    files.write("udm.toml", "[devices.a]\ntable = \"0 24 error\"\n[devices.c]\ntable = \"0 8 error\"");
    assert_eq!(server.says(&["reconfigure"]), "~ a: table\n= 1 unchanged\n");
}

#[test]
fn a_hangup_applies_the_file() {
    let files = ConfigDir::new(FIRST);
    let mut server = files.serve();
    files.write("udm.toml", SECOND);
    signal(Pid::from_child(&server.child), Signal::HUP);
    let output =
        until("the file", || server.log().split_once("udm: - old\n").map(|(_, rest)| rest.to_owned()));
    assert_eq!(names(&server), ["low", "new", "top"]);
    assert!(output.starts_with("udm: + new\nudm: ~ top: table\nudm: = 1 unchanged\n"), "{output}");
    files.write("udm.toml", "nonsense");
    signal(Pid::from_child(&server.child), Signal::HUP);
    until("what is wrong", || server.log().contains("udm.toml:1:").then_some(()));
    assert_eq!(names(&server), ["low", "new", "top"]);
    signal(Pid::from_child(&server.child), Signal::TERM);
    assert_eq!(until("its end", || server.child.try_wait().unwrap()).code(), Some(0));
}

#[test]
fn what_can_not_be_made_at_the_start_is_said_and_the_rest_is_served() {
    let files = ConfigDir::new(
        "[devices.a]\ntable = \"0 8 linear missing 0\"\n[devices.b]\ntable = \"0 8 linear @a 0\"",
    );
    files.write("conf.d/c.toml", "[devices.c]\ntable = \"0 8 error\"");
    let server = files.serve();
    assert_eq!(names(&server), ["c"]);
    let log = server.log();
    assert!(log.contains("udm: a: ") && log.contains("missing): No such file or directory"), "{log}");
    assert!(log.contains("udm: b: ") && log.contains("there is no device @a"), "{log}");
    files.write("missing", &"x".repeat(4096));
    assert_eq!(server.says(&["reconfigure"]), "+ a\n+ b\n= 1 unchanged\n");
}
