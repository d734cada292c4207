//! Counts the instructions per request and compares them with docs/internals/instructions.md.
//!
//! Times are noise on a shared machine; instruction counts are reproducible. The list is the test:
//! a line has a device, the table that creates it, and the counts when the line was written. The
//! test fails if a count is noticeably higher now. To add a line, write it with zeroes and copy the
//! counts from the output. The end of a line's name gives the workload: reads, `: writes` to places
//! that were written before, `: reads` of such places, or `: first writes`, each to a chunk that
//! was never written.
//!
//! As a test, the program runs itself under valgrind's callgrind, which counts. There it sends
//! requests through the lanes of each device. Only an optimised build gives useful counts (`cargo
//! test --release -p udm-backends --test instructions`). Other builds, and machines without
//! valgrind, print a note and pass.
#![allow(clippy::print_stdout, reason = "a program of its own")]

use std::process::{Command, ExitCode};
use std::sync::Arc;
use udm_core::{Batch, Bio, CoreLaneState, Cx, DevNo, Device, Lane, Nanos, Op, Sector, Sectors};
use udm_dm::testing::{SteppedTestCores, TestControlIo, TestDeviceNameResolver};
use udm_dm::throttle::Throttle;
use udm_dm::{DeviceSetTransition, MappedDevice, Table};
use udm_targets::TARGETS;
use udm_wire::uri;

/// Requests in flight: the columns of the list.
const DEPTHS: [usize; 2] = [1, 32];

/// Requests per measurement, and as many before it to warm up.
const REQUESTS: usize = 6400;

/// Null devices that tables can name. The last has exactly [`PLACES`] requests.
const DISKS: [&str; 17] =
    ["A", "B", "C", "D", "E", "F", "G", "H", "I", "J", "K", "L", "M", "N", "O", "P", "Q"];

/// Null devices with a queue, and the parameters of the queue.
const QUEUED: [(&str, &str); 2] = [("R", "scheduler=none"), ("S", "scheduler=mq-deadline")];

/// Sectors of a request.
const REQUEST: u64 = 8;

/// Places that are each written once at first: more than the requests of a line. A power of two.
const PLACES: u64 = 1 << 15;

/// The most polls until a batch completes.
const POLLS_MAX: usize = 1 << 10;

/// The argument for the run under valgrind. Names of lines may follow, to measure only these by
/// hand.
const MEASURE: &str = "--measure";

/// A line of the list.
struct BaselineRow {
    name: String,
    /// The table, its lines separated by ` / `; empty for the null device itself. Several tables
    /// are separated by ` ; `, and the last one is measured. `gone N` after them removes device N,
    /// counted from 1, after all places were written. `throttle LIMITS` limits the last device.
    table: String,
    /// Listed counts, by [`DEPTHS`].
    listed: [f64; 2],
}

/// The list, and the compiler of the build that was measured.
struct Baseline {
    compiler: String,
    rows: Vec<BaselineRow>,
}

fn main() -> ExitCode {
    let list = read(include_str!("../../../docs/internals/instructions.md"));
    let mut args = std::env::args().skip_while(|arg| arg != MEASURE);
    if args.next().is_some() {
        let names: Vec<String> = args.collect();
        let is_asked = |row: &&BaselineRow| names.is_empty() || names.contains(&row.name);
        list.rows.iter().filter(is_asked).for_each(measure);
    } else if cfg!(debug_assertions) {
        println!("instructions: not an optimised build, so nothing is measured");
    } else if !cfg!(target_arch = "x86_64") {
        println!("instructions: the list is of x86_64, so nothing is measured");
    } else {
        match count(&list) {
            Ok(counted) => return compare(&list, &counted),
            Err(why) => println!("instructions: no valgrind, so nothing is measured: {why}"),
        }
    }
    ExitCode::SUCCESS
}

/// Reads the table of docs/internals/instructions.md.
fn read(text: &str) -> Baseline {
    let compiler = text.lines().find_map(|line| line.strip_prefix("Compiler: `")?.strip_suffix('`'));
    let row = |line: &str| match &line.split('|').map(str::trim).collect::<Vec<_>>()[..] {
        [_, name, table, one, many, ..] => {
            let listed = [one.parse().ok()?, many.parse().ok()?];
            Some(BaselineRow { name: name.to_string(), table: table.replace('`', ""), listed })
        }
        _ => None,
    };
    let rows: Vec<BaselineRow> = text.lines().filter_map(row).collect();
    assert!(!rows.is_empty(), "the list has lines");
    Baseline { compiler: compiler.expect("the list names its compiler").to_owned(), rows }
}

