//! A server is killed while clients write to an origin and to its snapshots. Writes that reached
//! the kernel survive the kill. So each sector must hold an acknowledged write or one that was in
//! flight, and a snapshot is unchanged or reports that it is invalid.

#[path = "../../udm-targets/tests/snapshot/reader.rs"]
mod reader;
mod support;

use reader::{ParsedStore, read_store};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use support::nbd::Client;
use support::stamps::{LoadCounts, StampedVolume, image};
use support::{Server, has, text, until};
use tempfile::TempDir;
use udm_wire::nbd::NbdCommand as Nbd;

/// Number of kills, without UDM_KILL_ROUNDS in the environment.
const ROUNDS: u64 = 10;
/// Maximum number of kills per fixture; its data is kept from kill to kill.
const KILLS_MAX: u64 = 4;
const SECTORS: usize = 16384;
/// From these sectors on, `v` and `s` belong to fio, in a fixture that runs fio.
const FIO: [usize; 2] = [SECTORS - 4096, SECTORS - 2048];
const FIO_LEN: usize = 2048;
/// Clients per device.
const CLIENTS: u64 = 2;

/// The special condition of a fixture.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scenario {
    /// One snapshot with enough room.
    Plain,
    /// The store begins small and grows.
    Growing,
    /// Two snapshots, one with chunks of 16 KiB.
    Two,
    /// The store has too little room.
    Small,
    /// The snapshot is merged from the second server on.
    Merging,
}

const KINDS: [Scenario; 5] =
    [Scenario::Plain, Scenario::Growing, Scenario::Merging, Scenario::Two, Scenario::Small];

/// The totals of all fixtures.
#[derive(Default)]
struct KillTotals {
    kills: u64,
    served: LoadCounts,
    open: usize,
    invalid: u64,
    grown: u64,
    merging: u64,
    fio: u64,
}

struct KillFixture {
    kind: Scenario,
    seed: u64,
    folder: TempDir,
    /// Volumes by the names of their devices; the first is the origin.
    volumes: Vec<(&'static str, StampedVolume)>,
    merges: bool,
    fio: bool,
}

impl KillFixture {
    fn new(kind: Scenario, seed: u64) -> KillFixture {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("disk"), image(SECTORS)).unwrap();
        let names: &[&str] = if kind == Scenario::Two { &["v", "s", "t"] } else { &["v", "s"] };
        let volume =
            |(at, name): (usize, &&'static str)| (*name, StampedVolume::new(SECTORS, (at as u64) << 40));
        let volumes = names.iter().enumerate().map(volume).collect();
        let world = KillFixture { kind, seed, folder, volumes, merges: false, fio: false };
        let len = match kind {
            Scenario::Growing => 64 << 10,
            Scenario::Small => SECTORS as u64 * 512 / 4,
            _ => SECTORS as u64 * 512 * 3 / 2,
        };
        for (name, _) in &world.volumes[1..] {
            File::create(world.store(name)).unwrap().set_len(len).unwrap();
        }
        world
    }

    fn store(&self, name: &str) -> PathBuf {
        self.folder.path().join(format!("{name}.cow"))
    }

    fn serve(&self) -> Server {
        let disk = self.folder.path().join("disk").display().to_string();
        let line = |target: &str, name: &str, chunk: u32| {
            let grow = if self.kind == Scenario::Growing { "?grow=64k" } else { "" };
            let store = self.store(name).display().to_string();
            format!("0 {SECTORS} {target} {disk} file:{store}{grow} P {chunk}")
        };
        let mut devices = match self.merges {
            true => vec![format!("v={}", line("snapshot-merge", "s", 8))],
            false => {
                vec![
                    format!("v=0 {SECTORS} snapshot-origin {disk}"),
                    format!("s={}", line("snapshot", "s", 8)),
                ]
            }
        };
        if self.kind == Scenario::Two {
            devices.push(format!("t={}", line("snapshot", "t", 32)));
        }
        let state = self.folder.path().join("state").display().to_string();
        let two = std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() > 1);
        let cores = if two { "0,1" } else { "0" };
        let devices: Vec<&str> = devices.iter().map(String::as_str).collect();
        Server::start_with(&devices, &["--state", &state, "--cores", cores])
    }

