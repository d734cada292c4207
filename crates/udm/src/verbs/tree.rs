//! Dependencies of devices: `udm deps` and `udm ls --tree`, in dmsetup's format.

use super::show::{NONE, fetch_all_devices, fetch_tables_of_devices};
use crate::args::{OutputFormatArgs, ServerArgs, SharedListArgs};
use crate::columns::{dm_node_name, underlying_device_node_name};
use crate::output::{print_json_to_stdout, print_to_stdout};
use crate::requests::{all_tables, explain_client_error};
use anyhow::Result;
use clap::{Args, ValueEnum};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write as _;
use udm_control::api;
use udm_control::client::{ControlClient, ControlClientError};

/// The arguments of `udm deps`.
#[derive(Debug, Args)]
pub struct DepsArgs {
    #[command(flatten)]
    pub server: ServerArgs,
    #[command(flatten)]
    pub print: OutputFormatArgs,
    /// How the devices below are named
    #[arg(short = 'o', long = "options", value_name = "HOW", default_value = "devno")]
    pub how: DepsNameStyle,
    /// Use the table in the inactive slot
    #[arg(long)]
    pub inactive: bool,
    /// The devices [default: all]
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,
}

/// How a device is named in a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DepsNameStyle {
    /// By its number
    Devno,
    /// By its name; a device that is not a mapped device by its URI
    Devname,
}

/// The text for a device below a table.
pub fn dependency_name(below: &api::UnderlyingDevice, how: DepsNameStyle) -> String {
    match how {
        DepsNameStyle::Devno => below.number.replace(':', ", "),
        DepsNameStyle::Devname => below.uri.strip_prefix('@').unwrap_or(&below.uri).to_owned(),
    }
}

pub fn run_deps_command(args: &DepsArgs) -> Result<()> {
    let tables = fetch_tables_of_devices(&args.server.client()?, &args.names, args.inactive)?;
    if args.print.json {
        return print_json_to_stdout(&tables);
    }
    let prefix = args.names.len() != 1;
    let how = |below: &api::UnderlyingDevice| dependency_name(below, args.how);
    let out: String = tables.iter().map(|table| deps_line(table, prefix, how)).collect();
    print_to_stdout(if tables.is_empty() { NONE } else { &out })
}

/// The line of `dmsetup deps` for a table.
pub fn deps_line(
    table: &api::TableDescription,
    prefix: bool,
    how: impl Fn(&api::UnderlyingDevice) -> String,
) -> String {
    let prefix = if prefix { format!("{}: ", table.name) } else { String::new() };
    let below: String = table.devices.iter().map(|below| format!(" ({})", how(below))).collect();
    format!("{prefix}{} dependencies\t:{below}\n", table.devices.len())
}

/// Maximum depth of a printed tree. Tables that change between the requests may seem to form a
/// cycle.
const DEPTH_MAX: usize = 100;

/// The line drawing texts of a tree.
#[derive(Debug, Clone, Copy)]
pub struct TreeGlyphs {
    more: &'static str,
    last: &'static str,
    down: &'static str,
    /// Texts of the compact form: to an only child, and to the first of several children.
    only: &'static str,
    first: &'static str,
}

impl TreeGlyphs {
    /// Glyphs in UTF-8.
    pub const UTF8: TreeGlyphs =
        TreeGlyphs { more: "├─", last: "└─", down: "│ ", only: "───", first: "─┬─" };
    /// Glyphs in ASCII.
    pub const ASCII: TreeGlyphs =
        TreeGlyphs { more: "|-", last: "`-", down: "| ", only: "---", first: "-+-" };

    /// The glyphs for the locale: that of the first variable that is set.
    pub fn of_locale() -> TreeGlyphs {
        let set = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(set).unwrap_or_default();
        let locale = locale.to_ascii_lowercase();
        if locale.ends_with("utf-8") || locale.ends_with("utf8") {
            TreeGlyphs::UTF8
        } else {
            TreeGlyphs::ASCII
        }
    }
}

/// The shape of a tree, and the fields that it shows of each device.
#[derive(Debug, Clone, Copy)]
pub struct TreePrintOptions {
    pub lines: TreeGlyphs,
    /// The devices without dependencies are the roots.
    pub inverted: bool,
    /// The first child is on the line of its parent.
    pub compact: bool,
    /// Fields to show: the device number, the kernel's node name, the state, read-only or
    /// read-write, the open count, the uuid.
    pub number: bool,
    pub node: bool,
    pub active: bool,
    pub rw: bool,
    pub open: bool,
    pub uuid: bool,
}

