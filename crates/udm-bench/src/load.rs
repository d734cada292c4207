//! A load: fio's options by fio's names, as far as they mean something here. They are clap's, so
//! that a command line takes them in as they are.

use crate::distribution::Distribution;
use crate::percentiles::Percentiles;
use crate::request_lengths::{ByteLength, LengthDistribution, LengthRange, LengthSplit, PerDirection, Rate};
use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};
use std::collections::BTreeSet;
use std::str::FromStr;
use std::time::Duration;
use udm_core::Op;
use udm_wire::cpus::CpuList;
use udm_wire::size;

/// The most memory in bytes that the data of all requests may take.
const DATA_MAX: u64 = 16 << 30;

/// What a request without data takes, at the least.
const BIO: u64 = 512;

/// The longest request in bytes: its data is one buffer.
const BS_MAX: u64 = udm_buf::MAX_LEN as u64;

/// The length of a request, where nothing is said.
const BS_DEFAULT: u64 = 4096;

/// What jobs do to a device.
#[derive(Debug, Clone, Args)]
#[command(rename_all = "snake_case")]
pub struct Load {
    /// The name of the job in the report
    #[arg(long, value_name = "NAME", default_value = "bench")]
    pub name: String,
    /// The kind of load
    #[arg(long, alias = "readwrite", value_enum, default_value_t = ReadWrite::Read)]
    pub rw: ReadWrite,
    /// Of a mixed load, how many percent are reads
    #[arg(long, value_name = "PERCENT", default_value_t = 50, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub rwmixread: u8,
    /// Of a mixed load, how many percent are writes [default: what --rwmixread leaves]. Of both the
    /// last counts
    #[arg(long, value_name = "PERCENT", overrides_with = "rwmixread", value_parser = clap::value_parser!(u8).range(0..=100))]
    pub rwmixwrite: Option<u8>,
    /// The length of a request; of reads, writes and trims each, between commas
    #[arg(long, alias = "blocksize", value_name = "SIZE", default_value = "4k", value_parser = PerDirection::<ByteLength>::from_str)]
    pub bs: PerDirection<ByteLength>,
    /// Lengths from MIN to MAX, in steps of MIN, each as often as any other; of reads, writes and
    /// trims each, between commas
    #[arg(long, alias = "blocksize_range", value_name = "MIN-MAX", value_parser = PerDirection::<LengthRange>::from_str)]
    pub bsrange: Option<PerDirection<LengthRange>>,
    /// So many percent of the requests have this length, as in 4k/70:64k/30; of reads, writes and
    /// trims each, between commas
    #[arg(long, value_name = "SIZE/PERCENT:...", value_parser = PerDirection::<LengthSplit>::from_str)]
    pub bssplit: Option<PerDirection<LengthSplit>>,
    /// Random requests begin at multiples of this from where the load begins; of reads, writes and
    /// trims each, between commas [default: the shortest length]. With another than that blocks are
    /// drawn as with --norandommap
    #[arg(long, visible_alias = "ba", value_name = "SIZE", value_parser = PerDirection::<ByteLength>::from_str)]
    pub blockalign: Option<PerDirection<ByteLength>>,
    /// Requests in flight, a job
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub iodepth: u32,
    /// The most requests that are submitted at once [default: as many as there is room for]
    #[arg(long, alias = "iodepth_batch_submit", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub iodepth_batch: Option<u32>,
    /// Jobs, a thread each
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub numjobs: u16,
    /// How much of the device to use, and how much each job moves, in bytes or percent [default:
    /// all of it]
    #[arg(long, value_name = "SIZE|N%", value_parser = part)]
    pub size: Option<BytesOrPercent>,
    /// Where on the device to begin, in bytes or percent of it
    #[arg(long, value_name = "SIZE|N%", value_parser = part)]
    pub offset: Option<BytesOrPercent>,
    /// The length of the file: of a longer one the rest is not used
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub filesize: Option<u64>,
    /// How much each job moves, times --loops, in bytes or percent of --size; over the same blocks
    /// again, if that is more than --size [default: --size]
    #[arg(long, value_name = "SIZE|N%", value_parser = part)]
    pub io_size: Option<BytesOrPercent>,
    /// Go over all of it so many times
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub loops: u32,
    /// Bytes a second of each job, of reads and of writes each, or between commas: of reads, writes
    /// and trims; 0, or nothing between commas, is no limit. A latency counts from when the request
    /// should have been sent: what waits because the device is slow has waited
    #[arg(long, value_name = "SIZE", value_parser = PerDirection::<Rate>::from_str)]
    pub rate: Option<PerDirection<Rate>>,
    /// The same in requests a second
    #[arg(long, value_name = "N", value_parser = PerDirection::<Rate>::from_str)]
    pub rate_iops: Option<PerDirection<Rate>>,
    /// How the requests of a rate follow each other
    #[arg(long, value_enum, default_value_t = RateProcess::Linear)]
    pub rate_process: RateProcess,
    /// Stand still for so long (microseconds, or 1ms, 2s) when what was sent has come back
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = micros)]
    pub thinktime: Duration,
    /// After how many requests that is
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub thinktime_blocks: u32,
    /// Leave that time out of the rate, and do not make up for it
    #[arg(long, value_name = "0|1", num_args = 0..=1, require_equals = true, default_value = "0", default_missing_value = "1", value_parser = switch)]
    pub rate_ignore_thinktime: FioBool,
    /// Stop after this time, in seconds (or 500ms, 2m)
    #[arg(long, alias = "timeout", value_name = "TIME", value_parser = time)]
    pub runtime: Option<Duration>,
    /// Run for the whole --runtime, over the same blocks again if need be, whatever --io_size,
    /// --number_ios and --loops say
    #[arg(long, value_name = "0|1", num_args = 0..=1, require_equals = true, default_value = "0", default_missing_value = "1", value_parser = switch)]
    pub time_based: FioBool,
    /// Measure nothing for this long first
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = time)]
    pub ramp_time: Duration,
    /// Draw random blocks without seeing to it that each comes once before any comes again
    #[arg(long, value_name = "0|1", num_args = 0..=1, require_equals = true, default_value = "0", default_missing_value = "1", value_parser = switch)]
    pub norandommap: FioBool,
    /// Where random blocks are: random, zipf:THETA, pareto:H, normal:DEVIATION, each with :CENTER
    /// behind it, zoned:ACCESS/SIZE:..., in percent, or zoned_abs, with sizes. All but random imply
    /// --norandommap
    #[arg(long, value_name = "KIND:...", default_value = "random", value_parser = Distribution::from_str)]
    pub random_distribution: Distribution,
    /// Draw the same blocks in every run
    #[arg(long, value_name = "0|1", num_args = 0..=1, default_value = "1", default_missing_value = "1", value_parser = switch)]
    pub randrepeat: FioBool,
    /// What to draw them from; implies --randrepeat
    #[arg(long, value_name = "N")]
    pub randseed: Option<u64>,
    /// Stop after so many requests, a job
    #[arg(long, value_name = "N")]
    pub number_ios: Option<u64>,
    /// Flush after so many writes
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub fsync: u32,
    /// Write blocks that can be told apart and read them back, or check those that are there (--rw
    /// read). Each job has a part of the device then
    #[arg(long, value_enum)]
    pub verify: Option<VerifyMethod>,
    /// With --verify: read back what was written
    #[arg(long, value_name = "0|1", num_args = 0..=1, default_value = "1", default_missing_value = "1", value_parser = switch)]
    pub do_verify: FioBool,
    /// Requests carry no memory. For devices that move none (null:), so that clearing it is not
    /// measured
    #[arg(long)]
    pub bare: bool,
    /// CPUs that the jobs may run on, as in 0-3,8
    #[arg(long, value_name = "LIST", value_parser = AllowedCpus::from_str)]
    pub cpus_allowed: Option<AllowedCpus>,
    /// Whether all of them are for each job, or one, in turn
    #[arg(long, value_enum, default_value_t = CpusPolicy::Shared)]
    pub cpus_allowed_policy: CpusPolicy,
    /// The percentiles of latencies that the report has, between colons
    #[arg(long, value_name = "PERCENT:...", default_value_t, hide_default_value = true)]
    pub percentile_list: Percentiles,
    /// Report percentiles of clat
    #[arg(long, value_name = "0|1", num_args = 0..=1, require_equals = true, default_value = "1", default_missing_value = "1", value_parser = switch)]
    pub clat_percentiles: FioBool,
    /// Report percentiles of lat, which is the same here
    #[arg(long, value_name = "0|1", num_args = 0..=1, require_equals = true, default_value = "0", default_missing_value = "1", value_parser = switch)]
    pub lat_percentiles: FioBool,
    /// One report for all jobs
    #[arg(long, value_name = "0|1", num_args = 0..=1, require_equals = true, default_value = "0", default_missing_value = "1", value_parser = switch)]
    pub group_reporting: FioBool,
}

