//! The name and the identifier of this host.
//!
//! `hostnqn=` and `hostid=` of a URI come first, then the files of nvme-cli. Otherwise the
//! identifier is made of the machine's (`/etc/machine-id`), which itself must not be published.
//!
//! Secrets are in files that not everybody can read.

use super::client::NvmeClientError;
use ring::rand::{SecureRandom, SystemRandom};
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use udm_wire::nvme::host::{HostOptions, HostSecrets};
use udm_wire::nvme::{DhchapSecret, check_nqn};
use udm_wire::uri::NvmeUri;

/// The names and wishes of this host for the controller of `uri`, which is asked for `queues` I/O
/// queues.
///
/// # Errors
/// A secret cannot be read, or everybody can read it.
pub(super) fn host_options(uri: &NvmeUri, queues: u16) -> Result<HostOptions, NvmeClientError> {
    let host_id = uri.host_id.or_else(|| read_file("/etc/nvme/hostid").and_then(|text| parse_id(&text)));
    let host_id = host_id.unwrap_or_else(machine_uuid);
    let host = uri.host_nqn.clone();
    let host = host.or_else(|| read_file("/etc/nvme/hostnqn").filter(|name| check_nqn(name).is_ok()));
    Ok(HostOptions {
        host: host.unwrap_or_else(|| format!("nqn.2014-08.org.nvmexpress:uuid:{}", format_uuid(host_id))),
        host_id,
        subsystem: uri.subsystem.clone(),
        nsid: uri.nsid,
        digests: uri.digests,
        kato_ms: (uri.kato.0 / 1_000_000) as u32,
        queues,
        secrets: read_secrets(uri)?.map(Arc::new),
    })
}

/// The secrets of `uri`, if it has some.
fn read_secrets(uri: &NvmeUri) -> Result<Option<HostSecrets>, NvmeClientError> {
    let Some(host) = &uri.secret_file else { return Ok(None) };
    let (host, controller) = (read_secret(host)?, uri.controller_secret_file.as_deref().map(read_secret));
    let mut challenge_key = [0; 32];
    let random = SystemRandom::new().fill(&mut challenge_key);
    random.map_err(|_| NvmeClientError::Secret("the system has no random bytes".into()))?;
    Ok(Some(HostSecrets::new(host, controller.transpose()?, challenge_key)))
}

/// Reads a secret. No error contains a part of it.
fn read_secret(path: &Path) -> Result<DhchapSecret, NvmeClientError> {
    const SECRET_FILE_MAX: u64 = 4096;
    /// Permissions of others than the owner and the group.
    const OTHERS: u32 = 0o007;
    let refuse = |why: String| NvmeClientError::Secret(format!("the secret in {}: {why}", path.display()));
    let file = fs::File::open(path).map_err(|error| refuse(error.to_string()))?;
    let found = file.metadata().map_err(|error| refuse(error.to_string()))?;
    if found.mode() & OTHERS != 0 {
        return Err(refuse("everybody may use the file: chmod 600 takes this away".into()));
    }
    let mut text = String::new();
    file.take(SECRET_FILE_MAX).read_to_string(&mut text).map_err(|error| refuse(error.to_string()))?;
    DhchapSecret::parse(&text).map_err(|error| refuse(error.to_string()))
}

fn read_file(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

fn parse_id(text: &str) -> Option<[u8; 16]> {
    let hex: String = text.split('-').collect();
    (hex.len() == 32).then(|| u128::from_str_radix(&hex, 16).ok()).flatten().map(u128::to_be_bytes)
}

fn format_uuid(id: [u8; 16]) -> String {
    let hex = format!("{:032x}", u128::from_be_bytes(id));
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

/// A UUID of version 8 (RFC 9562) that is the same on each start of this machine. Without a machine
/// identifier it is made of the host's name.
fn machine_uuid() -> [u8; 16] {
    let machine = read_file("/etc/machine-id").filter(|id| !id.is_empty());
    let machine =
        machine.unwrap_or_else(|| rustix::system::uname().nodename().to_string_lossy().into_owned());
    let mut uuid = [0; 16];
    for (half, out) in uuid.chunks_exact_mut(8).enumerate() {
        let mut hasher = DefaultHasher::new();
        ("udm nvme host", half, &machine).hash(&mut hasher);
        out.copy_from_slice(&hasher.finish().to_be_bytes());
    }
    uuid[6] = uuid[6] & 0x0f | 0x80;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    uuid
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_has_one_valid_name() {
        let mut uri = NvmeUri::new("h", 4420, "nqn.2014-08.x", 1);
        let (one, other) = (host_options(&uri, 4).unwrap(), host_options(&uri, 4).unwrap());
        assert_eq!(one, other);
        assert_eq!(check_nqn(&one.host), Ok(()));
        assert_ne!(one.host_id, [0; 16]);
        uri.host_nqn = Some("nqn.2014-08.me".into());
        uri.host_id = parse_id("00112233-4455-6677-8899-aabbccddeeff");
        let named = host_options(&uri, 4).unwrap();
        assert_eq!((named.host.as_str(), named.host_id[1], named.kato_ms), ("nqn.2014-08.me", 0x11, 5000));
    }
}
