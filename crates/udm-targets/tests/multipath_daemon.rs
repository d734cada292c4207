//! Path maintenance of a multipath device, on a clock moved by the test. The names of tests begin
//! with the D rows of docs/internals/kernel-rows.md.

mod multipath_rig;

use multipath_rig::disks;
use std::cell::Cell;
use std::sync::Arc;
use udm_core::{CoreCommandSender, DevNo, Lane, Nanos, Op, Sectors, Status};
use udm_dm::testing::{SteppedTestCores, TestControlIo, TestDeviceNameResolver, TestDisk, bio_without_data};
use udm_dm::{DeviceTransition, MappedDevice, PathCommand, QueueingAndFailbackReport, Table};
use udm_targets::multipath::PathMaintenanceSettings;
use udm_wire::multipath_conf::{
    Failback, MarginalPathPolicy, MultipathSettings, NoPathRetry, PathPrioritizer,
};

const MS: u64 = 1_000_000;
const SECOND: u64 = 1000 * MS;

thread_local! {
    /// The time of the control side, equal to that of the cores.
    static CLOCK: Cell<Nanos> = const { Cell::new(Nanos(0)) };
}

/// A device over four disks with path maintenance; time advances in steps of 100 ms.
struct CheckedDeviceRig {
    world: SteppedTestCores,
    cores: Arc<dyn CoreCommandSender>,
    disks: Vec<Arc<TestDisk>>,
    resolver: TestDeviceNameResolver,
    device: Arc<MappedDevice>,
    lane: Box<dyn Lane>,
    /// The times in ms at which the first block of each disk was read.
    reads: Vec<Vec<u64>>,
}

impl CheckedDeviceRig {
    fn new(groups: &str, settings: MultipathSettings) -> CheckedDeviceRig {
        let (disks, mut resolver) = disks(4);
        let mut world = SteppedTestCores::new(1);
        let device = MappedDevice::new("t", None, DevNo { major: 254, minor: 0 }).unwrap();
        device.set_clock(|| CLOCK.get());
        let maintenance =
            PathMaintenanceSettings { paths: Some(Arc::new(settings)), ..PathMaintenanceSettings::default() };
        maintenance.set(&device);
        let lane = world.open(0, &*device).unwrap();
        let cores: Arc<dyn CoreCommandSender> = world.cores();
        let lines = udm_wire::table::parse_table(&format!("0 32768 multipath {groups}")).unwrap();
        let table =
            Table::build(udm_targets::TARGETS, &lines, &mut resolver, &TestControlIo::new(), 1).unwrap();
        device.load(table).unwrap();
        let reads = vec![Vec::new(); disks.len()];
        let mut host = CheckedDeviceRig { world, cores, disks, resolver, device, lane, reads };
        let change = host.device.resume(Arc::new(|| {})).unwrap();
        host.end(change);
        host
    }

    fn end(&mut self, mut change: DeviceTransition) {
        for _ in 0..20 {
            let over = change.step(&*self.cores);
            self.world.run_tasks();
            self.poll();
            if let Some(result) = over {
                return result.unwrap();
            }
        }
        panic!("the change does not end");
    }

    fn poll(&mut self) -> Vec<Status> {
        self.world.poll(0, &mut *self.lane).iter().map(|bio| bio.status).collect()
    }

    /// Advances the clock by `seconds`.
    fn pass(&mut self, seconds: f64) {
        let end = self.world.now.0 + (seconds * 1e9) as u64;
        while self.world.now.0 < end {
            self.world.now = Nanos(self.world.now.0 + 100 * MS);
            CLOCK.set(self.world.now);
            // A read is sent in one turn and completes in the next at the latest.
            for _ in 0..3 {
                self.world.run_tasks();
            }
            let now = self.world.now.0 / MS;
            for (disk, reads) in self.disks.iter().zip(&mut self.reads) {
                reads.extend(disk.take_log().iter().filter(|seen| seen.sector == 0).map(|_| now));
            }
        }
    }

    /// The intervals between checks of a disk, in seconds, rounded.
    fn gaps(&self, disk: usize) -> Vec<u64> {
        self.reads[disk].windows(2).map(|pair| (pair[1] - pair[0] + 500) / 1000).collect()
    }

    fn read(&mut self) -> Vec<Status> {
        self.world.submit(0, &mut *self.lane, [bio_without_data(Op::Read, 0, 8)]);
        self.poll()
    }

