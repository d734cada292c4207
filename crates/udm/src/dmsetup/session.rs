//! What all of dmsetup's commands share: the devices that are meant, the server, and the words for
//! what it refuses.

use super::options::{CommandLine, Name};
use crate::log;
use crate::verbs::all_devices;
use udm_control::api::{self, verbs};
use udm_control::client::{ClientError, ControlClient};
use udm_core::errno::ENXIO;

/// Where device nodes are, as scripts name them.
pub const NODES: &str = "/dev/mapper/";

/// Why a command came to nothing. `dmsetup` prints the text and a last line.
#[derive(Debug, PartialEq, Eq)]
pub enum CommandError {
    /// `Command command_failed.`
    Failed(String),
    /// `Couldn't process command line.`
    Line(String),
    /// How commands are used.
    Usage(String),
    /// No last line.
    Silent(String),
}

impl CommandError {
    /// With lines in front.
    pub fn behind(self, lines: &str) -> CommandError {
        match self {
            CommandError::Failed(text) => CommandError::Failed(format!("{lines}\n{text}")),
            other => other,
        }
    }
}

pub type CommandResult = Result<(), CommandError>;

/// A failure with `text`.
pub fn command_failed<T>(text: impl Into<String>) -> Result<T, CommandError> {
    Err(CommandError::Failed(text.into()))
}

/// A device, as the command line says which.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceSelector {
    /// By its name.
    Name(String),
    /// By its uuid.
    Uuid(String),
    /// By its number.
    Number(String),
}

impl DeviceSelector {
    /// What a word of the command line names: a name, or a path to its node.
    ///
    /// # Errors
    /// For a path to anything else.
    fn named(word: &str) -> Result<DeviceSelector, CommandError> {
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

    fn means(&self, device: &api::Device) -> bool {
        match self {
            DeviceSelector::Name(name) => device.name == *name,
            DeviceSelector::Uuid(uuid) => device.uuid.as_ref() == Some(uuid),
            DeviceSelector::Number(number) => device.number == *number,
        }
    }

    /// As errors name it.
    pub fn in_errors(&self) -> String {
        match self {
            DeviceSelector::Name(name) => format!("{name} "),
            DeviceSelector::Uuid(uuid) => format!(" {uuid}"),
            DeviceSelector::Number(number) => format!(" ({number})"),
        }
    }
}

/// dmsetup's line for what a kernel refused: `ioctl` on `device` ended with `errno`.
pub fn ioctl_failed(ioctl: &str, device: &str, errno: u32) -> String {
    let errno = i32::try_from(errno).unwrap_or(i32::MAX);
    let why = crate::strip_os_error(&std::io::Error::from_raw_os_error(errno).to_string());
    format!("device-mapper: {ioctl} ioctl on {device} failed: {why}")
}

/// A command line and the server that it is for.
pub struct NegotiatedSession {
    pub line: CommandLine,
    pub client: ControlClient,
    /// Standard output.
    pub out: String,
}

impl NegotiatedSession {
    pub fn has(&self, name: Name) -> bool {
        self.line.has(name)
    }

    pub fn value(&self, name: Name) -> Option<&str> {
        self.line.value(name)
    }

    /// Prints to standard error at once.
    pub fn warn(text: &str) {
        log::say(format!("{text}\n"));
    }

    /// The device that `-u` or `-j` and `-m` say.
    ///
    /// # Errors
    /// When one of two numbers is missing.
    pub fn selected(&self) -> Result<Option<DeviceSelector>, CommandError> {
        match (self.value(Name::Uuid), self.value(Name::Major), self.value(Name::Minor)) {
            (Some(uuid), ..) => Ok(Some(DeviceSelector::Uuid(uuid.to_owned()))),
            (None, None, None) => Ok(None),
            (None, Some(major), Some(minor)) => Ok(Some(DeviceSelector::Number(format!("{major}:{minor}")))),
            _ => Err(CommandError::Line("Please specify both major number and minor number.".into())),
        }
    }

