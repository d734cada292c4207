//! The path that a request takes.

use super::multipath_rig::{MultipathRig, bare_read, build, disks};
use udm_core::{Lane, Op, Status};
use udm_dm::Target;
use udm_dm::testing::{SteppedTestCores, bio_without_data};

fn three_paths(selector: &str) -> MultipathRig {
    MultipathRig::new(&format!("0 0 1 1 {selector} 0 3 0 253:0 253:1 253:2"))
}

/// Two paths that hold their requests.
fn rig_that_holds(group: &str) -> MultipathRig {
    let rig = MultipathRig::new(&format!("0 0 1 1 {group}"));
    rig.disks.iter().for_each(|disk| disk.hold(true));
    rig
}

/// The selector's part of the status of both paths, after their states and failure counts.
fn selector_status(rig: &MultipathRig) -> String {
    let status = rig.status();
    status.split_once(" 253:0 ").expect("the first path").1.trim_end().to_owned()
}

/// Completes all held requests without error.
fn complete_held(rig: &mut MultipathRig) {
    rig.disks.iter().for_each(|disk| disk.hold(false));
    rig.poll();
    assert!(rig.results().iter().all(|status| status.is_ok()));
}

#[test]
fn r01_round_robin_takes_turns() {
    assert_eq!(three_paths("round-robin").order(6), [0, 1, 2, 0, 1, 2]);
}

#[test]
fn r02_round_robin_without_a_path() {
    let mut rig = three_paths("round-robin");
    rig.tell("fail_path 253:0");
    assert_eq!(rig.order(3), [1, 2, 1]);
}

#[test]
fn r03_a_path_returns_to_the_head_of_round_robin() {
    let mut rig = three_paths("round-robin");
    rig.tell("fail_path 253:0");
    assert_eq!(rig.order(3), [1, 2, 1]);
    rig.tell("reinstate_path 253:0");
    assert_eq!(rig.order(6), [0, 2, 1, 0, 2, 1]);
}

/// The kernel, with one lock, had counts of 334, 333 and 333. Cores of udm rotate separately from
/// different starts, so counts differ by at most one request per core.
#[test]
fn r04_round_robin_is_fair_over_cores() {
    let (disks, mut resolver) = disks(3);
    let target = build("0 0 1 1 round-robin 0 3 0 253:0 253:1 253:2", &mut resolver).unwrap();
    let mut world = SteppedTestCores::new(4);
    let mut lanes: Vec<_> = (0..4).map(|core| world.turn(core, |cx| target.open(cx)).unwrap()).collect();
    for _ in 0..250 {
        for (core, lane) in lanes.iter_mut().enumerate() {
            assert_eq!(world.run(core, &mut **lane, bare_read(8)).status, Status::Ok);
        }
    }
    let counts: Vec<_> = disks.iter().map(|disk| disk.take_log().len()).collect();
    let spread = counts.iter().max().unwrap() - counts.iter().min().unwrap();
    assert!(counts.iter().sum::<usize>() == 1000 && spread <= 4, "{counts:?}");
}

#[test]
fn q02_a_path_returns_to_the_tail_of_queue_length() {
    let mut rig = three_paths("queue-length");
    rig.tell("fail_path 253:0");
    assert_eq!(rig.order(3), [1, 2, 1]);
    rig.tell("reinstate_path 253:0");
    assert_eq!(rig.order(4), [2, 1, 0, 2]);
}

#[test]
fn q03_queue_length_shows_what_is_in_flight() {
    let mut rig = rig_that_holds("queue-length 0 2 0 253:0 253:1");
    for want in ["A 0 1 253:1 A 0 0", "A 0 1 253:1 A 0 1", "A 0 2 253:1 A 0 1", "A 0 2 253:1 A 0 2"] {
        rig.start(bare_read(8));
        assert_eq!(selector_status(&rig), want);
    }
    complete_held(&mut rig);
}

#[test]
fn q04_a_path_that_failed_ends_what_it_has() {
    let mut rig = rig_that_holds("queue-length 0 2 0 253:0 253:1");
    (0..4).for_each(|_| rig.start(bare_read(8)));
    rig.tell("fail_path 253:0");
    assert_eq!(selector_status(&rig), "F 1 2 253:1 A 0 2");
    complete_held(&mut rig);
    assert_eq!(selector_status(&rig), "F 1 0 253:1 A 0 0");
    assert_eq!(rig.counts()[..2], [2, 2], "none was sent twice");
}

#[test]
fn s01_service_time_weighs_bytes_by_throughput() {
    let mut rig = rig_that_holds("service-time 0 2 2 253:0 1 1 253:1 1 4");
    rig.start(bare_read(8));
    assert_eq!(selector_status(&rig), "A 0 0 1 253:1 A 0 4096 4");
    rig.start(bare_read(128));
    assert_eq!(selector_status(&rig), "A 0 0 1 253:1 A 0 69632 4");
    complete_held(&mut rig);
}

#[test]
fn s02_service_time_takes_the_slow_path_when_it_is_sooner() {
    let mut rig = rig_that_holds("service-time 0 2 2 253:0 1 1 253:1 1 4");
    for sectors in [8, 128, 8] {
        rig.start(bare_read(sectors));
    }
    assert_eq!(selector_status(&rig), "A 0 4096 1 253:1 A 0 69632 4");
    complete_held(&mut rig);
}

