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

use crate::args::resolve_control_socket_path;
use crate::log;
use crate::output;
use options::{DmsetupCommandLine, DmsetupOption};
use session::{DmsetupError, DmsetupInvocation, DmsetupResult};
use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;
use udm_control::client::ControlClient;

/// The program name under which udm acts as dmsetup.
const PROGRAM: &str = "dmsetup";

/// A command of dmsetup.
struct DmsetupCommand {
    name: &'static str,
    usage: &'static str,
    /// Minimum and maximum number of arguments.
    words: (usize, usize),
    run: fn(&mut DmsetupInvocation, &[String]) -> DmsetupResult,
}

const MANY: usize = usize::MAX;

macro_rules! commands {
    ($($name:literal $usage:literal $least:literal..=$most:tt $run:expr;)*) => {
        [$(DmsetupCommand { name: $name, usage: $usage, words: ($least, $most), run: $run },)*]
    };
}

const COMMANDS: [DmsetupCommand; 32] = commands! {
    "help" "" 0..=MANY misc::run_dmsetup_help;
    "create" "NAME [-u UUID] [-n|--table TABLE|FILE]; --concise [DEVICES]" 0..=2 create::run_dmsetup_create;
    "remove" "[--deferred] [-f] [--retry] NAME..." 0..=MANY change::run_dmsetup_remove;
    "remove_all" "[--deferred] [-f]" 0..=0 change::run_dmsetup_remove_all;
    "suspend" "[--noflush] [--nolockfs] NAME..." 0..=MANY change::run_dmsetup_suspend;
    "resume" "NAME..." 0..=MANY change::run_dmsetup_resume;
    "load" "NAME [--table TABLE|FILE]" 0..=2 create::run_dmsetup_load;
    "reload" "NAME [--table TABLE|FILE]" 0..=2 create::run_dmsetup_load;
    "clear" "NAME..." 0..=MANY change::run_dmsetup_clear;
    "wipe_table" "NAME..." 1..=MANY change::run_dmsetup_wipe_table;
    "rename" "NAME [--setuuid] NEWNAME|UUID" 1..=2 change::run_dmsetup_rename;
    "message" "NAME SECTOR MESSAGE" 2..=MANY change::run_dmsetup_message;
    "ls" "[--target TYPE] [-o OPTIONS] [--tree]" 0..=0 stack::run_dmsetup_ls;
    "info" "[-c [-o FIELDS]] [NAME...]" 0..=MANY show::run_dmsetup_info;
    "deps" "[-o OPTION] [NAME...]" 0..=MANY stack::run_dmsetup_deps;
    "status" "[--target TYPE] [NAME...]" 0..=MANY show::run_dmsetup_status;
    "table" "[--concise] [--target TYPE] [NAME...]" 0..=MANY show::run_dmsetup_table;
    "wait" "NAME [EVENT]" 0..=2 change::run_dmsetup_wait;
    "mknodes" "[NAME...]" 0..=MANY |_, _| Ok(());
    "mangle" "[NAME...]" 0..=MANY misc::run_dmsetup_mangle;
    "udevcreatecookie" "" 0..=0 |_, _| Ok(());
    "udevreleasecookie" "[COOKIE]" 0..=1 |_, _| Ok(());
    "udevcomplete" "COOKIE" 1..=1 |_, _| Ok(());
    "udevcomplete_all" "[MINUTES]" 0..=1 misc::run_dmsetup_udevcomplete_all;
    "udevcookies" "" 0..=0 misc::run_dmsetup_udevcookies;
    "target-version" "[TYPE...]" 1..=MANY misc::run_dmsetup_target_version;
    "targets" "" 0..=0 misc::run_dmsetup_targets;
    "version" "" 0..=0 misc::run_dmsetup_version;
    "splitname" "NAME [SUBSYSTEM]" 1..=2 misc::run_dmsetup_splitname;
    "setgeometry" "" 0..=MANY |_, _| misc::fail_unsupported_feature("setgeometry", "devices have no geometry");
    "stats" "" 0..=MANY |_, _| misc::fail_unsupported_feature("stats", "udm multipath and /metrics count requests");
    "measure" "" 0..=MANY |_, _| misc::fail_unsupported_feature("measure", "there is no IMA subsystem");
};

