//! The lanes of a core, one per device, shared by the core's front ends.

use crate::in_flight_report::CoreWorkInFlightReport;
use std::sync::Arc;
use udm_core::{
    Batch, Bio, BioTaskLaneId, Cx, Device, DeviceControlError, DeviceId, DrainMode, Lane, OwnWork,
    PolledUnitId, Status,
};

struct LaneSlot {
    id: DeviceId,
    lane: Box<dyn Lane>,
    users: usize,
    /// The lane belongs to one background task, and nothing waits for its bios in flight.
    background: bool,
    batch: Batch,
    in_flight: usize,
    /// True if the slot is in the list of active slots.
    active: bool,
    /// A message arrived, perhaps for a lane far below. The lane is polled until a poll returns no
    /// bio, because lanes with bios in flight may postpone polls of their idle lower lanes.
    has_messages: bool,
}

/// The lanes of a core.
#[derive(Default)]
pub(crate) struct CoreLanes {
    slots: slab::Slab<LaneSlot>,
    /// Slots with bios to submit, bios in flight, or own work. Other slots cost nothing.
    active: Vec<usize>,
    /// True if the program ends: lanes hold back no bios any more.
    ending: bool,
}

impl CoreLanes {
    /// Opens the lane of `device`. Front ends share it; a background task gets its own. The lane is
    /// polled in the same turn, since its target may have work.
    pub(crate) fn open(
        &mut self,
        device: &Arc<dyn Device>,
        background: bool,
        cx: &mut Cx<'_>,
    ) -> Result<BioTaskLaneId, DeviceControlError> {
        let id = device.id();
        // A linear scan: once per connection, over the devices of one core.
        if let Some((key, slot)) =
            self.slots.iter_mut().find(|(_, s)| s.id == id && !s.background && !background)
        {
            slot.users += 1;
            return Ok(BioTaskLaneId(key));
        }
        let place = self.slots.vacant_entry();
        let key = place.key();
        let before = cx.set_current_target(Some(PolledUnitId(key as u32)));
        let lane = device.open(cx);
        cx.set_current_target(before);
        let lane = lane?;
        place.insert(LaneSlot {
            id,
            lane,
            users: 1,
            background,
            batch: Batch::new(),
            in_flight: 0,
            active: false,
            has_messages: false,
        });
        self.activate(key);
        Ok(BioTaskLaneId(key))
    }

    /// Marks a lane to be polled in this turn. Ignores a lane that is closed.
    pub(crate) fn run_target(&mut self, target: PolledUnitId) {
        let key = target.0 as usize;
        if let Some(s) = self.slots.get_mut(key) {
            s.has_messages = true;
            self.activate(key);
        }
    }

    fn activate(&mut self, key: usize) {
        let s = &mut self.slots[key];
        if !s.active {
            s.active = true;
            self.active.push(key);
        }
    }

    pub(crate) fn close(&mut self, slot: BioTaskLaneId) {
        let s = &mut self.slots[slot.0];
        s.users -= 1;
        if s.users > 0 || s.active {
            return;
        }
        if s.lane.own_work() == OwnWork::Required {
            self.activate(slot.0);
        } else {
            self.slots.remove(slot.0);
        }
    }

    /// From now on, lanes end the bios that they hold back.
    pub(crate) fn end(&mut self) {
        self.ending = true;
    }

    /// Adds requests in flight and own work to a report.
    pub(crate) fn report(&self, to: &mut CoreWorkInFlightReport) {
        for s in self.active.iter().map(|&key| &self.slots[key]).filter(|s| !s.background) {
            if s.in_flight > 0 {
                to.requests.insert(s.id, s.in_flight);
            } else if s.lane.own_work() == OwnWork::Required {
                to.busy.insert(s.id);
            }
        }
    }

    /// True if no lane is open.
    pub(crate) fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// True if a lane has bios from above in flight, or required own work.
    pub(crate) fn has_in_flight(&self) -> bool {
        self.slots.iter().any(|(_, s)| s.in_flight > 0 || s.lane.own_work() == OwnWork::Required)
    }

    /// True if nothing that must complete is in flight: no bios from above, no required own work.
    /// Ignores background lanes.
    pub(crate) fn is_idle(&self) -> bool {
        self.active
            .iter()
            .map(|&key| &self.slots[key])
            .all(|s| s.background || (s.in_flight == 0 && s.lane.own_work() < OwnWork::Required))
    }

    pub(crate) fn push(&mut self, slot: BioTaskLaneId, bio: Box<Bio>) {
        let s = &mut self.slots[slot.0];
        s.batch.push(bio);
        s.in_flight += 1;
        self.activate(slot.0);
    }

    /// Submits the batches and polls the active lanes. Returns true if a bio moved.
    pub(crate) fn run(&mut self, done: &mut Batch, cx: &mut Cx<'_>) -> bool {
        let before = done.len();
        let mut moved = false;
        let mut i = 0;
        while let Some(&key) = self.active.get(i) {
            let s = &mut self.slots[key];
            cx.set_current_target(Some(PolledUnitId(key as u32)));
            if !s.batch.is_empty() {
                s.lane.submit(&mut s.batch, cx);
                debug_assert!(s.batch.is_empty(), "a lane left bios in the batch");
                moved = true;
            }
            let n = done.len();
            if self.ending {
                end_held_bios_at_shutdown(s, done, cx);
            }
            s.lane.poll(done, cx);
            s.in_flight -= done.len() - n;
            s.has_messages &= done.len() > n;
            let busy = s.lane.own_work();
            let is_closed = s.users == 0 && busy < OwnWork::Required;
            if s.in_flight > 0 || s.has_messages || (busy > OwnWork::Idle && !is_closed) {
                i += 1;
                continue;
            }
            s.active = false;
            self.active.swap_remove(i);
            if s.users == 0 {
                self.slots.remove(key);
            }
        }
        cx.set_current_target(None);
        moved || done.len() > before
    }
}

/// Makes the lane end the bios that it holds back. Bios that it hands back fail, since no resume
/// will follow.
#[cold]
fn end_held_bios_at_shutdown(s: &mut LaneSlot, done: &mut Batch, cx: &mut Cx<'_>) {
    let from = done.len();
    s.lane.drain(DrainMode::End, done, cx);
    done[from..].iter_mut().for_each(|bio| bio.end_with(Status::IoErr));
}
