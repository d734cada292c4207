//! The quality of the selectors' choices for unequal paths. Simulated: each path serves one request
//! at a time, with its own service time, on a clock that jumps to the next completion.

mod multipath_rig;

use multipath_rig::{MultipathRig, bare_read};
use udm_core::Nanos;

const US: u64 = 1000;

/// A rig whose paths have these service times.
struct ServiceTimeModel {
    rig: MultipathRig,
    service: Vec<u64>,
    /// Time at which each path completes its current request.
    ends: Vec<Option<u64>>,
    served: Vec<u64>,
}

impl ServiceTimeModel {
    fn new(selector: &str, service: &[u64]) -> ServiceTimeModel {
        let paths: Vec<_> = (0..service.len()).map(|n| format!("253:{n}")).collect();
        let rig = MultipathRig::new(&format!("0 0 1 1 {selector} 0 {} 0 {}", paths.len(), paths.join(" ")));
        rig.disks.iter().for_each(|disk| disk.hold(true));
        ServiceTimeModel {
            rig,
            service: service.to_vec(),
            ends: vec![None; paths.len()],
            served: vec![0; paths.len()],
        }
    }

    fn now(&self) -> u64 {
        self.rig.world.now.0
    }

    fn begin(&mut self, requests: usize) {
        (0..requests).for_each(|_| self.rig.start(bare_read(8)));
        self.next_of_each();
    }

    /// Starts the next request of each idle path.
    fn next_of_each(&mut self) {
        for path in 0..self.ends.len() {
            if self.ends[path].is_none() && self.rig.disks[path].waiting() > 0 {
                self.ends[path] = Some(self.now() + self.service[path]);
            }
        }
    }

    /// Advances to the next completion. Returns false if there is none.
    fn step(&mut self) -> bool {
        let busy = (0..self.ends.len()).filter_map(|path| self.ends[path].map(|end| (end, path)));
        let Some((end, path)) = busy.min() else { return false };
        self.rig.world.now = Nanos(end);
        self.rig.disks[path].release(1);
        self.rig.poll();
        let results = self.rig.results();
        assert!(results.len() == 1 && results[0].is_ok());
        self.served[path] += 1;
        self.ends[path] = None;
        self.next_of_each();
        true
    }

    /// Keeps `depth` requests in flight. Returns requests per second of simulated time, after a
    /// warm-up.
    fn closed_loop(&mut self, depth: usize) -> f64 {
        self.begin(depth);
        let serve = |line: &mut ServiceTimeModel, n: u64| {
            for _ in 0..n {
                assert!(line.step());
                line.begin(1);
            }
        };
        serve(self, 2000);
        self.served.iter_mut().for_each(|served| *served = 0);
        let begin = self.now();
        serve(self, 10_000);
        let rate = 1e9 * 10_000.0 / (self.now() - begin) as f64;
        while self.step() {}
        rate
    }
}

const TEN_TIMES: [u64; 2] = [100 * US, 1000 * US];

/// The rate if both paths are always busy: the maximum.
fn ideal_rate(service: &[u64]) -> f64 {
    service.iter().map(|&ns| 1e9 / ns as f64).sum()
}

#[test]
fn one_path_of_two_is_ten_times_slower() {
    for selector in ["queue-length", "service-time", "historical-service-time"] {
        for depth in [8, 32] {
            let rate = ServiceTimeModel::new(selector, &TEN_TIMES).closed_loop(depth);
            let share = rate / ideal_rate(&TEN_TIMES);
            assert!(share >= 0.85, "{selector} at depth {depth}: {share:.3} of the ideal");
        }
    }
}

/// Round-robin gives each path the same number of requests, so the rate is twice that of the slow
/// path.
#[test]
fn round_robin_is_as_fast_as_its_slowest_path() {
    let mut line = ServiceTimeModel::new("round-robin", &TEN_TIMES);
    let rate = line.closed_loop(32);
    let want = 2.0 * 1e9 / TEN_TIMES[1] as f64;
    assert!((rate / want - 1.0).abs() < 0.01, "{rate} a second, {want} by the maths");
    assert!(line.served[0].abs_diff(line.served[1]) <= 33, "{:?}", line.served);
}

/// A burst on top of a steady load. Selectors that count requests in flight distribute it evenly;
/// historical-service-time gives the slow path few. The time of a burst ends when the same number
/// of requests has completed. (After a longer pause historical-service-time counts its history as
/// stale and distributes evenly too, as the kernel does.)
#[test]
fn bursts_are_over_sooner_with_historical_service_time() {
    let burst = |selector: &str, size: usize| {
        let mut line = ServiceTimeModel::new(selector, &TEN_TIMES);
        line.begin(2);
        let mut times = Vec::new();
        for _ in 0..50 {
            for _ in 0..200 {
                line.step();
                line.begin(1);
            }
            let begin = line.now();
            line.begin(size);
            (0..size).for_each(|_| assert!(line.step()));
            times.push(line.now() - begin);
        }
        while line.step() {}
        times.sort_unstable();
        times[times.len() / 2]
    };
    for size in [8, 32] {
        let (historical, service) = (burst("historical-service-time", size), burst("service-time", size));
        assert!(historical * 2 < service, "{size} at once: {historical} ns, service-time {service} ns");
    }
}