    /// The one device that a command is for, and its other words.
    ///
    /// # Errors
    /// `missing`, where there is none.
    pub fn one<'a>(
        &self,
        words: &'a [String],
        missing: &str,
    ) -> Result<(DeviceSelector, &'a [String]), CommandError> {
        match (self.selected()?, words) {
            (Some(which), words) => Ok((which, words)),
            (None, [name, rest @ ..]) => Ok((DeviceSelector::named(name)?, rest)),
            (None, []) => command_failed(missing),
        }
    }

    /// Does `verb` to each device that is named, until one fails.
    ///
    /// # Errors
    /// When none is named; `verb`'s.
    pub fn each(
        &mut self,
        words: &[String],
        mut verb: impl FnMut(&mut NegotiatedSession, &DeviceSelector) -> CommandResult,
    ) -> CommandResult {
        if let Some(which) = self.selected()? {
            return verb(self, &which);
        }
        if words.is_empty() {
            return command_failed("No device specified.");
        }
        words.iter().try_for_each(|word| {
            let which = DeviceSelector::named(word)?;
            verb(self, &which)
        })
    }

    /// Does `verb` to each device that is named, or to all; whether its name stands before what is
    /// printed of it.
    ///
    /// # Errors
    /// The server's, and `verb`'s.
    pub fn each_or_all(
        &mut self,
        words: &[String],
        mut verb: impl FnMut(&mut NegotiatedSession, &DeviceSelector, bool) -> CommandResult,
    ) -> CommandResult {
        if !words.is_empty() || self.selected()?.is_some() {
            let several = words.len() > 1;
            return self.each(words, |face, which| verb(face, which, several));
        }
        let all = self.all()?;
        if all.is_empty() {
            self.out += "No devices found\n";
        }
        all.into_iter().try_for_each(|device| verb(self, &DeviceSelector::Name(device.name), true))
    }

    /// All devices, by name, as the kernel lists them.
    ///
    /// # Errors
    /// When the server does not answer.
    pub fn all(&self) -> Result<Vec<api::Device>, CommandError> {
        let mut all = all_devices(&self.client).map_err(|e| CommandError::Failed(e.to_string()))?;
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    /// The device, where it is there.
    ///
    /// # Errors
    /// When the server does not answer.
    pub fn look(&self, which: &DeviceSelector) -> Result<Option<api::Device>, CommandError> {
        match self.client.call(verbs::GET_DEVICE.on(which.word()), &()) {
            Ok(device) => Ok(Some(device).filter(|device| which.means(device))),
            Err(ClientError::Refused(_)) => Ok(None),
            Err(error) => command_failed(error.to_string()),
        }
    }

    /// The device, for a request that the kernel calls `ioctl`.
    ///
    /// # Errors
    /// When there is none.
    pub fn find(&self, which: &DeviceSelector, ioctl: &str) -> Result<api::Device, CommandError> {
        let missing = || CommandError::Failed(ioctl_failed(ioctl, &which.in_errors(), ENXIO.unsigned_abs()));
        self.look(which)?.ok_or_else(missing)
    }

    /// The device, as commands want it that look first.
    ///
    /// # Errors
    /// When there is none.
    pub fn find_or_fail(&self, which: &DeviceSelector) -> Result<api::Device, CommandError> {
        self.look(which)?.ok_or_else(|| CommandError::Failed("Device does not exist.".into()))
    }

    /// What the server said to a request about `device` that the kernel calls `ioctl`.
    ///
    /// # Errors
    /// What it refused, in dmsetup's words; with `--verbose` its own reason behind that.
    pub fn said<T>(
        &self,
        ioctl: &str,
        device: &str,
        said: Result<T, ClientError>,
    ) -> Result<T, CommandError> {
        said.map_err(|error| match error {
            ClientError::Refused(why) if self.has(Name::Verbose) => {
                CommandError::Failed(format!("{}\n{}", ioctl_failed(ioctl, device, why.errno), why.error))
            }
            ClientError::Refused(why) => CommandError::Failed(ioctl_failed(ioctl, device, why.errno)),
            error => CommandError::Failed(error.to_string()),
        })
    }

    /// [`NegotiatedSession::said`] about `which`.
    ///
    /// # Errors
    /// As it.
    pub fn map_error_of<T>(
        &self,
        ioctl: &str,
        which: &DeviceSelector,
        said: Result<T, ClientError>,
    ) -> Result<T, CommandError> {
        self.said(ioctl, &which.in_errors(), said)
    }
}
