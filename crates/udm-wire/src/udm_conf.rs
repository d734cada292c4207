//! `udm.toml`: the options of a server and its devices.
//!
//! Contract: TOML with three tables. `[serve]` has the long options of `udm serve` as keys. This
//! module does not know the options, only that each has one value or several. `[devices.NAME]` has
//! the keys of [`DEVICE_KEYS`]. `[throttle-groups]` has limits that devices share, by the names of
//! their groups. Anything else is refused, with its position. Nothing is opened or
//! looked up. The text of a table is only parsed, so an invalid text is found before any action.
//!
//! Bounds: [`TEXT_MAX`] bytes; the TOML parser bounds the nesting.

use crate::throttle::{
    GROUP_NAME_MAX, ThrottleError, ThrottleLimits, is_throttle_group_name, parse_throttle_limits,
};
use crate::words::{WordSpan, draw_carets_under_span};
use crate::{table, uri};
use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue};

/// The longest file in bytes.
pub const TEXT_MAX: usize = 16 << 20;

/// The longest uuid in bytes (the kernel's `DM_UUID_LEN`, less its NUL).
const UUID_MAX: usize = 128;

/// The most names of clients of a device, and the longest one in bytes.
const ALLOWED_NAMES_MAX: usize = 1024;
const ALLOWED_NAME_MAX: usize = 512;

/// The longest description in bytes: what NBD can transmit.
const DESCRIPTION_MAX: usize = crate::nbd::STRING_MAX;

/// The keys of a device.
pub const DEVICE_KEYS: [&str; 9] = [
    "table",
    "table-file",
    "uuid",
    "readonly",
    "description",
    "allow",
    "throttle",
    "throttle-group",
    "hydrate-first",
];

/// A parsed file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UdmConf {
    /// `[serve]`, in the order of the file.
    pub serve: Vec<ServeSectionOption>,
    /// `[devices]`, in the order of the file.
    pub devices: Vec<DeviceConf>,
    /// `[throttle-groups]`, in the order of the file.
    pub throttle_groups: Vec<ThrottleGroupConf>,
}

/// Limits of requests and bytes per second that devices share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThrottleGroupConf {
    /// Name of the group.
    pub name: String,
    /// The limits.
    pub limits: ThrottleLimits,
    /// Position of the name in the file, in bytes.
    pub at: Range<usize>,
}

/// The limits of requests and bytes per second of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceThrottleConf {
    /// Its own.
    Limits(ThrottleLimits),
    /// Those of this group; with the position of the name in the file, in bytes.
    Group(String, Range<usize>),
}

/// A key of `[serve]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServeSectionOption {
    /// Name of the option.
    pub name: String,
    /// Value of the option.
    pub value: ServeOptionValue,
    /// Position of the name in the file, in bytes.
    pub at: Range<usize>,
    /// Position of the value in the file, in bytes.
    pub value_at: Range<usize>,
}

/// The value of an option.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServeOptionValue {
    /// A string, or a number as written.
    Text(String),
    /// True or false.
    Flag(bool),
    /// Several strings or numbers.
    List(Vec<String>),
}

/// A device of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceConf {
    /// Name of the device; valid as a device name.
    pub name: String,
    /// Table of the device.
    pub table: TableSource,
    /// Uuid of the device.
    pub uuid: Option<String>,
    /// True if clients must not write.
    pub read_only: bool,
    /// What NBD clients can show about it; empty for nothing.
    pub description: String,
    /// The clients that may use it: names in certificates, and users as `user:NAME`; `None` for
    /// all.
    pub allow: Option<Vec<String>>,
    /// Its limits of requests and bytes per second.
    pub throttle: Option<DeviceThrottleConf>,
    /// The file with the boot profile of its clone.
    pub hydrate_first: Option<PathBuf>,
    /// Position of the name in the file, in bytes.
    pub at: Range<usize>,
}

/// The source of a device's table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TableSource {
    /// In this file: a text that was parsed as a table, or the name of a device.
    Text(String),
    /// In another file.
    File(PathBuf),
}

