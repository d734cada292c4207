//! A thread that is a core.

use crate::Cluster;
use crate::cluster::Mail;
use crate::off_core::OnCore;
use crate::reactor::Aside;
use crate::ring::{Doorbell, MadeKernel, Ring, missing};
use crate::spin::Spin;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::time::{ClockId, clock_gettime};
use std::any::Any;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use udm_core::{CoreId, CoreState, Cores, Cx, Device, Lane, Nanos, OpenError};

/// How a core behaves.
#[derive(Clone, Debug)]
pub struct CoreOptions {
    /// The CPUs to stay on; none leaves it to the scheduler.
    pub cpus: Vec<usize>,
    /// Never sleep.
    pub poll: bool,
    /// The longest spin before sleeping. Whether it spins, and for how long, follows what has paid
    /// lately.
    pub spin_max: Duration,
    /// Go on without an io_uring where none is to be had: for devices that need none.
    pub ring_optional: bool,
}

impl Default for CoreOptions {
    fn default() -> CoreOptions {
        CoreOptions {
            cpus: Vec::new(),
            poll: false,
            spin_max: Duration::from_micros(50),
            ring_optional: false,
        }
    }
}

/// How a core hears of what happens outside.
enum Outside {
    Ring(Ring, Doorbell),
    /// By its bell alone; the text says why there is no ring.
    Bell(Arc<OwnedFd>, String),
}

/// The calling thread as core `id` of a cluster. It opens lanes and drives them itself:
/// [`LocalCore::turn`] with a `submit` and a `poll` of each lane, and [`LocalCore::park`] when a
/// turn had nothing to do.
///
/// Commands (suspend, resume, ...) reach its lanes at the begin of a turn. A core that is attached
/// must therefore take turns for as long as others may suspend its devices; `park` returns when a
/// command comes.
pub struct LocalCore {
    cluster: Arc<Cluster>,
    id: CoreId,
    state: CoreState,
    outside: Outside,
    /// When the turn began; only known to a core that never sleeps.
    begun: Nanos,
    wake: Nanos,
    /// Letters that are not for lanes.
    pub(crate) other: Vec<Mail>,
    /// A reactor takes the letters in `other`.
    serves: bool,
    /// Takes them where there is none.
    aside: Aside,
    options: CoreOptions,
    time: Time,
    spin: Spin,
    spun: Nanos,
    /// When the wait under way began.
    parked: Nanos,
    _on_core: OnCore,
}

