//! The words of a `clone` line, in the kernel's order and with its texts.

use super::settings::HydrationValues;
use udm_core::errno::EACCES;
use udm_core::{DeviceId, SECTOR_SIZE, Sectors, SharedDiskState};
use udm_dm::TargetError;
use udm_dm::target::{DeviceNameResolver, ResolvedDevice, TargetArgs, parse_decimal_u64};
use udm_wire::boot_profile::{HYDRATE_FIRST, HydrationOrder};

/// Region sizes in sectors (kernel `MIN_REGION_SIZE`, `MAX_REGION_SIZE`).
pub(super) const REGION_MIN: u64 = 1 << 3;
pub(super) const REGION_MAX: u64 = 1 << 21;

/// The maximum number of regions (kernel).
const REGIONS_MAX: u64 = 1 << 31;

/// The parsed words of a line.
pub(super) struct CloneTableArgs {
    pub metadata: ResolvedDevice,
    pub destination: ResolvedDevice,
    pub source: ResolvedDevice,
    /// The region size, a power of two.
    pub region: Sectors,
    /// Discards are passed to the destination, if it takes them.
    pub discard_passdown: bool,
    pub hydration: HydrationValues,
    /// The regions that are hydrated before the others.
    pub hydrate_first: HydrationOrder,
    /// The words from the region size on, as `table` prints them.
    pub words: Vec<String>,
}

/// Parses the words of a line.
///
/// # Errors
/// The kernel's, in its order. udm also refuses words after the core arguments, and devices that
/// are one disk, which the kernel accepts.
pub(super) fn parse_clone_table_args(args: &mut TargetArgs<'_>) -> Result<CloneTableArgs, TargetError> {
    let words = args.args;
    if words.len() < 4 {
        return Err(TargetError::new("Invalid number of arguments").at(words.len()));
    }
    let metadata = look_up_writable(args.resolver, words, 0, "Error opening metadata device")?;
    let destination = look_up_writable(args.resolver, words, 1, "Error opening destination device")?;
    check_size(&destination, args.len, "Device size larger than destination device", 1)?;
    let source = look_up(args.resolver, words, 2, "Error opening source device")?;
    check_size(&source, args.len, "Device size larger than source device", 2)?;
    let region = parse_region_size(&words[3], &source, &destination)?;
    if args.len.0.div_ceil(region.0) > REGIONS_MAX {
        return Err(TargetError::new("Too many regions. Consider increasing the region size").at(3));
    }
    let mut rest = WordReader { words, at: 4 };
    let mut line = CloneTableArgs {
        metadata,
        destination,
        source,
        region,
        discard_passdown: true,
        hydration: HydrationValues::default(),
        hydrate_first: HydrationOrder::default(),
        words: words[3..].to_vec(),
    };
    parse_features(&mut rest, &mut line)?;
    parse_core_args(&mut rest, &mut line, args.len.0.div_ceil(region.0))?;
    if let Some(word) = words.get(rest.at) {
        let error = TargetError::new("Invalid number of core arguments").at(rest.at);
        return Err(error.because(format!("nothing may follow the core arguments: {word:?}")));
    }
    check_distinct(&line)?;
    Ok(line)
}

/// The words of a line that are still to be read.
struct WordReader<'a> {
    words: &'a [String],
    at: usize,
}

impl WordReader<'_> {
    fn next(&mut self) -> &str {
        self.at += 1;
        &self.words[self.at - 1]
    }

    /// Reads the size of a group of at most `max` words; 0 if no words are left.
    fn group(&mut self, max: usize, text: &str) -> Result<usize, TargetError> {
        let Some(word) = self.words.get(self.at) else { return Ok(0) };
        let left = self.words.len() - self.at - 1;
        let count = parse_decimal_u64(word).and_then(|count| usize::try_from(count).ok());
        let count = count.filter(|count| *count <= max && *count <= left);
        let count = count.ok_or_else(|| TargetError::new(text).at(self.at))?;
        self.at += 1;
        Ok(count)
    }
}

fn parse_features(rest: &mut WordReader<'_>, line: &mut CloneTableArgs) -> Result<(), TargetError> {
    for _ in 0..rest.group(2, "Invalid number of feature arguments")? {
        match rest.next().to_ascii_lowercase().as_str() {
            "no_hydration" => line.hydration.enabled = false,
            "no_discard_passdown" => line.discard_passdown = false,
            _ => return Err(TargetError::new("Invalid feature argument").at(rest.at - 1)),
        }
    }
    Ok(())
}

