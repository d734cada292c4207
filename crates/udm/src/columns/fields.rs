//! The fields of a device that columns can show, with dmsetup's names.

use super::DeviceReportRow;
use std::fmt::Write as _;

/// The alignment and order of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FieldKind {
    /// Left-aligned, sorted by bytes.
    Text,
    /// Right-aligned, sorted by value.
    Number,
}

/// The data that a field needs besides the device itself; each kind takes a request to the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FieldDataSource {
    /// Nothing.
    Device,
    /// The devices below the live table.
    Below,
    /// The devices below all live tables, which give the users of the device.
    Above,
}

/// A field.
pub struct ReportField {
    /// The name for `-o`.
    pub name: &'static str,
    /// The heading of the column.
    pub heading: &'static str,
    /// The minimum width of the column.
    pub width: usize,
    /// Alignment and order.
    pub kind: FieldKind,
    /// The data that the field needs.
    pub needs: FieldDataSource,
    /// Returns the value, or the reason why there is none.
    pub value: fn(&DeviceReportRow) -> Result<String, String>,
}

/// A group of fields, which `-o` can name as a whole.
pub struct FieldGroup {
    /// The name for `-o`; empty if dmsetup has none.
    pub name: &'static str,
    /// The title of the group.
    pub heading: &'static str,
    /// The fields.
    pub fields: &'static [ReportField],
}

macro_rules! fields {
    ($($name:literal $heading:literal $width:literal $kind:ident $needs:ident $value:expr;)*) => {
        &[$(ReportField {
            name: $name,
            heading: $heading,
            width: $width,
            kind: FieldKind::$kind,
            needs: FieldDataSource::$needs,
            value: |row| $value(row).into_value(),
        },)*]
    };
}

/// A value, or the reason why there is none.
trait IntoFieldValue {
    fn into_value(self) -> Result<String, String>;
}

impl IntoFieldValue for String {
    fn into_value(self) -> Result<String, String> {
        Ok(self)
    }
}

impl IntoFieldValue for Result<String, String> {
    fn into_value(self) -> Result<String, String> {
        self
    }
}

/// All fields, in dmsetup's order.
pub const GROUPS: [FieldGroup; 5] = [
    FieldGroup {
        name: "name_all",
        heading: "Names",
        fields: fields! {
            "name" "Name" 16 Text Device |row: &DeviceReportRow| row.device.name.clone();
            "mangled_name" "MangledName" 16 Text Device |row: &DeviceReportRow| mangle_name_or_uuid(&row.device.name);
            "unmangled_name" "UnmangledName" 16 Text Device |row: &DeviceReportRow| row.device.name.clone();
            "uuid" "UUID" 32 Text Device uuid_field_value;
            "mangled_uuid" "MangledUUID" 32 Text Device |row: &DeviceReportRow| mangle_name_or_uuid(&uuid_field_value(row));
            "unmangled_uuid" "UnmangledUUID" 32 Text Device uuid_field_value;
            // udm has no read-ahead; dmsetup prints 0 if it cannot find out.
            "read_ahead" "RAhead" 6 Number Device |_: &DeviceReportRow| "0".to_owned();
        },
    },
    FieldGroup {
        name: "info_all",
        heading: "State",
        fields: fields! {
            "blkdevname" "BlkDevName" 16 Text Device blkdevname_field_value;
            "attr" "Stat" 4 Text Device device_attr_letters;
            "tables_loaded" "Tables" 6 Text Device |row: &DeviceReportRow| {
                let text = match (row.device.live_table, row.device.inactive_table) {
                    (true, true) => "Both",
                    (true, false) => "Live",
                    (false, true) => "Inact",
                    (false, false) => "None",
                };
                text.to_owned()
            };
            "suspended" "Suspended" 9 Text Device |row: &DeviceReportRow| {
                bool_to_text(row.device.state == "suspended", "Suspended", "Active")
            };
            "readonly" "Read-only" 9 Text Device |row: &DeviceReportRow| {
                bool_to_text(row.device.read_only, "Read-only", "Writeable")
            };
            "devno" "DevNo" 5 Text Device |row: &DeviceReportRow| row.device.number.clone();
            "major" "Maj" 3 Number Device |row: &DeviceReportRow| row.number().0.to_owned();
            "minor" "Min" 3 Number Device |row: &DeviceReportRow| row.number().1.to_owned();
            "open" "Open" 4 Number Device |row: &DeviceReportRow| row.device.open_count.to_string();
            "segments" "Targ" 4 Number Device |row: &DeviceReportRow| row.device.targets.to_string();
            "events" "Event" 6 Number Device |row: &DeviceReportRow| row.device.event_nr.to_string();
        },
    },
    FieldGroup {
        name: "deps_all",
        heading: "Dependencies",
        fields: fields! {
            "device_count" "#Devs" 5 Number Below |row: &DeviceReportRow| row.below.len().to_string();
            "devnos_used" "DevNosUsed" 16 Text Below |row: &DeviceReportRow| {
                join_with_commas(row.below.iter().map(|below| below.number.as_str()))
            };
            "blkdevs_used" "BlkDevNamesUsed" 16 Text Below |row: &DeviceReportRow| {
                let names: Vec<_> = row.below.iter().map(super::underlying_device_node_name).collect();
                join_with_commas(names.iter().map(String::as_str))
            };
        },
    },
    FieldGroup {
        name: "",
        heading: "Names of dependencies",
        fields: fields! {
            "devs_used" "DevNamesUsed" 16 Text Below |row: &DeviceReportRow| {
                join_with_commas(row.below.iter().filter_map(|below| below.uri.strip_prefix('@')))
            };
            "device_ref_count" "#Refs" 5 Number Above |row: &DeviceReportRow| row.above.len().to_string();
            "names_using_dev" "RefNames" 8 Text Above |row: &DeviceReportRow| {
                join_with_commas(row.above.iter().map(|(name, _)| name.as_str()))
            };
            "devnos_using_dev" "RefDevNos" 9 Text Above |row: &DeviceReportRow| {
                join_with_commas(row.above.iter().map(|(_, number)| number.as_str()))
            };
        },
    },
    FieldGroup {
        name: "splitname_all",
        heading: "Components of LVM names",
        fields: fields! {
            "subsystem" "Subsys" 6 Text Device uuid_subsystem;
            "vg_name" "VG" 4 Text Device |row: &DeviceReportRow| lvm_name_part(row, 0);
            "lv_name" "LV" 4 Text Device |row: &DeviceReportRow| lvm_name_part(row, 1);
            "lv_layer" "LVLayer" 7 Text Device |row: &DeviceReportRow| lvm_name_part(row, 2);
        },
    },
];

