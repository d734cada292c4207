//! Files with boot profiles of clones.

use anyhow::{Context, Result, anyhow};
use std::fs::File;
use std::io::Read;
use std::path::Path;
use udm_wire::boot_profile::{BootProfile, TEXT_MAX};
use udm_wire::table::parse_table;

/// Reads a profile.
///
/// # Errors
/// The file cannot be read, or is no profile.
pub fn read_boot_profile(path: &Path) -> Result<BootProfile> {
    let name = || path.display().to_string();
    let mut bytes = Vec::new();
    let file = File::open(path).with_context(name)?;
    file.take(TEXT_MAX as u64 + 1).read_to_end(&mut bytes).with_context(name)?;
    let text = String::from_utf8(bytes).map_err(|_| anyhow!("not a text")).with_context(name)?;
    BootProfile::parse(&text).with_context(name)
}

/// Adds the profile in a file to `table`, a clone.
///
/// # Errors
/// The file is no profile, or not one of this clone.
pub fn add_boot_profile(path: &Path, table: &str) -> Result<String> {
    let profile = read_boot_profile(path)?;
    let lines = parse_table(table).map_err(|error| anyhow!("table: {error}"))?;
    let line = profile.add_to_table(&lines).with_context(|| path.display().to_string())?;
    Ok(line.to_string())
}
