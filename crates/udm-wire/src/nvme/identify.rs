//! Data structures of Identify (*Base* 5.17.2, *NVM* 4.1.5).

use super::{FenceCapabilities, NvmeCommand};

/// Bytes of each structure.
pub const IDENTIFY_SIZE: usize = 4096;

/// What an Identify command asks about (*Base* figure 273).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdentifyTarget {
    /// A namespace.
    Namespace(u32),
    /// The controller.
    Controller,
    /// The namespaces whose numbers are greater than this.
    ActiveNamespaces(u32),
    /// The identifiers of a namespace.
    NamespaceDescriptors(u32),
    /// The limits of the controller for the NVM command set.
    NvmController,
    /// A structure that udm does not have.
    Other(u8),
}

impl IdentifyTarget {
    /// What `command` asks about.
    #[must_use]
    pub fn decode(command: &NvmeCommand) -> IdentifyTarget {
        // The command set identifier; 0 is the NVM command set.
        let command_set = command.dword(11) >> 24;
        match command.dword(10) as u8 {
            0x00 => IdentifyTarget::Namespace(command.nsid()),
            0x01 => IdentifyTarget::Controller,
            0x02 => IdentifyTarget::ActiveNamespaces(command.nsid()),
            0x03 => IdentifyTarget::NamespaceDescriptors(command.nsid()),
            0x06 if command_set == 0 => IdentifyTarget::NvmController,
            other => IdentifyTarget::Other(other),
        }
    }
}

/// Kind of a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ControllerKind {
    /// A controller with namespaces.
    Io = 1,
    /// A controller of a discovery subsystem.
    Discovery = 2,
}

/// State of an ANA group (*Base* 8.1.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[repr(u8)]
pub enum AnaState {
    /// The path is as good as any.
    #[default]
    Optimized = 1,
    /// The path works, but others are better.
    NonOptimized = 2,
    /// The path does not work at the moment.
    Inaccessible = 3,
    /// The path will not work again.
    PersistentLoss = 4,
    /// The state changes.
    Change = 15,
}

/// A controller, as a host sees it.
#[derive(Clone, Debug)]
pub struct IdentifyController<'a> {
    /// Kind of the controller.
    pub kind: ControllerKind,
    /// Serial number, at most 20 bytes of ASCII.
    pub serial: &'a str,
    /// Model, at most 40 bytes of ASCII.
    pub model: &'a str,
    /// Firmware revision, at most 8 bytes of ASCII.
    pub firmware: &'a str,
    /// Name of the subsystem.
    pub subsystem: &'a str,
    /// Number of the controller.
    pub id: u16,
    /// Version of the specification, as the property `VS`.
    pub version: u32,
    /// The longest data of a command: a power of two in pages of 4 KiB.
    pub transfer_max_log2: u8,
    /// The longest data in the capsule of an I/O command in bytes, a multiple of 16.
    pub capsule_data_max: u32,
    /// Limit of commands in a queue.
    pub commands_max: u16,
    /// Largest number of a namespace.
    pub namespaces_max: u32,
    /// Limit of asynchronous event requests, at least 1.
    pub event_requests_max: u8,
    /// The longest time in seconds for which an ANA group is in [`AnaState::Change`]; at least 1.
    pub ana_transition_max: u8,
    /// Number of ANA groups.
    pub ana_groups: u32,
    /// Granularity of the keep-alive timer in steps of 100 ms; at least 1.
    pub keep_alive_granularity: u16,
    /// How its requests can be fenced; for I/O controllers.
    pub fence: FenceCapabilities,
}

