//! `udm clone`: devices that read as their source at once, and are copied behind.
//!
//! `list` formats the list; `wait` waits for copies and shows their progress.

mod list;
mod wait;

use crate::args::{OutputFormatArgs, ServerArgs};
use crate::boot_profile::read_boot_profile;
use crate::output::{print_json_to_stdout, print_to_stdout};
use crate::requests::{call_verb_without_body, current_dir, explain_client_error};
use anyhow::Result;
use clap::{Args, Subcommand};
use list::format_clone_list;
use std::path::PathBuf;
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
    /// Wait until clones are completely copied, and show the progress
    #[command(
        after_help = "On a terminal each clone has a bar with its bytes, rate, time left and errors of its source; elsewhere a line is printed at every ten percent. A clone that was finished meanwhile counts as copied. A clone whose copy is stopped, or whose metadata has failed, is an error.\n\nExample:\n  udm clone wait vm1 vm2 && udm clone finish vm1"
    )]
    Wait {
        #[command(flatten)]
        server: ServerArgs,
        #[command(flatten)]
        print: OutputFormatArgs,
        /// The clones
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// Print the boot profile of a clone: what its clients read first, in the order of the reads
    #[command(
        after_help = "Each line is a range: its first byte and its length. Only reads of regions that were not copied yet are recorded, and writes of a part of such a region; so create the first clone with --pause, start the machine, and print the profile when it has booted. \
At most 65536 regions are recorded, until the server ends.\n\n\
Example:\n  udm clone profile vm1 > debian.profile\n  udm clone create vm2 --from https://images.example/debian.raw --to vm2.img --hydrate-first debian.profile"
    )]
    Profile {
        #[command(flatten)]
        server: ServerArgs,
        #[command(flatten)]
        print: OutputFormatArgs,
        /// The clone
        name: String,
    },
    /// Forget a clone that has not returned after a restart
    #[command(
        after_help = "udm clone list shows such a clone as absent, with the reason. Its destination and its metadata stay: udm clone create continues it."
    )]
    Forget {
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
    /// Copy the parts in this boot profile first, which `udm clone profile` has printed
    #[arg(long, value_name = "FILE")]
    hydrate_first: Option<PathBuf>,
    /// Do not copy in the background until `udm clone start`
    #[arg(long)]
    pause: bool,
    /// Wait until all is copied, as `udm clone wait` does
    #[arg(long, conflicts_with = "pause")]
    wait: bool,
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
        CloneVerb::Wait { server, print, names } => {
            let clones = wait::wait_for_clones(&server.client()?, names, print.json)?;
            if print.json { print_json_to_stdout(&clones) } else { Ok(()) }
        }
        CloneVerb::Profile { server, print, name } => {
            let profile = call_verb_without_body(&server.client()?, verbs::GET_CLONE_PROFILE.on(name))?;
            if print.json { print_json_to_stdout(&profile) } else { print_to_stdout(&profile.profile) }
        }
        CloneVerb::Forget { server, name } => {
            call_verb_without_body(&server.client()?, verbs::FORGET_CLONE.on(name))
        }
        CloneVerb::Finish { server, name } => {
            call_verb_without_body(&server.client()?, verbs::FINISH_CLONE.on(name))
        }
    }
}

fn run_clone_create(args: &CloneCreateArgs) -> Result<()> {
    let profile = args.hydrate_first.as_deref().map(read_boot_profile).transpose()?;
    let body = api::CreateCloneRequest {
        name: args.name.clone(),
        source: args.from.clone(),
        destination: args.to.clone(),
        metadata: args.metadata.clone(),
        region_bytes: args.region_size,
        paused: Some(args.pause),
        hydrate_first: profile.map(|profile| profile.to_string()),
        folder: current_dir(),
    };
    let client = args.server.client()?;
    let created = client.call(verbs::CREATE_CLONE, &body);
    let mut created = created.map_err(|error| explain_client_error(error, None))?;
    if args.wait {
        let waited = wait::wait_for_clones(&client, std::slice::from_ref(&args.name), args.print.json)?;
        created = waited.into_iter().next().unwrap_or(created);
    }
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
