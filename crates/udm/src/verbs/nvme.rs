//! `udm nvme`: the NVMe/TCP target.

use crate::args::{OutputFormatArgs, ServerArgs};
use crate::output::{print_json_to_stdout, print_to_stdout};
use crate::requests::explain_client_error;
use anyhow::Result;
use clap::{Args, Subcommand};
use std::fmt::Write;
use udm_control::api::{self, verbs};

/// The arguments of `udm nvme`.
#[derive(Debug, Args)]
pub struct NvmeArgs {
    #[command(subcommand)]
    pub verb: NvmeVerb,
}

/// A verb of `udm nvme`.
#[derive(Debug, Subcommand)]
pub enum NvmeVerb {
    /// Show the subsystem with its ports, namespaces and controllers
    #[command(visible_alias = "list")]
    Ls {
        #[command(flatten)]
        server: ServerArgs,
        #[command(flatten)]
        print: OutputFormatArgs,
    },
}

/// Runs `udm nvme`.
pub fn run(args: &NvmeArgs) -> Result<()> {
    match &args.verb {
        NvmeVerb::Ls { server, print } => {
            let list = server.client()?.call(verbs::LIST_NVME, &());
            let list = list.map_err(|error| explain_client_error(error, None))?.subsystems;
            if print.json {
                return print_json_to_stdout(&list);
            }
            print_to_stdout(&format_subsystem_list(&list))
        }
    }
}

fn format_subsystem_list(subsystems: &[api::NvmeSubsystem]) -> String {
    if subsystems.is_empty() {
        return "The server has no NVMe/TCP target: udm serve --nvme ADDRESS:PORT starts one\n".into();
    }
    let mut out = String::new();
    // Writing to a String can't fail.
    for subsystem in subsystems {
        let _ = writeln!(out, "{}  serial {}", subsystem.nqn, subsystem.serial);
        for port in &subsystem.ports {
            let _ = writeln!(out, "  port {}  {}", port.address, port.ana_state);
        }
        for one in &subsystem.namespaces {
            let access = if one.read_only { ", read-only" } else { "" };
            let _ = writeln!(
                out,
                "  namespace {}: {}  {} bytes in blocks of {}, uuid {}{access}",
                one.nsid, one.device, one.size_bytes, one.block_bytes, one.uuid
            );
        }
        for one in &subsystem.controllers {
            let address = one.address.as_deref().unwrap_or("an unknown address");
            let kind = if one.discovery { "discovery, " } else { "" };
            let queues = if one.io_queues == 1 { "I/O queue" } else { "I/O queues" };
            let _ = writeln!(
                out,
                "  controller {}: {} at {address}  {kind}{}, {} {queues}",
                one.cntlid, one.host_nqn, one.state, one.io_queues
            );
        }
    }
    out
}
