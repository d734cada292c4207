//! Identifiers that stay the same over restarts: of namespaces and of the subsystem.

use crate::nbd::Export;
use ring::digest::{Context, SHA256};

/// The identifier of a namespace, which is its NGUID and its UUID. It is the uuid of the device if
/// that is a UUID. Otherwise it is made of the uuid, or of the names of device and subsystem: hosts
/// refuse two different disks with one identifier.
pub(super) fn namespace_uuid(export: &Export, subsystem: &str) -> [u8; 16] {
    let uuid = export.device().stacked().and_then(|device| device.uuid());
    match uuid {
        Some(uuid) => parse_uuid(&uuid).unwrap_or_else(|| hashed_uuid(&["uuid", &uuid])),
        None => hashed_uuid(&["name", subsystem, &export.name()]),
    }
}

/// The default name of a subsystem, made of `parts`.
pub(super) fn subsystem_nqn(parts: &[&str]) -> String {
    let uuid = hashed_uuid(&[&["subsystem"], parts].concat());
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    let groups = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
    format!("nqn.2014-08.org.nvmexpress:uuid:{}", groups.join("-"))
}

/// A serial number of 16 digits, made of the name of a subsystem.
pub(super) fn serial_number(subsystem: &str) -> String {
    hashed_uuid(&["serial", subsystem])[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A UUID of version 8 (RFC 9562) made of `parts` by SHA-256.
fn hashed_uuid(parts: &[&str]) -> [u8; 16] {
    let mut hash = Context::new(&SHA256);
    for part in parts {
        hash.update(part.as_bytes());
        hash.update(&[0]);
    }
    let hash = hash.finish();
    let mut uuid = [0; 16];
    uuid.copy_from_slice(&hash.as_ref()[..16]);
    uuid[6] = uuid[6] & 0x0f | 0x80;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    uuid
}

/// The UUID in `text`, with or without hyphens; `None` if it is none, or all zero.
fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits: Vec<u8> = text.bytes().filter(|byte| *byte != b'-').collect();
    if digits.len() != 32 || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    let value = u128::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?;
    (value != 0).then(|| value.to_be_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_are_stable_and_different() {
        let nqn = subsystem_nqn(&["host", "127.0.0.1:4420"]);
        assert_eq!(nqn, "nqn.2014-08.org.nvmexpress:uuid:b0ef483a-0624-898c-9ccf-a2ebe22e74e1");
        assert_ne!(nqn, subsystem_nqn(&["host1", "27.0.0.1:4420"]));
        assert_eq!(udm_wire::nvme::check_nqn(&nqn), Ok(()));
        assert_eq!(serial_number(&nqn).len(), 16);
    }

    #[test]
    fn a_uuid_of_a_device_is_kept() {
        let uuid = "f81d4fae-7dec-11d0-a765-00a0c91e6bf6";
        assert_eq!(parse_uuid(uuid).unwrap()[..4], [0xf8, 0x1d, 0x4f, 0xae]);
        for other in ["mpath-3600140500000001", "", "00000000-0000-0000-0000-000000000000", "+81d4fae"] {
            assert_eq!(parse_uuid(other), None, "{other}");
        }
    }
}
