//! Log lines and events for path changes: one line per path that fails or returns, whatever the
//! cause, and one if no path is left.
//!
//! ```text
//! multipath: mp: Failing path 253:1 (same.img): I/O error, Write at sector 2048: 1 of 2 paths left
//! multipath: mp: Failing path 253:0 (disk.img): by message: no path left
//! multipath: mp: Failing path 253:0 (disk.img): silent for 2s, 3 requests have to wait for it: no
//! path left multipath: mp: no path left: 32 requests wait multipath: mp: Reinstating path 253:0
//! (disk.img): 1 of 2 paths up, 64 requests that waited go on multipath: mp: Reinstating path 253:1
//! (same.img): it answers: 2 of 2 paths up multipath: mp: path 253:1 (same.img) stays failed: it is
//! shorter than the 1048576 bytes of the table multipath: mp: path 253:1 (same.img) stays failed:
//! it failed twice within 60 s, and is watched for 120 s multipath: mp: back to group 1, which is
//! better
//! ```
//!
//! The thread that made the change writes the line. If several cores see a path fail at once, only
//! one of them writes it. Bios that are queued or failed because no path is left are counted over
//! all cores. Only lanes without a path touch these counters.

use super::checker_status::PathCheckerStatus;
use super::path_maintenance::PathMaintenanceSettings;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;
use udm_core::{Bio, CoreCommandSender, DevNo, Device, Nanos, StackedDevice, Status, UnansweredRequestState};
use udm_dm::target::{ResolvedDevice, TargetHostServices};
use udm_dm::{DeviceEventDetails, EventKind, PathCheckResult};
use udm_wire::multipath_conf::MultipathSettings;

/// The paths' names, the device to notify, and counters of bios without a path.
#[derive(Default)]
pub(super) struct PathEventLogger {
    /// The paths, printed by number and name: `253:1 (same.img)`.
    paths: Box<[LoggedPathName]>,
    notify: OnceLock<Arc<dyn TargetHostServices>>,
    waiting: AtomicUsize,
    failed: AtomicUsize,
    /// The last path has failed, and the line about its requests is not written yet.
    last_path_failed: AtomicBool,
    /// The group last reported as in use, counted from 1; 0 for none.
    group: AtomicUsize,
}

/// A path. It does not keep the path's device open.
struct LoggedPathName {
    number: DevNo,
    /// The name in the table.
    name: String,
    device: Weak<dyn Device>,
}

impl fmt::Display for LoggedPathName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = self.device.upgrade();
        // A mapped device may have been renamed.
        let now = device.as_ref().and_then(|device| device.stacked()).map(StackedDevice::name);
        write!(f, "{} ({})", self.number, now.as_ref().unwrap_or(&self.name))
    }
}

/// The reason why a path is failed.
pub(super) enum PathFailReason<'a> {
    /// A bio completed with an error that blames the path.
    Bio(&'a Bio),
    /// The message `fail_path`.
    Message,
    /// An administrator's command. No check reinstates the path.
    Command,
    /// A check completed with an error that blames the path.
    Check(Status),
    /// A check did not complete within this time.
    NoAnswer(Nanos),
    /// The path does not complete its requests. `waiting` requests cannot be sent elsewhere.
    Silent { how: UnansweredRequestState, waiting: usize },
}

/// The reason why a path is reinstated.
#[derive(Clone, Copy)]
pub(super) enum ReinstateReason {
    /// The message `reinstate_path`.
    Message,
    /// An administrator's command.
    Command,
    /// A check succeeded.
    CheckPassed,
}

impl fmt::Display for ReinstateReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReinstateReason::Message => Ok(()),
            ReinstateReason::Command => f.write_str("by command: "),
            ReinstateReason::CheckPassed => f.write_str("it answers: "),
        }
    }
}

impl fmt::Display for PathFailReason<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PathFailReason::Bio(bio) => {
                write!(f, "{} error, {:?} at sector {}", bio.status, bio.op, bio.sector.0)
            }
            PathFailReason::Message => f.write_str("by message"),
            PathFailReason::Command => f.write_str("by command, and no check brings it back"),
            PathFailReason::Check(status) => write!(f, "{status} error, in a check"),
            PathFailReason::NoAnswer(time) => write!(f, "no answer to a check in {} s", time.0 as f64 / 1e9),
            PathFailReason::Silent { how, waiting } => {
                let (what, time) = match how {
                    UnansweredRequestState::Starved(time) => {
                        ("answers others, and has kept a request for", time)
                    }
                    UnansweredRequestState::Silent(time) | UnansweredRequestState::Pending(time) => {
                        ("silent for", time)
                    }
                };
                write!(f, "{what} {:?}", Duration::from_nanos(time.0))?;
                match waiting {
                    0 => Ok(()),
                    n => write!(f, ", {n} requests have to wait for it"),
                }
            }
        }
    }
}

