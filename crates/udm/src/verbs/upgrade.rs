//! `udm upgrade`: replaces a server by another program, with its clients connected.

use crate::args::{OutputFormatArgs, ServerArgs};
use crate::output::{count_noun, print_json_to_stdout, print_to_stdout};
use anyhow::{Context, Result};
use clap::Args;
use std::path::PathBuf;
use udm_control::api::{UpgradeServerRequest, verbs};

/// The arguments of `udm upgrade`.
#[derive(Debug, Args)]
pub struct UpgradeArgs {
    #[command(flatten)]
    pub server: ServerArgs,
    #[command(flatten)]
    pub print: OutputFormatArgs,
    /// The program that takes over [default: the file from which the server was started, as it is
    /// now]
    #[arg(value_name = "PROGRAM")]
    pub program: Option<PathBuf>,
    /// Close the connections of clients that use TLS, which cannot be handed over, once their
    /// requests in flight are completed
    #[arg(long)]
    pub disconnect_tls: bool,
}

pub fn run(args: &UpgradeArgs) -> Result<()> {
    let absolute = |path: &PathBuf| -> Result<String> {
        let path = std::path::absolute(path).with_context(|| path.display().to_string())?;
        path.into_os_string().into_string().ok().context("upgrade: the path of the program is not UTF-8")
    };
    let program = args.program.as_ref().map(absolute).transpose()?;
    let request = UpgradeServerRequest { program, disconnect_tls: args.disconnect_tls };
    let done = args.server.client()?.call(verbs::UPGRADE, &request)?;
    if args.print.json {
        return print_json_to_stdout(&done);
    }
    print_to_stdout(&format!(
        "version {} serves {} and {} as process {}, after a pause of {:.1} ms\n",
        done.version,
        count_noun(done.devices, "device"),
        count_noun(done.clients, "NBD client"),
        done.pid,
        done.pause_ns as f64 / 1e6
    ))
}
