//! A backup program: full and incremental copies over NBD.
//!
//! The incremental copy shows all that a client needs: negotiate the metadata context
//! `qemu:dirty-bitmap:NAME` of the export, query the dirty ranges, read them, and write them into
//! the copy.

use super::super::demo_server::DemoServer;
use anyhow::{Result, bail};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command as Program, Stdio};
use udm_backends::nbd::BlockingNbdClient;
use udm_wire::nbd::client::ReplyEvent;
use udm_wire::nbd::{CONTEXT_DIRTY, NbdCommand, STATE_DIRTY};

/// Bytes per read.
const PIECE: u64 = 1 << 20;

/// Bytes per block-status query.
const STATUS: u64 = 1 << 30;

/// The program that makes the full copy.
pub(super) fn full_copy_program_name() -> &'static str {
    let found = Program::new("nbdcopy").arg("--version").output().is_ok_and(|out| out.status.success());
    if found { "nbdcopy" } else { "udm's own client; nbdcopy is not installed" }
}

/// Copies all of `export` into a new file. Returns the number of bytes transferred.
pub(super) fn full_backup(server: &DemoServer, export: &str, to: &Path) -> Result<u64> {
    if full_copy_program_name() == "nbdcopy" {
        let uri = server.uri(export).to_string();
        let out = Program::new("nbdcopy").arg(uri).arg(to).stdin(Stdio::null()).output()?;
        if !out.status.success() {
            bail!("nbdcopy: {}", String::from_utf8_lossy(&out.stderr).trim());
        }
        // The volume has no holes, so all of its bytes are transferred.
        return Ok(std::fs::metadata(to)?.len());
    }
    let file = File::create(to)?;
    let mut reader = DirtyMapClient::connect(server, export, None)?;
    let all = [(0, reader.size())];
    reader.copy(&all, &file)
}

/// Updates a copy of the snapshot `since` to `export`, a later snapshot of the same volume. Returns
/// the number of bytes transferred.
pub(super) fn incremental_backup(server: &DemoServer, export: &str, since: &str, to: &Path) -> Result<u64> {
    let file = File::options().write(true).open(to)?;
    let mut reader = DirtyMapClient::connect(server, export, Some(since))?;
    let dirty = reader.dirty()?;
    reader.copy(&dirty, &file)
}

/// A client that can query the ranges changed since a snapshot.
struct DirtyMapClient(BlockingNbdClient);

impl DirtyMapClient {
    /// Connects to `export`, with the dirty bitmap of the changes since `since`.
    fn connect(server: &DemoServer, export: &str, since: Option<&str>) -> Result<DirtyMapClient> {
        let map = since.map(|since| format!("{CONTEXT_DIRTY}{since}"));
        let client = BlockingNbdClient::connect(&server.uri(export), map.as_deref().as_slice())?;
        match since {
            Some(since) if client.export().contexts.is_empty() => {
                bail!("{export}: it has no bitmap of the changes since {since}")
            }
            _ => Ok(DirtyMapClient(client)),
        }
    }

    fn size(&self) -> u64 {
        self.0.export().size
    }

    /// The changed ranges, each with its start and its end in bytes.
    fn dirty(&mut self) -> Result<Vec<(u64, u64)>> {
        let (mut at, mut dirty) = (0, Vec::<(u64, u64)>::new());
        while at < self.size() {
            let (asked, len) = (at, STATUS.min(self.size() - at));
            self.0.ask(NbdCommand::BlockStatus, asked, len as u32, &[], |event| {
                let ReplyEvent::Status { descriptors, .. } = event else { return };
                for (len, flags) in descriptors {
                    let end = at + u64::from(len);
                    match dirty.last_mut().filter(|last| last.1 == at) {
                        _ if flags & STATE_DIRTY == 0 => {}
                        Some(last) => last.1 = end,
                        None => dirty.push((at, end)),
                    }
                    at = end;
                }
            })?;
            if at == asked || at > self.size() {
                bail!("a map of {} bytes goes from byte {asked} to byte {at}", self.size());
            }
        }
        Ok(dirty)
    }

    /// Reads ranges and writes them to the same offsets of the file. Returns the number of bytes.
    fn copy(&mut self, ranges: &[(u64, u64)], file: &File) -> Result<u64> {
        let mut sent = 0;
        for &(start, end) in ranges {
            for at in (start..end).step_by(PIECE as usize) {
                let data = self.0.read(at, PIECE.min(end - at) as u32)?;
                sent += data.len() as u64;
                file.write_all_at(&data, at)?;
            }
        }
        Ok(sent)
    }
}
