//! Paths that are watched: deadlines, hedged reads, and paths that are put out of use for being
//! slow. Over disks that hold what they are told to, on a clock that the test moves.

mod multipath_rig;

use multipath_rig::build;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use udm_core::{Batch, Busy, Cores, DevNo, Drain, Lane, Nanos, Op, Status};
use udm_dm::testing::{TestDisk, TestResolver, TestWorld, bare, data, read, write};
use udm_dm::{Notify, PathReport, PathWatch, Target, Upkeep, WatchReport};
use udm_targets::multipath::Multipath;

/// The deadline of those tests that have one.
const DEADLINE: Nanos = Nanos::from_millis(2000);
const MS: Nanos = Nanos::from_millis(1);

/// What the device is to its target.
struct Above {
    watch: PathWatch,
    events: AtomicU64,
}

impl Notify for Above {
    fn event(&self) {
        self.events.fetch_add(1, Ordering::Relaxed);
    }
    fn device(&self) -> String {
        "watched".into()
    }
    fn kick(&self, _: &dyn Cores) {}
    fn upkeep(&self) -> Upkeep {
        Upkeep { watch: self.watch, ..Upkeep::default() }
    }
}

struct Rig {
    world: TestWorld,
    disks: Vec<Arc<TestDisk>>,
    target: Arc<Multipath>,
    lane: Box<dyn Lane>,
    above: Arc<Above>,
    done: Batch,
}

impl Rig {
    /// `count` paths in a group, by turns. What is on a disk tells which it is.
    fn new(count: u32, watch: PathWatch) -> Rig {
        let disks: Vec<_> = (0..count).map(|_| TestDisk::new(32768)).collect();
        let mut resolver = TestResolver::new();
        for (minor, disk) in (0..count).zip(&disks) {
            disk.put(0, &vec![minor as u8 + 1; 64 * 512]);
            resolver.add(&format!("p{minor}"), DevNo { major: 253, minor }, disk.clone());
        }
        let paths: Vec<_> = (0..count).map(|i| format!("p{i}")).collect();
        let params = format!("0 0 1 1 round-robin 0 {count} 0 {}", paths.join(" "));
        let target = build(&params, &mut resolver).unwrap();
        let above = Arc::new(Above { watch, events: AtomicU64::new(0) });
        target.attach(above.clone());
        let mut world = TestWorld::new(1);
        world.now = MS;
        let lane = world.turn(0, |cx| target.open(cx)).unwrap();
        Rig { world, disks, target, lane, above, done: Batch::new() }
    }

    fn start(&mut self, bio: Box<udm_core::Bio>) {
        self.world.submit(0, &mut *self.lane, [bio]);
    }

    fn poll(&mut self) {
        let done = self.world.poll(0, &mut *self.lane);
        self.done.extend(done);
    }

    /// Moves the clock to when the lane asks for, as a core does, until something comes back: how
    /// long that took.
    fn wait(&mut self) -> Nanos {
        let from = self.world.now;
        for _ in 0..100 {
            self.world.wake = Nanos::NEVER;
            self.poll();
            if !self.done.is_empty() {
                return self.world.now.since(from);
            }
            assert_ne!(self.world.wake, Nanos::NEVER, "nobody would wake the lane");
            self.world.now = self.world.now.max(self.world.wake);
        }
        panic!("nothing comes back");
    }

    /// One read by itself: how it ended, which disk it is from, and how long it took.
    fn read(&mut self) -> (Status, u8, Nanos) {
        self.start(read(0, 8));
        let took = self.wait();
        let bio = self.done.pop().unwrap();
        let bytes = data(&bio);
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "of one answer");
        (bio.status, bytes[0], took)
    }

    fn report(&self, path: usize) -> PathReport {
        self.target.path_reports().swap_remove(path)
    }

    fn watch(&self, path: usize) -> WatchReport {
        self.report(path).watch.unwrap()
    }

    fn events(&self) -> u64 {
        self.above.events.load(Ordering::Relaxed)
    }

    /// Nothing is in flight, and no timer is asked for.
    fn rests(&mut self) {
        self.world.wake = Nanos::NEVER;
        // A path that was not in use has its turn in a poll that brings nothing.
        (0..3).for_each(|_| self.poll());
        self.world.wake = Nanos::NEVER;
        self.poll();
        assert_eq!((self.world.wake, self.lane.busy()), (Nanos::NEVER, Busy::Idle));
        assert!(self.done.is_empty() && self.disks.iter().all(|disk| disk.waiting() == 0));
    }
}

