//! The servers: nbdkit over one file, on Unix sockets and in a network of its own; and how they are
//! lost.

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use std::net::TcpStream;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The command that fences: it ends the server, and waits until nothing of it is left that could
/// write.
const FENCE: &str = r#"#!/bin/sh
# Ends the server behind $UDM_FENCE_SOCKET, or the one in its own network.
pid=$(cat "${UDM_FENCE_SOCKET:-NET}.pid") || exit 1
kill -KILL "$pid" 2>/dev/null
while grep -qs '^State:.[^Z]' "/proc/$pid/status"; do sleep 0.01; done
"#;

/// The network of a server that is cut off: of the addresses for tests of networks (RFC 2544),
/// where nobody here has any.
const TESTS: &str = "198.18.0.0/15";
const HERE: &str = "198.18.91.1/30";
const THERE: &str = "198.18.91.2/30";
const PORT: u16 = 10809;

/// True when a program can be run.
pub(super) fn has(program: &str) -> bool {
    let mut command = Command::new(program);
    command.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok()
}

/// Writes the command that fences.
pub(super) fn fence(folder: &Path) -> std::io::Result<PathBuf> {
    let path = folder.join("fence");
    let mut file = std::fs::File::options().write(true).create_new(true).mode(0o700).open(&path)?;
    let net = folder.join("net").display().to_string();
    std::io::Write::write_all(&mut file, FENCE.replace("NET", &net).as_bytes())?;
    Ok(path)
}

/// A server that is lost for a while.
pub(super) trait Lost {
    fn lose(&mut self) -> Result<()>;
    fn bring_back(&mut self) -> Result<()>;
}

/// nbdkit on a Unix socket. Dropping it ends it.
pub(super) struct Server {
    socket: PathBuf,
    disk: PathBuf,
    child: Option<Child>,
}

impl Server {
    pub fn start(socket: &Path, disk: &Path) -> Result<Server> {
        let mut server = Server { socket: socket.into(), disk: disk.into(), child: None };
        server.again()?;
        Ok(server)
    }

    pub fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }

    /// Ends what is left of it, and starts it anew.
    fn again(&mut self) -> Result<()> {
        self.end();
        let _ = std::fs::remove_file(&self.socket);
        let mut nbdkit = Command::new("nbdkit");
        nbdkit.arg("-f").arg("-U").arg(&self.socket).arg("file").arg(&self.disk);
        self.child = Some(begin(&mut nbdkit, &self.socket)?);
        answers(|| UnixStream::connect(&self.socket).is_ok())
    }

    fn end(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let child = self.child.as_ref().context("demo: no server")?;
        Ok(kill_process(Pid::from_child(child), signal)?)
    }

    /// It is stopped, and started anew: the old one may have been fenced.
    pub fn stopped(&mut self) -> impl Lost {
        Act { server: self, signal: Signal::STOP, goes_on: false }
    }

    /// It is stopped, and goes on.
    pub fn paused(&mut self) -> impl Lost {
        Act { server: self, signal: Signal::STOP, goes_on: true }
    }

    /// It is killed, and started anew.
    pub fn killed(&mut self) -> impl Lost {
        Act { server: self, signal: Signal::KILL, goes_on: false }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

/// How a server is lost.
struct Act<'a> {
    server: &'a mut Server,
    signal: Signal,
    goes_on: bool,
}

impl Lost for Act<'_> {
    fn lose(&mut self) -> Result<()> {
        self.server.signal(self.signal)
    }

    fn bring_back(&mut self) -> Result<()> {
        if self.goes_on { self.server.signal(Signal::CONT) } else { self.server.again() }
    }
}

/// Waits until a server is there.
fn answers(is_there: impl Fn() -> bool) -> Result<()> {
    for _ in 0..500 {
        if is_there() {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    bail!("demo: nbdkit does not answer")
}

/// Starts a server, and leaves its process ID for the command that fences.
fn begin(command: &mut Command, name: &Path) -> Result<Child> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let child = command.spawn().context("demo: nbdkit")?;
    std::fs::write(name.with_extension("pid"), child.id().to_string()).context("demo: process ID")?;
    Ok(child)
}

/// nbdkit in a network of its own, which is gone with it.
pub(super) struct Net(Child);

impl Net {
    /// Why there can be none here.
    pub fn missing() -> Option<&'static str> {
        if !rustix::process::geteuid().is_root() {
            return Some("that needs root");
        }
        let ready = has("ip") && has("unshare") && has("nsenter");
        if !ready {
            return Some("that needs ip, unshare and nsenter");
        }
        let routes = Command::new("ip").args(["route", "show", "table", "all", "root", TESTS]).output();
        let free = routes.is_ok_and(|out| out.status.success() && out.stdout.is_empty());
        (!free).then_some("its addresses are in use (198.18.0.0/15)")
    }

    pub fn start(name: &Path, disk: &Path) -> Result<Net> {
        let mut nbdkit = Command::new("unshare");
        nbdkit.args(["--net", "nbdkit", "-f", "-p", "10809", "file"]).arg(disk);
        let net = Net(begin(&mut nbdkit, name)?);
        let pid = net.0.id().to_string();
        let of = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/net")).ok();
        // Its network is its own only when the program has begun.
        answers(|| of(&pid).is_some_and(|theirs| Some(theirs) != of("self")))?;
        let link = link_of(net.0.id());
        ip(&["link", "add", &link, "type", "veth", "peer", "name", "eth0", "netns", &pid])?;
        ip(&["addr", "add", HERE, "dev", &link])?;
        ip(&["link", "set", &link, "up"])?;
        net.inside(&["addr", "add", THERE, "dev", "eth0"])?;
        net.inside(&["link", "set", "eth0", "up"])?;
        let address = (net.host(), PORT);
        answers(|| TcpStream::connect(address).is_ok())?;
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
        ends_well(&mut command)
    }
}

impl Lost for Net {
    /// Nothing comes through any more, and nobody is told.
    fn lose(&mut self) -> Result<()> {
        self.inside(&["link", "set", "eth0", "down"])
    }

    /// It stays lost: it was fenced.
    fn bring_back(&mut self) -> Result<()> {
        Ok(())
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        let _ = ip(&["link", "del", &link_of(self.0.id())]);
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Our end of the network of a server.
fn link_of(pid: u32) -> String {
    format!("udm{pid}")
}

fn ip(words: &[&str]) -> Result<()> {
    ends_well(Command::new("ip").args(words))
}

fn ends_well(command: &mut Command) -> Result<()> {
    let out = command.stdin(Stdio::null()).output().context("demo: ip")?;
    if !out.status.success() {
        bail!("demo: ip: {}", String::from_utf8_lossy(&out.stderr).trim());
    }
    Ok(())
}