/// An error of a file, and its position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UdmConfError {
    /// The reason, in one line.
    pub why: String,
    /// The bytes of the file to blame.
    pub at: Range<usize>,
}

impl fmt::Display for UdmConfError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.why)
    }
}

impl UdmConfError {
    /// An error at the bytes `at`. `why` may quote the file; control characters are escaped.
    pub fn new(why: impl AsRef<str>, at: Range<usize>) -> UdmConfError {
        let mut line = String::new();
        for c in why.as_ref().chars() {
            if c.is_control() { line.extend(c.escape_debug()) } else { line.push(c) }
        }
        UdmConfError { why: line, at }
    }

    /// Prints `FILE:LINE:COLUMN: reason`, then the line to blame in `text` with carets under it.
    #[must_use]
    pub fn with_source_line(&self, file: &str, text: &str) -> String {
        let start = char_boundary_before(text, self.at.start);
        let head = &text[..start];
        let from = head.rfind('\n').map_or(0, |i| i + 1);
        let line = text[from..].split('\n').next().unwrap_or_default();
        let line = line.strip_suffix('\r').unwrap_or(line);
        let (number, column) = (head.matches('\n').count() + 1, head[from..].chars().count() + 1);
        let end = char_boundary_before(text, self.at.end).clamp(start, from + line.len().max(start - from));
        let mark = draw_carets_under_span(line, WordSpan { start: start - from, end: end - from });
        format!("{file}:{number}:{column}: {}\n{mark}", self.why)
    }
}

/// The last character boundary in `text` at or before byte `at`.
fn char_boundary_before(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(0)
}

/// A key with its position.
type SpannedTomlKey<'i> = Spanned<Cow<'i, str>>;

/// The entries of a table in the order of the file.
fn sort_toml_entries_by_position<'t, 'i>(
    table: &'t DeTable<'i>,
) -> Vec<(&'t SpannedTomlKey<'i>, &'t Spanned<DeValue<'i>>)> {
    let mut all: Vec<_> = table.iter().collect();
    all.sort_by_key(|(key, _)| key.span().start);
    all
}

impl UdmConf {
    /// Parses a file.
    ///
    /// # Errors
    /// The first error of the file.
    pub fn parse(text: &str) -> Result<UdmConf, UdmConfError> {
        if text.len() > TEXT_MAX {
            return Err(UdmConfError::new(format!("longer than {TEXT_MAX} bytes"), 0..0));
        }
        let root = DeTable::parse(text)
            .map_err(|e| explain_toml_syntax_error(text, e.message(), e.span().unwrap_or(0..0)))?;
        let mut conf = UdmConf::default();
        for (key, value) in sort_toml_entries_by_position(root.get_ref()) {
            let name = key.get_ref().as_ref();
            let table = || {
                let table = value.get_ref().as_table();
                table.ok_or_else(|| {
                    UdmConfError::new(format!("{name}: expected a table: [{name}]"), key.span())
                })
            };
            match name {
                "serve" => conf.serve = parse_serve_section(table()?)?,
                "devices" => {
                    for (name, value) in sort_toml_entries_by_position(table()?) {
                        conf.devices.push(parse_device_section(text, name, value)?);
                    }
                }
                "throttle-groups" => {
                    for (name, value) in sort_toml_entries_by_position(table()?) {
                        conf.throttle_groups.push(parse_throttle_group(name, value)?);
                    }
                }
                other => {
                    return Err(UdmConfError::new(
                        format!("{other}: unknown: there are [serve], [devices.NAME] and [throttle-groups]"),
                        key.span(),
                    ));
                }
            }
        }
        Ok(conf)
    }
}

