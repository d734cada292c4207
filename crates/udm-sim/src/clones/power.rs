//! Rests, power cuts, and the checks of the state.

use super::world::{CloneWorld, DESTINATION, METADATA, SOURCE};
use crate::control_io::SimTableLoadIo;
use crate::environment::lock_environment;
use crate::machine::Machine;
use crate::model::Violation;
use crate::power_cuts::{PowerCutWorld, PowerState};
use crate::turn::MachineWorld as _;
use std::sync::Arc;
use udm_core::control_io::flush_device;
use udm_core::{Device, Nanos};

impl CloneWorld {
    /// Runs all steps of the plan, and quiesces the world.
    pub(super) fn run_all(&mut self) -> Result<(), Violation> {
        self.run_steps()?;
        loop {
            self.end_power_cut()?;
            self.rest()?;
            if !self.is_dead() {
                self.end_as_linear()?;
            }
            if !self.is_dead() {
                break;
            }
        }
        self.quiet()?;
        self.take_apart()
    }

    /// Reads every sector.
    fn read_back(&mut self) -> Result<(), Violation> {
        self.volume.check.set(if self.open { 0 } else { u64::MAX });
        self.machine.reading = true;
        let read =
            self.step_until(|world| world.is_dead() || world.volume.check.get() >= world.volume.sectors);
        self.machine.reading = false;
        self.volume.check.set(u64::MAX);
        read?;
        self.step_until(|world| world.machine.model.in_flight() == 0)
    }

    /// Checks the status and the events.
    fn look_at_status(&mut self) -> Result<(), Violation> {
        let Some(mapped) = self.mapped.clone() else { return Ok(()) };
        let disks: &[usize] =
            if self.target.is_mirror() { &[SOURCE, DESTINATION, METADATA] } else { &[DESTINATION, METADATA] };
        let is_excused = self.is_blamed(disks, self.writable_since);
        if self.is_switched {
            return Ok(());
        }
        let Some(status) = self.status() else {
            self.counts.broken += 1;
            return if is_excused { Ok(()) } else { Err("the metadata failed without a reason".into()) };
        };
        let regions = self.volume.sectors.div_ceil(self.region);
        if status.total != regions || status.hydrated > regions {
            return Err(format!(
                "{} of {} regions are hydrated, and there are {regions}",
                status.hydrated, status.total
            ));
        }
        if status.mode != "rw" {
            self.counts.broken += 1;
            if !is_excused {
                return Err(format!("the metadata is {} without a reason", status.mode));
            }
        }
        let is_complete = status.hydrated == regions;
        self.counts.complete += u64::from(is_complete);
        if is_complete && status.hydrating > 0 {
            return Err("all regions are hydrated, and some are being hydrated".into());
        }
        // The changes of modes raise events too.
        let raised = mapped.event_nr();
        if raised > 1 && !self.power.fails {
            return Err(format!("{raised} events were raised, and nothing has failed"));
        }
        if raised > 0 && !is_complete && !self.power.fails {
            return Err("an event was raised, and the clone is not complete".into());
        }
        Ok(())
    }

    /// Checks that the source is unchanged.
    fn look_at_source(&self) -> Result<(), Violation> {
        if self.target.is_mirror() {
            return Ok(());
        }
        let env = lock_environment(&self.machine.env);
        let source = &env.disks[SOURCE];
        let changed = (0..source.sectors()).find(|sector| source.read(*sector) != self.source_stamp(*sector));
        changed.map_or(Ok(()), |sector| Err(format!("sector {sector} of the source has changed")))
    }

    /// Hydrates all regions, and replaces the clone by a linear table over the destination.
    fn end_as_linear(&mut self) -> Result<(), Violation> {
        self.end_disturbances();
        // Metadata that failed becomes writable with a new table.
        if !self.load_clone()? {
            return if self.is_dead() { Ok(()) } else { Err("the clone can't be loaded".into()) };
        }
        self.must_resume()?;
        if self.is_switched {
            return self.read_back();
        }
        if self.target.is_mirror() {
            return self.switch();
        }
        for words in ["enable_hydration", "hydration_threshold 20", "hydration_batch_size 4"] {
            self.message(words)?;
        }
        let is_complete = |world: &CloneWorld| {
            world.status().is_some_and(|status| status.hydrated == status.total && status.mode == "rw")
        };
        let from = lock_environment(&self.machine.env).now;
        while !is_complete(self) && !self.is_dead() {
            if lock_environment(&self.machine.env).now.since(from) > Nanos::from_millis(100_000) {
                let text = self.mapped.as_ref().map(|mapped| mapped.status_text()).unwrap_or_default();
                return Err(format!("the clone is not hydrated in 100 s: {text}"));
            }
            self.one_step()?;
        }
        self.quiet()?;
        if self.is_dead() {
            return Ok(());
        }
        let raised = self.mapped.as_ref().map_or(0, |mapped| mapped.event_nr());
        if raised == 0 && !self.was_complete {
            return Err("the clone is complete, and no event was raised".into());
        }
        self.counts.complete += 1;
        let linear = format!("0 {} linear p{DESTINATION} 0", self.volume.sectors);
        if !self.load(&linear)? {
            return if self.is_dead() { Ok(()) } else { Err("the linear table can't be loaded".into()) };
        }
        self.must_resume()?;
        self.is_linear = true;
        self.read_back()?;
        self.counts.linear += 1;
        Ok(())
    }

