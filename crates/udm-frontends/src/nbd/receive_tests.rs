//! The receiver compared with a plain model of the same stream, for any sizes of payloads and
//! receives.

use super::*;
use proptest::prelude::*;
use std::collections::VecDeque;

const HEADER: usize = 28;

/// A stream of headers and payloads. The first bytes of a header are the length of its payload;
/// other bytes follow their position.
fn stream(lens: &[usize]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for &len in lens {
        let at = bytes.len();
        bytes.extend((at..at + HEADER + len).map(|i| (i % 251) as u8));
        bytes[at..at + 4].copy_from_slice(&(len as u32).to_be_bytes());
    }
    bytes
}

/// Runs the stream through a receiver with receives of `sizes` bytes in turn and at most `held`
/// live payloads, and checks every byte. Returns the most bytes of used slabs.
fn run(lens: &[usize], sizes: &[usize], held: usize, skip_every: usize) -> usize {
    let bytes = stream(lens);
    let (mut rx, mut pool) = (ReceiveBuffer::new(64 << 20), BufPool::new(64 << 20));
    let (mut sent, mut at, mut turn, mut resting) = (0, 0, 0, 0);
    let mut alive = VecDeque::new();
    let mut arriving = None;
    let mut taken = 0;
    while taken < lens.len() {
        // Take all that has arrived.
        loop {
            if let Some(len) = arriving {
                let Some(data) = rx.payload(len) else { break };
                assert!(
                    data.iter().count() <= len.div_ceil(PIECE_MAX),
                    "a payload has as few pieces as possible"
                );
                let got: Vec<u8> = data.iter().flat_map(|b| b.to_vec()).collect();
                assert!(got == bytes[at..at + len], "payload {taken} of {len} bytes");
                at += len;
                arriving = None;
                taken += 1;
                alive.push_back(data);
                if alive.len() > held {
                    crate::nbd::reply::return_buffers_to_pool(alive.pop_front().unwrap(), &mut pool);
                }
            }
            let Some(header) = rx.header::<HEADER>() else { break };
            let len = u32::from_be_bytes([header[0], header[1], header[2], header[3]]) as usize;
            assert_eq!(len, lens[taken], "header {taken}");
            assert_eq!(header[4..], bytes[at + 4..at + HEADER]);
            at += HEADER;
            if len == 0 || taken % skip_every == skip_every - 1 {
                rx.skip(len as u64);
                at += len;
                taken += 1;
            } else {
                arriving = Some(len);
            }
        }
        if taken == lens.len() {
            break;
        }
        // Receive some bytes.
        let may = [usize::MAX, PIECE_MAX][turn % 2];
        let before = rx.held() + pool.total_bytes();
        let mut room = rx.room(&mut pool, may).expect("the bound is not reached here");
        assert!(
            rx.held() + pool.total_bytes() <= before.saturating_add(may),
            "it takes no more memory than allowed"
        );
        assert_eq!(rx.room(&mut pool, 0).unwrap_err(), ReceiveBlocked::BuffersInUse, "one receive at a time");
        let n = sizes[turn % sizes.len()].min(room.len()).min(bytes.len() - sent);
        assert!(n > 0, "all bytes are received, but only {taken} of {} payloads were taken", lens.len());
        turn += 1;
        room.copy_from(&bytes[sent..sent + n]);
        sent += n;
        rx.arrived(n, room);
        resting = resting.max(rx.resting_bytes);
    }
    assert_eq!(at, bytes.len());
    resting
}

#[test]
fn a_stream_of_reads_needs_one_slab() {
    assert_eq!(run(&vec![0; 20_000], &[28 * 32], 0, usize::MAX), 0);
    assert!(run(&vec![0; 20_000], &[28 * 32 + 5], 0, usize::MAX) <= SLAB_MIN);
}

#[test]
fn a_stream_of_writes_takes_few_slabs() {
    assert!(run(&vec![4096; 4000], &[usize::MAX], 64, usize::MAX) <= 4 * SLAB_MAX);
    assert!(run(&[32 << 20, 1 << 20, 65536, 65537], &[usize::MAX], 4, usize::MAX) <= 4 * SLAB_MAX);
}

