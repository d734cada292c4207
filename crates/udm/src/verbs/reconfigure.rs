//! `udm reconfigure`: makes the server read its file again.

use crate::args::{OutputFormatArgs, ServerArgs};
use crate::log;
use crate::output::{print_json_to_stdout, print_to_stdout};
use anyhow::{Result, bail};
use clap::Args;
use udm_control::api::{ReconfigureQuery, ReconfigureReport, verbs};

/// The arguments of `udm reconfigure`.
#[derive(Debug, Args)]
pub struct ReconfigureArgs {
    #[command(flatten)]
    pub server: ServerArgs,
    #[command(flatten)]
    pub print: OutputFormatArgs,
    /// Print the changes without making them
    #[arg(short = 'n', long)]
    pub dry_run: bool,
}

pub fn run(args: &ReconfigureArgs) -> Result<()> {
    let query = ReconfigureQuery { dry_run: Some(args.dry_run) };
    let done = args.server.client()?.call(verbs::RECONFIGURE.with(&query), &())?;
    let (changed, refused) = format_reconfigure_changes(&done);
    if args.print.json {
        print_json_to_stdout(&done)?;
    } else {
        print_to_stdout(&changed.iter().map(|line| format!("{line}\n")).collect::<String>())?;
    }
    if refused.is_empty() {
        return Ok(());
    }
    refused.iter().for_each(|line| log::queue_stderr_text(&format!("udm: {line}\n")));
    bail!("reconfigure: {} of {} changes could not be made", refused.len(), done.changes.len())
}

/// One line per change that was made, and one per change that failed.
pub fn format_reconfigure_changes(done: &ReconfigureReport) -> (Vec<String>, Vec<String>) {
    let (mut changed, mut refused) = (Vec::new(), Vec::new());
    for change in &done.changes {
        let name = &change.name;
        match (&change.error, change.change.as_str()) {
            (Some(why), "uuid" | "readonly") => refused.push(format!("{name}: {}: {why}", change.change)),
            (Some(why), _) => refused.push(format!("{name}: {why}")),
            (None, "create") => changed.push(format!("+ {name}")),
            (None, "remove") => changed.push(format!("- {name}")),
            (None, "take-over") => changed.push(format!("~ {name}: taken over, table")),
            (None, same @ ("allow" | "description" | "throttle")) => {
                changed.push(format!("~ {name}: {same}"));
            }
            (None, _) => changed.push(format!("~ {name}: table")),
        }
    }
    changed.push(format!("= {} unchanged", done.unchanged));
    changed.extend(done.notes.iter().map(|note| format!("! {note}")));
    (changed, refused)
}
