//! Several cores: no bio is lost or completed twice while paths are failed, reinstated, held and
//! switched. Loads return to zero, and round-robin is fair. First the cores are stepped in an order
//! drawn by proptest, then they are threads.

mod multipath_rig;

use multipath_rig::{EventCounter, build, disks};
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use udm_core::{
    Batch, Bio, CoreId, CoreLaneState, Cx, Device, DeviceControlError, DeviceId, Lane, Limits, Nanos, Op,
    Sectors,
};
use udm_dm::testing::{SteppedTestCores, bio_without_data};
use udm_dm::{MultipathTarget, Target};

/// One step of the test.
#[derive(Clone, Debug)]
enum CoreAction {
    Submit { core: usize, bios: u64 },
    Poll { core: usize },
    Hold { disk: usize, hold: bool },
    Break { disk: usize, broken: bool },
    Message(String),
}

fn step() -> impl Strategy<Value = CoreAction> {
    let message = prop_oneof![
        (0..4).prop_map(|p| format!("fail_path 253:{p}")),
        (0..4).prop_map(|p| format!("reinstate_path 253:{p}")),
        (1..3).prop_map(|g| format!("switch_group {g}")),
        (1..3).prop_map(|g| format!("disable_group {g}")),
        (1..3).prop_map(|g| format!("enable_group {g}")),
    ];
    prop_oneof![
        4 => (0..3usize, 1..40u64).prop_map(|(core, bios)| CoreAction::Submit { core, bios }),
        4 => (0..3usize).prop_map(|core| CoreAction::Poll { core }),
        1 => (0..4usize, any::<bool>()).prop_map(|(disk, hold)| CoreAction::Hold { disk, hold }),
        1 => (0..4usize, any::<bool>()).prop_map(|(disk, broken)| CoreAction::Break { disk, broken }),
        3 => message.prop_map(CoreAction::Message),
    ]
}

