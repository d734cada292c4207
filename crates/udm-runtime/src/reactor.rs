//! The threads that serve front ends.
//!
//! A turn: letters → gather from the front ends that have something → submit and poll the lanes → complete to the front ends → the ring. A turn
//! in which nothing moved ends in `park`. What is idle is not visited: a front end is gathered when one of its ring operations finished, a lane is polled
//! while something is in flight on it.

use crate::cluster::{Cluster, Mail};
use crate::devices::Devices;
use crate::front_end::{FRONT, FrontCx, FrontEnd, Locals};
use crate::local::{CoreOptions, LocalCore};
use crate::ring::Client;
use slab::Slab;
use std::any::Any;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use udm_core::{Batch, CoreId, Cx, DeviceId, Nanos, OwnerId};

/// How the cores of a [`Runtime`] behave.
#[derive(Clone, Debug)]
pub struct RuntimeOptions {
    /// One entry a core: the CPU that it stays on, or `None`.
    pub cpus: Vec<Option<usize>>,
    /// Never sleep.
    pub poll: bool,
    /// The longest spin before sleeping.
    pub spin_max: Duration,
}

/// Core threads that serve front ends.
pub struct Runtime {
    cluster: Arc<Cluster>,
    threads: Vec<JoinHandle<()>>,
}

/// How long a front end may take to finish after it was told to stop.
const STOP_MAX: Nanos = Nanos(10_000_000_000);

impl Runtime {
    /// Starts the threads.
    ///
    /// # Errors
    /// When a core can't be had (no io_uring, no such CPU); none is left running then.
    pub fn start(options: &RuntimeOptions) -> io::Result<Runtime> {
        let cluster = Cluster::new(options.cpus.len())?;
        let mut runtime = Runtime { cluster: cluster.clone(), threads: Vec::new() };
        for (i, cpu) in options.cpus.iter().copied().enumerate() {
            let id = CoreId(i as u16);
            let core =
                CoreOptions { cpu, poll: options.poll, spin_max: options.spin_max, ring_optional: false };
            let (tx, rx) = std::sync::mpsc::sync_channel(1);
            let cluster = cluster.clone();
            let thread = std::thread::Builder::new().name(format!("udm-core{i}")).spawn(move || {
                match LocalCore::attach(&cluster, id, core) {
                    Ok(core) => {
                        let _ = tx.send(Ok(()));
                        let _abort = AbortOnPanic;
                        Reactor::new(core).run();
                    }
                    Err(e) => {
                        let _ = tx.send(Err(e));
                    }
                }
            })?;
            runtime.threads.push(thread);
            if let Err(e) = rx.recv().unwrap_or_else(|_| Err(io::Error::other("the core's thread ended"))) {
                runtime.stop();
                return Err(e);
            }
        }
        Ok(runtime)
    }

    /// The cores, for those that send them commands.
    #[must_use]
    pub fn cluster(&self) -> &Arc<Cluster> {
        &self.cluster
    }

    /// Gives `core` a front end, made by `make` on the core itself.
    ///
    /// # Panics
    /// When there is no such core.
    pub fn attach(&self, core: CoreId, make: Box<dyn FnOnce() -> Box<dyn FrontEnd> + Send>) {
        self.cluster.attach(core, make);
    }

    /// Tells all front ends to stop, waits for them (10 s at the most) and ends the threads.
    pub fn stop(self) {
        for i in 0..self.threads.len() {
            self.cluster.post(CoreId(i as u16), Mail::Stop);
        }
        for thread in self.threads {
            let _ = thread.join();
        }
    }
}

impl Cluster {
    /// As [`Runtime::attach`], for those that hold the cluster only, such as a listener.
    pub fn attach(&self, core: CoreId, make: Box<dyn FnOnce() -> Box<dyn FrontEnd> + Send>) {
        self.post(core, Mail::Attach(make));
    }
}

