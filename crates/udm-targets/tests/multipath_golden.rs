//! Replays the recording of a real kernel (`data/multipath-golden.txt`): states after each message
//! and request, event counts, orders of choice, suspend. The recording does not show what was done
//! to the device between its lines (tables, suspends, requests in the background). So each block
//! has cues: actions before the line with this beginning. Every line of a block is checked, or is
//! listed as a line without content to check.

mod multipath_rig;

use multipath_rig::{MultipathRig, SIZE, bare_read};
use udm_core::Status;

const GOLDEN: &str = include_str!("data/multipath-golden.txt");

/// An action before a line.
enum CueAction {
    /// A read of this many sectors in the background.
    Start(u64),
    /// From here on, foreground reads read the bad half.
    ReadBad,
    Suspend,
    SuspendNoflush,
    Resume,
    Load(&'static str),
    Message(&'static str),
    Hold,
    /// The disk completes its oldest request.
    Release(usize),
    ReleaseAll,
    /// The queued read has failed with EIO, while the kernel, in request mode, queues it over a
    /// flushing suspend: udm always has the rule of bio mode.
    FailedInstead,
    /// Nothing more in this block.
    Stop,
}
use CueAction::*;

/// The lines of the block of run `run` whose heading begins with `== name`.
fn block(run: u32, name: &str) -> Vec<&'static str> {
    let start = format!("################ run {run}");
    let lines = GOLDEN.lines().skip_while(|l| *l != start).skip(1).take_while(|l| !l.starts_with("####"));
    // The first heading of a run follows a reset sequence of the terminal.
    let heading = format!("== {name} ");
    let mut lines = lines.skip_while(|l| !l.contains(&heading));
    lines.next().unwrap_or_else(|| panic!("no block {name} in run {run}"));
    lines.take_while(|l| !l.starts_with("== ")).map(str::trim_start).collect()
}

/// A block being replayed.
struct Replay {
    rig: MultipathRig,
    /// Foreground reads read the bad half.
    bad: bool,
    background: usize,
    errno: Option<i32>,
    /// The disks' counters at the last line that shows them.
    shown: Option<Vec<usize>>,
    checks: usize,
}

impl Replay {
    fn new(params: &str) -> Replay {
        let rig = MultipathRig::new(params);
        Replay { rig, bad: false, background: 0, errno: None, shown: None, checks: 0 }
    }

    fn act(&mut self, act: &CueAction) {
        match act {
            Start(sectors) => {
                self.rig.start(bare_read(*sectors));
                self.background += 1;
            }
            ReadBad => self.bad = true,
            Suspend => self.rig.suspend(false),
            SuspendNoflush => self.rig.suspend(true),
            Resume => self.rig.resume(),
            Load(params) => self.rig.load(params),
            Message(text) => self.rig.tell(text),
            Hold => self.rig.disks.iter().for_each(|d| d.hold(true)),
            Release(disk) => {
                self.rig.disks[*disk].release(1);
                self.rig.poll();
                assert_eq!(self.rig.results(), [Status::Ok]);
            }
            ReleaseAll => {
                self.rig.disks.iter().for_each(|d| d.hold(false));
                self.rig.poll();
                assert!(self.rig.results().iter().all(|s| s.is_ok()));
            }
            FailedInstead => {
                assert_eq!(self.rig.results(), [Status::IoErr], "held over a flushing suspend");
                self.background = 0;
            }
            Stop => unreachable!("handled by replay"),
        }
    }

