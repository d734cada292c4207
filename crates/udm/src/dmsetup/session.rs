//! The shared part of dmsetup's commands: device arguments, requests to the server, and error
//! texts.

use super::options::{CommandLine, OptionName};
use crate::log;
use crate::requests::all_devices;
use udm_control::api::{self, verbs};
use udm_control::client::{ClientError, ControlClient};
use udm_core::errno::ENXIO;

/// Folder of device nodes, as scripts name them.
pub const NODES: &str = "/dev/mapper/";

/// The error of a command. `dmsetup` prints the text and then a last line.
#[derive(Debug, PartialEq, Eq)]
pub enum CommandError {
    /// The last line is `Command failed.`
    Failed(String),
    /// The last line is `Couldn't process command line.`
    Line(String),
    /// Prints the usage of the commands.
    Usage(String),
    /// There is no last line.
    Silent(String),
}

impl CommandError {
    /// Puts `lines` before the text of the error.
    pub fn with_lines_before(self, lines: &str) -> CommandError {
        match self {
            CommandError::Failed(text) => CommandError::Failed(format!("{lines}\n{text}")),
            other => other,
        }
    }
}

pub type CommandResult = Result<(), CommandError>;

/// The error with the last line `Command failed.`
pub fn command_failed<T>(text: impl Into<String>) -> Result<T, CommandError> {
    Err(CommandError::Failed(text.into()))
}

/// A device argument of the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceSelector {
    /// By name.
    Name(String),
    /// By uuid.
    Uuid(String),
    /// By number.
    Number(String),
}

impl DeviceSelector {
    /// Parses a word of the command line: a name, or the path of a device node.
    ///
    /// # Errors
    /// The path is not below `/dev/mapper`.
    fn parse(word: &str) -> Result<DeviceSelector, CommandError> {
        match word.strip_prefix(NODES) {
            Some(name) => Ok(DeviceSelector::Name(name.to_owned())),
            None if word.contains('/') => command_failed(format!("Device {word} not found")),
            None => Ok(DeviceSelector::Name(word.to_owned())),
        }
    }

    fn word(&self) -> &str {
        match self {
            DeviceSelector::Name(word) | DeviceSelector::Uuid(word) | DeviceSelector::Number(word) => word,
        }
    }

    fn matches(&self, device: &api::Device) -> bool {
        match self {
            DeviceSelector::Name(name) => device.name == *name,
            DeviceSelector::Uuid(uuid) => device.uuid.as_ref() == Some(uuid),
            DeviceSelector::Number(number) => device.number == *number,
        }
    }

    /// The text for the device in error messages.
    pub fn in_errors(&self) -> String {
        match self {
            DeviceSelector::Name(name) => format!("{name} "),
            DeviceSelector::Uuid(uuid) => format!(" {uuid}"),
            DeviceSelector::Number(number) => format!(" ({number})"),
        }
    }
}

/// dmsetup's message if `ioctl` on `device` fails with `errno`.
pub fn ioctl_failed(ioctl: &str, device: &str, errno: u32) -> String {
    let errno = i32::try_from(errno).unwrap_or(i32::MAX);
    let why = crate::strip_os_error(&std::io::Error::from_raw_os_error(errno).to_string());
    format!("device-mapper: {ioctl} ioctl on {device} failed: {why}")
}

/// A command line, its server and its output.
pub struct Session {
    pub line: CommandLine,
    pub client: ControlClient,
    /// Text for standard output.
    pub out: String,
}

impl Session {
    pub fn has(&self, name: OptionName) -> bool {
        self.line.has(name)
    }

    pub fn value(&self, name: OptionName) -> Option<&str> {
        self.line.value(name)
    }

    /// Prints to standard error at once.
    pub fn warn(text: &str) {
        log::say(format!("{text}\n"));
    }

    /// The device that `-u`, or `-j` and `-m`, select.
    ///
    /// # Errors
    /// Only one of the two numbers is given.
    pub fn selected(&self) -> Result<Option<DeviceSelector>, CommandError> {
        match (self.value(OptionName::Uuid), self.value(OptionName::Major), self.value(OptionName::Minor)) {
            (Some(uuid), ..) => Ok(Some(DeviceSelector::Uuid(uuid.to_owned()))),
            (None, None, None) => Ok(None),
            (None, Some(major), Some(minor)) => Ok(Some(DeviceSelector::Number(format!("{major}:{minor}")))),
            _ => Err(CommandError::Line("Please specify both major number and minor number.".into())),
        }
    }

