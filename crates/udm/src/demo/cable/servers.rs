//! The servers: nbdkit over one file, on Unix sockets or in its own network namespace; and their
//! faults.

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use std::net::TcpStream;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The fence command: kills the server, and waits until no process is left that could write.
const FENCE: &str = r#"#!/bin/sh
# Kills the server at $UDM_FENCE_SOCKET, or the one in its own network.
pid=$(cat "${UDM_FENCE_SOCKET:-NET}.pid") || exit 1
kill -KILL "$pid" 2>/dev/null
while grep -qs '^State:.[^Z]' "/proc/$pid/status"; do sleep 0.01; done
"#;

/// The network of the server that is cut off, from the range for benchmark tests (RFC 2544), which
/// is not in use here.
const TESTS: &str = "198.18.0.0/15";
const HERE: &str = "198.18.91.1/30";
const THERE: &str = "198.18.91.2/30";
const PORT: u16 = 10809;

/// True if a program can be run.
pub(super) fn is_program_installed(program: &str) -> bool {
    let mut command = Command::new(program);
    command.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok()
}

/// Writes the fence command to a file.
pub(super) fn write_fence_script(folder: &Path) -> std::io::Result<PathBuf> {
    let path = folder.join("fence");
    let mut file = std::fs::File::options().write(true).create_new(true).mode(0o700).open(&path)?;
    let net = folder.join("net").display().to_string();
    std::io::Write::write_all(&mut file, FENCE.replace("NET", &net).as_bytes())?;
    Ok(path)
}

/// A server with a temporary fault.
pub(super) trait FaultableServer {
    fn fail(&mut self) -> Result<()>;
    fn recover(&mut self) -> Result<()>;
}

/// nbdkit on a Unix socket. Dropping it ends the server.
pub(super) struct NbdkitServer {
    socket: PathBuf,
    disk: PathBuf,
    child: Option<Child>,
}

impl NbdkitServer {
    pub fn start(socket: &Path, disk: &Path) -> Result<NbdkitServer> {
        let mut server = NbdkitServer { socket: socket.into(), disk: disk.into(), child: None };
        server.restart()?;
        Ok(server)
    }

    pub fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }

    /// Ends the old process, and starts the server again.
    fn restart(&mut self) -> Result<()> {
        self.end();
        let _ = std::fs::remove_file(&self.socket);
        let mut nbdkit = Command::new("nbdkit");
        nbdkit.arg("-f").arg("-U").arg(&self.socket).arg("file").arg(&self.disk);
        self.child = Some(spawn_nbdkit_with_pidfile(&mut nbdkit, &self.socket)?);
        wait_until_nbdkit_answers(|| UnixStream::connect(&self.socket).is_ok())
    }

    fn end(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let child = self.child.as_ref().context("demo: the server does not run")?;
        Ok(kill_process(Pid::from_child(child), signal)?)
    }

    /// The fault: stopped (SIGSTOP), then started again, because the old process may have been
    /// fenced.
    pub fn stop_and_restart(&mut self) -> impl FaultableServer {
        FaultBySignal { server: self, signal: Signal::STOP, resumes: false }
    }

    /// The fault: stopped (SIGSTOP), then continued.
    pub fn pause(&mut self) -> impl FaultableServer {
        FaultBySignal { server: self, signal: Signal::STOP, resumes: true }
    }

    /// The fault: killed, then started again.
    pub fn kill(&mut self) -> impl FaultableServer {
        FaultBySignal { server: self, signal: Signal::KILL, resumes: false }
    }
}

impl Drop for NbdkitServer {
    fn drop(&mut self) {
        self.end();
    }
}

/// A fault by a signal.
struct FaultBySignal<'a> {
    server: &'a mut NbdkitServer,
    signal: Signal,
    resumes: bool,
}

impl FaultableServer for FaultBySignal<'_> {
    fn fail(&mut self) -> Result<()> {
        self.server.signal(self.signal)
    }

    fn recover(&mut self) -> Result<()> {
        if self.resumes { self.server.signal(Signal::CONT) } else { self.server.restart() }
    }
}

