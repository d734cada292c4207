//! `udm cow clear-invalid`: removes the server's mark that a store is invalid.

use crate::args::StateFolderArgs;
use crate::output::print_to_stdout;
use anyhow::{Result, bail};
use clap::Args;
use std::path::PathBuf;
use std::process::ExitCode;
use udm_control::state_folder::StableDiskId;

/// The arguments of `udm cow clear-invalid`.
#[derive(Debug, Args)]
pub(super) struct CowClearInvalidArgs {
    /// The store, as tables name it: a path, or @ and the name of a mapped device
    store: PathBuf,
    #[command(flatten)]
    state: StateFolderArgs,
}

/// Runs `udm cow clear-invalid`.
pub(super) fn run_cow_clear_invalid(args: &CowClearInvalidArgs) -> Result<ExitCode> {
    let name = args.store.display();
    match args.state.open()?.forget(&StableDiskId::named(&args.store))? {
        0 => bail!("{name}: nothing is kept against it"),
        _ => print_to_stdout(&format!("{name}: believed again\n"))?,
    }
    Ok(ExitCode::SUCCESS)
}
