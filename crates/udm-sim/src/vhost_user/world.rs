//! A world of disks of virtual machines: cores, disks, sessions and machines, on one thread, in an
//! order drawn from a seed.

use super::counts::VhostUserCounts;
use super::guest::{GuestDisk, GuestHabits, OrderlyGuest};
use super::hostile::HostileGuest;
use super::machine::{Machine, MachineMemoryCopy, RingGuest};
use super::memory::{BLOCK, MachineMemory};
use super::model::GuestDiskModel;
use super::ring::DriverRing;
use crate::counts::CombinedRunHash;
use crate::disk::SimDisk;
use crate::environment::{Env, SharedEnv, SimPathState, lock_environment};
use crate::model::Violation;
use crate::nbd::clock;
use crate::nbd::net::SimNetwork;
use crate::nbd::ring_core::{RunningDeviceChange, SteppedRingCore};
use crate::path::SimPath;
use crate::plan::{DisturbanceClass, RunPlan};
use crate::rng::{RngStream, SimRng};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use udm_core::Nanos;
use udm_dm::MappedDevice;
use udm_frontends::nbd::Exports;
use udm_runtime::ProcessCores;
use udm_wire::virtio::VirtioFeatures;

/// Whether the server runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ServerState {
    /// It serves.
    Serving,
    /// It ends in order.
    Ending,
    /// It was killed, also in the middle of a turn: what it does has no effect.
    Killed,
}

/// A simulated world of disks of virtual machines.
pub(super) struct VhostUserWorld {
    pub(super) plan: RunPlan,
    pub(super) env: SharedEnv,
    pub(super) paths: Vec<Arc<SimPath>>,
    /// The device of each machine, while the server runs.
    pub(super) devices: Vec<Option<Arc<MappedDevice>>>,
    pub(super) changes: Vec<RunningDeviceChange>,
    pub(super) exports: Arc<Exports>,
    pub(super) core_set: Arc<ProcessCores>,
    /// `None` while a core has its turn.
    pub(super) cores: Vec<Option<SteppedRingCore>>,
    pub(super) net: Rc<RefCell<SimNetwork>>,
    pub(super) machines: Vec<Machine>,
    /// The features that each machine may use.
    pub(super) offered: Vec<VirtioFeatures>,
    pub(super) model: GuestDiskModel,
    pub(super) schedule: SimRng,
    pub(super) work: SimRng,
    pub(super) control: SimRng,
    #[cfg_attr(not(feature = "interleave"), expect(dead_code, reason = "used only within turns"))]
    pub(super) between: SimRng,
    pub(super) step: u64,
    pub(super) count: usize,
    pub(super) latency: u64,
    pub(super) fails: bool,
    pub(super) state: ServerState,
    /// The memory of the machines at the moment of the kill.
    pub(super) copies: Vec<MachineMemoryCopy>,
    /// The kill is a power cut.
    pub(super) is_power_cut: bool,
    pub(super) is_resting: bool,
    /// The restores of paths in trouble: time and path.
    pub(super) restores: Vec<(Nanos, usize)>,
    pub(super) rest_at: u64,
    /// Lines of the log about the ring of the hostile guest.
    pub(super) hostile_lines: u64,
    /// Memory in use before the server was created, in bytes.
    pub(super) base: i64,
    /// A violation that was found within a call that cannot return it.
    pub(super) wrong: Option<Violation>,
    pub(super) counts: VhostUserCounts,
}

/// Features that a front end of udm may use for a disk with these limits.
fn offered_features(max: [u64; 3]) -> VirtioFeatures {
    let mut features = VirtioFeatures::VERSION_1
        | VirtioFeatures::VHOST_PROTOCOL_FEATURES
        | VirtioFeatures::EVENT_IDX
        | VirtioFeatures::RING_PACKED
        | VirtioFeatures::INDIRECT_DESC
        | VirtioFeatures::BLK_SEG_MAX
        | VirtioFeatures::BLK_BLK_SIZE
        | VirtioFeatures::BLK_TOPOLOGY
        | VirtioFeatures::BLK_FLUSH
        | VirtioFeatures::BLK_CONFIG_WCE
        | VirtioFeatures::BLK_MQ;
    features.set(VirtioFeatures::BLK_DISCARD, max[1] > 0);
    features.set(VirtioFeatures::BLK_WRITE_ZEROES, max[2] > 0);
    features
}