    fn tell(&mut self, text: &str) {
        let words: Vec<String> = text.split(' ').map(String::from).collect();
        self.device.message(0, &words, &mut self.resolver, &*self.cores).unwrap();
    }

    /// The state letter of each path.
    fn paths(&self) -> String {
        let status = self.device.status_text();
        let words: Vec<&str> = status.split_whitespace().collect();
        words.windows(2).filter(|w| w[0].contains(':')).map(|w| w[1]).collect()
    }

    /// The group in use, or the next group.
    fn group(&self) -> String {
        self.device.table_text(false).split_whitespace().nth(6).unwrap().to_owned()
    }

    fn path_maintenance(&self) -> QueueingAndFailbackReport {
        self.device.live().unwrap().targets()[0]
            .target
            .as_multipath()
            .unwrap()
            .path_maintenance_report()
            .unwrap()
    }

    /// The reason why no check reinstates the second path.
    fn held(&self) -> Option<String> {
        let live = self.device.live().unwrap();
        live.path_reports()[1].held.clone()
    }

    fn is_queueing(&self) -> bool {
        self.device.table_text(false).contains("queue_if_no_path")
    }
}

const ONE: &str = "0 0 1 1 round-robin 0 2 1 253:0 1 253:1 1";
const TWO: &str = "0 0 2 1 round-robin 0 2 1 253:0 1 253:1 1 round-robin 0 2 1 253:2 1 253:3 1";

#[test]
fn d01_checks_are_5_10_20_20_seconds_apart() {
    let mut host = CheckedDeviceRig::new(ONE, MultipathSettings::every(5));
    host.pass(75.0);
    assert_eq!(host.gaps(0)[..4], [5, 10, 20, 20], "{:?}", host.reads[0]);
    assert_eq!(host.gaps(1)[..4], [5, 10, 20, 20]);
    assert_ne!(host.reads[0][0], host.reads[1][0], "they are spread");
    host.tell("fail_path 253:0");
    host.reads[0].clear();
    let failed = host.world.now.0 / MS;
    host.pass(60.0);
    assert!((5000..5300).contains(&(host.reads[0][0] - failed)), "{:?}", host.reads[0]);
    assert_eq!(host.gaps(0)[..3], [5, 10, 20], "and from the beginning");
    assert_eq!(host.paths(), "AA");
}

#[test]
fn d02_a_path_that_fails_its_check_is_failed_before_a_request_meets_it() {
    let mut host = CheckedDeviceRig::new(ONE, MultipathSettings::every(5));
    host.pass(6.0);
    host.disks[1].fail(Status::Transport);
    let events = host.device.event_nr();
    host.pass(11.0);
    assert_eq!((host.paths().as_str(), host.device.event_nr()), ("AF", events + 1));
    // Each check of a failed path connects at once, whatever delay a connection waits for.
    let (checks, retries) = (host.reads[1].len(), host.disks[1].retries());
    host.pass(20.0);
    let checks = host.reads[1].len() - checks;
    assert!(checks > 2, "{:?}", host.reads[1]);
    assert_eq!((host.disks[0].retries(), host.disks[1].retries() - retries), (0, checks));
    host.disks[1].fail(Status::Ok);
    host.pass(6.0);
    assert_eq!((host.paths().as_str(), host.device.event_nr()), ("AA", events + 2));
    host.disks[1].fail(Status::Medium);
    host.pass(30.0);
    assert_eq!(host.paths(), "AA", "its first block is bad, and the path is not");
}

#[test]
fn d02_a_check_that_hangs_fails_its_path_and_holds_up_no_other() {
    let settings = MultipathSettings { checker_timeout: Nanos(3 * SECOND), ..MultipathSettings::every(5) };
    let mut host = CheckedDeviceRig::new(ONE, settings);
    host.disks[1].hold(true);
    host.pass(10.0);
    assert_eq!(host.paths(), "AF");
    let checks = host.disks[1].waiting();
    host.pass(60.0);
    assert_eq!((checks, host.disks[1].waiting()), (1, 1), "one, and no other before it completes");
    assert!(host.reads[0].len() > 4, "{:?}", host.reads[0]);
    // A late answer is ignored; the next check counts.
    host.disks[1].hold(false);
    host.pass(0.2);
    assert_eq!(host.paths(), "AF");
    host.pass(5.0);
    assert_eq!(host.paths(), "AA");
}