/// Parses the core arguments. `hydrate_first` is udm's own.
fn parse_core_args(
    rest: &mut WordReader<'_>,
    line: &mut CloneTableArgs,
    regions: u64,
) -> Result<(), TargetError> {
    let count_at = rest.at;
    let count = rest.group(6, "Invalid number of core arguments")?;
    if count % 2 == 1 {
        // The kernel has at most 4.
        let text = if count > 4 {
            "Invalid number of core arguments"
        } else {
            "Number of core arguments must be even"
        };
        return Err(TargetError::new(text).at(count_at));
    }
    for _ in 0..count / 2 {
        let name = rest.next().to_ascii_lowercase();
        let text = || TargetError::new(format!("Invalid value for argument `{name}'"));
        if name == HYDRATE_FIRST {
            let order = HydrationOrder::parse(rest.next(), regions);
            line.hydrate_first = order.map_err(|why| text().because(why).at(rest.at - 1))?;
            continue;
        }
        let value = parse_decimal_u64(rest.next()).and_then(|value| u32::try_from(value).ok());
        let place = match name.as_str() {
            "hydration_threshold" => &mut line.hydration.threshold,
            "hydration_batch_size" => &mut line.hydration.batch,
            _ => return Err(TargetError::new("Invalid core argument").at(rest.at - 2)),
        };
        *place = value.ok_or_else(|| text().at(rest.at - 1))?;
    }
    if count > 4 && line.hydrate_first == HydrationOrder::default() {
        // The kernel has two names.
        return Err(TargetError::new("Invalid number of core arguments").at(count_at));
    }
    Ok(())
}

fn parse_region_size(
    word: &str,
    source: &ResolvedDevice,
    destination: &ResolvedDevice,
) -> Result<Sectors, TargetError> {
    let size = parse_decimal_u64(word).filter(|size| (REGION_MIN..=REGION_MAX).contains(size));
    let size = size.ok_or_else(|| TargetError::new("Invalid region size").at(3))?;
    if !size.is_power_of_two() {
        return Err(TargetError::new("Region size is not a power of 2").at(3));
    }
    let is_whole = |device: &ResolvedDevice| {
        (size * SECTOR_SIZE).is_multiple_of(u64::from(device.device.limits().logical_block))
    };
    if !is_whole(source) || !is_whole(destination) {
        return Err(TargetError::new("Region size is not a multiple of device logical block size").at(3));
    }
    Ok(Sectors(size))
}

fn look_up(
    resolver: &mut dyn DeviceNameResolver,
    words: &[String],
    word: usize,
    text: &str,
) -> Result<ResolvedDevice, TargetError> {
    let refuse =
        |e: udm_dm::DeviceLookupError| TargetError::new(text).with_errno(e.errno).because(e.reason).at(word);
    resolver.get(&words[word]).map_err(refuse)
}

fn look_up_writable(
    resolver: &mut dyn DeviceNameResolver,
    words: &[String],
    word: usize,
    text: &str,
) -> Result<ResolvedDevice, TargetError> {
    let device = look_up(resolver, words, word, text)?;
    if device.device.limits().read_only {
        return Err(TargetError::new(text).with_errno(EACCES).because("it is read-only").at(word));
    }
    Ok(device)
}

fn check_size(device: &ResolvedDevice, len: Sectors, text: &str, word: usize) -> Result<(), TargetError> {
    let size = device.device.limits().size;
    if size >= len {
        return Ok(());
    }
    Err(TargetError::new(text).because(format!("it has {size} sectors, and {len} are needed")).at(word))
}

/// Refuses devices that are one disk: the clone would overwrite its source or its metadata.
fn check_distinct(line: &CloneTableArgs) -> Result<(), TargetError> {
    let CloneTableArgs { metadata, destination, source, .. } = line;
    for (one, other, word, text) in [
        (metadata, destination, 1, "Error opening destination device"),
        (metadata, source, 2, "Error opening source device"),
        (destination, source, 2, "Error opening source device"),
    ] {
        if is_same_disk(one, other) {
            let why = format!("{} and {} are one disk", one.name, other.name);
            return Err(TargetError::new(text).because(why).at(word));
        }
    }
    Ok(())
}

/// The identity of a disk, without keeping it open.
pub(super) struct DiskIdentity {
    pub name: String,
    id: DeviceId,
    /// Address of the state that all names of the disk share.
    shared: Option<usize>,
}

impl DiskIdentity {
    pub(super) fn of(device: &ResolvedDevice) -> DiskIdentity {
        let shared = device.device.shared_disk_state();
        DiskIdentity {
            name: device.name.clone(),
            id: device.device.id(),
            shared: shared.map(|state| std::ptr::from_ref::<SharedDiskState>(state).addr()),
        }
    }

    /// True if both are names of one disk.
    pub(super) fn is_same(&self, other: &DiskIdentity) -> bool {
        self.id == other.id || self.shared.is_some() && self.shared == other.shared
    }
}

/// True if two devices are names of one disk.
pub(super) fn is_same_disk(one: &ResolvedDevice, other: &ResolvedDevice) -> bool {
    DiskIdentity::of(one).is_same(&DiskIdentity::of(other))
}
