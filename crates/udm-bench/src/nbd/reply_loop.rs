//! The floor under an NBD server: a loop that reads requests from a socket and writes replies, and
//! does nothing else.
//!
//! It blocks in `parser`, takes all requests that came, and writes all replies at once. Offsets,
//! errors and the end of a device mean nothing to it; what it takes from client and system is what
//! any server over this kind of socket takes at the least.

use std::io::{ErrorKind, Read, Write};
use udm_wire::nbd::{Command, Request, SimpleReply};

/// What is read at once, in bytes.
const READ: usize = 256 << 10;

/// Serves until the other side hangs up.
pub fn serve(mut stream: impl Read + Write) {
    let mut input = vec![0u8; READ].into_boxed_slice();
    // The payload of a write that is on its way, and what the write is answered with.
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
            let Ok(request) = Request::decode(header) else { return };
            arrived.start += Request::SIZE;
            skip = request.payload_len() as usize;
            let reply = SimpleReply { error: 0, cookie: request.cookie };
            if request.command == Command::Read {
                out.extend_from_slice(&reply.encode());
                out.resize(out.len() + request.len as usize, 0);
            } else {
                owed = Some(reply);
            }
        }
        // A client of this crate reads while it writes: this does not wait for ever.
        if stream.write_all(&out).is_err() {
            return;
        }
        out.clear();
    }
}
