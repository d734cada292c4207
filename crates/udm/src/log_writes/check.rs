//! The command that checks a replayed state.

use super::image::ReplayOutputImage;
use anyhow::{Context, Result};
use std::process::{Command, ExitStatus};
use tempfile::NamedTempFile;

/// A command that runs on copies of an image. There is one copy at a time, and each run gets a new
/// one, because a check may mount, repair or damage it.
pub(super) struct ReplayCheckCommand<'a> {
    command: &'a str,
    copy: NamedTempFile,
}

impl<'a> ReplayCheckCommand<'a> {
    /// A check with `command`. The copies are in the folder of `image`, or in the system's
    /// temporary folder if the image is a device.
    pub(super) fn new(command: &'a str, image: &ReplayOutputImage) -> Result<ReplayCheckCommand<'a>> {
        let folder = image.path().parent().filter(|_| image.path().is_file());
        let folder = folder.map(|folder| if folder.as_os_str().is_empty() { ".".as_ref() } else { folder });
        let copy = match folder {
            Some(folder) => NamedTempFile::new_in(folder),
            None => NamedTempFile::new(),
        };
        Ok(ReplayCheckCommand { command, copy: copy.context("a file for the copy to check")? })
    }

    /// Runs the command on a copy of `image`. Its standard output goes to standard error: standard
    /// output is for the result of the replay.
    pub(super) fn run(&mut self, image: &mut ReplayOutputImage) -> Result<ExitStatus> {
        image.copy_to(self.copy.as_file())?;
        let mut shell = Command::new("/bin/sh");
        shell.arg("-c").arg(self.command).env("image", self.copy.path());
        shell.stdout(std::io::stderr()).status().context("/bin/sh")
    }
}
