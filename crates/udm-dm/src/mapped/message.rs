//! Messages: words for one target of a device, or for the device itself (`@...`).

use super::MappedDevice;
use crate::completion::TargetMessageWaitHandle;
use crate::error::TargetError;
use crate::target::{DeviceNameResolver, Target};
use udm_core::errno::EBUSY;
use udm_core::{CoreCommandSender, Device, LaneCommand, Sector};

impl MappedDevice {
    /// As [`MappedDevice::send`], for callers that do not wait for completion on the cores.
    ///
    /// # Errors
    /// As [`MappedDevice::send`].
    pub fn message(
        &self,
        sector: u64,
        words: &[String],
        resolver: &mut dyn DeviceNameResolver,
        cores: &dyn CoreCommandSender,
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
        resolver: &mut dyn DeviceNameResolver,
        cores: &dyn CoreCommandSender,
    ) -> Result<(String, Option<TargetMessageWaitHandle>), TargetError> {
        let Some(first) = words.first() else {
            return Err(TargetError::new("Empty message received."));
        };
        if first.starts_with('@') {
            return Err(TargetError::new(format!("Unsupported message sent to DM core: {first}")).at(0));
        }
        self.with_target(sector, cores, |target| {
            let answer = target.message(words, resolver)?;
            Ok((answer, target.pending_completion()))
        })
    }

    /// Calls `act` with the target that maps `sector`, then makes all lanes poll once.
    ///
    /// # Errors
    /// `Target message sector outside device.`; EBUSY while suspended, if the target refuses
    /// messages then; errors of `act`, with the line of the target.
    pub(crate) fn with_target<T>(
        &self,
        sector: u64,
        cores: &dyn CoreCommandSender,
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
        if target.features().refuses_messages_while_suspended && self.is_suspended() {
            return Err(TargetError::errno(EBUSY).because("the device is suspended"));
        }
        let done = act(&**target).map_err(|e| TargetError { line: Some(line), ..e })?;
        cores.broadcast(self.id(), LaneCommand::Kick);
        Ok(done)
    }
}
