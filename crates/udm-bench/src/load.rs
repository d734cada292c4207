//! A load: the options of fio that apply to udm, with fio's names. They derive clap's `Args`, so a
//! command line can include them.

use crate::options::WAY_OUT;
use crate::per_direction::{ByteLength, IoRateLimit, PerDirectionOption};
use crate::percentiles::PercentileList;
use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};
use std::collections::BTreeSet;
use std::str::FromStr;
use std::time::Duration;
use udm_core::Op;
use udm_wire::cpus::CpuList;
use udm_wire::size;

/// Maximum memory in bytes for the data of all requests.
const DATA_MAX: u64 = 16 << 30;

/// Minimum memory in bytes of a request without data.
const BIO: u64 = 512;

/// Maximum length of a request in bytes, because its data is one buffer.
const BS_MAX: u64 = udm_buf::MAX_LEN as u64;

/// Default length of a request in bytes.
const BS_DEFAULT: u64 = 4096;

/// The load of one or more equal jobs.
#[derive(Debug, Clone, Args)]
#[command(rename_all = "snake_case")]
pub struct FioLoadOptions {
    /// The name of the job in the report
    #[arg(long, value_name = "NAME", default_value = "bench")]
    pub name: String,
    /// The kind of load
    #[arg(long, alias = "readwrite", value_enum, default_value_t = FioRwMode::Read)]
    pub rw: FioRwMode,
    /// Percentage of reads in a mixed load
    #[arg(long, value_name = "PERCENT", default_value_t = 50, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub rwmixread: u8,
    /// Percentage of writes in a mixed load [default: 100 minus --rwmixread]. If both are given,
    /// the last one counts
    #[arg(long, value_name = "PERCENT", overrides_with = "rwmixread", value_parser = clap::value_parser!(u8).range(0..=100))]
    pub rwmixwrite: Option<u8>,
    /// The length of a request; for reads, writes and trims, separated by commas. A mixed load has
    /// one length for both
    #[arg(long, alias = "blocksize", value_name = "SIZE", default_value = "4k", value_parser = PerDirectionOption::<ByteLength>::from_str)]
    pub bs: PerDirectionOption<ByteLength>,
    /// Requests in flight per job
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub iodepth: u32,
    /// Maximum number of requests that are submitted at once [default: as many as --iodepth allows]
    #[arg(long, alias = "iodepth_batch_submit", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub iodepth_batch: Option<u32>,
    /// Number of jobs, one thread each
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub numjobs: u16,
    /// Size of the used part of the device, and how much each job moves, in bytes or percent
    /// [default: the whole device]
    #[arg(long, value_name = "SIZE|N%", value_parser = parse_bytes_or_percent)]
    pub size: Option<BytesOrPercent>,
    /// Offset on the device at which the load begins, in bytes or percent
    #[arg(long, value_name = "SIZE|N%", value_parser = parse_bytes_or_percent)]
    pub offset: Option<BytesOrPercent>,
    /// The length of the file. If the file is longer, the rest is not used
    #[arg(long, value_name = "SIZE", value_parser = parse_byte_size)]
    pub filesize: Option<u64>,
    /// How often to go over the whole region
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub loops: u32,
    /// Maximum bytes per second of each job, for reads and for writes; or for reads, writes and
    /// trims, separated by commas. 0 or an empty value is no limit. A latency counts from the time
    /// when the request should have been sent, so it includes the wait for a slow device
    #[arg(long, value_name = "SIZE", value_parser = PerDirectionOption::<IoRateLimit>::from_str)]
    pub rate: Option<PerDirectionOption<IoRateLimit>>,
    /// Like --rate, in requests per second
    #[arg(long, value_name = "N", value_parser = PerDirectionOption::<IoRateLimit>::from_str)]
    pub rate_iops: Option<PerDirectionOption<IoRateLimit>>,
    /// Stop after this time, in seconds (or 500ms, 2m)
    #[arg(long, alias = "timeout", value_name = "TIME", value_parser = parse_duration_in_seconds)]
    pub runtime: Option<Duration>,
    /// Run for the whole --runtime. If necessary, go over the same blocks again, regardless of
    /// --number_ios and --loops
    #[arg(long, value_name = "0|1", num_args = 0..=1, require_equals = true, default_value = "0", default_missing_value = "1", value_parser = parse_fio_bool)]
    pub time_based: FioBool,
    /// Time at the begin of the load that is not measured
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = parse_duration_in_seconds)]
    pub ramp_time: Duration,
    /// Draw random blocks independently. Without this option, each block comes once before any
    /// block repeats
    #[arg(long, value_name = "0|1", num_args = 0..=1, require_equals = true, default_value = "0", default_missing_value = "1", value_parser = parse_fio_bool)]
    pub norandommap: FioBool,
    /// Draw the same blocks in every run
    #[arg(long, value_name = "0|1", num_args = 0..=1, default_value = "1", default_missing_value = "1", value_parser = parse_fio_bool)]
    pub randrepeat: FioBool,
    /// Seed of the random numbers; implies --randrepeat
    #[arg(long, value_name = "N")]
    pub randseed: Option<u64>,
    /// Stop each job after this many requests
    #[arg(long, value_name = "N")]
    pub number_ios: Option<u64>,
    /// Flush after this many writes
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub fsync: u32,
    /// Write blocks with a header and a checksum and read them back; with --rw read, check the
    /// blocks on the device. Each job uses its own part of the device
    #[arg(long, value_enum)]
    pub verify: Option<VerifyMethod>,
    /// With --verify: read back the written data
    #[arg(long, value_name = "0|1", num_args = 0..=1, default_value = "1", default_missing_value = "1", value_parser = parse_fio_bool)]
    pub do_verify: FioBool,
    /// Requests carry no memory. For devices that do not move data (null:), so that clearing memory
    /// is not measured
    #[arg(long)]
    pub bare: bool,
    /// CPUs that the jobs may run on, as in 0-3,8
    #[arg(long, value_name = "LIST", value_parser = AllowedCpus::from_str)]
    pub cpus_allowed: Option<AllowedCpus>,
    /// Whether each job may use all of these CPUs or gets one of them
    #[arg(long, value_enum, default_value_t = CpusPolicy::Shared)]
    pub cpus_allowed_policy: CpusPolicy,
    /// Percentiles of latencies in the report, separated by colons
    #[arg(long, value_name = "PERCENT:...", default_value_t, hide_default_value = true)]
    pub percentile_list: PercentileList,
    /// Report percentiles of clat
    #[arg(long, value_name = "0|1", num_args = 0..=1, require_equals = true, default_value = "1", default_missing_value = "1", value_parser = parse_fio_bool)]
    pub clat_percentiles: FioBool,
    /// Report percentiles of lat, which equals clat here
    #[arg(long, value_name = "0|1", num_args = 0..=1, require_equals = true, default_value = "0", default_missing_value = "1", value_parser = parse_fio_bool)]
    pub lat_percentiles: FioBool,
    /// Sum up all jobs in one report
    #[arg(long, value_name = "0|1", num_args = 0..=1, require_equals = true, default_value = "0", default_missing_value = "1", value_parser = parse_fio_bool)]
    pub group_reporting: FioBool,
}

