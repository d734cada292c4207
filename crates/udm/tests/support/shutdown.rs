//! A server with captured standard error, for tests of the shutdown.

use super::nbd::Client;
use super::{udm, until};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::os::unix::net::UnixStream;
use std::process::{Child, ExitStatus};
use tempfile::TempDir;

pub struct ShutdownServer {
    pub child: Child,
    pub folder: TempDir,
}

impl ShutdownServer {
    pub fn start(options: &[&str], devices: &[&str]) -> ShutdownServer {
        let folder = tempfile::tempdir().unwrap();
        let mut serve = udm(&["serve", "--cores", "0"]);
        for device in devices {
            serve.args(["--device", device]);
        }
        serve.args(options).arg("--unix").arg(folder.path().join("nbd.sock"));
        serve.arg("--socket").arg(folder.path().join("control.sock"));
        let child = serve.stderr(fs::File::create(folder.path().join("said")).unwrap()).spawn().unwrap();
        let server = ShutdownServer { child, folder };
        until("a server that answers", || UnixStream::connect(server.folder.path().join("nbd.sock")).ok());
        server
    }

    /// Connects a client to `export`.
    pub fn client(&self, export: &str) -> Client {
        Client::connect(&self.folder.path().join("nbd.sock"), export)
    }

    pub fn verb(&self, args: &[&str]) {
        let out = udm(args).env("UDM_SOCKET", self.folder.path().join("control.sock")).output().unwrap();
        assert!(out.status.success(), "{args:?}: {out:?}");
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub fn output(&self) -> String {
        fs::read_to_string(self.folder.path().join("said")).unwrap()
    }

    pub fn wait(&mut self) -> ExitStatus {
        until("the end of the server", || self.child.try_wait().unwrap())
    }

    /// True if the sockets are removed.
    pub fn is_clean(&self) -> bool {
        ["nbd.sock", "control.sock"].iter().all(|name| !self.folder.path().join(name).exists())
    }
}

impl Drop for ShutdownServer {
    fn drop(&mut self) {
        // Does not wait: hung storage below may be removed later.
        let _ = self.child.kill();
    }
}
