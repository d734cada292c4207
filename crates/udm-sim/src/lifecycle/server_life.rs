//! The life of a server: it starts, serves, sometimes quiesces, and ends or is killed.

use super::driver::{is_server_in_phase, run_verb, step_until, step_world, with_world};
use super::model::SnapshotFate;
use super::observation::LiveTableKind;
use super::verb_jobs::ServerVerb;
use super::world::{ServerInstance, ServerLifecycleWorld, ServerPhase};
use crate::environment::lock_environment;
use crate::model::Violation;
use crate::plan::DisturbanceClass;
use crate::wakeable::WakeableFuture;
use std::sync::Arc;
use udm_control::config::{DesiredDevice, DesiredState};
use udm_control::exports::{DeviceExporter, ExportOptions};
use udm_control::registry::BaseDir;
use udm_control::verbs::snapshot::LostSnapshotPolicy;
use udm_control::{DeviceRegistry, StateFolder, verbs};
use udm_frontends::nbd::Exports;

/// Maximum number of rounds of removals and resumes until nothing is left.
const ROUNDS_MAX: usize = 30;

/// Runs one server. The last one has all stores, waits for all snapshots, and is not killed.
pub(super) fn run_server(last: bool) -> Result<(), Violation> {
    with_world(|world| world.start(last))?;
    run_verb(ServerVerb::Start)?;
    if is_server_in_phase(ServerPhase::Starting) {
        with_world(|world| {
            world.phase = ServerPhase::Serving;
            world.check_listed()
        })?;
    }
    while !last
        && is_server_in_phase(ServerPhase::Serving)
        && with_world(|world| world.machine.step < world.end_at)
    {
        step_world()?;
        if with_world(|world| world.control.one_in(600)) && is_server_in_phase(ServerPhase::Serving) {
            quiesce_and_read_back()?;
        }
    }
    if is_server_in_phase(ServerPhase::Serving) {
        quiesce_and_read_back()?;
    }
    if is_server_in_phase(ServerPhase::Serving) {
        with_world(|world| world.phase = ServerPhase::Ending);
    }
    if is_server_in_phase(ServerPhase::Ending) {
        stop_server()?;
    }
    // The server may have been killed while it ended.
    if is_server_in_phase(ServerPhase::Dying) {
        stop_server()?;
    }
    with_world(ServerLifecycleWorld::is_gone)
}

/// Waits until all verbs end, and reads all data back.
fn quiesce_and_read_back() -> Result<(), Violation> {
    with_world(|world| {
        world.resting = true;
        world.machine.say("no more is asked for");
    });
    resume_all()?;
    if is_server_in_phase(ServerPhase::Serving) {
        step_until("requests", |world| world.clients.iter().all(|client| client.busy.is_empty()))?;
    }
    if is_server_in_phase(ServerPhase::Serving) {
        with_world(|world| {
            for at in (0..world.clients.len()).rev() {
                world.go(at);
            }
            let now = lock_environment(&world.machine.env).now;
            world.machine.cores.iter_mut().for_each(|core| core.next_work = now);
            world.machine.reading = true;
            let names: Vec<String> = world.view.iter().map(|seen| seen.name.clone()).collect();
            names.iter().try_for_each(|name| world.come(name, true))
        })?;
        step_until("reads", |world| {
            world.clients.iter().all(|client| {
                client.busy.is_empty() && client.check.is_none_or(|next| next >= client.sectors)
            })
        })?;
    }
    if is_server_in_phase(ServerPhase::Serving) {
        with_world(|world| {
            for at in (0..world.clients.len()).rev() {
                world.go(at);
            }
            world.counts.rests += 1;
            world.check_listed()?;
            world.check_others()
        })?;
    }
    with_world(|world| (world.resting, world.machine.reading) = (false, false));
    Ok(())
}

/// Resumes all suspended devices.
fn resume_all() -> Result<(), Violation> {
    for _ in 0..ROUNDS_MAX {
        step_until("verbs", ServerLifecycleWorld::is_over)?;
        let suspended = with_world(|world| {
            let suspended = world.view.iter().filter(|seen| seen.suspended);
            suspended.map(|seen| seen.name.clone()).collect::<Vec<_>>()
        });
        if suspended.is_empty() {
            return Ok(());
        }
        clear_and_resume(suspended)?;
        with_world(ServerLifecycleWorld::look)?;
    }
    Ok(())
}

/// Clears all inactive tables and resumes the suspended devices. The inactive tables may not be
/// valid any more.
fn clear_and_resume(suspended: Vec<String>) -> Result<(), Violation> {
    for word in with_world(ServerLifecycleWorld::names) {
        run_verb(ServerVerb::Clear { word })?;
    }
    for word in suspended {
        run_verb(ServerVerb::Resume { words: vec![word] })?;
    }
    Ok(())
}

