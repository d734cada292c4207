//! The cost of a snapshot: nanoseconds per request at depth 32, over lanes that complete at once.
//!
//! `cargo run --release -p udm-targets --example snapshot_cost`. The stacks run in turn, so that
//! noise of the machine affects all of them. The program prints the median of the turns and the
//! quartiles. Ratios are comparable between machines, absolute numbers are not.
#![allow(clippy::print_stdout, reason = "it prints figures")]

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;
use udm_core::{
    Batch, Bio, Buf, CoreCommandSender, CoreId, CoreLaneState, Cx, DevNo, Device, DeviceControlError,
    DeviceId, Lane, LaneCommand, Limits, Nanos, Op, Sector, Sectors, SharedDiskState,
};
use udm_dm::testing::{TestControlIo, TestDeviceNameResolver};
use udm_dm::{MappedDevice, Table};

const DEPTH: usize = 32;
const TURNS: usize = 41;
const BATCHES: usize = 5_000;
const SIZE: u64 = 1 << 19;

/// A device that completes every bio at once.
struct NullDevice(DeviceId, SharedDiskState);

struct NullLane(Batch);

impl Device for NullDevice {
    fn id(&self) -> DeviceId {
        self.0
    }

    fn open(&self, _cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        Ok(Box::new(NullLane(Batch::with_capacity(DEPTH))))
    }

    fn limits(&self) -> Limits {
        Limits::new(Sectors(2 * SIZE))
    }

    fn shared_disk_state(&self) -> Option<&SharedDiskState> {
        Some(&self.1)
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

struct StackRig {
    resolver: TestDeviceNameResolver,
    minor: u32,
}

impl StackRig {
    fn null(&mut self, name: &str) {
        let number = DevNo { major: 1, minor: self.minor };
        self.minor += 1;
        self.resolver.add(name, number, Arc::new(NullDevice(DeviceId::new(), SharedDiskState::default())));
    }

    fn map(&mut self, name: &str, text: &str) -> Arc<MappedDevice> {
        self.minor += 1;
        let number = DevNo { major: 254, minor: self.minor };
        let device = MappedDevice::new(name, None, number).expect("a name");
        let lines = udm_wire::table::parse_table(text).expect("a table");
        let table = Table::build(udm_targets::TARGETS, &lines, &mut self.resolver, &TestControlIo::new(), 1);
        device.load(table.expect("a table")).expect("a load");
        let mut change = device.resume(Arc::new(|| {})).expect("a resume");
        change.step(&NoCores).expect("no core to wait for").expect("a resume");
        device
    }
}

/// Writes every chunk once.
fn write_all(lane: &mut dyn Lane, state: &mut CoreLaneState) {
    let mut done = Batch::new();
    for chunk in 0..SIZE / 8 {
        let mut bio = Bio::write(Sector(chunk * 8), Sectors(8), Buf::zeroed(4096).into());
        bio.start();
        lane.submit(&mut vec![bio], &mut state.cx(Nanos(0)));
        while done.is_empty() {
            lane.poll(&mut done, &mut state.cx(Nanos(0)));
        }
        done.drain(..).for_each(|mut bio| bio.finish());
    }
}

fn measure_turn(
    lane: &mut dyn Lane,
    state: &mut CoreLaneState,
    batch: &mut Batch,
    op: Op,
    spare: &mut Batch,
) -> f64 {
    let start = Instant::now();
    let mut at = 1u64;
    for _ in 0..BATCHES {
        let mut cx = state.cx(Nanos(0));
        for bio in batch.iter_mut() {
            at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            bio.op = op;
            bio.sector = Sector((at >> 44) & (SIZE - 8));
            bio.start();
        }
        lane.submit(batch, &mut cx);
        while spare.len() < DEPTH {
            lane.poll(spare, &mut cx);
        }
        for bio in spare.iter_mut() {
            bio.finish();
            black_box(bio.status);
        }
        std::mem::swap(batch, spare);
    }
    start.elapsed().as_nanos() as f64 / (BATCHES * DEPTH) as f64
}

fn main() {
    let mut host = StackRig { resolver: TestDeviceNameResolver::new(), minor: 0 };
    let mut state = CoreLaneState::new(CoreId(0), 1, 1, None);
    let mut stacks: Vec<(String, Box<dyn Lane>, Op)> = Vec::new();
    let mut keep = Vec::new();
    host.null("/plain");
    let linear = host.map("linear", &format!("0 {SIZE} linear /plain 0"));
    stacks.push(("linear, write".into(), linear.open(&mut state.cx(Nanos(0))).expect("a lane"), Op::Write));
    keep.push(linear);
    for snapshots in 0..3 {
        let disk = format!("/origin{snapshots}");
        host.null(&disk);
        for n in 0..snapshots {
            let store = format!("/store{snapshots}{n}");
            host.null(&store);
            let text = format!("0 {SIZE} snapshot {disk} {store} N 8");
            keep.push(host.map(&format!("s{snapshots}{n}"), &text));
        }
        let origin = host.map(&format!("o{snapshots}"), &format!("0 {SIZE} snapshot-origin {disk}"));
        let mut lane = origin.open(&mut state.cx(Nanos(0))).expect("a lane");
        write_all(&mut *lane, &mut state);
        let name = format!("origin, {snapshots} snapshots, all copied");
        for (what, op) in [("write", Op::Write), ("read", Op::Read)] {
            let lane = origin.open(&mut state.cx(Nanos(0))).expect("a lane");
            stacks.push((format!("{name}: {what}"), lane, op));
        }
        keep.push(origin);
        if snapshots == 1 {
            let snapshot = Arc::clone(&keep[keep.len() - 2]);
            for (what, op) in [("write", Op::Write), ("read", Op::Read)] {
                let lane = snapshot.open(&mut state.cx(Nanos(0))).expect("a lane");
                stacks.push((format!("snapshot, all in the store: {what}"), lane, op));
            }
        }
    }
    host.null("/image");
    host.null("/fresh");
    let fresh = host.map("fresh", &format!("0 {SIZE} snapshot /image /fresh N 8"));
    let lane = fresh.open(&mut state.cx(Nanos(0))).expect("a lane");
    stacks.push(("snapshot, all in the origin: read".into(), lane, Op::Read));

    let mut batch: Batch = (0..DEPTH).map(|_| Bio::new()).collect();
    for bio in &mut batch {
        bio.sectors = Sectors(8);
        bio.data = Buf::zeroed(4096).into();
    }
    let mut spare = Batch::with_capacity(DEPTH);
    let mut times = vec![Vec::with_capacity(TURNS); stacks.len()];
    for _ in 0..TURNS {
        for ((_, lane, op), times) in stacks.iter_mut().zip(&mut times) {
            times.push(measure_turn(&mut **lane, &mut state, &mut batch, *op, &mut spare));
        }
    }
    times.iter_mut().for_each(|times| times.sort_by(f64::total_cmp));
    let base = times[0][TURNS / 2];
    println!(
        "{:42} {:>8} {:>8} {:>8} {:>12}",
        "ns per request, depth 32", "median", "q1", "q3", "over linear"
    );
    for ((name, ..), times) in stacks.iter().zip(&times) {
        let [q1, median, q3] = [1, 2, 3].map(|q| times[TURNS * q / 4]);
        println!("{name:42} {median:8.2} {q1:8.2} {q3:8.2} {:12.2}", median - base);
    }
}
