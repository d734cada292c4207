//! An NBD client that only queries block status.

use super::nbd::dial;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use udm_wire::nbd::{
    ClientFlags, CommandFlags, ExportInfoRequest, GREETING_SIZE, MetaContextRequest, NbdCommand, NbdOption,
    NbdRequestHeader, OPTION_REPLY_HEADER_SIZE, OptionReply, OptionReplyHeader, ReplyChunk, ReplyChunkHeader,
    ReplyHeader, encode_client_flags,
};

/// A connection, with the numbers and names of its metadata contexts.
pub struct DirtyMapClient {
    stream: UnixStream,
    ids: Vec<(u32, String)>,
}

fn meta(export: &str, queries: &[&str]) -> MetaContextRequest {
    MetaContextRequest {
        name: export.into(),
        queries: queries.iter().map(|query| (*query).to_owned()).collect(),
    }
}

impl DirtyMapClient {
    /// Connects and completes the greeting; chooses no export.
    pub fn dial(socket: &Path) -> DirtyMapClient {
        let mut stream = dial(socket);
        stream.read_exact(&mut [0; GREETING_SIZE]).unwrap();
        let mut opening = encode_client_flags(ClientFlags::FIXED_NEWSTYLE | ClientFlags::NO_ZEROES).to_vec();
        NbdOption::StructuredReply.encode(&mut opening);
        stream.write_all(&opening).unwrap();
        let mut maps = DirtyMapClient { stream, ids: Vec::new() };
        assert_eq!(maps.answer(), OptionReply::Ack);
        maps
    }

    /// Connects, and chooses `export` with the dirty bitmap `name`.
    pub fn of(socket: &Path, export: &str, name: &str) -> DirtyMapClient {
        let mut maps = DirtyMapClient::dial(socket);
        let context = format!("qemu:dirty-bitmap:{name}");
        assert_eq!(maps.set(export, &[&context]), Ok(vec![context]), "{export}");
        maps.go(export);
        maps
    }

    /// The next reply to an option.
    pub fn answer(&mut self) -> OptionReply {
        let mut header = [0; OPTION_REPLY_HEADER_SIZE];
        self.stream.read_exact(&mut header).unwrap();
        let header = OptionReplyHeader::decode(&header).unwrap();
        let mut data = vec![0; header.len as usize];
        self.stream.read_exact(&mut data).unwrap();
        OptionReply::decode(header.reply, &data).unwrap()
    }

    pub fn send(&mut self, option: &NbdOption) {
        let mut bytes = Vec::new();
        option.encode(&mut bytes);
        self.stream.write_all(&bytes).unwrap();
    }

    /// The names of the available contexts.
    pub fn list(&mut self, export: &str, queries: &[&str]) -> Result<Vec<String>, String> {
        self.send(&NbdOption::ListMetaContext(meta(export, queries)));
        self.names()
    }

    /// Chooses contexts; returns the names that the server accepted.
    pub fn set(&mut self, export: &str, queries: &[&str]) -> Result<Vec<String>, String> {
        self.send(&NbdOption::SetMetaContext(meta(export, queries)));
        self.names()
    }

    fn names(&mut self) -> Result<Vec<String>, String> {
        self.ids.clear();
        loop {
            match self.answer() {
                OptionReply::MetaContext { id, name } => self.ids.push((id, name)),
                OptionReply::Ack => return Ok(self.ids.iter().map(|(_, name)| name.clone()).collect()),
                OptionReply::Error { text, .. } => return Err(text),
                other => panic!("{other:?}"),
            }
        }
    }

    pub fn go(&mut self, export: &str) {
        self.send(&NbdOption::Go(ExportInfoRequest { name: export.into(), infos: Vec::new() }));
        while self.answer() != OptionReply::Ack {}
    }

    /// Sends a block-status request.
    pub fn ask(&mut self, flags: CommandFlags, offset: u64, len: u32) {
        let request = NbdRequestHeader {
            flags,
            command: NbdCommand::BlockStatus,
            cookie: offset,
            offset,
            len: len.into(),
        };
        self.stream.write_all(&request.encode()).unwrap();
    }

    /// The extents of each context, in the order in which they were chosen.
    pub fn maps(&mut self, flags: CommandFlags, offset: u64, len: u32) -> Vec<Vec<(u32, u32)>> {
        self.ask(flags, offset, len);
        let mut found = vec![Vec::new(); self.ids.len()];
        loop {
            let mut head = [0; ReplyChunkHeader::SIZE];
            self.stream.read_exact(&mut head).unwrap();
            let Ok(Some(ReplyHeader::Chunk(header))) = ReplyHeader::decode(&mut &head[..]) else {
                panic!("no chunk: {head:?}")
            };
            let mut payload = vec![0; header.len as usize];
            self.stream.read_exact(&mut payload).unwrap();
            match ReplyChunk::decode(header, &payload).unwrap() {
                ReplyChunk::BlockStatus { context, descriptors } => {
                    let at = self.ids.iter().position(|(id, _)| *id == context).expect("a context chosen");
                    found[at] = descriptors.iter().collect();
                }
                other => panic!("{other:?}"),
            }
            if header.is_done() {
                return found;
            }
        }
    }

    /// The extents of the only context.
    pub fn map(&mut self, offset: u64, len: u32) -> Vec<(u32, u32)> {
        self.maps(CommandFlags::empty(), offset, len).remove(0)
    }
}
