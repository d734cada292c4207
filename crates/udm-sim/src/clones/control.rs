//! Operations on the device: tables, suspends, resumes, messages and removals. Each operation runs
//! to its end while the cores continue.

use super::world::{CloneWorld, DESTINATION, METADATA, SOURCE};
use crate::control::DeviceResolver;
use crate::environment::lock_environment;
use crate::model::Violation;
use crate::plan::DisturbanceClass;
use crate::power_cuts::{CancellableResult, PowerCutWorld as _};
use crate::wakeable::create_transition_wake_flag;
use udm_core::errno::EINTR;
use udm_core::{DevNo, OwnWork};
use udm_dm::{DeviceSetTransition, MappedDevice};

/// The numbers of a status line.
pub(super) struct CloneStatus {
    pub hydrated: u64,
    pub total: u64,
    pub hydrating: u64,
    pub mode: String,
}

impl CloneWorld {
    /// Does something to the device.
    pub(super) fn change_something(&mut self) -> Result<(), Violation> {
        self.volume.hot = self.machine.control.any() >> 1;
        match self.machine.control.below(10) {
            0..3 if self.on(DisturbanceClass::Suspend) => self.pause(),
            3..5 if self.on(DisturbanceClass::Reload) => self.reload(),
            5..8 if self.on(DisturbanceClass::Messages) => self.tell(),
            8 if self.on(DisturbanceClass::Remove) => self.remove_and_create(),
            9 if !self.target.is_mirror()
                && self.on(DisturbanceClass::Remove)
                && self.machine.control.one_in(2) =>
            {
                self.begin_anew()
            }
            _ => Ok(()),
        }
    }

    /// Draws a table.
    fn draw_table(&mut self) -> String {
        if self.is_switched {
            return format!("0 {} linear p{DESTINATION} 0", self.volume.sectors);
        }
        if self.target.is_mirror() {
            let (sectors, region) = (self.volume.sectors, self.region);
            let log = if self.has_log { format!("disk 2 p{METADATA}") } else { "core 1".into() };
            return format!(
                "0 {sectors} mirror {log} {region} 2 p{SOURCE} 0 p{DESTINATION} 0 1 handle_errors"
            );
        }
        let control = &mut self.machine.control;
        let features = control.pick(&[
            "0",
            "1 no_hydration",
            "1 no_hydration",
            "1 no_discard_passdown",
            "2 no_hydration no_discard_passdown",
        ]);
        let (threshold, batch) = (control.pick(&[0, 1, 4, 100]), control.pick(&[0, 1, 3, 64]));
        let regions = self.volume.sectors.div_ceil(self.region);
        let first = control.below(regions);
        let order = match control.below(3) {
            0 => String::new(),
            1 => format!(" hydrate_first {first}"),
            _ => format!(" hydrate_first {}-{},{first},0", first / 2, regions - 1),
        };
        let words = if order.is_empty() { 4 } else { 6 };
        format!(
            "0 {} clone p{METADATA} p{DESTINATION} p{SOURCE} {} {features} {words} \
             hydration_threshold {threshold} hydration_batch_size {batch}{order}",
            self.volume.sectors, self.region
        )
    }

    /// Creates the device, without a table.
    pub(super) fn create_device(&mut self) -> Result<(), Violation> {
        let mapped =
            MappedDevice::new("c", None, DevNo { major: 253, minor: 0 }).map_err(|e| e.to_string())?;
        self.mapped = Some(mapped);
        Ok(())
    }

    /// Loads a table of a clone. Returns false if storage failed.
    pub(super) fn load_clone(&mut self) -> Result<bool, Violation> {
        let words = self.draw_table();
        self.load(&words)
    }

    /// Loads a table. Returns false if storage failed.
    pub(super) fn load(&mut self, words: &str) -> Result<bool, Violation> {
        let Some(device) = self.mapped.clone() else { return Ok(false) };
        self.machine.say(format!("load: {words}"));
        let table = match self.build_table(words, Vec::new())? {
            Ok(table) => table,
            Err(None) => return Ok(false),
            Err(Some(error)) => return Err(format!("{words}: {error}")),
        };
        device.load(table).map_err(|e| format!("{words}: {e}"))?;
        Ok(true)
    }

    fn resume(&mut self) -> Result<CancellableResult, Violation> {
        let Some(device) = self.mapped.clone() else { return Ok(Ok(())) };
        let (woken, wake) = create_transition_wake_flag();
        self.machine.say("resume");
        let noflush = self.machine.control.one_in(2);
        self.machine.set_turn(None);
        let (has_new_table, begin) = (device.inactive().is_some(), 2 * self.machine.step);
        let devices = std::slice::from_ref(&device);
        let outcome = self.finish(DeviceSetTransition::resume(devices, noflush, &wake), &woken)?;
        if has_new_table && outcome.is_ok() {
            // Errors before the resume were of the old table.
            self.writable_since = begin;
        }
        self.look_at_limits();
        Ok(outcome)
    }