/// The last block of the table's range is read in the same check before a failed path is
/// reinstated. A bad block there says nothing about the path.
#[test]
fn a_path_whose_end_is_missing_stays_failed() {
    let mut host = CheckedDeviceRig::new(ONE, MultipathSettings::every(5));
    host.pass(6.0);
    let shorten =
        |host: &CheckedDeviceRig, sectors| host.disks[1].set_limits(|limits| limits.size = Sectors(sectors));
    shorten(&host, 32760);
    host.disks[1].set_verdict(|bio| if bio.end().0 > 32760 { Status::Transport } else { Status::Ok });
    host.pass(60.0);
    assert_eq!(host.paths(), "AA", "checks of a path that works read its first block");
    host.tell("fail_path 253:1");
    host.pass(60.0);
    assert_eq!(host.paths(), "AF");
    assert_eq!(host.held().as_deref(), Some("it is shorter than the 16777216 bytes of the table"));
    shorten(&host, 32768);
    host.disks[1].set_verdict(|bio| if bio.end().0 > 32760 { Status::Medium } else { Status::Ok });
    host.pass(6.0);
    assert_eq!((host.paths().as_str(), host.held()), ("AA", None));
    // A read beyond the end of the device may fail with any status.
    shorten(&host, 32760);
    host.tell("fail_path 253:1");
    host.pass(60.0);
    assert_eq!(host.paths(), "AF");
}

#[test]
fn a_path_that_a_command_failed_waits_for_another_command() {
    let mut host = CheckedDeviceRig::new(ONE, MultipathSettings::every(5));
    let command = |host: &CheckedDeviceRig, command| {
        let number = DevNo { major: 253, minor: 1 };
        host.device.command_path(number, command, &*host.cores).unwrap();
    };
    host.pass(6.0);
    let events = host.device.event_nr();
    command(&host, PathCommand::Fail);
    host.pass(0.1);
    host.reads[1].clear();
    host.pass(60.0);
    assert_eq!((host.paths().as_str(), host.device.event_nr()), ("AF", events + 1));
    assert_eq!(host.reads[1], [], "nothing is asked of it");
    assert_eq!(host.read(), [Status::Ok]);
    command(&host, PathCommand::Reinstate);
    assert_eq!((host.paths().as_str(), host.device.event_nr()), ("AA", events + 2));
    host.pass(0.3);
    assert!(!host.reads[1].is_empty(), "it is checked at once");
    // The same if the path fails and returns at once.
    host.reads[1].clear();
    command(&host, PathCommand::Fail);
    command(&host, PathCommand::Reinstate);
    host.pass(0.3);
    assert!(!host.reads[1].is_empty(), "it is checked at once");
    host.pass(6.0);
    // A command on a failed path also keeps the path failed. A message reinstates it.
    host.disks[1].fail(Status::Transport);
    host.pass(21.0);
    command(&host, PathCommand::Fail);
    host.disks[1].fail(Status::Ok);
    host.pass(60.0);
    assert_eq!(host.paths(), "AF");
    host.tell("reinstate_path 253:1");
    assert_eq!(host.paths(), "AA");
    host.tell("fail_path 253:1");
    host.pass(6.0);
    assert_eq!(host.paths(), "AA", "and what a message failed, a check brings back");
    let none = host.device.command_path(DevNo { major: 253, minor: 9 }, PathCommand::Fail, &*host.cores);
    assert_eq!(none.unwrap_err().text, "multipath: no path over device 253:9");
}