fn deadline() -> PathWatch {
    PathWatch { deadline: Some(DEADLINE), ..PathWatch::default() }
}

/// Of eight paths one takes requests and never answers.
/// Every read ends within the deadline and the time that it takes elsewhere.
#[test]
fn m10_reads_of_a_hung_path_end_within_the_deadline() {
    let mut rig = Rig::new(8, deadline());
    rig.disks[3].hold(true);
    let mut longest = Nanos(0);
    for _ in 0..64 {
        let (status, from, took) = rig.read();
        assert_eq!(status, Status::Ok);
        assert_ne!(from, 4, "nothing is of the path that hangs");
        longest = longest.max(took);
    }
    assert_eq!(longest, DEADLINE, "one had to wait, and no longer");
    let report = rig.report(3);
    assert!(report.failed && report.fail_count == 1 && rig.events() == 1, "{report:?}");
    let watch = rig.watch(3);
    assert_eq!((watch.given_up, watch.waiting, watch.late), (1, 0, 0));
    assert_eq!((rig.disks[3].waiting(), rig.lane.busy()), (1, Busy::Owed), "it has the copy still");
    rig.disks[3].hold(false);
    rig.poll();
    assert_eq!(rig.watch(3).late, 1, "what comes late is dropped");
    rig.rests();
}

/// A path that is slower than what it is given answers all of it: it is busy, and not silent.
#[test]
fn a_path_that_answers_others_is_busy() {
    let mut rig = Rig::new(2, deadline());
    rig.disks.iter().for_each(|disk| disk.hold(true));
    (0..6).for_each(|_| rig.start(read(0, 8)));
    rig.poll();
    for _ in 0..3 {
        rig.world.now = rig.world.now + Nanos(DEADLINE.0 * 3 / 4);
        rig.disks.iter().for_each(|disk| disk.release(1));
        rig.poll();
    }
    let ends: Vec<_> = rig.done.drain(..).map(|bio| bio.status).collect();
    assert_eq!(ends, [Status::Ok; 6], "the last of them took longer than the deadline");
    for path in 0..2 {
        assert!(!rig.report(path).failed && rig.watch(path).given_up == 0);
    }
    rig.rests();
}

/// Of what a path is given it answers all but one: that is given up all the same, in four times
/// the deadline.
#[test]
fn what_a_busy_path_keeps_is_given_up() {
    for lost in [read(0, 8), write(0, 8, 99)] {
        let (op, from) = (lost.op, MS);
        let mut rig = Rig::new(2, deadline());
        rig.disks[0].hold(true);
        rig.disks[0].reverse(true);
        rig.start(lost);
        rig.start(read(0, 8));
        rig.poll();
        while !rig.report(0).failed {
            rig.done.clear();
            rig.world.now = rig.world.now + Nanos(DEADLINE.0 / 2);
            (0..2).for_each(|_| rig.start(read(0, 8)));
            rig.disks[0].release(1);
            rig.poll();
            assert!(rig.world.now <= from + Nanos(4 * DEADLINE.0), "for ever");
        }
        assert_eq!(rig.world.now.since(from), Nanos(4 * DEADLINE.0));
        let watch = rig.watch(0);
        match op {
            Op::Read => assert_eq!((watch.given_up, watch.waiting), (1, 0)),
            _ => assert_eq!((watch.given_up, watch.waiting), (0, 1)),
        }
        rig.disks[0].hold(false);
        rig.poll();
        assert!(rig.done.iter().all(|bio| bio.status == Status::Ok));
        rig.done.clear();
        rig.rests();
    }
}