fn uuid_field_value(row: &DeviceReportRow) -> String {
    row.device.uuid.clone().unwrap_or_default()
}

fn bool_to_text(is: bool, so: &str, otherwise: &str) -> String {
    if is { so } else { otherwise }.to_owned()
}

fn join_with_commas<'a>(words: impl Iterator<Item = &'a str>) -> String {
    words.collect::<Vec<_>>().join(",")
}

fn device_attr_letters(row: &DeviceReportRow) -> String {
    let device = &row.device;
    let letter = |is, so: char, otherwise: char| if is { so } else { otherwise };
    let letters = [
        letter(device.live_table, 'L', '-'),
        letter(device.inactive_table, 'I', '-'),
        letter(device.state == "suspended", 's', '-'),
        letter(device.read_only, 'r', 'w'),
    ];
    letters.iter().collect()
}

/// The kernel's name for the node of a device.
fn blkdevname_field_value(row: &DeviceReportRow) -> Result<String, String> {
    super::dm_node_name(&row.device)
        .ok_or_else(|| format!("Could not resolve block device name for {}.", row.device.number))
}

/// `text` as dmsetup passes it to the kernel: special bytes become `\xHH`.
pub fn mangle_name_or_uuid(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"#+-.:=@_".contains(&byte) {
            out.push(char::from(byte));
        } else {
            // Writing to a String can't fail.
            let _ = write!(out, "\\x{byte:02x}");
        }
    }
    out
}

/// The part of the uuid before the first hyphen.
fn uuid_subsystem(row: &DeviceReportRow) -> String {
    let uuid = row.device.uuid.as_deref();
    uuid.and_then(|uuid| uuid.split_once('-')).map_or("", |(before, _)| before).to_owned()
}

/// A part of the name of an LVM device.
fn lvm_name_part(row: &DeviceReportRow, place: usize) -> String {
    if uuid_subsystem(row) == "LVM" {
        split_lvm_device_name(&row.device.name)[place].clone()
    } else {
        String::new()
    }
}

/// Splits a name into volume group, logical volume and layer. The separators are single hyphens; a
/// doubled hyphen is a hyphen in a part.
pub fn split_lvm_device_name(name: &str) -> [String; 3] {
    let mut parts = [const { String::new() }; 3];
    let (mut place, mut rest) = (0, name.chars().peekable());
    while let Some(c) = rest.next() {
        if c == '-' && rest.next_if_eq(&'-').is_none() && place < 2 {
            place += 1;
        } else {
            parts[place].push(c);
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_lvm() {
        assert_eq!(split_lvm_device_name("vg-lv"), ["vg", "lv", ""]);
        assert_eq!(split_lvm_device_name("a--b-c--d-real"), ["a-b", "c-d", "real"]);
        assert_eq!(split_lvm_device_name("plain"), ["plain", "", ""]);
        assert_eq!(mangle_name_or_uuid("a b\\ü"), "a\\x20b\\x5c\\xc3\\xbc");
    }
}
