//! What a host reads about a controller and a namespace, and what it insists on.

use crate::bytes::{u16_at, u32_at, u64_at};
use crate::nvme::{AnaState, AsyncEventMask, ControllerInstance, FenceCapabilities, IDENTIFY_SIZE, SQE_SIZE};
use udm_core::{Limits, Nanos, Sectors};

/// The most bytes of a read or write, also if the controller has no limit.
const TRANSFER_MAX: u64 = 4 << 20;
/// The most bytes of a discard.
const DISCARD_MAX: u64 = 1 << 30;
/// The most blocks of a command (*NVM* 3.2).
const BLOCKS_MAX: u64 = 65536;

/// A controller, as its property CAP and Identify describe it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerFacts {
    /// Number of the controller.
    pub id: u16,
    /// Entries of a queue at most, at least 2.
    pub queue_entries: u16,
    /// The longest data of a command in bytes.
    pub transfer_max: u64,
    /// The longest data in the capsule of an I/O command in bytes.
    pub capsule_data_max: u32,
    /// Times before a retry, in steps of 100 ms.
    pub retry_delays: [u16; 3],
    /// Granularity of the keep-alive timer (KAS): the controller rounds a timeout up to it.
    pub keep_alive_step: Nanos,
    /// The keep-alive timer restarts with any command.
    pub is_traffic_based: bool,
    /// The time of *Base* 2.1, CQT; 0 if the controller does not report it.
    pub quiesce: Nanos,
    /// This controller between two resets, by which another one can be asked to reset it; `None` if
    /// it does not say.
    pub instance: Option<ControllerInstance>,
    /// Resets of other controllers that it does at a time (CCRL); 0 for none.
    pub resets_max: u8,
    /// It reports the end of these resets by an event.
    pub reports_resets: bool,
    /// The controller reports ANA states.
    pub has_ana: bool,
    /// Number of ANA groups.
    pub ana_groups: u32,
    /// The longest time of the ANA state `change` (ANATT).
    pub ana_transition_max: Nanos,
    /// The controller reports that a namespace has changed.
    pub reports_changes: bool,
    /// A flush has an effect.
    has_write_cache: bool,
    has_discard: bool,
    has_write_zeroes: bool,
}

impl ControllerFacts {
    /// Reads Identify Controller of a controller that Connect called `id`, with the property
    /// `capabilities`.
    ///
    /// # Errors
    /// The reason why a host cannot use the controller, in one line. These are the checks of Linux.
    pub fn decode(
        bytes: &[u8; IDENTIFY_SIZE],
        id: u16,
        capabilities: u64,
    ) -> Result<ControllerFacts, String> {
        let check = |is_good: bool, why: &str| if is_good { Ok(()) } else { Err(why.to_owned()) };
        let now = u16_at(bytes, 78);
        if now != id {
            return Err(format!("Connect said controller {id}, and Identify says {now}"));
        }
        check(bytes[111] != 2, "it is a discovery controller, which has no namespaces")?;
        check(u16_at(bytes, 320) != 0, "it has no keep-alive timer (KAS is 0), which fabrics need")?;
        let capsule = u32_at(bytes, 1792).checked_mul(16).and_then(|len| len.checked_sub(SQE_SIZE as u32));
        let Some(capsule) = capsule else {
            return Err(format!("wrong size of I/O commands (IOCCSZ {})", u32_at(bytes, 1792)));
        };
        check(u32_at(bytes, 1796) >= 1, "wrong size of I/O responses (IORCSZ 0)")?;
        check(u16_at(bytes, 1800) == 0, "data in capsules has an offset (ICDOFF)")?;
        let commands_max = u16_at(bytes, 514);
        check(commands_max >= 2, "it does not say how many commands it takes (MAXCMD)")?;
        let sgls = u32_at(bytes, 536);
        check(sgls & 0b11 != 0, "it does not support SGLs")?;
        let in_capsule = sgls & 1 << 20 != 0;
        let page = 4096_u64 << (capabilities >> 48 & 0xf);
        let transfer_max = match bytes[77] {
            0 => TRANSFER_MAX,
            log2 => page.checked_shl(log2.into()).unwrap_or(TRANSFER_MAX).clamp(4096, TRANSFER_MAX),
        };
        let optional = u16_at(bytes, 520);
        let events = AsyncEventMask::from_bits_retain(u32_at(bytes, 92));
        let FenceCapabilities { instance, resets_max, quiesce_time_ms } = FenceCapabilities::decode(bytes);
        Ok(ControllerFacts {
            id,
            queue_entries: ((capabilities & 0xffff).min(0xfffe) as u16 + 1).clamp(2, commands_max),
            transfer_max,
            capsule_data_max: if in_capsule { capsule.min(64 << 10) } else { 0 },
            retry_delays: [128, 130, 132].map(|at| u16_at(bytes, at)),
            keep_alive_step: Nanos::from_millis(u64::from(u16_at(bytes, 320)) * 100),
            is_traffic_based: u32_at(bytes, 96) & 1 << 6 != 0,
            quiesce: Nanos::from_millis(quiesce_time_ms.into()),
            instance,
            resets_max,
            reports_resets: events.contains(AsyncEventMask::CROSS_CONTROLLER_RESET_COMPLETED),
            has_ana: bytes[76] & 1 << 3 != 0,
            ana_groups: u32_at(bytes, 348).clamp(1, 1024),
            // It must not be 0.
            ana_transition_max: Nanos::from_millis(
                u64::from(if bytes[342] == 0 { 10 } else { bytes[342] }) * 1000,
            ),
            reports_changes: events.contains(AsyncEventMask::NAMESPACE_CHANGED),
            has_write_cache: bytes[525] & 1 != 0,
            has_discard: optional & 1 << 2 != 0,
            has_write_zeroes: optional & 1 << 3 != 0,
        })
    }
}

