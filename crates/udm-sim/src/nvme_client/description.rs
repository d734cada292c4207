//! What a simulated controller and its namespace say about themselves.

use crate::plan::{DisturbanceClass, ExcludedDisturbances};
use crate::rng::SimRng;
use udm_core::Nanos;
use udm_wire::nvme::host::{ControllerFacts, NamespaceFacts};
use udm_wire::nvme::{AnaGroup, AnaState, ControllerInstance, IDENTIFY_SIZE, encode_ana_log};

/// The ANA group of the namespace.
const ANA_GROUP: u32 = 2;
/// Number of ANA groups.
const ANA_GROUPS: u32 = 3;

/// A namespace, the same on all controllers of its subsystem.
#[derive(Clone, Debug)]
pub(super) struct NamespaceDescription {
    /// Size in sectors.
    pub(super) sectors: u64,
    /// Sectors of a block.
    pub(super) block: u64,
    /// The identity, as a UUID and as an NGUID.
    pub(super) id: [u8; 16],
    has_uuid: bool,
    pub(super) write_cache: bool,
    pub(super) discard: bool,
    pub(super) write_zeroes: bool,
    /// Write Zeroes may deallocate.
    deallocates: bool,
    pub(super) read_only: bool,
}

/// A controller.
#[derive(Clone, Debug)]
pub(super) struct ControllerDescription {
    /// Entries of a queue, at least 2.
    pub(super) entries: u16,
    /// The longest data in a capsule, in units of 16 bytes; 0 for none.
    pub(super) capsule_units: u32,
    /// The longest data of an H2CData PDU.
    pub(super) h2c_max: u32,
    /// The longest transfer in pages, as a power of two; 0 for no limit.
    transfer_pages_log2: u8,
    /// I/O queues that are granted.
    pub(super) queues: u16,
    /// Granularity of the keep-alive timer, in steps of 100 ms.
    pub(super) keep_alive_steps: u16,
    /// Any command restarts the keep-alive timer.
    pub(super) is_traffic_based: bool,
    /// The time that commands in flight need after the end of a controller.
    pub(super) quiesce_ms: u16,
    pub(super) has_ana: bool,
    /// Controllers say by which instance they can be reset.
    pub(super) has_instance: bool,
    /// Resets of other controllers at a time; 0 for none.
    pub(super) resets_max: u8,
    /// An event reports the end of a reset.
    pub(super) reports_resets: bool,
    /// Times before a retry, in steps of 100 ms.
    retry_delays: [u16; 3],
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

impl NamespaceDescription {
    /// Draws a namespace of `sectors` sectors, a multiple of 8.
    pub(super) fn draw(
        c: &mut SimRng,
        number: u8,
        sectors: u64,
        without: ExcludedDisturbances,
    ) -> NamespaceDescription {
        let trims = !without.has(DisturbanceClass::Trim);
        NamespaceDescription {
            sectors,
            block: c.pick(&[1, 1, 8]),
            id: [number + 1; 16],
            has_uuid: c.one_in(2),
            write_cache: c.below(4) > 0,
            discard: trims && c.one_in(2),
            write_zeroes: trims && c.one_in(2),
            deallocates: c.one_in(2),
            read_only: false,
        }
    }

    /// A namespace that an initiator which uses this one must refuse.
    pub(super) fn other(&self, c: &mut SimRng) -> NamespaceDescription {
        let mut other = self.clone();
        match c.below(4) {
            0 => other.sectors -= 8,
            1 => other.read_only = true,
            2 if self.discard => other.discard = false,
            _ => other.id[3] ^= 0x55,
        }
        other
    }

