//! The files and folders that a restricted server may use, by Landlock (`landlock(7)`).
//!
//! Contract: what is not listed cannot be opened, created, removed or executed, whatever its
//! permissions. The list is complete when the server starts: the files that the options, the
//! configuration file and the tables name, and all below each `--sandbox-path`. A file that a table
//! names and that does not exist yet stands for its folder. Landlock also forbids debugging other
//! processes, and, as far as the kernel knows how, listening on other TCP ports (Linux 6.7),
//! requests to other device nodes (6.10), and signals and abstract sockets of other processes
//! (6.12).

use crate::args::resolve_control_socket_path;
use crate::serve::args::ServeArgs;
use crate::table_arg::TableArg;
use crate::verbs::read_table;
use anyhow::{Context, Result, bail};
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, NetPort, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetStatus, Scope, path_beneath_rules,
};
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use udm_backends::files_of_image;
use udm_control::config::DesiredDevice;
use udm_wire::table::parse_table;
use udm_wire::uri::{DeviceUri, FileUri, NbdUri, ServerStoppedProof, parse_device_uri};

/// The version of Landlock that the rules are written for; the kernel may know less of it.
const LANDLOCK: ABI = ABI::V6;

/// What every program reads: libraries, names of users and hosts, properties of block devices.
const SYSTEM: [&str; 6] = ["/etc", "/proc", "/sys", "/run/systemd/resolve", "/dev/urandom", "/dev/random"];

/// Where programs and their libraries are.
const PROGRAMS: [&str; 6] = ["/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin"];

/// The files and folders of a server, by what it may do with them and with all below them.
#[derive(Debug, Default)]
pub(super) struct SandboxFiles {
    /// May be read.
    read: Vec<PathBuf>,
    /// May be read and executed.
    execute: Vec<PathBuf>,
    /// May be read and changed.
    change: Vec<PathBuf>,
    /// Sockets and files may be created in these folders, and removed.
    sockets: Vec<PathBuf>,
    /// Folders that the server creates if they do not exist, for its user alone.
    create: Vec<PathBuf>,
}

impl SandboxFiles {
    /// The files that the options and the devices of the configuration file `file` name.
    ///
    /// # Errors
    /// A folder or a table cannot be found.
    pub fn of(args: &ServeArgs, file: Option<&Path>, devices: &[DesiredDevice]) -> Result<SandboxFiles> {
        let mut files = SandboxFiles::default();
        files.read.extend(SYSTEM.map(PathBuf::from));
        files.execute.extend(PROGRAMS.map(PathBuf::from));
        // An upgrade starts the program that is then in the place of this one.
        let own = std::env::current_exe().context("/proc/self/exe")?;
        files.execute.extend(own.parent().map(Path::to_owned));
        files.change.push("/dev/null".into());
        files.add_options(args)?;
        let here = std::env::current_dir().context("the current folder")?;
        for device in &args.devices {
            match &device.table {
                TableArg::Text(text) | TableArg::Whole(text) => files.add_table(text, &here),
                TableArg::File(path) => {
                    files.add_table(&read_table(path).with_context(|| device.name.clone())?, &here);
                    files.read.push(path.clone());
                }
            }
        }
        if let Some(file) = file {
            let folder = std::path::absolute(file).ok().and_then(|file| Some(file.parent()?.to_owned()));
            let folder = folder.context("the folder of the configuration file")?;
            devices.iter().for_each(|device| files.add_table(&device.table, &folder));
            files.read.push(folder);
        }
        Ok(files)
    }

    fn add_options(&mut self, args: &ServeArgs) -> Result<()> {
        for path in &args.sandbox_path {
            if !path.exists() {
                bail!("{}: no such file or folder", path.display());
            }
            self.change.push(path.clone());
        }
        if let Ok(state) = args.state.path() {
            self.change.push(state.clone());
            self.create.push(state);
        }
        if let Ok(control) = resolve_control_socket_path(args.socket.clone()) {
            self.create.extend(control.parent().map(Path::to_owned));
            self.add_socket(&control);
        }
        match &args.unix {
            Some(path) if path != Path::new("-") => self.add_socket(path),
            // Private folders are created in this one.
            _ => self.change.push(std::env::temp_dir()),
        }
        args.vhost_user.iter().for_each(|disk| self.add_socket(&disk.path));
        args.pidfile.iter().for_each(|path| self.add_socket(path));
        self.read.extend(args.tls_certificates.clone());
        self.read.extend(args.multipath_conf.clone());
        let secrets = args.nvme_dhchap_secrets.iter().chain(&args.nvme_dhchap_ctrl_secrets);
        self.read.extend(secrets.map(|secret| secret.path.clone()));
        self.change.extend(args.nvme_peers.clone());
        self.create.extend(args.nvme_peers.clone());
        Ok(())
    }

    /// Adds the folder of a socket or a file that the server creates.
    fn add_socket(&mut self, path: &Path) {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        self.sockets.push(folder.unwrap_or(Path::new(".")).to_owned());
    }

