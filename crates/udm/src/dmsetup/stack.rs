//! Commands for dependencies and lists of names.

use super::misc;
use super::options::DmsetupOption;
use super::session::{DmsetupError, DmsetupInvocation, DmsetupResult};
use crate::columns::{dm_node_name, underlying_device_node_name};
use crate::verbs::{DeviceTree, TreeGlyphs, TreePrintOptions, deps_line};
use udm_control::api::{self, verbs};

/// How a device is named in a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DmsetupNameStyle {
    Number,
    /// A mapped device by its name, any other device by the name of its node.
    Device,
    Node,
}

fn parse_dmsetup_name_style(session: &DmsetupInvocation) -> Result<DmsetupNameStyle, DmsetupError> {
    match session.value(DmsetupOption::Options) {
        None | Some("devno") => Ok(DmsetupNameStyle::Number),
        Some("devname") => Ok(DmsetupNameStyle::Device),
        Some("blkdevname") => Ok(DmsetupNameStyle::Node),
        Some(other) => Err(DmsetupError::Line(format!("Option not recognised: {other}."))),
    }
}

/// Runs `dmsetup deps`.
pub fn run_dmsetup_deps(session: &mut DmsetupInvocation, words: &[String]) -> DmsetupResult {
    let style = parse_dmsetup_name_style(session)?;
    session.each_or_all(words, |session, selector, prefix| {
        let device = session.find(selector, "deps")?;
        let slot = api::TableSlotQuery::of(session.has(DmsetupOption::Inactive));
        let table = session.client.call(verbs::GET_TABLE.on(&device.number).with(&slot), &());
        let table = session.map_error("deps", selector, table)?;
        if session.has(DmsetupOption::Verbose) {
            session.out += &super::show::format_dmsetup_info(session, &device)?;
        }
        let name = |below: &api::UnderlyingDevice| match (style, below.uri.strip_prefix('@')) {
            (DmsetupNameStyle::Number, _) => below.number.replace(':', ", "),
            (DmsetupNameStyle::Device, Some(name)) => name.to_owned(),
            _ => underlying_device_node_name(below),
        };
        session.out += &deps_line(&table, prefix, name);
        Ok(())
    })
}

/// Runs `dmsetup ls`.
pub fn run_dmsetup_ls(session: &mut DmsetupInvocation, _: &[String]) -> DmsetupResult {
    if session.has(DmsetupOption::Exec) {
        return misc::fail_unsupported_feature("ls --exec", "there are no device nodes to hand to a command");
    }
    let tree = if session.has(DmsetupOption::Tree) { Some(tree_style(session)?) } else { None };
    let style = if tree.is_none() { parse_dmsetup_name_style(session)? } else { DmsetupNameStyle::Number };
    let all = session.all()?;
    if all.is_empty() {
        session.out += "No devices found\n";
        return Ok(());
    }
    if let Some(tree) = tree {
        let forest =
            DeviceTree::ask(&session.client, all).map_err(|e| DmsetupError::Failed(e.to_string()))?;
        session.out += &forest.text(&tree);
        return Ok(());
    }
    for device in all {
        let number = match session.value(DmsetupOption::Target) {
            Some(target) => {
                let table = session.client.call(verbs::GET_TABLE.on(&device.number), &());
                // A device that was removed meanwhile has no targets.
                if !table.is_ok_and(|table| table.lines.iter().any(|line| line.target == target)) {
                    continue;
                }
                device.number.replace(':', ", ")
            }
            None => match (style, dm_node_name(&device)) {
                (DmsetupNameStyle::Device, Some(_)) => device.name.clone(),
                (DmsetupNameStyle::Node, Some(node)) => node,
                _ => device.number.clone(),
            },
        };
        session.out += &format!("{}\t({number})\n", device.name);
    }
    Ok(())
}

fn tree_style(session: &DmsetupInvocation) -> Result<TreePrintOptions, DmsetupError> {
    let mut style = TreePrintOptions::plain(TreeGlyphs::of_locale());
    for word in session.value(DmsetupOption::Options).unwrap_or_default().split(',') {
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
            other => return Err(DmsetupError::Line(format!("Tree options not recognised: {other}."))),
        }
    }
    Ok(style)
}
