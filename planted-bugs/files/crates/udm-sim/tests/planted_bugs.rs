//! The simulator must find each planted bug within a bounded number of seeds.
#![expect(clippy::print_stdout, reason = "the test prints a table of the bugs found")]

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use udm_core::bugs::{Bug, SimWorldKind, plant_bug};
use udm_sim::run::RunFailure;
use udm_sim::{DisturbanceClass, ExcludedDisturbances, RunPlan};
use udm_sim::{clones, lifecycle, nbd, nbd_client, nvme, nvme_client, run, verbs, vhost_user};

/// Steps per seed, and the number of seeds in which a bug must be found.
const STEPS: u64 = 5000;
const SEEDS_MAX: u64 = 2000;

/// Bugs whose first hundreds of seeds find nothing, each with the seed at which the search begins.
/// This saves most of the time of the test. If a change of a world moves such a bug, the search
/// takes longer, but still has [`SEEDS_MAX`] seeds.
const FIRST_SEEDS: &[(Bug, u64)] = &[
    (Bug::AnswerToNothing, 440),
    (Bug::BadBlocksStale, 1240),
    (Bug::CloneFuaNotCommitted, 190),
    (Bug::CorruptionForgotten, 480),
    (Bug::CountedEntryOverwritten, 80),
    (Bug::DrainNotRung, 260),
    (Bug::DrainOutlives, 420),
    (Bug::DroppedWriteSent, 280),
    (Bug::EarlyEnds, 320),
    (Bug::FailNotAtomic, 270),
    (Bug::FlushFirstForgotten, 130),
    (Bug::HandoverUnsettled, 500),
    (Bug::HedgeUnpaid, 120),
    (Bug::LateAnswerBelieved, 120),
    (Bug::LoserTaken, 120),
    (Bug::MergeTwice, 910),
    (Bug::MergeUnflushed, 190),
    (Bug::MergedFlags, 120),
    (Bug::MergedUnsound, 1110),
    (Bug::MirrorCleanedInWrite, 170),
    (Bug::MirrorDegradedCleans, 165),
    // The copies of so small a disk are nearly always over before a write of a part comes.
    (Bug::MirrorPartNotCopied, 1635),
    // Seed 102 shows it too, after minutes: a write that never completes, and its reads.
    (Bug::NoKick, 290),
    (Bug::NvmeAnaEventLost, 40),
    (Bug::NvmeAnaEventNotRaised, 30),
    (Bug::NvmeAnaStateIgnored, 100),
    (Bug::NvmeChangedLogNotRead, 40),
    (Bug::NvmeDelayedLost, 155),
    (Bug::NvmeDigestNotChecked, 345),
    (Bug::NvmeHostHeaderDigestIgnored, 60),
    (Bug::NvmeKeepAliveUnwatched, 60),
    (Bug::NvmeOtherNamespaceTaken, 205),
    (Bug::NvmeR2tBelieved, 20),
    (Bug::NvmeReauthenticationIgnored, 110),
    (Bug::NvmeRetryBeforeFence, 18),
    (Bug::NvmeShortReadTaken, 250),
    (Bug::NvmeWriteAnsweredEarly, 34),
    (Bug::OutIsFailed, 310),
    (Bug::OwnWorkDropped, 290),
    (Bug::ParkedMissReturn, 165),
    (Bug::PartTaken, 300),
    (Bug::SeenTooLate, 410),
    (Bug::SharedTagNotRung, 165),
    (Bug::SharedTagTwice, 230),
    (Bug::SpentTableCounts, 160),
    (Bug::TrialBelieved, 1070),
    (Bug::WayNotDrained, 200),
];

/// Bugs that need more seeds than this test has time for. Long runs with `--bug` find them.
const RARE: [Bug; 3] = [Bug::PreparedNotBusy, Bug::EndMarkWaits, Bug::GivenUpUnheard];

/// Bugs that need preemption of a core's turn.
const BETWEEN: [Bug; 2] = [Bug::FailNotAtomic, Bug::SeenTooLate];

