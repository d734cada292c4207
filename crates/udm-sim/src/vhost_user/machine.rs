//! A simulated machine: its memory, its guests, and the state of its front end.

use super::guest::{GuestDisk, OrderlyGuest};
use super::hostile::HostileGuest;
use super::memory::{ExtraRegionState, MachineMemory};
use super::messages::{self, FrontEndConnection, FrontEndStep, number};
use super::model::GuestRequest;
use super::ring::DriverRing;
use crate::model::Violation;
use crate::rng::SimRng;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use udm_buf::{SharedMemoryMap, copy_from_shared, copy_to_shared};
use udm_core::Nanos;
use udm_frontends::vhost_user::SteppedVhostUserSession;
use udm_wire::vhost_user::{InflightArea, VhostUserProtocolFeatures};
use udm_wire::virtio::VirtioFeatures;

/// The driver of a ring.
pub(super) enum RingGuest {
    Orderly(OrderlyGuest),
    Hostile(HostileGuest),
}

impl RingGuest {
    pub(super) fn ring(&self) -> &DriverRing {
        match self {
            RingGuest::Orderly(guest) => &guest.ring,
            RingGuest::Hostile(guest) => &guest.ring,
        }
    }

    pub(super) fn ring_mut(&mut self) -> &mut DriverRing {
        match self {
            RingGuest::Orderly(guest) => &mut guest.ring,
            RingGuest::Hostile(guest) => &mut guest.ring,
        }
    }
}

/// The memory for requests in flight, which the front end keeps.
pub(super) struct InflightMemory {
    pub(super) file: Arc<OwnedFd>,
    pub(super) area: InflightArea,
    pub(super) map: SharedMemoryMap,
}

/// A machine.
pub(super) struct Machine {
    pub(super) memory: MachineMemory,
    /// The drivers, by number of the ring.
    pub(super) guests: Vec<RingGuest>,
    pub(super) disk: GuestDisk,
    /// The front end and one of the guests are hostile.
    pub(super) is_hostile: bool,
    /// The front end keeps a record of requests in flight.
    pub(super) has_record: bool,
    pub(super) inflight: Option<InflightMemory>,
    /// The features that the guests use.
    pub(super) features: VirtioFeatures,
    /// The back end acknowledges messages once the protocol features are set.
    pub(super) negotiates_acks: bool,
    /// The guests want the write cache to be off.
    pub(super) wants_through: bool,
    /// Step since which the guests know that it is off, doubled.
    pub(super) through_since: Option<u64>,
    pub(super) connection: Option<FrontEndConnection>,
    pub(super) session: Option<Box<SteppedVhostUserSession>>,
    /// The session handles a message.
    pub(super) is_in_step: bool,
    /// Messages that the session has not handled.
    pub(super) unread: usize,
    /// The front end has closed the connection.
    pub(super) has_left: bool,
    /// The session may end with an error.
    pub(super) may_fail: bool,
    /// The rings are to begin again with the next connection, and the guests wait for it.
    pub(super) is_rebooting: bool,
    /// Where the rings continue, as the messages have it.
    pub(super) bases: Vec<u32>,
    /// Time of the next turn of the front end.
    pub(super) next: Nanos,
    /// Lines that the log may have about the ring of the hostile guest.
    pub(super) lines_allowed: u64,
}

/// The memory of a machine and of its requests in flight at some moment.
pub(super) struct MachineMemoryCopy {
    memory: Vec<u8>,
    inflight: Option<Vec<u8>>,
    /// Where the rings continue.
    used: Vec<u32>,
}

impl Machine {
    /// True if the front end has nothing left to do.
    pub(super) fn is_up(&self) -> bool {
        self.connection.as_ref().is_some_and(|c| c.script.is_empty() && !c.awaits()) && self.unread == 0
    }

    /// Time of the next turn of the front end.
    pub(super) fn front_end_reason(&self, is_resting: bool) -> Nanos {
        let is_due = match &self.connection {
            None => self.session.is_none() && !self.is_in_step,
            Some(c) if c.awaits() => c.has_reply(),
            Some(c) => !c.script.is_empty() || !is_resting,
        };
        if is_due { self.next } else { Nanos::NEVER }
    }