/// A write that hangs is on no other path, fails its path, and is counted for as long as it waits.
#[test]
fn a_write_waits_for_its_path() {
    let mut rig = Rig::new(2, deadline());
    rig.disks[0].hold(true);
    rig.start(write(0, 8, 99));
    rig.start(bare(Op::Flush, 0, 0));
    rig.disks[1].hold(true);
    rig.start(bare(Op::Flush, 0, 0));
    rig.disks[1].hold(false);
    rig.poll();
    assert_eq!(rig.done.drain(..).map(|bio| bio.op).collect::<Vec<_>>(), [Op::Flush]);
    rig.world.now = rig.world.now + DEADLINE;
    rig.poll();
    assert!(rig.done.is_empty() && rig.report(0).failed && rig.watch(0).waiting == 2);
    assert!(!rig.disks[1].take_log().iter().any(|seen| seen.op == Op::Write), "not on two paths");
    // The next ones do not go there.
    (0..4).for_each(|_| assert_eq!(rig.read().1, 2));
    rig.disks[0].hold(false);
    rig.poll();
    assert_eq!(rig.done.drain(..).map(|bio| bio.status).collect::<Vec<_>>(), [Status::Ok; 2]);
    assert_eq!(rig.watch(0).waiting, 0);
    assert_eq!(rig.disks[0].bytes(0, 1), [99; 512]);
    rig.rests();
}

/// A path that gives its write back late, with an error that blames it: then, and not before, the
/// write goes elsewhere.
#[test]
fn a_write_that_comes_back_late_goes_elsewhere() {
    let mut rig = Rig::new(2, deadline());
    rig.disks[0].hold(true);
    let bio = write(0, 8, 99);
    rig.start(bio);
    rig.world.now = rig.world.now + DEADLINE;
    rig.poll();
    rig.disks[0].fail(Status::Transport);
    rig.disks[0].hold(false);
    rig.poll();
    let back = rig.done.pop().unwrap();
    assert_eq!((back.status, back.op, rig.report(1).retries), (Status::Ok, Op::Write, 1));
    assert_eq!((rig.disks[1].bytes(0, 1), rig.events()), (vec![99; 512], 1));
    rig.rests();
}

/// Requests come back as they were given: cookie, owner, and their own memory.
#[test]
fn bios_come_back_as_they_were() {
    let mut rig = Rig::new(2, deadline());
    for mut bio in [read(0, 8), write(8, 8, 1), bare(Op::Flush, 0, 0), bare(Op::Discard, 8, 8)] {
        (bio.cookie, bio.owner) = (77, udm_core::OwnerId(5));
        let addr = |bio: &udm_core::Bio| bio.data.iter().next().map(|piece| piece.addr());
        let (op, memory) = (bio.op, addr(&bio));
        rig.start(bio);
        rig.wait();
        let back = rig.done.pop().unwrap();
        assert_eq!((back.op, back.cookie, back.owner.0, addr(&back)), (op, 77, 5, memory));
    }
}

/// A no-flush suspend takes back what a path holds back, as it was given.
#[test]
fn what_is_handed_back_is_as_it_was() {
    let mut rig = Rig::new(2, deadline());
    for disk in &rig.disks {
        disk.hold(true);
        disk.hand_back(true);
    }
    for mut bio in [read(0, 8), write(8, 8, 1)] {
        bio.cookie = 77;
        rig.start(bio);
    }
    let mut back = Batch::new();
    rig.world.turn(0, |cx| rig.lane.drain(Drain::NoFlush, &mut back, cx));
    let ops: Vec<_> = back.iter().map(|bio| (bio.op, bio.cookie, bio.status, bio.data.len())).collect();
    assert_eq!(ops, [(Op::Read, 77, Status::Ok, 4096), (Op::Write, 77, Status::Ok, 4096)]);
    back.iter_mut().for_each(|bio| bio.finish());
    rig.disks.iter().for_each(|disk| disk.hold(false));
    rig.rests();
}

