//! First writes of an origin and of a snapshot, compared with an origin whose exceptions are under
//! one mutex.

use super::load::{FixedDepthChunkLoad, permute_index_below};
use crate::cores;
use crate::mapped::{NamedTable, make_mapped_devices};
use crate::one_mutex_origin::{CHUNK, OneMutexExceptionTable, OneMutexOrigin};
use anyhow::Result;
use serde::Serialize;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Barrier};
use std::time::Duration;
use udm_core::{Batch, Device, Lane, Nanos, Op};
use udm_runtime::{CoreOptions, LocalCore, ProcessCores};

/// The measured device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum FirstChunkWriteDeviceKind {
    Linear,
    OriginTransient,
    OriginPersistent,
    OneMutex,
    SnapshotTransient,
    SnapshotPersistent,
}

impl FirstChunkWriteDeviceKind {
    pub(super) const ALL: [FirstChunkWriteDeviceKind; 6] = [
        FirstChunkWriteDeviceKind::Linear,
        FirstChunkWriteDeviceKind::OriginTransient,
        FirstChunkWriteDeviceKind::OriginPersistent,
        FirstChunkWriteDeviceKind::OneMutex,
        FirstChunkWriteDeviceKind::SnapshotTransient,
        FirstChunkWriteDeviceKind::SnapshotPersistent,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            FirstChunkWriteDeviceKind::Linear => "linear",
            FirstChunkWriteDeviceKind::OriginTransient => "origin, N",
            FirstChunkWriteDeviceKind::OriginPersistent => "origin, P",
            FirstChunkWriteDeviceKind::OneMutex => "origin, one mutex",
            FirstChunkWriteDeviceKind::SnapshotTransient => "snapshot N",
            FirstChunkWriteDeviceKind::SnapshotPersistent => "snapshot P",
        }
    }

    /// The type of the snapshot's store, and whether the origin is written (true) or the snapshot.
    fn store(self) -> Option<(char, bool)> {
        match self {
            FirstChunkWriteDeviceKind::OriginTransient => Some(('N', true)),
            FirstChunkWriteDeviceKind::OriginPersistent => Some(('P', true)),
            FirstChunkWriteDeviceKind::SnapshotTransient => Some(('N', false)),
            FirstChunkWriteDeviceKind::SnapshotPersistent => Some(('P', false)),
            FirstChunkWriteDeviceKind::Linear | FirstChunkWriteDeviceKind::OneMutex => None,
        }
    }
}

/// The result of first writes.
#[derive(Debug, Clone, Serialize)]
pub struct FirstChunkWriteResult {
    /// The device below: `null` or `mem`.
    pub below: &'static str,
    /// Requests in flight per thread.
    pub depth: usize,
    /// Number of threads.
    pub threads: usize,
    pub(super) device: FirstChunkWriteDeviceKind,
    /// Requests per second.
    pub iops: f64,
}

impl FirstChunkWriteResult {
    /// The name of the measured device.
    pub fn device(&self) -> &'static str {
        self.device.name()
    }
}

/// One measurement.
pub(super) struct FirstChunkWriteMeasurement {
    pub(super) kind: FirstChunkWriteDeviceKind,
    pub(super) below: &'static str,
    pub(super) threads: usize,
    pub(super) depth: usize,
    pub(super) chunks: u64,
}

