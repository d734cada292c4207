//! A disk that moves: a file, its server with a state folder, and what a test asks them.

use super::nbd::Client;
use super::{Server, until};
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use tempfile::TempDir;
use udm_wire::nbd::{CommandFlags, NbdCommand};

pub const SIZE: u64 = 16 << 20;
pub const REGION: u64 = 64 << 10;

/// Data without two equal sectors; the last quarter is zeroes.
pub fn data() -> Vec<u8> {
    let word = |word: u64| if word < SIZE / 8 * 3 / 4 { word * 0x9e37_79b9 + 1 } else { 0 };
    (0..SIZE / 8).flat_map(|at| word(at).to_le_bytes()).collect()
}

/// A disk in the file `old`, and its server, which has a state folder of its own.
pub struct MovedDisk {
    pub folder: TempDir,
    pub server: Server,
}

impl MovedDisk {
    pub fn new() -> MovedDisk {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("old"), data()).unwrap();
        let server = MovedDisk::serve(&folder, &[]);
        MovedDisk { folder, server }
    }

    /// A server of the disk, by its first place.
    pub fn serve(folder: &TempDir, more: &[&str]) -> Server {
        let path = |name: &str| folder.path().join(name).display().to_string();
        let device = format!("disk={}", path("old"));
        Server::start_with(&[&[device.as_str()], more].concat(), &["--state", &path("state")])
    }

    pub fn restart(&mut self) {
        self.server.kill();
        self.server = MovedDisk::serve(&self.folder, &[]);
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn word(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap()
    }

    /// Moves the disk to `to`, and waits for the end.
    pub fn move_to(&self, to: &str) -> Value {
        let moved = self.server.says(&["move", "disk", "--to", &self.word(to), "--wait", "--json"]);
        serde_json::from_str(&moved).unwrap()
    }

    /// Begins a move that cannot end by itself.
    pub fn begin(&self, to: &str) {
        self.server.says(&["move", "disk", "--to", to, "--pause"]);
    }

    pub fn list(&self) -> Value {
        serde_json::from_str(&self.server.says(&["move", "list", "--json"])).unwrap()
    }

    pub fn state(&self) -> String {
        self.list()[0]["state"].as_str().unwrap_or("none").to_owned()
    }

    pub fn until_state(&self, state: &str) {
        until(state, || {
            let now = self.state();
            assert!(now == state || now != "failed", "{}", self.list());
            (now == state).then_some(())
        });
    }

    /// The line of a verb that is refused.
    pub fn refusal(&self, args: &[&str]) -> String {
        let error = self.server.refuses(args);
        assert_eq!(error.trim_end().lines().count(), 1, "one line: {error}");
        error
    }

    pub fn client(&self) -> Client {
        Client::connect(&self.server.nbd, "disk")
    }
}

/// Writes bytes of 1 at one place.
pub fn write(client: &mut Client, at: u64, len: u64) {
    assert_eq!(client.one(NbdCommand::Write, at, len), 0, "{at}");
}

pub fn read(client: &mut Client, at: u64, len: u64) -> Vec<u8> {
    client.send(CommandFlags::empty(), NbdCommand::Read, at, len, &[]).unwrap();
    let (_, error, data) = client.answer().unwrap();
    assert_eq!(error, 0);
    data
}
