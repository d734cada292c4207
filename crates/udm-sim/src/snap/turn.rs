//! A turn of a core: its mail, what its front end asks for, and what came back.

use super::model::Causes;
use super::world::World;
use crate::between::{self, Others};
use crate::chance::Chance;
use crate::cores::Purpose;
use crate::env::lock;
use crate::model::Wrong;
use crate::plan::Class;
use crate::trace::{Kind, op_bits, range};
use crate::turn::visit;
use crate::world::Core;
use std::mem::ManuallyDrop;
use udm_core::{Bio, BioFlags, Buf, Nanos, Op, Sector, Sectors};

impl World {
    /// One turn of core `c`.
    pub(super) fn turn(&mut self, c: usize) -> Result<(), Wrong> {
        let now = self.set_turn(Some(c));
        let most = 1 + self.schedule.below(4);
        let post = self.post.clone();
        let count = self.cores[c].deliver(&post, c, most);
        if count > 0 {
            lock(&self.env).trace.add(now, c as u16, Kind::Mail, [count, 0, 0, 0]);
        }
        let working = self.works(c) && self.cores[c].next_work <= now && !self.cores[c].open.is_empty();
        let lucky = working.then(|| self.work.below(self.cores[c].open.len() as u64) as usize);
        for i in 0..self.cores[c].open.len() {
            if lucky == Some(i) {
                self.gather(c, i, now);
            }
            let open = &mut self.cores[c].open[i];
            if !std::mem::take(&mut open.mail) && self.batch.is_empty() && open.wake > now {
                continue;
            }
            let others = self.between.as_mut().is_some_and(|chance| chance.one_in(4));
            match self.between.take_if(|_| others) {
                Some(chance) => self.visit_between(c, i, now, chance)?,
                None => {
                    visit(&mut self.cores[c], i, now, &mut self.batch, &mut self.done)?;
                    self.take_back(c, i, now)?;
                }
            }
        }
        let mut i = 0;
        while i < self.cores[c].tasks.len() {
            let Core { state, tasks, .. } = &mut self.cores[c];
            if tasks[i].reason() > now {
                i += 1;
                continue;
            }
            lock(&self.env).task = Some(tasks[i].purpose).filter(|&p| p == Purpose::Loads);
            let over = tasks[i].turn(state, now);
            lock(&self.env).task = None;
            if over {
                tasks.swap_remove(i);
            } else {
                i += 1;
            }
        }
        if self.works(c) && self.cores[c].next_work <= now {
            let pause = if self.resting { 1_000 } else { self.pause };
            self.cores[c].next_work = now + Nanos(1 + self.work.span(pause));
        }
        let took = self.schedule.span(2_000);
        let mut env = lock(&self.env);
        env.now = env.now + Nanos(took);
        Ok(())
    }

    fn visit_between(&mut self, c: usize, i: usize, now: Nanos, chance: Chance) -> Result<(), Wrong> {
        let mut cores = std::mem::take(&mut self.cores);
        let mut core = ManuallyDrop::new(cores.remove(c));
        self.visits += 1;
        between::begin(Others {
            cores,
            turn: c,
            env: self.env.clone(),
            post: self.post.clone(),
            chance,
            acted: 0,
        });
        let visited = visit(&mut core, i, now, &mut self.batch, &mut self.done);
        let Others { mut cores, chance, acted, .. } = between::end().expect("what was begun");
        cores.insert(c, ManuallyDrop::into_inner(core));
        (self.cores, self.between) = (cores, Some(chance));
        self.counts.between += acted;
        visited?;
        self.take_back(c, i, now)?;
        for other in (0..self.cores.len()).filter(|_| acted > 0) {
            for i in 0..self.cores[other].open.len() {
                self.done.append(&mut self.cores[other].open[i].home);
                self.take_back(other, i, now)?;
            }
        }
        Ok(())
    }

