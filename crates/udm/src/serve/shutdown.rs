//! The shutdown of a server: its time limit, its messages, and the second signal.
//!
//! The first signal starts the shutdown: requests in flight complete, requests that are only queued
//! fail, devices are removed. That is fast unless storage hangs. A separate thread supervises it,
//! because the thread that shuts down may be stuck. After one second it reports the requests that
//! the shutdown waits for. At the time limit it reports what it abandons, and the program ends with
//! status 1. A second signal ends the program at once, with 128 plus the number of the signal.
//!
//! Data is durable before its flush is acknowledged. Data that was only written is in the system's
//! page cache, which outlives this program. So there is nothing to write at the end, and no way to
//! end loses data.

use crate::log;
use rustix::net::sockopt::socket_acceptconn;
use rustix::net::{Shutdown, SocketAddrAny, SocketAddrUnix, getpeername, getsockname, shutdown};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, Signal, getpid, pidfd_getfd, pidfd_open};
use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::signal::unix::{self, SignalKind};
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, sleep_until};
use udm_core::DeviceId;
use udm_runtime::{CoreWorkInFlightReport, ProcessCores};

/// Time until the first report of a shutdown that waits.
const QUIET_MAX: Duration = Duration::from_secs(1);

/// How long cores may take to report their requests.
const REPORT_MAX: Duration = Duration::from_millis(200);

/// The signals for the serving thread, and the link to the thread that supervises the shutdown.
pub(super) struct SignalReceiver {
    queue: mpsc::Receiver<Signal>,
    shared: Arc<SignalThreadState>,
}

#[derive(Default)]
struct SignalThreadState {
    begun: Notify,
    hung_up: Notify,
    plan: Mutex<Option<ShutdownWatchParams>>,
}

/// The data that the supervision needs.
#[derive(Clone)]
struct ShutdownWatchParams {
    limit: Duration,
    core_set: Arc<ProcessCores>,
    names: HashMap<DeviceId, String>,
}

impl SignalReceiver {
    /// Installs the signal handlers, and starts the thread that receives signals. With `reloads`
    /// SIGHUP does not end the server: see [`SignalReceiver::hangups`].
    pub fn start(reloads: bool) -> io::Result<SignalReceiver> {
        // A signal that finds the queue full is the second one: the serving thread is stuck.
        let (tx, queue) = mpsc::channel(1);
        let shared = Arc::new(SignalThreadState::default());
        let (ready, answer) = std::sync::mpsc::sync_channel(1);
        let watched = Arc::clone(&shared);
        std::thread::Builder::new().name("udm-signals".into()).spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let started = runtime.and_then(|runtime| {
                let streams = runtime.block_on(async { SignalStreams::new() })?;
                Ok((runtime, streams))
            });
            match started {
                Ok((runtime, streams)) => {
                    let _ = ready.send(Ok(()));
                    runtime.block_on(watch_signals_and_shutdown(streams, reloads, &tx, &watched));
                }
                Err(error) => drop(ready.send(Err(error))),
            }
        })?;
        answer.recv().unwrap_or_else(|_| Err(io::Error::other("the thread ended")))?;
        Ok(SignalReceiver { queue, shared })
    }

    /// Waits for the next signal.
    pub async fn next(&mut self) -> Signal {
        match self.queue.recv().await {
            Some(signal) => signal,
            // The signal thread has ended, which happens only at the end of the program.
            None => std::future::pending().await,
        }
    }

    /// The stream of SIGHUP signals that ask for a reload.
    pub fn hangups(&self) -> SighupStream {
        SighupStream(Arc::clone(&self.shared))
    }

    /// Starts the supervision of the shutdown with the time limit `limit`. `names` are the names of
    /// the devices.
    pub fn end_within(self, limit: Duration, core_set: &Arc<ProcessCores>, names: HashMap<DeviceId, String>) {
        let plan = ShutdownWatchParams { limit, core_set: Arc::clone(core_set), names };
        *self.shared.plan.lock().unwrap_or_else(PoisonError::into_inner) = Some(plan);
        self.shared.begun.notify_one();
    }
}

/// SIGHUP signals that ask for a reload.
pub(super) struct SighupStream(Arc<SignalThreadState>);

impl SighupStream {
    /// Waits for the next SIGHUP; several that arrived meanwhile count as one.
    pub async fn next(&self) {
        self.0.hung_up.notified().await;
    }
}

/// The system's signal streams.
pub(super) struct SignalStreams {
    interrupt: unix::Signal,
    terminate: unix::Signal,
    hangup: unix::Signal,
}

impl SignalStreams {
    /// Installs the signal handlers.
    pub fn new() -> io::Result<SignalStreams> {
        Ok(SignalStreams {
            interrupt: unix::signal(SignalKind::interrupt())?,
            terminate: unix::signal(SignalKind::terminate())?,
            hangup: unix::signal(SignalKind::hangup())?,
        })
    }

    /// Waits for the next signal.
    pub async fn next(&mut self) -> Signal {
        tokio::select! {
            _ = self.interrupt.recv() => Signal::INT,
            _ = self.terminate.recv() => Signal::TERM,
            _ = self.hangup.recv() => Signal::HUP,
        }
    }
}

