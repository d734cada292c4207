//! `udm serve FILE`: a file with the options of the server and its devices, and the files in
//! `conf.d` next to it.
//!
//! Contract: everything is read before anything is done. A fault is an error that names its place.
//! Relative paths, in tables too, start at the folder of FILE. The section `[serve]` has the
//! options of `udm serve`, parsed by the parser of the command line. `udm_control::config` applies
//! the devices.

mod allowed_users;
mod flags;
mod throttles;

use crate::boot_profile::add_boot_profile;
use crate::verbs::read_table;
use allowed_users::{is_certificate_name, resolve_allowed_users};
use anyhow::{Context, Result, bail};
use clap::{ArgMatches, Command};
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use throttles::ThrottlesOfFiles;
use udm_control::config::{DesiredDevice, DesiredState};
use udm_control::registry::BaseDir;
use udm_wire::udm_conf::{TEXT_MAX, TableSource, UdmConf, UdmConfError};

/// The folder next to the file; its files are read too.
const MORE: &str = "conf.d";

/// Maximum number of files in this folder.
const FILES_MAX: usize = 4096;

/// Maximum bytes of all these files and of the table files.
const ALL_MAX: usize = 256 << 20;

/// The content of all configuration files.
pub struct ConfigFiles {
    /// The parser of the options of `udm serve`.
    command: Command,
    /// Arguments of `udm serve`, by the names of the options.
    serve: BTreeMap<String, Vec<OsString>>,
    /// The devices, in the order of the files.
    pub devices: Vec<DesiredDevice>,
    folder: PathBuf,
}

/// Reads `file` and the files in `conf.d` next to it. `serve` parses the options of `udm serve`.
///
/// # Errors
/// The first fault, with its place and its text.
pub fn load_config_files(file: &Path, serve: &Command) -> Result<ConfigFiles> {
    let file = std::path::absolute(file).with_context(|| file.display().to_string())?;
    let folder = file.parent().unwrap_or(Path::new("/")).to_owned();
    let mut loaded =
        ConfigFiles { command: serve.clone(), serve: BTreeMap::new(), devices: Vec::new(), folder };
    let mut files = vec![file];
    files.extend(list_conf_d(&loaded.folder.join(MORE))?);
    let (mut keys, mut devices, mut size) = (HashMap::new(), HashMap::new(), 0);
    let mut throttles = ThrottlesOfFiles::default();
    for file in &files {
        let name = file.display().to_string();
        let text = read_config_file(file)?;
        size += text.len();
        let shown = |fault: &UdmConfError| anyhow::anyhow!(fault.with_source_line(&name, &text));
        let conf = UdmConf::parse(&text).map_err(|fault| shown(&fault))?;
        for key in &conf.serve {
            let arguments =
                flags::serve_option_to_args(key, &loaded.folder, serve).map_err(|fault| shown(&fault))?;
            if let Some(other) = keys.insert(key.name.clone(), name.clone()) {
                let why = format!("serve: {}: {other} has it too", key.name);
                return Err(shown(&UdmConfError::new(why, key.at.clone())));
            }
            loaded.serve.insert(key.name.clone(), arguments);
        }
        for group in conf.throttle_groups {
            throttles.add_group(group, &name).map_err(|fault| shown(&fault))?;
        }
        for device in conf.devices {
            if let Some(other) = devices.insert(device.name.clone(), name.clone()) {
                let why = format!("devices.{}: {other} has it too", device.name);
                return Err(shown(&UdmConfError::new(why, device.at)));
            }
            let table = match device.table {
                TableSource::Text(text) => text,
                TableSource::File(file) => {
                    let table = read_table(&loaded.folder.join(file));
                    table.map_err(|e| {
                        shown(&UdmConfError::new(
                            format!("devices.{}: {e:#}", device.name),
                            device.at.clone(),
                        ))
                    })?
                }
            };
            let table = match device.hydrate_first {
                None => table,
                Some(file) => add_boot_profile(&loaded.folder.join(file), &table).map_err(|e| {
                    let why = format!("devices.{}: hydrate-first: {e:#}", device.name);
                    shown(&UdmConfError::new(why, device.at.clone()))
                })?,
            };
            size += table.len();
            if size > ALL_MAX {
                bail!("{name}: the files and tables are longer than {ALL_MAX} bytes");
            }
            let place = (loaded.devices.len(), &*device.name);
            let throttle = throttles.limits_of_device(place, device.throttle, shown);
            let allow = device.allow.map(resolve_allowed_users).transpose().map_err(|why| {
                shown(&UdmConfError::new(format!("devices.{}: {why}", device.name), device.at.clone()))
            })?;
            let device = DesiredDevice::new(&device.name, table.clone(), device.uuid, device.read_only)
                .map(|wanted| wanted.with_allow(allow.map(Into::into)).with_throttle(throttle))
                .map(|wanted| wanted.with_description(device.description));
            loaded
                .devices
                .push(device.map_err(|e| anyhow::anyhow!("{name}: devices.{}", e.with_table(&table)))?);
        }
    }
    throttles.set_groups(&mut loaded.devices)?;
    // Devices that form a cycle are an error of the file.
    let circle = udm_control::config::plan_config_changes(&[], &loaded.devices).err();
    circle.map_or(Ok(loaded), |circle| bail!("{}: devices.{circle}", files[0].display()))
}