impl TreePrintOptions {
    /// The default style of `ls --tree`.
    pub fn plain(lines: TreeGlyphs) -> TreePrintOptions {
        TreePrintOptions {
            lines,
            inverted: false,
            compact: false,
            number: true,
            node: false,
            active: false,
            rw: false,
            open: false,
            uuid: false,
        }
    }

    /// The text of one device.
    fn text(&self, number: DevNumber, one: &TreeNode) -> String {
        let mut out = one.device.as_ref().map_or_else(String::new, |device| device.name.clone());
        if let Some(node) = one.node.as_ref().filter(|_| self.node) {
            // Writing to a String can't fail.
            let _ = write!(out, " <{node}>");
        }
        if self.number {
            let _ = write!(out, " ({}:{})", number.0, number.1);
        }
        if let Some(device) = one.device.as_ref().filter(|_| self.active || self.rw || self.open || self.uuid)
        {
            let open = device.open_count.to_string();
            let all = [
                (self.active, if device.state == "suspended" { "SUSPENDED" } else { "ACTIVE" }),
                (self.rw, if device.read_only { "RO" } else { "RW" }),
                (self.open, &open),
                (self.uuid, device.uuid.as_deref().unwrap_or_default()),
            ];
            let all: Vec<_> = all.iter().filter(|(is, _)| *is).map(|(_, text)| *text).collect();
            let _ = write!(out, " [{}]", all.join(", "));
        }
        out
    }
}

/// Major and minor number.
type DevNumber = (u32, u32);

/// A node of a tree: a mapped device, or a device below one.
struct TreeNode {
    device: Option<api::DeviceDescription>,
    node: Option<String>,
    next: Vec<DevNumber>,
}

/// Devices by number, and the order in which they are shown.
pub struct DeviceTree {
    all: BTreeMap<DevNumber, TreeNode>,
    order: Vec<DevNumber>,
}

fn parse_device_number(text: &str) -> DevNumber {
    let (major, minor) = text.split_once(':').unwrap_or((text, ""));
    (major.parse().unwrap_or(0), minor.parse().unwrap_or(0))
}

impl DeviceTree {
    /// Reads the tables and builds the forest of `devices`, in their order.
    ///
    /// # Errors
    /// The server refused a request or cannot be reached.
    pub fn ask(
        client: &ControlClient,
        devices: Vec<api::DeviceDescription>,
    ) -> Result<DeviceTree, ControlClientError> {
        let tables = all_tables(client)?.into_iter().map(|table| (table.number, table.devices));
        let mut tables: HashMap<_, _> = tables.collect();
        // Devices that were removed meanwhile are left out.
        let there = devices.into_iter().filter_map(|device| {
            let below = tables.remove(&device.number)?;
            Some((device, below))
        });
        Ok(DeviceTree::of(there.collect()))
    }

    fn of(devices: Vec<(api::DeviceDescription, Vec<api::UnderlyingDevice>)>) -> DeviceTree {
        let mut forest = DeviceTree { all: BTreeMap::new(), order: Vec::new() };
        for (device, below) in devices {
            let own = parse_device_number(&device.number);
            let node = dm_node_name(&device);
            let next = below.iter().map(|below| parse_device_number(&below.number)).collect();
            let device = Some(device);
            if forest.all.insert(own, TreeNode { device, node, next }).is_none() {
                forest.order.push(own);
            }
            for below in below {
                let lies_on = parse_device_number(&below.number);
                forest.all.entry(lies_on).or_insert_with(|| {
                    forest.order.push(lies_on);
                    TreeNode {
                        device: None,
                        node: Some(underlying_device_node_name(&below)),
                        next: Vec::new(),
                    }
                });
            }
        }
        forest
    }

    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Reverses all edges, so that the lowest devices become roots.
    fn inverted(mut self) -> DeviceTree {
        let mut above: BTreeMap<DevNumber, Vec<DevNumber>> = BTreeMap::new();
        for from in &self.order {
            for to in &self.all[from].next {
                above.entry(*to).or_default().push(*from);
            }
        }
        for (number, one) in &mut self.all {
            one.next = above.remove(number).unwrap_or_default();
        }
        self
    }

    /// The lines of all trees.
    #[must_use]
    pub fn text(mut self, style: &TreePrintOptions) -> String {
        if style.inverted {
            self = self.inverted();
        }
        let reached: BTreeSet<_> = self.all.values().flat_map(|one| &one.next).copied().collect();
        let mut out = String::new();
        let roots = self.order.iter().filter(|number| !reached.contains(number));
        for &root in roots.filter(|root| self.is_shown(**root, style)) {
            self.write(root, "", 0, style, &mut out);
        }
        out
    }

