//! The control side of mapped devices: tables, suspend, resume, messages.

use crate::device::{Device, Loaded, Phase, Running};
use crate::env::{Access, last_seen, lock};
use crate::model::Wrong;
use crate::path::SimPath;
use crate::tables::{Map, TableSpec};
use crate::timers::Timer;
use crate::world::World;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use udm_core::errno::{EBUSY, EINTR, ENOENT};
use udm_core::{DevNo, Device as _, Limits, Nanos};
use udm_dm::{DeviceRef, LookupError, Pending, Resolver, TargetError};
use udm_dm::{mapped::MappedDevice, table::Table};

/// Finds paths and devices by the words of [`crate::tables::Below`].
struct Names<'a> {
    paths: &'a [Arc<SimPath>],
    devices: &'a [Device],
}

impl Resolver for Names<'_> {
    fn get(&mut self, word: &str) -> Result<DeviceRef, LookupError> {
        let missing = || LookupError { errno: ENOENT, reason: format!("no device {word}") };
        let index = |prefix: &str| word.strip_prefix(prefix).and_then(|n| n.parse::<usize>().ok());
        if let Some(path) = index("p").and_then(|i| self.paths.get(i)) {
            let number = DevNo { major: 8, minor: index("p").unwrap_or(0) as u32 };
            return Ok(DeviceRef { number, name: word.into(), device: path.clone(), hold: None });
        }
        let i = index("@d").ok_or_else(missing)?;
        let device = self.devices.get(i).ok_or_else(missing)?;
        let number = DevNo { major: 253, minor: i as u32 };
        Ok(DeviceRef { number, name: word.into(), device: device.mapped.clone(), hold: None })
    }
}

fn text<E: std::fmt::Display>(what: String) -> impl FnOnce(E) -> Wrong {
    move |e| format!("{what}: {e}")
}

impl World {
    /// Makes all devices from their tables: those that they had, or those of the blueprint.
    pub fn make_devices(&mut self, specs: &[TableSpec]) -> Result<(), Wrong> {
        for (i, spec) in specs.iter().enumerate() {
            let number = DevNo { major: 253, minor: i as u32 };
            let mapped = MappedDevice::new(&format!("d{i}"), None, number).map_err(text(format!("d{i}")))?;
            let map = self.map(spec);
            self.devices.push(Device {
                mapped,
                spec: spec.clone(),
                maps: vec![map],
                limits: Limits::new(udm_core::Sectors(0)),
                loaded: None,
                phase: Phase::Suspended,
                running: None,
                before: None,
                access: None,
                spare: None,
                hot: 0,
                check: Cell::new(0),
            });
            self.load(i, spec.clone())?;
            self.resume(i)?;
            for _ in 0..100 {
                self.step_changes()?;
                if self.devices[i].is_live() {
                    break;
                }
                let mut env = lock(&self.env);
                env.now = env.now + Nanos::from_millis(100);
                drop(env);
                self.deliver_all();
            }
            if !self.devices[i].is_live() {
                return Err(format!("d{i} without lanes can't be resumed"));
            }
        }
        Ok(())
    }

    fn map(&self, spec: &TableSpec) -> Arc<Map> {
        let below = |d: usize| self.devices[d].maps[0].clone();
        Arc::new(Map::of(spec, &self.blueprint.paths, &self.model.cells, &below))
    }

    /// Puts a table into the inactive slot.
    pub fn load(&mut self, i: usize, spec: TableSpec) -> Result<(), Wrong> {
        let words = spec.text(self.blueprint.cores);
        lock(&self.env).say(format!("d{i} load: {}", words.replace('\n', "; ")));
        let lines = udm_wire::table::parse(&words).map_err(text(format!("d{i}: {words}")))?;
        let mut names = Names { paths: &self.paths, devices: &self.devices };
        let table = Table::build(udm_targets::TARGETS, &lines, &mut names, self.blueprint.cores)
            .map_err(text(format!("d{i}: {words}")))?;
        let map = self.map(&spec);
        self.devices[i].mapped.load(table).map_err(text(format!("d{i} load {words}")))?;
        let old = self.devices[i].loaded.take().and_then(|l| l.access);
        let spare = old.or_else(|| self.devices[i].spare.take());
        let access = spec.multipath().map(|(disk, queue, groups)| {
            let paths = groups.iter().flat_map(|(_, p)| p.iter().copied()).collect();
            let access = Access { disk, paths, queue, suspending: false, live: false };
            let mut env = lock(&self.env);
            match spare {
                Some(slot) => env.accesses[slot] = access,
                None => env.accesses.push(access),
            }
            spare.unwrap_or(env.accesses.len() - 1)
        });
        self.devices[i].loaded = Some(Loaded { spec, map, access });
        Ok(())
    }

