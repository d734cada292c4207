//! A core handle: the calling thread as a core, with its lanes.
//!
//! Core handles are kept per thread, so a handle is valid only on its own thread. A call takes the
//! core handle out of the list and puts it back. After a panic it is leaked, because the kernel may
//! still use its memory. Completions that the program has not fetched yet are in `completed`.

use crate::context::{FORKS, LibudmContext, new_handle};
use crate::error::{self, ErrnoWithText};
use crate::raw;
use crate::types::{UDM_IN_FLIGHT_MAX, udm_completion};
use slab::Slab;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use udm_core::{Batch, Bio, BioPool, Lane, Limits, Nanos, Op, OwnWork, Status};
use udm_dm::ResolvedDevice;
use udm_runtime::{CoreOptions, LocalCore};

/// Time limit for the own work of a lane, and for requests in flight when a thread ends.
const PATIENCE: Nanos = Nanos::from_millis(30_000);

/// Maximum sleep of a core that waits for its own verb.
const TURN_MAX: Nanos = Nanos::from_millis(1);

/// Options of the cores of a context.
pub(crate) fn core_options_for_cpu(cpu: Option<usize>) -> CoreOptions {
    CoreOptions { cpus: cpu.into_iter().collect(), ring_optional: true, ..CoreOptions::default() }
}

/// The cores of a thread.
#[derive(Default)]
struct ThreadCores(Vec<(i32, Option<Box<CallingThreadCore>>)>);

thread_local! {
    static CORES: RefCell<ThreadCores> = RefCell::default();
}

impl Drop for ThreadCores {
    /// Completes requests in flight when the thread ends.
    fn drop(&mut self) {
        for mut core in self.0.drain(..).filter_map(|(_, core)| core) {
            if core.forks != FORKS.load(Ordering::Relaxed) || core.close().is_err() {
                Box::leak(core);
            }
        }
    }
}

/// Takes a core handle out of the list for one call, and puts it back when dropped.
struct CallingThreadCoreGuard {
    handle: i32,
    core: Option<Box<CallingThreadCore>>,
}

impl Drop for CallingThreadCoreGuard {
    fn drop(&mut self) {
        let Some(core) = self.core.take() else { return };
        if std::thread::panicking() {
            Box::leak(core);
            return;
        }
        let _ = with_thread_cores(|cores| {
            if let Some((_, place)) = cores.0.iter_mut().find(|(handle, _)| *handle == self.handle) {
                *place = Some(core);
            }
        });
    }
}

/// Runs `work` with the cores of this thread. Fails if the thread is ending, as at the exit of the
/// program.
fn with_thread_cores<T>(work: impl FnOnce(&mut ThreadCores) -> T) -> Result<T, ErrnoWithText> {
    let done = CORES.try_with(|cores| work(&mut cores.borrow_mut()));
    done.map_err(|_| ErrnoWithText::new(libc::ESRCH, "the thread is ending"))
}

/// Makes the calling thread core `number` of a context, or any free one.
pub(crate) fn open_calling_thread_core(
    context: Arc<LibudmContext>,
    number: Option<usize>,
    cpu: Option<usize>,
) -> Result<i32, ErrnoWithText> {
    let place = context.claim_slot(number)?;
    let local = LocalCore::attach(&context.core_set, place, core_options_for_cpu(cpu)).map_err(|error| {
        context.release_slot(place);
        ErrnoWithText::new(error.raw_os_error().unwrap_or(libc::EINVAL), error.to_string())
    })?;
    let mut core = Some(Box::new(CallingThreadCore {
        lanes: Slab::new(),
        local: Some(local),
        pool: BioPool::new(UDM_IN_FLIGHT_MAX as usize),
        batch: Batch::new(),
        done: Batch::new(),
        completed: VecDeque::new(),
        forks: FORKS.load(Ordering::Relaxed),
        context,
    }));
    let handle = new_handle();
    let kept = with_thread_cores(|cores| cores.0.push((handle, core.take())));
    if let Some(mut core) = core {
        // The thread is ending, so nobody would close the core.
        core.close()?;
    }
    kept.map(|()| handle)
}