impl FirstChunkWriteMeasurement {
    /// Measures the requests per second.
    pub(super) fn measure(&self) -> Result<f64> {
        let exceptions = Arc::new(OneMutexExceptionTable::new());
        let copier = usize::from(self.kind == FirstChunkWriteDeviceKind::OneMutex);
        let option = CoreOptions { ring_optional: true, ..CoreOptions::default() };
        let (barrier, left) = (Barrier::new(self.threads), AtomicUsize::new(self.threads));
        let make = |core_set: &Arc<ProcessCores>| self.devices(core_set, &exceptions);
        let times =
            cores::run_on_attached_cores(&vec![option; self.threads + copier], make, |core, lanes| {
                let [mut top, mut origin, mut store] = <[_; 3]>::try_from(lanes).ok()?;
                let thread = usize::from(core.id().0);
                if thread == self.threads {
                    exceptions.copy(core, &mut *origin, &mut *store);
                    return None;
                }
                let mut load = FixedDepthChunkLoad::new(self.depth);
                if thread == 0 && self.below == "mem" {
                    load.run(core, &mut *origin, Op::Write, 0..self.chunks);
                    load.run(core, &mut *store, Op::Write, 0..self.chunks * 5 / 4);
                }
                barrier.wait();
                let mine = |chunk: &u64| chunk % self.threads as u64 == thread as u64;
                let all = (0..self.chunks).filter(mine).map(|chunk| permute_index_below(chunk, self.chunks));
                barrier.wait();
                let begin = core.clock();
                load.run(core, &mut *top, Op::Write, all);
                let end = core.clock();
                self.join(core, &mut *top, &left, &barrier);
                exceptions.end();
                Some((begin, end))
            })?;
        let times: Vec<(Nanos, Nanos)> = times.into_iter().flatten().collect();
        let begin = times.iter().map(|(begin, _)| begin.0).min().unwrap_or_default();
        let end = times.iter().map(|(_, end)| end.0).max().unwrap_or_default();
        Ok(self.chunks as f64 * 1e9 / (end - begin) as f64)
    }

    /// Takes turns until all threads reach this point, because other threads may wait for data that
    /// this thread must write.
    fn join(&self, core: &mut LocalCore, lane: &mut dyn Lane, left: &AtomicUsize, barrier: &Barrier) {
        left.fetch_sub(1, Relaxed);
        while left.load(Relaxed) > 0 {
            core.turn(|cx| lane.poll(&mut Batch::new(), cx));
            std::thread::sleep(Duration::from_micros(20));
        }
        barrier.wait();
    }

    /// Makes the measured device, the device of its origin, and the device of its store.
    fn devices(
        &self,
        core_set: &Arc<ProcessCores>,
        exceptions: &Arc<OneMutexExceptionTable>,
    ) -> Result<Vec<Arc<dyn Device>>> {
        let len = self.chunks * CHUNK;
        // The store holds all chunks and their exception records.
        let room = len * 5 / 4;
        let below = |bytes: u64| match self.below {
            "mem" => format!("mem:{bytes}"),
            // The two devices have different sizes, so the URIs differ.
            _ => format!("null:size={bytes}"),
        };
        let mut tables = vec![
            ("a", format!("0 {len} linear {} 0", below(len * 512))),
            ("b", format!("0 {room} linear {} 0", below(room * 512))),
        ];
        match self.kind.store() {
            None if self.kind == FirstChunkWriteDeviceKind::OneMutex => {}
            None => tables.push(("top", format!("0 {len} linear @a 0"))),
            Some((store, of_origin)) => {
                let [origin, snapshot] = if of_origin { ["top", "other"] } else { ["other", "top"] };
                tables.push((snapshot, format!("0 {len} snapshot @a @b {store} {CHUNK}")));
                if of_origin {
                    tables.push((origin, format!("0 {len} snapshot-origin @a")));
                }
            }
        }
        let tables: Vec<NamedTable> =
            tables.into_iter().map(|(name, text)| NamedTable { name: name.into(), text }).collect();
        let made = make_mapped_devices(core_set, &tables)?;
        let (origin, store) = (Arc::clone(&made[0]), Arc::clone(&made[1]));
        let top = match tables.iter().position(|table| table.name == "top") {
            Some(at) => Arc::clone(&made[at]),
            None => Arc::new(OneMutexOrigin::new(Arc::clone(&origin), exceptions)),
        };
        Ok(vec![top, origin, store])
    }
}
