//! Verbs that change a device.

use crate::args::{DrainTimeoutArgs, OutputFormatArgs, ServerArgs};
use crate::concise;
use crate::output::{print_json_to_stdout, print_to_stdout};
use crate::requests::{current_dir, explain_client_error};
use anyhow::{Context, Result, bail};
use clap::Args;
use std::io::Read;
use std::path::{Path, PathBuf};
use udm_control::api::{self, verbs};
use udm_control::client::{ControlClient, ControlClientError};
use udm_control::verbs::TABLE_MAX;

/// The table of a verb: from the command line, a file or standard input.
fn read_table_argument(table: Option<&str>, file: Option<&Path>) -> Result<String> {
    match (table, file) {
        (Some(table), _) => Ok(table.into()),
        (None, Some(file)) => read_table(file),
        (None, None) => read_bounded_table(std::io::stdin().lock(), "standard input"),
    }
}

/// Reads the table in `file`.
pub fn read_table(file: &Path) -> Result<String> {
    let name = file.display().to_string();
    let open = std::fs::File::open(file).with_context(|| name.clone())?;
    read_bounded_table(open, &name)
}

/// Reads a table; `name` is the source for error texts.
///
/// # Errors
/// The table cannot be read, is not UTF-8, or is longer than `TABLE_MAX` bytes.
pub fn read_bounded_table(from: impl Read, name: &str) -> Result<String> {
    let mut text = String::new();
    from.take(TABLE_MAX as u64 + 1).read_to_string(&mut text).with_context(|| format!("{name}: table"))?;
    if text.len() > TABLE_MAX {
        bail!("{name}: table: longer than {TABLE_MAX} bytes");
    }
    Ok(text)
}

/// Creates devices in concise form one after the other; stops at the first failure.
fn create_concise(args: &CreateArgs) -> Result<()> {
    let text = read_table_argument(args.name.as_deref(), None)?;
    let client = args.server.client()?;
    let (devices, wrong) = concise::parse_concise_devices(&text);
    for device in &devices {
        concise::create_load_resume_device(&client, device)
            .map_err(|refused| explain_client_error(refused.error, Some(&device.table)))?;
    }
    wrong.map_or(Ok(()), |why| bail!(why.replace('\n', ": ")))
}

/// The arguments of `udm create`.
#[derive(Debug, Args)]
pub struct CreateArgs {
    #[command(flatten)]
    pub server: ServerArgs,
    #[command(flatten)]
    pub print: OutputFormatArgs,
    /// The name of the device; with --concise, the devices [default: standard input]
    #[arg(required_unless_present = "concise", value_name = "NAME|DEVICES")]
    pub name: Option<String>,
    /// A file that holds the table [default: standard input]. Relative paths in a table are
    /// relative to the current folder
    #[arg(conflicts_with_all = ["table", "notable"])]
    pub file: Option<PathBuf>,
    /// The table
    #[arg(long, conflicts_with = "notable")]
    pub table: Option<String>,
    /// Create the device without a table
    #[arg(short, long)]
    pub notable: bool,
    /// The uuid of the device
    #[arg(short, long)]
    pub uuid: Option<String>,
    /// Queue depth of a request-based multipath device (queue_mode other than bio): the tags of
    /// each hardware queue, 0 for 2048, at most 10240. Such a device has a queue only with this or
    /// the next option
    #[arg(long = "dm_mq_queue_depth", value_name = "N", conflicts_with = "concise")]
    pub dm_mq_queue_depth: Option<u32>,
    /// Number of its hardware queues: 0 for 1, at most 32 and at most one per core
    #[arg(long = "dm_mq_nr_hw_queues", value_name = "N", conflicts_with = "concise")]
    pub dm_mq_nr_hw_queues: Option<u32>,
    /// Create the devices that udm table --concise printed:
    /// NAME,UUID,MINOR,FLAGS,LINE,LINE;NAME,... UUID, MINOR and FLAGS (rw or ro) may be empty
    #[arg(long, conflicts_with_all = ["file", "table", "notable", "uuid", "json"])]
    pub concise: bool,
}

pub fn run_create_command(args: &CreateArgs) -> Result<()> {
    if args.concise {
        return create_concise(args);
    }
    let table = match args.notable {
        true => None,
        false => Some(read_table_argument(args.table.as_deref(), args.file.as_deref())?),
    };
    let new = api::CreateDeviceRequest {
        name: args.name.clone().unwrap_or_default(),
        uuid: args.uuid.clone(),
        table,
        folder: current_dir(),
        minor: None,
        dm_mq_queue_depth: args.dm_mq_queue_depth,
        dm_mq_nr_hw_queues: args.dm_mq_nr_hw_queues,
    };
    let created = args.server.client()?.call(verbs::CREATE_DEVICE, &new);
    let created = created.map_err(|e| explain_client_error(e, new.table.as_deref()))?;
    if args.print.json { print_json_to_stdout(&created) } else { Ok(()) }
}

/// The arguments of `udm load`.
#[derive(Debug, Args)]
pub struct LoadTableArgs {
    #[command(flatten)]
    pub server: ServerArgs,
    /// The device
    pub name: String,
    /// A file that holds the table [default: standard input]. Relative paths in a table are
    /// relative to the current folder
    #[arg(conflicts_with = "table")]
    pub file: Option<PathBuf>,
    /// The table
    #[arg(long)]
    pub table: Option<String>,
}

pub fn run_load_command(args: &LoadTableArgs) -> Result<()> {
    let table = read_table_argument(args.table.as_deref(), args.file.as_deref())?;
    let body = api::LoadTableRequest { table, folder: current_dir(), read_only: None };
    let done = args.server.client()?.call(verbs::LOAD_TABLE.on(&args.name), &body);
    done.map_err(|e| explain_client_error(e, Some(&body.table)))
}

