//! Waits until clones are completely copied.

use crate::progress::{ByteProgress, ProgressBars};
use crate::requests::{call_verb_without_body, explain_client_error};
use anyhow::{Result, bail};
use std::thread::sleep;
use std::time::Duration;
use udm_control::api::{self, verbs};
use udm_control::client::{ControlClient, ControlClientError};
use udm_core::errno::EINVAL;

/// Time between two queries of the server.
const TICK: Duration = Duration::from_millis(100);

/// A clone that is waited for.
struct AwaitedClone {
    /// Number of the device, which may be renamed meanwhile.
    number: String,
    now: api::CloneDescription,
    progress: ByteProgress,
    is_over: bool,
    is_shown_to_end: bool,
}

/// Waits until all clones of `names` are complete, and shows their progress; with `is_quiet` only
/// on a terminal. Returns their last descriptions.
///
/// # Errors
/// One of them is no clone, has been stopped, or its metadata fails; or the server does not answer.
pub(super) fn wait_for_clones(
    client: &ControlClient,
    names: &[String],
    is_quiet: bool,
) -> Result<Vec<api::CloneDescription>> {
    let bars = ProgressBars::new();
    let mut clones = Vec::with_capacity(names.len());
    for name in names {
        let now = call_verb_without_body(client, verbs::GET_CLONE.on(name))?;
        let number = call_verb_without_body(client, verbs::GET_DEVICE.on(name))?.number;
        let new = if is_quiet { ByteProgress::quiet } else { ByteProgress::new };
        let progress = new(&bars, &now.name, now.size_bytes);
        clones.push(AwaitedClone { number, now, progress, is_over: false, is_shown_to_end: false });
    }
    loop {
        clones.iter_mut().try_for_each(AwaitedClone::check)?;
        for clone in clones.iter_mut().filter(|clone| !clone.is_shown_to_end) {
            clone.show()?;
        }
        if clones.iter().all(|clone| clone.is_over) {
            return Ok(clones.into_iter().map(|clone| clone.now).collect());
        }
        sleep(TICK);
        for clone in clones.iter_mut().filter(|clone| !clone.is_over) {
            clone.update(client)?;
        }
    }
}

impl AwaitedClone {
    fn update(&mut self, client: &ControlClient) -> Result<()> {
        match client.call(verbs::GET_CLONE.on(&self.number), &()) {
            Ok(now) => self.now = now,
            // It has another table. If the copy was nearly over, it was finished since.
            Err(ControlClientError::Refused(why)) if why.errno == EINVAL.unsigned_abs() => {
                let table = call_verb_without_body(client, verbs::GET_TABLE.on(&self.number))?;
                if table.lines.iter().any(|line| line.target != "linear") {
                    bail!("{}: it has got another table, which is no clone", self.now.name);
                }
                self.now.state = "done".into();
                self.now.hydrated_regions = self.now.regions;
                self.now.hydrated_bytes = self.now.size_bytes;
                self.now.hydrating_regions = 0;
            }
            Err(error) => return Err(explain_client_error(error, None)),
        }
        Ok(())
    }

    /// Looks whether the copy is over, or cannot go on.
    fn check(&mut self) -> Result<()> {
        let api::CloneDescription { name, state, .. } = &self.now;
        match state.as_str() {
            "done" => self.is_over = true,
            // The source of one that waits is tried again.
            "hydrating" | "waiting" => {}
            "stopped" => bail!("{name}: its copy is stopped: `udm clone start {name}` continues it"),
            _ => bail!("{name}: its metadata has failed ({state}), so it cannot be copied: see the log"),
        }
        Ok(())
    }

    fn show(&mut self) -> Result<()> {
        self.is_shown_to_end = self.is_over;
        let errors = match (self.now.source_errors, self.now.destination_errors) {
            (0, 0) => String::new(),
            (source, 0) => format!(", {source} errors of its source"),
            (0, destination) => format!(", {destination} errors of its destination"),
            (source, destination) => {
                format!(", {source} errors of its source, {destination} of its destination")
            }
        };
        self.progress.show(self.now.hydrated_bytes, &errors)
    }
}
