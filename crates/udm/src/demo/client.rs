//! As much of an NBD client as the demos need: one request at a time.

use anyhow::{Context, Result, bail};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;
use udm_wire::nbd::{
    ClientFlags, ClientOption, Command, CommandFlags, GREETING_SIZE, Request, encode_client_flags,
};

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// Bytes of a simple reply.
const REPLY_SIZE: usize = 16;

/// A client of one export.
pub(super) struct Client {
    stream: UnixStream,
    cookie: u64,
}

impl Client {
    /// Chooses `export` of the server at `socket`.
    pub fn connect(socket: &Path, export: &str) -> Result<Client> {
        let mut stream = UnixStream::connect(socket).with_context(|| socket.display().to_string())?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.read_exact(&mut [0; GREETING_SIZE])?;
        let mut opening = encode_client_flags(ClientFlags::FIXED_NEWSTYLE | ClientFlags::NO_ZEROES).to_vec();
        ClientOption::ExportName(export.into()).encode(&mut opening);
        stream.write_all(&opening)?;
        // Its size and flags.
        stream.read_exact(&mut [0; 10]).with_context(|| format!("{export}: there is no such export"))?;
        Ok(Client { stream, cookie: 0 })
    }

    /// Writes.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.ask(Command::Write, offset, bytes.len(), bytes)
    }

    /// Reads `len` bytes.
    pub fn read(&mut self, offset: u64, len: usize) -> Result<Vec<u8>> {
        self.ask(Command::Read, offset, len, &[])?;
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// Makes what was written durable.
    pub fn flush(&mut self) -> Result<()> {
        self.ask(Command::Flush, 0, 0, &[])
    }

    fn ask(&mut self, command: Command, offset: u64, len: usize, payload: &[u8]) -> Result<()> {
        self.cookie += 1;
        let (cookie, len) = (self.cookie, u32::try_from(len)?);
        let request = Request { flags: CommandFlags::empty(), command, cookie, offset, len };
        self.stream.write_all(&request.encode())?;
        self.stream.write_all(payload)?;
        let mut reply = [0; REPLY_SIZE];
        self.stream.read_exact(&mut reply)?;
        let error = u32::from_be_bytes(reply[4..8].try_into()?);
        if error != 0 || reply[8..] != cookie.to_be_bytes() {
            bail!("{command:?} at byte {offset}: error {error}");
        }
        Ok(())
    }
}
