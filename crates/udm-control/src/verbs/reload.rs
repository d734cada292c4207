//! Replacing the live table of a device by another one, in one verb.

use super::begin_transition::{LoadedTable, begin_resume_if_still_loaded};
use super::cancel::{CancelToken, CancellableVerbKind};
use super::change::{busy_error, run_change_with_device_locks};
use super::tables;
use crate::error::VerbError;
use crate::registry::{BaseDir, DeviceRegistry, RegisteredDevice};
use std::sync::Arc;
use udm_core::errno::ENXIO;
use udm_dm::{Table, TargetError};

/// Loads a table into an active device whose inactive slot is empty, and makes it live: both or
/// neither. If another verb suspends the device or changes the slot meanwhile, the reload fails.
/// Returns the live table.
pub(crate) async fn reload_live_table(
    registry: &DeviceRegistry,
    mapped: &Arc<RegisteredDevice>,
    name: &str,
    text: &str,
    folder: &BaseDir,
    cancel_token: &CancelToken,
) -> Result<Arc<Table>, VerbError> {
    replace_live_table(registry, mapped, name, None, (text, folder), cancel_token).await
}

/// As [`reload_live_table`]. The reload also fails if the live table is not `expected`, for a
/// caller whose new table is right for this one only.
pub(crate) async fn replace_live_table(
    registry: &DeviceRegistry,
    mapped: &Arc<RegisteredDevice>,
    name: &str,
    expected: Option<&Arc<Table>>,
    (text, folder): (&str, &BaseDir),
    cancel_token: &CancelToken,
) -> Result<Arc<Table>, VerbError> {
    let is_free = || {
        let info = mapped.device.info();
        if !registry.is_active(mapped) {
            return Err(TargetError::errno(ENXIO).because("it has been removed meanwhile"));
        }
        if info.suspended {
            return Err(busy_error("it is suspended: resume it first"));
        }
        if info.inactive {
            return Err(busy_error("a table waits in its inactive slot: resume or clear it first"));
        }
        check_live_table(mapped, expected)
    };
    is_free().map_err(|e| VerbError::new(name, e))?;
    let loaded = tables::load_if(registry, mapped, name, text, folder, cancel_token, |_| is_free())?;
    let one = [(name.to_owned(), Arc::clone(mapped))];
    let ours = [LoadedTable { place: 0, mapped, table: &loaded }];
    let done = run_change_with_device_locks(
        registry,
        &one,
        CancellableVerbKind::Resume,
        cancel_token,
        |devices, turns, wake| {
            let _linked = registry.linking();
            // A resume that was under way at the load may have made another table live.
            let is_live = mapped.device.live().is_some_and(|live| Arc::ptr_eq(&live, &loaded));
            check_live_table(mapped, expected.filter(|_| !is_live)).map_err(|why| (0, why))?;
            begin_resume_if_still_loaded(&ours, devices, turns, wake)
        },
    )
    .await;
    let is_live = || mapped.device.live().is_some_and(|live| Arc::ptr_eq(&live, &loaded));
    match done {
        // Another verb has made the table live.
        Err(_) if is_live() => Ok(loaded),
        Err(error) => {
            mapped.device.clear_own(&loaded);
            Err(error)
        }
        Ok(()) => Ok(loaded),
    }
}

/// Fails if the live table is not the expected one.
fn check_live_table(mapped: &RegisteredDevice, expected: Option<&Arc<Table>>) -> Result<(), TargetError> {
    let live = mapped.device.live();
    let is_expected = |table: &Arc<Table>| live.as_ref().is_some_and(|live| Arc::ptr_eq(table, live));
    match expected.is_none_or(is_expected) {
        true => Ok(()),
        false => Err(busy_error("its table has been replaced meanwhile: look at it and try again")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::{block_on_verb, create_mapped_device, resume_mapped_devices, tables::load_into};
    use std::sync::Mutex;
    use std::thread;
    use std::time::{Duration, Instant};
    use udm_core::errno::EBUSY;
    use udm_core::{BioTaskFactory, BioTaskHandle, CoreCommandSender, CoreId, DeviceId, LaneCommand};

    /// Cores without lanes. While suspends are held, none is acknowledged.
    #[derive(Default)]
    struct HoldingCores(Mutex<Option<Vec<LaneCommand>>>);

    impl HoldingCores {
        fn hold(&self, holds: bool) {
            let before = std::mem::replace(&mut *self.0.lock().unwrap(), holds.then(Vec::new));
            drop(before);
        }

        fn holds_one(&self) -> bool {
            self.0.lock().unwrap().as_ref().is_some_and(|held| !held.is_empty())
        }
    }

    impl CoreCommandSender for HoldingCores {
        fn broadcast(&self, _: DeviceId, command: LaneCommand) {
            if matches!(command, LaneCommand::Suspend { .. })
                && let Some(held) = &mut *self.0.lock().unwrap()
            {
                held.push(command);
            }
        }
        fn wake_up(&self, _: CoreId, _: DeviceId) {}
        fn start(&self, _: BioTaskFactory) -> BioTaskHandle {
            BioTaskHandle::new(drop)
        }
    }

    fn table_of(mapped: &RegisteredDevice) -> &'static str {
        mapped.device.live().unwrap().targets()[0].target.type_name()
    }

    /// A verb that has looked at a table does not replace another one, also not one that becomes
    /// live while the verb waits.
    #[test]
    fn only_the_expected_table_is_replaced() {
        let cores = Arc::new(HoldingCores::default());
        let registry = DeviceRegistry::new(Arc::<HoldingCores>::clone(&cores) as _, 1);
        block_on_verb(create_mapped_device(&registry, "d", None, Some("0 8 zero"))).unwrap();
        let mapped = registry.find("d").unwrap();
        let seen = mapped.device.live().unwrap();
        let (folder, token) = (BaseDir::none(), CancelToken::default());
        let replace = |expected: &Arc<Table>| {
            let table = ("0 16 zero", &folder);
            block_on_verb(replace_live_table(&registry, &mapped, "d", Some(expected), table, &token))
        };
        let load = || load_into(&registry, &mapped, "d", "0 8 error", &folder, &token).unwrap();
        // A resume with another table is under way, then complete.
        load();
        cores.hold(true);
        let refused = thread::scope(|scope| {
            let resume = scope.spawn(|| block_on_verb(resume_mapped_devices(&registry, &["d"])));
            let end = Instant::now() + Duration::from_secs(20);
            while !cores.holds_one() {
                assert!(Instant::now() < end && !resume.is_finished(), "the resume asks the cores");
                thread::yield_now();
            }
            let replacing = scope.spawn(|| replace(&seen));
            thread::sleep(Duration::from_millis(50));
            cores.hold(false);
            resume.join().unwrap().unwrap();
            replacing.join().unwrap().map(drop).unwrap_err()
        });
        assert_eq!((refused.error.errno, table_of(&mapped)), (EBUSY, "error"), "{refused}");
        assert!(mapped.device.inactive().is_none());
        let refused = replace(&seen).map(drop).unwrap_err();
        assert!(refused.to_string().contains("its table has been replaced meanwhile"), "{refused}");
        assert_eq!((table_of(&mapped), mapped.device.inactive().is_none()), ("error", true));
        // The table that is live is replaced.
        replace(&mapped.device.live().unwrap()).unwrap();
        assert_eq!(table_of(&mapped), "zero");
    }
}
