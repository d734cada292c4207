//! The fields of a device that columns can show: one list, by dmsetup's names.

use super::DeviceRow;
use std::fmt::Write as _;

/// How a field is aligned and sorted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FieldKind {
    /// To the left, by its bytes.
    Text,
    /// To the right, by its value.
    Number,
}

/// What a field has to know besides the device itself, each of which is a question to the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FieldScope {
    /// Nothing.
    Device,
    /// What its live table lies on.
    Below,
    /// What all live tables lie on: who uses it.
    Above,
}

/// A field.
pub struct Field {
    /// What `-o` calls it.
    pub name: &'static str,
    /// What stands above its column.
    pub heading: &'static str,
    /// How wide its column is at the least.
    pub width: usize,
    /// How it is aligned and sorted.
    pub kind: FieldKind,
    /// What it has to know.
    pub needs: FieldScope,
    /// Its value; why there is none.
    pub value: fn(&DeviceRow) -> Result<String, String>,
}

/// A group of fields, which `-o` can name as a whole.
pub struct FieldGroup {
    /// What `-o` calls all of them; empty where dmsetup has no word for it.
    pub name: &'static str,
    /// What they tell of.
    pub heading: &'static str,
    /// The fields.
    pub fields: &'static [Field],
}

macro_rules! fields {
    ($($name:literal $heading:literal $width:literal $kind:ident $needs:ident $value:expr;)*) => {
        &[$(Field {
            name: $name,
            heading: $heading,
            width: $width,
            kind: FieldKind::$kind,
            needs: FieldScope::$needs,
            value: |row| $value(row).said(),
        },)*]
    };
}

/// A value, or why there is none.
trait IntoValue {
    fn said(self) -> Result<String, String>;
}

impl IntoValue for String {
    fn said(self) -> Result<String, String> {
        Ok(self)
    }
}

impl IntoValue for Result<String, String> {
    fn said(self) -> Result<String, String> {
        self
    }
}

