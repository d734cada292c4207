//! Notifications for systemd: ready, reloading, stopping, and the watchdog.
//!
//! Contract: a notification is a datagram to `$NOTIFY_SOCKET`. Sending never blocks: if the socket
//! is full, the datagram is lost. Without the variable nothing is sent. With `$WATCHDOG_USEC` a
//! keep-alive is sent twice per interval, but only if this thread and each core have replied since
//! the last one. See sd_notify(3).

use anyhow::Result;
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sendto, socket_with};
use rustix::time::{ClockId, clock_gettime};
use std::convert::Infallible;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use udm_core::{AckOnLastDrop, CoreCommandSender, DeviceId, LaneCommand};
use udm_runtime::ProcessCores;

/// The variables of sd_notify(3), sd_watchdog_enabled(3) and sd_listen_fds(3). They are not for
/// child processes.
pub(super) const VARIABLES: [&str; 6] =
    ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"];

/// Sends `state`, lines of `KEY=VALUE`.
pub(super) fn notify_systemd(state: &str) {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET").filter(|path| !path.is_empty()) else { return };
    if let Err(error) = send_sd_notify_datagram(&path, state) {
        tracing::warn!("systemd: {}: {error}", path.display());
    }
}

fn send_sd_notify_datagram(path: &OsStr, state: &str) -> Result<()> {
    let address = match path.as_bytes() {
        [b'@', name @ ..] => SocketAddrUnix::new_abstract_name(name)?,
        _ => SocketAddrUnix::new(path)?,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
    sendto(&socket, state.as_bytes(), SendFlags::NOSIGNAL, &address)?;
    Ok(())
}

/// Reports that the devices are served.
pub(super) fn notify_systemd_ready(devices: usize) {
    let plural = if devices == 1 { "" } else { "s" };
    notify_systemd(&format!("READY=1\nSTATUS=Serving {devices} device{plural}"));
}

/// Reports that the file is being read again; [`notify_systemd_ready`] reports the end.
pub(super) fn notify_systemd_reloading() {
    let now = clock_gettime(ClockId::Monotonic);
    let usec = now.tv_sec as i128 * 1_000_000 + i128::from(now.tv_nsec / 1000);
    notify_systemd(&format!("RELOADING=1\nMONOTONIC_USEC={usec}\nSTATUS=Reading the file again"));
}

/// Reports that the shutdown has begun.
pub(super) fn notify_systemd_stopping() {
    notify_systemd("STOPPING=1\nSTATUS=Ending");
}

/// The watchdog interval; `None` if systemd expects no keep-alive from this process.
fn systemd_watchdog_interval() -> Option<Duration> {
    let number = |name| std::env::var(name).ok()?.parse::<u64>().ok();
    let is_ours = number("WATCHDOG_PID").is_none_or(|pid| pid == u64::from(std::process::id()));
    number("WATCHDOG_USEC").filter(|&usec| is_ours && usec > 0).map(Duration::from_micros)
}

/// Sends keep-alives without end.
pub(super) async fn send_systemd_keepalives(core_set: &Arc<ProcessCores>) -> Infallible {
    match systemd_watchdog_interval() {
        Some(within) => ping_while_cores_respond(&**core_set, within, || notify_systemd("WATCHDOG=1")).await,
        None => std::future::pending().await,
    }
}

/// Calls `alive` twice per interval `within`, as long as all `cores` reply. Waits for a core that
/// does not.
async fn ping_while_cores_respond(
    cores: &dyn CoreCommandSender,
    within: Duration,
    mut alive: impl FnMut(),
) -> Infallible {
    loop {
        let answered = Arc::new(Notify::new());
        let all = Arc::clone(&answered);
        // No lane belongs to this device, so each core drops the token as soon as it reads its
        // inbox.
        let ack = AckOnLastDrop::new(move || all.notify_one());
        cores.broadcast(DeviceId::new(), LaneCommand::Unprepare { generation: 0, ack });
        answered.notified().await;
        alive();
        tokio::time::sleep(within / 2).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use udm_core::{BioTaskFactory, BioTaskHandle, CoreId};

    /// Cores of which one replies `answers` times, and then keeps the messages it receives.
    struct StuckCores {
        answers: AtomicUsize,
        kept: Mutex<Vec<LaneCommand>>,
    }

    impl CoreCommandSender for StuckCores {
        fn broadcast(&self, _: DeviceId, command: LaneCommand) {
            let left = self.answers.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
            if left.is_err() {
                self.kept.lock().unwrap().push(command);
            }
        }
        fn wake_up(&self, _: CoreId, _: DeviceId) {}
        fn start(&self, _: BioTaskFactory) -> BioTaskHandle {
            BioTaskHandle::new(drop)
        }
    }

    #[test]
    fn nobody_is_told_that_a_stuck_core_lives() {
        let cores = StuckCores { answers: AtomicUsize::new(3), kept: Mutex::default() };
        let mut pings = 0;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let stuck = async {
                while cores.kept.lock().unwrap().is_empty() {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                // There was time for another keep-alive.
                tokio::time::sleep(Duration::from_millis(20)).await;
            };
            tokio::select! {
                never = ping_while_cores_respond(&cores, Duration::from_millis(2), || pings += 1) => match never {},
                () = stuck => {}
            }
        });
        assert_eq!(pings, 3);
    }
}
