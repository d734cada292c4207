//! What targets hold of their device: its event counter, its name, its clock, and who hears of it.

use super::device::{MappedDevice, Wake};
use super::names::Names;
use crate::news::{Listener, News, NewsKind, StateChange};
use crate::target::{Notify, Upkeep};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use udm_core::{Cores, DevNo, DeviceId, LaneCommand, Nanos};

/// See the module. No more than this, so that a table does not keep its own device alive.
pub(super) struct Events {
    id: DeviceId,
    number: DevNo,
    names: Arc<Mutex<Names>>,
    pub count: AtomicU32,
    pub hook: OnceLock<Wake>,
    pub listener: OnceLock<Listener>,
    pub clock: OnceLock<fn() -> Nanos>,
    device: Weak<MappedDevice>,
}

impl Events {
    /// Of a device that has raised none.
    pub fn new(
        id: DeviceId,
        number: DevNo,
        names: Arc<Mutex<Names>>,
        device: Weak<MappedDevice>,
    ) -> Arc<Events> {
        let (hook, listener, clock) = (OnceLock::new(), OnceLock::new(), OnceLock::new());
        Arc::new(Events { id, number, names, count: AtomicU32::new(0), hook, listener, clock, device })
    }

    /// The name and the uuid. Cores ask, and they wait for no lock.
    fn called(&self) -> (String, Option<String>) {
        self.names.try_lock().map_or_else(
            |_| (self.number.to_string(), None),
            |names| (names.name().to_owned(), names.uuid().map(str::to_owned)),
        )
    }
}

impl Notify for Events {
    fn event(&self) {
        // Release pairs with the acquire in `event_nr`: who sees the number sees what it is about.
        let before = self.count.fetch_add(1, Ordering::Release);
        if let Some(hook) = self.hook.get() {
            hook();
        }
        let number = before.wrapping_add(1);
        self.tell(&|| StateChange::new(NewsKind::Event, format!("event number {number}")));
    }

    fn tell(&self, change: &dyn Fn() -> StateChange) {
        let Some(listener) = self.listener.get() else { return };
        listener(&|| {
            let (device, uuid) = self.called();
            let event_nr = self.count.load(Ordering::Acquire);
            News { device, uuid, number: self.number, event_nr, change: change() }
        });
    }

    fn device(&self) -> String {
        self.called().0
    }

    fn kick(&self, cores: &dyn Cores) {
        cores.broadcast(self.id, LaneCommand::Kick);
    }

    fn now(&self) -> Nanos {
        self.clock.get().map_or(Nanos(0), |clock| clock())
    }

    fn upkeep(&self) -> Upkeep {
        self.device.upgrade().map(|device| device.upkeep()).unwrap_or_default()
    }

    fn mapped(&self) -> Option<Arc<MappedDevice>> {
        self.device.upgrade()
    }
}