/// A flag that fio also takes with a value.
pub type FioBool = bool;

/// A part of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BytesOrPercent {
    /// So many bytes.
    Bytes(u64),
    /// So much of it, 1 to 100.
    Percent(u8),
}

/// A set of CPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowedCpus(BTreeSet<usize>);

impl FromStr for AllowedCpus {
    type Err = String;

    /// As fio reads it: one may be named twice, and nothing follow the last comma. What fio reads
    /// as something else is refused: of `0:1` it takes CPU 0, and `0,,1` it ends at the gap.
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
pub enum ReadWrite {
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

/// How the requests of a rate follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RateProcess {
    /// At equal intervals
    Linear,
    /// As those of many clients that know nothing of each other
    Poisson,
}

/// What `cpus_allowed` is for each job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CpusPolicy {
    /// Each job may run on all of them
    Shared,
    /// Each job has one of them, in turn
    Split,
}

/// How written data is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum VerifyMethod {
    /// A header and a checksum in each block
    Crc32c,
}

impl ReadWrite {
    /// True when the blocks come in random order.
    pub fn is_random(self) -> bool {
        matches!(self, ReadWrite::Randread | ReadWrite::Randwrite | ReadWrite::Randtrim | ReadWrite::Randrw)
    }

    /// The only operation of the load; `None` for a mix of reads and writes.
    pub fn op(self) -> Option<Op> {
        match self {
            ReadWrite::Read | ReadWrite::Randread => Some(Op::Read),
            ReadWrite::Write | ReadWrite::Randwrite => Some(Op::Write),
            ReadWrite::Trim | ReadWrite::Randtrim => Some(Op::Discard),
            ReadWrite::Rw | ReadWrite::Randrw => None,
        }
    }

