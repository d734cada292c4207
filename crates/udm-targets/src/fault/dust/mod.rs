//! `dust`: a device with bad blocks, chosen by messages.
//!
//! ```text
//! dust <dev> <offset> <block bytes>
//! message: addbadblock <block> [<failing writes 0-255>] | removebadblock <block> | queryblock
//! <block>
//!          | countbadblocks | listbadblocks | clearbadblocks | enable | disable | quiet
//! ```
//!
//! Blocks count from the start of the **device below**, without the offset. The target starts in
//! bypass. Once it is enabled, a read of a bad block fails with EIO. A write fails as many times as
//! the block was given, and then makes the block good, as a drive remaps a sector. Discards and
//! write-zeroes count as writes. A flush touches no block (the kernel treats it as a write of the
//! first block).
//!
//! Requests are cut at the block size of the target or of the device below, the larger one, counted
//! from the start of the target. If the offset is no multiple of it, a request touches several
//! blocks. All of them are checked; the kernel checks only the first.
//!
//! # What the cores share
//! The set of bad blocks is immutable and sorted. A message replaces it. A lane keeps the set that
//! it saw last and compares its generation with the current one by **one atomic load per batch**.
//! There are two exceptions to "no lock, nothing shared per request":
//!
//! * after a message changed the set, the lane takes a mutex once to fetch the new set;
//! * a write that hits a bad block changes the state of the block by compare-and-swap.
//!
//! Neither costs anything without messages and without writes to bad blocks.

mod bad_blocks;

use super::{SectorOffsetLane, UnderlyingRange, look_up_device, parse_number};
use bad_blocks::{BadBlockSet, GOOD, SharedBadBlocks};
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use udm_core::errno::EINVAL;
use udm_core::{
    Batch, Cx, DeviceControlError, DrainMode, Lane, Limits, Op, OwnWork, Sector, Sectors, Status,
};
use udm_dm::TargetError;
use udm_dm::target::{DeviceNameResolver, DeviceRange, LowerLimits, Target, TargetArgs};

const NAME: &str = "dust";

/// Maximum block in sectors: 1 GiB.
const BLOCK_MAX: u64 = 1 << 21;

/// The control half.
struct DustTarget {
    under: UnderlyingRange,
    len: Sectors,
    /// Sectors in a block, a power of two.
    block: u64,
    quiet: AtomicBool,
    shared: Arc<SharedBadBlocks>,
}

/// The constructor.
///
/// # Errors
/// The kernel's, for a wrong number of words, a bad block size or offset, or an unknown device.
pub fn create_dust_target(args: &mut TargetArgs<'_>) -> Result<Arc<dyn Target>, TargetError> {
    let words = args.args;
    let bad = |text: &str, word| TargetError::new(format!("dust: {text}")).at(word);
    if words.len() != 3 {
        return Err(bad("Invalid argument count", words.len().min(3)));
    }
    let bytes = parse_number::<u32>(&words[2]).filter(|&bytes| bytes > 0);
    let bytes = bytes.ok_or_else(|| bad("Invalid block size parameter", 2))?;
    if bytes < 512 {
        return Err(bad("Block size must be at least 512", 2));
    }
    if !bytes.is_power_of_two() {
        return Err(bad("Block size must be a power of 2", 2));
    }
    let block = u64::from(bytes) / udm_core::SECTOR_SIZE;
    if block > args.len.0.min(BLOCK_MAX) {
        return Err(bad("Block size is too large", 2));
    }
    let start = parse_number(&words[1]).ok_or_else(|| bad("Invalid device offset sector", 1))?;
    // The kernel's errno here is EINVAL, whatever the lookup error.
    let device = look_up_device(args.resolver, words, 0, "dust: Device lookup failed")
        .map_err(|e| e.with_errno(EINVAL))?;
    let under = UnderlyingRange { device, start: Sector(start) };
    let (quiet, shared) = (AtomicBool::new(false), Arc::new(SharedBadBlocks::default()));
    Ok(Arc::new(DustTarget { under, len: args.len, block, quiet, shared }))
}

impl DustTarget {
    /// Logs what the kernel logs, unless the target is quiet.
    fn log_unless_quiet(&self, text: &str) {
        if !self.quiet.load(Ordering::Relaxed) {
            tracing::info!("dust: {text}");
        }
    }