    /// Replays a line; panics if the line is unknown.
    fn line(&mut self, line: &str) {
        if let Some(rest) = line.strip_prefix("msg '") {
            self.message(rest);
        } else if let Some(rest) = line.strip_prefix("io r ") {
            self.io(rest);
        } else if line.starts_with('[') {
            self.state(line.split_once("] ").expect("a tag").1);
        } else if line.starts_with("nullb0 r=") {
            let counts = line
                .split_terminator("; ")
                .map(|f| f.split(['=', ' ']).nth(2).and_then(|n| n.parse().ok()).expect("a count of reads"));
            self.counts(counts.collect());
        } else if let Some((before, after)) = line.split_once(" -> ") {
            let parse = |s: &str| -> Vec<usize> {
                let numbers = s.rsplit(": ").next().expect("counts").split_whitespace();
                numbers.map(|n| n.parse().expect("a count")).collect()
            };
            self.counts(parse(before));
            assert_eq!(self.rig.read(), Status::Ok);
            self.counts(parse(after));
        } else if line.ends_with("io.out=''") || line == "after resume: ''" {
            assert!(self.rig.results().is_empty(), "{line}: it was held");
            self.checks += 1;
        } else if let Some(at) = line.find("'io r ") {
            let (error, count) = line[at + 6..].split_once(") io r ").expect("an error and a count");
            self.io(error);
            self.io(count);
        } else {
            let idle = ["now ", "device-mapper: ", "Command failed", "rc change", "3        0"];
            assert!(idle.iter().any(|i| line.starts_with(i)), "unknown line: {line}");
        }
    }

    fn message(&mut self, rest: &str) {
        let (text, rest) = rest.split_once("' rc=").expect("a result");
        let (result, state) = rest.split_once(" | ").expect("a state");
        let want = result.split_once("failed: ").map(|(_, errno)| errno.trim());
        let got =
            self.rig.message(text).err().map(|e| std::io::Error::from_raw_os_error(e.errno).to_string());
        match (&got, want) {
            (None, None) => {}
            (Some(got), Some(want)) => assert!(got.starts_with(want), "{text}: {got}, recorded {want}"),
            _ => panic!("{text}: {got:?}, recorded {want:?}"),
        }
        self.status(state);
    }

    /// `STATUS | ev=N`.
    fn status(&mut self, text: &str) {
        let (status, events) = text.rsplit_once(" | ev=").expect("an event count");
        self.is(status, &format!("0 {SIZE} multipath {}", self.rig.status()));
        assert_eq!(events.trim().parse(), Ok(self.rig.events.count()), "events at {text}");
    }

    fn is(&mut self, want: &str, got: &str) {
        assert_eq!(got, want);
        self.checks += 1;
    }

    fn state(&mut self, text: &str) {
        if let Some(table) = text.strip_prefix("table : ") {
            self.is(table, &format!("0 {SIZE} multipath {}", self.rig.table()));
        } else if let Some(status) = text.strip_prefix("status: ") {
            self.status(status);
        } else {
            let (table, rest) = text.split_once(" || ").expect("table and status");
            self.is(table, &format!("0 {SIZE} multipath {}", self.rig.table()));
            self.status(&rest.replace(" || ev=", " | ev="));
        }
    }

    /// `#0 ret=-1 errno=5 ...`, or `ok=K of N ...` for completed background reads or for reads to
    /// make.
    fn io(&mut self, text: &str) {
        if let Some((_, errno)) = text.split_once("ret=-1 errno=") {
            self.errno = errno.split(' ').next().and_then(|n| n.parse().ok());
            return;
        }
        let mut words = text.strip_prefix("ok=").expect("a count").split(' ');
        let ok: usize = words.next().and_then(|n| n.parse().ok()).expect("a count");
        let all: usize = words.nth(1).and_then(|n| n.parse().ok()).expect("a count");
        let results = if self.background > 0 {
            self.background -= all;
            self.rig.results()
        } else {
            let sector = if self.bad { SIZE / 2 } else { 0 };
            (0..all).map(|_| self.rig.run(udm_dm::testing::make_test_read_bio(sector, 8))).collect()
        };
        assert_eq!(results.len(), all, "{text}");
        assert_eq!(results.iter().filter(|s| s.is_ok()).count(), ok, "{text}: {results:?}");
        if let Some(errno) = self.errno.take() {
            assert!(results.iter().any(|s| s.errno() == errno), "errno {errno}: {results:?}");
        }
        self.checks += 1;
    }

