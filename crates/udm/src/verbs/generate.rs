//! Man pages and completions, generated from the clap tree and from pages of docs/.

use super::manual::PAGES;
use crate::cli::{Cli, GenerateArgs, GenerateKind};
use anyhow::{Context, Result};
use clap::CommandFactory;
use clap_complete::Shell;

pub fn run(args: &GenerateArgs) -> Result<()> {
    let folder = &args.folder;
    let name = || folder.display().to_string();
    std::fs::create_dir_all(folder).with_context(name)?;
    match args.what {
        GenerateKind::Man => {
            clap_mangen::generate_to(Cli::command(), folder).with_context(name)?;
            PAGES
                .iter()
                .try_for_each(|page| std::fs::write(folder.join(page.file()), page.roff()).with_context(name))
        }
        GenerateKind::Completions => {
            for shell in [Shell::Bash, Shell::Fish, Shell::Zsh] {
                clap_complete::generate_to(shell, &mut Cli::command(), "udm", folder).with_context(name)?;
            }
            Ok(())
        }
    }
}
