//! The functions of libudm. Their doc comments become the comments of the header.

#![allow(clippy::missing_safety_doc, reason = "pointers lead to what the header says")]

use crate::context::{self, FORKS, LibudmContext};
use crate::core_handle;
use crate::error::{self, ErrnoWithText, catch_errors};
use crate::raw::{self, OutBuffer};
use crate::types::{UDM_ANY, UDM_FOREVER, UDM_NOFLUSH, udm_completion, udm_limits, udm_options, udm_request};
use std::ffi::{c_char, c_int};
use std::sync::Once;
use std::sync::atomic::Ordering;
use udm_control::verbs;

/// The version of the library, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn udm_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// The reason why the last failing call of this thread failed, in one or more lines; or why the
/// last udm_submit accepted fewer requests than given. Valid until the next such call.
#[unsafe(no_mangle)]
pub extern "C" fn udm_error() -> *const c_char {
    error::last_error()
}

/// Opens a context, which holds devices. `options` may be NULL. Returns its handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_open(options: *const udm_options) -> c_int {
    catch_errors(|| {
        register_fork_handler();
        let one_a_cpu = || std::thread::available_parallelism().map_or(1, usize::from);
        let cores = if options.is_null() {
            0
        } else {
            // SAFETY: it points to options, as the header says.
            let options = unsafe { raw::slice_from_c_array(options, 1, "options") }?[0];
            if options.size as usize != size_of::<udm_options>() {
                return Err(ErrnoWithText::new(libc::EINVAL, "options: of another version"));
            }
            options.cores as usize
        };
        context::open_libudm_context(if cores == 0 { one_a_cpu() } else { cores })
    })
}

/// Counts forks, so that a child is not taken for its parent: threads and rings are not inherited.
fn register_fork_handler() {
    extern "C" fn forked() {
        FORKS.fetch_add(1, Ordering::Relaxed);
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the function only adds to an atomic in the child. If registering fails for want
        // of memory, a child is not recognised.
        let _ = unsafe { libc::pthread_atfork(None, None, Some(forked)) };
    });
}

/// Closes a context with all of its devices. EBUSY while threads are cores of it.
#[unsafe(no_mangle)]
pub extern "C" fn udm_close(context: c_int) -> c_int {
    catch_errors(|| context::close_libudm_context(context).map(|()| 0))
}

/// Runs `work` for the device called `name`.
///
/// # Safety
/// As of [`raw::text`].
unsafe fn with_device_name<T: Send>(
    context: c_int,
    name: *const c_char,
    work: impl FnOnce(&LibudmContext, &str) -> Result<T, ErrnoWithText> + Send,
) -> Result<T, ErrnoWithText> {
    let context = context::find_libudm_context(context)?;
    // SAFETY: as the caller says.
    let name = unsafe { raw::str_from_c_string(name, "name") }?;
    context.control(|| work(&context, name))
}

/// Creates a mapped device with a live table. A table of one word means the whole device of that
/// word.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_create(context: c_int, name: *const c_char, table: *const c_char) -> c_int {
    catch_errors(|| {
        // SAFETY: it points to a string, as the header says.
        let table = unsafe { raw::str_from_c_string(table, "table") }?;
        let create = |context: &LibudmContext, name: &str| {
            let made =
                verbs::block_on_verb(verbs::create_mapped_device(&context.registry, name, None, Some(table)));
            made.map(|()| 0).map_err(|e| ErrnoWithText::with_table(&e, table))
        };
        // SAFETY: as above.
        unsafe { with_device_name(context, name, create) }
    })
}

/// Loads a table into the inactive slot of a device; a resume makes it live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_load(context: c_int, name: *const c_char, table: *const c_char) -> c_int {
    catch_errors(|| {
        // SAFETY: it points to a string, as the header says.
        let table = unsafe { raw::str_from_c_string(table, "table") }?;
        let load = |context: &LibudmContext, name: &str| {
            let loaded = verbs::load_inactive_table(&context.registry, name, table);
            loaded.map(|()| 0).map_err(|e| ErrnoWithText::with_table(&e, table))
        };
        // SAFETY: as above.
        unsafe { with_device_name(context, name, load) }
    })
}

