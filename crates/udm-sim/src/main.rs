//! `udm-sim`: runs seeds, and stops at the first failure.

use clap::Parser;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use udm_sim::counts::{AccumulateRuns, CombinedRunHash, RunReport, format_count};
use udm_sim::{
    DisturbanceClass, ExcludedDisturbances, RunFailure, RunPlan, RunTotals, clones, lifecycle, nbd,
    nbd_client, nvme, nvme_client, run, verbs, vhost_user,
};

/// Runs udm's targets in a simulated world, one seed after another, and stops at the first failure.
#[derive(Parser, Debug)]
#[command(name = "udm-sim", version)]
struct Options {
    /// Run this seed only
    #[arg(long, value_name = "N", conflicts_with = "seeds")]
    seed: Option<u64>,
    /// Run the seeds from A up to, not including, B
    #[arg(long, value_name = "A..B", value_parser = parse_seed_range)]
    seeds: Option<(u64, u64)>,
    /// Steps per seed
    #[arg(long, value_name = "N", default_value_t = 20_000, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Run seeds for this many minutes
    #[arg(long, value_name = "M", value_parser = parse_minutes)]
    minutes: Option<Duration>,
    /// Number of simulated cores; drawn from the seed by default
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=64))]
    cores: Option<u64>,
    /// Requests in flight per core and device; drawn from the seed by default
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=4096))]
    depth: Option<u64>,
    /// Run worlds of origins and their snapshots instead of other targets
    #[arg(long, group = "cut_worlds", conflicts_with = "bench")]
    snapshots: bool,
    /// Run the worlds of a clone
    #[arg(long, group = "cut_worlds", conflicts_with_all = ["bench", "nbd", "verbs", "nbd_client", "lives", "vhost_user"])]
    clones: bool,
    /// Run the worlds of a clone of an object, whose server stalls, lies, refuses and disappears
    #[arg(long, group = "cut_worlds", conflicts_with_all = ["bench", "nbd", "verbs", "nbd_client", "lives", "vhost_user"])]
    objects: bool,
    /// Run the worlds of a mirror that is switched to its destination
    #[arg(long, group = "cut_worlds", conflicts_with_all = ["bench", "nbd", "verbs", "nbd_client", "lives", "vhost_user"])]
    mirrors: bool,
    /// Run the worlds of a mirror with a log, which continues from it
    #[arg(long, group = "cut_worlds", conflicts_with_all = ["bench", "nbd", "verbs", "nbd_client", "lives", "vhost_user"])]
    mirror_logs: bool,
    /// Give the faults of null devices to disks that no multipath target uses
    #[arg(long, conflicts_with_all = ["bench", "snapshots", "nbd", "verbs", "nbd_client", "lives", "vhost_user"])]
    faulty: bool,
    /// Cut the power at the Nth start or completion of a write or flush on a disk
    #[arg(long, value_name = "N", requires = "cut_worlds", value_parser = clap::value_parser!(u64).range(1..))]
    cut: Option<u64>,
    /// Repeat each seed's run once per write and flush, and cut the power there
    #[arg(long, requires = "cut_worlds", conflicts_with = "cut")]
    every_cut: bool,
    /// Leave out classes of disturbance: crash, remove, paths, errors, suspend, reload, cancel,
    /// messages, delay, torn, flush, trim, long, reopen, pieces, hang, full, prompt, opens, limits,
    /// stacks, dust, lossy, late, wild, between, watch, queues; with --snapshots also merge, small;
    /// with --nbd and --nbd-client also cuts, lost, stalls, nonsense, and with --nbd moves; with
    /// --vhost-user also cuts, lost, nonsense; with --nvme also cuts, lost, nonsense; with
    /// --nvme-client also cuts, lost, stalls, nonsense
    #[arg(long, value_name = "CLASS,...", value_delimiter = ',')]
    without: Vec<DisturbanceClass>,
    /// Print this many of the last events of a failing run
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u64).range(0..=1_000_000))]
    trace: u64,
    /// Report a failure as it is, without shrinking it
    #[arg(long)]
    no_shrink: bool,
    /// Measure one multipath device over this many working paths, and nothing else
    #[arg(long, value_name = "PATHS", value_parser = clap::value_parser!(u64).range(1..=16))]
    bench: Option<u64>,
    /// Run the worlds of the NBD server and its clients
    #[arg(long, conflicts_with_all = ["bench", "snapshots"])]
    nbd: bool,
    /// Run the worlds of the registry and its verbs
    #[arg(long, conflicts_with_all = ["bench", "snapshots", "nbd"])]
    verbs: bool,
    /// Run the worlds of the NBD client and its servers
    #[arg(long, conflicts_with_all = ["bench", "snapshots", "nbd", "verbs"])]
    nbd_client: bool,
    /// Run the worlds of servers that run one after another
    #[arg(long, conflicts_with_all = ["bench", "snapshots", "nbd", "verbs", "nbd_client"])]
    lives: bool,
    /// Run the worlds of disks of virtual machines
    #[arg(long, conflicts_with_all = ["bench", "snapshots", "nbd", "verbs", "nbd_client", "lives"])]
    vhost_user: bool,
    /// Run the worlds of the NVMe/TCP target and its hosts
    #[arg(long, conflicts_with_all = ["bench", "snapshots", "clones", "nbd", "verbs", "nbd_client", "lives", "vhost_user"])]
    nvme: bool,
    /// Run the worlds of the NVMe/TCP initiator and its targets
    #[arg(long, conflicts_with_all = ["bench", "snapshots", "clones", "nbd", "verbs", "nbd_client", "lives", "vhost_user", "nvme"])]
    nvme_client: bool,
}

