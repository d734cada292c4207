//! Metadata contexts and `BLOCK_STATUS`.

use crate::disk::{CompletionOrder, TestDisk};
use crate::{ScriptedClient, ServerFixture};
use std::sync::Arc;
use udm_frontends::nbd::Export;
use udm_wire::nbd::{CommandFlags, EINVAL, NbdCommand};

const MIB: u64 = 1 << 20;
const NONE: CommandFlags = CommandFlags::empty();
const ALLOCATION: &str = "base:allocation";
const HOLE: u32 = 3;

fn client(world: &ServerFixture, of: &str, export: &str) -> (ScriptedClient, Vec<u32>) {
    let mut client = world.unnegotiated_client();
    let ids = client.go_with_contexts(of, &["x:y", ALLOCATION], export);
    (client, ids)
}

#[test]
fn what_a_device_holds() {
    let world = ServerFixture::new(TestDisk::new(4 * MIB, CompletionOrder::AtOnce));
    let (mut c, ids) = client(&world, "", "disk");
    assert_eq!(ids, [1], "the default export is this one");
    assert_eq!(c.status(NONE, 0, 20_480), Ok(vec![(8192, 0), (4096, HOLE), (8192, 0)]));
    // At any byte, and only for the requested range.
    assert_eq!(c.status(NONE, 8191, 3), Ok(vec![(1, 0), (2, HOLE)]));
    assert_eq!(c.status(NONE, 8195, 20), Ok(vec![(20, HOLE)]));
    assert_eq!(c.status(CommandFlags::REQ_ONE, 8191, 100), Ok(vec![(1, 0)]));
    // As many runs as one reply has; the rest needs another request.
    let all = c.status(NONE, 0, 4 << 20).unwrap();
    assert_eq!((all.len(), all[510], all[511]), (512, (8192, 0), (4096, HOLE)));
    for (offset, len) in [(0, 0), (4 * MIB, 1), (4 * MIB - 1, 2), (u64::MAX, 1)] {
        assert_eq!(c.status(NONE, offset, len), Err(EINVAL), "{offset} {len}");
    }
    assert_eq!(c.status(CommandFlags::DF, 0, 512), Err(EINVAL));
    assert!(c.read(0, 512).is_ok());
    drop(c);
    world.wait_until_empty();
    world.end();
}

/// Contexts belong to one export and to a client that chose them.
#[test]
fn contexts_are_chosen() {
    let world = ServerFixture::new(TestDisk::new(MIB, CompletionOrder::AtOnce));
    let other = Arc::new(TestDisk::new(MIB, CompletionOrder::AtOnce));
    world.exports.add(Export::new("other", "", false, other).unwrap()).unwrap();
    let (mut c, ids) = client(&world, "disk", "other");
    assert_eq!((ids, c.status(NONE, 0, 512)), (vec![1], Err(EINVAL)), "chosen for another export");
    let mut plain = world.client(true);
    assert_eq!(plain.status(NONE, 0, 512), Err(EINVAL));
    drop((c, plain));
    world.wait_until_empty();
    world.end();
}

/// A device that does not answer delays only its own queries, and no client that leaves.
#[test]
fn a_device_that_does_not_say() {
    let world = ServerFixture::new(TestDisk::new(MIB, CompletionOrder::AtOnce));
    let other = Arc::new(TestDisk::new(MIB, CompletionOrder::AtOnce));
    world.exports.add(Export::new("other", "", false, other).unwrap()).unwrap();
    world.disk.ignore_extent_queries(true);
    let (mut asks, _) = client(&world, "disk", "disk");
    let (mut leaves, _) = client(&world, "disk", "disk");
    // More queries than the queue holds: the others are answered as data.
    let asked = 700;
    for _ in 0..asked {
        asks.send(NbdCommand::BlockStatus, NONE, 0, 16_384, &[]);
    }
    leaves.send(NbdCommand::BlockStatus, NONE, 0, 4096, &[]);
    world.wait_for("all are taken in", |s| s.requests + s.in_flight > asked);
    drop(leaves);
    assert!(world.client(true).read(0, 512).is_ok());
    let (mut elsewhere, _) = client(&world, "other", "other");
    assert_eq!(elsewhere.status(NONE, 8192, 4096), Ok(vec![(4096, HOLE)]));
    drop(elsewhere);
    world.disk.ignore_extent_queries(false);
    let mut known = 0;
    for _ in 0..asked {
        assert_eq!(asks.receive().error, 0);
        match asks.blocks.as_slice() {
            [(8192, 0), (4096, HOLE), (4096, 0)] => known += 1,
            blocks => assert_eq!(blocks, [(16_384, 0)]),
        }
    }
    assert!((1..asked).contains(&known), "{known} of {asked}");
    drop(asks);
    world.wait_until_empty();
    world.end();
}