    /// The disks' counters are `now`. The first call records the start of the recording.
    fn counts(&mut self, now: Vec<usize>) {
        let done = self.rig.counts();
        if let Some(before) = &self.shown {
            let want: Vec<_> = before.iter().zip(&done).map(|(b, d)| b + d).collect();
            assert_eq!(want, now, "requests by disk");
            self.checks += 1;
        }
        self.shown = Some(now);
    }
}

/// Replays blocks of one device, created with `params`, with its cues. All cues must be used.
fn replay(run: u32, blocks: &[&str], params: &str, cues: &[(&str, CueAction)]) {
    replay_on(Replay::new(params), run, blocks, cues);
}

fn replay_on(replay: Replay, run: u32, blocks: &[&str], cues: &[(&str, CueAction)]) {
    replay_lines(replay, blocks.iter().flat_map(|name| block(run, name)).collect(), cues);
}

fn replay_lines(mut replay: Replay, lines: Vec<&str>, cues: &[(&str, CueAction)]) {
    let mut cues = cues.iter().peekable();
    'all: for line in lines {
        while let Some((_, act)) = cues.next_if(|(before, _)| line.starts_with(before)) {
            if matches!(act, Stop) {
                break 'all;
            }
            replay.act(act);
        }
        replay.line(line);
    }
    assert!(cues.peek().is_none(), "a cue before {:?} never came up", cues.peek().map(|c| c.0));
    assert!(replay.checks > 0, "nothing was checked");
}

#[test]
fn first_io_and_messages() {
    let table = "0 0 2 1 round-robin 0 2 1 253:0 1 253:1 1 round-robin 0 2 1 253:2 1 253:3 1";
    replay(2, &["B1", "B2"], table, &[]);
}

#[test]
fn last_path_without_queueing() {
    replay(2, &["B3"], "0 0 1 1 round-robin 0 1 1 253:0 1", &[]);
}

#[test]
fn queueing_in_request_mode() {
    let cues = [("io.out=''", Start(8)), ("msg 'fail_if_no_path'", Start(8))];
    replay(2, &["B4"], "1 queue_if_no_path 0 1 1 round-robin 0 1 1 253:0 1", &cues);
}

#[test]
fn queueing_in_bio_mode() {
    let cues = [("io.out=''", Start(8)), ("msg 'fail_if_no_path'", Start(8))];
    replay(2, &["B4b"], "3 queue_if_no_path queue_mode bio 0 1 1 round-robin 0 1 1 253:0 1", &cues);
}

#[test]
fn one_bad_block_takes_all_paths() {
    let table = "0 0 2 1 round-robin 0 2 1 253:0 1 253:1 1 round-robin 0 2 1 253:2 1 253:3 1";
    let mut with = Replay::new(table);
    with.rig.bad_second_half(&[0, 1, 2, 3], Status::IoErr);
    replay_on(with, 2, &["B5"], &[("io r #0", ReadBad)]);
}

#[test]
fn one_bad_path() {
    for (name, features) in [("B5b", "0"), ("B5c", "2 queue_mode bio")] {
        let mut with = Replay::new(&format!("{features} 0 1 1 round-robin 0 2 1 253:0 1 253:1 1"));
        with.rig.bad_second_half(&[0], Status::IoErr);
        replay_on(with, 2, &[name], &[("io r ok=3", ReadBad)]);
    }
}

#[test]
fn suspend_in_request_mode() {
    let cues = [
        ("[susp] table", Suspend),
        ("[res] table", Resume),
        ("[noflush] table", SuspendNoflush),
        ("[res2] table", Resume),
        ("now suspend --noflush", Start(8)),
        ("rc=0 io.out", SuspendNoflush),
        ("io r ok=1", Load("1 queue_if_no_path 0 1 1 round-robin 0 1 1 253:2 1")),
        ("io r ok=1", Resume),
        ("now flush suspend", Start(8)),
        ("rc=0 io.out", Suspend),
        ("rc=0 io.out", FailedInstead),
        ("[fl2] table", Resume),
    ];
    replay(2, &["B6"], "1 queue_if_no_path 0 1 1 round-robin 0 2 1 253:0 1 253:1 1", &cues);
}

#[test]
fn noflush_suspend_in_bio_mode() {
    let cues = [
        ("rc=0 io.out", Start(8)),
        ("rc=0 io.out", SuspendNoflush),
        ("io r ok=1", Load("3 queue_if_no_path queue_mode bio 0 1 1 round-robin 0 1 1 253:1 1")),
        ("io r ok=1", Resume),
    ];
    replay(2, &["B6b"], "3 queue_if_no_path queue_mode bio 0 1 1 round-robin 0 1 1 253:0 1", &cues);
}

