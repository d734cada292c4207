//! The turn of a core: messages, new requests of its front end, and completed requests.

use crate::cores::{CoreMessage, SimCoreInboxes, TaskPurpose};
use crate::dust_model::DustLine;
use crate::environment::lock_environment;
use crate::machine::{Machine, SimCore};
use crate::model::Violation;
use crate::preemption::{self, PausedCores};
use crate::rng::SimRng;
use crate::slow_path;
use crate::tasks::RunningTask;
use crate::trace::TraceEventKind;
use crate::world::MappedDeviceStackWorld;
use std::mem::ManuallyDrop;
use udm_core::{Batch, BioFlags, Nanos, Op};

/// Under heavy load, cores submit in each turn for this many steps, and then after pauses of about
/// this many ns. Without pauses the simulated time would not advance.
const CROWD_STEPS: u64 = 300;
const CROWD_PAUSE: u64 = 10_000_000;

/// Maximum time of a request without faults while other requests are submitted: four times the
/// timeout of the slowest path, for each of four paths.
const CROWD_MAX: Nanos = Nanos::from_millis(60_000);
/// Additional maximum time per fragment, and the shortest fragment of a disk in sectors. If
/// requests wait for tags, each fragment waits separately.
const CROWD_PIECE: Nanos = Nanos::from_millis(2_000);
const PIECE: u64 = 8;

impl SimCore {
    /// Delivers at most `most` messages that have arrived at this core, number `c`. Returns their
    /// number.
    pub(crate) fn deliver(&mut self, inboxes: &SimCoreInboxes, c: usize, most: u64) -> u64 {
        let mut count = 0;
        while count < most {
            let Some((to, what)) = inboxes.take(c) else { break };
            match what {
                CoreMessage::Command(command) => self.state.inboxes().deliver(to, &command),
                CoreMessage::Wake => self.state.inboxes().wake_up(to),
                CoreMessage::Start(make, purpose) => {
                    let owner = self.state.new_owner();
                    self.tasks.push(RunningTask::new(make, to, owner, purpose));
                }
                CoreMessage::Stop(ack) => {
                    if let Some(task) = self.tasks.iter_mut().find(|task| task.topic == to) {
                        task.stop = Some(ack);
                        task.stops = true;
                    }
                }
            }
            count += 1;
        }
        while let Some(target) = self.state.inboxes().take_woken() {
            self.open
                .iter_mut()
                .filter(|open| open.wake_target() == target)
                .for_each(|open| open.has_messages = true);
            self.tasks
                .iter_mut()
                .filter(|task| task.wake_target() == target)
                .for_each(|task| task.has_messages = true);
        }
        count
    }
}

