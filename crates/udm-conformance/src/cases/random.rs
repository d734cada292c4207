//! Case: random events on a mapped device in use. The events are requests from all handles,
//! suspends, resumes, reloads, cancelled changes, disks that delay requests, paths that fail and
//! are reinstated, and clients that vanish.

use crate::{DeviceTestRig, TestRequest};
use rand::RngExt;
use std::sync::Arc;
use udm_core::errno::EINTR;
use udm_core::{BioFlags, Op, Status};
use udm_dm::{DeviceTransition, MappedDevice};

/// Actions per run.
const ACTS: usize = 150;

/// Maximum number of uncollected requests per handle. Each request has its own range.
const SLOTS: u64 = 40;

struct RandomChangeRun<'a> {
    rig: &'a mut DeviceTestRig,
    device: Arc<MappedDevice>,
    /// Requests that were sent and not collected, by handle.
    sent: Vec<Vec<TestRequest>>,
    change: Option<DeviceTransition>,
    holding: bool,
    /// Tables with the same mapping.
    tables: Vec<String>,
    /// All paths of the device. `failed` is the number of failed paths.
    paths: Vec<String>,
    failed: usize,
}

/// Returns `text` and, if it is one linear target, other tables with the same mapping.
fn list_equivalent_tables(text: &str, block: u64) -> Vec<String> {
    let mut tables = vec![text.to_owned()];
    let words: Vec<&str> = text.split(' ').collect();
    if let ["0", len, "linear", device, offset] = words[..]
        && let (Ok(len), Ok(offset)) = (len.parse::<u64>(), offset.parse::<u64>())
    {
        let (cut, chunk) = (len / 3 / block * block, 16 * block);
        let (rest, behind) = (len - cut, offset + cut);
        tables.push(format!("0 {cut} linear {device} {offset}\n{cut} {rest} linear {device} {behind}"));
        if len % chunk == 0 {
            tables.push(format!("0 {len} striped 1 {chunk} {device} {offset}"));
        }
    }
    tables
}

/// No request fails, is lost or completes twice, and written data is there. Nothing hangs at the
/// end.
pub(super) fn random_changes_lose_no_request(rig: &mut DeviceTestRig) {
    let device = rig.mapped.clone().expect("the case needs a mapped device");
    let sent = vec![Vec::new(); rig.world.handles()];
    let paths = if rig.ground.paths().len() > 1 { rig.ground.paths() } else { Vec::new() };
    if !paths.is_empty() {
        // Tables printed from now on include this feature, so it stays after a reload.
        rig.message("queue_if_no_path");
    }
    let tables = list_equivalent_tables(&device.table_text(false), rig.facts.block());
    let mut run =
        RandomChangeRun { rig, device, sent, change: None, holding: false, tables, paths, failed: 0 };
    for _ in 0..ACTS {
        run.act();
    }
    run.finish_change();
    run.hold(false);
    if run.device.is_suspended() {
        run.begin(true);
        run.finish_change();
    }
    run.paths_return();
    run.collect_all();
    run.rig.verify_all(0);
    run.rig.world.quiet();
}

