//! The thread that does all work with servers, beside the cores.

use crate::block_cache::BlockCacheTask;
use crate::device::ObjectDevice;
use crate::object_bytes::ObjectBytes;
use crate::source::ObjectSource;
use crate::store;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, mpsc};
use std::thread;
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use udm_backends::{KnownObject, ObjectDeviceOpener, open_image_in_object};
use udm_core::errno::{EINVAL, EIO};
use udm_core::{Device, DeviceControlError, SECTOR_SIZE};
use udm_wire::uri::ObjectUri;

/// Opens objects. Its thread starts with the first object, and ends when this and all devices and
/// lanes of objects are dropped.
#[derive(Default)]
pub struct ObjectClient {
    thread: Mutex<Option<Arc<RuntimeThread>>>,
    /// The open objects.
    open: Mutex<Vec<Weak<ObjectSource>>>,
    /// Objects that are opened without asking their servers.
    known: Mutex<Vec<KnownObject>>,
}

/// The thread with the runtime, until this is dropped.
pub(crate) struct RuntimeThread {
    pub(crate) handle: Handle,
    /// Dropped to end the thread.
    _stop: oneshot::Sender<()>,
}

impl ObjectClient {
    /// The thread; starts it if it does not run.
    fn thread(&self) -> Result<Arc<RuntimeThread>, DeviceControlError> {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = &*thread {
            return Ok(Arc::clone(thread));
        }
        let fail = |e: std::io::Error| DeviceControlError::new(EIO, format!("a thread for objects: {e}"));
        let runtime = Builder::new_current_thread().enable_all().build().map_err(fail)?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        let run = move || {
            // An error means that the sender was dropped, which is the signal to end.
            let _ = runtime.block_on(stopped);
            runtime.shutdown_background();
        };
        thread::Builder::new().name("udm-object".into()).spawn(run).map_err(fail)?;
        let started = Arc::new(RuntimeThread { handle, _stop: stop });
        *thread = Some(Arc::clone(&started));
        Ok(started)
    }
}

impl ObjectDeviceOpener for ObjectClient {
    fn open(&self, uri: &ObjectUri) -> Result<Arc<dyn Device>, DeviceControlError> {
        let thread = self.thread()?;
        let store = store::connect(uri)?;
        let source = ObjectSource::new(uri, store)?;
        let known = lock(&self.known).iter().find(|known| known.uri == uri.to_string()).cloned();
        let source = match known {
            Some(known) => source.known_as(known),
            None => {
                let (reply, opened) = mpsc::channel();
                thread.handle.spawn(async move {
                    // If the caller has gone, nobody needs the object.
                    let _ = reply.send(source.open().await);
                });
                let fail = |why: String| DeviceControlError::new(EIO, format!("{uri}: {why}"));
                opened.recv().map_err(|_| fail("the thread for objects has ended".into()))??
            }
        };
        let rest = source.len() % SECTOR_SIZE;
        if source.len() < SECTOR_SIZE {
            return Err(DeviceControlError::new(EINVAL, format!("{uri}: shorter than a sector (512 bytes)")));
        }
        if rest > 0 && !uri.is_qcow2 {
            tracing::warn!("{uri}: its last {rest} bytes are not served, since sectors have 512 bytes");
        }
        let (len, source) = (source.len() - rest, Arc::new(source));
        let mut open = lock(&self.open);
        open.retain(|source| source.strong_count() > 0);
        open.push(Arc::downgrade(&source));
        drop(open);
        let jobs = BlockCacheTask::spawn(Arc::clone(&thread), Arc::clone(&source));
        let device: Arc<dyn Device> = Arc::new(ObjectDevice::new(len, jobs, Arc::clone(&source)));
        match uri.is_qcow2 {
            true => {
                open_image_in_object(&uri.to_string(), device, Arc::new(ObjectBytes::new(source, thread)))
            }
            false => Ok(device),
        }
    }

    fn in_use(&self) -> Vec<KnownObject> {
        lock(&self.open).iter().filter_map(Weak::upgrade).map(|source| source.as_known()).collect()
    }

    fn set_known(&self, objects: Vec<KnownObject>) {
        *lock(&self.known) = objects;
    }
}

fn lock<T>(list: &Mutex<Vec<T>>) -> MutexGuard<'_, Vec<T>> {
    list.lock().unwrap_or_else(PoisonError::into_inner)
}
