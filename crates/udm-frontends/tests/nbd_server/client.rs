//! A scripted client on one half of a socket pair.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;
use udm_wire::nbd::{
    ClientFlags, CommandFlags, ExportInfoItem, ExportInfoRequest, GREETING_SIZE, MetaContextRequest,
    NbdCommand, NbdOption, NbdRequestHeader, NbdServerGreeting, OPTION_REPLY_HEADER_SIZE, OptionReply,
    OptionReplyHeader, ReplyChunk, ReplyHeader, encode_client_flags,
};

pub struct ScriptedClient {
    pub stream: UnixStream,
    cookie: u64,
    /// Reads in flight by cookie: offset and length.
    reads: HashMap<u64, (u64, u32)>,
    structured: bool,
    /// Answer to the last `BLOCK_STATUS`: lengths and flags.
    pub blocks: Vec<(u32, u32)>,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Reply {
    pub cookie: u64,
    pub error: u32,
    pub data: Vec<u8>,
}

impl ScriptedClient {
    /// Creates a client, and the socket that the server adopts.
    pub fn pair() -> (ScriptedClient, OwnedFd) {
        let (stream, socket) = UnixStream::pair().unwrap();
        (ScriptedClient::on(stream), socket.into())
    }

    pub fn on(stream: UnixStream) -> ScriptedClient {
        // A limit against hanging forever.
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
        ScriptedClient { stream, cookie: 0, reads: HashMap::new(), structured: false, blocks: Vec::new() }
    }

