//! `vhost-user-blk`: under this name udm serves one file to one virtual machine, with the command
//! line that QEMU and libvirt expect of such a program.
//!
//! Source: "Backend program conventions" in QEMU's `docs/interop/vhost-user.rst`, and
//! `docs/interop/vhost-user.json` for the capabilities. It is `udm serve` with one device.

use crate::cli::{Cli, CliVerb};
use crate::output::print_to_stdout;
use crate::{log, serve};
use anyhow::{Context, Result, bail};
use clap::{ArgGroup, Parser};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use udm_wire::uri::FileUri;

/// The program name under which udm acts as this program.
const PROGRAM: &str = "vhost-user-blk";

/// The name of the only device.
const DEVICE: &str = "disk";

/// What the program can do, as in `vhost-user.json`.
const CAPABILITIES: &str = r#"{"type": "block", "features": ["read-only", "blk-file"]}"#;

/// Serve a file as the disk of a virtual machine
#[derive(Debug, Parser)]
#[command(name = PROGRAM, version, max_term_width = 100)]
#[command(group = ArgGroup::new("mode").required(true).args(["socket_path", "fd", "print_capabilities"]))]
#[command(
    after_help = "The program ends on SIGTERM, and with --fd also when the machine disconnects. udm serve has more: tables, several disks, snapshots, restart and upgrade.\n\n\
Example:\n  vhost-user-blk --socket-path=/tmp/disk.sock --blk-file=disk.img"
)]
struct VhostUserBlkArgs {
    /// Listen on this Unix socket; a machine may connect again
    #[arg(long, value_name = "PATH", requires = "blk_file")]
    socket_path: Option<PathBuf>,
    /// Serve the machine at the other end of this open socket
    #[arg(long, value_name = "FDNUM", requires = "blk_file")]
    fd: Option<u32>,
    /// The file or block device
    #[arg(long, value_name = "PATH")]
    blk_file: Option<PathBuf>,
    /// Refuse writes
    #[arg(long)]
    read_only: bool,
    /// Print what the program can do, as JSON
    #[arg(long)]
    print_capabilities: bool,
}

/// True if the program was started under this name.
pub fn is_vhost_user_blk(program: Option<&OsStr>) -> bool {
    program.is_some_and(|program| Path::new(program).file_name() == Some(OsStr::new(PROGRAM)))
}

/// Runs the program until its end.
///
/// # Errors
/// As `udm serve`.
pub fn run(words: impl Iterator<Item = OsString>) -> Result<ExitCode> {
    let args = VhostUserBlkArgs::parse_from([OsString::from(PROGRAM)].into_iter().chain(words));
    let Some(file) = args.blk_file.as_ref().filter(|_| !args.print_capabilities) else {
        print_to_stdout(&format!("{CAPABILITIES}\n"))?;
        return Ok(ExitCode::SUCCESS);
    };
    let file = std::path::absolute(file).with_context(|| file.display().to_string())?;
    let Some(path) = file.to_str() else { bail!("{}: the path is not UTF-8", file.display()) };
    let mut serve: Vec<OsString> =
        ["udm", "serve", "--private-control-socket", "--device"].map(Into::into).into();
    let uri = FileUri { readonly: args.read_only, ..FileUri::new(path.into()) };
    serve.push(format!("{DEVICE}={uri}").into());
    match (&args.socket_path, args.fd) {
        (Some(path), _) => {
            let mut disk = OsString::from(format!("{DEVICE}="));
            disk.push(path);
            serve.extend(["--vhost-user".into(), disk]);
        }
        (None, Some(fd)) => serve.extend(["--vhost-user-fd".into(), format!("{DEVICE}={fd}").into()]),
        (None, None) => {}
    }
    serve.extend(args.read_only.then(|| "--readonly".into()));
    let cli = Cli::parse_from(serve);
    log::init_logging("warn");
    let CliVerb::Serve(args) = &cli.verb else { bail!("these are not the words of udm serve") };
    serve::run(args)
}
