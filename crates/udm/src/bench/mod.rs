//! `udm bench`: the command line of `udm-bench`, with its signals and terminal output. The
//! measurement itself is in `udm-bench`.

mod device;
mod file;
mod line;
pub mod progress;
pub mod stop;

pub use line::add_unknown_option_hint;

use crate::log;
use crate::output::{print_json_to_stdout, print_to_stdout};
use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum, value_parser};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use udm_bench::{
    DmLayerComparisonOptions, FioLoadOptions, JobFile, JobOptions, LoadMeasurementPlan, PATHS_MAX,
    PathSampler, SnapshotCostOptions, TEXT_MAX, compare_dm_layers, measure_jobs, measure_snapshot_costs,
    parse_job_file,
};
use udm_wire::uri::{DeviceUri, NbdUri};

/// The arguments of `udm bench`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Each job is a thread that drives the device directly, like a core of udm. Latencies come from one clock reading per turn: requests that complete in one \
poll have the same end time, and a latency shorter than a turn is shown as one turn.\n\n\
Examples:\n  udm bench --device d='0 8388608 linear null:size=4G 0' --rw randread --bs 4k --iodepth 32 --runtime 5 --time_based\n  \
udm bench --device mem:1G --rw randwrite --verify crc32c\n  \
udm bench --nbd 'nbd+unix:///disk?socket=/tmp/udm.sock' --rw randread --iodepth 256 --runtime 5 --time_based --norandommap\n  \
udm bench --vhost-user /tmp/vm.sock --rw randread --iodepth 32 --runtime 5 --time_based --norandommap\n  \
udm bench --compare")]
pub struct BenchArgs {
    /// A job file of fio: sections with options. The device of a job is its filename, or --device
    /// for all. Options that only choose fio's way of access are ignored and listed
    #[arg(value_name = "FILE", conflicts_with_all = ["JobOptions", "FioLoadOptions", "nbd", "vhost_user", "floor", "comparison"])]
    file: Option<PathBuf>,
    /// The device to measure: a device with its table, a URI or a path. If there are several, the
    /// last is measured, and its table may name the others as @NAME
    #[arg(
        long = "device",
        value_name = "NAME=TABLE|NAME=DEVICE|DEVICE",
        required_unless_present_any = ["file", "filename", "ioengine", "compare", "snapshots", "nbd", "vhost_user", "floor"]
    )]
    devices: Vec<String>,
    /// Measure an export of an NBD server: nbd://HOST[:PORT]/EXPORT or
    /// nbd+unix:///EXPORT?socket=PATH. Each job has its own connection
    #[arg(long, value_name = "URI", conflicts_with_all = ["devices", "compare", "snapshots"])]
    nbd: Option<String>,
    /// Measure a disk of a vhost-user-blk server that listens at this socket. Each job has its own
    /// queue
    #[arg(long, value_name = "PATH", conflicts_with_all = ["devices", "compare", "snapshots", "nbd"])]
    vhost_user: Option<PathBuf>,
    /// Measure the upper limit of --nbd: the same client against a loop that only reads and writes
    /// a Unix socket. With =vhost-user, the upper limit of --vhost-user: against a thread that only
    /// copies each block
    #[arg(
        long,
        value_name = "OF",
        value_enum,
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "nbd",
        conflicts_with_all = ["devices", "compare", "snapshots", "nbd", "vhost_user"]
    )]
    floor: Option<BenchFloor>,
    /// With --vhost-user and --floor=vhost-user: the jobs poll for completions and ask for no
    /// notifications. Without it they sleep, as a machine does
    #[arg(long, conflicts_with_all = ["devices", "compare", "snapshots", "nbd"])]
    poll: bool,
    /// With --vhost-user: packed rings instead of split ones
    #[arg(long, requires = "vhost_user")]
    packed: bool,
    /// Compare layers over a null device with each other, and with the same layers behind one lock
    #[arg(long, group = "comparison", conflicts_with = "devices")]
    compare: bool,
    /// Measure first writes to origins and snapshots, compared with an origin whose exceptions are
    /// behind one lock and copied by one thread; writes to an origin whose chunks are all copied,
    /// or whose snapshot is removed; and reads with few and with many exceptions. Takes about two
    /// minutes; Ctrl-C prints the results so far
    #[arg(long, group = "comparison", conflicts_with = "devices")]
    snapshots: bool,
    /// With --compare: number of paths of the multipath device
    #[arg(long, value_name = "NUMBER", requires = "compare", default_value_t = 2,
        value_parser = value_parser!(u16).range(1..=PATHS_MAX as i64))]
    paths: u16,
    /// With --compare or --snapshots: take seconds instead of minutes
    #[arg(long, requires = "comparison")]
    quick: bool,
    #[command(flatten)]
    options: JobOptions,
    /// Format of the report
    #[arg(long = "output-format", value_name = "FORMAT", value_enum, default_value_t = BenchReportFormat::Normal)]
    output_format: BenchReportFormat,
    /// Also write a page with plots to this file: throughput over time, per job and per path, and
    /// latency percentiles
    #[arg(long, value_name = "FILE", conflicts_with = "comparison")]
    html: Option<PathBuf>,
    /// Print JSON, in fio's layout
    #[arg(long)]
    json: bool,
}

