//! The command of `fence=exec`: how often it runs, and which connections a run covers.

mod support;

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering::SeqCst;
use std::thread::{available_parallelism, sleep};
use std::time::Duration;
use support::nbd::Client;
use support::servers::{ScriptedServer, request};
use support::{Server, report_skip, until};
use tempfile::TempDir;
use udm_wire::nbd::{EIO, NbdCommand as Ask, SimpleReply};

/// A request for this sector ends its connection without an answer.
const END: u64 = 9;

fn serve_until_end(stream: &mut UnixStream) {
    while let Some(asked) = request(stream).filter(|asked| asked.offset != END * 512) {
        let mut answer = SimpleReply { error: 0, cookie: asked.cookie }.encode().to_vec();
        let len = if asked.command == Ask::Read { asked.len as usize } else { 0 };
        answer.resize(answer.len() + len, 0);
        if stream.write_all(&answer).is_err() {
            return;
        }
    }
}

/// A command that notes its begin, and ends when the test lets it.
struct FenceCommand(TempDir);

impl FenceCommand {
    fn new() -> FenceCommand {
        let command = FenceCommand(TempDir::new().unwrap());
        let folder = command.0.path().display();
        // It ends with its folder, too.
        let script = format!(
            "#!/bin/sh\necho begun >> {folder}/begun\n\
             while [ -d {folder} ] && [ ! -e {folder}/end ]; do sleep 0.01; done\n"
        );
        let (new, path) = (command.0.path().join("new"), command.0.path().join("command"));
        fs::write(&new, script).unwrap();
        fs::set_permissions(&new, fs::Permissions::from_mode(0o700)).unwrap();
        fs::rename(new, path).unwrap();
        command
    }

    /// The number of runs that have begun.
    fn runs(&self) -> usize {
        fs::read_to_string(self.0.path().join("begun")).map_or(0, |text| text.lines().count())
    }

    /// Lets the command end with success, from now on at once.
    fn end(&self) {
        fs::write(self.0.path().join("end"), "").unwrap();
    }

    /// A device over the export `name` of a server that is fenced by the command.
    fn device(&self, name: &str, puppet: &ScriptedServer) -> String {
        let (uri, command) = (puppet.uri(), self.0.path().join("command"));
        let uri = uri.replace("///", &format!("///{name}"));
        format!("{name}=0 2048 linear {uri}&deadline=10s&fence=exec:{} 0", command.display())
    }
}

/// Two exports of one server lose writes at the same time. One run of the command fences both: a
/// second run would end the server that the first has started.
#[test]
fn one_run_fences_all_exports_of_a_server() {
    let (puppet, command) = (ScriptedServer::start(|_, stream| serve_until_end(stream)), FenceCommand::new());
    let devices = ["one", "two"].map(|name| command.device(name, &puppet));
    let server = Server::start_with(&devices.each_ref().map(String::as_str), &["--cores", "0"]);
    let mut clients = ["one", "two"].map(|name| Client::connect(&server.nbd, name));
    // Both have a connection before the first run begins: it does not cover later ones.
    for client in &mut clients {
        assert_eq!(client.write(0), 0);
    }
    for client in &mut clients {
        client.ask(Ask::Write, END * 512, 512);
    }
    let waits = || server.log().matches("1 writes wait until the server answers or is fenced by").count();
    until("writes of both", || (waits() == 2).then_some(()));
    until("a run", || (command.runs() > 0).then_some(()));
    command.end();
    for client in &mut clients {
        assert_eq!(client.error(), EIO);
        until("a connection that works", || (client.write(0) == 0).then_some(()));
    }
    assert_eq!(command.runs(), 1, "{}", server.log());
}

/// A connection is made while the command runs: it leads to the new server, which the run did not
/// end. A write that is lost on it has to be fenced by another run.
#[test]
fn a_run_does_not_cover_a_connection_that_was_made_meanwhile() {
    if available_parallelism().map_or(1, usize::from) < 2 {
        return report_skip("two lanes need two CPUs");
    }
    let (puppet, command) = (ScriptedServer::start(|_, stream| serve_until_end(stream)), FenceCommand::new());
    let server = Server::start_with(&[&command.device("d", &puppet)], &["--cores", "0,1"]);
    // One client for each core, and so one for each lane.
    let [mut early, mut late] = [(); 2].map(|()| Client::connect(&server.nbd, "d"));
    assert_eq!((early.write(0), late.write(0)), (0, 0));
    // The lane of `late` connects again: the server has accepted and does not greet.
    assert_eq!(late.read(END), EIO);
    puppet.is_mute.store(true, SeqCst);
    let before = puppet.connections.load(SeqCst);
    // Longer than the first pause after a lost connection.
    sleep(Duration::from_millis(500));
    late.ask_read(0);
    until("a connection", || (puppet.connections.load(SeqCst) > before).then_some(()));
    // The lane of `early` loses a write.
    early.ask(Ask::Write, END * 512, 512);
    until("a run", || (command.runs() == 1).then_some(()));
    puppet.is_mute.store(false, SeqCst);
    assert_eq!(late.error(), 0, "it has connected while the command runs: {}", server.log());
    command.end();
    assert_eq!(early.error(), EIO);
    late.ask(Ask::Write, END * 512, 512);
    assert_eq!(late.error(), EIO);
    assert_eq!(command.runs(), 2, "{}", server.log());
}
