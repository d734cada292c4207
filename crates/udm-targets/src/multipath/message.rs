//! Messages and commands: the changes that `dmsetup message` can make to a multipath device.
//!
//! After each message the mapped device polls every lane, so that queued bios are retried.

use super::Multipath;
use super::parse::parse_u32;
use super::path_log::{PathFailReason, ReinstateReason};
use std::sync::MutexGuard;
use udm_core::DevNo;
use udm_dm::target::{DeviceNameResolver, ResolvedDevice};
use udm_dm::{PathCommand, TargetError};

/// An error in the kernel's words.
fn multipath_message_error(text: impl std::fmt::Display) -> TargetError {
    TargetError::new(format!("multipath: {text}"))
}

/// The action on a path.
enum PathAction {
    Fail(PathFailReason<'static>),
    Reinstate(ReinstateReason),
}

impl Multipath {
    pub(super) fn handle_message(
        &self,
        words: &[String],
        resolver: &mut dyn DeviceNameResolver,
    ) -> Result<(), TargetError> {
        let verb = words.first().map_or_else(String::new, |w| w.to_ascii_lowercase());
        // Resolved before the lock is taken: if resolving a path hangs, other messages can still
        // fail that path.
        let number = match (verb.as_str(), words) {
            ("fail_path" | "reinstate_path", [_, device]) => Some(self.device(device, resolver)?),
            _ => None,
        };
        // One message at a time. Lanes and the checker fail and reinstate paths without this lock.
        let _one = self.lock_messages();
        if let (Some(number), Some(word)) = (number, words.last()) {
            let act = if verb == "fail_path" {
                PathAction::Fail(PathFailReason::Message)
            } else {
                PathAction::Reinstate(ReinstateReason::Message)
            };
            return self.apply_to_paths(number, word, &act);
        }
        match (verb.as_str(), words) {
            ("queue_if_no_path", [_]) => self.queue(true),
            ("fail_if_no_path", [_]) => self.queue(false),
            ("disable_group", [_, group]) => self.shared.bypass(self.group(group, "bypass_pg")?, true),
            ("enable_group", [_, group]) => self.shared.bypass(self.group(group, "bypass_pg")?, false),
            ("switch_group", [_, group]) => {
                self.shared.switch_manually(self.group(group, "switch_pg_num")?);
            }
            (_, [word, _]) => {
                return Err(multipath_message_error(format!(
                    "Unrecognised multipath message received: {word}"
                )));
            }
            _ => {
                let n = words.len();
                return Err(multipath_message_error(format!(
                    "Invalid multipath message arguments. Expected 2 arguments, got {n}."
                )));
            }
        }
        // Group messages raise the event counter even if they change nothing. Other messages do
        // not.
        if verb.ends_with("_group") {
            self.shared.path_log.event();
        }
        Ok(())
    }

    /// An administrator's command. It works as the message, but no check reinstates a path that it
    /// failed.
    pub(super) fn command(&self, number: DevNo, command: PathCommand) -> Result<(), TargetError> {
        let _one = self.lock_messages();
        let act = match command {
            PathCommand::Fail => PathAction::Fail(PathFailReason::Command),
            PathCommand::Reinstate => PathAction::Reinstate(ReinstateReason::Command),
        };
        self.apply_to_paths(number, &number.to_string(), &act)
    }

    fn lock_messages(&self) -> MutexGuard<'_, ()> {
        self.messages.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Sets whether bios without a path are queued.
    fn queue(&self, on: bool) {
        if self.shared.valid() == 0 && on != self.shared.word().queueing() {
            self.shared.path_log.policy(on);
        }
        self.shared.set_queueing(on);
        // The checker starts or stops its timer for failing queued requests.
        self.shared.wait_queue.wake_up();
    }

    /// Parses a group number, counted from 1, to an index.
    fn group(&self, word: &str, who: &str) -> Result<usize, TargetError> {
        let index = parse_u32(word).and_then(|n| (n as usize).checked_sub(1));
        index
            .filter(|&g| g < self.groups.len())
            .ok_or_else(|| multipath_message_error(format!("invalid PG number supplied to {who}")).at(1))
    }

    /// Applies `act` to every path over device `number`, named `word` in the message. Raises one
    /// event if any path changed.
    fn apply_to_paths(&self, number: DevNo, word: &str, act: &PathAction) -> Result<(), TargetError> {
        let mut found = false;
        let mut changed = false;
        for (path, (_, device)) in self.paths().enumerate().filter(|(_, (_, d))| d.number == number) {
            found = true;
            if let PathAction::Reinstate(_) = act {
                device.device.retry_now();
            }
            changed |= match act {
                PathAction::Fail(why) => self.shared.fail(path, why),
                PathAction::Reinstate(back) => self.shared.reinstate(path, *back),
            };
        }
        if !found {
            return Err(multipath_message_error(format!("no path over device {word}")).at(1));
        }
        if changed {
            self.shared.path_log.event();
            self.shared.wait_queue.wake_up();
        }
        Ok(())
    }

    /// The number of the device that `word` names.
    ///
    /// A number is taken as it is: a device that does not exist is in no table. A name in the table
    /// needs no lookup, unless it is a mapped device, which may have been renamed.
    fn device(&self, word: &str, resolver: &mut dyn DeviceNameResolver) -> Result<DevNo, TargetError> {
        if let Ok(number) = word.parse() {
            return Ok(number);
        }
        let is_it = |device: &ResolvedDevice| device.name == word && device.device.stacked().is_none();
        if let Some((_, device)) = self.paths().find(|(_, device)| is_it(device)) {
            return Ok(device.number);
        }
        let found = resolver.get(word).map_err(|e| {
            multipath_message_error(format!("message: error getting device {word}"))
                .with_errno(e.errno)
                .because(e.reason)
                .at(1)
        })?;
        Ok(found.number)
    }
}
