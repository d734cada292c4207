//! Clients that record which writes were acknowledged.
//!
//! Each sector that is written contains the number of the write and its own position. So after a
//! kill of the server each sector can be checked: it must hold the last acknowledged write, or one
//! that was in flight.

use super::nbd::Client;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use udm_wire::nbd::{CommandFlags, NbdCommand};

const SECTOR: usize = 512;
/// Maximum sectors per request.
const LEN_MAX: usize = 24;
/// Requests that a client has in flight.
const DEPTH: usize = 8;
/// Bytes per read when the whole volume is read.
const PIECE: usize = 128 << 10;

/// The content of a sector after write `number`; 0 stands for the initial content.
pub fn stamp(number: u64, sector: usize) -> impl Iterator<Item = u8> {
    [number, sector as u64].map(u64::to_le_bytes).concat().repeat(SECTOR / 16).into_iter()
}

/// The number of the write that a sector contains; `None` if the content is invalid.
pub fn number(bytes: &[u8], sector: usize) -> Option<u64> {
    let found = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    stamp(found, sector).eq(bytes.iter().copied()).then_some(found)
}

/// The initial content of a disk.
pub fn image(sectors: usize) -> Vec<u8> {
    (0..sectors).flat_map(|sector| stamp(0, sector)).collect()
}

/// The record of a sector.
#[derive(Clone, Copy, Default)]
struct SectorState {
    /// The last acknowledged write.
    acknowledged: u64,
    /// A write that was not answered or failed: the sector may contain it.
    under_way: Option<u64>,
}

/// The records of a volume's sectors. At most one write per sector is in flight.
pub struct StampedVolume {
    sectors: Mutex<Vec<SectorState>>,
    /// The number of the last write.
    numbers: AtomicU64,
}

/// The sectors of a request; for a read also the acknowledged write of each sector when it was
/// sent.
type PendingRequest = (Range<usize>, Option<Vec<u64>>);

/// The counters of a load.
#[derive(Clone, Copy, Default)]
pub struct LoadCounts {
    pub answered: u64,
    pub unanswered: u64,
    pub failed: u64,
}

impl StampedVolume {
    /// A volume with the content of [`image`]. Its writes are numbered from `first`; other volumes
    /// use other numbers.
    pub fn new(sectors: usize, first: u64) -> StampedVolume {
        StampedVolume {
            sectors: Mutex::new(vec![SectorState::default(); sectors]),
            numbers: AtomicU64::new(first),
        }
    }

