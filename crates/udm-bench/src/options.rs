//! The options of a job, from a job file or the command line: its load, its file, and its order
//! among other jobs.

use crate::load::{FioBool, FioLoadOptions};
use clap::{Arg, ArgAction, ArgMatches, Args, Command, Error, FromArgMatches};

/// Hint for options that `udm bench` does not have.
pub const WAY_OUT: &str = "udm bench has a part of fio's options (docs/bench.md); for the others run fio with udm's engine: make fio-engine";

/// fio's engines that access the same blocks of a file as udm does.
const ENGINES: &[&str] = &[
    "sync",
    "psync",
    "vsync",
    "pvsync",
    "pvsync2",
    "libaio",
    "io_uring",
    "posixaio",
    "solarisaio",
    "windowsaio",
];

/// fio's engine that does nothing, which is a null device here.
const NULL: &str = "null";

/// The engines that have one request in flight.
const SYNC_ENGINES: &[&str] = &["sync", "psync", "vsync", "pvsync", "pvsync2"];

/// Ignored options with a value: how fio accesses a file or takes its measurements. Options that
/// change the load are in [`JobOptions`] or are refused.
const IGNORED: &[&str] = &[
    "buffer_compress_chunk",
    "clocksource",
    "description",
    "eta",
    "eta-interval",
    "eta-newline",
    "fallocate",
    "gtod_cpu",
    "iomem",
    "mem",
    "sqthread_poll_cpu",
];

/// Ignored options whose value may be left out.
const IGNORED_SWITCHES: &[&str] = &[
    "create_on_open",
    "create_serialize",
    "disable_bw_measurement",
    "disable_clat",
    "disable_lat",
    "disable_slat",
    "disk_util",
    "fixedbufs",
    "gtod_reduce",
    "hipri",
    "nonvectored",
    "overwrite",
    "refill_buffers",
    "registerfiles",
    "scramble_buffers",
    "sqthread_poll",
    "thread",
    "unlink",
    "verify_fatal",
    "zero_buffers",
];

/// All options of one job.
#[derive(Debug, Clone, Args)]
#[command(rename_all = "snake_case")]
pub struct JobOptions {
    /// The load.
    #[command(flatten)]
    pub load: FioLoadOptions,
    /// The file or device of the job, in place of --device. If a regular file is too short for
    /// --size or --filesize, it is extended, as in fio
    #[arg(long, value_name = "FILE|DEVICE")]
    pub filename: Option<String>,
    /// Bypass the page cache of the file (O_DIRECT), like ?direct=on
    #[arg(long, value_name = "0|1", num_args = 0..=1, default_missing_value = "1", value_parser = crate::load::parse_fio_bool)]
    pub direct: Option<FioBool>,
    /// The opposite of --direct
    #[arg(long, value_name = "0|1", num_args = 0..=1, default_missing_value = "1", value_parser = crate::load::parse_fio_bool, overrides_with = "direct")]
    pub buffered: Option<FioBool>,
    /// Drop the page cache of the file before the job begins, unless it is direct
    #[arg(long, value_name = "0|1", num_args = 0..=1, default_value = "1", default_missing_value = "1", value_parser = crate::load::parse_fio_bool)]
    pub invalidate: FioBool,
    /// Begin when all earlier jobs have ended
    #[arg(long, alias = "wait_for_previous", value_name = "0|1", num_args = 0..=1, require_equals = true, default_value = "0", default_missing_value = "1", value_parser = crate::load::parse_fio_bool)]
    pub stonewall: FioBool,
    /// Report this job and later ones as a new group
    #[arg(long, value_name = "0|1", num_args = 0..=1, require_equals = true, default_value = "0", default_missing_value = "1", value_parser = crate::load::parse_fio_bool)]
    pub new_group: FioBool,
    /// The engine of fio. Ignored, except that a synchronous engine has one request in flight
    #[arg(long, hide = true, value_parser = parse_fio_ioengine)]
    pub ioengine: Option<String>,
    /// Options that have no effect here.
    #[command(flatten)]
    pub ignored: IgnoredOptions,
}

impl JobOptions {
    /// Whether the job bypasses the page cache; `None` if neither option is given.
    #[must_use]
    pub fn is_direct(&self) -> Option<bool> {
        self.direct.or(self.buffered.map(|on| !on))
    }

    /// Applies the engine: `null` sets the device, a synchronous engine sets one request in flight.
    /// `bytes` is the required length of the device.
    pub(crate) fn apply_engine(&mut self, bytes: u64) -> Result<(), &'static str> {
        let Some(engine) = &self.ioengine else { return Ok(()) };
        if engine == NULL {
            self.filename = Some(format!("null:size={bytes}"));
            return if bytes > 0 { Ok(()) } else { Err("ioengine=null: it needs size in bytes") };
        }
        self.ignored.0.push("ioengine".into());
        if SYNC_ENGINES.contains(&engine.as_str()) && self.load.iodepth > 1 {
            self.load.iodepth = 1;
            self.ignored.0.push(format!("iodepth (1 with ioengine={engine})"));
        }
        Ok(())
    }
}

/// The given options of fio that have no effect here.
#[derive(Debug, Clone, Default)]
pub struct IgnoredOptions(pub Vec<String>);

impl FromArgMatches for IgnoredOptions {
    fn from_arg_matches(matches: &ArgMatches) -> Result<IgnoredOptions, Error> {
        let given = |name: &&&str| matches.value_source(name).is_some();
        Ok(IgnoredOptions(
            IGNORED.iter().chain(IGNORED_SWITCHES).filter(given).map(ToString::to_string).collect(),
        ))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = IgnoredOptions::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for IgnoredOptions {
    fn augment_args(command: Command) -> Command {
        let arg = |name: &'static str| Arg::new(name).long(name).hide(true).action(ArgAction::Append);
        let command = command.args(IGNORED.iter().map(|name| arg(name).num_args(1)));
        command.args(IGNORED_SWITCHES.iter().map(|name| arg(name).num_args(0..=1).require_equals(true)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        IgnoredOptions::augment_args(command)
    }
}

fn parse_fio_ioengine(text: &str) -> Result<String, String> {
    match ENGINES.contains(&text) {
        true => Ok(text.to_owned()),
        false if text == NULL => Ok(text.to_owned()),
        false => Err(format!("not one that reads and writes a file's blocks. {WAY_OUT}")),
    }
}
