//! Reads, writes and the other commands of I/O queues.

use super::disk::{CompletionOrder, TestDisk, pattern};
use super::host::{Answer, BLOCK, READ, WRITE, command, rw, with_data};
use super::{SIZE, TargetFixture, options};
use udm_core::{BioFlags, Op};
use udm_wire::nvme::{DataPdu, NvmeStatus};

fn pattern_at(block: u64, blocks: u32) -> Vec<u8> {
    (block * BLOCK as u64..(block + u64::from(blocks)) * BLOCK as u64).map(pattern).collect()
}

fn bytes(seed: u8, blocks: u32) -> Vec<u8> {
    (0..blocks as usize * BLOCK).map(|at| (at / 3) as u8 ^ seed).collect()
}

/// Short and long reads and writes, with and without digests, on both cores.
#[test]
fn reads_and_writes() {
    let target = TargetFixture::with(TestDisk::new(SIZE, CompletionOrder::Shuffled), options());
    let host = target.host();
    for (queue, digests) in [(1, false), (2, true)] {
        let mut queue = host.queue(queue, digests);
        for blocks in [1, 8, 33, 2048] {
            assert_eq!(queue.read(rw(READ, 100, blocks, false)), Ok(pattern_at(100, blocks)), "{blocks}");
        }
        for (seed, blocks) in [(1, 1), (2, 8), (3, 32)] {
            let data = bytes(seed, blocks);
            queue.command(rw(WRITE, 4000, blocks, true), &data);
            assert!(queue.answer().status().is_ok());
            assert_eq!(queue.read(rw(READ, 4000, blocks, false)), Ok(data));
        }
        for (seed, blocks, parts) in [(4, 1, 1), (5, 33, 2), (6, 2048, 1), (7, 2048, 5)] {
            let data = bytes(seed, blocks);
            let id = queue.command(rw(WRITE, 5000, blocks, false), &[]);
            let Answer::ReadyToTransfer(r2t) = queue.answer() else { panic!("expected R2T") };
            assert_eq!((r2t.command, r2t.offset, r2t.len as usize), (id, 0, data.len()));
            let len = data.len().div_ceil(parts).next_multiple_of(4);
            for (part, chunk) in data.chunks(len).enumerate() {
                let (offset, len) = ((part * len) as u32, chunk.len() as u32);
                queue.data(DataPdu { offset, len, ..r2t }, chunk, offset + len == r2t.len);
            }
            assert!(queue.answer().status().is_ok());
            assert_eq!(queue.read(rw(READ, 5000, blocks, false)), Ok(data));
        }
    }
    drop(host);
    target.end();
}

/// Many commands in flight at once complete in any order, each once.
#[test]
fn a_full_queue() {
    let target = TargetFixture::with(TestDisk::new(SIZE, CompletionOrder::Shuffled), options());
    let host = target.host();
    let mut queue = host.queue(1, false);
    for _ in 0..20 {
        let mut ids: Vec<(u16, u64)> =
            (0..32).map(|block| (queue.command(rw(READ, block * 9, 3, false), &[]), block * 9)).collect();
        while !ids.is_empty() {
            let Answer::Data { pdu, data, is_success: true } = queue.answer() else {
                panic!("expected data")
            };
            let at = ids.iter().position(|(id, _)| *id == pdu.command).expect("completed twice");
            let (_, block) = ids.swap_remove(at);
            assert_eq!(data, pattern_at(block, 3));
        }
    }
    drop((host, queue));
    target.end();
}

