//! Waiting for the events of a device.

use super::cancel::CancelToken;
use super::show;
use crate::api;
use crate::error::VerbError;
use crate::registry::DeviceRegistry;
use std::sync::Arc;
use udm_core::errno::ENXIO;
use udm_core::interleave;
use udm_dm::TargetError;

/// Waits until the device's event counter differs from `event_nr`, and describes the device. The
/// removal of a device with a live table counts as an event; the answer is its last state. The wait
/// needs no thread and keeps no reference to the device.
///
/// # Errors
/// ENXIO if there is no such device, or if a device without a live table is removed; the error of
/// the cancel token.
pub async fn wait_device_event(
    registry: &DeviceRegistry,
    word: &str,
    event_nr: u32,
    cancel_token: &CancelToken,
) -> Result<api::DeviceDescription, VerbError> {
    let (waiters, device) = {
        let mapped = registry.find(word)?;
        (Arc::clone(&mapped.waiters), Arc::downgrade(&mapped))
    };
    let waits = waiters.enter();
    loop {
        let mut next = std::pin::pin!(waits.next());
        // Events are noticed from here on.
        next.as_mut().enable();
        if let Some(last) = waiters.last() {
            if !last.live_table {
                let error = TargetError::errno(ENXIO).because("it has been removed meanwhile");
                return Err(VerbError::new(word, error));
            }
            return Ok(api::DeviceDescription { event_nr: last.event_nr.wrapping_add(1), ..last.clone() });
        }
        if let Some(mapped) = device.upgrade().filter(|mapped| mapped.device.event_nr() != event_nr) {
            return Ok(show::describe_mapped_device(registry, &mapped));
        }
        interleave::mark_interleave_point();
        tokio::select! {
            biased;
            () = next => {}
            why = cancel_token.cancelled() => return Err(VerbError::new(word, why)),
        }
    }
}
