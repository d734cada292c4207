//! Load on an export of any NBD server, over its socket.
//!
//! The client does little, so that the server is measured. It uses blocking sockets and no library,
//! gathers requests into one send, and takes several replies from one receive.
//!
//! [`reply_loop`] measures the same client against a loop that only reads and writes. No server can
//! be faster over such a socket.

mod client_wire;
mod reply_loop;

use crate::connection::{check_connection_load_options, new_write_payload};
use crate::report::BenchReport;
use crate::run::LoadMeasurementPlan;
use anyhow::{Context, Result, ensure};
use client_wire::NbdClientWire;
use rustix::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::thread;
use udm_backends::nbd::BlockingNbdClient;
use udm_core::{Limits, Op};
use udm_wire::nbd::client::NegotiatedExportInfo;
use udm_wire::nbd::{BlockSizes, ExportFlags};
use udm_wire::uri::NbdUri;

impl LoadMeasurementPlan<'_> {
    /// Runs the jobs against an export, one connection per job.
    ///
    /// # Errors
    /// If the load can't begin. Later failures are in the report.
    pub fn measure_nbd(&self, uri: &NbdUri) -> Result<BenchReport> {
        check_connection_load_options(self.load, "NBD")?;
        let connect = || {
            let socket = BlockingNbdClient::connect(uri, &[])?.into_socket();
            socket.context(
                "an NBD server is measured without TLS; a table over the nbds: URI measures it with TLS",
            )
        };
        let (first, export) = connect()?;
        let several = self.load.numjobs == 1 || export.flags.contains(ExportFlags::CAN_MULTI_CONN);
        let reads = self.load.rw.op() == Some(Op::Read);
        ensure!(
            several || reads,
            "the export takes one connection that writes: its server announces no multi-conn"
        );
        let mut sockets = vec![first];
        for _ in 1..self.load.numjobs {
            sockets.push(connect()?.0);
        }
        self.on_sockets(sockets, &export)
    }

    /// Runs the jobs against loops that only read and write, one per job, over Unix sockets.
    ///
    /// # Errors
    /// As [`LoadMeasurementPlan::measure_nbd`].
    pub fn measure_floor(&self) -> Result<BenchReport> {
        check_connection_load_options(self.load, "NBD")?;
        let pairs: Vec<_> = (0..self.load.numjobs).map(|_| UnixStream::pair()).collect::<Result<_, _>>()?;
        let blocks = BlockSizes { minimum: 1, preferred: 4096, maximum: 32 << 20 };
        let flags = ExportFlags::HAS_FLAGS | ExportFlags::SEND_TRIM | ExportFlags::CAN_MULTI_CONN;
        let export =
            NegotiatedExportInfo { size: 1 << 40, flags, blocks, structured: false, contexts: Vec::new() };
        thread::scope(|scope| {
            let mut sockets = Vec::new();
            for (ours, theirs) in pairs {
                scope.spawn(|| reply_loop::serve_minimal_nbd_replies(theirs));
                sockets.push(ours.into());
            }
            self.on_sockets(sockets, &export)
        })
    }

    fn on_sockets(&self, sockets: Vec<OwnedFd>, export: &NegotiatedExportInfo) -> Result<BenchReport> {
        let regions = self.load.regions(&request_limits_of_nbd_export(export))?;
        let payload = new_write_payload(self.load);
        let wires = sockets
            .into_iter()
            .map(|fd| NbdClientWire::new(fd, payload.clone()))
            .collect::<Result<Vec<_>>>()?;
        self.run_on_connections(wires, &regions)
    }
}

