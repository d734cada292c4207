//! A turn of a core: its mail, what its front end asks for, and what came back.

use crate::bad::Dust;
use crate::between::{self, Others};
use crate::chance::Chance;
use crate::cores::{Mail, SimCores};
use crate::env::lock;
use crate::model::Wrong;
use crate::rest::{CROWD_PAUSE, CROWD_STEPS};
use crate::tasks::Running;
use crate::trace::Kind;
use crate::world::{Core, World};
use std::mem::ManuallyDrop;
use udm_core::{Batch, BioFlags, Nanos, Op};

impl Core {
    /// Takes in at most `most` of the letters that have arrived at this core, which is number `c`;
    /// says how many there were.
    pub(crate) fn deliver(&mut self, post: &SimCores, c: usize, most: u64) -> u64 {
        let mut count = 0;
        while count < most {
            let Some((to, what)) = post.take(c) else { break };
            match what {
                Mail::Command(command) => self.state.ports().deliver(to, &command),
                Mail::Ring => self.state.ports().ring(to),
                Mail::Start(make, purpose) => {
                    let owner = self.state.new_owner();
                    self.tasks.push(Running::new(make, to, owner, purpose));
                }
                Mail::Stop(told) => {
                    if let Some(task) = self.tasks.iter_mut().find(|task| task.topic == to) {
                        task.stop = Some(told);
                    }
                }
            }
            count += 1;
        }
        while let Some(visit) = self.state.ports().take_marked() {
            self.open.iter_mut().filter(|open| open.visit() == visit).for_each(|open| open.mail = true);
            self.tasks.iter_mut().filter(|task| task.visit() == visit).for_each(|task| task.mail = true);
        }
        count
    }
}

/// Gives lane `i` of `core` the bios in `batch`, and polls it.
pub(crate) fn visit(
    core: &mut Core,
    i: usize,
    now: Nanos,
    batch: &mut Batch,
    done: &mut Batch,
) -> Result<(), Wrong> {
    let open = &mut core.open[i];
    let mut cx = core.state.cx(now);
    cx.visit(Some(open.visit()));
    if !batch.is_empty() {
        open.lane.submit(batch, &mut cx);
        if !batch.is_empty() {
            return Err(format!("the lane of d{} left {} bios in the batch", open.device, batch.len()));
        }
    }
    open.lane.poll(done, &mut cx);
    open.wake = cx.wake();
    Ok(())
}

impl World {
    /// One turn of core `c`.
    pub(crate) fn turn(&mut self, c: usize) -> Result<(), Wrong> {
        let now = self.set_turn(Some(c));
        self.deliver(c, now);
        let working = self.works(c) && self.cores[c].next_work <= now;
        let lucky = match working {
            true => Some(self.front.choose(self.cores[c].open.len())),
            false => None,
        };
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
        self.run_tasks(c, now)?;
        if working {
            self.cores[c].next_work = match self.crowded {
                None => self.front.next(now),
                Some(since) if self.step < since + CROWD_STEPS => now,
                Some(_) => now + Nanos(self.schedule.span(CROWD_PAUSE)),
            };
        }
        let mut env = lock(&self.env);
        let took = self.schedule.span(2_000);
        self.totals.simulated += took;
        env.now = env.now + Nanos(took);
        Ok(())
    }