    /// The served devices, with the part that belongs to fio.
    fn served(&self) -> Vec<(&'static str, &StampedVolume, Range<usize>)> {
        let all = self.volumes.iter().enumerate().take(if self.merges { 1 } else { usize::MAX });
        let part = |at: usize| match self.fio.then(|| FIO.get(at)).flatten() {
            Some(from) => *from..from + FIO_LEN,
            None => 0..0,
        };
        all.map(|(at, (name, volume))| (*name, volume, part(at))).collect()
    }

    /// fio on its part of a device.
    fn fio(&self, server: &Server, name: &str, part: &Range<usize>) -> Command {
        let mut fio = Command::new("timeout");
        fio.args(["-k", "5", "60", "fio", "--ioengine=nbd", "--rw=randwrite", "--bs=4k", "--iodepth=16"]);
        fio.args(["--verify=crc32c", &format!("--name={name}"), &format!("--randseed={}", self.seed)]);
        fio.arg(format!("--uri=nbd+unix:///{name}?socket={}", server.nbd.display()));
        fio.args([format!("--offset={}", part.start * 512), format!("--size={}", part.len() * 512)]);
        fio.current_dir(self.folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        fio
    }

    /// Serves clients, and kills the server after `answers` replies. With `with_fio`, fio writes
    /// its part at the same time, and has ended before the kill.
    fn kill(&mut self, answers: u64, with_fio: bool, totals: &mut KillTotals) {
        let mut server = self.serve();
        self.fio |= with_fio;
        let answered = AtomicU64::new(0);
        std::thread::scope(|scope| {
            let mut loads = Vec::new();
            let mut seed = self.seed << 8 | totals.kills << 32;
            for (name, volume, _) in self.served() {
                for _ in 0..CLIENTS {
                    seed += 1;
                    let (client, answered) = (Client::connect(&server.nbd, name), &answered);
                    let end = if self.fio { FIO[0] } else { SECTORS };
                    loads.push(scope.spawn(move || volume.load(client, 0..end, seed, answered)));
                }
            }
            if with_fio {
                let run = |(name, _, part): &(&str, &StampedVolume, Range<usize>)| {
                    self.fio(&server, name, part).arg("--do_verify=0").spawn().unwrap()
                };
                for fio in self.served().iter().map(run).collect::<Vec<_>>() {
                    let out = fio.wait_with_output().unwrap();
                    assert!(out.status.success(), "{}{}", text(&out.stdout), text(&out.stderr));
                }
                answered.store(0, Ordering::Relaxed);
            }
            until("a load", || {
                let over = loads.iter().all(|load| load.is_finished());
                (over || answered.load(Ordering::Relaxed) >= answers).then_some(())
            });
            server.child.kill().unwrap();
            server.child.wait().unwrap();
            for load in loads {
                let LoadCounts { answered, unanswered, failed } = load.join().unwrap();
                assert!(failed == 0 || self.kind == Scenario::Small, "{failed} requests have failed");
                totals.served.answered += answered;
                totals.served.unanswered += unanswered;
                totals.served.failed += failed;
            }
        });
        totals.kills += 1;
    }

    /// The content of a store, read by a reader that is independent of udm.
    fn read(&self, name: &str) -> ParsedStore {
        let file = File::open(self.store(name)).unwrap();
        let size = file.metadata().unwrap().len() / 512;
        let read = |sector: u64, sectors: u64| {
            let mut bytes = vec![0; sectors as usize * 512];
            file.read_exact_at(&mut bytes, sector * 512).unwrap();
            bytes
        };
        let found = read_store(size, SECTORS as u64, read).unwrap().expect("a store that is not blank");
        // Records are written in order, in one or several writes.
        assert!(found.is_in_order(), "{:?}: {name} has holes", self.kind);
        found
    }

    /// Checks all volumes and stores after a kill.
    fn check(&self, totals: &mut KillTotals) {
        let stores = self.volumes[1..].iter().map(|(name, _)| (*name, self.read(name)));
        let stores: Vec<(&str, ParsedStore)> = stores.collect();
        totals.grown += u64::from(
            self.kind == Scenario::Growing && std::fs::metadata(self.store("s")).unwrap().len() > 64 << 10,
        );
        totals.merging += u64::from(self.merges && !stores[0].1.records.is_empty());
        let server = self.serve();
        for (name, volume, part) in self.served() {
            let lost = stores.iter().any(|(store, found)| *store == name && !found.valid);
            assert!(!lost || self.kind == Scenario::Small, "{name} is invalid");
            if lost {
                assert_eq!(server.says(&["status", name]), format!("0 {SECTORS} snapshot Invalid\n"));
                let mut client = Client::connect(&server.nbd, name);
                assert!(
                    (0..SECTORS as u64 / 8).step_by(97).all(|at| client.one(Nbd::Read, at * 4096, 512) == 5)
                );
                totals.invalid += 1;
                continue;
            }
            totals.open += volume.settle(&server.nbd, name, part.clone());
            if !part.is_empty() {
                let out = self.fio(&server, name, &part).arg("--verify_only").output().unwrap();
                let output = text(&out.stdout) + &text(&out.stderr);
                assert!(
                    out.status.success() && output.contains("issued rwts: total=256,"),
                    "{name}: {output}"
                );
                totals.fio += 1;
            }
        }
    }
}

#[test]
fn what_was_acknowledged_survives_a_kill_and_the_instant_stays() {
    let rounds = std::env::var("UDM_KILL_ROUNDS").map_or(ROUNDS, |n| n.parse().unwrap());
    let mut totals = KillTotals::default();
    let kills = (rounds / KINDS.len() as u64).clamp(2, KILLS_MAX);
    let has_fio = has("fio") && has("timeout");
    let kill_world = |kind: Scenario, seed: u64, kills: u64, totals: &mut KillTotals| {
        let mut world = KillFixture::new(kind, seed);
        for nr in 0..kills {
            if kind == Scenario::Merging && nr == 1 {
                world.merges = true;
                let [(_, v), (_, s)] = &world.volumes[..] else { unreachable!("an origin and a snapshot") };
                v.become_of(s);
            }
            // A merge takes only a short time.
            let most = match world.merges {
                true if totals.kills >= rounds => 7,
                true => 211,
                false => 1601,
            };
            let answers = 1 + (totals.kills * 6007 + seed) % most;
            let with_fio = has_fio && nr == 0 && kind == Scenario::Growing;
            world.kill(answers, with_fio, totals);
            world.check(totals);
        }
    };
    for seed in 0.. {
        let kind = KINDS[seed as usize % KINDS.len()];
        kill_world(kind, seed, kills.min(rounds - totals.kills), &mut totals);
        if totals.kills == rounds {
            break;
        }
    }
    // On a busy machine a merge may have finished before the kill.
    for seed in (rounds..rounds + 30).take_while(|_| rounds >= ROUNDS) {
        if totals.merging > 0 {
            break;
        }
        kill_world(Scenario::Merging, seed, 2, &mut totals);
    }
    let KillTotals { kills, served, open, invalid, grown, merging, fio } = totals;
    let LoadCounts { answered, unanswered, failed } = served;
    #[expect(clippy::print_stdout, reason = "the totals of a long run")]
    let say = |line: String| println!("{line}");
    say(format!(
        "{kills} kills: {answered} requests answered, {unanswered} not, {failed} failed; {open} sectors were \
         being written; {invalid} snapshots invalid, {grown} stores grown, {merging} merges cut off, {fio} fios verified"
    ));
    let is_test = unanswered > kills && open > 0 && (kills < ROUNDS || grown > 0 && merging > 0);
    assert!(is_test, "this shows nothing");
}
