//! A mount with a server that can be stopped.

use super::{has, report_skip, until};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

/// A mount with one file, `nbd`: nbdfuse over nbdkit. Dropping it ends both and removes the mount.
pub struct Mount {
    fuse: Child,
    behind: Pid,
    folder: TempDir,
}

impl Mount {
    /// Returns `None` and reports the skip if there is no FUSE.
    pub fn new() -> Option<Mount> {
        Mount::of(&["memory", "1M"])
    }

    /// The same with an nbdkit with these arguments.
    pub fn of(kit: &[&str]) -> Option<Mount> {
        if !has("nbdfuse") || !has("nbdkit") || !has("fusermount3") {
            return None;
        }
        if fs::File::options().read(true).write(true).open("/dev/fuse").is_err() {
            report_skip("/dev/fuse can't be opened");
            return None;
        }
        let folder = TempDir::new().unwrap();
        let mut fuse = Command::new("nbdfuse");
        fuse.arg(folder.path()).args(["--command", "nbdkit", "-s"]).args(kit).stderr(Stdio::null());
        let fuse = fuse.spawn().unwrap();
        until("the mount", || folder.path().join("nbd").exists().then_some(()));
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", fuse.id())).unwrap();
        let behind =
            children.split_whitespace().next().and_then(|pid| Pid::from_raw(pid.parse().ok()?)).unwrap();
        Some(Mount { fuse, behind, folder })
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    pub fn file(&self) -> PathBuf {
        self.folder.path().join("nbd")
    }

    /// Sends a signal to the mount's server.
    pub fn signal(&self, signal: Signal) {
        super::signal(Pid::from_child(&self.fuse), signal);
    }

    /// Sends a signal to the nbdkit that has the data.
    pub fn signal_behind(&self, signal: Signal) {
        super::signal(self.behind, signal);
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = kill_process(self.behind, Signal::KILL);
        self.signal(Signal::KILL);
        let _ = self.fuse.wait();
        let _ = Command::new("fusermount3").arg("-uz").arg(self.folder.path()).status();
    }
}
