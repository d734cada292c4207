//! What takes the place of a source that is away: a device of its size whose reads fail. The
//! hydrated part of a clone can be read and written then.
//!
//! It is never shown as a hole, or the regions would count as zeroes.

use super::record::parse_clone_line;
use crate::state_folder::clones::CloneRecord;
use udm_wire::clone_table::CloneTableLine;

/// The URI of the stand-in for a source of this many sectors.
fn stand_in_uri(sectors: u64) -> String {
    format!("null:size={},badblocks=+0-{}", sectors.saturating_mul(512), sectors.saturating_sub(1))
}

/// The table of a clone without its source: nothing is copied in the background, because each
/// copy would fail.
pub(crate) fn table_without_source(record: &CloneRecord) -> Option<String> {
    let mut line = parse_clone_line(&record.table)?;
    let [_, _, source] = &mut line.devices;
    *source = stand_in_uri(record.source_sectors);
    Some(CloneTableLine { no_hydration: true, ..line }.to_line().to_string())
}

/// True if `uri`, the source of a live clone, stands in for that of the record.
pub(crate) fn is_stand_in(uri: &str, record: &CloneRecord) -> bool {
    let recorded = parse_clone_line(&record.table).is_some_and(|line| line.devices[2].starts_with("null:"));
    uri.starts_with("null:") && !recorded
}
