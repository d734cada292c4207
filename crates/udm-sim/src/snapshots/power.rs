//! Rests, power cuts, and the checks of the state.

use super::control::parse_snapshot_status;
use super::volumes::OriginOrSnapshot;
use super::world::SnapshotWorld;
use crate::environment::lock_environment;
use crate::machine::Machine;
use crate::model::Violation;
use crate::power_cuts::{PowerCutWorld, PowerState};
use crate::turn::MachineWorld as _;

impl SnapshotWorld {
    /// Runs all steps of the plan, and quiesces the world.
    pub(super) fn run_all(&mut self) -> Result<(), Violation> {
        self.run_steps()?;
        self.rest()?;
        self.quiet()?;
        self.take_apart()
    }

    fn boot_devices(&mut self) -> Result<(), Violation> {
        let fails = |side: usize| Err(format!("s{side} can't be loaded, and nothing fails"));
        for side in 0..self.origins() {
            self.device(side)?;
            let loaded = self.put_floor(side)? && self.load_origin(side)?;
            // The merge of an invalid snapshot has no effect.
            let marked = self.sides[side].merging.is_some_and(|store| self.is_marked(store));
            if !loaded && marked && !self.is_dead() {
                (self.sides[side].merging, self.sides[side].base) = (None, self.word(side));
            }
            if !(loaded || marked && self.load_origin(side)?) {
                return if self.is_dead() { Ok(()) } else { fails(side) };
            }
        }
        // The snapshot continues: writes of an origin are copied from the first one on. Lower
        // snapshots come first.
        for side in self.origins()..self.sides.len() {
            let below = self.sides[side].origin;
            let there = self.sides[below].mapped.is_some();
            if !(there && self.sides[side].live && self.sides[side].is_persistent()) {
                self.forget(side);
                continue;
            }
            let device = self.device(side)?;
            if !self.load_snapshot(side, None)? {
                match self.is_marked(side) && !self.is_dead() {
                    true => self.forget(side),
                    false => return if self.is_dead() { Ok(()) } else { fails(side) },
                }
                continue;
            }
            self.must_resume(&[device])?;
            self.tell_settings(side)?;
            self.put_upper(side)?;
            if self.sides[side].upper.is_some() && !self.load_origin(side)? {
                return if self.is_dead() { Ok(()) } else { fails(side) };
            }
        }
        let all: Vec<usize> =
            (0..self.sides.len()).rev().filter(|&side| self.sides[side].mapped.is_some()).collect();
        for &side in &all {
            let origin = self.sides[side].origin == side || self.sides[side].upper.is_some();
            if let Some(door) = self.sides[side].door().cloned().filter(|_| origin) {
                self.must_resume(&[door])?;
            }
        }
        for side in all {
            self.open(side)?;
        }
        for side in self.origins()..self.sides.len() {
            let valid = self.sides[side].live && self.status(side) != "Invalid";
            self.counts.survived += u64::from(valid && self.counts.cuts > 0);
        }
        Ok(())
    }

    /// Removes a snapshot that was lost with the power.
    fn forget(&mut self, side: usize) {
        let base = self.word(side);
        let one = &mut self.sides[side];
        (one.mapped, one.live, one.merging, one.base) = (None, false, None, base);
    }

    /// Loads the origin table, or the table of the merge, into the top device of `side`.
    fn load_origin(&mut self, side: usize) -> Result<bool, Violation> {
        let merges = self.sides[side].merging.is_some();
        self.load_base(side, if merges { "snapshot-merge" } else { "snapshot-origin" }, None)
    }

    /// Reads every sector of every volume.
    fn read_back(&mut self) -> Result<(), Violation> {
        for side in &mut self.sides {
            side.check.set(if side.open { 0 } else { u64::MAX });
        }
        self.machine.reading = true;
        let read = self.step_until(|world| {
            world.is_dead() || world.sides.iter().all(|side| side.check.get() >= side.sectors)
        });
        self.machine.reading = false;
        self.sides.iter_mut().for_each(|side| side.check.set(u64::MAX));
        read?;
        self.step_until(|world| world.machine.model.in_flight() == 0)
    }

