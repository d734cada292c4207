//! A lifecycle world: cores, the files that outlive servers, and the running server. It runs on one
//! thread in an order drawn from a seed.

use super::backends::SimFileOpener;
use super::clients::DeviceClient;
use super::counts::LifecycleCounts;
use super::files::PersistentFiles;
use super::model::{DiskAndSnapshotModel, DiskImage, OriginDiskModel, SnapshotFate};
use super::observation::{DeviceView, last_component};
use super::verb_jobs::{ServerVerb, ServerVerbJob, VerbReply};
use crate::counts::CombinedRunHash;
use crate::disk::SimDisk;
use crate::environment::{Env, lock_environment};
use crate::machine::Machine;
use crate::model::Violation;
use crate::plan::{DisturbanceClass, RunPlan};
use crate::register_model::SectorRegisterModel;
use crate::rng::{RngStream, SimRng};
use crate::turn::MachineWorld;
use crate::wakeable::WakeableFuture;
use std::path::PathBuf;
use std::sync::Arc;
use udm_control::error::VerbError;
use udm_control::verbs::snapshot::{self, LostSnapshotPolicy, PendingMerge};
use udm_control::{DeviceRegistry, StateFolder, config};
use udm_core::errno::ENXIO;
use udm_core::{DeviceId, Nanos};
use udm_dm::SnapshotState;
use udm_frontends::nbd::Exports;

/// Phase of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ServerPhase {
    /// No server runs.
    Off,
    Starting,
    Serving,
    /// The server ends in order.
    Ending,
    /// The server was killed. Its remaining work is completed without effect.
    Dying,
}

/// A running server.
pub(super) struct ServerInstance {
    pub(super) registry: Arc<DeviceRegistry>,
    pub(super) exports: Arc<Exports>,
    pub(super) folder: Arc<StateFolder>,
    pub(super) wish: config::DesiredState,
    /// Future of the next merge that continues from an earlier life.
    pub(super) merges: Option<WakeableFuture<PendingMerge>>,
}

/// A step that runs outside of the borrowed world, because it calls back into the world.
pub(super) enum LifecycleStepOutsideBorrow {
    ServerVerbJob(Box<ServerVerbJob>),
    Work(Box<dyn FnOnce() + Send>),
}

/// A lifecycle world with its machine, files, server and model.
pub(super) struct ServerLifecycleWorld {
    pub(super) machine: Machine,
    pub(super) outside: SimFileOpener,
    pub(super) base: String,
    pub(super) server: Option<ServerInstance>,
    pub(super) phase: ServerPhase,
    pub(super) policy: LostSnapshotPolicy,
    pub(super) jobs: Vec<ServerVerbJob>,
    pub(super) clients: Vec<DeviceClient>,
    /// Merges in progress, and completed merges that a verb finishes.
    pub(super) merges: Vec<PendingMerge>,
    pub(super) finishing: Vec<(u64, PendingMerge)>,
    pub(super) model: DiskAndSnapshotModel,
    pub(super) view: Vec<DeviceView>,
    pub(super) view_names: Vec<(DeviceId, String)>,
    /// Stores that were attached in this life.
    pub(super) attached_before: Vec<String>,
    /// The configuration file: name and table of each disk and each store.
    pub(super) file: Vec<(String, String)>,
    /// Missing stores: present path, and proper path.
    pub(super) away: Vec<(PathBuf, PathBuf)>,
    /// Foreign files at the paths of stores.
    pub(super) others: Vec<PathBuf>,
    pub(super) work: SimRng,
    pub(super) control: SimRng,
    pub(super) ids: u64,
    pub(super) jobs_max: usize,
    pub(super) resting: bool,
    pub(super) kill_at: u64,
    pub(super) end_at: u64,
    /// Depth of nested verbs that wait.
    pub(super) depth: usize,
    /// Verbs that run now, or wait for a nested one.
    pub(super) below: Vec<ServerVerb>,
    pub(super) wrong: Option<Violation>,
    pub(super) counts: LifecycleCounts,
}

