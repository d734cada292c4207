//! Repeated lives of a server. It is killed under load and started again over the same disks and
//! the same state folder, from a file with its devices in another order each time. Meanwhile two
//! clients hand a snapshot over to new tables, and the file is applied again. A store may be
//! missing in a life, and is put back during or after it.
//!
//! Each sector must hold an acknowledged value or a value that was in flight. A snapshot is
//! unchanged or reports that it is invalid, and it may be invalid only if the server was told to
//! give it up.

mod support;

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use support::nbd::Client;
use support::stamps::{LoadCounts, StampedVolume, image};
use support::{Server, text, udm, until};
use tempfile::TempDir;

/// Number of lives, without UDM_LIVES_ROUNDS in the environment.
const ROUNDS: u64 = 8;
/// Lives per fixture.
const LIVES: u64 = 4;
const SECTORS: usize = 8192;
const SNAPSHOTS: [&str; 2] = ["s", "t"];

/// The totals of all fixtures.
#[derive(Default)]
struct LifeTotals {
    lives: u64,
    answered: u64,
    unanswered: u64,
    away: u64,
    invalid: u64,
    open: usize,
}

struct LivesFixture {
    folder: TempDir,
    rng: SmallRng,
    seed: u64,
    /// Volumes by the names of their devices; the first is the origin.
    volumes: Vec<(&'static str, StampedVolume)>,
    /// Snapshots whose store was missing in a life that gave them up.
    excused: Vec<&'static str>,
}

impl LivesFixture {
    fn new(seed: u64) -> LivesFixture {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("disk"), image(SECTORS)).unwrap();
        let names = ["v", SNAPSHOTS[0], SNAPSHOTS[1]];
        let volume =
            |(at, name): (usize, &&'static str)| (*name, StampedVolume::new(SECTORS, (at as u64) << 40));
        let volumes = names.iter().enumerate().map(volume).collect();
        let rng = SmallRng::seed_from_u64(seed);
        let world = LivesFixture { folder, rng, seed, volumes, excused: Vec::new() };
        for name in SNAPSHOTS {
            File::create(world.path(&format!("{name}.cow"))).unwrap().set_len(SECTORS as u64 * 1024).unwrap();
        }
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Starts a server from the file, with the devices in random order.
    fn serve(&mut self, lost_snapshots: &str) -> Server {
        let mut devices = vec![("v", format!("0 {SECTORS} snapshot-origin disk"))];
        devices.extend(SNAPSHOTS.map(|name| (name, format!("0 {SECTORS} snapshot disk {name}.cow P 8"))));
        devices.shuffle(&mut self.rng);
        let devices = devices.iter().map(|(name, table)| format!("[devices.{name}]\ntable = \"{table}\"\n"));
        let conf = self.path("udm.toml");
        std::fs::write(
            &conf,
            format!(
                "[serve]\nstate = \"state\"\nlost-snapshots = \"{lost_snapshots}\"\n{}",
                devices.collect::<String>()
            ),
        )
        .unwrap();
        Server::start_by(udm(&["serve", conf.to_str().unwrap()]), &[], &[])
    }

    /// The devices that are served.
    fn served(&self, server: &Server) -> Vec<&(&'static str, StampedVolume)> {
        let status = |name: &str| server.verb(&["status", name]);
        let is_served = |name: &str| {
            let out = status(name);
            out.status.success() && text(&out.stdout).starts_with("0 ")
        };
        let is_whole = |name: &str| !text(&status(name).stdout).contains("Invalid");
        self.volumes.iter().filter(|(name, _)| is_served(name) && is_whole(name)).collect()
    }

    /// Serves clients, and kills the server after some replies.
    fn live(&mut self, totals: &mut LifeTotals) {
        let policy = if self.rng.random_bool(0.2) { "give-up" } else { "refuse" };
        let away = self.rng.random_bool(0.3).then(|| SNAPSHOTS[self.rng.random_range(0..2)]);
        let (here, gone) = (away.map(|name| self.path(&format!("{name}.cow"))), self.path("gone"));
        if let (Some(name), Some(here)) = (away, &here) {
            std::fs::rename(here, &gone).unwrap();
            totals.away += 1;
            if policy == "give-up" {
                self.excused.push(name);
            }
        }
        let answers = self.rng.random_range(1..1500);
        let seed = self.seed << 16 | totals.lives << 4;
        let mut server = self.serve(policy);
        let returns = self.rng.random_bool(0.5);
        if let Some(here) = here.as_ref().filter(|_| returns) {
            std::fs::rename(&gone, here).unwrap();
            // Creates the devices that could not be created before.
            let _ = server.verb(&["reconfigure"]);
        }
        let answered = AtomicU64::new(0);
        let (served, ends) = (self.served(&server), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let mut loads = Vec::new();
            for (at, (name, volume)) in served.iter().enumerate() {
                let (client, answered) = (Client::connect(&server.nbd, name), &answered);
                let seed = seed + at as u64;
                loads.push(scope.spawn(move || volume.load(client, 0..SECTORS, seed, answered)));
            }
            // Errors are ignored: the server may be dead, and one of two concurrent changes may be
            // refused.
            let table = |name: &str| {
                let [disk, store] = ["disk".to_owned(), format!("{name}.cow")].map(|file| self.path(&file));
                format!("0 {SECTORS} snapshot {} {} P 8", disk.display(), store.display())
            };
            for name in [SNAPSHOTS[0]; 2] {
                let (server, ends, table) = (&server.socket, &ends, table(name));
                scope.spawn(move || {
                    let verb = |args: &[&str]| drop(udm(args).env("UDM_SOCKET", server).output());
                    while !ends.load(Ordering::Relaxed) {
                        verb(&["load", name, "--table", &table]);
                        verb(&["resume", name]);
                        verb(&["reconfigure"]);
                    }
                });
            }
            until("a load", || {
                let over = loads.iter().all(|load| load.is_finished());
                (over || answered.load(Ordering::Relaxed) >= answers).then_some(())
            });
            kill_process(Pid::from_child(&server.child), Signal::KILL).unwrap();
            ends.store(true, Ordering::Relaxed);
            for load in loads {
                let LoadCounts { answered, unanswered, failed } = load.join().unwrap();
                assert_eq!(failed, 0, "seed {}: requests have failed", self.seed);
                totals.answered += answered;
                totals.unanswered += unanswered;
            }
        });
        server.child.wait().unwrap();
        if let Some(here) = here.filter(|_| !returns) {
            std::fs::rename(&gone, here).unwrap();
        }
        totals.lives += 1;
    }

