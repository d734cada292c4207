//! What lies on what, and lists of names.

use super::face::{Done, Face, Failure};
use super::options::Name;
use super::small;
use crate::columns::{node_below, node_of};
use crate::verbs::{Forest, Lines, Looks, dependencies};
use udm_control::client::device_path;
use udm_control::http::api;

/// How a device is named in a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    Number,
    /// A mapped device by its name, another by that of its node.
    Device,
    Node,
}

fn how(face: &Face) -> Result<How, Failure> {
    match face.value(Name::Options) {
        None | Some("devno") => Ok(How::Number),
        Some("devname") => Ok(How::Device),
        Some("blkdevname") => Ok(How::Node),
        Some(other) => Err(Failure::Line(format!("Option not recognised: {other}."))),
    }
}

/// `dmsetup deps`.
pub fn deps(face: &mut Face, words: &[String]) -> Done {
    let how = how(face)?;
    face.each_or_all(words, |face, which, prefix| {
        let device = face.find(which, "deps")?;
        let path = if face.has(Name::Inactive) { "/table?inactive=1" } else { "/table" };
        let table = face.client.get::<api::Table>(&device_path(&device.number, path));
        let table = face.said_of("deps", which, table)?;
        if face.has(Name::Verbose) {
            face.out += &super::show::describe(face, &device)?;
        }
        let name = |below: &api::Below| match (how, below.uri.strip_prefix('@')) {
            (How::Number, _) => below.number.replace(':', ", "),
            (How::Device, Some(name)) => name.to_owned(),
            _ => node_below(below),
        };
        face.out += &dependencies(&table, prefix, name);
        Ok(())
    })
}

/// `dmsetup ls`.
pub fn ls(face: &mut Face, _: &[String]) -> Done {
    if face.has(Name::Exec) {
        return small::none("ls --exec", "there are no device nodes to hand to a command");
    }
    let looks = if face.has(Name::Tree) { Some(looks(face)?) } else { None };
    let how = if looks.is_none() { how(face)? } else { How::Number };
    let all = face.all()?;
    if all.is_empty() {
        face.out += "No devices found\n";
        return Ok(());
    }
    if let Some(looks) = looks {
        let forest = Forest::ask(&face.client, all).map_err(|e| Failure::Failed(e.to_string()))?;
        face.out += &forest.text(&looks);
        return Ok(());
    }
    for device in all {
        let number = match face.value(Name::Target) {
            Some(target) => {
                let table = face.client.get::<api::Table>(&device_path(&device.number, "/table"));
                // One that is gone meanwhile has no targets.
                if !table.is_ok_and(|table| table.lines.iter().any(|line| line.target == target)) {
                    continue;
                }
                device.number.replace(':', ", ")
            }
            None => match (how, node_of(&device)) {
                (How::Device, Some(_)) => device.name.clone(),
                (How::Node, Some(node)) => node,
                _ => device.number.clone(),
            },
        };
        face.out += &format!("{}\t({number})\n", device.name);
    }
    Ok(())
}

fn looks(face: &Face) -> Result<Looks, Failure> {
    let mut looks = Looks::plain(Lines::of_locale());
    for word in face.value(Name::Options).unwrap_or_default().split(',') {
        match word {
            "ascii" => looks.lines = Lines::ASCII,
            "utf" => looks.lines = Lines::UTF8,
            // It was for terminals that had no other lines.
            "vt100" => looks.lines = Lines::ASCII,
            "compact" => looks.compact = true,
            "inverted" => looks.inverted = true,
            "device" => looks.number = true,
            "nodevice" => looks.number = false,
            "blkdevname" => looks.node = true,
            "active" => looks.active = true,
            "open" => looks.open = true,
            "rw" => looks.rw = true,
            "uuid" => looks.uuid = true,
            // Lines are never cut.
            "notrunc" | "" => {}
            other => return Err(Failure::Line(format!("Tree options not recognised: {other}."))),
        }
    }
    Ok(looks)
}
