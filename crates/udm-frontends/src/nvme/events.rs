//! Asynchronous events of a controller (*Base* 5.2): what a host is told, and when.
//!
//! An event is reported once, with the oldest request that waits. Then it is silent until the host
//! has read the log page that explains it.

use super::EVENT_REQUESTS_MAX;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use udm_wire::nvme::{AsyncEvent, AsyncEventMask, NvmeStatus};

/// Events of a controller, and the requests of its host.
#[derive(Default)]
pub(super) struct ControllerEvents {
    mask: AsyncEventMask,
    /// Identifiers of requests that wait, in order.
    requests: VecDeque<u16>,
    due: BTreeSet<AsyncEvent>,
    /// Events that were reported and whose page was not read.
    silent: BTreeSet<AsyncEvent>,
    /// Namespaces that the host knows, and how often each had changed.
    namespaces: BTreeMap<u32, u64>,
    /// Namespaces that have changed since the page was last read.
    changed: BTreeSet<u32>,
    ana_changes: u64,
}

impl ControllerEvents {
    /// Begins with these namespaces, and so many changes of ANA states.
    pub(super) fn begin(&mut self, namespaces: BTreeMap<u32, u64>, ana_changes: u64) {
        (self.namespaces, self.ana_changes) = (namespaces, ana_changes);
    }

    pub(super) fn mask(&self) -> AsyncEventMask {
        self.mask
    }

    pub(super) fn set_mask(&mut self, mask: AsyncEventMask) {
        self.mask = mask;
    }

    /// Adds a request that waits for an event.
    ///
    /// # Errors
    /// There are too many: the status of the request.
    pub(super) fn request(&mut self, id: u16) -> Result<(), NvmeStatus> {
        if self.requests.len() >= usize::from(EVENT_REQUESTS_MAX) {
            return Err(NvmeStatus::ASYNC_EVENT_LIMIT_EXCEEDED.permanent());
        }
        self.requests.push_back(id);
        Ok(())
    }

    /// Drops all requests: the controller was reset.
    pub(super) fn reset(&mut self) {
        self.requests.clear();
        self.silent.clear();
    }

    /// Compares the namespaces and the number of changes of ANA states with those that the host
    /// knows.
    pub(super) fn look(&mut self, namespaces: BTreeMap<u32, u64>, ana_changes: u64) {
        let before = std::mem::replace(&mut self.namespaces, namespaces);
        let now = &self.namespaces;
        let is_changed = |nsid: &u32| before.get(nsid) != now.get(nsid);
        let changed: Vec<u32> = before.keys().chain(now.keys()).copied().filter(is_changed).collect();
        if !changed.is_empty() {
            self.changed.extend(changed);
            self.due.insert(AsyncEvent::NamespaceChanged);
        }
        if std::mem::replace(&mut self.ana_changes, ana_changes) != ana_changes {
            self.due.insert(AsyncEvent::AnaChanged);
        }
    }

    /// A reset of another controller has ended after its command was answered.
    pub(super) fn reset_completed(&mut self) {
        self.due.insert(AsyncEvent::CrossControllerResetCompleted);
    }

    /// The next event to report, with the request that it completes.
    pub(super) fn next(&mut self) -> Option<(u16, AsyncEvent)> {
        let is_ready = |event: &&AsyncEvent| {
            self.due.contains(event) && !self.silent.contains(event) && self.mask.contains(event.mask())
        };
        let event = *AsyncEvent::ALL.iter().find(is_ready)?;
        let id = self.requests.pop_front()?;
        self.due.remove(&event);
        self.silent.insert(event);
        Some((id, event))
    }

    /// The host has read a log page: its event is reported again.
    pub(super) fn page_read(&mut self, page: u8) {
        self.silent.retain(|event| event.log_page() != page);
    }

    /// The namespaces that have changed. With `clears`, they are forgotten.
    pub(super) fn changed_namespaces(&mut self, clears: bool) -> Vec<u32> {
        let changed = self.changed.iter().copied().collect();
        if clears {
            self.changed.clear();
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_reported_once_until_its_page_is_read() {
        let mut events = ControllerEvents::default();
        events.begin(BTreeMap::from([(1, 0), (2, 0)]), 0);
        events.set_mask(AsyncEventMask::NAMESPACE_CHANGED | AsyncEventMask::ANA_CHANGED);
        for id in 0..u16::from(EVENT_REQUESTS_MAX) {
            events.request(id).unwrap();
        }
        assert!(events.request(9).is_err());
        events.look(BTreeMap::from([(1, 0), (2, 0)]), 0);
        assert_eq!(events.next(), None, "nothing has changed");
        events.look(BTreeMap::from([(1, 1), (3, 0)]), 1);
        assert_eq!(events.next(), Some((0, AsyncEvent::NamespaceChanged)));
        assert_eq!(events.next(), Some((1, AsyncEvent::AnaChanged)));
        events.look(BTreeMap::from([(1, 2), (3, 0)]), 1);
        assert_eq!(events.next(), None, "the page was not read");
        assert_eq!(events.changed_namespaces(true), [1, 2, 3]);
        events.page_read(0x04);
        assert_eq!(events.next(), Some((2, AsyncEvent::NamespaceChanged)), "it has changed meanwhile");
        assert_eq!(events.changed_namespaces(true), []);
    }

    #[test]
    fn events_wait_for_a_request_and_for_the_mask() {
        let mut events = ControllerEvents::default();
        events.look(BTreeMap::from([(1, 0)]), 0);
        assert_eq!(events.next(), None);
        events.request(7).unwrap();
        assert_eq!(events.next(), None, "the host does not want it");
        events.set_mask(AsyncEventMask::NAMESPACE_CHANGED);
        assert_eq!(events.next(), Some((7, AsyncEvent::NamespaceChanged)));
        events.request(8).unwrap();
        events.reset();
        events.look(BTreeMap::new(), 0);
        assert_eq!(events.next(), None, "a reset drops requests");
    }
}