/// Applies `verb` to each device in turn; stops at the first failure.
fn call_for_each_device(
    server: &ServerArgs,
    names: &[String],
    verb: impl Fn(&ControlClient, &str) -> Result<(), ControlClientError>,
) -> Result<()> {
    let client = server.client()?;
    names.iter().try_for_each(|name| verb(&client, name).map_err(|e| explain_client_error(e, None)))
}

/// The arguments of `udm remove`.
#[derive(Debug, Args)]
pub struct RemoveArgs {
    #[command(flatten)]
    pub server: ServerArgs,
    #[command(flatten)]
    pub timeout: DrainTimeoutArgs,
    /// The devices
    #[arg(required = true, value_name = "NAME")]
    pub names: Vec<String>,
    /// First replace the table of the device by one that fails every request
    #[arg(short, long)]
    pub force: bool,
    /// Remove a device in use as soon as it is no longer in use
    #[arg(long)]
    pub deferred: bool,
}

pub fn run_remove_command(args: &RemoveArgs) -> Result<()> {
    let (force, deferred, timeout_ms) = (Some(args.force), Some(args.deferred), args.timeout.timeout_ms());
    let query = api::RemoveDeviceQuery { force, deferred, timeout_ms };
    call_for_each_device(&args.server, &args.names, |client, name| {
        client.call(verbs::REMOVE_DEVICE.on(name).with(&query), &())
    })
}

/// The arguments of `udm rename`.
#[derive(Debug, Args)]
pub struct RenameArgs {
    #[command(flatten)]
    pub server: ServerArgs,
    /// The device
    pub name: String,
    /// The new name, or with --setuuid the uuid
    #[arg(value_name = "NEWNAME|UUID")]
    pub new: String,
    /// Set the uuid of a device that has none
    #[arg(long)]
    pub setuuid: bool,
}

pub fn run_rename_command(args: &RenameArgs) -> Result<()> {
    let new = Some(args.new.clone());
    let to = match args.setuuid {
        true => api::RenameDeviceRequest { uuid: new, ..api::RenameDeviceRequest::default() },
        false => api::RenameDeviceRequest { name: new, ..api::RenameDeviceRequest::default() },
    };
    args.server
        .client()?
        .call(verbs::RENAME_DEVICE.on(&args.name), &to)
        .map_err(|e| explain_client_error(e, None))
}

/// The arguments of verbs that take only devices.
#[derive(Debug, Args)]
pub struct DeviceNamesArgs {
    #[command(flatten)]
    pub server: ServerArgs,
    /// The devices
    #[arg(required = true, value_name = "NAME")]
    pub names: Vec<String>,
}

pub fn run_clear_command(args: &DeviceNamesArgs) -> Result<()> {
    call_for_each_device(&args.server, &args.names, |client, name| {
        client.call(verbs::CLEAR_TABLE.on(name), &())
    })
}

/// The arguments of `udm suspend`.
#[derive(Debug, Args)]
pub struct SuspendArgs {
    #[command(flatten)]
    pub server: ServerArgs,
    #[command(flatten)]
    pub timeout: DrainTimeoutArgs,
    /// The devices
    #[arg(required = true, value_name = "NAME")]
    pub names: Vec<String>,
    /// Do not wait for requests that targets hold back
    #[arg(long)]
    pub noflush: bool,
    /// Accepted for compatibility with dmsetup; udm has no file system to freeze
    #[arg(long)]
    pub nolockfs: bool,
}

pub fn run_suspend_command(args: &SuspendArgs) -> Result<()> {
    let (noflush, timeout_ms) = (Some(args.noflush), args.timeout.timeout_ms());
    let how = api::SuspendDevicesRequest { names: args.names.clone(), noflush, timeout_ms };
    args.server.client()?.call(verbs::SUSPEND_TOGETHER, &how).map_err(|e| explain_client_error(e, None))
}

/// The arguments of `udm resume`.
#[derive(Debug, Args)]
pub struct ResumeArgs {
    #[command(flatten)]
    pub server: ServerArgs,
    #[command(flatten)]
    pub timeout: DrainTimeoutArgs,
    /// The devices
    #[arg(required = true, value_name = "NAME")]
    pub names: Vec<String>,
}

pub fn run_resume_command(args: &ResumeArgs) -> Result<()> {
    let how = api::ResumeDevicesRequest { names: args.names.clone(), timeout_ms: args.timeout.timeout_ms() };
    args.server.client()?.call(verbs::RESUME_TOGETHER, &how).map_err(|e| explain_client_error(e, None))
}

/// The arguments of `udm message`.
#[derive(Debug, Args)]
pub struct MessageArgs {
    #[command(flatten)]
    pub server: ServerArgs,
    #[command(flatten)]
    pub print: OutputFormatArgs,
    /// The device
    pub name: String,
    /// A sector inside the target; 0 addresses the first target
    pub sector: u64,
    /// The words of the message; put -- before them if one begins with -
    #[arg(required = true)]
    pub message: Vec<String>,
}

pub fn run_message_command(args: &MessageArgs) -> Result<()> {
    let message = api::TargetMessageRequest {
        sector: args.sector,
        message: args.message.join(" "),
        folder: current_dir(),
    };
    let answer = args.server.client()?.call(verbs::SEND_MESSAGE.on(&args.name), &message);
    let answer = answer.map_err(|e| explain_client_error(e, None))?;
    match (args.print.json, answer.answer.as_str()) {
        (true, _) => print_json_to_stdout(&answer),
        (false, "") => Ok(()),
        (false, text) => print_to_stdout(&format!("{}\n", text.trim_end_matches('\n'))),
    }
}
