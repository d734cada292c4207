//! A server is killed while it hydrates a clone and clients write to it. Each sector must then hold
//! the last write that a flush covered, or a later one, and sectors without such a write may still
//! be read from the source.

mod support;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::fs::{self, File};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use support::nbd::Client;
use support::stamps::{image, number, stamp};
use support::{Server, until};
use tempfile::TempDir;
use udm_wire::nbd::{CommandFlags, NbdCommand};

/// Number of kills, without UDM_KILL_ROUNDS in the environment.
const ROUNDS: u64 = 10;
/// Kills per clone; its data is kept from kill to kill.
const KILLS_MAX: u64 = 5;
const SECTORS: usize = 32_768;
const CLIENTS: usize = 3;
const LEN_MAX: usize = 40;

/// The writes of a sector: of `durable..=last`, any may be found.
#[derive(Clone, Copy, Default)]
struct SectorWrites {
    /// The last write that a completed flush covers.
    durable: u64,
    /// The last write that completed.
    completed: u64,
    /// The last write that was sent.
    last: u64,
}

/// A client with sectors of its own, one request at a time.
struct VerifiedLoad {
    sectors: Vec<SectorWrites>,
    first: usize,
    rng: SmallRng,
}

impl VerifiedLoad {
    /// Runs until the server ends. Counts requests in `answered`.
    fn run(&mut self, mut client: Client, numbers: &AtomicU64, answered: &AtomicU64) {
        while self.step(&mut client, numbers).is_some() {
            answered.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// One request; `None` if the server has ended.
    fn step(&mut self, client: &mut Client, numbers: &AtomicU64) -> Option<()> {
        let none = CommandFlags::empty();
        let kind = self.rng.random_range(0..20);
        if kind == 0 {
            client.send(none, NbdCommand::Flush, 0, 0, &[]).ok()?;
            let (_, error, _) = client.answer().ok()?;
            assert_eq!(error, 0, "a flush failed");
            self.sectors.iter_mut().for_each(|one| one.durable = one.completed);
            return Some(());
        }
        // A third of the requests cover whole regions of 8 sectors.
        let len = self.rng.random_range(1..=LEN_MAX);
        let at = self.rng.random_range(0..self.sectors.len() - len - 8);
        let (at, len) = if kind % 3 == 0 { (at / 8 * 8, len.next_multiple_of(8)) } else { (at, len) };
        let len = len.min(self.sectors.len() - at);
        let (offset, bytes) = (((self.first + at) * 512) as u64, (len * 512) as u64);
        if kind < 7 {
            client.send(none, NbdCommand::Read, offset, bytes, &[]).ok()?;
            let (_, error, data) = client.answer().ok()?;
            assert_eq!(error, 0, "a read failed");
            for (sector, found) in (at..at + len).zip(data.chunks(512)) {
                let found = number(found, self.first + sector);
                assert_eq!(found, Some(self.sectors[sector].completed), "sector {}", self.first + sector);
            }
            return Some(());
        }
        let number = numbers.fetch_add(1, Ordering::Relaxed) + 1;
        let data: Vec<u8> = (at..at + len).flat_map(|sector| stamp(number, self.first + sector)).collect();
        let written = at..at + len;
        self.sectors[written.clone()].iter_mut().for_each(|one| one.last = number);
        let fua = kind == 7;
        let flags = if fua { CommandFlags::FUA } else { none };
        client.send(flags, NbdCommand::Write, offset, bytes, &data).ok()?;
        let (_, error, _) = client.answer().ok()?;
        assert_eq!(error, 0, "a write failed");
        for one in &mut self.sectors[written] {
            one.completed = number;
            if fua {
                one.durable = number;
            }
        }
        Some(())
    }

    /// Checks the content of a sector after a kill, which is its state from now on.
    fn settle(&mut self, sector: usize, bytes: &[u8]) -> bool {
        let one = &mut self.sectors[sector - self.first];
        let found = number(bytes, sector);
        let SectorWrites { durable, last, .. } = *one;
        assert!(
            found.is_some_and(|found| (durable..=last).contains(&found)),
            "sector {sector} is of write {found:?}: {durable} was flushed, {last} was sent"
        );
        let found = found.unwrap_or_default();
        let is_lost = found < one.completed;
        *one = SectorWrites { durable: found, completed: found, last: found };
        is_lost
    }
}

struct KillFixture {
    folder: TempDir,
    loads: Vec<VerifiedLoad>,
    numbers: AtomicU64,
    /// The clone is created by name, and returns with each server.
    is_by_name: bool,
}

impl KillFixture {
    fn new(seed: u64, is_by_name: bool) -> KillFixture {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("source"), image(SECTORS)).unwrap();
        for (name, len) in [("destination", SECTORS * 512), ("metadata", 1 << 20)] {
            File::create(folder.path().join(name)).unwrap().set_len(len as u64).unwrap();
        }
        let part = SECTORS / CLIENTS;
        let ranges = (0..CLIENTS).map(|at| -> Range<usize> {
            at * part..if at + 1 == CLIENTS { SECTORS } else { (at + 1) * part }
        });
        let load = |range: Range<usize>| VerifiedLoad {
            first: range.start,
            sectors: vec![SectorWrites::default(); range.len()],
            rng: SmallRng::seed_from_u64(seed << 20 | range.start as u64),
        };
        KillFixture { loads: ranges.map(load).collect(), folder, numbers: AtomicU64::new(0), is_by_name }
    }

    fn serve(&self, words: &str) -> Server {
        let path = |name: &str| self.folder.path().join(name).display().to_string();
        // A source that takes its time, so that few clones are complete before the next kill.
        let slow = format!("slow=0 {SECTORS} delay file:{}?readonly=on 0 4", path("source"));
        let table = format!("c=0 {SECTORS} clone {} {} @slow {words}", path("metadata"), path("destination"));
        let two = std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() > 1);
        let cores = ["--cores", if two { "0,1" } else { "0" }];
        if !self.is_by_name {
            return Server::start_with(&[&slow, &table], &cores);
        }
        let (state, source, to) = (path("state"), "@slow", path("destination"));
        let server = Server::start_with(&[&slow], &[&cores[..], &["--state", &state]].concat());
        let is_new = server.says(&["clone", "list"]) == "No clones found\n";
        // A clone that does not return is created only once.
        assert_eq!(is_new, !self.folder.path().join("state/clones").exists(), "{}", server.log());
        if is_new {
            let metadata = path("metadata");
            let words = ["--metadata", &metadata, "--region-size", "4k", "--pause"];
            server.says(&[&["clone", "create", "c", "--from", source, "--to", &to], &words[..]].concat());
        }
        // What messages set is set in the next server, too.
        let words: Vec<&str> = words.split(' ').collect();
        match words[1..] {
            ["1", "no_hydration"] => drop(server.says(&["clone", "pause", "c"])),
            [_, _, _, threshold, _, batch] => {
                server.says(&["message", "c", "0", "hydration_threshold", threshold]);
                server.says(&["message", "c", "0", "hydration_batch_size", batch]);
                server.says(&["clone", "start", "c"]);
            }
            _ => panic!("{words:?}"),
        }
        server
    }

