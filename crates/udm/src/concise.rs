//! Devices in dmsetup's concise form: `NAME,UUID,MINOR,FLAGS,LINE,LINE...;NAME,...`, with a
//! backslash before what would separate.

use crate::verbs::folder;
use udm_control::api::{self, verbs};
use udm_control::client::{ClientError, ControlClient};

/// A device in concise form.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ConciseDevice {
    /// Its name.
    pub name: String,
    /// Its uuid; empty where it has none.
    pub uuid: String,
    /// Its minor number, where it says one.
    pub minor: Option<u32>,
    /// It can't be written to.
    pub read_only: bool,
    /// Its table, a target a line.
    pub table: String,
}

/// Splits `text` into fields and devices; what stands behind a backslash separates nothing.
fn devices(text: &str) -> Vec<Vec<String>> {
    let mut all = vec![vec![String::new()]];
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            ';' => all.push(vec![String::new()]),
            ',' => all.last_mut().expect("there is always one").push(String::new()),
            _ => {
                let c = if c == '\\' { chars.next().unwrap_or(c) } else { c };
                all.last_mut().and_then(|fields| fields.last_mut()).expect("there is always one").push(c);
            }
        }
    }
    all.retain(|fields| fields.iter().any(|field| !field.trim().is_empty()));
    all
}

/// Reads devices.
///
/// # Errors
/// dmsetup's lines about the first that is none; what comes before it is given back all the same.
pub fn parse(text: &str) -> (Vec<ConciseDevice>, Option<String>) {
    let mut all = Vec::new();
    for fields in devices(text) {
        match read(&fields) {
            Ok(device) => all.push(device),
            Err(why) => return (all, Some(why)),
        }
    }
    (all, None)
}

fn read(fields: &[String]) -> Result<ConciseDevice, String> {
    let [name, uuid, minor, flags, lines @ ..] = fields else { return Err(too_few(fields)) };
    if lines.is_empty() {
        return Err(too_few(fields));
    }
    let minor = match minor.trim() {
        "" => None,
        number => Some(number.parse().map_err(|_| format!("Invalid minor number '{number}'."))?),
    };
    let read_only = match flags.as_str() {
        "ro" => true,
        "rw" | "" => false,
        other => {
            return Err(format!("Invalid flags parameter '{other}' must be 'ro' or 'rw' or empty."));
        }
    };
    let name = name.trim_start().to_owned();
    Ok(ConciseDevice { name, uuid: uuid.clone(), minor, read_only, table: lines.join("\n") })
}

fn too_few(fields: &[String]) -> String {
    let named = ["name", "uuid", "minor", "flags", "table"];
    let shown = named
        .iter()
        .enumerate()
        .map(|(place, name)| format!(" {name}: {}", fields.get(place).map_or("(null)", String::as_str)));
    format!(
        "Five comma-separated fields are required for each device\nParsed {} fields:{}",
        fields.len(),
        shown.collect::<String>()
    )
}

/// Why a device in concise form was not made.
pub struct CreateError {
    /// The step, as a kernel calls it: create, reload, resume.
    pub ioctl: &'static str,
    /// The number that the device had, if it came so far.
    pub number: Option<String>,
    /// Why.
    pub error: ClientError,
}

/// Makes a device as dmsetup does, in three steps: it is there, has a table, is resumed. Where one
/// is refused it is gone again. Relative paths in its table count from our folder.
///
/// # Errors
/// The step that was refused.
pub fn make(client: &ControlClient, new: &ConciseDevice) -> Result<api::Device, CreateError> {
    let uuid = Some(&new.uuid).filter(|uuid| !uuid.is_empty()).cloned();
    let body = api::Create { name: new.name.clone(), uuid, minor: new.minor, ..api::Create::default() };
    let made = client.call(verbs::CREATE_DEVICE, &body);
    let made = made.map_err(|error| CreateError { ioctl: "create", number: None, error })?;
    if new.table.trim().is_empty() {
        return Ok(made);
    }
    let refused = |ioctl, error| {
        // It is nobody's yet; why it came to nothing is what the caller wants to know.
        let _ = client.call(verbs::REMOVE_DEVICE.on(&made.name), &());
        CreateError { ioctl, number: Some(made.number.clone()), error }
    };
    let table = api::Load { table: new.table.clone(), folder: folder(), read_only: Some(new.read_only) };
    client.call(verbs::LOAD_TABLE.on(&made.name), &table).map_err(|error| refused("reload", error))?;
    let resumed = client.call(verbs::RESUME_DEVICE.on(&made.name), &api::Resume::default());
    resumed.map_err(|error| refused("resume", error))?;
    Ok(made)
}

fn escape_field(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if matches!(c, ',' | ';' | '\\') {
            out.push('\\');
        }
        out.push(c);
    }
    out
}

/// A device and the lines of its live table, in concise form.
pub fn print(device: &api::Device, lines: &[api::Line]) -> String {
    let (name, uuid) = (escape_field(&device.name), escape_field(device.uuid.as_deref().unwrap_or_default()));
    let minor = device.number.split_once(':').map_or("", |(_, minor)| minor);
    let flags = if device.read_only { "ro" } else { "rw" };
    let mut out = format!("{name},{uuid},{minor},{flags}");
    for line in lines {
        let (start, length) = (line.start_bytes / 512, line.length_bytes / 512);
        out += &format!(",{start} {length} {} {}", line.target, escape_field(&line.params));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        let device = api::Device {
            name: "a,b\\".into(),
            uuid: Some("U;1".into()),
            number: "254:7".into(),
            read_only: true,
            ..api::Device::default()
        };
        let line = |start_bytes, params: &str| api::Line {
            start_bytes,
            length_bytes: 512,
            target: "linear".into(),
            params: params.into(),
        };
        let text = print(&device, &[line(0, "253:0 0"), line(512, "x\\,y 0")]);
        assert_eq!(text, "a\\,b\\\\,U\\;1,7,ro,0 1 linear 253:0 0,1 1 linear x\\\\\\,y 0");
        let (read, wrong) = parse(&format!("{text}; second,,,,0 8 error\n"));
        assert_eq!(wrong, None);
        let first = ConciseDevice {
            name: "a,b\\".into(),
            uuid: "U;1".into(),
            minor: Some(7),
            read_only: true,
            table: "0 1 linear 253:0 0\n1 1 linear x\\,y 0".into(),
        };
        assert_eq!(read[0], first);
        assert_eq!((read[1].name.as_str(), read[1].table.as_str()), ("second", "0 8 error\n"));
        assert_eq!(parse(""), (vec![], None));
    }

    #[test]
    fn what_is_wrong() {
        let (before, why) = parse("a,,,,0 8 error;b");
        assert_eq!(before.len(), 1);
        assert!(why.is_some_and(|why| why.contains("Parsed 1 fields: name: b uuid: (null)")));
        assert!(parse("a,,x,,0 8 error").1.is_some());
        assert!(parse("a,,,wo,0 8 error").1.is_some());
    }
}