/// The files in the folder, sorted by name; none if there is no such folder.
fn list_conf_d(folder: &Path) -> Result<Vec<PathBuf>> {
    let name = || folder.display().to_string();
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.with_context(name)?,
    };
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.with_context(name)?.path();
        let hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        if path.extension().is_some_and(|extension| extension == "toml") && !hidden {
            files.push(path);
        }
    }
    if files.len() > FILES_MAX {
        bail!("{}: more than {FILES_MAX} files", folder.display());
    }
    files.sort();
    Ok(files)
}

fn read_config_file(file: &Path) -> Result<String> {
    let name = || file.display().to_string();
    let mut bytes = Vec::new();
    let open = std::fs::File::open(file).with_context(name)?;
    open.take(TEXT_MAX as u64 + 1).read_to_end(&mut bytes).with_context(name)?;
    match String::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => Ok(text),
        _ => bail!("{0}: not a configuration file; a disk is served by --device NAME={0}", name()),
    }
}

impl ConfigFiles {
    /// Merges the command line with the files. The command line takes precedence.
    ///
    /// # Errors
    /// Options that exclude each other.
    pub fn merged(&self, file: &Path) -> Result<ArgMatches> {
        let merge = || -> Result<ArgMatches, clap::Error> {
            // The first of these words is the verb: udm has no options before it.
            let words: Vec<OsString> = std::env::args_os().skip(1).collect();
            let matches = self.command.clone().try_get_matches_from(&words)?;
            // Compares the long name: the id of a clap argument may differ from it.
            let is_given = |name: &str| {
                let option = self.command.get_arguments().find(|option| option.get_long() == Some(name));
                let source = option.and_then(|option| matches.value_source(option.get_id().as_str()));
                source == Some(clap::parser::ValueSource::CommandLine)
            };
            let arguments =
                self.serve.iter().filter(|(name, _)| !is_given(name)).flat_map(|(_, all)| all.clone());
            let (verb, rest) = words.split_at(words.len().min(1));
            let all = verb.iter().cloned().chain(arguments).chain(rest.iter().cloned());
            self.command.clone().try_get_matches_from(all)
        };
        merge().map_err(|e| anyhow::anyhow!("{}: serve: {}", file.display(), flags::clap_error_reason(&e)))
    }

    /// A device that clients of TLS may use by names in their certificates.
    pub fn device_for_certificates(&self) -> Option<&DesiredDevice> {
        let has_names = |device: &&DesiredDevice| {
            device.allow.iter().flat_map(|allow| allow.iter()).any(|entry| is_certificate_name(entry))
        };
        self.devices.iter().find(has_names)
    }

    /// The devices to apply, for a server that was started with the options `first`.
    fn desired_state(self, first: &BTreeMap<String, Vec<OsString>>) -> DesiredState {
        let changed = |name: &&String| first.get(*name) != self.serve.get(*name);
        let mut names: Vec<&String> = first.keys().chain(self.serve.keys()).filter(changed).collect();
        names.sort();
        names.dedup();
        let note = |name: &String| format!("serve: {name}: changed, takes effect after a restart");
        DesiredState {
            notes: names.into_iter().map(note).collect(),
            folder: BaseDir::at(&self.folder).unwrap_or_default(),
            devices: self.devices,
        }
    }

    /// The devices to apply first, and a function that reads the files again.
    pub fn reader(self, file: &Path) -> (DesiredState, udm_control::config::ConfigReader) {
        let (first, file) = (self.serve.clone(), std::path::absolute(file).unwrap_or_else(|_| file.into()));
        let command = self.command.clone();
        let desired_state = self.desired_state(&first);
        let read = move || {
            load_config_files(&file, &command)
                .map(|loaded| loaded.desired_state(&first))
                .map_err(|e| format_error_without_errno(&e))
        };
        (desired_state, Box::new(read))
    }
}

