//! A registry world: cores, the registry and its clients, which run on one thread in an order drawn
//! from a seed.

use super::backends::{NAMES as DISKS, SimDiskOpener};
use super::clients::DeviceReadClient;
use super::counts::RegistryCounts;
use super::driver::{self, RegistryStepOutsideBorrow};
use super::expected_results::KEEP;
use super::file::DeclaredDevice;
use super::generator::VerbGenerator;
use super::model::{LastRegistryActor, RegistryModel};
use super::observation::format_device_number;
use super::verb_jobs::{ControlVerb, ControlVerbJob, RefusalReasonCounts, VerbOutcome, WakeableFuture};
use crate::counts::CombinedRunHash;
use crate::disk::SimDisk;
use crate::environment::{Env, SimPathState, lock_environment};
use crate::machine::Machine;
use crate::model::Violation;
use crate::plan::{DisturbanceClass, RunPlan};
use crate::register_model::SectorRegisterModel;
use crate::rng::{RngStream, SimRng};
use crate::turn::MachineWorld;
use std::convert::Infallible;
use std::sync::Arc;
use std::task::Poll;
use udm_control::DeviceRegistry;
use udm_control::config::DesiredState;
use udm_control::exports::{DeviceExporter, ExportOptions};
use udm_control::registry::BaseDir;
use udm_control::{config, verbs};
use udm_core::Nanos;
use udm_frontends::nbd::{Export, Exports};

/// Sectors of a disk.
const SECTORS: u64 = 64;

/// A simulated world of the registry and its clients.
pub(super) struct RegistryWorld {
    pub(super) machine: Machine,
    registry: Arc<DeviceRegistry>,
    pub(super) exports: Arc<Exports>,
    pub(super) outside: SimDiskOpener,
    pub(super) jobs: Vec<ControlVerbJob>,
    /// The task of deferred removals.
    pub(super) deferred: Option<WakeableFuture<Infallible>>,
    pub(super) clients: Vec<DeviceReadClient>,
    pub(super) model: RegistryModel,
    pub(super) draw: VerbGenerator,
    pub(super) work: SimRng,
    ids: u64,
    pub(super) jobs_max: usize,
    pub(super) resting: bool,
    pub(super) rest_at: u64,
    /// The verb that is loading a table, the table, and the number of the inspection at its start.
    /// `beside` is true while others run during the load.
    pub(super) loading: Option<(u64, String, u64)>,
    pub(super) beside: bool,
    /// A violation found while others ran.
    pub(super) wrong: Option<Violation>,
    pub(super) counts: RegistryCounts,
}

impl RegistryWorld {
    pub(super) fn new(plan: &RunPlan) -> RegistryWorld {
        let on = |class| !plan.without.has(class);
        let mut build = SimRng::new(plan.seed, RngStream::Build);
        let count = plan.cores.unwrap_or(build.pick(&[1, 2, 2, 3]));
        let mut env = Env::new(plan.seed, plan.keep_events);
        for disk in 0..DISKS.len() - 1 {
            env.disks.push(SimDisk::new(disk, SECTORS));
            env.paths.push(SimPathState::draw(disk, &mut build, plan.without));
        }
        let cells = SectorRegisterModel::new(&[SECTORS; 3], SimDisk::first_stamp);
        let mut machine = Machine::new(plan, &mut build, count, env, cells);
        machine.make_cores(count);
        let fails = if on(DisturbanceClass::Opens) { build.pick(&[0, 10, 30]) } else { 0 };
        let outside = SimDiskOpener::new(&machine.env, SimRng::new(plan.seed, RngStream::SimNetwork), fails);
        let registry = DeviceRegistry::with_opener(machine.inboxes.clone(), count, Box::new(outside.clone()));
        registry.set_config_reader(Box::new(driver::read_simulated_config_file));
        let exports = Arc::new(Exports::new());
        registry.set_exporter(DeviceExporter::new(exports.clone(), ExportOptions::default()));
        let sees = registry.clone();
        RegistryWorld {
            deferred: Some(WakeableFuture::new(async move { verbs::run_deferred_removals(&sees).await })),
            registry,
            exports,
            outside,
            jobs: Vec::new(),
            clients: Vec::new(),
            model: RegistryModel::default(),
            draw: VerbGenerator {
                chance: SimRng::new(plan.seed, RngStream::Verbs),
                without: plan.without,
                crowded: build.one_in(2),
            },
            work: SimRng::new(plan.seed, RngStream::Clients),
            ids: 0,
            jobs_max: plan.depth.unwrap_or(build.pick(&[1, 3, 6, 12])),
            resting: false,
            rest_at: 300,
            loading: None,
            beside: false,
            wrong: None,
            counts: RegistryCounts::default(),
            machine,
        }
    }