/// Runs `work` with the core of a handle.
pub(crate) fn with_calling_thread_core<T>(
    handle: i32,
    work: impl FnOnce(&mut CallingThreadCore) -> Result<T, ErrnoWithText>,
) -> Result<T, ErrnoWithText> {
    let core = with_thread_cores(|cores| {
        cores.0.iter_mut().find(|(of, _)| *of == handle).and_then(|(_, core)| core.take())
    })?;
    let mut held = CallingThreadCoreGuard { handle, core };
    let core = held.core.as_mut().ok_or_else(|| {
        ErrnoWithText::new(
            libc::EBADF,
            format!("{handle} is not a core of this thread: only the thread that opened it may use it"),
        )
    })?;
    if core.forks != FORKS.load(Ordering::Relaxed) {
        return Err(ErrnoWithText::new(libc::ECHILD, "the core is the parent process's"));
    }
    work(core)
}

/// Closes the core of a handle.
pub(crate) fn close_calling_thread_core(handle: i32) -> Result<(), ErrnoWithText> {
    with_calling_thread_core(handle, |core| {
        if core.in_flight() > 0 {
            let text = format!("{} requests are in flight: wait for them first", core.in_flight());
            return Err(ErrnoWithText::new(libc::EBUSY, text));
        }
        core.close()
    })?;
    with_thread_cores(|cores| cores.0.retain(|(of, _)| *of != handle))
}

/// True if the calling thread is a core.
pub(crate) fn is_core_thread() -> bool {
    with_thread_cores(|cores| !cores.0.is_empty()).unwrap_or(false)
}

/// Runs a turn of each core of the calling thread.
pub(crate) fn poll_all_cores() {
    let handles = with_thread_cores(|cores| cores.0.iter().map(|(handle, _)| *handle).collect::<Vec<_>>());
    for handle in handles.unwrap_or_default() {
        let _ = with_calling_thread_core(handle, |core| {
            let until = core.local().clock() + TURN_MAX;
            if !core.turn(until) {
                core.local().park();
            }
            Ok(())
        });
    }
}

/// An open lane. Dropped before its device.
struct OpenLane {
    lane: Box<dyn Lane>,
    in_flight: usize,
    limits: Limits,
    found: ResolvedDevice,
}

impl OpenLane {
    /// Checks if a request can be submitted. A mapped device splits requests, so they are never too
    /// long for it.
    fn check(&mut self, bio: &Bio) -> Result<(), Status> {
        let fits = |limits: &Limits, stacked: bool| {
            limits.check(bio.op, bio.sector, bio.sectors)?;
            let too_long = !stacked && bio.op != Op::Flush && bio.sectors > limits.max_for(bio.op);
            if too_long { Err(Status::Inval) } else { Ok(()) }
        };
        let stacked = self.found.device.stacked().is_some();
        fits(&self.limits, stacked).or_else(|_| {
            // The limits may have changed, for example by a new table.
            self.limits = self.found.device.limits();
            fits(&self.limits, stacked)
        })
    }
}

/// The calling thread as a core.
pub(crate) struct CallingThreadCore {
    lanes: Slab<OpenLane>,
    /// `None` after the close.
    local: Option<LocalCore>,
    pool: BioPool,
    batch: Batch,
    done: Batch,
    completed: VecDeque<udm_completion>,
    forks: u32,
    context: Arc<LibudmContext>,
}

impl CallingThreadCore {
    fn local(&mut self) -> &mut LocalCore {
        self.local.as_mut().expect("a core handle in the list is open")
    }

    fn in_flight(&self) -> usize {
        self.lanes.iter().map(|(_, open)| open.in_flight).sum()
    }