/// Formats an error without system error numbers.
fn format_error_without_errno(error: &anyhow::Error) -> String {
    crate::strip_os_error(&format!("{error:#}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::ServeArgs;
    use std::fs;

    fn refused(files: &[(&str, &str)]) -> String {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join(MORE)).unwrap();
        for (name, text) in files {
            fs::write(folder.path().join(name), text).unwrap();
        }
        let error = load_config_files(&folder.path().join("udm.toml"), &ServeArgs::command())
            .err()
            .map(|e| format_error_without_errno(&e))
            .unwrap_or_default();
        error.replace(&folder.path().display().to_string(), "F")
    }

    #[test]
    fn a_fault_is_said_with_its_place() {
        let serve = |line: &str| refused(&[("udm.toml", &format!("[serve]\n{line}\n"))]);
        assert_eq!(
            serve("prot = 1"),
            "F/udm.toml:2:1: serve: prot: unknown: see docs/config.md, or udm serve --help\nprot = 1\n^^^^"
        );
        assert_eq!(
            serve("port = 99999"),
            "F/udm.toml:2:8: serve: port: 99999 is not in 0..=65535\nport = 99999\n       ^^^^^"
        );
        let head = |line: &str| serve(line).lines().next().unwrap_or_default().to_owned();
        assert_eq!(head("readonly = \"yes\""), "F/udm.toml:2:12: serve: readonly: expected true or false");
        assert_eq!(head("unix = true"), "F/udm.toml:2:8: serve: unix: expected PATH");
        assert_eq!(
            head("vhost-user = \"disk\""),
            "F/udm.toml:2:14: serve: vhost-user: expected NAME=PATH: a device, and a path for its socket"
        );
        assert_eq!(head("port = [1, 2]"), "F/udm.toml:2:8: serve: port: expected one value");
        for name in ["device = \"a=mem:1M\"", "run = \"true\"", "fork = true", "check = true", "help = true"]
        {
            assert!(head(name).contains("unknown"), "{name}: {}", head(name));
        }
        let device = "[devices.a]\ntable = \"0 8 error\"\n";
        let twice = refused(&[("udm.toml", device), ("conf.d/x.toml", device)]);
        assert_eq!(twice.lines().next(), Some("F/conf.d/x.toml:1:10: devices.a: F/udm.toml has it too"));
        let key = "[serve]\nport = 1\n";
        let twice = refused(&[("udm.toml", key), ("conf.d/x.toml", key)]);
        assert_eq!(twice.lines().next(), Some("F/conf.d/x.toml:2:1: serve: port: F/udm.toml has it too"));
        let circle = "[devices]\na.table = \"0 8 linear @b 0\"\nb.table = \"0 8 linear @a 0\"";
        assert_eq!(
            refused(&[("udm.toml", circle)]),
            "F/udm.toml: devices.a: it depends on itself: a uses b, b uses a"
        );
        let file = "[devices.a]\ntable-file = \"t\"";
        assert_eq!(
            refused(&[("udm.toml", file)]).lines().next(),
            Some("F/udm.toml:1:10: devices.a: F/t: No such file or directory")
        );
        assert_eq!(
            refused(&[("udm.toml", file), ("t", "0 8 lineal x 0\n")]),
            "F/udm.toml: devices.a: lineal: unknown target type: Invalid argument\n0 8 lineal x 0\n    ^^^^^^"
        );
        assert_eq!(refused(&[]), "F/udm.toml: No such file or directory");
    }

    #[test]
    fn files_are_read_by_name_and_paths_count_from_the_first() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        fs::create_dir(folder.path().join(MORE)).unwrap();
        write(
            "udm.toml",
            "[serve]\nunix = \"nbd.sock\"\npoll = false\nhedge-reads = true\nexport = [\"a\", \"b\"]\n",
        );
        write("conf.d/2.toml", "[devices.b]\ntable-file = \"b.table\"");
        write("conf.d/1.toml", "[serve]\nport = 0\n[devices.a]\ntable = \"0 8 error\"");
        write("conf.d/1.toml~", "what an editor leaves");
        write("conf.d/.2.toml", "the same");
        write("b.table", "0 8 zero\n");
        let read = || load_config_files(&folder.path().join("udm.toml"), &ServeArgs::command()).unwrap();
        let loaded = read();
        let names: Vec<_> = loaded.devices.iter().map(|device| device.name.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
        let arguments: Vec<String> =
            loaded.serve.values().flatten().map(|word| word.to_str().unwrap().to_owned()).collect();
        let unix = format!("--unix={}/nbd.sock", folder.path().display());
        assert_eq!(arguments, ["--export=a", "--export=b", "--hedge-reads", "--port=0", &unix]);
        let first = loaded.serve.clone();
        write("conf.d/1.toml", "[serve]\nport = 1\n");
        write("udm.toml", "[serve]\npoll = true\n");
        let desired_state = read().desired_state(&first);
        let changed = |name: &str| format!("serve: {name}: changed, takes effect after a restart");
        assert_eq!(desired_state.notes, ["export", "hedge-reads", "poll", "port", "unix"].map(changed));
    }
}
