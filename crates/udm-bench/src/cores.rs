//! Threads that run as cores during a measurement.
//!
//! A mapped device can only be made while the cores run, because each core takes up its table. So
//! the threads attach first and take turns until the device is ready. They then open their lanes
//! and begin together.

use anyhow::{Context, Result, anyhow};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread;
use udm_core::{CoreCommandSender, CoreId, Device, DeviceId, Lane, LaneCommand};
use udm_runtime::{CoreOptions, LocalCore, ProcessCores};

/// A value that the threads wait for. `None` cancels the measurement.
pub struct ValueOrCancelGate<T>(OnceLock<Option<T>>);

impl<T: Clone> ValueOrCancelGate<T> {
    pub fn new() -> ValueOrCancelGate<T> {
        ValueOrCancelGate(OnceLock::new())
    }

    pub fn open(&self, value: Option<T>, core_set: &ProcessCores) {
        let _ = self.0.set(value);
        // The command names a device that nobody has. Its only effect is to wake sleeping cores.
        core_set.broadcast(DeviceId::new(), LaneCommand::Kick);
    }

    pub fn wait(&self, core: &mut LocalCore) -> Option<T> {
        loop {
            core.turn(|_| ());
            if let Some(value) = self.0.get() {
                return value.clone();
            }
            core.park();
        }
    }
}

/// Runs `work` on each of `options.len()` cores, with the core's lanes of the devices that `make`
/// makes. Returns the result of each core.
///
/// # Errors
/// If a core, a device or a lane is not available. No `work` has run in this case.
pub fn run_on_attached_cores<T: Send>(
    options: &[CoreOptions],
    make: impl FnOnce(&Arc<ProcessCores>) -> Result<Vec<Arc<dyn Device>>>,
    work: impl Fn(&mut LocalCore, Vec<Box<dyn Lane>>) -> T + Sync,
) -> Result<Vec<T>> {
    let core_set = ProcessCores::new(options.len()).context("cores")?;
    let (devices, start) = (ValueOrCancelGate::<Vec<Arc<dyn Device>>>::new(), ValueOrCancelGate::<()>::new());
    thread::scope(|scope| {
        let (tx, answers) = mpsc::channel::<Result<()>>();
        let threads: Vec<_> = options
            .iter()
            .enumerate()
            .map(|(i, options)| {
                let (core_set, tx) = (&core_set, tx.clone());
                let (devices, start, work) = (&devices, &start, &work);
                scope.spawn(move || {
                    let attached = LocalCore::attach(core_set, CoreId(i as u16), options.clone());
                    let mut core = match attached.with_context(|| format!("core {i}")) {
                        Ok(core) => core,
                        Err(error) => return report_core_setup_result(&tx, Err(error)),
                    };
                    report_core_setup_result::<()>(&tx, Ok(()));
                    let devices = devices.wait(&mut core)?;
                    let lanes = devices.iter().map(|d| core.open(&**d)).collect::<Result<Vec<_>, _>>();
                    let lanes = match lanes {
                        Ok(lanes) => lanes,
                        Err(error) => {
                            let error =
                                core.ring_error().map_or(anyhow!("{error}"), |why| anyhow!("{error}: {why}"));
                            return report_core_setup_result(&tx, Err(error));
                        }
                    };
                    report_core_setup_result::<()>(&tx, Ok(()));
                    start.wait(&mut core)?;
                    Some(work(&mut core, lanes))
                })
            })
            .collect();
        drop(tx);
        let all =
            || -> Result<()> { options.iter().try_for_each(|_| answers.recv().context("a core ended")?) };
        let made = all().and_then(|()| make(&core_set));
        let opened = match made {
            Ok(made) => {
                devices.open(Some(made), &core_set);
                all()
            }
            Err(error) => {
                devices.open(None, &core_set);
                Err(error)
            }
        };
        start.open(opened.is_ok().then_some(()), &core_set);
        let results: Vec<_> = threads.into_iter().map(|t| t.join()).collect();
        opened?;
        results
            .into_iter()
            .map(|r| r.map_err(|_| anyhow!("a core panicked"))?.context("a core ended"))
            .collect()
    })
}

/// Reports the result of a step of the setup. If another core has failed, the receiver may already
/// be dropped.
fn report_core_setup_result<T>(tx: &mpsc::Sender<Result<()>>, result: Result<()>) -> Option<T> {
    let _ = tx.send(result);
    None
}