/// A request of 4 KiB: an idle path with throughput 1 loses against 12 KiB at throughput 4, and
/// wins against 16 KiB.
#[test]
fn s03_service_time_compares_with_the_request() {
    let mut rig = rig_that_holds("service-time 0 2 2 253:0 1 1 253:1 1 4");
    rig.start(bare_read(24));
    assert_eq!(selector_status(&rig), "A 0 0 1 253:1 A 0 12288 4");
    rig.start(bare_read(8));
    assert_eq!(selector_status(&rig), "A 0 0 1 253:1 A 0 16384 4");
    rig.start(bare_read(8));
    assert_eq!(selector_status(&rig), "A 0 4096 1 253:1 A 0 16384 4");
    complete_held(&mut rig);
}

#[test]
fn s04_no_throughput_is_the_last_resort() {
    let mut rig = rig_that_holds("service-time 0 2 2 253:0 1 0 253:1 1 1");
    rig.start(bare_read(128));
    rig.start(bare_read(8));
    assert_eq!(selector_status(&rig), "A 0 0 0 253:1 A 0 69632 1");
    complete_held(&mut rig);
    let mut rig = rig_that_holds("service-time 0 2 2 253:0 1 0 253:1 1 0");
    rig.start(bare_read(128));
    rig.start(bare_read(8));
    rig.start(bare_read(8));
    assert_eq!(selector_status(&rig), "A 0 65536 0 253:1 A 0 8192 0", "both are: fewer bytes");
    complete_held(&mut rig);
}

#[test]
fn s06_service_time_that_is_even_takes_turns() {
    assert_eq!(three_paths("service-time").order(4), [0, 1, 2, 0]);
}

/// Makes ten reads on each of four cores. Returns the path of each core, and the printed misses.
fn ten_reads_per_core(
    world: &mut SteppedTestCores,
    lanes: &mut [Box<dyn Lane>],
    rig: &IoAffinityRig,
) -> (Vec<usize>, String) {
    let mut paths = Vec::new();
    for (core, lane) in lanes.iter_mut().enumerate() {
        for _ in 0..10 {
            assert_eq!(world.run(core, &mut **lane, bio_without_data(Op::Read, 0, 8)).status, Status::Ok);
        }
        let counts: Vec<_> = rig.disks.iter().map(|disk| disk.take_log().len()).collect();
        assert!(counts.contains(&10), "{counts:?}");
        paths.push(counts.iter().position(|&n| n == 10).unwrap());
    }
    let status = rig.target.status();
    (paths, status.rsplit(' ').nth(1).expect("the second path's misses").to_owned())
}

/// Core 0 has the first path, core 1 the second; cores 2 and 3 have none.
struct IoAffinityRig {
    disks: Vec<std::sync::Arc<udm_dm::testing::TestDisk>>,
    resolver: udm_dm::testing::TestDeviceNameResolver,
    target: std::sync::Arc<udm_targets::multipath::Multipath>,
}

impl IoAffinityRig {
    fn new() -> (IoAffinityRig, SteppedTestCores, Vec<Box<dyn Lane>>) {
        let (disks, mut resolver) = disks(2);
        let target = build("0 0 1 1 io-affinity 0 2 1 253:0 1 253:1 2", &mut resolver).unwrap();
        let mut world = SteppedTestCores::new(4);
        let lanes = (0..4).map(|core| world.turn(core, |cx| target.open(cx)).unwrap()).collect();
        (IoAffinityRig { disks, resolver, target }, world, lanes)
    }

    fn tell(&mut self, message: &str) {
        let words: Vec<String> = message.split(' ').map(String::from).collect();
        self.target.message(&words, &mut self.resolver).expect("a good message");
    }
}

#[test]
fn i01_each_core_has_its_path() {
    let (rig, mut world, mut lanes) = IoAffinityRig::new();
    assert_eq!(ten_reads_per_core(&mut world, &mut lanes, &rig), (vec![0, 1, 0, 0], "20".into()));
}

#[test]
fn i02_an_owner_that_failed_is_no_miss() {
    let (mut rig, mut world, mut lanes) = IoAffinityRig::new();
    ten_reads_per_core(&mut world, &mut lanes, &rig);
    rig.tell("fail_path 253:0");
    assert_eq!(ten_reads_per_core(&mut world, &mut lanes, &rig), (vec![1, 1, 1, 1], "40".into()));
}

#[test]
fn i03_all_paths_failed() {
    let (mut rig, mut world, mut lanes) = IoAffinityRig::new();
    rig.tell("fail_path 253:0");
    rig.tell("fail_path 253:1");
    assert_eq!(world.run(0, &mut *lanes[0], bare_read(8)).status, Status::IoErr);
    rig.tell("reinstate_path 253:0");
    rig.tell("reinstate_path 253:1");
    assert_eq!(world.run(0, &mut *lanes[0], bare_read(8)).status, Status::Ok);
    assert_eq!(rig.disks.iter().map(|disk| disk.take_log().len()).collect::<Vec<_>>(), [1, 0]);
}

#[test]
fn a02_the_next_group_serves_when_all_of_one_failed() {
    for group in
        ["round-robin 0 1 0", "queue-length 0 1 0", "service-time 0 1 0", "historical-service-time 0 1 0"]
    {
        let mut rig = MultipathRig::new(&format!("0 0 2 1 {group} 253:0 {group} 253:1"));
        rig.tell("fail_path 253:0");
        assert_eq!(rig.order(1), [1], "{group}");
    }
    let mut rig = MultipathRig::new("0 0 2 1 io-affinity 0 1 1 253:0 1 io-affinity 0 1 1 253:1 1");
    rig.tell("fail_path 253:0");
    assert_eq!(rig.order(1), [1]);
}
