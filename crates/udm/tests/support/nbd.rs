//! A minimal NBD client for tests.

use super::PATIENCE;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use udm_wire::nbd::{
    ClientFlags, CommandFlags, ExportFlags, GREETING_SIZE, NbdCommand, NbdOption, NbdRequestHeader,
    encode_client_flags,
};

const SECTOR: u64 = 512;

/// Connects, without a handshake.
pub fn dial(socket: &Path) -> UnixStream {
    let stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// A client of an export, with simple replies.
pub struct Client {
    pub stream: UnixStream,
    pub size: u64,
    pub flags: ExportFlags,
    /// The requests so far; the index is the cookie.
    asked: Vec<(NbdCommand, u64, u64)>,
}

impl Client {
    pub fn connect(socket: &Path, export: &str) -> Client {
        Client::connect_on(dial(socket), export)
    }

    /// The same on a connected socket.
    pub fn connect_on(mut stream: UnixStream, export: &str) -> Client {
        stream.read_exact(&mut [0; GREETING_SIZE]).unwrap();
        let mut opening = encode_client_flags(ClientFlags::FIXED_NEWSTYLE | ClientFlags::NO_ZEROES).to_vec();
        NbdOption::ExportName(export.into()).encode(&mut opening);
        stream.write_all(&opening).unwrap();
        let (mut size, mut flags) = ([0; 8], [0; 2]);
        stream.read_exact(&mut size).unwrap();
        stream.read_exact(&mut flags).unwrap();
        let flags = ExportFlags::from_bits_retain(u16::from_be_bytes(flags));
        Client { stream, size: u64::from_be_bytes(size), flags, asked: Vec::new() }
    }

    /// Sends the header of a request. The caller sends the payload of a write.
    pub fn head(&mut self, command: NbdCommand, offset: u64, len: u64) -> io::Result<()> {
        let request = self.request(CommandFlags::empty(), command, offset, len);
        self.stream.write_all(&request)
    }

    /// The header of the next request.
    fn request(&mut self, flags: CommandFlags, command: NbdCommand, offset: u64, len: u64) -> Vec<u8> {
        let cookie = self.asked.len() as u64;
        self.asked.push((command, offset, len));
        NbdRequestHeader { flags, command, cookie, offset, len }.encode().to_vec()
    }

    /// Sends a request, with its data if it is a write; returns its cookie. Cookies count from 0.
    ///
    /// # Errors
    /// The server has closed the connection.
    pub fn send(
        &mut self,
        flags: CommandFlags,
        command: NbdCommand,
        offset: u64,
        len: u64,
        data: &[u8],
    ) -> io::Result<u64> {
        let mut bytes = self.request(flags, command, offset, len);
        bytes.extend(data);
        self.stream.write_all(&bytes)?;
        Ok(self.asked.len() as u64 - 1)
    }

    /// Sends a request; the payload of a write is bytes of 1.
    pub fn ask(&mut self, command: NbdCommand, offset: u64, len: u64) {
        self.head(command, offset, len).unwrap();
        if command == NbdCommand::Write {
            self.stream.write_all(&vec![1; len as usize]).unwrap();
        }
    }

    /// The next reply: the cookie, the error, and the data of a read.
    ///
    /// # Errors
    /// The server has closed the connection.
    pub fn answer(&mut self) -> io::Result<(u64, u32, Vec<u8>)> {
        let mut head = [0; 16];
        self.stream.read_exact(&mut head)?;
        let error = u32::from_be_bytes(head[4..8].try_into().unwrap());
        let cookie = u64::from_be_bytes(head[8..].try_into().unwrap());
        let (command, _, len) = self.asked[cookie as usize];
        let is_data = command == NbdCommand::Read && error == 0;
        let mut data = vec![0; if is_data { len as usize } else { 0 }];
        self.stream.read_exact(&mut data)?;
        Ok((cookie, error, data))
    }

    /// The next reply: the offset of its request, and the error.
    pub fn reply(&mut self) -> (u64, u32) {
        let (cookie, error, _) = self.answer().unwrap();
        (self.asked[cookie as usize].1, error)
    }

    /// The error of the next reply.
    pub fn error(&mut self) -> u32 {
        self.reply().1
    }

    /// Sends one request; returns the error of its reply.
    pub fn one(&mut self, command: NbdCommand, offset: u64, len: u64) -> u32 {
        self.ask(command, offset, len);
        let (answered, error) = self.reply();
        assert_eq!(answered, offset);
        error
    }

    /// Sends a read of one sector.
    pub fn ask_read(&mut self, sector: u64) {
        self.ask(NbdCommand::Read, sector * SECTOR, SECTOR);
    }

    /// Reads one sector; returns the error.
    pub fn read(&mut self, sector: u64) -> u32 {
        self.one(NbdCommand::Read, sector * SECTOR, SECTOR)
    }

    /// Writes one sector; returns the error.
    pub fn write(&mut self, sector: u64) -> u32 {
        self.one(NbdCommand::Write, sector * SECTOR, SECTOR)
    }
}