    /// Adds the files that a table names; relative paths start at `folder`. A table that cannot be
    /// parsed names none: its device is refused later.
    fn add_table(&mut self, text: &str, folder: &Path) {
        let lines = parse_table(text).unwrap_or_default();
        let mut words: Vec<&str> = lines.iter().flat_map(|line| &line.args).map(String::as_str).collect();
        if words.is_empty() {
            // The name of a device stands for a table that maps all of it.
            words.push(text);
        }
        for word in words {
            match parse_device_uri(word) {
                Ok(DeviceUri::File(file)) => self.add_device_file(&file, word, folder),
                Ok(DeviceUri::Number { major, minor }) => {
                    self.change.push(format!("/dev/block/{major}:{minor}").into());
                }
                Ok(DeviceUri::Nbd(server)) => self.add_nbd_server(&server, folder),
                Ok(DeviceUri::Nvme(namespace)) => {
                    self.read
                        .extend(namespace.secret_file.into_iter().chain(namespace.controller_secret_file));
                }
                _ => {}
            }
        }
    }

    fn add_device_file(&mut self, file: &FileUri, word: &str, folder: &Path) {
        let path = folder.join(&file.path);
        // Most words of a table are numbers and options.
        let is_path = word.contains('/') || word.starts_with("file:");
        match path.exists() {
            true if path.is_dir() => {}
            true if file.readonly => {
                // Files that an image names are read too.
                self.read.extend(files_of_image(&FileUri { path: path.clone(), ..file.clone() }));
                self.read.push(path);
            }
            true => self.change.push(path),
            false if is_path => {
                self.change
                    .extend(path.parent().filter(|folder| *folder != Path::new("/")).map(Path::to_owned));
            }
            false => {}
        }
    }

    fn add_nbd_server(&mut self, server: &NbdUri, folder: &Path) {
        self.read.extend(server.tls.iter().map(|tls| folder.join(&tls.certificates)));
        if let ServerStoppedProof::Exec(command) = &server.silence.fence {
            self.execute.push(command.clone());
        }
    }

    /// Creates the folders of the server, because a restricted process cannot create them. What
    /// fails here is reported where the folder is used.
    pub fn create_folders(&self) {
        for folder in self.create.iter().filter(|folder| !folder.as_os_str().is_empty()) {
            let _ = DirBuilder::new().recursive(true).mode(0o700).create(folder);
        }
    }
}

/// Restricts this thread to `files`, and to listening on `ports`.
///
/// # Errors
/// The kernel has no Landlock.
pub(super) fn restrict_files(files: &SandboxFiles, ports: &[u16]) -> Result<()> {
    let all = AccessFs::from_all(LANDLOCK);
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let nodes = AccessFs::MakeChar | AccessFs::MakeBlock | AccessFs::Execute;
    let sockets: BitFlags<AccessFs> = read
        | AccessFs::WriteFile
        | AccessFs::Truncate
        | AccessFs::MakeReg
        | AccessFs::MakeSock
        | AccessFs::RemoveFile;
    let ports = ports.iter().map(|port| Ok(NetPort::new(*port, AccessNet::BindTcp)));
    let status = Ruleset::default()
        .handle_access(all)?
        .handle_access(AccessNet::BindTcp)?
        .scope(Scope::from_all(LANDLOCK))?
        .create()?
        .add_rules(path_beneath_rules(&files.read, read))?
        .add_rules(path_beneath_rules(&files.execute, read | AccessFs::Execute))?
        .add_rules(path_beneath_rules(&files.change, all & !nodes))?
        .add_rules(path_beneath_rules(&files.sockets, sockets))?
        .add_rules(ports.collect::<Vec<Result<_, landlock::RulesetError>>>())?
        .restrict_self()?;
    if status.ruleset == RulesetStatus::NotEnforced {
        bail!(
            "this kernel has no Landlock: it needs Linux 5.13 or later with `landlock` in /sys/kernel/security/lsm, \
             or serve without --sandbox"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Words of a table that are no files, and folders, add nothing; files that do not exist add
    /// their folder.
    #[test]
    fn a_table_names_files_and_folders() {
        let folder = tempfile::tempdir().unwrap();
        let (disk, base) = (folder.path().join("disk.img"), folder.path().join("base.img"));
        std::fs::write(&disk, "x").unwrap();
        std::fs::write(&base, "x").unwrap();
        let table = format!(
            "0 8 linear disk.img 0\n8 8 snapshot file:{}?readonly=on {}/stores/new.cow P 8\n\
             16 8 linear nbds://h/x?tls-certificates=/tls&fence=exec:/bin/stop 0\n24 8 linear 7:1 0\n\
             32 8 linear /tmp 0\n40 8 linear /not-there 0\n\
             48 8 linear nvme+tcp://h/nqn.2014-08.x/1?dhchap-secret=/key&dhchap-ctrl-secret=/other 0",
            base.display(),
            folder.path().display()
        );
        let mut files = SandboxFiles::default();
        files.add_table(&table, folder.path());
        assert_eq!(files.change, [disk, folder.path().join("stores"), "/dev/block/7:1".into()]);
        assert_eq!(files.read, [base, "/tls".into(), "/key".into(), "/other".into()]);
        assert_eq!(files.execute, [PathBuf::from("/bin/stop")]);
        assert!(files.sockets.is_empty());
    }

    /// A table that is the name of a device.
    #[test]
    fn a_name_is_a_table() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("disk.img"), "x").unwrap();
        let mut files = SandboxFiles::default();
        files.add_table("disk.img", folder.path());
        assert_eq!(files.change, [folder.path().join("disk.img")]);
    }
}
