//! Faults in shared memory whose file was cut.
//!
//! A process that shares its memory may truncate the file. An access to a page beyond the new end
//! raises SIGBUS, which ends a process by default. For a guarded range the handler maps zero pages
//! over the whole range instead, marks the range as lost, and the access continues. Users check
//! [`LostPagesGuard::is_lost`] before they report success.
//!
//! The handler only reads atomics and calls `mmap`, which is a plain system call. A SIGBUS at any
//! other address goes to the handler that was installed before.

use std::cell::UnsafeCell;
use std::io;
use std::mem::MaybeUninit;
use std::sync::Mutex;
use std::sync::OnceLock;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Number of ranges that can be guarded at the same time: 32 machines with 32 regions each.
const SLOTS: usize = 1024;

/// A guarded range of addresses; unused if `start` is 0.
struct GuardedRange {
    start: AtomicUsize,
    len: AtomicUsize,
    lost: AtomicBool,
}

static GUARDS: [GuardedRange; SLOTS] = [const {
    GuardedRange { start: AtomicUsize::new(0), len: AtomicUsize::new(0), lost: AtomicBool::new(false) }
}; SLOTS];

/// Held while a slot is taken.
static CLAIM: Mutex<()> = Mutex::new(());

/// The disposition of SIGBUS before [`install`].
struct PreviousSigbusAction(UnsafeCell<MaybeUninit<libc::sigaction>>);

// SAFETY: written once, before the handler that reads it is installed.
unsafe impl Sync for PreviousSigbusAction {}

static PREVIOUS: PreviousSigbusAction = PreviousSigbusAction(UnsafeCell::new(MaybeUninit::zeroed()));

/// Keeps a mapped range of this process usable after its file was cut.
#[derive(Debug)]
pub(crate) struct LostPagesGuard(usize);

impl LostPagesGuard {
    /// Guards `len` bytes from address `start` on. The caller drops the guard before it unmaps
    /// them.
    ///
    /// # Errors
    /// 1,024 ranges are guarded already, or the handler cannot be installed.
    pub(crate) fn new(start: usize, len: usize) -> io::Result<LostPagesGuard> {
        static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
        INSTALLED.get_or_init(install).map_err(io::Error::from_raw_os_error)?;
        let _claim = CLAIM.lock().unwrap_or_else(PoisonError::into_inner);
        let free = GUARDS.iter().position(|slot| slot.start.load(Ordering::Relaxed) == 0);
        let Some(index) = free else {
            return Err(io::Error::other(format!(
                "too many regions of shared memory: all {SLOTS} are in use"
            )));
        };
        let slot = &GUARDS[index];
        slot.lost.store(false, Ordering::Relaxed);
        slot.len.store(len, Ordering::Relaxed);
        slot.start.store(start, Ordering::Release);
        Ok(LostPagesGuard(index))
    }

    /// True if the file of the range was cut and a lost page was accessed. The range holds zeroes
    /// from then on.
    pub(crate) fn is_lost(&self) -> bool {
        GUARDS[self.0].lost.load(Ordering::Relaxed)
    }
}

impl Drop for LostPagesGuard {
    fn drop(&mut self) {
        GUARDS[self.0].start.store(0, Ordering::Release);
    }
}

/// Installs the handler.
///
/// # Errors
/// The errno of `sigaction`.
fn install() -> Result<(), i32> {
    let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = on_bus_error;
    // SAFETY: all zeroes is a valid sigaction: no flags, and an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the place is valid for a sigaction, and nobody reads it before the handler runs.
    let known = unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), PREVIOUS.0.get().cast()) };
    // SAFETY: the handler has the signature that SA_SIGINFO demands, and is async-signal-safe.
    let set = unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) };
    if known == 0 && set == 0 {
        return Ok(());
    }
    Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL))
}

extern "C" fn on_bus_error(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo.
    let info = unsafe { &*info };
    // SAFETY: SIGBUS has an address.
    let address = unsafe { info.si_addr() } as usize;
    let contains = |slot: &&GuardedRange| {
        let start = slot.start.load(Ordering::Acquire);
        start != 0 && address.wrapping_sub(start) < slot.len.load(Ordering::Relaxed)
    };
    if GUARDS.iter().find(contains).is_none_or(|slot| !map_zero_pages_over_lost_range(slot)) {
        // SAFETY: `PREVIOUS` was filled before this handler was installed. The access is repeated
        // after the return and then reaches the previous handler.
        unsafe { libc::sigaction(libc::SIGBUS, PREVIOUS.0.get().cast(), std::ptr::null_mut()) };
    }
}

/// Maps zero pages over the range of `slot` and marks it as lost; false if that fails.
fn map_zero_pages_over_lost_range(slot: &GuardedRange) -> bool {
    let (start, len) = (slot.start.load(Ordering::Relaxed), slot.len.load(Ordering::Relaxed));
    slot.lost.store(true, Ordering::Relaxed);
    // The interrupted code may be about to read errno.
    // SAFETY: no condition.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: the variable of this thread; nothing else holds a reference to it.
    let before = unsafe { errno.read() };
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // SAFETY: the range is a mapping of this process that its owner keeps until the guard is
    // dropped; it becomes zero pages. Its users treat every value of its bytes as valid.
    let at = unsafe { libc::mmap(start as *mut libc::c_void, len, access, flags, -1, 0) };
    // SAFETY: as above.
    unsafe { errno.write(before) };
    at != libc::MAP_FAILED
}