/// The connection whose upper limit is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BenchFloor {
    /// An NBD socket
    Nbd,
    /// Rings in shared memory
    VhostUser,
}

/// The format of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BenchReportFormat {
    /// fio's summary
    Normal,
    /// fio's JSON
    Json,
    /// fio's JSON with a histogram of the latencies
    #[value(name = "json+")]
    JsonPlus,
}

impl BenchArgs {
    fn format(&self) -> BenchReportFormat {
        if self.json && self.output_format == BenchReportFormat::Normal {
            BenchReportFormat::Json
        } else {
            self.output_format
        }
    }
}

/// Runs the load and prints the report.
///
/// # Errors
/// The load cannot start, or a request failed; in the second case the report is printed first.
pub fn run(args: &BenchArgs) -> Result<ExitCode> {
    let stop = stop::install_stop_handler().context("bench: signals")?;
    if args.compare {
        run_layer_comparison_bench(args, stop)?;
        return Ok(stop::measurement_exit_code(stop));
    }
    if args.snapshots {
        run_snapshot_bench(args, stop)?;
        return Ok(stop::measurement_exit_code(stop));
    }
    let server = args.nbd.as_deref().map(parse_nbd_uri_arg).transpose()?;
    let JobFile { jobs, devices, .. } = load_bench_jobs(args)?;
    let loads: Vec<&FioLoadOptions> = jobs.iter().map(|job| &job.load).collect();
    let (mut mapped, mut watch) = (None, None);
    let report = progress::run_with_bench_progress(&loads, |progress| {
        let run = LoadMeasurementPlan { load: loads[0], progress, stop };
        match (&server, &args.vhost_user, args.floor) {
            (Some(uri), ..) => run.measure_nbd(uri).context("bench"),
            (_, Some(socket), _) => run.measure_vhost_user(socket, args.poll, args.packed).context("bench"),
            (_, _, Some(BenchFloor::Nbd)) => run.measure_floor().context("bench"),
            (_, _, Some(BenchFloor::VhostUser)) => run.measure_copy_floor(args.poll).context("bench"),
            (None, None, None) => measure_jobs(&jobs, progress, stop, |core_set| {
                let (devices, all) = device::open_bench_job_devices(core_set, &args.devices, &devices, stop)?;
                let all = Arc::new(all);
                if args.html.is_some() {
                    watch = Some(PathSampler::start(Arc::clone(&all)).context("bench")?);
                }
                // The devices must stay open until the measurement has ended.
                mapped = Some(all);
                Ok(devices)
            }),
        }
    })?;
    let paths = watch.map(PathSampler::end).unwrap_or_default();
    drop(mapped);
    let named = devices.iter().find_map(|device| device.filename.as_ref()).or(args.devices.last());
    let disk = args.vhost_user.as_deref().and_then(Path::to_str);
    let device = args.nbd.as_deref().or(disk).or(named.map(String::as_str));
    match args.format() {
        BenchReportFormat::Normal => print_to_stdout(&report.text())?,
        format => print_json_to_stdout(&report.json(device, format == BenchReportFormat::JsonPlus))?,
    }
    if let Some(file) = &args.html {
        fs::write(file, report.html(device, &paths)).with_context(|| format!("--html {}", file.display()))?;
    }
    match report.failure() {
        Some((job, failure)) => bail!("{job}: {failure}"),
        None => Ok(stop::measurement_exit_code(stop)),
    }
}