/// Counts completed bios by cookie.
fn count_completions(back: &mut [u8], done: Batch) {
    for bio in done {
        assert!(bio.status.is_ok(), "with queue_if_no_path nothing fails: {bio:?}");
        back[bio.cookie as usize] += 1;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Every bio completes once, on its own core, without an error; at the end all loads are zero.
    #[test]
    fn nothing_is_lost(steps in prop::collection::vec(step(), 1..80), groups in prop::sample::select(vec![
        "round-robin 0 2 0 253:0 253:1 round-robin 0 2 0 253:2 253:3",
        "queue-length 0 2 0 253:0 253:1 service-time 0 2 2 253:2 1 1 253:3 1 5",
        "service-time 0 2 0 253:0 253:1 queue-length 0 3 0 253:2 253:3 253:2",
    ])) {
        let (disks, mut resolver) = disks(4);
        let target = build(&format!("1 queue_if_no_path 0 2 1 {groups}"), &mut resolver).unwrap();
        target.attach(Arc::new(EventCounter::default()));
        let mut world = SteppedTestCores::new(3);
        let mut lanes: Vec<_> = (0..3).map(|core| world.turn(core, |cx| target.open(cx)).unwrap()).collect();
        let mut home = Vec::new();
        let mut back = Vec::new();
        for step in steps {
            match step {
                CoreAction::Submit { core, bios } => {
                    let bios: Vec<_> = (0..bios).map(|i| {
                        let mut bio = bio_without_data(Op::Read, i, 1 + i % 7);
                        bio.cookie = back.len() as u64;
                        home.push(core);
                        back.push(0);
                        bio
                    }).collect();
                    world.submit(core, &mut *lanes[core], bios);
                }
                CoreAction::Poll { core } => {
                    let done = world.poll(core, &mut *lanes[core]);
                    prop_assert!(done.iter().all(|bio| home[bio.cookie as usize] == core));
                    count_completions(&mut back, done);
                }
                CoreAction::Hold { disk, hold } => disks[disk].hold(hold),
                CoreAction::Break { disk, broken } => disks[disk].fail(match broken {
                    true => udm_core::Status::IoErr,
                    false => udm_core::Status::Ok,
                }),
                CoreAction::Message(text) => {
                    let words: Vec<_> = text.split(' ').map(String::from).collect();
                    target.message(&words, &mut resolver).unwrap();
                }
            }
        }
        // Repair everything; then all bios complete in a few polls.
        for (disk, name) in disks.iter().zip(0..) {
            disk.hold(false);
            disk.fail(udm_core::Status::Ok);
            target.message(&["reinstate_path".into(), format!("253:{name}")], &mut resolver).unwrap();
        }
        for _ in 0..4 {
            for (core, lane) in lanes.iter_mut().enumerate() {
                count_completions(&mut back, world.poll(core, &mut **lane));
            }
        }
        prop_assert!(back.iter().all(|&n| n == 1), "{back:?}");
        for group in target.status().split(" 253:").skip(1) {
            let mut words = group.split_whitespace();
            prop_assert_eq!(words.nth(1), Some("A"), "all paths are back");
            prop_assert!(matches!(words.nth(1), None | Some("0" | "D" | "E" | "A")), "load left: {}", group);
        }
        let served: u64 = target.path_reports().iter().map(|r| r.bios - r.errors).sum();
        prop_assert_eq!(served, back.len() as u64);
    }

    /// For any batches on c cores, the counts of the paths differ by at most c.
    #[test]
    fn round_robin_is_fair(batches in prop::collection::vec((0..3usize, 1..50u64), 1..60), paths in 1..5usize) {
        let (disks, mut resolver) = disks(4);
        let names: Vec<_> = (0..paths).map(|p| format!("253:{p}")).collect();
        let params = format!("0 0 1 1 round-robin 0 {paths} 0 {}", names.join(" "));
        let target = build(&params, &mut resolver).unwrap();
        let mut world = SteppedTestCores::new(3);
        let mut lanes: Vec<_> = (0..3).map(|core| world.turn(core, |cx| target.open(cx)).unwrap()).collect();
        let mut sent = 0;
        for (core, bios) in batches {
            world.submit(core, &mut *lanes[core], (0..bios).map(|_| bio_without_data(Op::Read, 0, 8)));
            sent += bios as usize;
            prop_assert_eq!(world.poll(core, &mut *lanes[core]).len(), bios as usize);
        }
        let counts: Vec<_> = disks[..paths].iter().map(|d| d.take_log().len()).collect();
        prop_assert_eq!(counts.iter().sum::<usize>(), sent);
        let spread = counts.iter().max().unwrap() - counts.iter().min().unwrap();
        prop_assert!(spread <= 3, "{counts:?}");
    }
}

/// Cores see each other's load: if another core keeps a path busy, the idle path is chosen.
#[test]
fn cores_see_each_others_load() {
    for selector in ["queue-length", "service-time"] {
        let (disks, mut resolver) = disks(2);
        let target = build(&format!("0 0 1 1 {selector} 0 2 0 253:0 253:1"), &mut resolver).unwrap();
        let mut world = SteppedTestCores::new(2);
        let mut lanes: Vec<_> = (0..2).map(|core| world.turn(core, |cx| target.open(cx)).unwrap()).collect();
        disks[0].hold(true);
        world.submit(0, &mut *lanes[0], [bio_without_data(Op::Read, 0, 8)]);
        // A core publishes its load at the end of its turn.
        assert!(world.poll(0, &mut *lanes[0]).is_empty());
        for _ in 0..4 {
            world.run(1, &mut *lanes[1], bio_without_data(Op::Read, 0, 8));
        }
        assert_eq!(disks[1].take_log().len(), 4, "{selector}");
        disks[0].hold(false);
        assert_eq!(world.poll(0, &mut *lanes[0]).len(), 1);
    }
}

/// With io-affinity each core has its own path, and uses it whenever it works, whatever happens to
/// the others.
#[test]
fn no_core_uses_the_path_of_another_while_its_own_works() {
    let (disks, mut resolver) = disks(4);
    let masks = "253:0 1 253:1 2 253:2 4 253:3 8";
    let target = build(&format!("0 0 1 1 io-affinity 0 4 1 {masks}"), &mut resolver).unwrap();
    let mut world = SteppedTestCores::new(4);
    let mut lanes: Vec<_> = (0..4).map(|core| world.turn(core, |cx| target.open(cx)).unwrap()).collect();
    let mut round = |world: &mut SteppedTestCores, core: usize| {
        for bios in [1, 7, 32] {
            let batch: Vec<_> = (0..bios).map(|n| bio_without_data(Op::Read, 8 * n, 8)).collect();
            world.submit(core, &mut *lanes[core], batch);
            assert_eq!(world.poll(core, &mut *lanes[core]).len() as u64, bios);
        }
        disks.iter().map(|disk| disk.take_log().len()).collect::<Vec<_>>()
    };
    let only = |path: usize| (0..4).map(|at| if at == path { 40 } else { 0 }).collect::<Vec<_>>();
    for lost in 0..4 {
        (0..4).for_each(|core| assert_eq!(round(&mut world, core), only(core), "all work"));
        let mut tell = |verb: &str| {
            target.message(&[verb.into(), format!("253:{lost}")], &mut resolver).expect("a good message");
        };
        tell("fail_path");
        for core in 0..4 {
            let next = if lost == 0 { 1 } else { 0 };
            assert_eq!(
                round(&mut world, core),
                only(if core == lost { next } else { core }),
                "{lost} is lost"
            );
        }
        tell("reinstate_path");
    }
}

/// Two threads, while a third fails and reinstates paths as fast as it can: every bio returns to
/// its thread once.
#[test]
fn threads() {
    let (_disks, mut resolver) = disks(4);
    let params = "1 queue_if_no_path 0 2 1 queue-length 0 2 0 253:0 253:1 service-time 0 2 0 253:2 253:3";
    let target = build(params, &mut resolver).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..2)
            .map(|core| {
                let target = &target;
                scope.spawn(move || {
                    let mut state = CoreLaneState::new(CoreId(core), 2, 0, None);
                    let mut cx = state.cx(Nanos(0));
                    let mut lane = target.open(&mut cx).expect("disks open");
                    let mut batch: Batch = (0..32).map(|_| bio_without_data(Op::Read, 0, 8)).collect();
                    let mut done = Batch::new();
                    for _ in 0..2000 {
                        batch.iter_mut().for_each(|bio| bio.start());
                        lane.submit(&mut batch, &mut cx);
                        // Queued bios wait for the third thread, which never leaves all paths
                        // failed for long.
                        while done.len() < 32 {
                            lane.poll(&mut done, &mut cx);
                        }
                        assert_eq!(done.len(), 32);
                        for bio in &mut done {
                            bio.finish();
                            assert!(bio.status.is_ok());
                        }
                        std::mem::swap(&mut batch, &mut done);
                    }
                })
            })
            .collect();
        let meddler = scope.spawn(|| {
            let mut tell = |verb: &str, path: usize| {
                target.message(&[verb.into(), format!("253:{path}")], &mut resolver).expect("a good message");
            };
            let mut n = 0;
            while !stop.load(Ordering::Relaxed) {
                n += 1;
                (0..1 + n % 4).for_each(|p| tell("fail_path", p));
                (0..4).rev().for_each(|p| tell("reinstate_path", p));
            }
        });
        let results: Vec<_> = workers.into_iter().map(|w| w.join()).collect();
        stop.store(true, Ordering::Relaxed);
        meddler.join().expect("the third thread ends");
        results.into_iter().for_each(|r| r.expect("a worker ends"));
    });
    assert_eq!(target.path_reports().iter().map(|r| r.bios).sum::<u64>(), 2 * 2000 * 32);
    assert!(target.status().contains("253:0 A"));
    for load in target.status().split(" 253:").skip(1).map(|p| p.split(' ').nth(3)) {
        assert_eq!(load, Some("0"), "{}", target.status());
    }
}

