//! Commands for dependencies and lists of names.

use super::misc;
use super::options::OptionName;
use super::session::{CommandError, CommandResult, Session};
use crate::columns::{node_below, node_of};
use crate::verbs::{DeviceTree, TreeGlyphs, TreeStyle, deps_line};
use udm_control::api::{self, verbs};

/// How a device is named in a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NameStyle {
    Number,
    /// A mapped device by its name, any other device by the name of its node.
    Device,
    Node,
}

fn name_style(session: &Session) -> Result<NameStyle, CommandError> {
    match session.value(OptionName::Options) {
        None | Some("devno") => Ok(NameStyle::Number),
        Some("devname") => Ok(NameStyle::Device),
        Some("blkdevname") => Ok(NameStyle::Node),
        Some(other) => Err(CommandError::Line(format!("Option not recognised: {other}."))),
    }
}

/// Runs `dmsetup deps`.
pub fn deps(session: &mut Session, words: &[String]) -> CommandResult {
    let style = name_style(session)?;
    session.each_or_all(words, |session, selector, prefix| {
        let device = session.find(selector, "deps")?;
        let slot = api::SlotQuery::of(session.has(OptionName::Inactive));
        let table = session.client.call(verbs::GET_TABLE.on(&device.number).with(&slot), &());
        let table = session.map_error("deps", selector, table)?;
        if session.has(OptionName::Verbose) {
            session.out += &super::show::describe(session, &device)?;
        }
        let name = |below: &api::Below| match (style, below.uri.strip_prefix('@')) {
            (NameStyle::Number, _) => below.number.replace(':', ", "),
            (NameStyle::Device, Some(name)) => name.to_owned(),
            _ => node_below(below),
        };
        session.out += &deps_line(&table, prefix, name);
        Ok(())
    })
}

/// Runs `dmsetup ls`.
pub fn ls(session: &mut Session, _: &[String]) -> CommandResult {
    if session.has(OptionName::Exec) {
        return misc::unsupported("ls --exec", "there are no device nodes to hand to a command");
    }
    let tree = if session.has(OptionName::Tree) { Some(tree_style(session)?) } else { None };
    let style = if tree.is_none() { name_style(session)? } else { NameStyle::Number };
    let all = session.all()?;
    if all.is_empty() {
        session.out += "No devices found\n";
        return Ok(());
    }
    if let Some(tree) = tree {
        let forest =
            DeviceTree::ask(&session.client, all).map_err(|e| CommandError::Failed(e.to_string()))?;
        session.out += &forest.text(&tree);
        return Ok(());
    }
    for device in all {
        let number = match session.value(OptionName::Target) {
            Some(target) => {
                let table = session.client.call(verbs::GET_TABLE.on(&device.number), &());
                // A device that was removed meanwhile has no targets.
                if !table.is_ok_and(|table| table.lines.iter().any(|line| line.target == target)) {
                    continue;
                }
                device.number.replace(':', ", ")
            }
            None => match (style, node_of(&device)) {
                (NameStyle::Device, Some(_)) => device.name.clone(),
                (NameStyle::Node, Some(node)) => node,
                _ => device.number.clone(),
            },
        };
        session.out += &format!("{}\t({number})\n", device.name);
    }
    Ok(())
}

fn tree_style(session: &Session) -> Result<TreeStyle, CommandError> {
    let mut style = TreeStyle::plain(TreeGlyphs::of_locale());
    for word in session.value(OptionName::Options).unwrap_or_default().split(',') {
        match word {
            "ascii" => style.lines = TreeGlyphs::ASCII,
            "utf" => style.lines = TreeGlyphs::UTF8,
            // `vt100` is for terminals without other line characters.
            "vt100" => style.lines = TreeGlyphs::ASCII,
            "compact" => style.compact = true,
            "inverted" => style.inverted = true,
            "device" => style.number = true,
            "nodevice" => style.number = false,
            "blkdevname" => style.node = true,
            "active" => style.active = true,
            "open" => style.open = true,
            "rw" => style.rw = true,
            "uuid" => style.uuid = true,
            // Lines are never truncated.
            "notrunc" | "" => {}
            other => return Err(CommandError::Line(format!("Tree options not recognised: {other}."))),
        }
    }
    Ok(style)
}
