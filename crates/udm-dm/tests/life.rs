//! The complete life of a mapped device: for each state and event, the answer and the next state.
//!
//! The kernel's states are in drivers/md: `table_load`, `table_clear`, `do_suspend` and `do_resume`
//! of dm-ioctl.c, and `dm_submit_bio` of dm.c for requests. One difference in udm: a resume that
//! cannot work is refused with the old table live and running.

mod mapped_fixture;

use mapped_fixture::Fixture;
use std::fmt::Write;
use std::sync::Arc;
use udm_core::errno::EMFILE;
use udm_core::{Batch, BioFlags, DeviceControlError, Lane, Op, Status};
use udm_dm::testing::{TestDisk, bio_without_data};
use udm_dm::{DeviceTransition, MappedDevice, TargetError, TransitionWakeFn};

/// A device over disks `a` (its live table), `b` (its inactive one) and `c`, and a lane of it.
struct LifecycleTest {
    rig: Fixture,
    device: Arc<MappedDevice>,
    b: Arc<TestDisk>,
    lane: Box<dyn Lane>,
    done: Batch,
}

const TABLES: [&str; 3] = ["0 8 linear a 0", "0 8 linear b 0", "0 8 linear c 0"];

/// Causes an event; returns the answer.
type Action = fn(&mut LifecycleTest) -> String;

const EVENTS: [(&str, Action); 11] = [
    ("load", |life| life.load(TABLES[2])),
    ("load, too large", |life| life.load("0 9 linear c 0")),
    ("clear", |life| {
        life.device.clear();
        "done".into()
    }),
    ("suspend", |life| life.change(|device, wake| device.suspend(false, wake))),
    ("suspend, no flush", |life| life.change(|device, wake| device.suspend(true, wake))),
    ("resume", |life| life.change(MappedDevice::resume)),
    ("resume, b does not open", |life| {
        life.b.refuse(Some(DeviceControlError::new(EMFILE, "too many open files")));
        life.change(MappedDevice::resume)
    }),
    ("suspend, and a resume in it", |life| {
        let first = life.device.suspend(false, wake()).expect("nothing is under way");
        let second = life.device.resume(wake()).err().expect("refused").to_string();
        let first = life.end(first);
        format!("{first}; {second}")
    }),
    ("read", |life| life.read(BioFlags::empty())),
    ("read, no waiting", |life| life.read(BioFlags::NOWAIT)),
    ("read ahead", |life| life.read(BioFlags::RAHEAD)),
];

fn wake() -> TransitionWakeFn {
    Arc::new(|| {})
}

fn answer(result: Result<(), TargetError>) -> String {
    result.map_or_else(|e| e.to_string(), |()| "done".into())
}

impl LifecycleTest {
    fn new(live: bool, inactive: bool, suspended: bool) -> LifecycleTest {
        let mut rig = Fixture::new();
        let [_, b, _] = ["a", "b", "c"].map(|name| rig.disk(name, 8));
        let device = rig.make("t");
        let lane = rig.open(&device);
        let mut life = LifecycleTest { rig, device, b, lane, done: Batch::new() };
        if live {
            life.load(TABLES[0]);
            life.change(MappedDevice::resume);
        }
        if inactive {
            life.load(TABLES[1]);
        }
        if suspended {
            life.change(|device, wake| device.suspend(false, wake));
        }
        life
    }

    fn load(&mut self, table: &str) -> String {
        answer(self.rig.load(&self.device, table))
    }

    fn change(
        &mut self,
        begin: impl Fn(&Arc<MappedDevice>, TransitionWakeFn) -> Result<DeviceTransition, TargetError>,
    ) -> String {
        match begin(&self.device, wake()) {
            Ok(change) => self.end(change),
            Err(error) => error.to_string(),
        }
    }

    fn end(&mut self, change: DeviceTransition) -> String {
        answer(self.rig.finish(change, &mut [&mut self.lane], &mut self.done))
    }

    /// Reads a sector. Returns the outcome, or that the read waits.
    fn read(&mut self, flags: BioFlags) -> String {
        let mut bio = bio_without_data(Op::Read, 0, 1);
        bio.flags = flags;
        self.rig.world.submit(0, &mut *self.lane, [bio]);
        for _ in 0..4 {
            self.done.extend(self.rig.world.poll(0, &mut *self.lane));
        }
        match self.done.pop() {
            Some(bio) if bio.status == Status::Ok => "served".into(),
            Some(bio) => format!("fails: {}", bio.status),
            None => "waits".into(),
        }
    }

    /// The disks of its tables, and whether it is suspended.
    fn state(&self) -> String {
        let number = |table: String| match table.split(' ').nth(3) {
            Some(number) => ["a", "b", "c"][number.trim_start_matches("7:").parse::<usize>().unwrap() - 1],
            None => "-",
        };
        let [live, inactive] = [false, true].map(|inactive| number(self.device.table_text(inactive)));
        let state = if self.device.info().suspended { "suspended" } else { "active" };
        format!("{live} {inactive} {state}")
    }

    /// Lets all waiting bios complete or fail before the test ends.
    fn release(mut self) {
        self.b.refuse(None);
        self.change(MappedDevice::resume);
        for _ in 0..4 {
            self.done.extend(self.rig.world.poll(0, &mut *self.lane));
        }
    }
}

#[test]
fn every_transition() {
    let mut text = String::from("live, inactive, state\n");
    for number in 0..8 {
        let [live, inactive, suspended] = [4, 2, 1].map(|bit| number & bit != 0);
        for (event, act) in EVENTS {
            let mut life = LifecycleTest::new(live, inactive, suspended);
            let before = life.state();
            let answer = act(&mut life);
            let after = life.state();
            let after = if after == before { "same" } else { &after };
            writeln!(text, "{before:<13} | {event:<27} | {after:<13} | {answer}").unwrap();
            life.release();
        }
    }
    insta::assert_snapshot!(text);
}
