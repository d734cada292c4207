//! The words of a `mirror` line, in the kernel's order and with its texts.

use crate::clone::args::{REGION_MAX, REGION_MIN};
use udm_core::{SECTOR_SIZE, Sector, Sectors};
use udm_dm::TargetError;
use udm_dm::target::{ResolvedDevice, TargetArgs, parse_decimal_u64};

/// One device of a mirror.
#[derive(Clone)]
pub(super) struct MirrorLeg {
    pub device: ResolvedDevice,
    /// The sector of the device with the mirror's first sector.
    pub start: Sector,
}

/// The parsed words of a line.
pub(super) struct MirrorTableArgs {
    /// The source and the destination.
    pub legs: [MirrorLeg; 2],
    /// The region size, a power of two.
    pub region: Sectors,
    /// The destination has the data already.
    pub nosync: bool,
    /// The feature words.
    pub features: Vec<String>,
}

/// Parses the words of a line.
///
/// # Errors
/// The kernel's. udm has only the `core` log and two devices, and refuses devices that are one
/// disk.
pub(super) fn parse_mirror_table_args(args: &mut TargetArgs<'_>) -> Result<MirrorTableArgs, TargetError> {
    let words = args.args;
    let word = |at: usize| words.get(at).map(String::as_str).unwrap_or_default();
    if words.len() < 2 {
        return Err(TargetError::new("Insufficient mirror log arguments").at(words.len()));
    }
    if word(0) != "core" {
        let error = TargetError::new("Error creating mirror dirty log").at(0);
        return Err(error.because(format!("the log {:?} is not available: use core", word(0))));
    }
    let log_words = parse_decimal_u64(word(1)).filter(|count| (1..=2).contains(count));
    let log_words = log_words.ok_or_else(|| TargetError::new("Invalid mirror log argument count").at(1))?;
    let region = parse_decimal_u64(word(2));
    let region = region.filter(|size| size.is_power_of_two() && (REGION_MIN..=REGION_MAX).contains(size));
    let region = Sectors(region.ok_or_else(|| TargetError::new("Invalid region size").at(2))?);
    let nosync = match (log_words, word(3)) {
        (1, _) | (_, "sync") => false,
        (_, "nosync") => true,
        _ => {
            return Err(TargetError::new("Error creating mirror dirty log")
                .at(3)
                .because("unknown log word"));
        }
    };
    let at = 2 + log_words as usize;
    if word(at) != "2" {
        let error = TargetError::new("Invalid number of mirrors").at(at);
        return Err(error.because("expected 2: the source and the destination"));
    }
    if words.len() < at + 5 {
        return Err(TargetError::new("Too few mirror arguments").at(words.len()));
    }
    let legs = [leg(args, at + 1)?, leg(args, at + 3)?];
    let [source, destination] = &legs;
    if crate::clone::args::is_same_disk(&source.device, &destination.device)
        && source.start.0 < destination.start.0 + args.len.0
        && destination.start.0 < source.start.0 + args.len.0
    {
        let why = format!("{} and {} overlap on one disk", source.device.name, destination.device.name);
        return Err(TargetError::new("Device lookup failure").because(why).at(at + 3));
    }
    for leg in &legs {
        let block = u64::from(leg.device.device.limits().logical_block);
        if !region.bytes().is_multiple_of(block) || !(leg.start.0 * SECTOR_SIZE).is_multiple_of(block) {
            let why = format!("{} has blocks of {block} bytes", leg.device.name);
            return Err(TargetError::new("Invalid region size").because(why).at(2));
        }
    }
    let features = parse_features(words, at + 5)?;
    Ok(MirrorTableArgs { legs, region, nosync, features })
}

fn leg(args: &mut TargetArgs<'_>, at: usize) -> Result<MirrorLeg, TargetError> {
    let words = args.args;
    let start =
        parse_decimal_u64(&words[at + 1]).ok_or_else(|| TargetError::new("Invalid offset").at(at + 1))?;
    let refuse = |error: udm_dm::DeviceLookupError| {
        TargetError::new("Device lookup failure").with_errno(error.errno).because(error.reason).at(at)
    };
    let device = args.resolver.get(&words[at]).map_err(refuse)?;
    if device.device.limits().read_only {
        let error = TargetError::new("Device lookup failure").with_errno(udm_core::errno::EACCES);
        return Err(error.because("it is read-only").at(at));
    }
    let size = device.device.limits().size;
    if start.checked_add(args.len.0).is_none_or(|end| end > size.0) {
        let why = format!("{} has {size} sectors, and {} from {start} on are needed", device.name, args.len);
        return Err(TargetError::new("Device lookup failure").because(why).at(at));
    }
    Ok(MirrorLeg { device, start: Sector(start) })
}

fn parse_features(words: &[String], at: usize) -> Result<Vec<String>, TargetError> {
    let Some(count) = words.get(at) else { return Ok(Vec::new()) };
    let features = &words[at + 1..];
    if parse_decimal_u64(count) != Some(features.len() as u64) {
        return Err(TargetError::new("Not enough arguments to support feature count").at(at));
    }
    let known = |word: &String| ["handle_errors", "keep_log"].contains(&word.as_str());
    match features.iter().position(|word| !known(word)) {
        Some(wrong) => Err(TargetError::new("Unrecognised feature requested").at(at + 1 + wrong)),
        None => Ok(features.to_vec()),
    }
}
