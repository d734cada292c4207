//! Tests of null_blk's fault parameters, with a clock that the test sets.

use crate::faults::InjectedFaults;
use crate::testing::{SingleLaneTestCore, bio_without_data, make_zeroed_segments};
use std::sync::Arc;
use udm_core::{
    Batch, CoreId, CoreLaneState, Cx, Device, DeviceControlError, DeviceId, DrainMode, Lane, Limits, Nanos,
    Op, Sectors, Status,
};
use udm_wire::uri::NullFaults;

fn null(words: &str) -> Arc<dyn Device> {
    crate::open_standalone_device(&udm_wire::uri::parse_device_uri(&format!("null:size=1G,{words}")).unwrap())
        .unwrap()
}

fn reads(n: u64, sectors: u64) -> Batch {
    (0..n).map(|i| bio_without_data(Op::Read, i * sectors, sectors)).collect()
}

fn core(words: &str) -> SingleLaneTestCore {
    SingleLaneTestCore::over(&*null(words))
}

/// Polls at each time that the lane requests, until it requests none. Returns the times, numbers
/// and statuses of the completed requests.
fn run_out(core: &mut SingleLaneTestCore) -> Vec<(Nanos, usize, Status)> {
    let mut all = Vec::new();
    for _ in 0..1000 {
        let (done, wake) = core.poll();
        if let Some(bio) = done.first() {
            assert!(done.iter().all(|other| other.status == bio.status), "{all:?}");
            all.push((core.now, done.len(), bio.status));
        }
        if wake == Nanos::NEVER {
            return all;
        }
        core.now = core.now.max(wake);
    }
    panic!("it goes on for ever: {all:?}");
}

/// Row B03: `+0-7`, then `-0-3`, leaves 4 to 7.
#[test]
fn b03_bad_blocks_fail_whatever_touches_them() {
    let words = "memory_backed=1,discard=1,badblocks=+0-7,badblocks=-0-3,badblocks=+100-100";
    for (op, sector, sectors, fails) in [
        (Op::Read, 0, 4, false),
        (Op::Read, 3, 2, true),
        (Op::Read, 7, 1, true),
        (Op::Read, 8, 92, false),
        (Op::Read, 0, 200, true),
        (Op::Read, 100, 1, true),
        (Op::Read, 101, 1, false),
        (Op::Write, 0, 5, true),
        (Op::WriteZeroes, 6, 4, true),
        (Op::Discard, 90, 11, true),
        (Op::Flush, 0, 0, false),
    ] {
        let mut bio = bio_without_data(op, sector, sectors);
        if op.has_data() {
            bio.data = make_zeroed_segments(sectors as usize * 512, &[]);
        }
        let want = if fails { Status::IoErr } else { Status::Ok };
        assert_eq!(core(words).run(bio).status, want, "{op:?} {sector}+{sectors}");
    }
}

/// A request to a bad block fails before data moves, and not earlier than it would succeed.
#[test]
fn a_write_of_a_bad_block_changes_nothing() {
    let device = null("memory_backed=1,irqmode=2,completion_nsec=1000,badblocks=+2-2");
    let mut core = SingleLaneTestCore::over(&*device);
    let mut data = make_zeroed_segments(4 * 512, &[]);
    data.fill(7);
    let mut bio = bio_without_data(Op::Write, 0, 4);
    bio.data = data;
    core.submit(vec![bio]);
    assert_eq!(run_out(&mut core), [(Nanos(1001), 1, Status::IoErr)]);
    let mut bio = bio_without_data(Op::Read, 0, 2);
    bio.data = make_zeroed_segments(2 * 512, &[]);
    core.submit(vec![bio]);
    core.now = core.now + Nanos(1000);
    let done = core.poll().0;
    assert!(done[0].status.is_ok() && done[0].data.iter().all(|piece| piece.iter().all(|b| *b == 0)));
}

