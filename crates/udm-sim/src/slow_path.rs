//! Test of the ejection of slow paths. A path of a watched device is slow for a while. It must be
//! ejected if it is slow enough, no other path may be, no request may be lost, and it must return.
//!
//! The test starts with devices that were just created, so no latencies are known. No faults occur
//! meanwhile. So the expected result follows from the latencies that the test sets.

use crate::environment::lock_environment;
use crate::model::Violation;
use crate::tables::PathSelector;
use crate::world::MappedDeviceStackWorld;
use udm_core::{Nanos, Op};
use udm_dm::PathReport;

/// Interval and number of the reads per core: enough for four paths in each window of 250 ms.
pub(crate) const PAUSE: Nanos = Nanos::from_millis(30);
pub(crate) const READS: usize = 32;

/// Maximum time until an ejection: three windows, and the one in progress.
const VERDICT: Nanos = Nanos::from_millis(2_000);
/// Maximum time during which requests sent to a path before still complete.
const SLOW_TIME: Nanos = Nanos::from_millis(200);
/// Minimum time for which a path stays ejected.
const OUT: Nanos = Nanos::from_millis(10_000);
/// Maximum duration of a trial.
const TRIAL: Nanos = Nanos::from_millis(3_000);
/// Maximum number of trials until a fast path returns, regardless of the other paths.
const TRIALS_MAX: u32 = 6;

/// Expected result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ExpectedPathEjection {
    /// The path is ejected.
    Out,
    /// The path stays in use.
    Stays,
    /// Both are allowed.
    Either,
}

/// Additional latency of the slow path and of the other paths, and the expected result.
const WAYS: [(Nanos, Nanos, ExpectedPathEjection); 7] = [
    (Nanos(0), Nanos(0), ExpectedPathEjection::Stays),
    // This latency is never too slow, even if the other paths are fast.
    (Nanos(500_000), Nanos(0), ExpectedPathEjection::Stays),
    (Nanos::from_millis(3), Nanos::from_millis(1), ExpectedPathEjection::Stays),
    (Nanos::from_millis(3), Nanos(0), ExpectedPathEjection::Out),
    (Nanos::from_millis(8), Nanos(0), ExpectedPathEjection::Out),
    (Nanos::from_millis(30), Nanos(0), ExpectedPathEjection::Out),
    (Nanos::from_millis(30), Nanos::from_millis(3), ExpectedPathEjection::Out),
];

/// The slow path of a test.
struct SlowPath {
    device: usize,
    path: usize,
    /// The other paths of its group.
    others: Vec<usize>,
    /// True if all reads go to that group.
    alone: bool,
    verdict: ExpectedPathEjection,
}

impl MappedDeviceStackWorld {
    /// Runs the test, if the world ejects slow paths.
    ///
    /// # Errors
    /// The violation.
    pub(crate) fn slow_path(&mut self) -> Result<(), Violation> {
        if !self.watch.eject_slow {
            return Ok(());
        }
        let Some((slow, one, rest)) = self.draw_slow() else { return Ok(()) };
        self.machine.totals.slow_paths += 1;
        let rooms: Vec<usize> = {
            let mut env = lock_environment(&self.machine.env);
            env.say(format!("p{} takes {one:?} longer than else, and the others {rest:?}", slow.path));
            env.paths.iter_mut().map(|p| std::mem::replace(&mut p.room, usize::MAX)).collect()
        };
        self.drag(&slow, one, rest);
        (self.machine.resting, self.machine.reads_of) = (false, Some(slow.device));
        self.check_ejection(&slow)?;
        self.drag(&slow, Nanos(0), Nanos(0));
        self.read_for(SLOW_TIME)?;
        (self.machine.resting, self.machine.reads_of) = (true, None);
        self.count_watch();
        let mut env = lock_environment(&self.machine.env);
        env.paths.iter_mut().zip(rooms).for_each(|(path, room)| path.room = room);
        Ok(())
    }

    /// Draws the slow path and the additional latencies.
    fn draw_slow(&mut self) -> Option<(SlowPath, Nanos, Nanos)> {
        let (one, rest, mut verdict) = self.slow.pick(&WAYS);
        let mut all = Vec::new();
        for (i, device) in self.devices.iter().enumerate().filter(|(_, d)| !d.spec.is_loose() && d.is_live())
        {
            let Some((_, _, groups)) = device.spec.multipath() else { continue };
            let several = groups.iter().filter(|(_, paths)| paths.len() > 1);
            all.extend(several.map(|(selector, paths)| (i, *selector, paths.clone(), groups.len() == 1)));
        }
        let nth = self.slow.below(all.len() as u64) as usize;
        let (device, selector, mut others, alone) = all.into_iter().nth(nth)?;
        let path = others.swap_remove(self.slow.below(others.len() as u64) as usize);
        // Other selectors give a slow path fewer reads than an ejection needs, and hedges also
        // affect the result.
        if verdict == ExpectedPathEjection::Out && !(alone && selector == PathSelector::RoundRobin)
            || rest.0 > 0
        {
            verdict = if verdict == ExpectedPathEjection::Stays && !self.watch.hedge_reads {
                verdict
            } else {
                ExpectedPathEjection::Either
            };
        }
        Some((SlowPath { device, path, others, alone, verdict }, one, rest))
    }

