//! ANA states: of each device on each port (*Base* 8.1).
//!
//! Each namespace is a group of its own with the same number, so that each device has a state of
//! its own. A state belongs to the name of a device, also while there is no such device.

use super::subsystem::Subsystem;
use std::collections::BTreeMap;
use udm_wire::nvme::{AnaGroup, AnaState};

/// States of all devices on one port.
#[derive(Default)]
pub(super) struct PortAnaStates {
    /// State of devices that are not listed.
    default: AnaState,
    devices: BTreeMap<String, AnaState>,
    /// Number of changes on this port.
    changes: u64,
    /// Number of changes on this port when the state of a device last changed.
    changed_at: BTreeMap<String, u64>,
    /// The same for devices that are not listed.
    default_changed_at: u64,
}

impl PortAnaStates {
    pub(super) fn of(&self, device: &str) -> AnaState {
        self.devices.get(device).copied().unwrap_or(self.default)
    }

    pub(super) fn changes(&self) -> u64 {
        self.changes
    }

    /// Sets the state of a device, or of all. Returns true if a state is another one now.
    fn set(&mut self, device: Option<&str>, state: AnaState) -> bool {
        let is_same = match device {
            Some(device) => self.of(device) == state,
            None => self.default == state && self.devices.values().all(|one| *one == state),
        };
        if is_same {
            return false;
        }
        self.changes += 1;
        match device {
            Some(device) if state == self.default => {
                self.devices.remove(device);
                self.changed_at.insert(device.to_owned(), self.changes);
            }
            Some(device) => {
                self.devices.insert(device.to_owned(), state);
                self.changed_at.insert(device.to_owned(), self.changes);
            }
            None => {
                (self.default, self.default_changed_at) = (state, self.changes);
                self.devices.clear();
                self.changed_at.clear();
            }
        }
        true
    }

    fn changed_at(&self, device: &str) -> u64 {
        self.changed_at.get(device).copied().unwrap_or(self.default_changed_at)
    }
}

impl Subsystem {
    /// Sets the state of a device, or of all, on these ports. Hosts get an event.
    pub(super) fn set_ana_state(&self, ports: &[usize], device: Option<&str>, ana_state: AnaState) {
        let is_changed = {
            let mut state = self.state();
            let change = |port: &usize| state.ana[*port].set(device, ana_state);
            ports.iter().map(change).fold(false, |any, one| any | one)
        };
        if is_changed {
            self.notify();
        }
    }

    /// The state of a device on a port.
    pub(super) fn ana_state(&self, port: usize, device: &str) -> AnaState {
        self.state().ana[port].of(device)
    }

    /// Number of changes of states on a port.
    pub(super) fn ana_changes(&self, port: usize) -> u64 {
        self.state().ana[port].changes()
    }

    /// The groups on a port, one for each namespace.
    pub(super) fn ana_groups(&self, port: usize) -> Vec<AnaGroup> {
        let state = self.state();
        let states = &state.ana[port];
        let group = |(nsid, device): (u32, String)| AnaGroup {
            id: nsid,
            changes: states.changed_at(&device),
            state: states.of(&device),
            namespaces: vec![nsid],
        };
        state.device_names().map(group).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_belongs_to_a_device_or_to_all() {
        let mut states = PortAnaStates::default();
        assert!(!states.set(None, AnaState::Optimized));
        assert!(states.set(Some("a"), AnaState::Inaccessible));
        assert!(!states.set(Some("a"), AnaState::Inaccessible));
        assert_eq!((states.of("a"), states.of("b")), (AnaState::Inaccessible, AnaState::Optimized));
        assert!(states.set(Some("b"), AnaState::NonOptimized));
        assert_eq!((states.changes(), states.changed_at("a"), states.changed_at("c")), (2, 1, 0));
        assert!(states.set(None, AnaState::NonOptimized));
        assert_eq!((states.of("a"), states.changed_at("a")), (AnaState::NonOptimized, 3));
        assert!(states.set(Some("a"), AnaState::Optimized));
        assert!(states.set(Some("a"), AnaState::NonOptimized));
        assert_eq!(
            (states.of("a"), states.changed_at("a"), states.changed_at("b")),
            (AnaState::NonOptimized, 5, 3)
        );
    }
}