/// Holds back new requests of a device. Without UDM_NOFLUSH it waits for those in flight. Every
/// thread that has a lane of the device must poll or wait meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_suspend(context: c_int, name: *const c_char, flags: u32) -> c_int {
    catch_errors(|| {
        if flags & !UDM_NOFLUSH != 0 {
            return Err(ErrnoWithText::new(libc::EINVAL, "flags that a suspend does not have"));
        }
        let suspend = |context: &LibudmContext, name: &str| {
            verbs::block_on_verb(verbs::suspend_mapped_devices(
                &context.registry,
                &[name],
                flags & UDM_NOFLUSH != 0,
            ))?;
            Ok(0)
        };
        // SAFETY: it points to a string, as the header says.
        unsafe { with_device_name(context, name, suspend) }
    })
}

/// Makes the loaded table live, if there is one, and lets requests continue. Every thread that has
/// a lane of the device must poll or wait meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_resume(context: c_int, name: *const c_char) -> c_int {
    catch_errors(|| {
        let resume = |context: &LibudmContext, name: &str| {
            verbs::block_on_verb(verbs::resume_mapped_devices(&context.registry, &[name]))?;
            Ok(0)
        };
        // SAFETY: it points to a string, as the header says.
        unsafe { with_device_name(context, name, resume) }
    })
}

/// Removes a device. EBUSY while a lane of it is open, or another device uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_remove(context: c_int, name: *const c_char) -> c_int {
    catch_errors(|| {
        let remove = |context: &LibudmContext, name: &str| {
            verbs::block_on_verb(verbs::remove_mapped_device(&context.registry, name))?;
            Ok(0)
        };
        // SAFETY: it points to a string, as the header says.
        unsafe { with_device_name(context, name, remove) }
    })
}

/// Sends a message to the target at `sector`. Writes its answer into `text`, which has `len` bytes,
/// like snprintf. Returns the length of the whole answer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_message(
    context: c_int,
    name: *const c_char,
    sector: u64,
    message: *const c_char,
    text: *mut c_char,
    len: usize,
) -> c_int {
    catch_errors(|| {
        // SAFETY: it points to a string, as the header says.
        let message = unsafe { raw::str_from_c_string(message, "message") }?;
        // SAFETY: `text` points to `len` bytes, as the header says.
        let mut room = unsafe { OutBuffer::new(text, len, "text") }?;
        let send = |context: &LibudmContext, name: &str| {
            Ok(verbs::send_target_message(&context.registry, name, sector, message)?)
        };
        // SAFETY: it points to a string, as the header says.
        raw::copy_string(&unsafe { with_device_name(context, name, send) }?, &mut room)
    })
}

/// Writes the live table of a device into `text`, in dmsetup's format, like snprintf. Returns the
/// length of the whole text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_table(
    context: c_int,
    name: *const c_char,
    text: *mut c_char,
    len: usize,
) -> c_int {
    catch_errors(|| {
        // SAFETY: it points to `len` bytes, as the header says.
        let mut room = unsafe { OutBuffer::new(text, len, "text") }?;
        let table = |context: &LibudmContext, name: &str| {
            Ok(verbs::table_by_device_name(&context.registry, name, false)?.text)
        };
        // SAFETY: it points to a string, as the header says.
        raw::copy_string(&unsafe { with_device_name(context, name, table) }?, &mut room)
    })
}

/// Writes the status of a device into `text`, in dmsetup's format, like snprintf. Returns the
/// length of the whole text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_status(
    context: c_int,
    name: *const c_char,
    text: *mut c_char,
    len: usize,
) -> c_int {
    catch_errors(|| {
        // SAFETY: it points to `len` bytes, as the header says.
        let mut room = unsafe { OutBuffer::new(text, len, "text") }?;
        let status = |context: &LibudmContext, name: &str| {
            Ok(verbs::table_status_by_device_name(&context.registry, name, false)?.text)
        };
        // SAFETY: it points to a string, as the header says.
        raw::copy_string(&unsafe { with_device_name(context, name, status) }?, &mut room)
    })
}

/// Writes size and limits of a device to `limits`. `device` is the name of a mapped device, or any
/// device word of a table: "null:size=1G", a file, a block device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_device_limits(
    context: c_int,
    device: *const c_char,
    limits: *mut udm_limits,
) -> c_int {
    catch_errors(|| {
        // SAFETY: it points to space for one structure, as the header says.
        let mut room = unsafe { OutBuffer::new(limits, 1, "limits") }?;
        let look = |context: &LibudmContext, device: &str| Ok(context.device(device)?.device.limits());
        // SAFETY: it points to a string, as the header says.
        let of = unsafe { with_device_name(context, device, look) }?;
        let given = udm_limits {
            sectors: of.size.0,
            logical_block: of.logical_block,
            physical_block: of.physical_block,
            discard_max: of.max_discard.0,
            write_zeroes_max: of.max_write_zeroes.0,
            read_only: of.read_only.into(),
            write_cache: of.write_cache.into(),
        };
        room.write_at(0, given);
        Ok(0)
    })
}