    /// Draws requests of core `c` for its lane `i`.
    fn gather(&mut self, c: usize, i: usize, now: Nanos) {
        let (side, in_flight) = (self.cores[c].open[i].device, self.cores[c].open[i].in_flight);
        let room = self.depth.saturating_sub(in_flight) as u64;
        for _ in 0..(1 + self.work.below(4)).min(room) {
            let Some(mut bio) = self.request(side) else { break };
            bio.start();
            (bio.started, bio.owner) = (now, self.cores[c].open[i].owner);
            let id = self.model.begin(&mut bio, side, self.step);
            let op = op_bits(bio.op, bio.flags.bits());
            let span = range(bio.sector.0, bio.sectors.0);
            lock(&self.env).trace.add(now, c as u16, Kind::Submit, [id, side as u64, op, span]);
            self.batch.push(bio);
        }
        self.cores[c].open[i].in_flight += self.batch.len();
    }

    fn request(&mut self, side: usize) -> Option<Box<Bio>> {
        let (size, chance) = (self.sides[side].sectors, &mut self.work);
        let data = |len: u64| Buf::zeroed(len as usize * 512).into();
        let at = self.sides[side].check;
        if at < size {
            let len = (size - at).min(16);
            self.sides[side].check += len;
            return Some(Bio::read(Sector(at), Sectors(len), data(len)));
        }
        if self.resting || !self.sides[side].open {
            return None;
        }
        if !self.plan.without.has(Class::Flush) && chance.one_in(16) {
            let mut flush = Bio::new();
            flush.op = Op::Flush;
            return Some(flush);
        }
        let mut len = match chance.below(16) {
            0 if !self.plan.without.has(Class::Long) => chance.between(1, size),
            1..4 => chance.between(1, 32.min(size)),
            4..10 => chance.pick(&[1, 2, 4, 8]),
            _ => 1,
        };
        let mut at = if chance.one_in(2) { chance.below(size) } else { chance.below(24.min(size)) };
        if chance.one_in(3) {
            at -= at % len;
        }
        len = len.min(size - at);
        let read = chance.below(100) < self.reads;
        let mut bio = match read {
            true => Bio::read(Sector(at), Sectors(len), data(len)),
            false => Bio::write(Sector(at), Sectors(len), data(len)),
        };
        if !read && !self.plan.without.has(Class::Flush) {
            match chance.below(16) {
                0 => bio.flags |= BioFlags::FUA,
                1 => bio.flags |= BioFlags::PREFLUSH,
                _ => {}
            }
        }
        Some(bio)
    }

    /// Checks what lane `i` of core `c` returned.
    fn take_back(&mut self, c: usize, i: usize, now: Nanos) -> Result<(), Wrong> {
        if self.done.is_empty() {
            return Ok(());
        }
        let side = self.cores[c].open[i].device;
        let causes = self.causes(side);
        let mut env = lock(&self.env);
        self.done.reverse();
        while let Some(mut bio) = self.done.pop() {
            bio.finish();
            self.cores[c].open[i].in_flight -= 1;
            let id = self.model.id(&bio);
            env.trace.add(now, c as u16, Kind::Done, [id, bio.status as u64, 0, 0]);
            if env.dead {
                self.model.abandon(&bio);
            } else {
                self.model.finish(&bio, &causes, &env).map_err(|wrong| format!("core {c}: {wrong}"))?;
            }
        }
        Ok(())
    }

    /// What errors of `side` may come of.
    pub(super) fn causes(&self, side: usize) -> Causes {
        let origin = self.sides[side].origin;
        if origin == side {
            let disks = std::iter::once(side).chain(self.sides[side].merging).collect();
            // A merge that failed leaves chunks that nobody may write.
            let lost = self.sides[side].merging.is_some() && self.is_faulty(side);
            return Causes { disks, lost };
        }
        Causes { disks: vec![origin, side], lost: self.sides[side].small || self.is_faulty(side) }
    }

    /// A disk that `side` needs has failed something since its instant.
    pub(super) fn is_faulty(&self, side: usize) -> bool {
        let store = self.sides[side].merging.unwrap_or(side);
        let causes = Causes { disks: vec![self.sides[side].origin, store], lost: false };
        causes.since(self.sides[store].since, &lock(&self.env))
    }
}