/// Runs callgrind. Returns the instructions per request of every second call of [`measured`], in
/// order.
fn count(list: &Baseline) -> std::io::Result<Vec<f64>> {
    let folder = tempfile::tempdir()?;
    let out = Command::new("valgrind")
        .args([
            "--tool=callgrind",
            "--toggle-collect=instructions::measured",
            "--dump-after=instructions::measured",
        ])
        .arg(format!("--callgrind-out-file={}/out", folder.path().display()))
        .arg(std::env::current_exe()?)
        .arg(MEASURE)
        .output()?;
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let counted = (1..=list.rows.len() * DEPTHS.len()).map(|i| {
        let text =
            std::fs::read_to_string(folder.path().join(format!("out.{}", 2 * i))).expect("a measurement");
        let total = text.lines().find_map(|line| line.strip_prefix("totals: ")).expect("its total");
        total.trim().parse::<f64>().expect("a number") / REQUESTS as f64
    });
    Ok(counted.collect())
}

/// Compares the counts with the list.
fn compare(list: &Baseline, counted: &[f64]) -> ExitCode {
    let compiler = Command::new("rustc").arg("--version").output();
    // Another compiler generates other code from the same sources.
    let same = compiler.is_ok_and(|out| String::from_utf8_lossy(&out.stdout).starts_with(&list.compiler));
    let tolerance = if same { 1.04 } else { 1.25 };
    let mut result = ExitCode::SUCCESS;
    for (row, counted) in list.rows.iter().zip(counted.chunks(DEPTHS.len())) {
        let BaselineRow { name, table, listed } = row;
        println!("| {name} | `{table}` | {:.0} | {:.0} |", counted[0], counted[1]);
        for ((depth, now), listed) in DEPTHS.iter().zip(counted).zip(listed) {
            if *now > (listed * tolerance).max(listed + 3.0) {
                println!("  longer: {now:.0} instructions at depth {depth}, not {listed}");
                result = ExitCode::FAILURE;
            } else if *now < (listed / tolerance).min(listed - 3.0) {
                println!("  shorter: {now:.0} instructions at depth {depth}, not {listed}: write it down");
            }
        }
    }
    result
}

/// Kind of requests.
#[derive(Clone, Copy, PartialEq)]
enum Workload {
    Reads,
    ReadsOfWritten,
    Writes,
    FirstWrites,
}

impl BaselineRow {
    fn load(&self) -> Workload {
        match self.name.rsplit_once(": ").map(|(_, load)| load) {
            None => Workload::Reads,
            Some("reads") => Workload::ReadsOfWritten,
            Some("writes") => Workload::Writes,
            Some("first writes") => Workload::FirstWrites,
            Some(other) => panic!("{}: {other}?", self.name),
        }
    }
}

/// Generates the offsets of requests.
#[derive(Clone, Copy)]
struct OffsetGenerator {
    load: Workload,
    /// Random offsets are below this number of places.
    places: u64,
    chance: u64,
    /// Number of places written once.
    once: u64,
}

impl OffsetGenerator {
    #[inline(always)]
    fn at(&mut self, batch: &mut Batch) {
        for bio in batch.iter_mut() {
            self.chance = self.chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            bio.sector = Sector((((self.chance >> 32) * self.places) >> 32) * REQUEST);
        }
    }

    #[inline(always)]
    fn at_new(&mut self, batch: &mut Batch) {
        for bio in batch.iter_mut() {
            bio.sector = Sector(self.once.wrapping_mul(0x9e37_79b9_7f4a_7c15) % PLACES * REQUEST);
            self.once += 1;
        }
    }
}

/// Measures the device of `row` at each depth.
fn measure(row: &BaselineRow) {
    let (tables, gone) = match row.table.split_once(" ; gone ") {
        Some((tables, number)) => (tables, Some(number.parse::<usize>().expect("a number") - 1)),
        None => (&*row.table, None),
    };
    let (tables, limits) = match tables.split_once(" ; throttle ") {
        Some((tables, limits)) => (tables, Some(limits.parse().expect("limits"))),
        None => (tables, None),
    };
    let mut world = SteppedTestCores::new(1);
    let (nulls, mapped) = make(tables, &mut world);
    if let (Some(limits), Some(last)) = (limits, mapped.last()) {
        last.set_throttle(Some(Throttle::new(limits)), &*world.cores());
    }
    let device =
        mapped.last().map_or_else(|| Arc::clone(&nulls[0]), |last| Arc::clone(last) as Arc<dyn Device>);
    let mut lane = world.open(0, &*device).expect("the lane opens");
    let load = row.load();
    let places = if load == Workload::Reads { device.limits().size.0 / REQUEST } else { PLACES };
    let is_read = matches!(load, Workload::Reads | Workload::ReadsOfWritten);
    let mut aim = OffsetGenerator { load, places, chance: 1, once: 0 };
    let batch = |depth| -> Batch {
        let bio = |_| {
            let mut bio = Bio::read(Sector(0), Sectors(REQUEST), Default::default());
            bio.op = if is_read { Op::Read } else { Op::Write };
            bio.start();
            bio
        };
        (0..depth).map(bio).collect()
    };
    if matches!(load, Workload::Writes | Workload::ReadsOfWritten) {
        let mut batch = batch(PLACES as usize);
        batch.iter_mut().for_each(|bio| bio.op = Op::Write);
        aim.at_new(&mut batch);
        let (mut done, mut cx) = (Batch::new(), world.state(0).cx(Nanos(1)));
        lane.submit(&mut batch, &mut cx);
        poll_until_complete(&mut *lane, &mut done, PLACES as usize, &mut cx);
        done.iter_mut().for_each(|bio| bio.finish());
    }
    if let Some(gone) = gone {
        remove(&mapped[gone], &mut world, &mut *lane);
    }
    for depth in DEPTHS {
        let mut batch = batch(depth);
        // The first run warms up.
        (0..2).for_each(|_| measured(world.state(0), &mut *lane, &mut batch, &mut aim));
        batch.iter_mut().for_each(|bio| bio.finish());
    }
}