    /// True if the session has something to do.
    pub(super) fn has_session_work(&self) -> bool {
        self.session.is_some() && (self.unread > 0 || self.has_left)
    }

    /// Where rings continue whose requests are complete.
    pub(super) fn used_bases(&self) -> Vec<u32> {
        self.guests.iter().map(|guest| guest.ring().used_base(&self.memory)).collect()
    }

    pub(super) fn copy(&self) -> MachineMemoryCopy {
        let inflight = self.inflight.as_ref().map(|inflight| {
            let mut bytes = vec![0; inflight.map.len()];
            copy_from_shared(inflight.map.words(), 0, &mut bytes);
            bytes
        });
        let used = self.used_bases();
        MachineMemoryCopy { memory: self.memory.read(0, self.memory.len()), inflight, used }
    }

    /// Restores the memory. The rings continue at the used entries of that moment.
    pub(super) fn restore(&mut self, copy: &MachineMemoryCopy) {
        self.memory.write(0, &copy.memory);
        if let (Some(inflight), Some(bytes)) = (&self.inflight, &copy.inflight) {
            copy_to_shared(inflight.map.words(), 0, bytes);
        }
        self.bases.clone_from(&copy.used);
    }

    /// True if a request of a guest has data in the region that is added and removed.
    pub(super) fn uses_extra(&self) -> bool {
        self.guests.iter().any(|guest| match guest {
            RingGuest::Orderly(guest) => guest.requests.values().any(GuestRequest::is_in_extra),
            RingGuest::Hostile(_) => false,
        })
    }

    /// Lets the guests use the region that is added and removed, or not any more. A request that
    /// the back end takes after it has removed the region fails.
    pub(super) fn open_extra(&mut self, is_open: bool) {
        let state = if is_open { ExtraRegionState::Open } else { ExtraRegionState::Closed };
        self.memory.set_extra_state(state);
        for guest in &mut self.guests {
            if let RingGuest::Orderly(guest) = guest {
                let requests = guest.requests.values_mut().filter(|request| request.is_in_extra());
                requests.for_each(|request| request.may_fail |= !is_open);
            }
        }
    }

    /// The back end has removed the region: it has completed the requests with data there.
    pub(super) fn check_removed_region(&mut self) -> Result<(), Violation> {
        self.memory.set_extra_state(ExtraRegionState::Removed);
        for guest in &self.guests {
            let RingGuest::Orderly(guest) = guest else { continue };
            let completed = guest.ring.completed_heads(&self.memory);
            let mut used = guest.requests.iter().filter(|(_, request)| request.is_in_extra());
            if let Some((_, request)) = used.find(|(head, _)| !completed.contains(head)) {
                return Err(format!("{} uses memory that was removed", request.describe()));
            }
        }
        Ok(())
    }

    /// The connection is over.
    pub(super) fn forget_connection(&mut self) {
        (self.connection, self.session) = (None, None);
        (self.unread, self.has_left, self.may_fail) = (0, false, false);
    }

    /// Draws the features that the guests use, out of `offered`. Their rings are empty.
    pub(super) fn draw_features(&mut self, offered: VirtioFeatures, chance: &mut SimRng) {
        let optional = [
            VirtioFeatures::EVENT_IDX,
            VirtioFeatures::INDIRECT_DESC,
            VirtioFeatures::BLK_FLUSH,
            VirtioFeatures::BLK_MQ,
        ];
        self.features = offered;
        for feature in optional {
            self.features.set(feature, chance.below(4) > 0);
        }
        self.features.set(VirtioFeatures::RING_PACKED, chance.one_in(2));
        let has_event_index = self.features.contains(VirtioFeatures::EVENT_IDX);
        let is_packed = self.features.contains(VirtioFeatures::RING_PACKED);
        for ring in self.guests.iter_mut().map(RingGuest::ring_mut) {
            ring.has_event_index = has_event_index;
            ring.set_packed(is_packed);
        }
        self.bases = self.guests.iter().map(|guest| guest.ring().first_base()).collect();
        // Without the feature each write is durable when it completes.
        let has_cache = self.features.contains(VirtioFeatures::BLK_FLUSH);
        self.through_since = if has_cache { None } else { Some(0) };
    }

