//! Limits of the requests and bytes per second of a mapped device, with every order of suspends,
//! other limits and clients.

mod mapped_fixture;

use mapped_fixture::Fixture;
use proptest::prelude::*;
use std::sync::Arc;
use udm_core::{Batch, Bio, BioFlags, DrainMode, Lane, Nanos, Op, Status};
use udm_dm::MappedDevice;
use udm_dm::testing::bio_without_data;
use udm_dm::throttle::Throttle;

struct ThrottledDevice {
    rig: Fixture,
    device: Arc<MappedDevice>,
    lane: Box<dyn Lane>,
}

impl ThrottledDevice {
    fn new(limits: &str) -> ThrottledDevice {
        let mut rig = Fixture::new();
        rig.disk("a", 1 << 20);
        let device = rig.live("d", "0 1048576 linear a 0");
        rig.world.now = Nanos::from_millis(1_000_000);
        let lane = rig.open(&device);
        let mut throttled = ThrottledDevice { rig, device, lane };
        throttled.set(limits);
        throttled
    }

    fn set(&mut self, limits: &str) {
        let limits = udm_wire::throttle::parse_throttle_limits(limits).unwrap();
        let throttle = limits.map(|limits| match self.device.throttle() {
            Some(before) => before.followed_by(limits),
            None => Throttle::new(limits),
        });
        self.device.set_throttle(throttle, &*self.rig.world.cores());
    }

    fn submit(&mut self, bios: impl IntoIterator<Item = Box<Bio>>) {
        self.rig.world.submit(0, &mut *self.lane, bios);
    }

    fn poll(&mut self) -> Batch {
        let mut done = self.rig.world.poll(0, &mut *self.lane);
        done.extend(self.rig.world.poll(0, &mut *self.lane));
        done
    }

    /// Number of bios that completed, each without an error.
    fn passed(&mut self) -> usize {
        let done = self.poll();
        assert!(done.iter().all(|bio| bio.status.is_ok()));
        done.len()
    }

    fn wait(&mut self, ms: u64) {
        self.rig.world.now = self.rig.world.now + Nanos::from_millis(ms);
    }

    /// Suspends or resumes the device; returns the number of bios that completed meanwhile.
    fn change(&mut self, suspend: bool) -> usize {
        let (wake, mut done): (udm_dm::TransitionWakeFn, _) = (Arc::new(|| {}), Batch::new());
        let change = if suspend { self.device.suspend(false, wake) } else { self.device.resume(wake) };
        self.rig.finish(change.unwrap(), &mut [&mut self.lane], &mut done).unwrap();
        done.len()
    }

    fn waiting(&self) -> u64 {
        self.device.throttle_counters().waiting
    }
}

fn bios(count: usize, op: Op, sectors: u64) -> Batch {
    (0..count).map(|_| bio_without_data(op, 0, sectors)).collect()
}

#[test]
fn a_burst_passes_at_once_and_the_others_in_time() {
    let mut d = ThrottledDevice::new("iops=1000:10");
    d.submit(bios(25, Op::Read, 8));
    assert_eq!(d.passed(), 10);
    assert_eq!(d.waiting(), 15);
    d.rig.world.wake = Nanos::NEVER;
    assert_eq!(d.passed(), 0);
    assert_eq!(d.rig.world.wake, d.rig.world.now + Nanos::from_millis(1), "the lane asks for its next poll");
    for _ in 0..15 {
        d.wait(1);
        assert_eq!(d.passed(), 1);
    }
    assert_eq!((d.waiting(), d.device.throttle_counters().delayed), (0, 25));
    d.wait(1000);
    d.submit(bios(10, Op::Read, 8));
    assert_eq!(d.passed(), 10, "the burst is there again");
    assert_eq!(d.device.throttle_counters().delayed, 25, "what passes at once was not delayed");
}

