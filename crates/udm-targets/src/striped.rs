//! The striped target: `striped <n> <chunk> (<dev> <off>)×n`. Chunk k is on stripe k mod n, at
//! chunk k / n of the stripe.
//!
//! The target has no lane: the lane of the table computes the positions itself
//! ([`TargetDataPath::Striped`]). `chunk` is in sectors and need not be a power of two. The table
//! splits reads and writes at chunk boundaries ([`Target::max_io_len`]). A discard or write-zeroes
//! may cover many chunks and becomes one request per stripe; a flush becomes one per device.
//!
//! A failed request changes the letter of its stripe in `status` from A to D and raises an event,
//! at most [`EVENTS_MAX`] times per device.

use std::fmt::Write;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use udm_core::{Extents, Limits, SECTOR_SIZE, Sector, Sectors};
use udm_dm::stripes::{StripeFailureObserver, StripeLayout, StripedTargetDescription};
use udm_dm::target::{
    DeviceRange, LowerLimits, ResolvedDevice, Target, TargetArgs, TargetDataPath, TargetFeatures,
    TargetHostServices, parse_decimal_u64,
};
use udm_dm::{DeviceEventDetails, EventKind, TargetError};

/// Maximum number of failures per device that raise an event; later ones are only counted. The
/// kernel's `DM_IO_ERROR_THRESHOLD` is 15, and the fifteenth raises none.
const EVENTS_MAX: u32 = 14;

struct Stripe {
    device: ResolvedDevice,
    offset: Sector,
    /// Failures of the stripe's device. Written only if a request fails.
    errors: AtomicU32,
}

struct StripedShared {
    stripes: Vec<Stripe>,
    notify: OnceLock<Arc<dyn TargetHostServices>>,
}

struct StripedTarget {
    shared: Arc<StripedShared>,
    layout: StripeLayout,
    len: Sectors,
}

/// Creates a striped target.
///
/// # Errors
/// The kernel's, in its order: `Not enough arguments`, `Invalid stripe count`, `Invalid
/// chunk_size`, `Target length not divisible by number of stripes`, `Target length not divisible by
/// chunk size`, `Not enough destinations specified`, `Couldn't parse stripe destination`.
pub fn create_striped_target(args: &mut TargetArgs<'_>) -> Result<Arc<dyn Target>, TargetError> {
    let refuse = |text: &str, word: usize| TargetError::new(format!("striped: {text}")).at(word);
    let [count, chunk, destinations @ ..] = args.args else {
        return Err(refuse("Not enough arguments", args.args.len()));
    };
    let small = |word: &str| parse_decimal_u64(word).filter(|&n| (1..=u64::from(u32::MAX)).contains(&n));
    let count = small(count).ok_or_else(|| refuse("Invalid stripe count", 0))?;
    let chunk = small(chunk).ok_or_else(|| refuse("Invalid chunk_size", 1))?;
    if !args.len.0.is_multiple_of(count) {
        return Err(refuse("Target length not divisible by number of stripes", 0));
    }
    let width = Sectors(args.len.0 / count);
    if !width.0.is_multiple_of(chunk) {
        return Err(refuse("Target length not divisible by chunk size", 1));
    }
    if destinations.len() as u64 != 2 * count {
        let word = args.args.len().min(2 + 2 * count as usize);
        return Err(refuse("Not enough destinations specified", word));
    }
    let mut stripes = Vec::with_capacity(destinations.len() / 2);
    for (i, pair) in destinations.chunks_exact(2).enumerate() {
        let text = "Couldn't parse stripe destination";
        let offset = parse_decimal_u64(&pair[1]).ok_or_else(|| refuse(text, 3 + 2 * i))?;
        let device = args
            .resolver
            .get(&pair[0])
            .map_err(|e| refuse(text, 2 + 2 * i).with_errno(e.errno).because(e.reason))?;
        stripes.push(Stripe { device, offset: Sector(offset), errors: AtomicU32::new(0) });
    }
    Ok(Arc::new(StripedTarget {
        shared: Arc::new(StripedShared { stripes, notify: OnceLock::new() }),
        layout: StripeLayout::new(count, chunk),
        len: args.len,
    }))
}