/// The limits of requests: those of the export, but discards are not split here.
fn request_limits_of_nbd_export(export: &NegotiatedExportInfo) -> Limits {
    let limits = export.limits();
    Limits { max_discard: limits.max_discard.min(limits.max_sectors), ..limits }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::parse_fio_load_options;
    use std::io::{Read, Write};
    use std::sync::atomic::AtomicBool;
    use udm_core::Nanos;

    fn floor(text: &str) -> Result<BenchReport> {
        LoadMeasurementPlan {
            load: &parse_fio_load_options(text),
            progress: None,
            stop: &AtomicBool::new(false),
        }
        .measure_floor()
    }

    /// All requests of each kind complete, including hundreds of short ones, and long ones that
    /// exceed the buffers of sockets.
    #[test]
    fn every_request_is_answered() {
        for (text, want) in [
            ("--rw randread --bs 4k --iodepth 300 --number_ios 5000 --numjobs 2", [5000, 0, 0]),
            ("--rw write --bs 64k --iodepth 64 --number_ios 1000", [0, 1000, 0]),
            ("--rw randrw --bs 1m --iodepth 40 --number_ios 300", [0, 0, 0]),
            ("--rw randtrim --bs 512 --iodepth 1 --number_ios 100", [0, 0, 100]),
            ("--rw read --bs 8m --number_ios 20", [20, 0, 0]),
        ] {
            let report = floor(text).unwrap();
            assert_eq!(report.failure(), None, "{text}");
            for entry in &report.entries {
                let ios = entry.stats.directions.each_ref().map(|d| d.ios);
                if want == [0, 0, 0] {
                    assert_eq!((ios[0] + ios[1], ios[0] > 0, ios[1] > 0), (300, true, true), "{text}");
                } else {
                    assert_eq!(ios, want, "{text}");
                }
                let timed: u64 = entry.stats.directions.iter().map(|d| d.latency.count()).sum();
                assert_eq!(timed, ios.iter().sum::<u64>(), "{text}");
            }
        }
    }

    #[test]
    fn options_that_mean_nothing_here_are_refused() {
        for (text, why) in [("--verify crc32c", "verify"), ("--fsync 3", "fsync"), ("--bare", "bare")] {
            let error = floor(&format!("--rw write --number_ios 1 {text}")).err().expect("refused");
            assert!(format!("{error:#}").contains(why), "{error:#}");
        }
        let error = floor("--rw read --bs 64m --number_ios 1").err().expect("refused");
        assert!(format!("{error:#}").contains("at most"), "{error:#}");
    }

    #[test]
    fn rates_take_their_time() {
        let took = |text: &str| {
            let report = floor(text).unwrap();
            let stats = &report.entries[0].stats;
            assert_eq!((report.failure(), stats.directions[0].ios), (None, 101), "{text}");
            stats.runtime
        };
        assert!(
            took("--rw randread --rate_iops 500 --number_ios 101 --iodepth 8") >= Nanos::from_millis(200)
        );
        assert!(took("--rw randread --rate 2m --number_ios 101 --iodepth 8") >= Nanos::from_millis(195));
    }

    /// Each request takes 50 ms, and the rate is one per 10 ms. The tenth request is due at 90 ms,
    /// is sent at 450 ms and completes at 500 ms. Its latency includes the delay.
    #[test]
    fn a_slow_server_hides_nothing_from_a_rate() {
        let load = parse_fio_load_options("--rw read --rate_iops 100 --number_ios 10");
        let (ours, theirs) = UnixStream::pair().unwrap();
        let server = thread::spawn(move || reply_loop::serve_minimal_nbd_replies(SlowStream(theirs)));
        let stop = AtomicBool::new(false);
        let run = LoadMeasurementPlan { load: &load, progress: None, stop: &stop };
        let report = run.on_sockets(vec![ours.into()], &export(1 << 20)).unwrap();
        server.join().unwrap();
        let reads = &report.entries[0].stats.directions[0];
        assert_eq!((report.failure(), reads.ios), (None, 10));
        assert!(reads.latency.max >= 400_000_000, "{}", reads.latency.max);
    }

    /// A stream whose writes take 50 ms.
    struct SlowStream(UnixStream);

    impl Read for SlowStream {
        fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
            self.0.read(out)
        }
    }

    impl Write for SlowStream {
        fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
            thread::sleep(std::time::Duration::from_millis(50));
            self.0.write(data)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn export(size: u64) -> NegotiatedExportInfo {
        let blocks = BlockSizes { minimum: 1, preferred: 4096, maximum: 32 << 20 };
        NegotiatedExportInfo {
            size,
            flags: ExportFlags::HAS_FLAGS,
            blocks,
            structured: false,
            contexts: Vec::new(),
        }
    }

    /// The run time ends a load whose requests are never answered.
    #[test]
    fn a_server_that_answers_nothing() {
        let load = parse_fio_load_options("--rw randread --iodepth 8 --runtime 200ms");
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let stop = AtomicBool::new(false);
        let run = LoadMeasurementPlan { load: &load, progress: None, stop: &stop };
        let report = run.on_sockets(vec![ours.into()], &export(1 << 20)).unwrap();
        let (_, failure) = report.failure().expect("a failure");
        assert_eq!(failure, "8 requests were not answered within 10 s of the end of the load");
    }

    /// If the server closes the connection, the job fails and ends.
    #[test]
    fn a_server_that_goes_away() {
        let load = parse_fio_load_options("--rw randread --iodepth 8");
        let stop = AtomicBool::new(false);
        let run = LoadMeasurementPlan { load: &load, progress: None, stop: &stop };
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        let report = run.on_sockets(vec![ours.into()], &export(1 << 20)).unwrap();
        assert!(report.failure().is_some());
    }
}
