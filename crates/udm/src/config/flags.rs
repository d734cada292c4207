//! The keys of `[serve]`: the long options of `udm serve`, parsed by the parser of the command
//! line.

use crate::serve::VhostUserDiskArg;
use clap::error::ErrorKind;
use clap::{Arg, ArgAction, Command};
use std::any::TypeId;
use std::error::Error as _;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use udm_wire::udm_conf::{ServeOptionValue, ServeSectionOption, UdmConfError};

/// Options that are not keys of a file: how a server is started, the devices, which have their own
/// section, and --run.
const NO_KEYS: [&str; 8] =
    ["device", "run", "fork", "check", "single", "exit-with-parent", "help", "version"];

/// The options that are keys of the file.
pub fn serve_config_keys(serve: &Command) -> impl Iterator<Item = &Arg> {
    let is_key = |arg: &&Arg| {
        // Hidden options are for programs that start a server.
        !arg.is_hide_set() && arg.get_long().is_some_and(|long| !NO_KEYS.contains(&long))
    };
    serve.get_arguments().filter(is_key)
}

/// Converts a key to arguments of `udm serve`; relative paths start at `folder`.
///
/// # Errors
/// The key is unknown, or the option refuses its value.
pub fn serve_option_to_args(
    key: &ServeSectionOption,
    folder: &Path,
    serve: &Command,
) -> Result<Vec<OsString>, UdmConfError> {
    let name = &key.name;
    let Some(option) = serve_config_keys(serve).find(|option| option.get_long() == Some(name)) else {
        let why = format!("serve: {name}: unknown: see docs/config.md, or udm serve --help");
        return Err(UdmConfError::new(why, key.at.clone()));
    };
    let refuse = |why: &str| Err(UdmConfError::new(format!("serve: {name}: {why}"), key.value_at.clone()));
    let kind = option.get_value_parser().type_id();
    let is_socket = ["unix", "socket", "vhost-user"].contains(&name.as_str());
    let argument = |value: &String| {
        let mut argument = OsString::from(format!("--{name}="));
        let (name, path) = match value.split_once('=') {
            Some((name, path)) if kind == TypeId::of::<VhostUserDiskArg>() => (Some(name), path),
            _ if kind == TypeId::of::<PathBuf>() => (None, value.as_str()),
            _ => (None, ""),
        };
        // An abstract name stays one, so that it is refused.
        if path.is_empty() || path == "-" || is_socket && path.starts_with('@') {
            argument.push(value);
            return argument;
        }
        if let Some(name) = name {
            argument.push(name);
            argument.push("=");
        }
        argument.push(folder.join(path));
        argument
    };
    let arguments = match (option.get_action(), &key.value) {
        (ArgAction::SetTrue, ServeOptionValue::Flag(flag)) => {
            flag.then(|| OsString::from(format!("--{name}"))).into_iter().collect()
        }
        (ArgAction::SetTrue, _) => return refuse("expected true or false"),
        (_, ServeOptionValue::Text(text)) => vec![argument(text)],
        (ArgAction::Append, ServeOptionValue::List(list)) => list.iter().map(argument).collect(),
        (_, ServeOptionValue::List(_)) => return refuse("expected one value"),
        (_, ServeOptionValue::Flag(_)) => {
            let names = option.get_value_names().unwrap_or_default();
            let expected: Vec<&str> = names.iter().map(|name| name.as_str()).collect();
            return refuse(&format!("expected {}", expected.join(" ")));
        }
    };
    let read = serve.clone().no_binary_name(true).try_get_matches_from(&arguments);
    match read {
        // Required companion options are checked later, when all keys are known.
        Err(error) if error.kind() != ErrorKind::MissingRequiredArgument => {
            refuse(&clap_error_reason(&error))
        }
        _ => Ok(arguments),
    }
}

/// The reason of an error, without the text that clap puts around it.
pub fn clap_error_reason(error: &clap::Error) -> String {
    match error.source() {
        Some(why) => why.to_string(),
        None => {
            let message = error.to_string();
            let text = message.strip_prefix("error: ").unwrap_or(&message);
            // clap may list the options at fault on separate lines.
            let lines = text.lines().take_while(|line| !line.is_empty()).map(str::trim);
            lines.collect::<Vec<_>>().join(" ")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::ServeArgs;
    use udm_wire::udm_conf::DEVICE_KEYS;

    /// docs/config.md has a table for each section of the file, with its keys in order and their
    /// values.
    #[test]
    fn the_docs_have_each_key() {
        let docs = include_str!("../../../../docs/config.md");
        let rows = |part: &str| -> Vec<(String, String)> {
            let (_, part) = docs.split_once(&format!("\n## {part}\n")).unwrap();
            let part = part.split("\n## ").next().unwrap().replace("\\|", "\0");
            let rows = part.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` | "));
            let rows =
                rows.map(|(key, value)| (key.to_owned(), value.trim_end_matches(" |").replace('\0', "|")));
            rows.collect()
        };
        let serve = ServeArgs::command();
        let takes = |option: &Arg| match option.get_action() {
            ArgAction::SetTrue => "true or false".to_owned(),
            action => {
                let names: Vec<&str> =
                    option.get_value_names().unwrap_or_default().iter().map(|name| name.as_str()).collect();
                let list = if matches!(action, ArgAction::Append) { ", or a list" } else { "" };
                format!("{}{list}", names.join(" "))
            }
        };
        let has: Vec<(String, String)> = serve_config_keys(&serve)
            .map(|option| (option.get_long().unwrap().to_owned(), takes(option)))
            .collect();
        assert_eq!(rows("[serve]"), has);
        let devices: Vec<String> = rows("[devices.NAME]").into_iter().map(|(key, _)| key).collect();
        assert_eq!(devices, DEVICE_KEYS);
    }
}
