//! Load on a server, over a connection: an NBD socket or the ring of a vhost-user disk.
//!
//! A job ([`job`]) has one connection, and knows it only as a [`RequestConnection`].

mod job;

use crate::job::{JobOutcome, JobSpec};
use crate::jobs::BenchJob;
use crate::load::FioLoadOptions;
use crate::region::JobRegion;
use crate::report::BenchReport;
use crate::run::LoadMeasurementPlan;
use crate::verify::{self, BlockHeader};
use anyhow::{Result, anyhow, ensure};
use std::thread;
use std::time::Duration;
use udm_core::Op;
use udm_runtime::pin_thread_to_cpus;

/// Maximum wait for the server in one call, so that the caller can check the clock.
pub(crate) const WAIT: Duration = Duration::from_millis(100);

/// A request of the load: a read, a write or a discard.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConnectionRequest {
    pub op: Op,
    /// Less than the queue depth. Unique among the requests in flight.
    pub cookie: u64,
    /// In bytes.
    pub offset: u64,
    /// In bytes.
    pub len: u32,
}

/// A connection to a server, which keeps several requests in flight. It reads no clock and counts
/// nothing.
pub(crate) trait RequestConnection: Send {
    /// Whether another request may be added.
    fn has_room(&self) -> bool;

    /// Adds a request to those that will be sent.
    ///
    /// # Errors
    /// If the connection is lost.
    fn put(&mut self, request: ConnectionRequest) -> Result<()>;

    /// Sends as much as the server accepts now.
    ///
    /// # Errors
    /// If the connection is lost.
    fn flush(&mut self) -> Result<()>;

    /// Waits for replies, at most for `most` and for [`WAIT`]. Calls `done` with the cookie and the
    /// errno (0: success) of each reply. `op` returns the operation and the length of a cookie in
    /// flight.
    ///
    /// # Errors
    /// If the connection is lost, or the received data is not a reply.
    fn replies(
        &mut self,
        most: Option<Duration>,
        op: impl Fn(u64) -> Option<(Op, u32)>,
        done: impl FnMut(u64, i32),
    ) -> Result<()>;
}

impl LoadMeasurementPlan<'_> {
    /// Runs one job per connection; job *i* accesses `regions[i]`.
    pub(crate) fn run_on_connections(
        &self,
        connections: Vec<impl RequestConnection>,
        regions: &[JobRegion],
    ) -> Result<BenchReport> {
        let load = self.load;
        let outcomes = thread::scope(|scope| {
            let threads: Vec<_> = connections
                .into_iter()
                .enumerate()
                .map(|(job, connection)| {
                    let region = regions[job];
                    scope.spawn(move || -> Result<JobOutcome> {
                        pin_thread_to_cpus(&load.cpus(job))?;
                        let progress = self.progress.map(|p| p.counter(job));
                        let spec = JobSpec { load, job, region, progress, stop: self.stop };
                        Ok(job::run_job_over_connection(connection, &spec))
                    })
                })
                .collect();
            threads
                .into_iter()
                .map(|t| t.join().map_err(|_| anyhow!("a job panicked"))?)
                .collect::<Result<Vec<_>>>()
        })?;
        Ok(BenchReport::new(
            &[BenchJob::alone(load.clone())],
            outcomes.into_iter().map(|outcome| (0, outcome)),
        ))
    }
}

/// Checks the options that do not apply to connections of `kind`.
pub(crate) fn check_connection_load_options(load: &FioLoadOptions, kind: &str) -> Result<()> {
    load.check()?;
    ensure!(load.verify.is_none(), "verify: not over {kind}");
    ensure!(load.fsync == 0, "fsync: not over {kind}");
    ensure!(!load.bare, "bare: over {kind} all data moves");
    Ok(())
}

/// The data of writes, which is incompressible. Empty if the load only reads.
pub(crate) fn new_write_payload(load: &FioLoadOptions) -> Vec<u8> {
    let mut data = vec![0; if load.rw.op() == Some(Op::Read) { 0 } else { load.block_bytes() as usize }];
    if !data.is_empty() {
        verify::fill_block_with_header_and_crc(
            &mut data,
            BlockHeader { offset: 0, tag: load.seed(), index: 0 },
        );
    }
    data
}
