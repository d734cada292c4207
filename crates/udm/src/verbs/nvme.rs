//! `udm nvme`: the NVMe/TCP target, and the namespaces of other targets.

use crate::args::{OutputFormatArgs, ServerArgs};
use crate::output::{print_json_to_stdout, print_to_stdout};
use crate::requests::explain_client_error;
use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use serde_json::json;
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
    /// Show the subsystem with its ports, namespaces and controllers, and used namespaces of others
    #[command(visible_alias = "list")]
    Ls {
        #[command(flatten)]
        server: ServerArgs,
        #[command(flatten)]
        print: OutputFormatArgs,
    },
    /// Show the ANA states, or set one: how good each port is for each device
    ///
    /// The states are optimized, non-optimized, inaccessible and persistent-loss. Hosts get an
    /// event and choose their paths by the state. A state belongs to the name of a device, and
    /// holds until the server ends; --nvme-ana of udm serve sets it at the start.
    Ana {
        #[command(flatten)]
        server: ServerArgs,
        #[command(flatten)]
        print: OutputFormatArgs,
        /// The device and its new state; with --all, only the state; nothing to show the states
        #[arg(value_name = "DEVICE|STATE", num_args = 0..=2)]
        words: Vec<String>,
        /// Set the state of all devices
        #[arg(long)]
        all: bool,
        /// Only on this port of the target [default: all]
        #[arg(long, value_name = "ADDRESS:PORT")]
        port: Option<String>,
    },
}

/// Runs `udm nvme`.
pub fn run(args: &NvmeArgs) -> Result<()> {
    match &args.verb {
        NvmeVerb::Ls { server, print } => {
            let list = server.client()?.call(verbs::LIST_NVME, &());
            let api::NvmeSubsystemList { subsystems, paths } =
                list.map_err(|error| explain_client_error(error, None))?;
            if print.json {
                return print_json_to_stdout(&subsystems);
            }
            print_to_stdout(&(format_subsystem_list(&subsystems, &paths) + &format_path_list(&paths)))
        }
        NvmeVerb::Ana { server, print, words, all, port } => {
            let request = match (&words[..], all) {
                ([], false) if port.is_none() => None,
                ([state], true) => Some((None, state)),
                ([device, state], false) => Some((Some(device.clone()), state)),
                _ => bail!("nvme ana: expected DEVICE STATE, or --all STATE, or nothing to show the states"),
            };
            let client = server.client()?;
            let list = match request {
                None => client.call(verbs::LIST_NVME, &()),
                Some((device, state)) => {
                    let port = port.clone();
                    let body = api::SetNvmeAnaStateRequest { device, port, state: state.clone() };
                    client.call(verbs::SET_NVME_ANA, &body)
                }
            };
            let list = list.map_err(|error| explain_client_error(error, None))?.subsystems;
            if print.json {
                let all = list.iter().flat_map(|one| &one.namespaces);
                let states: Vec<_> = all.map(|one| json!({"device": one.device, "ana": one.ana})).collect();
                return print_json_to_stdout(&states);
            }
            print_to_stdout(&format_ana_states(&list))
        }
    }
}

/// The ANA state if it is the same on all ports, else that of each port.
fn format_states_of(namespace: &api::NvmeNamespace) -> String {
    match &namespace.ana[..] {
        [first, rest @ ..] if rest.iter().all(|one| one.state == first.state) => first.state.clone(),
        all => all.iter().map(|one| format!("{} on {}", one.state, one.port)).collect::<Vec<_>>().join(", "),
    }
}

/// One line for each device and port.
fn format_ana_states(subsystems: &[api::NvmeSubsystem]) -> String {
    let mut out = String::new();
    for one in subsystems.iter().flat_map(|subsystem| &subsystem.namespaces) {
        for ana in &one.ana {
            // Writing to a String can't fail.
            let _ = writeln!(out, "{}  {}  {}", one.device, ana.port, ana.state);
        }
    }
    out
}

/// The namespaces of other controllers that tables use.
fn format_path_list(paths: &[api::NvmePath]) -> String {
    let mut out = String::new();
    // Writing to a String can't fail.
    for one in paths {
        let controller = one.cntlid.map_or_else(String::new, |id| format!(", controller {id}"));
        let _ = writeln!(
            out,
            "path {}  {}{controller}, {}, {} associations, {} lost, {} writes wait, {} after a reset, {} after \
             their time",
            one.uri,
            one.state,
            one.ana,
            one.associations,
            one.losses,
            one.held_writes,
            one.writes_after_reset,
            one.writes_after_time
        );
    }
    out
}

fn format_subsystem_list(subsystems: &[api::NvmeSubsystem], paths: &[api::NvmePath]) -> String {
    if subsystems.is_empty() && paths.is_empty() {
        return "The server has no NVMe/TCP target: udm serve --nvme ADDRESS:PORT starts one\n".into();
    }
    let mut out = String::new();
    // Writing to a String can't fail.
    for subsystem in subsystems {
        let _ = writeln!(out, "{}  serial {}", subsystem.nqn, subsystem.serial);
        for port in &subsystem.ports {
            let _ = writeln!(out, "  port {}", port.address);
        }
        for one in &subsystem.namespaces {
            let access = if one.read_only { ", read-only" } else { "" };
            let _ = writeln!(
                out,
                "  namespace {}: {}  {} bytes in blocks of {}, uuid {}{access}, {}",
                one.nsid,
                one.device,
                one.size_bytes,
                one.block_bytes,
                one.uuid,
                format_states_of(one)
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
        for one in &subsystem.hosts {
            let queues =
                one.queues.iter().map(|queue| format!("{} of queue {}", queue.requests, queue.queue));
            let queues: Vec<_> = queues.collect();
            let _ = writeln!(
                out,
                "  host {}: {} requests, {} bytes, {} errors, {} in flight ({})",
                one.host_nqn,
                one.requests,
                one.bytes,
                one.errors,
                one.in_flight,
                queues.join(", ")
            );
        }
    }
    out
}