    /// Waits until a mirror is complete, and replaces it by its destination while requests go on.
    fn switch(&mut self) -> Result<(), Violation> {
        let is_complete =
            |world: &CloneWorld| world.status().is_some_and(|status| status.hydrated == status.total);
        let from = lock_environment(&self.machine.env).now;
        while !is_complete(self) && !self.is_dead() {
            if lock_environment(&self.machine.env).now.since(from) > Nanos::from_millis(100_000) {
                return Err("the mirror is not complete in 100 s".into());
            }
            self.one_step()?;
        }
        // Requests are in flight during all of the switch.
        self.machine.resting = false;
        let live = self.mapped.as_ref().and_then(|mapped| mapped.live());
        let Some(entry) = live.as_ref().and_then(|table| table.targets().first()) else { return Ok(()) };
        let Some(mirror) = entry.target.as_mirror() else { return Err("it is no mirror".into()) };
        self.machine.say("a write needs both");
        match mirror.begin_switch() {
            Ok(()) => {}
            Err(_) if self.is_dead() => return Ok(()),
            Err(error) => return Err(format!("the switch does not begin: {error}")),
        }
        let steps = self.machine.control.below(60);
        self.some_steps(steps)?;
        let destination = Arc::clone(&self.machine.fronts[DESTINATION]) as Arc<dyn Device>;
        let io = SimTableLoadIo::new(self);
        let flushed = flush_device(&io, &destination);
        io.verdict()?;
        if self.is_dead() {
            return Ok(());
        }
        if flushed.is_err() {
            if !self.power.fails {
                return Err("the destination cannot be flushed".into());
            }
            // As a move does it: the source stays the disk.
            self.machine.say("the switch is taken back");
            mirror.cancel_switch();
            self.quiet()?;
            return self.read_back();
        }
        // The record of the move.
        self.machine.say("the destination is the disk");
        self.is_switched = true;
        let steps = self.machine.control.below(60);
        self.some_steps(steps)?;
        if self.is_dead() || !self.load_clone()? {
            return if self.is_dead() { Ok(()) } else { Err("the linear table can't be loaded".into()) };
        }
        self.must_resume()?;
        self.is_linear = true;
        self.counts.complete += 1;
        self.quiet()?;
        self.read_back()?;
        self.counts.linear += 1;
        Ok(())
    }

    fn some_steps(&mut self, steps: u64) -> Result<(), Violation> {
        for _ in 0..steps {
            if !self.is_dead() {
                self.one_step()?;
            }
        }
        Ok(())
    }
}

impl PowerCutWorld for CloneWorld {
    fn parts(&self) -> (&Machine, &PowerState) {
        (&self.machine, &self.power)
    }

    fn parts_mut(&mut self) -> (&mut Machine, &mut PowerState) {
        (&mut self.machine, &mut self.power)
    }

    fn act(&mut self) -> Result<(), Violation> {
        self.change_something()
    }

    fn before_turn(&mut self) {
        if self.has_log && self.power.fails {
            self.look_at_log();
        }
    }

    /// Quiesces the world without faults: first requests must complete while others are submitted,
    /// then all of them. Checks the device, and reads all data back.
    fn rest(&mut self) -> Result<(), Violation> {
        self.machine.say("a rest");
        self.end_disturbances();
        if self.machine.control.one_in(2) && !self.is_dead() {
            self.check_no_starvation()?;
        }
        self.quiet()?;
        self.machine.check_goes_idle()?;
        if !self.is_dead() {
            self.look_at_status()?;
            self.look_at_source()?;
        }
        self.read_back()?;
        self.machine.totals.rests += 1;
        self.go_on();
        Ok(())
    }

    fn boot(&mut self) -> Result<(), Violation> {
        self.machine.make_cores(self.count);
        lock_environment(&self.machine.env).calm = true;
        self.machine.resting = true;
        self.create()?;
        if !self.is_dead() {
            self.read_back()?;
        }
        self.go_on();
        Ok(())
    }

    fn before_power_cut(&mut self) {
        let partly = self.status().is_some_and(|status| (1..status.total).contains(&status.hydrated));
        self.counts.cuts[0] += 1;
        self.counts.cuts[1] += u64::from(partly);
    }

    fn count_cancel(&mut self) {
        self.counts.cancels += 1;
    }

    fn drop_devices(&mut self) {
        self.open = false;
        self.volume.check.set(u64::MAX);
        drop(self.mapped.take());
    }
}