#[test]
fn each_limit_counts_its_requests() {
    for (limits, op, sectors, passes) in [
        ("iops=1:4", Op::Read, 8, 4),
        ("iops=1:4", Op::Flush, 0, 4),
        ("riops=1:4", Op::Read, 8, 4),
        ("riops=1:4", Op::WriteZeroes, 8, 9),
        ("wiops=1:4", Op::Read, 8, 9),
        ("wiops=1:4", Op::Discard, 8, 4),
        ("bps=1:16384", Op::Read, 8, 4),
        ("bps=1:16384", Op::Flush, 0, 9),
        ("bps=1:2048", Op::Discard, 8, 4),
        ("rbps=1:16384", Op::Read, 8, 4),
        ("rbps=1:16384", Op::WriteZeroes, 8, 9),
        ("wbps=1:16384", Op::WriteZeroes, 8, 4),
        ("wbps=1:16384 iops=1:3", Op::WriteZeroes, 8, 3),
        ("wbps=1:16384 iops=1:3", Op::Read, 8, 3),
        ("wbps=1:16384 riops=1:3", Op::Read, 8, 3),
        ("riops=9223372036854775807", Op::Read, 8, 9),
    ] {
        let mut d = ThrottledDevice::new(limits);
        for bio in bios(9, op, sectors) {
            d.submit([bio]);
        }
        assert_eq!(d.passed(), passes, "{limits} {op:?}");
        d.set("none");
        assert_eq!(d.passed(), 9 - passes, "{limits} {op:?}");
    }
}

#[test]
fn reads_do_not_wait_for_writes() {
    let mut d = ThrottledDevice::new("wiops=1:1");
    d.submit(bios(3, Op::WriteZeroes, 8).into_iter().chain(bios(2, Op::Read, 8)));
    let done = d.poll();
    assert_eq!(done.iter().filter(|bio| bio.op == Op::Read).count(), 2);
    assert_eq!((done.len(), d.waiting()), (3, 2));
    d.set("none");
    assert_eq!(d.passed(), 2);
}

/// As in blk-throttle. A length beyond the device does not use the rate up.
#[test]
fn any_bio_may_wait() {
    let mut d = ThrottledDevice::new("iops=1:1 bps=1G");
    let mut nowait = bios(2, Op::Read, 8);
    nowait.iter_mut().for_each(|bio| bio.flags = BioFlags::NOWAIT);
    d.submit(nowait);
    assert_eq!((d.passed(), d.waiting()), (1, 1));
    d.wait(1000);
    assert_eq!(d.passed(), 1);
    d.wait(1000);
    d.submit(bios(1, Op::WriteZeroes, u64::MAX));
    let mut done = Batch::new();
    for _ in 0..4300 {
        d.wait(1);
        done.extend(d.poll());
    }
    assert!(done.len() == 1 && !done[0].status.is_ok());
    d.submit(bios(1, Op::Read, 8));
    assert_eq!(d.passed(), 1);
}

#[test]
fn other_limits_hold_at_once_for_those_that_wait() {
    let mut d = ThrottledDevice::new("iops=1:1");
    d.submit(bios(5, Op::Read, 8));
    assert_eq!(d.passed(), 1);
    d.set("iops=1000:100");
    assert_eq!(d.passed(), 0, "a change gives no new burst");
    d.wait(2);
    assert_eq!(d.passed(), 2);
    d.set("riops=1:1");
    assert_eq!(d.passed(), 1, "a limit that was not there before has its burst");
    d.set("none");
    assert_eq!((d.passed(), d.waiting()), (1, 0));
    d.submit(bios(100, Op::Read, 8));
    assert_eq!(d.passed(), 100);
}

#[test]
fn a_suspended_device_sends_nothing() {
    let mut d = ThrottledDevice::new("iops=1000:1");
    d.submit(bios(5, Op::Read, 8));
    assert_eq!(d.passed(), 1);
    assert_eq!(d.change(true), 0);
    d.wait(1000);
    d.submit(bios(2, Op::Read, 8));
    assert_eq!((d.passed(), d.waiting()), (0, 4));
    // Without limits, those that waited are held for the resume like the others.
    d.set("none");
    assert_eq!((d.passed(), d.waiting()), (0, 0));
    d.set("iops=1000:3");
    assert_eq!((d.change(false) + d.passed(), d.waiting()), (3, 3));
    d.wait(3);
    assert_eq!(d.passed(), 3);
}