impl ServerLifecycleWorld {
    pub(super) fn new(plan: &RunPlan) -> Result<ServerLifecycleWorld, Violation> {
        let on = |class| !plan.without.has(class);
        let mut build = SimRng::new(plan.seed, RngStream::Build);
        let count = plan.cores.unwrap_or(build.pick(&[1, 2, 2, 3]));
        let env = Env::new(plan.seed, plan.keep_events);
        let cells = SectorRegisterModel::new(&[], SimDisk::first_stamp);
        let machine = Machine::new(plan, &mut build, count, env, cells);
        let failed = |e: std::io::Error| format!("a temporary folder: {e}");
        let mut files = PersistentFiles::new().map_err(failed)?;
        let (mut model, mut file) = (DiskAndSnapshotModel::new(), Vec::new());
        let origins = build.pick(&[1, 1, 2]);
        for disk in 0..origins {
            let (name, sectors) = (format!("o{disk}"), 8 * build.between(2, 12));
            files.make(&name, sectors).map_err(failed)?;
            let path = files.path(&name);
            files.disk(&path, &mut lock_environment(&machine.env), true).map_err(failed)?;
            let stores = if on(DisturbanceClass::Stacks) { build.pick(&[0, 0, 1, 2]) } else { 0 };
            let kind = if stores > 0 || build.one_in(3) { "snapshot-origin" } else { "linear" };
            let end = if kind == "linear" { " 0" } else { "" };
            file.push((format!("v{disk}"), format!("0 {sectors} {kind} {}{end}", path.display())));
            for at in 0..stores {
                let store = format!("t{disk}{at}");
                files.make(&format!("{store}.cow"), 2 * sectors + 64).map_err(failed)?;
                let store_path = files.path(&format!("{store}.cow"));
                let (path, store_path) = (path.display(), store_path.display());
                file.push((store, format!("0 {sectors} snapshot {path} {store_path} P 8")));
            }
            let image = DiskImage::new(sectors, |sector| SimDisk::first_stamp(disk, sector));
            model.origins.push(OriginDiskModel { path, image });
        }
        let base = files.path("").display().to_string();
        let outside = SimFileOpener::new(&machine.env, files);
        Ok(ServerLifecycleWorld {
            outside,
            base,
            server: None,
            phase: ServerPhase::Off,
            policy: LostSnapshotPolicy::Refuse,
            jobs: Vec::new(),
            clients: Vec::new(),
            merges: Vec::new(),
            finishing: Vec::new(),
            model,
            view: Vec::new(),
            view_names: Vec::new(),
            attached_before: Vec::new(),
            file,
            away: Vec::new(),
            others: Vec::new(),
            work: SimRng::new(plan.seed, RngStream::Clients),
            control: SimRng::new(plan.seed, RngStream::Verbs),
            ids: 0,
            jobs_max: plan.depth.unwrap_or(build.pick(&[1, 2, 4])),
            resting: false,
            kill_at: u64::MAX,
            end_at: u64::MAX,
            depth: 0,
            below: Vec::new(),
            wrong: None,
            counts: LifecycleCounts::default(),
            machine,
        })
    }

    pub(super) fn counts(&self) -> LifecycleCounts {
        let env = lock_environment(&self.machine.env);
        LifecycleCounts {
            steps: self.machine.step,
            simulated: self.machine.totals.simulated,
            hash: CombinedRunHash(env.trace.hash()),
            ..self.counts
        }
    }

    pub(super) fn on(&self, class: DisturbanceClass) -> bool {
        !self.machine.plan.without.has(class)
    }

    /// Describes the work that waits, for a person.
    pub(super) fn waits(&self) -> String {
        let jobs = self.jobs.iter().map(|job| format!("{} {:?}", job.id, job.verb));
        let clients = self.clients.iter();
        let clients = clients.map(|client| {
            format!(
                "client {} of {:?}: {:?}, {:?} of {}",
                client.number, client.of, client.busy, client.check, client.sectors
            )
        });
        let all: Vec<String> = jobs.chain(clients).collect();
        format!("what waits, {:?}: {}; {:?}", self.phase, all.join("; "), self.view)
    }