    pub(super) fn must_resume(&mut self) -> Result<(), Violation> {
        for _ in 0..1000 {
            match self.resume()? {
                Ok(()) => return Ok(()),
                Err(error) if error.errno == EINTR => {}
                Err(error) => return Err(format!("resume: {error}")),
            }
        }
        Err("the resume is cancelled each time".into())
    }

    fn suspend(&mut self) -> Result<CancellableResult, Violation> {
        let Some(device) = self.mapped.clone() else { return Ok(Ok(())) };
        let (woken, wake) = create_transition_wake_flag();
        self.machine.say("suspend");
        let noflush = self.machine.control.one_in(2);
        self.machine.set_turn(None);
        let devices = std::slice::from_ref(&device);
        let outcome = self.finish(DeviceSetTransition::suspend(devices, noflush, &wake), &woken)?;
        self.counts.suspends += u64::from(outcome.is_ok());
        Ok(outcome)
    }

    /// Suspends the device, and resumes it some time later.
    fn pause(&mut self) -> Result<(), Violation> {
        if self.suspend()?.is_err() {
            return Ok(());
        }
        for _ in 0..self.machine.control.below(60) {
            // With the power off, a suspended device makes no progress.
            if !self.is_dead() {
                self.one_step()?;
            }
        }
        self.must_resume()
    }

    /// Loads a new table that takes the live clone over.
    fn reload(&mut self) -> Result<(), Violation> {
        if !self.load_clone()? {
            return Ok(());
        }
        // More is hydrated between the load and the resume.
        for _ in 0..self.machine.control.below(200) {
            if !self.is_dead() {
                self.one_step()?;
            }
        }
        match self.resume()? {
            Ok(()) => self.counts.reloads += 1,
            Err(error) if error.errno == EINTR => self.mapped.iter().for_each(|mapped| mapped.clear()),
            Err(error) => return Err(format!("reload: {error}")),
        }
        Ok(())
    }

    /// Sends a message.
    fn tell(&mut self) -> Result<(), Violation> {
        if self.target.is_mirror() {
            let is_paused = self.machine.control.one_in(2);
            self.counts.messages += 1;
            self.set_paused(is_paused);
            return Ok(());
        }
        let words = self.machine.control.pick(&[
            "enable_hydration",
            "disable_hydration",
            "hydration_threshold 0",
            "hydration_threshold 2",
            "hydration_threshold 50",
            "hydration_batch_size 1",
            "hydration_batch_size 5",
        ]);
        self.message(words)
    }

    /// As a move does it: if the log of the mirror has failed, the record says that nobody
    /// continues from it, and then writes need it no more.
    pub(super) fn look_at_log(&mut self) {
        let live = self.mapped.as_ref().and_then(|mapped| mapped.live());
        for entry in live.iter().flat_map(|table| table.targets()) {
            let Some(mirror) = entry.target.as_mirror() else { continue };
            if mirror.report().log.is_some_and(|log| log.failure.is_some()) {
                self.machine.say("the log has failed");
                self.machine.set_turn(None);
                self.has_log = false;
                self.counts.lost_logs += 1;
                mirror.abandon_log();
            }
        }
    }

    /// Pauses the copies of a mirror, or starts them again.
    pub(super) fn set_paused(&mut self, is_paused: bool) {
        self.machine.say(format!("paused: {is_paused}"));
        self.machine.set_turn(None);
        let live = self.mapped.as_ref().and_then(|mapped| mapped.live());
        for entry in live.iter().flat_map(|table| table.targets()) {
            entry.target.as_mirror().inspect(|mirror| mirror.set_paused(is_paused));
        }
    }

    pub(super) fn message(&mut self, words: &str) -> Result<(), Violation> {
        let Some(mapped) = self.mapped.clone() else { return Ok(()) };
        self.machine.say(format!("message: {words}"));
        let all: Vec<String> = words.split(' ').map(str::to_string).collect();
        let mut names = DeviceResolver { paths: Vec::new(), fronts: Vec::new(), devices: Vec::new() };
        self.machine.set_turn(None);
        self.counts.messages += 1;
        let sent = mapped.send(0, &all, &mut names, &*self.machine.inboxes);
        sent.map(drop).map_err(|error| format!("message {words}: {error}"))
    }

