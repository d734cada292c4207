//! The work for a write of a part of a block does not depend on the number of idle clients: they
//! are no members of the range locks, so they get no messages.

use super::super::{Export, Exports, NbdServer, NbdServerLimits};
use super::{IDLE_MESSAGES, RangeLocks};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;
use udm_runtime::{Runtime, RuntimeOptions};
use udm_wire::nbd::{
    ClientFlags, CommandFlags, GREETING_SIZE, NbdCommand, NbdOption, NbdRequestHeader, encode_client_flags,
};

const CLIENTS: usize = 40;

/// A client that has chosen the export `d`.
fn connect(server: &NbdServer) -> UnixStream {
    let (mut client, socket) = UnixStream::pair().unwrap();
    // A limit against hanging forever.
    client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    server.adopt(socket.into()).unwrap();
    client.read_exact(&mut [0; GREETING_SIZE]).unwrap();
    let mut opening = encode_client_flags(ClientFlags::FIXED_NEWSTYLE | ClientFlags::NO_ZEROES).to_vec();
    NbdOption::ExportName("d".into()).encode(&mut opening);
    client.write_all(&opening).unwrap();
    // The size, and flags.
    client.read_exact(&mut [0; 10]).unwrap();
    client
}

/// Writes one byte.
fn write(client: &mut UnixStream) {
    let (flags, command) = (CommandFlags::empty(), NbdCommand::Write);
    let mut request = NbdRequestHeader { flags, command, cookie: 0, offset: 7, len: 1 }.encode().to_vec();
    request.push(1);
    client.write_all(&request).unwrap();
    let mut reply = [0; 16];
    client.read_exact(&mut reply).unwrap();
    assert_eq!(reply[4..8], [0; 4], "an error");
}

fn members(locks: &RangeLocks) -> usize {
    locks.state().members.iter().sum()
}

#[test]
fn idle_clients_leave_the_range_locks() {
    let spin_max = Duration::from_micros(20);
    let runtime = Runtime::start(&RuntimeOptions { cpus: vec![None; 2], poll: false, spin_max }).unwrap();
    let disk = udm_backends::open_standalone_device(&udm_wire::uri::parse_device_uri("mem:1M").unwrap());
    let exports = Arc::new(Exports::new());
    let export = exports.add(Export::new("d", "", false, disk.unwrap()).unwrap()).unwrap();
    let limits = NbdServerLimits::default();
    let server = NbdServer::start(runtime.core_set(), Arc::clone(&exports), limits, &[]).unwrap();
    let mut clients: Vec<UnixStream> = (0..CLIENTS).map(|_| connect(&server)).collect();
    let locks = export.range_locks();
    assert_eq!(members(locks), 0, "clients that have never written are no members");
    clients.iter_mut().for_each(write);
    // A write sends two messages to a member. Those of the last write may be on their way.
    let mut rounds = 0;
    while members(locks) > 1 {
        write(&mut clients[0]);
        rounds += 1;
        assert!(rounds < 100 * IDLE_MESSAGES, "{} members", members(locks));
    }
    // A client that writes again is a member again, and the writer is still served.
    write(&mut clients[1]);
    write(&mut clients[0]);
    assert_eq!(members(locks), 2);
    drop(clients);
    server.stop();
    runtime.stop();
}