    /// Serves clients, and kills the server after `answers` requests.
    fn kill(&mut self, answers: u64) -> (u64, u64) {
        let mut server = self.serve("8 0 4 hydration_threshold 8 hydration_batch_size 2");
        let (answered, over) = (AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for load in &mut self.loads {
                let client = Client::connect(&server.nbd, "c");
                let (numbers, answered) = (&self.numbers, &answered);
                scope.spawn(move || load.run(client, numbers, answered));
            }
            until("a load", || (answered.load(Ordering::Relaxed) >= answers).then_some(()));
            over.store(true, Ordering::Relaxed);
            server.kill();
        });
        (answered.into_inner(), hydrated_in(&self.folder))
    }

    /// Checks all sectors. Returns how many lost a write that no flush covered.
    fn check(&mut self) -> usize {
        let server = self.serve("8 1 no_hydration");
        let mut client = Client::connect(&server.nbd, "c");
        let mut lost = 0;
        for load in &mut self.loads {
            for at in (load.first..load.first + load.sectors.len()).step_by(256) {
                let len = 256.min(load.first + load.sectors.len() - at);
                let (offset, bytes) = ((at * 512) as u64, (len * 512) as u64);
                client.send(CommandFlags::empty(), NbdCommand::Read, offset, bytes, &[]).unwrap();
                let (_, error, data) = client.answer().unwrap();
                assert_eq!(error, 0);
                let settled =
                    (at..at + len).zip(data.chunks(512)).filter(|(at, data)| load.settle(*at, data));
                lost += settled.count();
            }
        }
        lost
    }
}