/// A flag that fio also accepts with a value, 0 or 1.
pub type FioBool = bool;

/// A part of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BytesOrPercent {
    /// Number of bytes.
    Bytes(u64),
    /// Percentage of the device, 1 to 100.
    Percent(u8),
}

/// A set of CPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowedCpus(BTreeSet<usize>);

impl FromStr for AllowedCpus {
    type Err = String;

    /// Parses a list as fio does: a CPU may occur twice, and a comma may end the list. If fio reads
    /// a list in another way than it looks, it is refused: of `0:1` fio takes CPU 0, and it ends
    /// `0,,1` at the gap.
    fn from_str(text: &str) -> Result<AllowedCpus, String> {
        let mut cpus = BTreeSet::new();
        for part in text.strip_suffix(',').unwrap_or(text).split(',') {
            cpus.extend(part.parse::<CpuList>()?.numbers());
        }
        Ok(AllowedCpus(cpus))
    }
}

/// Kinds of load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FioRwMode {
    /// Reads, in order
    Read,
    /// Writes, in order
    Write,
    /// Discards, in order
    Trim,
    /// Reads of random blocks
    Randread,
    /// Writes of random blocks
    Randwrite,
    /// Discards of random blocks
    Randtrim,
    /// Reads and writes, in order
    #[value(alias = "readwrite")]
    Rw,
    /// Reads and writes of random blocks
    Randrw,
}