/// 1 MiB/s is 20971 bytes per 20 ms; a request that does not fit waits for the next tick.
#[test]
fn mbps_is_a_budget_a_tick() {
    let mut core = core("mbps=1");
    core.submit(reads(12, 8));
    let ms = |n: u64| Nanos::from_millis(n);
    assert_eq!(
        run_out(&mut core),
        [(Nanos(1), 5, Status::Ok), (ms(20), 5, Status::Ok), (ms(40), 2, Status::Ok)]
    );
    core.now = ms(1000);
    // 128 KiB are more than six ticks: the next request starts when they are paid.
    core.submit(reads(3, 256));
    let came = [1000, 1120, 1240].map(|at| (ms(at), 1, Status::Ok));
    assert_eq!(run_out(&mut core), came);
}

/// All cores share one budget.
#[test]
fn cores_share_the_bandwidth() {
    let device = null("mbps=1,submit_queues=2");
    let mut cores = [0, 1].map(|id| {
        let mut state = CoreLaneState::new(CoreId(id), 2, 1, None);
        let lane = device.open(&mut state.cx(Nanos(1))).unwrap();
        (state, lane)
    });
    let mut came = 0;
    for (state, lane) in &mut cores {
        let mut batch = reads(8, 8);
        batch.iter_mut().for_each(|bio| bio.start());
        lane.submit(&mut batch, &mut state.cx(Nanos(1)));
    }
    for at in [1, 20_000_000, 40_000_000, 60_000_000] {
        let mut done = Batch::new();
        for (state, lane) in &mut cores {
            // A request that starts in one poll completes in the next.
            lane.poll(&mut done, &mut state.cx(Nanos(at)));
            lane.poll(&mut done, &mut state.cx(Nanos(at)));
        }
        came += done.len();
        assert!(came as u64 <= 5 * (1 + at / 20_000_000), "{came} in {at} ns");
        done.iter_mut().for_each(|bio| bio.finish());
    }
    assert_eq!(came, 16);
}

/// Row B10: a lost request fails with ETIMEDOUT after 5 s and keeps its tag until then.
#[test]
fn b10_requests_time_out() {
    let mut core = core("hw_queue_depth=2,timeout=1,100,0,2");
    core.submit(reads(3, 8));
    let late = Nanos::from_millis(5_000) + Nanos(1);
    assert_eq!(core.poll().1, late, "the third has no tag");
    core.now = late;
    let (done, _) = core.poll();
    assert_eq!(done.iter().map(|bio| bio.status.errno()).collect::<Vec<_>>(), [110, 110]);
    assert_eq!(run_out(&mut core), [(late, 1, Status::Ok)]);
}

/// Row B10: a request that finds no resources still completes, alternately at once and after 3 ms.
#[test]
fn b10_requeued_requests_complete() {
    let mut core = core("requeue=1,100,0,2");
    core.submit(reads(3, 8));
    // First the third, then the second, which was retried in that poll; the first after 3 ms.
    let came = [1, 1, 3_000_001].map(|at| (Nanos(at), 1, Status::Ok));
    assert_eq!(run_out(&mut core), came);
}

#[test]
fn b10_half_of_all_requests_go_again() {
    let mut core = core("requeue=1,50,0,-1");
    core.submit(reads(64, 8));
    let came = run_out(&mut core);
    assert_eq!(came.iter().map(|(_, n, _)| n).sum::<usize>(), 64);
    assert!(came.iter().all(|(.., status)| status.is_ok()) && came.len() > 2, "{came:?}");
}

/// The kernel's fault attributes: `space` - 1 requests pass, then each `interval`th fails, `times`
/// times.
#[test]
fn injections_count_as_the_kernels() {
    let mut core = core("irqmode=0,timeout=3,100,4,2");
    core.submit(reads(16, 8));
    let mut lost: Vec<u64> = (0..16).collect();
    core.poll().0.iter().for_each(|bio| lost.retain(|i| *i != bio.sector.0 / 8));
    assert_eq!(lost, [5, 8]);
    assert_eq!(run_out(&mut core).len(), 1);
}