/// Sends [`REQUESTS`] requests in batches. callgrind counts this function.
#[inline(never)]
fn measured(core: &mut CoreLaneState, lane: &mut dyn Lane, batch: &mut Batch, to: &mut OffsetGenerator) {
    let (mut done, depth, mut aim) = (Batch::with_capacity(batch.len()), batch.len(), *to);
    for turn in 0..REQUESTS / depth {
        let mut cx = core.cx(Nanos(turn as u64));
        match aim.load {
            Workload::FirstWrites => aim.at_new(batch),
            Workload::Reads | Workload::ReadsOfWritten | Workload::Writes => aim.at(batch),
        }
        lane.submit(batch, &mut cx);
        lane.poll(&mut done, &mut cx);
        if done.len() != depth {
            poll_until_complete(lane, &mut done, depth, &mut cx);
        }
        std::mem::swap(batch, &mut done);
    }
    *to = aim;
}

/// Polls until a whole batch has completed.
#[inline(never)]
fn poll_until_complete(lane: &mut dyn Lane, done: &mut Batch, depth: usize, cx: &mut Cx<'_>) {
    for _ in 0..POLLS_MAX {
        lane.poll(done, cx);
        if done.len() == depth {
            return;
        }
    }
    panic!("{} of {depth} come back", done.len());
}

/// Removes `device` while `lane` is open.
fn remove(device: &Arc<MappedDevice>, world: &mut SteppedTestCores, lane: &mut dyn Lane) {
    let devices = std::slice::from_ref(device);
    let mut change = DeviceSetTransition::remove(devices, &(Arc::new(|| ()) as _))
        .map_err(|(_, why)| why)
        .expect("no other change");
    let mut over = false;
    while !over {
        over = change.step(&*world.cores()).transpose().map_err(|(_, why)| why).expect("it goes").is_some();
        assert!(world.poll(0, lane).is_empty());
    }
}

/// Creates the null devices, and mapped devices with these tables.
fn make(tables: &str, world: &mut SteppedTestCores) -> (Vec<Arc<dyn Device>>, Vec<Arc<MappedDevice>>) {
    // Each null device is a disk with its own size.
    let null = |minor: u32| -> Arc<dyn Device> {
        let is_small = minor as usize == DISKS.len() - 1;
        let size = if is_small { PLACES * REQUEST * 512 } else { (1u64 << 30) + u64::from(minor) * 4096 };
        udm_backends::open_standalone_device(
            &uri::parse_device_uri(&format!("null:size={size}")).expect("a URI"),
        )
        .expect("it opens")
    };
    let nulls: Vec<_> = (0..DISKS.len() as u32).map(null).collect();
    let mut resolver = TestDeviceNameResolver::new();
    for ((minor, name), device) in (0..).zip(DISKS).zip(&nulls) {
        resolver.add(name, DevNo { major: 253, minor }, Arc::clone(device));
    }
    for (minor, (name, words)) in (100..).zip(QUEUED) {
        let uri = uri::parse_device_uri(&format!("null:size=1G,{words}")).expect("a URI");
        resolver.add(
            name,
            DevNo { major: 253, minor },
            udm_backends::open_standalone_device(&uri).expect("it opens"),
        );
    }
    let map = |(minor, table): (u32, &str)| {
        let lines = udm_wire::table::parse_table(&table.replace(" / ", "\n")).expect("a table");
        let table =
            Table::build(TARGETS, &lines, &mut resolver, &TestControlIo::new(), 1).expect("a good table");
        let device = MappedDevice::new("t", None, DevNo { major: 254, minor }).expect("a name");
        device.load(table).expect("a table that fits");
        let mut change = device.resume(Arc::new(|| ())).expect("no other change");
        while change.step(&*world.cores()).transpose().expect("it resumes").is_none() {
            world.deliver(0);
        }
        device
    };
    let mapped = (0..).zip(tables.split(" ; ")).filter(|(_, table)| !table.is_empty()).map(map).collect();
    (nulls, mapped)
}
