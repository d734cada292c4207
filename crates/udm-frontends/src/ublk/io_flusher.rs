//! `PR_SET_IO_FLUSHER`: a thread that serves a disk must not wait for it when memory is short.

/// Lets the kernel prefer this thread, and those that it starts later, when memory is short: memory
/// that they need must not wait for their own disks. Needs `CAP_SYS_RESOURCE`; without it, nothing
/// changes. Source: `prctl(2)`.
pub fn set_io_flusher() {
    if let Err(error) = rustix::process::configure_io_flusher_behavior(true) {
        tracing::debug!("ublk: PR_SET_IO_FLUSHER: {error}: CAP_SYS_RESOURCE is needed");
    }
}