    /// Takes the present records of `other`.
    pub fn become_of(&self, other: &StampedVolume) {
        self.sectors().clone_from(&other.sectors());
        self.numbers.store(other.numbers.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    fn sectors(&self) -> MutexGuard<'_, Vec<SectorState>> {
        self.sectors.lock().unwrap()
    }

    /// Reads and writes random sectors of `range`, several at a time, until the server ends or a
    /// request fails. Counts replies in `answered`.
    pub fn load(
        &self,
        mut client: Client,
        range: Range<usize>,
        seed: u64,
        answered: &AtomicU64,
    ) -> LoadCounts {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut asked: HashMap<u64, PendingRequest> = HashMap::new();
        let mut served = LoadCounts::default();
        loop {
            while asked.len() < DEPTH && served.failed == 0 {
                let Some((cookie, write)) = self.begin(&mut client, &range, &mut rng) else { break };
                asked.insert(cookie, write);
            }
            // Replies sent before the end of the server can still be read.
            let Ok((cookie, error, data)) = client.answer() else { break };
            let (sectors, read) = asked.remove(&cookie).unwrap();
            answered.fetch_add(1, Ordering::Relaxed);
            served.answered += 1;
            match (error, read) {
                (0, Some(before)) => self.check_read(sectors, &before, &data),
                (0, None) => self.written(sectors),
                _ => served.failed += 1,
            }
            if asked.is_empty() {
                break;
            }
        }
        served.unanswered = asked.len() as u64;
        served
    }

    /// Sends a request; returns `None` if the server has ended.
    fn begin(
        &self,
        client: &mut Client,
        range: &Range<usize>,
        rng: &mut SmallRng,
    ) -> Option<(u64, PendingRequest)> {
        let none = CommandFlags::empty();
        let kind = rng.random_range(0..20);
        if kind == 0 {
            let cookie = client.send(none, NbdCommand::Flush, 0, 0, &[]).ok()?;
            return Some((cookie, (0..0, None)));
        }
        let (sectors, data) = loop {
            // A third of the requests cover whole chunks of the stores.
            let (at, len) = match rng.random_range(0..3) {
                0 => (rng.random_range(range.start / 8..range.end / 8 - 2) * 8, 8 << rng.random_range(0..2)),
                _ => {
                    let len = rng.random_range(1..=LEN_MAX);
                    (rng.random_range(range.start..range.end - len), len)
                }
            };
            let mut all = self.sectors();
            let known = &mut all[at..at + len];
            if kind < 6 {
                let before = known.iter().map(|known| known.acknowledged).collect();
                break (at..at + len, Err(before));
            }
            if known.iter().all(|known| known.under_way.is_none()) {
                let number = self.numbers.fetch_add(1, Ordering::Relaxed) + 1;
                known.iter_mut().for_each(|known| known.under_way = Some(number));
                break (
                    at..at + len,
                    Ok((at..at + len).flat_map(|at| stamp(number, at)).collect::<Vec<u8>>()),
                );
            }
        };
        let (at, len) = ((sectors.start * SECTOR) as u64, (sectors.len() * SECTOR) as u64);
        let (cookie, before) = match data {
            Ok(data) => {
                let flags = if kind == 6 { CommandFlags::FUA } else { none };
                (client.send(flags, NbdCommand::Write, at, len, &data), None)
            }
            Err(before) => (client.send(none, NbdCommand::Read, at, len, &[]), Some(before)),
        };
        Some((cookie.ok()?, (sectors, before)))
    }

    fn written(&self, sectors: Range<usize>) {
        for known in &mut self.sectors()[sectors] {
            known.acknowledged = known.under_way.take().expect("a write under way");
        }
    }

    /// Checks a read: no sector may be older than the write acknowledged when the read was sent, or
    /// hold an unknown write. If a write of a sector is in flight, the kernel's page cache may mix
    /// both contents.
    fn check_read(&self, sectors: Range<usize>, before: &[u64], data: &[u8]) {
        let all = self.sectors();
        for ((sector, before), bytes) in sectors.zip(before).zip(data.chunks(SECTOR)) {
            let last = all[sector].under_way.unwrap_or(all[sector].acknowledged);
            let found = number(bytes, sector);
            let is_right = found.map_or(last != *before, |found| (*before..=last).contains(&found));
            assert!(is_right, "sector {sector} reads {found:?}, between {before} and {last}");
        }
    }

    /// Reads all sectors except `others`, which belong to another program. Each sector must hold
    /// its acknowledged write or the one in flight, and its record is updated. Returns the number
    /// of writes that were in flight.
    pub fn settle(&self, socket: &Path, export: &str, others: Range<usize>) -> usize {
        let mut client = Client::connect(socket, export);
        let mut all = self.sectors();
        let mut open = 0;
        for at in (0..all.len()).step_by(PIECE / SECTOR) {
            let part = at..all.len().min(at + PIECE / SECTOR);
            let (from, len) = (part.start * SECTOR, part.len() * SECTOR);
            client.send(CommandFlags::empty(), NbdCommand::Read, from as u64, len as u64, &[]).unwrap();
            let (_, error, data) = client.answer().unwrap();
            assert_eq!(error, 0, "{export}: sector {at} cannot be read");
            for (sector, bytes) in part.zip(data.chunks(SECTOR)).filter(|(at, _)| !others.contains(at)) {
                let (known, found) = (&mut all[sector], number(bytes, sector));
                let is_right =
                    found.is_some_and(|found| found == known.acknowledged || known.under_way == Some(found));
                let SectorState { acknowledged, under_way } = *known;
                assert!(
                    is_right,
                    "{export}: sector {sector} is of write {found:?}: {acknowledged} was answered, {under_way:?} was under way"
                );
                open += usize::from(under_way.is_some());
                *known = SectorState { acknowledged: found.unwrap(), under_way: None };
            }
        }
        open
    }
}
