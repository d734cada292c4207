//! Man pages and completions, generated from the clap tree and from pages of docs/.

use super::manual::PAGES;
use anyhow::{Context, Result};
use clap::{Args, Command, ValueEnum};
use clap_complete::Shell;
use std::path::PathBuf;

/// The arguments of `udm generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// The kind of files to write
    pub what: GenerateKind,
    /// The folder to write to; it is created if it is missing
    pub folder: PathBuf,
}

/// The kinds of files that `udm generate` writes.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum GenerateKind {
    /// Man pages: one per verb, one of udm.toml and one of udm as dmsetup.
    Man,
    /// Completions for bash, fish and zsh.
    Completions,
}

/// Writes man pages or completions of the command line `cli`.
pub fn run(args: &GenerateArgs, mut cli: Command) -> Result<()> {
    let folder = &args.folder;
    let name = || folder.display().to_string();
    std::fs::create_dir_all(folder).with_context(name)?;
    match args.what {
        GenerateKind::Man => {
            clap_mangen::generate_to(cli, folder).with_context(name)?;
            PAGES
                .iter()
                .try_for_each(|page| std::fs::write(folder.join(page.file()), page.roff()).with_context(name))
        }
        GenerateKind::Completions => {
            for shell in [Shell::Bash, Shell::Fish, Shell::Zsh] {
                clap_complete::generate_to(shell, &mut cli, "udm", folder).with_context(name)?;
            }
            Ok(())
        }
    }
}