impl Target for StripedTarget {
    fn type_name(&self) -> &'static str {
        "striped"
    }

    fn table(&self) -> String {
        let mut text = format!("{} {}", self.layout.stripes(), self.layout.chunk());
        for stripe in &self.shared.stripes {
            let _ = write!(text, " {} {}", stripe.device.number, stripe.offset);
        }
        text
    }

    fn status(&self) -> String {
        let mut text = format!("{} ", self.shared.stripes.len());
        for stripe in &self.shared.stripes {
            let _ = write!(text, "{} ", stripe.device.number);
        }
        text.push_str("1 ");
        let letter = |s: &Stripe| if s.errors.load(Ordering::Relaxed) == 0 { 'A' } else { 'D' };
        text.extend(self.shared.stripes.iter().map(letter));
        text
    }

    fn limits(&self, below: LowerLimits<'_>) -> Limits {
        let bytes = self.layout.chunk().saturating_mul(SECTOR_SIZE);
        let all = self.shared.stripes.iter().map(|s| below.limits(&s.device));
        let limits = all.fold(Limits::new(self.len), |all, one| all.stack(&one));
        let hint = |bytes: u64| u32::try_from(bytes).unwrap_or(0);
        Limits {
            request_stackable: false,
            io_min: hint(bytes).max(limits.io_min),
            io_opt: hint(bytes.saturating_mul(self.layout.stripes())),
            ..limits
        }
    }

    fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        let (mut at, end) = (from.0, from.0 + len.0);
        while at < end && !out.is_full() {
            let (stripe, sector) = self.layout.map(at);
            let now = self.layout.left(at).min(end - at);
            let Stripe { device, offset, .. } = &self.shared.stripes[stripe];
            device.device.extents(Sector(offset.0 + sector), Sectors(now), out);
            at += now;
        }
    }

    fn devices(&self) -> Vec<DeviceRange> {
        let len = Sectors(self.len.0 / self.layout.stripes());
        let used = |s: &Stripe| DeviceRange::new(&s.device, s.offset, len);
        self.shared.stripes.iter().map(used).collect()
    }

    fn max_io_len(&self) -> Option<Sectors> {
        Some(Sectors(self.layout.chunk()))
    }

    fn data_path(&self) -> TargetDataPath {
        let stripes = self.shared.stripes.iter().map(|s| (s.device.clone(), s.offset)).collect();
        let failures = Arc::<StripedShared>::clone(&self.shared);
        TargetDataPath::Striped(StripedTargetDescription { layout: self.layout, stripes, failures })
    }

    fn features(&self) -> TargetFeatures {
        TargetFeatures { flush_bypasses_map: true, ..TargetFeatures::default() }
    }

    fn attach(&self, notify: Arc<dyn TargetHostServices>) {
        // A table is loaded once; a second device would be a bug of the caller.
        let _ = self.shared.notify.set(notify);
    }
}

impl StripeFailureObserver for StripedShared {
    /// Counts the failure on all stripes of the device.
    fn failed(&self, stripe: usize) {
        let id = self.stripes[stripe].device.device.id();
        for stripe in self.stripes.iter().filter(|s| s.device.device.id() == id) {
            // Relaxed: a count for display; it orders nothing.
            let before = stripe.errors.fetch_add(1, Ordering::Relaxed);
            if let Some(notify) = self.notify.get().filter(|_| before < EVENTS_MAX) {
                let number = stripe.device.number;
                let line = || format!("device {number} failed a request, {} in all", before + 1);
                notify.emit(&|| DeviceEventDetails {
                    path: Some(number),
                    ..DeviceEventDetails::new(EventKind::StripeFailed, line())
                });
                notify.event();
            }
        }
    }
}