/// The identity of a namespace: all that controllers report, zero for what they do not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct NamespaceId {
    /// NGUID.
    pub nguid: [u8; 16],
    /// EUI-64.
    pub eui64: [u8; 8],
    /// UUID, from the list of identifiers.
    pub uuid: [u8; 16],
}

impl NamespaceId {
    /// Reads the list of identifiers (*Base* figure 277), and takes NGUID and EUI-64 from
    /// `namespace`.
    #[must_use]
    pub fn decode(namespace: &[u8; IDENTIFY_SIZE], descriptors: &[u8; IDENTIFY_SIZE]) -> NamespaceId {
        let mut id = NamespaceId::default();
        id.nguid.copy_from_slice(&namespace[104..120]);
        id.eui64.copy_from_slice(&namespace[120..128]);
        let mut rest = &descriptors[..];
        while let Some((&[kind, len, _, _], after)) = rest.split_first_chunk()
            && let Some((value, after)) = after.split_at_checked(len.into())
            && len > 0
        {
            match (kind, len) {
                (1, 8) => id.eui64.copy_from_slice(value),
                (2, 16) => id.nguid.copy_from_slice(value),
                (3, 16) => id.uuid.copy_from_slice(value),
                _ => {}
            }
            rest = after;
        }
        id
    }

    /// The name of the disk, as Linux prints it in `wwid`; `None` if it has none.
    #[must_use]
    pub fn wwid(&self) -> Option<String> {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        if self.uuid != [0; 16] {
            let hex = hex(&self.uuid);
            let groups = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
            return Some(format!("uuid.{}", groups.join("-")));
        }
        let long = (self.nguid != [0; 16]).then(|| format!("eui.{}", hex(&self.nguid)));
        long.or_else(|| (self.eui64 != [0; 8]).then(|| format!("eui.{}", hex(&self.eui64))))
    }
}

/// A namespace and its controller, as a host uses them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceFacts {
    /// Size in bytes, in whole blocks.
    pub size: u64,
    /// Bytes of a block as a power of two, 9 to 16.
    pub block_log2: u8,
    /// Identity of the namespace.
    pub id: NamespaceId,
    /// The ANA group; 0 for none.
    pub ana_group: u32,
    /// Write Zeroes may deallocate, and deallocated blocks read as zeroes.
    pub zeroes_deallocate: bool,
    /// Limits of a device on the namespace, without its size.
    pub limits: Limits,
}