/// Ends the server: requests and verbs complete, and its devices are removed.
fn stop_server() -> Result<(), Violation> {
    let phase = with_world(|world| world.phase);
    with_world(|world| {
        if let Some(server) = &world.server {
            verbs::cancel_all_pending_verbs(&server.registry);
        }
    });
    for _ in 0..ROUNDS_MAX {
        step_until("verbs", ServerLifecycleWorld::is_over)?;
        let suspended = with_world(ServerLifecycleWorld::suspended);
        if suspended.is_empty() || !is_server_in_phase(phase) {
            break;
        }
        clear_and_resume(suspended)?;
    }
    step_until("clients", |world| {
        world.machine.cores.iter().flat_map(|core| &core.open).all(|open| open.in_flight == 0)
    })?;
    if !is_server_in_phase(phase) {
        return Ok(());
    }
    while with_world(|world| !world.clients.is_empty()) {
        let all = with_world(|world| (0..world.clients.len()).rev().all(|at| world.go(at)));
        if !all {
            step_world()?;
        }
        if !is_server_in_phase(phase) {
            return Ok(());
        }
    }
    with_world(|world| world.server.iter().for_each(|server| server.registry.begin_shutdown()));
    for round in 0.. {
        let names = with_world(ServerLifecycleWorld::names);
        if names.is_empty() {
            break;
        }
        if round == ROUNDS_MAX {
            return Err(format!(
                "the server does not come to its end: {}",
                with_world(|world| world.waits())
            ));
        }
        for word in names {
            run_verb(ServerVerb::Remove { word })?;
            if !is_server_in_phase(phase) {
                return Ok(());
            }
        }
    }
    step_until("the cores", |world| {
        world.is_over()
            && world.machine.is_inbox_empty()
            && world.machine.cores.iter().all(|core| core.tasks.is_empty())
    })
}

impl ServerLifecycleWorld {
    /// Starts a server over the existing files.
    fn start(&mut self, last: bool) -> Result<(), Violation> {
        self.counts.lives += 1;
        let failed = |e: std::io::Error| e.to_string();
        self.forget_removed().map_err(failed)?;
        {
            let mut env = lock_environment(&self.machine.env);
            env.dead = false;
            // The previous users of the disks no longer exist.
            env.disks.iter_mut().for_each(|disk| disk.shared_disk_state = Arc::default());
            let mut files = self.outside.files();
            files.tell_writes(&env).map_err(failed)?;
            files.write_stores(&env).map_err(failed)?;
        }
        let on = |world: &ServerLifecycleWorld, class| world.on(class);
        self.policy = match self.control.below(10) {
            _ if last => LostSnapshotPolicy::Refuse,
            0 | 1 if on(self, DisturbanceClass::Paths) => LostSnapshotPolicy::GiveUp,
            2 => LostSnapshotPolicy::Wait,
            _ => LostSnapshotPolicy::Refuse,
        };
        if last {
            self.bring_back_stores()?;
        } else if on(self, DisturbanceClass::Paths) && self.control.one_in(4) {
            self.take_store_away()?;
        }
        let step = self.machine.step;
        let life = self.control.pick(&[300, 1000, 3000]);
        self.end_at = step + self.control.span(life);
        let killed = !last && on(self, DisturbanceClass::Crash) && self.control.below(5) < 3;
        self.kill_at = if killed { step + self.control.span(life) } else { u64::MAX };
        let count = self.machine.inboxes.count();
        self.machine.make_cores(count);
        let registry =
            DeviceRegistry::with_opener(self.machine.inboxes.clone(), count, Box::new(self.outside.clone()));
        let folder = StateFolder::new(self.outside.files().state());
        folder.clean();
        registry.set_state_folder(folder.clone());
        registry.set_lost_snapshots(self.policy);
        let exports = Arc::new(Exports::new());
        registry.set_exporter(DeviceExporter::new(exports.clone(), ExportOptions::default()));
        let wish = self.wish()?;
        let read = wish.clone();
        registry.set_config_reader(Box::new(move || Ok(read.clone())));
        let next = registry.clone();
        let merges = Some(WakeableFuture::new(async move { next.next_merge().await }));
        self.machine.say(format!("life {}: {:?}, {} away", self.counts.lives, self.policy, self.away.len()));
        self.server = Some(ServerInstance { registry, exports, folder, wish, merges });
        self.phase = ServerPhase::Starting;
        self.attached_before.clear();
        Ok(())
    }