fn parse_seed_range(word: &str) -> Result<(u64, u64), String> {
    let (a, b) = word.split_once("..").ok_or("a range is written A..B")?;
    let number = |s: &str| s.parse::<u64>().map_err(|_| format!("{s:?} is not a number"));
    let (a, b) = (number(a)?, number(b)?);
    if a < b { Ok((a, b)) } else { Err("there is no seed in it".into()) }
}

fn parse_minutes(word: &str) -> Result<Duration, String> {
    let minutes: f64 = word.parse().map_err(|_| "not a number of minutes".to_string())?;
    if minutes > 0.0 && minutes <= 1e6 {
        Ok(Duration::from_secs_f64(minutes * 60.0))
    } else {
        Err("must be above 0 and at most a million".into())
    }
}

/// Executes a plan, without its counters.
type PlanRunner = fn(&RunPlan) -> Result<(), Box<RunFailure>>;

/// Coverage counters of the runs.
enum CoverageCounters {
    Targets(Box<RunTotals>),
    Nbd(Box<nbd::NbdServerCounts>),
    Verbs(Box<verbs::RegistryCounts>),
    NbdClient(Box<nbd_client::NbdClientCounts>),
    Lives(Box<lifecycle::LifecycleCounts>),
    VhostUser(Box<vhost_user::VhostUserCounts>),
    Clones(Box<clones::CloneCounts>),
    Objects(Box<clones::CloneCounts>),
    Nvme(Box<nvme::NvmeTargetCounts>),
    NvmeClient(Box<nvme_client::NvmeClientCounts>),
    Mirrors(Box<clones::CloneCounts>),
    MirrorLogs(Box<clones::CloneCounts>),
}

/// Adds the counters of a run to `all`.
fn add_counts<C: AccumulateRuns>(
    all: &mut C,
    counts: Result<C, Box<RunFailure>>,
    hash: fn(&C) -> CombinedRunHash,
) -> Result<u64, Box<RunFailure>> {
    let counts = counts?;
    all.add(&counts);
    Ok(hash(&counts).0)
}

impl CoverageCounters {
    fn none(options: &Options) -> CoverageCounters {
        match (options.nbd, options.verbs, options.nbd_client) {
            _ if options.lives => CoverageCounters::Lives(Box::default()),
            _ if options.vhost_user => CoverageCounters::VhostUser(Box::default()),
            _ if options.nvme => CoverageCounters::Nvme(Box::default()),
            _ if options.nvme_client => CoverageCounters::NvmeClient(Box::default()),
            _ if options.clones => CoverageCounters::Clones(Box::default()),
            _ if options.objects => CoverageCounters::Objects(Box::default()),
            _ if options.mirrors => CoverageCounters::Mirrors(Box::default()),
            _ if options.mirror_logs => CoverageCounters::MirrorLogs(Box::default()),
            (true, ..) => CoverageCounters::Nbd(Box::default()),
            (_, true, _) => CoverageCounters::Verbs(Box::default()),
            (.., true) => CoverageCounters::NbdClient(Box::default()),
            _ => CoverageCounters::Targets(Box::new(RunTotals {
                snapshots: options.snapshots,
                ..RunTotals::default()
            })),
        }
    }

