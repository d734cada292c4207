//! `udm`: the device mapper as an ordinary program. See `udm --help`.
//!
//! * `cli`: the command line. `args`, `table_arg`: arguments that verbs share.
//!   `requests`: requests that they share. `boot_profile`: profiles in files. `progress`: bars of
//!   commands that wait.
//! * `verbs`, `snapshot`, `multipath`: commands that talk to a running server.
//! * `serve`, `config`, `log`: the server. `top`, `web`: displays of a running server.
//! * `dmsetup`, `columns`, `concise`: dmsetup's command line and output. `vhost_user_blk`: the
//!   command line that QEMU expects of a back end.
//! * `bench`, `lab`, `demo`: measurements and demonstrations. `cow`, `log_writes`: offline tools.
#![forbid(unsafe_code)]

mod args;
mod bench;
mod boot_profile;
mod cli;
mod columns;
mod concise;
mod config;
mod cow;
mod demo;
mod dmsetup;
mod interrupt;
mod lab;
mod log;
mod log_writes;
mod multipath;
mod output;
mod private_dir;
mod progress;
mod requests;
mod serve;
mod snapshot;
mod table_arg;
mod top;
mod verbs;
mod vhost_user_blk;
mod web;

use clap::{CommandFactory, Parser};
use cli::{Cli, CliVerb};
use std::ffi::CString;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use verbs::{change, show, tree};

/// Stack size of the program's thread, in bytes.
const STACK: usize = 8 << 20;

/// Runs the program on a thread with a known stack size. The main thread's stack has the size of
/// the caller's `ulimit -s`, which may be too small.
fn main() -> ExitCode {
    // A server that was started again as /proc/self/exe would be called `exe` by ps and pgrep.
    if let Some(name) = std::env::args_os().next().as_deref().and_then(|name| Path::new(name).file_name()) {
        let _ = CString::new(name.as_encoded_bytes()).map(|name| rustix::thread::set_name(&name));
    }
    let program = std::thread::Builder::new().name("main".into()).stack_size(STACK).spawn(run_udm_or_dmsetup);
    match program.map(std::thread::JoinHandle::join) {
        Ok(Ok(code)) => code,
        // The panic hook has printed the reason.
        Ok(Err(_)) => ExitCode::from(101),
        Err(error) => {
            // If standard error is closed too, nothing more can be done.
            let _ = writeln!(
                std::io::stderr(),
                "udm: no thread to run on: {}",
                strip_os_error(&error.to_string())
            );
            ExitCode::FAILURE
        }
    }
}

fn run_udm_or_dmsetup() -> ExitCode {
    let mut words = std::env::args_os();
    let program = words.next();
    if dmsetup::is_dmsetup(program.as_deref()) {
        log::init_logging("warn");
        return dmsetup::run_dmsetup_command_line(words);
    }
    if serve::is_supervisor(program.as_deref()) {
        return serve::run_supervisor(words).unwrap_or_else(|error| fail_without_log(&error));
    }
    if vhost_user_blk::is_vhost_user_blk(program.as_deref()) {
        let code = vhost_user_blk::run(words).unwrap_or_else(|error| fail_without_log(&error));
        log::flush_log();
        return code;
    }
    let cli = Cli::try_parse().unwrap_or_else(|error| {
        let bench = std::env::args_os().nth(1).is_some_and(|verb| verb == "bench");
        if bench { bench::add_unknown_option_hint(error) } else { error }.exit()
    });
    if let CliVerb::Serve(args) = &cli.verb
        && !args.has_listen_args()
    {
        cli::no_listen_address_error().exit();
    }
    // The fork must come before any other thread starts.
    if let CliVerb::Serve(args) = &cli.verb
        && args.fork
        && !args.ready_on_stdout
    {
        return serve::spawn_daemon_until_ready().unwrap_or_else(|error| fail_without_log(&error));
    }
    // Verbs report the errors of their own requests, so the log shows only warnings. The demo
    // causes path failures itself and reports them, so its log shows only errors.
    log::init_logging(if matches!(cli.verb, CliVerb::Demo(_)) { "error" } else { "warn" });
    let code = run_cli_verb(&cli.verb).unwrap_or_else(|error| {
        // It may have words of the server.
        let text = output::sanitize_lines(&strip_os_error(&format!("{error:#}")));
        log::queue_stderr_text(&format!("udm: {text}\n"));
        ExitCode::FAILURE
    });
    log::flush_log();
    code
}

