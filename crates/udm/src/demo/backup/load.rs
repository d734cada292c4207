//! The load: writers that write marks to both volumes, and read some back.

use super::super::demo_server::DemoServer;
use super::model::{
    BLOCK, LastMarkPerSlot, VOLUMES, WRITERS, expected_slot_content, volume_and_slot_of_mark,
    writer_slot_offset,
};
use anyhow::{Result, anyhow};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use udm_backends::nbd::BlockingNbdClient;

/// Number of writes per checked read.
const READ_EVERY: u64 = 4;

/// The progress of a writer, for other threads.
#[derive(Default)]
struct WriterProgress {
    /// The last mark that was sent, and the last that was acknowledged.
    sent: AtomicU64,
    acknowledged: AtomicU64,
}

#[derive(Default)]
struct MarkWritersState {
    over: AtomicBool,
    writers: [WriterProgress; WRITERS as usize],
    read: AtomicU64,
    wrong: AtomicU64,
}

/// The running writers. Dropping it ends them.
pub(super) struct MarkWriters {
    shared: Arc<MarkWritersState>,
    threads: Vec<JoinHandle<Result<()>>>,
}

impl MarkWriters {
    /// Starts the writers; each has its own client of each volume.
    pub fn start(server: &DemoServer) -> Result<MarkWriters> {
        let shared = Arc::new(MarkWritersState::default());
        let mut load = MarkWriters { shared: Arc::clone(&shared), threads: Vec::new() };
        for writer in 0..WRITERS {
            let clients = [server.client(VOLUMES[0])?, server.client(VOLUMES[1])?];
            let shared = Arc::clone(&shared);
            let run = move || shared.run(writer, clients);
            load.threads.push(std::thread::Builder::new().name(format!("writer{writer}")).spawn(run)?);
        }
        Ok(load)
    }

    /// The last acknowledged mark of each writer.
    pub fn acknowledged(&self) -> Vec<u64> {
        self.shared.writers.iter().map(|writer| writer.acknowledged.load(Ordering::SeqCst)).collect()
    }

    /// The last mark that each writer sent.
    pub fn sent(&self) -> Vec<u64> {
        self.shared.writers.iter().map(|writer| writer.sent.load(Ordering::SeqCst)).collect()
    }

    /// Runs `act`; returns the writes per second meanwhile, and the result of `act`.
    pub fn rate<T>(&self, act: impl FnOnce() -> Result<T>) -> Result<(f64, T)> {
        let (begin, before) = (Instant::now(), self.acknowledged().iter().sum::<u64>());
        let done = act()?;
        let written = self.acknowledged().iter().sum::<u64>() - before;
        Ok((written as f64 / begin.elapsed().max(Duration::from_micros(1)).as_secs_f64(), done))
    }

    /// Ends the writers; returns the last mark of each, the number of blocks read back, and the
    /// number of wrong ones.
    pub fn end(mut self) -> Result<(Vec<u64>, u64, u64)> {
        self.shared.over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread.join().map_err(|_| anyhow!("demo: a writer panicked"))??;
        }
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Ok((self.acknowledged(), of(&self.shared.read), of(&self.shared.wrong)))
    }
}

impl Drop for MarkWriters {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // Errors are ignored: the load is dropped early only because of another error.
            let _ = thread.join();
        }
    }
}

impl MarkWritersState {
    fn run(&self, writer: u64, mut clients: [BlockingNbdClient; 2]) -> Result<()> {
        let mut marks = LastMarkPerSlot::new();
        for n in 1.. {
            if self.over.load(Ordering::Relaxed) {
                break;
            }
            let (volume, slot) = volume_and_slot_of_mark(writer, n);
            self.writers[writer as usize].sent.store(n, Ordering::SeqCst);
            clients[volume]
                .write(writer_slot_offset(writer, slot), &expected_slot_content(volume, writer, slot, n))?;
            self.writers[writer as usize].acknowledged.store(n, Ordering::SeqCst);
            marks.put(writer, n);
            if n % READ_EVERY == 0 {
                // Reads a pseudo-random block, which may or may not have been written.
                let (volume, slot) = volume_and_slot_of_mark(writer, n * 7 + 1);
                let got = clients[volume].read(writer_slot_offset(writer, slot), BLOCK as u32)?;
                let right = got == expected_slot_content(volume, writer, slot, marks.at(volume, slot));
                self.read.fetch_add(1, Ordering::Relaxed);
                self.wrong.fetch_add(u64::from(!right), Ordering::Relaxed);
            }
        }
        Ok(())
    }
}
