//! `udm move`: a device moves to another place while it is used.

use crate::args::{OutputFormatArgs, ServerArgs};
use crate::output::{align_rows, format_bytes, print_json_to_stdout, print_to_stdout};
use crate::progress::{ByteProgress, ProgressBars};
use crate::requests::{call_verb_without_body, current_dir, explain_client_error};
use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use std::thread::sleep;
use std::time::Duration;
use udm_control::api::{self, verbs};
use udm_control::client::ControlClient;

/// Time between two queries of the server.
const TICK: Duration = Duration::from_millis(100);

/// The arguments of `udm move`.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_help = "Writes go to both places while the disk is copied, so the move can be stopped at any moment. When all is copied, the device gets a linear table over DEVICE; its clients see a pause only. \
A file that does not exist or is empty is made. The state folder of the server says where the disk is: a server that is killed continues the move, and serves the disk from the new place afterwards, also if its configuration names the old one.\n\n\
Examples:\n  udm move vm1 --to /fast/vm1.img --wait\n  udm move vm1 --to nbd://host2/vm1\n  udm move list\n  udm move stop vm1"
)]
pub struct MoveArgs {
    #[command(subcommand)]
    verb: Option<MoveVerb>,
    #[command(flatten)]
    server: ServerArgs,
    #[command(flatten)]
    print: OutputFormatArgs,
    /// The device that moves: its table must be one linear line
    #[arg(required = true)]
    name: Option<String>,
    /// The new place, a device as in a table
    #[arg(long, value_name = "DEVICE", required = true)]
    to: Option<String>,
    /// Overwrite a DEVICE that has data
    #[arg(long)]
    force: bool,
    /// Keep the log of the move there, and not in the state folder: a device as in a table
    #[arg(long, value_name = "FILE")]
    log: Option<String>,
    /// Do not copy in the background, and do not switch, until `udm move start`
    #[arg(long, conflicts_with = "wait")]
    pause: bool,
    /// Wait for the end of the move, and show the progress
    #[arg(long)]
    wait: bool,
}

#[derive(Debug, Subcommand)]
enum MoveVerb {
    /// List moves, and the disks that were moved
    List {
        #[command(flatten)]
        server: ServerArgs,
        #[command(flatten)]
        print: OutputFormatArgs,
    },
    /// Pause the copy and the switch; writes still go to both places
    Pause {
        #[command(flatten)]
        server: ServerArgs,
        /// The device
        name: String,
    },
    /// Start the copy and the switch again
    Start {
        #[command(flatten)]
        server: ServerArgs,
        /// The device
        name: String,
    },
    /// Stop a move: the device stays where it is
    Stop {
        #[command(flatten)]
        server: ServerArgs,
        /// The device
        name: String,
    },
    /// Let tables use the old content of a place that a disk has left
    Forget {
        #[command(flatten)]
        server: ServerArgs,
        /// The place, a device as in a table
        device: String,
    },
}

/// Runs `udm move`.
///
/// # Errors
/// One line: the device, and what is wrong.
pub fn run(args: &MoveArgs) -> Result<()> {
    let pause = |server: &ServerArgs, name: &str, paused| {
        let paused = server.client()?.call(verbs::PAUSE_MOVE.on(name), &api::PauseMoveRequest { paused });
        paused.map(drop).map_err(|error| explain_client_error(error, None))
    };
    match &args.verb {
        None => run_move_start(args),
        Some(MoveVerb::List { server, print }) => run_move_list(server, print),
        Some(MoveVerb::Pause { server, name }) => pause(server, name, true),
        Some(MoveVerb::Start { server, name }) => pause(server, name, false),
        Some(MoveVerb::Stop { server, name }) => {
            call_verb_without_body(&server.client()?, verbs::STOP_MOVE.on(name)).map(drop)
        }
        Some(MoveVerb::Forget { server, device }) => {
            let body = api::ForgetOldPlaceRequest { device: device.clone(), folder: current_dir() };
            let done = server.client()?.call(verbs::FORGET_OLD_PLACE, &body);
            done.map_err(|error| explain_client_error(error, None))
        }
    }
}

fn run_move_start(args: &MoveArgs) -> Result<()> {
    let (Some(name), Some(to)) = (&args.name, &args.to) else { bail!("move: expected NAME --to DEVICE") };
    let body = api::StartMoveRequest {
        destination: to.clone(),
        force: Some(args.force),
        paused: Some(args.pause),
        log: args.log.clone(),
        folder: current_dir(),
    };
    let client = args.server.client()?;
    let begun = client.call(verbs::START_MOVE.on(name), &body);
    let begun = begun.map_err(|error| explain_client_error(error, None))?;
    let last = if args.wait { wait_for_move(&client, begun, args.print.json)? } else { begun };
    if args.print.json { print_json_to_stdout(&last) } else { Ok(()) }
}