    fn flag() -> (Arc<AtomicBool>, Arc<dyn Fn() + Send + Sync>) {
        let woken = Arc::new(AtomicBool::new(true));
        let handle = woken.clone();
        (woken, Arc::new(move || handle.store(true, Ordering::Relaxed)))
    }

    /// Begins a suspend.
    pub fn suspend(&mut self, i: usize, noflush: bool) -> Result<(), Wrong> {
        lock(&self.env).say(format!("d{i} suspend{}", if noflush { " without a flush" } else { "" }));
        let (woken, wake) = World::flag();
        self.hold(i, !noflush);
        let device = &mut self.devices[i];
        let change = device.mapped.suspend(noflush, wake).map_err(text(format!("d{i} suspend")))?;
        device.running = Some(Running { change, woken, cancelled: false });
        device.phase = Phase::Suspending;
        self.totals.suspends += 1;
        Ok(())
    }

    /// Begins a resume.
    pub fn resume(&mut self, i: usize) -> Result<(), Wrong> {
        lock(&self.env).say(format!("d{i} resume"));
        let (woken, wake) = World::flag();
        let was_live = self.devices[i].phase == Phase::Live;
        // The kernel's way fails what is held; ours lets it wait for the new table.
        let noflush = !was_live || self.control.one_in(2);
        if was_live {
            self.hold(i, !noflush);
            self.totals.reloads += 1;
        }
        let device = &mut self.devices[i];
        device.before = Some(device.maps[0].clone());
        if let Some(loaded) = &device.loaded {
            self.model.remap(i, &loaded.map);
            if device.maps[0] != loaded.map {
                match was_live {
                    true => device.maps.push(loaded.map.clone()),
                    false => device.maps = vec![loaded.map.clone()],
                }
            }
        }
        let change = device.mapped.resume_with(noflush, wake).map_err(text(format!("d{i} resume")))?;
        device.running = Some(Running { change, woken, cancelled: false });
        device.phase = Phase::Resuming(was_live);
        self.bar();
        Ok(())
    }

    /// Tells the outside that held requests of a multipath device may fail, or no longer.
    fn hold(&mut self, i: usize, suspending: bool) {
        let mut env = lock(&self.env);
        if let Some(access) = self.devices[i].access {
            env.accesses[access].suspending = suspending;
            let disk = env.accesses[access].disk;
            env.recheck(disk);
        }
    }

    /// Goes on with the suspends and resumes that were woken.
    pub fn step_changes(&mut self) -> Result<(), Wrong> {
        for i in 0..self.devices.len() {
            let device = &mut self.devices[i];
            let Some(running) = &mut device.running else { continue };
            if !running.woken.swap(false, Ordering::Relaxed) {
                continue;
            }
            let result = running.change.step(&*self.post);
            // A change that was called off goes on with the table that was in use.
            if self.post.took_resume(device.mapped.id()) && !running.cancelled {
                self.swap(i)?;
                self.bar();
            }
            if let Some(result) = result {
                let cancelled = self.devices[i].running.take().is_some_and(|r| r.cancelled);
                if cancelled && result.as_ref().is_err_and(|e| e.errno == EINTR) {
                    self.called_off(i);
                    continue;
                }
                self.changed(i, result)?;
            }
        }
        Ok(())
    }

    /// Calls off a suspend or resume under way.
    pub fn cancel(&mut self, i: usize) {
        let device = &mut self.devices[i];
        let Some(running) = &mut device.running else { return };
        lock(&self.env).say(format!("d{i} goes back on {}", device.phase.doing()));
        self.totals.cancels += 1;
        running.change.cancel(&*self.post);
        running.woken.store(true, Ordering::Relaxed);
        running.cancelled = true;
        // Too late where the new table is in use: then this changes nothing.
        if let (Phase::Resuming(_), Some(before), Some(_)) =
            (device.phase, device.before.clone(), &device.loaded)
        {
            self.model.remap(i, &before);
            device.maps = vec![before];
        }
    }

