//! The extents of a table are those of the sectors below, each looked up by itself.

use std::sync::Arc;
use udm_core::errno::{ENOENT, EOPNOTSUPP};
use udm_core::{
    Cx, DevNo, Device, DeviceControlError, DeviceId, ExtentKind, Extents, Lane, Limits, Sector, Sectors,
};
use udm_dm::table::Table;
use udm_dm::target::{DeviceLookupError, DeviceNameResolver, ResolvedDevice};
use udm_dm::testing::TestControlIo;

/// A device with a fixed pattern of holes.
struct PatternedHoles {
    id: DeviceId,
    minor: u32,
}

impl PatternedHoles {
    fn content(minor: u32, sector: u64) -> ExtentKind {
        let odd = (sector / 3 + u64::from(minor) * sector / 40) % 3 == 1;
        if odd { ExtentKind::Hole } else { ExtentKind::Data }
    }
}

impl Device for PatternedHoles {
    fn id(&self) -> DeviceId {
        self.id
    }
    fn open(&self, _: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        Err(DeviceControlError::new(EOPNOTSUPP, "nobody does I/O here"))
    }
    fn limits(&self) -> Limits {
        Limits::new(Sectors(10_000))
    }
    fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        (from.0..from.0 + len.0).for_each(|at| out.push(Sectors(1), PatternedHoles::content(self.minor, at)));
    }
}

/// A resolver of `/0` to `/9`.
struct TenDevices(Vec<ResolvedDevice>);

impl TenDevices {
    fn new() -> TenDevices {
        let device = |minor| ResolvedDevice {
            number: DevNo { major: 253, minor },
            name: format!("/{minor}"),
            device: Arc::new(PatternedHoles { id: DeviceId::new(), minor }),
            hold: None,
        };
        TenDevices((0..10).map(device).collect())
    }
}

impl DeviceNameResolver for TenDevices {
    fn get(&mut self, word: &str) -> Result<ResolvedDevice, DeviceLookupError> {
        let found = self.0.iter().find(|d| d.name == word);
        found.cloned().ok_or(DeviceLookupError { errno: ENOENT, reason: String::new() })
    }
}

fn content_of(table: &Table, from: u64, len: u64) -> Vec<ExtentKind> {
    let mut out = Extents::new(usize::MAX);
    table.extents(Sector(from), Sectors(len), &mut out);
    let runs = out.list().iter();
    runs.flat_map(|run| std::iter::repeat_n(run.content, run.len.0 as usize)).collect()
}

#[test]
fn tables_say_what_is_below() {
    let text = "0 10 zero\n10 50 linear /1 33\n60 240 striped 3 10 /2 5 /3 0 /4 100\n300 20 error\n320 30 linear /5 0";
    let table = Table::build(
        udm_targets::TARGETS,
        &udm_wire::table::parse_table(text).unwrap(),
        &mut TenDevices::new(),
        &TestControlIo::new(),
        1,
    )
    .unwrap();
    let expected = |at: u64| match at {
        0..10 => ExtentKind::Hole,
        10..60 => PatternedHoles::content(1, at - 10 + 33),
        60..300 => {
            let (chunk, within) = ((at - 60) / 10, (at - 60) % 10);
            let (stripe, row) = (chunk % 3, chunk / 3);
            PatternedHoles::content(2 + stripe as u32, [5, 0, 100][stripe as usize] + row * 10 + within)
        }
        300..320 => ExtentKind::Data,
        _ => PatternedHoles::content(5, at - 320),
    };
    for (from, len) in [(0, 350), (0, 1), (9, 2), (59, 12), (77, 200), (299, 22), (349, 1), (61, 1)] {
        let wanted: Vec<_> = (from..from + len).map(expected).collect();
        assert_eq!(content_of(&table, from, len), wanted, "{from} +{len}");
    }
}

#[test]
fn a_multipath_device_is_what_its_paths_lead_to() {
    let text = "0 100 multipath 0 0 1 1 round-robin 0 2 1 /7 1 /8 1";
    let table = Table::build(
        udm_targets::TARGETS,
        &udm_wire::table::parse_table(text).unwrap(),
        &mut TenDevices::new(),
        &TestControlIo::new(),
        1,
    )
    .unwrap();
    let wanted: Vec<_> = (20..90).map(|at| PatternedHoles::content(7, at)).collect();
    assert_eq!(content_of(&table, 20, 70), wanted);
}
