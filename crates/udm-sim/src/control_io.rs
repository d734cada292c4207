//! Control-side I/O in a world: what a table's constructors read and write when it is loaded goes
//! through a task on one of the cores, as it does in a server, and the world takes its steps
//! meanwhile.

use crate::cores::SimCores;
use crate::env::{SharedEnv, lock};
use crate::model::Wrong;
use crate::world::World;
use std::cell::{Cell, RefCell};
use std::sync::{Arc, Mutex, PoisonError};
use udm_core::control_io::{Answer, Started};
use udm_core::{Batch, ControlIo, Device, Errand, Nanos, OpenError, errno};

/// How long a run may take, on the world's clock.
const PATIENCE: Nanos = Nanos::from_millis(30_000);

/// And in steps.
const STEPS_MAX: u64 = 20_000;

/// A world that goes on while a table is loaded.
pub trait GoesOn {
    /// Its outside.
    fn env(&self) -> &SharedEnv;
    /// Its inboxes.
    fn post(&self) -> &Arc<SimCores>;
    /// Steps taken.
    fn steps(&self) -> u64;
    /// A step.
    ///
    /// # Errors
    /// The first thing that is wrong.
    fn step(&mut self) -> Result<(), Wrong>;
    /// Says that a table is being loaded, or no longer; what was said before.
    fn set_loading(&mut self, loading: bool) -> bool;
    /// It is the control side's turn again.
    fn back(&mut self);
}

impl GoesOn for World {
    fn env(&self) -> &SharedEnv {
        &self.env
    }

    fn post(&self) -> &Arc<SimCores> {
        &self.post
    }

    fn steps(&self) -> u64 {
        self.step
    }

    fn step(&mut self) -> Result<(), Wrong> {
        World::step(self)
    }

    fn set_loading(&mut self, loading: bool) -> bool {
        std::mem::replace(&mut self.loading, loading)
    }

    fn back(&mut self) {
        self.set_turn(None);
    }
}

/// The control side of `world`, while it loads a table.
pub struct SimIo<'a, W = World> {
    world: RefCell<&'a mut W>,
    wrong: RefCell<Option<Wrong>>,
    failed: Cell<bool>,
}

impl<'a, W: GoesOn> SimIo<'a, W> {
    /// On the cores of `world`.
    #[must_use]
    pub fn new(world: &'a mut W) -> SimIo<'a, W> {
        SimIo { world: RefCell::new(world), wrong: RefCell::default(), failed: Cell::new(false) }
    }

    /// What the world found wrong meanwhile.
    ///
    /// # Errors
    /// That.
    pub fn verdict(&self) -> Result<(), Wrong> {
        self.wrong.take().map_or(Ok(()), Err)
    }

    /// Something failed, as disks do: a table that is refused then is no wonder.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.failed.get()
    }

    fn wait(&self, told: &Mutex<Option<Answer>>) -> Answer {
        let mut world = self.world.borrow_mut();
        let (from, first) = (lock(world.env()).now, world.steps());
        let was = world.set_loading(true);
        let answer = loop {
            if let Some(answer) = told.lock().unwrap_or_else(PoisonError::into_inner).take() {
                break answer;
            }
            let now = lock(world.env()).now;
            if now.since(from) > PATIENCE || world.steps() - first > STEPS_MAX {
                break Err(Errand::no_answer());
            }
            if let Err(wrong) = world.step() {
                *self.wrong.borrow_mut() = Some(wrong);
                break Err(OpenError::new(errno::EIO, "the world is wrong"));
            }
        };
        world.set_loading(was);
        world.back();
        answer
    }
}

impl<W: GoesOn> ControlIo for SimIo<'_, W> {
    fn run(&self, device: &Arc<dyn Device>, bios: Batch) -> Answer {
        let told = Arc::new(Mutex::new(None));
        let tell = Arc::clone(&told);
        let tell = move |answer| *tell.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer);
        let post: Arc<SimCores> = Arc::clone(self.world.borrow().post());
        let started = Started::new(device, bios, tell, |task| post.start_io(&**device, task));
        let answer = match &started {
            Ok(_) => self.wait(&told),
            Err(error) => Err(error.clone()),
        };
        let failed = answer.as_ref().map_or(true, |bios| bios.iter().any(|bio| !bio.status.is_ok()));
        self.failed.set(self.failed.get() | failed);
        answer
    }
}
