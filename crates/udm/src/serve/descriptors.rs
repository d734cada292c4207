//! The limit on open files of a server.
//!
//! Each connection, device and file needs a descriptor, but the default soft limit is low for the
//! sake of programs that use `select`. A server raises its soft limit to the hard limit. The
//! command of `--run` gets the original limit.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::sync::OnceLock;

/// The soft limit before it was raised.
static ORIGINAL_LIMIT: OnceLock<u64> = OnceLock::new();

/// Raises the soft limit to the hard limit, once.
pub fn raise_open_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let Some(soft) = limit.current.filter(|&soft| limit.maximum.is_none_or(|hard| soft < hard)) else {
        return;
    };
    match setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        Ok(()) => drop(ORIGINAL_LIMIT.set(soft)),
        Err(error) => tracing::warn!("serve: the limit on open files stays at {soft}: {error}"),
    }
}

/// The words of a shell that runs `command` under the original limit.
pub(super) fn shell_with_original_ulimit(command: &str) -> Vec<String> {
    let mut shell = vec!["/bin/sh".to_owned(), "-c".into()];
    shell.extend(ORIGINAL_LIMIT.get().map(|soft| format!("ulimit -Sn {soft}; exec /bin/sh -c \"$0\"")));
    shell.push(command.into());
    shell
}
