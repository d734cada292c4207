//! `udm`: the device mapper as an ordinary program. See `udm --help`.
//!
//! * `cli`: the command line. `args`, `table_arg`: arguments that verbs share.
//!   `requests`: requests that they share.
//! * `verbs`, `snapshot`, `multipath`: commands that talk to a running server.
//! * `serve`, `config`, `log`: the server. `top`, `web`: displays of a running server.
//! * `dmsetup`, `columns`, `concise`: dmsetup's command line and output.
//! * `bench`, `lab`, `demo`: measurements and demonstrations. `cow`, `log_writes`: offline tools.
#![forbid(unsafe_code)]

mod args;
mod bench;
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
mod requests;
mod serve;
mod snapshot;
mod table_arg;
mod top;
mod verbs;
mod web;

use clap::{CommandFactory, Parser};
use cli::{Cli, Verb};
use std::io::Write;
use std::process::ExitCode;
use verbs::{change, show, tree};

/// Stack size of the program's thread, in bytes.
const STACK: usize = 8 << 20;

/// Runs the program on a thread with a known stack size. The main thread's stack has the size of
/// the caller's `ulimit -s`, which may be too small.
fn main() -> ExitCode {
    let program = std::thread::Builder::new().name("main".into()).stack_size(STACK).spawn(program);
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

fn program() -> ExitCode {
    let mut words = std::env::args_os();
    if dmsetup::is_dmsetup(words.next().as_deref()) {
        log::start("warn");
        return dmsetup::run(words);
    }
    let cli = Cli::try_parse().unwrap_or_else(|error| {
        let bench = std::env::args_os().nth(1).is_some_and(|verb| verb == "bench");
        if bench { bench::with_hint(error) } else { error }.exit()
    });
    if let Verb::Serve(args) = &cli.verb
        && !args.has_listen_args()
    {
        cli::no_address_error().exit();
    }
    // The fork must come before any other thread starts.
    if let Verb::Serve(args) = &cli.verb
        && args.fork
        && !args.ready_on_stdout
    {
        return serve::spawn_background().unwrap_or_else(|error| {
            // If standard error is closed too, nothing more can be done.
            let _ = writeln!(std::io::stderr(), "udm: {}", strip_os_error(&format!("{error:#}")));
            ExitCode::FAILURE
        });
    }
    // Verbs report the errors of their own requests, so the log shows only warnings. The demo
    // causes path failures itself and reports them, so its log shows only errors.
    log::start(if matches!(cli.verb, Verb::Demo(_)) { "error" } else { "warn" });
    let code = run(&cli.verb).unwrap_or_else(|error| {
        log::say(format!("udm: {}\n", strip_os_error(&format!("{error:#}"))));
        ExitCode::FAILURE
    });
    log::flush();
    code
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

fn run(verb: &Verb) -> anyhow::Result<ExitCode> {
    match verb {
        Verb::Serve(args) => return serve::run(args),
        Verb::LogWrites(args) => return log_writes::run(args),
        Verb::Cow(args) => return cow::run(args),
        Verb::Snapshot(args) => return snapshot::run(args),
        Verb::Bench(args) => return bench::run(args),
        Verb::Lab(args) => return lab::run(args),
        Verb::Top(args) => return top::run(args),
        Verb::Multipath(args) => multipath::run(args),
        Verb::Demo(args) => demo::run(args),
        Verb::Web(args) => web::run(args),
        Verb::Create(args) => change::create(args),
        Verb::Remove(args) => change::remove(args),
        Verb::Rename(args) => change::rename(args),
        Verb::Load(args) => change::load(args),
        Verb::Clear(args) => change::clear(args),
        Verb::Suspend(args) => change::suspend(args),
        Verb::Resume(args) => change::resume(args),
        Verb::Message(args) => change::message(args),
        Verb::Queue(args) => verbs::queue::queue(args),
        Verb::Power(args) => verbs::power::power(args),
        Verb::Wait(args) => verbs::wait::wait(args),
        Verb::Events(args) => verbs::events::print_events(args),
        Verb::Reconfigure(args) => verbs::reconfigure::run(args),
        Verb::Table(args) => show::table(args),
        Verb::Status(args) => show::status(args),
        Verb::Info(args) => verbs::info::info(args),
        Verb::Ls(args) if args.tree => tree::ls(&args.list),
        Verb::Ls(args) => show::ls(args),
        Verb::Deps(args) => tree::deps(args),
        Verb::Exports(args) => show::exports(args),
        Verb::Targets(args) => show::targets(args),
        Verb::Version(args) => show::version(args),
        Verb::Generate(args) => verbs::generate::run(args, Cli::command()),
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
