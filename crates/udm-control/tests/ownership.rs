//! Ownership of a registry entry: concurrent creates, removals and loads.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use udm_control::exports::{DeviceExporter, ExportOptions};
use udm_control::{DeviceRegistry, verbs};
use udm_core::errno::{EBUSY, ENXIO};
use udm_core::{CoreCommandSender, CoreId, DeviceId, LaneCommand};
use udm_frontends::nbd::Exports;

/// Cores without lanes: every command is acknowledged at once.
struct StubCores;

impl CoreCommandSender for StubCores {
    fn broadcast(&self, _: DeviceId, _: LaneCommand) {}
    fn wake_up(&self, _: CoreId, _: DeviceId) {}
    fn start(&self, _: udm_core::BioTaskFactory) -> udm_core::BioTaskHandle {
        udm_core::BioTaskHandle::new(drop)
    }
}

fn registry() -> Arc<DeviceRegistry> {
    let registry = DeviceRegistry::new(Arc::new(StubCores), 1);
    registry.set_exporter(DeviceExporter::new(Arc::new(Exports::new()), ExportOptions::default()));
    registry
}

/// A table that takes a moment to build. Unless `good`, it is refused at its end.
fn slow_table(good: bool) -> String {
    let lines: String = (0..40_000).map(|i| format!("{i} 1 zero\n")).collect();
    lines + if good { "40000 1 zero" } else { "40000 1 none" }
}

fn errno<T: std::fmt::Debug>(done: Result<T, udm_control::error::VerbError>) -> i32 {
    done.unwrap_err().error.errno
}

/// Checks that listed devices answer, and that exactly these are exported.
fn consistent(registry: &Arc<DeviceRegistry>) {
    let listed: BTreeSet<String> = verbs::list_mapped_devices(registry).into_iter().map(|d| d.name).collect();
    let exported: BTreeSet<String> = registry.exports().into_iter().map(|e| e.name).collect();
    assert_eq!(listed, exported);
    for name in &listed {
        verbs::describe_device_by_name(registry, name).unwrap();
    }
}

/// While `create` builds the table, no other verb removes the device or takes its name. If the
/// create fails, it removes only its own device.
#[test]
fn a_device_that_is_being_made_belongs_to_its_maker() {
    for good in [true, false] {
        let registry = registry();
        let ended = AtomicBool::new(false);
        let mut met = 0;
        thread::scope(|scope| {
            let made = scope.spawn(|| {
                let table = slow_table(good);
                let made = verbs::block_on_verb(verbs::create_mapped_device(
                    &registry,
                    "a",
                    Some("UUID-A"),
                    Some(&table),
                ));
                ended.store(true, Ordering::Release);
                made
            });
            while !ended.load(Ordering::Acquire) {
                match verbs::block_on_verb(verbs::remove_mapped_device(&registry, "a")) {
                    Err(error) if error.error.errno == ENXIO => {}
                    Err(error) => {
                        assert_eq!(error.error.errno, EBUSY, "{error}");
                        met += 1;
                        // Takes the lowest free number.
                        if met == 1 {
                            verbs::block_on_verb(verbs::create_mapped_device(
                                &registry,
                                "b",
                                None,
                                Some("0 8 zero"),
                            ))
                            .unwrap();
                        }
                        if verbs::block_on_verb(verbs::create_mapped_device(&registry, "a", None, None))
                            .is_ok()
                        {
                            assert!(!good, "the name is taken");
                            // The create has failed, so the name is free.
                            verbs::block_on_verb(verbs::remove_mapped_device(&registry, "a")).unwrap();
                            break;
                        }
                        assert!(
                            !verbs::list_mapped_devices(&registry)
                                .iter()
                                .any(|d| d.name == "a" && !d.live_table)
                        );
                    }
                    // The device may be removed as soon as it is complete.
                    Ok(()) => {
                        assert!(met > 0, "removed while it was being made");
                        break;
                    }
                }
            }
            assert_eq!(made.join().unwrap().is_ok(), good);
        });
        assert!(met > 0, "the remove never met the create");
        consistent(&registry);
        verbs::describe_device_by_name(&registry, "b").unwrap();
        let _ = verbs::block_on_verb(verbs::remove_mapped_device(&registry, "a"));
        verbs::block_on_verb(verbs::create_mapped_device(
            &registry,
            "a",
            Some("UUID-A"),
            Some("0 8 linear @b 0"),
        ))
        .unwrap();
        assert_eq!(errno(verbs::block_on_verb(verbs::remove_mapped_device(&registry, "b"))), EBUSY);
        consistent(&registry);
    }
}

/// A table that names a device, and the removal of that device: one of the two is refused.
#[test]
fn no_table_names_a_removed_device() {
    let registry = registry();
    verbs::block_on_verb(verbs::create_mapped_device(&registry, "i", None, None)).unwrap();
    let until = Instant::now() + Duration::from_secs(2);
    let (mut loaded, mut removed) = (0u32, 0u32);
    thread::scope(|scope| {
        let removing = scope.spawn(|| {
            let mut removed = 0;
            while Instant::now() < until {
                let _ =
                    verbs::block_on_verb(verbs::create_mapped_device(&registry, "b", None, Some("0 8 zero")));
                removed +=
                    u32::from(verbs::block_on_verb(verbs::remove_mapped_device(&registry, "b")).is_ok());
            }
            removed
        });
        while Instant::now() < until {
            if verbs::load_inactive_table(&registry, "i", "0 8 linear @b 0").is_err() {
                continue;
            }
            verbs::block_on_verb(verbs::resume_mapped_devices(&registry, &["i"])).unwrap();
            let below = verbs::table_by_device_name(&registry, "i", false).unwrap().devices;
            // Checked after the table: a device in the table must still exist.
            assert!(below.iter().all(|b| !b.uri.is_empty()), "{below:?}");
            assert_eq!(verbs::describe_device_by_name(&registry, "b").unwrap().open_count, 1);
            loaded += 1;
            verbs::load_inactive_table(&registry, "i", "0 8 error").unwrap();
            verbs::block_on_verb(verbs::resume_mapped_devices(&registry, &["i"])).unwrap();
        }
        removed = removing.join().unwrap();
    });
    assert!(loaded > 0 && removed > 0, "{loaded} loads, {removed} removals");
}