fn parse_serve_section(table: &DeTable<'_>) -> Result<Vec<ServeSectionOption>, UdmConfError> {
    let key = |(key, value): (&SpannedTomlKey<'_>, &Spanned<DeValue<'_>>)| {
        let name = key.get_ref();
        let refused = || {
            let what = "expected a string, a number, true, false, or a list of strings and numbers";
            UdmConfError::new(format!("serve: {name}: {what}"), value.span())
        };
        let said = match value.get_ref() {
            DeValue::Boolean(flag) => ServeOptionValue::Flag(*flag),
            DeValue::Array(list) => {
                ServeOptionValue::List(toml_scalars_to_strings(list).ok_or_else(refused)?)
            }
            one => ServeOptionValue::Text(toml_scalar_to_string(one).ok_or_else(refused)?),
        };
        Ok(ServeSectionOption { name: name.to_string(), value: said, at: key.span(), value_at: value.span() })
    };
    sort_toml_entries_by_position(table).into_iter().map(key).collect()
}

fn toml_scalars_to_strings(list: &DeArray<'_>) -> Option<Vec<String>> {
    list.iter().map(|value| toml_scalar_to_string(value.get_ref())).collect()
}

/// A string or a number, as written.
fn toml_scalar_to_string(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Integer(number) if number.radix() == 10 => Some(number.as_str().to_owned()),
        DeValue::Float(number) => Some(number.as_str().to_owned()),
        _ => None,
    }
}

/// The position in `file` of a table error, where `value` is the position of the table. If the file
/// contains the table unchanged, this is the word to blame; otherwise it is `value`.
fn locate_table_error(
    file: &str,
    value: Range<usize>,
    text: &str,
    error: &table::TableSyntaxError,
) -> Range<usize> {
    let line = text.split_inclusive('\n').take(error.number.saturating_sub(1)).map(str::len).sum::<usize>();
    match file.get(value.clone()).and_then(|written| written.find(text)) {
        Some(at) if error.number > 0 => {
            let from = value.start + at + line;
            from + error.span.start..from + error.span.end
        }
        _ => value,
    }
}

/// The error at `at` of a text that is not TOML. A common mistake is a value without quotes, which
/// the parser takes for a number; it gets its own message.
fn explain_toml_syntax_error(text: &str, why: &str, at: Range<usize>) -> UdmConfError {
    let word = text.get(at.clone()).unwrap_or_default().trim();
    let is_value = text.get(..at.start).is_some_and(|before| before.trim_end().ends_with('='));
    match is_value && word.starts_with(|c: char| c.is_alphabetic() || "/.@~".contains(c)) {
        true => UdmConfError::new(format!("text as a value stands in quotes: \"{word}\""), at),
        false => UdmConfError::new(why, at),
    }
}

