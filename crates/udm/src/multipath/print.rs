//! Output in the format of multipath-tools: the tree of `multipath -ll`, and columns by format.

use super::map_reader::{MultipathMap, MultipathPath};
use anyhow::{Result, bail};
use std::fmt::Write as _;

/// The text of multipath-tools for an unknown vendor and product.
const NO_VENDOR: &str = "##,##";

/// A format letter, its heading, and the function that prints its value.
type FormatWildcard<T> = (char, &'static str, fn(&T) -> String);

const MAP: &[FormatWildcard<MultipathMap>] = &[
    ('n', "name", |map| map.name.clone()),
    ('w', "uuid", |map| map.uuid.clone()),
    ('d', "sysfs", |map| map.sysfs.clone()),
    ('F', "failback", |map| map.failback.clone()),
    ('Q', "queueing", |map| map.queueing.clone()),
    ('N', "paths", |map| map.paths.to_string()),
    ('r', "write_prot", |map| map.write_prot.into()),
    ('t', "dm-st", |map| map.dm_st.into()),
    ('S', "size", |map| format_multipath_size(map.size_bytes)),
    ('f', "features", |map| map.features.clone()),
    ('h', "hwhandler", |map| map.hwhandler.clone()),
    ('0', "path_faults", |map| map.path_faults.to_string()),
    ('s', "vend/prod/rev", |_| NO_VENDOR.into()),
];

const PATH: &[FormatWildcard<MultipathPath>] = &[
    ('i', "hcil", |_| "#:#:#:#".into()),
    ('d', "dev", |path| path.dev.clone()),
    ('D', "dev_t", |path| path.dev_t.clone()),
    ('p', "pri", |path| path.pri.to_string()),
    ('t', "dm_st", |path| path.dm_st.clone()),
    ('T', "chk_st", |path| path.chk_st.clone()),
    ('o', "dev_st", |path| path.dev_st.into()),
    ('W', "held", |path| path.held.clone().unwrap_or_default()),
    ('m', "multipath", |path| path.multipath.clone()),
    ('0', "failures", |path| path.failures.to_string()),
    ('s', "vend/prod/rev", |_| NO_VENDOR.into()),
];

/// A size as multipath-tools prints it: in KiB or larger units, with one decimal below 10.
fn format_multipath_size(bytes: u64) -> String {
    let (mut size, mut units) = (bytes as f64 / 1024.0, "KMGTP".chars().peekable());
    while size >= 1024.0 && units.peek() != Some(&'P') {
        size /= 1024.0;
        units.next();
    }
    let digits = usize::from(size < 10.0);
    format!("{size:.digits$}{}", units.next().unwrap_or('P'))
}

/// A part of a format: a field or literal text.
enum FormatPart<'a, T> {
    Field(&'a FormatWildcard<T>),
    Text(char),
}

fn parse_multipathd_format<'a, T>(
    format: &str,
    fields: &'a [FormatWildcard<T>],
) -> Result<Vec<FormatPart<'a, T>>> {
    let mut parts = Vec::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        parts.push(match (c, if c == '%' { chars.next() } else { None }) {
            ('%', Some(letter)) => match fields.iter().find(|field| field.0 == letter) {
                Some(field) => FormatPart::Field(field),
                None => bail!("multipath: %{} is not supported", letter.escape_default()),
            },
            ('%', None) => bail!("multipath: a letter is missing after %"),
            (c, _) => FormatPart::Text(c),
        });
    }
    Ok(parts)
}

/// Formats lines of fields: in columns, with headings, or raw.
fn format_multipathd_rows<T>(
    of: &[&T],
    format: &str,
    fields: &[FormatWildcard<T>],
    heads: bool,
    columns: bool,
) -> Result<Vec<String>> {
    let parts = parse_multipathd_format(format, fields)?;
    let mut rows: Vec<Vec<String>> = Vec::new();
    let value = |part: &FormatPart<'_, T>, one: Option<&T>| match part {
        FormatPart::Field(field) => one.map_or_else(|| field.1.to_owned(), |one| (field.2)(one)),
        FormatPart::Text(c) => c.to_string(),
    };
    if heads {
        rows.push(parts.iter().map(|part| value(part, None)).collect());
    }
    rows.extend(of.iter().map(|one| parts.iter().map(|part| value(part, Some(one))).collect()));
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..parts.len()).map(|column| if columns { width(column) } else { 0 }).collect();
    let line = |row: &Vec<String>| {
        let padded: String =
            row.iter().zip(&widths).map(|(value, width)| format!("{value:<width$}")).collect();
        if columns { padded.trim_end().to_owned() } else { padded }
    };
    Ok(rows.iter().map(line).collect())
}

fn join_lines(lines: &[String]) -> String {
    lines.iter().map(|line| format!("{line}\n")).collect()
}

/// Output of `show paths`.
///
/// # Errors
/// A format letter is not known.
pub fn format_multipath_paths(maps: &[MultipathMap], format: &str, raw: bool) -> Result<String> {
    Ok(join_lines(&format_multipathd_rows(&all_paths(maps), format, PATH, !raw, !raw)?))
}

