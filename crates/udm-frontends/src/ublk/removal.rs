//! The end of a device: it is removed, or left to the next server if it is in use.

use super::driver::UblkCommandError;
use super::openers::{BlockDeviceUse, look_at_block_device};
use super::queue::{UblkQueueEvent, UblkQueueMessage};
use super::session::{QUEUES_LIMIT, UblkSession, is_recoverable};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::time::Instant;
use udm_wire::ublk::UblkFeatures;

/// Why a device was not removed.
#[derive(Debug, thiserror::Error)]
pub enum UblkRemovalError {
    /// Somebody uses it: who, in words.
    #[error("it is in use ({0})")]
    InUse(String),
    /// It is paused for an upgrade, or its thread has ended.
    #[error("it is not served now")]
    NotServed,
    /// The kernel refuses: why.
    #[error("{0}")]
    Kernel(String),
}

impl From<UblkCommandError> for UblkRemovalError {
    fn from(error: UblkCommandError) -> UblkRemovalError {
        match error.errno() {
            Some(Errno::BUSY) => UblkRemovalError::InUse("somebody has it open".into()),
            _ => UblkRemovalError::Kernel(error.to_string()),
        }
    }
}

impl UblkSession {
    /// Removes the device while its server goes on. With `force` also if it is in use; its users
    /// get errors then. After an error the device is served as before.
    ///
    /// # Errors
    /// Somebody uses the device, or the kernel refuses.
    pub(super) fn remove(&mut self, force: bool) -> Result<(), UblkRemovalError> {
        if self.export.is_none() {
            return Err(UblkRemovalError::NotServed);
        }
        let claim = match self.stop_device(false) {
            Err(UblkRemovalError::InUse(_)) if force => self.stop_device(true)?,
            stopped => stopped?,
        };
        self.delete_stopped(claim);
        Ok(())
    }

    /// Ends the device in order: removes it, or leaves it to the next server if it is in use.
    pub(super) fn end(mut self) {
        if self.export.is_none() {
            // Another process takes over.
            self.tell(&UblkQueueMessage::Detach);
            return self.wait_until_closed();
        }
        let stopped = match self.stop_device(false) {
            Err(UblkRemovalError::InUse(user)) if is_recoverable(&self.info) => return self.leave(&user),
            Err(UblkRemovalError::InUse(user)) => {
                let (name, number) = (&self.name, self.info.number);
                tracing::warn!(
                    "ublk {name}: /dev/ublkb{number} ends with its server, although {user} uses it"
                );
                self.stop_device(true)
            }
            stopped => stopped,
        };
        match stopped {
            Ok(claim) => self.delete_stopped(claim),
            Err(error) => {
                self.tell(&UblkQueueMessage::Detach);
                let (name, number) = (&self.name, self.info.number);
                tracing::warn!("ublk {name}: /dev/ublkb{number} is not removed: {error}");
            }
        }
    }

    /// Stops the block device; its queues end then. Returns a claim that keeps others from opening
    /// it until it is gone. With `force`, nobody is asked.
    fn stop_device(&self, force: bool) -> Result<Option<OwnedFd>, UblkRemovalError> {
        if force {
            self.driver.stop_always(&self.info)?;
            return Ok(None);
        }
        match look_at_block_device(self.info.number) {
            BlockDeviceUse::Used(user) => Err(UblkRemovalError::InUse(user)),
            BlockDeviceUse::Free(claim) => {
                // No flush here: closed files have written their data, and this process must not
                // wait for its own disk.
                // The kernel looks for itself, and would count the claim.
                let claim = claim.filter(|_| !self.driver.features().contains(UblkFeatures::SAFE_STOP_DEV));
                self.driver.stop(&self.info)?;
                Ok(claim)
            }
        }
    }

    /// Deletes the device after its block device was stopped.
    fn delete_stopped(&mut self, claim: Option<OwnedFd>) {
        drop(claim);
        self.wait_until_closed();
        if let Some(link) = self.link.take() {
            link.remove();
        }
        if let Err(error) = self.driver.delete(&self.info) {
            // For example until a file system that was mounted by force is unmounted.
            let (name, number) = (&self.name, self.info.number);
            tracing::warn!("ublk {name}: /dev/ublkc{number} stays until its last user ends: {error}");
        }
    }

    /// Leaves the device to the next server. The kernel keeps requests once this process has ended.
    fn leave(&mut self, user: &str) {
        self.tell(&UblkQueueMessage::Detach);
        self.wait_until_closed();
        let (name, number) = (&self.name, self.info.number);
        tracing::warn!(
            "ublk {name}: /dev/ublkb{number} is in use ({user}): its requests wait for the next server of \
             {name}"
        );
    }

    fn wait_until_closed(&mut self) {
        let end = Instant::now() + QUEUES_LIMIT;
        for queue in self.queues.drain(..) {
            // Disconnected: the core has ended, or the queue is gone.
            let next = || queue.events.recv_timeout(end.saturating_duration_since(Instant::now()));
            while let Ok(event) = next() {
                if matches!(event, UblkQueueEvent::Closed) {
                    break;
                }
            }
        }
    }
}
