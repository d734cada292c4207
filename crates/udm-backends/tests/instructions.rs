//! How many instructions a request takes: the list in docs/instructions.md, measured again.
//!
//! Times are noise on a machine that others use; instructions are the same each time. The list is
//! the test: a line there is a device, the table that makes it, and what a request took when the
//! line was written. One that takes noticeably more now fails. To add a line, write it with zeroes
//! and take over what the test says.
//!
//! The program is two: as a test it runs itself below valgrind's callgrind, which counts; there it
//! sends requests through the lanes of each device. Only an optimised build says anything
//! (`cargo test --release -p udm-backends --test instructions`); others say so and pass, as where
//! there is no valgrind.
#![allow(clippy::print_stdout, reason = "a program of its own")]

use std::process::{Command, ExitCode};
use std::sync::Arc;
use udm_core::{Batch, Bio, CoreId, CoreState, DevNo, Device, Lane, Nanos, Sector, Sectors};
use udm_dm::testing::{TestIo, TestResolver, TestWorld};
use udm_dm::{MappedDevice, Table};
use udm_targets::TARGETS;
use udm_wire::uri;

/// Requests in flight: the columns of the list.
const DEPTHS: [usize; 2] = [1, 32];

/// Requests a measurement, and as many before it to warm up.
const REQUESTS: usize = 6400;

/// Null devices that tables can name.
const DISKS: [&str; 8] = ["A", "B", "C", "D", "E", "F", "G", "H"];

/// Sectors of a request.
const REQUEST: u64 = 8;

/// The argument below valgrind.
const MEASURE: &str = "--measure";

/// A line of the list.
struct Row {
    /// What it is called.
    name: String,
    /// The table, its lines separated by ` / `; empty for a null device itself.
    table: String,
    /// What it took, by [`DEPTHS`].
    listed: [f64; 2],
}

/// The list, and the compiler of the build that it was measured with.
struct List {
    compiler: String,
    rows: Vec<Row>,
}

fn main() -> ExitCode {
    let list = read(include_str!("../../../docs/instructions.md"));
    if std::env::args().any(|arg| arg == MEASURE) {
        list.rows.iter().for_each(measure);
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

/// Reads the table of docs/instructions.md.
fn read(text: &str) -> List {
    let compiler = text.lines().find_map(|line| line.strip_prefix("Compiler: `")?.strip_suffix('`'));
    let row = |line: &str| match &line.split('|').map(str::trim).collect::<Vec<_>>()[..] {
        [_, name, table, one, many, ..] => {
            let listed = [one.parse().ok()?, many.parse().ok()?];
            Some(Row { name: name.to_string(), table: table.replace('`', ""), listed })
        }
        _ => None,
    };
    let rows: Vec<Row> = text.lines().filter_map(row).collect();
    assert!(!rows.is_empty(), "the list has lines");
    List { compiler: compiler.expect("the list names its compiler").to_owned(), rows }
}

/// Has callgrind count: what every second call of [`measured`] took a request, in their order.
fn count(list: &List) -> std::io::Result<Vec<f64>> {
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

/// Compares with the list.
fn compare(list: &List, counted: &[f64]) -> ExitCode {
    let compiler = Command::new("rustc").arg("--version").output();
    // Another compiler makes other code of the same sources.
    let same = compiler.is_ok_and(|out| String::from_utf8_lossy(&out.stdout).starts_with(&list.compiler));
    let tolerance = if same { 1.04 } else { 1.25 };
    let mut result = ExitCode::SUCCESS;
    for (row, counted) in list.rows.iter().zip(counted.chunks(DEPTHS.len())) {
        let Row { name, table, listed } = row;
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

/// Measures the device of `row` at each depth.
fn measure(row: &Row) {
    let device = make(&row.table);
    let mut core = CoreState::new(CoreId(0), 1, 1, None);
    let mut lane = device.open(&mut core.cx(Nanos(1))).expect("the lane opens");
    let places = device.limits().size.0 / REQUEST;
    for depth in DEPTHS {
        let mut batch: Batch =
            (0..depth).map(|_| Bio::read(Sector(0), Sectors(REQUEST), Default::default())).collect();
        batch.iter_mut().for_each(|bio| bio.start());
        // The first warms up.
        (0..2).for_each(|_| measured(&mut core, &mut *lane, &mut batch, places));
        batch.iter_mut().for_each(|bio| bio.finish());
    }
}

/// Sends [`REQUESTS`] reads to random ones of so many places, a batch at a time. What is counted.
#[inline(never)]
fn measured(core: &mut CoreState, lane: &mut dyn Lane, batch: &mut Batch, places: u64) {
    let (mut done, depth) = (Batch::with_capacity(batch.len()), batch.len());
    let mut chance: u64 = 1;
    for turn in 0..REQUESTS / depth {
        let mut cx = core.cx(Nanos(turn as u64));
        for bio in batch.iter_mut() {
            chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            bio.sector = Sector((((chance >> 32) * places) >> 32) * REQUEST);
        }
        lane.submit(batch, &mut cx);
        lane.poll(&mut done, &mut cx);
        assert_eq!(done.len(), depth, "all come back at once");
        std::mem::swap(batch, &mut done);
    }
}

/// A device with `table`.
fn make(table: &str) -> Arc<dyn Device> {
    let null = || udm_backends::open(&uri::parse("null:size=1G").expect("a URI")).expect("it opens");
    if table.is_empty() {
        return null();
    }
    let mut resolver = TestResolver::new();
    for (minor, name) in (0..).zip(DISKS) {
        resolver.add(name, DevNo { major: 253, minor }, null());
    }
    let lines = udm_wire::table::parse(&table.replace(" / ", "\n")).expect("a table");
    let table = Table::build(TARGETS, &lines, &mut resolver, &TestIo::new(), 1).expect("a good table");
    let device = MappedDevice::new("t", None, DevNo { major: 254, minor: 0 }).expect("a name");
    device.load(table).expect("a table that fits");
    let (mut world, mut change) =
        (TestWorld::new(1), device.resume(Arc::new(|| ())).expect("no other change"));
    while change.step(&*world.cores()).transpose().expect("it resumes").is_none() {
        world.deliver(0);
    }
    device
}