/// With the last path silent requests fail, as with any last path that fails.
#[test]
fn the_last_path_may_be_silent_too() {
    let mut rig = Rig::new(1, deadline());
    rig.disks[0].hold(true);
    assert_eq!(rig.read().0, Status::IoErr);
    rig.disks[0].hold(false);
    rig.rests();
}

fn hedged() -> PathWatch {
    PathWatch { hedge_reads: true, ..PathWatch::default() }
}

/// Enough reads for a window to go by, over enough time for it to be over.
fn warm(rig: &mut Rig, reads: u32) {
    for _ in 0..reads {
        assert_eq!(rig.read().0, Status::Ok);
    }
    rig.world.now = rig.world.now + Nanos::from_millis(300);
}

/// A read that takes longer than most goes to a second path, and the first answer wins.
#[test]
fn a_hedge_answers_for_a_path_that_hangs() {
    let mut rig = Rig::new(2, hedged());
    warm(&mut rig, 200);
    rig.disks[0].hold(true);
    for nth in 1..=5 {
        // Every other one is for the path that hangs.
        let (a, b) = (rig.read(), rig.read());
        assert_eq!(((a.0, a.1), (b.0, b.1)), ((Status::Ok, 2), (Status::Ok, 2)));
        assert_eq!(a.2.max(b.2), MS, "the shortest time before a hedge");
        let watch = rig.watch(0);
        assert_eq!((watch.hedges, watch.won, watch.wasted), (nth, nth, 0));
    }
    assert!(!rig.report(0).failed, "that is no reason to fail it");
    rig.disks[0].hold(false);
    rig.poll();
    assert_eq!(rig.watch(0).late, 5);
    rig.rests();
}

/// The path that was chosen answers first: the hedge is wasted, and its answer dropped.
#[test]
fn a_hedge_that_loses_is_dropped() {
    let mut rig = Rig::new(2, hedged());
    warm(&mut rig, 200);
    rig.disks.iter().for_each(|disk| disk.hold(true));
    rig.start(read(0, 8));
    rig.poll();
    rig.world.now = rig.world.now + MS;
    rig.poll();
    assert_eq!((rig.disks[0].waiting(), rig.disks[1].waiting()), (1, 1));
    rig.disks[0].release(1);
    rig.poll();
    assert_eq!(data(&rig.done.pop().unwrap())[0], 1);
    assert_eq!(rig.lane.busy(), Busy::Owed);
    rig.disks.iter().for_each(|disk| disk.hold(false));
    rig.poll();
    rig.poll();
    let watch = rig.watch(0);
    assert_eq!((watch.hedges, watch.won, watch.wasted), (1, 0, 1));
    rig.rests();
}

/// The error of a hedge ends nothing and fails no path; that of the path itself does.
#[test]
fn an_error_of_a_hedge_is_not_believed() {
    let mut rig = Rig::new(2, hedged());
    warm(&mut rig, 200);
    rig.disks[0].hold(true);
    rig.disks[1].fail(Status::Transport);
    rig.start(read(0, 8));
    rig.poll();
    rig.world.now = rig.world.now + MS;
    (0..3).for_each(|_| rig.poll());
    assert!(rig.done.is_empty() && rig.watch(0).wasted == 1);
    assert!(!rig.report(0).failed && !rig.report(1).failed);
    rig.disks[0].hold(false);
    rig.poll();
    assert_eq!((rig.done[0].status, data(&rig.done[0])[0]), (Status::Ok, 1));
    rig.done.clear();
    rig.rests();
}