/// A device that counts the polls of its lanes and requests a poll at time 99.
struct PollCountDevice(DeviceId, Arc<std::sync::atomic::AtomicU64>);

impl Device for PollCountDevice {
    fn id(&self) -> DeviceId {
        self.0
    }
    fn open(&self, _cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        Ok(Box::new(PollCountLane(self.1.clone(), Batch::new())))
    }
    fn limits(&self) -> Limits {
        Limits::new(Sectors(multipath_rig::SIZE))
    }
}

struct PollCountLane(Arc<std::sync::atomic::AtomicU64>, Batch);

impl Lane for PollCountLane {
    fn submit(&mut self, batch: &mut Batch, _cx: &mut Cx<'_>) {
        self.1.append(batch);
    }
    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
        done.append(&mut self.1);
        cx.wake_at(Nanos(99));
    }
}

/// A path without bios is polled before the core may sleep. It may be a mapped device with a
/// suspend message in its inbox, or wait for a time.
#[test]
fn idle_paths_are_polled() {
    let (_, mut resolver) = disks(0);
    let polls: Vec<Arc<std::sync::atomic::AtomicU64>> = (0..2).map(|_| Arc::default()).collect();
    for (minor, polls) in (0..).zip(&polls) {
        let clock = PollCountDevice(DeviceId::new(), polls.clone());
        resolver.add(&format!("clock{minor}"), udm_core::DevNo { major: 253, minor }, Arc::new(clock));
    }
    let params = "0 0 2 1 round-robin 0 1 0 253:0 round-robin 0 1 0 253:1";
    let target = build(params, &mut resolver).unwrap();
    let mut world = SteppedTestCores::new(1);
    let mut lane = world.turn(0, |cx| target.open(cx)).unwrap();
    let count = |i: usize| polls[i].swap(0, Ordering::Relaxed);
    world.poll(0, &mut *lane);
    assert_eq!((count(0), count(1), world.wake), (1, 1, Nanos(99)));
    world.wake = Nanos::NEVER;
    world.submit(0, &mut *lane, [Bio::new()]);
    assert_eq!(world.poll(0, &mut *lane).len(), 1);
    assert_eq!(
        (count(0), count(1), world.wake),
        (1, 0, world.now),
        "not in a poll that brings bios, but the next is due"
    );
    world.wake = Nanos::NEVER;
    world.poll(0, &mut *lane);
    assert_eq!((count(0), count(1), world.wake), (1, 1, Nanos(99)));
}