/// Waits for the end of a move, and shows its progress. With `is_quiet`, lines are left out.
fn wait_for_move(
    client: &ControlClient,
    begun: api::MoveDescription,
    is_quiet: bool,
) -> Result<api::MoveDescription> {
    let new = if is_quiet { ByteProgress::quiet } else { ByteProgress::new };
    let mut progress = new(&ProgressBars::new(), &begun.name, begun.size_bytes);
    // Uses the device number: the device may be renamed meanwhile.
    let number = client.call(verbs::GET_DEVICE.on(&begun.name), &()).map(|device| device.number);
    let number = number.map_err(|error| explain_client_error(error, None))?;
    let mut now = begun;
    loop {
        progress.show(now.copied_bytes, &describe_obstacle(&now))?;
        match now.state.as_str() {
            "done" => return Ok(now),
            "failed" | "stopped" => bail!("{}: {}: {}", now.name, now.state, now.error.unwrap_or_default()),
            _ => sleep(TICK),
        }
        let next = client.call(verbs::GET_MOVE.on(&number), &());
        now = next.map_err(|error| explain_client_error(error, None))?;
    }
}

/// What keeps a move from copying, after a comma; empty if nothing does.
fn describe_obstacle(now: &api::MoveDescription) -> String {
    let state = Some(&now.state).filter(|state| *state != "copying");
    state.into_iter().chain(&now.error).map(|word| format!(", {word}")).collect()
}

fn run_move_list(server: &ServerArgs, print: &OutputFormatArgs) -> Result<()> {
    let moves = call_verb_without_body(&server.client()?, verbs::LIST_MOVES)?.moves;
    match (print.json, moves.is_empty()) {
        (true, _) => print_json_to_stdout(&moves),
        (false, true) => print_to_stdout("No moves found\n"),
        (false, false) => print_to_stdout(&format_move_list(&moves)),
    }
}

/// The heads of the columns. Those that may be long are the last ones.
const HEADS: [&str; 8] = ["NAME", "STATE", "%", "COPIED", "RATE", "LEFT", "TO", "FROM"];

/// The columns of numbers.
const NUMBERS: [usize; 4] = [2, 3, 4, 5];

/// One line per move, and one below it for its error.
fn format_move_list(moves: &[api::MoveDescription]) -> String {
    let rows: Vec<[String; 8]> =
        [HEADS.map(String::from)].into_iter().chain(moves.iter().map(format_move_row)).collect();
    let errors = std::iter::once(None).chain(moves.iter().map(|one| one.error.as_ref()));
    let mut out = String::new();
    for (line, error) in align_rows(&rows, &NUMBERS).iter().zip(errors) {
        out += &format!("{line}\n");
        if let Some(error) = error {
            out += &format!("  {error}\n");
        }
    }
    out
}

fn format_move_row(one: &api::MoveDescription) -> [String; 8] {
    let percent = one.copied_bytes as f64 * 100.0 / one.size_bytes.max(1) as f64;
    [
        one.name.clone(),
        one.state.clone(),
        // 100 only if nothing is left.
        format!("{:.1}", (percent * 10.0).floor() / 10.0),
        format!("{}/{}", format_bytes(one.copied_bytes), format_bytes(one.size_bytes)),
        one.bytes_per_second.map_or("-".into(), |rate| format!("{}/s", format_bytes(rate))),
        one.seconds_left.map_or("-".into(), |left| format!("{left}s")),
        one.destination.clone(),
        one.source.clone(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_has_a_line_of_its_own() {
        let one = api::MoveDescription {
            name: "vm1".into(),
            state: "waiting".into(),
            source: "/srv/vm1.img".into(),
            destination: "nbd://host2/vm1".into(),
            size_bytes: 1 << 30,
            copied_bytes: (1 << 30) - 1,
            error: Some("a write failed".into()),
            ..api::MoveDescription::default()
        };
        let list = format_move_list(&[one]);
        let lines: Vec<&str> = list.lines().collect();
        assert_eq!(lines.len(), 3, "{list}");
        assert!(lines[1].contains(" 99.9 ") && lines[1].ends_with("nbd://host2/vm1  /srv/vm1.img"), "{list}");
        assert_eq!(lines[2], "  a write failed");
    }
}
