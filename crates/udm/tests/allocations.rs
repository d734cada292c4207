//! The steady state allocates nothing. A counting allocator sees no allocation in a million
//! requests through a mapped device, multipath and the null device, and in fewer requests to files,
//! on a warm core. The core is a [`LocalCore`], as in `udm bench`; the table is built as by `udm
//! serve`.

use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use std::alloc::System;
use udm_control::{DeviceRegistry, verbs};
use udm_core::{Batch, Bio, BioFlags, Buf, CoreId, Lane, Op, Sector, Sectors};
use udm_runtime::{CoreOptions, LocalCore, ProcessCores};

#[global_allocator]
static ALLOC: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const DEPTH: usize = 32;
const REQUESTS: u64 = 1_000_000;

/// Sends reads and writes of 4 KiB through `lane`, as many at a time as there are in `ready`, until
/// `requests` have completed. At the end all bios are in `ready` again.
fn run(core: &mut LocalCore, lane: &mut dyn Lane, ready: &mut Batch, done: &mut Batch, requests: u64) {
    let (mut sent, mut home) = (0, 0);
    while home < sent.max(requests) {
        if home < requests {
            for bio in ready.iter_mut() {
                bio.op = if sent % 3 == 0 { Op::Write } else { Op::Read };
                bio.sector = Sector(sent * 8 % (1 << 20));
                bio.start();
                sent += 1;
            }
        }
        core.turn(|cx| {
            if home < requests {
                lane.submit(ready, cx);
            }
            lane.poll(done, cx);
        });
        if done.is_empty() {
            core.park();
        }
        home += done.len() as u64;
        for mut bio in done.drain(..) {
            bio.finish();
            assert!(bio.status.is_ok());
            ready.push(bio);
        }
    }
}

/// Counts the allocations of `run`. Allocations of the test harness on another thread are counted
/// too, so one of three runs must have none.
fn allocates_nothing(name: &str, mut run: impl FnMut()) {
    let mut changes = Vec::new();
    for _ in 0..3 {
        let region = Region::new(ALLOC);
        run();
        let change = region.change();
        if change.allocations + change.reallocations == 0 {
            return;
        }
        changes.push(change);
    }
    panic!("{name}: {changes:?}");
}

/// A single test, since the allocator counts for the whole process.
#[test]
fn a_million_requests_allocate_nothing() {
    paths();
    files();
}

fn paths() {
    let core_set = ProcessCores::new(1).unwrap();
    let registry = DeviceRegistry::new(core_set.clone(), 1);
    let mut core = LocalCore::attach(&core_set, CoreId(0), CoreOptions::default()).unwrap();
    for selector in [
        "round-robin 0 2 1 null:size=1G 1 null:size=2G 1",
        "queue-length 0 2 1 null:size=1G 1 null:size=2G 1",
        "service-time 0 2 1 null:size=1G 1 null:size=2G 1",
    ] {
        let table = format!("0 2097152 multipath 1 queue_if_no_path 0 1 1 {selector}");
        verbs::block_on_verb_with_idle_fn(
            verbs::create_mapped_device(&registry, "mp", None, Some(&table)),
            || core.turn(|_| ()),
        )
        .unwrap();
        let mut lane = core.open(&*registry.find("mp").unwrap().device).unwrap();
        let mut ready: Batch =
            (0..DEPTH).map(|_| Bio::read(Sector(0), Sectors(8), Default::default())).collect();
        let mut done = Batch::new();
        run(&mut core, &mut *lane, &mut ready, &mut done, 10_000);

        allocates_nothing(selector, || run(&mut core, &mut *lane, &mut ready, &mut done, REQUESTS));
        drop(lane);
        verbs::block_on_verb_with_idle_fn(verbs::remove_mapped_device(&registry, "mp"), || core.turn(|_| ()))
            .unwrap();
    }
}

/// Reads and writes of files, with and without the page cache; some writes with FUA or a flush
/// before them.
fn files() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(512 << 20).unwrap();
    let core_set = ProcessCores::new(1).unwrap();
    let mut core = LocalCore::attach(&core_set, CoreId(0), CoreOptions::default()).unwrap();
    for direct in ["off", "on"] {
        let uri = format!("file:{}?direct={direct}", file.path().display());
        let Ok(device) =
            udm_backends::open_standalone_device(&udm_wire::uri::parse_device_uri(&uri).unwrap())
        else {
            continue;
        };
        let mut lane = core.open(&*device).unwrap();
        let data = || Buf::zeroed(4096).into();
        let mut ready: Batch = (0..DEPTH).map(|_| Bio::read(Sector(0), Sectors(8), data())).collect();
        // The flags have no effect on reads; a third of the requests are writes.
        ready[0].flags = BioFlags::FUA;
        ready[1].flags = BioFlags::PREFLUSH;
        let mut done = Batch::new();
        run(&mut core, &mut *lane, &mut ready, &mut done, 2_000);

        allocates_nothing(&uri, || run(&mut core, &mut *lane, &mut ready, &mut done, 5_000));
    }
}
