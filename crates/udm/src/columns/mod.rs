//! Devices in columns: `udm info -c` and `dmsetup info -c`.
//!
//! Contract: the output is dmsetup's, byte for byte: its field names, in columns as wide as their
//! widest value, or unaligned with a separator.

mod fields;
mod regex;
mod select;

use crate::requests::all_tables;
use anyhow::Result;
use fields::{FieldDataSource, FieldKind, GROUPS, ReportField};
pub use select::SelectionCriterion;
use std::cmp::Ordering;
use std::collections::HashMap;
use udm_control::api;
use udm_control::client::{ControlClient, ControlClientError};

/// The fields that are shown by default.
const DEFAULT: &str = "name,major,minor,attr,open,segments,events,uuid";

/// The known data of a device.
#[derive(Clone, Default)]
pub struct DeviceReportRow {
    device: api::DeviceDescription,
    below: Vec<api::UnderlyingDevice>,
    /// Names and numbers of the devices that use this one.
    above: Vec<(String, String)>,
}

impl DeviceReportRow {
    fn number(&self) -> (&str, &str) {
        self.device.number.split_once(':').unwrap_or((&self.device.number, ""))
    }
}

/// The layout of the output.
#[derive(Debug, Default)]
pub struct ColumnReportLayout {
    /// No line of headings; values are then separated, by default with `:`.
    pub no_headings: bool,
    /// The separator of values, which are then not aligned.
    pub separator: Option<String>,
    /// Each value as `DM_NAME='value'`.
    pub name_prefixes: bool,
    /// With `name_prefixes`, values without quotes.
    pub unquoted: bool,
    /// One line per field instead of one line per device.
    pub rows: bool,
}

/// An error in the arguments, in dmsetup's words.
#[derive(Debug)]
pub enum ColumnReportArgError {
    /// A word that is not a field, or is misplaced; dmsetup then lists the fields.
    Word(String),
    /// Any other error.
    Value(String),
}

/// A report: fields, order, selection and layout.
pub struct ColumnReport {
    fields: Vec<Column>,
    sort: Vec<(&'static ReportField, bool)>,
    selection: Option<SelectionCriterion>,
    layout: ColumnReportLayout,
    /// Widths of the columns so far; columns only grow.
    widths: Vec<usize>,
}

/// A column of a report.
#[derive(Clone, Copy)]
enum Column {
    Field(&'static ReportField),
    /// 1 if the device is selected, else 0.
    Selected,
}

impl Column {
    fn name(self) -> &'static str {
        match self {
            Column::Field(field) => field.name,
            Column::Selected => "selected",
        }
    }

    fn heading(self) -> &'static str {
        match self {
            Column::Field(field) => field.heading,
            Column::Selected => "Selected",
        }
    }

    fn is_number(self) -> bool {
        !matches!(self, Column::Field(ReportField { kind: FieldKind::Text, .. }))
    }
}

fn iter_report_fields() -> impl Iterator<Item = &'static ReportField> {
    GROUPS.iter().flat_map(|group| group.fields)
}

fn find_report_field(name: &str) -> Option<&'static ReportField> {
    iter_report_fields().find(|field| field.name.eq_ignore_ascii_case(name))
}

/// The fields that `-o` can name, one group per line.
pub fn report_fields_help() -> String {
    let group = |group: &fields::FieldGroup| {
        let names: Vec<_> = group.fields.iter().map(|field| field.name).collect();
        let all = if group.name.is_empty() { String::new() } else { format!(" ({})", group.name) };
        format!("{}{all}: {}\n", group.heading, names.join(", "))
    };
    GROUPS.iter().map(group).collect::<String>() + "Which are selected by -S: selected\n"
}

fn parse_columns(names: &str) -> Result<Vec<Column>, String> {
    let mut all = Vec::new();
    let (names, default) = names.strip_prefix('+').map_or((names, ""), |names| (names, DEFAULT));
    for name in default.split(',').chain(names.split(',')).filter(|name| !name.is_empty()) {
        match (GROUPS.iter().find(|group| group.name.eq_ignore_ascii_case(name)), find_report_field(name)) {
            (Some(group), _) => all.extend(group.fields.iter().map(Column::Field)),
            (None, Some(field)) => all.push(Column::Field(field)),
            (None, None) if name == "selected" => all.push(Column::Selected),
            (None, None) => return Err(format!("Unrecognised field: {name}")),
        }
    }
    Ok(all)
}

