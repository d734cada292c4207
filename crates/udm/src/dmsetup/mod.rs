//! `dmsetup`: under this name udm accepts dmsetup's command line and prints its output, so scripts
//! run unchanged.
//!
//! Contract: standard output, standard error and exit status are dmsetup's, byte for byte, except
//! for the list in docs/dmsetup.md. `tests/dmsetup.rs` compares them with a recording.
//!
//! It is a client like any other. A command is dmsetup's own requests in its own order (`create` is
//! create, reload and resume), because errors name the request that failed. Each is one or two
//! requests on the control socket. Output that `udm` prints too exists once: columns (`columns`),
//! trees and dependencies (`verbs/tree`), table lines, and the concise form (`concise`).

mod change;
mod create;
mod misc;
mod options;
mod report;
mod session;
mod show;
mod stack;

use crate::args::socket_path;
use crate::log;
use crate::output;
use options::{CommandLine, OptionName};
use session::{CommandError, CommandResult, Session};
use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;
use udm_control::client::ControlClient;

/// The program name under which udm acts as dmsetup.
const PROGRAM: &str = "dmsetup";

/// A command of dmsetup.
struct Command {
    name: &'static str,
    usage: &'static str,
    /// Minimum and maximum number of arguments.
    words: (usize, usize),
    run: fn(&mut Session, &[String]) -> CommandResult,
}

const MANY: usize = usize::MAX;

macro_rules! commands {
    ($($name:literal $usage:literal $least:literal..=$most:tt $run:expr;)*) => {
        [$(Command { name: $name, usage: $usage, words: ($least, $most), run: $run },)*]
    };
}

const COMMANDS: [Command; 32] = commands! {
    "help" "" 0..=MANY misc::help;
    "create" "NAME [-u UUID] [-n|--table TABLE|FILE]; --concise [DEVICES]" 0..=2 create::create;
    "remove" "[--deferred] [-f] [--retry] NAME..." 0..=MANY change::remove;
    "remove_all" "[--deferred] [-f]" 0..=0 change::remove_all;
    "suspend" "[--noflush] [--nolockfs] NAME..." 0..=MANY change::suspend;
    "resume" "NAME..." 0..=MANY change::resume;
    "load" "NAME [--table TABLE|FILE]" 0..=2 create::load;
    "reload" "NAME [--table TABLE|FILE]" 0..=2 create::load;
    "clear" "NAME..." 0..=MANY change::clear;
    "wipe_table" "NAME..." 1..=MANY change::wipe_table;
    "rename" "NAME [--setuuid] NEWNAME|UUID" 1..=2 change::rename;
    "message" "NAME SECTOR MESSAGE" 2..=MANY change::message;
    "ls" "[--target TYPE] [-o OPTIONS] [--tree]" 0..=0 stack::ls;
    "info" "[-c [-o FIELDS]] [NAME...]" 0..=MANY show::info;
    "deps" "[-o OPTION] [NAME...]" 0..=MANY stack::deps;
    "status" "[--target TYPE] [NAME...]" 0..=MANY show::status;
    "table" "[--concise] [--target TYPE] [NAME...]" 0..=MANY show::table;
    "wait" "NAME [EVENT]" 0..=2 change::wait;
    "mknodes" "[NAME...]" 0..=MANY |_, _| Ok(());
    "mangle" "[NAME...]" 0..=MANY misc::mangle;
    "udevcreatecookie" "" 0..=0 |_, _| Ok(());
    "udevreleasecookie" "[COOKIE]" 0..=1 |_, _| Ok(());
    "udevcomplete" "COOKIE" 1..=1 |_, _| Ok(());
    "udevcomplete_all" "[MINUTES]" 0..=1 misc::complete_all;
    "udevcookies" "" 0..=0 misc::cookies;
    "target-version" "[TYPE...]" 1..=MANY misc::target_version;
    "targets" "" 0..=0 misc::targets;
    "version" "" 0..=0 misc::version;
    "splitname" "NAME [SUBSYSTEM]" 1..=2 misc::split_name;
    "setgeometry" "" 0..=MANY |_, _| misc::unsupported("setgeometry", "devices have no geometry");
    "stats" "" 0..=MANY |_, _| misc::unsupported("stats", "udm multipath and /metrics count requests");
    "measure" "" 0..=MANY |_, _| misc::unsupported("measure", "there is no IMA subsystem");
};

/// True if the program was called by the name dmsetup.
pub fn is_dmsetup(program: Option<&OsStr>) -> bool {
    program.map(Path::new).and_then(Path::file_name).is_some_and(|name| name == PROGRAM)
}

/// Runs a dmsetup command line.
pub fn run(words: impl Iterator<Item = std::ffi::OsString>) -> ExitCode {
    let words = words.map(|word| word.to_string_lossy().into_owned());
    let line = match CommandLine::parse(words) {
        Ok(line) => line,
        Err(why) => {
            return exit_code(&Err(CommandError::Line(format!("{PROGRAM}: {why}"))));
        }
    };
    let client = match socket_path(None) {
        Ok(path) => ControlClient::new(path),
        Err(error) => {
            return exit_code(&Err(CommandError::Failed(crate::strip_os_error(&format!("{error:#}")))));
        }
    };
    let mut session = Session { line, client, out: String::new() };
    let done = command(&mut session);
    // Prints the output for the devices that succeeded, even if others failed.
    let done = match output::say(&session.out) {
        Ok(()) => done,
        Err(error) => {
            done.and_then(|()| session::command_failed(crate::strip_os_error(&format!("{error:#}"))))
        }
    };
    exit_code(&done)
}

fn command(session: &mut Session) -> CommandResult {
    let words = std::mem::take(&mut session.line.words);
    if session.has(OptionName::Help) {
        return misc::help(session, &words);
    }
    if session.has(OptionName::Version) {
        return misc::version(session, &words);
    }
    let Some((name, words)) = words.split_first() else {
        return Err(CommandError::Usage("No command given.".into()));
    };
    let Some(command) = COMMANDS.iter().find(|command| command.name == name) else {
        return Err(CommandError::Usage("Unknown command.".into()));
    };
    if report::is_repeated(session)? && !report::is_report(session, name) {
        return misc::unsupported(name, "only reports are repeated: info -c, splitname");
    }
    let (least, most) = command.words;
    if words.len() < least || words.len() > most {
        return Err(CommandError::Usage("Incorrect number of arguments.".into()));
    }
    (command.run)(session, words)
}

fn usage() -> String {
    let commands = COMMANDS.iter().map(|command| format!("\t{} {}\n", command.name, command.usage));
    format!(
        "Usage:\n\n{PROGRAM} [OPTIONS] COMMAND\n\n{}\nNAME is a device's name, or -u UUID, or -j MAJOR -m MINOR. docs/dmsetup.md says \
         what differs from dmsetup.\n",
        commands.collect::<String>()
    )
}

/// Prints the error, if any; returns the exit status.
fn exit_code(done: &CommandResult) -> ExitCode {
    let text = match done {
        Ok(()) => String::new(),
        Err(CommandError::Failed(text)) => format!("{text}\nCommand failed.\n"),
        Err(CommandError::Line(text)) => format!("{text}\nCouldn't process command line.\n"),
        Err(CommandError::Silent(text)) => format!("{text}\n"),
        Err(CommandError::Usage(text)) => format!("{text}\n{}\n", usage()),
    };
    if !text.is_empty() {
        log::say(text);
    }
    log::flush();
    if done.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
