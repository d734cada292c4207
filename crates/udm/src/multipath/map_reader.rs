//! A multipath device, composed from its table and its status.

use crate::requests::explain_client_error;
use anyhow::{Result, bail};
use serde::Serialize;
use std::str::SplitWhitespace;
use udm_control::api::{self, verbs};
use udm_control::client::{ControlClient, ControlClientError};

/// A multipath device, with the field names of multipath-tools.
#[derive(Debug, Default, Serialize)]
pub struct MultipathMap {
    pub name: String,
    /// The uuid, or the name if there is none.
    pub uuid: String,
    pub sysfs: String,
    /// The failback rule, and the time left until a planned failback.
    pub failback: String,
    /// Whether requests without a path are queued, and for how much longer.
    pub queueing: String,
    pub size_bytes: u64,
    pub write_prot: &'static str,
    /// "active" or "suspend".
    pub dm_st: &'static str,
    pub features: String,
    pub hwhandler: String,
    /// Number of paths in use.
    pub paths: usize,
    /// Sum of the path failures.
    pub path_faults: u64,
    pub path_groups: Vec<PathGroup>,
}

/// A path group.
#[derive(Debug, Default, Serialize)]
pub struct PathGroup {
    pub group: usize,
    pub selector: String,
    /// Mean priority of the paths in use.
    pub pri: i64,
    pub dm_st: &'static str,
    pub paths: Vec<MultipathPath>,
}

/// A path.
#[derive(Debug, Default, Serialize)]
pub struct MultipathPath {
    pub dev: String,
    pub dev_t: String,
    /// "active" or "failed".
    pub dm_st: String,
    /// Result of the last check.
    pub chk_st: String,
    /// Reason why no check reinstates the path.
    pub held: Option<String>,
    /// Always "running": udm has no state of the system's device.
    pub dev_st: &'static str,
    /// Priority; -1 if it is not known.
    pub pri: i64,
    pub failures: u64,
    pub multipath: String,
    /// True if the path is in use.
    #[serde(skip)]
    pub is_up: bool,
}

/// The words of a table or a status line; its methods return `None` if words are missing.
struct StatusWordReader<'a>(SplitWhitespace<'a>);

impl<'a> StatusWordReader<'a> {
    fn word(&mut self) -> Option<&'a str> {
        self.0.next()
    }

    fn number(&mut self) -> Option<usize> {
        self.word()?.parse().ok()
    }

    /// Reads a count and as many words; returns them as one text.
    fn counted(&mut self) -> Option<String> {
        let count = self.word()?;
        let mut text = count.to_owned();
        for _ in 0..count.parse::<usize>().ok()? {
            text.extend([" ", self.word()?]);
        }
        Some(text)
    }

    /// Skips `rows` times `words` words.
    fn rows(&mut self, rows: usize, words: usize) -> Option<()> {
        (0..rows.checked_mul(words)?).try_for_each(|_| self.word().map(drop))
    }
}

/// Maximum attempts to read a device whose table changes meanwhile.
const TRIES: usize = 10;

