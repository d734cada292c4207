//! The range lock protocol without cores: members, inboxes and a disk of a few bytes. The tests run
//! all orders of events, or very many.

use super::*;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Bytes in a block.
const BLOCK: u64 = 2;

/// The inboxes of all cores.
struct TestInboxes(Mutex<Vec<VecDeque<RangeLockMessage>>>);

impl RangeLockMessenger for TestInboxes {
    fn post(&self, core: CoreId, _: DeviceId, message: RangeLockMessage) {
        self.0.lock().unwrap()[core.index()].push_back(message);
    }
}

/// A step of a connection's script.
#[derive(Clone, Copy, Debug, PartialEq)]
enum ClientAction {
    /// Begins a write of these bytes, which continues by itself.
    Write(u64, u64),
    /// Ends the connection: waiting requests are dropped, requests in flight complete first.
    Leave,
}

/// Stage of a write.
#[derive(Clone, Debug, PartialEq, Hash)]
enum WriteStage {
    /// Waits for its own range lock or for the release of another.
    Parked,
    /// Whole blocks, at the disk.
    Whole,
    /// Has its range lock and will read.
    Granted,
    /// Has read these blocks and will write them back.
    Read(Vec<u8>),
    /// Completed.
    Done,
}

struct ModelWrite {
    range: Range<u64>,
    stage: WriteStage,
    mark: u8,
}

impl ModelWrite {
    fn blocks(&self) -> Range<u64> {
        self.range.start / BLOCK * BLOCK..self.range.end.next_multiple_of(BLOCK)
    }
    fn is_whole(&self) -> bool {
        self.blocks() == self.range
    }
    fn in_flight(&self) -> bool {
        !matches!(self.stage, WriteStage::Parked | WriteStage::Done)
    }
}

/// The state of a connection that matters for range locks.
struct ModelConnection {
    core: usize,
    script: VecDeque<ClientAction>,
    member: Option<RangeLockMember>,
    requests: Vec<ModelWrite>,
    blocked: VecDeque<usize>,
    leaving: bool,
    over: bool,
}

struct LockModel {
    inboxes: Arc<TestInboxes>,
    range_locks: Arc<RangeLocks>,
    connections: Vec<ModelConnection>,
    disk: Vec<u8>,
    marks: u8,
}

/// Possible next events.
#[derive(Clone, Copy, Debug)]
enum ModelEvent {
    Message(usize),
    Script(usize),
    Io(usize, usize),
}