/// Waits until a server is up.
fn wait_until_nbdkit_answers(is_there: impl Fn() -> bool) -> Result<()> {
    for _ in 0..500 {
        if is_there() {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    bail!("demo: nbdkit does not answer")
}

/// Starts a server, and writes its process ID to a file for the fence command.
fn spawn_nbdkit_with_pidfile(command: &mut Command, name: &Path) -> Result<Child> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let child = command.spawn().context("demo: nbdkit")?;
    std::fs::write(name.with_extension("pid"), child.id().to_string()).context("demo: process ID")?;
    Ok(child)
}

/// nbdkit in its own network namespace, which ends with it.
pub(super) struct NetnsNbdkitServer(Child);

impl NetnsNbdkitServer {
    /// The reason why this server cannot run here, if there is one.
    pub fn missing() -> Option<&'static str> {
        if !rustix::process::geteuid().is_root() {
            return Some("that needs root");
        }
        let ready =
            is_program_installed("ip") && is_program_installed("unshare") && is_program_installed("nsenter");
        if !ready {
            return Some("that needs ip, unshare and nsenter");
        }
        let routes = Command::new("ip").args(["route", "show", "table", "all", "root", TESTS]).output();
        let free = routes.is_ok_and(|out| out.status.success() && out.stdout.is_empty());
        (!free).then_some("its addresses are in use (198.18.0.0/15)")
    }

    pub fn start(name: &Path, disk: &Path) -> Result<NetnsNbdkitServer> {
        let mut nbdkit = Command::new("unshare");
        nbdkit.args(["--net", "nbdkit", "-f", "-p", "10809", "file"]).arg(disk);
        let net = NetnsNbdkitServer(spawn_nbdkit_with_pidfile(&mut nbdkit, name)?);
        let pid = net.0.id().to_string();
        let of = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/net")).ok();
        // The namespace is new only once `unshare` has created it.
        wait_until_nbdkit_answers(|| of(&pid).is_some_and(|theirs| Some(theirs) != of("self")))?;
        let link = host_veth_name(net.0.id());
        run_ip(&["link", "add", &link, "type", "veth", "peer", "name", "eth0", "netns", &pid])?;
        run_ip(&["addr", "add", HERE, "dev", &link])?;
        run_ip(&["link", "set", &link, "up"])?;
        net.inside(&["addr", "add", THERE, "dev", "eth0"])?;
        net.inside(&["link", "set", "eth0", "up"])?;
        let address = (net.host(), PORT);
        wait_until_nbdkit_answers(|| TcpStream::connect(address).is_ok())?;
        Ok(net)
    }

    fn host(&self) -> &'static str {
        THERE.split('/').next().unwrap_or_default()
    }

    pub fn uri(&self) -> String {
        format!("nbd://{}:{PORT}/", self.host())
    }

    fn inside(&self, words: &[&str]) -> Result<()> {
        let mut command = Command::new("nsenter");
        command.args(["--net", "--target", &self.0.id().to_string(), "ip"]).args(words);
        run_command_or_fail(&mut command)
    }
}

impl FaultableServer for NetnsNbdkitServer {
    /// Drops all packets without notice to either side.
    fn fail(&mut self) -> Result<()> {
        self.inside(&["link", "set", "eth0", "down"])
    }

    /// The server stays lost, because it was fenced.
    fn recover(&mut self) -> Result<()> {
        Ok(())
    }
}

impl Drop for NetnsNbdkitServer {
    fn drop(&mut self) {
        let _ = run_ip(&["link", "del", &host_veth_name(self.0.id())]);
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The name of our end of the link to a server.
fn host_veth_name(pid: u32) -> String {
    format!("udm{pid}")
}

fn run_ip(words: &[&str]) -> Result<()> {
    run_command_or_fail(Command::new("ip").args(words))
}

fn run_command_or_fail(command: &mut Command) -> Result<()> {
    let out = command.stdin(Stdio::null()).output().context("demo: ip")?;
    if !out.status.success() {
        bail!("demo: ip: {}", String::from_utf8_lossy(&out.stderr).trim());
    }
    Ok(())
}