/// Reads all multipath devices, or only the one with the name `name`.
///
/// # Errors
/// The server refused a request, or `name` is not a multipath device.
pub fn read_multipath_maps(client: &ControlClient, name: Option<&str>) -> Result<Vec<MultipathMap>> {
    if let Some(name) = name {
        let device =
            client.call(verbs::GET_DEVICE.on(name), &()).map_err(|e| explain_client_error(e, None))?;
        return match read_multipath_map(client, &device).map_err(|e| explain_client_error(e, None))? {
            Some(map) => Ok(vec![map]),
            None => bail!("{name}: it is not a multipath device"),
        };
    }
    let devices = client.call(verbs::LIST_DEVICES, &()).map_err(|e| explain_client_error(e, None))?.devices;
    let mut maps = Vec::new();
    for device in &devices {
        match read_multipath_map(client, device) {
            Ok(map) => maps.extend(map),
            // The device was removed meanwhile.
            Err(ControlClientError::Refused(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(maps)
}

/// Reads a device; returns `None` if its live table is not multipath.
fn read_multipath_map(
    client: &ControlClient,
    device: &api::DeviceDescription,
) -> Result<Option<MultipathMap>, ControlClientError> {
    let table = || client.call(verbs::GET_TABLE.on(&device.name), &());
    let mut before = table()?;
    if multipath_line_params(&before.lines).is_none() {
        return Ok(None);
    }
    let mut tries = TRIES;
    loop {
        let status = client.call(verbs::GET_STATUS.on(&device.name), &())?;
        let after = table()?;
        tries -= 1;
        // If the table changed, the status may belong to the other table.
        if before == after || tries == 0 {
            return Ok(parse_multipath_map(device, &before, &status));
        }
        before = after;
    }
}

/// The parameters of a table or status with a single multipath line.
fn multipath_line_params(lines: &[api::TableOrStatusLine]) -> Option<&str> {
    match lines {
        [line] if line.target == "multipath" => Some(&line.params),
        _ => None,
    }
}

/// Composes the device; returns `None` if the table is not multipath, or the status belongs to
/// another table.
fn parse_multipath_map(
    device: &api::DeviceDescription,
    table: &api::TableDescription,
    status: &api::TableStatus,
) -> Option<MultipathMap> {
    let (table, status_words) = (multipath_line_params(&table.lines)?, multipath_line_params(&status.lines)?);
    let (mut table, mut status_words) =
        (StatusWordReader(table.split_whitespace()), StatusWordReader(status_words.split_whitespace()));
    let (features, hwhandler) = (table.counted()?, table.counted()?);
    let groups = table.number()?;
    // The number of the next group.
    table.word()?;
    // The number of queued requests, the handler's status, and the two numbers of groups.
    status_words.counted()?;
    status_words.counted()?;
    status_words.rows(2, 1)?;
    let (mut path_groups, usable) = (Vec::new(), api::usable_path_flags(&status.paths));
    for group in 1..=groups {
        let selector = format!("{} {}", table.word()?, table.counted()?);
        let (count, arguments) = (table.number()?, table.number()?);
        table.rows(count, arguments.checked_add(1)?)?;
        let dm_st = match status_words.word()? {
            "A" => "active",
            "E" => "enabled",
            "D" => "disabled",
            _ => "undef",
        };
        status_words.counted()?;
        let (count, values) = (status_words.number()?, status_words.number()?);
        status_words.rows(count, values.checked_add(3)?)?;
        let paths = status.paths.iter().zip(&usable).filter(|(path, _)| path.group == group as u64);
        let paths: Vec<MultipathPath> =
            paths.map(|(path, up)| multipath_path_from_api(path, *up, &device.name)).collect();
        path_groups.push(PathGroup { group, selector, pri: mean_path_priority(&paths), dm_st, paths });
    }
    let paths = || path_groups.iter().flat_map(|group| &group.paths);
    let up = paths().filter(|path| path.is_up).count();
    Some(MultipathMap {
        failback: format_failback_status(status.path_maintenance.as_ref()),
        queueing: format_no_path_retry(status.path_maintenance.as_ref(), up),
        name: device.name.clone(),
        uuid: device.uuid.clone().unwrap_or_else(|| device.name.clone()),
        sysfs: format!("dm-{}", device.number.rsplit(':').next().unwrap_or_default()),
        size_bytes: device.size_bytes,
        write_prot: if device.read_only { "ro" } else { "rw" },
        dm_st: if device.state == "suspended" { "suspend" } else { "active" },
        features,
        hwhandler,
        paths: up,
        path_faults: paths().map(|path| path.failures).sum(),
        path_groups,
    })
}

/// Whole seconds, rounded up.
fn ceil_ns_to_seconds(ns: u64) -> u64 {
    ns.div_ceil(1_000_000_000)
}

/// `failback` as multipathd prints it: the time left as a bar of at most ten marks, which becomes
/// shorter. If a person has switched to another group than the best, the text says so.
fn format_failback_status(maintenance: Option<&api::PathMaintenanceStatus>) -> String {
    let Some(api::PathMaintenanceStatus { failback, failback_left_ns, group_by_hand, .. }) = maintenance
    else {
        return "-".into();
    };
    if group_by_hand.is_some() {
        return "by hand".into();
    }
    match (failback.parse::<u64>(), failback_left_ns) {
        (Ok(all), Some(left)) => {
            let left = ceil_ns_to_seconds(*left).min(all);
            let part = (left * 10).checked_div(all).unwrap_or(0) as usize;
            format!("{}{} {left}/{all}", "X".repeat(part), ".".repeat(10 - part))
        }
        (Err(_), _) if failback != "manual" => failback.clone(),
        _ => "-".into(),
    }
}

/// `no_path_retry` as multipathd prints it, for a device with `up` paths in use. A setting made by
/// a message takes precedence.
fn format_no_path_retry(maintenance: Option<&api::PathMaintenanceStatus>, up: usize) -> String {
    let Some(maintenance) = maintenance else { return "-".into() };
    match (maintenance.no_path_retry.as_deref(), maintenance.queueing_left_ns) {
        (None, _) => "-".into(),
        _ if !maintenance.queueing => "off".into(),
        (Some("fail" | "queue"), _) => "on".into(),
        (Some(_), Some(left)) => format!("{} sec", ceil_ns_to_seconds(left)),
        (Some(checks), None) if up > 0 => format!("{checks} chk"),
        (Some(_), None) => "on".into(),
    }
}

/// The priority of a group: the mean of its paths in use, 0 if none is known.
fn mean_path_priority(paths: &[MultipathPath]) -> i64 {
    let known = || paths.iter().filter(|path| path.is_up && path.pri >= 0).map(|path| path.pri);
    known().sum::<i64>().checked_div(known().count() as i64).unwrap_or(0)
}

fn multipath_path_from_api(path: &api::MultipathPathReport, is_up: bool, multipath: &str) -> MultipathPath {
    MultipathPath {
        dev: path.name.clone(),
        dev_t: path.number.clone(),
        dm_st: path.state.clone(),
        chk_st: path.checker.clone(),
        held: path.held.clone(),
        dev_st: "running",
        pri: path.priority.map_or(-1, i64::from),
        failures: path.failures,
        multipath: multipath.to_owned(),
        is_up,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_planned_in_multipathds_words() {
        let maintenance =
            |no_path_retry: Option<&str>, left, failback: &str, back| api::PathMaintenanceStatus {
                no_path_retry: no_path_retry.map(str::to_owned),
                queueing: no_path_retry.is_some_and(|rule| rule != "fail"),
                queueing_left_ns: left,
                failback: failback.into(),
                failback_left_ns: back,
                ..api::PathMaintenanceStatus::default()
            };
        let words = |maintenance: &api::PathMaintenanceStatus, up| {
            (format_no_path_retry(Some(maintenance), up), format_failback_status(Some(maintenance)))
        };
        let rows = [
            (maintenance(None, None, "manual", None), 1, "-", "-"),
            (maintenance(Some("fail"), None, "immediate", None), 0, "off", "immediate"),
            (maintenance(Some("queue"), None, "followover", None), 0, "on", "followover"),
            (maintenance(Some("3"), None, "10", None), 2, "3 chk", "-"),
            (
                maintenance(Some("3"), Some(13_000_000_001), "10", Some(6_500_000_000)),
                0,
                "14 sec",
                "XXXXXXX... 7/10",
            ),
            (maintenance(Some("3"), None, "10", Some(0)), 0, "on", ".......... 0/10"),
        ];
        for (maintenance, up, queueing, failback) in rows {
            assert_eq!(
                words(&maintenance, up),
                (queueing.to_owned(), failback.to_owned()),
                "{maintenance:?}"
            );
        }
        assert_eq!(
            (format_no_path_retry(None, 1), format_failback_status(None)),
            ("-".to_owned(), "-".to_owned())
        );
        let chosen = api::PathMaintenanceStatus {
            group_by_hand: Some(2),
            ..maintenance(None, None, "immediate", None)
        };
        assert_eq!(format_failback_status(Some(&chosen)), "by hand");
        // A message changed the setting, or the time is over.
        for (rule, waits, is) in [("fail", true, "on"), ("queue", false, "off"), ("3", false, "off")] {
            let maintenance = api::PathMaintenanceStatus {
                queueing: waits,
                ..maintenance(Some(rule), None, "manual", None)
            };
            assert_eq!([0, 1].map(|up| format_no_path_retry(Some(&maintenance), up)), [is, is], "{rule}");
        }
    }

    #[test]
    fn a_map_is_read_from_table_and_status() {
        let line = |params: &str| api::TableOrStatusLine {
            target: "multipath".into(),
            params: params.into(),
            ..api::TableOrStatusLine::default()
        };
        let table = api::TableDescription {
            lines: vec![line(
                "1 queue_if_no_path 0 2 1 historical-service-time 2 972 0 1 1 8:1 1 service-time 0 2 2 8:2 1 1 8:3 1 1 ",
            )],
            ..api::TableDescription::default()
        };
        let path = |group, name: &str, state: &str, priority| api::MultipathPathReport {
            group,
            name: name.into(),
            state: state.into(),
            priority,
            ..api::MultipathPathReport::default()
        };
        let status = api::TableStatus {
            lines: vec![line("2 0 0 0 2 1 E 2 972 0 1 3 8:1 F 1 5 0 7 A 0 2 2 8:2 A 0 0 1 8:3 A 0 0 1 ")],
            paths: vec![
                path(1, "a", "failed", Some(9)),
                path(2, "b", "active", Some(50)),
                path(2, "c", "active", Some(11)),
            ],
            ..api::TableStatus::default()
        };
        let device = api::DeviceDescription {
            name: "m".into(),
            number: "254:7".into(),
            ..api::DeviceDescription::default()
        };
        let map = parse_multipath_map(&device, &table, &status).unwrap();
        assert_eq!((map.features.as_str(), map.hwhandler.as_str()), ("1 queue_if_no_path", "0"));
        assert_eq!((map.sysfs.as_str(), map.uuid.as_str(), map.paths), ("dm-7", "m", 2));
        let groups: Vec<_> =
            map.path_groups.iter().map(|g| (g.selector.as_str(), g.pri, g.dm_st, g.paths.len())).collect();
        assert_eq!(
            groups,
            [("historical-service-time 2 972 0", 0, "enabled", 1), ("service-time 0", 30, "active", 2)]
        );
        // An ejected path is not counted as in use, unless its group has no other.
        let slow = |at: &[usize]| {
            let mut status = status.clone();
            at.iter().for_each(|at| status.paths[*at].ejected = true);
            let map = super::parse_multipath_map(&device, &table, &status).unwrap();
            (map.paths, map.path_groups[1].pri)
        };
        assert_eq!((slow(&[1]), slow(&[1, 2])), ((1, 11), (2, 30)));
        // A status of another table, and wrong counts.
        let groups = |text: &str| {
            let status = api::TableStatus { lines: vec![line(text)], ..api::TableStatus::default() };
            super::parse_multipath_map(&device, &table, &status).map(|map| map.path_groups.len())
        };
        assert_eq!(groups("2 0 0 0 1 1 E 0 1 2 8:1 A 0 0 1 "), None);
        assert_eq!(groups(&format!("2 0 0 0 2 1 E 2 1 1 {0} {0}", usize::MAX)), None);
        assert_eq!(groups(""), None);
    }
}