#[test]
fn a_hardware_queue_that_cannot_be_set_up() {
    let device = null("init_hctx=1,100,0,1");
    let mut state = CoreLaneState::new(CoreId(0), 1, 1, None);
    let refused = device.open(&mut state.cx(Nanos(1))).err().unwrap();
    assert_eq!(refused.to_string(), "init_hctx: a hardware queue that can't be set up");
    assert!(device.open(&mut state.cx(Nanos(1))).is_ok(), "once");
}

/// A suspend ends although all requests always find no resources.
#[test]
fn a_suspend_ends() {
    for how in [DrainMode::Flush, DrainMode::NoFlush, DrainMode::End] {
        let device = null("hw_queue_depth=2,requeue=1,100,0,-1");
        let mut state = CoreLaneState::new(CoreId(0), 1, 1, None);
        let mut lane = device.open(&mut state.cx(Nanos(1))).unwrap();
        let mut batch = reads(4, 8);
        batch.iter_mut().for_each(|bio| bio.start());
        lane.submit(&mut batch, &mut state.cx(Nanos(1)));
        let (mut done, mut back) = (Batch::new(), Batch::new());
        for ms in 1..20 {
            lane.drain(how, &mut back, &mut state.cx(Nanos::from_millis(ms)));
            lane.poll(&mut done, &mut state.cx(Nanos::from_millis(ms)));
        }
        let want = if how == DrainMode::NoFlush { (0, 4) } else { (4, 0) };
        assert_eq!((done.len(), back.len()), want, "{how:?}");
        done.iter_mut().chain(&mut back).for_each(|bio| bio.finish());
    }
}

/// A request that was handed back and is submitted again in the same tick waits for the next tick.
#[test]
fn a_suspend_that_is_called_off_in_mid_tick() {
    let device = null("mbps=1");
    let mut state = CoreLaneState::new(CoreId(0), 1, 1, None);
    let mut lane = device.open(&mut state.cx(Nanos(1))).unwrap();
    let mut batch = reads(6, 8);
    batch.iter_mut().for_each(|bio| bio.start());
    lane.submit(&mut batch, &mut state.cx(Nanos(1)));
    let (mut done, mut back) = (Batch::new(), Batch::new());
    lane.drain(DrainMode::NoFlush, &mut back, &mut state.cx(Nanos(2)));
    lane.poll(&mut done, &mut state.cx(Nanos(2)));
    assert_eq!((done.len(), back.len()), (5, 1));
    let mut cx = state.cx(Nanos(3));
    lane.submit(&mut back, &mut cx);
    assert_eq!(cx.wake(), Nanos::from_millis(20));
    // The request starts in one poll and completes in the next.
    lane.poll(&mut done, &mut state.cx(Nanos::from_millis(20)));
    lane.poll(&mut done, &mut state.cx(Nanos::from_millis(20)));
    assert_eq!(done.len(), 6);
    done.iter_mut().for_each(|bio| bio.finish());
}

/// A device with one tag, over a lane that completes bios during `submit` and requests no poll.
struct InstantDevice(DeviceId);

struct InstantLane(Batch);

impl Device for InstantDevice {
    fn id(&self) -> DeviceId {
        self.0
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        let params = NullFaults { mbps: 1000, ..NullFaults::default() };
        let faults = InjectedFaults::new(&params).expect("a bandwidth");
        faults.open(1, Nanos(0), cx, |_| Ok(Box::new(InstantLane(Batch::new()))))
    }

    fn limits(&self) -> Limits {
        Limits::new(Sectors(1 << 20))
    }
}

impl Lane for InstantLane {
    fn submit(&mut self, batch: &mut Batch, _: &mut Cx<'_>) {
        self.0.append(batch);
    }

    fn poll(&mut self, done: &mut Batch, _: &mut Cx<'_>) {
        done.append(&mut self.0);
    }
}

/// All requests but the first wait for the tag and are submitted in a poll.
#[test]
fn what_ends_as_it_goes_down_is_polled_for() {
    let mut core = SingleLaneTestCore::over(&InstantDevice(DeviceId::new()));
    core.submit(reads(3, 8));
    assert_eq!(run_out(&mut core), [(Nanos(1), 1, Status::Ok); 3]);
}
