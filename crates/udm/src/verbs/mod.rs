//! dmsetup's verbs, against a running `udm serve`.
//!
//! Contract: standard output is dmsetup's, byte for byte, or JSON with `--json`. A failure is an
//! error that `main` prints.

mod change;
mod events;
mod generate;
mod manual;
mod power;
mod queue;
mod reconfigure;
mod show;
mod tree;

pub use change::{current_dir, read_bounded, read_table};
pub use reconfigure::result_lines;
pub use show::{all_devices, all_tables, describe, table_lines};
pub use tree::{DeviceTree, TreeGlyphs, TreeStyle, deps_line};

use crate::cli::{ServerArgs, StateArgs, Verb};
use anyhow::{Context, Result};
use std::path::PathBuf;
use std::sync::Arc;
use udm_control::StateFolder;
use udm_control::client::{ClientError, ControlClient};
use udm_control::error::TextPosition;

/// Runs a verb that talks to a server or only writes files.
pub fn run(verb: &Verb) -> Result<()> {
    match verb {
        Verb::Create(args) => change::create(args),
        Verb::Remove(args) => change::remove(args),
        Verb::Rename(args) => change::rename(args),
        Verb::Load(args) => change::load(args),
        Verb::Clear(args) => change::clear(args),
        Verb::Suspend(args) => change::suspend(args),
        Verb::Resume(args) => change::resume(args),
        Verb::Message(args) => change::message(args),
        Verb::Queue(args) => queue::queue(args),
        Verb::Power(args) => power::power(args),
        Verb::Wait(args) => show::wait(args),
        Verb::Events(args) => events::print_events(args),
        Verb::Reconfigure(args) => reconfigure::run(args),
        Verb::Table(args) => show::table(args),
        Verb::Status(args) => show::status(args),
        Verb::Info(args) => show::info(args),
        Verb::Ls(args) if args.tree => tree::ls(&args.list),
        Verb::Ls(args) => show::ls(args),
        Verb::Deps(args) => tree::deps(args),
        Verb::Exports(args) => show::exports(args),
        Verb::Targets(args) => show::targets(args),
        Verb::Version(args) => show::version(args),
        Verb::Generate(args) => generate::run(args),
        Verb::Serve(_)
        | Verb::Demo(_)
        | Verb::Bench(_)
        | Verb::Lab(_)
        | Verb::LogWrites(_)
        | Verb::Cow(_)
        | Verb::Multipath(_)
        | Verb::Top(_)
        | Verb::Snapshot(_)
        | Verb::Web(_) => {
            unreachable!("main runs these itself")
        }
    }
}

impl ServerArgs {
    /// A client of the server that the arguments name.
    pub fn client(&self) -> Result<ControlClient> {
        Ok(ControlClient::new(socket_path(self.socket.clone())?))
    }
}

impl StateArgs {
    /// Opens the state folder: the given one, `$UDM_STATE`, or the default of the user.
    pub fn open(&self) -> Result<Arc<StateFolder>> {
        let given = self.folder.clone().or_else(|| env_path("UDM_STATE"));
        let path = given.or_else(|| match rustix::process::geteuid().is_root() {
            true => Some("/var/lib/udm".into()),
            false => {
                let home = || Some(env_path("HOME")?.join(".local/state"));
                Some(env_path("XDG_STATE_HOME").or_else(home)?.join("udm"))
            }
        });
        let path = path.context("state: neither XDG_STATE_HOME nor HOME is set: give --state FOLDER")?;
        let path = std::path::absolute(&path).with_context(|| path.display().to_string())?;
        Ok(StateFolder::new(path))
    }
}

/// A path in an environment variable; `None` if it is unset or empty.
fn env_path(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// The path of the control socket: as given, `$UDM_SOCKET`, or the default of the user.
pub fn socket_path(given: Option<PathBuf>) -> Result<PathBuf> {
    if let Some(path) = given.or_else(|| env_path("UDM_SOCKET")) {
        return Ok(path);
    }
    if rustix::process::geteuid().is_root() {
        return Ok("/run/udm/udm.sock".into());
    }
    let folder = env_path("XDG_RUNTIME_DIR")
        .context("control socket: XDG_RUNTIME_DIR is not set: give --socket PATH")?;
    Ok(folder.join("udm/udm.sock"))
}

/// Converts an error of the client. If a table is at fault, the text shows its line.
pub fn explain(error: ClientError, table: Option<&str>) -> anyhow::Error {
    let refused = match &error {
        ClientError::Refused(refused) => refused,
        ClientError::Unreachable { source, .. } => {
            return anyhow::anyhow!(
                "{error}: {source} (start it, or name its control socket with --socket or $UDM_SOCKET)"
            );
        }
        ClientError::Broken { .. } => return error.into(),
    };
    let number = |n: Option<u64>| usize::try_from(n?).ok();
    let position = number(refused.line).zip(number(refused.column)).map(|(line, column)| TextPosition {
        line,
        column,
        width: number(refused.width).unwrap_or(1),
    });
    match table.zip(position).and_then(|(table, position)| position.mark(table)) {
        Some(mark) => anyhow::anyhow!("{error}\n{mark}"),
        None => error.into(),
    }
}
