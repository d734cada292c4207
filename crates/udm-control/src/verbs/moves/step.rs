//! What a move does by itself: it waits for the copies, and switches.

use super::job::{MoveJob, MovePoll, MoveState};
use super::move_error;
use super::places::linear_table;
use super::start::{load_mirror, new_log, put};
use crate::TableLoadControlIo;
use crate::error::VerbError;
use crate::registry::{BaseDir, DeviceRegistry, RegisteredDevice};
use crate::state_folder::moves::MoveRecord;
use crate::verbs::reload::reload_live_table;
use crate::verbs::{CancelToken, block_on_verb};
use std::sync::Arc;
use std::time::{Duration, Instant};
use udm_core::errno::{EIO, ENXIO};
use udm_core::{Sector, Sectors, control_io};
use udm_dm::{EventKind, MirrorFailure, MirrorPhase, MirrorReport, Table};

/// How often a mirror is looked at.
const STEP: Duration = Duration::from_millis(50);

/// The pause after a step that failed because of another change of the device.
const RETRY: Duration = Duration::from_secs(1);

/// What to do next. Never blocks.
#[must_use]
pub fn poll_move(registry: &DeviceRegistry, job: &MoveJob) -> MovePoll {
    let is_there = job.mapped.upgrade().is_some_and(|mapped| registry.is_active(&mapped));
    let facts = job.facts();
    if facts.state.is_over() || !is_there || registry.is_ending() {
        return MovePoll::Over;
    }
    let now = Instant::now();
    if now < facts.retry_at {
        return MovePoll::Wait((facts.retry_at - now).min(RETRY));
    }
    drop(facts);
    match job.mirror().map(|(_, report)| report) {
        Some(report) if has_failed_log(&report) => MovePoll::Step,
        Some(MirrorReport { phase: MirrorPhase::Copying, failure: None, .. }) => {
            job.facts().error = None;
            MovePoll::Wait(STEP)
        }
        Some(MirrorReport { phase: MirrorPhase::InSync, .. }) if job.is_paused() => MovePoll::Wait(STEP),
        _ => MovePoll::Step,
    }
}

fn has_failed_log(report: &MirrorReport) -> bool {
    report.log.as_ref().is_some_and(|log| log.failure.is_some())
}

/// Does one step. May block.
///
/// # Errors
/// What the job waits for; it is tried again after a pause, and `udm move list` shows it.
pub fn run_move_step(registry: &DeviceRegistry, job: &MoveJob) -> Result<(), VerbError> {
    let _turn = job.turn();
    let name = job.name();
    let Some(mapped) = job.mapped.upgrade().filter(|_| !job.facts().state.is_over()) else { return Ok(()) };
    let done = match job.mirror() {
        None => without_mirror(registry, job, &mapped, &name),
        Some((table, report)) if has_failed_log(&report) => give_up_log(registry, job, &name, &table),
        Some((table, report)) => match (report.phase, report.failure) {
            (MirrorPhase::InSync | MirrorPhase::Switching, _) => {
                switch_to_new_place(registry, job, &mapped, &name, (&table, &report))
            }
            (_, Some(failure)) => handle_failure(registry, job, &mapped, &name, (&report, failure)),
            (MirrorPhase::Copying | MirrorPhase::Degraded, None) => Ok(()),
        },
    };
    if let Err(error) = &done {
        job.facts().retry_later(error.error.reason.clone());
    }
    done
}

/// The move begins again after a restart of the server, or somebody has replaced the mirror.
fn without_mirror(
    registry: &DeviceRegistry,
    job: &MoveJob,
    mapped: &Arc<RegisteredDevice>,
    name: &str,
) -> Result<(), VerbError> {
    let (state, record) = {
        let facts = job.facts();
        (facts.state, facts.record.clone())
    };
    match state {
        MoveState::Waiting => {
            let record = with_log(registry, job, name, record);
            load_mirror(registry, mapped, name, &record, &CancelToken::default())?;
            begin_copies(job);
            Ok(())
        }
        // The record says that the new place is the disk, and every table of it is redirected
        // there.
        MoveState::Switching => {
            publish_finished_move(job, mapped, name);
            Ok(())
        }
        _ => end(registry, job, mapped, (MoveState::Failed, "its table was replaced by another one".into())),
    }
}