#[test]
fn every_cut_of_a_short_stream() {
    for size in 1..300 {
        run(&[0, 512, 0, 0, 4096, 9000, 512, 0, 20_000], &[size], 2, usize::MAX);
    }
}

#[test]
fn at_the_bound_it_asks_for_nothing_until_payloads_are_dropped() {
    let (mut rx, mut pool) = (ReceiveBuffer::new(4 * SLAB_MAX), BufPool::new(1 << 20));
    let mut alive = Vec::new();
    for _ in 0..100_000 {
        let Ok(mut room) = rx.room(&mut pool, usize::MAX) else { break };
        room.fill(1);
        let n = room.len();
        rx.arrived(n, room);
        while let Some(data) = rx.payload(512) {
            alive.push(data);
        }
    }
    assert_eq!(rx.room(&mut pool, usize::MAX).unwrap_err(), ReceiveBlocked::BuffersInUse);
    let bytes: usize = alive.iter().map(Segments::len).sum();
    assert!(bytes <= 6 * SLAB_MAX, "{bytes}");
    alive.clear();
    assert!(rx.room(&mut pool, 0).is_ok(), "without anything new");
    alive.clear();
    rx.trim();
    assert!(rx.held() <= 2 * SLAB_MAX, "{}", rx.held());
}

/// Memory is taken for bytes as they arrive, one piece at a time, and only within the allowance.
#[test]
fn a_long_payload_takes_memory_as_it_arrives() {
    let (mut rx, mut pool) = (ReceiveBuffer::new(4 * SLAB_MAX), BufPool::new(0));
    let len = 8 * PIECE_MAX + 5;
    assert!(rx.payload(len).is_none());
    assert_eq!(pool.total_bytes(), 0);
    let mut got = 0;
    while got < len {
        // A whole piece is missing: nothing is received without an allowance for it.
        if got % PIECE_MAX == 0 && len - got >= PIECE_MAX {
            assert_eq!(rx.room(&mut pool, PIECE_MAX - 1).unwrap_err(), ReceiveBlocked::Memory(PIECE_MAX));
        }
        let mut room = rx.room(&mut pool, PIECE_MAX).unwrap();
        let n = room.len().min(PIECE_MAX / 4).min(len - got);
        room.fill(1);
        rx.arrived(n, room);
        got += n;
        assert!(pool.total_bytes() <= got + PIECE_MAX, "{} for {got} bytes", pool.total_bytes());
        if let Some(data) = rx.payload(len) {
            assert_eq!((data.len(), got), (len, len));
            return_buffers_to_pool(data, &mut pool);
        }
    }
    assert_eq!(pool.total_bytes(), 0);
}

/// A client that disconnects in the middle of a payload leaves no memory in use.
#[test]
fn half_a_payload_is_freed() {
    let (mut rx, mut pool) = (ReceiveBuffer::new(4 * SLAB_MAX), BufPool::new(0));
    assert!(rx.payload(3 * PIECE_MAX).is_none());
    let room = rx.room(&mut pool, usize::MAX).unwrap();
    rx.arrived(PIECE_MAX, room);
    let room = rx.room(&mut pool, usize::MAX).unwrap();
    rx.arrived(1000, room);
    assert_eq!(pool.total_bytes(), 2 * PIECE_MAX);
    rx.clear(&mut pool);
    assert_eq!(pool.total_bytes(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn any_lengths_in_any_pieces(
        lens in prop::collection::vec(prop_oneof![
            3 => Just(0usize), 3 => Just(4096usize), 2 => 1usize..5000, 2 => 1usize..200_000, 1 => 1usize..2_000_000,
        ], 1..60),
        sizes in prop::collection::vec(prop_oneof![1usize..100, 1usize..70_000, Just(usize::MAX)], 1..8),
        held in 0usize..20,
        skip_every in prop_oneof![Just(usize::MAX), 1usize..5],
    ) {
        run(&lens, &sizes, held, skip_every);
    }
}