/// How `cpus_allowed` applies to each job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CpusPolicy {
    /// Each job may run on all of them
    Shared,
    /// Each job gets one of them, in rotation
    Split,
}

/// How written data is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum VerifyMethod {
    /// A header and a checksum in each block
    Crc32c,
}

impl FioRwMode {
    /// Whether the blocks come in random order.
    pub fn is_random(self) -> bool {
        matches!(self, FioRwMode::Randread | FioRwMode::Randwrite | FioRwMode::Randtrim | FioRwMode::Randrw)
    }

    /// The only operation of the load; `None` for a mix of reads and writes.
    pub fn op(self) -> Option<Op> {
        match self {
            FioRwMode::Read | FioRwMode::Randread => Some(Op::Read),
            FioRwMode::Write | FioRwMode::Randwrite => Some(Op::Write),
            FioRwMode::Trim | FioRwMode::Randtrim => Some(Op::Discard),
            FioRwMode::Rw | FioRwMode::Randrw => None,
        }
    }

    /// fio's name of the kind.
    pub fn name(self) -> &'static str {
        match self {
            FioRwMode::Read => "read",
            FioRwMode::Write => "write",
            FioRwMode::Trim => "trim",
            FioRwMode::Randread => "randread",
            FioRwMode::Randwrite => "randwrite",
            FioRwMode::Randtrim => "randtrim",
            FioRwMode::Rw => "rw",
            FioRwMode::Randrw => "randrw",
        }
    }
}

impl FioLoadOptions {
    /// Checks options that do not depend on the device.
    ///
    /// # Errors
    /// One line that names the option.
    pub fn check(&self) -> Result<()> {
        let (bs, parts) = (self.block_bytes(), &self.bs);
        let same = self.used().iter().all(|direction| self.bs_of(*direction) == bs);
        ensure!(same, "bs={parts}: reads and writes of one job have one length. {WAY_OUT}");
        ensure!(bs.is_multiple_of(512), "bs={bs}: not a multiple of 512");
        ensure!(bs <= BS_MAX, "bs={bs}: more than {BS_MAX}");
        FioLoadOptions::check_memory(std::iter::once(self))?;
        ensure!(!self.time_based || self.runtime().is_some(), "time_based needs runtime");
        if self.verify.is_some() {
            ensure!(!self.has_no_data(), "verify: a {} carries no data", self.rw.name());
            ensure!(!self.bare, "verify and bare exclude each other");
        }
        Ok(())
    }

