//! Builds targets from table lines: order, lengths, types, and types that must be alone.

use super::TableEntry;
use crate::error::TargetError;
use crate::target::{DeviceNameResolver, TargetArgs, TargetType};
use udm_core::{ControlIo, Sector, Sectors};
use udm_wire::table::TableLine;

/// The end of the largest device, in sectors (kernel: 2^63 - 1 bytes).
const END_MAX: u64 = (1 << 54) - 1;

/// The targets of `lines`. Checks run in the kernel's order (`dm_table_add_target`).
pub(super) fn build_table_entries(
    types: &[TargetType],
    lines: &[TableLine],
    resolver: &mut dyn DeviceNameResolver,
    io: &dyn ControlIo,
    cores: usize,
) -> Result<Vec<TableEntry>, TargetError> {
    if lines.is_empty() {
        return Err(TargetError::new("populate_table: no targets specified"));
    }
    let mut entries: Vec<TableEntry> = Vec::with_capacity(lines.len());
    for (i, line) in lines.iter().enumerate() {
        let entry = build_table_entry(types, line, entries.last(), resolver, io, cores);
        entries.push(entry.map_err(|e| TargetError { line: Some(i), ..e })?);
    }
    Ok(entries)
}

fn build_table_entry(
    types: &[TargetType],
    line: &TableLine,
    previous: Option<&TableEntry>,
    resolver: &mut dyn DeviceNameResolver,
    io: &dyn ControlIo,
    cores: usize,
) -> Result<TableEntry, TargetError> {
    if let Some(alone) = previous.filter(|p| p.target.features().singleton) {
        let kind = alone.target.type_name();
        return Err(TargetError::new(format!("target type {kind} must appear alone in table")));
    }
    if line.len == 0 {
        return Err(TargetError::new("zero-length target"));
    }
    if line.start.checked_add(line.len).is_none_or(|end| end > END_MAX) {
        return Err(TargetError::new("too large device"));
    }
    let kind = &line.kind;
    let refuse = |text: &str| Err(TargetError::new(format!("{kind}: {text}")));
    let Some(target_type) = types.iter().find(|one| one.name == kind) else {
        return refuse("unknown target type");
    };
    if line.start != previous.map_or(0, |p| p.end().0) {
        return refuse("Gap in table");
    }
    let (start, len) = (Sector(line.start), Sectors(line.len));
    let mut args = TargetArgs { start, len, args: &line.args, resolver, io, cores };
    let target = (target_type.new)(&mut args).map_err(|e| prefix_type_name(e, kind))?;
    if previous.is_some() && target.features().singleton {
        return refuse("singleton target type must appear alone in table");
    }
    Ok(TableEntry { start, len, target })
}

/// Adds the type to the front of the error text, if it is missing.
fn prefix_type_name(mut error: TargetError, kind: &str) -> TargetError {
    let has_it = error.text.strip_prefix(kind).is_some_and(|rest| rest.starts_with(": "));
    if !has_it && !error.text.is_empty() {
        error.text.insert_str(0, &format!("{kind}: "));
    }
    error
}