type Scenario<'a> = (usize, u64, &'a [(usize, &'a [ClientAction])]);

impl LockModel {
    fn new((cores, blocks, scripts): Scenario<'_>) -> LockModel {
        let inboxes = Arc::new(TestInboxes(Mutex::new((0..cores).map(|_| VecDeque::new()).collect())));
        let connections = scripts.iter().map(|(core, script)| ModelConnection {
            core: *core,
            script: script.iter().copied().collect(),
            member: None,
            requests: Vec::new(),
            blocked: VecDeque::new(),
            leaving: false,
            over: false,
        });
        LockModel {
            inboxes,
            range_locks: Arc::new(RangeLocks::new()),
            connections: connections.collect(),
            disk: vec![0; (blocks * BLOCK) as usize],
            marks: 0,
        }
    }

    fn moves(&self) -> Vec<ModelEvent> {
        let mut moves = Vec::new();
        for (core, inbox) in self.inboxes.0.lock().unwrap().iter().enumerate() {
            if !inbox.is_empty() {
                moves.push(ModelEvent::Message(core));
            }
        }
        for (i, c) in self.connections.iter().enumerate().filter(|(_, c)| !c.over) {
            if !c.script.is_empty() && !c.leaving {
                moves.push(ModelEvent::Script(i));
            }
            let io = c.requests.iter().enumerate().filter(|(_, r)| r.in_flight());
            moves.extend(io.map(|(key, _)| ModelEvent::Io(i, key)));
        }
        moves
    }

    fn make(&mut self, what: ModelEvent) {
        match what {
            ModelEvent::Message(core) => self.deliver(core),
            ModelEvent::Script(i) => self.act(i),
            ModelEvent::Io(i, key) => self.io(i, key),
        }
    }

    fn deliver(&mut self, core: usize) {
        let Some(message) = self.inboxes.0.lock().unwrap()[core].pop_front() else { return };
        for i in 0..self.connections.len() {
            let ModelConnection { core: at, member, requests, .. } = &mut self.connections[i];
            let Some(member) = member.as_mut().filter(|_| *at == core) else { continue };
            let busy = |range: &Range<u64>| {
                requests.iter().any(|r| r.in_flight() && ranges_overlap(&r.blocks(), range))
            };
            match member.message(&message, busy) {
                RangeLockEvent::None => {}
                RangeLockEvent::Granted(key) => self.connections[i].requests[key].stage = WriteStage::Granted,
                RangeLockEvent::Released => self.resume(i),
            }
        }
    }

    fn act(&mut self, i: usize) {
        let c = &mut self.connections[i];
        if c.member.is_none() {
            let post: Arc<dyn RangeLockMessenger> = self.inboxes.clone();
            c.member = Some(RangeLockMember::join(&self.range_locks, post, CoreId(c.core as u16)));
        }
        match c.script.pop_front() {
            Some(ClientAction::Write(start, end)) => {
                self.marks += 1;
                c.requests.push(ModelWrite {
                    range: start..end,
                    stage: WriteStage::Parked,
                    mark: self.marks,
                });
                let key = c.requests.len() - 1;
                if !self.admit(i, key) {
                    self.connections[i].blocked.push_back(key);
                }
            }
            Some(ClientAction::Leave) => {
                c.leaving = true;
                c.blocked.clear();
                for (key, request) in c.requests.iter_mut().enumerate() {
                    if request.stage == WriteStage::Parked {
                        request.stage = WriteStage::Done;
                        c.member.as_mut().unwrap().release(key);
                    }
                }
                self.end(i);
            }
            None => unreachable!(),
        }
    }

    /// Returns false if the request must wait in the connection.
    fn admit(&mut self, i: usize, key: usize) -> bool {
        let c = &mut self.connections[i];
        let (request, member) = (&mut c.requests[key], c.member.as_mut().unwrap());
        if request.is_whole() {
            let free = !member.is_locked(&request.range);
            if free {
                request.stage = WriteStage::Whole;
            }
            return free;
        }
        let may = member.may_acquire();
        if may {
            member.acquire(key, request.blocks());
        }
        may
    }

    fn resume(&mut self, i: usize) {
        while let Some(&key) = self.connections[i].blocked.front()
            && self.admit(i, key)
        {
            self.connections[i].blocked.pop_front();
        }
    }

    fn io(&mut self, i: usize, key: usize) {
        let request = &self.connections[i].requests[key];
        let (range, blocks, mark) = (request.range.clone(), request.blocks(), request.mark);
        let bytes = |r: &Range<u64>| r.start as usize..r.end as usize;
        let next = match request.stage.clone() {
            WriteStage::Whole => {
                self.nobody_reads(i, key, &range);
                self.disk[bytes(&range)].fill(mark);
                WriteStage::Done
            }
            WriteStage::Granted => WriteStage::Read(self.disk[bytes(&blocks)].to_vec()),
            WriteStage::Read(mut data) => {
                self.nobody_reads(i, key, &blocks);
                let at = (range.start - blocks.start) as usize;
                data[at..at + (range.end - range.start) as usize].fill(mark);
                self.disk[bytes(&blocks)].copy_from_slice(&data);
                WriteStage::Done
            }
            WriteStage::Parked | WriteStage::Done => unreachable!(),
        };
        let done = next == WriteStage::Done;
        let c = &mut self.connections[i];
        c.requests[key].stage = next;
        if done {
            let ModelConnection { member, requests, .. } = c;
            let member = member.as_mut().unwrap();
            member.release(key);
            member.write_ended(|range| {
                requests.iter().any(|r| r.in_flight() && ranges_overlap(&r.blocks(), range))
            });
            self.end(i);
        }
    }

    /// Checks that no other request is between the read of a block and its write-back.
    fn nobody_reads(&self, i: usize, key: usize, range: &Range<u64>) {
        for (j, c) in self.connections.iter().enumerate() {
            for (k, r) in c.requests.iter().enumerate() {
                let reads = matches!(r.stage, WriteStage::Read(_)) && (i, key) != (j, k);
                assert!(
                    !(reads && ranges_overlap(&r.blocks(), range)),
                    "connection {i} writes {range:?} under {j}"
                );
            }
        }
    }

    /// A connection that leaves ends when none of its requests is in flight.
    fn end(&mut self, i: usize) {
        let c = &mut self.connections[i];
        if c.leaving && !c.requests.iter().any(ModelWrite::in_flight) {
            c.over = true;
            c.member = None;
        }
    }

    /// Hash of all state that determines the further events.
    fn fingerprint(&self) -> u64 {
        let mut hash = DefaultHasher::new();
        self.disk.hash(&mut hash);
        for inbox in self.inboxes.0.lock().unwrap().iter() {
            for message in inbox {
                match message {
                    RangeLockMessage::RangeLock { id, .. } => (0, id.0).hash(&mut hash),
                    RangeLockMessage::Granted(id) => (1, id.0).hash(&mut hash),
                    RangeLockMessage::Release(id) => (2, id.0).hash(&mut hash),
                }
            }
            u64::MAX.hash(&mut hash);
        }
        for c in &self.connections {
            (c.script.len(), &c.blocked, c.leaving, c.over).hash(&mut hash);
            for r in &c.requests {
                (r.mark, &r.stage).hash(&mut hash);
            }
            for held in c.member.iter().flat_map(|m| &m.held) {
                (held.id.0, held.owed.is_some()).hash(&mut hash);
            }
            for (id, key) in c.member.iter().flat_map(|m| &m.own) {
                (id.0, key).hash(&mut hash);
            }
        }
        let state = self.range_locks.state();
        for hold in state.active.iter().chain(&state.waiting) {
            (hold.id.0, hold.informed.len()).hash(&mut hash);
        }
        state.members.hash(&mut hash);
        hash.finish()
    }

    fn check_end(&self) {
        for (i, c) in self.connections.iter().enumerate() {
            let stuck: Vec<_> = c.requests.iter().filter(|r| r.stage != WriteStage::Done).collect();
            assert!(stuck.is_empty(), "connection {i} waits for ever: {:?}", stuck[0].range);
            if let Some(member) = &c.member {
                assert!(member.held.is_empty() && member.own.is_empty(), "connection {i} still knows holds");
            }
        }
        let state = self.range_locks.state();
        assert!(state.active.is_empty() && state.waiting.is_empty());
        assert_eq!(
            state.members.iter().sum::<usize>(),
            self.connections.iter().filter(|c| c.member.is_some()).count()
        );
    }
}

/// Runs a scenario to its end. `choose` selects one of the given number of moves.
fn run(scenario: Scenario<'_>, mut choose: impl FnMut(usize) -> usize) {
    let mut world = LockModel::new(scenario);
    loop {
        let moves = world.moves();
        if moves.is_empty() {
            return world.check_end();
        }
        let at = choose(moves.len());
        world.make(moves[at]);
    }
}

/// Runs all orders of events that lead to different states. Returns the number of states.
fn explore_all_orders(scenario: Scenario<'_>, check: impl Fn(&LockModel)) -> usize {
    let mut seen = HashSet::new();
    // The choices that led to the current state, each with the number of alternatives.
    let mut path: Vec<(usize, usize)> = Vec::new();
    loop {
        let mut world = LockModel::new(scenario);
        let mut depth = 0;
        loop {
            let moves = world.moves();
            if moves.is_empty() {
                world.check_end();
                check(&world);
                break;
            }
            if depth == path.len() {
                if !seen.insert(world.fingerprint()) {
                    break;
                }
                path.push((0, moves.len()));
            }
            world.make(moves[path[depth].0]);
            depth += 1;
        }
        while let Some((at, n)) = path.pop() {
            if at + 1 < n {
                path.push((at + 1, n));
                break;
            }
        }
        if path.is_empty() {
            return seen.len();
        }
    }
}

use ClientAction::{Leave, Write};

#[test]
fn two_halves_of_a_block_in_every_order() {
    for cores in [[0, 0], [0, 1]] {
        let scripts: [(usize, &[ClientAction]); 2] = [(cores[0], &[Write(0, 1)]), (cores[1], &[Write(1, 2)])];
        let states =
            explore_all_orders((2, 1, &scripts), |w| assert!(!w.disk.contains(&0), "a half was lost"));
        assert!(states > 30, "{states}");
    }
}

#[test]
fn a_part_against_a_whole_block_in_every_order() {
    for cores in [[0, 0], [0, 1]] {
        let scripts: [(usize, &[ClientAction]); 2] =
            [(cores[0], &[Write(0, 1)]), (cores[1], &[Write(0, 2), Write(0, 2)])];
        explore_all_orders((2, 1, &scripts), |w| assert!(w.disk[1] != 0, "a whole write was lost"));
    }
}

#[test]
fn three_members_in_every_order() {
    for cores in [[0, 0, 1], [0, 1, 2]] {
        let scripts: [(usize, &[ClientAction]); 3] = [
            (cores[0], &[Write(0, 1), Leave]),
            (cores[1], &[Write(1, 3)]),
            (cores[2], &[Write(0, 4), Write(3, 4)]),
        ];
        let states =
            explore_all_orders((3, 2, &scripts), |w| assert!(!w.disk[1..].contains(&0), "{:?}", w.disk));
        assert!(states > 1000, "{states}");
    }
}

#[test]
fn a_member_that_leaves_in_every_order() {
    // It may leave with a lock queued, active or granted, or while others wait for its token.
    for cores in [[0, 0], [0, 1]] {
        let scripts: [(usize, &[ClientAction]); 2] =
            [(cores[0], &[Write(0, 1), Leave]), (cores[1], &[Write(1, 2), Leave])];
        explore_all_orders((2, 1, &scripts), |_| {});
        let scripts: [(usize, &[ClientAction]); 3] = [
            (cores[0], &[Write(0, 1), Leave]),
            (cores[1], &[Write(2, 4), Leave]),
            (cores[1], &[Write(0, 2)]),
        ];
        explore_all_orders((2, 2, &scripts), |w| assert!(w.disk[1] != 0));
    }
}

/// More connections and writes, in random orders from seeds.
#[test]
fn crowds_in_many_orders() {
    for seed in 0..1000 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let scripts: Vec<(usize, Vec<ClientAction>)> = (0..rng.random_range(2..6))
            .map(|_| {
                let n = rng.random_range(1..24);
                let mut acts: Vec<ClientAction> = (0..n)
                    .map(|_| {
                        let start = rng.random_range(0..12);
                        Write(start, rng.random_range(start + 1..(start + 7).min(13)))
                    })
                    .collect();
                if rng.random_bool(0.4) {
                    acts.push(Leave);
                }
                (rng.random_range(0..3), acts)
            })
            .collect();
        let scripts: Vec<(usize, &[ClientAction])> =
            scripts.iter().map(|(core, acts)| (*core, &acts[..])).collect();
        run((3, 7, &scripts), |n| rng.random_range(0..n));
    }
}

/// Queued locks are served in order, and the number of active locks is limited.
#[test]
fn bounds() {
    let inboxes = Arc::new(TestInboxes(Mutex::new(vec![VecDeque::new()])));
    let range_locks = Arc::new(RangeLocks::new());
    let post: Arc<dyn RangeLockMessenger> = inboxes.clone();
    let mut members: Vec<RangeLockMember> =
        (0..6).map(|_| RangeLockMember::join(&range_locks, post.clone(), CoreId(0))).collect();
    for (i, member) in members.iter_mut().enumerate() {
        let mut key = 0;
        while member.may_acquire() {
            let at = (i * 100 + key) as u64 * BLOCK;
            member.acquire(key, at..at + BLOCK);
            key += 1;
        }
        assert_eq!(key, OWN_MAX);
    }
    let count = |range_locks: &RangeLocks| {
        let state = range_locks.state();
        (state.active.len(), state.waiting.len())
    };
    assert_eq!(count(&range_locks), (ACTIVE_MAX, 6 * OWN_MAX - ACTIVE_MAX));
    members[0].release(0);
    assert_eq!(count(&range_locks), (ACTIVE_MAX, 6 * OWN_MAX - ACTIVE_MAX - 1));
    members.clear();
    assert_eq!(count(&range_locks), (0, 0));
    // A message that is still in the inbox must not leave a new member with a lock forever.
    let mut late = RangeLockMember::join(&range_locks, post, CoreId(0));
    loop {
        let Some(message) = inboxes.0.lock().unwrap()[0].pop_front() else { break };
        late.message(&message, |_| false);
    }
    assert!(late.held.is_empty());
}