    fn lane(&mut self, lane: i32) -> Result<&mut OpenLane, ErrnoWithText> {
        let found = usize::try_from(lane).ok().and_then(|lane| self.lanes.get_mut(lane));
        found.ok_or_else(|| {
            ErrnoWithText::new(libc::EBADF, format!("{lane} is not an open lane of this core"))
        })
    }

    /// Opens a lane of the device `word`.
    pub(crate) fn open_lane(&mut self, word: &str) -> Result<i32, ErrnoWithText> {
        let found = self.context.device(word)?;
        let core = self.local();
        let lane = core.open(&*found.device).map_err(|error| {
            let why = core.ring_error().map(|why| format!(": {why}")).unwrap_or_default();
            ErrnoWithText::new(error.errno, format!("{word}: {error}{why}"))
        })?;
        let limits = found.device.limits();
        Ok(self.lanes.insert(OpenLane { lane, in_flight: 0, limits, found }) as i32)
    }

    /// Closes a lane without requests in flight, after its required own work.
    pub(crate) fn close_lane(&mut self, lane: i32) -> Result<(), ErrnoWithText> {
        if self.lane(lane)?.in_flight > 0 {
            return Err(ErrnoWithText::new(
                libc::EBUSY,
                "requests of the lane are in flight: wait for them first",
            ));
        }
        let end = self.local().clock() + PATIENCE;
        while self.lane(lane)?.lane.own_work() == OwnWork::Required {
            if self.local().clock() >= end {
                return Err(ErrnoWithText::new(libc::ETIMEDOUT, "the lane's own work does not complete"));
            }
            if !self.turn(end) {
                self.local().park();
            }
        }
        self.lanes.remove(lane as usize);
        Ok(())
    }

    /// Submits up to `count` requests, made by `fill`, to a lane, and returns how many were
    /// accepted. The first refused request ends it; the thread's last error has the reason.
    pub(crate) fn submit(
        &mut self,
        lane: i32,
        count: usize,
        mut fill: impl FnMut(usize, &mut Bio) -> Result<(), ErrnoWithText>,
    ) -> Result<usize, ErrnoWithText> {
        self.lane(lane)?;
        let open = &mut self.lanes[lane as usize];
        let (mut taken, mut refused) = (0, None);
        while taken < count {
            let room = self.pool.out() + self.completed.len() < UDM_IN_FLIGHT_MAX as usize;
            let Some(mut bio) = room.then(|| self.pool.get()).flatten() else {
                let text = format!("{UDM_IN_FLIGHT_MAX} requests are in flight, or not yet taken back");
                refused = Some(ErrnoWithText::new(libc::EAGAIN, text));
                break;
            };
            if let Err(error) = fill(taken, &mut bio) {
                self.pool.put(bio);
                refused = Some(error);
                break;
            }
            taken += 1;
            match open.check(&bio) {
                Ok(()) => {
                    bio.start();
                    self.batch.push(bio);
                }
                Err(status) => {
                    self.completed.push_back(udm_completion {
                        cookie: bio.cookie,
                        error: -status.errno(),
                        lane,
                    });
                    self.pool.put(bio);
                }
            }
        }
        if !self.batch.is_empty() {
            open.in_flight += self.batch.len();
            let local = self.local.as_mut().expect("a core handle in the list is open");
            local.turn(|cx| open.lane.submit(&mut self.batch, cx));
        }
        match refused {
            Some(error) if taken == 0 => Err(error),
            Some(error) => {
                error::set_last_error(&error);
                Ok(taken)
            }
            None => Ok(taken),
        }
    }

    /// Runs a turn and sets a timer for `until`. Returns true if a request completed.
    fn turn(&mut self, until: Nanos) -> bool {
        let before = self.completed.len();
        let local = self.local.as_mut().expect("a core handle in the list is open");
        let (lanes, done, completed, pool) =
            (&mut self.lanes, &mut self.done, &mut self.completed, &mut self.pool);
        local.turn(|cx| {
            for (number, open) in lanes.iter_mut() {
                open.lane.poll(done, cx);
                open.in_flight -= done.len();
                for mut bio in done.drain(..) {
                    bio.finish();
                    raw::take_back_buffers(&mut bio);
                    let (cookie, error) = (bio.cookie, -bio.status.errno());
                    completed.push_back(udm_completion { cookie, error, lane: number as i32 });
                    pool.put(bio);
                }
            }
            cx.wake_at(until);
        });
        self.completed.len() > before
    }