impl RandomChangeRun<'_> {
    fn act(&mut self) {
        let handle = self.rig.rng.random_range(0..self.sent.len());
        match self.rig.rng.random_range(0..17) {
            0..6 => self.submit(handle),
            6..8 if self.runs() => self.collect(handle),
            8 => self.begin(self.device.is_suspended()),
            9 => self.begin(true),
            10 => self.step(),
            11 => self.call_off(),
            12 => {
                let table = self.rig.rng.random_range(0..self.tables.len());
                let table = self.rig.ground.table(&self.tables[table]);
                self.device.load(table).expect("a table of the same meaning");
            }
            13 => self.hold(!self.holding),
            14 => drop(self.rig.world.settle()),
            15 if !self.paths.is_empty() && self.failed < self.paths.len() => {
                let path = self.rig.rng.random_range(0..self.paths.len());
                self.rig.ground.fail_path(&self.paths[path], Status::Transport);
                self.failed += 1;
            }
            15 if !self.paths.is_empty() => self.paths_return(),
            _ if self.runs() && self.rig.rng.random_range(0..3) == 0 => self.away(),
            _ => {}
        }
    }

    /// Whether submitted requests can complete.
    fn runs(&self) -> bool {
        self.change.is_none() && !self.holding && !self.device.is_suspended() && self.failed == 0
    }

    /// Reinstates all paths. Messages need a device that is active.
    fn paths_return(&mut self) {
        if self.failed > 0 && self.change.is_none() && !self.device.is_suspended() {
            self.rig.ground.heal();
            for path in self.paths.clone() {
                self.rig.message(&format!("reinstate_path {path}"));
            }
            self.failed = 0;
        }
    }

    fn submit(&mut self, handle: usize) {
        let block = self.rig.facts.block();
        let mut requests = Vec::new();
        for _ in 0..self.rig.rng.random_range(1..6) {
            let slot = self.sent[handle].len() + requests.len();
            if slot as u64 >= SLOTS {
                break;
            }
            let at = (handle as u64 * SLOTS + slot as u64) * 4 * block;
            let n = self.rig.rng.random_range(1..=4) * block;
            let op = match self.rig.rng.random_range(0..12) {
                0 => Op::Flush,
                1 if self.rig.facts.can(Op::Discard) => Op::Discard,
                2 if self.rig.facts.can(Op::WriteZeroes) => Op::WriteZeroes,
                3..8 if self.rig.facts.can(Op::Write) => Op::Write,
                _ => Op::Read,
            };
            let mut request =
                if op == Op::Flush { TestRequest::flush() } else { self.rig.request(op, at, n) };
            if self.rig.rng.random_range(0..6) == 0 {
                request.flags |= BioFlags::FUA;
            }
            requests.push(request);
        }
        self.rig.world.submit(handle, requests.clone());
        self.sent[handle].append(&mut requests);
    }

    fn collect(&mut self, handle: usize) {
        let answers = self.rig.world.collect(handle);
        let sent = std::mem::take(&mut self.sent[handle]);
        assert_eq!(answers.len(), sent.len(), "each request has one answer");
        for (request, answer) in sent.iter().zip(&answers) {
            self.rig.set_verdict(request, answer);
        }
    }

    fn collect_all(&mut self) {
        (0..self.sent.len()).for_each(|handle| self.collect(handle));
    }

    /// Begins a resume or a suspend, unless a change is in progress. With paths the suspend is
    /// noflush, because a flushing one fails requests that wait for a path.
    fn begin(&mut self, resume: bool) {
        if self.change.is_none() {
            let noflush = !self.paths.is_empty() || self.rig.rng.random_range(0..2) == 0;
            let wake: udm_dm::TransitionWakeFn = Arc::new(|| {});
            let change = if resume { self.device.resume(wake) } else { self.device.suspend(noflush, wake) };
            self.change = Some(change.expect("nothing else changes it"));
        }
    }

    fn step(&mut self) {
        if let Some(mut change) = self.change.take() {
            if self.rig.world.begin_change(&mut change) {
                self.rig.world.change(change).expect("a change");
            } else {
                self.change = Some(change);
            }
        }
    }

    fn call_off(&mut self) {
        if let Some(mut change) = self.change.take() {
            self.rig.world.call_off(&mut change);
            match self.rig.world.change(change) {
                Ok(()) => {}
                Err(e) => assert_eq!(e.errno, EINTR, "called off is EINTR: {e}"),
            }
        }
    }

    fn finish_change(&mut self) {
        if let Some(change) = self.change.take() {
            self.hold(false);
            self.rig.world.change(change).expect("a change");
        }
    }

    fn hold(&mut self, hold: bool) {
        self.holding = hold;
        self.rig.ground.hold(hold);
    }

    /// Closes all handles and opens new ones. Clients vanish with requests in flight; lanes are
    /// closed when they are idle.
    fn away(&mut self) {
        if self.rig.kind.is_served() {
            for request in self.sent.iter_mut().flat_map(std::mem::take) {
                self.rig.model.may_have_written(&request);
            }
            self.rig.world.vanish();
        } else {
            self.collect_all();
            self.rig.world.reopen();
        }
    }
}