    /// Runs `plan` and adds its coverage. With `every_cut`, also runs it once per power cut.
    /// Returns the hash of the events.
    fn run(&mut self, plan: &RunPlan, every_cut: bool) -> Result<u64, Box<RunFailure>> {
        match self {
            CoverageCounters::Targets(all) => {
                let clean = if every_cut { run::run_every_power_cut(plan) } else { run::run(plan) }?;
                all.add(&clean.totals);
                Ok(clean.hash)
            }
            CoverageCounters::Nbd(all) => add_counts(&mut **all, nbd::run(plan), |counts| counts.hash),
            CoverageCounters::Verbs(all) => add_counts(&mut **all, verbs::run(plan), |counts| counts.hash),
            CoverageCounters::NbdClient(all) => {
                add_counts(&mut **all, nbd_client::run(plan), |counts| counts.hash)
            }
            CoverageCounters::Lives(all) => {
                add_counts(&mut **all, lifecycle::run(plan), |counts| counts.hash)
            }
            CoverageCounters::VhostUser(all) => {
                add_counts(&mut **all, vhost_user::run(plan), |counts| counts.hash)
            }
            CoverageCounters::Nvme(all) => add_counts(&mut **all, nvme::run(plan), |counts| counts.hash),
            CoverageCounters::NvmeClient(all) => {
                add_counts(&mut **all, nvme_client::run(plan), |counts| counts.hash)
            }
            CoverageCounters::Clones(all) => {
                let counts = if every_cut { clones::run_every_power_cut(plan) } else { clones::run(plan) };
                add_counts(&mut **all, counts, |counts| counts.hash)
            }
            CoverageCounters::Objects(all) => {
                let run = match every_cut {
                    true => clones::run_every_power_cut_of_clone_of_object,
                    false => clones::run_clone_of_object,
                };
                add_counts(&mut **all, run(plan), |counts| counts.hash)
            }
            CoverageCounters::Mirrors(all) => {
                let run = if every_cut { clones::run_every_power_cut_of_mirror } else { clones::run_mirror };
                add_counts(&mut **all, run(plan), |counts| counts.hash)
            }
            CoverageCounters::MirrorLogs(all) => {
                let run = match every_cut {
                    true => clones::run_every_power_cut_of_logged_mirror,
                    false => clones::run_logged_mirror,
                };
                add_counts(&mut **all, run(plan), |counts| counts.hash)
            }
        }
    }

    fn shrink(&self, failure: RunFailure) -> RunFailure {
        let run: PlanRunner = match self {
            CoverageCounters::Targets(_) => |plan| run::run(plan).map(drop),
            CoverageCounters::Nbd(_) => |plan| nbd::run(plan).map(drop),
            CoverageCounters::Verbs(_) => |plan| verbs::run(plan).map(drop),
            CoverageCounters::NbdClient(_) => |plan| nbd_client::run(plan).map(drop),
            CoverageCounters::Lives(_) => |plan| lifecycle::run(plan).map(drop),
            CoverageCounters::VhostUser(_) => |plan| vhost_user::run(plan).map(drop),
            CoverageCounters::Nvme(_) => |plan| nvme::run(plan).map(drop),
            CoverageCounters::NvmeClient(_) => |plan| nvme_client::run(plan).map(drop),
            CoverageCounters::Clones(_) => |plan| clones::run(plan).map(drop),
            CoverageCounters::Objects(_) => |plan| clones::run_clone_of_object(plan).map(drop),
            CoverageCounters::Mirrors(_) => |plan| clones::run_mirror(plan).map(drop),
            CoverageCounters::MirrorLogs(_) => |plan| clones::run_logged_mirror(plan).map(drop),
        };
        run::shrink_failure_with_runner(failure, &run)
    }

