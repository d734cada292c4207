//! The end of a connection: which requests fail, and which wait.

use super::NvmeLane;
use crate::nvme::remote_namespace::AssociationState;
use crate::stream::{BACK_OFF, DisconnectKind, DisconnectReason};
use std::sync::atomic::Ordering::Relaxed;
use udm_core::{Cx, Nanos, Status, UnansweredRequestState};
use udm_wire::uri::TimeSpan;

/// Wait before a queue that the controller refused is connected again, at first. The controller may
/// still have the queue of a lane that was closed just now.
pub(super) const REFUSED_BACK_OFF: Nanos = Nanos::from_millis(2);

/// How long requests wait for a queue that the controller refuses.
const REFUSED_MAX: Nanos = Nanos(10_000_000_000);

impl NvmeLane {
    /// Handles the loss of the connection. Its association ends, except if the controller refused
    /// the queue.
    #[cold]
    pub(super) fn handle_loss(&mut self, loss: &DisconnectReason, cx: &mut Cx<'_>) {
        if loss.end == DisconnectKind::ShuttingDown {
            return self.handle_refusal(loss, cx);
        }
        let number = match &self.state {
            AssociationState::Live(association) => Some(association.number),
            AssociationState::Connecting | AssociationState::Down => None,
        };
        let own = self.connection.as_ref().map(|connection| connection.association.number).or(number);
        let status = if loss.end == DisconnectKind::TimedOut { Status::Timeout } else { Status::Transport };
        self.fail_requests(status, cx);
        if let Some(own) = own {
            self.namespace.end_association(own, &loss.why);
        }
    }

    /// Handles a refusal of the queue: requests wait for a while, and the association goes on.
    #[cold]
    fn handle_refusal(&mut self, loss: &DisconnectReason, cx: &mut Cx<'_>) {
        let now = cx.now();
        let since = *self.refused_since.get_or_insert(now);
        self.next_try = now + self.back_off;
        self.back_off = (self.back_off + self.back_off).min(BACK_OFF);
        if now.since(since) < REFUSED_MAX {
            self.connection = None;
            return cx.wake_at(self.next_try);
        }
        self.fail_requests(Status::Transport, cx);
        self.namespace.mark_down(&loss.why);
    }

    pub(super) fn forget_refusals(&mut self) {
        (self.next_try, self.back_off, self.refused_since) = (Nanos(0), REFUSED_BACK_OFF, None);
    }

    pub(super) fn fail_waiting(&mut self, status: Status) {
        for mut bio in self.waiting.drain(..) {
            bio.end_with(status);
            self.ready.push(bio);
        }
    }

    /// Drops the connection. All requests fail, except writes that the controller may still
    /// execute.
    #[cold]
    pub(super) fn fail_requests(&mut self, status: Status, cx: &mut Cx<'_>) {
        let now = cx.now();
        self.fail_waiting(status);
        let mut slots = std::mem::take(&mut self.slots);
        for key in self.send_queue.take_unsent() {
            let mut bio = slots.remove(key).bio;
            bio.end_with(status);
            self.ready.push(bio);
        }
        for (_, key) in self.delayed.drain(..) {
            let mut bio = slots.remove(key).bio;
            bio.end_with(status);
            self.ready.push(bio);
        }
        let mut held = Vec::new();
        for mut slot in slots.drain() {
            if slot.may_still_apply() {
                held.push(slot.bio);
                continue;
            }
            slot.bio.end_with(status);
            self.ready.push(slot.bio);
        }
        if let Some(connection) = self.connection.take() {
            // Discards unsent data: it could arrive after the wait has ended.
            self.namespace.sockets.reset(connection.stream.socket());
            if !held.is_empty() {
                let association = &connection.association;
                let heard = Nanos(association.last_heard.load(Relaxed)).max(self.last_reply_at);
                let until = association.fence.ends_at(heard, now);
                let (uri, wait) = (self.namespace.uri.plain(), until.0.saturating_sub(now.0));
                let wait = TimeSpan(Nanos::from_millis(wait.div_ceil(1_000_000)));
                tracing::warn!("{uri}: {} unanswered writes wait for {wait}", held.len());
                self.held.add(held, until, &connection.association, &self.namespace);
            }
        }
        // The caller may have polled already.
        cx.wake_now();
    }

    /// Abandons the connection if its oldest request is overdue. The check is rare: later requests
    /// are due later, and every received byte moves the time of all.
    pub(super) fn look_for_silence(&mut self, cx: &mut Cx<'_>) {
        if self.deadline_timer.is_none() || self.slots.is_empty() {
            return;
        }
        if cx.now() < self.next_check {
            return cx.wake_at(self.next_check);
        }
        let Some(oldest) = self.slots.iter().map(|(_, slot)| slot.since).min() else { return };
        let (now, Some(deadline_timer)) = (cx.now(), &mut self.deadline_timer) else { return };
        let why = match deadline_timer.check(oldest, self.last_reply_at, now) {
            UnansweredRequestState::Pending(due) => {
                self.next_check = due.max(now + Nanos(1));
                return cx.wake_at(self.next_check);
            }
            UnansweredRequestState::Silent(time) => format!("no answer for {}", TimeSpan(time)),
            UnansweredRequestState::Starved(time) => {
                format!("others are answered, and one request is not for {}", TimeSpan(time))
            }
        };
        self.handle_loss(&DisconnectReason::new(DisconnectKind::TimedOut, why), cx);
    }
}