/// Reads the jobs of the file, or those of the command line.
fn load_bench_jobs(args: &BenchArgs) -> Result<JobFile> {
    let (file, from) = match &args.file {
        None => {
            let words = std::env::args_os().skip_while(|word| word != "bench").skip(1);
            (line::parse_bench_jobs_from_args(args, words)?, "bench".to_owned())
        }
        Some(path) => {
            let from = path.display().to_string();
            // Reads a little more than the limit, so that a longer file is refused.
            let file = fs::File::open(path).with_context(|| from.clone())?;
            let mut text = String::new();
            let mut file = file.take(TEXT_MAX as u64 + 1);
            file.read_to_string(&mut text).with_context(|| from.clone())?;
            let jobs = parse_job_file(&text, |name| std::env::var(name).ok());
            (jobs.with_context(|| from.clone())?, from)
        }
    };
    if !file.ignored.is_empty() {
        let ignored = file.ignored.join(", ");
        log::queue_stderr_text(&format!("udm: {from}: options without effect here are ignored: {ignored}\n"));
    }
    if args.nbd.is_some() || args.vhost_user.is_some() || args.floor.is_some() {
        let direct = file.devices.iter().any(|device| device.direct == Some(true));
        ensure!(!direct, "direct=1: the server has the file: open it there with ?direct=on");
        ensure!(
            file.jobs.len() == 1,
            "bench: one job is measured over a connection; numjobs makes it several connections"
        );
        ensure!(
            file.devices[0].filename.is_none(),
            "bench: filename excludes --nbd, --vhost-user and --floor"
        );
    } else if args.devices.is_empty() && file.devices.iter().any(|device| device.filename.is_none()) {
        bail!("{from}: a job has no filename, and there is no --device");
    }
    Ok(file)
}

fn parse_nbd_uri_arg(word: &str) -> Result<NbdUri> {
    match udm_wire::uri::parse_device_uri(word)? {
        DeviceUri::Nbd(uri) => Ok(uri),
        _ => bail!(
            "--nbd {word}: not an NBD URI; expected nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=PATH"
        ),
    }
}

fn run_snapshot_bench(args: &BenchArgs, stop: &AtomicBool) -> Result<()> {
    let options = if args.quick { SnapshotCostOptions::quick() } else { SnapshotCostOptions::full() };
    let costs = progress::run_with_step_progress(options.steps(), |done| {
        measure_snapshot_costs(&options, stop, done)
    })
    .context("bench")?;
    match args.format() {
        BenchReportFormat::Normal => print_to_stdout(&costs.table()),
        _ => print_json_to_stdout(&costs),
    }
}

fn run_layer_comparison_bench(args: &BenchArgs, stop: &AtomicBool) -> Result<()> {
    let options =
        if args.quick { DmLayerComparisonOptions::quick() } else { DmLayerComparisonOptions::full() };
    let options = DmLayerComparisonOptions { paths: args.paths.into(), ..options };
    let comparison = compare_dm_layers(&options, stop).context("bench")?;
    match args.format() {
        BenchReportFormat::Normal => print_to_stdout(&comparison.table()),
        _ => print_json_to_stdout(&comparison),
    }
}
