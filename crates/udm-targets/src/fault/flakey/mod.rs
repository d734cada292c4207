//! `flakey`: a device that works for some time, fails for some time, and works again.
//!
//! ```text
//! flakey <dev> <offset> <up s> <down s> [<#words> <feature>...]
//! feature: error_reads | error_writes | drop_writes | corrupt_bio_byte <nth> <r|w> <0-255> <flags>
//!          | random_read_corrupt <p> | random_write_corrupt <p>           p of 1000000000
//! ```
//!
//! While the device is up, requests pass. While it is down, the features apply; without features
//! all requests fail. Flushes, discards and write-zeroes count as writes, as in the kernel:
//! `drop_writes` drops a flush, `error_writes` fails it. The time at which a request arrives
//! decides if it meets an up or a down device. A read that arrived while the device was down is
//! corrupted on completion.
//!
//! * **Time** counts in whole seconds from the load of the table. The control half has no clock, so
//!   the first lane of any core that opens sets the origin. A load followed by a resume does this
//!   at once. The origin stays over suspends.
//! * **Corruption of a write** uses a private copy from a pool: the request completes with its
//!   original data.
//! * **The flags mask** of `corrupt_bio_byte` is compared with operation and flags of the request
//!   as Linux 6.12 numbers them (`enum req_op`, `enum req_flag_bits`). A request carries only the
//!   flags that udm knows.
//! * Words after the announced number of features are ignored, as in the kernel.

mod features;
mod lane;

use super::{UnderlyingRange, look_up_device, parse_number};
use features::FlakeyFeatures;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use udm_core::{Cx, DeviceControlError, Lane, Limits, Nanos, Sector, Sectors};
use udm_dm::TargetError;
use udm_dm::target::{DeviceRange, LowerLimits, Target, TargetArgs};

const NAME: &str = "flakey";

/// Maximum bytes of free copies that a lane keeps for later corrupted writes.
const FREE_COPY_BYTES: usize = 1 << 20;

/// The up and down intervals.
struct UpDownSchedule {
    up_s: u32,
    down_s: u32,
    /// Time when the first lane was opened; `NEVER` before.
    origin: AtomicU64,
}

impl UpDownSchedule {
    fn new(up_s: u32, down_s: u32) -> UpDownSchedule {
        UpDownSchedule { up_s, down_s, origin: AtomicU64::new(Nanos::NEVER.0) }
    }

    /// Sets the origin unless it is set.
    fn begin(&self, now: Nanos) {
        // Relaxed: only this number is shared, and a core that loses the race reads the winner's
        // value.
        let _ = self.origin.compare_exchange(Nanos::NEVER.0, now.0, Ordering::Relaxed, Ordering::Relaxed);
    }

    fn is_down(&self, now: Nanos) -> bool {
        let origin = Nanos(self.origin.load(Ordering::Relaxed));
        let elapsed_s = now.since(origin).0 / 1_000_000_000;
        elapsed_s % (u64::from(self.up_s) + u64::from(self.down_s)) >= u64::from(self.up_s)
    }
}

/// The control half.
struct FlakeyTarget {
    under: UnderlyingRange,
    len: Sectors,
    phases: Arc<UpDownSchedule>,
    features: FlakeyFeatures,
}

/// The constructor.
///
/// # Errors
/// The kernel's, for missing words, bad numbers, unknown or conflicting features, or an unknown
/// device.
pub fn create_flakey_target(args: &mut TargetArgs<'_>) -> Result<Arc<dyn Target>, TargetError> {
    let words = args.args;
    if words.len() < 4 {
        return Err(TargetError::new("flakey: Invalid argument count").at(words.len()));
    }
    let bad = |text: &str, word| TargetError::new(format!("flakey: {text}")).at(word);
    let start = parse_number(&words[1]).ok_or_else(|| bad("Invalid device sector", 1))?;
    let up_s: u32 = parse_number(&words[2]).ok_or_else(|| bad("Invalid up interval", 2))?;
    let down_s: u32 = parse_number(&words[3]).ok_or_else(|| bad("Invalid down interval", 3))?;
    if up_s == 0 && down_s == 0 {
        return Err(bad("Total (up + down) interval is zero", 3));
    }
    if up_s.checked_add(down_s).is_none() {
        return Err(bad("Interval overflow", 3));
    }
    let features = FlakeyFeatures::parse(&words[4..]).map_err(|(text, word)| bad(text, 4 + word))?;
    let device = look_up_device(args.resolver, words, 0, "flakey: Device lookup failed")?;
    let phases = Arc::new(UpDownSchedule::new(up_s, down_s));
    let under = UnderlyingRange { device, start: Sector(start) };
    Ok(Arc::new(FlakeyTarget { under, len: args.len, phases, features }))
}

impl Target for FlakeyTarget {
    fn type_name(&self) -> &'static str {
        NAME
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        self.phases.begin(cx.now());
        Ok(Box::new(lane::FlakeyLane::open(self, cx)?))
    }

    fn table(&self) -> String {
        let UpDownSchedule { up_s, down_s, .. } = &*self.phases;
        format!("{} {} {up_s} {down_s} {}", self.under.device.number, self.under.start, self.features)
    }

    fn limits(&self, below: LowerLimits<'_>) -> Limits {
        self.under.limits(self.len, below)
    }

    fn devices(&self) -> Vec<DeviceRange> {
        vec![self.under.used(self.len)]
    }
}