#[test]
fn lifted_limits_let_all_pass_and_hold_again() {
    let mut d = ThrottledDevice::new("iops=1:1");
    d.submit(bios(5, Op::Read, 8));
    assert_eq!(d.passed(), 1);
    d.device.lift_throttle(true, &*d.rig.world.cores());
    assert_eq!((d.passed(), d.waiting()), (4, 0));
    assert!(d.device.throttle().is_some());
    d.device.lift_throttle(false, &*d.rig.world.cores());
    d.wait(1);
    d.submit(bios(2, Op::Read, 8));
    assert_eq!((d.passed(), d.waiting()), (0, 2));
    d.wait(1000);
    assert_eq!(d.passed(), 1);
    d.set("none");
    assert_eq!(d.passed(), 1);
}

#[test]
fn a_suspend_above_takes_back_what_waits() {
    let mut d = ThrottledDevice::new("iops=1:1");
    d.submit(bios(5, Op::Read, 8));
    assert_eq!(d.passed(), 1);
    let mut back = Batch::new();
    d.rig.world.turn(0, |cx| d.lane.drain(DrainMode::NoFlush, &mut back, cx));
    assert_eq!((back.len(), d.waiting()), (4, 0));
    back.iter_mut().for_each(|bio| bio.finish());
    // The place that one of them had is free.
    d.wait(1000);
    d.submit(bios(1, Op::Read, 8));
    assert_eq!(d.passed(), 1);
}

#[test]
fn a_lane_that_ends_fails_what_waits() {
    let mut d = ThrottledDevice::new("iops=1:1");
    d.submit(bios(5, Op::Read, 8));
    assert_eq!(d.passed(), 1);
    let mut back = Batch::new();
    d.rig.world.turn(0, |cx| d.lane.drain(DrainMode::End, &mut back, cx));
    let done = d.poll();
    assert!(back.is_empty() && done.len() == 4 && done.iter().all(|bio| bio.status == Status::IoErr));
    assert_eq!(d.waiting(), 0);
}

/// A device that joins a group does not bring what it has used of its own limits.
#[test]
fn who_joins_a_group_takes_none_of_its_burst() {
    let mut d = ThrottledDevice::new("iops=1:1");
    d.submit(bios(1, Op::Read, 8));
    assert_eq!(d.passed(), 1);
    let group = Throttle::new("iops=1:10".parse().unwrap());
    d.device.set_throttle(Some(group), &*d.rig.world.cores());
    d.submit(bios(12, Op::Read, 8));
    assert_eq!((d.passed(), d.waiting()), (10, 2));
    d.set("iops=1:20");
    assert_eq!((d.passed(), d.waiting()), (0, 2), "other limits of the group give no new burst");
    d.set("none");
    assert_eq!(d.passed(), 2);
}

/// Polls two devices of one group for `ms` milliseconds. The first one has `first` bios waiting at
/// the start; the second one gets a bio of 4 KiB whenever fewer than `depth` of its bios wait.
/// Returns the sectors that each was given.
fn share(limits: &str, first: Batch, depth: u64, ms: u64) -> [u64; 2] {
    let mut rig = Fixture::new();
    rig.disk("a", 1 << 20);
    let devices = ["d", "e"].map(|name| rig.live(name, "0 1048576 linear a 0"));
    rig.world.now = Nanos::from_millis(1_000_000);
    let throttle = Throttle::new(limits.parse().unwrap());
    let mut lanes = devices.each_ref().map(|device| {
        device.set_throttle(Some(Arc::clone(&throttle)), &*rig.world.cores());
        rig.open(device)
    });
    rig.world.submit(0, &mut *lanes[0], first);
    let mut passed = [0, 0];
    for _ in 0..ms {
        while devices[1].throttle_counters().waiting < depth {
            rig.world.submit(0, &mut *lanes[1], bios(1, Op::Read, 8));
            let at_once = rig.world.poll(0, &mut *lanes[1]);
            passed[1] += at_once.iter().map(|bio| bio.sectors.0).sum::<u64>();
        }
        for (lane, passed) in lanes.iter_mut().zip(&mut passed) {
            for _ in 0..2 {
                let done = rig.world.poll(0, &mut **lane);
                *passed += done.iter().map(|bio| bio.sectors.0).sum::<u64>();
            }
        }
        rig.world.now = rig.world.now + Nanos::from_millis(1);
    }
    let mut back = Batch::new();
    rig.world.turn(0, |cx| lanes.iter_mut().for_each(|lane| lane.drain(DrainMode::NoFlush, &mut back, cx)));
    back.iter_mut().for_each(|bio| bio.finish());
    passed
}

