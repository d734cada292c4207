//! Random tables against a model of the address map: every bio comes back once and unchanged, with
//! the right data and status.

use proptest::prelude::*;
use std::sync::Arc;
use udm_core::{Bio, BioFlags, BioOwnerId, Buf, DevNo, Lane, Nanos, Op, Sector, Sectors, Segments, Status};
use udm_dm::testing::{SteppedTestCores, TestControlIo, TestDeviceNameResolver, TestDisk, copy_bio_data};
use udm_dm::{MappedDevice, Table};
use udm_wire::table::TableLine;

const SECTOR: usize = 512;
const DISKS: usize = 3;
const DISK_SECTORS: u64 = 4096;

#[derive(Clone, Debug)]
enum LineSpec {
    Linear { disk: usize, len: u64 },
    Striped { disks: Vec<usize>, chunk: u64, chunks: u64 },
    Zero { len: u64 },
    Error { len: u64 },
}

fn any_line() -> impl Strategy<Value = LineSpec> {
    prop_oneof![
        4 => (0..DISKS, 1u64..80).prop_map(|(disk, len)| LineSpec::Linear { disk, len }),
        3 => (prop::collection::vec(0..DISKS, 1..4), 1u64..20, 1u64..5)
            .prop_map(|(disks, chunk, chunks)| LineSpec::Striped { disks, chunk, chunks }),
        1 => (1u64..40).prop_map(|len| LineSpec::Zero { len }),
        1 => (1u64..40).prop_map(|len| LineSpec::Error { len }),
    ]
}

#[derive(Clone, Debug)]
struct Request {
    op: Op,
    flags: BioFlags,
    /// In thousandths of the device, so that it fits all sizes; may be beyond the end.
    at: u64,
    sectors: u64,
    /// The offset at which the buffer is cut, in bytes.
    cut: usize,
    fill: u8,
}

