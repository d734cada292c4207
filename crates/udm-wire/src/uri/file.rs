//! `file:PATH?NAME=VALUE&...`, or a path alone: a file or block device.

use super::{DeviceUriError, PATH_MAX, QueueParams, parse_switch, percent};
use crate::size::{self, SizeWithUnit};
use crate::words::quote_for_error_line;
use std::fmt;
use std::path::PathBuf;

/// The names of the options.
const OPTIONS: [&str; 7] = ["direct", "readonly", "exclusive", "grow", "grow_max", "format", "backing"];

/// Format of the disk in a file. It is named, never probed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ImageFormat {
    /// The bytes of the file are the disk.
    #[default]
    Raw,
    /// A qcow2 image, read-only.
    Qcow2 {
        /// Other files that the image names may be used: backing files, a file with its data.
        allow_backing: bool,
    },
}

/// A file or block device, and how it is opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileUri {
    /// Path: not empty, at most [`PATH_MAX`] bytes, UTF-8, no NUL. A relative path starts at the
    /// working directory of the program.
    pub path: PathBuf,
    /// Bypass the page cache (`O_DIRECT`). `None` is the default: on for a block device, off for a
    /// regular file. For an open file, `None` accepts either mode.
    pub direct: Option<bool>,
    /// Open for reading only; default off.
    pub readonly: bool,
    /// No other program may write the disk; default on. A block device that is opened for writing
    /// is opened with `O_EXCL`. A regular file is locked as QEMU locks it. No effect on a read-only
    /// disk.
    pub exclusive: bool,
    /// Bytes, above 0, by which a regular file grows when its user is about to need more space,
    /// such as a snapshot store. `None`: the file does not grow.
    pub grow: Option<u64>,
    /// Maximum size in bytes of a file that grows; `None`: no limit but the file system's.
    pub grow_max: Option<u64>,
    /// The format of the disk in the file. A qcow2 image is always read-only.
    pub format: ImageFormat,
    /// The queue in front of the file; `None` for none.
    pub queue: Option<QueueParams>,
}

impl FileUri {
    /// A path without options.
    #[must_use]
    pub fn new(path: PathBuf) -> FileUri {
        FileUri {
            path,
            direct: None,
            readonly: false,
            exclusive: true,
            grow: None,
            grow_max: None,
            format: ImageFormat::Raw,
            queue: None,
        }
    }

    /// A path without options.
    ///
    /// # Errors
    /// An invalid path.
    pub(super) fn literal(path: &str) -> Result<FileUri, DeviceUriError> {
        Ok(FileUri::new(check_file_uri_path(path)?))
    }

