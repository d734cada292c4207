//! NVMe namespaces as plain data, for another process: the controller may be down when it takes
//! over.

use serde::{Deserialize, Serialize};
use udm_backends::nvme::KnownNamespace;
use udm_core::{Limits, Sectors};
use udm_wire::nvme::host::{NamespaceFacts, NamespaceId};

/// A namespace in use, as its controller described it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandedOverNvmeNamespace {
    /// The URI without a queue.
    pub uri: String,
    /// Size in bytes.
    pub size: u64,
    /// Bytes of a block as a power of two.
    pub block_log2: u8,
    /// NGUID.
    pub nguid: [u8; 16],
    /// EUI-64.
    pub eui64: [u8; 8],
    /// UUID.
    pub uuid: [u8; 16],
    /// The ANA group; 0 for none.
    pub ana_group: u32,
    /// Write Zeroes may deallocate.
    pub zeroes_deallocate: bool,
    /// Number of I/O queues that the controller grants.
    pub queues: u16,
    /// Physical block, preferred smallest request and preferred request in bytes.
    pub io_sizes: [u32; 3],
    /// The longest read or write, discard and write-zeroes in sectors.
    pub max_sectors: [u64; 3],
    /// The namespace has a volatile cache.
    pub write_cache: bool,
    /// Writes fail.
    pub read_only: bool,
}

impl From<(String, KnownNamespace)> for HandedOverNvmeNamespace {
    fn from((uri, KnownNamespace { namespace, queues }): (String, KnownNamespace)) -> Self {
        let NamespaceFacts { size, block_log2, id, ana_group, zeroes_deallocate, limits } = namespace;
        let NamespaceId { nguid, eui64, uuid } = id;
        HandedOverNvmeNamespace {
            uri,
            size,
            block_log2,
            nguid,
            eui64,
            uuid,
            ana_group,
            zeroes_deallocate,
            queues,
            io_sizes: [limits.physical_block, limits.io_min, limits.io_opt],
            max_sectors: [limits.max_sectors, limits.max_discard, limits.max_write_zeroes].map(|max| max.0),
            write_cache: limits.write_cache,
            read_only: limits.read_only,
        }
    }
}

impl From<&HandedOverNvmeNamespace> for (String, KnownNamespace) {
    fn from(from: &HandedOverNvmeNamespace) -> Self {
        let HandedOverNvmeNamespace { size, block_log2, nguid, eui64, uuid, .. } = *from;
        let [physical_block, io_min, io_opt] = from.io_sizes;
        let [max_sectors, max_discard, max_write_zeroes] = from.max_sectors.map(Sectors);
        let limits = Limits {
            logical_block: 1 << block_log2.clamp(9, 16),
            physical_block,
            io_min,
            io_opt,
            max_sectors,
            max_discard,
            max_write_zeroes,
            write_cache: from.write_cache,
            read_only: from.read_only,
            ..Limits::new(Sectors::from_bytes(size))
        };
        let namespace = NamespaceFacts {
            size,
            block_log2,
            id: NamespaceId { nguid, eui64, uuid },
            ana_group: from.ana_group,
            zeroes_deallocate: from.zeroes_deallocate,
            limits,
        };
        (from.uri.clone(), KnownNamespace { namespace, queues: from.queues })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The new process sees the namespace as the old one did.
    #[test]
    fn a_namespace_reads_back() {
        let limits = Limits {
            logical_block: 4096,
            physical_block: 8192,
            io_min: 4096,
            io_opt: 65536,
            max_sectors: Sectors(2048),
            max_discard: Sectors(4096),
            max_write_zeroes: Sectors(1024),
            write_cache: true,
            read_only: true,
            ..Limits::new(Sectors(8192))
        };
        let id = NamespaceId { nguid: [1; 16], eui64: [2; 8], uuid: [3; 16] };
        let (size, block_log2, ana_group, zeroes_deallocate) = (4 << 20, 12, 7, true);
        let namespace = NamespaceFacts { size, block_log2, id, ana_group, zeroes_deallocate, limits };
        let known = ("nvme+tcp://h/n/1".to_owned(), KnownNamespace { namespace, queues: 3 });
        let handed_over = HandedOverNvmeNamespace::from(known.clone());
        let text = serde_json::to_string(&handed_over).unwrap();
        let read: HandedOverNvmeNamespace = serde_json::from_str(&text).unwrap();
        assert_eq!(<(String, KnownNamespace)>::from(&read), known);
    }
}