/// Runs `plan` in a world of kind `world`.
fn try_one(world: SimWorldKind, plan: &RunPlan) -> Result<(), Box<RunFailure>> {
    match world {
        SimWorldKind::Devices => run::run(plan).map(drop),
        SimWorldKind::Faults => run::run(&RunPlan { faulty: true, ..plan.clone() }).map(drop),
        SimWorldKind::Snapshots => run::run(&RunPlan { snapshots: true, ..plan.clone() }).map(drop),
        SimWorldKind::Nbd => nbd::run(plan).map(drop),
        SimWorldKind::Verbs => verbs::run(plan).map(drop),
        SimWorldKind::NbdClient => nbd_client::run(plan).map(drop),
        SimWorldKind::Lives => lifecycle::run(plan).map(drop),
        SimWorldKind::VhostUser => vhost_user::run(plan).map(drop),
        SimWorldKind::Clones => clones::run(plan).map(drop),
        SimWorldKind::Objects => clones::run_clone_of_object(plan).map(drop),
        SimWorldKind::Mirrors => clones::run_mirror(plan).map(drop),
        SimWorldKind::Nvme => nvme::run(plan).map(drop),
        SimWorldKind::NvmeClient => nvme_client::run(plan).map(drop),
        SimWorldKind::MirrorLogs => clones::run_logged_mirror(plan).map(drop),
    }
}

/// Returns the plan of `seed` for `bug`. A bug that is rare otherwise gets only the disturbances
/// that it needs.
fn plan(bug: Bug, seed: u64) -> RunPlan {
    let kept = [DisturbanceClass::Paths, DisturbanceClass::Messages, DisturbanceClass::Delay];
    let is_left_out = |class: &DisturbanceClass| match bug {
        Bug::ParkedMissReturn => !kept.contains(class),
        // A crash or a cancel ends the endless loop of this bug.
        Bug::CopyHandedBack => [DisturbanceClass::Crash, DisturbanceClass::Cancel].contains(class),
        // The marked snapshot must still exist after the power cut.
        Bug::MarkNotKept => {
            [DisturbanceClass::Remove, DisturbanceClass::Reload, DisturbanceClass::Merge].contains(class)
        }
        _ => false,
    };
    let left_out = DisturbanceClass::ALL.into_iter().filter(is_left_out);
    RunPlan {
        without: left_out.fold(ExcludedDisturbances::default(), ExcludedDisturbances::and),
        ..RunPlan::new(seed, STEPS)
    }
}

/// Returns a line of the table, or `None` if `bug` is not found. A seed counts only if it fails
/// with the bug and, up to the same step, passes without it.
fn look_for(bug: Bug, world: SimWorldKind) -> Option<String> {
    let first = FIRST_SEEDS.iter().find(|(other, _)| *other == bug).map_or(1, |(_, seed)| *seed);
    plant_bug(Some(bug));
    let found = (first..first + SEEDS_MAX).find_map(|seed| try_one(world, &plan(bug, seed)).err());
    plant_bug(None);
    let failure = found?;
    if let Err(anyway) = try_one(world, &failure.plan) {
        panic!("seed {} fails without {bug:?} too: {}", anyway.plan.seed, anyway.what);
    }
    let line = failure.what.lines().next().unwrap_or_default();
    let shown: String = line.chars().take(150).collect();
    Some(format!("| {bug:?} | {} | {} | {shown} |", failure.plan.seed, failure.plan.steps))
}

/// A bug is switched on per thread, so several are searched for in parallel.
#[test]
fn every_planted_bug_is_found() {
    let (next, found) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let look = || {
        while let Some((bug, world)) = Bug::ALL.get(next.fetch_add(1, Ordering::Relaxed)) {
            if RARE.contains(bug) {
                continue;
            }
            // Searched before the lock is taken, because the lock is held until the end of the
            // statement.
            let line = look_for(*bug, *world);
            found.lock().unwrap().push((*bug as usize, *bug, line));
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(look))));
    let mut found = found.into_inner().unwrap();
    found.sort_unstable_by_key(|(at, ..)| *at);
    found.iter().filter_map(|(.., line)| line.as_ref()).for_each(|line| println!("{line}"));
    let missed: Vec<Bug> = found.iter().filter(|(.., line)| line.is_none()).map(|(_, bug, _)| *bug).collect();
    assert!(missed.is_empty(), "not found in {SEEDS_MAX} seeds: {missed:?}");
}

/// Bugs that need preemption are not found without it.
#[test]
fn whole_turns_do_not_see_what_happens_between() {
    for bug in BETWEEN {
        plant_bug(Some(bug));
        for seed in 1..=60 {
            let plan = RunPlan {
                without: ExcludedDisturbances::default().and(DisturbanceClass::Between),
                ..RunPlan::new(seed, STEPS)
            };
            if let Err(failure) = run::run(&plan) {
                panic!("{bug:?} shows in whole turns too, seed {seed}: {}", failure.what);
            }
        }
        plant_bug(None);
    }
}
