//! Random choice of verbs, and other random actions.

use super::backends::NAMES as DISKS;
use super::expected_results::{FAIL_PATH, KEEP};
use super::file::DeclaredDevice;
use super::multipath::POLICIES;
use super::observation::format_device_number;
use super::verb_jobs::ControlVerb;
use super::world::RegistryWorld;
use crate::environment::{PathMode, lock_environment};
use crate::model::Violation;
use crate::plan::{DisturbanceClass, ExcludedDisturbances};
use crate::rng::SimRng;
use udm_control::registry::OPENED_MAJOR;
use udm_control::verbs::{self, RemoveOptions};

/// Device names that clients use.
pub(super) const NAMES: [&str; 4] = ["n0", "n1", "n2", "n3"];

/// Maximum number of clients that wait for events.
const WAITS_MAX: usize = 6;

/// UUIDs of some devices.
pub(super) const UUIDS: [&str; 3] = ["u0", "u1", "u2"];

/// Generator of random verbs.
pub(super) struct VerbGenerator {
    pub(super) chance: SimRng,
    pub(super) without: ExcludedDisturbances,
    /// True if most verbs name the same device.
    pub(super) crowded: bool,
}

impl VerbGenerator {
    /// Draws the next verb.
    pub(super) fn verb(&mut self) -> ControlVerb {
        let without = self.without;
        let on = |class| !without.has(class);
        match self.chance.below(47) {
            0..8 => {
                let name = self.name();
                let table = (self.chance.below(4) > 0).then(|| self.table(name));
                let uuid = self.chance.one_in(2).then(|| self.chance.pick(&UUIDS).to_owned());
                ControlVerb::Create { name: NAMES[name].into(), uuid, table }
            }
            8..13 if on(DisturbanceClass::Reload) => {
                let name = self.name();
                ControlVerb::Load { table: self.table(name), word: NAMES[name].into() }
            }
            13 => ControlVerb::Clear { word: self.word() },
            14..17 if on(DisturbanceClass::Suspend) => {
                ControlVerb::Suspend { words: self.words(), noflush: self.chance.one_in(2) }
            }
            17..21 => ControlVerb::Resume { words: self.words() },
            21..27 if on(DisturbanceClass::Remove) => {
                let how = RemoveOptions { force: self.chance.one_in(5), deferred: self.chance.one_in(3) };
                ControlVerb::Remove { word: self.word(), how }
            }
            27..30 if on(DisturbanceClass::Messages) => {
                let text = match self.chance.one_in(3) {
                    true => KEEP.to_owned(),
                    false => format!("{FAIL_PATH} {}", self.chance.pick(&DISKS)),
                };
                ControlVerb::Message { word: self.word(), text }
            }
            30..34 => {
                let uuid = self.chance.one_in(4);
                let to = if uuid { self.chance.pick(&UUIDS) } else { NAMES[self.name()] };
                ControlVerb::Rename { word: self.word(), to: to.into(), uuid }
            }
            34..37 => {
                let name = self.name();
                let uuid = self.chance.one_in(2).then(|| self.chance.pick(&UUIDS).to_owned());
                let policy = self.chance.one_in(2).then(|| self.chance.pick(&POLICIES).to_owned());
                let paths: Vec<String> = (0..self.chance.below(4)).map(|_| self.path()).collect();
                ControlVerb::Multipath { name: NAMES[name].into(), uuid, paths: paths.join(" "), policy }
            }
            37..41 => ControlVerb::Wait { word: self.word(), event: u32::from(self.chance.one_in(4)) },
            41..45 if on(DisturbanceClass::Reload) => {
                ControlVerb::Reconfigure { dry_run: self.chance.one_in(5) }
            }
            _ => ControlVerb::Look { word: self.word() },
        }
    }

    fn name(&mut self) -> usize {
        match self.crowded && self.chance.below(4) > 0 {
            true => 0,
            false => self.chance.below(NAMES.len() as u64) as usize,
        }
    }

    /// Draws a device by its name, uuid or number.
    fn word(&mut self) -> String {
        match self.chance.below(6) {
            0 => self.chance.pick(&UUIDS).into(),
            1 => format_device_number(self.chance.below(4) as u32),
            _ => NAMES[self.name()].into(),
        }
    }

    fn words(&mut self) -> Vec<String> {
        let mut words = vec![self.word()];
        if self.chance.one_in(4) {
            words.push(self.word());
        }
        words
    }

