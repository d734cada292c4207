//! What comes back from the paths of a watched lane, and what is late.

use super::Watch;
use super::judge::LOST_MAX;
use super::slots::{Read, Role, Sent, Slot, What, pour};
use crate::multipath::journal::Why;
use crate::multipath::served::Watched;
use udm_core::bugs::{self, Bug};
use udm_core::{Bio, Cx, Nanos, Op, Overdue, Status};

/// Bytes of answers that a poll copies even where others have used up the core's budget of work.
const FLOOR: u64 = 256 << 10;

impl Watch {
    /// Polls the lane of a path and sorts out what it brings, as far as the turn's work goes.
    pub(super) fn take_in(&mut self, path: usize, now: Nanos, cx: &mut Cx<'_>) {
        let mut came = std::mem::take(&mut self.came);
        self.paths[path].lane.poll(&mut came, cx);
        let refused = &mut self.groups[self.paths[path].group].refused;
        if !came.is_empty() && std::mem::take(refused) {
            // Of a path that may have had its poll in this turn.
            cx.wake_now();
        }
        self.paths[path].arrived.extend(came.drain(..));
        self.came = came;
        let mut floor = FLOOR;
        while let Some(bio) = self.paths[path].arrived.pop_front() {
            let cost = if bio.op == Op::Read { bio.sectors.bytes() } else { 0 };
            if cx.work_left() < cost && floor < cost && floor < FLOOR {
                self.paths[path].arrived.push_front(bio);
                cx.wake_now();
                break;
            }
            cx.set_work_left(cx.work_left().saturating_sub(cost));
            floor = floor.saturating_sub(cost);
            self.arrived(path, bio, now, cx);
        }
    }

    /// `bio` is off `path`: what it was.
    pub(super) fn leave(&mut self, path: usize, bio: &Bio) -> Slot {
        let slot = self.slots.remove(bio.cookie as usize);
        debug_assert_eq!(slot.path, path, "a bio came back from another path");
        self.paths[path].in_flight -= 1;
        slot
    }

    fn arrived(&mut self, path: usize, mut bio: Box<Bio>, now: Nanos, cx: &mut Cx<'_>) {
        let slot = self.leave(path, &bio);
        self.paths[path].heard = now;
        let took = (bio.op == Op::Read && bio.status.is_ok()).then(|| now.since(slot.at));
        if let Some(took) = took {
            if let Some(all) = &self.row[path].latency {
                all.add(took);
            }
            self.paths[path].window.add(took);
            let group = self.paths[path].group;
            self.groups[group].count(slot.what, took);
        }
        match slot.what {
            What::Itself { cookie, late } => {
                bio.cookie = cookie;
                self.heard_of(path, late);
                self.paths[path].home.push(bio);
            }
            What::Copy { read, role } => {
                bio.finish();
                self.is_home(path, read, role);
                match read {
                    Some(read) => self.answered(read, role, &bio, now, cx),
                    None if role == Role::Trial => self.tried(slot.serial, took, now),
                    None if bugs::on(Bug::LateAnswerBelieved) => self.believe(path, &bio, now, cx),
                    None => Watched::add(&self.counts(path).late, 1),
                }
                self.copies.give_back(bio);
            }
        }
    }

    /// What comes late passes for the answer to another read: for [`Bug::LateAnswerBelieved`].
    #[cold]
    fn believe(&mut self, path: usize, copy: &Bio, now: Nanos, cx: &mut Cx<'_>) {
        let other = self.reads.iter().find(|(_, read)| read.leg == path).map(|(key, read)| (key, read.own));
        if let Some((read, own)) = other {
            self.let_go(own);
            self.answered(read, Role::Own, copy, now, cx);
        }
    }

    /// A copy has left `path`.
    pub(super) fn is_home(&mut self, path: usize, read: Option<usize>, role: Role) {
        if read.is_none() || role != Role::Own {
            self.guests -= 1;
            self.paths[path].guests -= 1;
        }
    }

    /// What had been told as late has come back.
    pub(super) fn heard_of(&self, path: usize, late: bool) {
        if late {
            Watched::take(&self.counts(path).waiting, 1);
        }
    }

