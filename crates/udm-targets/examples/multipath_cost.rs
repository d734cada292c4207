//! The cost that multipath adds to a request, over a device that does nothing.
//!
//! ```text
//! cargo run --release -p udm-targets --example multipath_cost [DEPTH [ROUNDS [CASE]]]
//! ```
//! One thread submits batches of DEPTH 4 KiB reads and polls for them. Each case is a stack over
//! null lanes: the null lane alone, a lane that adds an offset (`linear`), and multipath with each
//! selector over two paths. For comparison, one case has a selector behind a mutex that is taken
//! for each request and each completion, as in the kernel. The cases run in turn, ROUNDS times, so
//! that a slow phase of the machine affects all of them. CASE runs one case alone, to count its
//! instructions. The program prints medians in ns per request, and the difference to the null lane.
//! The second table has two threads, each with its own lanes over the same control half.
#![allow(clippy::print_stdout, reason = "a program that prints a table")]

use std::sync::{Arc, Barrier, Mutex};
use std::time::Instant;
use udm_core::errno::ENOENT;
use udm_core::{
    Batch, Bio, CoreId, CoreLaneState, Cx, DevNo, Device, DeviceControlError, DeviceId, Lane, Limits, Nanos,
    Sector, Sectors,
};
use udm_dm::testing::TestControlIo;
use udm_dm::{DeviceLookupError, DeviceNameResolver, ResolvedDevice, Target, TargetArgs};
use udm_targets::multipath::Multipath;

/// A device that completes every bio at once.
struct NullDevice(DeviceId);

impl Device for NullDevice {
    fn id(&self) -> DeviceId {
        self.0
    }
    fn open(&self, _cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        Ok(Box::new(NullLane(Batch::new())))
    }
    fn limits(&self) -> Limits {
        Limits::new(Sectors(1 << 30))
    }
}

struct NullLane(Batch);

impl Lane for NullLane {
    fn submit(&mut self, batch: &mut Batch, _cx: &mut Cx<'_>) {
        for bio in batch.iter_mut() {
            bio.status = udm_core::Status::Ok;
        }
        self.0.append(batch);
    }
    fn poll(&mut self, done: &mut Batch, _cx: &mut Cx<'_>) {
        done.append(&mut self.0);
    }
}

/// Adds an offset on the way down and subtracts it on the way up.
struct LinearLane(Box<dyn Lane>, Sectors);

impl Lane for LinearLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        for bio in batch.iter_mut() {
            bio.sector += self.1;
        }
        self.0.submit(batch, cx);
    }
    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let from = done.len();
        self.0.poll(done, cx);
        for bio in &mut done[from..] {
            bio.sector -= self.1;
        }
    }
}

/// Queue-length with its state behind one mutex, taken by all cores once per choice of a path and
/// once per completion.
struct MutexLane {
    shared: Arc<Mutex<[u64; 2]>>,
    paths: [(Box<dyn Lane>, Batch); 2],
}

impl Lane for MutexLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        for bio in batch.drain(..) {
            let mut load = self.shared.lock().expect("no panic holds it");
            let path = usize::from(load[1] < load[0]);
            load[path] += 1;
            drop(load);
            self.paths[path].1.push(bio);
        }
        for (lane, out) in &mut self.paths {
            lane.submit(out, cx);
        }
    }
    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        for (path, (lane, _)) in self.paths.iter_mut().enumerate() {
            let from = done.len();
            lane.poll(done, cx);
            for _ in &done[from..] {
                self.shared.lock().expect("no panic holds it")[path] -= 1;
            }
        }
    }
}

struct NullResolver;

impl DeviceNameResolver for NullResolver {
    fn get(&mut self, word: &str) -> Result<ResolvedDevice, DeviceLookupError> {
        let number: DevNo =
            word.parse().map_err(|()| DeviceLookupError { errno: ENOENT, reason: String::new() })?;
        Ok(ResolvedDevice {
            number,
            name: word.to_string(),
            device: Arc::new(NullDevice(DeviceId::new())),
            hold: None,
        })
    }
}

fn multipath(params: &str) -> Arc<Multipath> {
    let args: Vec<String> = params.split_whitespace().map(String::from).collect();
    let mut args = TargetArgs {
        start: Sector(0),
        len: Sectors(1 << 30),
        args: &args,
        resolver: &mut NullResolver,
        io: &TestControlIo::new(),
        cores: 2,
    };
    Multipath::new(&mut args).expect("the table is good")
}