/// The log cannot be written, and writes wait for it. The record forgets the log first: the next
/// server copies all again. Then writes need it no more.
fn give_up_log(registry: &DeviceRegistry, job: &MoveJob, name: &str, table: &Table) -> Result<(), VerbError> {
    let folder = registry.state_folder().ok_or_else(|| VerbError::missing(name))?;
    let record = MoveRecord { log: None, ..job.facts().record.clone() };
    let log = job.facts().record.log.clone().unwrap_or_default();
    let record = put(folder, name, &record)?;
    job.facts().record = record;
    let mirrors = table.targets().iter().filter_map(|entry| entry.target.as_mirror());
    mirrors.for_each(|mirror| mirror.abandon_log());
    tracing::warn!("{name}: the log {log} of its move failed: if the server ends, all is copied again");
    Ok(())
}

/// The record of a mirror that is about to begin. Without a log it gets a new one, which says that
/// nothing is copied; without space for it, the move does without.
fn with_log(registry: &DeviceRegistry, job: &MoveJob, name: &str, record: MoveRecord) -> MoveRecord {
    let Some(folder) = registry.state_folder().filter(|_| record.log.is_none()) else { return record };
    let made = new_log(folder, &record)
        .and_then(|log| folder.put_move(&MoveRecord { log: Some(log), ..record.clone() }));
    match made {
        Ok(made) => {
            job.facts().record = made.clone();
            made
        }
        Err(error) => {
            tracing::warn!("{name}: no log of its move: {error}");
            record
        }
    }
}

/// The mirror was loaded.
fn begin_copies(job: &MoveJob) {
    let mut facts = job.facts();
    facts.state = MoveState::Copying;
    facts.began = Instant::now();
    facts.reset_retry();
    drop(facts);
    job.set_paused(job.is_paused());
}

/// A copy or a write failed. A device that may return is waited for; otherwise the move has failed.
fn handle_failure(
    registry: &DeviceRegistry,
    job: &MoveJob,
    mapped: &Arc<RegisteredDevice>,
    name: &str,
    (report, failure): (&MirrorReport, MirrorFailure),
) -> Result<(), VerbError> {
    let text = failure_text(job, &failure);
    if failure.of_destination && !failure.status.is_path_error() {
        put_back_table(registry, job, mapped, name)?;
        return end(registry, job, mapped, (MoveState::Failed, text));
    }
    if report.phase != MirrorPhase::Degraded {
        // The task copies the region again.
        let mut facts = job.facts();
        if facts.error.as_ref() != Some(&text) {
            tracing::warn!("{name}: {text}: it is tried again");
        }
        facts.error = Some(text);
        facts.retry_at = Instant::now() + RETRY;
        return Ok(());
    }
    {
        let mut facts = job.facts();
        (facts.state, facts.error) = (MoveState::Waiting, Some(text.clone()));
    }
    // Without a log, a new mirror copies all again, so it is loaded only when the device answers.
    let io = TableLoadControlIo::new(registry.cores());
    let probe = control_io::read_sectors(&io, &report.destination.device.device, Sector(0), Sectors(8));
    probe.map_err(|error| move_error(name, error.errno, format!("{text}; {}", error.text)))?;
    let record = job.facts().record.clone();
    let again = if record.log.is_some() { "continues" } else { "begins again" };
    let record = with_log(registry, job, name, record);
    load_mirror(registry, mapped, name, &record, &CancelToken::default())?;
    tracing::info!("{name}: its move to {} {again}", job.facts().to);
    begin_copies(job);
    Ok(())
}

fn failure_text(job: &MoveJob, failure: &MirrorFailure) -> String {
    let facts = job.facts();
    let at = failure.sector.map(|sector| format!(" near sector {sector}")).unwrap_or_default();
    let (device, what) = match (failure.of_destination, failure.sector) {
        (false, Some(_)) => (&facts.from, "read"),
        (false, None) => (&facts.from, "write"),
        (true, _) => (&facts.to, "write"),
    };
    format!("{device}: a {what} failed{at}: {}", failure.status.text())
}