    /// True if the device has a text; devices without one are left out.
    fn is_shown(&self, number: DevNumber, style: &TreePrintOptions) -> bool {
        style.number || self.all[&number].device.is_some()
    }

    /// Writes the device `at` and its children, at `depth` below a root. All lines except the first
    /// begin with `under`.
    fn write(&self, at: DevNumber, under: &str, depth: usize, style: &TreePrintOptions, out: &mut String) {
        let one = &self.all[&at];
        let text = style.text(at, one);
        out.push_str(&text);
        let next = if depth < DEPTH_MAX { &one.next[..] } else { &[] };
        let next: Vec<_> = next.iter().copied().filter(|next| self.is_shown(*next, style)).collect();
        // Children are indented by one column, or in the compact form by the width of the text.
        let indent = match (style.compact, depth) {
            (true, _) => " ".repeat(text.chars().count() + 1),
            (false, 0) => " ".to_owned(),
            (false, _) => String::new(),
        };
        let behind = if style.compact { "" } else { " " };
        let lines = &style.lines;
        if !style.compact || next.is_empty() {
            out.push('\n');
        }
        for (place, &number) in next.iter().enumerate() {
            let is_last = place + 1 == next.len();
            match (style.compact && place == 0, is_last) {
                (true, true) => out.push_str(lines.only),
                (true, false) => out.push_str(lines.first),
                (false, _) => {
                    out.push_str(under);
                    out.push_str(&indent);
                    out.push_str(if is_last { lines.last } else { lines.more });
                }
            }
            let further = format!("{under}{indent}{}{behind}", if is_last { "  " } else { lines.down });
            self.write(number, &further, depth + 1, style, out);
        }
    }
}

/// Prints all devices as trees from the top, in the order of their numbers.
pub fn run_ls_tree_command(args: &SharedListArgs) -> Result<()> {
    let client = args.server.client()?;
    let forest =
        DeviceTree::ask(&client, fetch_all_devices(&client)?).map_err(|e| explain_client_error(e, None))?;
    let style = TreePrintOptions::plain(TreeGlyphs::of_locale());
    print_to_stdout(&if forest.is_empty() { NONE.to_owned() } else { forest.text(&style) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(
        minor: u32,
        name: &str,
        below: &[DevNumber],
    ) -> (api::DeviceDescription, Vec<api::UnderlyingDevice>) {
        let number = format!("254:{minor}");
        let below = below.iter().map(|(major, minor)| {
            let number = format!("{major}:{minor}");
            api::UnderlyingDevice { uri: if *major == 254 { "@".into() } else { "mem:1M".into() }, number }
        });
        (
            api::DeviceDescription { name: name.into(), number, ..api::DeviceDescription::default() },
            below.collect(),
        )
    }

    #[test]
    fn a_tree_has_dmsetups_lines() {
        let all = || {
            DeviceTree::of(vec![
                device(0, "base", &[(253, 0)]),
                device(1, "mp", &[(254, 0), (253, 1)]),
                device(2, "top", &[(254, 1), (254, 0)]),
                device(3, "alone", &[]),
            ])
        };
        let expected = "top (254:2)\n ├─mp (254:1)\n │  ├─base (254:0)\n │  │  └─ (253:0)\n │  └─ (253:1)\n \
                      └─base (254:0)\n    └─ (253:0)\nalone (254:3)\n";
        assert_eq!(all().text(&TreePrintOptions::plain(TreeGlyphs::UTF8)), expected);
        let compact = TreePrintOptions { compact: true, ..TreePrintOptions::plain(TreeGlyphs::ASCII) };
        let expected = "top (254:2)-+-mp (254:1)-+-base (254:0)--- (253:0)\n            |            `- (253:1)\n            \
                      `-base (254:0)--- (253:0)\nalone (254:3)\n";
        assert_eq!(all().text(&compact), expected);
        // A cycle has no root; below a root the depth limit ends it.
        let circle =
            vec![device(0, "a", &[(254, 1)]), device(1, "b", &[(254, 0)]), device(2, "c", &[(254, 0)])];
        let text = DeviceTree::of(circle).text(&TreePrintOptions::plain(TreeGlyphs::ASCII));
        assert_eq!(text.lines().count(), DEPTH_MAX + 1);
    }
}
