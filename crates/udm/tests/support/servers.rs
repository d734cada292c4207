//! NBD servers below udm: nbdkit and a scripted server; and fio above it.

use super::{Server, until};
use rustix::process::{Pid, Signal};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use tempfile::TempDir;
use udm_wire::nbd::{
    BlockSizes, ClientHandshakeMessage, ClientHandshakeMessageParser, ExportFlags, ExportInfoItem,
    HandshakeFlags, NbdHeaderStyle, NbdRequestHeader, OPT_GO, REP_ERR_UNSUP, SimpleReply,
    encode_nbd_server_greeting, put_export_info_reply, put_option_ack_reply, put_option_error_reply,
};

/// nbdkit on a Unix socket. Dropping it kills it.
pub struct Nbdkit {
    pub child: Option<Child>,
    pub socket: PathBuf,
    args: Vec<String>,
}

impl Nbdkit {
    pub fn start(socket: PathBuf, args: &[&str]) -> Nbdkit {
        let args = args.iter().map(|&arg| arg.to_owned()).collect();
        let mut nbdkit = Nbdkit { child: None, socket, args };
        nbdkit.again();
        nbdkit
    }

    /// Starts the server again with the same arguments.
    pub fn again(&mut self) {
        let _ = std::fs::remove_file(&self.socket);
        let mut command = Command::new("nbdkit");
        command.arg("-f").arg("-U").arg(&self.socket).args(&self.args);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        self.child = Some(child);
        until("nbdkit that answers", || UnixStream::connect(&self.socket).ok());
    }

    /// Starts a new server while the old one shuts down, which lasts until its clients have
    /// disconnected. Returns the old process.
    pub fn restart(&mut self) -> Child {
        self.signal(Signal::TERM);
        let before = self.child.take().unwrap();
        self.again();
        before
    }

    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    pub fn signal(&self, signal: Signal) {
        super::signal(Pid::from_child(self.child.as_ref().unwrap()), signal);
    }

    pub fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }
}

impl Drop for Nbdkit {
    fn drop(&mut self) {
        self.kill();
    }
}

pub fn fio(server: &Server, device: &str, more: &str) -> Command {
    let mut fio = Command::new("timeout");
    fio.args("-k 5 120 fio --name=t --ioengine=nbd --bs=4k --iodepth=16 --verify=crc32c".split(' '));
    fio.arg(format!("--uri=nbd+unix:///{device}?socket={}", server.nbd.display()));
    fio.args(more.split(' ')).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // fio's state for a later verification is not needed.
    fio.arg("--verify_state_save=0").current_dir(server.folder.path());
    fio
}

/// A server that completes the handshake, and then runs the test's function for each connection.
pub struct ScriptedServer {
    socket: PathBuf,
    _folder: TempDir,
    pub connections: Arc<AtomicUsize>,
    /// Accepted connections get no greeting while this is true.
    pub is_mute: Arc<AtomicBool>,
    pub size: Arc<Mutex<u64>>,
}

pub type ConnectionScript = dyn Fn(usize, &mut UnixStream) + Send + Sync;

impl ScriptedServer {
    pub fn start(act: impl Fn(usize, &mut UnixStream) + Send + Sync + 'static) -> ScriptedServer {
        let folder = TempDir::new().unwrap();
        let socket = folder.path().join("p");
        let listener = UnixListener::bind(&socket).unwrap();
        let (connections, size) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(1 << 20)));
        let (count, size_now): (_, Arc<Mutex<u64>>) = (Arc::clone(&connections), Arc::clone(&size));
        let is_mute = Arc::new(AtomicBool::new(false));
        let waits = Arc::clone(&is_mute);
        let act: Arc<ConnectionScript> = Arc::new(act);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (number, act, size) =
                    (count.fetch_add(1, SeqCst), Arc::clone(&act), *size_now.lock().unwrap());
                let mut stream = stream.unwrap();
                let waits = Arc::clone(&waits);
                std::thread::spawn(move || {
                    while waits.load(SeqCst) {
                        std::thread::sleep(std::time::Duration::from_millis(1));
                    }
                    if handshake(&mut stream, size).is_ok() {
                        act(number, &mut stream);
                    }
                });
            }
        });
        ScriptedServer { socket, _folder: folder, connections, is_mute, size }
    }

    pub fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }
}

pub fn handshake(stream: &mut UnixStream, size: u64) -> std::io::Result<()> {
    stream
        .write_all(&encode_nbd_server_greeting(HandshakeFlags::FIXED_NEWSTYLE | HandshakeFlags::NO_ZEROES))?;
    let mut parser = ClientHandshakeMessageParser::new();
    loop {
        // Reads single bytes, because data after the handshake belongs to the test.
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        let Ok(Some(ClientHandshakeMessage::Option(option))) = parser.next(&mut &byte[..]) else { continue };
        if option.number() != OPT_GO {
            let mut out = Vec::new();
            put_option_error_reply(&mut out, option.number(), REP_ERR_UNSUP, "");
            stream.write_all(&out)?;
            continue;
        }
        let flags = ExportFlags::HAS_FLAGS
            | ExportFlags::CAN_MULTI_CONN
            | ExportFlags::SEND_FLUSH
            | ExportFlags::SEND_WRITE_ZEROES;
        let mut out = Vec::new();
        put_export_info_reply(&mut out, OPT_GO, &ExportInfoItem::Export { size, flags });
        let blocks = BlockSizes { minimum: 1, preferred: 4096, maximum: 1 << 20 };
        put_export_info_reply(&mut out, OPT_GO, &ExportInfoItem::BlockSize(blocks));
        put_option_ack_reply(&mut out, OPT_GO);
        return stream.write_all(&out);
    }
}

pub fn request(stream: &mut UnixStream) -> Option<NbdRequestHeader> {
    let mut header = [0; NbdRequestHeader::SIZE];
    stream.read_exact(&mut header).ok()?;
    let request = NbdRequestHeader::decode(&header).unwrap();
    let mut data = vec![0; request.payload_len(NbdHeaderStyle::Simple) as usize];
    stream.read_exact(&mut data).ok()?;
    Some(request)
}

/// Serves zeroes until the client disconnects.
pub fn serve_zeroes(stream: &mut UnixStream) {
    while let Some(request) = request(stream) {
        let mut out = SimpleReply { error: 0, cookie: request.cookie }.encode().to_vec();
        if request.command == udm_wire::nbd::NbdCommand::Read {
            out.resize(out.len() + request.len as usize, 0);
        }
        if stream.write_all(&out).is_err() {
            return;
        }
    }
}
