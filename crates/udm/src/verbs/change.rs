//! Verbs that change something.

use super::explain;
use crate::cli::{
    CreateArgs, LoadArgs, MessageArgs, NamesArgs, RemoveArgs, RenameArgs, ResumeArgs, ServerArgs, SuspendArgs,
};
use crate::concise;
use crate::output::{say, say_json};
use anyhow::{Context, Result, bail};
use std::io::Read;
use std::path::Path;
use udm_control::api::{self, verbs};
use udm_control::client::{ClientError, ControlClient};
use udm_control::verbs::TABLE_MAX;

/// The table of a verb: given, in a file, or on standard input.
fn table_text(table: Option<&str>, file: Option<&Path>) -> Result<String> {
    match (table, file) {
        (Some(table), _) => Ok(table.into()),
        (None, Some(file)) => read_table(file),
        (None, None) => read_bounded(std::io::stdin().lock(), "standard input"),
    }
}

/// The folder from which relative paths count: ours. A server refuses them when we can't say.
pub fn folder() -> Option<String> {
    std::env::current_dir().ok()?.into_os_string().into_string().ok()
}

/// The table in `file`.
pub fn read_table(file: &Path) -> Result<String> {
    let name = file.display().to_string();
    let open = std::fs::File::open(file).with_context(|| name.clone())?;
    read_bounded(open, &name)
}

/// A table that is read from elsewhere; `name` says from where in errors.
///
/// # Errors
/// What can't be read, is no text, or is too long.
pub fn read_bounded(from: impl Read, name: &str) -> Result<String> {
    let mut text = String::new();
    from.take(TABLE_MAX as u64 + 1).read_to_string(&mut text).with_context(|| format!("{name}: table"))?;
    if text.len() > TABLE_MAX {
        bail!("{name}: table: longer than {TABLE_MAX} bytes");
    }
    Ok(text)
}

/// Makes devices in concise form, one after the other, until one fails.
fn create_concise(args: &CreateArgs) -> Result<()> {
    let text = table_text(args.name.as_deref(), None)?;
    let client = args.talk.client()?;
    let (devices, wrong) = concise::parse(&text);
    for device in &devices {
        concise::make(&client, device).map_err(|refused| explain(refused.error, Some(&device.table)))?;
    }
    wrong.map_or(Ok(()), |why| bail!(why.replace('\n', ": ")))
}

pub fn create(args: &CreateArgs) -> Result<()> {
    if args.concise {
        return create_concise(args);
    }
    let table = match args.notable {
        true => None,
        false => Some(table_text(args.table.as_deref(), args.file.as_deref())?),
    };
    let new = api::Create {
        name: args.name.clone().unwrap_or_default(),
        uuid: args.uuid.clone(),
        table,
        folder: folder(),
        minor: None,
        dm_mq_queue_depth: args.dm_mq_queue_depth,
        dm_mq_nr_hw_queues: args.dm_mq_nr_hw_queues,
    };
    let made = args.talk.client()?.call(verbs::CREATE_DEVICE, &new);
    let made = made.map_err(|e| explain(e, new.table.as_deref()))?;
    if args.print.json { say_json(&made) } else { Ok(()) }
}

pub fn load(args: &LoadArgs) -> Result<()> {
    let table = table_text(args.table.as_deref(), args.file.as_deref())?;
    let body = api::Load { table, folder: folder(), read_only: None };
    let done = args.talk.client()?.call(verbs::LOAD_TABLE.on(&args.name), &body);
    done.map_err(|e| explain(e, Some(&body.table)))
}

/// Does `verb` to each device in turn; the first failure ends it.
fn each(
    talk: &ServerArgs,
    names: &[String],
    verb: impl Fn(&ControlClient, &str) -> Result<(), ClientError>,
) -> Result<()> {
    let client = talk.client()?;
    names.iter().try_for_each(|name| verb(&client, name).map_err(|e| explain(e, None)))
}

pub fn remove(args: &RemoveArgs) -> Result<()> {
    let (force, deferred, timeout_ms) = (Some(args.force), Some(args.deferred), args.until.timeout_ms());
    let query = api::RemoveQuery { force, deferred, timeout_ms };
    each(&args.talk, &args.names, |client, name| client.call(verbs::REMOVE_DEVICE.on(name).with(&query), &()))
}

pub fn rename(args: &RenameArgs) -> Result<()> {
    let new = Some(args.new.clone());
    let to = match args.setuuid {
        true => api::Rename { uuid: new, ..api::Rename::default() },
        false => api::Rename { name: new, ..api::Rename::default() },
    };
    args.talk.client()?.call(verbs::RENAME_DEVICE.on(&args.name), &to).map_err(|e| explain(e, None))
}

pub fn clear(args: &NamesArgs) -> Result<()> {
    each(&args.talk, &args.names, |client, name| client.call(verbs::CLEAR_TABLE.on(name), &()))
}

pub fn suspend(args: &SuspendArgs) -> Result<()> {
    let (noflush, timeout_ms) = (Some(args.noflush), args.until.timeout_ms());
    let how = api::SuspendTogether { names: args.names.clone(), noflush, timeout_ms };
    args.talk.client()?.call(verbs::SUSPEND_TOGETHER, &how).map_err(|e| explain(e, None))
}

pub fn resume(args: &ResumeArgs) -> Result<()> {
    let how = api::ResumeTogether { names: args.names.clone(), timeout_ms: args.until.timeout_ms() };
    args.talk.client()?.call(verbs::RESUME_TOGETHER, &how).map_err(|e| explain(e, None))
}

pub fn message(args: &MessageArgs) -> Result<()> {
    let message = api::Message { sector: args.sector, message: args.message.join(" "), folder: folder() };
    let answer = args.talk.client()?.call(verbs::SEND_MESSAGE.on(&args.name), &message);
    let answer = answer.map_err(|e| explain(e, None))?;
    match (args.print.json, answer.answer.as_str()) {
        (true, _) => say_json(&answer),
        (false, "") => Ok(()),
        (false, text) => say(&format!("{}\n", text.trim_end_matches('\n'))),
    }
}
