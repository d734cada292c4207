//! `udm clone`: devices that read as their source at once, and are copied behind.

use crate::args::{OutputFormatArgs, ServerArgs};
use crate::output::{print_json_to_stdout, print_to_stdout};
use crate::requests::{call_verb_without_body, current_dir, explain_client_error};
use anyhow::Result;
use clap::{Args, Subcommand};
use udm_bench::units::format_with_binary_prefix;
use udm_control::api::{self, verbs};

/// The arguments of `udm clone`.
#[derive(Debug, Args)]
pub struct CloneArgs {
    #[command(subcommand)]
    verb: CloneVerb,
}

#[derive(Debug, Subcommand)]
enum CloneVerb {
    /// Create a clone, with the files for its destination and metadata
    #[command(
        after_help = "The source is only read. The clone has its size and reads as it at once; writes go to the destination, and the rest is copied in the background. \
A DESTINATION or FILE that does not exist or is empty is made, and removed again if the clone cannot be created. A destination with data is refused, unless FILE belongs to it: then that clone continues, also after a restart. \
A destination that is no regular file must have zeroes in its first MiB, and is overwritten.\n\n\
Examples:\n  udm clone create vm1 --from file:/srv/golden.qcow2?format=qcow2 --to /srv/vm1.img\n  udm clone create restored --from nbd://backup/disk --to disk.img --region-size 1M --pause"
    )]
    Create(CloneCreateArgs),
    /// List clones
    List {
        #[command(flatten)]
        server: ServerArgs,
        #[command(flatten)]
        print: OutputFormatArgs,
    },
    /// Stop the copy in the background; a write still copies its region
    Pause {
        #[command(flatten)]
        server: ServerArgs,
        /// The clone
        name: String,
    },
    /// Start the copy in the background again
    Start {
        #[command(flatten)]
        server: ServerArgs,
        /// The clone
        name: String,
    },
    /// Replace a clone that is completely copied by its destination
    #[command(
        after_help = "The device becomes linear over the destination. Its clients see a pause only. Afterwards the source and the metadata are not used any more. \
If regions are left, or the device is suspended or has a table in its inactive slot, nothing changes."
    )]
    Finish {
        #[command(flatten)]
        server: ServerArgs,
        /// The clone
        name: String,
    },
}

/// The arguments of `udm clone create`.
#[derive(Debug, Args)]
struct CloneCreateArgs {
    #[command(flatten)]
    server: ServerArgs,
    #[command(flatten)]
    print: OutputFormatArgs,
    /// The name of the clone
    name: String,
    /// The source, a device as in a table
    #[arg(long, value_name = "SOURCE")]
    from: String,
    /// The destination, a device as in a table
    #[arg(long, value_name = "DESTINATION")]
    to: String,
    /// The metadata, a device as in a table [default: DESTINATION.clone]
    #[arg(long, value_name = "FILE")]
    metadata: Option<String>,
    /// The region size, the unit of copies: a power of two, 4k to 1G [default: 64k, or that of the
    /// metadata]
    #[arg(long, value_name = "SIZE", value_parser = udm_wire::size::parse_size_with_unit)]
    region_size: Option<u64>,
    /// Do not copy in the background until `udm clone start`
    #[arg(long)]
    pause: bool,
}

/// Runs `udm clone`.
///
/// # Errors
/// One line: the device, and what is wrong.
pub fn run(args: &CloneArgs) -> Result<()> {
    match &args.verb {
        CloneVerb::Create(args) => run_clone_create(args),
        CloneVerb::List { server, print } => run_clone_list(server, print),
        CloneVerb::Pause { server, name } => send_hydration_message(server, name, "disable_hydration"),
        CloneVerb::Start { server, name } => send_hydration_message(server, name, "enable_hydration"),
        CloneVerb::Finish { server, name } => {
            call_verb_without_body(&server.client()?, verbs::FINISH_CLONE.on(name))
        }
    }
}

fn run_clone_create(args: &CloneCreateArgs) -> Result<()> {
    let body = api::CreateCloneRequest {
        name: args.name.clone(),
        source: args.from.clone(),
        destination: args.to.clone(),
        metadata: args.metadata.clone(),
        region_bytes: args.region_size,
        paused: Some(args.pause),
        folder: current_dir(),
    };
    let created = args.server.client()?.call(verbs::CREATE_CLONE, &body);
    let created = created.map_err(|error| explain_client_error(error, None))?;
    if args.print.json { print_json_to_stdout(&created) } else { Ok(()) }
}

