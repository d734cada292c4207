//! A context: devices, slots for threads that are cores, and a background core.
//!
//! The background core runs the tasks: own work of targets, and I/O when a table is loaded. It
//! sleeps if there is nothing to do. Threads of the program claim and release the slots. Slot
//! numbers start at 0; the background core has the last one.

use crate::core_handle;
use crate::error::ErrnoWithText;
use std::collections::BTreeMap;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use udm_control::{DeviceRegistry, verbs};
use udm_core::{CoreCommandSender, CoreId, DeviceId, LaneCommand};
use udm_dm::ResolvedDevice;
use udm_runtime::{LocalCore, ProcessCores};

/// Number of forks of the process. A context made before a fork belongs to the parent.
pub(crate) static FORKS: AtomicU32 = AtomicU32::new(0);

/// Contexts by their handles. After a fork, the lock may be held by a thread that the child does
/// not have, so a wait for it is always limited.
static CONTEXTS: Mutex<BTreeMap<i32, Arc<LibudmContext>>> = Mutex::new(BTreeMap::new());

static HANDLES: AtomicI32 = AtomicI32::new(1);

/// A new handle; never reused.
pub(crate) fn new_handle() -> i32 {
    // After 2^31 handles the numbers become invalid; look-ups then fail.
    HANDLES.fetch_add(1, Ordering::Relaxed)
}

pub(crate) struct LibudmContext {
    pub core_set: Arc<ProcessCores>,
    pub registry: Arc<DeviceRegistry>,
    /// True for each claimed slot; `None` once the context is being closed.
    core_slots: Mutex<Option<Vec<bool>>>,
    background_core: Mutex<Option<JoinHandle<()>>>,
    over: Arc<AtomicBool>,
    forks: u32,
}

/// Number of attempts to lock the list of contexts, 100 µs apart.
const TRIES: u32 = 10_000;

fn lock_libudm_contexts() -> Result<MutexGuard<'static, BTreeMap<i32, Arc<LibudmContext>>>, ErrnoWithText> {
    for _ in 0..TRIES {
        match CONTEXTS.try_lock() {
            Ok(all) => return Ok(all),
            Err(std::sync::TryLockError::Poisoned(all)) => return Ok(all.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => thread::sleep(Duration::from_micros(100)),
        }
    }
    Err(ErrnoWithText::new(
        libc::EDEADLK,
        "the process was forked while another thread opened or closed a context",
    ))
}

/// The context of a handle.
pub(crate) fn find_libudm_context(handle: i32) -> Result<Arc<LibudmContext>, ErrnoWithText> {
    let found = lock_libudm_contexts()?.get(&handle).cloned();
    let context =
        found.ok_or_else(|| ErrnoWithText::new(libc::EBADF, format!("{handle} is not an open context")))?;
    if context.forks != FORKS.load(Ordering::Relaxed) {
        return Err(ErrnoWithText::new(
            libc::ECHILD,
            "the context is the parent process's: open one of your own",
        ));
    }
    Ok(context)
}

/// Opens a context with slots for `cores` threads.
pub(crate) fn open_libudm_context(cores: usize) -> Result<i32, ErrnoWithText> {
    let context = LibudmContext::new(cores)?;
    let handle = new_handle();
    lock_libudm_contexts()?.insert(handle, Arc::new(context));
    Ok(handle)
}

/// Closes a context with all of its devices.
pub(crate) fn close_libudm_context(handle: i32) -> Result<(), ErrnoWithText> {
    let context = find_libudm_context(handle)?;
    context.end()?;
    lock_libudm_contexts()?.remove(&handle);
    Ok(())
}

fn errno_with_text_from_io_error(error: &std::io::Error) -> ErrnoWithText {
    ErrnoWithText::new(error.raw_os_error().unwrap_or(libc::EINVAL), error.to_string())
}