#[test]
fn d04_requests_wait_for_so_many_checks() {
    let settings =
        MultipathSettings { no_path_retry: Some(NoPathRetry::Checks(3)), ..MultipathSettings::every(5) };
    let mut host = CheckedDeviceRig::new(ONE, settings);
    host.pass(1.0);
    assert!(host.is_queueing(), "whatever the table says");
    host.disks[..2].iter().for_each(|disk| disk.fail(Status::Transport));
    assert_eq!(host.read(), []);
    assert_eq!(host.paths(), "FF");
    assert_eq!(host.path_maintenance().fails_in, None, "the checker has not seen it yet");
    host.pass(4.0);
    let Nanos(left) = host.path_maintenance().fails_in.unwrap();
    assert_eq!(left, 11_100 * MS, "15 s from the turn after, less 4 s");
    host.pass(10.5);
    assert_eq!((host.poll(), host.is_queueing()), (vec![], true));
    host.pass(1.5);
    assert_eq!((host.poll(), host.is_queueing()), (vec![Status::IoErr], false));
    assert_eq!((host.path_maintenance().fails_in, host.path_maintenance().queueing), (None, false));
    assert_eq!(host.read(), [Status::IoErr]);
    host.disks[0].fail(Status::Ok);
    host.pass(6.0);
    assert_eq!((host.paths().as_str(), host.is_queueing()), ("AF", true), "with the first path");
    host.disks[0].fail(Status::Transport);
    assert_eq!(host.read(), []);
    host.tell("fail_if_no_path");
    assert_eq!(host.poll(), [Status::IoErr]);
}

/// A message overrides the setting until a path returns, by a check or by a message.
#[test]
fn what_a_message_said_holds_until_a_path_comes_back() {
    for (rule, waits) in
        [(NoPathRetry::Fail, false), (NoPathRetry::Queue, true), (NoPathRetry::Checks(3), true)]
    {
        let settings = MultipathSettings { no_path_retry: Some(rule), ..MultipathSettings::every(5) };
        let mut host = CheckedDeviceRig::new(ONE, settings);
        host.pass(1.0);
        let said = if waits { "fail_if_no_path" } else { "queue_if_no_path" };
        for back in ["check", "reinstate_path 253:1"] {
            host.tell(said);
            host.disks[..2].iter().for_each(|disk| disk.fail(Status::Transport));
            assert_eq!(host.read(), if waits { vec![Status::IoErr] } else { vec![] }, "{rule:?}");
            host.pass(21.0);
            assert_eq!(
                (host.path_maintenance().queueing, host.path_maintenance().fails_in),
                (!waits, None),
                "{rule:?}"
            );
            host.disks[1].fail(Status::Ok);
            if back == "check" {
                host.pass(6.0);
            } else {
                host.tell(back);
                host.pass(0.1);
            }
            assert_eq!(
                (host.paths().as_str(), host.path_maintenance().queueing),
                ("FA", waits),
                "{rule:?} {back}"
            );
            assert_eq!(host.poll().len(), usize::from(!waits), "what waited goes on");
        }
        let change = host.device.suspend(false, Arc::new(|| {})).unwrap();
        host.end(change);
        assert_eq!(host.path_maintenance().queueing, waits, "what holds from the resume on");
    }
}

#[test]
fn d04_a_table_that_queues_is_told_to_fail() {
    let settings =
        MultipathSettings { no_path_retry: Some(NoPathRetry::Fail), ..MultipathSettings::every(5) };
    let mut host = CheckedDeviceRig::new(&ONE.replacen('0', "1 queue_if_no_path", 1), settings);
    host.pass(0.1);
    assert!(!host.is_queueing());
    let mut left =
        CheckedDeviceRig::new(&ONE.replacen('0', "1 queue_if_no_path", 1), MultipathSettings::every(5));
    left.pass(60.0);
    assert!(left.is_queueing(), "without the setting it is the table's");
}

/// Group 1 is lost and returns. Returns the group in use after each of `seconds`.
fn failback(rule: Failback, seconds: &[f64]) -> Vec<String> {
    let prio = PathPrioritizer::Weighted(vec![("253:0".into(), 50), ("253:1".into(), 50), ("*".into(), 10)]);
    let mut host =
        CheckedDeviceRig::new(TWO, MultipathSettings { failback: rule, prio, ..MultipathSettings::every(5) });
    host.pass(1.0);
    host.disks[..2].iter().for_each(|disk| disk.fail(Status::Transport));
    host.pass(11.0);
    assert_eq!((host.read(), host.paths().as_str(), host.group().as_str()), (vec![Status::Ok], "FFAA", "2"));
    host.disks[..2].iter().for_each(|disk| disk.fail(Status::Ok));
    while host.paths() != "AAAA" {
        host.pass(0.1);
    }
    let from = host.world.now.0;
    let at = |seconds: &f64| {
        let passed = (host.world.now.0 - from) as f64 / 1e9;
        host.pass(seconds - passed);
        assert_eq!(
            host.path_maintenance().failback.is_some(),
            matches!(rule, Failback::After(_)) && host.group() == "2"
        );
        host.group()
    };
    seconds.iter().map(at).collect()
}