    fn drag(&mut self, slow: &SlowPath, one: Nanos, rest: Nanos) {
        let mut env = lock_environment(&self.machine.env);
        env.paths[slow.path].drag = one;
        slow.others.iter().for_each(|p| env.paths[*p].drag = rest);
    }

    /// Lets the cores read for `span`.
    fn read_for(&mut self, span: Nanos) -> Result<(), Violation> {
        let until = lock_environment(&self.machine.env).now + span;
        while lock_environment(&self.machine.env).now < until {
            self.step()?;
        }
        Ok(())
    }

    /// Lets the cores pause for `span`.
    fn nap(&mut self, span: Nanos) -> Result<(), Violation> {
        let until = lock_environment(&self.machine.env).now + span;
        self.machine.cores.iter_mut().for_each(|core| core.next_work = until);
        self.read_for(span)
    }

    fn reports(&self, device: usize) -> Vec<PathReport> {
        let live = self.devices[device].mapped().live();
        live.map(|table| table.path_reports()).unwrap_or_default()
    }

    /// Returns the report of the slow path.
    fn report(&self, slow: &SlowPath) -> Result<PathReport, Violation> {
        let mut all = self.reports(slow.device).into_iter();
        all.find(|r| r.number.minor as usize == slow.path).ok_or(format!("d{} lost a path", slow.device))
    }

    /// Checks that no other path is ejected.
    fn check_no_other_ejected(&self, slow: &SlowPath) -> Result<(), Violation> {
        let mut others = self.reports(slow.device).into_iter();
        match others.find(|r| r.ejected && r.number.minor as usize != slow.path) {
            Some(r) => Err(format!("path {} of d{} is ejected, and not slow", r.name, slow.device)),
            None => Ok(()),
        }
    }

    /// Reads for as long as an ejection may take, and checks the result.
    fn check_ejection(&mut self, slow: &SlowPath) -> Result<(), Violation> {
        let (device, path) = (slow.device, slow.path);
        self.read_for(VERDICT)?;
        self.check_no_other_ejected(slow)?;
        let out = self.report(slow)?.ejected;
        match (slow.verdict, out) {
            (ExpectedPathEjection::Out, false) => {
                return Err(format!("p{path} of d{device} is slow, and is in use"));
            }
            (ExpectedPathEjection::Stays, true) => {
                return Err(format!("p{path} of d{device} is ejected, and not slow"));
            }
            (_, false) => return Ok(()),
            (_, true) => {}
        }
        // Checks that an ejected path gets no reads.
        self.read_for(SLOW_TIME)?;
        let before = self.report(slow)?;
        self.read_for(Nanos(5 * SLOW_TIME.0))?;
        let after = self.report(slow)?;
        if before.ops[Op::Read as usize] != after.ops[Op::Read as usize] {
            return Err(format!("p{path} of d{device} is ejected, and was given reads"));
        }
        if self.slow.one_in(2) {
            self.check_last_path_used(slow)?;
        }
        self.check_readmission(slow)
    }

    /// Fails the other paths, and checks that the slow path serves requests.
    fn check_last_path_used(&mut self, slow: &SlowPath) -> Result<(), Violation> {
        let words: Vec<String> =
            slow.others.iter().map(|p| self.devices[slow.device].spec.path_word(*p)).collect();
        for word in &words {
            self.message(slow.device, &format!("fail_path {word}"))?;
        }
        let last = self.machine.model.last();
        self.read_for(SLOW_TIME)?;
        if slow.alone && self.machine.model.has_older(last) {
            return Err(format!("{} waits, and the path that is slow could serve it", self.waiting()));
        }
        for word in &words {
            self.message(slow.device, &format!("reinstate_path {word}"))?;
        }
        Ok(())
    }

    /// Checks that the path is tried after its time and returns if it is fast.
    fn check_readmission(&mut self, slow: &SlowPath) -> Result<(), Violation> {
        let (device, path) = (slow.device, slow.path);
        if self.slow.one_in(2) {
            let times = self.report(slow)?.ejections;
            self.nap(OUT)?;
            self.read_for(TRIAL)?;
            let report = self.report(slow)?;
            // A new ejection means that the path was in use again.
            if slow.verdict == ExpectedPathEjection::Out && !(report.ejected && report.ejections == times) {
                return Err(format!("p{path} of d{device} is slow, and is in use again"));
            }
        }
        self.drag(slow, Nanos(0), Nanos(0));
        for _ in 0..TRIALS_MAX {
            self.nap(OUT)?;
            self.read_for(TRIAL)?;
            if !self.report(slow)?.ejected {
                self.machine.totals.admitted += 1;
                return Ok(());
            }
        }
        match slow.alone {
            true => Err(format!("p{path} of d{device} is not slow any more, and stays out of use")),
            false => Ok(()),
        }
    }
}
