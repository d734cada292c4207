//! Inspection of the content of the registry.

use crate::model::Violation;
use std::sync::{Arc, Weak};
use udm_control::registry::MAPPED_MAJOR;
use udm_control::{DeviceRegistry, verbs};
use udm_core::{Device as _, DeviceId};
use udm_dm::Table;

/// A device that the registry lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ListedDevice {
    pub(super) id: DeviceId,
    pub(super) name: String,
    pub(super) uuid: Option<String>,
    pub(super) minor: u32,
    pub(super) suspended: bool,
    /// Live table, by its number in [`ObservedTables`]; `inactive` is the inactive one.
    pub(super) live: Option<usize>,
    pub(super) inactive: Option<usize>,
    pub(super) open: u64,
    pub(super) deferred: bool,
    pub(super) events: u32,
}

/// All listed devices.
#[derive(Clone, Debug, Default)]
pub(super) struct ListedDevices(pub(super) Vec<ListedDevice>);

/// Device number of a mapped device, as text.
pub(super) fn format_device_number(minor: u32) -> String {
    format!("{MAPPED_MAJOR}:{minor}")
}

impl ListedDevices {
    pub(super) fn take(
        registry: &DeviceRegistry,
        tables: &mut ObservedTables,
    ) -> Result<ListedDevices, Violation> {
        let mut view = ListedDevices::default();
        for mapped in registry.all() {
            let device = &mapped.device;
            let info = device.info();
            let word = info.number.to_string();
            let shown = verbs::describe_device_by_name(registry, &word)
                .map_err(|e| format!("{word} is listed: {e}"))?;
            view.0.push(ListedDevice {
                id: device.id(),
                name: info.name,
                uuid: info.uuid,
                minor: info.number.minor,
                suspended: info.suspended,
                live: device.live().map(|table| tables.number(&table)),
                inactive: device.inactive().map(|table| tables.number(&table)),
                open: shown.open_count,
                deferred: shown.deferred_remove,
                events: info.event_nr,
            });
        }
        Ok(view)
    }

    pub(super) fn get(&self, id: DeviceId) -> Option<&ListedDevice> {
        self.0.iter().find(|seen| seen.id == id)
    }

    /// Returns the device with the name, uuid or number `word`.
    pub(super) fn meant(&self, word: &str) -> Option<&ListedDevice> {
        self.0.iter().find(|seen| seen.is_called(word))
    }
}

/// Previous names of renamed devices, each with the number of the inspection of the rename.
#[derive(Default)]
pub(super) struct PreviousDeviceNames(Vec<(u64, DeviceId, String)>);

impl PreviousDeviceNames {
    /// Records a rename of `was` at the inspection `at`.
    pub(super) fn renamed(&mut self, at: u64, was: &ListedDevice) {
        self.0.push((at, was.id, was.name.clone()));
    }

    /// True if `seen` is called `name`, or was so at any time since the inspection `since`.
    pub(super) fn was(&self, seen: &ListedDevice, name: &str, since: u64) -> bool {
        let had = |(at, id, old): &(u64, DeviceId, String)| *at > since && *id == seen.id && old == name;
        seen.name == name || self.0.iter().any(had)
    }
}

impl ListedDevice {
    /// True if `table`, resolved since the inspection `since`, names this device.
    pub(super) fn stands_in(&self, table: &str, since: u64, names: &PreviousDeviceNames) -> bool {
        let number = format_device_number(self.minor);
        let is_name = |name: &str| names.was(self, name, since);
        table.split_whitespace().any(|word| word == number || word.strip_prefix('@').is_some_and(is_name))
    }

    pub(super) fn is_called(&self, word: &str) -> bool {
        self.name == word || self.uuid.as_deref() == Some(word) || format_device_number(self.minor) == word
    }
}

/// A table that was seen in a slot.
pub(super) struct ObservedTable {
    table: Weak<Table>,
    /// The mapped devices that the table uses.
    pub(super) uses: Vec<DeviceId>,
    pub(super) text: String,
}

impl ObservedTable {
    pub(super) fn is_alive(&self) -> bool {
        self.table.strong_count() > 0
    }

    /// Numbers and ids of the devices that the table uses, while it exists.
    pub(super) fn devices(&self) -> Vec<(udm_core::DevNo, DeviceId)> {
        let table = self.table.upgrade();
        table.iter().flat_map(|table| table.devices()).map(|used| (used.number, used.device.id())).collect()
    }
}

/// All tables that were seen in a slot.
#[derive(Default)]
pub(super) struct ObservedTables {
    pub(super) all: Vec<ObservedTable>,
    alive: Vec<usize>,
    /// Tables that were dropped while messages were in transit. Cores that had prepared such a
    /// table may hold its devices until the messages arrive.
    leaving: Vec<usize>,
}

impl ObservedTables {
    fn number(&mut self, table: &Arc<Table>) -> usize {
        let same = |&&i: &&usize| std::ptr::eq(self.all[i].table.as_ptr(), Arc::as_ptr(table));
        if let Some(known) = self.alive.iter().find(same) {
            return *known;
        }
        let mapped = table.devices().filter(|used| used.number.major == MAPPED_MAJOR);
        let mut uses: Vec<DeviceId> = mapped.map(|used| used.device.id()).collect();
        uses.sort_unstable();
        uses.dedup();
        self.all.push(ObservedTable { table: Arc::downgrade(table), uses, text: table.text() });
        self.alive.push(self.all.len() - 1);
        self.all.len() - 1
    }

    /// Returns the tables that still exist.
    pub(super) fn alive(&mut self) -> &[usize] {
        let ObservedTables { all, alive, leaving } = self;
        leaving.extend(alive.extract_if(.., |i| !all[*i].is_alive()));
        alive
    }

    /// Records that no message is in transit.
    pub(super) fn have_left(&mut self) {
        self.alive();
        self.leaving.clear();
    }

    /// Number of dropped tables that may still hold `device` on a core.
    pub(super) fn leaving(&self, device: DeviceId) -> u64 {
        self.leaving.iter().filter(|&&i| self.all[i].uses.contains(&device)).count() as u64
    }

    /// Number of tables that use `device`.
    pub(super) fn users(&self, device: DeviceId) -> u64 {
        let uses = |&&i: &&usize| self.all[i].is_alive() && self.all[i].uses.contains(&device);
        self.alive.iter().filter(uses).count() as u64
    }
}
