//! Simulated cores: their inboxes, and the state that their lanes see.

use crate::rng::{RngStream, SimRng};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use udm_core::{
    AckOnLastDrop, BioTaskFactory, BioTaskHandle, CoreCommandSender, CoreId, Device, DeviceId, LaneCommand,
    Nanos,
};

/// A message in transit.
struct MessageInTransit {
    due: Nanos,
    to: DeviceId,
    what: CoreMessage,
}

/// Content of a message to a core.
pub enum CoreMessage {
    /// A command to the lane.
    Command(LaneCommand),
    /// A wake-up of the lane.
    Wake,
    /// Start of a task.
    Start(BioTaskFactory, TaskPurpose),
    /// A request to stop a task.
    Stop(Option<AckOnLastDrop>),
}

/// Purpose of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskPurpose {
    /// Task of a target that checks paths.
    PathCheck,
    /// Owner lane: one lane that serves the requests of all cores in one order.
    OwnerLane,
    /// I/O of a load to a disk.
    TableLoad,
    /// I/O of a load to a mapped device, checked like other requests.
    MappedTableLoad,
}

/// Messages in transit to one core, in one queue per sender. Messages of one sender keep their
/// order.
struct Inbox {
    from: Vec<VecDeque<MessageInTransit>>,
}

struct SimCoreInboxesState {
    inboxes: Vec<Inbox>,
    chance: SimRng,
    now: Nanos,
    sender: usize,
    /// Mean delay of a message, in ns.
    delay: u64,
    /// Devices whose lanes received a resume.
    resumed: Vec<DeviceId>,
    /// Devices whose lanes received a command to open a new table.
    prepared: Vec<DeviceId>,
}

/// Removes `device` from `list`. Returns true if it was there.
fn remove_device_from_list(list: &mut Vec<DeviceId>, device: DeviceId) -> bool {
    let before = list.len();
    list.retain(|d| *d != device);
    list.len() < before
}

/// The inboxes of all cores. The control side and the targets send messages through them.
pub struct SimCoreInboxes {
    post: Mutex<SimCoreInboxesState>,
    me: Weak<SimCoreInboxes>,
}

impl SimCoreInboxes {
    /// Creates inboxes for `cores` cores. Messages take about `delay` ns.
    #[must_use]
    pub fn new(seed: u64, cores: usize, delay: u64) -> Arc<SimCoreInboxes> {
        let inbox = || Inbox { from: (0..=cores).map(|_| VecDeque::new()).collect() };
        let inboxes = (0..cores).map(|_| inbox()).collect();
        let chance = SimRng::new(seed, RngStream::Inbox);
        let post = SimCoreInboxesState {
            inboxes,
            chance,
            now: Nanos(0),
            sender: 0,
            delay,
            resumed: Vec::new(),
            prepared: Vec::new(),
        };
        Arc::new_cyclic(|me| SimCoreInboxes { post: Mutex::new(post), me: me.clone() })
    }

    fn post(&self) -> MutexGuard<'_, SimCoreInboxesState> {
        self.post.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Number of cores.
    pub(crate) fn count(&self) -> usize {
        self.post().inboxes.len()
    }

    /// Sets the current time and sender: core `core`, or the control side.
    pub fn set_turn(&self, now: Nanos, core: Option<usize>) {
        let mut post = self.post();
        post.now = now;
        post.sender = core.map_or(0, |c| c + 1);
    }

    /// Takes a message that has arrived at `core`. If several senders have one, the choice is
    /// random.
    pub fn take(&self, core: usize) -> Option<(DeviceId, CoreMessage)> {
        let mut post = self.post();
        let SimCoreInboxesState { inboxes, chance, now, .. } = &mut *post;
        let from = &mut inboxes[core].from;
        let ready = from.iter().filter(|q| q.front().is_some_and(|l| l.due <= *now)).count();
        if ready == 0 {
            return None;
        }
        let pick = chance.below(ready as u64) as usize;
        let queue = from.iter_mut().filter(|q| q.front().is_some_and(|l| l.due <= *now)).nth(pick)?;
        queue.pop_front().map(|l| (l.to, l.what))
    }

