//! The command that looks at a state.

use super::image::Image;
use anyhow::{Context, Result};
use std::process::{Command, ExitStatus};
use tempfile::NamedTempFile;

/// A command to run on copies of an image. One copy at a time, made afresh for each run: a check
/// may mount, repair or ruin it.
pub(super) struct Check<'a> {
    command: &'a str,
    copy: NamedTempFile,
}

impl<'a> Check<'a> {
    /// A check by `command`. The copies live beside `image`, or with the other temporary files when
    /// it is a device.
    pub(super) fn new(command: &'a str, image: &Image) -> Result<Check<'a>> {
        let folder = image.path().parent().filter(|_| image.path().is_file());
        let folder = folder.map(|folder| if folder.as_os_str().is_empty() { ".".as_ref() } else { folder });
        let copy = match folder {
            Some(folder) => NamedTempFile::new_in(folder),
            None => NamedTempFile::new(),
        };
        Ok(Check { command, copy: copy.context("a file for the copy to check")? })
    }

    /// Runs the command on a copy of `image`. Its standard output goes to standard error: ours is
    /// for the result.
    pub(super) fn run(&mut self, image: &mut Image) -> Result<ExitStatus> {
        image.copy_to(self.copy.as_file())?;
        let mut shell = Command::new("/bin/sh");
        shell.arg("-c").arg(self.command).env("image", self.copy.path());
        shell.stdout(std::io::stderr()).status().context("/bin/sh")
    }
}