    /// Stops requests, and waits for those in flight.
    fn close(&mut self) -> Result<(), Violation> {
        self.open = false;
        self.step_until(|world| {
            let mut lanes = world.machine.cores.iter().flat_map(|core| &core.open);
            lanes.all(|open| open.in_flight == 0 && open.lane.own_work() != OwnWork::Required)
        })
    }

    /// Removes the device after all of its requests. Its lanes stay open until it is quiesced, as a
    /// server keeps one open.
    fn remove(&mut self) -> Result<bool, Violation> {
        self.close()?;
        let Some(device) = self.mapped.clone() else { return Ok(false) };
        loop {
            if self.suspend()?.is_ok() {
                break;
            }
        }
        self.machine.close_lanes();
        loop {
            let (woken, wake) = create_transition_wake_flag();
            self.machine.set_turn(None);
            let devices = std::slice::from_ref(&device);
            match self.finish(DeviceSetTransition::remove(devices, &wake), &woken)? {
                Ok(()) => break,
                Err(error) if error.errno == EINTR => {}
                Err(error) => return Err(format!("the clone can't be removed: {error}")),
            }
        }
        self.mapped = None;
        drop(device);
        if self.is_dead() {
            return Ok(false);
        }
        let is_clone = !self.target.is_mirror();
        if is_clone && self.is_blamed(&[DESTINATION, METADATA], self.writable_since) {
            // What the metadata does not know is lost, as with the power.
            let step = self.machine.step;
            self.machine.model.crash(step);
        }
        Ok(true)
    }

    /// Removes the device, and creates it again from its metadata.
    fn remove_and_create(&mut self) -> Result<(), Violation> {
        if self.remove()? {
            self.counts.removals += 1;
            self.create()?;
        }
        Ok(())
    }

    /// Begins a new clone of the source over the same destination.
    fn begin_anew(&mut self) -> Result<(), Violation> {
        if !self.remove()? {
            return Ok(());
        }
        let mut env = lock_environment(&self.machine.env);
        let metadata = &mut env.disks[METADATA];
        (0..metadata.sectors()).for_each(|sector| metadata.blank(sector));
        env.say("the metadata is blank");
        drop(env);
        let now = 2 * self.machine.step;
        let sectors = self.volume.sectors;
        self.machine.model.cells.copy(&[SOURCE], DESTINATION, sectors, now, |_, _| true);
        self.counts.renewals += 1;
        self.create()
    }

    /// Creates the device and opens it. If storage fails, it is tried again without faults.
    pub(super) fn create(&mut self) -> Result<(), Violation> {
        self.create_device()?;
        let loaded = self.load_clone()? || self.load_without_faults()?;
        if self.is_dead() {
            return Ok(());
        }
        if !loaded {
            return Err("the clone can't be loaded".into());
        }
        self.must_resume()?;
        let status = self.status();
        self.was_complete = status.as_ref().is_some_and(|status| status.hydrated == status.total);
        let is_continued = self.has_log && status.is_some_and(|status| status.hydrated > 0);
        self.counts.continued += u64::from(is_continued);
        self.open()
    }

    fn load_without_faults(&mut self) -> Result<bool, Violation> {
        let was_calm = std::mem::replace(&mut lock_environment(&self.machine.env).calm, true);
        (0..self.machine.paths.len()).for_each(|path| self.machine.restore_path(path));
        // A run that was given up may still be in flight.
        let mut loaded = false;
        for _ in 0..100 {
            loaded = loaded || self.load_clone()?;
            if !loaded && !self.is_dead() {
                self.one_step()?;
            }
        }
        lock_environment(&self.machine.env).calm = was_calm;
        Ok(loaded)
    }

    /// The numbers of the status; `None` if there is no device, or its metadata failed.
    pub(super) fn status(&self) -> Option<CloneStatus> {
        let text = self.mapped.as_ref()?.status_text();
        let words: Vec<&str> = text.trim().split(' ').skip(3).collect();
        if self.target.is_mirror() {
            let (copied, total) = words.get(3)?.split_once('/')?;
            let mode = if words.get(5)?.contains('D') { "degraded" } else { "rw" };
            let (hydrated, total) = (copied.parse().ok()?, total.parse().ok()?);
            return Some(CloneStatus { hydrated, total, hydrating: 0, mode: mode.into() });
        }
        let (hydrated, total) = words.get(3)?.split_once('/')?;
        Some(CloneStatus {
            hydrated: hydrated.parse().ok()?,
            total: total.parse().ok()?,
            hydrating: words.get(4)?.parse().ok()?,
            mode: words.last()?.to_string(),
        })
    }
}
