//! The header of a qcow2 image, and its extensions.

use super::{Qcow2Error, ReadImageBytes, be32, be64};
use crate::words::quote_for_error_line;

/// The first bytes of an image.
pub const MAGIC: &[u8; 4] = b"QFI\xfb";

/// Bytes of the header of version 2, and of version 3 without additional fields.
const V2_LEN: usize = 72;
const V3_LEN: usize = 104;

/// Smallest and largest cluster, as powers of two: 512 bytes and 2 MiB.
const CLUSTER_BITS_MIN: u32 = 9;
/// The largest cluster, as a power of two: 2 MiB.
pub const CLUSTER_BITS_MAX: u32 = 21;

/// Maximum number of entries in the first table (QEMU: 32 MiB).
const L1_ENTRIES_MAX: u64 = 4 << 20;

/// The longest name of another file, in bytes (QEMU).
pub const NAME_MAX: u64 = 1023;

/// Bits of `incompatible_features`.
const DIRTY: u64 = 1 << 0;
const CORRUPT: u64 = 1 << 1;
const EXTERNAL_DATA: u64 = 1 << 2;
const COMPRESSION_TYPE: u64 = 1 << 3;
const EXTENDED_L2: u64 = 1 << 4;

/// Types of header extensions.
const EXT_END: u32 = 0;
/// Type of the header extension with the format of the backing file.
pub const EXT_BACKING_FORMAT: u32 = 0xe279_2aca;
const EXT_DATA_FILE: u32 = 0x4441_5441;

/// The fields of a header that a reader needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Qcow2Header {
    /// 2 or 3.
    pub version: u32,
    /// Size of the disk in bytes.
    pub size: u64,
    /// Cluster size as a power of two: 9..=21.
    pub cluster_bits: u32,
    /// Byte offset of the first table.
    pub l1_offset: u64,
    /// Entries of the first table that the disk needs.
    pub l1_entries: u64,
    /// The backing file; `None` for none.
    pub backing: Option<BackingFile>,
    /// The data of the image is in another file.
    pub external_data: bool,
    /// Name of the file with the data, if the image names it.
    pub data_file: Option<String>,
}

/// The file that has the data of clusters that the image does not have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackingFile {
    /// Its name, as the image has it.
    pub name: String,
    /// Its format, such as `raw` or `qcow2`; `None` if the image does not name it.
    pub format: Option<String>,
}

