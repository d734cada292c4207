//! Actions of the environment on its own: late effects of writes, and changes of disks.

use crate::environment::lock_environment;
use crate::register_model::stamp_text;
use crate::timers::TimedEvent;
use crate::world::MappedDeviceStackWorld;
use udm_core::Nanos;

impl MappedDeviceStackWorld {
    /// Applies the late writes that are due at `at`, or now.
    pub(crate) fn land(&mut self, at: Option<Nanos>) {
        let mut env = lock_environment(&self.machine.env);
        if env.late.is_empty() {
            return;
        }
        let (now, ending) = (at.unwrap_or(env.now), env.ending());
        for (disk, sector, stamp) in crate::write_effects::apply_due_late_writes(&mut env, now) {
            env.say(format!("disk {disk} sector {sector}: {} lands late", stamp_text(stamp)));
            self.machine.model.landed(disk, sector, stamp, ending);
        }
    }

    /// Makes a disk read-only for a while, larger, or changes its limits. Tables see the change at
    /// their next resume.
    pub(crate) fn change_limits(&mut self) {
        let mut env = lock_environment(&self.machine.env);
        let d = self.machine.control.below(env.disks.len() as u64) as usize;
        let now = env.now;
        let disk = &mut env.disks[d];
        if disk.log {
            return;
        }
        self.machine.totals.limits += 1;
        let what = match self.machine.control.below(4) {
            0 if !disk.read_only => {
                disk.set_read_only(true);
                let last = self.machine.control.below(500) * 1_000_000;
                self.machine.timers.set(now + Nanos(last), TimedEvent::Writable(d));
                "is read-only".to_string()
            }
            1 => {
                disk.size = disk.sectors();
                format!("shows {} sectors", disk.size)
            }
            _ => {
                let mut max = [self.machine.control.pick(&[8, 64, 1024]), 0, 0];
                max[1] = self.machine.control.pick(&[0, 16, 256, u64::from(u32::MAX)]);
                max[2] = self.machine.control.pick(&[0, 16, 256, u64::from(u32::MAX)]);
                disk.set_max(max);
                format!("takes at most {max:?} sectors")
            }
        };
        env.say(format!("disk {d} {what}"));
    }
}
