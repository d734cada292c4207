//! What lies on what: `udm deps` and `ls --tree`, as dmsetup prints them.

use super::explain;
use super::show::{NONE, all_tables, list, tables};
use crate::cli::{DepName, DepsArgs, ListArgs};
use crate::columns::{node_below, node_of};
use crate::output::{say, say_json};
use anyhow::Result;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write as _;
use udm_control::api;
use udm_control::client::{ClientError, ControlClient};

/// How what a table lies on is named.
pub fn dependency_name(below: &api::Below, how: DepName) -> String {
    match how {
        DepName::Devno => below.number.replace(':', ", "),
        DepName::Devname => below.uri.strip_prefix('@').unwrap_or(&below.uri).to_owned(),
    }
}

pub fn deps(args: &DepsArgs) -> Result<()> {
    let tables = tables(&args.talk.client()?, &args.names, args.inactive)?;
    if args.print.json {
        return say_json(&tables);
    }
    let prefix = args.names.len() != 1;
    let how = |below: &api::Below| dependency_name(below, args.how);
    let out: String = tables.iter().map(|table| deps_line(table, prefix, how)).collect();
    say(if tables.is_empty() { NONE } else { &out })
}

/// The line of `dmsetup deps` about a table.
pub fn deps_line(table: &api::Table, prefix: bool, how: impl Fn(&api::Below) -> String) -> String {
    let prefix = if prefix { format!("{}: ", table.name) } else { String::new() };
    let below: String = table.devices.iter().map(|below| format!(" ({})", how(below))).collect();
    format!("{prefix}{} dependencies\t:{below}\n", table.devices.len())
}

/// How deep a tree is shown: tables that change while they are asked for may seem to lie in a
/// circle.
const DEPTH_MAX: usize = 100;

/// The lines of a tree.
#[derive(Debug, Clone, Copy)]
pub struct TreeGlyphs {
    more: &'static str,
    last: &'static str,
    down: &'static str,
    /// To an only one, and to the first of several, on one line.
    only: &'static str,
    first: &'static str,
}

impl TreeGlyphs {
    /// In UTF-8.
    pub const UTF8: TreeGlyphs =
        TreeGlyphs { more: "├─", last: "└─", down: "│ ", only: "───", first: "─┬─" };
    /// In ASCII.
    pub const ASCII: TreeGlyphs =
        TreeGlyphs { more: "|-", last: "`-", down: "| ", only: "---", first: "-+-" };