    /// True if only requests are in progress.
    pub(super) fn is_over(&self) -> bool {
        self.jobs.is_empty() && self.outside.work().is_empty()
    }

    /// Runs one step. A verb is returned to the caller, because it runs outside of the world.
    pub(super) fn step(&mut self) -> Result<Option<LifecycleStepOutsideBorrow>, Violation> {
        self.machine.step += 1;
        self.machine.set_turn(None);
        self.outside.files().tell_writes(&lock_environment(&self.machine.env)).map_err(|e| e.to_string())?;
        self.look()?;
        if self.machine.step >= self.kill_at
            && matches!(self.phase, ServerPhase::Starting | ServerPhase::Serving | ServerPhase::Ending)
        {
            self.kill()?;
        }
        if self.phase == ServerPhase::Serving && !self.resting {
            self.act()?;
        }
        self.see_to_merges();
        let mut ready: Vec<usize> =
            (0..self.jobs.len()).filter(|at| self.jobs[*at].waiting.is_woken()).collect();
        let (verbs, work) = (ready.len(), self.outside.work().len());
        ready.extend((0..work).map(|at| verbs + at));
        let core = self.machine.choose();
        if ready.is_empty() || core.is_some() && self.work.below(3) > 0 {
            match core {
                Some(core) => self.turn(core)?,
                None => self.jump(),
            }
            return self.verdict().map(|()| None);
        }
        let nth = self.work.below(ready.len() as u64) as usize;
        if nth < verbs {
            let job = self.jobs.swap_remove(ready[nth]);
            self.counts.nested += u64::from(self.depth > 0);
            self.machine.note_control_job(job.id);
            self.below.push(job.verb.clone());
            return Ok(Some(LifecycleStepOutsideBorrow::ServerVerbJob(Box::new(job))));
        }
        let work = self.outside.work().remove(nth - verbs);
        Ok(Some(LifecycleStepOutsideBorrow::Work(work)))
    }

    /// Returns the violation found so far, if any.
    pub(super) fn verdict(&mut self) -> Result<(), Violation> {
        if let Some(wrong) = self.wrong.clone() {
            return Err(wrong);
        }
        lock_environment(&self.machine.env).verdict()
    }

    fn jump(&mut self) {
        if !self.machine.jump() {
            let mut env = lock_environment(&self.machine.env);
            env.now = env.now + Nanos(1_000_000);
        }
    }

    /// Starts a verb of a client of the control socket.
    pub(super) fn begin(&mut self, verb: ServerVerb) {
        let Some(server) = &self.server else { return };
        self.ids += 1;
        self.machine.say(format!("{}: {}", self.ids, format!("{verb:?}").replace(&self.base, "")));
        let about = match &verb {
            ServerVerb::Discard { name, .. } | ServerVerb::Merge { name } => {
                self.in_device(name).or_else(|| self.recorded(name)).or_else(|| self.spent(name))
            }
            _ => None,
        };
        if let Some(one) = about.map(|at| &mut self.model.snapshots[at]) {
            match verb {
                ServerVerb::Discard { .. } => one.removals.push(self.ids),
                _ => one.merges.push(self.ids),
            }
        }
        let mut job = ServerVerbJob::new(self.ids, verb, &server.registry, &server.wish);
        job.about = about;
        self.model.running.push(self.ids);
        self.jobs.push(job);
    }

    /// Returns the valid snapshot of the device `name`.
    pub(super) fn in_device(&self, name: &str) -> Option<usize> {
        let seen = self.view.iter().find(|seen| seen.name == name)?;
        match &seen.kind {
            super::observation::LiveTableKind::Snapshot { store, state: SnapshotState::Valid, .. } => {
                self.model.in_store(store)
            }
            _ => None,
        }
    }