    /// As fio spells it.
    pub fn name(self) -> &'static str {
        match self {
            ReadWrite::Read => "read",
            ReadWrite::Write => "write",
            ReadWrite::Trim => "trim",
            ReadWrite::Randread => "randread",
            ReadWrite::Randwrite => "randwrite",
            ReadWrite::Randtrim => "randtrim",
            ReadWrite::Rw => "rw",
            ReadWrite::Randrw => "randrw",
        }
    }
}

impl Load {
    /// Checks what does not depend on the device.
    ///
    /// # Errors
    /// One line that names the option.
    pub fn check(&self) -> Result<()> {
        for sizes in self.used_sizes() {
            let what = self.sizes_word();
            ensure!(sizes.are_multiples_of(512), "{what}: not a multiple of 512");
            ensure!(sizes.max <= BS_MAX, "{what}: more than {BS_MAX}");
            let even = self.verify.is_none() || sizes.are_multiples_of(self.unit());
            ensure!(even, "verify: {what}: lengths are no multiples of the shortest");
        }
        for one in self.blockalign.iter().flat_map(|align| align.of.iter().flatten()) {
            ensure!(one.0.is_multiple_of(512), "blockalign={}: not a multiple of 512", one.0);
            let even = self.verify.is_none() || one.0.is_multiple_of(self.unit());
            ensure!(even, "verify: blockalign={}: not a multiple of the shortest length", one.0);
        }
        Load::check_memory(std::iter::once(self))?;
        ensure!(!self.time_based || self.runtime().is_some(), "time_based needs runtime");
        if self.verify.is_some() {
            ensure!(!self.has_no_data(), "verify: a {} carries no data", self.rw.name());
            ensure!(!self.bare, "verify and bare exclude each other");
        }
        Ok(())
    }

