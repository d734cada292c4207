//! A connection to an NBD server, up to where requests may be sent: the client's half of the
//! handshake.

use anyhow::{Context, Result, bail, ensure};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;
use udm_core::{Limits, Sectors};
use udm_wire::nbd::{
    BlockSizes, ClientFlags, ClientOption, ExportFlags, GREETING_SIZE, Greeting, HandshakeFlags,
    INFO_BLOCK_SIZE, Info, InfoRequest, OPTION_REPLY_HEADER_SIZE, OptionReply, OptionReplyHeader,
    PAYLOAD_MAX_DEFAULT, encode_client_flags,
};
use udm_wire::uri::{NbdAddress, NbdUri};

/// How long a server may take over a part of the handshake.
const PATIENCE: Duration = Duration::from_secs(10);

/// The most replies to one option.
const REPLIES_MAX: usize = 64;

/// What a server says of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Export {
    /// In bytes.
    pub size: u64,
    pub flags: ExportFlags,
    pub blocks: BlockSizes,
}

impl Export {
    /// As a device's.
    pub fn limits(&self) -> Limits {
        let max = Sectors::from_bytes(u64::from(self.blocks.maximum.min(PAYLOAD_MAX_DEFAULT)));
        let discard = if self.flags.contains(ExportFlags::SEND_TRIM) { max } else { Sectors::ZERO };
        Limits {
            logical_block: self.blocks.minimum.max(512),
            max_sectors: max,
            max_discard: discard,
            read_only: self.flags.contains(ExportFlags::READ_ONLY),
            ..Limits::new(Sectors::from_bytes(self.size))
        }
    }
}

/// Connects and chooses the export.
///
/// # Errors
/// One line: who does not answer, or what it answers.
pub fn connect(uri: &NbdUri) -> Result<(OwnedFd, Export)> {
    match &uri.address {
        NbdAddress::Unix(path) => {
            let mut stream = UnixStream::connect(path).with_context(|| path.display().to_string())?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.set_write_timeout(Some(PATIENCE))?;
            let export = shake(&mut stream, &uri.export)?;
            Ok((stream.into(), export))
        }
        NbdAddress::Tcp { host, port } => {
            let mut stream =
                TcpStream::connect((host.as_str(), *port)).with_context(|| format!("{host}, port {port}"))?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.set_write_timeout(Some(PATIENCE))?;
            let export = shake(&mut stream, &uri.export)?;
            Ok((stream.into(), export))
        }
    }
}

fn shake(stream: &mut (impl Read + Write), name: &str) -> Result<Export> {
    let mut greeting = [0; GREETING_SIZE];
    stream.read_exact(&mut greeting).context("no greeting")?;
    let newstyle = Greeting::decode(&greeting)?.flags.contains(HandshakeFlags::FIXED_NEWSTYLE);
    ensure!(newstyle, "the server does not speak the fixed newstyle handshake");
    let mut out = encode_client_flags(ClientFlags::FIXED_NEWSTYLE).to_vec();
    // No structured replies: a read is answered with its data, and nothing else is to be measured.
    ClientOption::Go(InfoRequest { name: name.to_owned(), infos: vec![INFO_BLOCK_SIZE] }).encode(&mut out);
    stream.write_all(&out).context("handshake")?;
    let (mut export, mut blocks) = (None, None);
    for _ in 0..REPLIES_MAX {
        let mut header = [0; OPTION_REPLY_HEADER_SIZE];
        stream.read_exact(&mut header).context("handshake")?;
        let header = OptionReplyHeader::decode(&header)?;
        let mut data = vec![0; header.len as usize];
        stream.read_exact(&mut data).context("handshake")?;
        match OptionReply::decode(header.reply, &data)? {
            OptionReply::Ack => {
                let (size, flags) = export.context("the server says nothing of its export")?;
                let assumed = BlockSizes { minimum: 1, preferred: 4096, maximum: PAYLOAD_MAX_DEFAULT };
                return Ok(Export { size, flags, blocks: blocks.unwrap_or(assumed) });
            }
            OptionReply::Info(Info::Export { size, flags }) => export = Some((size, flags)),
            OptionReply::Info(Info::BlockSize(sizes)) => blocks = Some(sizes),
            OptionReply::Error { error, text } => bail!("the server refuses the export: {text} ({error:#x})"),
            _ => {}
        }
    }
    bail!("the server does not come to an end with its export")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;
    use udm_wire::nbd::{REP_ERR_UNSUP, greeting, put_ack, put_error, put_info};

    /// A server that has said all that it will ever say.
    struct Said(Cursor<Vec<u8>>);

    impl Read for Said {
        fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
            self.0.read(buf)
        }
    }

    impl Write for Said {
        fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
            Ok(buf.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn hear(flags: HandshakeFlags, rest: impl FnOnce(&mut Vec<u8>)) -> Result<Export, String> {
        let mut out = greeting(flags).to_vec();
        rest(&mut out);
        shake(&mut Said(Cursor::new(out)), "x").map_err(|e| format!("{e:#}"))
    }

    #[test]
    fn what_a_server_may_say() {
        const GO: u32 = udm_wire::nbd::OPT_GO;
        let fixed = HandshakeFlags::FIXED_NEWSTYLE;
        let flags = ExportFlags::HAS_FLAGS | ExportFlags::READ_ONLY;
        let sizes = BlockSizes { minimum: 4096, preferred: 4096, maximum: 1 << 20 };
        let export = hear(fixed, |out| {
            put_info(out, GO, &Info::Export { size: 1 << 30, flags });
            put_info(out, GO, &Info::BlockSize(sizes));
            put_ack(out, GO);
        })
        .unwrap();
        assert_eq!(export, Export { size: 1 << 30, flags, blocks: sizes });
        let limits = export.limits();
        assert_eq!((limits.logical_block, limits.max_sectors.bytes()), (4096, 1 << 20));
        assert!(limits.read_only && limits.max_discard == Sectors::ZERO);
        for (error, flags, rest) in [
            ("fixed newstyle", HandshakeFlags::empty(), None),
            ("handshake", fixed, None),
            ("nothing of its export", fixed, Some(0)),
            ("no such thing", fixed, Some(1)),
            ("come to an end", fixed, Some(REPLIES_MAX)),
        ] {
            let said = hear(flags, |out| match rest {
                None => {}
                Some(0) => put_ack(out, GO),
                Some(1) => put_error(out, GO, REP_ERR_UNSUP, "no such thing"),
                Some(n) => (0..n).for_each(|_| put_info(out, GO, &Info::Name("x".into()))),
            });
            assert!(said.as_ref().is_err_and(|e| e.contains(error)), "{error}: {said:?}");
        }
        let said = shake(&mut Said(Cursor::new(b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec())), "x");
        assert!(said.is_err());
    }
}