    /// Has lane `i` of core `c` visited, and others act in between.
    fn visit_between(&mut self, c: usize, i: usize, now: Nanos, chance: Chance) -> Result<(), Wrong> {
        let mut cores = std::mem::take(&mut self.cores);
        // A core that has panicked is not taken apart: bios are in flight in it.
        let mut core = ManuallyDrop::new(cores.remove(c));
        let (env, post) = (self.env.clone(), self.post.clone());
        self.visits += 1;
        lock(&env).visit = Some(self.visits);
        between::begin(Others { cores, turn: c, env, post, chance, acted: 0 });
        let visited = visit(&mut core, i, now, &mut self.batch, &mut self.done);
        let Others { mut cores, chance, acted, .. } = between::end().expect("what was begun");
        cores.insert(c, ManuallyDrop::into_inner(core));
        (self.cores, self.between) = (cores, Some(chance));
        self.totals.between += acted;
        lock(&self.env).visit = None;
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

    /// Hands the letters that have arrived to the lanes of core `c` that they are for.
    fn deliver(&mut self, c: usize, now: Nanos) {
        let most = 1 + self.schedule.below(4);
        let count = self.cores[c].deliver(&self.post, c, most);
        if count > 0 {
            lock(&self.env).trace.add(now, c as u16, Kind::Mail, [count, 0, 0, 0]);
        }
    }

    /// Hands over every letter that has arrived anywhere.
    pub fn deliver_all(&mut self) {
        self.set_turn(None);
        for (c, core) in self.cores.iter_mut().enumerate() {
            core.deliver(&self.post, c, u64::MAX);
        }
    }

    /// Draws requests of core `c` for its lane `i`.
    fn gather(&mut self, c: usize, i: usize, now: Nanos) {
        let open = &mut self.cores[c].open[i];
        self.front.draw(&mut self.batch, open, &self.devices[open.device]);
        let mut env = lock(&self.env);
        for bio in &mut self.batch {
            bio.start();
            bio.started = now;
            bio.owner = open.owner;
            let id = self.model.begin(bio, open.device, self.devices[open.device].ways(), self.step, now);
            if bio.op.is_write() {
                self.devices[open.device].dust.iter_mut().for_each(|d| d.write(bio.sector.0, bio.sectors.0));
            }
            if self.blueprint.logger == Some(open.device) {
                let sure = self.devices[open.device].maps().len() == 1;
                self.log.begin(id, bio, self.step, sure);
            }
            let op = crate::trace::op_bits(bio.op, bio.flags.bits());
            let span = crate::trace::range(bio.sector.0, bio.sectors.0);
            env.trace.add(now, c as u16, Kind::Submit, [id, open.device as u64, op, span]);
        }
        open.in_flight += self.batch.len();
    }

    /// Checks what lane `i` of core `c` returned.
    fn take_back(&mut self, c: usize, i: usize, now: Nanos) -> Result<(), Wrong> {
        if self.done.is_empty() {
            return Ok(());
        }
        let device = self.cores[c].open[i].device;
        let logger = self.blueprint.logger == Some(device);
        let logging = logger && self.is_logging(device);
        let mut promised = false;
        let open = &mut self.cores[c].open[i];
        let mut env = lock(&self.env);
        let parked = self.devices[open.device].is_suspended() && !env.dead;
        // Those that are left after an error stay where they are: a bio in flight must not be
        // dropped.
        self.done.reverse();
        while let Some(mut bio) = self.done.pop() {
            let id = self.model.id(&bio);
            env.trace.add(now, c as u16, Kind::Done, [id, bio.status as u64, 0, 0]);
            bio.finish();
            let impatient = bio.flags.intersects(BioFlags::RAHEAD | BioFlags::NOWAIT);
            if parked && (bio.status.is_ok() || !impatient) {
                return Err(format!("request {id} came back while d{} is suspended", open.device));
            }
            if open.in_flight == 0 {
                return Err(format!("d{} returned more requests than it was given", open.device));
            }
            open.in_flight -= 1;
            match env.dead {
                true => self.model.abandon(&bio)?,
                false => {
                    self.totals.requests[bio.op as usize] += 1;
                    if logger {
                        promised |= self.log.end(id, &bio, env.ending(), logging);
                    }
                    let start = self.model.start(&bio);
                    let dust = &self.devices[device].dust;
                    let forbids = |d: &Dust| d.forbids(bio.sector.0, bio.sectors.0, start);
                    if bio.op == Op::Read && bio.status.is_ok() && dust.iter().any(forbids) {
                        return Err(format!("request {id} read a bad block of d{device}"));
                    }
                    self.model.finish(&bio, self.devices[device].ways().1, &env)?;
                }
            }
            self.front.put(bio);
        }
        drop(env);
        if promised { self.look_at_log() } else { Ok(()) }
    }
}
