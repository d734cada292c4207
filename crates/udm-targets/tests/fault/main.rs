//! The fault targets over disks in memory, on cores stepped by the test.

#[path = "../common/mod.rs"]
mod common;
mod delay;
mod dust;
mod flakey;
mod log_writes;
mod prompt;
mod recorded;

use std::sync::Arc;
use udm_core::{Batch, Bio, Cx, DevNo, Device, Lane, Op, Sector, Sectors};
use udm_dm::testing::{SteppedTestCores, TestControlIo, TestDeviceNameResolver, TestDisk};
use udm_dm::{Target, TargetArgs, TargetError};
use udm_targets::TARGETS;

/// Builds the target of `line` (type and arguments), over `len` sectors.
fn build(
    line: &str,
    len: u64,
    resolver: &mut TestDeviceNameResolver,
) -> Result<Arc<dyn Target>, TargetError> {
    let mut words = line.split_whitespace();
    let word = words.next().unwrap();
    let kind = TARGETS.iter().find(|kind| kind.name == word).expect("a type that there is");
    let args: Vec<String> = words.map(str::to_owned).collect();
    (kind.new)(&mut TargetArgs {
        start: Sector(0),
        len: Sectors(len),
        args: &args,
        resolver,
        io: &TestControlIo::new(),
        cores: 2,
    })
}

/// Disks `a` (1:0) and `b` (1:1) with these sizes in sectors, and a resolver that knows them.
fn disks(a: u64, b: u64) -> (Arc<TestDisk>, Arc<TestDisk>, TestDeviceNameResolver) {
    let (a, b) = (TestDisk::new(a), TestDisk::new(b));
    let mut resolver = TestDeviceNameResolver::new();
    resolver.add("a", DevNo { major: 1, minor: 0 }, Arc::clone(&a) as Arc<dyn Device>);
    resolver.add("b", DevNo { major: 1, minor: 1 }, Arc::clone(&b) as Arc<dyn Device>);
    (a, b, resolver)
}

fn message(target: &dyn Target, words: &str) -> Result<String, TargetError> {
    let words: Vec<String> = words.split_whitespace().map(str::to_owned).collect();
    target.message(&words, &mut TestDeviceNameResolver::new())
}

fn open(world: &mut SteppedTestCores, core: usize, target: &Arc<dyn Target>) -> Box<dyn Lane> {
    world.turn(core, |cx: &mut Cx<'_>| target.open(cx)).unwrap()
}

/// Polls until nothing more completes.
fn poll_until_idle(world: &mut SteppedTestCores, core: usize, lane: &mut dyn Lane) -> Batch {
    let mut done = Batch::new();
    for _ in 0..16 {
        done.append(&mut world.poll(core, lane));
    }
    done
}

/// The fields of a bio that must not change.
fn bio_identity(bio: &Bio) -> (Op, u64, u64, u64) {
    (bio.op, bio.sector.0, bio.sectors.0, bio.cookie)
}

/// `bio` with its cookie set.
fn tagged(mut bio: Box<Bio>, cookie: u64) -> Box<Bio> {
    bio.cookie = cookie;
    bio
}