    /// Returns the detached snapshot that the device `name` had.
    fn spent(&self, name: &str) -> Option<usize> {
        let seen = self.view.iter().find(|seen| seen.name == name)?;
        let super::observation::LiveTableKind::Snapshot { store, .. } = &seen.kind else { return None };
        self.model.in_store(store).filter(|at| {
            let one = &self.model.snapshots[*at];
            !one.attached && matches!(one.fate, SnapshotFate::Kept | SnapshotFate::Released)
        })
    }

    /// Returns the unattached snapshot that is recorded as `name`.
    fn recorded(&self, name: &str) -> Option<usize> {
        let listed = snapshot::list_unattached_snapshots(&self.server.as_ref()?.registry).ok()?;
        let listed = listed.into_iter().find(|listed| listed.name == name)?;
        self.model.in_store(&listed.store)
    }

    /// Records the end of a verb.
    pub(super) fn ended(
        &mut self,
        job: &ServerVerbJob,
        outcome: Result<VerbReply, VerbError>,
    ) -> Result<(), Violation> {
        let reply = outcome.as_ref().map_or_else(ToString::to_string, |reply| match reply {
            VerbReply::Applied(failed) => format!("done, but for {failed:?}"),
            _ => "done".into(),
        });
        self.machine.say(format!("{} ends: {}", job.id, reply.replace(&self.base, "")));
        let finishing = self.finishing.iter().position(|(id, _)| *id == job.id);
        let finishing = finishing.map(|at| self.finishing.swap_remove(at).1);
        if self.phase == ServerPhase::Dying {
            return Ok(());
        }
        self.counts.verbs[job.verb.kind()] += 1;
        self.counts.refused += u64::from(outcome.is_err());
        self.look()?;
        self.model.is_over(job.id)?;
        if let Some(one) = job.about.map(|at| &mut self.model.snapshots[at]) {
            match (&job.verb, &outcome) {
                (ServerVerb::Discard { .. }, Ok(_)) => one.fate = SnapshotFate::Gone,
                (ServerVerb::Merge { name }, Ok(_)) if one.fate != SnapshotFate::Merged => {
                    let store = last_component(&one.store.display().to_string()).to_owned();
                    return Err(format!("{name} is merged, but {store} was never seen in its origin"));
                }
                // Another verb has removed the snapshot meanwhile.
                (ServerVerb::Discard { .. }, Err(error)) if error.error.errno == ENXIO => {}
                (_, Err(_)) => {
                    one.removals.retain(|id| *id != job.id);
                    one.merges.retain(|id| *id != job.id);
                }
                _ => {}
            }
        }
        match outcome {
            Ok(VerbReply::Merging(end)) => self.merges.push(end),
            Ok(VerbReply::Applied(failed)) if job.verb.kind() == 0 => {
                self.counts.refused_at_start += failed.len() as u64;
            }
            Err(_) => self.merges.extend(finishing),
            _ => {}
        }
        Ok(())
    }

    /// Starts a verb for a completed merge.
    fn see_to_merges(&mut self) {
        let Some(server) = &mut self.server else { return };
        if let Some(waiting) = server.merges.as_mut().filter(|waiting| waiting.is_woken())
            && let std::task::Poll::Ready(end) = waiting.poll()
        {
            self.counts.merges_went_on += 1;
            self.merges.push(end);
            let registry = server.registry.clone();
            server.merges = Some(WakeableFuture::new(async move { registry.next_merge().await }));
        }
        if self.phase != ServerPhase::Serving || self.merges.is_empty() || !self.work.one_in(16) {
            return;
        }
        let at = self.work.below(self.merges.len() as u64) as usize;
        match snapshot::final_merge_state(&server.registry, &self.merges[at]) {
            None | Some(SnapshotState::MergeFailed) => {}
            Some(SnapshotState::Merged) => {
                let end = self.merges.swap_remove(at);
                self.ids += 1;
                self.machine.say(format!("{}: the merge of {} is over", self.ids, end.name()));
                self.finishing.push((self.ids, end.clone()));
                self.model.running.push(self.ids);
                self.jobs.push(ServerVerbJob::finish(self.ids, &server.registry, end));
            }
            Some(_) => drop(self.merges.swap_remove(at)),
        }
    }
}
