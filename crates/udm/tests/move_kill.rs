//! A disk moves to and fro between two places while clients write to it, and its server is killed
//! again and again, at any moment of the moves. The server is always started with the same command
//! line, which names the first file. Writes that reached the kernel survive the kill, so each
//! sector must hold the last acknowledged write or one that was in flight.

mod support;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use serde_json::Value;
use std::fs;
use std::sync::atomic::AtomicU64;
use std::thread;
use std::time::{Duration, Instant};
use support::Server;
use support::nbd::Client;
use support::stamps::{StampedVolume, image};
use tempfile::TempDir;
use udm_wire::nbd::{CommandFlags, NbdCommand};

/// Number of moves, without UDM_MOVE_ROUNDS in the environment.
const MOVES: u64 = 20;
const SECTORS: usize = 32_768;
const CLIENTS: usize = 2;
/// The longest time in ms from the start of the load to a kill.
const LIFE_MAX: u64 = 450;

/// What the moves and kills of a test came to.
#[derive(Default)]
struct MoveTotals {
    moves: u64,
    kills: u64,
    /// Kills in the middle of a move.
    in_between: u64,
    answered: u64,
    failed: u64,
    open: usize,
    longest: Duration,
}

struct MoveFixture {
    folder: TempDir,
    /// The other place: a file, or an export of another server.
    other: String,
    _there: Option<Server>,
    volume: StampedVolume,
    rng: SmallRng,
    /// The place of the disk when it was looked at last.
    place: String,
    totals: MoveTotals,
}

impl MoveFixture {
    fn new(is_remote: bool) -> MoveFixture {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a"), image(SECTORS)).unwrap();
        let file = folder.path().join("b").display().to_string();
        let there = is_remote.then(|| {
            fs::write(&file, vec![0; SECTORS * 512]).unwrap();
            Server::start(&[&format!("there={file}")])
        });
        let uri = |there: &Server| format!("nbd+unix:///there?socket={}", there.nbd.display());
        let other = there.as_ref().map_or(file, uri);
        let place = folder.path().join("a").display().to_string();
        let volume = StampedVolume::new(SECTORS, 0);
        let rng = SmallRng::seed_from_u64(32);
        MoveFixture { folder, other, _there: there, volume, rng, place, totals: MoveTotals::default() }
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    fn serve(&self) -> Server {
        let two = thread::available_parallelism().is_ok_and(|cpus| cpus.get() > 1);
        let device = format!("disk={}", self.path("a"));
        let (state, cores) = (self.path("state"), if two { "0,1" } else { "0" });
        Server::start_with(&[&device], &["--state", &state, "--cores", cores])
    }

    /// True if the record says that the disk is being moved.
    fn is_moving_on_disk(&self) -> bool {
        let records = fs::read_dir(self.folder.path().join("state/moves")).into_iter().flatten();
        let records = records.map(|record| record.unwrap().path());
        let mut records = records.filter(|path| path.extension().is_some_and(|end| end == "json"));
        records.any(|path| fs::read_to_string(path).unwrap().contains("\"destination\""))
    }

    /// Counts a move that was done, and begins the next one if there is none.
    fn look(&mut self, server: &Server) {
        let list: Value = serde_json::from_str(&server.says(&["move", "list", "--json"])).unwrap();
        let one = &list[0];
        let is_there = |state: &str| one["state"] == state;
        let text = |key: &str| one[key].as_str().unwrap().to_owned();
        let (place, moves) = match &list[0] {
            Value::Null => (self.place.clone(), false),
            _ if is_there("failed") || is_there("stopped") => panic!("{list}"),
            _ if is_there("done") => (text("destination"), false),
            _ if is_there("switching") => (text("destination"), true),
            _ => (text("source"), true),
        };
        if place != self.place {
            self.totals.moves += 1;
            self.place = place;
        }
        if !moves {
            let to = if self.place == self.path("a") { self.other.clone() } else { self.path("a") };
            server.says(&["move", "disk", "--to", &to]);
        }
    }

    /// One server, from its start to its kill.
    fn live(&mut self) {
        let mut server = self.serve();
        self.totals.open += self.volume.settle(&server.nbd, "disk", 0..0);
        let life = Duration::from_millis(self.rng.random_range(0..LIFE_MAX));
        let (seed, answered): (u64, _) = (self.rng.random_range(0..1 << 40), AtomicU64::new(0));
        let volume = std::mem::replace(&mut self.volume, StampedVolume::new(0, 0));
        let part = SECTORS / CLIENTS;
        thread::scope(|scope| {
            let loads: Vec<_> = (0..CLIENTS)
                .map(|at| {
                    let client = Client::connect(&server.nbd, "disk");
                    let (volume, answered) = (&volume, &answered);
                    scope.spawn(move || {
                        volume.load(client, at * part..(at + 1) * part, seed + at as u64, answered)
                    })
                })
                .collect();
            let probe = Client::connect(&server.nbd, "disk");
            let probe = scope.spawn(move || longest_pause(probe));
            let begin = Instant::now();
            while begin.elapsed() < life {
                thread::sleep(Duration::from_millis(5));
                self.look(&server);
            }
            // Begins a move if there is none.
            self.look(&server);
            thread::sleep(Duration::from_millis(self.rng.random_range(0..30)));
            server.kill();
            self.totals.kills += 1;
            self.totals.in_between += u64::from(self.is_moving_on_disk());
            for load in loads {
                let served = load.join().unwrap();
                self.totals.answered += served.answered;
                self.totals.failed += served.failed;
            }
            self.totals.longest = self.totals.longest.max(probe.join().unwrap());
        });
        self.volume = volume;
    }
}

/// Reads one sector after the other until the server ends; returns the longest time of a read.
fn longest_pause(mut client: Client) -> Duration {
    let mut longest = Duration::ZERO;
    loop {
        let begin = Instant::now();
        let asked = client.send(CommandFlags::empty(), NbdCommand::Read, 0, 512, &[]);
        let Ok((_, error, _)) = asked.and_then(|_| client.answer()) else { return longest };
        assert_eq!(error, 0, "a read failed");
        longest = longest.max(begin.elapsed());
    }
}

fn move_to_and_fro(is_remote: bool) {
    let moves = std::env::var("UDM_MOVE_ROUNDS").map_or(MOVES, |n| n.parse().unwrap());
    let mut world = MoveFixture::new(is_remote);
    while world.totals.moves < moves {
        world.live();
    }
    // The last server sees all, too.
    let server = world.serve();
    world.totals.open += world.volume.settle(&server.nbd, "disk", 0..0);
    let MoveTotals { moves, kills, in_between, answered, failed, open, longest } = world.totals;
    #[expect(clippy::print_stdout, reason = "the totals of a long run")]
    let say = |line: String| println!("{line}");
    say(format!(
        "{moves} moves, {kills} kills, {in_between} of them during a move: {answered} requests answered, \
         {open} sectors had a write under way at a kill, the longest pause of a client was {longest:?}"
    ));
    assert_eq!(failed, 0, "no client sees an error");
    assert!(in_between * 4 > kills && answered > 100 * kills, "this shows nothing");
}

#[test]
fn a_disk_moves_to_and_fro_and_kills_lose_nothing() {
    move_to_and_fro(false);
}

/// The other place is an export of another server, which lives on.
#[test]
fn a_disk_moves_to_another_server_and_back_and_kills_lose_nothing() {
    move_to_and_fro(true);
}
