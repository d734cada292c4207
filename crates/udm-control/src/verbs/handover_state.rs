//! The devices of a server as plain data, for another process.

use super::handover_counters::HandedOverCounters;
use super::handover_nvme::HandedOverNvmeNamespace;
use crate::config::HandedOverConfig;
use crate::throttle_settings::ThrottleSettings;
use serde::{Deserialize, Serialize};
use udm_backends::DiskIdentity;
use udm_wire::nbd::client::NegotiatedExportInfo;
use udm_wire::nbd::{BlockSizes, ExportFlags};

/// A table, with URIs in place of numbers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandedOverTable {
    /// The text.
    pub text: String,
    /// True if the device cannot be written while it has this table.
    pub read_only: bool,
}

/// A mapped device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandedOverDevice {
    /// Its name.
    pub name: String,
    /// Its UUID.
    pub uuid: Option<String>,
    /// Its minor number.
    pub minor: u32,
    /// True if clients may not write.
    pub read_only: bool,
    /// Names in the certificates of the NBD clients that may use it; `None` for all clients.
    #[serde(default)]
    pub allow: Option<Vec<String>>,
    /// What NBD clients can show about it.
    #[serde(default)]
    pub description: String,
    /// Its limits of requests and bytes per second.
    #[serde(default)]
    pub throttle: Option<ThrottleSettings>,
    /// `dm_mq_queue_depth` of its own queue.
    pub queue_depth: Option<u32>,
    /// `dm_mq_nr_hw_queues` of its own queue.
    pub nr_hw_queues: Option<u32>,
    /// The live table.
    pub live: Option<HandedOverTable>,
    /// The table in the inactive slot.
    pub inactive: Option<HandedOverTable>,
    /// True for a snapshot that was created by name; its record in the state folder has the rest.
    pub is_snapshot_by_name: bool,
    /// True for an origin that was linear before it had snapshots.
    pub was_linear: bool,
    /// Messages that bring targets into their state: sector and words.
    pub messages: Vec<(u64, String)>,
    /// URIs of the paths that an administrator failed.
    pub failed_by_hand: Vec<String>,
    /// Its counters.
    #[serde(default)]
    pub counters: HandedOverCounters,
}

/// A disk that has a number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandedOverDisk {
    /// The canonical URI.
    pub uri: String,
    /// Where the URI led.
    pub identity: HandedOverDiskIdentity,
}

/// [`DiskIdentity`] in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HandedOverDiskIdentity {
    /// A regular file.
    File {
        /// `st_dev`.
        device: u64,
        /// `st_ino`.
        inode: u64,
    },
    /// A block device.
    Block {
        /// `st_rdev`.
        number: u64,
    },
    /// No disk of the operating system.
    Virtual,
}

impl From<DiskIdentity> for HandedOverDiskIdentity {
    fn from(identity: DiskIdentity) -> Self {
        match identity {
            DiskIdentity::File { device, inode } => Self::File { device, inode },
            DiskIdentity::Block { number } => Self::Block { number },
            DiskIdentity::Virtual => Self::Virtual,
        }
    }
}

impl From<HandedOverDiskIdentity> for DiskIdentity {
    fn from(identity: HandedOverDiskIdentity) -> Self {
        match identity {
            HandedOverDiskIdentity::File { device, inode } => Self::File { device, inode },
            HandedOverDiskIdentity::Block { number } => Self::Block { number },
            HandedOverDiskIdentity::Virtual => Self::Virtual,
        }
    }
}

/// An NBD export in use, as its server described it: the server may be down when another process
/// takes over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandedOverNbdExport {
    /// The URI without a queue.
    pub uri: String,
    /// Size in bytes.
    pub size: u64,
    /// Its transmission flags (the NBD protocol's `NBD_FLAG_*`).
    pub flags: u16,
    /// Smallest, preferred and largest block size in bytes.
    pub blocks: [u32; 3],
}

impl From<(String, NegotiatedExportInfo)> for HandedOverNbdExport {
    fn from((uri, export): (String, NegotiatedExportInfo)) -> HandedOverNbdExport {
        let BlockSizes { minimum, preferred, maximum } = export.blocks;
        let (size, flags) = (export.size, export.flags.bits());
        HandedOverNbdExport { uri, size, flags, blocks: [minimum, preferred, maximum] }
    }
}

impl From<&HandedOverNbdExport> for (String, NegotiatedExportInfo) {
    fn from(export: &HandedOverNbdExport) -> Self {
        let HandedOverNbdExport { uri, size, flags, blocks: [minimum, preferred, maximum] } = export.clone();
        let blocks = BlockSizes { minimum, preferred, maximum };
        let flags = ExportFlags::from_bits_retain(flags);
        // Devices negotiate neither structured replies nor contexts.
        (uri, NegotiatedExportInfo { size, flags, blocks, structured: false, contexts: Vec::new() })
    }
}

/// All devices of a server.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandedOverDevices {
    /// The disks, by number from 0.
    pub disks: Vec<HandedOverDisk>,
    /// The NBD exports in use.
    #[serde(default)]
    pub nbd_exports: Vec<HandedOverNbdExport>,
    /// The NVMe namespaces in use.
    #[serde(default)]
    pub nvme_namespaces: Vec<HandedOverNvmeNamespace>,
    /// The mapped devices, in an order in which they can be created.
    pub devices: Vec<HandedOverDevice>,
    /// The names of the exports, in their order: a client that names none gets the first.
    pub exports: Vec<String>,
    /// What is applied of the configuration file.
    pub config: HandedOverConfig,
    /// The devices of that file that could not be created yet and are tried again.
    #[serde(default)]
    pub absent: Vec<String>,
}
