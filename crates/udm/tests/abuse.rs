//! Clients that take what they can get, beside one in order: it is served throughout, and memory stays within what is documented
//! (`ServerOptions::core_bytes_max`).

mod support;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use support::{PATIENCE, Server};
use udm_wire::nbd::{
    ClientFlags, ClientOption, Command, CommandFlags, GREETING_SIZE, Request, encode_client_flags,
};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// What one core may use for connections, and each connection besides.
const CORE: u64 = (256 + 64) * MIB;
const CONNECTION: u64 = 640 * KIB;

fn connect(server: &Server) -> UnixStream {
    let stream = UnixStream::connect(&server.nbd).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// A client of the only export.
fn client(server: &Server) -> UnixStream {
    let mut stream = connect(server);
    stream.read_exact(&mut [0; GREETING_SIZE]).unwrap();
    let mut opening = encode_client_flags(ClientFlags::FIXED_NEWSTYLE | ClientFlags::NO_ZEROES).to_vec();
    ClientOption::ExportName(String::new()).encode(&mut opening);
    stream.write_all(&opening).unwrap();
    stream.read_exact(&mut [0; 10]).unwrap();
    stream
}

fn request(command: Command, offset: u64, len: u64) -> [u8; Request::SIZE] {
    let (flags, cookie) = (CommandFlags::empty(), 7);
    Request { flags, command, cookie, offset, len: len as u32 }.encode()
}

fn read(stream: &mut UnixStream, len: u64) {
    stream.write_all(&request(Command::Read, 0, len)).unwrap();
    let mut answer = vec![0; 16 + len as usize];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer[4..8], [0; 4]);
}

/// Resident memory of the server in bytes.
fn resident(server: &Server) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", server.child.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap() * KIB
}

/// The client in order is served, and memory is within `bound`.
#[expect(clippy::print_stdout, reason = "the figures are what somebody who runs this wants to see")]
fn served(what: &str, server: &Server, healthy: &mut UnixStream, bound: u64) {
    let begin = Instant::now();
    for len in [4 * KIB, 64 * KIB] {
        read(healthy, len);
    }
    let took = begin.elapsed();
    // A newcomer gets in too.
    read(&mut client(server), 4 * KIB);
    let rss = resident(server);
    println!("{what}: served in {took:?}, {} MiB resident (bound {})", rss / MIB, bound / MIB);
    assert!(rss <= bound, "{what}: {rss} bytes resident, {bound} allowed");
}

/// For some thousand connections at both ends.
fn more_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }).unwrap();
}

#[test]
#[expect(clippy::print_stdout, reason = "as above")]
fn who_is_in_order_is_served_beside_who_is_not() {
    more_descriptors();
    // Reads of it move data and leave none in memory.
    let server = Server::start(&["d=0 2097152 linear null:size=1G 0"]);
    let mut healthy = client(&server);
    read(&mut healthy, MIB);
    let base = resident(&server) + 32 * MIB;

    let mut idle: Vec<_> = (0..1024).map(|_| client(&server)).collect();
    idle.iter_mut().for_each(|c| read(c, 64 * KIB));
    served("1,024 connections that were busy once", &server, &mut healthy, base + 1024 * CONNECTION);
    std::thread::sleep(Duration::from_millis(3500));
    served("the same, idle", &server, &mut healthy, base + 1024 * 64 * KIB);

    let silent: Vec<_> = (0..1024).map(|_| connect(&server)).collect();
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

    // What the allocator keeps of small things goes on counting.
    let base = resident(&server) + 8 * MIB;
    let mut writers: Vec<_> = (0..50).map(|_| client(&server)).collect();
    for stream in &mut writers {
        stream.write_all(&request(Command::Write, 0, 32 * MIB)).unwrap();
    }
    served("50 writes of 32 MiB announced", &server, &mut healthy, base + 50 * 64 * KIB);

    let piece = vec![1; MIB as usize];
    writers.iter().for_each(|stream| stream.set_nonblocking(true).unwrap());
    let mut sent = vec![0; writers.len()];
    for _ in 0..200 {
        for (stream, sent) in writers.iter_mut().zip(&mut sent) {
            // As much as the server takes, but for the end; it may also have had enough of this client.
            let most = piece.len().min(31 * MIB as usize - *sent);
            *sent += stream.write(&piece[..most]).unwrap_or(0);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    println!("50 writers sent {} MiB", sent.iter().sum::<usize>() as u64 / MIB);
    let bound = base + CORE + 60 * CONNECTION;
    served("50 writes of 32 MiB, begun", &server, &mut healthy, bound);
    drop(writers);

    let mut deaf: Vec<_> = (0..20).map(|_| client(&server)).collect();
    for stream in &mut deaf {
        // The server may have had enough of one before the last is here.
        (0..4).for_each(|_| drop(stream.write_all(&request(Command::Read, 0, 32 * MIB))));
    }
    served("20 clients that take none of their 128 MiB", &server, &mut healthy, bound);
    // A long request, too, once it is clear who is in the way.
    read(&mut healthy, 32 * MIB);
    drop(deaf);
    std::thread::sleep(Duration::from_millis(3500));
    served("alone again", &server, &mut healthy, base);
}
