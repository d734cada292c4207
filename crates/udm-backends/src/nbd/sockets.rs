//! What lanes want of the world besides their core's ring: the system, or a world that is made up.

use super::remote_export::ServerAddress;
use crate::blocking;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::net::{AddressFamily, SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::io;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;
use udm_wire::uri::{NbdAddress, NbdUri};

/// How long a command may take that fences, in seconds.
const COMMAND_MAX: i64 = 60;

/// How soon the other machine is asked whether it still knows a connection on which nothing comes,
/// and how often. One that was started anew does not, and says so; that proves that what was sent
/// is written no more.
const KEEPALIVE: Duration = Duration::from_secs(15);

/// How long the system waits for the other machine before it gives a connection up, in ms: as long
/// as it can, 24 days. What the system gives up proves nothing; when a path is silent for too long,
/// the lane says. It goes by `tcp_retries2` all the same where the server's window is full.
const USER_TIMEOUT: u32 = i32::MAX as u32;

/// Is told whether a server is fenced, or why not, in one line.
pub type FenceDone = Box<dyn FnOnce(Result<(), String>) + Send>;

/// See the module's documentation. All else that a lane does with a socket it asks of its core's
/// ring.
pub trait SocketFactory: Send + Sync {
    /// A socket for a connection to `address`, set up, and what it is to be connected to.
    ///
    /// # Errors
    /// There is none to be had.
    fn open(&self, address: &ServerAddress) -> io::Result<(OwnedFd, SocketAddrAny)>;

    /// What is sent on `socket` and has not left yet is sent no more when it is closed.
    fn reset(&self, socket: &OwnedFd);

    /// Runs `command`, which is to keep the server of `uri` from delivering anything. Returns at
    /// once; `then` is told how it ended, at any time and on any thread.
    fn fence(&self, command: &Path, uri: &NbdUri, then: FenceDone);
}

/// The system's.
pub(super) struct SystemSockets;

impl SocketFactory for SystemSockets {
    fn open(&self, address: &ServerAddress) -> io::Result<(OwnedFd, SocketAddrAny)> {
        /// Room for a deep queue of 4 KiB writes; the kernel cuts it to what it allows.
        const UNIX_SEND_BUFFER: usize = 4 << 20;
        let open = |family| rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None);
        match address {
            ServerAddress::Unix(path) => {
                let fd = open(AddressFamily::UNIX)?;
                sockopt::set_socket_send_buffer_size(&fd, UNIX_SEND_BUFFER)?;
                Ok((fd, SocketAddrUnix::new(path)?.into()))
            }
            ServerAddress::Tcp(address) => {
                let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
                let fd = open(family)?;
                sockopt::set_tcp_nodelay(&fd, true)?;
                sockopt::set_socket_keepalive(&fd, true)?;
                sockopt::set_tcp_keepidle(&fd, KEEPALIVE)?;
                sockopt::set_tcp_keepintvl(&fd, KEEPALIVE)?;
                sockopt::set_tcp_user_timeout(&fd, USER_TIMEOUT)?;
                Ok((fd, (*address).into()))
            }
        }
    }

    fn reset(&self, socket: &OwnedFd) {
        // It means nothing to a Unix socket: what was sent is with the other end.
        let _ = sockopt::set_socket_linger(socket, Some(Duration::ZERO));
    }

    fn fence(&self, command: &Path, uri: &NbdUri, then: FenceDone) {
        let (mut prepared, name) = (prepare(command, uri), command.display().to_string());
        let no_thread = || Err("there is no thread to run it".into());
        blocking::run("udm-fence", then, no_thread, move || {
            run(&mut prepared).map_err(|why| format!("{name}: {why}"))
        });
    }
}

/// The command, told whom to fence. No shell has a part in it.
fn prepare(command: &Path, uri: &NbdUri) -> Command {
    let mut prepared = Command::new(command);
    prepared.arg(uri.to_string()).env("UDM_FENCE_EXPORT", &uri.export);
    match &uri.address {
        NbdAddress::Unix(path) => prepared.env("UDM_FENCE_SOCKET", path),
        NbdAddress::Tcp { host, port } => {
            prepared.env("UDM_FENCE_HOST", host).env("UDM_FENCE_PORT", port.to_string())
        }
    };
    prepared.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    prepared
}

/// Runs it to its end, or to the end of its time.
fn run(command: &mut Command) -> Result<(), String> {
    let mut child = command.spawn().map_err(|error| error.to_string())?;
    match wait(&mut child).map_err(|error| error.to_string())? {
        Some(status) if status.success() => Ok(()),
        Some(status) => Err(status.to_string()),
        None => Err(format!("not over after {COMMAND_MAX} s, and killed")),
    }
}

/// Its status; `None` for one that had to be killed.
fn wait(child: &mut Child) -> io::Result<Option<ExitStatus>> {
    let process = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
    let limit = Timespec { tv_sec: COMMAND_MAX, tv_nsec: 0 };
    while let Err(error) = poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&limit)) {
        if error != rustix::io::Errno::INTR {
            return Err(error.into());
        }
    }
    if let Some(status) = child.try_wait()? {
        return Ok(Some(status));
    }
    child.kill()?;
    child.wait()?;
    Ok(None)
}