    /// Loads that run beside each other have memory for all requests.
    ///
    /// # Errors
    /// One line that names the options.
    pub fn check_memory<'a>(loads: impl Iterator<Item = &'a Load>) -> Result<()> {
        let all = loads.fold(0u64, |all, load| all.saturating_add(load.memory()));
        ensure!(all <= DATA_MAX, "bs * iodepth * numjobs: {all} bytes of data, more than {DATA_MAX}");
        Ok(())
    }

    /// The memory of all requests, in bytes.
    fn memory(&self) -> u64 {
        let one = match self.fixed() {
            _ if self.bare || self.has_no_data() => 0,
            Some(bs) => bs,
            // A buffer of each power of two.
            None => self.longest().next_power_of_two() * 2,
        };
        one.max(BIO) * u64::from(self.iodepth) * u64::from(self.numjobs)
    }

    fn has_no_data(&self) -> bool {
        self.rw.op() == Some(Op::Discard)
    }

    /// For how long it runs at the most. No time is no bound, as in fio.
    pub fn runtime(&self) -> Option<Duration> {
        self.runtime.filter(|time| !time.is_zero())
    }

    /// How long the requests of a direction are.
    pub fn sizes(&self, direction: usize) -> LengthDistribution {
        let bs = self.bs.of[direction].map_or(BS_DEFAULT, |one| one.0);
        let range = self.bsrange.as_ref().and_then(|range| range.of[direction]);
        LengthDistribution::new(
            bs,
            range,
            self.bssplit.as_ref().and_then(|split| split.of[direction].as_ref()),
        )
    }

    /// The same of the directions that the load has.
    pub fn used_sizes(&self) -> impl Iterator<Item = LengthDistribution> {
        self.used().iter().map(|direction| self.sizes(*direction))
    }

    /// The directions that the load has.
    pub fn used(&self) -> &'static [usize] {
        match self.rw.op() {
            Some(Op::Write) => &[1],
            Some(Op::Discard) => &[2],
            Some(_) => &[0],
            None => &[0, 1],
        }
    }

    /// The option that says the lengths, as an error and the page name it.
    pub fn sizes_word(&self) -> String {
        let bs = match self.fixed() {
            Some(bs) => bs.to_string(),
            None => self.bs.to_string(),
        };
        let split = self.bssplit.iter().map(|split| format!("bssplit={split}"));
        let range = self.bsrange.iter().map(|range| format!("bsrange={range}"));
        split.chain(range).next().unwrap_or_else(|| format!("bs={bs}"))
    }

    /// The length of all requests, where they have the same.
    pub fn fixed(&self) -> Option<u64> {
        let unit = self.unit();
        self.used_sizes().all(|sizes| (sizes.min, sizes.max) == (unit, unit)).then_some(unit)
    }

    /// The shortest request.
    pub fn unit(&self) -> u64 {
        self.used_sizes().map(|sizes| sizes.min).min().unwrap_or(BS_DEFAULT)
    }

    /// The longest request.
    pub fn longest(&self) -> u64 {
        self.used_sizes().map(|sizes| sizes.max).max().unwrap_or(BS_DEFAULT)
    }

    /// Whether the load has such requests.
    pub fn does(&self, op: Op) -> bool {
        match (self.rw.op(), op) {
            (None, Op::Read) => self.read_percent() > 0 || self.verify.is_some(),
            (None, Op::Write) => self.read_percent() < 100,
            (only, op) => only == Some(op),
        }
    }

    /// Of a mixed load, how many percent are reads.
    pub fn read_percent(&self) -> u8 {
        self.rwmixwrite.map_or(self.rwmixread, |percent| 100 - percent)
    }

    /// What the jobs draw their blocks from.
    pub fn seed(&self) -> u64 {
        match self.randseed {
            Some(seed) => seed,
            // The same number in every run is what the option is for; which one is of no matter.
            None if self.randrepeat => 0x89,
            None => rand::random(),
        }
    }

    /// The CPUs that a thread may run on, none for any; `thread` is its place in the run.
    pub fn cpus(&self, thread: usize) -> Vec<usize> {
        let cpus = self.cpus_allowed.iter().flat_map(|cpus| &cpus.0).copied().collect::<Vec<_>>();
        match self.cpus_allowed_policy {
            CpusPolicy::Split if !cpus.is_empty() => vec![cpus[thread % cpus.len()]],
            _ => cpus,
        }
    }
}

fn bytes(text: &str) -> Result<u64, String> {
    size::parse(text).map_err(|e| e.to_string())
}

fn part(text: &str) -> Result<BytesOrPercent, String> {
    match text.strip_suffix('%') {
        None => bytes(text).map(BytesOrPercent::Bytes),
        Some(percent) => match percent.parse() {
            Ok(n @ 1..=100) => Ok(BytesOrPercent::Percent(n)),
            _ => Err("a percentage is 1% to 100%".into()),
        },
    }
}

pub(crate) fn switch(text: &str) -> Result<FioBool, String> {
    match text {
        "1" => Ok(true),
        "0" => Ok(false),
        _ => Err("neither 0 nor 1".into()),
    }
}

/// A time: seconds, or with a unit (`us`, `ms`, `s`, `m`, `h`, `d`).
fn time(text: &str) -> Result<Duration, String> {
    time_in("s", text)
}

/// The same, where a plain number is microseconds.
fn micros(text: &str) -> Result<Duration, String> {
    time_in("us", text)
}

fn time_in(plain: &str, text: &str) -> Result<Duration, String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let us: u64 = match if unit.is_empty() { plain } else { unit } {
        "us" => 1,
        "ms" => 1000,
        "s" => 1_000_000,
        "m" => 60_000_000,
        "h" => 3_600_000_000,
        "d" => 86_400_000_000,
        _ => return Err(format!("{unit}: not one of us, ms, s, m, h, d")),
    };
    let number: u64 = number.parse().map_err(|_| "a number of seconds is wanted".to_owned())?;
    number.checked_mul(us).map(Duration::from_micros).ok_or_else(|| "too long".into())
}
