//! Warnings about a file that is probably not what its user expects: an image in another format,
//! and bytes after the last whole block.
//!
//! Neither is refused. A raw disk may begin with any bytes, and a guest can write a format's magic
//! to it. udm never guesses a format: it serves the bytes of the file.

use rustix::fd::BorrowedFd;
use rustix::fs::{FileType, Stat};
use std::path::Path;
use udm_core::Buf;

/// Bytes that are read from a file. Aligned for every direct I/O.
const HEAD: usize = 4096;

/// Image formats: offset of the magic, magic, name (QEMU's `qemu-img --help`).
const FORMATS: [(usize, &[u8], &str); 8] = [
    (0, b"QFI\xfb", "qcow2"),
    (0, b"QED\0", "qed"),
    (0, b"KDMV", "vmdk"),
    (0, b"COWD", "vmdk"),
    (0, b"vhdxfile", "vhdx"),
    (0, b"conectix", "vpc"),
    (0, b"WithoutFreeSpace", "parallels"),
    (64, &0xbeda_107f_u32.to_le_bytes(), "vdi"),
];

/// Returns the format of an image that begins with `head`; `None` for a raw image.
fn detect_image_format(head: &[u8]) -> Option<&'static str> {
    let found =
        FORMATS.iter().find(|(at, magic, _)| head.get(*at..).is_some_and(|rest| rest.starts_with(magic)));
    found.map(|(_, _, name)| *name)
}

/// Logs warnings about a file that was opened with blocks of `block` bytes. Block devices are not
/// checked.
pub(super) fn log_opened_file_warnings(path: &Path, fd: BorrowedFd<'_>, stat: &Stat, block: u32) {
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return;
    }
    let path = path.display();
    let rest = stat.st_size as u64 % u64::from(block);
    if rest > 0 && stat.st_size as u64 > rest {
        tracing::warn!(
            "{path}: its last {rest} bytes are not served, since blocks have {block} bytes: \
             \"truncate --size=%{block} {path}\" fills the block"
        );
    }
    let mut head = Buf::zeroed(HEAD);
    let read = rustix::io::pread(fd, &mut head[..], 0).unwrap_or(0);
    if let Some(format) = detect_image_format(&head[..read]) {
        let way = match format {
            "qcow2" => format!("\"file:{path}?format=qcow2\" serves"),
            _ => format!("\"qemu-img convert -O raw {path} NEW\" makes"),
        };
        tracing::warn!(
            "{path}: begins like an image in format {format}, and is served as it is: {way} the disk that is in it"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_known_by_their_magic() {
        assert_eq!(detect_image_format(b"QFI\xfb\0\0\0\x03"), Some("qcow2"));
        let mut vdi = [0; 512];
        vdi[64..68].copy_from_slice(&[0x7f, 0x10, 0xda, 0xbe]);
        assert_eq!(detect_image_format(&vdi), Some("vdi"));
        assert_eq!(detect_image_format(&[0; 512]), None);
        assert_eq!(detect_image_format(b"QF"), None);
        assert_eq!(detect_image_format(b""), None);
    }
}