    pub(super) fn counts(&self) -> RegistryCounts {
        let env = lock_environment(&self.machine.env);
        RegistryCounts {
            steps: self.machine.step,
            deferred: self.model.deferred,
            not_opened: self.outside.world().failed,
            no_lanes: env.seen.refused,
            hangs: env.seen.hangs,
            simulated: self.machine.totals.simulated,
            hash: CombinedRunHash(env.trace.hash()),
            ..self.counts
        }
    }

    pub(super) fn on(&self, class: DisturbanceClass) -> bool {
        !self.machine.plan.without.has(class)
    }

    /// True if only waits for events are in progress, and nothing is left to close.
    pub(super) fn is_over(&self) -> bool {
        self.jobs.iter().all(ControlVerbJob::waits_for_event) && self.outside.world().closing.is_empty()
    }

    /// True if nothing can run, and no removal is in progress.
    pub(super) fn is_quiet(&self) -> bool {
        let woken = self.deferred.as_ref().is_some_and(WakeableFuture::is_woken);
        let rests = self.machine.is_inbox_empty() && self.machine.is_still();
        self.is_over() && !woken && self.model.hidden.is_empty() && rests
    }

    /// True if nothing can run without a new verb.
    pub(super) fn is_stuck(&self) -> bool {
        let woken = self.deferred.iter().any(WakeableFuture::is_woken)
            || self.jobs.iter().any(|job| job.waiting.is_woken());
        !woken && self.outside.world().closing.is_empty() && self.machine.is_still()
    }

    /// The suspended devices.
    pub(super) fn suspended(&self) -> Vec<String> {
        let suspended = self.model.view.0.iter().filter(|seen| seen.suspended);
        suspended.map(|seen| format_device_number(seen.minor)).collect()
    }

    /// Describes the work that waits, for a person.
    pub(super) fn waits(&self) -> String {
        let mut all: Vec<_> = self.jobs.iter().map(|job| format!("{} {:?}", job.id, job.verb)).collect();
        for (core, open) in
            self.machine.cores.iter().flat_map(|c| c.open.iter().map(move |o| (c.state.id(), o)))
        {
            let client = self.clients.iter().find(|client| client.number == open.device);
            let seen = client.and_then(|client| self.model.view.get(client.device));
            if open.in_flight > 0 {
                let (n, number) = (open.in_flight, open.device);
                all.push(format!(
                    "{n} requests of client {number} on {core:?} of {seen:?}, {:?}",
                    open.lane.own_work()
                ));
            }
        }
        format!("what waits: {}", all.join("; "))
    }

    /// Inspects the registry after `actor` has run.
    pub(super) fn look(&mut self, actor: LastRegistryActor<'_>) -> Result<(), Violation> {
        self.judge(actor)?;
        self.check()
    }