    fn report(&self) -> RunReport {
        match self {
            CoverageCounters::Targets(counts) => counts.report(),
            CoverageCounters::Nbd(counts) => counts.report(),
            CoverageCounters::Verbs(counts) => counts.report(),
            CoverageCounters::NbdClient(counts) => counts.report(),
            CoverageCounters::Lives(counts) => counts.report(),
            CoverageCounters::VhostUser(counts) => counts.report(),
            CoverageCounters::Nvme(counts) => counts.report(),
            CoverageCounters::NvmeClient(counts) => counts.report(),
            CoverageCounters::Clones(counts)
            | CoverageCounters::Objects(counts)
            | CoverageCounters::Mirrors(counts)
            | CoverageCounters::MirrorLogs(counts) => counts.report(),
        }
    }
}

/// Progress of the runs so far.
struct RunProgress {
    seeds: u64,
    covered: CoverageCounters,
    began: Instant,
    shown: Option<Instant>,
}

impl RunProgress {
    fn line(&self) -> String {
        let (s, t) = (self.seeds, self.covered.report());
        let hours = t.simulated as f64 / 3.6e12;
        let seeds = if s == 1 { "1 seed".to_string() } else { format!("{s} seeds") };
        format!(
            "{seeds}, {} steps, {} requests, {hours:.1} simulated hours",
            format_count(t.steps),
            format_count(t.requests)
        )
    }

    /// Shows the progress line: often on a terminal, rarely elsewhere.
    fn show(&mut self) {
        let terminal = std::io::stderr().is_terminal();
        let every = Duration::from_millis(if terminal { 250 } else { 30_000 });
        if self.shown.is_some_and(|at| at.elapsed() < every)
            || (self.shown.is_none() && self.began.elapsed() < every)
        {
            return;
        }
        self.shown = Some(Instant::now());
        let seconds = self.began.elapsed().as_secs_f64();
        let speed = format!(
            "{:.1} seeds/s, {} requests/s",
            self.seeds as f64 / seconds,
            format_count((self.covered.report().requests as f64 / seconds) as u64)
        );
        let (start, end) = if terminal { ("\r\x1b[K", "") } else { ("", "\n") };
        print_ignoring_errors(&mut std::io::stderr(), format_args!("{start}{}, {speed}{end}", self.line()));
    }

    fn clear(&self) {
        if self.shown.is_some() && std::io::stderr().is_terminal() {
            print_ignoring_errors(&mut std::io::stderr(), format_args!("\r\x1b[K"));
        }
    }
}

/// Prints a text. An output that was closed is no reason to stop.
fn print_ignoring_errors(to: &mut dyn Write, text: std::fmt::Arguments<'_>) {
    let _ = to.write_fmt(text);
    let _ = to.flush();
}

fn main() -> ExitCode {
    let options = match Options::try_parse() {
        Ok(options) => options,
        Err(e) if !e.use_stderr() => {
            print_ignoring_errors(&mut std::io::stdout(), format_args!("{e}"));
            return ExitCode::SUCCESS;
        }
        Err(e) => {
            let text = e.to_string();
            // The first paragraph is the error; the rest is advice.
            let lines: Vec<&str> = text.lines().take_while(|l| !l.trim().is_empty()).map(str::trim).collect();
            let line = lines.join(" ");
            print_ignoring_errors(
                &mut std::io::stderr(),
                format_args!("udm-sim: {}\n", line.trim_start_matches("error: ")),
            );
            return ExitCode::from(2);
        }
    };
    run_all_seeds(&options)
}

fn make_run_plan(options: &Options, seed: u64) -> RunPlan {
    RunPlan {
        cores: options.cores.map(|n| n as usize),
        depth: options.depth.map(|n| n as usize),
        without: options.without.iter().fold(ExcludedDisturbances::default(), |w, c| w.and(*c)),
        keep_events: (options.trace as usize).max(1),
        bench: options.bench.map(|n| n as usize),
        snapshots: options.snapshots,
        faulty: options.faulty,
        cut: options.cut,
        ..RunPlan::new(seed, options.steps)
    }
}

