//! The cost of a layer: nanoseconds per request at depth 32, over a lane that completes at once.
//!
//! `cargo run --release -p udm-targets --example lane_cost`. The stacks run in turn, so that noise
//! of the machine affects all of them. The program prints the median of the turns and the
//! quartiles. Ratios are comparable between machines, absolute numbers are not.
#![allow(clippy::print_stdout, reason = "it prints figures")]

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;
use udm_core::{
    Batch, Bio, CoreCommandSender, CoreId, CoreLaneState, Cx, DevNo, Device, DeviceControlError, DeviceId,
    Lane, LaneCommand, Limits, Nanos, Op, Sector, Sectors,
};
use udm_dm::testing::{TestControlIo, TestDeviceNameResolver};
use udm_dm::{MappedDevice, Table};

const DEPTH: usize = 32;
const TURNS: usize = 41;
const BATCHES: usize = 20_000;
const SIZE: u64 = 1 << 21;

/// A device that completes every bio at once.
struct NullDevice(DeviceId);

struct NullLane(Batch);

impl Device for NullDevice {
    fn id(&self) -> DeviceId {
        self.0
    }

    fn open(&self, _cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        Ok(Box::new(NullLane(Batch::with_capacity(DEPTH))))
    }

    fn limits(&self) -> Limits {
        Limits::new(Sectors(SIZE))
    }
}

impl Lane for NullLane {
    fn submit(&mut self, batch: &mut Batch, _cx: &mut Cx<'_>) {
        self.0.append(batch);
    }

    fn poll(&mut self, done: &mut Batch, _cx: &mut Cx<'_>) {
        done.append(&mut self.0);
    }
}

/// No lanes are open while the stacks are built, so no core needs a message.
struct NoCores;

impl CoreCommandSender for NoCores {
    fn broadcast(&self, _device: DeviceId, _command: LaneCommand) {}
    fn wake_up(&self, _: CoreId, _: DeviceId) {}
    fn start(&self, _: udm_core::BioTaskFactory) -> udm_core::BioTaskHandle {
        udm_core::BioTaskHandle::new(drop)
    }
}

fn map(name: &str, text: &str, resolver: &mut TestDeviceNameResolver, minor: u32) -> Arc<MappedDevice> {
    let device = MappedDevice::new(name, None, DevNo { major: 254, minor }).expect("a name");
    let lines = udm_wire::table::parse_table(text).expect("a table");
    device
        .load(
            Table::build(udm_targets::TARGETS, &lines, resolver, &TestControlIo::new(), 1).expect("a table"),
        )
        .expect("a load");
    let mut change = device.resume(Arc::new(|| {})).expect("a resume");
    change.step(&NoCores).expect("no core to wait for").expect("a resume");
    resolver.add(&format!("@{name}"), device.number(), Arc::<MappedDevice>::clone(&device));
    device
}

fn measure_turn(lane: &mut dyn Lane, state: &mut CoreLaneState, batch: &mut Batch, done: &mut Batch) -> f64 {
    let start = Instant::now();
    let mut at = 1u64;
    for _ in 0..BATCHES {
        let mut cx = state.cx(Nanos(0));
        for bio in batch.iter_mut() {
            at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            bio.sector = Sector((at >> 44) & (SIZE / 2 - 8));
            bio.start();
        }
        lane.submit(batch, &mut cx);
        lane.poll(done, &mut cx);
        assert_eq!(done.len(), DEPTH);
        for bio in done.iter_mut() {
            bio.finish();
            black_box(bio.status);
        }
        std::mem::swap(batch, done);
    }
    start.elapsed().as_nanos() as f64 / (BATCHES * DEPTH) as f64
}

fn main() {
    let null = Arc::new(NullDevice(DeviceId::new()));
    let mut resolver = TestDeviceNameResolver::new();
    resolver.add("/null", DevNo { major: 1, minor: 0 }, Arc::<NullDevice>::clone(&null));
    let linear = map("linear", &format!("0 {SIZE} linear /null 0"), &mut resolver, 0);
    let shifted = map("shifted", &format!("0 {} linear /null 64", SIZE - 64), &mut resolver, 1);
    let zero = map("zero", &format!("0 {SIZE} zero"), &mut resolver, 2);
    let half = SIZE / 2;
    let quarter = SIZE / 4;
    let parts = map(
        "parts",
        &format!("0 {quarter} linear /null {half}\n{quarter} {} linear /null 0", SIZE - quarter - half),
        &mut resolver,
        3,
    );
    let striped = map("striped", &format!("0 {SIZE} striped 2 128 /null 0 /null 0"), &mut resolver, 4);
    let mut top = Arc::clone(&shifted);
    for level in 1..4 {
        let below = if level == 1 { "@shifted".to_owned() } else { format!("@level{}", level - 1) };
        let text = format!("0 {} linear {below} {level}", SIZE - 64 - 8 * level);
        top = map(&format!("level{level}"), &text, &mut resolver, 4 + level as u32);
    }
    let stacks: [(&str, Arc<dyn Device>, f64); 7] = [
        ("null lane alone", null, 0.0),
        ("1 mapped device, linear at 0", linear, 1.0),
        ("1 mapped device, linear with an offset", shifted, 1.0),
        ("4 mapped devices, linear with offsets", top, 4.0),
        ("1 mapped device, two linear lines", parts, 1.0),
        ("1 mapped device, striped 2", striped, 1.0),
        ("1 mapped device, zero (no null lane)", zero, 1.0),
    ];

    let mut state = CoreLaneState::new(CoreId(0), 1, 1, None);
    let mut lanes: Vec<_> =
        stacks.iter().map(|(_, device, _)| device.open(&mut state.cx(Nanos(0))).expect("a lane")).collect();
    let mut batch: Batch = (0..DEPTH).map(|_| Bio::new()).collect();
    for bio in &mut batch {
        (bio.op, bio.sectors) = (Op::Write, Sectors(8));
    }
    let mut done = Batch::with_capacity(DEPTH);
    let mut times = vec![Vec::with_capacity(TURNS); stacks.len()];
    for _ in 0..TURNS {
        for (lane, times) in lanes.iter_mut().zip(&mut times) {
            times.push(measure_turn(&mut **lane, &mut state, &mut batch, &mut done));
        }
    }
    for times in &mut times {
        times.sort_by(f64::total_cmp);
    }
    let base = times[0][TURNS / 2];
    println!(
        "{:42} {:>8} {:>8} {:>8} {:>12}",
        "ns per request, depth 32", "median", "q1", "q3", "a layer adds"
    );
    for ((name, _, layers), times) in stacks.iter().zip(&times) {
        let [q1, median, q3] = [1, 2, 3].map(|q| times[TURNS * q / 4]);
        let adds = if *layers > 0.0 { format!("{:.2}", (median - base) / layers) } else { String::new() };
        println!("{name:42} {median:8.2} {q1:8.2} {q3:8.2} {adds:>12}");
    }
}
