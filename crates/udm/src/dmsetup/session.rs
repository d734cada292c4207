//! The shared part of dmsetup's commands: device arguments, requests to the server, and error
//! texts.

use super::options::{DmsetupCommandLine, DmsetupOption};
use crate::log;
use crate::requests::all_devices;
use udm_control::api::{self, verbs};
use udm_control::client::{ControlClient, ControlClientError};
use udm_core::errno::ENXIO;

/// Folder of device nodes, as scripts name them.
pub const NODES: &str = "/dev/mapper/";

/// The error of a command. `dmsetup` prints the text and then a last line.
#[derive(Debug, PartialEq, Eq)]
pub enum DmsetupError {
    /// The last line is `Command failed.`
    Failed(String),
    /// The last line is `Couldn't process command line.`
    Line(String),
    /// Prints the usage of the commands.
    Usage(String),
    /// There is no last line.
    Silent(String),
}

impl DmsetupError {
    /// Puts `lines` before the text of the error.
    pub fn with_lines_before(self, lines: &str) -> DmsetupError {
        match self {
            DmsetupError::Failed(text) => DmsetupError::Failed(format!("{lines}\n{text}")),
            other => other,
        }
    }
}

pub type DmsetupResult = Result<(), DmsetupError>;

/// The error with the last line `Command failed.`
pub fn command_failed_error<T>(text: impl Into<String>) -> Result<T, DmsetupError> {
    Err(DmsetupError::Failed(text.into()))
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
    fn parse(word: &str) -> Result<DeviceSelector, DmsetupError> {
        match word.strip_prefix(NODES) {
            Some(name) => Ok(DeviceSelector::Name(name.to_owned())),
            None if word.contains('/') => command_failed_error(format!("Device {word} not found")),
            None => Ok(DeviceSelector::Name(word.to_owned())),
        }
    }

    fn word(&self) -> &str {
        match self {
            DeviceSelector::Name(word) | DeviceSelector::Uuid(word) | DeviceSelector::Number(word) => word,
        }
    }

    fn matches(&self, device: &api::DeviceDescription) -> bool {
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
pub struct DmsetupInvocation {
    pub line: DmsetupCommandLine,
    pub client: ControlClient,
    /// Text for standard output.
    pub out: String,
}

impl DmsetupInvocation {
    pub fn has(&self, name: DmsetupOption) -> bool {
        self.line.has(name)
    }

    pub fn value(&self, name: DmsetupOption) -> Option<&str> {
        self.line.value(name)
    }

    /// Prints to standard error at once.
    pub fn warn(text: &str) {
        log::queue_stderr_text(&format!("{text}\n"));
    }

    /// The device that `-u`, or `-j` and `-m`, select.
    ///
    /// # Errors
    /// Only one of the two numbers is given.
    pub fn selected(&self) -> Result<Option<DeviceSelector>, DmsetupError> {
        match (
            self.value(DmsetupOption::Uuid),
            self.value(DmsetupOption::Major),
            self.value(DmsetupOption::Minor),
        ) {
            (Some(uuid), ..) => Ok(Some(DeviceSelector::Uuid(uuid.to_owned()))),
            (None, None, None) => Ok(None),
            (None, Some(major), Some(minor)) => Ok(Some(DeviceSelector::Number(format!("{major}:{minor}")))),
            _ => Err(DmsetupError::Line("Please specify both major number and minor number.".into())),
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
    ) -> Result<(DeviceSelector, &'a [String]), DmsetupError> {
        match (self.selected()?, words) {
            (Some(selector), words) => Ok((selector, words)),
            (None, [name, rest @ ..]) => Ok((DeviceSelector::parse(name)?, rest)),
            (None, []) => command_failed_error(missing),
        }
    }

    /// Applies `verb` to each device argument; stops at the first failure.
    ///
    /// # Errors
    /// There is no device argument, or `verb` fails.
    pub fn each(
        &mut self,
        words: &[String],
        mut verb: impl FnMut(&mut DmsetupInvocation, &DeviceSelector) -> DmsetupResult,
    ) -> DmsetupResult {
        if let Some(selector) = self.selected()? {
            return verb(self, &selector);
        }
        if words.is_empty() {
            return command_failed_error("No device specified.");
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
        mut verb: impl FnMut(&mut DmsetupInvocation, &DeviceSelector, bool) -> DmsetupResult,
    ) -> DmsetupResult {
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
    pub fn all(&self) -> Result<Vec<api::DeviceDescription>, DmsetupError> {
        let mut all = all_devices(&self.client).map_err(|e| DmsetupError::Failed(e.to_string()))?;
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    /// Finds a device; returns `None` if it does not exist.
    ///
    /// # Errors
    /// The server does not answer.
    pub fn lookup(&self, selector: &DeviceSelector) -> Result<Option<api::DeviceDescription>, DmsetupError> {
        match self.client.call(verbs::GET_DEVICE.on(selector.word()), &()) {
            Ok(device) => Ok(Some(device).filter(|device| selector.matches(device))),
            Err(ControlClientError::Refused(_)) => Ok(None),
            Err(error) => command_failed_error(error.to_string()),
        }
    }

    /// Finds a device for a request that the kernel calls `ioctl`.
    ///
    /// # Errors
    /// The device does not exist; the message names `ioctl`.
    pub fn find(
        &self,
        selector: &DeviceSelector,
        ioctl: &str,
    ) -> Result<api::DeviceDescription, DmsetupError> {
        let missing =
            || DmsetupError::Failed(ioctl_failed(ioctl, &selector.in_errors(), ENXIO.unsigned_abs()));
        self.lookup(selector)?.ok_or_else(missing)
    }

    /// Finds a device; the error text is that of commands that check first.
    ///
    /// # Errors
    /// The device does not exist.
    pub fn find_or_fail(&self, selector: &DeviceSelector) -> Result<api::DeviceDescription, DmsetupError> {
        self.lookup(selector)?.ok_or_else(|| DmsetupError::Failed("Device does not exist.".into()))
    }

    /// Converts the result of a request about `device` that the kernel calls `ioctl`.
    ///
    /// # Errors
    /// The refusal, in dmsetup's words; with `--verbose` followed by the server's reason.
    pub fn map_ioctl_error<T>(
        &self,
        ioctl: &str,
        device: &str,
        result: Result<T, ControlClientError>,
    ) -> Result<T, DmsetupError> {
        result.map_err(|error| match error {
            ControlClientError::Refused(why) if self.has(DmsetupOption::Verbose) => {
                DmsetupError::Failed(format!("{}\n{}", ioctl_failed(ioctl, device, why.errno), why.error))
            }
            ControlClientError::Refused(why) => DmsetupError::Failed(ioctl_failed(ioctl, device, why.errno)),
            error => DmsetupError::Failed(error.to_string()),
        })
    }

    /// [`DmsetupInvocation::map_ioctl_error`] for a device argument.
    ///
    /// # Errors
    /// As for [`DmsetupInvocation::map_ioctl_error`].
    pub fn map_error<T>(
        &self,
        ioctl: &str,
        selector: &DeviceSelector,
        result: Result<T, ControlClientError>,
    ) -> Result<T, DmsetupError> {
        self.map_ioctl_error(ioctl, &selector.in_errors(), result)
    }
}