    fn exactly<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).expect("the server went away");
        bytes
    }

    /// The bytes that open a session without waiting for answers.
    pub fn opening(export: &str, structured: bool) -> Vec<u8> {
        let flags = ClientFlags::FIXED_NEWSTYLE | ClientFlags::NO_ZEROES;
        let mut bytes = encode_client_flags(flags).to_vec();
        if structured {
            NbdOption::StructuredReply.encode(&mut bytes);
        }
        NbdOption::Go(ExportInfoRequest { name: export.into(), infos: vec![] }).encode(&mut bytes);
        bytes
    }

    /// As `go`, after a selection of metadata contexts of the export `of`. Returns their numbers.
    pub fn go_with_contexts(&mut self, of: &str, queries: &[&str], export: &str) -> Vec<u32> {
        self.exactly::<GREETING_SIZE>();
        let flags = ClientFlags::FIXED_NEWSTYLE | ClientFlags::NO_ZEROES;
        let mut bytes = encode_client_flags(flags).to_vec();
        NbdOption::StructuredReply.encode(&mut bytes);
        let queries = queries.iter().map(|q| (*q).to_owned()).collect();
        NbdOption::SetMetaContext(MetaContextRequest { name: of.into(), queries }).encode(&mut bytes);
        NbdOption::Go(ExportInfoRequest { name: export.into(), infos: vec![] }).encode(&mut bytes);
        self.stream.write_all(&bytes).unwrap();
        self.structured = true;
        let (mut acks, mut ids) = (3, Vec::new());
        while acks > 0 {
            match self.option_reply() {
                OptionReply::Ack => acks -= 1,
                OptionReply::MetaContext { id, .. } => ids.push(id),
                OptionReply::Info(_) => {}
                other => panic!("{other:?}"),
            }
        }
        ids
    }

    /// Sends a `BLOCK_STATUS`. Returns the runs of the only context.
    pub fn status(&mut self, flags: CommandFlags, offset: u64, len: u32) -> Result<Vec<(u32, u32)>, u32> {
        self.blocks.clear();
        let reply = self.ask(NbdCommand::BlockStatus, flags, offset, len, &[]);
        if reply.error == 0 { Ok(std::mem::take(&mut self.blocks)) } else { Err(reply.error) }
    }

    /// Performs the handshake. Returns the information about the export.
    pub fn go(&mut self, export: &str, structured: bool) -> Vec<ExportInfoItem> {
        let greeting = self.exactly::<GREETING_SIZE>();
        NbdServerGreeting::decode(&greeting).unwrap();
        self.stream.write_all(&ScriptedClient::opening(export, structured)).unwrap();
        self.structured = structured;
        let mut acks = 1 + usize::from(structured);
        let mut infos = Vec::new();
        while acks > 0 {
            match self.option_reply() {
                OptionReply::Ack => acks -= 1,
                OptionReply::Info(info) => infos.push(info),
                other => panic!("{other:?}"),
            }
        }
        infos
    }

    /// Performs the handshake with simple replies. Returns false if the export is refused.
    pub fn try_go(&mut self, export: &str) -> bool {
        self.exactly::<GREETING_SIZE>();
        self.stream.write_all(&ScriptedClient::opening(export, false)).unwrap();
        loop {
            match self.option_reply() {
                OptionReply::Ack => return true,
                OptionReply::Info(_) => {}
                _ => return false,
            }
        }
    }

    pub fn option_reply(&mut self) -> OptionReply {
        let header = OptionReplyHeader::decode(&self.exactly::<OPTION_REPLY_HEADER_SIZE>()).unwrap();
        let mut data = vec![0; header.len as usize];
        self.stream.read_exact(&mut data).unwrap();
        OptionReply::decode(header.reply, &data).unwrap()
    }

    /// Sends a request with its payload. Returns its cookie.
    pub fn send(
        &mut self,
        command: NbdCommand,
        flags: CommandFlags,
        offset: u64,
        len: u32,
        payload: &[u8],
    ) -> u64 {
        self.cookie += 1;
        let cookie = self.cookie;
        let request = NbdRequestHeader { flags, command, cookie, offset, len: len.into() };
        let mut bytes = request.encode().to_vec();
        bytes.extend_from_slice(payload);
        if matches!(command, NbdCommand::Read | NbdCommand::BlockStatus) {
            self.reads.insert(cookie, (offset, len));
        }
        self.stream.write_all(&bytes).unwrap();
        cookie
    }

    /// Returns the next reply to any request. Joins the chunks of a structured read.
    pub fn receive(&mut self) -> Reply {
        let mut head = self.exactly::<4>().to_vec();
        loop {
            if let Some(header) = ReplyHeader::decode(&mut &head[..]).unwrap() {
                return self.body(header);
            }
            head.extend_from_slice(&self.exactly::<1>());
        }
    }

    fn body(&mut self, header: ReplyHeader) -> Reply {
        match header {
            ReplyHeader::Simple(simple) => {
                let (cookie, error) = (simple.cookie, simple.error);
                let len = match self.reads.remove(&cookie) {
                    Some(_) if self.structured => panic!("a simple reply to a structured read"),
                    Some((_, len)) if error == 0 => len,
                    _ => 0,
                };
                let mut data = vec![0; len as usize];
                self.stream.read_exact(&mut data).unwrap();
                Reply { cookie, error, data }
            }
            ReplyHeader::Chunk(chunk) => {
                let (cookie, done) = (chunk.cookie, chunk.is_done());
                let (offset, len) = self.reads.remove(&cookie).expect("chunks answer reads only");
                let mut payload = vec![0; chunk.len as usize];
                self.stream.read_exact(&mut payload).unwrap();
                assert!(done, "a read is one chunk");
                let (error, data) = match ReplyChunk::decode(chunk, &payload).unwrap() {
                    ReplyChunk::None => {
                        assert_eq!(len, 0);
                        (0, vec![])
                    }
                    ReplyChunk::Data { offset: at, data } => {
                        assert_eq!((at, data.len()), (offset, len as usize));
                        (0, data.to_vec())
                    }
                    ReplyChunk::BlockStatus { descriptors, .. } => {
                        self.blocks = descriptors.iter().collect();
                        (0, vec![])
                    }
                    ReplyChunk::Error { error, .. } => (error, vec![]),
                    other => panic!("{other:?}"),
                };
                Reply { cookie, error, data }
            }
        }
    }

    /// Sends one request and receives its reply.
    pub fn ask(
        &mut self,
        command: NbdCommand,
        flags: CommandFlags,
        offset: u64,
        len: u32,
        payload: &[u8],
    ) -> Reply {
        let cookie = self.send(command, flags, offset, len, payload);
        let reply = self.receive();
        assert_eq!(reply.cookie, cookie);
        reply
    }

    pub fn read(&mut self, offset: u64, len: u32) -> Result<Vec<u8>, u32> {
        let reply = self.ask(NbdCommand::Read, CommandFlags::empty(), offset, len, &[]);
        if reply.error == 0 { Ok(reply.data) } else { Err(reply.error) }
    }

    /// Sends a request without data. Returns its error; 0 for none.
    pub fn plain(&mut self, command: NbdCommand, flags: CommandFlags, offset: u64, len: u32) -> u32 {
        self.ask(command, flags, offset, len, &[]).error
    }

    pub fn write(&mut self, flags: CommandFlags, offset: u64, payload: &[u8]) -> u32 {
        self.ask(NbdCommand::Write, flags, offset, payload.len() as u32, payload).error
    }

    /// Returns true if the server has closed the connection, after any further output.
    pub fn is_at_end(&mut self) -> bool {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => true,
            // Closed with unread input.
            Err(e) => e.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}
