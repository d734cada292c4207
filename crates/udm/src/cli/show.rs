//! Arguments of verbs that show something.

use super::{ListArgs, Print, ServerArgs};
use clap::{Args, ValueEnum};

/// The arguments of `udm table` and `udm status`.
#[derive(Debug, Args)]
pub struct ShowArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    #[command(flatten)]
    pub print: Print,
    /// The devices [default: all, each line with the device's name in front]
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,
    /// Use the table in the inactive slot
    #[arg(long)]
    pub inactive: bool,
    /// Only targets of this type
    #[arg(long, value_name = "TYPE")]
    pub target: Option<String>,
}

/// The arguments of `udm table`.
#[derive(Debug, Args)]
pub struct TableArgs {
    #[command(flatten)]
    pub show: ShowArgs,
    /// Print all on one line, as udm create --concise reads it:
    /// NAME,UUID,MINOR,FLAGS,LINE,LINE;NAME,...
    #[arg(long, conflicts_with = "json")]
    pub concise: bool,
}

/// The arguments of `udm info`.
#[derive(Debug, Args)]
pub struct InfoArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    #[command(flatten)]
    pub print: Print,
    /// The devices [default: all]
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,
    #[command(flatten)]
    pub columns: ColumnArgs,
}

/// How `udm info -c` prints.
#[derive(Debug, Args)]
pub struct ColumnArgs {
    /// Print one line per device, with one column per field
    #[arg(short = 'c', short_alias = 'C', long, conflicts_with = "json")]
    pub columns: bool,
    /// The fields to print; with a + in front, in addition to the default ones; help lists all
    /// fields
    #[arg(short = 'o', long, value_name = "FIELDS", requires = "columns")]
    pub options: Option<String>,
    /// Sort by these fields; a - in front of a field sorts in descending order
    #[arg(short = 'O', long, value_name = "FIELDS", requires = "columns", allow_hyphen_values = true)]
    pub sort: Option<String>,
    /// Only devices that meet these criteria: 'open>0 && (name=a || uuid!=b)'
    #[arg(short = 'S', long, value_name = "CRITERIA", requires = "columns")]
    pub select: Option<String>,
    /// Omit the line of headings; values are then not aligned
    #[arg(long, requires = "columns")]
    pub noheadings: bool,
    /// Separator of values, which are then not aligned [default: a blank, or : without headings]
    #[arg(long, value_name = "TEXT", requires = "columns")]
    pub separator: Option<String>,
    /// Print each value as DM_FIELD='VALUE'
    #[arg(long, requires = "columns")]
    pub nameprefixes: bool,
    /// Print these values without quotes
    #[arg(long, requires = "nameprefixes")]
    pub unquoted: bool,
    /// Print one line per field instead of one line per device
    #[arg(long, requires = "columns")]
    pub rows: bool,
}

/// The arguments of `udm ls`.
#[derive(Debug, Args)]
pub struct LsArgs {
    #[command(flatten)]
    pub list: ListArgs,
    /// Show the devices as trees, each above the devices that it uses
    #[arg(long, conflicts_with = "json")]
    pub tree: bool,
    /// Only devices with a target of this type
    #[arg(long, value_name = "TYPE", conflicts_with = "tree")]
    pub target: Option<String>,
}

/// The arguments of `udm deps`.
#[derive(Debug, Args)]
pub struct DepsArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    #[command(flatten)]
    pub print: Print,
    /// How the devices below are named
    #[arg(short = 'o', long = "options", value_name = "HOW", default_value = "devno")]
    pub how: DepName,
    /// Use the table in the inactive slot
    #[arg(long)]
    pub inactive: bool,
    /// The devices [default: all]
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,
}

/// How a device is named in a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DepName {
    /// By its number
    Devno,
    /// By its name; a device that is not a mapped device by its URI
    Devname,
}
