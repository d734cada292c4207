//! What a front end has set up of a ring.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use udm_core::{CoreId, DeviceId};
use udm_wire::vhost_user::VringAddresses;

/// The state of a ring.
#[derive(Default)]
pub(super) struct VringSetup {
    pub(super) size: Option<u16>,
    pub(super) addresses: Option<VringAddresses>,
    /// The number of `SET_VRING_BASE` or `GET_VRING_BASE`.
    pub(super) base: u32,
    /// The front end has set the base after the ring ran: the record does not say it.
    pub(super) is_rebased: bool,
    /// The ring was started in this session.
    pub(super) has_run: bool,
    pub(super) kick: Option<Arc<OwnedFd>>,
    /// A kick descriptor was set, or polling without one.
    pub(super) has_kick: bool,
    pub(super) call: Option<Arc<OwnedFd>>,
    pub(super) is_enabled: bool,
    pub(super) running: Option<RunningVirtQueue>,
}

/// The queue of a ring that was started.
#[derive(Clone, Copy)]
pub(super) struct RunningVirtQueue {
    /// The topic of its messages.
    pub(super) topic: DeviceId,
    pub(super) core: CoreId,
}