/// Makes the calling thread a core of the context. `number` is its number, from 0, which tables use
/// as CPU number; `cpu` is the CPU to run on. Both may be UDM_ANY. Returns a handle that only this
/// thread may use.
#[unsafe(no_mangle)]
pub extern "C" fn udm_core_open(context: c_int, number: i32, cpu: i32) -> c_int {
    catch_errors(|| {
        let context = context::find_libudm_context(context)?;
        let given = |what: &str, value: i32| match value {
            UDM_ANY => Ok(None),
            value => usize::try_from(value)
                .map(Some)
                .map_err(|_| ErrnoWithText::new(libc::EINVAL, format!("{what}: {value} is negative"))),
        };
        core_handle::open_calling_thread_core(context, given("number", number)?, given("cpu", cpu)?)
    })
}

/// Closes the core and its lanes; the thread is no longer a core. EBUSY while requests are in
/// flight.
#[unsafe(no_mangle)]
pub extern "C" fn udm_core_close(core: c_int) -> c_int {
    catch_errors(|| core_handle::close_calling_thread_core(core).map(|()| 0))
}

/// Opens a lane of a device on this core. `device` is the name of a mapped device, or any device
/// word of a table. Returns the number of the lane, from 0; numbers of closed lanes are reused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_lane_open(core: c_int, device: *const c_char) -> c_int {
    catch_errors(|| {
        // SAFETY: it points to a string, as the header says.
        let device = unsafe { raw::str_from_c_string(device, "device") }?;
        core_handle::with_calling_thread_core(core, |core| core.open_lane(device))
    })
}

/// Closes a lane. EBUSY while requests of it are in flight.
#[unsafe(no_mangle)]
pub extern "C" fn udm_lane_close(core: c_int, lane: c_int) -> c_int {
    catch_errors(|| core_handle::with_calling_thread_core(core, |core| core.close_lane(lane)).map(|()| 0))
}

/// Submits `count` requests to a lane, as one batch. Nothing is copied: the buffers of a request
/// belong to udm until it completes. Returns how many requests were accepted. If these are fewer
/// than `count`, the next one was refused, and udm_error() has the reason. If none was accepted,
/// returns an errno: EAGAIN if too many are in flight.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_submit(
    core: c_int,
    lane: c_int,
    requests: *const udm_request,
    count: u32,
) -> c_int {
    catch_errors(|| {
        // SAFETY: it points to `count` requests, as the header says.
        let requests = unsafe { raw::slice_from_c_array(requests, count as usize, "requests") }?;
        core_handle::with_calling_thread_core(core, |core| {
            // SAFETY: the buffers belong to udm until the requests complete, as the header says.
            let taken =
                core.submit(lane, requests.len(), |i, bio| unsafe { raw::fill_bio(bio, &requests[i]) })?;
            Ok(taken as i32)
        })
    })
}

/// Runs a turn of the core, and writes up to `max` completed requests to `completions`. Returns how
/// many. Never waits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_poll(core: c_int, completions: *mut udm_completion, max: u32) -> c_int {
    // SAFETY: it points to space for `max` completions, as the header says.
    unsafe { udm_wait(core, completions, 0, max, 0) }
}

/// As udm_poll, but waits until `min` requests are completed, or all in flight if those are fewer.
/// Waits at most `timeout` nanoseconds, or without limit for UDM_FOREVER. The thread sleeps during
/// a long wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_wait(
    core: c_int,
    completions: *mut udm_completion,
    min: u32,
    max: u32,
    timeout: i64,
) -> c_int {
    catch_errors(|| {
        // SAFETY: it points to space for `max` completions, as the header says.
        let mut room = unsafe { OutBuffer::new(completions, max as usize, "completions") }?;
        let timeout = match timeout {
            UDM_FOREVER => None,
            timeout => Some(u64::try_from(timeout).map_err(|_| ErrnoWithText::new(libc::EINVAL, "timeout"))?),
        };
        core_handle::with_calling_thread_core(core, |core| {
            let (min, max) = (min as usize, max as usize);
            Ok(core.wait(min, max, timeout, |i, completion| room.write_at(i, completion)) as i32)
        })
    })
}
