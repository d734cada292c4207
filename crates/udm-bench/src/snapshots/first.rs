//! First writes of an origin and of a snapshot, beside an origin whose exceptions are behind one
//! mutex.

use super::load::{Load, shuffled};
use crate::cores;
use crate::mapped::{Table, make_mapped};
use crate::one_mutex_origin::{CHUNK, Exceptions, OneMutexOrigin};
use anyhow::Result;
use serde::Serialize;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Barrier};
use std::time::Duration;
use udm_core::{Batch, Device, Lane, Nanos, Op};
use udm_runtime::{Cluster, CoreOptions, LocalCore};

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Kind {
    Linear,
    OriginTransient,
    OriginPersistent,
    OneMutex,
    SnapshotTransient,
    SnapshotPersistent,
}

impl Kind {
    pub(super) const ALL: [Kind; 6] = [
        Kind::Linear,
        Kind::OriginTransient,
        Kind::OriginPersistent,
        Kind::OneMutex,
        Kind::SnapshotTransient,
        Kind::SnapshotPersistent,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::Linear => "linear",
            Kind::OriginTransient => "origin, N",
            Kind::OriginPersistent => "origin, P",
            Kind::OneMutex => "origin, one mutex",
            Kind::SnapshotTransient => "snapshot N",
            Kind::SnapshotPersistent => "snapshot P",
        }
    }

    /// The type of the snapshot's store, and whether it is its origin that is written.
    fn store(self) -> Option<(char, bool)> {
        match self {
            Kind::OriginTransient => Some(('N', true)),
            Kind::OriginPersistent => Some(('P', true)),
            Kind::SnapshotTransient => Some(('N', false)),
            Kind::SnapshotPersistent => Some(('P', false)),
            Kind::Linear | Kind::OneMutex => None,
        }
    }
}

/// First writes.
#[derive(Debug, Clone, Serialize)]
pub struct FirstWrites {
    /// What is below: `null` or `mem`.
    pub below: &'static str,
    /// Requests in flight, a thread.
    pub depth: usize,
    /// How many threads.
    pub threads: usize,
    pub(super) device: Kind,
    /// Requests a second.
    pub iops: f64,
}

impl FirstWrites {
    /// What was written.
    pub fn device(&self) -> &'static str {
        self.device.name()
    }
}

/// One measurement.
pub(super) struct Case {
    pub(super) kind: Kind,
    pub(super) below: &'static str,
    pub(super) threads: usize,
    pub(super) depth: usize,
    pub(super) chunks: u64,
}

impl Case {
    /// Requests a second.
    pub(super) fn measure(&self) -> Result<f64> {
        let exceptions = Arc::new(Exceptions::new());
        let copier = usize::from(self.kind == Kind::OneMutex);
        let option = CoreOptions { ring_optional: true, ..CoreOptions::default() };
        let (barrier, left) = (Barrier::new(self.threads), AtomicUsize::new(self.threads));
        let make = |cluster: &Arc<Cluster>| self.devices(cluster, &exceptions);
        let times = cores::run(&vec![option; self.threads + copier], make, |core, lanes| {
            let [mut top, mut origin, mut store] = <[_; 3]>::try_from(lanes).ok()?;
            let thread = usize::from(core.id().0);
            if thread == self.threads {
                exceptions.copy(core, &mut *origin, &mut *store);
                return None;
            }
            let mut load = Load::new(self.depth);
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

    /// Takes turns until all threads have come here: one may have to write what others wait for.
    fn join(&self, core: &mut LocalCore, lane: &mut dyn Lane, left: &AtomicUsize, barrier: &Barrier) {
        left.fetch_sub(1, Relaxed);
        while left.load(Relaxed) > 0 {
            core.turn(|cx| lane.poll(&mut Batch::new(), cx));
            std::thread::sleep(Duration::from_micros(20));
        }
        barrier.wait();
    }

    /// What is measured, and the devices of its origin and its store.
    fn devices(&self, cluster: &Arc<Cluster>, exceptions: &Arc<Exceptions>) -> Result<Vec<Arc<dyn Device>>> {
        let len = self.chunks * CHUNK;
        // A little more than all chunks, for records.
        let room = len * 5 / 4;
        let below = |bytes: u64| match self.below {
            "mem" => format!("mem:{bytes}"),
            // Two are told apart by their size.
            _ => format!("null:size={bytes}"),
        };
        let mut tables = vec![
            ("a", format!("0 {len} linear {} 0", below(len * 512))),
            ("b", format!("0 {room} linear {} 0", below(room * 512))),
        ];
        match self.kind.store() {
            None if self.kind == Kind::OneMutex => {}
            None => tables.push(("top", format!("0 {len} linear @a 0"))),
            Some((store, of_origin)) => {
                let [origin, snapshot] = if of_origin { ["top", "other"] } else { ["other", "top"] };
                tables.push((snapshot, format!("0 {len} snapshot @a @b {store} {CHUNK}")));
                if of_origin {
                    tables.push((origin, format!("0 {len} snapshot-origin @a")));
                }
            }
        }
        let tables: Vec<Table> =
            tables.into_iter().map(|(name, text)| Table { name: name.into(), text }).collect();
        let made = make_mapped(cluster, &tables)?;
        let (origin, store) = (Arc::clone(&made[0]), Arc::clone(&made[1]));
        let top = match tables.iter().position(|table| table.name == "top") {
            Some(at) => Arc::clone(&made[at]),
            None => Arc::new(OneMutexOrigin::new(Arc::clone(&origin), exceptions)),
        };
        Ok(vec![top, origin, store])
    }
}
