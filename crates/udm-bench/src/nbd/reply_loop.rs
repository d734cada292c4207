//! The lower bound of an NBD server: a loop that only reads requests from a socket and writes
//! replies.
//!
//! The loop blocks in `read`, takes all requests that arrived, and writes all replies at once. It
//! ignores offsets, errors and the size of a device. Any server over this kind of socket costs
//! client and system at least as much.

use std::io::{ErrorKind, Read, Write};
use udm_wire::nbd::{NbdCommand, NbdHeaderStyle, NbdRequestHeader, SimpleReply};

/// Bytes per read.
const READ: usize = 256 << 10;

/// Serves until the other side closes the connection.
pub fn serve_minimal_nbd_replies(mut stream: impl Read + Write) {
    let mut input = vec![0u8; READ].into_boxed_slice();
    // `skip` is the rest of a write's payload that has not arrived, `owed` the reply of this write.
    let (mut arrived, mut skip, mut owed) = (0..0usize, 0usize, None);
    let mut out = Vec::with_capacity(READ);
    loop {
        input.copy_within(arrived.clone(), 0);
        arrived = 0..arrived.len();
        match stream.read(&mut input[arrived.end..]) {
            Ok(0) => return,
            Ok(n) => arrived.end += n,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(_) => return,
        }
        loop {
            let now = skip.min(arrived.len());
            arrived.start += now;
            skip -= now;
            if skip > 0 {
                break;
            }
            out.extend(owed.take().iter().flat_map(SimpleReply::encode));
            let Some(header) = input[arrived.clone()].first_chunk() else { break };
            let Ok(request) = NbdRequestHeader::decode(header) else { return };
            arrived.start += NbdRequestHeader::SIZE;
            skip = request.payload_len(NbdHeaderStyle::Simple) as usize;
            let reply = SimpleReply { error: 0, cookie: request.cookie };
            if request.command == NbdCommand::Read {
                out.extend_from_slice(&reply.encode());
                out.resize(out.len() + request.len as usize, 0);
            } else {
                owed = Some(reply);
            }
        }
        // The client of this crate reads while it writes, so this cannot block forever.
        if stream.write_all(&out).is_err() {
            return;
        }
        out.clear();
    }
}