    /// Parses the text after `file:`.
    ///
    /// # Errors
    /// One line with the reason, and the accepted values.
    pub(super) fn parse(rest: &str) -> Result<FileUri, DeviceUriError> {
        let (path, query) = rest.split_once('?').map_or((rest, None), |(path, query)| (path, Some(query)));
        let option = OPTIONS.iter().filter_map(|name| path.find(&format!(",{name}="))).min();
        if let (None, Some(at)) = (query, option) {
            let right =
                quote_for_error_line(&format!("file:{}?{}", &path[..at], path[at + 1..].replace(',', "&")));
            let why = format!("options follow a ?: {right} (%2C is a comma in the path)");
            return Err(DeviceUriError::new(format!("file: {why}")));
        }
        let path =
            percent::percent_decode_uri(path).map_err(|why| DeviceUriError::new(format!("file: {why}")))?;
        let path = check_file_uri_path(&path)?;
        let (mut direct, mut readonly, mut exclusive) = (None, None, None);
        let (mut grow, mut grow_max) = (None, None);
        let (mut format, mut backing) = (None, None);
        let (mut queue, mut queued) = (None, Vec::new());
        for pair in query.into_iter().flat_map(|query| query.split('&')) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let option = match name {
                "direct" => &mut direct,
                "readonly" => &mut readonly,
                "exclusive" => &mut exclusive,
                "grow" | "grow_max" => {
                    let bytes = size::parse_size_with_unit(value)
                        .map_err(|e| DeviceUriError::new(format!("file: {name}: {e}")))?;
                    if bytes == 0 {
                        return Err(DeviceUriError::new(format!("file: {name} is above 0")));
                    }
                    let option = if name == "grow" { &mut grow } else { &mut grow_max };
                    if option.replace(bytes).is_some() {
                        return Err(DeviceUriError::new(format!("file: {name} is given twice")));
                    }
                    continue;
                }
                "format" | "backing" => {
                    let option = if name == "format" { &mut format } else { &mut backing };
                    if option.replace(value).is_some() {
                        return Err(DeviceUriError::new(format!("file: {name} is given twice")));
                    }
                    continue;
                }
                _ if QueueParams::word(&mut queue, name, value)
                    .map_err(|why| DeviceUriError::new(format!("file: {why}")))? =>
                {
                    if queued.contains(&name) {
                        return Err(DeviceUriError::new(format!("file: {name} is given twice")));
                    }
                    queued.push(name);
                    continue;
                }
                _ => {
                    let name = quote_for_error_line(name);
                    let known = [&OPTIONS, QueueParams::NAMES].concat().join(", ");
                    return Err(DeviceUriError::new(format!(
                        "file: unknown option {name}; expected one of {known}"
                    )));
                }
            };
            let value = parse_switch("file", name, value)?;
            if option.replace(value).is_some() {
                return Err(DeviceUriError::new(format!("file: {name} is given twice")));
            }
        }
        let format =
            ImageFormat::parse(format, backing).map_err(|why| DeviceUriError::new(format!("file: {why}")))?;
        let is_image = format != ImageFormat::Raw;
        if is_image && (readonly == Some(false) || grow.is_some()) {
            return Err(DeviceUriError::new(
                "file: an image in qcow2 is read-only; a snapshot over it takes writes",
            ));
        }
        let (readonly, exclusive) = (readonly.unwrap_or(is_image), exclusive.unwrap_or(true));
        if grow.is_none() && grow_max.is_some() {
            return Err(DeviceUriError::new("file: grow_max (the maximum size) needs grow (the step)"));
        }
        Ok(FileUri { path, direct, readonly, exclusive, grow, grow_max, format, queue })
    }

    /// The options that differ from the defaults.
    fn options(&self) -> impl Iterator<Item = String> {
        let direct = self.direct.map(|on| if on { "direct=on" } else { "direct=off" });
        let is_raw = self.format == ImageFormat::Raw;
        let readonly = (self.readonly && is_raw).then_some("readonly=on");
        let exclusive = (!self.exclusive).then_some("exclusive=off");
        let switches = [direct, readonly, exclusive].into_iter().flatten().map(String::from);
        let grow = self.grow.map(|bytes| format!("grow={}", SizeWithUnit(bytes)));
        let grow_max = self.grow_max.map(|bytes| format!("grow_max={}", SizeWithUnit(bytes)));
        let format = self.format.words().iter().copied().map(String::from);
        switches.chain(grow).chain(grow_max).chain(format).chain(QueueParams::words(self.queue.as_ref()))
    }
}

impl ImageFormat {
    /// Parses the values of `format` and `backing`.
    fn parse(format: Option<&str>, backing: Option<&str>) -> Result<ImageFormat, String> {
        match (format, backing) {
            (Some("qcow2"), None | Some("deny")) => Ok(ImageFormat::Qcow2 { allow_backing: false }),
            (Some("qcow2"), Some("allow")) => Ok(ImageFormat::Qcow2 { allow_backing: true }),
            (Some("qcow2"), Some(other)) => {
                Err(format!("backing={} is neither allow nor deny", quote_for_error_line(other)))
            }
            (None | Some("raw"), None) => Ok(ImageFormat::Raw),
            (None | Some("raw"), Some(_)) => Err("backing needs format=qcow2".into()),
            (Some(other), _) => Err(format!(
                "format={} is neither raw nor qcow2 (nbd: serves others, by qemu-nbd)",
                quote_for_error_line(other)
            )),
        }
    }

    /// The options of a format that is not the default.
    fn words(self) -> &'static [&'static str] {
        match self {
            ImageFormat::Raw => &[],
            ImageFormat::Qcow2 { allow_backing: false } => &["format=qcow2"],
            ImageFormat::Qcow2 { allow_backing: true } => &["format=qcow2", "backing=allow"],
        }
    }
}

impl fmt::Display for FileUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.to_string_lossy();
        let literal = (path.starts_with('/') || path.starts_with('.')) && !path.contains(char::is_control);
        if literal && self.options().next().is_none() {
            return f.write_str(&path);
        }
        write!(f, "file:{}", percent::percent_encode_word(&path))?;
        for (i, option) in self.options().enumerate() {
            write!(f, "{}{option}", if i == 0 { '?' } else { '&' })?;
        }
        Ok(())
    }
}

fn check_file_uri_path(path: &str) -> Result<PathBuf, DeviceUriError> {
    match path {
        "" => Err(DeviceUriError::new("no path of a device")),
        _ if path.len() > PATH_MAX => Err(DeviceUriError::new(format!(
            "{}: a path has at most {PATH_MAX} bytes",
            quote_for_error_line(path)
        ))),
        _ if path.contains('\0') => {
            Err(DeviceUriError::new(format!("{}: a NUL character", quote_for_error_line(path))))
        }
        _ => Ok(PathBuf::from(path)),
    }
}
