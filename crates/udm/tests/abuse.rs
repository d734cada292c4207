//! Abusive clients next to a well-behaved one, which is served throughout. Memory stays within the
//! documented limit (`ServerOptions::core_bytes_max`).

mod support;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use support::Server;
use support::nbd::{Client, dial};
use udm_wire::nbd::NbdCommand;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Memory limits for connections: per core, and in addition per connection.
const CORE: u64 = (256 + 64) * MIB;
const CONNECTION: u64 = 640 * KIB;

/// A client of the only export.
fn client(server: &Server) -> Client {
    Client::connect(&server.nbd, "")
}

fn read(client: &mut Client, len: u64) {
    assert_eq!(client.one(NbdCommand::Read, 0, len), 0);
}

/// Resident memory of the server in bytes.
fn resident(server: &Server) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", server.child.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap() * KIB
}

/// Checks that the well-behaved client is served and that memory is within `bound`.
#[expect(clippy::print_stdout, reason = "the figures are the report of a manual run")]
fn served(name: &str, server: &Server, healthy: &mut Client, bound: u64) {
    let begin = Instant::now();
    for len in [4 * KIB, 64 * KIB] {
        read(healthy, len);
    }
    let took = begin.elapsed();
    // A new client is accepted too.
    read(&mut client(server), 4 * KIB);
    let rss = resident(server);
    println!("{name}: served in {took:?}, {} MiB resident (bound {})", rss / MIB, bound / MIB);
    assert!(rss <= bound, "{name}: {rss} bytes resident, {bound} allowed");
}

/// Raises the descriptor limit for some thousand connections with both ends in this process.
fn more_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }).unwrap();
}

#[test]
#[expect(clippy::print_stdout, reason = "as above")]
fn who_is_in_order_is_served_beside_who_is_not() {
    more_descriptors();
    // Reads of a null device transfer data and keep none in memory.
    let server = Server::start(&["d=0 2097152 linear null:size=1G 0"]);
    let mut healthy = client(&server);
    read(&mut healthy, MIB);
    let base = resident(&server) + 32 * MIB;

    let mut idle: Vec<_> = (0..1024).map(|_| client(&server)).collect();
    idle.iter_mut().for_each(|c| read(c, 64 * KIB));
    served("1,024 connections that were busy once", &server, &mut healthy, base + 1024 * CONNECTION);
    std::thread::sleep(Duration::from_millis(3500));
    served("the same, idle", &server, &mut healthy, base + 1024 * 64 * KIB);

    let silent: Vec<_> = (0..1024).map(|_| dial(&server.nbd)).collect();
    served("1,024 connections without a handshake", &server, &mut healthy, base + 2048 * 64 * KIB);
    drop(silent);

    let dead: Vec<_> = (0..64)
        .map(|_| {
            let mut stream = UnixStream::connect(&server.socket).unwrap();
            stream
                .write_all(b"POST /v1/devices HTTP/1.1\r\nHost: udm\r\nContent-Length: 100\r\n\r\n")
                .unwrap();
            stream
        })
        .collect();
    served("64 control requests without their bodies", &server, &mut healthy, base + 1100 * 64 * KIB);
    drop((dead, idle));

    // The allocator keeps freed small blocks, so the base is measured again.
    let base = resident(&server) + 8 * MIB;
    let mut writers: Vec<_> = (0..50).map(|_| client(&server)).collect();
    for client in &mut writers {
        client.head(NbdCommand::Write, 0, 32 * MIB).unwrap();
    }
    served("50 writes of 32 MiB announced", &server, &mut healthy, base + 50 * 64 * KIB);

    let piece = vec![1; MIB as usize];
    writers.iter().for_each(|client| client.stream.set_nonblocking(true).unwrap());
    let mut sent = vec![0; writers.len()];
    for _ in 0..200 {
        for (client, sent) in writers.iter_mut().zip(&mut sent) {
            // Sends as much as the server accepts, except for the end; the server may also have
            // disconnected the client.
            let most = piece.len().min(31 * MIB as usize - *sent);
            *sent += client.stream.write(&piece[..most]).unwrap_or(0);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    println!("50 writers sent {} MiB", sent.iter().sum::<usize>() as u64 / MIB);
    let bound = base + CORE + 60 * CONNECTION;
    served("50 writes of 32 MiB, begun", &server, &mut healthy, bound);
    drop(writers);

    let mut deaf: Vec<_> = (0..20).map(|_| client(&server)).collect();
    for client in &mut deaf {
        // The server may disconnect a client before its last request.
        (0..4).for_each(|_| drop(client.head(NbdCommand::Read, 0, 32 * MIB)));
    }
    served("20 clients that take none of their 128 MiB", &server, &mut healthy, bound);
    // A long request is served too, once the server knows which clients block it.
    read(&mut healthy, 32 * MIB);
    drop(deaf);
    std::thread::sleep(Duration::from_millis(3500));
    served("alone again", &server, &mut healthy, base);
}
