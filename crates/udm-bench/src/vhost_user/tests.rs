//! The copy loop, and the sizes of queues.

use super::*;
use crate::jobs::parse_fio_load_options;
use std::sync::atomic::AtomicBool;

fn floor(text: &str, poll: bool) -> Result<BenchReport> {
    let load = parse_fio_load_options(text);
    LoadMeasurementPlan { load: &load, progress: None, stop: &AtomicBool::new(false) }
        .measure_copy_floor(poll)
}

#[test]
fn the_copy_loop_answers_every_request() {
    for (text, want) in [
        ("--rw randread --bs 4k --iodepth 300 --number_ios 5000 --numjobs 2", [5000, 0, 0]),
        ("--rw write --bs 64k --iodepth 1 --number_ios 500", [0, 500, 0]),
        ("--rw randtrim --bs 512 --iodepth 8 --number_ios 100", [0, 0, 100]),
    ] {
        let report = floor(text, want[1] == 0).unwrap();
        assert_eq!(report.failure(), None, "{text}");
        for entry in &report.entries {
            assert_eq!(entry.stats.directions.each_ref().map(|d| d.ios), want, "{text}");
        }
    }
}

#[test]
fn a_queue_holds_the_requests_of_its_depth() {
    assert_eq!([1, 32, 128, 341].map(|depth| queue_size_for_depth(depth).unwrap()), [4, 128, 512, 1024]);
    let refused = queue_size_for_depth(342).unwrap_err().to_string();
    assert_eq!(refused, "iodepth=342: at most 341 over vhost-user");
}
