//! TLS of a server, and the thread that performs its handshakes.
//!
//! A handshake costs a signature, which takes a core as long as a thousand requests, and a stranger
//! can ask for it. So a thread performs the steps of all handshakes, one after the other: a
//! connection gives it the session with what has arrived, and gets the session back as a message.
//! The queue has room for all connections that may be in a handshake.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use udm_core::{Buf, CoreId, DeviceId};
use udm_runtime::ProcessCores;
use udm_tls::{TlsServerConfig, TlsSession, TlsSessionError};

/// TLS of a server.
#[derive(Clone, Debug)]
pub struct NbdServerTls {
    /// The certificates.
    pub config: Arc<TlsServerConfig>,
    /// A client without TLS gets nothing but the answer that it is required.
    pub is_required: bool,
}

/// TLS of a server with the thread for handshakes.
#[derive(Clone)]
pub(super) struct NbdServerTlsHandle {
    pub(super) tls: NbdServerTls,
    steps: SyncSender<TlsHandshakeStep>,
}

/// A step of a handshake: the session reads what has arrived.
pub(super) struct TlsHandshakeStep {
    pub(super) session: TlsSession,
    /// Received bytes, and how many of them the session has read.
    pub(super) received: (Buf, usize),
    /// The connection.
    pub(super) fd: Arc<OwnedFd>,
    pub(super) core_set: Arc<ProcessCores>,
    /// The core of the connection, and the topic to which it has subscribed.
    pub(super) core: CoreId,
    pub(super) topic: DeviceId,
}

/// The session after a step, what it has not read, and whether the handshake goes on.
pub(super) type TlsHandshakeStepResult = (TlsSession, (Buf, usize), Result<(), TlsSessionError>);

/// Message with the result of a step; without one, the client has gone.
pub(super) struct TlsHandshakeStepDone(Mutex<Option<TlsHandshakeStepResult>>);

impl TlsHandshakeStepDone {
    /// Takes the result. The first caller gets it.
    pub(super) fn take(&self) -> Option<TlsHandshakeStepResult> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl NbdServerTlsHandle {
    /// Starts the thread, for at most `handshakes_max` handshakes at a time.
    pub(super) fn start(tls: NbdServerTls, handshakes_max: usize) -> io::Result<NbdServerTlsHandle> {
        let (steps, received) = sync_channel(handshakes_max);
        let thread = std::thread::Builder::new().name("udm-nbd-tls".to_owned());
        thread.spawn(move || run_handshake_steps(&received))?;
        Ok(NbdServerTlsHandle { tls, steps })
    }

    /// Gives a step to the thread. Returns false if there is no room for it.
    pub(super) fn run(&self, step: TlsHandshakeStep) -> bool {
        self.steps.try_send(step).is_ok()
    }
}

/// Performs steps until the server and its connections have ended.
fn run_handshake_steps(steps: &Receiver<TlsHandshakeStep>) {
    while let Ok(step) = steps.recv() {
        let TlsHandshakeStep { mut session, received: (buf, at), fd, core_set, core, topic } = step;
        // Whoever only asks for signatures and leaves gets none.
        let result = (!has_client_gone(&fd)).then(|| {
            let mut input = &buf[at..];
            let result = session.receive(&mut input);
            let at = buf.len() - input.len();
            (session, (buf, at), result)
        });
        let done = TlsHandshakeStepDone(Mutex::new(result));
        core_set.send_message(core, topic, Box::new(done));
    }
}

/// True if the client sends nothing more.
fn has_client_gone(fd: &OwnedFd) -> bool {
    let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    let mut fds = [PollFd::new(fd, PollFlags::RDHUP)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok() && fds[0].revents().intersects(gone)
}
