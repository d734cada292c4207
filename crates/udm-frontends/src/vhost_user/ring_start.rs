//! The start of a ring: its parts are looked up in the memory, and its kind is chosen.

use super::inflight_memory::{InflightMemory, RingKinds};
use super::inflight_record::InflightRecord;
use super::packed_record::PackedInflightRecord;
use super::packed_ring::PackedRing;
use super::queue::{VirtQueue, VirtQueueStart};
use super::ring::SplitRing;
use super::session::{VhostUserSession, refused};
use super::virt_ring::{RingPart, VirtRing};
use super::vring_setup::RunningVirtQueue;
use std::io;
use std::sync::Arc;
use udm_core::{CoreId, DeviceId};
use udm_wire::vhost_user::VringAddresses;
use udm_wire::virtio::VirtioFeatures;
use udm_wire::virtio::blk::BLK_ID_SIZE;
use udm_wire::virtio::packed::{EVENT_SUPPRESSION_SIZE, PackedPosition};
use udm_wire::virtio::ring::{DESCRIPTOR_SIZE, SplitRingLayout};

/// Name, length and alignment of a part of a ring.
type PartOfRing = (&'static str, usize, u64);

impl VhostUserSession {
    fn has(&self, feature: VirtioFeatures) -> bool {
        self.features.contains(feature)
    }

    /// The kinds of rings that the front end may start.
    pub(super) fn ring_kinds(&self) -> RingKinds {
        match self.features {
            // Not negotiated yet.
            features if features.is_empty() => RingKinds::Any,
            _ if self.has(VirtioFeatures::RING_PACKED) => RingKinds::Packed,
            _ => RingKinds::Split,
        }
    }

    /// Starts a ring if it has all that it needs.
    pub(super) fn start_if_ready(&mut self, index: usize) -> io::Result<()> {
        let ring = &self.rings[index];
        let (Some(size), Some(addresses), true, true, None) =
            (ring.size, ring.addresses, ring.has_kick, ring.is_enabled, ring.running)
        else {
            return Ok(());
        };
        match self.has(VirtioFeatures::RING_PACKED) {
            true => self.attach_queue(index, self.packed_ring(index, size, &addresses)?),
            false => self.attach_queue(index, self.split_ring(index, size, &addresses)?),
        }
        Ok(())
    }

    /// Finds the parts of ring `index`: the descriptors, and what driver and device write.
    fn ring_parts(
        &self,
        index: usize,
        addresses: &VringAddresses,
        parts: [PartOfRing; 3],
    ) -> io::Result<[RingPart; 3]> {
        let find = |address: u64, (name, len, align): PartOfRing| {
            let bad =
                || refused(format!("ring {index}: its {name} is in no region, or is not aligned to {align}"));
            self.memory.find_user(address, len, align).ok_or_else(bad)
        };
        let [descriptors, driver, device] = parts;
        let VringAddresses { descriptors: first, avail, used, .. } = *addresses;
        Ok([find(first, descriptors)?, find(avail, driver)?, find(used, device)?])
    }

    fn split_ring(&self, index: usize, size: u16, addresses: &VringAddresses) -> io::Result<SplitRing> {
        let bad = || refused(format!("ring {index} of {size} entries: expected a power of two"));
        let layout = SplitRingLayout::new(size.into()).ok_or_else(bad)?;
        let parts = [
            ("descriptor table", layout.descriptors_len(), 16),
            ("available ring", layout.avail_len(), 2),
            ("used ring", layout.used_len(), 4),
        ];
        let parts = self.ring_parts(index, addresses, parts)?;
        let has_event_index = self.has(VirtioFeatures::EVENT_IDX);
        let mut split = SplitRing::new(layout, parts, has_event_index, self.rings[index].base as u16);
        if let Some(InflightMemory { map, area, .. }) = &self.inflight {
            let own = InflightRecord::new(map, area, index).filter(|_| size <= area.ring_size);
            let mut own = own.ok_or_else(|| no_record(index))?;
            let recovery = own.recover(split.next_used());
            if let Some(head) = recovery.resubmit.iter().find(|head| **head >= size) {
                return Err(refused(format!("ring {index}: request {head} in flight is not in the ring")));
            }
            split.continue_with(own, recovery);
            self.log_resubmission(index, split.left_in_flight());
        }
        Ok(split)
    }

    fn packed_ring(&self, index: usize, size: u16, addresses: &VringAddresses) -> io::Result<PackedRing> {
        let parts = [
            ("descriptor ring", DESCRIPTOR_SIZE * usize::from(size), 16),
            ("driver event suppression", EVENT_SUPPRESSION_SIZE, 4),
            ("device event suppression", EVENT_SUPPRESSION_SIZE, 4),
        ];
        let parts = self.ring_parts(index, addresses, parts)?;
        let (base, has_event_index) = (self.rings[index].base, self.has(VirtioFeatures::EVENT_IDX));
        // A ring stops when all is used, so both positions are the same. Some front ends send one.
        let at = PackedPosition::decode(base as u16);
        let new = |at: PackedPosition| PackedRing::new(size, parts.clone(), has_event_index, at);
        let mut packed = new(at);
        if base == 0 && packed.is_unused() {
            // The wrap counters begin with 1, and some front ends send 0 for a new ring. Descriptor
            // 0 of a later round has all others of the ring before it.
            packed = new(PackedPosition::START);
        }
        let used = PackedPosition::decode((base >> 16) as u16);
        let has_other_used = self.inflight.is_none() && base >> 16 != 0 && used != at;
        if at.index >= size || has_other_used {
            return Err(refused(format!("ring {index} cannot continue at {base:#x}")));
        }
        let Some(InflightMemory { map, area, .. }) = &self.inflight else { return Ok(packed) };
        let own = PackedInflightRecord::new(map, area, index, size);
        let mut own = own.ok_or_else(|| no_record(index))?;
        if self.rings[index].is_rebased {
            own.reset(packed.position());
        }
        if !packed.continue_with(own) {
            return Err(refused(format!("ring {index}: the record of its requests in flight is damaged")));
        }
        self.log_resubmission(index, packed.left_in_flight());
        Ok(packed)
    }

    fn log_resubmission(&self, index: usize, count: usize) {
        if count > 0 {
            let name = self.export.name();
            tracing::info!("vhost-user {name}: ring {index}: {count} requests in flight are submitted again");
        }
    }

    /// Gives `ring` to a queue on its core.
    fn attach_queue<R: VirtRing>(&mut self, index: usize, ring: R) {
        let (topic, core) = (DeviceId::new(), CoreId((index % self.core_set.len()) as u16));
        let setup = &self.rings[index];
        let start = VirtQueueStart {
            index: index as u32,
            topic,
            export: self.export.clone(),
            memory: Arc::clone(&self.memory),
            ring,
            disk_id: encode_disk_id(&self.export.name()),
            kick: setup.kick.clone(),
            call: setup.call.clone(),
            settings: self.settings(index),
        };
        self.core_set.attach(core, Box::new(move || Box::new(VirtQueue::new(start))));
        let setup = &mut self.rings[index];
        setup.running = Some(RunningVirtQueue { topic, core });
        (setup.has_run, setup.is_rebased) = (true, false);
    }

    /// Clears the memory for requests in flight: the driver has reset the device, so its rings
    /// begin again. No ring may run.
    pub(super) fn clear_inflight(&self) {
        if let Some(inflight) = &self.inflight
            && self.rings.iter().all(|ring| ring.running.is_none())
        {
            inflight.clear();
        }
    }
}

fn no_record(index: usize) -> io::Error {
    refused(format!("ring {index} is not in the memory for requests in flight"))
}

/// The ID of a disk: the first bytes of its name, with zeroes up to 20 bytes.
fn encode_disk_id(name: &str) -> [u8; BLK_ID_SIZE] {
    let mut id = [0; BLK_ID_SIZE];
    let len = name.len().min(BLK_ID_SIZE);
    id[..len].copy_from_slice(&name.as_bytes()[..len]);
    id
}
