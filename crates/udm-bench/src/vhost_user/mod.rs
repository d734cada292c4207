//! Load on a disk of any vhost-user-blk server, through rings in shared memory.
//!
//! The driver is the crate `virtio-driver`: one connection, and a queue per job ([`queue`]). A job
//! that has nothing to do sleeps until the server notifies it, as a machine would, or polls.
//!
//! [`copy_loop`] measures the same jobs against a thread that only copies: the lower bound of a
//! server in another thread.

mod copy_loop;
mod queue;

use crate::connection::{WAIT, check_connection_load_options, new_write_payload};
use crate::report::BenchReport;
use crate::run::LoadMeasurementPlan;
use anyhow::{Context, Result, ensure};
use copy_loop::CopyLoopConnection;
use queue::{VirtioBlkConnection, queue_size_for_depth};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};
use udm_core::{Limits, Sectors};
use virtio_driver::{
    VhostUser, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags,
};

impl LoadMeasurementPlan<'_> {
    /// Runs the jobs against the server that listens at `socket`, one queue per job. If the jobs
    /// do not `poll`, they sleep while they wait. The rings are split, or `packed`.
    ///
    /// # Errors
    /// If the load can't begin. Later failures are in the report.
    pub fn measure_vhost_user(&self, socket: &Path, poll: bool, packed: bool) -> Result<BenchReport> {
        check_connection_load_options(self.load, "vhost-user")?;
        let entries = queue_size_for_depth(self.load.iodepth)?;
        let path = socket.to_str().context("the path is not UTF-8")?;
        let mut features = VirtioFeatureFlags::VERSION_1 | VirtioFeatureFlags::RING_EVENT_IDX;
        features.set(VirtioFeatureFlags::RING_PACKED, packed);
        let disk = VirtioBlkFeatureFlags::MQ
            | VirtioBlkFeatureFlags::BLK_SIZE
            | VirtioBlkFeatureFlags::RO
            | VirtioBlkFeatureFlags::DISCARD;
        let mut transport: Box<VirtioBlkTransport> =
            Box::new(VhostUser::new(path, features.bits() | disk.bits()).with_context(|| path.to_owned())?);
        let has_packed = VirtioFeatureFlags::from_bits_truncate(transport.get_features())
            .contains(VirtioFeatureFlags::RING_PACKED);
        ensure!(has_packed == packed, "{path}: the server has no packed rings");
        let regions = self.load.regions(&limits_of_disk(&*transport)?)?;
        let queues = VirtioBlkQueue::setup_queues(&mut *transport, usize::from(self.load.numjobs), entries)
            .with_context(|| format!("{path}: {} queues of {entries} entries", self.load.numjobs))?;
        let payload = new_write_payload(self.load);
        let connections = queues
            .into_iter()
            .enumerate()
            .map(|(job, queue)| {
                VirtioBlkConnection::new(&mut *transport, job, queue, self.load, &payload, poll)
            })
            .collect::<Result<Vec<_>>>()?;
        self.run_on_connections(connections, &regions)
    }

    /// Runs the jobs against threads that only copy, one per job.
    ///
    /// # Errors
    /// As [`LoadMeasurementPlan::measure_vhost_user`].
    pub fn measure_copy_floor(&self, poll: bool) -> Result<BenchReport> {
        check_connection_load_options(self.load, "vhost-user")?;
        let regions = self.load.regions(&Limits::new(Sectors(1 << 31)))?;
        thread::scope(|scope| {
            let connections: Vec<_> = (0..self.load.numjobs)
                .map(|_| {
                    let (connection, server) =
                        CopyLoopConnection::new(self.load.iodepth, self.load.block_bytes() as usize, poll);
                    scope.spawn(move || server.serve());
                    connection
                })
                .collect();
            self.run_on_connections(connections, &regions)
        })
    }
}

/// The limits of requests. A request has one buffer, whose length the disk does not limit.
fn limits_of_disk(transport: &VirtioBlkTransport) -> Result<Limits> {
    let config = transport.get_config().context("the configuration of the disk")?;
    let features = VirtioBlkFeatureFlags::from_bits_truncate(transport.get_features());
    let has = |feature| features.contains(feature);
    let logical_block = if has(VirtioBlkFeatureFlags::BLK_SIZE) { config.blk_size.to_native() } else { 512 };
    ensure!(logical_block.is_power_of_two() && logical_block >= 512, "a block size of {logical_block}");
    let discard =
        if has(VirtioBlkFeatureFlags::DISCARD) { config.max_discard_sectors.to_native() } else { 0 };
    Ok(Limits {
        logical_block,
        max_discard: Sectors(discard.into()),
        read_only: has(VirtioBlkFeatureFlags::RO),
        ..Limits::new(Sectors(config.capacity.to_native()))
    })
}

/// Polls until `reap` has found completions, at most for `most` and for [`WAIT`].
fn poll_for(most: Option<Duration>, mut reap: impl FnMut() -> bool) -> Result<()> {
    let begin = Instant::now();
    let most = most.map_or(WAIT, |most| most.min(WAIT));
    loop {
        for _ in 0..100 {
            if reap() {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        if begin.elapsed() >= most {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests;
