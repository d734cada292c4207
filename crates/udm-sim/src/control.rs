//! The control side of mapped devices: tables, suspend, resume, messages.

use crate::control_io::SimTableLoadIo;
use crate::device::{DevicePhase, InactiveTable, MappedDeviceWithModel, RunningSuspendOrResume};
use crate::dust_model::DustLine;
use crate::environment::{MultipathModel, lock_environment, record_condition_last_held};
use crate::expected_limits::ExpectedLimits;
use crate::model::Violation;
use crate::path::SimPath;
use crate::table_map::ModelTableMap;
use crate::tables::TableSpec;
use crate::wakeable::create_transition_wake_flag;
use crate::world::MappedDeviceStackWorld;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use udm_core::errno::{EBUSY, EMLINK, ENOENT};
use udm_core::{DevNo, Limits, Nanos};
use udm_dm::{
    DeviceLookupError, DeviceNameResolver, InvalidStoreMark, ResolvedDevice, TargetError,
    TargetMessageWaitHandle,
};
use udm_dm::{
    mapped::{DeviceSetTransition, MappedDevice},
    table::Table,
};
use udm_targets::multipath::PathMaintenanceSettings;
use udm_wire::multipath_conf::{
    Failback, MarginalPathPolicy, MultipathSettings, MultipathTableOptions, NoPathRetry, PathPrioritizer,
};
use udm_wire::table::TableLine;

/// Resolves the words of [`crate::tables::TableLineDevice`] to paths and devices.
pub(crate) struct DeviceResolver {
    pub(crate) paths: Vec<Arc<SimPath>>,
    pub(crate) fronts: Vec<Arc<dyn udm_core::Device>>,
    pub(crate) devices: Vec<Option<Arc<MappedDevice>>>,
}

impl DeviceNameResolver for DeviceResolver {
    fn get(&mut self, word: &str) -> Result<ResolvedDevice, DeviceLookupError> {
        let missing = || DeviceLookupError { errno: ENOENT, reason: format!("no device {word}") };
        let index = |prefix: &str| word.strip_prefix(prefix).and_then(|n| n.parse::<usize>().ok());
        if let Some(path) = index("p").and_then(|i| self.fronts.get(i)) {
            let number = DevNo { major: PATHS, minor: index("p").unwrap_or(0) as u32 };
            return Ok(ResolvedDevice { number, name: word.into(), device: path.clone(), hold: None });
        }
        let i = index("@d").ok_or_else(missing)?;
        let device = self.devices.get(i).and_then(Option::as_ref).ok_or_else(missing)?;
        let number = DevNo { major: 253, minor: i as u32 };
        Ok(ResolvedDevice { number, name: word.into(), device: device.clone(), hold: None })
    }

    fn mark(&self, device: &ResolvedDevice) -> Option<Arc<dyn InvalidStoreMark>> {
        let path = device.name.strip_prefix('p').and_then(|n| n.parse::<usize>().ok());
        Some(self.paths.get(path?)?.mark())
    }
}

/// Major device number of paths.
pub(crate) const PATHS: u32 = 8;

/// Maximum number of attempts of a load that fails because of disk errors.
const LOADS_MAX: usize = 100;

pub(crate) fn error_to_violation<E: std::fmt::Display>(what: String) -> impl FnOnce(E) -> Violation {
    move |e| format!("{what}: {e}")
}

impl MappedDeviceStackWorld {
    /// Creates all devices with the given tables: those of the blueprint, or those from before a
    /// crash.
    pub fn make_devices(&mut self, specs: &[TableSpec]) -> Result<(), Violation> {
        for (i, spec) in specs.iter().enumerate() {
            let number = DevNo { major: 253, minor: i as u32 };
            let mapped = MappedDevice::new(&format!("d{i}"), None, number)
                .map_err(error_to_violation(format!("d{i}")))?;
            let settings = self.settings();
            let stands = self.give_queue(i, &mapped);
            PathMaintenanceSettings { paths: Some(Arc::clone(&settings)), watch: self.watch }.set(&mapped);
            let map = self.map(spec);
            let expected = self.expected(spec, &|d| self.devices[d].expected);
            self.devices.push(MappedDeviceWithModel {
                mapped,
                settings,
                spec: spec.clone(),
                maps: vec![map],
                limits: Limits::new(udm_core::Sectors(0)),
                loaded: None,
                phase: DevicePhase::Suspended,
                stands,
                running: None,
                before: None,
                access: None,
                free_access: None,
                hot: 0,
                dust: Vec::new(),
                expected,
                watched: self.watch.is_on(),
                hedged: [0; 2],
                throttled: None,
                events: (0, 0),
                check: Cell::new(0),
            });
            for _ in 0..LOADS_MAX {
                self.load(i, spec.clone())?;
                if self.devices[i].loaded.is_some() {
                    break;
                }
            }
            self.take_queue(i);
            self.resume(&[i])?;
            for _ in 0..100 {
                self.step_changes()?;
                if self.devices[i].is_live() {
                    break;
                }
                let mut env = lock_environment(&self.machine.env);
                env.now = env.now + Nanos::from_millis(100);
                drop(env);
                self.machine.deliver_all();
            }
            if !self.devices[i].is_live() {
                return Err(format!("d{i} without lanes can't be resumed"));
            }
        }
        Ok(())
    }