impl LibudmContext {
    fn new(cores: usize) -> Result<LibudmContext, ErrnoWithText> {
        let core_set = ProcessCores::with_task_core(cores).map_err(|e| errno_with_text_from_io_error(&e))?;
        let over = Arc::new(AtomicBool::new(false));
        let (sender, receiver) = sync_channel(1);
        let background_core = {
            let (core_set, over) = (Arc::clone(&core_set), Arc::clone(&over));
            let run = move || {
                let id = CoreId(cores as u16);
                let attached = LocalCore::attach(&core_set, id, core_handle::core_options_for_cpu(None));
                let mut core = match attached {
                    Ok(core) => core,
                    Err(error) => return drop(sender.send(Err(error))),
                };
                let _ = sender.send(Ok(()));
                loop {
                    core.turn(|_| ());
                    // Checked between turn and park, because the turn may have consumed the kick
                    // that follows the flag.
                    if over.load(Ordering::Relaxed) {
                        break;
                    }
                    core.park();
                }
                core.detach();
            };
            thread::Builder::new()
                .name("udm-keeper".into())
                .spawn(run)
                .map_err(|e| errno_with_text_from_io_error(&e))?
        };
        let attached =
            receiver.recv().map_err(|_| ErrnoWithText::new(libc::EIO, "the background core ended"))?;
        attached.map_err(|e| errno_with_text_from_io_error(&e))?;
        Ok(LibudmContext {
            registry: DeviceRegistry::new(core_set.clone(), core_set.len()),
            core_set,
            core_slots: Mutex::new(Some(vec![false; cores])),
            background_core: Mutex::new(Some(background_core)),
            over,
            forks: FORKS.load(Ordering::Relaxed),
        })
    }

    fn core_slots(&self) -> MutexGuard<'_, Option<Vec<bool>>> {
        self.core_slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Claims slot `number`, or the first free one.
    pub(crate) fn claim_slot(&self, number: Option<usize>) -> Result<CoreId, ErrnoWithText> {
        let mut core_slots = self.core_slots();
        let taken = core_slots
            .as_mut()
            .ok_or_else(|| ErrnoWithText::new(libc::EBADF, "the context is being closed"))?;
        let free = match number {
            None => taken.iter().position(|taken| !taken).ok_or(libc::EAGAIN),
            Some(number) if number >= taken.len() => Err(libc::EINVAL),
            Some(number) if taken[number] => Err(libc::EBUSY),
            Some(number) => Ok(number),
        };
        let number = free.map_err(|errno| {
            let which = number.map_or("all of the".into(), |number| format!("number {number} of the"));
            ErrnoWithText::new(errno, format!("core not available: {which} context's {}", taken.len()))
        })?;
        taken[number] = true;
        Ok(CoreId(number as u16))
    }

    pub(crate) fn release_slot(&self, core: CoreId) {
        if let Some(taken) = self.core_slots().as_mut() {
            taken[core.index()] = false;
        }
    }

    /// Runs `work`, which may wait for all cores of this context. A calling thread that is a core
    /// runs turns meanwhile.
    pub(crate) fn control<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        if !core_handle::is_core_thread() {
            return work();
        }
        thread::scope(|scope| {
            let work = scope.spawn(work);
            while !work.is_finished() {
                core_handle::poll_all_cores();
            }
            work.join().unwrap_or_else(|panic| resume_unwind(panic))
        })
    }

    /// The device `word`: the name of a mapped device, or any device word of a table.
    pub(crate) fn device(&self, word: &str) -> Result<ResolvedDevice, ErrnoWithText> {
        let named = self.registry.find(word).is_ok();
        let at = if named { format!("@{word}") } else { word.to_owned() };
        Ok(verbs::resolve_device(&self.registry, word, &at)?)
    }

    /// Removes all devices and ends the background core.
    fn end(&self) -> Result<(), ErrnoWithText> {
        {
            let mut core_slots = self.core_slots();
            let Some(taken) = &*core_slots else {
                return Err(ErrnoWithText::new(libc::EBADF, "another thread closes the context"));
            };
            if taken.contains(&true) {
                return Err(ErrnoWithText::new(libc::EBUSY, "some threads are still cores of the context"));
            }
            // From here on, calls find the context closed.
            *core_slots = None;
        }
        // A device can be removed only after the devices above it, so retry while devices
        // disappear.
        let mut left = usize::MAX;
        loop {
            let names: Vec<String> = self.registry.all().iter().map(|mapped| mapped.device.name()).collect();
            if names.is_empty() || names.len() >= left {
                break;
            }
            left = names.len();
            for name in names.iter().rev() {
                let _ =
                    self.control(|| verbs::block_on_verb(verbs::remove_mapped_device(&self.registry, name)));
            }
        }
        self.over.store(true, Ordering::Relaxed);
        // No device has this id, so the command only wakes the background core.
        self.core_set.broadcast(DeviceId::new(), LaneCommand::Kick);
        let background_core = self.background_core.lock().unwrap_or_else(PoisonError::into_inner).take();
        let ended = background_core.map_or(Ok(()), JoinHandle::join);
        ended.map_err(|_| ErrnoWithText::new(libc::EIO, "the background core panicked"))
    }
}