/// All fields, in dmsetup's order.
pub const GROUPS: [FieldGroup; 5] = [
    FieldGroup {
        name: "name_all",
        heading: "Names",
        fields: fields! {
            "name" "Name" 16 Text Device |row: &DeviceRow| row.device.name.clone();
            "mangled_name" "MangledName" 16 Text Device |row: &DeviceRow| mangled(&row.device.name);
            "unmangled_name" "UnmangledName" 16 Text Device |row: &DeviceRow| row.device.name.clone();
            "uuid" "UUID" 32 Text Device uuid;
            "mangled_uuid" "MangledUUID" 32 Text Device |row: &DeviceRow| mangled(&uuid(row));
            "unmangled_uuid" "UnmangledUUID" 32 Text Device uuid;
            // There is none, as of a device of which dmsetup can't find it out.
            "read_ahead" "RAhead" 6 Number Device |_: &DeviceRow| "0".to_owned();
        },
    },
    FieldGroup {
        name: "info_all",
        heading: "State",
        fields: fields! {
            "blkdevname" "BlkDevName" 16 Text Device kernel_node;
            "attr" "Stat" 4 Text Device attr;
            "tables_loaded" "Tables" 6 Text Device |row: &DeviceRow| {
                let text = match (row.device.live_table, row.device.inactive_table) {
                    (true, true) => "Both",
                    (true, false) => "Live",
                    (false, true) => "Inact",
                    (false, false) => "None",
                };
                text.to_owned()
            };
            "suspended" "Suspended" 9 Text Device |row: &DeviceRow| {
                choose(row.device.state == "suspended", "Suspended", "Active")
            };
            "readonly" "Read-only" 9 Text Device |row: &DeviceRow| {
                choose(row.device.read_only, "Read-only", "Writeable")
            };
            "devno" "DevNo" 5 Text Device |row: &DeviceRow| row.device.number.clone();
            "major" "Maj" 3 Number Device |row: &DeviceRow| row.number().0.to_owned();
            "minor" "Min" 3 Number Device |row: &DeviceRow| row.number().1.to_owned();
            "open" "Open" 4 Number Device |row: &DeviceRow| row.device.open_count.to_string();
            "segments" "Targ" 4 Number Device |row: &DeviceRow| row.device.targets.to_string();
            "events" "Event" 6 Number Device |row: &DeviceRow| row.device.event_nr.to_string();
        },
    },
    FieldGroup {
        name: "deps_all",
        heading: "What lies on what",
        fields: fields! {
            "device_count" "#Devs" 5 Number Below |row: &DeviceRow| row.below.len().to_string();
            "devnos_used" "DevNosUsed" 16 Text Below |row: &DeviceRow| {
                list(row.below.iter().map(|below| below.number.as_str()))
            };
            "blkdevs_used" "BlkDevNamesUsed" 16 Text Below |row: &DeviceRow| {
                let names: Vec<_> = row.below.iter().map(super::node_below).collect();
                list(names.iter().map(String::as_str))
            };
        },
    },
    FieldGroup {
        name: "",
        heading: "Names of what lies on what",
        fields: fields! {
            "devs_used" "DevNamesUsed" 16 Text Below |row: &DeviceRow| {
                list(row.below.iter().filter_map(|below| below.uri.strip_prefix('@')))
            };
            "device_ref_count" "#Refs" 5 Number Above |row: &DeviceRow| row.above.len().to_string();
            "names_using_dev" "RefNames" 8 Text Above |row: &DeviceRow| {
                list(row.above.iter().map(|(name, _)| name.as_str()))
            };
            "devnos_using_dev" "RefDevNos" 9 Text Above |row: &DeviceRow| {
                list(row.above.iter().map(|(_, number)| number.as_str()))
            };
        },
    },
    FieldGroup {
        name: "splitname_all",
        heading: "Parts of LVM's names",
        fields: fields! {
            "subsystem" "Subsys" 6 Text Device uuid_subsystem;
            "vg_name" "VG" 4 Text Device |row: &DeviceRow| lvm_name_part(row, 0);
            "lv_name" "LV" 4 Text Device |row: &DeviceRow| lvm_name_part(row, 1);
            "lv_layer" "LVLayer" 7 Text Device |row: &DeviceRow| lvm_name_part(row, 2);
        },
    },
];

fn uuid(row: &DeviceRow) -> String {
    row.device.uuid.clone().unwrap_or_default()
}

fn choose(is: bool, so: &str, otherwise: &str) -> String {
    if is { so } else { otherwise }.to_owned()
}

fn list<'a>(words: impl Iterator<Item = &'a str>) -> String {
    words.collect::<Vec<_>>().join(",")
}

fn attr(row: &DeviceRow) -> String {
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

/// As the kernel names the node of a device.
fn kernel_node(row: &DeviceRow) -> Result<String, String> {
    super::node_of(&row.device)
        .ok_or_else(|| format!("Could not resolve block device name for {}.", row.device.number))
}

/// `text` as dmsetup hands it to a kernel: what is no plain character as `\xHH`.
pub fn mangled(text: &str) -> String {
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

/// What comes before the first hyphen of a uuid.
fn uuid_subsystem(row: &DeviceRow) -> String {
    let uuid = row.device.uuid.as_deref();
    uuid.and_then(|uuid| uuid.split_once('-')).map_or("", |(before, _)| before).to_owned()
}

/// A part of the name of a device of LVM's.
fn lvm_name_part(row: &DeviceRow, place: usize) -> String {
    if uuid_subsystem(row) == "LVM" { split_name(&row.device.name)[place].clone() } else { String::new() }
}

/// Volume group, logical volume and layer: parts of a name between single hyphens, in which a
/// hyphen is doubled.
pub fn split_name(name: &str) -> [String; 3] {
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
        assert_eq!(split_name("vg-lv"), ["vg", "lv", ""]);
        assert_eq!(split_name("a--b-c--d-real"), ["a-b", "c-d", "real"]);
        assert_eq!(split_name("plain"), ["plain", "", ""]);
        assert_eq!(mangled("a b\\ü"), "a\\x20b\\x5c\\xc3\\xbc");
    }
}