impl LocalCore {
    /// Makes the calling thread core `id`.
    ///
    /// # Errors
    /// When there is no such core, no io_uring, or the CPU can't be had.
    pub fn attach(cluster: &Arc<Cluster>, id: CoreId, options: CoreOptions) -> io::Result<LocalCore> {
        if id.index() >= cluster.len() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("no core {}", id.0)));
        }
        pin(&options.cpus)?;
        let inbox = cluster.inbox(id);
        let outside = match Ring::new() {
            Ok(ring) => Outside::Ring(ring.clone(), Doorbell::new(&ring, inbox)),
            Err(error) if options.ring_optional => Outside::Bell(inbox.eventfd(), missing::why(&error)),
            Err(error) => return Err(io::Error::new(error.kind(), missing::why(&error))),
        };
        inbox.join();
        Ok(LocalCore::over(cluster, id, options, outside, Time::SYSTEM))
    }

    /// Core `id` of a world that is made up: what its ring is asked for `kernel` does, and `time`
    /// is its clock.
    pub(crate) fn made(
        cluster: &Arc<Cluster>,
        id: CoreId,
        kernel: Box<dyn MadeKernel>,
        room: usize,
        time: Time,
    ) -> LocalCore {
        let ring = Ring::made(kernel, room);
        let bell = Doorbell::new(&ring, cluster.inbox(id));
        let options = CoreOptions { spin_max: Duration::ZERO, ..CoreOptions::default() };
        LocalCore::over(cluster, id, options, Outside::Ring(ring, bell), time)
    }

    fn over(
        cluster: &Arc<Cluster>,
        id: CoreId,
        options: CoreOptions,
        outside: Outside,
        time: Time,
    ) -> LocalCore {
        let io = match &outside {
            Outside::Ring(ring, _) => Some(Rc::new(ring.clone()) as Rc<dyn Any>),
            Outside::Bell(..) => None,
        };
        let others: Arc<dyn Cores> = Arc::<Cluster>::clone(cluster);
        let begun = (time.now)();
        let state = CoreState::new(id, cluster.len(), u64::from(id.0) + 1, io).among(others);
        LocalCore {
            cluster: cluster.clone(),
            id,
            state,
            outside,
            begun,
            wake: Nanos::NEVER,
            other: Vec::new(),
            serves: false,
            aside: Aside::default(),
            spin: Spin::new(options.spin_max.as_nanos() as u64),
            options,
            time,
            spun: Nanos(0),
            parked: begun,
            _on_core: OnCore::new(),
        }
    }

    /// This core.
    #[must_use]
    pub fn id(&self) -> CoreId {
        self.id
    }

    /// Opens this core's lane of `device`.
    ///
    /// # Errors
    /// As the device says.
    pub fn open(&mut self, device: &dyn Device) -> Result<Box<dyn Lane>, OpenError> {
        device.open(&mut self.state.cx_by(self.time.now))
    }

    /// The core's clock. All cores of a process read the same.
    #[must_use]
    pub fn clock(&self) -> Nanos {
        (self.time.now)()
    }

    /// What it has for clocks.
    pub(crate) fn time(&self) -> Time {
        self.time
    }

    /// How long this core has spun, waiting.
    pub(crate) fn spun(&self) -> Nanos {
        self.spun
    }

    /// From here on letters that are not for lanes are a reactor's.
    pub(crate) fn serve(&mut self) {
        self.serves = true;
        self.cluster.serving.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn ring(&self) -> Option<&Ring> {
        match &self.outside {
            Outside::Ring(ring, _) => Some(ring),
            Outside::Bell(..) => None,
        }
    }

    /// Why this core has no io_uring; `None` when it has one.
    #[must_use]
    pub fn no_ring(&self) -> Option<&str> {
        match &self.outside {
            Outside::Ring(..) => None,
            Outside::Bell(_, why) => Some(why),
        }
    }

    fn take_fresh(&self) -> bool {
        self.ring().is_some_and(Ring::take_fresh)
    }

    /// One turn: delivers commands, calls `f`, then sends off and takes in what the ring has.
    pub fn turn<R>(&mut self, f: impl FnOnce(&mut Cx<'_>) -> R) -> R {
        let r = self.quiet_turn(f);
        self.exchange();
        r
    }

    /// A turn that leaves it to [`LocalCore::exchange`] or [`LocalCore::park`] to send off what it
    /// brought: where the core has nothing else to do, one system call submits and waits.
    pub(crate) fn quiet_turn<R>(&mut self, f: impl FnOnce(&mut Cx<'_>) -> R) -> R {
        if self.options.poll {
            self.begun = self.clock();
        }
        self.take_fresh();
        let inbox = self.cluster.inbox(self.id);
        if inbox.has_mail() {
            // Bounded by what is there now: a sender that never stops must not stop the core.
            for _ in 0..1024 {
                match inbox.take() {
                    Some(Mail::Command(device, command)) => {
                        self.state.ports().deliver(device, &command);
                    }
                    Some(Mail::Ring(id)) => self.state.ports().ring(id),
                    Some(mail) => self.other.push(mail),
                    None => break,
                }
            }
        }
        let mut cx = self.state.cx_by(self.time.now);
        let r = f(&mut cx);
        if !self.serves {
            match &self.outside {
                Outside::Ring(ring, _) => self.aside.turn(&mut self.other, ring, &mut cx),
                // Who started a task is told that it is gone.
                Outside::Bell(..) => self.other.clear(),
            }
        }
        self.wake = cx.wake();
        r
    }

    /// Sends off and takes in what the ring has, without waiting.
    pub(crate) fn exchange(&mut self) {
        if let Outside::Ring(ring, bell) = &mut self.outside
            && ring.has_work()
        {
            ring.enter();
            bell.rearm();
        }
    }

    /// The thread is no core any more, and its place may be another's. Its lanes are closed
    /// already.
    pub fn detach(self) {
        self.leave();
    }

    /// This core reads no letters any more.
    pub(crate) fn leave(&self) {
        self.cluster.inbox(self.id).leave();
    }

    /// True when something happened that is a reason for another turn.
    fn roused(&self) -> bool {
        self.ring().is_some_and(Ring::has_completions) || self.cluster.inbox(self.id).has_mail()
    }

    /// Waits for a reason to take another turn: a completion in the ring, a command, or the
    /// earliest time that a lane asked for in the last turn. Spins first where that makes the wait
    /// shorter, then sleeps. Afterwards every lane must be polled once.
    pub fn park(&mut self) {
        if self.lies_down() {
            let timeout =
                (self.wake != Nanos::NEVER).then(|| Duration::from_nanos(self.wake.since(self.clock()).0));
            self.wait(timeout);
            self.gets_up();
        }
    }

    /// What comes before the sleep of [`LocalCore::park`]. False when there is none.
    pub(crate) fn lies_down(&mut self) -> bool {
        if self.take_fresh() {
            self.exchange();
            return false;
        }
        if self.ring().is_some_and(Ring::is_awaited) {
            self.exchange();
            if self.take_fresh() {
                return false;
            }
        }
        let begin = self.clock();
        if self.options.poll && !self.roused() {
            // The turn that is over found nothing to do.
            self.has_spun(self.begun, begin);
        }
        if self.options.poll || self.wake <= begin || self.roused() {
            std::hint::spin_loop();
            self.exchange();
            return false;
        }
        self.parked = begin;
        if (self.spin.length() == 0 || !self.spins(begin)) && self.cluster.inbox(self.id).try_sleep() {
            return true;
        }
        self.spin.waited(begin, self.clock());
        false
    }

    /// What comes behind it.
    pub(crate) fn gets_up(&mut self) {
        self.cluster.inbox(self.id).awake();
        if let Outside::Ring(_, bell) = &mut self.outside {
            bell.rearm();
        }
        self.spin.waited(self.parked, self.clock());
    }

    /// The earliest time that a lane or front end asked for in the last turn.
    pub(crate) fn wake(&self) -> Nanos {
        self.wake
    }

    /// A thread that is not on a CPU does not spin: what took longer than the longest spin counts
    /// as that.
    fn has_spun(&mut self, begin: Nanos, end: Nanos) {
        let most = self.options.spin_max.as_nanos() as u64;
        self.spun = self.spun + Nanos(end.since(begin).0.min(most));
    }

    /// Spins for a while from `begin` on. True when there is a reason for another turn.
    fn spins(&mut self, begin: Nanos) -> bool {
        self.exchange();
        if self.take_fresh() {
            return true;
        }
        loop {
            for _ in 0..16 {
                std::hint::spin_loop();
            }
            let now = self.clock();
            if self.roused() || now >= self.wake {
                self.has_spun(begin, now);
                self.exchange();
                return true;
            }
            if now.since(begin).0 >= self.spin.length() {
                self.has_spun(begin, now);
                return false;
            }
        }
    }

    /// Sleeps until something happens outside, or `timeout` is over.
    fn wait(&mut self, timeout: Option<Duration>) {
        match &self.outside {
            Outside::Ring(ring, _) => ring.wait(timeout),
            Outside::Bell(bell, _) => {
                let timeout = timeout
                    .map(|t| Timespec { tv_sec: t.as_secs() as i64, tv_nsec: t.subsec_nanos().into() });
                let rung = poll(&mut [PollFd::new(bell, PollFlags::IN)], timeout.as_ref());
                if rung.is_ok_and(|n| n > 0) {
                    // It was rung, so this does not wait.
                    let _ = rustix::io::read(&**bell, &mut [0; 8]);
                }
            }
        }
    }
}

/// The clocks of a core.
#[derive(Clone, Copy, Debug)]
pub struct Time {
    /// The time, the same on all cores of a process. It never goes back.
    pub now: fn() -> Nanos,
    /// The CPU time that the calling thread has spent.
    pub spent: fn() -> Nanos,
}

impl Time {
    /// The system's.
    pub(crate) const SYSTEM: Time = Time { now: clock, spent };
}

impl Default for Time {
    fn default() -> Time {
        Time::SYSTEM
    }
}

/// The clock of all cores: nanoseconds since it was first read, and one.
fn clock() -> Nanos {
    static ORIGIN: std::sync::OnceLock<Nanos> = std::sync::OnceLock::new();
    // Not by `Instant`, whose arithmetic takes longer.
    let now = read(ClockId::Monotonic);
    since(*ORIGIN.get_or_init(|| now), now)
}

/// Never 0, which is no time to a [`Cx`]: of two cores that read the clock first, the one whose
/// reading is not the origin may have the earlier one.
#[inline]
fn since(origin: Nanos, now: Nanos) -> Nanos {
    Nanos(now.since(origin).0 + 1)
}

fn spent() -> Nanos {
    read(ClockId::ThreadCPUTime)
}

fn read(clock: ClockId) -> Nanos {
    let time = clock_gettime(clock);
    Nanos(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

/// Keeps the calling thread on these CPUs; none leaves it where it may be.
///
/// # Errors
/// When one of them is not there, or not for this process.
pub fn pin(cpus: &[usize]) -> io::Result<()> {
    if cpus.is_empty() {
        return Ok(());
    }
    let mut set = rustix::thread::CpuSet::new();
    for cpu in cpus {
        if *cpu >= rustix::thread::CpuSet::MAX_CPU {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("no CPU {cpu}")));
        }
        set.set(*cpu);
    }
    let words: Vec<_> = cpus.iter().map(usize::to_string).collect();
    rustix::thread::sched_setaffinity(None, &set)
        .map_err(|e| io::Error::new(io::Error::from(e).kind(), format!("CPU {}: {e}", words.join(","))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_reading_is_no_time() {
        let readings = [3, 5, 6].map(|now| since(Nanos(5), Nanos(now)));
        assert_eq!(readings, [Nanos(1), Nanos(1), Nanos(2)]);
    }
}
