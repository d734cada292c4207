//! `udm ublk`: devices as block devices of this machine.

use crate::args::{OutputFormatArgs, ServerArgs};
use crate::output::{print_json_to_stdout, print_to_stdout};
use crate::requests::explain_client_error;
use anyhow::Result;
use clap::{Args, Subcommand};
use std::fmt::Write;
use udm_control::api::{self, verbs};
use udm_wire::ublk::{NUMBER_MAX, QUEUES_MAX};

/// The arguments of `udm ublk`.
#[derive(Debug, Args)]
pub struct UblkArgs {
    #[command(subcommand)]
    pub verb: UblkVerb,
}

/// A verb of `udm ublk`.
#[derive(Debug, Subcommand)]
pub enum UblkVerb {
    /// Make a block device of this machine from a device, and print its path
    ///
    /// The link /dev/udm/NAME leads to it. If an earlier server left the block device of this
    /// device, it is taken over. It follows a rename and goes over an upgrade. It ends with the
    /// server, unless somebody uses it: then the next server takes it over. That of a snapshot made
    /// by name comes back with the snapshot when the server is started again.
    Add {
        #[command(flatten)]
        server: ServerArgs,
        /// The device
        name: String,
        /// N of /dev/ublkbN [default: the first that is free]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(..=i64::from(NUMBER_MAX)))]
        number: Option<u32>,
        /// Number of queues, at most one per core of the server [default: one per core]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=i64::from(QUEUES_MAX)))]
        queues: Option<u16>,
    },
    /// Remove a block device that was added
    Remove {
        #[command(flatten)]
        server: ServerArgs,
        /// The device
        name: String,
        /// Also while it is in use: its users get errors then
        #[arg(long)]
        force: bool,
    },
    /// List all block devices
    List {
        #[command(flatten)]
        server: ServerArgs,
        #[command(flatten)]
        print: OutputFormatArgs,
    },
}

/// Runs `udm ublk`.
pub fn run(args: &UblkArgs) -> Result<()> {
    match &args.verb {
        UblkVerb::Add { server, name, number, queues } => {
            let body = api::AddUblkDiskRequest { number: *number, queues: *queues };
            let added = server.client()?.call(verbs::ADD_UBLK.on(name), &body);
            let added = added.map_err(|error| explain_client_error(error, None))?;
            print_to_stdout(&format!("{}\n", added.path))
        }
        UblkVerb::Remove { server, name, force } => {
            let query = api::RemoveUblkDiskQuery { force: force.then_some(1) };
            let removed = server.client()?.call(verbs::REMOVE_UBLK.on(name).with(&query), &());
            removed.map_err(|error| explain_client_error(error, None))
        }
        UblkVerb::List { server, print } => {
            let list = server.client()?.call(verbs::LIST_UBLK, &());
            let list = list.map_err(|error| explain_client_error(error, None))?.disks;
            if print.json {
                return print_json_to_stdout(&list);
            }
            print_to_stdout(&format_disk_list(&list))
        }
    }
}

fn format_disk_list(disks: &[api::UblkDiskDescription]) -> String {
    if disks.is_empty() {
        return "No device is a block device of this machine\n".into();
    }
    let mut out = String::new();
    for disk in disks {
        let link = disk.link.as_deref().unwrap_or("no link");
        let queues = if disk.queues == 1 { "queue" } else { "queues" };
        let origin = if disk.added { "added" } else { "option of the server" };
        // Writing to a String can't fail.
        let _ = writeln!(out, "{}: {}  {link}, {} {queues}, {origin}", disk.device, disk.path, disk.queues);
    }
    out
}
