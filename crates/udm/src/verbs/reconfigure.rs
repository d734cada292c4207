//! `udm reconfigure`: the server reads its file again.

use crate::cli::ReconfigureArgs;
use crate::log;
use crate::output::{say, say_json};
use anyhow::{Result, bail};
use udm_control::api::{ReconfigureQuery, Reconfigured, verbs};

pub fn run(args: &ReconfigureArgs) -> Result<()> {
    let query = ReconfigureQuery { dry_run: Some(args.dry_run) };
    let done = args.talk.client()?.call(verbs::RECONFIGURE.with(&query), &())?;
    let (made, refused) = result_lines(&done);
    if args.print.json {
        say_json(&done)?;
    } else {
        say(&made.iter().map(|line| format!("{line}\n")).collect::<String>())?;
    }
    if refused.is_empty() {
        return Ok(());
    }
    refused.iter().for_each(|line| log::say(format!("udm: {line}\n")));
    bail!("reconfigure: {} of {} changes could not be made", refused.len(), done.changes.len())
}

/// What was done, a line each, and what could not be.
pub fn result_lines(done: &Reconfigured) -> (Vec<String>, Vec<String>) {
    let (mut made, mut refused) = (Vec::new(), Vec::new());
    for change in &done.changes {
        let name = &change.name;
        match (&change.error, change.change.as_str()) {
            (Some(why), "uuid" | "readonly") => refused.push(format!("{name}: {}: {why}", change.change)),
            (Some(why), _) => refused.push(format!("{name}: {why}")),
            (None, "create") => made.push(format!("+ {name}")),
            (None, "remove") => made.push(format!("- {name}")),
            (None, "take-over") => made.push(format!("~ {name}: taken over, table")),
            (None, _) => made.push(format!("~ {name}: table")),
        }
    }
    made.push(format!("= {} unchanged", done.unchanged));
    made.extend(done.notes.iter().map(|note| format!("! {note}")));
    (made, refused)
}
