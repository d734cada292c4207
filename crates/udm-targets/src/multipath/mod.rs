//! `multipath`: one device over several paths to the same blocks.
//!
//! Table, messages and texts are the kernel's (6.12, target 1.14.0). A bio goes whole to one path
//! of the current group, chosen by the selector of the group. An error that blames the path fails
//! the path, and the bio is sent to another path, unchanged, in the same poll. An error that blames
//! the request is returned. If no path is left, bios wait (`queue_if_no_path`) or fail with EIO.
//!
//! The parts, in the order in which a request meets them:
//!
//! * `lane`: the data path of one core.
//! * `state`: the states of paths and groups, atomics that all cores share.
//! * `route`: the group that the lane uses, and its usable paths.
//! * [`selector`]: the choice of a path in the group.
//! * `watch`: deadlines, hedged reads and ejection of slow paths, if requested.
//! * `ejection`: the ejected paths, as all cores see them.
//! * `counters`: what each lane counts per path. `carried_counters`: what another process counted.
//! * `reaped_paths`: the completed bios of several paths, for the selector.
//! * `retry`: bios that found no path or lost theirs.
//! * `path_log`: a line and an event for each path that fails or returns.
//!
//! No request meets the others:
//!
//! * `parse`: the table line. `message`, `status`: text in and out.
//! * `path_maintenance`: settings that no table holds.
//! * `checker`: the task that checks paths.
//! * `checker_status`, `quarantine_status`: its results, for reports.
//!
//! **What cores share** is one word per device (flags, current and next group, generation), changed
//! by compare-and-swap, and the loads of the paths. A lane loads the word once per batch. While it
//! is unchanged, no other path state is examined.
//!
//! **Counters.** Each lane counts requests and errors per path in its own counters. `status --json`
//! adds them up. The control half's clock (`TargetHost::now`) measures how long a path has been in
//! its state. It is read when the state changes and when a client asks.
//!
//! **Path maintenance.** The kernel leaves path checks to a daemon. `udm serve` does them itself,
//! unless it runs with `--check-paths off`. Table, status and messages stay the kernel's. The
//! settings come from outside the table (`PathMaintenanceSettings`), with the words of
//! multipath.conf (`udm_wire::multipath_conf`). `udm multipath` prints the results with
//! multipath-tools' texts.
//!
//! A bio is retried only after the lane of the path has returned it. So nothing below can still
//! touch its data or its blocks.
//!
//! Not supported: hardware handlers, group activation, and the kernel's time limit on queued bios.
//! A table with a handler is refused as by the kernel, because no path can attach one.

mod carried_counters;
mod checker;
mod checker_status;
mod counters;
mod ejection;
mod lane;
mod message;
mod parse;
mod path_log;
mod path_maintenance;
mod quarantine_status;
mod reaped_paths;
mod retry;
mod route;
pub mod selector;
mod state;
mod status;
mod watch;

use carried_counters::CarriedPathCounters;
use checker_status::PathCheckerStatus;
use counters::MultipathDeviceCounters;
use parse::{MultipathFeatures, PriorityGroup, QueueMode};
use path_log::PathEventLogger;
pub use path_maintenance::{PathMaintenanceSettings, PathWatchOptions};
use state::MultipathState;
use std::sync::{Arc, Mutex, OnceLock};
use udm_core::{
    BioTaskFactory, Cx, DevNo, DeviceControlError, ExtentKind, Extents, Lane, Limits, Sector, Sectors,
};
use udm_dm::target::{
    DeviceNameResolver, DeviceRange, DmQueueMode, LowerLimits, ResolvedDevice, Target, TargetArgs,
    TargetFeatures, TargetHostServices,
};
use udm_dm::{MultipathTarget, PathCommand, PathReport, QueueingAndFailbackReport, TargetError};

/// The constructor: `multipath FEATURES HANDLER GROUPS INITIAL GROUP...`; the grammar is in
/// `parse`.
///
/// # Errors
/// The kernel's, with the word to blame.
pub fn create_multipath_target(args: &mut TargetArgs<'_>) -> Result<Arc<dyn Target>, TargetError> {
    Ok(Multipath::new(args)?)
}

/// The control half of a multipath target.
pub struct Multipath {
    len: Sectors,
    features: MultipathFeatures,
    handler: Option<String>,
    groups: Vec<PriorityGroup>,
    shared: Arc<MultipathState>,
    counters: MultipathDeviceCounters,
    carried: OnceLock<Box<[CarriedPathCounters]>>,
    checker_status: Arc<PathCheckerStatus>,
    /// The path watch options, set when the table is loaded into a device.
    watch: OnceLock<PathWatchOptions>,
    /// Serialises messages. The data path never takes it.
    messages: Mutex<()>,
}