    /// Identify Namespace, and the list of identifiers.
    pub(super) fn encode(&self) -> (Box<[u8; IDENTIFY_SIZE]>, Box<[u8; IDENTIFY_SIZE]>) {
        let (mut bytes, mut list) = (Box::new([0; IDENTIFY_SIZE]), Box::new([0; IDENTIFY_SIZE]));
        let blocks = self.sectors / self.block;
        for at in [0, 8, 16] {
            put(&mut bytes[..], at, &blocks.to_le_bytes());
        }
        bytes[33] = if self.deallocates { 0b1001 } else { 0 };
        put(&mut bytes[..], 92, &ANA_GROUP.to_le_bytes());
        bytes[99] = u8::from(self.read_only);
        put(&mut bytes[..], 104, &self.id);
        // The format: data of 2^LBADS bytes, no metadata.
        bytes[130] = 9 + self.block.trailing_zeros() as u8;
        if self.has_uuid {
            list[..4].copy_from_slice(&[3, 16, 0, 0]);
            put(&mut list[..], 4, &self.id);
        }
        (bytes, list)
    }
}

impl ControllerDescription {
    pub(super) fn draw(c: &mut SimRng, cores: usize) -> ControllerDescription {
        ControllerDescription {
            entries: c.pick(&[2, 3, 8, 33, 129]),
            capsule_units: c.pick(&[0, 256, 512, 1024]),
            h2c_max: c.pick(&[4096, 16 << 10, 256 << 10]),
            transfer_pages_log2: c.pick(&[0, 3, 5]),
            // Sometimes too few: then cores share one.
            queues: c.pick(&[1, 2, cores as u16 + 1, 2 * cores as u16 + 2]),
            keep_alive_steps: c.pick(&[1, 5, 10]),
            is_traffic_based: c.one_in(3),
            quiesce_ms: c.pick(&[0, 200, 1000]),
            has_ana: c.below(3) > 0,
            has_instance: c.below(4) > 0,
            resets_max: c.pick(&[0, 1, 4]),
            reports_resets: c.one_in(2),
            retry_delays: [1, 5, 20],
        }
    }

    /// The time that commands in flight need after the end of a controller. One that reports none
    /// may be given one by `fence-delay`, which is `fallback`.
    pub(super) fn quiesce(&self, fallback: Nanos) -> Nanos {
        if self.quiesce_ms == 0 { fallback } else { Nanos::from_millis(self.quiesce_ms.into()) }
    }

    /// The property CAP.
    pub(super) fn capabilities(&self) -> u64 {
        u64::from(self.entries - 1)
    }

    /// The longest data in the capsule of an I/O command.
    pub(super) fn capsule_data_max(&self) -> u32 {
        self.capsule_units * 16
    }

    /// Identify Controller.
    pub(super) fn encode(
        &self,
        id: u16,
        instance: Option<ControllerInstance>,
        namespace: &NamespaceDescription,
    ) -> Box<[u8; IDENTIFY_SIZE]> {
        let mut bytes = Box::new([0; IDENTIFY_SIZE]);
        let all = &mut bytes[..];
        all[76] = if self.has_ana { 1 << 3 | 0b11 } else { 0b11 };
        all[77] = self.transfer_pages_log2;
        put(all, 78, &id.to_le_bytes());
        put(all, 92, &(1_u32 << 8 | 1 << 11 | u32::from(self.reports_resets) << 20).to_le_bytes());
        if let Some(instance) = instance {
            all[135] = instance.uniquifier;
            put(all, 136, &instance.random.to_le_bytes());
        }
        all[1807] = self.resets_max;
        put(all, 96, &(u32::from(self.is_traffic_based) << 6).to_le_bytes());
        all[111] = 1;
        for (at, delay) in [128, 130, 132].into_iter().zip(self.retry_delays) {
            put(all, at, &delay.to_le_bytes());
        }
        put(all, 320, &self.keep_alive_steps.to_le_bytes());
        put(all, 344, &ANA_GROUPS.to_le_bytes());
        put(all, 348, &ANA_GROUPS.to_le_bytes());
        put(all, 386, &self.quiesce_ms.to_le_bytes());
        put(all, 514, &self.entries.max(16).to_le_bytes());
        let optional = u16::from(namespace.discard) << 2 | u16::from(namespace.write_zeroes) << 3;
        put(all, 520, &optional.to_le_bytes());
        all[525] = u8::from(namespace.write_cache);
        let in_capsule = u32::from(self.capsule_units > 0) << 20;
        put(all, 536, &(1 | in_capsule).to_le_bytes());
        put(all, 1792, &(4 + self.capsule_units).to_le_bytes());
        put(all, 1796, &1_u32.to_le_bytes());
        bytes
    }

    /// The ANA log.
    pub(super) fn ana_log(&self, changes: u64, state: AnaState) -> Vec<u8> {
        let state_of = |id| if id == ANA_GROUP { state } else { AnaState::Inaccessible };
        let group = |id| AnaGroup { id, changes, state: state_of(id), namespaces: Vec::new() };
        let groups: Vec<AnaGroup> = (1..=ANA_GROUPS).map(group).collect();
        encode_ana_log(changes, &groups, true)
    }

    /// What an initiator knows of the controller and the namespace.
    pub(super) fn facts(&self, namespace: &NamespaceDescription) -> Result<NamespaceFacts, String> {
        let bytes = self.encode(1, None, namespace);
        let controller = ControllerFacts::decode(&bytes, 1, self.capabilities())?;
        let (bytes, list) = namespace.encode();
        NamespaceFacts::decode(1, &bytes, &list, &controller)
    }
}