impl IdentifyController<'_> {
    /// The bytes.
    ///
    /// # Panics
    /// If a text is too long.
    #[must_use]
    pub fn encode(&self) -> [u8; IDENTIFY_SIZE] {
        let mut bytes = [0; IDENTIFY_SIZE];
        let is_io = self.kind == ControllerKind::Io;
        put_text(&mut bytes[4..24], self.serial);
        put_text(&mut bytes[24..64], self.model);
        put_text(&mut bytes[64..72], self.firmware);
        // CMIC: several ports and controllers, and for I/O controllers ANA.
        bytes[76] = 0b0011 | if is_io { 0b1000 } else { 0 };
        bytes[77] = self.transfer_max_log2;
        put(&mut bytes, 78, &self.id.to_le_bytes());
        put(&mut bytes, 80, &self.version.to_le_bytes());
        // OAES: the events of this kind of controller.
        let events: u32 = if is_io { 1 << 8 | 1 << 11 | 1 << 20 } else { 1 << 31 };
        put(&mut bytes, 92, &events.to_le_bytes());
        // CTRATT: host identifiers of 16 bytes.
        bytes[96] = 1;
        bytes[111] = self.kind as u8;
        // ACL: 4 aborts at a time.
        bytes[258] = 3;
        bytes[259] = self.event_requests_max - 1;
        // FRMW: one read-only slot.
        bytes[260] = 0b0000_0011;
        // LPA: log pages can be read from any offset.
        bytes[261] = 0b100;
        put(&mut bytes, 320, &self.keep_alive_granularity.to_le_bytes());
        if is_io {
            self.fence.encode(&mut bytes);
            bytes[342] = self.ana_transition_max;
            // ANACAP: every state may be reported.
            bytes[343] = 0b1_1111;
            put(&mut bytes, 344, &self.ana_groups.to_le_bytes());
            put(&mut bytes, 348, &self.ana_groups.to_le_bytes());
            (bytes[512], bytes[513]) = (0x66, 0x44);
            put(&mut bytes, 516, &self.namespaces_max.to_le_bytes());
            // ONCS: Dataset Management and Write Zeroes.
            bytes[520] = 1 << 2 | 1 << 3;
            // VWC: there is a cache; a flush of all namespaces is not supported.
            bytes[525] = 0b101;
            put(&mut bytes, 540, &self.namespaces_max.to_le_bytes());
        }
        put(&mut bytes, 514, &self.commands_max.to_le_bytes());
        // SGLS: byte-aligned SGLs, with offsets in capsules.
        let sgls: u32 = 1 | 1 << 20;
        put(&mut bytes, 536, &sgls.to_le_bytes());
        put(&mut bytes, 768, self.subsystem.as_bytes());
        let capsule = (super::SQE_SIZE as u32 + self.capsule_data_max) / 16;
        put(&mut bytes, 1792, &capsule.to_le_bytes());
        put(&mut bytes, 1796, &1_u32.to_le_bytes());
        // MSDBD: one data descriptor.
        bytes[1803] = 1;
        bytes
    }
}

/// A namespace, as a host sees it.
#[derive(Clone, Copy, Debug)]
pub struct IdentifyNamespace {
    /// Size in blocks.
    pub blocks: u64,
    /// Block size in bytes as a power of two, at least 9.
    pub block_log2: u8,
    /// The preferred granularity of writes in blocks; at least 1.
    pub preferred_write: u32,
    /// The preferred length of writes in blocks; 0 if there is none.
    pub optimal_write: u32,
    /// The device discards blocks.
    pub is_thin: bool,
    /// Writes fail.
    pub is_read_only: bool,
    /// The ANA group.
    pub ana_group: u32,
    /// Globally unique identifier.
    pub nguid: [u8; 16],
}

impl IdentifyNamespace {
    /// The bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; IDENTIFY_SIZE] {
        let mut bytes = [0; IDENTIFY_SIZE];
        for at in [0, 8, 16] {
            put(&mut bytes, at, &self.blocks.to_le_bytes());
        }
        // NSFEAT: thin provisioning; the preferred sizes below are valid.
        bytes[24] = u8::from(self.is_thin) | 1 << 4;
        // NMIC: several controllers may have the namespace.
        bytes[30] = 1;
        // DLFEAT: Write Zeroes may deallocate; deallocated blocks have any content.
        bytes[33] = 1 << 3;
        let preferred = u16::try_from(self.preferred_write.max(1) - 1).unwrap_or(u16::MAX);
        for at in [64, 66, 68, 70] {
            put(&mut bytes, at, &preferred.to_le_bytes());
        }
        let optimal = u16::try_from(self.optimal_write.saturating_sub(1)).unwrap_or(u16::MAX);
        put(&mut bytes, 72, &optimal.to_le_bytes());
        put(&mut bytes, 92, &self.ana_group.to_le_bytes());
        bytes[99] = u8::from(self.is_read_only);
        put(&mut bytes, 104, &self.nguid);
        // LBAF 0: no metadata.
        bytes[130] = self.block_log2;
        bytes
    }
}

/// The list of namespaces, at most 1024, in ascending order.
#[must_use]
pub fn encode_active_namespaces(namespaces: impl IntoIterator<Item = u32>) -> [u8; IDENTIFY_SIZE] {
    let mut bytes = [0; IDENTIFY_SIZE];
    for (entry, nsid) in bytes.chunks_exact_mut(4).zip(namespaces) {
        entry.copy_from_slice(&nsid.to_le_bytes());
    }
    bytes
}

/// The identifiers of a namespace: NGUID, UUID, and the NVM command set.
#[must_use]
pub fn encode_namespace_descriptors(nguid: &[u8; 16], uuid: &[u8; 16]) -> [u8; IDENTIFY_SIZE] {
    let mut bytes = [0; IDENTIFY_SIZE];
    let mut at = 0;
    for (kind, identifier) in [(2, &nguid[..]), (3, &uuid[..]), (4, &[0][..])] {
        (bytes[at], bytes[at + 1]) = (kind, identifier.len() as u8);
        put(&mut bytes, at + 4, identifier);
        at += 4 + identifier.len();
    }
    bytes
}

/// Writes `value` at byte `at`.
pub(super) fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

/// Writes ASCII text, padded with spaces.
fn put_text(field: &mut [u8], text: &str) {
    field.fill(b' ');
    put(field, 0, text.as_bytes());
}
