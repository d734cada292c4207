//! Messages: words for one target of a device, or for the device itself (`@...`).

use super::MappedDevice;
use crate::completion::CompletionHandle;
use crate::error::TargetError;
use crate::report::PathCommand;
use crate::target::{Resolver, Target};
use udm_core::bugs::{self, Bug};
use udm_core::errno::EBUSY;
use udm_core::{Cores, DevNo, Device, LaneCommand, Sector};

impl MappedDevice {
    /// As [`MappedDevice::send`], for callers that do not wait for completion on the cores.
    ///
    /// # Errors
    /// As [`MappedDevice::send`].
    pub fn message(
        &self,
        sector: u64,
        words: &[String],
        resolver: &mut dyn Resolver,
        cores: &dyn Cores,
    ) -> Result<String, TargetError> {
        self.send(sector, words, resolver, cores).map(|(answer, _)| answer)
    }

    /// Sends `words` to the target that maps `sector`, and makes all lanes poll once. Returns the
    /// target's answer, and a handle if cores still have work to finish.
    ///
    /// # Errors
    /// `Empty message received.`; `Unsupported message sent to DM core: @word`; `Target message
    /// sector outside device.`; EBUSY while suspended; errors of the target.
    pub fn send(
        &self,
        sector: u64,
        words: &[String],
        resolver: &mut dyn Resolver,
        cores: &dyn Cores,
    ) -> Result<(String, Option<CompletionHandle>), TargetError> {
        let Some(first) = words.first() else {
            return Err(TargetError::new("Empty message received."));
        };
        if first.starts_with('@') {
            return Err(TargetError::new(format!("Unsupported message sent to DM core: {first}")).at(0));
        }
        self.call_target(sector, cores, |target| {
            let answer = target.message(words, resolver)?;
            Ok((answer, target.pending_completion()))
        })
    }

    /// Fails or reinstates each path over device `number`, for an administrator, and makes all
    /// lanes poll once. The command goes to the target at sector 0, because a target with paths is
    /// alone in its table.
    ///
    /// # Errors
    /// EINVAL if there is no such path, or the target has no paths; EBUSY while suspended.
    pub fn command_path(
        &self,
        number: DevNo,
        command: PathCommand,
        cores: &dyn Cores,
    ) -> Result<(), TargetError> {
        self.call_target(0, cores, |target| target.command_path(number, command))
    }

    /// Calls `act` with the target that maps `sector`, then makes all lanes poll once.
    fn call_target<T>(
        &self,
        sector: u64,
        cores: &dyn Cores,
        act: impl FnOnce(&dyn Target) -> Result<T, TargetError>,
    ) -> Result<T, TargetError> {
        let live = self.live();
        let target = live.as_ref().and_then(|table| {
            let i = table.find(Sector(sector))?;
            Some((i, &table.targets()[i].target))
        });
        let Some((line, target)) = target else {
            return Err(TargetError::new("Target message sector outside device."));
        };
        if target.refuses_messages_while_suspended() && self.is_suspended() {
            return Err(TargetError::errno(EBUSY).because("the device is suspended"));
        }
        let done = act(&**target).map_err(|e| TargetError { line: Some(line), ..e })?;
        if !bugs::on(Bug::NoKick) {
            cores.broadcast(self.id(), LaneCommand::Kick);
        }
        Ok(done)
    }
}
