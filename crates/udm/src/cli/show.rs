//! What verbs that show something take.

use super::{ListArgs, Print, ServerArgs};
use clap::{Args, ValueEnum};

/// `udm table`, `udm status`.
#[derive(Debug, Args)]
pub struct ShowArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    #[command(flatten)]
    pub print: Print,
    /// The devices [default: all, each with its name in front]
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,
    /// The table in the inactive slot
    #[arg(long)]
    pub inactive: bool,
    /// Only targets of this type
    #[arg(long, value_name = "TYPE")]
    pub target: Option<String>,
}

/// `udm table`.
#[derive(Debug, Args)]
pub struct TableArgs {
    #[command(flatten)]
    pub show: ShowArgs,
    /// All on one line, as udm create --concise takes it: NAME,UUID,MINOR,FLAGS,LINE,LINE;NAME,...
    #[arg(long, conflicts_with = "json")]
    pub concise: bool,
}

/// `udm info`.
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
    /// A line a device, with a column a field
    #[arg(short = 'c', short_alias = 'C', long, conflicts_with = "json")]
    pub columns: bool,
    /// The fields; behind a + in addition to those that are shown otherwise; help lists them
    #[arg(short = 'o', long, value_name = "FIELDS", requires = "columns")]
    pub options: Option<String>,
    /// Sort by these fields, one with a - in front downwards
    #[arg(short = 'O', long, value_name = "FIELDS", requires = "columns", allow_hyphen_values = true)]
    pub sort: Option<String>,
    /// Only devices that are so: 'open>0 && (name=a || uuid!=b)'
    #[arg(short = 'S', long, value_name = "CRITERIA", requires = "columns")]
    pub select: Option<String>,
    /// No line of headings; values are not aligned then
    #[arg(long, requires = "columns")]
    pub noheadings: bool,
    /// What stands between values, which are not aligned then [default: a blank, and : without
    /// headings]
    #[arg(long, value_name = "TEXT", requires = "columns")]
    pub separator: Option<String>,
    /// Each value as DM_FIELD='VALUE'
    #[arg(long, requires = "columns")]
    pub nameprefixes: bool,
    /// Those without quotes
    #[arg(long, requires = "nameprefixes")]
    pub unquoted: bool,
    /// A line a field, not a line a device
    #[arg(long, requires = "columns")]
    pub rows: bool,
}

/// `udm ls`.
#[derive(Debug, Args)]
pub struct LsArgs {
    #[command(flatten)]
    pub list: ListArgs,
    /// Show what lies on what
    #[arg(long, conflicts_with = "json")]
    pub tree: bool,
    /// Only devices with a target of this type
    #[arg(long, value_name = "TYPE", conflicts_with = "tree")]
    pub target: Option<String>,
}

/// `udm deps`.
#[derive(Debug, Args)]
pub struct DepsArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    #[command(flatten)]
    pub print: Print,
    /// How what they lie on is named
    #[arg(short = 'o', long = "options", value_name = "HOW", default_value = "devno")]
    pub how: DepName,
    /// Those of the table in the inactive slot
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
    /// By its name, or the URI of what is no mapped device
    Devname,
}