fn run_clone_list(server: &ServerArgs, print: &OutputFormatArgs) -> Result<()> {
    let clones = call_verb_without_body(&server.client()?, verbs::LIST_CLONES)?.clones;
    match (print.json, clones.is_empty()) {
        (true, _) => print_json_to_stdout(&clones),
        (false, true) => print_to_stdout("No clones found\n"),
        (false, false) => print_to_stdout(&format_clone_list(&clones)),
    }
}

/// Sends a message to a clone. Other targets do not know the message, so they are refused before.
fn send_hydration_message(server: &ServerArgs, name: &str, message: &str) -> Result<()> {
    let client = server.client()?;
    call_verb_without_body(&client, verbs::GET_CLONE.on(name))?;
    let body = api::TargetMessageRequest { message: message.into(), ..api::TargetMessageRequest::default() };
    let sent = client.call(verbs::SEND_MESSAGE.on(name), &body);
    sent.map(drop).map_err(|error| explain_client_error(error, None))
}

/// The heads of the columns. The paths are the last ones, since they may be long.
const HEADS: [&str; 9] =
    ["NAME", "STATE", "%", "HYDRATED", "REGIONS", "HYDRATING", "REGION", "DESTINATION", "SOURCE"];

/// The columns of words; the others are numbers.
const WORDS: [usize; 4] = [0, 1, 7, 8];

/// One line per clone.
fn format_clone_list(clones: &[api::CloneDescription]) -> String {
    let rows = [HEADS.map(String::from)].into_iter().chain(clones.iter().map(format_clone_row));
    let rows: Vec<[String; 9]> = rows.collect();
    let widths: Vec<usize> = (0..HEADS.len())
        .map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
        .collect();
    let cell = |(column, text): (usize, &String)| match WORDS.contains(&column) {
        true => format!("{text:<0$}", widths[column]),
        false => format!("{text:>0$}", widths[column]),
    };
    let line = |row: &[String; 9]| {
        let cells: Vec<String> = row.iter().enumerate().map(cell).collect();
        format!("{}\n", cells.join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}

fn format_clone_row(clone: &api::CloneDescription) -> [String; 9] {
    let percent = clone.hydrated_regions as f64 * 100.0 / clone.regions.max(1) as f64;
    [
        clone.name.clone(),
        clone.state.clone(),
        // 100 only if no region is left.
        format!("{:.1}", (percent * 10.0).floor() / 10.0),
        format!("{}/{}", format_bytes(clone.hydrated_bytes), format_bytes(clone.size_bytes)),
        format!("{}/{}", clone.hydrated_regions, clone.regions),
        clone.hydrating_regions.to_string(),
        format_bytes(clone.region_bytes),
        clone.destination.clone(),
        clone.source.clone(),
    ]
}

/// Formats bytes with a binary unit and at most four digits.
fn format_bytes(bytes: u64) -> String {
    format_with_binary_prefix(bytes as f64, 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_stand_below_their_heads_and_100_percent_means_done() {
        let one = api::CloneDescription {
            name: "vm1".into(),
            source: "nbd://backup/disk".into(),
            destination: "/srv/vm1.img".into(),
            state: "hydrating".into(),
            size_bytes: 1 << 30,
            region_bytes: 64 << 10,
            regions: 16_384,
            hydrated_regions: 16_383,
            hydrated_bytes: (1 << 30) - (64 << 10),
            hydrating_regions: 1,
            ..api::CloneDescription::default()
        };
        let all = [one.clone(), api::CloneDescription { name: "a-long-name".into(), ..one }];
        let lines: Vec<String> = format_clone_list(&all).lines().map(String::from).collect();
        assert_eq!(lines.len(), 3);
        for head in ["STATE", "DESTINATION", "SOURCE"] {
            let at = lines[0].find(head).unwrap();
            assert!(
                lines[1..].iter().all(|line| &line[at - 1..at] == " " && &line[at..=at] != " "),
                "{lines:?}"
            );
        }
        assert!(lines[1].contains(" 99.9 ") && lines[1].contains(" 16383/16384 "), "{lines:?}");
    }
}