    /// As the locale has it, of which the first variable that is set counts.
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

/// How a tree is shown, and what of each device.
#[derive(Debug, Clone, Copy)]
pub struct TreeStyle {
    pub lines: TreeGlyphs,
    /// What lies on nothing is on the left.
    pub inverted: bool,
    /// What fits on one line is on one line.
    pub compact: bool,
    /// The number, the name of the node, the state, whether it can be written to, who has it open,
    /// the uuid.
    pub number: bool,
    pub node: bool,
    pub active: bool,
    pub rw: bool,
    pub open: bool,
    pub uuid: bool,
}

impl TreeStyle {
    /// As `ls --tree` shows it when nothing else is said.
    pub fn plain(lines: TreeGlyphs) -> TreeStyle {
        TreeStyle {
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

    /// What stands for a device.
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

/// Major and minor.
type DevNumber = (u32, u32);

/// A device of a tree: a mapped one, or one that it lies on.
struct TreeNode {
    device: Option<api::Device>,
    node: Option<String>,
    next: Vec<DevNumber>,
}

/// Devices by number, and in the order in which they are shown.
pub struct DeviceTree {
    all: BTreeMap<DevNumber, TreeNode>,
    order: Vec<DevNumber>,
}

fn number(text: &str) -> DevNumber {
    let (major, minor) = text.split_once(':').unwrap_or((text, ""));
    (major.parse().unwrap_or(0), minor.parse().unwrap_or(0))
}

impl DeviceTree {
    /// The forest of `devices`, in their order.
    ///
    /// # Errors
    /// What the server or the connection to it says.
    pub fn ask(client: &ControlClient, devices: Vec<api::Device>) -> Result<DeviceTree, ClientError> {
        let tables = all_tables(client)?.into_iter().map(|table| (table.number, table.devices));
        let mut tables: HashMap<_, _> = tables.collect();
        // Without those that are gone meanwhile.
        let there = devices.into_iter().filter_map(|device| {
            let below = tables.remove(&device.number)?;
            Some((device, below))
        });
        Ok(DeviceTree::of(there.collect()))
    }

    fn of(devices: Vec<(api::Device, Vec<api::Below>)>) -> DeviceTree {
        let mut forest = DeviceTree { all: BTreeMap::new(), order: Vec::new() };
        for (device, below) in devices {
            let own = number(&device.number);
            let node = node_of(&device);
            let next = below.iter().map(|below| number(&below.number)).collect();
            let device = Some(device);
            if forest.all.insert(own, TreeNode { device, node, next }).is_none() {
                forest.order.push(own);
            }
            for below in below {
                let lies_on = number(&below.number);
                forest.all.entry(lies_on).or_insert_with(|| {
                    forest.order.push(lies_on);
                    TreeNode { device: None, node: Some(node_below(&below)), next: Vec::new() }
                });
            }
        }
        forest
    }

    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// From what lies on nothing to what lies on it.
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
    pub fn text(mut self, looks: &TreeStyle) -> String {
        if looks.inverted {
            self = self.inverted();
        }
        let reached: BTreeSet<_> = self.all.values().flat_map(|one| &one.next).copied().collect();
        let mut out = String::new();
        let roots = self.order.iter().filter(|number| !reached.contains(number));
        for &root in roots.filter(|root| self.is_shown(**root, looks)) {
            self.write(root, "", 0, looks, &mut out);
        }
        out
    }

    /// What would have no text at all is left out.
    fn is_shown(&self, number: DevNumber, looks: &TreeStyle) -> bool {
        looks.number || self.all[&number].device.is_some()
    }

    /// `at` and what follows it, `depth` behind a root, with `under` in front of all lines but its
    /// own.
    fn write(&self, at: DevNumber, under: &str, depth: usize, looks: &TreeStyle, out: &mut String) {
        let one = &self.all[&at];
        let text = looks.text(at, one);
        out.push_str(&text);
        let next = if depth < DEPTH_MAX { &one.next[..] } else { &[] };
        let next: Vec<_> = next.iter().copied().filter(|next| self.is_shown(*next, looks)).collect();
        // What follows is a column further in, or behind the text.
        let indent = match (looks.compact, depth) {
            (true, _) => " ".repeat(text.chars().count() + 1),
            (false, 0) => " ".to_owned(),
            (false, _) => String::new(),
        };
        let behind = if looks.compact { "" } else { " " };
        let lines = &looks.lines;
        if !looks.compact || next.is_empty() {
            out.push('\n');
        }
        for (place, &number) in next.iter().enumerate() {
            let is_last = place + 1 == next.len();
            match (looks.compact && place == 0, is_last) {
                (true, true) => out.push_str(lines.only),
                (true, false) => out.push_str(lines.first),
                (false, _) => {
                    out.push_str(under);
                    out.push_str(&indent);
                    out.push_str(if is_last { lines.last } else { lines.more });
                }
            }
            let further = format!("{under}{indent}{}{behind}", if is_last { "  " } else { lines.down });
            self.write(number, &further, depth + 1, looks, out);
        }
    }
}

/// What lies on what, from the top, by number.
pub fn ls(args: &ListArgs) -> Result<()> {
    let client = args.talk.client()?;
    let forest = DeviceTree::ask(&client, list(&client)?).map_err(|e| explain(e, None))?;
    let looks = TreeStyle::plain(TreeGlyphs::of_locale());
    say(&if forest.is_empty() { NONE.to_owned() } else { forest.text(&looks) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(minor: u32, name: &str, below: &[DevNumber]) -> (api::Device, Vec<api::Below>) {
        let number = format!("254:{minor}");
        let below = below.iter().map(|(major, minor)| {
            let number = format!("{major}:{minor}");
            api::Below { uri: if *major == 254 { "@".into() } else { "mem:1M".into() }, number }
        });
        (api::Device { name: name.into(), number, ..api::Device::default() }, below.collect())
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
        let wanted = "top (254:2)\n ├─mp (254:1)\n │  ├─base (254:0)\n │  │  └─ (253:0)\n │  └─ (253:1)\n \
                      └─base (254:0)\n    └─ (253:0)\nalone (254:3)\n";
        assert_eq!(all().text(&TreeStyle::plain(TreeGlyphs::UTF8)), wanted);
        let compact = TreeStyle { compact: true, ..TreeStyle::plain(TreeGlyphs::ASCII) };
        let wanted = "top (254:2)-+-mp (254:1)-+-base (254:0)--- (253:0)\n            |            `- (253:1)\n            \
                      `-base (254:0)--- (253:0)\nalone (254:3)\n";
        assert_eq!(all().text(&compact), wanted);
        // In a circle nothing is a root; below one it comes to an end.
        let circle =
            vec![device(0, "a", &[(254, 1)]), device(1, "b", &[(254, 0)]), device(2, "c", &[(254, 0)])];
        let text = DeviceTree::of(circle).text(&TreeStyle::plain(TreeGlyphs::ASCII));
        assert_eq!(text.lines().count(), DEPTH_MAX + 1);
    }
}