/// A core that panics takes requests with it that nobody will ever answer: better no server than one that lies.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!("a core panicked; udm ends");
            std::process::abort();
        }
    }
}

struct Attached {
    /// Out while it is being called.
    front: Option<Box<dyn FrontEnd>>,
    client: Client,
    done: Batch,
    in_flight: usize,
    wake: Nanos,
    topic: Option<DeviceId>,
}

struct Reactor {
    core: LocalCore,
    inner: Inner,
}

#[derive(Default)]
struct Inner {
    devices: Devices,
    fronts: Slab<Attached>,
    by_client: HashMap<usize, usize>,
    ready: Vec<usize>,
    done: Batch,
    /// Front ends with bios to complete.
    touched: Vec<usize>,
    /// Front ends that are to be gathered in the next turn.
    roused: Vec<usize>,
    roused_all: bool,
    /// A list for the same, while they are.
    rousing: Vec<usize>,
    /// What front ends share.
    locals: Locals,
    /// The earliest time that a front end asked for.
    wake: Nanos,
    stopping: Option<Nanos>,
}

impl Reactor {
    fn new(mut core: LocalCore) -> Reactor {
        core.serves = true;
        Reactor { core, inner: Inner { wake: Nanos::NEVER, ..Inner::default() } }
    }

    fn run(mut self) {
        loop {
            let ring = self.core.ring().expect("a reactor's core has one").clone();
            let inner = &mut self.inner;
            ring.take_ready(&mut inner.ready);
            let kicked_before = self.core.kicked;
            let mail = std::mem::take(&mut self.core.other);
            let moved = self.core.turn(|cx| inner.turn(mail, &ring, cx, kicked_before));
            // Commands delivered in this turn are acted on at once: lanes that are idle have not been polled yet.
            if self.core.kicked || !self.core.other.is_empty() {
                continue;
            }
            if self.inner.is_over(self.core.clock()) {
                break;
            }
            if !moved {
                self.core.park();
            }
        }
    }
}

impl Inner {
    /// One turn; true when something moved.
    fn turn(&mut self, mail: Vec<Mail>, ring: &crate::Ring, cx: &mut Cx<'_>, kicked: bool) -> bool {
        let mut moved = !self.ready.is_empty() || !mail.is_empty();
        for mail in mail {
            match mail {
                Mail::Attach(make) => self.attach(make(), ring.client(), cx),
                Mail::Hold(device, failure, ack) => {
                    if let Err(error) = self.devices.hold(&device, cx) {
                        failure.set(error);
                    }
                    drop(ack);
                }
                Mail::Release(device) => self.devices.release(device),
                Mail::Letter(device, letter) => self.letter(device, &*letter, cx),
                Mail::Stop => self.stop(cx),
                Mail::Command(..) => unreachable!("commands are delivered by the core itself"),
            }
        }
        while let Some(client) = self.ready.pop() {
            if let Some(&key) = self.by_client.get(&client) {
                self.call(key, cx, |front, _, fcx| front.gather(fcx));
            }
        }
        std::mem::swap(&mut self.roused, &mut self.rousing);
        if std::mem::take(&mut self.roused_all) {
            self.rousing.clear();
            self.rousing.extend(self.fronts.iter().map(|(key, _)| key));
        }
        for i in 0..self.rousing.len() {
            moved = true;
            self.call(self.rousing[i], cx, |front, _, fcx| front.gather(fcx));
        }
        self.rousing.clear();
        if self.wake <= cx.now {
            moved = true;
            self.wake_due(cx);
        }
        moved |= self.devices.run(kicked, &mut self.done, cx);
        self.distribute(cx);
        if self.wake != Nanos::NEVER {
            cx.wake_at(self.wake);
        }
        if !self.roused.is_empty() || self.roused_all {
            cx.wake_at(cx.now);
        }
        moved
    }