#[test]
fn a_reload_starts_afresh() {
    let table = "0 0 1 1 round-robin 0 2 1 253:0 1 253:1 1";
    let cues = [
        ("[reload_resets] table", Suspend),
        ("[reload_resets] table", Load(table)),
        ("[reload_resets] table", Resume),
    ];
    replay(2, &["B7"], table, &cues);
}

#[test]
fn no_groups() {
    replay(2, &["B8"], "0 0 0 0", &[]);
}

#[test]
fn orders_of_choice() {
    for (name, selector) in [("C1", "round-robin"), ("C2", "queue-length")] {
        let cues = [("f0 1:", Message("fail_path 253:0")), ("re0 1:", Message("reinstate_path 253:0"))];
        replay(3, &[name], &format!("0 0 1 1 {selector} 0 3 0 253:0 253:1 253:2"), &cues);
    }
}

#[test]
fn flushing_suspend_with_held_io() {
    // Request mode, recorded three times. udm fails the queued read, so later parts of the
    // recording about it are skipped.
    let cues = [
        ("1 rc=0 after suspend", Message("fail_path 253:0")),
        ("1 rc=0 after suspend", Start(8)),
        ("1 rc=0 after suspend", Suspend),
        ("1 rc=0 after suspend", FailedInstead),
        ("after resume", Stop),
    ];
    replay(3, &["C6"], "1 queue_if_no_path 0 1 1 round-robin 0 1 1 253:0 1", &cues);
    // Bio mode. The recording repeats the read's output after the resume; a replay has it once.
    let lines: Vec<_> = block(3, "C7").into_iter().filter(|l| !l.starts_with("after resume")).collect();
    let cues = [
        ("rc=0 after suspend", Message("fail_path 253:0")),
        ("rc=0 after suspend", Start(8)),
        ("rc=0 after suspend", Suspend),
        ("[res]", Resume),
    ];
    let with = Replay::new("3 queue_if_no_path queue_mode bio 0 1 1 round-robin 0 1 1 253:0 1");
    replay_lines(with, lines, &cues);
}

#[test]
fn queueing_that_ends_is_not_restored_by_a_path() {
    // In the recording the module's time limit ended the queueing; here the message does, with the
    // same texts.
    let cues = [
        ("io r #0", Message("fail_path 253:0")),
        ("io r #0", Start(8)),
        ("io r #0", Message("fail_if_no_path")),
        ("[re]", Message("reinstate_path 253:0")),
    ];
    replay(3, &["C8"], "1 queue_if_no_path 0 1 1 round-robin 0 1 1 253:0 1", &cues);
}

#[test]
fn loads_in_flight() {
    let mut with = Replay::new("0 0 1 1 service-time 0 2 2 253:0 1 1 253:1 1 4");
    let lines = block(3, "C9");
    let at = |tag: &str| {
        let tag = format!("[{tag}]");
        lines.iter().find(|l| l.starts_with(&tag)).expect("the tag is recorded")
    };
    with.line(at("idle"));
    with.act(&Hold);
    for (tag, acts) in [
        ("one4k", vec![Start(8)]),
        ("two64k", vec![Start(128)]),
        ("three4k", vec![Start(8)]),
        // The first read had completed by then.
        ("four8k", vec![Release(1), Start(16)]),
        ("idle2", vec![ReleaseAll]),
    ] {
        acts.iter().for_each(|act| with.act(act));
        with.line(at(tag));
    }
    let mut with = Replay::new("0 0 1 1 queue-length 0 2 0 253:0 253:1");
    with.line(at("qlidle"));
    with.act(&Hold);
    for (tag, acts) in [
        ("q1", vec![Start(8)]),
        ("q2", vec![Start(8)]),
        ("q3", vec![Start(8)]),
        ("q4", vec![Start(8)]),
        ("q5", vec![Release(0), Start(8)]),
        ("qf", vec![Message("fail_path 253:0")]),
        ("qdone", vec![ReleaseAll]),
    ] {
        acts.iter().for_each(|act| with.act(act));
        with.line(at(tag));
    }
}