async fn watch_signals_and_shutdown(
    mut streams: SignalStreams,
    reloads: bool,
    queue: &mpsc::Sender<Signal>,
    shared: &SignalThreadState,
) {
    loop {
        tokio::select! {
            signal = streams.next() => {
                if reloads && signal == Signal::HUP {
                    shared.hung_up.notify_one();
                } else if queue.try_send(signal).is_err() {
                    exit_by_second_signal(signal);
                }
            }
            () = shared.begun.notified() => break,
        }
    }
    let plan = shared.plan.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let Some(plan) = plan else { return };
    let begin = Instant::now();
    let mut unanswered = QUIET_MAX < plan.limit;
    loop {
        let next = if unanswered { QUIET_MAX } else { plan.limit };
        tokio::select! {
            signal = streams.next() => {
                if !reloads || signal != Signal::HUP {
                    exit_by_second_signal(signal);
                }
            }
            () = sleep_until(begin + next) => {
                let waited_for = plan.text();
                if !unanswered {
                    log::queue_stderr_text(&format!(
                        "udm: stopped waiting after {} s: {waited_for}; flushed data is safe; \
                         the process ends when the kernel has completed its requests\n",
                        plan.limit.as_secs()
                    ));
                    shutdown_connections_and_exit(1);
                }
                unanswered = false;
                log::queue_stderr_text(&format!("udm: waiting for {waited_for} (a second signal, or Ctrl-C, ends at once)\n"));
            }
        }
    }
}

/// Ends the program after a second signal.
fn exit_by_second_signal(signal: Signal) -> ! {
    log::queue_stderr_text("udm: ended at once; flushed data is safe\n");
    shutdown_connections_and_exit(128 + signal.as_raw())
}

/// Ends the program regardless of its other threads. Connections are shut down first: a request
/// that hangs in the kernel keeps the process and its descriptors open even after the exit.
fn shutdown_connections_and_exit(status: i32) -> ! {
    log::flush_log();
    let _ = shutdown_all_connections();
    std::process::exit(status)
}

/// Shuts down all connections of this process.
fn shutdown_all_connections() -> io::Result<()> {
    let this = pidfd_open(getpid(), PidfdFlags::empty())?;
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let Some(number) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // Standard streams may be sockets that other processes share. Listening sockets may be
        // inherited.
        if number <= 2 {
            continue;
        }
        let Ok(socket) = pidfd_getfd(&this, number, PidfdGetfdFlags::empty()) else { continue };
        // An unnamed socket pair belongs to the tokio runtime, which panics if it is shut down.
        let inside = is_unnamed_unix_address(getsockname(&socket).ok())
            && is_unnamed_unix_address(getpeername(&socket).ok().flatten());
        if socket_acceptconn(&socket) == Ok(false) && !inside {
            let _ = shutdown(&socket, Shutdown::Both);
        }
    }
    Ok(())
}

/// True for the address of a Unix socket that was never bound.
fn is_unnamed_unix_address(address: Option<SocketAddrAny>) -> bool {
    let unix = address.and_then(|address| SocketAddrUnix::try_from(address).ok());
    unix.is_some_and(|unix| unix.path().is_none())
}

impl ShutdownWatchParams {
    fn text(&self) -> String {
        describe_in_flight_requests(&self.core_set.in_flight_report(REPORT_MAX), &self.names)
    }
}

/// Describes the requests in flight in words.
fn describe_in_flight_requests(
    under_way: &CoreWorkInFlightReport,
    names: &HashMap<DeviceId, String>,
) -> String {
    let name = |id: &DeviceId| names.get(id).map_or("a device", String::as_str).to_owned();
    let many = |n: usize, noun: &str| format!("{n} {noun}{}", if n == 1 { "" } else { "s" });
    let mut parts: Vec<String> =
        under_way.requests.iter().map(|(id, n)| format!("{} on {}", many(*n, "request"), name(id))).collect();
    parts.extend(under_way.busy.iter().map(|id| format!("internal work of {}", name(id))));
    if parts.is_empty() && under_way.front_ends > 0 {
        parts.push(format!("{} to read the last replies", many(under_way.front_ends, "client")));
    }
    if under_way.unanswered > 0 {
        parts.push(format!("{} stuck in a system call", many(under_way.unanswered, "core")));
    }
    if parts.is_empty() {
        parts.push("devices to close".into());
    }
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_waited_for_is_said_in_words() {
        let (a, b) = (DeviceId::new(), DeviceId::new());
        let names = HashMap::from([(a, "a".to_string()), (b, "b".to_string())]);
        let mut under_way = CoreWorkInFlightReport::default();
        assert_eq!(describe_in_flight_requests(&under_way, &names), "devices to close");
        under_way.front_ends = 2;
        assert_eq!(describe_in_flight_requests(&under_way, &names), "2 clients to read the last replies");
        under_way.requests.extend([(a, 1), (b, 30)]);
        under_way.busy.insert(b);
        under_way.unanswered = 1;
        assert_eq!(
            describe_in_flight_requests(&under_way, &names),
            "1 request on a, 30 requests on b, internal work of b, 1 core stuck in a system call"
        );
    }
}
