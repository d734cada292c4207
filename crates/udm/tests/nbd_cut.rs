//! NBD servers on a machine that is cut off from the network while it has unanswered writes, and
//! returns: over TCP, in a separate network namespace.

mod support;

use rustix::process::{Pid, Signal};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;
use support::nbd::Client;
use support::servers::Nbdkit;
use support::{Server, UDM, has, report_skip, until};
use tempfile::TempDir;
use udm_wire::nbd::{CommandFlags, NbdCommand as Ask};

const BLOCK: u64 = 4096;

/// A network namespace without any route. TCP connections time out in less than a second, and
/// socket buffers hold 64 KiB.
struct TestNetns(Child);

impl TestNetns {
    /// Returns `None` and reports why if it cannot be created.
    fn new() -> Option<TestNetns> {
        if !has("unshare") || !has("nsenter") || !has("nbdkit") {
            return None;
        }
        let script = "cd /proc/sys/net/ipv4 && echo 1 > tcp_retries2 \
            && echo 4096 65536 65536 | tee tcp_rmem > tcp_wmem && ip link set lo up && echo && exec sleep 600";
        let mut holder = Command::new("unshare");
        holder.args(["--net", "sh", "-c", script]).stdin(Stdio::null()).stderr(Stdio::null());
        let mut net = TestNetns(holder.stdout(Stdio::piped()).spawn().unwrap());
        let mut output = [0];
        let ready = std::io::Read::read(net.0.stdout.as_mut().unwrap(), &mut output).unwrap() == 1;
        if !ready {
            report_skip("no network namespace is available here");
        }
        ready.then_some(net)
    }

    /// A command that runs `program` in the namespace.
    fn inside(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{}/ns/net", self.0.id())).arg(program);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command
    }

    fn link(&self, state: &str) {
        assert!(self.inside("ip").args(["link", "set", "lo", state]).status().unwrap().success());
    }
}

impl Drop for TestNetns {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A multipath device over two servers of one file; the first is over TCP and is used while it
/// works.
struct TcpFixture {
    net: TestNetns,
    server: Server,
    tcp: Child,
    _unix: Nbdkit,
    disk: File,
    _folder: TempDir,
}

impl TcpFixture {
    fn new() -> Option<TcpFixture> {
        let net = TestNetns::new()?;
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("disk");
        std::fs::write(&path, vec![0; 16 << 20]).unwrap();
        let disk = File::open(&path).unwrap();
        let unix = Nbdkit::start(folder.path().join("b"), &["file", path.to_str().unwrap()]);
        let tcp = tcp(&net, &path);
        let uri = "nbd://127.0.0.1/?deadline=300ms";
        let groups = format!("round-robin 0 1 1 {uri} 1 round-robin 0 1 1 {} 1", unix.uri());
        let table = format!("m=0 32768 multipath 1 queue_if_no_path 0 2 1 {groups}");
        let mut command = net.inside(UDM);
        command.arg("serve").env_remove("UDM_LOG");
        let server = Server::start_by(command, &[&table], &[]);
        Some(TcpFixture { net, server, tcp, _unix: unix, disk, _folder: folder })
    }

    /// Sends a write that the first server may have received but cannot answer.
    fn cut_off(&self) -> Client {
        let mut client = Client::connect(&self.server.nbd, "m");
        write(&mut client, 1);
        assert_eq!(client.answer().unwrap().1, 0);
        // Waits until the reply is acknowledged; otherwise the server's TCP would time out as well.
        sleep(Duration::from_millis(300));
        self.net.link("down");
        write(&mut client, 2);
        until("a write that waits", || self.waits().then_some(()));
        // Longer than the TCP timeout.
        sleep(Duration::from_secs(2));
        assert!(self.waits() && self.byte() == 1, "{}", self.server.log());
        client
    }

    fn status(&self) -> String {
        self.server.says(&["status", "m", "--json"])
    }

    fn waits(&self) -> bool {
        self.status().contains("1 writes wait until the server answers or closes the connection\"")
    }

    fn byte(&self) -> u8 {
        let mut block = [0; BLOCK as usize];
        self.disk.read_exact_at(&mut block, 5 * BLOCK).unwrap();
        block[0]
    }
}

impl Drop for TcpFixture {
    fn drop(&mut self) {
        let _ = self.tcp.kill();
        let _ = self.tcp.wait();
    }
}

/// Starts nbdkit in `net`; returns once it answers.
fn tcp(net: &TestNetns, disk: &Path) -> Child {
    let mut nbdkit = net.inside("nbdkit");
    let child = nbdkit.args(["-f", "-i", "127.0.0.1", "-p", "10809", "file"]).arg(disk).spawn().unwrap();
    let size = || net.inside("nbdinfo").args(["--size", "nbd://127.0.0.1"]).stderr(Stdio::null()).status();
    until("nbdkit", || size().is_ok_and(|status| status.success()).then_some(()));
    child
}

fn write(client: &mut Client, byte: u8) {
    let data = [byte; BLOCK as usize];
    client.send(CommandFlags::empty(), Ask::Write, 5 * BLOCK, BLOCK, &data).unwrap();
}

/// A TCP timeout proves nothing, so it is disabled. The server has the write when it can be reached
/// again, and answers it.
#[test]
fn a_machine_that_can_be_reached_again() {
    let Some(rig) = TcpFixture::new() else { return };
    let mut client = rig.cut_off();
    rig.net.link("up");
    assert_eq!((client.answer().unwrap().1, rig.byte()), (0, 2));
    until("a line", || rig.server.log().contains("all 1 writes that waited were answered").then_some(()));
}

/// A machine that was restarted resets the connection, and the write is sent to the other path.
#[test]
fn a_machine_that_was_started_anew() {
    let Some(mut rig) = TcpFixture::new() else { return };
    let mut client = rig.cut_off();
    rig.tcp.kill().unwrap();
    rig.tcp.wait().unwrap();
    rig.net.link("up");
    assert_eq!((client.answer().unwrap().1, rig.byte()), (0, 2));
    until("a line", || rig.server.log().contains("waiting writes that fail over: 1").then_some(()));
}

/// A server that does not read is cut off. Then the local TCP gives up the connection in spite of
/// the setting. That does not count as a close, so the writes wait.
#[test]
fn what_the_system_gives_up_is_not_closed() {
    let Some(rig) = TcpFixture::new() else { return };
    const LEN: u64 = 1 << 20;
    let mut client = Client::connect(&rig.server.nbd, "m");
    write(&mut client, 1);
    assert_eq!(client.answer().unwrap().1, 0);
    support::signal(Pid::from_child(&rig.tcp), Signal::STOP);
    for n in 0..4 {
        let data = vec![2; LEN as usize];
        client.send(CommandFlags::empty(), Ask::Write, n * LEN, LEN, &data).unwrap();
    }
    until("a write that waits", || rig.status().contains(" writes wait until").then_some(()));
    rig.net.link("down");
    until("a connection that is lost", || {
        rig.status().contains("1 connections were lost on this side").then_some(())
    });
    assert!(!rig.server.log().contains("fail over"), "{}", rig.server.log());
}
