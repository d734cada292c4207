//! Who may connect to the NBD server's Unix socket: its permissions and its group.

use super::args::ServeArgs;
use anyhow::{Context, Result, bail};
use nix::unistd::{Gid, Group};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, chmod, chownat};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// The permissions without `--unix-mode`: of the owner, and of a group that is given.
const OWNER: u32 = 0o600;
const OWNER_AND_GROUP: u32 = 0o660;

/// Parses permissions of a socket, in octal.
///
/// # Errors
/// What is expected.
pub fn parse_unix_mode(word: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(word, 8).ok().filter(|mode| *mode <= 0o777 && mode & OWNER == OWNER);
    mode.ok_or_else(|| "expected an octal number from 600 to 777 that lets the owner read and write".into())
}

/// Gives the socket at `path` the group and permissions of the options. Until here only the owner
/// could connect.
///
/// # Errors
/// There is no such group, or it may not be given to the socket.
pub(super) fn apply_socket_access(args: &ServeArgs, path: &Path) -> Result<()> {
    let default = if args.group.is_some() { OWNER_AND_GROUP } else { OWNER };
    set_group_and_mode(path, args.group.as_deref(), args.unix_mode.unwrap_or(default))
}

/// Lets the group of `--control-group` connect to the control socket at `path`.
///
/// # Errors
/// As [`apply_socket_access`].
pub(super) fn apply_control_access(args: &ServeArgs, path: &Path) -> Result<()> {
    let Some(group) = &args.control_group else { return Ok(()) };
    set_group_and_mode(path, Some(group), OWNER_AND_GROUP)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mode = std::fs::metadata(folder).map_or(0, |folder| folder.permissions().mode());
    if mode & 0o011 == 0 {
        tracing::warn!(
            "control-group: group {group} cannot enter {}: give it another folder with --socket",
            folder.display()
        );
    }
    Ok(())
}

fn set_group_and_mode(path: &Path, group: Option<&str>, mode: u32) -> Result<()> {
    let about = || path.display().to_string();
    // The folder may be another user's, who can replace the socket with a link. So the socket that
    // is open here is changed, through its path in /proc.
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let socket = rustix::fs::open(path, flags, Mode::empty()).with_context(about)?;
    let found = rustix::fs::fstat(&socket).with_context(about)?;
    if FileType::from_raw_mode(found.st_mode) != FileType::Socket {
        bail!("{}: it is not the server's socket any more", path.display());
    }
    let open = format!("/proc/self/fd/{}", socket.as_raw_fd());
    if let Some(group) = group {
        let gid = rustix::process::Gid::from_raw(find_group(group)?.as_raw());
        chownat(CWD, &open, None, Some(gid), AtFlags::empty())
            .with_context(|| format!("{}: group {group}", about()))?;
    }
    if mode != OWNER {
        chmod(&open, Mode::from_raw_mode(mode)).with_context(about)?;
    }
    Ok(())
}

/// The group of a name or a number.
fn find_group(word: &str) -> Result<Gid> {
    if let Ok(number) = word.parse() {
        return Ok(Gid::from_raw(number));
    }
    match Group::from_name(word).with_context(|| format!("group {word}"))? {
        Some(group) => Ok(group.gid),
        None => bail!("group: there is no group {word}"),
    }
}