    /// Draws the multipath settings of a device.
    fn settings(&mut self) -> Arc<MultipathSettings> {
        // A sample must be so long that the delays of three delay targets fit into half of it.
        // Otherwise a path that is always late would be held back forever.
        let sample_min = (6 * self.blueprint.delay_max).max(200);
        let control = &mut self.machine.control;
        let interval = control.between(50, 500);
        let after = Nanos::from_millis(control.between(1, 1000));
        let marginal = MarginalPathPolicy {
            double_failed_time: Nanos::from_millis(control.between(1, 5000)),
            err_sample_time: Nanos::from_millis(control.between(sample_min, 4000)),
            err_rate_threshold: 10,
            err_recheck_gap_time: Nanos::from_millis(control.between(1, 1000)),
        };
        Arc::new(MultipathSettings {
            polling_interval: Nanos::from_millis(interval),
            max_polling_interval: Nanos::from_millis(interval * control.pick(&[1, 4, 64])),
            checker_timeout: lock_environment(&self.machine.env).check_timeout,
            no_path_retry: control.pick(&[None, None, Some(NoPathRetry::Checks(2))]),
            failback: control.pick(&[
                Failback::Manual,
                Failback::Manual,
                Failback::Immediate,
                Failback::Followover,
                Failback::After(after),
            ]),
            prio: PathPrioritizer::Const,
            marginal: control.one_in(3).then_some(marginal),
            grouping: MultipathTableOptions::default(),
        })
    }

    fn names(&self) -> DeviceResolver {
        let devices = self.devices.iter().map(|d| Some(d.mapped.clone())).collect();
        DeviceResolver { paths: self.machine.paths.clone(), fronts: self.machine.fronts.clone(), devices }
    }

    fn map(&self, spec: &TableSpec) -> Arc<ModelTableMap> {
        let below = |d: usize| self.devices[d].maps[0].clone();
        Arc::new(ModelTableMap::of(spec, &self.blueprint.paths, &self.machine.model.cells, &below))
    }

    /// Returns the limits that a table of `spec` must have, given the current disks and the devices
    /// `below`.
    pub(crate) fn expected(
        &self,
        spec: &TableSpec,
        below: &dyn Fn(usize) -> ExpectedLimits,
    ) -> ExpectedLimits {
        let env = lock_environment(&self.machine.env);
        let disk = |p: usize| ExpectedLimits::of_disk(&env.disks[env.paths[p].disk]);
        ExpectedLimits::of_table(spec, &disk, below)
    }

    /// Loads a table into the inactive slot.
    pub fn load(&mut self, i: usize, spec: TableSpec) -> Result<(), Violation> {
        let words = spec.text(self.blueprint.cores);
        lock_environment(&self.machine.env).say(format!("d{i} load: {}", words.replace('\n', "; ")));
        let lines =
            udm_wire::table::parse_table(&words).map_err(error_to_violation(format!("d{i}: {words}")))?;
        let (built, failed) = self.build(&lines)?;
        // A disk error during the load leaves the slot unchanged.
        if built.is_err() && failed {
            return Ok(());
        }
        let table = built.map_err(error_to_violation(format!("d{i}: {words}")))?;
        let map = self.map(&spec);
        let weak = Arc::downgrade(&table);
        self.tables.push(weak.clone());
        match self.devices[i].mapped.load(table) {
            // Inactive tables count, so the total number of lines may be too large. The slot is
            // unchanged.
            Err(error) if error.errno == EMLINK => return Ok(()),
            loaded => loaded.map_err(error_to_violation(format!("d{i} load {words}")))?,
        }
        self.check_exclusive_claims(i, &words)?;
        let old = self.devices[i].loaded.take().and_then(|l| l.access);
        let free_access = old.or_else(|| self.devices[i].free_access.take());
        let settings = &self.devices[i].settings;
        let retries = settings.no_path_retry.is_some();
        let intervals = (settings.polling_interval, settings.max_polling_interval);
        let access = spec.multipath().map(|(disk, queue, groups)| {
            let paths = groups.iter().flat_map(|(_, p)| p.iter().copied()).collect();
            let has_unknown_paths = spec.is_loose() || self.watch.is_on();
            let access = MultipathModel {
                disk,
                paths,
                queue,
                suspending: false,
                live: false,
                has_unknown_paths,
                retries,
                intervals,
                lost: 0,
            };
            let mut env = lock_environment(&self.machine.env);
            match free_access {
                Some(slot) => env.accesses[slot] = access,
                None => env.accesses.push(access),
            }
            free_access.unwrap_or(env.accesses.len() - 1)
        });
        self.devices[i].loaded = Some(InactiveTable { spec, map, access, table: weak, expected: None });
        Ok(())
    }

