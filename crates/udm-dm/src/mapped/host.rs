//! The part of a mapped device that its targets hold: event counter, name, clock and event
//! receiver.

use super::device::{MappedDevice, TransitionWakeFn};
use super::names::DeviceNameAndUuid;
use crate::device_events::{DeviceEvent, DeviceEventDetails, EventKind, EventSink};
use crate::target::{SettingsOutsideTable, TargetHostServices};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use udm_core::{CoreCommandSender, DevNo, DeviceId, LaneCommand, Nanos};

/// Implements [`TargetHostServices`]. It holds only a weak reference, so a table does not keep its
/// own device alive.
pub(super) struct WeakTargetHost {
    id: DeviceId,
    number: DevNo,
    names: Arc<Mutex<DeviceNameAndUuid>>,
    pub count: AtomicU32,
    pub hook: OnceLock<TransitionWakeFn>,
    pub event_sink: OnceLock<EventSink>,
    pub clock: OnceLock<fn() -> Nanos>,
    device: Weak<MappedDevice>,
}

impl WeakTargetHost {
    /// Creates the host of a device; its event counter is 0.
    pub fn new(
        id: DeviceId,
        number: DevNo,
        names: Arc<Mutex<DeviceNameAndUuid>>,
        device: Weak<MappedDevice>,
    ) -> Arc<WeakTargetHost> {
        let (hook, event_sink, clock) = (OnceLock::new(), OnceLock::new(), OnceLock::new());
        Arc::new(WeakTargetHost {
            id,
            number,
            names,
            count: AtomicU32::new(0),
            hook,
            event_sink,
            clock,
            device,
        })
    }

    /// The name and the uuid. Cores call this, so it does not wait for the lock.
    fn current_name(&self) -> (String, Option<String>) {
        self.names.try_lock().map_or_else(
            |_| (self.number.to_string(), None),
            |names| (names.name().to_owned(), names.uuid().map(str::to_owned)),
        )
    }
}

impl TargetHostServices for WeakTargetHost {
    fn event(&self) {
        // Release pairs with the acquire in `event_nr`: a reader of the number also sees the state
        // before the event.
        let before = self.count.fetch_add(1, Ordering::Release);
        if let Some(hook) = self.hook.get() {
            hook();
        }
        let number = before.wrapping_add(1);
        self.emit(&|| DeviceEventDetails::new(EventKind::Event, format!("event number {number}")));
    }

    fn emit(&self, change: &dyn Fn() -> DeviceEventDetails) {
        let Some(event_sink) = self.event_sink.get() else { return };
        event_sink(&|| {
            let (device, uuid) = self.current_name();
            let event_nr = self.count.load(Ordering::Acquire);
            DeviceEvent { device, uuid, number: self.number, event_nr, change: change() }
        });
    }

    fn device(&self) -> String {
        self.current_name().0
    }

    fn kick(&self, cores: &dyn CoreCommandSender) {
        cores.broadcast(self.id, LaneCommand::Kick);
    }

    fn now(&self) -> Nanos {
        self.clock.get().map_or(Nanos(0), |clock| clock())
    }

    fn settings(&self) -> Option<SettingsOutsideTable> {
        self.device.upgrade()?.target_settings()
    }

    fn mapped(&self) -> Option<Arc<MappedDevice>> {
        self.device.upgrade()
    }
}
