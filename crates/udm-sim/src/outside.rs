//! What the outside does besides answering requests: writes that land late, paths that let go of
//! what hung, disks that change.

use crate::cells::stamp_text;
use crate::env::lock;
use crate::timers::Timer;
use crate::world::World;
use udm_core::Nanos;

impl World {
    /// Lets the late writes take effect that are due at `at`, or now.
    pub(crate) fn land(&mut self, at: Option<Nanos>) {
        let mut env = lock(&self.env);
        if env.late.is_empty() {
            return;
        }
        let (now, ending) = (at.unwrap_or(env.now), env.ending());
        for (disk, sector, stamp) in crate::effect::land(&mut env, now) {
            env.say(format!("disk {disk} sector {sector}: {} lands late", stamp_text(stamp)));
            self.model.landed(disk, sector, stamp, ending);
        }
    }

    /// A path lets go of what hangs in it: its cores hear of it, as of any end of a request.
    pub(crate) fn release(&mut self, p: usize) {
        let mut env = lock(&self.env);
        env.paths[p].released += 1;
        let now = env.now;
        self.cores.iter_mut().flat_map(|c| &mut c.open).for_each(|o| o.wake = o.wake.min(now));
        self.cores.iter_mut().flat_map(|c| &mut c.tasks).for_each(|task| task.rouse(now));
    }

    /// A disk becomes read-only for a while, shows more sectors, or takes requests of other
    /// lengths. Tables hear of it at their next resume.
    pub(crate) fn change_limits(&mut self) {
        let mut env = lock(&self.env);
        let d = self.control.below(env.disks.len() as u64) as usize;
        let now = env.now;
        let disk = &mut env.disks[d];
        if disk.log {
            return;
        }
        self.totals.limits += 1;
        let what = match self.control.below(4) {
            0 if !disk.read_only => {
                disk.set_read_only(true);
                let last = self.control.below(500) * 1_000_000;
                self.timers.set(now + Nanos(last), Timer::Writable(d));
                "is read-only".to_string()
            }
            1 => {
                disk.size = disk.sectors();
                format!("shows {} sectors", disk.size)
            }
            _ => {
                let mut max = [self.control.pick(&[8, 64, 1024]), 0, 0];
                max[1] = self.control.pick(&[0, 16, 256, u64::from(u32::MAX)]);
                max[2] = self.control.pick(&[0, 16, 256, u64::from(u32::MAX)]);
                disk.set_max(max);
                format!("takes at most {max:?} sectors")
            }
        };
        env.say(format!("disk {d} {what}"));
    }
}
