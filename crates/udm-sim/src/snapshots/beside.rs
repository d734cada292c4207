//! Threads beside the cores do what they were asked for: stores grow, and marks are kept of stores
//! that can't be made to say that they are invalid.

use super::world::SnapshotWorld;
use crate::beside::{HelperRequest, HelperRequestKind};
use crate::environment::lock;
use udm_core::OpenError;
use udm_core::errno::ENOSPC;

impl SnapshotWorld {
    /// What is due is done. With the power off nothing is, and whoever waits for it is let go.
    pub(super) fn do_asked(&mut self) {
        loop {
            let mut env = lock(&self.machine.env);
            // A step of growth may be one sector: at rest a request does not wait for many slow
            // ones.
            let (now, dead, calm) = (env.now, env.dead, env.calm);
            let Some(due) = env.asked.iter().position(|asked| dead || calm || asked.at <= now) else {
                return;
            };
            let HelperRequest { disk, what, .. } = env.asked.remove(due);
            drop(env);
            match what {
                HelperRequestKind::Grow(size, then) if !dead && self.grow_disk(disk, size) => then(Ok(())),
                HelperRequestKind::Grow(_, then) => then(Err(OpenError::new(ENOSPC, "no room"))),
                HelperRequestKind::Mark(kept) if dead => kept(Err("the power is off".into())),
                HelperRequestKind::Mark(kept) => {
                    let mut env = lock(&self.machine.env);
                    env.marks.get_mut(&disk).into_iter().for_each(|mark| mark.lasts = true);
                    env.say(format!("disk {disk} is marked"));
                    drop(env);
                    self.counts.marked += 1;
                    kept(Ok(()));
                }
            }
        }
    }

    /// A disk becomes longer, or can't.
    fn grow_disk(&mut self, side: usize, size: u64) -> bool {
        let mut env = lock(&self.machine.env);
        let fails = !env.calm && self.fails && self.machine.control.one_in(8);
        let (one, was_stuck) = (&mut self.sides[side], env.disks[side].stuck);
        // What it had before an error it keeps.
        let part = size.saturating_sub(one.block);
        let size = if fails { env.chance.pick(&[0, part]) } else { size };
        env.disks[side].grow(size);
        let now = env.disks[side].size;
        env.say(format!(
            "disk {side} {} {now} sectors",
            if fails { "can't grow, and has" } else { "grows to" }
        ));
        if fails {
            // It may become full.
            one.small = true;
            one.stuck += u32::from(!was_stuck);
            env.disks[side].stuck = true;
        }
        self.counts.grew += u64::from(!fails);
        !fails
    }

    /// The store of `side` was marked, for what it lost since its snapshot was made.
    pub(super) fn is_marked(&self, side: usize) -> bool {
        let env = lock(&self.machine.env);
        env.marks.get(&side).is_some_and(|mark| 2 * mark.step >= self.sides[side].since)
    }
}
