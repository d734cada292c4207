//! Messages: words for one target of a device, or for the device itself (`@...`).

use super::MappedDevice;
use crate::error::TargetError;
use crate::pending::Pending;
use crate::target::Resolver;
use udm_core::bugs::{self, Bug};
use udm_core::errno::EBUSY;
use udm_core::{Cores, Device, LaneCommand, Sector};

impl MappedDevice {
    /// As [`MappedDevice::send`], for those who need not know when it is done.
    ///
    /// # Errors
    /// As there.
    pub fn message(
        &self,
        sector: u64,
        words: &[String],
        resolver: &mut dyn Resolver,
        cores: &dyn Cores,
    ) -> Result<String, TargetError> {
        self.send(sector, words, resolver, cores).map(|(answer, _)| answer)
    }

    /// Sends `words` to the target that maps `sector`, and has the lanes look what changed. Returns
    /// the target's answer, and what the cores have yet to finish before the message is done.
    ///
    /// # Errors
    /// `Empty message received.`; `Unsupported message sent to DM core: @word`;
    /// `Target message sector outside device.`; EBUSY while suspended; the target's own.
    pub fn send(
        &self,
        sector: u64,
        words: &[String],
        resolver: &mut dyn Resolver,
        cores: &dyn Cores,
    ) -> Result<(String, Option<Pending>), TargetError> {
        let Some(first) = words.first() else {
            return Err(TargetError::new("Empty message received."));
        };
        if first.starts_with('@') {
            return Err(TargetError::new(format!("Unsupported message sent to DM core: {first}")).at(0));
        }
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
        let answer = target.message(words, resolver).map_err(|e| TargetError { line: Some(line), ..e })?;
        let pending = target.under_way();
        if !bugs::on(Bug::NoKick) {
            cores.broadcast(self.id(), LaneCommand::Kick);
        }
        Ok((answer, pending))
    }
}
