//! Tests of the cache against a model: contents, write-back and loss.

use crate::null::NullBlockDevice;
use crate::testing::{SingleLaneTestCore, bio_without_data, make_zeroed_segments};
use proptest::prelude::*;
use udm_core::{Bio, BioFlags, Device, ExtentKind, Extents, Op, Sector, Sectors, Status, TURN_BUDGET};
use udm_wire::uri::{self, DeviceUri};

/// Creates a memory-backed null device with the parameters `words`.
fn null(words: &str) -> NullBlockDevice {
    let Ok(DeviceUri::Null(params)) =
        uri::parse_device_uri(&format!("null:memory_backed=1,discard=1,{words}"))
    else {
        panic!("not null: {words}")
    };
    NullBlockDevice::new(&params).unwrap()
}

fn turn(device: &NullBlockDevice, on: bool) {
    device.power().expect("it has a switch").turn(on);
}

fn cycle(device: &NullBlockDevice) {
    turn(device, false);
    turn(device, true);
}

fn write(sector: u64, sectors: u64, with: u8, flags: BioFlags) -> Box<Bio> {
    let mut data = make_zeroed_segments(sectors as usize * 512, &[]);
    data.fill(with);
    let mut bio = Bio::write(Sector(sector), Sectors(sectors), data);
    bio.flags = flags;
    bio
}

fn read(core: &mut SingleLaneTestCore, sector: u64, sectors: u64) -> Vec<u8> {
    let bio = core.run(Bio::read(
        Sector(sector),
        Sectors(sectors),
        make_zeroed_segments(sectors as usize * 512, &[]),
    ));
    assert_eq!(bio.status, Status::Ok);
    let mut bytes = vec![0; sectors as usize * 512];
    bio.data.copy_to(&mut bytes);
    bytes
}

fn flush() -> Box<Bio> {
    bio_without_data(Op::Flush, 0, 0)
}

/// Runs one bio that may take several turns.
fn end(core: &mut SingleLaneTestCore, bio: Box<Bio>) -> Box<Bio> {
    core.submit(vec![bio]);
    std::iter::repeat_with(|| core.poll().0.pop()).flatten().next().expect("it ends")
}

#[derive(Debug, Clone)]
enum Action {
    Request { op: Op, at: u64, len: u64, cuts: Vec<usize>, flags: BioFlags },
    Cut,
}

/// Sectors of the device: 2 MiB and a part of a page, twice the size of the cache.
const SECTORS: u64 = 4096 + 3;

