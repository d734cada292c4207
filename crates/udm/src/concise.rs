//! dmsetup's concise form of devices: `NAME,UUID,MINOR,FLAGS,LINE,LINE...;NAME,...`. A backslash
//! escapes a separator.

use crate::requests::current_dir;
use udm_control::api::{self, verbs};
use udm_control::client::{ControlClient, ControlClientError};

/// A device in concise form.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ConciseDevice {
    /// The name.
    pub name: String,
    /// The uuid; empty if the device has none.
    pub uuid: String,
    /// The minor number, if given.
    pub minor: Option<u32>,
    /// The device is read-only.
    pub read_only: bool,
    /// The table, one target per line.
    pub table: String,
}

/// Splits `text` into devices and their fields; a character after a backslash does not separate.
fn split_concise_devices(text: &str) -> Vec<Vec<String>> {
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

/// Parses devices in concise form.
///
/// # Errors
/// dmsetup's error lines for the first invalid device; the devices before it are returned as well.
pub fn parse_concise_devices(text: &str) -> (Vec<ConciseDevice>, Option<String>) {
    let mut all = Vec::new();
    for fields in split_concise_devices(text) {
        match concise_device_from_fields(&fields) {
            Ok(device) => all.push(device),
            Err(why) => return (all, Some(why)),
        }
    }
    (all, None)
}

fn concise_device_from_fields(fields: &[String]) -> Result<ConciseDevice, String> {
    let [name, uuid, minor, flags, lines @ ..] = fields else {
        return Err(missing_concise_fields_error(fields));
    };
    if lines.is_empty() {
        return Err(missing_concise_fields_error(fields));
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

fn missing_concise_fields_error(fields: &[String]) -> String {
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

/// The error of creating a device in concise form.
pub struct ConciseCreateError {
    /// The step that failed, by the kernel's name: create, reload or resume.
    pub ioctl: &'static str,
    /// The number of the device, if it was created.
    pub number: Option<String>,
    /// The error of the request.
    pub error: ControlClientError,
}

/// Creates a device in the three steps of dmsetup: create, load, resume. If a step fails, the
/// device is removed. Relative paths in its table are relative to the current folder.
///
/// # Errors
/// The step that failed, and its error.
pub fn create_load_resume_device(
    client: &ControlClient,
    new: &ConciseDevice,
) -> Result<api::DeviceDescription, ConciseCreateError> {
    let uuid = Some(&new.uuid).filter(|uuid| !uuid.is_empty()).cloned();
    let body = api::CreateDeviceRequest {
        name: new.name.clone(),
        uuid,
        minor: new.minor,
        ..api::CreateDeviceRequest::default()
    };
    let created = client.call(verbs::CREATE_DEVICE, &body);
    let created = created.map_err(|error| ConciseCreateError { ioctl: "create", number: None, error })?;
    if new.table.trim().is_empty() {
        return Ok(created);
    }
    let refused = |ioctl, error| {
        // Errors of the removal are ignored: the caller reports the failed step.
        let _ = client.call(verbs::REMOVE_DEVICE.on(&created.name), &());
        ConciseCreateError { ioctl, number: Some(created.number.clone()), error }
    };
    let table = api::LoadTableRequest {
        table: new.table.clone(),
        folder: current_dir(),
        read_only: Some(new.read_only),
    };
    client.call(verbs::LOAD_TABLE.on(&created.name), &table).map_err(|error| refused("reload", error))?;
    let resumed = client.call(verbs::RESUME_DEVICE.on(&created.name), &api::ResumeDeviceRequest::default());
    resumed.map_err(|error| refused("resume", error))?;
    Ok(created)
}

fn escape_concise_field(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if matches!(c, ',' | ';' | '\\') {
            out.push('\\');
        }
        out.push(c);
    }
    out
}

/// Formats a device and its live table in concise form.
pub fn format_concise_device(device: &api::DeviceDescription, lines: &[api::TableOrStatusLine]) -> String {
    let (name, uuid) = (
        escape_concise_field(&device.name),
        escape_concise_field(device.uuid.as_deref().unwrap_or_default()),
    );
    let minor = device.number.split_once(':').map_or("", |(_, minor)| minor);
    let flags = if device.read_only { "ro" } else { "rw" };
    let mut out = format!("{name},{uuid},{minor},{flags}");
    for line in lines {
        let (start, length) = (line.start_bytes / 512, line.length_bytes / 512);
        out += &format!(",{start} {length} {} {}", line.target, escape_concise_field(&line.params));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        let device = api::DeviceDescription {
            name: "a,b\\".into(),
            uuid: Some("U;1".into()),
            number: "254:7".into(),
            read_only: true,
            ..api::DeviceDescription::default()
        };
        let line = |start_bytes, params: &str| api::TableOrStatusLine {
            start_bytes,
            length_bytes: 512,
            target: "linear".into(),
            params: params.into(),
        };
        let text = format_concise_device(&device, &[line(0, "253:0 0"), line(512, "x\\,y 0")]);
        assert_eq!(text, "a\\,b\\\\,U\\;1,7,ro,0 1 linear 253:0 0,1 1 linear x\\\\\\,y 0");
        let (read, wrong) = parse_concise_devices(&format!("{text}; second,,,,0 8 error\n"));
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
        assert_eq!(parse_concise_devices(""), (vec![], None));
    }

    #[test]
    fn what_is_wrong() {
        let (before, why) = parse_concise_devices("a,,,,0 8 error;b");
        assert_eq!(before.len(), 1);
        assert!(why.is_some_and(|why| why.contains("Parsed 1 fields: name: b uuid: (null)")));
        assert!(parse_concise_devices("a,,x,,0 8 error").1.is_some());
        assert!(parse_concise_devices("a,,,wo,0 8 error").1.is_some());
    }
}
