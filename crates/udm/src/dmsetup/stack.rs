//! What lies on what, and lists of names.

use super::misc;
use super::options::Name;
use super::session::{CommandError, CommandResult, NegotiatedSession};
use crate::columns::{node_below, node_of};
use crate::verbs::{DeviceTree, TreeGlyphs, TreeStyle, deps_line};
use udm_control::api::{self, verbs};

/// How a device is named in a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NameStyle {
    Number,
    /// A mapped device by its name, another by that of its node.
    Device,
    Node,
}

fn name_style(face: &NegotiatedSession) -> Result<NameStyle, CommandError> {
    match face.value(Name::Options) {
        None | Some("devno") => Ok(NameStyle::Number),
        Some("devname") => Ok(NameStyle::Device),
        Some("blkdevname") => Ok(NameStyle::Node),
        Some(other) => Err(CommandError::Line(format!("Option not recognised: {other}."))),
    }
}

/// `dmsetup deps`.
pub fn deps(face: &mut NegotiatedSession, words: &[String]) -> CommandResult {
    let name_style = name_style(face)?;
    face.each_or_all(words, |face, which, prefix| {
        let device = face.find(which, "deps")?;
        let slot = api::SlotQuery::of(face.has(Name::Inactive));
        let table = face.client.call(verbs::GET_TABLE.on(&device.number).with(&slot), &());
        let table = face.map_error_of("deps", which, table)?;
        if face.has(Name::Verbose) {
            face.out += &super::show::describe(face, &device)?;
        }
        let name = |below: &api::Below| match (name_style, below.uri.strip_prefix('@')) {
            (NameStyle::Number, _) => below.number.replace(':', ", "),
            (NameStyle::Device, Some(name)) => name.to_owned(),
            _ => node_below(below),
        };
        face.out += &deps_line(&table, prefix, name);
        Ok(())
    })
}

/// `dmsetup ls`.
pub fn ls(face: &mut NegotiatedSession, _: &[String]) -> CommandResult {
    if face.has(Name::Exec) {
        return misc::unsupported("ls --exec", "there are no device nodes to hand to a command");
    }
    let tree_style = if face.has(Name::Tree) { Some(tree_style(face)?) } else { None };
    let name_style = if tree_style.is_none() { name_style(face)? } else { NameStyle::Number };
    let all = face.all()?;
    if all.is_empty() {
        face.out += "No devices found\n";
        return Ok(());
    }
    if let Some(tree_style) = tree_style {
        let forest = DeviceTree::ask(&face.client, all).map_err(|e| CommandError::Failed(e.to_string()))?;
        face.out += &forest.text(&tree_style);
        return Ok(());
    }
    for device in all {
        let number = match face.value(Name::Target) {
            Some(target) => {
                let table = face.client.call(verbs::GET_TABLE.on(&device.number), &());
                // One that is gone meanwhile has no targets.
                if !table.is_ok_and(|table| table.lines.iter().any(|line| line.target == target)) {
                    continue;
                }
                device.number.replace(':', ", ")
            }
            None => match (name_style, node_of(&device)) {
                (NameStyle::Device, Some(_)) => device.name.clone(),
                (NameStyle::Node, Some(node)) => node,
                _ => device.number.clone(),
            },
        };
        face.out += &format!("{}\t({number})\n", device.name);
    }
    Ok(())
}

fn tree_style(face: &NegotiatedSession) -> Result<TreeStyle, CommandError> {
    let mut tree_style = TreeStyle::plain(TreeGlyphs::of_locale());
    for word in face.value(Name::Options).unwrap_or_default().split(',') {
        match word {
            "ascii" => tree_style.lines = TreeGlyphs::ASCII,
            "utf" => tree_style.lines = TreeGlyphs::UTF8,
            // It was for terminals that had no other lines.
            "vt100" => tree_style.lines = TreeGlyphs::ASCII,
            "compact" => tree_style.compact = true,
            "inverted" => tree_style.inverted = true,
            "device" => tree_style.number = true,
            "nodevice" => tree_style.number = false,
            "blkdevname" => tree_style.node = true,
            "active" => tree_style.active = true,
            "open" => tree_style.open = true,
            "rw" => tree_style.rw = true,
            "uuid" => tree_style.uuid = true,
            // Lines are never cut.
            "notrunc" | "" => {}
            other => return Err(CommandError::Line(format!("Tree options not recognised: {other}."))),
        }
    }
    Ok(tree_style)
}