fn run_all_seeds(options: &Options) -> ExitCode {
    // With `--minutes` and no seeds, the range is endless.
    let seeds = match (options.seed, options.seeds) {
        (Some(seed), _) => seed..=seed,
        (None, Some((first, end))) => first..=end - 1,
        (None, None) if options.minutes.is_some() => 1..=u64::MAX,
        (None, None) => 1..=100,
    };
    let open_ended = options.seed.is_none() && options.seeds.is_none();
    let mut tally = RunProgress {
        seeds: 0,
        covered: CoverageCounters::none(options),
        began: Instant::now(),
        shown: None,
    };
    let mut hash = None;
    for seed in seeds {
        if options.minutes.is_some_and(|m| tally.began.elapsed() >= m) {
            tally.clear();
            if open_ended {
                break;
            }
            print_ignoring_errors(
                &mut std::io::stderr(),
                format_args!("udm-sim: stopped before seed {seed}: the time is over\n"),
            );
            print_ignoring_errors(
                &mut std::io::stdout(),
                format_args!("{}: not all were run\n", tally.line()),
            );
            return ExitCode::FAILURE;
        }
        match tally.covered.run(&make_run_plan(options, seed), options.every_cut) {
            Ok(of_seed) => {
                tally.seeds += 1;
                hash = Some(of_seed);
            }
            Err(failure) => {
                tally.clear();
                shrink_and_print_failure(*failure, options, &tally);
                return ExitCode::FAILURE;
            }
        }
        tally.show();
    }
    tally.clear();
    print_coverage_and_verdict(&tally, hash, options)
}

/// Prints the coverage and the verdict. Runs that covered nothing count as a failure, because they
/// would look clean.
fn print_coverage_and_verdict(tally: &RunProgress, hash: Option<u64>, options: &Options) -> ExitCode {
    let t = tally.covered.report();
    let nothing = t.nothing;
    let left_out: Vec<&str> = options.without.iter().map(|class| class.name()).collect();
    let verdict = match nothing {
        Some(why) => format!("nothing was tested: {why}"),
        None if options.bench.is_some() => "measured, with all well; nothing else was tested".into(),
        None if left_out.is_empty() => "clean".into(),
        None => format!("clean, without {}", left_out.join(",")),
    };
    let without = options.without.iter().fold(ExcludedDisturbances::default(), |w, c| w.and(*c));
    let missed = match (t.uncovered(without), options.bench) {
        (missed, None) if !missed.is_empty() => format!("never came: {}\n", missed.join(", ")),
        _ => String::new(),
    };
    let rate = (t.requests as f64 / tally.began.elapsed().as_secs_f64()) as u64;
    let mut out = std::io::stdout();
    print_ignoring_errors(
        &mut out,
        format_args!(
            "{}: {verdict}\n{}{missed}{} requests/s\n",
            tally.line(),
            t.coverage,
            format_count(rate)
        ),
    );
    if let (1, Some(hash)) = (tally.seeds, hash) {
        print_ignoring_errors(&mut out, format_args!("trace {hash:016x}\n"));
    }
    if nothing.is_some() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn shrink_and_print_failure(failure: RunFailure, options: &Options, tally: &RunProgress) {
    let mut out = std::io::stdout();
    let first = failure.clone();
    let kind = match (options.nbd, options.verbs, options.nbd_client) {
        (true, ..) => "--nbd ",
        (_, true, _) => "--verbs ",
        (.., true) => "--nbd-client ",
        _ if options.lives => "--lives ",
        _ if options.vhost_user => "--vhost-user ",
        _ if options.clones => "--clones ",
        _ if options.objects => "--objects ",
        _ if options.mirrors => "--mirrors ",
        _ if options.nvme => "--nvme ",
        _ if options.nvme_client => "--nvme-client ",
        _ if options.mirror_logs => "--mirror-logs ",
        _ => "",
    };
    let small = if options.no_shrink { failure } else { tally.covered.shrink(failure) };
    for line in &small.trace {
        print_ignoring_errors(&mut out, format_args!("{line}\n"));
    }
    print_ignoring_errors(
        &mut out,
        format_args!(
            "seed {} failed at step {}, revision {}\n",
            first.plan.seed,
            first.plan.steps,
            env!("UDM_REVISION")
        ),
    );
    print_ignoring_errors(
        &mut out,
        format_args!("  {}\n  replay: udm-sim {kind}{}\n", first.what, first.plan.options()),
    );
    if small.plan != first.plan {
        print_ignoring_errors(
            &mut out,
            format_args!(
                "smaller, with the trace above:\n  {}\n  replay: udm-sim {kind}{}\n",
                small.what,
                small.plan.options()
            ),
        );
    }
    print_ignoring_errors(&mut out, format_args!("before it: {}\n", tally.line()));
}
