//! Devices in columns: `udm info -c` and `dmsetup info -c`.
//!
//! Contract: the output is dmsetup's, byte for byte: its field names, in columns as wide as their
//! widest value, or unaligned with a separator.

mod fields;
mod regex;
mod select;

use crate::verbs::all_tables;
use anyhow::Result;
use fields::{Field, FieldKind, FieldScope, GROUPS};
pub use select::Selection;
use std::cmp::Ordering;
use std::collections::HashMap;
use udm_control::api;
use udm_control::client::{ClientError, ControlClient};

/// The fields that are shown when nobody says which.
const DEFAULT: &str = "name,major,minor,attr,open,segments,events,uuid";

/// What is known of a device.
#[derive(Clone, Default)]
pub struct DeviceRow {
    device: api::Device,
    below: Vec<api::Below>,
    /// Name and number of the devices that lie on it.
    above: Vec<(String, String)>,
}

impl DeviceRow {
    fn number(&self) -> (&str, &str) {
        self.device.number.split_once(':').unwrap_or((&self.device.number, ""))
    }
}

/// How to print.
#[derive(Debug, Default)]
pub struct ColumnLayout {
    /// No line of headings; values are then separated, by `:` if nothing else is said.
    pub no_headings: bool,
    /// What stands between values, which are not aligned then.
    pub separator: Option<String>,
    /// `DM_NAME='value'` for each value.
    pub name_prefixes: bool,
    /// Those values without quotes.
    pub unquoted: bool,
    /// A line a field, not a line a device.
    pub rows: bool,
}

/// What is wrong with what was asked for, in dmsetup's words.
#[derive(Debug)]
pub enum Wrong {
    /// A word that is no field, or stands at a wrong place: dmsetup shows what there is.
    Word(String),
    /// Anything else.
    Value(String),
}

/// A table of devices that was asked for.
pub struct Columns {
    fields: Vec<Column>,
    sort: Vec<(&'static Field, bool)>,
    selection: Option<Selection>,
    layout: ColumnLayout,
    /// How wide the columns were the last time: they only grow.
    widths: Vec<usize>,
}

/// A column.
#[derive(Clone, Copy)]
enum Column {
    Field(&'static Field),
    /// Whether the device is selected.
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
        !matches!(self, Column::Field(Field { kind: FieldKind::Text, .. }))
    }
}

fn iter_fields() -> impl Iterator<Item = &'static Field> {
    GROUPS.iter().flat_map(|group| group.fields)
}

fn field(name: &str) -> Option<&'static Field> {
    iter_fields().find(|field| field.name.eq_ignore_ascii_case(name))
}

/// The fields that `-o` can name, a group a line.
pub fn list_of_fields() -> String {
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
        match (GROUPS.iter().find(|group| group.name.eq_ignore_ascii_case(name)), field(name)) {
            (Some(group), _) => all.extend(group.fields.iter().map(Column::Field)),
            (None, Some(field)) => all.push(Column::Field(field)),
            (None, None) if name == "selected" => all.push(Column::Selected),
            (None, None) => return Err(format!("Unrecognised field: {name}")),
        }
    }
    Ok(all)
}

impl Columns {
    /// A table of the fields in `options`, sorted by those in `sort`, of devices that `select`
    /// takes.
    ///
    /// # Errors
    /// What names no field or is no criterion, in dmsetup's words.
    pub fn new(
        options: Option<&str>,
        sort: Option<&str>,
        select: Option<&str>,
        layout: ColumnLayout,
    ) -> Result<Columns, Wrong> {
        let fields = parse_columns(options.unwrap_or(DEFAULT))?;
        let mut keys = Vec::new();
        for key in sort.unwrap_or_default().split(',').filter(|key| !key.is_empty()) {
            let (name, down) = key.strip_prefix('-').map_or((key, false), |name| (name, true));
            let name = name.strip_prefix('+').unwrap_or(name);
            keys.push((field(name).ok_or_else(|| format!("dm_report: Unrecognised field: {name}"))?, down));
        }
        let selection = select.map(Selection::parse).transpose()?;
        Ok(Columns { widths: vec![0; fields.len()], fields, sort: keys, selection, layout })
    }

    fn needs(&self, what: FieldScope) -> bool {
        let parse_columns = self.fields.iter().filter_map(|parse_columns| match parse_columns {
            Column::Field(field) => Some(*field),
            Column::Selected => None,
        });
        let sorted = self.sort.iter().map(|(field, _)| *field);
        let selected = self.selection.iter().flat_map(Selection::fields);
        parse_columns.chain(sorted).chain(selected).any(|field| field.needs == what)
    }