impl Multipath {
    /// The same as [`new`], with the concrete type.
    ///
    /// # Errors
    /// The kernel's, with the word to blame.
    pub fn new(args: &mut TargetArgs<'_>) -> Result<Arc<Multipath>, TargetError> {
        let params = parse::parse_multipath_table(args)?;
        let paths = params.groups.iter().map(|g| g.paths.len()).sum();
        let queueing = params.features.queue_if_no_path;
        let path_log = PathEventLogger::new(params.groups.iter().flat_map(|g| &g.paths));
        let shared = MultipathState::new(params.groups.len(), paths, queueing, params.initial, path_log);
        Ok(Arc::new(Multipath {
            len: args.len,
            features: params.features,
            handler: params.handler,
            groups: params.groups,
            shared: Arc::new(shared),
            counters: MultipathDeviceCounters::default(),
            carried: OnceLock::new(),
            checker_status: Arc::new(PathCheckerStatus::new(paths)),
            watch: OnceLock::new(),
            messages: Mutex::new(()),
        }))
    }

    /// Every path in the table's order, with the index of its group.
    fn paths(&self) -> impl Iterator<Item = (usize, &ResolvedDevice)> {
        self.groups.iter().enumerate().flat_map(|(g, group)| group.paths.iter().map(move |p| (g, p)))
    }
}

impl Target for Multipath {
    fn type_name(&self) -> &'static str {
        "multipath"
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        let mut paths = Vec::new();
        for (_, path) in self.paths() {
            paths.push(path.device.open(cx)?);
        }
        let core = cx.core();
        let groups = self.groups.iter().map(|g| (g.paths.len(), Arc::clone(&g.selector).lane(core)));
        let watch = self.watch.get().copied().unwrap_or_default();
        let counters = self.counters.open(paths.len(), watch.is_on());
        if watch.is_on() {
            let counts = self.groups.iter().map(|group| group.paths.len());
            let with = (watch, Arc::clone(&self.shared), Arc::clone(&counters));
            paths = watch::add_path_watch_to_lanes(paths, counts, with, cx);
        }
        Ok(Box::new(lane::MultipathLane::new(Arc::clone(&self.shared), groups, paths, counters)))
    }

    fn table(&self) -> String {
        self.table_text()
    }

    fn status(&self) -> String {
        self.status_text()
    }

    fn limits(&self, below: LowerLimits<'_>) -> Limits {
        let mut limits = Limits::new(self.len);
        limits.request_stackable = self.features.queue_mode == QueueMode::Request;
        self.paths().fold(limits, |limits, (_, path)| limits.stack(&below.limits(path)))
    }

    /// Reports the extents of the first path that is not failed: all paths lead to the same blocks.
    fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        let mut paths = self.paths().enumerate();
        match paths.find(|(index, _)| !self.shared.path(*index).failed) {
            Some((_, (_, path))) => path.device.extents(from, len, out),
            None => out.push(len, ExtentKind::Data),
        }
    }

    fn devices(&self) -> Vec<DeviceRange> {
        let used = |device: &ResolvedDevice| DeviceRange::new(device, Sector(0), self.len);
        self.paths().map(|(_, path)| used(path)).collect()
    }

    fn features(&self) -> TargetFeatures {
        let queue_mode = match self.features.queue_mode {
            QueueMode::Bio => DmQueueMode::Bio,
            QueueMode::Request => DmQueueMode::Request,
        };
        TargetFeatures {
            queue_mode,
            singleton: true,
            is_over_one_disk: true,
            refuses_messages_while_suspended: true,
            ..TargetFeatures::default()
        }
    }

    fn as_multipath(&self) -> Option<&dyn MultipathTarget> {
        Some(self)
    }

    fn message(
        &self,
        words: &[String],
        resolver: &mut dyn DeviceNameResolver,
    ) -> Result<String, TargetError> {
        self.handle_message(words, resolver).map(|()| String::new())
    }

    fn attach(&self, notify: Arc<dyn TargetHostServices>) {
        let _ = self.watch.set(PathMaintenanceSettings::of_host(&*notify).watch);
        self.shared.attach(notify);
    }

    fn tasks(&self) -> Vec<BioTaskFactory> {
        let Some(settings) = self.shared.path_log.settings() else { return Vec::new() };
        let paths = self.paths().map(|(_, path)| path.clone()).collect();
        let mut next = 0;
        let range = |group: &PriorityGroup| {
            next += group.paths.len();
            next - group.paths.len()..next
        };
        let groups = self.groups.iter().map(range).collect();
        let (shared, checker_status) = (Arc::clone(&self.shared), Arc::clone(&self.checker_status));
        let len = self.len;
        let subject = checker::PathCheckerInput { shared, checker_status, len, paths, groups, settings };
        vec![Box::new(move || Box::new(checker::PathChecker::new(subject)))]
    }

    fn presuspend(&self, noflush: bool) {
        // In request mode a no-flush suspend leaves the flag unchanged, and tables show it.
        self.shared.presuspend(noflush, self.features.queue_mode == QueueMode::Bio || !noflush);
    }

    fn resume(&self) {
        self.shared.resume();
    }
}

impl MultipathTarget for Multipath {
    fn path_reports(&self) -> Vec<PathReport> {
        self.reports()
    }

    fn continue_path_counters(&self, before: &[PathReport]) {
        self.carry_on(before);
    }

    fn path_maintenance_report(&self) -> Option<QueueingAndFailbackReport> {
        self.path_maintenance()
    }

    fn command_path(&self, number: DevNo, command: PathCommand) -> Result<(), TargetError> {
        self.command(number, command)
    }
}