fn request() -> impl Strategy<Value = Request> {
    let op = prop_oneof![
        6 => Just(Op::Read),
        6 => Just(Op::Write),
        1 => Just(Op::Flush),
        1 => Just(Op::Discard),
        1 => Just(Op::WriteZeroes),
    ];
    let flags = prop_oneof![
        3 => Just(BioFlags::empty()),
        1 => Just(BioFlags::FUA),
        1 => Just(BioFlags::PREFLUSH),
        1 => Just(BioFlags::PREFLUSH | BioFlags::FUA),
    ];
    let sectors = prop_oneof![8 => 1u64..60, 1 => 60u64..800, 1 => Just(0)];
    (op, flags, 0u64..1020, sectors, 0usize..4096, any::<u8>())
        .prop_map(|(op, flags, at, sectors, cut, fill)| Request { op, flags, at, sectors, cut, fill })
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum SectorTarget {
    Disk(usize, u64),
    Zero,
    Error,
}

/// The table and its map: the disk and sector of each sector. No two sectors share one.
fn build_model(rows: &[LineSpec]) -> (Vec<TableLine>, Vec<SectorTarget>) {
    let mut next = [0u64; DISKS];
    let mut take = |disk: usize, len: u64| {
        let at = next[disk];
        next[disk] += len + 1;
        at
    };
    let (mut lines, mut homes) = (Vec::new(), Vec::new());
    for row in rows {
        let start = homes.len() as u64;
        let (kind, args): (&str, Vec<String>) = match row {
            LineSpec::Linear { disk, len } => {
                let at = take(*disk, *len);
                homes.extend((at..at + len).map(|s| SectorTarget::Disk(*disk, s)));
                ("linear", vec![format!("/d{disk}"), at.to_string()])
            }
            LineSpec::Striped { disks, chunk, chunks } => {
                let at: Vec<u64> = disks.iter().map(|&disk| take(disk, chunk * chunks)).collect();
                for k in 0..chunks * disks.len() as u64 {
                    let (stripe, row) = (k as usize % disks.len(), k / disks.len() as u64);
                    let first = at[stripe] + row * chunk;
                    homes.extend((first..first + chunk).map(|s| SectorTarget::Disk(disks[stripe], s)));
                }
                let mut args = vec![disks.len().to_string(), chunk.to_string()];
                for (disk, at) in disks.iter().zip(&at) {
                    args.extend([format!("/d{disk}"), at.to_string()]);
                }
                ("striped", args)
            }
            LineSpec::Zero { len } => {
                homes.extend((0..*len).map(|_| SectorTarget::Zero));
                ("zero", vec![])
            }
            LineSpec::Error { len } => {
                homes.extend((0..*len).map(|_| SectorTarget::Error));
                ("error", vec![])
            }
        };
        lines.push(TableLine::new(start, homes.len() as u64 - start, kind, args));
    }
    (lines, homes)
}

struct Fixture {
    world: SteppedTestCores,
    disks: Vec<Arc<TestDisk>>,
    model: Vec<Vec<u8>>,
    homes: Vec<SectorTarget>,
    devices: Vec<Arc<MappedDevice>>,
    lane: Box<dyn Lane>,
    serial: u64,
}

impl Fixture {
    /// The table alone, or with `levels` devices on top; each maps it whole, in two halves.
    fn new(rows: &[LineSpec], max_sectors: u64, fua: bool, reverse: bool, levels: u32) -> Fixture {
        let mut world = SteppedTestCores::new(1);
        let mut resolver = TestDeviceNameResolver::new();
        let mut disks = Vec::new();
        for i in 0..DISKS {
            let disk = TestDisk::new(DISK_SECTORS);
            disk.set_limits(|l| {
                l.max_sectors = Sectors(max_sectors);
                l.max_discard = Sectors(2 * max_sectors);
                (l.fua, l.write_cache) = (fua, true);
            });
            disk.reverse(reverse);
            resolver.add(
                &format!("/d{i}"),
                DevNo { major: 7, minor: i as u32 },
                Arc::<TestDisk>::clone(&disk),
            );
            disks.push(disk);
        }
        let (mut lines, homes) = build_model(rows);
        let mut devices = Vec::new();
        for level in 0..=levels {
            let number = DevNo { major: 254, minor: level };
            let device = MappedDevice::new(&format!("t{level}"), None, number).unwrap();
            device
                .load(
                    Table::build(udm_targets::TARGETS, &lines, &mut resolver, &TestControlIo::new(), 1)
                        .unwrap(),
                )
                .unwrap();
            finish_resume(&mut world, &device);
            resolver.add(&format!("@t{level}"), number, Arc::<MappedDevice>::clone(&device));
            let (all, half) = (homes.len() as u64, homes.len() as u64 / 2);
            lines = [(0, half), (half, all - half)]
                .into_iter()
                .filter(|&(_, len)| len > 0)
                .map(|(at, len)| TableLine::new(at, len, "linear", [format!("@t{level}"), at.to_string()]))
                .collect();
            devices.push(device);
        }
        let top = Arc::clone(devices.last().unwrap());
        let lane = world.open(0, &*top).unwrap();
        let model = vec![vec![0; DISK_SECTORS as usize * SECTOR]; DISKS];
        Fixture { world, disks, model, homes, devices, lane, serial: 0 }
    }

    fn bio(&mut self, r: &Request) -> Box<Bio> {
        let mut bio = Bio::new();
        self.serial += 1;
        (bio.op, bio.flags) = (r.op, r.flags);
        bio.owner = BioOwnerId(77_000);
        bio.cookie = self.serial;
        bio.started = Nanos(self.serial * 3);
        if r.op == Op::Flush {
            return bio;
        }
        bio.sector = Sector(r.at * self.homes.len() as u64 / 1000);
        bio.sectors = Sectors(r.sectors);
        if r.op.has_data() && r.sectors > 0 {
            let bytes = r.sectors as usize * SECTOR;
            let cut = r.cut % bytes;
            bio.data = Segments::from(Buf::zeroed(bytes - cut));
            if cut > 0 {
                bio.data.push(Buf::zeroed(cut));
            }
            let text: Vec<u8> = (0..bytes).map(|i| r.fill.wrapping_add((i / 61) as u8)).collect();
            bio.data.copy_from(&text);
        }
        bio
    }

    /// The expected status and read data of a request. Applies its effect to the model.
    fn expect(&mut self, bio: &Bio) -> (Status, Option<Vec<u8>>) {
        if bio.op == Op::Flush {
            return (Status::Ok, None);
        }
        let unsupported = self.homes.iter().any(|p| matches!(p, SectorTarget::Zero | SectorTarget::Error));
        if bio.op == Op::WriteZeroes && unsupported {
            return (Status::NotSupp, None);
        }
        let (from, to) = (bio.sector.0 as usize, bio.end().0 as usize);
        if to > self.homes.len() {
            return (Status::IoErr, None);
        }
        if bio.sectors.0 == 0 {
            return (Status::Inval, None);
        }
        let bytes = copy_bio_data(bio);
        let mut out = Vec::new();
        let mut status = Status::Ok;
        for (i, home) in self.homes[from..to].iter().enumerate() {
            match *home {
                SectorTarget::Disk(disk, sector) => {
                    let at = sector as usize * SECTOR;
                    let sector = &mut self.model[disk][at..at + SECTOR];
                    match bio.op {
                        Op::Read => out.extend_from_slice(sector),
                        Op::Write => sector.copy_from_slice(&bytes[i * SECTOR..][..SECTOR]),
                        Op::Discard | Op::WriteZeroes => sector.fill(0),
                        Op::Flush => unreachable!("handled above"),
                    }
                }
                SectorTarget::Zero => out.extend_from_slice(&[0; SECTOR]),
                SectorTarget::Error => status = Status::IoErr,
            }
        }
        (status, (bio.op == Op::Read && status.is_ok()).then_some(out))
    }

    /// Submits the bios as one batch and checks each one that comes back.
    fn run(&mut self, requests: &[Request]) {
        let bios: Vec<_> = requests.iter().map(|r| self.bio(r)).collect();
        let facts = |b: &Bio| {
            (
                b.op,
                b.flags,
                b.owner,
                b.sector,
                b.sectors,
                b.cookie,
                b.started,
                b.data.iter().map(|d| (d.addr(), d.len())).collect::<Vec<_>>(),
            )
        };
        let mut due: Vec<_> = bios
            .iter()
            .map(|b| {
                let text = copy_bio_data(b);
                let (status, read) = self.expect(b);
                (facts(b), status, read, text)
            })
            .collect();
        self.world.submit(0, &mut *self.lane, bios);
        for _ in 0..10_000 {
            for bio in self.world.poll(0, &mut *self.lane) {
                let i = due.iter().position(|d| d.0.5 == bio.cookie).expect("a bio that is due, once");
                let (was, status, read, text) = due.swap_remove(i);
                assert_eq!(facts(&bio), was, "as it was given");
                assert_eq!(bio.status, status, "{bio:?}");
                if let Some(read) = read {
                    assert!(copy_bio_data(&bio) == read, "data of {bio:?}");
                } else if bio.op == Op::Write {
                    assert!(copy_bio_data(&bio) == text, "a write's buffer is left alone: {bio:?}");
                }
            }
            if due.is_empty() {
                return;
            }
        }
        panic!("{} bios did not come back", due.len());
    }

    fn compare_disks(&self) {
        for (i, disk) in self.disks.iter().enumerate() {
            assert!(disk.bytes(0, DISK_SECTORS) == self.model[i], "disk {i}");
            assert_eq!(disk.waiting(), 0);
        }
    }
}

fn finish_resume(world: &mut SteppedTestCores, device: &Arc<MappedDevice>) {
    let mut change = device.resume(Arc::new(|| {})).unwrap();
    let cores = world.cores();
    while change.step(&*cores).is_none() {
        world.deliver(0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn any_table_is_its_address_map(
        rows in prop::collection::vec(any_line(), 1..8),
        max_sectors in prop_oneof![Just(1u64), 2u64..30, Just(1 << 20)],
        fua in any::<bool>(),
        reverse in any::<bool>(),
        levels in 0u32..3,
        writes in prop::collection::vec(request(), 1..40),
        reads in prop::collection::vec(request(), 1..20),
    ) {
        let mut rig = Fixture::new(&rows, max_sectors, fua, reverse, levels);
        // Writes may overlap, so they run one by one; reads run together.
        for request in &writes {
            rig.run(std::slice::from_ref(request));
        }
        let reads: Vec<_> = reads.into_iter().map(|r| Request { op: Op::Read, flags: BioFlags::empty(), ..r }).collect();
        rig.run(&reads);
        rig.compare_disks();
        drop(rig.lane);
        for disk in &rig.disks {
            prop_assert_eq!(disk.opened(), 0);
        }
        prop_assert_eq!(rig.devices.len(), 1 + levels as usize);
    }
}
