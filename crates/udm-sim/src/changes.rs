//! Suspends and resumes in progress: their steps, completion, cancellation and refusal.

use crate::control::error_to_violation;
use crate::device::{DevicePhase, RunningSuspendOrResume};
use crate::dust_model::DustLine;
use crate::environment::lock_environment;
use crate::model::Violation;
use crate::path::NO_LANE;
use crate::tables::{FlakeyFault, TableLineTarget};
use crate::timers::TimedEvent;
use crate::world::MappedDeviceStackWorld;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use udm_core::errno::EINTR;
use udm_core::{Device as _, Nanos};
use udm_dm::TargetError;

/// Maximum number of events that failures of a striped line raise: 14 per stripe.
fn max_striped_failure_events(kind: &TableLineTarget) -> u64 {
    match kind {
        TableLineTarget::Striped { of, .. } => 14 * of.len() as u64,
        _ => 0,
    }
}

impl MappedDeviceStackWorld {
    /// Continues the suspends and resumes that were woken.
    pub fn step_changes(&mut self) -> Result<(), Violation> {
        for i in 0..self.devices.len() {
            let Some(running) = self.devices[i].running.clone() else { continue };
            if running.borrow().woken.swap(false, Ordering::Relaxed) {
                self.step_change(&running)?;
            }
        }
        Ok(())
    }

    fn step_change(&mut self, running: &RefCell<RunningSuspendOrResume>) -> Result<(), Violation> {
        let several = running.borrow().devices.clone();
        let result = running.borrow_mut().changes.step(&*self.machine.inboxes);
        let cancelled = running.borrow().cancelled;
        self.sample_lower_limits(&several);
        // A change that was cancelled or refused keeps the live table.
        for &i in &several {
            let goes_on = self.machine.inboxes.took_resume(self.devices[i].mapped.id());
            let waits = self.devices[i].loaded.is_some();
            // All tables are swapped at one instant. The cores are told after the lower devices
            // have resumed.
            if !cancelled && self.has_new_table(i) && (waits || goes_on) {
                if waits {
                    self.check_quiesced(&several, running)?;
                }
                self.swap(i)?;
                self.update_suspended_users();
            } else if !cancelled && goes_on {
                self.keep_live_table(i);
                self.update_suspended_users();
            }
        }
        let Some(result) = result else { return Ok(()) };
        let past = running.borrow().past;
        for i in several {
            self.devices[i].running = None;
            let result = result.clone().map_err(|(_, error)| error);
            let refused = result.as_ref().is_err_and(|e| e.errno == NO_LANE) && !past;
            if refused && lock_environment(&self.machine.env).seen.refused == 0 {
                return Err(format!(
                    "d{i} reports that a lane could not be opened, but every open succeeded"
                ));
            }
            if refused || (cancelled && result.as_ref().is_err_and(|e| e.errno == EINTR)) {
                if self.devices[i].loaded.is_some() && self.has_new_table(i) {
                    return Err(format!("d{i} uses a new table, but the change was cancelled or refused"));
                }
                self.machine.totals.refused += u64::from(refused);
                self.keep_live_table(i);
                self.called_off(i);
                continue;
            }
            self.changed(i, result)?;
        }
        Ok(())
    }

    /// Records the expected limits of new tables whose lanes the cores were just told to open.
    /// Lower devices come first.
    fn sample_lower_limits(&mut self, several: &[usize]) {
        let mut sorted = several.to_vec();
        sorted.sort_unstable();
        for i in sorted {
            if !self.machine.inboxes.took_prepare(self.devices[i].mapped.id()) {
                continue;
            }
            if let Some(spec) = self.devices[i].loaded.as_ref().map(|l| l.spec.clone()) {
                let coming = |d: usize| {
                    let loaded = self.devices[d].loaded.as_ref().filter(|_| several.contains(&d));
                    loaded.and_then(|l| l.expected).unwrap_or(self.devices[d].expected)
                };
                let expected = Some(self.expected(&spec, &coming));
                self.devices[i].loaded.iter_mut().for_each(|l| l.expected = expected);
            }
        }
    }

