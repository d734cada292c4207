//! The other process. Its standard output is the memfd, its standard input the socket.

use super::front_end::{DATA, DONE, ENTRY, SLOTS, TABLE, TAIL};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{stdin, stdout};
use std::os::fd::AsFd;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use udm_core::errno::EINVAL;
use udm_core::{Op, SECTOR_SIZE, SharedMemoryMap, copy_from_shared, copy_to_shared};

/// Bytes for the data of one request.
const ROOM: usize = 128 << 10;
/// Bytes of the whole memory.
pub const SHARED: usize = DATA + SLOTS as usize * ROOM;

/// The geometry of the device.
pub struct DiskGeometry {
    pub sectors: u64,
    pub block: u64,
    pub max: u64,
}

struct SharedMemoryPeer {
    map: SharedMemoryMap,
    tail: u64,
    disk: DiskGeometry,
    rng: SmallRng,
}

/// Acts according to `mode`, and panics if a request is served wrongly.
pub fn run(mode: &str, disk: DiskGeometry) {
    let map = SharedMemoryMap::of_memfd(stdout(), SHARED).expect("the memory");
    let mut peer = SharedMemoryPeer { map, tail: 0, disk, rng: SmallRng::seed_from_u64(7) };
    match mode {
        "honest" => peer.run_honest(),
        "scribbling" => peer.run_scribbling(),
        "hostile" => peer.run_hostile(),
        "vanishing" => peer.run_vanishing(),
        other => panic!("{other}"),
    }
}

impl SharedMemoryPeer {
    fn give(&mut self, op: u64, sector: u64, sectors: u64, at: u64) -> usize {
        let i = (self.tail % SLOTS) as usize;
        let words = &self.map.words()[TABLE + i * ENTRY..][..ENTRY];
        for (word, value) in words.iter().zip([op, sector, sectors, at, 0]) {
            word.store(value, Relaxed);
        }
        self.tail += 1;
        self.map.words()[TAIL].store(self.tail, Release);
        i
    }

    fn ring(&self) {
        rustix::io::write(stdin(), &[1]).expect("the server is there");
    }

    /// Waits for entry `i` and returns its errno. The time limit only detects hangs.
    fn wait(&self, i: usize) -> i32 {
        for _ in 0..2000 {
            let end = self.map.words()[TABLE + i * ENTRY + 4].load(Acquire);
            if end & DONE != 0 {
                return (end & !DONE) as i32;
            }
            let stdin = stdin();
            let mut fds = [PollFd::from_borrowed_fd(stdin.as_fd(), PollFlags::IN)];
            let timeout = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
            if poll(&mut fds, Some(&timeout)).expect("poll") > 0 {
                let n = rustix::io::read(stdin.as_fd(), &mut [0; 64][..]).expect("the server is there");
                assert!(n > 0, "the server hung up");
            }
        }
        panic!("entry {i} is not served");
    }

    fn ask(&mut self, op: Op, sector: u64, sectors: u64, at: usize) -> i32 {
        let op = Op::ALL.iter().position(|&o| o == op).expect("listed");
        let i = self.give(op as u64, sector, sectors, at as u64);
        self.ring();
        self.wait(i)
    }

    /// A random valid range, and an offset for its data, aligned or not.
    fn some(&mut self, slot: usize) -> (u64, u64, usize) {
        let DiskGeometry { sectors, block, max } = self.disk;
        let n = self.rng.random_range(1..=max.min(ROOM as u64 / 2 / SECTOR_SIZE) / block) * block;
        let from = self.rng.random_range(0..=(sectors - n) / block) * block;
        let odd = if self.rng.random_bool(0.5) { 0 } else { self.rng.random_range(1..600) };
        (from, n, DATA + slot * ROOM + odd)
    }

    /// Reads return the written data, with any pieces of memory.
    fn run_honest(&mut self) {
        for round in 0..100u8 {
            let (from, n, at) = self.some(usize::from(round % 4));
            let len = (n * SECTOR_SIZE) as usize;
            let bytes: Vec<u8> = (0..len).map(|i| (i / 100) as u8 ^ round).collect();
            copy_to_shared(self.map.words(), at, &bytes);
            assert_eq!(self.ask(Op::Write, from, n, at), 0);
            let back = DATA + 8 * ROOM + self.rng.random_range(0..600);
            assert_eq!(self.ask(Op::Read, from, n, back), 0);
            let (mut got, mut beside) = (vec![0; len], [0; 1]);
            copy_from_shared(self.map.words(), back, &mut got);
            assert!(got == bytes, "round {round}: {n} sectors at {from}");
            // The memory after the data is unchanged.
            copy_from_shared(self.map.words(), DATA + 9 * ROOM, &mut beside);
            assert_eq!(beside, [0]);
            if round % 8 == 0 {
                assert_eq!(self.ask(Op::Flush, 0, 0, DATA), 0);
            }
        }
    }

    /// All bytes change all the time, during writes and reads.
    fn run_scribbling(&mut self) {
        let over = AtomicBool::new(false);
        let words = SharedMemoryMap::of_memfd(stdout(), SHARED).expect("the memory once more");
        std::thread::scope(|s| {
            s.spawn(|| {
                for byte in (0..=255u8).cycle().take_while(|_| !over.load(Relaxed)) {
                    copy_to_shared(words.words(), DATA, &vec![byte; SHARED - DATA]);
                }
            });
            for round in 0..40 {
                let (from, n, at) = self.some(round % 4);
                let op = if round % 2 == 0 { Op::Write } else { Op::Read };
                assert_eq!(self.ask(op, from, n, at), 0);
            }
            over.store(true, Relaxed);
        });
    }

    /// Sends invalid requests of all kinds.
    fn run_hostile(&mut self) {
        assert!(rustix::fs::ftruncate(stdout(), 4096).is_err(), "the memory can't be taken away");
        let (size, end) = (self.disk.sectors, SHARED as u64);
        let one = self.disk.block;
        for (op, sector, sectors, at) in [
            (5, 0, one, DATA as u64),
            (u64::MAX, 0, one, DATA as u64),
            (0, size, one, DATA as u64),
            (0, u64::MAX, 2, DATA as u64),
            (1, 0, 0, DATA as u64),
            (0, 0, u64::MAX, DATA as u64),
            (1, 0, one, end),
            (1, 0, one, end - one * SECTOR_SIZE + 1),
            (0, 0, one, u64::MAX),
            (0, 0, one, u64::MAX - one * SECTOR_SIZE + 1),
            (0, 0, 1 << 23, 0),
            (2, 1, 0, 0),
        ] {
            let i = self.give(op, sector, sectors, at);
            self.ring();
            assert_eq!(self.wait(i), EINVAL, "{op} at {sector} +{sectors}, data at {at}");
        }
        // Data in the table itself only harms the process that asks for it.
        assert_eq!(self.ask(Op::Read, 0, one, 2048), 0);
        // An inconsistent table ends the connection, possibly before the notification is sent: the
        // server may still handle an earlier one.
        self.map.words()[TAIL].store(self.tail + SLOTS + 1, Release);
        let _ = rustix::io::write(stdin(), &[1]);
        let mut rest = [0; 64];
        while rustix::io::read(stdin(), &mut rest[..]).is_ok_and(|n| n > 0) {}
    }

    /// Exits with requests in all entries.
    fn run_vanishing(&mut self) {
        for slot in 0..SLOTS as usize {
            let (from, n, at) = self.some(slot);
            self.give((slot % 2) as u64, from, n, at as u64);
        }
        self.ring();
    }
}