    fn set_enabled(&self, enabled: bool) -> Result<String, TargetError> {
        tracing::info!(
            "dust: {} read failures on bad sectors",
            if enabled { "enabling" } else { "disabling" }
        );
        self.shared.change(|set| {
            set.enabled = enabled;
            Ok(String::new())
        })
    }

    fn add(&self, block: u64, failing_writes: u8) -> Result<String, TargetError> {
        self.shared.change(|set| match set.blocks.binary_search_by_key(&block, |(block, _)| *block) {
            Ok(_) => Err(TargetError::new(format!("dust: block {block} already in badblocklist"))),
            Err(at) => {
                set.blocks.insert(at, (block, Arc::new(AtomicU16::new(failing_writes.into()))));
                Ok(())
            }
        })?;
        self.log_unless_quiet(&format!(
            "badblock added at block {block} with write fail count {failing_writes}"
        ));
        Ok(String::new())
    }

    fn remove(&self, block: u64) -> Result<String, TargetError> {
        self.shared.change(|set| match set.blocks.binary_search_by_key(&block, |(block, _)| *block) {
            Ok(at) => {
                set.blocks.remove(at);
                Ok(())
            }
            Err(_) => Err(TargetError::new(format!("dust: block {block} not found in badblocklist"))),
        })?;
        self.log_unless_quiet(&format!("badblock removed at block {block}"));
        Ok(String::new())
    }

    fn query(&self, block: u64) -> String {
        let set = Arc::clone(&self.shared.lock());
        let bad = set.find(block).is_some_and(|state| state.load(Ordering::Relaxed) != GOOD);
        let found = if bad { "found" } else { "not found" };
        format!("dust_query_block: block {block} {found} in badblocklist")
    }

    fn bad_blocks(&self) -> Vec<u64> {
        let set = Arc::clone(&self.shared.lock());
        let bad = set.blocks.iter().filter(|(_, state)| state.load(Ordering::Relaxed) != GOOD);
        bad.map(|(block, _)| *block).collect()
    }

    fn clear(&self) -> Result<String, TargetError> {
        let cleared = self.shared.change(|set| Ok(std::mem::take(&mut set.blocks).len()))?;
        let what = if cleared > 0 { "badblocks cleared" } else { "no badblocks found" };
        Ok(format!("dust_clear_badblocks: {what}"))
    }

    /// Parses a block number of a message. As in the kernel, one past the last block is accepted.
    fn block_number(&self, word: &str) -> Result<u64, TargetError> {
        let block = parse_number(word).ok_or_else(|| TargetError::errno(EINVAL).at(1))?;
        if block > self.under.device.device.limits().size.0 / self.block {
            return Err(TargetError::new("dust: selected block value out of range").at(1));
        }
        Ok(block)
    }
}