    /// Checks that no device of `several` has a request in flight when the first of them takes its
    /// new table.
    fn check_quiesced(
        &self,
        several: &[usize],
        running: &RefCell<RunningSuspendOrResume>,
    ) -> Result<(), Violation> {
        if std::mem::replace(&mut running.borrow_mut().past, true) || several.len() < 2 {
            return Ok(());
        }
        let changes = |i: &usize| self.devices[*i].loaded.is_some() || self.devices[*i].mapped.is_suspended();
        let env = lock_environment(&self.machine.env);
        for p in 0..env.paths.len() {
            let mut users = (0..self.devices.len()).filter(|u| self.devices[*u].spec.paths().contains(&p));
            let ours = |u: usize| several.contains(&u) && changes(&u);
            if users.clone().next().is_some() && users.all(ours) && env.paths[p].in_flight > 0 {
                let n = env.paths[p].in_flight;
                return Err(format!(
                    "several devices go on with new tables, and {n} requests are in flight on p{p}"
                ));
            }
        }
        Ok(())
    }

    /// True if the loaded table is live, or if no table was loaded.
    fn has_new_table(&self, i: usize) -> bool {
        let device = &self.devices[i];
        let live = device.mapped.live();
        device.loaded.as_ref().is_none_or(|l| live.is_some_and(|t| Arc::as_ptr(&t) == l.table.as_ptr()))
    }

    /// Cancels a suspend or resume of device `i`, for all its devices. It may be too late to
    /// cancel.
    pub fn cancel(&mut self, i: usize) {
        let Some(running) = self.devices[i].running.clone() else { return };
        let mut running = running.borrow_mut();
        if !running.changes.cancel(&*self.machine.inboxes) {
            return;
        }
        lock_environment(&self.machine.env)
            .say(format!("d{i} goes back on {}", self.devices[i].phase.doing()));
        self.machine.totals.cancels += 1;
        running.woken.store(true, Ordering::Relaxed);
        running.cancelled = true;
        for &i in &running.devices {
            self.keep_live_table(i);
        }
    }

    /// Cancels one of two changes that wait for each other. This happens if each has a device above
    /// a device of the other. Returns false if there are none.
    pub(crate) fn cancel_deadlocked_change(&mut self) -> bool {
        self.machine.set_turn(None);
        let count = self.devices.len();
        let crossed = (0..count).filter(|&one| (0..count).any(|other| self.is_deadlocked(one, other)));
        crossed.collect::<Vec<_>>().into_iter().any(|one| {
            self.cancel(one);
            self.devices[one].running.as_ref().is_some_and(|running| running.borrow().cancelled)
        })
    }

    /// True if the changes of these two devices may wait for each other.
    fn is_deadlocked(&self, one: usize, other: usize) -> bool {
        let [Some(first), Some(second)] = [one, other].map(|i| self.devices[i].running.as_ref()) else {
            return false;
        };
        if Rc::ptr_eq(first, second) || [first, second].iter().any(|running| running.borrow().cancelled) {
            return false;
        }
        let (first, second) = (&first.borrow().devices, &second.borrow().devices);
        let lies_on = |upper: &[usize], lower: &[usize]| {
            upper.iter().any(|&upper| self.below(upper).iter().any(|d| lower.contains(d)))
        };
        lies_on(first, second) && lies_on(second, first)
    }

    /// Returns the devices below `i`, direct and indirect.
    fn below(&self, i: usize) -> Vec<usize> {
        let mut all = vec![i];
        let mut at = 0;
        while let Some(&d) = all.get(at) {
            let device = &self.devices[d];
            let specs = [Some(&device.spec), device.loaded.as_ref().map(|loaded| &loaded.spec)];
            for lower in specs.into_iter().flatten().flat_map(|spec| spec.devices()) {
                if !all.contains(&lower) {
                    all.push(lower);
                }
            }
            at += 1;
        }
        all.split_off(1)
    }