fn any_action() -> impl Strategy<Value = Action> {
    let op = prop_oneof![
        8 => Just(Op::Write), 6 => Just(Op::Read), 1 => Just(Op::Discard), 1 => Just(Op::WriteZeroes), 2 => Just(Op::Flush)
    ];
    let at = prop_oneof![2 => 0..64u64, 1 => 0..SECTORS, 1 => SECTORS - 9..SECTORS];
    let flags =
        prop_oneof![5 => Just(BioFlags::empty()), 1 => any::<u16>().prop_map(BioFlags::from_bits_truncate)];
    let len = prop_oneof![4 => 1..20u64, 1 => 1..2000u64];
    let cuts = proptest::collection::vec(1..700usize, 0..4);
    let request = (op, at, len, cuts, flags).prop_map(|(op, at, len, cuts, flags)| {
        let (at, len) = if op == Op::Flush { (0, 0) } else { (at, len.min(SECTORS - at)) };
        Action::Request { op, at, len, cuts, flags }
    });
    prop_oneof![12 => request, 1 => Just(Action::Cut)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    /// Reads return the last written data. After a power cut, each sector holds the data that a
    /// flush or a FUA write made durable, or later data. Both hold for two cores.
    #[test]
    fn what_a_cut_leaves(acts in proptest::collection::vec((any_action(), 0..2usize), 1..120)) {
        let device = null(&format!("size={},cache_size=1M", SECTORS * 512));
        let mut cores = [SingleLaneTestCore::over(&device), SingleLaneTestCore::over(&device)];
        // Contents of each sector, and possible contents after a cut, as numbers of writes.
        let mut now = vec![0u64; SECTORS as usize];
        let mut kept = vec![vec![0u64]; SECTORS as usize];
        for (i, (any_action, core)) in acts.into_iter().enumerate() {
            let nr = i as u64 + 1;
            let Action::Request { op, at, len, cuts, flags } = any_action else {
                cycle(&device);
                for sector in 0..SECTORS {
                    let bytes = read(&mut cores[core], sector, 1);
                    let nr = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                    let at = sector as usize;
                    prop_assert!(kept[at].contains(&nr), "sector {sector} has {nr}, of {:?}", kept[at]);
                    (now[at], kept[at]) = (nr, vec![nr]);
                }
                continue;
            };
            let mut bio = bio_without_data(op, at, len);
            bio.flags = flags;
            if op.has_data() {
                bio.data = make_zeroed_segments(len as usize * 512, &cuts);
            }
            if op == Op::Write {
                bio.data.copy_from(&nr.to_le_bytes().repeat(len as usize * 64));
            }
            let bio = end(&mut cores[core], bio);
            prop_assert_eq!(bio.status, Status::Ok);
            if op == Op::Flush || op.is_write() && flags.contains(BioFlags::PREFLUSH) {
                kept.iter_mut().zip(&now).for_each(|(kept, now)| *kept = vec![*now]);
            }
            for sector in at as usize..(at + len) as usize {
                if op == Op::Read {
                    let mut got = vec![0; len as usize * 512];
                    bio.data.copy_to(&mut got);
                    let from = (sector - at as usize) * 512;
                    prop_assert!(got[from..from + 512] == now[sector].to_le_bytes().repeat(64));
                } else {
                    now[sector] = if op == Op::Write { nr } else { 0 };
                    match op == Op::Write && !flags.contains(BioFlags::FUA) {
                        true => kept[sector].push(nr),
                        false => kept[sector] = vec![now[sector]],
                    }
                }
            }
        }
    }
}

/// Row B13 at the device: a power cut loses data that was not flushed and keeps flushed data.
#[test]
fn b13_a_cut_loses_what_was_not_flushed() {
    let device = null("size=1M,cache_size=1M");
    let mut core = SingleLaneTestCore::over(&device);
    core.run(write(0, 8, 1, BioFlags::empty()));
    assert_eq!(read(&mut core, 0, 8), [1; 4096]);
    cycle(&device);
    assert_eq!(read(&mut core, 0, 8), [0; 4096]);
    core.run(write(0, 8, 2, BioFlags::empty()));
    core.run(flush());
    core.run(write(3, 1, 3, BioFlags::empty()));
    cycle(&device);
    assert_eq!(read(&mut core, 0, 8), [2; 4096]);
    core.run(write(3, 1, 3, BioFlags::FUA));
    cycle(&device);
    assert_eq!(read(&mut core, 3, 1), [3; 512]);
}

/// The cache holds no more than `cache_size`; the excess is written back.
#[test]
fn a_full_cache_writes_back() {
    let device = null("size=4M,cache_size=1M");
    let mut core = SingleLaneTestCore::over(&device);
    for page in 0..512 {
        core.run(write(page * 8, 8, 1, BioFlags::empty()));
    }
    cycle(&device);
    let kept = (0..512).filter(|page| read(&mut core, page * 8, 1) == [1; 512]).count();
    assert_eq!(kept, 256, "1 MiB of 2 was in the cache");
}

#[test]
fn without_power_nothing_is_served() {
    let device = null("size=1M,cache_size=1M");
    let mut core = SingleLaneTestCore::over(&device);
    turn(&device, false);
    assert!(!device.power().unwrap().is_on());
    for bio in [write(0, 1, 1, BioFlags::FUA), bio_without_data(Op::Discard, 0, 8), flush()] {
        assert_eq!(core.run(bio).status, Status::IoErr);
    }
    turn(&device, true);
    assert_eq!(read(&mut core, 0, 8), [0; 4096]);
}

/// A flush or a long write that was partly served before a cut must not succeed after it.
#[test]
fn what_was_half_served_fails() {
    let device = null("size=64M,cache_size=64M");
    let mut core = SingleLaneTestCore::over(&device);
    let sectors = 4 * TURN_BUDGET / 512;
    let long = |core: &mut SingleLaneTestCore, bio| {
        core.submit(vec![bio]);
        assert_eq!(core.poll().0.len(), 0, "it takes longer than a turn");
        cycle(&device);
        std::iter::repeat_with(|| core.poll().0.pop()).flatten().next().expect("it ends").status
    };
    assert_eq!(long(&mut core, write(0, sectors, 1, BioFlags::empty())), Status::IoErr);
    end(&mut core, write(0, sectors, 1, BioFlags::empty()));
    assert_eq!(long(&mut core, flush()), Status::IoErr);
}

/// Neither cached data nor data that was written back is a hole.
#[test]
fn what_is_cached_is_allocated() {
    let device = null("size=2M,cache_size=1M");
    let mut core = SingleLaneTestCore::over(&device);
    let holes = || {
        let mut out = Extents::new(16);
        device.extents(Sector(0), Sectors(4096), &mut out);
        out.list().iter().map(|one| (one.len.0, one.content == ExtentKind::Hole)).collect::<Vec<_>>()
    };
    assert_eq!(holes(), [(4096, true)]);
    core.run(write(1024, 1, 1, BioFlags::empty()));
    let one = [(1024, true), (512, false), (2560, true)];
    assert_eq!(holes(), one);
    core.run(flush());
    assert_eq!(holes(), one);
    turn(&device, false);
    assert_eq!(holes(), [(4096, false)], "nobody knows");
    turn(&device, true);
    assert_eq!(holes(), one);
}

#[test]
fn only_a_device_with_a_cache_has_a_switch() {
    for words in ["size=1M", "size=1M,memory_backed=1", "size=1M,cache_size=1M"] {
        let Ok(DeviceUri::Null(params)) = uri::parse_device_uri(&format!("null:{words}")) else {
            panic!("{words}")
        };
        assert!(NullBlockDevice::new(&params).unwrap().power().is_none(), "{words}");
    }
}
