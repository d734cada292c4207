//! Other servers of the same subsystem (*peers*): a host may ask this server to reset a controller
//! of one of them, and a peer may ask this server to reset one of its own.
//!
//! The front end knows no way to reach a peer; [`NvmePeers`] is given to it. Who implements it must
//! answer [`NvmeResetOutcome::Done`] only if no request of the controller can reach a disk any
//! more.

use super::association::Association;
use super::listener::NvmeServer;
use super::subsystem::{Subsystem, keyed_hash};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Weak};
use udm_wire::nvme::{ControllerInstance, ControllerKind};

/// A request to reset a controller of another server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NvmePeerReset {
    /// The controller.
    pub impacted: ControllerInstance,
    /// Name of the host that asks: it must be the host of the controller.
    pub host: String,
    /// Identifier of that host.
    pub host_id: [u8; 16],
}

impl NvmePeerReset {
    /// The tag of the server that has made the controller ([`instance_tag`]).
    #[must_use]
    pub fn tag(&self) -> u32 {
        (self.impacted.random >> 32) as u32
    }
}

/// The outcome of a reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum NvmeResetOutcome {
    /// No request of the controller can reach a disk any more.
    Done = 1,
    /// The controller is not known, or is not one of this host: nothing was reset.
    Refused = 2,
    /// It is not known whether requests of the controller may reach a disk.
    Failed = 3,
}

/// Other servers of the subsystem.
pub trait NvmePeers: std::fmt::Debug + Send + Sync {
    /// Resets a controller of another server, and replies. A core calls this, so it must not block;
    /// the reply may come from any thread.
    fn reset(&self, request: NvmePeerReset, reply: NvmeResetReply);
}

/// Tells the outcome of a reset. If it is dropped without one, the reset has failed.
#[derive(Debug)]
pub struct NvmeResetReply {
    reset: Arc<PendingPeerReset>,
    subsystem: Weak<Subsystem>,
}

impl NvmeResetReply {
    /// Tells the outcome.
    pub fn send(self, outcome: NvmeResetOutcome) {
        self.reset.outcome.store(outcome as u8, Ordering::Release);
    }
}

impl Drop for NvmeResetReply {
    fn drop(&mut self) {
        let (failed, order) = (NvmeResetOutcome::Failed as u8, Ordering::AcqRel);
        // An outcome that was sent stays.
        let _ = self.reset.outcome.compare_exchange(PENDING, failed, order, Ordering::Relaxed);
        if let Some(subsystem) = self.subsystem.upgrade() {
            subsystem.notify_resets();
        }
    }
}

const PENDING: u8 = 0;

/// A reset that another server was asked for.
#[derive(Debug)]
pub(super) struct PendingPeerReset {
    outcome: AtomicU8,
}

impl PendingPeerReset {
    /// Asks `peers`, for the host of `own`.
    pub(super) fn begin(
        peers: &dyn NvmePeers,
        impacted: ControllerInstance,
        own: &Association,
        subsystem: &Arc<Subsystem>,
    ) -> Arc<PendingPeerReset> {
        let reset = Arc::new(PendingPeerReset { outcome: AtomicU8::new(PENDING) });
        let reply = NvmeResetReply { reset: Arc::clone(&reset), subsystem: Arc::downgrade(subsystem) };
        let request = NvmePeerReset { impacted, host: own.host.clone(), host_id: own.host_id };
        peers.reset(request, reply);
        reset
    }

    /// The outcome; `None` while the other server has not answered.
    pub(super) fn outcome(&self) -> Option<NvmeResetOutcome> {
        use NvmeResetOutcome::{Done, Failed, Refused};
        let outcome = self.outcome.load(Ordering::Acquire);
        [Done, Refused, Failed].into_iter().find(|one| *one as u8 == outcome)
    }
}

/// A reset of a controller of this server that another server has asked for.
pub struct OwnNvmeReset(Option<Arc<Association>>);

impl OwnNvmeReset {
    /// True when no request of the controller can reach a disk any more.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.0.as_ref().is_none_or(|association| association.is_forgotten())
    }
}

impl NvmeServer {
    /// Begins a reset of a controller of this server. It receives nothing more, and its requests at
    /// the devices are awaited.
    ///
    /// # Errors
    /// This server has made no such controller, or it is one of another host: one line.
    pub fn reset_own_controller(&self, request: &NvmePeerReset) -> Result<OwnNvmeReset, &'static str> {
        let NvmePeerReset { impacted, host, host_id } = request;
        let subsystem = self.subsystem_state();
        if !subsystem.is_own_instance(impacted) {
            return Err("this server has made no such controller");
        }
        let association = subsystem.association(impacted.id);
        let Some(association) = association.filter(|one| one.instance() == Some(*impacted)) else {
            return Ok(OwnNvmeReset(None));
        };
        let is_of_host = association.host == *host && association.host_id == *host_id;
        if !is_of_host || association.kind != ControllerKind::Io {
            return Err("the controller is not one of this host");
        }
        association.end("its host has reset it through another server");
        Ok(OwnNvmeReset(Some(association)))
    }
}

/// The number by which the controllers of a server with this key are known: the upper half of their
/// random numbers.
#[must_use]
pub fn instance_tag(instance_key: &[u8; 32]) -> u32 {
    u32::from_le_bytes(*keyed_hash(instance_key, 0).first_chunk().expect("64 bytes"))
}