    /// The cores are being told to use the loaded table.
    fn swap(&mut self, i: usize) -> Result<(), Wrong> {
        if self.blueprint.logger == Some(i) && self.devices[i].loaded.is_some() {
            // The old log has come to its end: a last look.
            self.look_at_log()?;
        }
        let device = &mut self.devices[i];
        let Some(loaded) = device.loaded.take() else { return Ok(()) };
        let mut env = lock(&self.env);
        if let Some(old) = device.access {
            env.accesses[old].live = false;
            let disk = env.accesses[old].disk;
            env.recheck(disk);
        }
        if let Some(new) = loaded.access {
            env.refresh(new);
        }
        device.spare = std::mem::replace(&mut device.access, loaded.access).or(device.spare);
        device.maps = vec![loaded.map];
        device.spec = loaded.spec;
        device.spec.lines.iter().for_each(|(_, kind)| self.totals.see(kind));
        device.limits = device.mapped.limits();
        env.say(format!("d{i} uses its new table"));
        if self.blueprint.logger == Some(i) {
            self.log.restart(&device.spec);
        }
        Ok(())
    }

    /// A change was called off: the device is in use as it was before.
    fn called_off(&mut self, i: usize) {
        lock(&self.env).say(format!("d{i} is in use again"));
        self.devices[i].phase = Phase::Live;
        self.hold(i, false);
        self.bar();
    }

    fn changed(&mut self, i: usize, result: Result<(), TargetError>) -> Result<(), Wrong> {
        let phase = self.devices[i].phase;
        lock(&self.env).say(format!("d{i} is done {}", self.devices[i].doing()));
        result.map_err(text(format!("d{i} {}", self.devices[i].doing())))?;
        if phase == Phase::Suspending {
            self.devices[i].phase = Phase::Suspended;
            self.bar();
            let mut env = lock(&self.env);
            for p in self.devices[i].spec.paths() {
                let path = &env.paths[p];
                if path.barred > 0 && path.in_flight > 0 {
                    return Err(format!(
                        "d{i} is suspended with {} requests in flight on p{p}",
                        path.in_flight
                    ));
                }
            }
            let at = env.now + Nanos(env.chance.below(200_000_000));
            self.timers.set(at, Timer::Resume(i));
            return Ok(());
        }
        if self.devices[i].loaded.is_some() {
            return Err(format!("d{i} was resumed and did not take its new table"));
        }
        self.devices[i].phase = Phase::Live;
        self.devices[i].before = None;
        self.devices[i].limits = self.devices[i].mapped.limits();
        self.hold(i, false);
        self.bar();
        Ok(())
    }

    /// Works out which paths must be quiet: those whose every user is suspended. And which disks are behind something flaky.
    fn bar(&mut self) {
        let mut env = lock(&self.env);
        let ending = env.ending();
        for (i, disk) in env.disks.iter_mut().enumerate() {
            let flaky = self.devices.iter().any(|d| d.spec.is_flaky() && d.maps[0].disks.contains(&i));
            last_seen(&mut disk.flaky, flaky, ending);
        }
        for p in 0..env.paths.len() {
            let mut users = self.devices.iter().filter(|d| d.spec.paths().contains(&p)).peekable();
            let barred = users.peek().is_some() && users.all(Device::is_suspended);
            env.paths[p].barred = u32::from(barred);
        }
    }

    /// Sends a message to what lies at `sector`: its answer, and what is still to be done.
    pub(crate) fn send(
        &self,
        i: usize,
        sector: u64,
        words: &str,
    ) -> Result<(String, Option<Pending>), TargetError> {
        let words: Vec<String> = words.split(' ').map(str::to_string).collect();
        let mut names = Names { paths: &self.paths, devices: &self.devices };
        self.devices[i].mapped.send(sector, &words, &mut names, &*self.post)
    }

    /// Sends a message. `Ok(false)` when the device was suspended and refused it.
    pub fn message(&mut self, i: usize, words: &str) -> Result<bool, Wrong> {
        lock(&self.env).say(format!("d{i} message: {words}"));
        let live = self.devices[i].phase == Phase::Live;
        match self.send(i, 0, words) {
            Ok(_) => {
                self.totals.messages += 1;
                Ok(true)
            }
            Err(e) if e.errno == EBUSY && !live => Ok(false),
            Err(e) => Err(format!("d{i} message {words}: {e}")),
        }
    }

    /// Moves the place where requests like to go.
    pub fn move_hot_spot(&mut self, i: usize) {
        self.devices[i].hot = self.control.any() >> 1;
    }
}
