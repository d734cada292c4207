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

/// How a log begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LogStart {
    /// With what it says; a blank one says that all is to be copied.
    Continue,
    /// `sync`: as a new one.
    New,
    /// `nosync`: as a new one, and both devices have the same data.
    InSync,
}

/// The `disk` log of a line.
pub(super) struct MirrorLogArgs {
    pub device: ResolvedDevice,
    pub start: LogStart,
}

/// The parsed words of a line.
pub(super) struct MirrorTableArgs {
    /// The source and the destination.
    pub legs: [MirrorLeg; 2],
    /// The region size, a power of two.
    pub region: Sectors,
    /// The destination has the data already.
    pub nosync: bool,
    /// The device of the `disk` log.
    pub log: Option<MirrorLogArgs>,
    /// The words of the log, as `table` prints them.
    pub log_words: String,
    /// The feature words.
    pub features: Vec<String>,
}

/// Parses the words of a line.
///
/// # Errors The kernel's. udm has the `core` and `disk` logs, and two devices, and refuses devices
/// that are one disk.
pub(super) fn parse_mirror_table_args(args: &mut TargetArgs<'_>) -> Result<MirrorTableArgs, TargetError> {
    let words = args.args;
    let word = |at: usize| words.get(at).map(String::as_str).unwrap_or_default();
    let ParsedLog { device: log, region, start, end: at, printed: log_words } = parse_log(args)?;
    if word(at) != "2" {
        let error = TargetError::new("Invalid number of mirrors").at(at);
        return Err(error.because("expected 2: the source and the destination"));
    }
    if words.len() < at + 5 {
        return Err(TargetError::new("Too few mirror arguments").at(words.len()));
    }
    let legs = [parse_mirror_leg(args, at + 1)?, parse_mirror_leg(args, at + 3)?];
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
    let nosync = start == LogStart::InSync;
    let log = log.map(|device| MirrorLogArgs { device, start });
    if let Some(log) = &log {
        check_log(log, &legs, at)?;
    }
    Ok(MirrorTableArgs { legs, region, nosync, log, log_words, features })
}

/// The parsed words of a log.
struct ParsedLog {
    device: Option<ResolvedDevice>,
    region: Sectors,
    start: LogStart,
    /// The word after them.
    end: usize,
    /// The words as `table` prints them.
    printed: String,
}

/// Parses `core <#args> <region> [sync|nosync]` or `disk <#args> <device> <region> [sync|nosync]`.
fn parse_log(args: &mut TargetArgs<'_>) -> Result<ParsedLog, TargetError> {
    let words = args.args;
    let word = |at: usize| words.get(at).map(String::as_str).unwrap_or_default();
    if words.len() < 2 {
        return Err(TargetError::new("Insufficient mirror log arguments").at(words.len()));
    }
    let refuse =
        |at: usize, why: String| Err(TargetError::new("Error creating mirror dirty log").because(why).at(at));
    let count = parse_decimal_u64(word(1)).filter(|count| *count <= u64::from(u32::MAX));
    let count = count.ok_or_else(|| TargetError::new("Invalid mirror log argument count").at(1))? as usize;
    let end = 2 + count;
    if words.len() < end {
        return Err(TargetError::new("Insufficient mirror log arguments").at(words.len()));
    }
    let has_device = match word(0) {
        "core" => false,
        "disk" => true,
        other => return refuse(0, format!("the log {other:?} is not available: use core or disk")),
    };
    let first = 2 + usize::from(has_device);
    if !(first + 1..=first + 2).contains(&end) {
        return refuse(1, "wrong number of arguments to dirty region log".into());
    }
    let start = match (end > first + 1, word(first + 1)) {
        (false, _) => LogStart::Continue,
        (true, "sync") => LogStart::New,
        (true, "nosync") => LogStart::InSync,
        (true, other) => return refuse(first + 1, format!("unrecognised sync argument {other:?}")),
    };
    let region = parse_decimal_u64(word(first));
    let region = region.filter(|size| size.is_power_of_two() && (REGION_MIN..=REGION_MAX).contains(size));
    let Some(region) = region.map(Sectors) else {
        let why = format!("region size: expected a power of two from {REGION_MIN} to {REGION_MAX} sectors");
        return refuse(first, why);
    };
    if region.0 > REGION_MIN && region > args.len {
        return refuse(first, format!("invalid region size {region}: the mirror has {} sectors", args.len));
    }
    let mut printed = format!("{} {count} ", word(0));
    let device = if has_device {
        let device = args.resolver.get(&words[2]);
        let device = device.map_err(|error| {
            TargetError::new("Error creating mirror dirty log")
                .with_errno(error.errno)
                .because(error.reason)
                .at(2)
        })?;
        if device.device.limits().read_only {
            return refuse(2, format!("{} is read-only", device.name));
        }
        printed += &format!("{} ", device.number);
        Some(device)
    } else {
        None
    };
    printed += &region.to_string();
    if end > first + 1 {
        printed += &format!(" {}", word(first + 1));
    }
    Ok(ParsedLog { device, region, start, end, printed })
}

/// Refuses a log on one of the devices.
fn check_log(log: &MirrorLogArgs, legs: &[MirrorLeg; 2], at: usize) -> Result<(), TargetError> {
    let is_leg = |leg: &&MirrorLeg| crate::clone::args::is_same_disk(&leg.device, &log.device);
    match legs.iter().find(is_leg) {
        None => Ok(()),
        Some(leg) => {
            let why = format!("the log {} and {} are one disk", log.device.name, leg.device.name);
            Err(TargetError::new("Device lookup failure").because(why).at(at + 1))
        }
    }
}

fn parse_mirror_leg(args: &mut TargetArgs<'_>, at: usize) -> Result<MirrorLeg, TargetError> {
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

/// Parses the features. As in the kernel, a word may come twice, and `table` prints one of each.
fn parse_features(words: &[String], at: usize) -> Result<Vec<String>, TargetError> {
    const KNOWN: [&str; 2] = ["handle_errors", "keep_log"];
    let Some(count) = words.get(at) else { return Ok(Vec::new()) };
    let features = &words[at + 1..];
    let count = parse_decimal_u64(count);
    let count = count.ok_or_else(|| TargetError::new("Invalid number of features").at(at))? as usize;
    if features.len() < count {
        return Err(TargetError::new("Not enough arguments to support feature count").at(at));
    }
    if let Some(wrong) = features[..count].iter().position(|word| !KNOWN.contains(&word.as_str())) {
        return Err(TargetError::new("Unrecognised feature requested").at(at + 1 + wrong));
    }
    let found: Vec<String> = KNOWN
        .iter()
        .filter(|word| features[..count].iter().any(|one| one == *word))
        .map(|word| word.to_string())
        .collect();
    if found == ["keep_log"] {
        return Err(TargetError::new("keep_log feature requires the handle_errors feature").at(at));
    }
    match features.len() > count {
        true => Err(TargetError::new("Too many mirror arguments").at(at + 1 + count)),
        false => Ok(found),
    }
}