impl ColumnReport {
    /// Creates a report of the fields in `options`, sorted by the fields in `sort`, with the
    /// devices that match `select`.
    ///
    /// # Errors
    /// An unknown field or a wrong criterion, in dmsetup's words.
    pub fn new(
        options: Option<&str>,
        sort: Option<&str>,
        select: Option<&str>,
        layout: ColumnReportLayout,
    ) -> Result<ColumnReport, ColumnReportArgError> {
        let fields = parse_columns(options.unwrap_or(DEFAULT))?;
        let mut keys = Vec::new();
        for key in sort.unwrap_or_default().split(',').filter(|key| !key.is_empty()) {
            let (name, down) = key.strip_prefix('-').map_or((key, false), |name| (name, true));
            let name = name.strip_prefix('+').unwrap_or(name);
            keys.push((
                find_report_field(name).ok_or_else(|| format!("dm_report: Unrecognised field: {name}"))?,
                down,
            ));
        }
        let selection = select.map(SelectionCriterion::parse).transpose()?;
        Ok(ColumnReport { widths: vec![0; fields.len()], fields, sort: keys, selection, layout })
    }

    fn needs(&self, scope: FieldDataSource) -> bool {
        let columns = self.fields.iter().filter_map(|column| match column {
            Column::Field(field) => Some(*field),
            Column::Selected => None,
        });
        let sorted = self.sort.iter().map(|(field, _)| *field);
        let selected = self.selection.iter().flat_map(SelectionCriterion::fields);
        columns.chain(sorted).chain(selected).any(|field| field.needs == scope)
    }

    /// Requests the data of `devices` that the fields need.
    ///
    /// # Errors
    /// The server refused a request or cannot be reached.
    pub fn ask(
        &self,
        client: &ControlClient,
        devices: Vec<api::DeviceDescription>,
    ) -> Result<Vec<DeviceReportRow>, ControlClientError> {
        let is_asked = self.needs(FieldDataSource::Above) || self.needs(FieldDataSource::Below);
        let tables = if is_asked { all_tables(client)? } else { Vec::new() };
        let mut rows: HashMap<&str, DeviceReportRow> = HashMap::new();
        for table in &tables {
            rows.entry(&table.number).or_default().below.clone_from(&table.devices);
            for below in &table.devices {
                let user = (table.name.clone(), table.number.clone());
                rows.entry(&below.number).or_default().above.push(user);
            }
        }
        let row = |device: api::DeviceDescription| {
            let known = rows.get(&device.number[..]).cloned().unwrap_or_default();
            DeviceReportRow { device, ..known }
        };
        Ok(devices.into_iter().map(row).collect())
    }

    /// Returns the text, and the errors of fields without a value.
    pub fn print(&mut self, mut rows: Vec<DeviceReportRow>) -> (String, Vec<String>) {
        let mut wrong = Vec::new();
        rows.sort_by(|a, b| self.order(a, b));
        let keeps_all = self.fields.iter().any(|column| matches!(column, Column::Selected));
        let mut lines: Vec<Vec<String>> = Vec::new();
        for row in &rows {
            // As in dmsetup, the values of a device that is not selected are computed as well.
            let selected = self.selection.as_ref().is_none_or(|selection| selection.takes(row));
            let value = |column: &Column| match column {
                Column::Field(field) => (field.value)(row).map_err(|why| {
                    format!("{why}\n_do_report_object: report function failed for field {}", field.name)
                }),
                Column::Selected => Ok(u8::from(selected).to_string()),
            };
            match self.fields.iter().map(value).collect::<Result<Vec<_>, _>>() {
                Ok(line) if selected || keeps_all => lines.push(line),
                Ok(_) => {}
                Err(why) => wrong.push(why),
            }
        }
        (self.text(&lines), wrong)
    }