    /// With all stores in place, each device has its expected content or reports that it is
    /// invalid.
    fn check(&mut self, totals: &mut LifeTotals) {
        let server = self.serve("refuse");
        let served = self.served(&server);
        for (name, _) in &self.volumes {
            if let Some((_, volume)) = served.iter().find(|(is, _)| is == name) {
                totals.open += volume.settle(&server.nbd, name, 0..0);
                continue;
            }
            let seed = self.seed;
            assert!(self.excused.contains(name), "seed {seed}: {name} is lost: {}", server.log());
            totals.invalid += 1;
        }
    }
}

#[test]
fn what_was_acknowledged_and_each_instant_survive_all_lives() {
    let rounds = std::env::var("UDM_LIVES_ROUNDS").map_or(ROUNDS, |n| n.parse().unwrap());
    let mut totals = LifeTotals::default();
    for seed in 0..rounds.div_ceil(LIVES) {
        let mut world = LivesFixture::new(seed);
        // Takes the snapshots.
        drop(world.serve("refuse"));
        for _ in 0..LIVES.min(rounds - totals.lives) {
            world.live(&mut totals);
            world.check(&mut totals);
        }
    }
    let LifeTotals { lives, answered, unanswered, away, invalid, open } = totals;
    #[expect(clippy::print_stdout, reason = "the totals of a long run")]
    let say = |line: String| println!("{line}");
    say(format!(
        "{lives} lives: {answered} requests answered, {unanswered} not; {open} sectors were being \
         written; {away} stores away, {invalid} snapshots lost with a word"
    ));
    assert!(answered > 0 && unanswered > 0, "this shows nothing");
}