impl NamespaceFacts {
    /// Reads Identify Namespace and the list of identifiers of namespace `nsid`.
    ///
    /// # Errors
    /// The reason why the namespace cannot be used, in one line.
    pub fn decode(
        nsid: u32,
        bytes: &[u8; IDENTIFY_SIZE],
        descriptors: &[u8; IDENTIFY_SIZE],
        controller: &ControllerFacts,
    ) -> Result<NamespaceFacts, String> {
        let blocks = u64_at(bytes, 0);
        if blocks == 0 {
            return Err(format!("there is no namespace {nsid}"));
        }
        let format = usize::from(bytes[26] & 0xf | (bytes[26] >> 5 & 3) << 4);
        let descriptor = u32_at(bytes, 128 + format * 4);
        let block_log2 = (descriptor >> 16) as u8;
        if descriptor as u16 != 0 {
            return Err(format!("namespace {nsid} has metadata, which udm does not support"));
        }
        if !(9..=16).contains(&block_log2) {
            return Err(format!(
                "namespace {nsid} has blocks of 2^{block_log2} bytes; udm supports 512 to 65536"
            ));
        }
        let block = 1_u64 << block_log2;
        let size = blocks.checked_mul(block).filter(|size| *size <= i64::MAX as u64);
        let size = size.ok_or_else(|| format!("namespace {nsid} is larger than 8 EiB"))?;
        let whole = |bytes: u64| Sectors::from_bytes(bytes / block * block);
        let max = controller.transfer_max.min(BLOCKS_MAX * block).max(block);
        let has = |supported: bool, max: u64| if supported { whole(max) } else { Sectors::ZERO };
        let preferred = match bytes[24] & 1 << 4 {
            0 => (0, 0),
            _ => ((u64::from(u16_at(bytes, 64)) + 1) * block, (u64::from(u16_at(bytes, 72)) + 1) * block),
        };
        let limits = Limits {
            logical_block: block as u32,
            physical_block: (preferred.0.clamp(block, block.max(65536)) as u32).next_power_of_two(),
            io_min: preferred.0.clamp(block, 1 << 30) as u32,
            io_opt: if preferred.1 > block { preferred.1.min(1 << 30) as u32 } else { 0 },
            max_sectors: whole(max),
            max_discard: has(controller.has_discard, DISCARD_MAX),
            max_write_zeroes: has(controller.has_write_zeroes, max),
            write_cache: controller.has_write_cache,
            fua: true,
            read_only: bytes[99] & 1 != 0,
            ..Limits::new(Sectors::from_bytes(size))
        };
        Ok(NamespaceFacts {
            size,
            block_log2,
            id: NamespaceId::decode(bytes, descriptors),
            ana_group: u32_at(bytes, 92),
            zeroes_deallocate: bytes[33] & 0b1111 == 0b1001,
            limits,
        })
    }
}

/// The state of group `group` in an ANA log (*Base* 5.16.1.12); `None` if the log is cut before it.
#[must_use]
pub fn find_ana_state(log: &[u8], group: u32) -> Option<AnaState> {
    const DESCRIPTOR: usize = 32;
    let mut at = 16;
    let groups = usize::from(u16_at(log.get(..16)?, 8));
    for _ in 0..groups {
        let descriptor = log.get(at..at + DESCRIPTOR)?;
        if u32_at(descriptor, 0) == group {
            return Some(match descriptor[16] & 0xf {
                1 => AnaState::Optimized,
                2 => AnaState::NonOptimized,
                3 => AnaState::Inaccessible,
                4 => AnaState::PersistentLoss,
                _ => AnaState::Change,
            });
        }
        let namespaces = u32_at(descriptor, 4) as usize;
        at = at.checked_add(namespaces.checked_mul(4)?.checked_add(DESCRIPTOR)?)?;
    }
    None
}

/// True if requests may be sent on a path in this state.
#[must_use]
pub const fn is_usable(state: AnaState) -> bool {
    matches!(state, AnaState::Optimized | AnaState::NonOptimized)
}

/// The priority of a path in this state, as multipath-tools has it (`prioritizers/ana.c`).
#[must_use]
pub const fn ana_priority(state: AnaState) -> u32 {
    match state {
        AnaState::Optimized => 50,
        AnaState::NonOptimized => 10,
        AnaState::Inaccessible => 5,
        AnaState::PersistentLoss => 1,
        AnaState::Change => 0,
    }
}

#[cfg(test)]
#[path = "facts_tests.rs"]
mod tests;
