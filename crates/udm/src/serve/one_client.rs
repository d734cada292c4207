//! Servers of another program: `--single`, for the one client on standard input, and
//! `--exit-with-parent`.

use super::args::ServeArgs;
use anyhow::{Context, Result, bail};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use std::os::fd::OwnedFd;
use std::time::Duration;
use udm_frontends::nbd::NbdServer;

/// Interval of looks at whether the client is still connected.
const LOOK_PAUSE: Duration = Duration::from_millis(20);

/// The socket of `--single`, if the option is given.
///
/// # Errors
/// Standard input is not a connected socket.
pub(super) fn take_single_client(args: &ServeArgs) -> Result<Option<OwnedFd>> {
    if !args.single {
        return Ok(None);
    }
    let socket = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)
        .context("serve: single: standard input")?;
    if rustix::net::getpeername(&socket).is_err() {
        bail!(
            "serve: single: standard input is not a connected socket; a client that starts a server gives it one, \
             as nbd_connect_command of libnbd does"
        );
    }
    Ok(Some(socket))
}

/// Completes when the only client, if there is one, has disconnected.
pub(super) async fn single_client_left(args: &ServeArgs, server: &NbdServer) {
    if !args.single {
        return std::future::pending().await;
    }
    while server.stats().connections > 0 {
        tokio::time::sleep(LOOK_PAUSE).await;
    }
}

/// With `--exit-with-parent`, lets the kernel end this process in an orderly way when its parent
/// has ended.
///
/// # Errors
/// The parent has ended already.
pub(super) fn exit_with_parent(args: &ServeArgs) -> Result<()> {
    if !args.exit_with_parent {
        return Ok(());
    }
    let parent = getppid();
    set_parent_process_death_signal(Some(Signal::TERM)).context("serve: exit-with-parent")?;
    if getppid() != parent {
        bail!("serve: exit-with-parent: the parent has ended already");
    }
    Ok(())
}