/// Submits the bios in `batch` to lane `i` of `core`, and polls the lane.
pub(crate) fn submit_batch_and_poll_lane(
    core: &mut SimCore,
    i: usize,
    now: Nanos,
    batch: &mut Batch,
    done: &mut Batch,
) -> Result<(), Violation> {
    let open = &mut core.open[i];
    let mut cx = core.state.cx(now);
    cx.set_current_target(Some(open.wake_target()));
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

/// A world, as its machine uses it.
pub trait MachineWorld {
    /// The machine of the world.
    fn machine(&mut self) -> &mut Machine;

    /// Runs one step: a turn of one core, and other actions. A world that its driver steps does not
    /// have it.
    ///
    /// # Errors
    /// The first violation.
    fn step(&mut self) -> Result<(), Violation> {
        Err("this world is not stepped by its machine".into())
    }

    /// Draws requests of core `c` for its lane `i` into the batch.
    fn gather(&mut self, c: usize, i: usize, now: Nanos);

    /// Checks the bios in `done` that lane `i` of core `c` completed.
    fn take_back(&mut self, c: usize, i: usize, now: Nanos) -> Result<(), Violation>;

    /// True if lanes that a task with this purpose opens get no requests of devices.
    fn is_internal_io(purpose: TaskPurpose) -> bool;

    /// Called after the turn of a task.
    fn after_task(&mut self) -> Result<(), Violation> {
        Ok(())
    }

    /// Describes the work that waits, for a person.
    fn waiting(&self) -> String;

    /// Cancels one of two changes that wait for each other. Returns false if there are none.
    fn cancel_deadlocked_change(&mut self) -> bool {
        false
    }

    /// Runs one turn of core `c`.
    fn turn(&mut self, c: usize) -> Result<(), Violation> {
        let machine = self.machine();
        let now = machine.set_turn(Some(c));
        machine.deliver(c, now);
        let working = machine.works(c) && machine.cores[c].next_work <= now;
        let lanes = machine.cores[c].open.len();
        let asked = machine.reads_of;
        let lucky = working.then(|| match asked {
            Some(device) => machine.cores[c].open.iter().position(|open| open.device == device),
            None => Some(machine.front.choose(lanes)),
        });
        let lucky = lucky.flatten();
        for i in 0..lanes {
            if lucky == Some(i) {
                self.gather(c, i, now);
            }
            let machine = self.machine();
            let open = &mut machine.cores[c].open[i];
            if !std::mem::take(&mut open.has_messages) && machine.batch.is_empty() && open.wake > now {
                continue;
            }
            let others = machine.between.as_mut().is_some_and(|chance| chance.one_in(4));
            match machine.between.take_if(|_| others) {
                Some(chance) => self.submit_and_poll_preempted(c, i, now, chance)?,
                None => {
                    submit_batch_and_poll_lane(
                        &mut machine.cores[c],
                        i,
                        now,
                        &mut machine.batch,
                        &mut machine.done,
                    )?;
                    self.take_back(c, i, now)?;
                }
            }
        }
        self.run_tasks(c, now)?;
        let machine = self.machine();
        if working {
            machine.cores[c].next_work = match machine.crowded {
                _ if machine.reading => now + Nanos(1),
                _ if machine.reads_of.is_some() => now + slow_path::PAUSE,
                None => machine.front.next(now),
                Some(since) if machine.step < since + CROWD_STEPS => now,
                Some(_) => now + Nanos(machine.schedule.span(CROWD_PAUSE)),
            };
        }
        let mut env = lock_environment(&machine.env);
        let took = machine.schedule.span(2_000);
        machine.totals.simulated += took;
        env.now = env.now + Nanos(took);
        Ok(())
    }

    /// Visits lane `i` of core `c` with preemption by other cores.
    fn submit_and_poll_preempted(
        &mut self,
        c: usize,
        i: usize,
        now: Nanos,
        chance: SimRng,
    ) -> Result<(), Violation> {
        let machine = self.machine();
        let mut cores = std::mem::take(&mut machine.cores);
        // After a panic the core must not be dropped, because it has bios in flight.
        let mut core = ManuallyDrop::new(cores.remove(c));
        let (env, inboxes) = (machine.env.clone(), machine.inboxes.clone());
        machine.polls += 1;
        lock_environment(&env).current_poll = Some(machine.polls);
        preemption::enable_preemption(PausedCores {
            cores,
            turn: c,
            env,
            inboxes,
            chance,
            acted: 0,
            is_internal_io: Self::is_internal_io,
        });
        let polled = submit_batch_and_poll_lane(&mut core, i, now, &mut machine.batch, &mut machine.done);
        let PausedCores { mut cores, chance, acted, .. } =
            preemption::disable_preemption().expect("preemption was begun");
        cores.insert(c, ManuallyDrop::into_inner(core));
        (machine.cores, machine.between) = (cores, Some(chance));
        machine.totals.between += acted;
        lock_environment(&machine.env).current_poll = None;
        polled?;
        self.take_back(c, i, now)?;
        for other in (0..self.machine().cores.len()).filter(|_| acted > 0) {
            for i in 0..self.machine().cores[other].open.len() {
                let machine = self.machine();
                machine.done.append(&mut machine.cores[other].open[i].completed);
                self.take_back(other, i, now)?;
            }
        }
        Ok(())
    }

    /// Runs the turns of the tasks of core `c`.
    fn run_tasks(&mut self, c: usize, now: Nanos) -> Result<(), Violation> {
        let mut i = 0;
        while i < self.machine().cores[c].tasks.len() {
            let machine = self.machine();
            let SimCore { state, tasks, .. } = &mut machine.cores[c];
            if tasks[i].reason() > now {
                i += 1;
                continue;
            }
            {
                let mut env = lock_environment(&machine.env);
                env.task = Some(tasks[i].purpose).filter(|&p| Self::is_internal_io(p));
                env.task_stops = tasks[i].stops;
            }
            let over = tasks[i].turn(state, now);
            lock_environment(&machine.env).task = None;
            if over {
                tasks.swap_remove(i);
            } else {
                i += 1;
            }
            self.after_task()?;
        }
        Ok(())
    }

    /// Checks that no request starves while new requests are submitted and nothing fails.
    fn check_no_starvation(&mut self) -> Result<(), Violation> {
        let machine = self.machine();
        let (mut from, last) = (lock_environment(&machine.env).now, machine.model.last());
        let most = CROWD_MAX + Nanos(CROWD_PIECE.0 * machine.model.longest().div_ceil(PIECE));
        (machine.resting, machine.crowded) = (false, Some(machine.step));
        machine.say("nothing fails, and requests come as fast as others end");
        while self.machine().model.has_older(last) {
            self.step()?;
            let now = lock_environment(&self.machine().env).now;
            if now.since(from) > most {
                // Requests held by two changes that wait for each other complete when one change is
                // cancelled.
                if self.cancel_deadlocked_change() {
                    from = now;
                    continue;
                }
                return Err(format!("{} waits, nothing fails, and others pass it by", self.waiting()));
            }
        }
        let machine = self.machine();
        (machine.resting, machine.crowded) = (true, None);
        machine.totals.crowds += 1;
        Ok(())
    }
}

impl Machine {
    /// Delivers the messages that have arrived to the lanes of core `c`.
    fn deliver(&mut self, c: usize, now: Nanos) {
        let most = 1 + self.schedule.below(4);
        let count = self.cores[c].deliver(&self.inboxes, c, most);
        if count > 0 {
            let mut env = lock_environment(&self.env);
            env.trace.add(now, c as u16, TraceEventKind::CoreMessage, [count, 0, 0, 0]);
        }
    }
}

impl MachineWorld for MappedDeviceStackWorld {
    fn machine(&mut self) -> &mut Machine {
        &mut self.machine
    }

    fn step(&mut self) -> Result<(), Violation> {
        MappedDeviceStackWorld::step(self)
    }

    fn is_internal_io(purpose: TaskPurpose) -> bool {
        purpose != TaskPurpose::MappedTableLoad
    }

    fn after_task(&mut self) -> Result<(), Violation> {
        self.sync_checked_paths()
    }

    fn waiting(&self) -> String {
        MappedDeviceStackWorld::waiting(self)
    }

    fn cancel_deadlocked_change(&mut self) -> bool {
        MappedDeviceStackWorld::cancel_deadlocked_change(self)
    }

    /// Draws requests of core `c` for its lane `i`.
    fn gather(&mut self, c: usize, i: usize, now: Nanos) {
        let open = &mut self.machine.cores[c].open[i];
        let (front, batch) = (&mut self.machine.front, &mut self.machine.batch);
        match self.machine.reads_of {
            Some(device) => front.draw_reads(batch, slow_path::READS, &self.devices[device]),
            None => front.draw(batch, open, &self.devices[open.device], false),
        }
        let mut env = lock_environment(&self.machine.env);
        for bio in &mut self.machine.batch {
            bio.start();
            bio.started = now;
            bio.owner = open.owner;
            let id = self.machine.model.begin(
                bio,
                open.device,
                self.devices[open.device].ways(),
                self.machine.step,
                now,
            );
            if bio.op.is_write() {
                self.devices[open.device].dust.iter_mut().for_each(|d| d.write(bio.sector.0, bio.sectors.0));
            }
            if self.blueprint.logger == Some(open.device) {
                let sure = self.devices[open.device].maps().len() == 1;
                self.log.begin(id, bio, self.machine.step, sure);
            }
            env.trace.add_submit(now, c as u16, id, open.device, bio);
        }
        open.in_flight += self.machine.batch.len();
    }

    /// Checks the requests that lane `i` of core `c` completed.
    fn take_back(&mut self, c: usize, i: usize, now: Nanos) -> Result<(), Violation> {
        if self.machine.done.is_empty() {
            return Ok(());
        }
        let device = self.machine.cores[c].open[i].device;
        let logger = self.blueprint.logger == Some(device);
        let logging = logger && self.is_logging(device);
        let mut promised = false;
        let held = self.devices[device].is_suspended() && !self.answers_travel(device);
        let lanes = 2 * self.machine.cores.len() as u64 * self.devices.len() as u64;
        self.begin_throttle_record(device, now);
        let open = &mut self.machine.cores[c].open[i];
        let mut env = lock_environment(&self.machine.env);
        let held = held && !env.dead;
        // After an error, the remaining bios stay in the batch, because a bio in flight must not be
        // dropped.
        self.machine.done.reverse();
        while let Some(mut bio) = self.machine.done.pop() {
            let id = self.machine.model.id(&bio);
            env.trace.add(now, c as u16, TraceEventKind::Done, [id, bio.status as u64, 0, 0]);
            bio.finish();
            let impatient = bio.flags.intersects(BioFlags::RAHEAD | BioFlags::NOWAIT);
            if held && (bio.status.is_ok() || !impatient) {
                return Err(format!("request {id} came back while d{} is suspended", open.device));
            }
            if open.in_flight == 0 {
                return Err(format!("d{} returned more requests than it was given", open.device));
            }
            open.in_flight -= 1;
            if self.machine.reads_of.is_some() && !bio.status.is_ok() {
                return Err(format!("request {id} failed, and all that is wrong is that a path is slow"));
            }
            match env.dead {
                true => self.machine.model.abandon(&bio)?,
                false => {
                    self.machine.totals.requests[bio.op as usize] += 1;
                    let throttled = &mut self.devices[device].throttled;
                    if let Some(record) = throttled.as_mut().filter(|_| bio.status.is_ok()) {
                        record.answer(&bio, now, lanes)?;
                    }
                    if logger {
                        promised |= self.log.end(id, &bio, env.ending(), logging);
                    }
                    let start = self.machine.model.start(&bio);
                    let dust = &self.devices[device].dust;
                    let forbids = |d: &DustLine| d.forbids(bio.sector.0, bio.sectors.0, start);
                    if bio.op == Op::Read && bio.status.is_ok() && dust.iter().any(forbids) {
                        return Err(format!("request {id} read a bad block of d{device}"));
                    }
                    self.machine.model.finish(&bio, self.devices[device].ways().1, false, &env)?;
                }
            }
            self.machine.front.put(bio);
        }
        drop(env);
        if promised { self.look_at_log() } else { Ok(()) }
    }
}
