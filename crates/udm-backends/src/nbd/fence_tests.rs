//! Fences without a server: one run of the command for all lanes, failures, and covered
//! connections.

use super::super::remote_export::RemoteExport;
use super::super::sockets::{FenceDone, NbdSocketAndFenceOps};
use super::*;
use crate::stream::{ServerAddress, SocketOps};
use rustix::fd::OwnedFd;
use rustix::net::SocketAddrAny;
use udm_wire::nbd::ExportFlags;
use udm_wire::nbd::client::NegotiatedExportInfo;
use udm_wire::uri::{NbdAddress, NbdUri};

const COMMAND: &str = "/sbin/off";

/// Commands that run until the test ends them.
#[derive(Clone, Default)]
struct PendingFenceCommands(Arc<Mutex<Vec<FenceDone>>>);

impl SocketOps for PendingFenceCommands {
    fn open(&self, _: &ServerAddress) -> std::io::Result<(OwnedFd, SocketAddrAny)> {
        panic!("nobody connects here")
    }

    fn reset(&self, _: &OwnedFd) {}
}

impl NbdSocketAndFenceOps for PendingFenceCommands {
    fn fence(&self, command: &Path, uri: &NbdUri, then: FenceDone) {
        assert_eq!((command, uri.to_string().as_str()), (Path::new(COMMAND), "nbd+unix:///?socket=s"));
        self.0.lock().unwrap().push(then);
    }
}

impl PendingFenceCommands {
    fn running(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    fn end(&self, result: Result<(), String>) {
        let then = self.0.lock().unwrap().remove(0);
        then(result);
    }
}

fn server() -> (Arc<RemoteExport>, PendingFenceCommands) {
    let commands = PendingFenceCommands::default();
    let blocks = NegotiatedExportInfo::BLOCKS_ASSUMED;
    let flags = ExportFlags::HAS_FLAGS;
    let export = NegotiatedExportInfo { size: 4096, flags, blocks, structured: false, contexts: vec![] };
    let mut uri = NbdUri::new(NbdAddress::Unix("s".into()), "");
    uri.silence.fence = ServerStoppedProof::Exec(COMMAND.into());
    let world = Box::new(commands.clone());
    (Arc::new(RemoteExport::new(uri, vec![], export, world, Default::default())), commands)
}

fn check(server: &Arc<RemoteExport>, runs: u64, now: u64) -> FenceStatus {
    ExportFence::check(server, Path::new(COMMAND), runs, Nanos(now))
}

#[test]
fn one_run_is_for_all_that_were_connected_before() {
    let (server, commands) = server();
    server.fencing.add_held_writes(3);
    let before = server.fencing.runs();
    assert!(server.fencing.is_running() && !server.fencing.covers(before));
    assert_eq!(check(&server, before, 100), FenceStatus::Running);
    let meanwhile = server.fencing.runs();
    assert_eq!(
        check(&server, before, 101),
        FenceStatus::Running,
        "a connection of another lane, from before the run"
    );
    assert_eq!(check(&server, meanwhile, 110), FenceStatus::Running, "connected while it runs");
    assert_eq!(commands.running(), 1);
    commands.end(Ok(()));
    assert_eq!(check(&server, before, 120), FenceStatus::Done);
    assert_eq!(
        (check(&server, meanwhile, 120), commands.running()),
        (FenceStatus::Running, 1),
        "the run does not cover this connection"
    );
    commands.end(Ok(()));
    assert_eq!(check(&server, meanwhile, 130), FenceStatus::Done);
    server.fencing.remove_held_writes(3);
    server.fencing.release(false);
    assert!(!server.fencing.is_running());
}

#[test]
fn a_command_that_fails_is_run_again_later_each_time() {
    let (server, commands) = server();
    server.fencing.add_held_writes(2);
    let fence = server.uri.silence.fence.clone();
    let second = 1_000_000_000;
    let mut now = second;
    for wait in [second / 2, second, 2 * second] {
        assert_eq!((check(&server, 0, now), commands.running()), (FenceStatus::Running, 1));
        commands.end(Err("exit status: 1".into()));
        let again = FenceStatus::Again(Nanos(now + wait));
        assert_eq!((check(&server, 0, now), check(&server, 0, now + wait - 1)), (again, again));
        assert_eq!(commands.running(), 0);
        now += wait;
    }
    let why =
        "2 writes wait until the server answers or is fenced by /sbin/off (failed 3 times: exit status: 1)";
    assert_eq!(server.fencing.stall_reason(&fence).as_deref(), Some(why));
    for _ in 0..40 {
        assert_eq!(check(&server, 0, now), FenceStatus::Running);
        commands.end(Err("x".into()));
        let FenceStatus::Again(next) = check(&server, 0, now) else { panic!("it is run again") };
        assert!(next <= Nanos(now) + BACK_OFF_MAX);
        now = next.0;
    }
    assert_eq!(check(&server, 0, now), FenceStatus::Running);
    commands.end(Ok(()));
    assert_eq!(check(&server, 0, now), FenceStatus::Done);
    server.fencing.remove_held_writes(2);
    assert_eq!(server.fencing.stall_reason(&fence), None);
}

/// Two exports of one server share one run of the command, which fences both.
#[test]
fn exports_of_one_address_share_the_runs_of_a_command() {
    let servers = super::super::remote_export::RemoteExports::default();
    let uri = |export: &str, command: &str| {
        let mut uri = NbdUri::new(NbdAddress::Unix("s".into()), export);
        uri.silence.fence = ServerStoppedProof::Exec(command.into());
        servers.runs(&uri)
    };
    let (one, two) = (uri("a", "/sbin/off"), uri("b", "/sbin/off"));
    assert!(Arc::ptr_eq(&one, &two));
    assert!(!Arc::ptr_eq(&one, &uri("a", "/sbin/other")));
}
