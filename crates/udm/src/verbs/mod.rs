//! dmsetup's verbs, against a running `udm serve`.
//!
//! Contract: what goes to standard output is dmsetup's, byte for byte, or JSON with `--json`; what
//! goes wrong is an error that `main` prints.

mod change;
mod generate;
mod show;

pub use change::{folder, read_table};

use crate::cli::{Talk, Verb};
use anyhow::{Context, Result};
use std::path::PathBuf;
use udm_control::client::{ClientError, ControlClient};
use udm_control::error::Position;

/// Runs one of the verbs that speak to a server, or need none at all.
pub fn run(verb: &Verb) -> Result<()> {
    match verb {
        Verb::Create(args) => change::create(args),
        Verb::Remove(args) => change::remove(args),
        Verb::Load(args) => change::load(args),
        Verb::Clear(args) => change::clear(args),
        Verb::Suspend(args) => change::suspend(args),
        Verb::Resume(args) => change::resume(args),
        Verb::Message(args) => change::message(args),
        Verb::Table(args) => show::table(args),
        Verb::Status(args) => show::status(args),
        Verb::Info(args) => show::info(args),
        Verb::Ls(args) => show::ls(args),
        Verb::Exports(args) => show::exports(args),
        Verb::Targets(args) => show::targets(args),
        Verb::Version(args) => show::version(args),
        Verb::Generate(args) => generate::run(args),
        Verb::Serve(_)
        | Verb::Demo(_)
        | Verb::Bench(_)
        | Verb::LogWrites(_)
        | Verb::Cow(_)
        | Verb::Snapshot(_) => {
            unreachable!("main runs these itself")
        }
    }
}

impl Talk {
    /// A client of the server that is meant.
    pub fn client(&self) -> Result<ControlClient> {
        Ok(ControlClient::new(socket_path(self.socket.clone())?))
    }
}

/// Where the control socket is: as given, `$UDM_SOCKET`, or the user's place for it.
pub fn socket_path(given: Option<PathBuf>) -> Result<PathBuf> {
    let named = |variable: &str| std::env::var_os(variable).filter(|v| !v.is_empty()).map(PathBuf::from);
    if let Some(path) = given.or_else(|| named("UDM_SOCKET")) {
        return Ok(path);
    }
    if rustix::process::geteuid().is_root() {
        return Ok("/run/udm/udm.sock".into());
    }
    let folder =
        named("XDG_RUNTIME_DIR").context("control socket: XDG_RUNTIME_DIR is not set: give --socket PATH")?;
    Ok(folder.join("udm/udm.sock"))
}

/// What the server refused, with the table's line when a table is to blame.
pub fn explain(error: ClientError, table: Option<&str>) -> anyhow::Error {
    let ClientError::Refused(refused) = &error else { return error.into() };
    let number = |n: Option<u64>| usize::try_from(n?).ok();
    let position = number(refused.line).zip(number(refused.column)).map(|(line, column)| Position {
        line,
        column,
        width: number(refused.width).unwrap_or(1),
    });
    match table.zip(position).and_then(|(table, position)| position.mark(table)) {
        Some(mark) => anyhow::anyhow!("{error}\n{mark}"),
        None => error.into(),
    }
}