#[test]
fn d05_failback() {
    assert_eq!(failback(Failback::Manual, &[0.0, 100.0]), ["2", "2"]);
    assert_eq!(failback(Failback::Immediate, &[0.0, 100.0]), ["1", "1"]);
    assert_eq!(failback(Failback::Followover, &[0.0, 100.0]), ["1", "1"]);
    assert_eq!(failback(Failback::After(Nanos(10 * SECOND)), &[0.0, 9.0, 11.0]), ["2", "2", "1"]);
}

/// A manual switch holds, even if another group is better, until the last path of the group fails.
#[test]
fn a_group_that_a_person_chose_is_kept_while_it_works() {
    for rule in [Failback::Immediate, Failback::Followover, Failback::After(Nanos(10 * SECOND))] {
        let mut host =
            CheckedDeviceRig::new(TWO, MultipathSettings { failback: rule, ..MultipathSettings::every(5) });
        assert_eq!(host.read(), [Status::Ok]);
        host.tell("switch_group 2");
        assert_eq!(host.read(), [Status::Ok]);
        host.pass(60.0);
        assert_eq!((host.group().as_str(), host.path_maintenance().manual_group), ("2", Some(2)), "{rule:?}");
        // One path of the group fails and returns.
        host.tell("fail_path 253:2");
        host.pass(60.0);
        assert_eq!((host.group().as_str(), host.paths().as_str()), ("2", "AAAA"), "{rule:?}");
        host.disks[2..].iter().for_each(|disk| disk.fail(Status::Transport));
        host.pass(60.0);
        assert_eq!(host.read(), [Status::Ok]);
        assert_eq!((host.group().as_str(), host.path_maintenance().manual_group), ("1", None), "{rule:?}");
        host.disks[2..].iter().for_each(|disk| disk.fail(Status::Ok));
        host.pass(60.0);
        assert_eq!((host.group().as_str(), host.paths().as_str()), ("1", "AAAA"), "{rule:?}");
        // A manual switch to the best group ends the manual choice.
        host.tell("switch_group 2");
        host.tell("switch_group 1");
        host.pass(60.0);
        assert_eq!((host.group().as_str(), host.path_maintenance().manual_group), ("1", None), "{rule:?}");
    }
}

#[test]
fn d05_while_a_group_is_disabled_nothing_is_gone_back_to() {
    let mut host = CheckedDeviceRig::new(
        TWO,
        MultipathSettings { failback: Failback::Immediate, ..MultipathSettings::every(5) },
    );
    assert_eq!(host.read(), [Status::Ok]);
    host.tell("disable_group 1");
    assert_eq!(host.read(), [Status::Ok]);
    host.pass(60.0);
    assert_eq!(host.group(), "2");
    host.tell("enable_group 1");
    host.pass(21.0);
    assert_eq!(host.group(), "1", "the first of equals");
}