/// Flush, FUA, zeroes and discards reach the disk as what they are.
#[test]
fn other_commands() {
    for zeroes in [true, false] {
        let disk = TestDisk::new(SIZE, CompletionOrder::AtOnce);
        let target = TargetFixture::with(if zeroes { disk } else { disk.without_zeroes() }, options());
        let host = target.host();
        let mut queue = host.queue(1, false);
        let none = BioFlags::empty();
        assert!(queue.ask(command(0x00, 1, &[])).status.is_ok());
        assert_eq!(target.disk.seen(), [(Op::Flush, none)]);

        let fua = with_data(command(WRITE, 1, &[7, 0, 1 << 30]), true, BLOCK as u32);
        queue.command(fua, &bytes(9, 1));
        assert!(queue.answer().status().is_ok());
        assert_eq!(target.disk.seen(), [(Op::Write, BioFlags::FUA)]);

        // Zeroes of 1,000 blocks that may be deallocated, and durable ones that may not.
        assert!(queue.ask(command(0x08, 1, &[64, 0, 999 | 1 << 25])).status.is_ok());
        assert!(queue.ask(command(0x08, 1, &[2000, 0, 1 | 1 << 30])).status.is_ok());
        let seen = target.disk.seen();
        assert_eq!(seen[0], (Op::WriteZeroes, none));
        assert!(
            seen.contains(&(Op::WriteZeroes, BioFlags::NOUNMAP)) && seen.last() == Some(&(Op::Flush, none))
        );
        assert_eq!(seen.len(), if zeroes { 3 } else { 6 }, "{seen:?}");
        assert_eq!(queue.read(rw(READ, 64, 1000, false)), Ok(vec![0; 1000 * BLOCK]));
        assert_eq!(queue.read(rw(READ, 63, 1, false)), Ok(pattern_at(63, 1)));
        assert_eq!(queue.read(rw(READ, 2000, 2, false)), Ok(vec![0; 2 * BLOCK]));
        target.disk.seen();

        // Two ranges, one of them empty, and one beyond the end.
        let discard = |ranges: &[(u64, u32)]| {
            let data: Vec<u8> = ranges
                .iter()
                .flat_map(|(start, blocks)| {
                    [&[0; 4][..], &blocks.to_le_bytes(), &start.to_le_bytes()].concat()
                })
                .collect();
            (with_data(command(0x09, 1, &[ranges.len() as u32 - 1, 4]), true, data.len() as u32), data)
        };
        let (command, data) = discard(&[(8, 16), (100, 0), (200, 8)]);
        queue.command(command, &data);
        assert!(queue.answer().status().is_ok());
        assert_eq!(target.disk.seen(), [(Op::Discard, none), (Op::Discard, none)]);
        // The last one would be block 0 if its offset in bytes had only 64 bits.
        for start in [SIZE / 512 - 1, u64::MAX, 1 << 55] {
            let (command, data) = discard(&[(start, 2)]);
            queue.command(command, &data);
            assert_eq!(queue.answer().status(), NvmeStatus::LBA_OUT_OF_RANGE.permanent(), "{start}");
            assert_eq!(target.disk.seen(), []);
        }
        drop((host, queue));
        target.end();
    }
}

/// Errors of the disk and of the command have the statuses that make a host do the right thing.
#[test]
fn errors() {
    let target = TargetFixture::new();
    let host = target.host();
    let mut queue = host.queue(1, false);
    // The last sector can be neither read nor written.
    let last = SIZE / 512 - 1;
    assert_eq!(queue.read(rw(READ, last, 1, false)), Err(NvmeStatus::UNRECOVERED_READ_ERROR.permanent()));
    queue.command(rw(WRITE, last, 1, true), &bytes(1, 1));
    assert_eq!(queue.answer().status(), NvmeStatus::WRITE_FAULT.permanent());
    assert_eq!(queue.read(rw(READ, last, 2, false)), Err(NvmeStatus::LBA_OUT_OF_RANGE.permanent()));
    for nsid in [0, 2, 1025, u32::MAX] {
        let status = queue.ask(command(0x00, nsid, &[])).status;
        assert_eq!(status, NvmeStatus::INVALID_NAMESPACE.permanent(), "{nsid}");
    }
    assert_eq!(queue.ask(command(0x55, 1, &[])).status, NvmeStatus::INVALID_OPCODE.permanent());
    // A wrong command with data in its capsule does not disturb the next one.
    queue.command(rw(WRITE, last + 1, 8, true), &bytes(1, 8));
    assert_eq!(queue.answer().status(), NvmeStatus::LBA_OUT_OF_RANGE.permanent());
    assert_eq!(queue.read(rw(READ, 0, 1, false)), Ok(pattern_at(0, 1)));
    drop((host, queue));
    target.end();
}

