//! Writes of a lost association that its controller may still execute.

use super::remote_namespace::{Association, RemoteNamespace};
use std::sync::Arc;
use udm_core::{Batch, Cx, Nanos, Status};

/// Unanswered writes of one connection.
struct LostWrites {
    bios: Batch,
    /// Time at which the controller must have ended them.
    until: Nanos,
    association: Arc<Association>,
}

impl LostWrites {
    /// Returns true if the controller can execute none of them any more.
    fn are_over(&self, now: Nanos) -> bool {
        self.until <= now || self.association.is_fenced()
    }
}

/// The held writes of a lane.
#[derive(Default)]
pub(super) struct HeldWrites {
    lost: Vec<LostWrites>,
}

impl HeldWrites {
    /// Returns true if there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.lost.is_empty()
    }

    /// Number of writes.
    pub(super) fn len(&self) -> usize {
        self.lost.iter().map(|lost| lost.bios.len()).sum()
    }

    /// Holds `bios` of `association` until `until`, or until another controller has reset its
    /// controller.
    pub(super) fn add(
        &mut self,
        bios: Batch,
        until: Nanos,
        association: &Arc<Association>,
        namespace: &RemoteNamespace,
    ) {
        namespace.add_held_writes(bios.len());
        self.lost.push(LostWrites { bios, until, association: Arc::clone(association) });
        namespace.resets.request(association, namespace);
    }

    /// Fails the writes that the controller can no longer execute, so that they can be sent
    /// elsewhere. With `works`, the lane has a connection again, and they are retried without a
    /// path error.
    pub(super) fn release(
        &mut self,
        works: bool,
        namespace: &RemoteNamespace,
        ready: &mut Batch,
        cx: &mut Cx<'_>,
    ) {
        let now = cx.now();
        let status = if works { Status::Requeue } else { Status::Transport };
        for lost in self.lost.extract_if(.., |lost| lost.are_over(now)) {
            namespace.remove_held_writes(lost.bios.len());
            namespace.counters.count_released_writes(lost.bios.len(), lost.association.is_fenced());
            tracing::warn!("{}: {} writes that waited fail over", namespace.uri.plain(), lost.bios.len());
            for mut bio in lost.bios {
                bio.end_with(status);
                ready.push(bio);
            }
        }
        if let Some(next) = self.lost.iter().map(|lost| lost.until).min() {
            cx.wake_at(next);
        }
    }
}