/// Reads earn a hedge for each twenty, and what is refused is counted. Writes are never hedged.
#[test]
fn hedges_keep_to_their_budget() {
    let mut rig = Rig::new(2, hedged());
    warm(&mut rig, 100);
    rig.disks[0].hold(true);
    (0..40).for_each(|_| rig.start(read(0, 8)));
    (0..4).for_each(|_| rig.start(write(8, 8, 7)));
    rig.world.now = rig.world.now + MS;
    (0..3).for_each(|_| rig.poll());
    let watch = rig.watch(0);
    assert_eq!((watch.hedges, watch.refused), (7, 13), "of 140 reads");
    assert_eq!(rig.disks[0].waiting(), 22, "20 reads and two writes");
    rig.disks[0].hold(false);
    (0..3).for_each(|_| rig.poll());
    assert_eq!(rig.done.len(), 44);
    rig.done.clear();
    rig.rests();
}

/// A path goes silent for far more reads than the budget has hedges for: each is answered within a
/// few times what it takes until a hedge is sent, whether they come all at once or one by one.
#[test]
fn the_budget_keeps_no_read_waiting_for_a_silent_path() {
    for depth in [1, 16, 300] {
        let mut rig = Rig::new(2, hedged());
        warm(&mut rig, 100);
        rig.disks[0].hold(true);
        for _ in 0..600u32.div_ceil(depth) {
            let from = rig.world.now;
            (0..depth).for_each(|_| rig.start(read(0, 8)));
            let mut back = 0;
            while back < depth {
                rig.wait();
                back += rig.done.len() as u32;
                assert!(rig.done.drain(..).all(|bio| bio.status == Status::Ok && data(&bio)[0] == 2));
            }
            let took = rig.world.now.since(from);
            assert!(took <= Nanos::from_millis(5), "{took:?} at depth {depth}");
        }
        let watch = rig.watch(0);
        assert!(watch.hedges == watch.won && watch.hedges > 200, "{watch:?}");
        assert!(watch.hedges - watch.free <= 700 / 20, "{watch:?}");
        rig.disks[0].hold(false);
        (0..20).for_each(|_| rig.poll());
        rig.rests();
    }
}

/// Storage that is slow behind all paths gets no hedges past the budget.
#[test]
fn nothing_is_free_where_all_paths_are_silent() {
    let mut rig = Rig::new(2, hedged());
    warm(&mut rig, 100);
    rig.disks.iter().for_each(|disk| disk.hold(true));
    (0..200).for_each(|_| rig.start(read(0, 8)));
    for _ in 0..50 {
        rig.world.now = rig.world.now + MS;
        rig.poll();
    }
    let (a, b) = (rig.watch(0), rig.watch(1));
    assert_eq!((a.free + b.free, a.hedges + b.hedges), (0, 15), "of 300 reads");
    rig.disks.iter().for_each(|disk| disk.hold(false));
    (0..20).for_each(|_| rig.poll());
    rig.done.clear();
    rig.rests();
}

/// Hedges that did not win have a rest. A path that falls silent meanwhile keeps no read waiting.
#[test]
fn a_rest_keeps_no_read_waiting_for_a_silent_path() {
    let mut rig = Rig::new(2, hedged());
    warm(&mut rig, 700);
    for nth in 0..32 {
        rig.disks.iter().for_each(|disk| disk.hold(true));
        rig.start(read(0, 8));
        rig.poll();
        rig.world.now = rig.world.now + MS;
        rig.poll();
        // By turns: the path that was chosen is the first to answer.
        rig.disks[nth % 2].hold(false);
        rig.poll();
        assert_eq!(rig.done.drain(..).count(), 1);
        rig.disks[1 - nth % 2].hold(false);
        (0..3).for_each(|_| rig.poll());
    }
    let lost = (rig.watch(0).hedges + rig.watch(1).hedges, rig.watch(0).won + rig.watch(1).won);
    assert_eq!(lost, (32, 0));
    rig.disks[0].hold(true);
    for _ in 0..4 {
        rig.start(read(0, 8));
        rig.start(read(0, 8));
        let from = rig.world.now;
        for _ in 0..2 {
            rig.wait();
            assert_eq!(data(&rig.done.pop().unwrap())[0], 2);
        }
        let took = rig.world.now.since(from);
        assert!(took <= Nanos::from_millis(5), "{took:?}");
    }
    let watch = rig.watch(0);
    assert_eq!((watch.won, watch.free), (4, 4), "nothing else is had in a rest");
    rig.disks[0].hold(false);
    (0..3).for_each(|_| rig.poll());
    rig.rests();
}