impl Target for DustTarget {
    fn type_name(&self) -> &'static str {
        NAME
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        Ok(Box::new(DustLane {
            under: self.under.open(cx)?,
            shift: self.block.trailing_zeros(),
            start: Sectors(self.under.start.0),
            shared: Arc::clone(&self.shared),
            seen: 0,
            set: Arc::default(),
            failed: Batch::new(),
            scratch: Batch::new(),
        }))
    }

    fn table(&self) -> String {
        format!("{} {} {}", self.under.device.number, self.under.start, self.block * udm_core::SECTOR_SIZE)
    }

    fn status(&self) -> String {
        let mode = if self.shared.lock().enabled { "fail_read_on_bad_block" } else { "bypass" };
        let log = if self.quiet.load(Ordering::Relaxed) { "quiet" } else { "verbose" };
        format!("{} {mode} {log}", self.under.device.number)
    }

    fn state_outside_table(&self) -> Option<String> {
        let set = self.shared.lock();
        match (set.blocks.len(), set.enabled) {
            (0, false) => None,
            (0, true) => Some("bad blocks fail, because a message enabled it".into()),
            (1, _) => Some("a bad block that a message added".into()),
            (count, _) => Some(format!("{count} bad blocks that messages added")),
        }
    }

    fn limits(&self, below: LowerLimits<'_>) -> Limits {
        self.under.limits(self.len, below)
    }

    fn devices(&self) -> Vec<DeviceRange> {
        vec![self.under.used(self.len)]
    }

    fn max_io_len(&self) -> Option<Sectors> {
        // At least the device's block: it refuses smaller requests.
        let least = u64::from(self.under.device.device.limits().logical_block) / udm_core::SECTOR_SIZE;
        Some(Sectors(self.block.max(least)))
    }

    fn message(&self, words: &[String], _: &mut dyn DeviceNameResolver) -> Result<String, TargetError> {
        let name = words.first().map(|word| word.to_ascii_lowercase()).unwrap_or_default();
        let unrecognised = || {
            let word = words.first().map_or("", String::as_str);
            Err(TargetError::new(format!("dust: unrecognized message '{word}' received")).at(0))
        };
        match (name.as_str(), &words[words.len().min(1)..]) {
            ("addbadblock" | "removebadblock" | "queryblock", []) => {
                Err(TargetError::new(format!("dust: {} requires an additional argument", words[0])).at(1))
            }
            ("enable", []) => self.set_enabled(true),
            ("disable", []) => self.set_enabled(false),
            ("countbadblocks", []) => {
                Ok(format!("countbadblocks: {} badblock(s) found", self.bad_blocks().len()))
            }
            ("clearbadblocks", []) => self.clear(),
            ("listbadblocks", []) => {
                let mut text = String::new();
                for block in self.bad_blocks() {
                    let _ = writeln!(text, "{block}");
                }
                Ok(text)
            }
            ("quiet", []) => {
                self.quiet.fetch_xor(true, Ordering::Relaxed);
                Ok(String::new())
            }
            (_, []) => unrecognised(),
            (name, [block]) => {
                let block = self.block_number(block)?;
                match name {
                    "addbadblock" => self.add(block, 0),
                    "removebadblock" => self.remove(block),
                    "queryblock" => Ok(self.query(block)),
                    _ => unrecognised(),
                }
            }
            (name, [block, count]) => {
                let block = self.block_number(block)?;
                let count: u32 = parse_number(count).ok_or_else(|| TargetError::errno(EINVAL).at(2))?;
                let Ok(count) = u8::try_from(count) else {
                    return Err(TargetError::new("dust: selected write fail count out of range").at(2));
                };
                if name == "addbadblock" { self.add(block, count) } else { unrecognised() }
            }
            _ => Err(TargetError::new(format!("dust: invalid number of arguments '{}'", words.len())).at(3)),
        }
    }
}

struct DustLane {
    under: SectorOffsetLane,
    /// Converts a sector of the device below to its block.
    shift: u32,
    start: Sectors,
    shared: Arc<SharedBadBlocks>,
    /// The generation of `set`.
    seen: u64,
    set: Arc<BadBlockSet>,
    /// Bios that failed in `submit`; the next `poll` returns them.
    failed: Batch,
    /// Scratch for a batch; empty between calls.
    scratch: Batch,
}

impl DustLane {
    /// Fetches the set if it has changed. One load of a cache line that only messages write.
    fn refresh(&mut self) {
        // Acquire pairs with the release in `change`.
        let generation = self.shared.generation.load(Ordering::Acquire);
        if generation != self.seen {
            self.set = Arc::clone(&self.shared.lock());
            self.seen = generation;
        }
    }
}

impl Lane for DustLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        self.refresh();
        if !self.set.enabled || self.set.blocks.is_empty() {
            self.under.submit(batch, cx);
            return;
        }
        for mut bio in batch.drain(..) {
            let status = if bio.op == Op::Flush || bio.sectors == Sectors::ZERO {
                Status::Ok
            } else {
                let first = (bio.sector + self.start).0 >> self.shift;
                let last = ((bio.end() + self.start).0 - 1) >> self.shift;
                self.set.status_for(&bio, first, last)
            };
            if status.is_ok() {
                self.scratch.push(bio);
            } else {
                bio.end_with(status);
                self.failed.push(bio);
            }
        }
        self.under.submit(&mut self.scratch, cx);
        if !self.failed.is_empty() {
            // The failed bios need a poll, and no external event will cause one.
            cx.wake_now();
        }
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        done.append(&mut self.failed);
        self.under.poll(done, cx);
    }

    fn drain(&mut self, how: DrainMode, back: &mut Batch, cx: &mut Cx<'_>) {
        self.under.drain(how, back, cx);
    }

    fn own_work(&self) -> OwnWork {
        self.under.own_work()
    }
}