/// Prints the error of a process that has no log.
fn fail_without_log(error: &anyhow::Error) -> ExitCode {
    // If standard error is closed too, nothing more can be done.
    let _ = writeln!(std::io::stderr(), "udm: {}", strip_os_error(&format!("{error:#}")));
    ExitCode::FAILURE
}

/// Removes the numbers that Rust appends to the texts of system errors.
fn strip_os_error(text: &str) -> String {
    let mut parts = text.split(" (os error ");
    let mut out = parts.next().unwrap_or_default().to_string();
    for part in parts {
        out.push_str(part.split_once(')').map_or(part, |(_, rest)| rest));
    }
    out
}

fn run_cli_verb(verb: &CliVerb) -> anyhow::Result<ExitCode> {
    match verb {
        CliVerb::Serve(args) => return serve::run(args),
        CliVerb::LogWrites(args) => return log_writes::run(args),
        CliVerb::Cow(args) => return cow::run(args),
        CliVerb::Snapshot(args) => return snapshot::run(args),
        CliVerb::Bench(args) => return bench::run(args),
        CliVerb::Lab(args) => return lab::run(args),
        CliVerb::Top(args) => return top::run(args),
        CliVerb::Multipath(args) => multipath::run(args),
        CliVerb::Demo(args) => demo::run(args),
        CliVerb::Web(args) => web::run(args),
        CliVerb::Create(args) => change::run_create_command(args),
        CliVerb::Remove(args) => change::run_remove_command(args),
        CliVerb::Rename(args) => change::run_rename_command(args),
        CliVerb::Load(args) => change::run_load_command(args),
        CliVerb::Clear(args) => change::run_clear_command(args),
        CliVerb::Suspend(args) => change::run_suspend_command(args),
        CliVerb::Resume(args) => change::run_resume_command(args),
        CliVerb::Message(args) => change::run_message_command(args),
        CliVerb::Queue(args) => verbs::queue::run_queue_command(args),
        CliVerb::Power(args) => verbs::power::run_power_command(args),
        CliVerb::Throttle(args) => verbs::throttle::run_throttle_command(args),
        CliVerb::Clone(args) => verbs::clone::run(args),
        CliVerb::Move(args) => verbs::moves::run(args),
        CliVerb::Nvme(args) => verbs::nvme::run(args),
        CliVerb::Ublk(args) => verbs::ublk::run(args),
        CliVerb::VhostUser(args) => verbs::vhost_user::run(args),
        CliVerb::Wait(args) => verbs::wait::run_wait_command(args),
        CliVerb::Events(args) => verbs::events::print_events(args),
        CliVerb::Reconfigure(args) => verbs::reconfigure::run(args),
        CliVerb::Upgrade(args) => verbs::upgrade::run(args),
        CliVerb::Table(args) => show::run_table_command(args),
        CliVerb::Status(args) => show::run_status_command(args),
        CliVerb::Info(args) => verbs::info::run_info_command(args),
        CliVerb::Ls(args) if args.tree => tree::run_ls_tree_command(&args.list),
        CliVerb::Ls(args) => show::run_ls_command(args),
        CliVerb::Deps(args) => tree::run_deps_command(args),
        CliVerb::Exports(args) => show::run_exports_command(args),
        CliVerb::Targets(args) => show::run_targets_command(args),
        CliVerb::Version(args) => show::run_version_command(args),
        CliVerb::Generate(args) => verbs::generate::run(args, Cli::command()),
    }
    .map(|()| ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    #[test]
    fn errors_are_plain() {
        let error = std::io::Error::from_raw_os_error(2);
        assert_eq!(
            super::strip_os_error(&format!("x: {error}: {error}")),
            "x: No such file or directory: No such file or directory"
        );
        assert_eq!(super::strip_os_error("nothing (of the) kind"), "nothing (of the) kind");
    }
}
