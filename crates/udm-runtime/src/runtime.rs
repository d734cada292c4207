//! The core threads of a program, from start to end.

use crate::core_set::{CoreMessage, ProcessCores};
use crate::front_end::FrontEnd;
use crate::local::{CoreOptions, LocalCore};
use crate::reactor::Reactor;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use udm_core::{CoreId, Nanos};

/// Options of the cores of a [`Runtime`].
#[derive(Clone, Debug)]
pub struct RuntimeOptions {
    /// One entry per core: the CPU to pin it to, or `None`.
    pub cpus: Vec<Option<usize>>,
    /// Never sleep.
    pub poll: bool,
    /// The longest spin before a sleep.
    pub spin_max: Duration,
}

/// Core threads that serve front ends.
pub struct Runtime {
    core_set: Arc<ProcessCores>,
    threads: Vec<JoinHandle<()>>,
}

/// Time for requests in flight to complete after [`Runtime::stop`].
const STOP_MAX: Duration = Duration::from_secs(10);

impl Runtime {
    /// Starts the threads.
    ///
    /// # Errors
    /// A core cannot start (no io_uring, no such CPU). All threads are stopped then.
    pub fn start(options: &RuntimeOptions) -> io::Result<Runtime> {
        let core_set = ProcessCores::new(options.cpus.len())?;
        let mut runtime = Runtime { core_set: core_set.clone(), threads: Vec::new() };
        for (i, cpu) in options.cpus.iter().copied().enumerate() {
            let id = CoreId(i as u16);
            let cpus = cpu.into_iter().collect();
            let core =
                CoreOptions { cpus, poll: options.poll, spin_max: options.spin_max, ring_optional: false };
            let (tx, rx) = std::sync::mpsc::sync_channel(1);
            let core_set = core_set.clone();
            let thread = std::thread::Builder::new().name(format!("udm-core{i}")).spawn(move || {
                match LocalCore::attach(&core_set, id, core) {
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

    /// The cores, for senders of messages.
    #[must_use]
    pub fn core_set(&self) -> &Arc<ProcessCores> {
        &self.core_set
    }

    /// Attaches a front end to `core`; `make` runs on that core.
    ///
    /// # Panics
    /// If there is no such core.
    pub fn attach(&self, core: CoreId, make: Box<dyn FnOnce() -> Box<dyn FrontEnd> + Send>) {
        self.core_set.attach(core, make);
    }

    /// Makes all front ends refuse new requests, and makes lanes send or fail the bios that they
    /// hold back. The cores still run, so devices can be suspended and removed.
    pub fn end(&self) {
        self.core_set.end();
    }

    /// Ends, waits for bios in flight (at most 10 s) and for the threads.
    pub fn stop(self) {
        let end = Instant::now() + STOP_MAX + Duration::from_secs(1);
        let stopping = self.stop_within(STOP_MAX);
        while !stopping.is_over() && Instant::now() < end {
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// As [`Runtime::stop`], without waiting. After `limit`, a core leaves requests in flight
    /// unanswered, and leaks their memory.
    #[must_use = "it tells when the threads have ended"]
    pub fn stop_within(self, limit: Duration) -> StoppedRuntimeThreads {
        let limit = Nanos(u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX / 2));
        self.core_set.stop(limit);
        StoppedRuntimeThreads(self.threads)
    }
}

/// The threads of a stopped runtime. Dropping it does not wait for them.
pub struct StoppedRuntimeThreads(Vec<JoinHandle<()>>);

impl StoppedRuntimeThreads {
    /// True if all threads have ended. A thread that is blocked in the kernel by a hanging disk has
    /// not.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.0.iter().all(JoinHandle::is_finished)
    }
}

impl ProcessCores {
    /// As [`Runtime::attach`], for users that only have the `ProcessCores`, such as an acceptor of
    /// connections.
    pub fn attach(&self, core: CoreId, make: Box<dyn FnOnce() -> Box<dyn FrontEnd> + Send>) {
        self.send(core, CoreMessage::Attach(make));
    }

    /// As [`Runtime::end`].
    pub fn end(&self) {
        self.send_to_all(|| CoreMessage::End);
    }

    /// As [`Runtime::stop_within`], without a handle to the threads.
    pub fn stop(&self, limit: Nanos) {
        self.send_to_all(|| CoreMessage::Stop(limit));
    }

    fn send_to_all(&self, message: impl Fn() -> CoreMessage) {
        (0..self.len()).for_each(|core| self.send(CoreId(core as u16), message()));
    }
}

/// Aborts the program if a core panics: the core's requests would never complete, and no answer is
/// better than a wrong one.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!("a core panicked; udm ends");
            std::process::abort();
        }
    }
}