    /// Checks the memory for all requests of loads that run at the same time.
    ///
    /// # Errors
    /// One line that names the options.
    pub fn check_memory<'a>(loads: impl Iterator<Item = &'a FioLoadOptions>) -> Result<()> {
        let all = loads.fold(0u64, |all, load| all.saturating_add(load.memory()));
        ensure!(all <= DATA_MAX, "bs * iodepth * numjobs: {all} bytes of data, more than {DATA_MAX}");
        Ok(())
    }

    /// The memory of all requests, in bytes.
    fn memory(&self) -> u64 {
        let one = if self.bare || self.has_no_data() { 0 } else { self.block_bytes() };
        one.max(BIO) * u64::from(self.iodepth) * u64::from(self.numjobs)
    }

    fn has_no_data(&self) -> bool {
        self.rw.op() == Some(Op::Discard)
    }

    /// The maximum time of the load. A time of 0 is no limit, as in fio.
    pub fn runtime(&self) -> Option<Duration> {
        self.runtime.filter(|time| !time.is_zero())
    }

    /// The length of the requests of a direction.
    pub fn bs_of(&self, direction: usize) -> u64 {
        self.bs.of[direction].map_or(BS_DEFAULT, |one| one.0)
    }

    /// The length of all requests of the load.
    pub fn block_bytes(&self) -> u64 {
        self.bs_of(self.used()[0])
    }

    /// The directions that the load has. `check` refuses different lengths of them.
    fn used(&self) -> &'static [usize] {
        match self.rw.op() {
            Some(Op::Write) => &[1],
            Some(Op::Discard) => &[2],
            Some(_) => &[0],
            None => &[0, 1],
        }
    }

    /// Whether the load has requests of this operation.
    pub fn does(&self, op: Op) -> bool {
        match (self.rw.op(), op) {
            (None, Op::Read) => self.read_percent() > 0 || self.verify.is_some(),
            (None, Op::Write) => self.read_percent() < 100,
            (only, op) => only == Some(op),
        }
    }

    /// The percentage of reads in a mixed load.
    pub fn read_percent(&self) -> u8 {
        self.rwmixwrite.map_or(self.rwmixread, |percent| 100 - percent)
    }

    /// The seed from which the jobs draw their blocks.
    pub fn seed(&self) -> u64 {
        match self.randseed {
            Some(seed) => seed,
            // Any fixed number is fine; the option only requires the same one in every run.
            None if self.randrepeat => 0x89,
            None => rand::random(),
        }
    }

    /// The CPUs that a thread may run on; empty for any. `thread` is its index in the run.
    pub fn cpus(&self, thread: usize) -> Vec<usize> {
        let cpus = self.cpus_allowed.iter().flat_map(|cpus| &cpus.0).copied().collect::<Vec<_>>();
        match self.cpus_allowed_policy {
            CpusPolicy::Split if !cpus.is_empty() => vec![cpus[thread % cpus.len()]],
            _ => cpus,
        }
    }
}

fn parse_byte_size(text: &str) -> Result<u64, String> {
    size::parse_size_with_unit(text).map_err(|e| e.to_string())
}

fn parse_bytes_or_percent(text: &str) -> Result<BytesOrPercent, String> {
    match text.strip_suffix('%') {
        None => parse_byte_size(text).map(BytesOrPercent::Bytes),
        Some(percent) => match percent.parse() {
            Ok(n @ 1..=100) => Ok(BytesOrPercent::Percent(n)),
            _ => Err("a percentage is 1% to 100%".into()),
        },
    }
}

pub(crate) fn parse_fio_bool(text: &str) -> Result<FioBool, String> {
    match text {
        "1" => Ok(true),
        "0" => Ok(false),
        _ => Err("neither 0 nor 1".into()),
    }
}

/// Parses a time: seconds, or a number with a unit (`us`, `ms`, `s`, `m`, `h`, `d`).
fn parse_duration_in_seconds(text: &str) -> Result<Duration, String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let us: u64 = match unit {
        "us" => 1,
        "ms" => 1000,
        "" | "s" => 1_000_000,
        "m" => 60_000_000,
        "h" => 3_600_000_000,
        "d" => 86_400_000_000,
        _ => return Err(format!("{unit}: not one of us, ms, s, m, h, d")),
    };
    let number: u64 = number.parse().map_err(|_| "expected a number, such as 500ms".to_owned())?;
    number.checked_mul(us).map(Duration::from_micros).ok_or_else(|| "too long".into())
}