/// Makes the new place the disk: see the head of the module.
fn switch_to_new_place(
    registry: &DeviceRegistry,
    job: &MoveJob,
    mapped: &Arc<RegisteredDevice>,
    name: &str,
    (table, report): (&Table, &MirrorReport),
) -> Result<(), VerbError> {
    let Some(mirror) = table.targets().first().and_then(|entry| entry.target.as_mirror()) else {
        return Ok(());
    };
    if job.facts().state != MoveState::Switching {
        mirror.begin_switch().map_err(|error| VerbError::new(name, error))?;
        let io = TableLoadControlIo::new(registry.cores());
        if let Err(error) = control_io::flush_device(&io, &report.destination.device.device) {
            mirror.cancel_switch();
            let why = format!("the destination cannot be flushed: {}", error.text);
            return Err(move_error(name, error.errno, why));
        }
        let record = job.facts().record.clone();
        match write_switch(registry, name, &record) {
            Ok(written) => {
                let mut facts = job.facts();
                (facts.record, facts.state) = (written, MoveState::Switching);
            }
            Err((error, is_undone)) => {
                // If nobody knows which record a restart will find, both places must stay complete.
                if is_undone {
                    mirror.cancel_switch();
                }
                return Err(error);
            }
        }
    }
    let record = job.facts().record.clone();
    load_linear(registry, mapped, name, &record)?;
    publish_finished_move(job, mapped, name);
    Ok(())
}

/// Writes the record that names the new place. After an error, `true` says that the record of
/// before is durable again.
fn write_switch(
    registry: &DeviceRegistry,
    name: &str,
    record: &MoveRecord,
) -> Result<MoveRecord, (VerbError, bool)> {
    let Some(folder) = registry.state_folder() else {
        return Err((move_error(name, EIO, "the server has no state folder"), true));
    };
    put(folder, name, &record.switched()).map_err(|error| (error, folder.put_move(record).is_ok()))
}

fn publish_finished_move(job: &MoveJob, mapped: &RegisteredDevice, name: &str) {
    let mut facts = job.facts();
    (facts.state, facts.error) = (MoveState::Done, None);
    let (from, to) = (&facts.from, &facts.to);
    tracing::info!("{name}: it was moved from {from} to {to}: name {to} in its configuration");
    mapped.publish(EventKind::Moved, &format!("it was moved from {from} to {to}"));
}

/// Replaces the mirror by the place that is the disk. May block.
pub(super) fn put_back_table(
    registry: &DeviceRegistry,
    job: &MoveJob,
    mapped: &Arc<RegisteredDevice>,
    name: &str,
) -> Result<(), VerbError> {
    if job.mirror().is_none() {
        return Ok(());
    }
    let record = job.facts().record.clone();
    load_linear(registry, mapped, name, &record)
}

/// Replaces the live table by one over the current place. May block.
fn load_linear(
    registry: &DeviceRegistry,
    mapped: &Arc<RegisteredDevice>,
    name: &str,
    record: &MoveRecord,
) -> Result<(), VerbError> {
    let linear = linear_table(record.sectors, &record.current);
    let (cancel_token, folder) = (CancelToken::default(), BaseDir::none());
    let reload = reload_live_table(registry, mapped, name, &linear, &folder, &cancel_token);
    block_on_verb(reload).map(drop).map_err(|error| error.at(None))
}

/// Ends a move whose disk stays where it is: the record no longer says that it moves.
pub(super) fn end(
    registry: &DeviceRegistry,
    job: &MoveJob,
    mapped: &RegisteredDevice,
    (state, why): (MoveState, String),
) -> Result<(), VerbError> {
    let name = job.name();
    let folder = registry.state_folder().ok_or_else(|| VerbError::missing(&name))?;
    let record = MoveRecord { destination: None, log: None, ..job.facts().record.clone() };
    let record = put(folder, &name, &record)?;
    let mut facts = job.facts();
    (facts.record, facts.state) = (record, state);
    facts.error = (state == MoveState::Failed).then(|| why.clone());
    let (from, to) = (&facts.from, &facts.to);
    let line = format!("it stays on {from}, and is not moved to {to}: {why}");
    tracing::warn!("{name}: {line}");
    mapped.publish(EventKind::MoveFailed, &line);
    Ok(())
}

/// The device of a job that is not over.
pub(super) fn device_of(job: &MoveJob) -> Result<Arc<RegisteredDevice>, VerbError> {
    job.mapped.upgrade().ok_or_else(|| move_error(&job.name(), ENXIO, "it has been removed meanwhile"))
}