/// In a rest a path that has long answered nothing gets no hedge: not even if it has been asked
/// for something just now. As soon as it answers it does.
#[test]
fn nothing_is_free_in_a_rest_but_where_a_path_answers() {
    let mut rig = Rig::new(2, hedged());
    warm(&mut rig, 700);
    rig.disks.iter().for_each(|disk| disk.hold(true));
    (0..64).for_each(|_| rig.start(read(0, 8)));
    rig.world.now = rig.world.now + MS;
    rig.poll();
    assert_eq!(rig.watch(0).hedges + rig.watch(1).hedges, 38, "of 764 reads");
    // Each path gives back its own, and then the hedges, which have lost.
    rig.disks.iter().for_each(|disk| disk.hold(false));
    (0..4).for_each(|_| rig.poll());
    assert_eq!(rig.done.drain(..).count(), 64);
    rig.world.now = rig.world.now + Nanos::from_millis(100);
    rig.disks.iter().for_each(|disk| disk.hold(true));
    rig.start(read(0, 8));
    rig.world.now = rig.world.now + Nanos::from_millis(4);
    (0..20).for_each(|_| rig.start(read(0, 8)));
    rig.poll();
    assert_eq!((rig.watch(0).free, rig.watch(1).free), (0, 0));
    // The second has its turn behind the first, whose read is looked at again then.
    rig.disks[1].hold(false);
    rig.world.wake = Nanos::NEVER;
    rig.poll();
    assert!(rig.watch(0).free == 0 && rig.world.wake <= rig.world.now, "nobody would wake the lane");
    rig.poll();
    assert_eq!(rig.watch(0).free, 1);
    rig.disks[0].hold(false);
    (0..4).for_each(|_| rig.poll());
    rig.done.clear();
    rig.rests();
}

/// What reads take is known with the first of them, before a window is over.
#[test]
fn a_path_that_hangs_at_once_is_hedged() {
    let mut rig = Rig::new(2, hedged());
    (0..64).for_each(|_| assert_eq!(rig.read().0, Status::Ok));
    rig.disks[0].hold(true);
    let took = [rig.read(), rig.read()].map(|(_, from, took)| (from, took));
    assert_eq!(took, [(2, MS), (2, Nanos(0))]);
    rig.disks[0].hold(false);
    rig.poll();
    rig.rests();
}

/// Of three paths two are silent: a hedge goes to the third, however much that has to do.
#[test]
fn a_hedge_goes_to_no_silent_path() {
    let mut rig = Rig::new(3, hedged());
    warm(&mut rig, 99);
    rig.disks.iter().for_each(|disk| disk.hold(true));
    (0..30).for_each(|_| rig.start(read(0, 8)));
    rig.poll();
    rig.disks[..2].iter().for_each(|disk| disk.release(9));
    rig.poll();
    rig.world.now = rig.world.now + Nanos(MS.0 / 2);
    rig.disks[2].release(1);
    rig.poll();
    assert_eq!(rig.done.drain(..).count(), 19);
    rig.world.now = rig.world.now + Nanos(MS.0 * 7 / 2);
    rig.poll();
    let hedges = [0, 1, 2].map(|path| rig.watch(path).hedges);
    assert_eq!((hedges[0], hedges[1]), (1, 1));
    rig.disks[2].hold(false);
    let mut back = 0;
    while back < 11 {
        rig.wait();
        back += rig.done.drain(..).count();
    }
    assert_eq!([0, 1].map(|path| rig.watch(path).won), [1, 1]);
    rig.disks.iter().for_each(|disk| disk.hold(false));
    (0..4).for_each(|_| rig.poll());
    rig.rests();
}