    /// Builds a table from `lines`. Also returns whether a read or write of the build failed.
    fn build(&mut self, lines: &[TableLine]) -> Result<(Result<Arc<Table>, TargetError>, bool), Violation> {
        let (mut names, cores) = (self.names(), self.blueprint.cores);
        self.acting = true;
        let io = SimTableLoadIo::new(self);
        let built = Table::build(udm_targets::TARGETS, lines, &mut names, &io, cores);
        let (verdict, failed) = (io.verdict(), io.has_failed());
        self.acting = false;
        verdict.map(|()| (built, failed))
    }

    /// Checks that another device cannot use the disks that the table of device `i` claims
    /// exclusively.
    fn check_exclusive_claims(&mut self, i: usize, words: &str) -> Result<(), Violation> {
        if !words.contains("log-writes") {
            return Ok(());
        }
        let lines = udm_wire::table::parse_table(words).map_err(error_to_violation(words.to_owned()))?;
        let (built, failed) = self.build(&lines)?;
        if built.is_err() && failed {
            return Ok(());
        }
        let table = built.map_err(error_to_violation(words.to_owned()))?;
        let stranger = MappedDevice::new("stranger", None, DevNo { major: 254, minor: 1 << 19 })
            .map_err(error_to_violation("a stranger".into()))?;
        match stranger.load(table) {
            Err(error) if error.errno == EBUSY || error.errno == EMLINK => Ok(()),
            other => Err(format!("d{i} has a log, and another device got it as well: {other:?}")),
        }
    }

    /// Starts a suspend of one or several devices.
    pub fn suspend(&mut self, several: &[usize], noflush: bool) -> Result<(), Violation> {
        let (woken, wake) = create_transition_wake_flag();
        for &i in several {
            let how = if noflush { " without a flush" } else { "" };
            lock_environment(&self.machine.env).say(format!("d{i} suspend, of {}{how}", several.len()));
            self.hold(i, !noflush);
            self.forget_checks(i);
            self.devices[i].enter(DevicePhase::Suspending);
        }
        let mapped = self.mapped(several);
        let changes = DeviceSetTransition::suspend(&mapped, noflush, &wake)
            .map_err(|(_, e)| format!("suspend: {e}"))?;
        self.set_off(several, changes, woken);
        self.machine.totals.suspends += several.len() as u64;
        self.machine.totals.together += u64::from(several.len() > 1);
        Ok(())
    }

    fn mapped(&self, several: &[usize]) -> Vec<Arc<MappedDevice>> {
        several.iter().map(|&i| self.devices[i].mapped.clone()).collect()
    }

    fn set_off(&mut self, several: &[usize], changes: DeviceSetTransition, woken: Arc<AtomicBool>) {
        let running = RunningSuspendOrResume {
            devices: several.to_vec(),
            changes,
            woken,
            cancelled: false,
            past: false,
        };
        let running = Rc::new(RefCell::new(running));
        several.iter().for_each(|&i| self.devices[i].running = Some(Rc::clone(&running)));
    }

