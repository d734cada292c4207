//! Two cores under load while tables are loaded, suspended and resumed at random. No request is
//! lost, duplicated, failed or mixed up.

use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;
use udm_core::{Bio, DevNo, Device, Lane, Op, Status};
use udm_dm::testing::{
    SteppedTestCores, TestControlIo, TestDeviceNameResolver, TestDisk, copy_bio_data, make_test_read_bio,
    make_test_write_bio,
};
use udm_dm::{DeviceTransition, MappedDevice, Table};

const CORES: usize = 2;
const SLOTS: u64 = 8;
/// Long enough that pieces, boundaries and chunks lie within a slot.
const SLOT: u64 = 12;
const SIZE: u64 = CORES as u64 * SLOTS * SLOT;

/// Tables that map every sector to the same sector of the disk.
const TABLES: [&str; 5] = [
    "0 192 linear /disk 0",
    "0 77 linear /disk 0\n77 115 linear /disk 77",
    "0 192 striped 1 8 /disk 0",
    "0 100 linear @lower 0\n100 92 striped 1 4 /disk 100",
    "0 192 linear @lower 0",
];

#[derive(Clone, Debug)]
enum Action {
    Submit { core: usize, slots: Vec<(u64, bool)> },
    Poll { core: usize },
    Deliver { core: usize },
    Load { lower: bool, table: usize },
    Suspend { lower: bool },
    Resume { lower: bool },
    Step { lower: bool },
    Hold(bool),
    Release(usize),
}

fn action() -> impl Strategy<Value = Action> {
    let core = 0..CORES;
    let slots = prop::collection::vec((0..SLOTS, any::<bool>()), 1..5);
    prop_oneof![
        8 => (core.clone(), slots).prop_map(|(core, slots)| Action::Submit { core, slots }),
        8 => core.clone().prop_map(|core| Action::Poll { core }),
        3 => core.prop_map(|core| Action::Deliver { core }),
        2 => (any::<bool>(), 0..TABLES.len()).prop_map(|(lower, table)| Action::Load { lower, table }),
        2 => any::<bool>().prop_map(|lower| Action::Suspend { lower }),
        3 => any::<bool>().prop_map(|lower| Action::Resume { lower }),
        6 => any::<bool>().prop_map(|lower| Action::Step { lower }),
        2 => any::<bool>().prop_map(Action::Hold),
        2 => (0usize..6).prop_map(Action::Release),
    ]
}

struct Fixture {
    world: SteppedTestCores,
    resolver: TestDeviceNameResolver,
    disk: Arc<TestDisk>,
    /// The upper device and the lower one.
    devices: [Arc<MappedDevice>; 2],
    changes: [Option<DeviceTransition>; 2],
    lanes: Vec<Box<dyn Lane>>,
    hand_back: bool,
    serial: u8,
    /// For each slot its content (0: never written), and the content that a write in flight stores.
    content: Vec<u8>,
    busy: BTreeMap<u64, Option<u8>>,
    finished: usize,
}

impl Fixture {
    fn new(hand_back: bool, max_sectors: u64) -> Fixture {
        let disk = TestDisk::new(SIZE);
        disk.set_limits(|l| l.max_sectors.0 = max_sectors);
        disk.hand_back(hand_back);
        let mut resolver = TestDeviceNameResolver::new();
        resolver.add("/disk", DevNo { major: 7, minor: 0 }, Arc::<TestDisk>::clone(&disk));
        let device = |name, minor| MappedDevice::new(name, None, DevNo { major: 254, minor }).unwrap();
        let (upper, lower) = (device("upper", 0), device("lower", 1));
        resolver.add("@lower", lower.number(), Arc::<MappedDevice>::clone(&lower));
        let mut rig = Fixture {
            world: SteppedTestCores::new(CORES),
            resolver,
            disk,
            devices: [upper, lower],
            changes: [None, None],
            lanes: Vec::new(),
            hand_back,
            serial: 0,
            content: vec![0; CORES * SLOTS as usize],
            busy: BTreeMap::new(),
            finished: 0,
        };
        for lower in [true, false] {
            rig.action(Action::Load { lower, table: 0 });
            rig.action(Action::Resume { lower });
            for _ in 0..4 {
                (0..CORES).for_each(|core| rig.world.deliver(core));
                rig.action(Action::Step { lower });
            }
        }
        let upper = Arc::clone(&rig.devices[0]);
        for core in 0..CORES {
            rig.lanes.push(rig.world.open(core, &*upper as &dyn Device).unwrap());
        }
        rig
    }

