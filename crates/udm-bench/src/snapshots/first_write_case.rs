//! First writes of an origin and of a snapshot, compared with an origin whose exceptions are under
//! one mutex.

use super::load::{ChunkLoad, shuffled};
use crate::cores;
use crate::mapped::{NamedTable, make_mapped};
use crate::one_mutex_origin::{CHUNK, ExceptionTable, OneMutexOrigin};
use anyhow::Result;
use serde::Serialize;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Barrier};
use std::time::Duration;
use udm_core::{Batch, Device, Lane, Nanos, Op};
use udm_runtime::{CoreOptions, CoreSet, LocalCore};

/// The measured device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum WriteTarget {
    Linear,
    OriginTransient,
    OriginPersistent,
    OneMutex,
    SnapshotTransient,
    SnapshotPersistent,
}

impl WriteTarget {
    pub(super) const ALL: [WriteTarget; 6] = [
        WriteTarget::Linear,
        WriteTarget::OriginTransient,
        WriteTarget::OriginPersistent,
        WriteTarget::OneMutex,
        WriteTarget::SnapshotTransient,
        WriteTarget::SnapshotPersistent,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            WriteTarget::Linear => "linear",
            WriteTarget::OriginTransient => "origin, N",
            WriteTarget::OriginPersistent => "origin, P",
            WriteTarget::OneMutex => "origin, one mutex",
            WriteTarget::SnapshotTransient => "snapshot N",
            WriteTarget::SnapshotPersistent => "snapshot P",
        }
    }

    /// The type of the snapshot's store, and whether the origin is written (true) or the snapshot.
    fn store(self) -> Option<(char, bool)> {
        match self {
            WriteTarget::OriginTransient => Some(('N', true)),
            WriteTarget::OriginPersistent => Some(('P', true)),
            WriteTarget::SnapshotTransient => Some(('N', false)),
            WriteTarget::SnapshotPersistent => Some(('P', false)),
            WriteTarget::Linear | WriteTarget::OneMutex => None,
        }
    }
}

/// The result of first writes.
#[derive(Debug, Clone, Serialize)]
pub struct FirstWrites {
    /// The device below: `null` or `mem`.
    pub below: &'static str,
    /// Requests in flight per thread.
    pub depth: usize,
    /// Number of threads.
    pub threads: usize,
    pub(super) device: WriteTarget,
    /// Requests per second.
    pub iops: f64,
}

impl FirstWrites {
    /// The name of the measured device.
    pub fn device(&self) -> &'static str {
        self.device.name()
    }
}

/// One measurement.
pub(super) struct FirstWriteCase {
    pub(super) kind: WriteTarget,
    pub(super) below: &'static str,
    pub(super) threads: usize,
    pub(super) depth: usize,
    pub(super) chunks: u64,
}

impl FirstWriteCase {
    /// Measures the requests per second.
    pub(super) fn measure(&self) -> Result<f64> {
        let exceptions = Arc::new(ExceptionTable::new());
        let copier = usize::from(self.kind == WriteTarget::OneMutex);
        let option = CoreOptions { ring_optional: true, ..CoreOptions::default() };
        let (barrier, left) = (Barrier::new(self.threads), AtomicUsize::new(self.threads));
        let make = |core_set: &Arc<CoreSet>| self.devices(core_set, &exceptions);
        let times = cores::run(&vec![option; self.threads + copier], make, |core, lanes| {
            let [mut top, mut origin, mut store] = <[_; 3]>::try_from(lanes).ok()?;
            let thread = usize::from(core.id().0);
            if thread == self.threads {
                exceptions.copy(core, &mut *origin, &mut *store);
                return None;
            }
            let mut load = ChunkLoad::new(self.depth);
            if thread == 0 && self.below == "mem" {
                load.run(core, &mut *origin, Op::Write, 0..self.chunks);
                load.run(core, &mut *store, Op::Write, 0..self.chunks * 5 / 4);
            }
            barrier.wait();
            let mine = |chunk: &u64| chunk % self.threads as u64 == thread as u64;
            let all = (0..self.chunks).filter(mine).map(|chunk| shuffled(chunk, self.chunks));
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

    /// Takes turns until all threads reach this point. One thread may have to write data for which
    /// others wait.
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
        core_set: &Arc<CoreSet>,
        exceptions: &Arc<ExceptionTable>,
    ) -> Result<Vec<Arc<dyn Device>>> {
        let len = self.chunks * CHUNK;
        // A little more than all chunks, for records.
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
            None if self.kind == WriteTarget::OneMutex => {}
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
        let made = make_mapped(core_set, &tables)?;
        let (origin, store) = (Arc::clone(&made[0]), Arc::clone(&made[1]));
        let top = match tables.iter().position(|table| table.name == "top") {
            Some(at) => Arc::clone(&made[at]),
            None => Arc::new(OneMutexOrigin::new(Arc::clone(&origin), exceptions)),
        };
        Ok(vec![top, origin, store])
    }
}