    /// Restores the map of the live table if the new one is not in use yet.
    fn keep_live_table(&mut self, i: usize) {
        let device = &mut self.devices[i];
        if let (DevicePhase::Resuming(_), Some(before), Some(loaded)) =
            (device.phase, device.before.clone(), &mut device.loaded)
        {
            loaded.expected = None;
            self.machine.model.remap(i, &before);
            device.maps = vec![before];
        }
    }

    /// Switches the model of device `i` to the loaded table, as the cores are told to use it.
    fn swap(&mut self, i: usize) -> Result<(), Violation> {
        if self.blueprint.logger == Some(i) && self.devices[i].loaded.is_some() {
            // The old log is complete: check it one last time.
            self.look_at_log()?;
        }
        self.count_lost(i);
        let device = &mut self.devices[i];
        let Some(loaded) = device.loaded.take() else { return Ok(()) };
        let mut env = lock_environment(&self.machine.env);
        if let Some(old) = device.access {
            env.accesses[old].live = false;
            let disk = env.accesses[old].disk;
            env.recheck(disk);
        }
        if let Some(new) = loaded.access {
            env.refresh(new);
        }
        device.free_access = std::mem::replace(&mut device.access, loaded.access).or(device.free_access);
        device.maps = vec![loaded.map];
        device.spec = loaded.spec;
        device.dust = DustLine::of(&device.spec, self.blueprint.is_free(i));
        device.events.1 +=
            device.spec.lines.iter().map(|(_, kind)| max_striped_failure_events(kind)).sum::<u64>();
        device.expected =
            loaded.expected.ok_or_else(|| format!("d{i} took a table that it did not look at"))?;
        device.spec.lines.iter().for_each(|(_, kind)| self.machine.totals.see(kind));
        device.limits = device.mapped.limits();
        device.expected.compare(&device.limits).map_err(|e| format!("d{i} uses a new table and {e}"))?;
        for lossy in &device.maps[0].lossy {
            if matches!(
                lossy.flaw,
                FlakeyFault::CorruptByte(_, true, _) | FlakeyFault::RandomCorrupt(true, _)
            ) {
                device.maps[0].disks.iter().for_each(|d| env.disks[*d].tainted = true);
            }
        }
        env.say(format!("d{i} uses its new table"));
        if self.blueprint.logger == Some(i) && !self.blueprint.over_log {
            self.log.restart(&device.spec);
        }
        Ok(())
    }

    /// Records that a change was cancelled and that the device is live as before.
    fn called_off(&mut self, i: usize) {
        lock_environment(&self.machine.env).say(format!("d{i} is in use again"));
        self.devices[i].enter(DevicePhase::Live);
        self.hold(i, false);
        self.forget_checks(i);
        self.update_suspended_users();
    }

    fn changed(&mut self, i: usize, result: Result<(), TargetError>) -> Result<(), Violation> {
        let phase = self.devices[i].phase;
        lock_environment(&self.machine.env).say(format!("d{i} is done {}", self.devices[i].doing()));
        result.map_err(error_to_violation(format!("d{i} {}", self.devices[i].doing())))?;
        if phase == DevicePhase::Suspending {
            self.devices[i].enter(DevicePhase::Suspended);
            self.update_suspended_users();
            let mut env = lock_environment(&self.machine.env);
            for p in self.devices[i].spec.paths() {
                let path = &env.paths[p];
                if path.suspended_users > 0 && path.in_flight > 0 {
                    return Err(format!(
                        "d{i} is suspended with {} requests in flight on p{p}",
                        path.in_flight
                    ));
                }
            }
            let at = env.now + Nanos(env.chance.below(200_000_000));
            self.machine.timers.set(at, TimedEvent::Resume(i));
            return Ok(());
        }
        if self.devices[i].loaded.is_some() {
            return Err(format!("d{i} was resumed and did not take its new table"));
        }
        self.devices[i].enter(DevicePhase::Live);
        self.devices[i].before = None;
        self.devices[i].limits = self.devices[i].mapped.limits();
        self.hold(i, false);
        self.forget_checks(i);
        self.update_suspended_users();
        Ok(())
    }
}