#[test]
fn d07_a_path_that_keeps_failing_is_held_back_until_it_has_shown_better() {
    let marginal = MarginalPathPolicy {
        double_failed_time: Nanos(60 * SECOND),
        err_sample_time: Nanos(120 * SECOND),
        err_rate_threshold: 10,
        err_recheck_gap_time: Nanos(50 * SECOND),
    };
    let mut host = CheckedDeviceRig::new(
        ONE,
        MultipathSettings { marginal: Some(marginal), ..MultipathSettings::every(5) },
    );
    host.tell("fail_path 253:1");
    host.pass(6.0);
    assert_eq!(host.paths(), "AA", "once is nothing");
    assert_eq!(host.held(), None);
    host.tell("fail_path 253:1");
    host.pass(1.0);
    let watched = "it failed twice within 60 s, and is watched for 120 s";
    assert_eq!(host.held().as_deref(), Some(watched));
    host.reads[1].clear();
    // Of 600 reads every 50th fails, then none.
    let mut count = 0;
    host.disks[1].set_verdict(move |_| {
        count += 1;
        if count < 700 && count % 50 == 0 { Status::Transport } else { Status::Ok }
    });
    host.pass(122.0);
    assert!((580..=660).contains(&host.reads[1].len()), "{}", host.reads[1].len());
    assert_eq!(host.paths(), "AF", "20 of 1000 are too many");
    assert_eq!(host.held().unwrap(), "11 of 600 reads failed, and it is watched again in 48 s");
    host.pass(165.0);
    assert_eq!(host.paths(), "AF", "it is held, and read from again");
    assert!(host.held().is_some_and(|held| held.starts_with("it failed twice")), "{:?}", host.held());
    host.pass(15.0);
    assert_eq!((host.paths().as_str(), host.held()), ("AA", None));
    // Held again, and reinstated by a message.
    for wait in [6.0, 1.0] {
        host.tell("fail_path 253:1");
        host.pass(wait);
    }
    host.pass(20.0);
    assert!(host.paths() == "AF" && host.held().is_some());
    host.tell("reinstate_path 253:1");
    host.pass(1.0);
    assert_eq!(host.held(), None);
    let reads = host.reads[1].len();
    host.pass(4.0);
    assert_eq!((host.paths().as_str(), host.reads[1].len()), ("AA", reads), "and read from no more");
    // If there is no other path, it is used at once.
    for wait in [6.0, 20.0] {
        host.tell("fail_path 253:1");
        host.pass(wait);
    }
    assert_eq!(host.paths(), "AF");
    host.tell("fail_path 253:0");
    host.pass(0.5);
    assert_eq!(host.paths(), "FA");
}

#[test]
fn d07_the_last_path_that_keeps_failing_is_checked_no_sooner_than_others() {
    let marginal = MarginalPathPolicy {
        double_failed_time: Nanos(60 * SECOND),
        err_sample_time: Nanos(120 * SECOND),
        err_rate_threshold: 10,
        err_recheck_gap_time: Nanos(50 * SECOND),
    };
    let mut host = CheckedDeviceRig::new(
        ONE,
        MultipathSettings { marginal: Some(marginal), ..MultipathSettings::every(5) },
    );
    host.disks[1].fail(Status::Transport);
    host.pass(6.0);
    for _ in 0..4 {
        host.tell("fail_path 253:0");
        host.pass(4.0);
        assert_eq!(host.paths(), "FF", "in the instant in which it failed it would pass for one that works");
        host.pass(16.5);
        assert_eq!(host.paths(), "AF");
    }
}

/// A failure is counted once: the task started by a resume does not count it as new.
#[test]
fn a_failure_from_before_a_resume_is_not_counted_again() {
    let marginal = MarginalPathPolicy {
        double_failed_time: Nanos(8 * SECOND),
        err_sample_time: Nanos(120 * SECOND),
        err_rate_threshold: 10,
        err_recheck_gap_time: Nanos(50 * SECOND),
    };
    let mut host = CheckedDeviceRig::new(
        ONE,
        MultipathSettings { marginal: Some(marginal), ..MultipathSettings::every(1) },
    );
    host.tell("fail_path 253:1");
    host.pass(11.0);
    let change = host.device.suspend(false, Arc::new(|| {})).unwrap();
    host.end(change);
    let change = host.device.resume(Arc::new(|| {})).unwrap();
    host.end(change);
    host.pass(1.0);
    host.tell("fail_path 253:1");
    host.pass(3.0);
    assert_eq!((host.held(), host.paths().as_str()), (None, "AA"), "the first is 12 s old");
    host.tell("fail_path 253:1");
    host.pass(1.0);
    assert!(host.held().is_some(), "twice within 8 s");
}

/// The core does not run for long while checks are pending: no path times out.
#[test]
fn a_pause_of_the_core_is_no_check_without_an_answer() {
    let mut host = CheckedDeviceRig::new(
        ONE,
        MultipathSettings { checker_timeout: Nanos(3 * SECOND), ..MultipathSettings::every(5) },
    );
    host.disks[..2].iter().for_each(|disk| disk.hold(true));
    let waits = |host: &CheckedDeviceRig| host.disks[..2].iter().all(|disk| disk.waiting() == 1);
    while !waits(&host) {
        host.pass(0.1);
    }
    host.world.now = Nanos(host.world.now.0 + 100 * SECOND);
    host.pass(0.1);
    assert_eq!(host.paths(), "AA");
    host.disks[..2].iter().for_each(|disk| disk.hold(false));
    host.pass(1.0);
    assert_eq!(host.paths(), "AA");
}
