//! A backup program: a copy of everything, and a copy of what has changed since the one before.
//!
//! The second is all that an incremental backup is over NBD: ask for the context
//! `qemu:dirty-bitmap:NAME` of the export, ask what is dirty, read that, and put it into the copy.

use super::super::scene::Scene;
use anyhow::{Context, Result, bail};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command as Program, Stdio};
use std::time::Duration;
use udm_wire::nbd::{
    Chunk, ChunkHeader, ClientFlags, ClientOption, Command, CommandFlags, GREETING_SIZE, Info, InfoRequest,
    MetaRequest, OPTION_REPLY_HEADER_SIZE, OptionReply, OptionReplyHeader, ReplyHeader, Request, STATE_DIRTY,
    encode_client_flags,
};
use udm_wire::uri::{NbdAddress, NbdUri};

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// Bytes that are read at once.
const PIECE: u64 = 1 << 20;

/// Bytes that are asked about at once.
const STATUS: u64 = 1 << 30;

/// Who makes the first copy.
pub(super) fn program() -> &'static str {
    let found = Program::new("nbdcopy").arg("--version").output().is_ok_and(|out| out.status.success());
    if found { "nbdcopy" } else { "udm's own client; nbdcopy is not installed" }
}

/// Copies all of `export` into a new file. How many bytes were sent.
pub(super) fn whole(scene: &Scene, export: &str, to: &Path) -> Result<u64> {
    if program() == "nbdcopy" {
        let uri = NbdUri { address: NbdAddress::Unix(scene.socket()), export: export.into() }.to_string();
        let out = Program::new("nbdcopy").arg(uri).arg(to).stdin(Stdio::null()).output()?;
        if !out.status.success() {
            bail!("nbdcopy: {}", String::from_utf8_lossy(&out.stderr).trim());
        }
        // There are no holes in it.
        return Ok(std::fs::metadata(to)?.len());
    }
    let file = File::create(to)?;
    let mut reader = Reader::connect(scene, export, None)?;
    let all = [(0, reader.size)];
    reader.copy(&all, &file)
}

/// Brings a copy of the snapshot `since` up to `export`, another one of the same volume. How many
/// bytes were sent.
pub(super) fn changes(scene: &Scene, export: &str, since: &str, to: &Path) -> Result<u64> {
    let file = File::options().write(true).open(to)?;
    let mut reader = Reader::connect(scene, export, Some(since))?;
    let dirty = reader.dirty()?;
    reader.copy(&dirty, &file)
}

/// A client with structured replies.
struct Reader {
    stream: UnixStream,
    size: u64,
    cookie: u64,
}

impl Reader {
    /// Chooses `export`, and the map of what has changed `since`.
    fn connect(scene: &Scene, export: &str, since: Option<&str>) -> Result<Reader> {
        let mut stream = UnixStream::connect(scene.socket())?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.read_exact(&mut [0; GREETING_SIZE])?;
        let mut opening = encode_client_flags(ClientFlags::FIXED_NEWSTYLE | ClientFlags::NO_ZEROES).to_vec();
        let queries = since.iter().map(|since| format!("{}{since}", udm_wire::nbd::CONTEXT_DIRTY)).collect();
        ClientOption::StructuredReply.encode(&mut opening);
        ClientOption::SetMetaContext(MetaRequest { name: export.into(), queries }).encode(&mut opening);
        ClientOption::Go(InfoRequest { name: export.into(), infos: Vec::new() }).encode(&mut opening);
        stream.write_all(&opening)?;
        let (mut reader, mut maps) = (Reader { stream, size: 0, cookie: 0 }, 0);
        let mut acknowledged = 0;
        while acknowledged < 3 {
            match reader.option_reply()? {
                OptionReply::Ack => acknowledged += 1,
                OptionReply::MetaContext { .. } => maps += 1,
                OptionReply::Info(Info::Export { size, .. }) => reader.size = size,
                OptionReply::Info(_) => {}
                refused => bail!("{export}: {refused:?}"),
            }
        }
        match since {
            Some(since) if maps == 0 => bail!("{export}: it does not know what has changed since {since}"),
            _ => Ok(reader),
        }
    }

    fn option_reply(&mut self) -> Result<OptionReply> {
        let mut header = [0; OPTION_REPLY_HEADER_SIZE];
        self.stream.read_exact(&mut header)?;
        let header = OptionReplyHeader::decode(&header)?;
        let mut data = vec![0; header.len as usize];
        self.stream.read_exact(&mut data)?;
        Ok(OptionReply::decode(header.reply, &data)?)
    }

    /// What has changed: where each range begins, and where it ends.
    fn dirty(&mut self) -> Result<Vec<(u64, u64)>> {
        let (mut at, mut dirty) = (0, Vec::<(u64, u64)>::new());
        while at < self.size {
            let asked = at;
            self.ask(Command::BlockStatus, at, STATUS.min(self.size - at), |chunk| {
                let Chunk::BlockStatus { descriptors, .. } = chunk else { bail!("not a map: {chunk:?}") };
                for (len, flags) in descriptors.iter() {
                    let end = at + u64::from(len);
                    match dirty.last_mut().filter(|last| last.1 == at) {
                        _ if flags & STATE_DIRTY == 0 => {}
                        Some(last) => last.1 = end,
                        None => dirty.push((at, end)),
                    }
                    at = end;
                }
                Ok(())
            })?;
            if at == asked || at > self.size {
                bail!("a map of {} bytes goes from byte {asked} to byte {at}", self.size);
            }
        }
        Ok(dirty)
    }

    /// Reads ranges and puts them where they belong.
    fn copy(&mut self, ranges: &[(u64, u64)], file: &File) -> Result<u64> {
        let mut sent = 0;
        for &(start, end) in ranges {
            for at in (start..end).step_by(PIECE as usize) {
                self.ask(Command::Read, at, PIECE.min(end - at), |chunk| {
                    match chunk {
                        Chunk::Data { offset, data } => {
                            sent += data.len() as u64;
                            file.write_all_at(data, offset)?;
                        }
                        Chunk::None => {}
                        other => bail!("not data: {other:?}"),
                    }
                    Ok(())
                })?;
            }
        }
        Ok(sent)
    }

    /// One request, with each chunk of its answer.
    fn ask(
        &mut self,
        command: Command,
        offset: u64,
        len: u64,
        mut take: impl FnMut(Chunk<'_>) -> Result<()>,
    ) -> Result<()> {
        self.cookie += 1;
        let (cookie, len) = (self.cookie, u32::try_from(len)?);
        let request = Request { flags: CommandFlags::empty(), command, cookie, offset, len };
        self.stream.write_all(&request.encode())?;
        loop {
            let mut head = [0; ChunkHeader::SIZE];
            self.stream.read_exact(&mut head).context("an answer")?;
            let header = match ReplyHeader::decode(&mut &head[..])? {
                Some(ReplyHeader::Chunk(header)) if header.cookie == cookie => header,
                other => bail!("{command:?} at byte {offset}: {other:?}"),
            };
            if u64::from(header.len) > 2 * PIECE {
                bail!("{command:?} at byte {offset}: a chunk of {} bytes", header.len);
            }
            let mut payload = vec![0; header.len as usize];
            self.stream.read_exact(&mut payload)?;
            match Chunk::decode(header, &payload)? {
                Chunk::Error { error, text, .. } => {
                    bail!("{command:?} at byte {offset}: error {error} {text}")
                }
                chunk => take(chunk)?,
            }
            if header.is_done() {
                return Ok(());
            }
        }
    }
}