    fn action(&mut self, action: Action) {
        match action {
            Action::Submit { core, slots } => {
                let mut bios: Vec<Box<Bio>> = Vec::new();
                for (slot, is_write) in slots {
                    let slot = core as u64 * SLOTS + slot;
                    if self.busy.contains_key(&slot) {
                        continue;
                    }
                    self.serial = self.serial % 255 + 1;
                    let mut bio = if is_write {
                        make_test_write_bio(slot * SLOT, SLOT, self.serial)
                    } else {
                        make_test_read_bio(slot * SLOT, SLOT)
                    };
                    bio.cookie = slot;
                    self.busy.insert(slot, is_write.then_some(self.serial));
                    bios.push(bio);
                }
                self.world.submit(core, &mut *self.lanes[core], bios);
            }
            Action::Poll { core } => {
                for bio in self.world.poll(core, &mut *self.lanes[core]) {
                    self.home(&bio);
                }
            }
            Action::Deliver { core } => self.world.deliver(core),
            Action::Load { lower, table } => {
                let table = if lower { table % 3 } else { table };
                let lines = udm_wire::table::parse_table(TABLES[table]).unwrap();
                let table = Table::build(
                    udm_targets::TARGETS,
                    &lines,
                    &mut self.resolver,
                    &TestControlIo::new(),
                    CORES,
                )
                .unwrap();
                self.devices[usize::from(lower)].load(table).unwrap();
            }
            Action::Suspend { lower } => {
                // A disk that hands back fails its held requests in a flushing suspend.
                let noflush = self.hand_back;
                let device = &self.devices[usize::from(lower)];
                if let Ok(change) = device.suspend(noflush, Arc::new(|| {})) {
                    self.changes[usize::from(lower)] = Some(change);
                }
            }
            Action::Resume { lower } => {
                let device = &self.devices[usize::from(lower)];
                if let Ok(change) = device.resume(Arc::new(|| {})) {
                    self.changes[usize::from(lower)] = Some(change);
                }
            }
            Action::Step { lower } => {
                let cores = self.world.cores();
                let change = &mut self.changes[usize::from(lower)];
                if let Some(result) = change.as_mut().and_then(|change| change.step(&*cores)) {
                    result.expect("nothing here is refused");
                    *change = None;
                }
            }
            Action::Hold(hold) => self.disk.hold(hold),
            Action::Release(n) => self.disk.release(n),
        }
    }

    fn home(&mut self, bio: &Bio) {
        let slot = bio.cookie;
        let written = self.busy.remove(&slot).expect("a bio that is due, once");
        assert_eq!((bio.sector.0, bio.sectors.0), (slot * SLOT, SLOT));
        assert_eq!(bio.status, Status::Ok);
        assert_eq!(bio.op == Op::Write, written.is_some());
        let content = &mut self.content[slot as usize];
        *content = written.unwrap_or(*content);
        let expected = match *content {
            0 => vec![0; (SLOT * 512) as usize],
            fill => copy_bio_data(&make_test_write_bio(0, SLOT, fill)),
        };
        assert!(copy_bio_data(bio) == expected, "{bio:?}");
        self.finished += 1;
    }

    /// Ends all changes and requests; all bios complete.
    fn wind_up(&mut self) {
        self.disk.hold(false);
        for round in 0..200 {
            for lower in [true, false] {
                if self.changes[usize::from(lower)].is_none()
                    && self.devices[usize::from(lower)].is_suspended()
                {
                    self.action(Action::Resume { lower });
                }
                self.action(Action::Step { lower });
            }
            (0..CORES).for_each(|core| self.action(Action::Poll { core }));
            let idle =
                self.changes.iter().all(Option::is_none) && self.devices.iter().all(|d| !d.is_suspended());
            if idle && self.busy.is_empty() && round > 3 {
                return;
            }
        }
        panic!("not home: {:?}", self.busy);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn nothing_is_lost(
        hand_back in any::<bool>(),
        max_sectors in prop_oneof![Just(1u64), Just(5), Just(1 << 20)],
        acts in prop::collection::vec(action(), 1..200),
    ) {
        let mut rig = Fixture::new(hand_back, max_sectors);
        for action in acts {
            rig.action(action);
        }
        rig.wind_up();
        for (slot, &fill) in rig.content.iter().enumerate().filter(|(_, fill)| **fill != 0) {
            prop_assert!(rig.disk.bytes(slot as u64 * SLOT, SLOT) == copy_bio_data(&make_test_write_bio(0, SLOT, fill)));
        }
        prop_assert_eq!(rig.disk.waiting(), 0);
        rig.changes = [None, None];
        rig.lanes.clear();
        prop_assert_eq!(rig.disk.opened(), 0);
    }
}
