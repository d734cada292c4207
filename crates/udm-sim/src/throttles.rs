//! Limits of the requests and bytes per second of mapped devices, and the rule that they hold.
//!
//! In one of four worlds, devices get and lose limits at any time, some of them in one group. That
//! nothing is lost or waits for ever is the model's rule for every device. In addition, a device
//! that has had the same limits for a while must not have answered more than they allow.

use crate::environment::lock_environment;
use crate::model::Violation;
use crate::plan::{DisturbanceClass, RunPlan};
use crate::rng::{RngStream, SimRng};
use crate::world::MappedDeviceStackWorld;
use std::sync::Arc;
use udm_core::{Bio, Device as _, Nanos, Op};
use udm_dm::throttle::{QUANTUM, Throttle};
use udm_wire::throttle::{ThrottleKey, ThrottleLimits};

/// Random choice of limits; `None` in worlds without any.
pub(crate) fn draw_throttles(plan: &RunPlan) -> Option<SimRng> {
    let mut chance = SimRng::new(plan.seed, RngStream::Throttles);
    let wanted = plan.bench.is_none() && !plan.without.has(DisturbanceClass::Throttles);
    (wanted && chance.one_in(4)).then_some(chance)
}

/// What a device answered since it has its limits.
pub(crate) struct ThrottleRecord {
    limits: ThrottleLimits,
    /// The time since which all lanes know the limits; `None` if some did not know them yet at the
    /// last answer.
    since: Option<Nanos>,
    /// Requests that had passed and were not answered at that time.
    earlier: u64,
    /// Answered requests and bytes, by [`ThrottleKey::ALL`].
    answered: [u64; ThrottleKey::ALL.len()],
    longest: u64,
}

impl ThrottleRecord {
    /// True if some lane did not know the limits at the last answer.
    pub(crate) fn is_new(&self) -> bool {
        self.since.is_none()
    }

    /// All lanes know the limits from now on; `earlier` requests have passed them.
    pub(crate) fn begin(&mut self, now: Nanos, earlier: u64) {
        (self.since, self.earlier) = (Some(now), earlier);
    }

    /// Counts an answer.
    ///
    /// # Errors
    /// If there were more answers than the limits allow.
    pub(crate) fn answer(&mut self, bio: &Bio, now: Nanos, lanes: u64) -> Result<(), Violation> {
        let Some(since) = self.since else { return Ok(()) };
        let bytes = match bio.op {
            Op::Discard => 512,
            _ => bio.sectors.0.min(1 << 23) * 512,
        };
        self.longest = self.longest.max(bytes);
        for (key, rate) in self.limits.rates() {
            let is_read = bio.op == Op::Read;
            if !(is_read && key.counts_reads() || !is_read && key.counts_writes()) {
                continue;
            }
            let (one, largest) = if key.counts_bytes() { (bytes, self.longest) } else { (1, 1) };
            let answered = &mut self.answered[key as usize];
            *answered += one;
            // A lane may have reserved a part of the rate before another limit let it pass.
            let reserved = lanes * (largest + rate.per_second * QUANTUM.0 / 1_000_000_000);
            let time = u128::from(now.since(since).0);
            let passed =
                u64::try_from(u128::from(rate.per_second) * time / 1_000_000_000).unwrap_or(u64::MAX);
            let most = passed + rate.burst.max(largest) + reserved + self.earlier * largest;
            if *answered > most {
                return Err(format!(
                    "{answered} of {} were answered since {} us, and the limit allows {most}",
                    key.word(),
                    since.0 / 1000
                ));
            }
        }
        Ok(())
    }
}

impl MappedDeviceStackWorld {
    /// Sometimes changes the limits of a device; true if it did. Devices that are paths keep none,
    /// because waiting would be a fault of the path for its deadline and its checks.
    pub(crate) fn change_throttle(&mut self) -> bool {
        let Some(chance) = self.throttles.as_mut().filter(|_| !self.machine.resting) else { return false };
        if !chance.one_in(12) {
            return false;
        }
        let i = chance.below(self.devices.len() as u64) as usize;
        if self.blueprint.via.iter().any(|(_, device)| *device == i) {
            return false;
        }
        let group = chance.one_in(4).then(|| chance.below(self.devices.len() as u64) as usize);
        let throttle = match group.and_then(|other| self.devices[other].mapped.throttle()) {
            Some(of_group) => Some(of_group),
            None => draw_limits(chance).map(Throttle::new),
        };
        let shown = throttle.as_ref().map_or("none".to_owned(), |throttle| throttle.limits().to_string());
        lock_environment(&self.machine.env).say(format!("d{i} has the limits {shown}"));
        self.machine.totals.throttles += 1;
        // The queue of a device merges requests, so its limits count fewer than the front end.
        let is_counted = self.devices[i].mapped.own_queue().is_none();
        self.devices[i].throttled = throttle.as_ref().filter(|_| is_counted).map(|throttle| ThrottleRecord {
            limits: *throttle.limits(),
            since: None,
            earlier: 0,
            answered: Default::default(),
            longest: 0,
        });
        let inboxes = Arc::clone(&self.machine.inboxes);
        self.devices[i].mapped.set_throttle(throttle, &*inboxes);
        true
    }

    /// Begins to count the answers of a device with new limits, once all its lanes know them.
    pub(crate) fn begin_throttle_record(&mut self, device: usize, now: Nanos) {
        let is_new = self.devices[device].throttled.as_ref().is_some_and(ThrottleRecord::is_new);
        if is_new && !self.machine.inboxes.is_on_the_way_to(self.devices[device].mapped.id()) {
            let open = self.machine.cores.iter().flat_map(|core| &core.open);
            let earlier = open.filter(|open| open.device == device).map(|open| open.in_flight as u64).sum();
            self.devices[device].throttled.iter_mut().for_each(|record| record.begin(now, earlier));
        }
    }

    /// Checks that no device counts a request as waiting at rest.
    pub(crate) fn check_throttles_at_rest(&self) -> Result<(), Violation> {
        let waits = |device: &crate::device::MappedDeviceWithModel| device.mapped.throttle_counters().waiting;
        match self.devices.iter().position(|device| waits(device) > 0) {
            Some(i) => {
                Err(format!("at rest, and {} requests wait for limits of d{i}", waits(&self.devices[i])))
            }
            None => Ok(()),
        }
    }

    /// True if a device has limits, which may let requests wait longer than others do.
    pub(crate) fn is_throttled(&self) -> bool {
        self.devices.iter().any(|device| device.mapped.throttle().is_some())
    }
}

/// Limits, or none.
fn draw_limits(chance: &mut SimRng) -> Option<ThrottleLimits> {
    let mut text = String::new();
    for key in ThrottleKey::ALL {
        if chance.one_in(3) {
            let per_second = match key.counts_bytes() {
                true => chance.pick(&[1 << 20, 10 << 20, 1 << 30]),
                false => chance.pick(&[50, 1000, 30_000, 1_000_000]),
            };
            let burst = chance.pick(&[1, per_second / 10, per_second]);
            text += &format!("{}={per_second}:{burst} ", key.word());
        }
    }
    text.parse().ok()
}