/// The number of bits in the newest copies of the bitmap.
fn hydrated_in(folder: &TempDir) -> u64 {
    use udm_wire::clone_metadata::{
        BLOCK_LEN, BitmapBlock, CloneMetadataLayout, MetadataCopy, newest_bitmap_block,
    };
    let bytes = fs::read(folder.path().join("metadata")).unwrap();
    let layout = CloneMetadataLayout::new(SECTORS as u64 / 8);
    let block = |copy| {
        let at = layout.bitmap(copy, 0).0 as usize * 512;
        BitmapBlock::decode(&bytes[at..at + BLOCK_LEN], 0)
    };
    let newest = newest_bitmap_block(MetadataCopy::ALL.map(block)).unwrap();
    newest.map_or(0, |block| block.words.iter().map(|word| u64::from(word.count_ones())).sum())
}

#[test]
fn what_was_flushed_survives_a_kill_while_regions_are_hydrated() {
    kill_while_regions_are_hydrated(false);
}

#[test]
fn a_clone_by_name_returns_from_each_kill() {
    kill_while_regions_are_hydrated(true);
}

fn kill_while_regions_are_hydrated(is_by_name: bool) {
    let rounds = std::env::var("UDM_KILL_ROUNDS").map_or(ROUNDS, |n| n.parse().unwrap());
    let (mut kills, mut answered, mut lost, mut partly) = (0, 0, 0, 0);
    for seed in 0.. {
        let mut world = KillFixture::new(seed, is_by_name);
        for _ in 0..KILLS_MAX.min(rounds - kills) {
            let (served, hydrated) = world.kill(1 + (kills * 6007 + seed * 97) % 2503);
            lost += world.check();
            kills += 1;
            answered += served;
            partly += u64::from((1..SECTORS as u64 / 8).contains(&hydrated));
        }
        // To the end: the destination has all of it.
        let server = world.serve("8 0 4 hydration_threshold 256 hydration_batch_size 64");
        until("a complete clone", || {
            server.says(&["status", "c"]).contains(&format!(" {0}/{0} 0 ", SECTORS / 8)).then_some(())
        });
        drop(server);
        let destination = fs::read(world.folder.path().join("destination")).unwrap();
        for load in &mut world.loads {
            for sector in load.first..load.first + load.sectors.len() {
                load.settle(sector, &destination[sector * 512..(sector + 1) * 512]);
            }
        }
        if kills >= rounds {
            break;
        }
    }
    #[expect(clippy::print_stdout, reason = "the totals of a long run")]
    let say = |line: String| println!("{line}");
    say(format!(
        "{kills} kills, {partly} of clones that were hydrated in part: {answered} requests answered; {lost} \
         sectors lost a write that no flush covered"
    ));
    assert!(partly > 0 && answered > 100 * kills, "this shows nothing");
}