    /// Checks the changes that `actor` made.
    fn judge(&mut self, actor: LastRegistryActor<'_>) -> Result<(), Violation> {
        self.counts.looks += 1;
        let kept = match &actor {
            LastRegistryActor::ControlVerb(
                ControlVerbJob { verb: ControlVerb::Message { text, .. }, began: Some(began), .. },
                _,
            ) if text == KEEP => began.targets.clone(),
            _ => Vec::new(),
        };
        let gone = self.model.judge(&self.registry, &self.outside, actor)?;
        for began in self.jobs.iter_mut().filter_map(|job| job.began.as_mut()) {
            began.see(&self.model.view);
            began.kept |= kept.iter().any(|id| began.targets.contains(id));
            if began.targets.iter().any(|id| gone.contains(id)) {
                began.may.push(udm_core::errno::ENXIO);
            }
        }
        Ok(())
    }

    fn trouble(&self) -> RefusalReasonCounts {
        let failed = self.outside.world().failed;
        let refused = lock_environment(&self.machine.env).seen.refused;
        RefusalReasonCounts { failed, refused, moved: self.counts.moved }
    }

    /// Inspects the changes of a reconfigure before others run in the middle of it.
    pub(super) fn look_at_file(&mut self) {
        let is_file = self.model.config.under.as_ref().map(|under| under.job);
        if !self.beside && is_file.is_some() && self.loading.as_ref().map(|(id, ..)| *id) == is_file {
            let looked = self.look(LastRegistryActor::Reconfigure);
            self.wrong = self.wrong.take().or(looked.err());
        }
    }

    /// Checks open counts and exports, and that no client waits for an event that has occurred.
    fn check(&mut self) -> Result<(), Violation> {
        let names = std::mem::take(&mut self.model.names);
        let file = self.model.config.under.take();
        let RegistryWorld { clients, jobs, loading, .. } = self;
        let users = |device| clients.iter().filter(|client| client.device == device).count() as u64;
        let unseen = |seen: &super::observation::ListedDevice| {
            let made = jobs.iter().filter(|job| job.is_making());
            let made = made.filter_map(|job| Some((job.verb.table()?, job.began.as_ref()?.look)));
            let loaded = loading.iter().map(|(_, table, look)| (table.as_str(), *look));
            let named = made.chain(loaded).filter(|(table, look)| seen.stands_in(table, *look, &names));
            named.count() as u64 + u64::from(file.as_ref().is_some_and(|under| under.may_hold(seen, &names)))
        };
        let counted = self.model.check_counts(&users, &unseen);
        self.model.names = names;
        self.model.config.under = file;
        counted?;
        self.model.check_waits(&self.jobs)?;
        if self.machine.is_inbox_empty() && self.machine.is_still() {
            self.model.tables.have_left();
        }
        let exports: Vec<_> =
            self.exports.all().iter().map(|e| (e.name().to_string(), e.device().id())).collect();
        let fine = |seen: &super::observation::ListedDevice| exports.contains(&(seen.name.clone(), seen.id));
        if exports.len() != self.model.view.0.len() || !self.model.view.0.iter().all(fine) {
            return Err(format!("{exports:?} are exported, and there are {:?}", self.model.view));
        }
        let is_said =
            |e: &&Arc<Export>| e.is_read_only() != self.model.config.read_only.contains(&e.device().id());
        if let Some(export) = self.exports.all().iter().find(is_said) {
            return Err(format!("{}: the read-only flag of the export is wrong", export.name()));
        }
        lock_environment(&self.machine.env).verdict()
    }