impl VhostUserWorld {
    pub(super) fn new(plan: &RunPlan) -> Result<VhostUserWorld, Violation> {
        let mut build = SimRng::new(plan.seed, RngStream::Build);
        let on = |class| !plan.without.has(class);
        let count = plan.cores.unwrap_or(build.pick(&[1, 1, 2, 2, 3]));
        let fails = build.one_in(3) && on(DisturbanceClass::Errors);
        let mut env = Env::new(plan.seed, plan.keep_events);
        (env.torn, env.lags) = (on(DisturbanceClass::Torn), false);
        let hostile = (on(DisturbanceClass::Wild) && build.below(3) > 0).then_some(1);
        let number = if hostile.is_some() { 2 } else { build.pick(&[1, 1, 2]) };
        let now = env.now;
        let (mut machines, mut sizes, mut offered) = (Vec::new(), Vec::new(), Vec::new());
        for m in 0..number {
            let block: u64 = build.pick(&[1, 1, 8]);
            let sectors = 8 * build.between(2, 10);
            let most = build.pick(&[u64::from(u32::MAX), 8, 8 * block]);
            let discards = if on(DisturbanceClass::Trim) { build.pick(&[0, most, most]) } else { 0 };
            let max = [most, discards, build.pick(&[0, u64::from(u32::MAX), 16])];
            let mut disk = SimDisk::new(m, sectors);
            (disk.log, disk.block, disk.max) = (hostile == Some(m), block, max);
            (0..sectors).for_each(|sector| disk.blank(sector));
            (disk.volatile, disk.fua) = (build.below(4) > 0, build.one_in(2));
            disk.start();
            disk.error_one_in = if fails { build.pick(&[0, 100, 1000]) } else { 0 };
            env.disks.push(disk);
            let mut path = SimPathState::healthy(m, build.pick(&[2_000, 20_000, 200_000, 2_000_000]));
            if on(DisturbanceClass::Full) {
                path.room = build.pick(&[usize::MAX, usize::MAX, 2, 16]);
            }
            path.prompt = on(DisturbanceClass::Prompt) && build.one_in(3);
            env.paths.push(path);
            sizes.push(sectors);
            offered.push(offered_features(max));
            let disk = GuestDisk { index: m, sectors, block };
            machines.push(VhostUserWorld::build_machine(plan, &mut build, disk, hostile == Some(m), now)?);
        }
        for (machine, offered) in machines.iter_mut().zip(&offered) {
            machine.draw_features(*offered, &mut build);
        }
        let env = Arc::new(Mutex::new(env));
        Ok(VhostUserWorld {
            paths: (0..number).map(|p| Arc::new(SimPath::new(&env, p))).collect(),
            devices: (0..number).map(|_| None).collect(),
            changes: Vec::new(),
            exports: Arc::default(),
            core_set: ProcessCores::new(count).map_err(|e| e.to_string())?,
            cores: Vec::new(),
            net: Rc::new(RefCell::new(SimNetwork::new(SimRng::new(plan.seed, RngStream::SimNetwork)))),
            machines,
            offered,
            model: GuestDiskModel::new(&sizes, hostile),
            schedule: SimRng::new(plan.seed, RngStream::Schedule),
            work: SimRng::new(plan.seed, RngStream::Work),
            control: SimRng::new(plan.seed, RngStream::Control),
            between: SimRng::new(plan.seed, RngStream::Between),
            step: 0,
            count,
            latency: build.pick(&[100, 10_000, 1_000_000]),
            fails,
            state: ServerState::Serving,
            copies: Vec::new(),
            is_power_cut: false,
            is_resting: false,
            restores: Vec::new(),
            rest_at: 500 + build.span(1500),
            hostile_lines: 0,
            base: 0,
            wrong: None,
            counts: VhostUserCounts::default(),
            plan: plan.clone(),
            env,
        })
    }

    fn build_machine(
        plan: &RunPlan,
        build: &mut SimRng,
        disk: GuestDisk,
        is_hostile: bool,
        now: Nanos,
    ) -> Result<Machine, Violation> {
        let failed = |e: std::io::Error| e.to_string();
        let on = |class| !plan.without.has(class);
        let rings: usize = if is_hostile { 2 } else { build.pick(&[1, 1, 2, 3]) };
        let memory = MachineMemory::new(rings, build.one_in(2)).map_err(failed)?;
        let pause = build.pick(&[1_000, 30_000, 300_000]);
        let mut guests = Vec::new();
        for index in 0..rings {
            // The hostile ring is the first one, and its block is the last one of the memory.
            let place = if is_hostile { rings - 1 - index } else { index };
            let size = build.pick(&[8, 16, 64]);
            let ring = DriverRing::new(place * BLOCK, size).map_err(failed)?;
            if is_hostile && index == 0 {
                guests.push(RingGuest::Hostile(HostileGuest {
                    ring,
                    next: now,
                    pause,
                    sectors: disk.sectors,
                    acts: 0,
                }));
                continue;
            }
            let habits = GuestHabits {
                trims: on(DisturbanceClass::Trim),
                flushes: on(DisturbanceClass::Flush),
                pieces: on(DisturbanceClass::Pieces) && build.one_in(2),
                wild: on(DisturbanceClass::Wild),
                depth: plan.depth.unwrap_or(build.pick(&[1, 3, 8])),
                pause,
            };
            guests.push(RingGuest::Orderly(OrderlyGuest::new(ring, habits, now)));
        }
        Ok(Machine {
            memory,
            bases: Vec::new(),
            guests,
            disk,
            is_hostile,
            has_record: build.below(4) > 0,
            inflight: None,
            features: VirtioFeatures::empty(),
            negotiates_acks: true,
            wants_through: false,
            through_since: None,
            connection: None,
            session: None,
            is_in_step: false,
            unread: 0,
            has_left: false,
            may_fail: false,
            is_rebooting: false,
            next: now,
            lines_allowed: 0,
        })
    }

    pub(super) fn counts(&self) -> VhostUserCounts {
        let env = lock_environment(&self.env);
        let acts = self.machines.iter().flat_map(|machine| &machine.guests).map(|guest| match guest {
            RingGuest::Hostile(guest) => guest.acts,
            RingGuest::Orderly(_) => 0,
        });
        VhostUserCounts {
            steps: self.step,
            requests: self.model.requests,
            errors: self.model.errors,
            compared: self.model.compared,
            acts: acts.sum(),
            faults: env.faults,
            simulated: env.now.0,
            hash: CombinedRunHash(env.trace.hash()),
            ..self.counts
        }
    }

    pub(super) fn say(&self, text: impl Into<String>) {
        lock_environment(&self.env).say(text);
    }

    /// Sets the clocks for a turn of core `c`, or of another part.
    pub(super) fn set_turn(&mut self, c: Option<usize>) -> Nanos {
        let mut env = lock_environment(&self.env);
        // All turns have different times.
        env.now = env.now + Nanos(1);
        env.step = self.step;
        env.core = c.map_or(crate::trace::NO_CORE, |c| c as u16);
        clock::set_simulated_clock(env.now, Nanos(0));
        env.now
    }
}