/// Two devices with one throttle share its rate, and take turns whatever their depth.
#[test]
fn a_group_shares_its_rate_fairly() {
    // A client that has one request at a time beside one with hundreds.
    let passed = share("iops=1000:1", bios(300, Op::Read, 8), 1, 200).map(|sectors| sectors / 8);
    assert!((200..=202).contains(&(passed[0] + passed[1])), "{passed:?}");
    assert!(passed[1] >= 90, "{passed:?}");
}

/// Long bios are reserved in parts, so that a device with short ones gets as many bytes.
#[test]
fn long_requests_get_no_larger_part_of_a_group() {
    // 8 sectors a millisecond; a bio of 2048 sectors takes 256 ms of all the rate.
    let passed = share("bps=4096000:4096", bios(8, Op::WriteZeroes, 2048), 8, 2048);
    assert!((6144..=8208).contains(&passed[1]), "{passed:?}");
    assert!(passed[0] >= 6144 && passed[0] + passed[1] <= 2048 * 8 + 16, "{passed:?}");
}

/// A long bio that is partly reserved and does not pass gives its parts back.
#[test]
fn parts_that_do_not_pass_are_given_back() {
    let mut d = ThrottledDevice::new("bps=4096000:409600");
    d.submit(bios(1, Op::Read, 800));
    assert_eq!(d.passed(), 1, "the burst");
    d.submit(bios(1, Op::Read, 800));
    d.wait(50);
    assert_eq!((d.passed(), d.waiting()), (0, 1));
    let mut back = Batch::new();
    d.rig.world.turn(0, |cx| d.lane.drain(DrainMode::NoFlush, &mut back, cx));
    back.iter_mut().for_each(|bio| bio.finish());
    d.submit(bios(50, Op::Read, 8));
    assert_eq!(d.passed(), 50, "what 50 ms have given");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever the order of clients, pauses, other limits, suspends and resumes: nothing is lost,
    /// and no second has more than its rate and one burst.
    #[test]
    fn nothing_is_lost_and_no_limit_is_exceeded(
        steps in proptest::collection::vec((0..7_u8, 1..40_u64), 1..80),
    ) {
        let mut d = ThrottledDevice::new("iops=500:20");
        let (mut submitted, mut completed, mut suspended) = (0, 0, false);
        // Since the limits were last set to 500 a second.
        let (mut from, mut passed, mut limited) = (d.rig.world.now, 0, true);
        for (step, amount) in steps {
            match step {
                0 | 1 => {
                    let op = if step == 0 { Op::Read } else { Op::WriteZeroes };
                    d.submit(bios(amount as usize, op, 8));
                    submitted += amount as usize;
                }
                2 | 3 => d.wait(amount),
                4 => {
                    suspended = !suspended;
                    let done = d.change(suspended);
                    (completed, passed) = (completed + done, passed + done);
                }
                5 => {
                    d.set("none");
                    limited = false;
                }
                _ => {
                    d.set("iops=500:20");
                    let done = d.passed();
                    completed += done;
                    if !limited {
                        (from, passed, limited) = (d.rig.world.now, 0, true);
                    }
                    passed += done;
                }
            }
            let done = d.passed();
            (completed, passed) = (completed + done, passed + done);
            let may = 20 + d.rig.world.now.since(from).0 * 500 / 1_000_000_000 + 1;
            prop_assert!(!limited || passed as u64 <= may, "{passed} of {may}");
            prop_assert!(completed <= submitted);
        }
        d.set("none");
        if suspended {
            completed += d.change(false);
        }
        completed += d.passed();
        prop_assert_eq!((completed, d.waiting()), (submitted, 0));
    }
}