    /// Updates the model for a server that was killed during a removal: a snapshot without a record
    /// is removed.
    fn forget_removed(&mut self) -> std::io::Result<()> {
        let mut records = Vec::new();
        if let Ok(entries) = std::fs::read_dir(self.outside.files().state().join("snapshots")) {
            for entry in entries {
                records.push(std::fs::read_to_string(entry?.path())?);
            }
        }
        for one in self.model.snapshots.iter_mut().filter(|one| !one.removals.is_empty()) {
            let store = one.store.display().to_string();
            if one.fate != SnapshotFate::Gone && !records.iter().any(|record| record.contains(&store)) {
                one.fate = SnapshotFate::Gone;
            }
        }
        Ok(())
    }

    /// Returns the devices of the configuration file, in random order.
    fn wish(&mut self) -> Result<DesiredState, Violation> {
        let mut left = self.file.clone();
        let mut devices = Vec::new();
        while !left.is_empty() {
            let at = self.control.below(left.len() as u64) as usize;
            let (name, table) = left.swap_remove(at);
            devices.push(DesiredDevice::new(&name, table, None, false).map_err(|e| e.to_string())?);
        }
        Ok(DesiredState { devices, folder: BaseDir::none(), notes: Vec::new() })
    }

    /// Kills the server.
    pub(super) fn kill(&mut self) -> Result<(), Violation> {
        let merges = self.view.iter().any(|seen| matches!(seen.kind, LiveTableKind::Merge { .. }));
        self.counts.killed += 1;
        self.counts.killed_starting += u64::from(self.phase == ServerPhase::Starting);
        self.counts.killed_in_verbs +=
            u64::from(self.phase == ServerPhase::Serving && (self.depth > 0 || !self.jobs.is_empty()));
        self.counts.killed_in_merges += u64::from(merges);
        self.machine.say("the server is killed");
        self.outside.files().freeze().map_err(|e| e.to_string())?;
        let mut env = lock_environment(&self.machine.env);
        env.dead = true;
        env.crashes += 1;
        drop(env);
        self.model.images().for_each(super::model::DiskImage::kill);
        // A snapshot may be released if a verb was releasing it.
        let killed: Vec<String> = self.devices_being_released();
        let killed: Vec<usize> = killed.iter().filter_map(|name| self.in_device(name)).collect();
        for (at, one) in
            self.model.snapshots.iter_mut().enumerate().filter(|(_, one)| one.fate == SnapshotFate::Kept)
        {
            let by = one.released_by.iter().any(|id| self.model.running.contains(id));
            if killed.contains(&at) || !one.attached && by {
                one.fate = SnapshotFate::Released;
            }
        }
        self.model.running.clear();
        self.phase = ServerPhase::Dying;
        (self.resting, self.machine.reading) = (false, false);
        self.kill_at = u64::MAX;
        if let Some(server) = &self.server {
            server.registry.begin_shutdown();
        }
        Ok(())
    }

    /// Checks that nothing of the server is left in memory.
    fn is_gone(&mut self) -> Result<(), Violation> {
        let failed = |e: std::io::Error| e.to_string();
        self.machine.set_turn(None);
        self.outside.files().tell_writes(&lock_environment(&self.machine.env)).map_err(failed)?;
        if let Some(server) = self.server.take().filter(|_| self.phase == ServerPhase::Ending) {
            server.folder.detach_all();
            self.counts.ended += 1;
        }
        (self.merges, self.finishing) = (Vec::new(), Vec::new());
        self.machine.cores.clear();
        self.machine.paths_are_closed()?;
        if self.phase == ServerPhase::Dying {
            self.outside.files().thaw().map_err(failed)?;
        }
        self.phase = ServerPhase::Off;
        self.view.clear();
        for snapshot in self.model.snapshots.iter_mut().filter(|one| one.fate == SnapshotFate::Kept) {
            snapshot.attached = false;
        }
        Ok(())
    }

    /// Names of the devices that verbs in progress remove or give another table.
    fn devices_being_released(&self) -> Vec<String> {
        let of = |verb: &ServerVerb| match verb {
            ServerVerb::Remove { word } | ServerVerb::Discard { name: word, .. } => vec![word.clone()],
            ServerVerb::Resume { words } => words.clone(),
            _ => Vec::new(),
        };
        self.jobs.iter().map(|job| &job.verb).chain(&self.below).flat_map(of).collect()
    }

    fn suspended(&mut self) -> Vec<String> {
        let Some(server) = &self.server else { return Vec::new() };
        let all = server.registry.all().into_iter();
        all.filter(|mapped| mapped.device.is_suspended()).map(|mapped| mapped.device.name()).collect()
    }

    fn names(&mut self) -> Vec<String> {
        let Some(server) = &self.server else { return Vec::new() };
        server.registry.all().iter().map(|mapped| mapped.device.name()).collect()
    }
}
