//! Simulated work of helper threads: stores grow, and marks are recorded for stores that cannot be
//! marked invalid themselves.

use super::world::SnapshotWorld;
use crate::environment::lock_environment;
use crate::helper_threads::{BlockingHelperJob, HelperRequest};
use udm_core::DeviceControlError;
use udm_core::errno::ENOSPC;

impl SnapshotWorld {
    /// Completes the helper requests that are due. If the power is off, all of them fail.
    pub(super) fn do_asked(&mut self) {
        loop {
            let mut env = lock_environment(&self.machine.env);
            // In quiescence, requests complete at once. A step of growth may be one sector, so a
            // request could wait for many slow steps.
            let (now, dead, calm) = (env.now, env.dead, env.calm);
            let Some(due) = env.asked.iter().position(|asked| dead || calm || asked.at <= now) else {
                return;
            };
            let HelperRequest { disk, what, .. } = env.asked.remove(due);
            drop(env);
            match what {
                BlockingHelperJob::Grow(size, then) if !dead && self.grow_disk(disk, size) => then(Ok(())),
                BlockingHelperJob::Grow(_, then) => then(Err(DeviceControlError::new(ENOSPC, "no room"))),
                BlockingHelperJob::Mark(kept) if dead => kept(Err("the power is off".into())),
                BlockingHelperJob::Mark(kept) => {
                    let mut env = lock_environment(&self.machine.env);
                    env.marks.get_mut(&disk).into_iter().for_each(|mark| mark.lasts = true);
                    env.say(format!("disk {disk} is marked"));
                    drop(env);
                    self.counts.marked += 1;
                    kept(Ok(()));
                }
            }
        }
    }

    /// Grows a disk. Returns false if the growth fails.
    fn grow_disk(&mut self, side: usize, size: u64) -> bool {
        let mut env = lock_environment(&self.machine.env);
        let fails = !env.calm && self.power.fails && self.machine.control.one_in(8);
        let (one, was_stuck) = (&mut self.sides[side], env.disks[side].stuck);
        // An error may occur after a part of the growth.
        let part = size.saturating_sub(one.block);
        let size = if fails { env.chance.pick(&[0, part]) } else { size };
        env.disks[side].grow(size);
        let now = env.disks[side].size;
        env.say(format!(
            "disk {side} {} {now} sectors",
            if fails { "can't grow, and has" } else { "grows to" }
        ));
        if fails {
            // The store may become full.
            one.small = true;
            one.stuck += u32::from(!was_stuck);
            env.disks[side].stuck = true;
        }
        self.counts.grew += u64::from(!fails);
        !fails
    }

    /// True if the store of `side` was marked since its snapshot was created.
    pub(super) fn is_marked(&self, side: usize) -> bool {
        let env = lock_environment(&self.machine.env);
        env.marks.get(&side).is_some_and(|mark| 2 * mark.step >= self.sides[side].since)
    }
}
