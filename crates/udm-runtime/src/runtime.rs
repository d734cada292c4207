//! The threads of a program that are cores, from their start to their end.

use crate::core_set::{CoreMessage, CoreSet};
use crate::front_end::FrontEnd;
use crate::local::{CoreOptions, LocalCore};
use crate::reactor::Reactor;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use udm_core::{CoreId, Nanos};

/// How the cores of a [`Runtime`] behave.
#[derive(Clone, Debug)]
pub struct RuntimeOptions {
    /// One entry a core: the CPU that it stays on, or `None`.
    pub cpus: Vec<Option<usize>>,
    /// Never sleep.
    pub poll: bool,
    /// The longest spin before sleeping.
    pub spin_max: Duration,
}

/// Core threads that serve front ends.
pub struct Runtime {
    cluster: Arc<CoreSet>,
    threads: Vec<JoinHandle<()>>,
}

/// How long what is in flight may take to finish after [`Runtime::stop`].
const STOP_MAX: Duration = Duration::from_secs(10);

impl Runtime {
    /// Starts the threads.
    ///
    /// # Errors
    /// When a core can't be had (no io_uring, no such CPU); none is left running then.
    pub fn start(options: &RuntimeOptions) -> io::Result<Runtime> {
        let cluster = CoreSet::new(options.cpus.len())?;
        let mut runtime = Runtime { cluster: cluster.clone(), threads: Vec::new() };
        for (i, cpu) in options.cpus.iter().copied().enumerate() {
            let id = CoreId(i as u16);
            let cpus = cpu.into_iter().collect();
            let core =
                CoreOptions { cpus, poll: options.poll, spin_max: options.spin_max, ring_optional: false };
            let (tx, rx) = std::sync::mpsc::sync_channel(1);
            let cluster = cluster.clone();
            let thread = std::thread::Builder::new().name(format!("udm-core{i}")).spawn(move || {
                match LocalCore::attach(&cluster, id, core) {
                    Ok(core) => {
                        let _ = tx.send(Ok(()));
                        let _abort = AbortOnPanic;
                        Reactor::new(core).run();
                    }
                    Err(e) => {
                        let _ = tx.send(Err(e));
                    }
                }
            })?;
            runtime.threads.push(thread);
            if let Err(e) = rx.recv().unwrap_or_else(|_| Err(io::Error::other("the core's thread ended"))) {
                runtime.stop();
                return Err(e);
            }
        }
        Ok(runtime)
    }

    /// The cores, for those that send them commands.
    #[must_use]
    pub fn cluster(&self) -> &Arc<CoreSet> {
        &self.cluster
    }

    /// Gives `core` a front end, made by `make` on the core itself.
    ///
    /// # Panics
    /// When there is no such core.
    pub fn attach(&self, core: CoreId, make: Box<dyn FnOnce() -> Box<dyn FrontEnd> + Send>) {
        self.cluster.attach(core, make);
    }

    /// Tells all front ends to take no more, and has everything that lanes hold back end or fail.
    /// The cores go on: devices can be suspended and removed.
    pub fn end(&self) {
        self.cluster.end();
    }

    /// Ends, waits for what is in flight (10 s at the most) and for the threads.
    pub fn stop(self) {
        let end = Instant::now() + STOP_MAX + Duration::from_secs(1);
        let stopping = self.stop_within(STOP_MAX);
        while !stopping.is_over() && Instant::now() < end {
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// As [`Runtime::stop`], for those who do the waiting themselves. After `limit` a core leaves
    /// what is still in flight unanswered, and its memory where it is.
    #[must_use = "it says when the threads are over"]
    pub fn stop_within(self, limit: Duration) -> ShutdownHandle {
        let limit = Nanos(u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX / 2));
        self.cluster.stop(limit);
        ShutdownHandle(self.threads)
    }
}

/// Cores on their way out. Dropping it waits for nobody.
pub struct ShutdownHandle(Vec<JoinHandle<()>>);

impl ShutdownHandle {
    /// True when all threads are over. One that sits in the kernel with a disk that hangs is not.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.0.iter().all(JoinHandle::is_finished)
    }
}

impl CoreSet {
    /// As [`Runtime::attach`], for those that hold the cluster only, such as a listener.
    pub fn attach(&self, core: CoreId, make: Box<dyn FnOnce() -> Box<dyn FrontEnd> + Send>) {
        self.send(core, CoreMessage::Attach(make));
    }

    /// As [`Runtime::end`].
    pub fn end(&self) {
        self.send_to_all(|| CoreMessage::End);
    }

    /// As [`Runtime::stop_within`], for those who know when the cores are over.
    pub fn stop(&self, limit: Nanos) {
        self.send_to_all(|| CoreMessage::Stop(limit));
    }

    fn send_to_all(&self, mail: impl Fn() -> CoreMessage) {
        (0..self.len()).for_each(|core| self.send(CoreId(core as u16), mail()));
    }
}

/// A core that panics takes requests with it that nobody will ever answer: better no server than
/// one that lies.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!("a core panicked; udm ends");
            std::process::abort();
        }
    }
}