    /// Runs one step. A verb is returned to the caller, because it runs outside of the world.
    pub(super) fn step(&mut self) -> Result<Option<RegistryStepOutsideBorrow>, Violation> {
        self.machine.step += 1;
        self.machine.set_turn(None);
        if !self.resting {
            self.disturb()?;
        }
        let mut ready: Vec<usize> = (0..self.jobs.len()).filter(|at| self.can_go_on(*at)).collect();
        let closing = self.outside.world().closing.len();
        let verbs = ready.len();
        ready.extend((0..closing).map(|at| verbs + at));
        let deferred = self.deferred.as_ref().is_some_and(WakeableFuture::is_woken);
        if deferred {
            ready.push(verbs + closing);
        }
        let core = self.machine.choose();
        if ready.is_empty() || core.is_some() && self.work.one_in(2) {
            match core {
                Some(core) => self.turn(core)?,
                None => self.jump()?,
            }
            return lock_environment(&self.machine.env).verdict().map(|()| None);
        }
        let nth = self.work.below(ready.len() as u64) as usize;
        if nth < verbs {
            return Ok(Some(RegistryStepOutsideBorrow::ControlVerbJob(Box::new(self.take(ready[nth])))));
        }
        if nth < verbs + closing {
            let (_, work) = self.outside.world().closing.remove(nth - verbs);
            work();
            self.look(LastRegistryActor::Other)?;
            return Ok(None);
        }
        self.outside.world().actor = 0;
        Ok(self.deferred.take().map(RegistryStepOutsideBorrow::Deferred))
    }

    fn jump(&mut self) -> Result<(), Violation> {
        if self.machine.jump() {
            return Ok(());
        }
        if self.resting {
            return Err(format!("nothing moves any more: {}", self.waits()));
        }
        let mut env = lock_environment(&self.machine.env);
        env.now = env.now + Nanos(1_000_000);
        Ok(())
    }

    /// Only one load at a time may access the file system.
    fn can_go_on(&self, at: usize) -> bool {
        let job = &self.jobs[at];
        let is_file = matches!(job.verb, ControlVerb::Reconfigure { .. });
        let loads = is_file || job.began.is_none() && job.verb.table().is_some();
        job.waiting.is_woken() && !(self.loading.is_some() && loads)
    }

    /// Takes a verb out of the list to poll it.
    fn take(&mut self, at: usize) -> ControlVerbJob {
        let mut job = self.jobs.swap_remove(at);
        if job.began.is_none() {
            let trouble = self.trouble();
            let (began, met) = self.model.begin(&job, &mut self.jobs, trouble);
            job.began = Some(began);
            self.counts.met += u64::from(met);
            if let Some(table) = job.verb.table() {
                self.loading = Some((job.id, table.to_owned(), self.model.looks));
            }
        }
        if let ControlVerb::Reconfigure { .. } = job.verb {
            self.model.note_hang_up(&job);
            self.loading = Some((job.id, String::new(), self.model.looks));
        }
        self.counts.beside_loads += u64::from(self.beside);
        self.outside.world().actor = job.id;
        job
    }

    /// Handles a verb that was polled.
    pub(super) fn after_poll(
        &mut self,
        mut job: ControlVerbJob,
        polled: Poll<VerbOutcome>,
    ) -> Result<(), Violation> {
        if self.loading.as_ref().is_some_and(|(id, ..)| *id == job.id) {
            self.loading = None;
        }
        self.wrong.take().map_or(Ok(()), Err)?;
        let was = self.model.view.clone();
        self.machine.note_control_job(job.id);
        let is_file = matches!(job.verb, ControlVerb::Reconfigure { .. });
        let Poll::Ready(outcome) = polled else {
            self.judge(if is_file {
                LastRegistryActor::Reconfigure
            } else {
                LastRegistryActor::ControlVerb(&mut job, None)
            })?;
            self.model.check_hang_up(&job)?;
            self.jobs.push(job);
            return self.check();
        };
        let done = |reply: &Vec<String>| if is_file { format!("{reply:?}") } else { "done".into() };
        let reply = outcome.as_ref().map_or_else(ToString::to_string, done);
        self.machine.say(format!("{} ends: {reply}", job.id));
        self.look(if is_file {
            LastRegistryActor::Reconfigure
        } else {
            LastRegistryActor::ControlVerb(&mut job, Some(&outcome))
        })?;
        self.model.check_hang_up(&job)?;
        let trouble = self.trouble();
        let may_be_called_off = match is_file {
            true => self.model.reconfigured(&job, &outcome, trouble)?,
            false => {
                self.model.end(&job, &was, &outcome, trouble)?;
                self.model.may_be_called_off(&job)
            }
        };
        let waits = self.outside.world().closing.iter().any(|(of, _)| *of == job.id);
        if waits && outcome.is_ok() && !may_be_called_off {
            return Err(format!(
                "{outcome:?}: {:?} has ended, but the objects that it released are not closed",
                job.verb
            ));
        }
        self.counts.verbs[job.verb.kind()] += 1;
        match &outcome {
            Ok(_) => {
                self.counts.messages += u64::from(matches!(job.verb, ControlVerb::Message { .. }));
                self.counts.stacks += u64::from(job.verb.table().is_some_and(|text| text.contains('@')));
            }
            Err(error) => {
                self.counts.refused += 1;
                self.counts.called_off += u64::from(error.error.errno == udm_core::errno::EINTR);
            }
        }
        Ok(())
    }