    /// The messages that set a new connection up.
    pub(super) fn set_up(&mut self, chance: &mut SimRng) -> Vec<FrontEndStep> {
        let mut script = vec![
            messages::plain(number::SET_OWNER, vec![]),
            messages::plain(number::GET_FEATURES, vec![]),
            messages::plain(number::GET_PROTOCOL_FEATURES, vec![]),
        ];
        let mut protocol = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::STATUS;
        protocol.set(VhostUserProtocolFeatures::INFLIGHT_SHMFD, self.has_record);
        // A session begins with the write cache on. The last one may have ended before the message
        // that switched it on.
        if !self.wants_through && self.through_since != Some(0) {
            self.through_since = None;
        }
        self.negotiates_acks = chance.below(4) > 0;
        protocol.set(VhostUserProtocolFeatures::REPLY_ACK, self.negotiates_acks);
        let bits = protocol.bits().to_ne_bytes().to_vec();
        script.push(messages::plain(number::SET_PROTOCOL_FEATURES, bits));
        script.extend(self.start_device(true, chance));
        script
    }

    /// The messages from the features on. A connection that is not new has regions already.
    pub(super) fn start_device(&mut self, is_new: bool, chance: &mut SimRng) -> Vec<FrontEndStep> {
        let bits = self.features.bits().to_ne_bytes().to_vec();
        let mut script = vec![messages::plain(number::SET_FEATURES, bits)];
        if self.has_record {
            if self.inflight.is_none() {
                let ring_size = self.guests.iter().map(|guest| guest.ring().layout.size).max().unwrap_or(1);
                let queues = self.guests.len() as u16;
                let area = InflightArea { size: 0, offset: 0, queues, ring_size };
                script.push(messages::plain(number::GET_INFLIGHT_FD, area.encode()));
            }
            script.push(FrontEndStep::SendInflight);
        }
        let regions = self.memory.regions();
        if !is_new || chance.one_in(2) {
            let mut payload = [(regions.len() as u32).to_ne_bytes(), [0; 4]].concat();
            regions.iter().for_each(|(region, _)| payload.extend(messages::encode_memory_region(region)));
            let fds = regions.into_iter().map(|(_, file)| file).collect();
            script.push(FrontEndStep::Send { number: number::SET_MEM_TABLE, payload, fds, is_wild: false });
        } else {
            for (region, file) in &regions {
                let payload = [vec![0; 8], messages::encode_memory_region(region)].concat();
                script.push(messages::with_fd(number::ADD_MEM_REG, payload, file));
            }
        }
        if self.wants_through {
            script.push(messages::write_cache(number::SET_CONFIG, false));
            script.push(messages::write_cache(number::GET_CONFIG, false));
        }
        let mut rings: Vec<usize> = (0..self.guests.len()).collect();
        while !rings.is_empty() {
            let index = rings.swap_remove(chance.below(rings.len() as u64) as usize);
            script.extend(self.start_ring(index, chance));
        }
        script
    }

    /// The messages that start ring `index`, in an order that is permitted.
    pub(super) fn start_ring(&self, index: usize, chance: &mut SimRng) -> Vec<FrontEndStep> {
        let ring = self.guests[index].ring();
        let size = u32::from(ring.layout.size);
        let mut steps = vec![
            messages::plain(number::SET_VRING_NUM, messages::ring_state(index, size)),
            FrontEndStep::SendBase(index),
            messages::plain(number::SET_VRING_ADDR, messages::addresses_of(&self.memory, index, ring)),
        ];
        let fd = |number, fd| messages::with_fd(number, (index as u64).to_ne_bytes().to_vec(), fd);
        let call = fd(number::SET_VRING_CALL, &ring.call);
        let kick = fd(number::SET_VRING_KICK, &ring.kick);
        let enable = messages::plain(number::SET_VRING_ENABLE, messages::ring_state(index, 1));
        let last = if chance.one_in(2) { [kick, enable] } else { [enable, kick] };
        steps.extend(last);
        // The call descriptor may come at any time.
        steps.insert(chance.below(steps.len() as u64 + 1) as usize, call);
        steps
    }
}
