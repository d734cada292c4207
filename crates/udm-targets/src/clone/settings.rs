//! The settings of hydration: from the table, changed by messages.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use udm_wire::boot_profile::HydrationOrder;

/// The settings of a table. Relaxed: each value is used by itself, and a late view of it is
/// harmless.
pub(super) struct HydrationSettings {
    enabled: AtomicBool,
    threshold: AtomicU32,
    batch: AtomicU32,
    /// The values of the table.
    initial: HydrationValues,
    /// The regions that are hydrated before the others.
    pub first: HydrationOrder,
}

/// Values of all settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HydrationValues {
    /// Regions are hydrated in the background.
    pub enabled: bool,
    /// Maximum number of regions that are hydrated at a time in the background.
    pub threshold: u32,
    /// Number of adjacent regions that are copied together; 0 counts as 1.
    pub batch: u32,
}

impl Default for HydrationValues {
    fn default() -> HydrationValues {
        HydrationValues { enabled: true, threshold: 1, batch: 1 }
    }
}

impl HydrationSettings {
    pub(super) fn new(initial: HydrationValues, first: HydrationOrder) -> HydrationSettings {
        HydrationSettings {
            enabled: AtomicBool::new(initial.enabled),
            threshold: AtomicU32::new(initial.threshold),
            batch: AtomicU32::new(initial.batch),
            initial,
            first,
        }
    }

    /// The current values.
    pub(super) fn values(&self) -> HydrationValues {
        HydrationValues {
            enabled: self.enabled.load(Ordering::Relaxed),
            threshold: self.threshold.load(Ordering::Relaxed),
            batch: self.batch.load(Ordering::Relaxed),
        }
    }

    /// True if messages have changed the values of the table.
    pub(super) fn are_changed(&self) -> bool {
        self.values() != self.initial
    }

    /// Executes a message. Returns false for an unknown one; nothing has changed then. As in the
    /// kernel, the case of letters does not matter, and words after the first two messages are
    /// ignored.
    pub(super) fn message(&self, words: &[String]) -> bool {
        let Some((name, values)) = words.split_first() else { return false };
        match name.to_ascii_lowercase().as_str() {
            "enable_hydration" => self.enabled.store(true, Ordering::Relaxed),
            "disable_hydration" => self.enabled.store(false, Ordering::Relaxed),
            "hydration_threshold" => return HydrationSettings::set(&self.threshold, values),
            "hydration_batch_size" => return HydrationSettings::set(&self.batch, values),
            _ => return false,
        }
        true
    }

    fn set(setting: &AtomicU32, values: &[String]) -> bool {
        let [value] = values else { return false };
        let value = udm_dm::target::parse_decimal_u64(value).and_then(|value| u32::try_from(value).ok());
        value.inspect(|value| setting.store(*value, Ordering::Relaxed)).is_some()
    }
}