/// True if the program was called by the name dmsetup.
pub fn is_dmsetup(program: Option<&OsStr>) -> bool {
    program.map(Path::new).and_then(Path::file_name).is_some_and(|name| name == PROGRAM)
}

/// Runs a dmsetup command line.
pub fn run_dmsetup_command_line(words: impl Iterator<Item = std::ffi::OsString>) -> ExitCode {
    let words = words.map(|word| word.to_string_lossy().into_owned());
    let line = match DmsetupCommandLine::parse(words) {
        Ok(line) => line,
        Err(why) => {
            return report_dmsetup_result(&Err(DmsetupError::Line(format!("{PROGRAM}: {why}"))));
        }
    };
    let client = match resolve_control_socket_path(None) {
        Ok(path) => ControlClient::new(path),
        Err(error) => {
            return report_dmsetup_result(&Err(DmsetupError::Failed(crate::strip_os_error(&format!(
                "{error:#}"
            )))));
        }
    };
    let mut session = DmsetupInvocation { line, client, out: String::new() };
    let done = run_dmsetup_command(&mut session);
    // Prints the output for the devices that succeeded, even if others failed.
    let done = match output::print_to_stdout(&session.out) {
        Ok(()) => done,
        Err(error) => {
            done.and_then(|()| session::command_failed_error(crate::strip_os_error(&format!("{error:#}"))))
        }
    };
    report_dmsetup_result(&done)
}

fn run_dmsetup_command(session: &mut DmsetupInvocation) -> DmsetupResult {
    let words = std::mem::take(&mut session.line.words);
    if session.has(DmsetupOption::Help) {
        return misc::run_dmsetup_help(session, &words);
    }
    if session.has(DmsetupOption::Version) {
        return misc::run_dmsetup_version(session, &words);
    }
    let Some((name, words)) = words.split_first() else {
        return Err(DmsetupError::Usage("No command given.".into()));
    };
    let Some(command) = COMMANDS.iter().find(|command| command.name == name) else {
        return Err(DmsetupError::Usage("Unknown command.".into()));
    };
    if report::is_report_repeated(session)? && !report::command_prints_report(session, name) {
        return misc::fail_unsupported_feature(name, "only reports are repeated: info -c, splitname");
    }
    let (least, most) = command.words;
    if words.len() < least || words.len() > most {
        return Err(DmsetupError::Usage("Incorrect number of arguments.".into()));
    }
    (command.run)(session, words)
}

fn dmsetup_usage_text() -> String {
    let commands = COMMANDS.iter().map(|command| format!("\t{} {}\n", command.name, command.usage));
    format!(
        "Usage:\n\n{PROGRAM} [OPTIONS] COMMAND\n\n{}\nNAME is a device's name, or -u UUID, or -j MAJOR -m MINOR. docs/dmsetup.md says \
         what differs from dmsetup.\n",
        commands.collect::<String>()
    )
}

/// Prints the error, if any; returns the exit status.
fn report_dmsetup_result(done: &DmsetupResult) -> ExitCode {
    let text = match done {
        Ok(()) => String::new(),
        Err(DmsetupError::Failed(text)) => format!("{text}\nCommand failed.\n"),
        Err(DmsetupError::Line(text)) => format!("{text}\nCouldn't process command line.\n"),
        Err(DmsetupError::Silent(text)) => format!("{text}\n"),
        Err(DmsetupError::Usage(text)) => format!("{text}\n{}\n", dmsetup_usage_text()),
    };
    if !text.is_empty() {
        log::queue_stderr_text(&output::sanitize_lines(&text));
    }
    log::flush_log();
    if done.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