    fn order(&self, a: &DeviceReportRow, b: &DeviceReportRow) -> Ordering {
        self.sort.iter().fold(Ordering::Equal, |order, (field, down)| {
            order.then_with(|| {
                let value = |row| (field.value)(row).unwrap_or_default();
                let (a, b) = (value(a), value(b));
                let order = match field.kind {
                    FieldKind::Text => a.cmp(&b),
                    FieldKind::Number => a.parse::<u64>().ok().cmp(&b.parse().ok()),
                };
                if *down { order.reverse() } else { order }
            })
        })
    }

    fn text(&mut self, lines: &[Vec<String>]) -> String {
        if lines.is_empty() {
            return String::new();
        }
        self.widen(lines);
        let ColumnReportLayout { no_headings, separator, name_prefixes, unquoted, rows } = &self.layout;
        let headings = || self.fields.iter().map(|column| column.heading().to_owned()).collect::<Vec<_>>();
        if !no_headings && separator.is_none() && !name_prefixes && !rows {
            return self.aligned(&headings(), lines);
        }
        let quote = if *unquoted { "" } else { "'" };
        let value = |(value, column): (&String, &Column)| match name_prefixes {
            true => format!("DM_{}={quote}{value}{quote}", column.name().to_ascii_uppercase()),
            false => value.clone(),
        };
        let values = lines.iter().map(|line| line.iter().zip(&self.fields).map(value).collect::<Vec<_>>());
        let mut all: Vec<Vec<String>> = if *no_headings { Vec::new() } else { vec![headings()] };
        all.extend(values);
        if *rows {
            all = (0..self.fields.len())
                .map(|field| all.iter().map(|line| line[field].clone()).collect())
                .collect();
        }
        let separator = separator.as_deref().unwrap_or(if *no_headings { ":" } else { " " });
        all.iter().map(|line| line.join(separator) + "\n").collect()
    }

    /// Widens the columns so that `lines` fit.
    fn widen(&mut self, lines: &[Vec<String>]) {
        for (place, (width, column)) in self.widths.iter_mut().zip(&self.fields).enumerate() {
            let least = match column {
                Column::Field(field) => field.width,
                Column::Selected => 8,
            };
            let all = lines.iter().map(|line| line[place].as_str()).chain([column.heading()]);
            let now = all.map(|value| value.chars().count()).max().unwrap_or_default();
            *width = now.max(least).max(*width);
        }
    }

    /// Aligns headings left and numbers right, and pads each line to its full width.
    fn aligned(&self, headings: &[String], lines: &[Vec<String>]) -> String {
        let line = |line: &[String], is_heading: bool| {
            let cell = |((value, width), column): ((&String, &usize), &Column)| {
                if column.is_number() && !is_heading {
                    format!("{value:>width$}")
                } else {
                    format!("{value:<width$}")
                }
            };
            let cells: Vec<_> = line.iter().zip(&self.widths).zip(&self.fields).map(cell).collect();
            cells.join(" ") + "\n"
        };
        line(headings, true) + &lines.iter().map(|values| line(values, false)).collect::<String>()
    }
}

/// A row with only a device name, for a uuid of `subsystem`.
pub fn build_splitname_row(name: &str, subsystem: &str) -> DeviceReportRow {
    let uuid = Some(format!("{subsystem}-"));
    DeviceReportRow {
        device: api::DeviceDescription { name: name.to_owned(), uuid, ..api::DeviceDescription::default() },
        ..DeviceReportRow::default()
    }
}

/// The kernel's name of the node of a mapped device; `None` until it has a table.
pub fn dm_node_name(device: &api::DeviceDescription) -> Option<String> {
    let minor = device.number.split_once(':')?.1;
    (device.live_table || device.inactive_table).then(|| format!("dm-{minor}"))
}

/// The node name of a device below a table: the last component of a file's path, or the URI of
/// other devices.
pub fn underlying_device_node_name(below: &api::UnderlyingDevice) -> String {
    if below.uri.starts_with('@') {
        return format!("dm-{}", below.number.split_once(':').map_or("", |(_, minor)| minor));
    }
    let path = below.uri.strip_prefix("file:").unwrap_or(&below.uri);
    match path.rsplit_once('/') {
        Some((_, name)) if path.starts_with('/') => name.split('?').next().unwrap_or(name).to_owned(),
        _ => below.uri.clone(),
    }
}
