//! Features (*Base* 5.27) and asynchronous events (*Base* 5.2).

use bitflags::bitflags;

/// A feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeatureId {
    /// The volatile write cache.
    VolatileWriteCache,
    /// Number of I/O queues.
    NumberOfQueues,
    /// The asynchronous events that the controller reports.
    AsyncEventConfiguration,
    /// The keep-alive timer.
    KeepAliveTimer,
    /// The identifier of the host.
    HostIdentifier,
    /// A feature that udm does not have.
    Other(u8),
}

impl FeatureId {
    /// The feature of dword 10 of a Set Features or Get Features command.
    #[must_use]
    pub const fn from_dword(dword: u32) -> FeatureId {
        match dword as u8 {
            0x06 => FeatureId::VolatileWriteCache,
            0x07 => FeatureId::NumberOfQueues,
            0x0b => FeatureId::AsyncEventConfiguration,
            0x0f => FeatureId::KeepAliveTimer,
            0x81 => FeatureId::HostIdentifier,
            other => FeatureId::Other(other),
        }
    }
}

/// Numbers of I/O queues, asked for or allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueCounts {
    /// Submission queues, at least 1.
    pub submission: u32,
    /// Completion queues, at least 1.
    pub completion: u32,
}

impl QueueCounts {
    /// The numbers in a dword.
    #[must_use]
    pub const fn decode(dword: u32) -> QueueCounts {
        QueueCounts { submission: (dword & 0xffff) + 1, completion: (dword >> 16) + 1 }
    }

    /// The result of both Set Features and Get Features with `queues` queues of each kind.
    ///
    /// # Panics
    /// If `queues` is 0.
    #[must_use]
    pub const fn encode(queues: u16) -> u32 {
        let number = (queues - 1) as u32;
        number | number << 16
    }
}

bitflags! {
    /// Events that a host wants to be told.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct AsyncEventMask: u32 {
        /// The list or the size of namespaces has changed.
        const NAMESPACE_CHANGED = 1 << 8;
        /// The state of an ANA group has changed.
        const ANA_CHANGED = 1 << 11;
        /// A reset of another controller has ended.
        const CROSS_CONTROLLER_RESET_COMPLETED = 1 << 20;
        /// The discovery log has changed.
        const DISCOVERY_CHANGED = 1 << 31;
        const _ = !0;
    }
}

/// An asynchronous event of type *notice*.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AsyncEvent {
    /// The list or the size of namespaces has changed.
    NamespaceChanged,
    /// The state of an ANA group has changed.
    AnaChanged,
    /// A reset of another controller has ended.
    CrossControllerResetCompleted,
    /// The discovery log has changed.
    DiscoveryChanged,
}

impl AsyncEvent {
    /// Every event.
    pub const ALL: [AsyncEvent; 4] = [
        AsyncEvent::CrossControllerResetCompleted,
        AsyncEvent::NamespaceChanged,
        AsyncEvent::AnaChanged,
        AsyncEvent::DiscoveryChanged,
    ];

    /// The bit of the host's mask.
    #[must_use]
    pub const fn mask(self) -> AsyncEventMask {
        match self {
            AsyncEvent::NamespaceChanged => AsyncEventMask::NAMESPACE_CHANGED,
            AsyncEvent::AnaChanged => AsyncEventMask::ANA_CHANGED,
            AsyncEvent::CrossControllerResetCompleted => AsyncEventMask::CROSS_CONTROLLER_RESET_COMPLETED,
            AsyncEvent::DiscoveryChanged => AsyncEventMask::DISCOVERY_CHANGED,
        }
    }

    /// The log page that explains the event; reading it makes the controller report it again.
    #[must_use]
    pub const fn log_page(self) -> u8 {
        match self {
            AsyncEvent::NamespaceChanged => 0x04,
            AsyncEvent::AnaChanged => 0x0c,
            AsyncEvent::CrossControllerResetCompleted => 0x1e,
            AsyncEvent::DiscoveryChanged => 0x70,
        }
    }

    /// The result of the completion.
    #[must_use]
    pub const fn result(self) -> u32 {
        let information = match self {
            AsyncEvent::NamespaceChanged => 0x00,
            AsyncEvent::AnaChanged => 0x03,
            AsyncEvent::CrossControllerResetCompleted => 0xf4,
            AsyncEvent::DiscoveryChanged => 0xf0,
        };
        0b010 | information << 8 | (self.log_page() as u32) << 16
    }
}