    /// Checks the status of the snapshots.
    fn look_at_status(&mut self) -> Result<(), Violation> {
        for side in self.origins()..self.sides.len() {
            if self.sides[side].mapped.is_none() {
                continue;
            }
            let status = self.status(side);
            let full = self.sides[side].small && self.sides[side].ends_full;
            let lost_below = self.causes(self.sides[side].origin).lost;
            let cause = full || lost_below || self.is_faulty(side);
            match &*status {
                "Invalid" if !cause => return Err(format!("s{side} is invalid without a reason")),
                "Invalid" => {
                    self.counts.invalid += u64::from(self.sides[side].invalid.is_none());
                    self.sides[side].invalid.get_or_insert(2 * self.machine.step);
                }
                _ if self.sides[side].invalid.is_some() => {
                    return Err(format!("s{side} was invalid, and is {status}"));
                }
                "Overflow" if !full || !self.sides[side].line.contains("PO") => {
                    return Err(format!("s{side} overflows without a reason"));
                }
                "Overflow" => self.counts.overflowed += 1,
                numbered => {
                    let size = lock_environment(&self.machine.env).disks[side].size;
                    let most = 16.max(
                        2 * self.sides[side].line.split(' ').nth(3).map_or(0, |n| n.parse().unwrap_or(0)),
                    );
                    let sane =
                        |(used, total, metadata)| metadata <= used && total == size && used <= total + most;
                    if !parse_snapshot_status(numbered).is_some_and(sane) {
                        return Err(format!("s{side} says {numbered}, and its store has {size}"));
                    }
                }
            }
        }
        Ok(())
    }

    /// Checks the events: the end of a snapshot raises one event, as does each failure of growth. A
    /// store that may overflow may raise more.
    fn look_at_events(&mut self) -> Result<(), Violation> {
        for side in self.origins()..self.sides.len() {
            let Some(mapped) = &self.sides[side].mapped else { continue };
            let raised = mapped.event_nr();
            let ended = self.sides[side].invalid.is_some();
            let may_overflow = self.sides[side].small && self.sides[side].line.contains("PO");
            if raised > u32::from(ended) + self.sides[side].stuck && !may_overflow {
                return Err(format!("s{side} has raised {raised} events, and is {}", self.status(side)));
            }
        }
        Ok(())
    }
}

impl PowerCutWorld for SnapshotWorld {
    fn parts(&self) -> (&Machine, &PowerState) {
        (&self.machine, &self.power)
    }

    fn parts_mut(&mut self) -> (&mut Machine, &mut PowerState) {
        (&mut self.machine, &mut self.power)
    }

    fn act(&mut self) -> Result<(), Violation> {
        self.change_something()
    }

    /// Quiesces the world without faults: first requests must complete while others are submitted,
    /// then all of them. Checks the devices, and reads all data back.
    fn rest(&mut self) -> Result<(), Violation> {
        self.machine.say("a rest");
        self.end_disturbances();
        self.make_room()?;
        if self.machine.control.one_in(2) && !self.is_dead() {
            self.check_no_starvation()?;
        }
        self.quiet()?;
        self.machine.check_goes_idle()?;
        self.machine.paths_are_empty()?;
        if !self.is_dead() {
            self.look_at_status()?;
            self.look_at_events()?;
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
        self.boot_devices()?;
        if !self.is_dead() {
            self.read_back()?;
        }
        if !self.is_dead() {
            self.look_at_status()?;
        }
        self.go_on();
        Ok(())
    }

    fn make_room(&mut self) -> Result<bool, Violation> {
        self.enlarge_full_stores()
    }

    fn before_turn(&mut self) {
        self.do_asked();
    }

    fn after_turn(&mut self) -> Result<(), Violation> {
        self.look_at_maps()
    }

    fn after_change_step(&mut self) -> Result<(), Violation> {
        self.look_at_tables()
    }

    fn before_power_cut(&mut self) {
        self.counts.cuts += 1;
        self.counts.cut_merges += u64::from(self.sides.iter().any(|side| side.merging.is_some()));
        let grouped = |side: &OriginOrSnapshot| side.coming.as_ref().is_some_and(|c| c.group.len() > 1);
        let together = |side: &OriginOrSnapshot| {
            let same = |other: &OriginOrSnapshot| other.live && other.since == side.since;
            side.live && self.sides.iter().any(|other| same(other) && !std::ptr::eq(other, side))
        };
        self.counts.cut_groups += u64::from(self.sides.iter().any(|side| grouped(side) || together(side)));
        self.sides.iter_mut().for_each(|side| side.whole_runs = false);
    }

    fn count_cancel(&mut self) {
        self.counts.cancels += 1;
    }

    fn drop_devices(&mut self) {
        for one in self.sides.iter_mut().rev() {
            let gone = [one.upper.take(), one.mapped.take(), one.floor.take()];
            (one.open, one.coming, one.invalid) = (false, None, None);
            one.stuck = 0;
            one.check.set(u64::MAX);
            drop(gone);
        }
    }
}