    fn attach(&mut self, front: Box<dyn FrontEnd>, client: Client, cx: &mut Cx<'_>) {
        let id = client.id();
        let attached = Attached {
            front: Some(front),
            client,
            done: Batch::new(),
            in_flight: 0,
            wake: Nanos::NEVER,
            topic: None,
        };
        let key = self.fronts.insert(attached);
        self.by_client.insert(id, key);
        self.call(key, cx, |front, _, fcx| front.gather(fcx));
        if self.stopping.is_some() {
            self.call(key, cx, |front, _, fcx| front.stop(fcx));
        }
    }

    fn stop(&mut self, cx: &mut Cx<'_>) {
        if self.stopping.is_none() {
            self.stopping = Some(cx.now + STOP_MAX);
            let keys: Vec<usize> = self.fronts.iter().map(|(k, _)| k).collect();
            for key in keys {
                self.call(key, cx, |front, _, fcx| front.stop(fcx));
            }
        }
    }

    fn letter(&mut self, device: DeviceId, letter: &(dyn Any + Send), cx: &mut Cx<'_>) {
        let listens = |f: &Attached| f.topic == Some(device);
        let keys: Vec<usize> = self.fronts.iter().filter(|(_, f)| listens(f)).map(|(k, _)| k).collect();
        for key in keys {
            self.call(key, cx, |front, _, fcx| front.letter(letter, fcx));
        }
    }

    fn is_over(&self, now: Nanos) -> bool {
        let idle = self.fronts.is_empty() && self.devices.is_idle();
        self.stopping.is_some_and(|deadline| idle || now >= deadline)
    }

    fn wake_due(&mut self, cx: &mut Cx<'_>) {
        let due: Vec<usize> = self.fronts.iter().filter(|(_, f)| f.wake <= cx.now).map(|(k, _)| k).collect();
        for key in due {
            self.fronts[key].wake = Nanos::NEVER;
            self.call(key, cx, |front, _, fcx| front.gather(fcx));
        }
        self.wake = self.fronts.iter().map(|(_, f)| f.wake).min().unwrap_or(Nanos::NEVER);
        if let Some(deadline) = self.stopping {
            self.wake = self.wake.min(deadline);
        }
    }

    /// Hands finished bios to their makers.
    fn distribute(&mut self, cx: &mut Cx<'_>) {
        for mut bio in self.done.drain(..) {
            bio.finish();
            let key = (bio.owner.0 & !FRONT) as usize;
            let front = &mut self.fronts[key];
            front.in_flight -= 1;
            if front.done.is_empty() {
                self.touched.push(key);
            }
            front.done.push(bio);
        }
        while let Some(key) = self.touched.pop() {
            self.call(key, cx, |front, done, fcx| front.complete(done, fcx));
        }
    }

    fn call(
        &mut self,
        key: usize,
        cx: &mut Cx<'_>,
        f: impl FnOnce(&mut dyn FrontEnd, &mut Batch, &mut FrontCx<'_, '_>),
    ) {
        let Some(attached) = self.fronts.get_mut(key) else { return };
        let mut front = attached.front.take().expect("front ends do not call each other");
        let mut done = std::mem::take(&mut attached.done);
        let mut fcx = FrontCx {
            cx,
            devices: &mut self.devices,
            client: &attached.client,
            owner: OwnerId(FRONT | key as u32),
            in_flight: &mut attached.in_flight,
            wake: &mut attached.wake,
            roused: &mut self.roused,
            roused_all: &mut self.roused_all,
            locals: &mut self.locals,
            topic: &mut attached.topic,
        };
        f(&mut *front, &mut done, &mut fcx);
        attached.done = done;
        self.wake = self.wake.min(attached.wake);
        if let Some(deadline) = self.stopping {
            self.wake = self.wake.min(deadline);
        }
        if front.is_closed() && attached.in_flight == 0 {
            self.by_client.remove(&attached.client.id());
            self.fronts.remove(key);
        } else {
            attached.front = Some(front);
        }
    }
}