    /// Reads the file for the running reconfigure.
    pub(super) fn read_file(&mut self) -> Result<DesiredState, String> {
        let job = self.outside.world().actor;
        let trouble = self.trouble();
        let wanted = self.model.read_file(job, trouble, &mut self.jobs)?;
        let device = |one: DeclaredDevice| {
            let wanted = config::DesiredDevice::new(&one.name, one.table, one.uuid, one.read_only);
            wanted.map_err(|e| e.to_string())
        };
        let devices = wanted.into_iter().map(device).collect::<Result<Vec<_>, String>>()?;
        Ok(DesiredState { devices, folder: BaseDir::none(), notes: Vec::new() })
    }

    /// Starts a verb of a client.
    pub(super) fn begin(&mut self, mut verb: ControlVerb) {
        if let ControlVerb::Wait { word, event } = &mut verb {
            let events = self.model.view.meant(word).map_or(0, |seen| seen.events);
            *event = events.wrapping_sub(*event);
        }
        self.ids += 1;
        self.machine.say(format!("{}: {verb:?}", self.ids));
        self.jobs.push(ControlVerbJob::new(self.ids, verb, &self.registry));
    }

    /// Checks, in the quiescent world, that no operation is unfinished and no unused object is
    /// held.
    pub(super) fn check_rest(&mut self) -> Result<(), Violation> {
        if let Some(hidden) = self.model.hidden.first() {
            return Err(format!("at rest, {hidden:?} is still being created or removed"));
        }
        let waits = |seen: &&super::observation::ListedDevice| seen.deferred && seen.open == 0;
        if let Some(seen) = self.model.view.0.iter().find(waits) {
            return Err(format!("{} is unused and its removal was deferred, but it still exists", seen.name));
        }
        let slots = self.model.view.0.iter().flat_map(|seen| [seen.live, seen.inactive]).flatten();
        let slots: Vec<usize> = slots.collect();
        let alive = self.model.tables.alive().to_vec();
        if let Some(left) = alive.iter().find(|table| !slots.contains(table)) {
            return Err(format!(
                "a table is in no slot, but is still held: {}",
                self.model.tables.all[*left].text
            ));
        }
        let used: Vec<_> = alive.iter().flat_map(|table| self.model.tables.all[*table].devices()).collect();
        let world = self.outside.world();
        let open = world.opened.iter().filter(|disk| disk.device.strong_count() > 0);
        match open.into_iter().find(|disk| !used.iter().any(|(_, id)| *id == disk.id)) {
            Some(left) => {
                let lanes: Vec<_> = self
                    .machine
                    .cores
                    .iter()
                    .flat_map(|core| {
                        core.open.iter().map(|open| (core.state.id(), open.device, open.in_flight))
                    })
                    .collect();
                let (uri, count) = (&left.uri, left.device.strong_count());
                Err(format!("{uri} is open {count} times, and no table uses it; lanes: {lanes:?}"))
            }
            None => Ok(()),
        }
    }
}