/// Output of `show maps`.
///
/// # Errors
/// A format letter is not known.
pub fn format_multipath_maps(maps: &[MultipathMap], format: &str, raw: bool) -> Result<String> {
    Ok(join_lines(&format_multipathd_rows(&maps.iter().collect::<Vec<_>>(), format, MAP, !raw, !raw)?))
}

/// The paths of all devices.
pub fn all_paths(maps: &[MultipathMap]) -> Vec<&MultipathPath> {
    maps.iter().flat_map(|map| &map.path_groups).flat_map(|group| &group.paths).collect()
}

/// The tree. Columns are as wide as the widest path needs.
pub fn format_multipath_topology(maps: &[MultipathMap]) -> String {
    let paths =
        format_multipathd_rows(&all_paths(maps), "%i %d %D %t %T %o", PATH, false, true).unwrap_or_default();
    let (mut paths, mut out) = (paths.into_iter(), String::new());
    for map in maps {
        let uuid = if map.uuid == map.name { String::new() } else { format!(" ({})", map.uuid) };
        // Writing to a String can't fail.
        let _ = writeln!(out, "{}{uuid} {} {NO_VENDOR}", map.name, map.sysfs);
        let _ = writeln!(
            out,
            "size={} features='{}' hwhandler='{}' wp={}",
            format_multipath_size(map.size_bytes),
            map.features,
            map.hwhandler,
            map.write_prot
        );
        for (at, group) in map.path_groups.iter().enumerate() {
            let last = at + 1 == map.path_groups.len();
            let (branch, beside) = if last { ('`', ' ') } else { ('|', '|') };
            let _ = writeln!(
                out,
                "{branch}-+- policy='{}' prio={} status={}",
                group.selector, group.pri, group.dm_st
            );
            for path in 1..=group.paths.len() {
                let branch = if path == group.paths.len() { '`' } else { '|' };
                let _ = writeln!(out, "{beside} {branch}- {}", paths.next().unwrap_or_default());
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::map_reader::PathGroup;
    use super::*;

    fn path(dev: &str, dev_t: &str, dm_st: &str, chk_st: &str) -> MultipathPath {
        let (dev, dev_t) = (dev.into(), dev_t.into());
        let (dm_st, chk_st) = (dm_st.into(), chk_st.into());
        let path =
            MultipathPath { dev, dev_t, dm_st, chk_st, pri: 50, failures: 2, ..MultipathPath::default() };
        MultipathPath { dev_st: "running", multipath: "mp".into(), ..path }
    }

    fn map() -> MultipathMap {
        let group = |group, dm_st, paths| PathGroup {
            group,
            selector: "service-time 0".into(),
            pri: 50,
            dm_st,
            paths,
        };
        MultipathMap {
            name: "mpatha".into(),
            uuid: "3600a0".into(),
            sysfs: "dm-0".into(),
            failback: "immediate".into(),
            queueing: "on".into(),
            size_bytes: 64 << 20,
            write_prot: "rw",
            dm_st: "active",
            features: "1 queue_if_no_path".into(),
            hwhandler: "0".into(),
            paths: 2,
            path_faults: 6,
            path_groups: vec![
                group(
                    1,
                    "active",
                    vec![path("sda", "8:0", "active", "ready"), path("sdb", "8:16", "failed", "faulty")],
                ),
                group(2, "enabled", vec![path("sdc", "8:32", "active", "ready")]),
            ],
        }
    }

    /// The layout of multipath-tools, except for fields without a value in udm.
    #[test]
    fn the_tree_is_multipath_tools() {
        let expected = "\
mpatha (3600a0) dm-0 ##,##
size=64M features='1 queue_if_no_path' hwhandler='0' wp=rw
|-+- policy='service-time 0' prio=50 status=active
| |- #:#:#:# sda 8:0  active ready  running
| `- #:#:#:# sdb 8:16 failed faulty running
`-+- policy='service-time 0' prio=50 status=enabled
  `- #:#:#:# sdc 8:32 active ready  running
";
        assert_eq!(format_multipath_topology(&[map()]), expected);
    }

    #[test]
    fn columns_by_format() {
        let maps_ = [map()];
        assert_eq!(
            format_multipath_paths(&maps_, "%d %t %0", false).unwrap(),
            "dev dm_st  failures\nsda active 2\nsdb failed 2\nsdc active 2\n"
        );
        assert_eq!(
            format_multipath_paths(&maps_, "%d|%T", true).unwrap(),
            "sda|ready\nsdb|faulty\nsdc|ready\n"
        );
        assert_eq!(
            format_multipath_maps(&maps_, "%n %d %w", false).unwrap(),
            "name   sysfs uuid\nmpatha dm-0  3600a0\n"
        );
        assert!(
            format_multipath_paths(&maps_, "%q", false).is_err()
                && format_multipath_maps(&maps_, "%", false).is_err()
        );
    }

    #[test]
    fn sizes() {
        for (bytes, want) in
            [(0, "0.0K"), (512, "0.5K"), (9 << 20, "9.0M"), (1 << 30, "1.0G"), (15 << 40, "15T")]
        {
            assert_eq!(format_multipath_size(bytes), want);
        }
        assert_eq!(
            (format_multipath_size(64 << 20).as_str(), format_multipath_size(1536 << 20).as_str()),
            ("64M", "1.5G")
        );
    }
}