    /// The device argument of a command for one device, and the other words.
    ///
    /// # Errors
    /// `missing`, if there is no device argument.
    pub fn one<'a>(
        &self,
        words: &'a [String],
        missing: &str,
    ) -> Result<(DeviceSelector, &'a [String]), CommandError> {
        match (self.selected()?, words) {
            (Some(selector), words) => Ok((selector, words)),
            (None, [name, rest @ ..]) => Ok((DeviceSelector::parse(name)?, rest)),
            (None, []) => command_failed(missing),
        }
    }

    /// Applies `verb` to each device argument; stops at the first failure.
    ///
    /// # Errors
    /// There is no device argument, or `verb` fails.
    pub fn each(
        &mut self,
        words: &[String],
        mut verb: impl FnMut(&mut Session, &DeviceSelector) -> CommandResult,
    ) -> CommandResult {
        if let Some(selector) = self.selected()? {
            return verb(self, &selector);
        }
        if words.is_empty() {
            return command_failed("No device specified.");
        }
        words.iter().try_for_each(|word| {
            let selector = DeviceSelector::parse(word)?;
            verb(self, &selector)
        })
    }

    /// Applies `verb` to each device argument, or to all devices. The boolean is true if the output
    /// needs the device's name in front.
    ///
    /// # Errors
    /// The server does not answer, or `verb` fails.
    pub fn each_or_all(
        &mut self,
        words: &[String],
        mut verb: impl FnMut(&mut Session, &DeviceSelector, bool) -> CommandResult,
    ) -> CommandResult {
        if !words.is_empty() || self.selected()?.is_some() {
            let several = words.len() > 1;
            return self.each(words, |session, selector| verb(session, selector, several));
        }
        let all = self.all()?;
        if all.is_empty() {
            self.out += "No devices found\n";
        }
        all.into_iter().try_for_each(|device| verb(self, &DeviceSelector::Name(device.name), true))
    }

    /// All devices, sorted by name as the kernel lists them.
    ///
    /// # Errors
    /// The server does not answer.
    pub fn all(&self) -> Result<Vec<api::Device>, CommandError> {
        let mut all = all_devices(&self.client).map_err(|e| CommandError::Failed(e.to_string()))?;
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    /// Finds a device; returns `None` if it does not exist.
    ///
    /// # Errors
    /// The server does not answer.
    pub fn lookup(&self, selector: &DeviceSelector) -> Result<Option<api::Device>, CommandError> {
        match self.client.call(verbs::GET_DEVICE.on(selector.word()), &()) {
            Ok(device) => Ok(Some(device).filter(|device| selector.matches(device))),
            Err(ClientError::Refused(_)) => Ok(None),
            Err(error) => command_failed(error.to_string()),
        }
    }

    /// Finds a device for a request that the kernel calls `ioctl`.
    ///
    /// # Errors
    /// The device does not exist; the message names `ioctl`.
    pub fn find(&self, selector: &DeviceSelector, ioctl: &str) -> Result<api::Device, CommandError> {
        let missing =
            || CommandError::Failed(ioctl_failed(ioctl, &selector.in_errors(), ENXIO.unsigned_abs()));
        self.lookup(selector)?.ok_or_else(missing)
    }

    /// Finds a device; the error text is that of commands that check first.
    ///
    /// # Errors
    /// The device does not exist.
    pub fn find_or_fail(&self, selector: &DeviceSelector) -> Result<api::Device, CommandError> {
        self.lookup(selector)?.ok_or_else(|| CommandError::Failed("Device does not exist.".into()))
    }

    /// Converts the result of a request about `device` that the kernel calls `ioctl`.
    ///
    /// # Errors
    /// The refusal, in dmsetup's words; with `--verbose` followed by the server's reason.
    pub fn map_ioctl_error<T>(
        &self,
        ioctl: &str,
        device: &str,
        result: Result<T, ClientError>,
    ) -> Result<T, CommandError> {
        result.map_err(|error| match error {
            ClientError::Refused(why) if self.has(OptionName::Verbose) => {
                CommandError::Failed(format!("{}\n{}", ioctl_failed(ioctl, device, why.errno), why.error))
            }
            ClientError::Refused(why) => CommandError::Failed(ioctl_failed(ioctl, device, why.errno)),
            error => CommandError::Failed(error.to_string()),
        })
    }

    /// [`Session::map_ioctl_error`] for a device argument.
    ///
    /// # Errors
    /// As for [`Session::map_ioctl_error`].
    pub fn map_error<T>(
        &self,
        ioctl: &str,
        selector: &DeviceSelector,
        result: Result<T, ClientError>,
    ) -> Result<T, CommandError> {
        self.map_ioctl_error(ioctl, &selector.in_errors(), result)
    }
}