    /// Asks `client` what is still to be known of `devices`.
    ///
    /// # Errors
    /// What the server or the connection to it says.
    pub fn ask(
        &self,
        client: &ControlClient,
        devices: Vec<api::Device>,
    ) -> Result<Vec<DeviceRow>, ClientError> {
        let is_asked = self.needs(FieldScope::Above) || self.needs(FieldScope::Below);
        let tables = if is_asked { all_tables(client)? } else { Vec::new() };
        let mut rows: HashMap<&str, DeviceRow> = HashMap::new();
        for table in &tables {
            rows.entry(&table.number).or_default().below.clone_from(&table.devices);
            for below in &table.devices {
                let user = (table.name.clone(), table.number.clone());
                rows.entry(&below.number).or_default().above.push(user);
            }
        }
        let row = |device: api::Device| {
            let known = rows.get(&device.number[..]).cloned().unwrap_or_default();
            DeviceRow { device, ..known }
        };
        Ok(devices.into_iter().map(row).collect())
    }

    /// The text, and why there is less of it than there should be.
    pub fn print(&mut self, mut rows: Vec<DeviceRow>) -> (String, Vec<String>) {
        let mut wrong = Vec::new();
        rows.sort_by(|a, b| self.order(a, b));
        let keeps_all = self.fields.iter().any(|parse_columns| matches!(parse_columns, Column::Selected));
        let mut lines: Vec<Vec<String>> = Vec::new();
        for row in &rows {
            // What is not selected has all its values looked up as well.
            let selected = self.selection.as_ref().is_none_or(|selection| selection.takes(row));
            let value = |parse_columns: &Column| match parse_columns {
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

    fn order(&self, a: &DeviceRow, b: &DeviceRow) -> Ordering {
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
        let ColumnLayout { no_headings, separator, name_prefixes, unquoted, rows } = &self.layout;
        let headings =
            || self.fields.iter().map(|parse_columns| parse_columns.heading().to_owned()).collect::<Vec<_>>();
        if !no_headings && separator.is_none() && !name_prefixes && !rows {
            return self.aligned(&headings(), lines);
        }
        let quote = if *unquoted { "" } else { "'" };
        let value = |(value, parse_columns): (&String, &Column)| match name_prefixes {
            true => format!("DM_{}={quote}{value}{quote}", parse_columns.name().to_ascii_uppercase()),
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

    /// Has `lines` fit.
    fn widen(&mut self, lines: &[Vec<String>]) {
        for (place, (width, parse_columns)) in self.widths.iter_mut().zip(&self.fields).enumerate() {
            let least = match parse_columns {
                Column::Field(field) => field.width,
                Column::Selected => 8,
            };
            let all = lines.iter().map(|line| line[place].as_str()).chain([parse_columns.heading()]);
            let now = all.map(|value| value.chars().count()).max().unwrap_or_default();
            *width = now.max(least).max(*width);
        }
    }

    /// Headings to the left, numbers to the right, and blanks to the end of the line.
    fn aligned(&self, headings: &[String], lines: &[Vec<String>]) -> String {
        let line = |line: &[String], is_heading: bool| {
            let cell = |((value, width), parse_columns): ((&String, &usize), &Column)| {
                if parse_columns.is_number() && !is_heading {
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

/// A device of which nothing but its name is known, and that it is of `subsystem`.
pub fn split_row(name: &str, subsystem: &str) -> DeviceRow {
    let uuid = Some(format!("{subsystem}-"));
    DeviceRow {
        device: api::Device { name: name.to_owned(), uuid, ..api::Device::default() },
        ..DeviceRow::default()
    }
}

/// What the kernel calls the node of a mapped device, which it has from its first table on.
pub fn node_of(device: &api::Device) -> Option<String> {
    let minor = device.number.split_once(':')?.1;
    (device.live_table || device.inactive_table).then(|| format!("dm-{minor}"))
}

/// What the kernel would call the node of what a table lies on: the last part of a file's path; a
/// URI of another kind as it is.
pub fn node_below(below: &api::Below) -> String {
    if below.uri.starts_with('@') {
        return format!("dm-{}", below.number.split_once(':').map_or("", |(_, minor)| minor));
    }
    let path = below.uri.strip_prefix("file:").unwrap_or(&below.uri);
    match path.rsplit_once('/') {
        Some((_, name)) if path.starts_with('/') => name.split('?').next().unwrap_or(name).to_owned(),
        _ => below.uri.clone(),
    }
}