/// Opens the lane of a case on a core.
type OpenLane = Box<dyn Fn(&mut Cx<'_>) -> Box<dyn Lane> + Sync>;

fn cases() -> Vec<(&'static str, OpenLane)> {
    let null = |cx: &mut Cx<'_>| NullDevice(DeviceId::new()).open(cx).expect("null opens");
    let mut cases: Vec<(&'static str, OpenLane)> = vec![
        ("null", Box::new(null)),
        ("linear", Box::new(move |cx| Box::new(LinearLane(null(cx), Sectors(2048))))),
    ];
    for (name, params) in [
        ("round-robin", "0 0 1 1 round-robin 0 2 0 1:0 1:1"),
        ("queue-length", "0 0 1 1 queue-length 0 2 0 1:0 1:1"),
        ("service-time", "0 0 1 1 service-time 0 2 0 1:0 1:1"),
        ("service-time, uneven", "0 0 1 1 service-time 0 2 2 1:0 1 1 1:1 1 3"),
        ("queue-length, 8 paths", "0 0 1 1 queue-length 0 8 0 1:0 1:1 1:2 1:3 1:4 1:5 1:6 1:7"),
    ] {
        let target = multipath(params);
        cases.push((name, Box::new(move |cx| target.open(cx).expect("nulls open"))));
    }
    let shared = Arc::default();
    cases.push((
        "one mutex",
        Box::new(move |cx| {
            let paths = [(null(cx), Batch::new()), (null(cx), Batch::new())];
            Box::new(MutexLane { shared: Arc::clone(&shared), paths })
        }),
    ));
    cases
}

/// Nanoseconds per request over `batches` batches of `depth`.
fn measure(open: &OpenLane, core: u16, depth: usize, batches: usize, start: &Barrier) -> f64 {
    let mut state = CoreLaneState::new(CoreId(core), 2, 1, None);
    let mut cx = state.cx(Nanos(0));
    let mut lane = open(&mut cx);
    let mut batch: Batch = (0..depth as u64)
        .map(|i| {
            let mut bio = Bio::read(Sector(i * 8), Sectors(8), Default::default());
            bio.start();
            bio
        })
        .collect();
    let mut done = Batch::with_capacity(depth);
    let mut turn = |batch: &mut Batch| {
        lane.submit(batch, &mut cx);
        while done.len() < depth {
            lane.poll(&mut done, &mut cx);
        }
        std::mem::swap(batch, &mut done);
    };
    (0..100).for_each(|_| turn(&mut batch));
    start.wait();
    let from = Instant::now();
    (0..batches).for_each(|_| turn(&mut batch));
    let ns = from.elapsed().as_nanos() as f64 / (batches * depth) as f64;
    batch.iter_mut().for_each(|bio| bio.finish());
    ns
}

/// The mean of [`measure`] on `threads` concurrent threads.
fn measure_on_threads(open: &OpenLane, threads: u16, depth: usize, batches: usize) -> f64 {
    let barrier = Barrier::new(threads.into());
    let sum: f64 = std::thread::scope(|scope| {
        let start = &barrier;
        let runs: Vec<_> = (0..threads)
            .map(|core| scope.spawn(move || measure(open, core, depth, batches, start)))
            .collect();
        runs.into_iter().map(|run| run.join().expect("the run ends")).sum()
    });
    sum / f64::from(threads)
}

fn main() {
    let mut args = std::env::args().skip(1);
    let mut number = |default: usize| args.next().map_or(default, |a| a.parse().expect("a number")).max(1);
    let (depth, rounds) = (number(32), number(9));
    let only = args.next();
    let batches = (2_000_000 / depth).max(1);
    let mut cases = cases();
    cases.retain(|(name, _)| only.as_ref().is_none_or(|only| name == only));
    for threads in [1, 2] {
        println!("{threads} thread(s), depth {depth}, ns per request (median of {rounds})");
        let mut times = vec![Vec::new(); cases.len()];
        for _ in 0..rounds {
            for ((_, open), times) in cases.iter().zip(&mut times) {
                times.push(measure_on_threads(open, threads, depth, batches));
            }
        }
        let mut null = 0.0;
        for ((name, _), mut times) in cases.iter().zip(times) {
            times.sort_by(f64::total_cmp);
            let median = times[times.len() / 2];
            if *name == "null" {
                null = median;
            }
            println!("  {name:22} {median:7.1}   adds {:7.1}", median - null);
        }
    }
}