impl PathEventLogger {
    pub fn new<'a>(paths: impl Iterator<Item = &'a ResolvedDevice>) -> PathEventLogger {
        let path = |d: &ResolvedDevice| LoggedPathName {
            number: d.number,
            name: d.name.clone(),
            device: Arc::downgrade(&d.device),
        };
        let paths = paths.map(path).collect();
        PathEventLogger { paths, ..PathEventLogger::default() }
    }

    /// Sets the device that receives events.
    pub fn attach(&self, notify: Arc<dyn TargetHostServices>) {
        // A table is loaded into one device, once.
        let _ = self.notify.set(notify);
    }

    /// The time on the device's clock; 0 before [`PathEventLogger::attach`].
    pub fn now(&self) -> Nanos {
        self.notify.get().map_or(Nanos(0), |notify| notify.now())
    }

    /// The path maintenance settings of the device; `None` if its paths are not checked.
    pub fn settings(&self) -> Option<Arc<MultipathSettings>> {
        self.notify.get().and_then(|notify| PathMaintenanceSettings::of_host(&**notify).paths)
    }

    /// Raises the device's event counter by one.
    pub fn event(&self) {
        if let Some(notify) = self.notify.get() {
            notify.event();
        }
    }

    /// Polls every lane of the device.
    pub fn kick(&self, cores: &dyn CoreCommandSender) {
        if let Some(notify) = self.notify.get() {
            notify.kick(cores);
        }
    }

    /// A path was failed; `left` paths are still up.
    pub fn failed(&self, path: usize, why: &PathFailReason<'_>, left: u32) {
        let (device, name, all) = (self.device(), self.path(path), self.paths.len());
        let rest = if left > 0 { format!("{left} of {all} paths") } else { "no path".into() };
        let line = format!("Failing path {name}: {why}: {rest} left");
        if left > 0 {
            tracing::warn!("multipath: {device}: {line}");
        } else {
            self.failed.store(0, Relaxed);
            self.last_path_failed.store(true, Relaxed);
            // A second call site, because log lines are limited per call site: if many paths fail
            // at once, the line of the last one is not suppressed.
            tracing::warn!("multipath: {device}: {line}");
        }
        self.emit(EventKind::PathFailed, Some(path), &line);
    }

    /// A failed path is now failed by an administrator.
    pub fn held(&self, path: usize) {
        let line = format!("path {} stays failed: {}", self.path(path), PathFailReason::Command);
        self.emit(EventKind::PathHeld, Some(path), &line);
    }

    /// Stores the result of a path check in `checker_status`. If the state changed, an event is
    /// sent.
    pub fn checked(&self, checker_status: &PathCheckerStatus, path: usize, found: PathCheckResult) {
        if !checker_status.set(path, found) {
            return;
        }
        let line = format!("path {}: the checker says {}", self.path(path), found.text());
        self.emit(EventKind::PathChecked, Some(path), &line);
    }

    /// Requests go to group `group`, counted from 0. If that is a change, an event is sent.
    pub fn group_in_use(&self, group: usize) {
        let group = group + 1;
        if self.group.swap(group, Relaxed) != group {
            let change = || {
                let line = format!("group {group} is in use");
                DeviceEventDetails {
                    group: Some(group),
                    ..DeviceEventDetails::new(EventKind::PathGroup, line)
                }
            };
            self.emit_as(&change);
        }
    }

    /// A failed path is not reinstated although it may answer: it is another disk, or it keeps
    /// failing.
    pub fn refused(&self, path: usize, why: &str) {
        let (device, line) = (self.device(), format!("path {} stays failed: {why}", self.path(path)));
        tracing::warn!("multipath: {device}: {line}");
        self.emit(EventKind::PathRefused, Some(path), &line);
    }

    /// A path is ejected because it is slow, for at least `length`.
    pub fn ejected(&self, path: usize, length: Nanos) {
        let (device, name, length) = (self.device(), self.path(path), Duration::from_nanos(length.0));
        let line = format!("path {name} is much slower than the others: out of use for {length:?}");
        tracing::warn!("multipath: {device}: {line}");
        self.emit(EventKind::PathEjected, Some(path), &line);
    }

    /// An ejected path is in use again.
    pub fn ejection_ended(&self, path: usize) {
        let (device, name) = (self.device(), self.path(path));
        let line = format!("path {name} is no slower than the others: in use again");
        tracing::warn!("multipath: {device}: {line}");
        self.emit(EventKind::PathAdmitted, Some(path), &line);
    }

    /// A path was reinstated; `up` paths are up now.
    pub fn reinstated(&self, path: usize, back: ReinstateReason, up: u32) {
        let (device, name, all) = (self.device(), self.path(path), self.paths.len());
        let mut meanwhile = String::new();
        if up == 1 && !self.last_path_failed.swap(false, Relaxed) {
            let (waiting, failed) = (self.waiting.load(Relaxed), self.failed.swap(0, Relaxed));
            if waiting > 0 {
                meanwhile += &format!(", {waiting} requests that waited go on");
            }
            if failed > 0 {
                meanwhile += &format!(", {failed} requests failed meanwhile");
            }
        }
        let line = format!("Reinstating path {name}: {back}{up} of {all} paths up{meanwhile}");
        tracing::warn!("multipath: {device}: {line}");
        self.emit(EventKind::PathReinstated, Some(path), &line);
    }

    /// Logs once, after the last path failed, whether requests are queued or failed. The first lane
    /// with such requests calls it.
    pub fn no_path(&self, waits: bool) {
        if !self.last_path_failed.swap(false, Relaxed) {
            return;
        }
        let device = self.device();
        let line = if waits {
            format!("no path left: {} requests wait, and those that come", self.waiting.load(Relaxed))
        } else {
            format!("no path left: {} requests failed, and those that come will", self.failed.load(Relaxed))
        };
        tracing::warn!("multipath: {device}: {line}");
        self.emit(EventKind::NoPath, None, &line);
    }

    /// A message changed whether requests are queued or failed while there is no path.
    pub fn policy(&self, waits: bool) {
        self.last_path_failed.store(false, Relaxed);
        let device = self.device();
        let line = if waits {
            "no path left: requests wait from now on".to_owned()
        } else {
            let n = self.waiting.load(Relaxed);
            format!("no path left: {n} requests that waited fail, and those that come")
        };
        tracing::warn!("multipath: {device}: {line}");
        self.emit(EventKind::NoPath, None, &line);
    }

    /// Requests go back to group `group`, counted from 0, because it is better than the one in use.
    pub fn failed_back(&self, group: usize) {
        let (device, group) = (self.device(), group + 1);
        let line = format!("back to group {group}, which is better");
        tracing::warn!("multipath: {device}: {line}");
        self.emit_as(&|| DeviceEventDetails {
            group: Some(group),
            ..DeviceEventDetails::new(EventKind::Failback, &*line)
        });
    }

    /// A lane has `now` queued bios without a path; it last reported `before`.
    pub fn waiting(&self, before: usize, now: usize) {
        if now >= before {
            self.waiting.fetch_add(now - before, Relaxed);
        } else {
            self.waiting.fetch_sub(before - now, Relaxed);
        }
    }

    /// `n` bios failed because no path was left.
    pub fn ended(&self, n: usize) {
        self.failed.fetch_add(n, Relaxed);
    }

    fn device(&self) -> String {
        self.notify.get().map_or_else(|| "?".into(), |notify| notify.device())
    }

    fn path(&self, path: usize) -> String {
        self.paths.get(path).map_or_else(|| "?".into(), LoggedPathName::to_string)
    }

    /// Sends an event with the text `line`, about `path` or the whole device.
    fn emit(&self, kind: EventKind, path: Option<usize>, line: &str) {
        let path = path.and_then(|path| self.paths.get(path)).map(|path| path.number);
        self.emit_as(&|| DeviceEventDetails { path, ..DeviceEventDetails::new(kind, line) });
    }

    fn emit_as(&self, change: &dyn Fn() -> DeviceEventDetails) {
        if let Some(notify) = self.notify.get() {
            notify.emit(change);
        }
    }
}