impl Qcow2Header {
    /// Bytes in a cluster.
    #[must_use]
    pub fn cluster_size(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Reads the header of an image of `len` bytes.
    ///
    /// # Errors
    /// The image is no qcow2 image, is damaged, or has a feature that is not supported.
    pub fn read(len: u64, read: &mut ReadImageBytes<'_>) -> Result<Qcow2Header, Qcow2Error> {
        let mut bytes = [0; V3_LEN + 8];
        let head = bytes.len().min(usize::try_from(len).unwrap_or(usize::MAX));
        read(0, &mut bytes[..head])?;
        if head < V2_LEN || !bytes.starts_with(MAGIC) {
            let text = "not a qcow2 image (format=raw serves the bytes of the file as they are)";
            return Err(Qcow2Error::refused(text));
        }
        let version = be32(&bytes, 4);
        match version {
            2 => {}
            3 if head >= V3_LEN => {}
            3 => return Err(Qcow2Error::damaged("it ends inside its header")),
            _ => return Err(Qcow2Error::unsupported(&format!("version {version} of qcow2"))),
        }
        let cluster_bits = be32(&bytes, 20);
        if !(CLUSTER_BITS_MIN..=CLUSTER_BITS_MAX).contains(&cluster_bits) {
            return Err(Qcow2Error::damaged(format!(
                "clusters of 2^{cluster_bits} bytes; expected 2^{CLUSTER_BITS_MIN} to 2^{CLUSTER_BITS_MAX}"
            )));
        }
        match be32(&bytes, 32) {
            0 => {}
            1 => return Err(Qcow2Error::unsupported("encrypted with AES")),
            2 => return Err(Qcow2Error::unsupported("encrypted with LUKS")),
            other => return Err(Qcow2Error::unsupported(&format!("encryption method {other}"))),
        }
        let header_len = if version == 2 { V2_LEN as u64 } else { u64::from(be32(&bytes, 100)) };
        let features = if version == 2 { 0 } else { be64(&bytes, 72) };
        let has_type = header_len > V3_LEN as u64 && head > V3_LEN;
        check_features(features, has_type.then(|| bytes[V3_LEN]))?;
        let cluster = 1_u64 << cluster_bits;
        if header_len > cluster || version == 3 && header_len < V3_LEN as u64 {
            return Err(Qcow2Error::damaged(format!("a header of {header_len} bytes")));
        }
        let mut header = Qcow2Header {
            version,
            size: be64(&bytes, 24),
            cluster_bits,
            l1_offset: be64(&bytes, 40),
            l1_entries: 0,
            backing: None,
            external_data: features & EXTERNAL_DATA != 0,
            data_file: None,
        };
        header.check_l1(len, u64::from(be32(&bytes, 36)))?;
        let format = header.read_extensions(header_len, len, read)?;
        let (name_at, name_len) = (be64(&bytes, 8), u64::from(be32(&bytes, 16)));
        if name_at != 0 {
            if name_len > NAME_MAX || name_at.checked_add(name_len).is_none_or(|end| end > cluster.min(len)) {
                return Err(Qcow2Error::damaged("the name of its backing file is outside its first cluster"));
            }
            let name = read_text("backing file", name_at, name_len as usize, read)?;
            header.backing = Some(BackingFile { name, format });
        }
        Ok(header)
    }

    /// Checks the size of the disk and the place of the first table, which has `entries` entries.
    fn check_l1(&mut self, len: u64, entries: u64) -> Result<(), Qcow2Error> {
        let per_table = self.cluster_size() / 8 * self.cluster_size();
        self.l1_entries = self.size.div_ceil(per_table);
        if self.l1_entries > L1_ENTRIES_MAX {
            return Err(Qcow2Error::damaged(format!(
                "a disk of {} bytes is too large for clusters of {} bytes",
                self.size,
                self.cluster_size()
            )));
        }
        if entries < self.l1_entries {
            return Err(Qcow2Error::damaged("its first table is shorter than the disk"));
        }
        let end = self.l1_offset.checked_add(self.l1_entries * 8);
        if !self.l1_offset.is_multiple_of(self.cluster_size()) || end.is_none_or(|end| end > len) {
            return Err(Qcow2Error::damaged(format!("its first table is at byte {}", self.l1_offset)));
        }
        Ok(())
    }

    /// Reads the extensions from byte `at` on. Returns the format of the backing file.
    fn read_extensions(
        &mut self,
        mut at: u64,
        len: u64,
        read: &mut ReadImageBytes<'_>,
    ) -> Result<Option<String>, Qcow2Error> {
        let end = self.cluster_size().min(len);
        let mut format = None;
        // Each extension has at least 8 bytes, so the loop ends with the cluster.
        while at + 8 <= end {
            let mut head = [0; 8];
            read(at, &mut head)?;
            let (kind, bytes) = (be32(&head, 0), u64::from(be32(&head, 4)));
            at += 8;
            if kind == EXT_END {
                break;
            }
            if bytes > end - at {
                return Err(Qcow2Error::damaged("a header extension exceeds its first cluster"));
            }
            let name = match kind {
                EXT_BACKING_FORMAT => Some(&mut format),
                EXT_DATA_FILE => Some(&mut self.data_file),
                _ => None,
            };
            if let Some(name) = name {
                if bytes > NAME_MAX {
                    return Err(Qcow2Error::damaged("a name in its header is too long"));
                }
                *name = Some(read_text("header extension", at, bytes as usize, read)?);
            }
            at += bytes.next_multiple_of(8);
        }
        Ok(format)
    }
}

/// Refuses incompatible features that are not supported.
fn check_features(features: u64, compression: Option<u8>) -> Result<(), Qcow2Error> {
    let known = DIRTY | CORRUPT | EXTERNAL_DATA | COMPRESSION_TYPE | EXTENDED_L2;
    if features & CORRUPT != 0 {
        let text = "marked as corrupt: \"qemu-img check -r all IMAGE\" repairs it, after a backup";
        return Err(Qcow2Error::refused(text));
    }
    if features & DIRTY != 0 {
        let text = "marked as dirty: a program writes it, or was killed; \"qemu-img check -r leaks IMAGE\" repairs it";
        return Err(Qcow2Error::refused(text));
    }
    if features & EXTENDED_L2 != 0 {
        return Err(Qcow2Error::unsupported("subclusters (extended_l2=on)"));
    }
    // 0 is deflate, which QEMU calls zlib.
    match (features & COMPRESSION_TYPE != 0, compression) {
        (false, None | Some(0)) => {}
        (true, Some(1)) => return Err(Qcow2Error::unsupported("compressed with zstd")),
        (_, kind) => {
            let kind = kind.unwrap_or(0);
            return Err(Qcow2Error::damaged(format!("compression type {kind} contradicts its features")));
        }
    }
    match features & !known {
        0 => Ok(()),
        unknown => Err(Qcow2Error::unsupported(&format!("unknown features {unknown:#x}"))),
    }
}

/// Reads a name in the header.
fn read_text(what: &str, at: u64, len: usize, read: &mut ReadImageBytes<'_>) -> Result<String, Qcow2Error> {
    let mut bytes = vec![0; len];
    read(at, &mut bytes)?;
    let text = String::from_utf8(bytes).map_err(|_| Qcow2Error::damaged(format!("{what}: not UTF-8")))?;
    if text.is_empty() || text.contains(char::is_control) {
        let text = quote_for_error_line(&text);
        return Err(Qcow2Error::damaged(format!("{what}: {text} is not a name")));
    }
    Ok(text)
}
