//! What lies on what: `udm deps` and `udm ls --tree`, as dmsetup prints them.

use super::explain;
use super::show::{NONE, get, list};
use crate::cli::{DepName, DepsArgs, ListArgs};
use crate::output::{say, say_json};
use anyhow::Result;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use udm_control::client::{ClientError, ControlClient, device_path};
use udm_control::http::api;
use udm_core::errno::ENXIO;

pub fn deps(args: &DepsArgs) -> Result<()> {
    let client = args.talk.client()?;
    let all = args.names.is_empty();
    let names = if all { list(&client)?.into_iter().map(|d| d.name).collect() } else { args.names.clone() };
    let rest = if args.inactive { "/table?inactive=1" } else { "/table" };
    let tables = names.iter().map(|name| get::<api::Table>(&client, &device_path(name, rest)));
    let tables = tables.collect::<Result<Vec<_>>>()?;
    if args.print.json {
        return say_json(&tables);
    }
    let mut out = String::new();
    for table in &tables {
        if all || tables.len() > 1 {
            // Writing to a String can't fail.
            let _ = write!(out, "{}: ", table.name);
        }
        let _ = write!(out, "{} dependencies\t:", table.devices.len());
        for below in &table.devices {
            let _ = match args.how {
                DepName::Devno => write!(out, " ({})", below.number.replace(':', ", ")),
                DepName::Devname => write!(out, " ({})", below.uri.strip_prefix('@').unwrap_or(&below.uri)),
            };
        }
        out.push('\n');
    }
    say(if names.is_empty() { NONE } else { &out })
}

/// How deep a tree is shown: tables that change while they are asked for may seem to lie in a
/// circle.
const DEPTH_MAX: usize = 100;

/// The lines of a tree.
struct Lines {
    more: &'static str,
    last: &'static str,
    down: &'static str,
}

const UTF8: Lines = Lines { more: "├─", last: "└─", down: "│  " };
const ASCII: Lines = Lines { more: "|-", last: "`-", down: "|  " };

impl Lines {
    /// As the locale has it, of which the first variable that is set counts.
    fn of_locale() -> &'static Lines {
        let set = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(set).unwrap_or_default();
        let locale = locale.to_ascii_lowercase();
        if locale.ends_with("utf-8") || locale.ends_with("utf8") { &UTF8 } else { &ASCII }
    }
}

/// Major and minor.
type Number = (u32, u32);

/// Devices by number, with what they are called and lie on.
struct Forest(BTreeMap<Number, (String, Vec<Number>)>);

fn number(text: &str) -> Number {
    let (major, minor) = text.split_once(':').unwrap_or((text, ""));
    (major.parse().unwrap_or(0), minor.parse().unwrap_or(0))
}

impl Forest {
    fn ask(client: &ControlClient) -> Result<Forest> {
        let mut all = BTreeMap::new();
        for device in list(client)? {
            let below = match client.get::<api::Table>(&device_path(&device.number, "/table")) {
                Ok(table) => table.devices.iter().map(|below| number(&below.number)).collect(),
                // Gone meanwhile.
                Err(ClientError::Refused(why)) if why.errno == ENXIO.unsigned_abs() => continue,
                Err(error) => return Err(explain(error, None)),
            };
            all.insert(number(&device.number), (device.name, below));
        }
        Ok(Forest(all))
    }

    fn text(&self, lines: &Lines) -> String {
        let below: BTreeSet<_> = self.0.values().flat_map(|(_, below)| below).copied().collect();
        let mut out = String::new();
        for (&root, _) in self.0.iter().filter(|(number, _)| !below.contains(number)) {
            self.write(root, ("", ""), 0, lines, &mut out);
        }
        out
    }

    /// `at` and what it lies on, `depth` below a root, with `before` in front of its own line and
    /// `under` in front of theirs.
    fn write(
        &self,
        at: Number,
        (before, under): (&str, &str),
        depth: usize,
        lines: &Lines,
        out: &mut String,
    ) {
        let (name, below) = self.0.get(&at).map_or(("", [].as_slice()), |(name, below)| (name, below));
        // Writing to a String can't fail.
        let _ = writeln!(out, "{before}{name} ({}:{})", at.0, at.1);
        // What lies on a root is a column further in.
        let under = if depth == 0 { " " } else { under };
        let below = if depth < DEPTH_MAX { below } else { &[] };
        for (place, &next) in below.iter().enumerate() {
            let (line, further) =
                if place + 1 < below.len() { (lines.more, lines.down) } else { (lines.last, "   ") };
            let (line, further) = (format!("{under}{line}"), format!("{under}{further}"));
            self.write(next, (&line, &further), depth + 1, lines, out);
        }
    }
}

/// What lies on what, from the top, by number.
pub fn ls(args: &ListArgs) -> Result<()> {
    let forest = Forest::ask(&args.talk.client()?)?;
    say(&if forest.0.is_empty() { NONE.to_owned() } else { forest.text(Lines::of_locale()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_has_dmsetups_lines() {
        let device = |minor, name: &str, below: &[Number]| ((254, minor), (name.to_owned(), below.to_vec()));
        let all = [
            device(0, "base", &[(253, 0)]),
            device(1, "mp", &[(254, 0), (253, 1)]),
            device(2, "top", &[(254, 1), (254, 0)]),
            device(3, "alone", &[]),
        ];
        let text = Forest(all.into()).text(&UTF8);
        let wanted = "top (254:2)\n ├─mp (254:1)\n │  ├─base (254:0)\n │  │  └─ (253:0)\n │  └─ (253:1)\n \
                      └─base (254:0)\n    └─ (253:0)\nalone (254:3)\n";
        assert_eq!(text, wanted);
        // In a circle nothing is a root; below one it comes to an end.
        let circle = [device(0, "a", &[(254, 1)]), device(1, "b", &[(254, 0)]), device(2, "c", &[(254, 0)])];
        assert_eq!(Forest(circle.into()).text(&ASCII).lines().count(), DEPTH_MAX + 1);
    }
}
