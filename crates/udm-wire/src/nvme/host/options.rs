//! The names, wishes and secrets of a host.

use super::queue::HostDigests;
use crate::nvme::{DhchapHash, DhchapSecret};
use ring::hmac;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// The names and wishes of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostOptions {
    /// Name of the host.
    pub host: String,
    /// Identifier of the host.
    pub host_id: [u8; 16],
    /// Name of the subsystem.
    pub subsystem: String,
    /// Number of the namespace.
    pub nsid: u32,
    /// Digests to ask for.
    pub digests: HostDigests,
    /// Keep-alive timeout in milliseconds, above 0.
    pub kato_ms: u32,
    /// Number of I/O queues to ask for, at least 1.
    pub queues: u16,
    /// Secrets for a controller that asks for authentication; `None` if there are none.
    pub secrets: Option<Arc<HostSecrets>>,
}

/// The secrets of a host, and the source of its challenges. Nothing of it is ever printed.
pub struct HostSecrets {
    pub(super) host: DhchapSecret,
    pub(super) controller: Option<DhchapSecret>,
    challenge_key: [u8; 32],
    /// Number of authentications so far.
    authentications: AtomicU64,
    /// A controller has refused a host that names the null group only.
    names_more_groups: AtomicBool,
}

impl HostSecrets {
    /// The host proves that it knows `host`. With `controller`, it uses only controllers that prove
    /// that they know this one. `challenge_key` are random bytes that nobody else knows: all
    /// challenges are made of them.
    #[must_use]
    pub fn new(host: DhchapSecret, controller: Option<DhchapSecret>, challenge_key: [u8; 32]) -> HostSecrets {
        HostSecrets {
            host,
            controller,
            challenge_key,
            authentications: AtomicU64::new(0),
            names_more_groups: AtomicBool::new(false),
        }
    }

    /// True once a controller has refused the null group: the next authentication names a second
    /// group, so that the target of Linux takes the null group. A connection is worth another try.
    #[must_use]
    pub fn names_more_groups(&self) -> bool {
        self.names_more_groups.load(Relaxed)
    }

    pub(super) fn name_more_groups(&self) {
        self.names_more_groups.store(true, Relaxed);
    }

    /// The number of the next authentication.
    pub(super) fn next_authentication(&self) -> u64 {
        self.authentications.fetch_add(1, Relaxed)
    }

    /// The challenge of authentication `number`: no two are equal, and nobody can guess one.
    pub(super) fn challenge(&self, number: u64, hash: DhchapHash) -> Vec<u8> {
        let key = hmac::Key::new(hmac::HMAC_SHA512, &self.challenge_key);
        hmac::sign(&key, &number.to_le_bytes()).as_ref()[..hash.size()].to_vec()
    }
}

impl fmt::Debug for HostSecrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostSecrets").field("has_controller", &self.controller.is_some()).finish()
    }
}

/// Equal if the secrets are: the state of the challenges does not count.
impl PartialEq for HostSecrets {
    fn eq(&self, other: &HostSecrets) -> bool {
        (&self.host, &self.controller) == (&other.host, &other.controller)
    }
}

impl Eq for HostSecrets {}