    /// Changes the configuration file.
    fn file(&mut self, file: &mut Vec<DeclaredDevice>) {
        let name = self.chance.below(NAMES.len() as u64) as usize;
        file.retain(|wanted| wanted.name != NAMES[name]);
        if self.chance.one_in(3) {
            return;
        }
        let mut table = self.table(name);
        if table.contains("nonsense") && !self.chance.one_in(3) {
            table = "0 16 zero".into();
        }
        let uuid = self.chance.one_in(6).then(|| self.chance.pick(&UUIDS).to_owned());
        let read_only = self.chance.one_in(8);
        let place = self.chance.below(file.len() as u64 + 1) as usize;
        file.insert(place, DeclaredDevice { name: NAMES[name].into(), uuid, table, read_only });
    }

    /// Draws a path of a multipath device.
    fn path(&mut self) -> String {
        match !self.without.has(DisturbanceClass::Stacks) && self.chance.one_in(8) {
            true => format!("@{}", self.chance.pick(&NAMES)),
            false => self.chance.pick(&DISKS).into(),
        }
    }

    /// Draws a table for the device of `name`.
    fn table(&mut self, name: usize) -> String {
        let disk = self.chance.pick(&DISKS);
        let stacks = !self.without.has(DisturbanceClass::Stacks);
        match self.chance.below(16) {
            0 => "0 8 nonsense".into(),
            1 => "0 16 zero".into(),
            2 => "0 8 error\n8 8 zero".into(),
            // Mostly lower names, so that there is no cycle.
            3..7 if stacks => {
                let below = if name > 0 { self.chance.below(name as u64) } else { self.chance.below(4) };
                format!("0 8 linear @{} 0", NAMES[below as usize])
            }
            7 if stacks => format!("0 16 striped 2 8 @{} 0 {disk} 0", self.chance.pick(&NAMES)),
            8 => format!("0 8 linear {OPENED_MAJOR}:{} 0", self.chance.below(6)),
            9 if stacks => format!("0 8 linear {} 0", format_device_number(self.chance.below(4) as u32)),
            10..12 => {
                let other = self.chance.pick(&DISKS[..3]);
                format!("0 16 multipath 0 0 1 1 round-robin 0 2 1 {disk} 1 {other} 1")
            }
            _ => format!("0 16 linear {disk} 0"),
        }
    }
}

impl RegistryWorld {
    /// Performs random actions.
    pub(super) fn disturb(&mut self) -> Result<(), Violation> {
        let waits = self.jobs.iter().filter(|job| matches!(job.verb, ControlVerb::Wait { .. })).count();
        if self.jobs.len() - waits < self.jobs_max && self.work.one_in(3) {
            let verb = self.draw.verb();
            if waits < WAITS_MAX || !matches!(verb, ControlVerb::Wait { .. }) {
                self.begin(verb);
            }
        }
        if self.on(DisturbanceClass::Reload) && self.work.one_in(30) {
            let RegistryWorld { draw, model, work, .. } = self;
            draw.file(&mut model.config.file);
            model.config.is_broken = work.one_in(12);
        }
        if self.on(DisturbanceClass::Cancel) && !self.jobs.is_empty() && self.work.one_in(40) {
            let at = self.work.below(self.jobs.len() as u64) as usize;
            match self.jobs[at].waits_for_event() && self.work.one_in(2) {
                // As when the server ends a wait.
                true => drop(self.jobs.swap_remove(at)),
                false => self.hang_up(at),
            }
        }
        if self.work.one_in(30) && self.clients.len() < 4 {
            self.come()?;
        }
        if self.work.one_in(40) && !self.clients.is_empty() {
            let at = self.work.below(self.clients.len() as u64) as usize;
            self.go(at)?;
        }
        if self.on(DisturbanceClass::Paths) && self.work.one_in(100) {
            let (name, disk) = (self.work.below(3) as usize, self.work.below(3) as usize);
            self.outside.world().leads[name] = disk;
            self.counts.moved += 1;
            self.machine.say(format!("{} leads to disk {disk}", DISKS[name]));
        }
        if self.on(DisturbanceClass::Hang) && self.work.one_in(100) {
            let path = self.work.below(self.machine.paths.len() as u64) as usize;
            let was =
                std::mem::replace(&mut lock_environment(&self.machine.env).paths[path].mode, PathMode::Hung);
            if was == PathMode::Hung {
                self.machine.restore_path(path);
            }
        }
        if self.on(DisturbanceClass::Opens) && self.work.one_in(60) {
            let nth = self.work.below(4);
            lock_environment(&self.machine.env).open_fails = Some(nth);
        }
        Ok(())
    }

    /// Disconnects the client of a verb.
    pub(super) fn hang_up(&mut self, at: usize) {
        let job = &mut self.jobs[at];
        if !std::mem::replace(&mut job.hung_up, true) {
            self.counts.hung_up += 1;
            job.off.cancel(verbs::interrupted_error("the client hung up"));
            let text = format!("the client of {} hangs up", job.id);
            self.machine.say(text);
        }
    }
}