fn parse_device_section(
    file: &str,
    key: &SpannedTomlKey<'_>,
    value: &Spanned<DeValue<'_>>,
) -> Result<DeviceConf, UdmConfError> {
    let name = key.get_ref().as_ref();
    let fault = |why: String, at| UdmConfError::new(format!("devices.{name}: {why}"), at);
    let is_name =
        matches!(uri::parse_device_uri(&format!("@{name}")), Ok(uri::DeviceUri::Mapped(is)) if is == name);
    if !is_name {
        let why =
            format!("not a name of a device: expected 1 to {} bytes without a slash", uri::MAPPED_NAME_MAX);
        return Err(fault(why, key.span()));
    }
    let Some(table) = value.get_ref().as_table() else {
        return Err(fault(format!("expected a table: [devices.{name}]"), key.span()));
    };
    let (mut found, mut uuid, mut read_only, mut allow, mut throttle) = (None, None, false, None, None);
    let (mut description, mut hydrate_first) = (String::new(), None);
    for (key, value) in sort_toml_entries_by_position(table) {
        let word = key.get_ref().as_ref();
        let text = || {
            let text = value.get_ref().as_str().filter(|text| !text.contains('\0'));
            text.ok_or_else(|| fault(format!("{word}: expected a string"), value.span()))
        };
        match word {
            "table" | "table-file" if found.is_some() => {
                return Err(fault("expected one of table and table-file".into(), key.span()));
            }
            "table" => {
                let text = text()?;
                // The name of a device has no spaces here.
                if table::is_table_not_device_name(text) || text.trim().contains(char::is_whitespace) {
                    let at = |e: &_| locate_table_error(file, value.span(), text, e);
                    table::parse_table(text).map_err(|e| fault(format!("table: {e}"), at(&e)))?;
                }
                found = Some(TableSource::Text(text.to_owned()));
            }
            "table-file" => match text()? {
                "" => return Err(fault("table-file: empty".into(), value.span())),
                file => found = Some(TableSource::File(file.into())),
            },
            "uuid" => {
                let word = text()?;
                if word.is_empty() || word.len() > UUID_MAX {
                    return Err(fault(format!("uuid: expected 1 to {UUID_MAX} bytes"), value.span()));
                }
                uuid = Some(word.to_owned());
            }
            "readonly" => {
                read_only = value
                    .get_ref()
                    .as_bool()
                    .ok_or_else(|| fault("readonly: expected true or false".into(), value.span()))?;
            }
            "description" => {
                let written = text()?;
                if written.len() > DESCRIPTION_MAX || written.contains(char::is_control) {
                    let why = format!("at most {DESCRIPTION_MAX} bytes without control characters");
                    return Err(fault(format!("description: expected {why}"), value.span()));
                }
                written.clone_into(&mut description);
            }
            "allow" => {
                let names = parse_allowed_names(value.get_ref());
                allow = Some(names.map_err(|why| fault(format!("allow: {why}"), value.span()))?);
            }
            "throttle" | "throttle-group" if throttle.is_some() => {
                return Err(fault("expected one of throttle and throttle-group".into(), key.span()));
            }
            "throttle" => {
                let limits = parse_throttle_limits(text()?);
                let limits = limits.map_err(|why| fault(format!("throttle: {why}"), value.span()))?;
                throttle = limits.map(DeviceThrottleConf::Limits);
            }
            "throttle-group" => {
                throttle = Some(DeviceThrottleConf::Group(text()?.to_owned(), value.span()));
            }
            "hydrate-first" => match text()? {
                "" => return Err(fault("hydrate-first: empty".into(), value.span())),
                file => hydrate_first = Some(file.into()),
            },
            other => {
                let why = format!("{other}: unknown: there are {}", DEVICE_KEYS.join(", "));
                return Err(fault(why, key.span()));
            }
        }
    }
    let table = found.ok_or_else(|| fault("table, or table-file, is missing".into(), key.span()))?;
    let (name, at) = (name.to_owned(), key.span());
    Ok(DeviceConf { name, table, uuid, read_only, description, allow, throttle, hydrate_first, at })
}

fn parse_throttle_group(
    key: &SpannedTomlKey<'_>,
    value: &Spanned<DeValue<'_>>,
) -> Result<ThrottleGroupConf, UdmConfError> {
    let name = key.get_ref().as_ref();
    let fault = |why: String, at| UdmConfError::new(format!("throttle-groups: {name}: {why}"), at);
    if !is_throttle_group_name(name) {
        let why = format!("expected 1 to {GROUP_NAME_MAX} bytes without control characters");
        return Err(fault(why, key.span()));
    }
    let text = value.get_ref().as_str();
    let text = text.ok_or_else(|| fault("expected a string, as \"iops=1000\"".into(), value.span()))?;
    let limits = text.parse().map_err(|why: ThrottleError| fault(why.to_string(), value.span()))?;
    Ok(ThrottleGroupConf { name: name.to_owned(), limits, at: key.span() })
}

/// Parses a list of names in certificates.
fn parse_allowed_names(value: &DeValue<'_>) -> Result<Vec<String>, String> {
    let names = value.as_array().ok_or("expected a list of names")?;
    let name = |name: &Spanned<DeValue<'_>>| name.get_ref().as_str().map(str::to_owned);
    let names: Option<Vec<String>> = names.iter().map(name).collect();
    let names = names.ok_or("expected a list of names")?;
    if names.is_empty() || names.len() > ALLOWED_NAMES_MAX {
        return Err(format!("expected 1 to {ALLOWED_NAMES_MAX} names"));
    }
    match names.iter().find(|name| name.is_empty() || name.len() > ALLOWED_NAME_MAX || name.contains('\0')) {
        Some(_) => Err(format!("a name has 1 to {ALLOWED_NAME_MAX} bytes and no NUL")),
        None => Ok(names),
    }
}

#[cfg(test)]
mod tests;