    /// True if the lanes of `device` received a resume since the last call.
    pub fn took_resume(&self, device: DeviceId) -> bool {
        remove_device_from_list(&mut self.post().resumed, device)
    }

    /// True if the lanes of `device` were told to open a new table since the last call.
    pub fn took_prepare(&self, device: DeviceId) -> bool {
        remove_device_from_list(&mut self.post().prepared, device)
    }

    /// True if a message to lanes of `device` has not arrived yet.
    #[must_use]
    pub fn is_on_the_way_to(&self, device: DeviceId) -> bool {
        let post = self.post();
        let mut queues = post.inboxes.iter().flat_map(|inbox| &inbox.from);
        queues.any(|queue| queue.iter().any(|message| message.to == device))
    }

    /// Time at which the next message arrives at `core`.
    #[must_use]
    pub fn next(&self, core: usize) -> Nanos {
        let post = self.post();
        post.inboxes[core].from.iter().filter_map(|q| q.front()).map(|l| l.due).min().unwrap_or(Nanos::NEVER)
    }
}

impl SimCoreInboxesState {
    /// Queues a message to `core` after the sender's earlier messages to it.
    fn send(&mut self, core: usize, to: DeviceId, what: CoreMessage) {
        let SimCoreInboxesState { inboxes, chance, now, sender, delay, .. } = self;
        let queue = &mut inboxes[core].from[*sender];
        let after = queue.back().map_or(Nanos(0), |l| l.due);
        let due = after.max(*now + Nanos(chance.span(*delay)));
        queue.push_back(MessageInTransit { due, to, what });
    }
}

impl CoreCommandSender for SimCoreInboxes {
    fn broadcast(&self, device: DeviceId, command: LaneCommand) {
        let mut post = self.post();
        match command {
            LaneCommand::Resume { .. } => post.resumed.push(device),
            LaneCommand::Prepare { .. } => post.prepared.push(device),
            _ => {}
        }
        for core in 0..post.inboxes.len() {
            post.send(core, device, CoreMessage::Command(command.clone()));
        }
    }

    fn wake_up(&self, core: CoreId, id: DeviceId) {
        self.post().send(core.index(), id, CoreMessage::Wake);
    }

    /// Starts the task on a random core. The control side starts tasks of tables; a core in its
    /// turn starts those of lanes.
    fn start(&self, make: BioTaskFactory) -> BioTaskHandle {
        let by_lane = self.post().sender > 0;
        self.start_for(make, if by_lane { TaskPurpose::OwnerLane } else { TaskPurpose::PathCheck })
    }
}

impl SimCoreInboxes {
    /// Starts a control-side task with a lane of `device`, as a load does.
    pub fn start_io(&self, device: &dyn Device, make: BioTaskFactory) -> BioTaskHandle {
        let mapped = device.stacked().is_some();
        self.start_for(make, if mapped { TaskPurpose::MappedTableLoad } else { TaskPurpose::TableLoad })
    }

    fn start_for(&self, make: BioTaskFactory, purpose: TaskPurpose) -> BioTaskHandle {
        let (topic, me) = (DeviceId::new(), self.me.clone());
        let mut post = self.post();
        let cores = post.inboxes.len() as u64;
        let core = post.chance.below(cores) as usize;
        post.send(core, topic, CoreMessage::Start(make, purpose));
        BioTaskHandle::new(move |ack| {
            if let Some(cores) = me.upgrade() {
                cores.post().send(core, topic, CoreMessage::Stop(ack));
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_in_first_out_per_sender() {
        let cores = SimCoreInboxes::new(3, 2, 1000);
        let (a, b) = (DeviceId::new(), DeviceId::new());
        for sender in [None, Some(1)] {
            cores.set_turn(Nanos(5), sender);
            cores.broadcast(a, LaneCommand::Kick);
            cores.broadcast(b, LaneCommand::Kick);
        }
        cores.set_turn(Nanos(1_000_000), None);
        let mut got = Vec::new();
        while let Some((id, _)) = cores.take(0) {
            got.push(id);
        }
        assert_eq!(got.len(), 4);
        assert_eq!((got[0], got[3]), (a, b));
        assert_eq!(cores.next(0), Nanos::NEVER);
        assert!(cores.next(1) < Nanos::NEVER);
    }
}