/// Commands whose data does not fit into memory wait, and complete in the end.
#[test]
fn commands_wait_for_memory() {
    let mut options = options();
    options.limits.core_bytes_max = 2 << 20;
    let target = TargetFixture::with(TestDisk::new(SIZE, CompletionOrder::Shuffled), options);
    let host = target.host();
    let mut queue = host.queue(1, false);
    let ids: Vec<u16> = (0..31).map(|_| queue.command(rw(READ, 0, 2048, false), &[])).collect();
    let mut done: Vec<u16> = Vec::new();
    for _ in &ids {
        match queue.answer() {
            Answer::Data { pdu, data, .. } => {
                assert_eq!(data.len(), 1 << 20);
                done.push(pdu.command);
            }
            other => panic!("{other:?}"),
        }
    }
    done.sort_unstable();
    assert_eq!(done, ids);
    drop((host, queue));
    target.end();
}

/// More long writes at once than the memory of a queue holds.
#[test]
fn many_long_writes() {
    let target = TargetFixture::with(TestDisk::new(SIZE, CompletionOrder::Shuffled), options());
    let host = target.host();
    let mut queue = host.queue(1, false);
    let data = bytes(3, 2048);
    let ids: Vec<u16> = (0..31).map(|_| queue.command(rw(WRITE, 2048, 2048, false), &[])).collect();
    let mut done: Vec<u16> = Vec::new();
    // The host sends no data before it has all R2T that the memory of the queue allows.
    let mut asked = Vec::new();
    while done.len() < ids.len() {
        match queue.answer() {
            Answer::ReadyToTransfer(r2t) => asked.push(r2t),
            Answer::Response(completion) if completion.status.is_ok() => done.push(completion.id),
            other => panic!("{other:?}"),
        }
        let is_all = asked.len() + done.len() == ids.len();
        if asked.len() == 16 || is_all {
            asked.drain(..).for_each(|r2t| queue.data(r2t, &data, true));
        }
    }
    done.sort_unstable();
    assert_eq!(done, ids);
    assert_eq!(queue.read(rw(READ, 2048, 2048, false)), Ok(data));
    drop((host, queue));
    target.end();
}

/// The ranges of a deallocation are all checked before the first one reaches the device.
#[test]
fn a_wrong_range_discards_nothing() {
    let target = TargetFixture::new();
    let host = target.host();
    let mut queue = host.queue(1, false);
    let dataset = |queue: &mut super::Connection, ranges: &[(u32, u64)], attributes: u32| {
        let mut data = Vec::new();
        for (blocks, start) in ranges {
            data.extend_from_slice(&[[0; 4], blocks.to_le_bytes()].concat());
            data.extend_from_slice(&start.to_le_bytes());
        }
        let dwords = [ranges.len() as u32 - 1, attributes];
        queue.command(with_data(command(0x09, 1, &dwords), true, data.len() as u32), &data);
        queue.answer().status()
    };
    let end = SIZE / BLOCK as u64;
    let out_of_range = NvmeStatus::LBA_OUT_OF_RANGE.permanent();
    for wrong in [(1, end), (9, end - 8), (u32::MAX, 0), (8, u64::MAX - 2)] {
        for attributes in [1 << 2, 0] {
            let ranges = [(8, 0), (8, 64), wrong, (8, 128)];
            assert_eq!(dataset(&mut queue, &ranges, attributes), out_of_range, "{wrong:?}");
        }
    }
    assert_eq!(target.disk.seen(), [], "no range was discarded");
    assert!(dataset(&mut queue, &[(8, 0), (8, 64), (8, end - 8)], 1 << 2).is_ok());
    assert_eq!(target.disk.seen().len(), 3);
    drop((host, queue));
    target.end();
}