    /// Waits until `min` requests are completed, or all that are in flight if those are fewer; at
    /// most `timeout` nanoseconds, `None` for no limit. Passes at most `max` completions to `take`
    /// and returns their number.
    pub(crate) fn wait(
        &mut self,
        min: usize,
        max: usize,
        timeout: Option<u64>,
        mut take: impl FnMut(usize, udm_completion),
    ) -> usize {
        let min = min.min(max).min(self.in_flight() + self.completed.len());
        let mut until = Nanos::NEVER;
        if let Some(timeout) = timeout.filter(|_| min > self.completed.len()) {
            until = Nanos(self.local().clock().0.saturating_add(timeout));
        }
        loop {
            let moved = self.turn(until);
            if self.completed.len() >= min || (until != Nanos::NEVER && self.local().clock() >= until) {
                break;
            }
            if !moved {
                self.local().park();
            }
        }
        let count = self.completed.len().min(max);
        self.completed.drain(..count).enumerate().for_each(|(i, completion)| take(i, completion));
        count
    }

    /// Waits for requests in flight, closes all lanes and releases the slot.
    fn close(&mut self) -> Result<(), ErrnoWithText> {
        let Some(end) = self.local.as_ref().map(|local| local.clock() + PATIENCE) else { return Ok(()) };
        while self.in_flight() > 0 {
            if self.local().clock() >= end {
                return Err(ErrnoWithText::new(libc::ETIMEDOUT, "requests in flight do not complete"));
            }
            if !self.turn(end) {
                self.local().park();
            }
        }
        let lanes: Vec<usize> = self.lanes.iter().map(|(lane, _)| lane).collect();
        lanes.into_iter().try_for_each(|lane| self.close_lane(lane as i32))?;
        if let Some(local) = self.local.take() {
            let place = local.id();
            local.detach();
            self.context.release_slot(place);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::context;
    use std::cell::Cell;
    use std::sync::mpsc::{Sender, channel};

    /// Opens slot 0 when its thread ends.
    struct OpensAtExit(Arc<LibudmContext>, Sender<Result<i32, ErrnoWithText>>);

    impl Drop for OpensAtExit {
        fn drop(&mut self) {
            let _ = self.1.send(open_calling_thread_core(Arc::clone(&self.0), Some(0), None));
        }
    }

    thread_local! {
        static BEFORE: Cell<Option<OpensAtExit>> = const { Cell::new(None) };
        static AFTER: Cell<Option<OpensAtExit>> = const { Cell::new(None) };
    }

    /// The order in which a thread drops its variables is not defined, so one before and one after
    /// the list of cores try it.
    #[test]
    fn a_core_of_an_ending_thread_leaves_its_slot_free() {
        let handle = context::open_libudm_context(1).unwrap();
        let context = context::find_libudm_context(handle).unwrap();
        let (results, all) = channel();
        let of_thread = Arc::clone(&context);
        let thread = std::thread::spawn(move || {
            BEFORE.set(Some(OpensAtExit(Arc::clone(&of_thread), results.clone())));
            assert!(!is_core_thread());
            AFTER.set(Some(OpensAtExit(of_thread, results)));
        });
        thread.join().unwrap();
        let errors: Vec<i32> = all.iter().filter_map(|result| Some(result.err()?.errno)).collect();
        assert_eq!(errors, [libc::ESRCH], "one of them found no list");
        context.claim_slot(Some(0)).unwrap();
        context.release_slot(udm_core::CoreId(0));
        drop(context);
        context::close_libudm_context(handle).unwrap();
    }
}
