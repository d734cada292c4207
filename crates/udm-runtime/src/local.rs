//! A core on the calling thread.

use crate::ProcessCores;
use crate::blocking_drop::CoreThreadMarkGuard;
use crate::core_set::CoreMessage;
use crate::eventfd_read::EventFdRead;
use crate::reactor::LibraryModeTaskRunner;
use crate::ring::{Ring, SimulatedKernel, unavailable};
use crate::spin::SpinPolicy;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::time::{ClockId, clock_gettime};
use std::any::Any;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use udm_core::{CoreCommandSender, CoreId, CoreLaneState, Cx, Device, DeviceControlError, Lane, Nanos};

/// Options of a core.
#[derive(Clone, Debug)]
pub struct CoreOptions {
    /// CPUs to pin the thread to; empty leaves the choice to the scheduler.
    pub cpus: Vec<usize>,
    /// Never sleep.
    pub poll: bool,
    /// The longest spin before a sleep. Recent measurements decide if and how long the core spins.
    pub spin_max: Duration,
    /// Continue without an io_uring if none is available. Suits devices that need none.
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

/// The longest time that a thread waits for the requests of tasks before it leaves its core.
const TASKS_END_MAX: Nanos = Nanos::from_millis(5000);

/// The source of external events of a core.
enum RingOrEventFd {
    Ring(Ring, EventFdRead),
    /// Only the eventfd of the inbox; the text is the reason why there is no ring.
    EventFd(Arc<OwnedFd>, String),
}

/// Input of a core that neither its ring nor its inbox reports.
pub(crate) trait PolledInput {
    /// True if there is input. With `sleeps`, all sources first arrange that later input completes
    /// a ring operation.
    fn has_input(&mut self, sleeps: bool) -> bool;
}

/// No such input.
struct NoPolledInput;

impl PolledInput for NoPolledInput {
    fn has_input(&mut self, _: bool) -> bool {
        false
    }
}

/// The calling thread as core `id` of a [`ProcessCores`]. It opens lanes and drives them itself:
/// [`LocalCore::turn`] with a `submit` and a `poll` of each lane, and [`LocalCore::park`] after a
/// turn with nothing to do.
///
/// Commands (suspend, resume, ...) reach its lanes at the begin of a turn. So an attached core must
/// run turns as long as others may suspend its devices. `park` returns when a command arrives.
pub struct LocalCore {
    core_set: Arc<ProcessCores>,
    id: CoreId,
    state: CoreLaneState,
    wake_source: RingOrEventFd,
    /// Begin of the turn; only set if the core never sleeps.
    begun: Nanos,
    wake: Nanos,
    /// Messages that are not for lanes.
    pub(crate) other: Vec<CoreMessage>,
    /// True if a reactor handles the messages in `other`.
    serves: bool,
    /// Handles the messages in `other` without a reactor.
    tasks: LibraryModeTaskRunner,
    options: CoreOptions,
    time: CoreClockFunctions,
    spin: SpinPolicy,
    spin_time: Nanos,
    /// Begin of the current wait.
    wait_began: Nanos,
    _on_core: CoreThreadMarkGuard,
}

impl LocalCore {
    /// Makes the calling thread core `id`.
    ///
    /// # Errors
    /// There is no such core or no io_uring, or the thread cannot be pinned to the CPUs.
    pub fn attach(core_set: &Arc<ProcessCores>, id: CoreId, options: CoreOptions) -> io::Result<LocalCore> {
        if id.index() >= core_set.len() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("no core {}", id.0)));
        }
        pin_thread_to_cpus(&options.cpus)?;
        let inbox = core_set.inbox(id);
        let wake_source = match Ring::new() {
            Ok(ring) => RingOrEventFd::Ring(ring.clone(), EventFdRead::new(&ring, inbox.eventfd())),
            Err(error) if options.ring_optional => {
                RingOrEventFd::EventFd(inbox.eventfd(), unavailable::explain_uring_unavailable(&error))
            }
            Err(error) => {
                return Err(io::Error::new(error.kind(), unavailable::explain_uring_unavailable(&error)));
            }
        };
        inbox.join();
        Ok(LocalCore::with_backend(core_set, id, options, wake_source, CoreClockFunctions::SYSTEM))
    }

    /// Creates core `id` of a simulated world: `kernel` executes its ring operations, and `time` is
    /// its clock.
    pub(crate) fn simulated(
        core_set: &Arc<ProcessCores>,
        id: CoreId,
        kernel: Box<dyn SimulatedKernel>,
        room: usize,
        time: CoreClockFunctions,
    ) -> LocalCore {
        let ring = Ring::simulated(kernel, room);
        let eventfd_read = EventFdRead::new(&ring, core_set.inbox(id).eventfd());
        let options = CoreOptions { spin_max: Duration::ZERO, ..CoreOptions::default() };
        LocalCore::with_backend(core_set, id, options, RingOrEventFd::Ring(ring, eventfd_read), time)
    }

    fn with_backend(
        core_set: &Arc<ProcessCores>,
        id: CoreId,
        options: CoreOptions,
        wake_source: RingOrEventFd,
        time: CoreClockFunctions,
    ) -> LocalCore {
        let io = match &wake_source {
            RingOrEventFd::Ring(ring, _) => Some(Rc::new(ring.clone()) as Rc<dyn Any>),
            RingOrEventFd::EventFd(..) => None,
        };
        let others: Arc<dyn CoreCommandSender> = Arc::<ProcessCores>::clone(core_set);
        let begun = (time.now)();
        let state = CoreLaneState::new(id, core_set.len(), u64::from(id.0) + 1, io).with_cores(others);
        LocalCore {
            core_set: core_set.clone(),
            id,
            state,
            wake_source,
            begun,
            wake: Nanos::NEVER,
            other: Vec::new(),
            serves: false,
            tasks: LibraryModeTaskRunner::default(),
            spin: SpinPolicy::new(options.spin_max.as_nanos() as u64),
            options,
            time,
            spin_time: Nanos(0),
            wait_began: begun,
            _on_core: CoreThreadMarkGuard::new(),
        }
    }

    /// The id of this core.
    #[must_use]
    pub fn id(&self) -> CoreId {
        self.id
    }

    /// Opens this core's lane of `device`.
    ///
    /// # Errors
    /// The error of the device.
    pub fn open(&mut self, device: &dyn Device) -> Result<Box<dyn Lane>, DeviceControlError> {
        device.open(&mut self.state.cx_by(self.time.now))
    }

    /// The core's clock, the same for all cores of a process.
    #[must_use]
    pub fn clock(&self) -> Nanos {
        (self.time.now)()
    }

    /// The clocks of the core.
    pub(crate) fn time(&self) -> CoreClockFunctions {
        self.time
    }

    /// Total time that this core has spun while it waited.
    pub(crate) fn spin_time(&self) -> Nanos {
        self.spin_time
    }

    /// From now on a reactor handles messages that are not for lanes.
    pub(crate) fn serve(&mut self) {
        self.serves = true;
        self.core_set.serving.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn ring(&self) -> Option<&Ring> {
        match &self.wake_source {
            RingOrEventFd::Ring(ring, _) => Some(ring),
            RingOrEventFd::EventFd(..) => None,
        }
    }

    /// The reason why this core has no io_uring; `None` if it has one.
    #[must_use]
    pub fn ring_error(&self) -> Option<&str> {
        match &self.wake_source {
            RingOrEventFd::Ring(..) => None,
            RingOrEventFd::EventFd(_, reason) => Some(reason),
        }
    }

    fn take_progress(&self) -> bool {
        self.ring().is_some_and(Ring::take_progress)
    }

    /// Runs one turn: delivers commands, calls `f`, then submits to the ring and reaps completions.
    pub fn turn<R>(&mut self, f: impl FnOnce(&mut Cx<'_>) -> R) -> R {
        let r = self.turn_without_enter(f);
        self.submit_and_reap();
        r
    }

    /// Runs a turn without a system call for the ring. Call [`LocalCore::submit_and_reap`] or
    /// [`LocalCore::park`] next. If the core is idle, `park` submits and waits in one system call.
    pub(crate) fn turn_without_enter<R>(&mut self, f: impl FnOnce(&mut Cx<'_>) -> R) -> R {
        if self.options.poll {
            self.begun = self.clock();
        }
        self.take_progress();
        let inbox = self.core_set.inbox(self.id);
        if inbox.has_messages() {
            // Bounded, so that a sender that never stops does not block the core.
            for _ in 0..1024 {
                match inbox.take() {
                    Some(CoreMessage::Command(device, command)) => {
                        self.state.inboxes().deliver(device, &command);
                    }
                    Some(CoreMessage::Wake(id)) => self.state.inboxes().wake_up(id),
                    Some(message) => self.other.push(message),
                    None => break,
                }
            }
        }
        let mut cx = self.state.cx_by(self.time.now);
        let r = f(&mut cx);
        if !self.serves {
            match &self.wake_source {
                RingOrEventFd::Ring(ring, _) => self.tasks.turn(&mut self.other, ring, &mut cx),
                // Dropping the messages tells the senders that their tasks are gone.
                RingOrEventFd::EventFd(..) => self.other.clear(),
            }
        }
        self.wake = cx.wake();
        r
    }

    /// Submits to the ring and reaps completions, without waiting.
    pub(crate) fn submit_and_reap(&mut self) {
        if let RingOrEventFd::Ring(ring, eventfd_read) = &mut self.wake_source
            && ring.has_work()
        {
            ring.enter();
            eventfd_read.rearm();
        }
    }

    /// Detaches the thread from the core, so that another thread can attach. The lanes must be
    /// closed already. Tasks of devices that run on this core (copies in the background, for
    /// example) are stopped, and their requests complete first. Requests that take longer than five
    /// seconds keep their memory until the program ends.
    pub fn detach(mut self) {
        self.end_tasks();
        self.stop_receiving();
    }

    fn end_tasks(&mut self) {
        let limit = self.clock() + TASKS_END_MAX;
        self.tasks.end();
        self.turn(|_| ());
        while self.tasks.has_in_flight() && self.clock() < limit {
            self.park();
            self.turn(|cx| cx.wake_at(limit));
        }
    }

    /// Stops receiving messages.
    pub(crate) fn stop_receiving(&self) {
        self.core_set.inbox(self.id).stop_receiving();
    }

    /// True if an event requires another turn.
    fn has_wakeup(&self) -> bool {
        self.ring().is_some_and(Ring::has_completions) || self.core_set.inbox(self.id).has_messages()
    }

    /// Waits for a reason for another turn: a completion, a command, or the earliest time that a
    /// lane asked for in the last turn. Spins first if that makes the wait shorter, then sleeps.
    /// Afterwards poll every lane once.
    pub fn park(&mut self) {
        self.park_with(&mut NoPolledInput);
    }

    /// As [`LocalCore::park`]; also returns if there is `input`.
    pub(crate) fn park_with(&mut self, input: &mut impl PolledInput) {
        if self.prepare_sleep(input) {
            let timeout =
                (self.wake != Nanos::NEVER).then(|| Duration::from_nanos(self.wake.since(self.clock()).0));
            self.wait(timeout);
            self.finish_sleep();
        }
    }

    /// The part of [`LocalCore::park`] before the sleep. False if the core must not sleep.
    pub(crate) fn prepare_sleep(&mut self, input: &mut impl PolledInput) -> bool {
        if self.take_progress() {
            self.submit_and_reap();
            return false;
        }
        if self.ring().is_some_and(Ring::has_waiter) {
            self.submit_and_reap();
            if self.take_progress() {
                return false;
            }
        }
        let begin = self.clock();
        if self.options.poll && !self.has_wakeup() {
            // The last turn found nothing to do, so it counts as spinning.
            self.add_spin_time(self.begun, begin);
        }
        if self.options.poll || self.wake <= begin || self.has_wakeup() {
            std::hint::spin_loop();
            self.submit_and_reap();
            return false;
        }
        self.wait_began = begin;
        if (self.spin.length() == 0 || !self.spin_until_event(begin, input))
            && !input.has_input(true)
            && self.core_set.inbox(self.id).try_sleep()
        {
            return true;
        }
        self.spin.waited(begin, self.clock());
        false
    }

    /// The part of [`LocalCore::park`] after the sleep.
    pub(crate) fn finish_sleep(&mut self) {
        self.core_set.inbox(self.id).set_awake();
        if let RingOrEventFd::Ring(_, eventfd_read) = &mut self.wake_source {
            eventfd_read.rearm();
        }
        self.spin.waited(self.wait_began, self.clock());
    }

    /// The earliest time that a lane or front end asked for in the last turn.
    pub(crate) fn wake(&self) -> Nanos {
        self.wake
    }

    /// Adds to the spin time. Limited to the longest spin: in a longer interval the thread was not
    /// on a CPU.
    fn add_spin_time(&mut self, begin: Nanos, end: Nanos) {
        let most = self.options.spin_max.as_nanos() as u64;
        self.spin_time = self.spin_time + Nanos(end.since(begin).0.min(most));
    }

    /// Spins from `begin` on. Returns true if there is a reason for another turn.
    fn spin_until_event(&mut self, begin: Nanos, input: &mut impl PolledInput) -> bool {
        self.submit_and_reap();
        if self.take_progress() {
            return true;
        }
        loop {
            for _ in 0..16 {
                std::hint::spin_loop();
            }
            let now = self.clock();
            if input.has_input(false) || self.has_wakeup() || now >= self.wake {
                self.add_spin_time(begin, now);
                self.submit_and_reap();
                return true;
            }
            if now.since(begin).0 >= self.spin.length() {
                self.add_spin_time(begin, now);
                return false;
            }
        }
    }

    /// Sleeps until an external event or the end of `timeout`.
    fn wait(&mut self, timeout: Option<Duration>) {
        match &self.wake_source {
            RingOrEventFd::Ring(ring, _) => ring.wait(timeout),
            RingOrEventFd::EventFd(eventfd, _) => {
                let timeout = timeout
                    .map(|t| Timespec { tv_sec: t.as_secs() as i64, tv_nsec: t.subsec_nanos().into() });
                let ready = poll(&mut [PollFd::new(eventfd, PollFlags::IN)], timeout.as_ref());
                if ready.is_ok_and(|n| n > 0) {
                    // The eventfd is readable, so this does not wait.
                    let _ = rustix::io::read(&**eventfd, &mut [0; 8]);
                }
            }
        }
    }
}

/// The clocks of a core.
#[derive(Clone, Copy, Debug)]
pub struct CoreClockFunctions {
    /// Monotonic time, the same on all cores of a process.
    pub now: fn() -> Nanos,
    /// CPU time of the calling thread.
    pub cpu_time: fn() -> Nanos,
}

impl CoreClockFunctions {
    /// The system's clocks.
    pub(crate) const SYSTEM: CoreClockFunctions = CoreClockFunctions { now: read_core_clock, cpu_time };
}

impl Default for CoreClockFunctions {
    fn default() -> CoreClockFunctions {
        CoreClockFunctions::SYSTEM
    }
}

/// The clock of all cores: nanoseconds since its first reading, plus one.
fn read_core_clock() -> Nanos {
    static ORIGIN: std::sync::OnceLock<Nanos> = std::sync::OnceLock::new();
    // `Instant` has slower arithmetic.
    let now = read_clock_nanos(ClockId::Monotonic);
    nonzero_time_since(*ORIGIN.get_or_init(|| now), now)
}

/// Never 0, since [`Cx`] uses 0 for "not read". If two cores read the clock first at once, one may
/// have a time before the origin.
#[inline]
fn nonzero_time_since(origin: Nanos, now: Nanos) -> Nanos {
    Nanos(now.since(origin).0 + 1)
}

fn cpu_time() -> Nanos {
    read_clock_nanos(ClockId::ThreadCPUTime)
}

fn read_clock_nanos(clock: ClockId) -> Nanos {
    let time = clock_gettime(clock);
    Nanos(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

/// Pins the calling thread to these CPUs; does nothing if the list is empty.
///
/// # Errors
/// A CPU does not exist, or this process may not use it.
pub fn pin_thread_to_cpus(cpus: &[usize]) -> io::Result<()> {
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
        let readings = [3, 5, 6].map(|now| nonzero_time_since(Nanos(5), Nanos(now)));
        assert_eq!(readings, [Nanos(1), Nanos(1), Nanos(2)]);
    }
}