fn ejecting() -> PathWatch {
    PathWatch { eject_slow: true, ..PathWatch::default() }
}

impl Rig {
    /// A window of reads in which the first path takes `slow` and the others a quarter of a
    /// millisecond: how many the first had.
    fn window(&mut self, slow: Nanos) -> usize {
        let mut slowed = 0;
        for _ in 0..40 {
            self.disks.iter().for_each(|disk| disk.hold(true));
            (0..self.disks.len()).for_each(|_| self.start(read(0, 8)));
            self.poll();
            self.world.now = self.world.now + Nanos(250_000);
            self.disks[1..].iter().for_each(|disk| disk.hold(false));
            self.poll();
            slowed += self.disks[0].waiting();
            self.world.now = self.world.now + slow;
            self.disks[0].hold(false);
            (0..3).for_each(|_| self.poll());
            assert_eq!(self.done.len(), self.disks.len());
            self.done.clear();
        }
        self.world.now = self.world.now + Nanos::from_millis(300);
        slowed
    }
}

/// A path that is slower than the others, window after window, is put out of use, tried with copies
/// of reads when its time is over, and comes back when it does well.
#[test]
fn a_slow_path_is_put_out_of_use_and_comes_back() {
    let (slow, even) = (Nanos::from_millis(5), Nanos(0));
    let mut rig = Rig::new(3, ejecting());
    (0..3).for_each(|_| assert_eq!(rig.window(slow), 40));
    assert!(rig.window(slow) <= 1, "the fourth begins with the verdict");
    assert!(rig.report(0).ejected && !rig.report(0).failed && rig.report(0).ejections == 1);
    assert!(rig.target.status().contains("253:0 A 0 "), "{}", rig.target.status());
    assert_eq!(rig.events(), 0);
    // Still slow when it is tried: no request waits for that, and it is out for twice as long.
    rig.world.now = rig.world.now + Nanos::from_millis(10_000);
    let tried = rig.window(slow);
    assert!(tried > 0 && tried <= 8, "{tried} copies");
    assert!(rig.report(0).ejected);
    rig.world.now = rig.world.now + Nanos::from_millis(15_000);
    assert_eq!(rig.window(even), 0, "out for twice as long");
    rig.world.now = rig.world.now + Nanos::from_millis(5_000);
    rig.window(even);
    rig.window(even);
    assert!(!rig.report(0).ejected, "it has done well");
    assert_eq!((rig.window(even), rig.report(0).ejections), (40, 1));
    rig.rests();
}

/// A trial for which there was nothing to read says nothing: the path is tried again soon.
#[test]
fn a_trial_without_reads_is_not_held_against_the_path() {
    let mut rig = Rig::new(3, ejecting());
    for _ in 0..4 {
        rig.window(Nanos::from_millis(5));
    }
    assert!(rig.report(0).ejected);
    rig.world.now = rig.world.now + Nanos::from_millis(10_000);
    rig.start(write(0, 8, 1));
    rig.wait();
    rig.done.clear();
    rig.world.now = rig.world.now + Nanos::from_millis(10_000);
    for _ in 0..6 {
        rig.window(Nanos(0));
    }
    assert!(!rig.report(0).ejected, "not out for twice as long");
    rig.rests();
}

/// A slow path serves when nothing else is left, and no request fails for its being slow.
#[test]
fn what_is_slow_serves_where_nothing_else_does() {
    let mut rig = Rig::new(2, ejecting());
    for _ in 0..4 {
        rig.window(Nanos::from_millis(5));
    }
    assert!(rig.report(0).ejected);
    rig.disks[1].fail(Status::Transport);
    (0..4).for_each(|_| assert_eq!((rig.read().0, rig.read().1), (Status::Ok, 1)));
    assert!(rig.report(0).ejected && rig.report(1).failed);
}
