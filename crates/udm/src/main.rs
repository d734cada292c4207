//! `udm`: the device mapper as an ordinary program. See `udm --help`.
//!
//! * `cli`: the command line. `verbs`, `snapshot`, `multipath`: commands that talk to a running
//!   server.
//! * `serve`, `config`, `log`: the server. `top`, `web`: displays of a running server.
//! * `dmsetup`, `columns`, `concise`: dmsetup's command line and output.
//! * `bench`, `lab`, `demo`: measurements and demonstrations. `cow`, `log_writes`: offline tools.
#![forbid(unsafe_code)]

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
mod serve;
mod snapshot;
mod top;
mod verbs;
mod web;

use clap::Parser;
use cli::{Cli, Verb};
use std::io::Write;
use std::process::ExitCode;

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
        && let Some(error) = args.check_listen_args()
    {
        error.exit();
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
        Verb::Serve(args) => serve::run(args),
        Verb::LogWrites(args) => log_writes::run(args),
        Verb::Cow(args) => cow::run(args),
        Verb::Snapshot(args) => snapshot::run(args),
        Verb::Multipath(args) => multipath::run(args).map(|()| ExitCode::SUCCESS),
        Verb::Demo(args) => demo::run(args).map(|()| ExitCode::SUCCESS),
        Verb::Bench(args) => bench::run(args),
        Verb::Lab(args) => lab::run(args),
        Verb::Web(args) => web::run(args).map(|()| ExitCode::SUCCESS),
        Verb::Top(args) => top::run(args),
        verb => verbs::run(verb).map(|()| ExitCode::SUCCESS),
    }
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