    /// The first answer ends a read; but an error of a hedge says nothing, since the path that was
    /// chosen has it still.
    fn answered(&mut self, read: usize, role: Role, copy: &Bio, now: Nanos, cx: &mut Cx<'_>) {
        let won = role == Role::Hedge;
        if won && !copy.status.is_ok() {
            return self.hedge_failed(read, now);
        }
        let Read { mut bio, leg, .. } = self.end_read(read, Some(won), now);
        if copy.status.is_ok() {
            pour(&copy.data, &mut bio.data);
        }
        bio.end_with(copy.status);
        self.paths[leg].home.push(bio);
        if won {
            // It may have had its poll in this turn.
            cx.wake_now();
            self.paths[leg].standing.lost += 1;
            if self.paths[leg].standing.lost >= LOST_MAX {
                self.put_out(leg, now);
            }
        } else {
            self.paths[leg].standing.lost = 0;
        }
    }

    /// Nobody waits for `read` any more. If it was answered, `won` says whether by its hedge.
    pub(super) fn end_read(&mut self, read: usize, won: Option<bool>, now: Nanos) -> Read {
        let ended = self.reads.remove(read);
        let Read { leg, own, hedge, .. } = ended;
        match won {
            Some(true) => {
                if !bugs::on(Bug::LoserTaken) {
                    self.let_go(own);
                }
                Watched::add(&self.counts(leg).won, 1);
            }
            Some(false) => {}
            // Given up: whether its own copy is still there, its slot says.
            None => self.let_go(own),
        }
        if let Some(hedge) = hedge {
            if won != Some(true) {
                self.let_go(hedge);
                Watched::add(&self.counts(leg).wasted, 1);
            }
            let group = self.paths[leg].group;
            self.groups[group].budget.ended(won == Some(true), now);
        }
        ended
    }

    /// The answer of a copy is waited for no longer.
    fn let_go(&mut self, slot: usize) {
        let Some(Slot { path, what: What::Copy { read, role }, .. }) = self.slots.get_mut(slot) else {
            return;
        };
        if read.take().is_some() && *role == Role::Own {
            self.guests += 1;
            self.paths[*path].guests += 1;
        }
    }

    /// A hedge did not do what it was for.
    pub(super) fn hedge_failed(&mut self, read: usize, now: Nanos) {
        let Read { leg, hedge, .. } = &mut self.reads[read];
        let (leg, hedge) = (*leg, hedge.take());
        if let Some(hedge) = hedge {
            self.let_go(hedge);
        }
        Watched::add(&self.counts(leg).wasted, 1);
        let group = self.paths[leg].group;
        self.groups[group].budget.ended(false, now);
        // It may have another one, elsewhere.
        let own = self.reads[read].own;
        let Slot { at, serial, .. } = self.slots[own];
        let path = &mut self.paths[leg];
        path.refused.push(Sent { at, slot: own, serial }, path.in_flight, &self.slots);
    }

    /// What on `path` is past its deadline.
    pub(super) fn see_deadlines(&mut self, path: usize, now: Nanos, cx: &mut Cx<'_>) {
        while let Some(sent) = self.paths[path].undue.first(&self.slots) {
            let heard = self.paths[path].heard;
            let Some(patience) = &mut self.paths[path].patience else { return };
            let how = patience.look(sent.at, heard, now);
            if let Overdue::No(due) = how {
                cx.wake_at(due);
                break;
            }
            self.paths[path].undue.pop();
            self.is_silent(path, how);
            self.is_late(path, sent.slot, now);
        }
    }

    /// Fails a path for its silence, or for a request that it has kept.
    fn is_silent(&self, path: usize, how: Overdue) {
        if self.shared.path(path).failed {
            return;
        }
        let stays = |slot: &Slot| slot.path == path && matches!(slot.what, What::Itself { .. });
        let waiting = self.slots.iter().filter(|(_, slot)| stays(slot)).count();
        if self.shared.fail(path, &Why::Silent { how, waiting }) {
            self.shared.journal.event();
        }
    }

    /// The deadline of what is in `slot` is over.
    fn is_late(&mut self, path: usize, slot: usize, now: Nanos) {
        match &mut self.slots[slot].what {
            What::Itself { late, .. } => {
                *late = true;
                Watched::add(&self.counts(path).waiting, 1);
            }
            What::Copy { read: Some(read), role: Role::Own } => {
                let read = *read;
                let Read { mut bio, leg, .. } = self.end_read(read, None, now);
                Watched::add(&self.counts(leg).given_up, 1);
                bio.end_with(Status::Timeout);
                self.paths[leg].home.push(bio);
            }
            What::Copy { read: Some(read), .. } => {
                let read = *read;
                self.hedge_failed(read, now);
            }
            What::Copy { read: None, role } => {
                if *role == Role::Trial {
                    let serial = self.slots[slot].serial;
                    self.slots[slot].what = What::Copy { read: None, role: Role::Hedge };
                    self.tried(serial, None, now);
                }
            }
        }
    }
}