    /// Starts a resume of one or several devices.
    pub fn resume(&mut self, several: &[usize]) -> Result<(), Violation> {
        let (woken, wake) = create_transition_wake_flag();
        let live = |world: &MappedDeviceStackWorld, i: usize| world.devices[i].phase == DevicePhase::Live;
        // With the kernel's semantics, held requests fail; with `noflush` they wait for the new
        // table. Requests that a suspended device holds must wait.
        let asked = self.machine.control.one_in(2);
        let noflush = asked || !several.iter().all(|&i| live(self, i));
        for &i in several {
            lock_environment(&self.machine.env).say(format!("d{i} resume, of {}", several.len()));
            let was_live = live(self, i);
            self.forget_checks(i);
            if was_live {
                self.hold(i, !noflush);
                self.machine.totals.reloads += 1;
            }
            let device = &mut self.devices[i];
            device.before = Some(device.maps[0].clone());
            if let Some(loaded) = &device.loaded {
                self.machine.model.remap(i, &loaded.map);
                if device.maps[0] != loaded.map {
                    match was_live {
                        true => device.maps.push(loaded.map.clone()),
                        false => device.maps = vec![loaded.map.clone()],
                    }
                }
            }
            device.enter(DevicePhase::Resuming(was_live));
        }
        let mapped = self.mapped(several);
        let changes =
            DeviceSetTransition::resume(&mapped, asked, &wake).map_err(|(_, e)| format!("resume: {e}"))?;
        self.set_off(several, changes, woken);
        self.machine.totals.resumed_together += u64::from(several.len() > 1);
        self.update_suspended_users();
        Ok(())
    }

    /// Forgets the checks of device `i`: its tasks are replaced, and their pending checks have no
    /// effect.
    pub(crate) fn forget_checks(&mut self, i: usize) {
        let mut env = lock_environment(&self.machine.env);
        let paths = self.devices[i].access.map_or_else(Vec::new, |access| env.accesses[access].paths.clone());
        paths.into_iter().for_each(|p| env.paths[p].forget_checks());
    }

    /// Records whether held requests of a multipath device may fail because of a suspend.
    pub(crate) fn hold(&mut self, i: usize, suspending: bool) {
        let mut env = lock_environment(&self.machine.env);
        if let Some(access) = self.devices[i].access {
            env.accesses[access].suspending = suspending;
            let disk = env.accesses[access].disk;
            env.recheck(disk);
        }
    }

    /// Updates the state derived from tables: which paths must be idle because all their users are
    /// suspended, which disks are below a target that injects errors, and which paths' errors are
    /// retried.
    pub(crate) fn update_suspended_users(&mut self) {
        let mut env = lock_environment(&self.machine.env);
        let ending = env.ending();
        for (i, disk) in env.disks.iter_mut().enumerate() {
            let fails = |d: &MappedDeviceWithModel| d.spec.is_flaky() || d.dust.iter().any(DustLine::is_on);
            let flaky = self.devices.iter().any(|d| fails(d) && d.maps[0].disks.contains(&i));
            record_condition_last_held(&mut disk.flaky, flaky, ending);
        }
        for p in 0..env.paths.len() {
            let mut users = self.devices.iter().filter(|d| d.spec.paths().contains(&p)).peekable();
            let suspended_users = users.peek().is_some() && users.all(MappedDeviceWithModel::is_suspended);
            env.paths[p].suspended_users = u32::from(suspended_users);
            let tries = |d: &MappedDeviceWithModel| {
                let groups = d.spec.multipath().map_or(&[][..], |(_, _, groups)| groups);
                groups.iter().any(|(_, paths)| paths.contains(&p))
            };
            env.paths[p].retried = self.devices.iter().any(tries);
        }
    }

    /// Sends a message to the target at `sector`. Returns the reply and the handle of an operation
    /// still in progress.
    pub(crate) fn send(
        &self,
        i: usize,
        sector: u64,
        words: &str,
    ) -> Result<(String, Option<TargetMessageWaitHandle>), TargetError> {
        let words: Vec<String> = words.split(' ').map(str::to_string).collect();
        let mut names = self.names();
        self.devices[i].mapped.send(sector, &words, &mut names, &*self.machine.inboxes)
    }

    /// Sends a message. Returns `Ok(false)` if the device was suspended and refused the message.
    pub fn message(&mut self, i: usize, words: &str) -> Result<bool, Violation> {
        lock_environment(&self.machine.env).say(format!("d{i} message: {words}"));
        let live = self.devices[i].phase == DevicePhase::Live;
        match self.send(i, 0, words) {
            Ok(_) => {
                self.machine.totals.messages += 1;
                Ok(true)
            }
            Err(e) if e.errno == EBUSY && !live => Ok(false),
            Err(e) => Err(format!("d{i} message {words}: {e}")),
        }
    }

    /// Moves the region that requests prefer.
    pub fn move_hot_spot(&mut self, i: usize) {
        self.devices[i].hot = self.machine.control.any() >> 1;
    }
}
