//! Verbs that also change partner devices.

use super::begin_transition::begin_resume_transition;
use super::cancel::CancellableVerbKind;
use super::change::run_change_with_device_locks;
use super::{
    CancelToken, RemoveOptions, block_on_verb, interrupted_error, remove_device_cancellable,
    remove_mapped_device, resume_mapped_devices, suspend_mapped_devices,
};
use crate::error::VerbError;
use crate::registry::{BaseDir, DeviceRegistry, RegisteredDevice, TableResolver};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::thread;
use std::time::{Duration, Instant};
use udm_core::errno::{EINTR, ENXIO};
use udm_core::{
    BioTaskFactory, BioTaskHandle, CoreCommandSender, CoreId, Cx, Device as _, DeviceControlError, DeviceId,
    Lane, LaneCommand, Limits, Sector,
};
use udm_dm::testing::TestControlIo;
use udm_dm::{
    DeviceRange, LowerLimits, MappedDevice, ResolvedDevice, Table, Target, TargetArgs, TargetError,
    TargetHostServices, TargetType,
};

/// Cores without lanes: every command is acknowledged at once, except those to one device that
/// hangs.
#[derive(Default)]
struct StubCores {
    hangs: Mutex<Option<DeviceId>>,
    waiting: Mutex<Vec<LaneCommand>>,
}

impl StubCores {
    fn hang(&self, device: Option<DeviceId>) {
        *self.hangs.lock().unwrap() = device;
        let answered = std::mem::take(&mut *self.waiting.lock().unwrap());
        drop(answered);
    }

    fn is_asked(&self) -> bool {
        !self.waiting.lock().unwrap().is_empty()
    }
}

impl CoreCommandSender for StubCores {
    fn broadcast(&self, device: DeviceId, command: LaneCommand) {
        // A hanging device answers everything but a suspend.
        let suspends = matches!(command, LaneCommand::Suspend { .. });
        if suspends && *self.hangs.lock().unwrap() == Some(device) {
            self.waiting.lock().unwrap().push(command);
        }
    }
    fn wake_up(&self, _: CoreId, _: DeviceId) {}
    fn start(&self, _: BioTaskFactory) -> BioTaskHandle {
        BioTaskHandle::new(drop)
    }
}

/// State that the targets over one disk share.
#[derive(Default)]
struct DiskShared {
    tops: Mutex<Vec<Weak<TopState>>>,
    sides: AtomicU32,
}

#[derive(Default)]
struct TopState {
    notify: OnceLock<Arc<dyn TargetHostServices>>,
    live: AtomicBool,
}

impl TopState {
    fn mapped(&self) -> Option<Arc<MappedDevice>> {
        self.notify.get()?.mapped()
    }
}

/// `top DISK` and `side DISK`: like an origin and its snapshots.
struct TestTarget {
    is_top: bool,
    disk: ResolvedDevice,
    args: (Sector, udm_core::Sectors),
    place: Arc<TopState>,
    shared: Arc<DiskShared>,
}

impl TestTarget {
    fn tops(&self) -> Vec<Arc<TopState>> {
        self.shared.tops.lock().unwrap().iter().filter_map(Weak::upgrade).collect()
    }

    fn changes(&self, live: bool) {
        if self.place.live.swap(live, Ordering::Relaxed) == live || self.is_top {
            return;
        }
        for top in self.tops().iter().filter(|top| top.live.load(Ordering::Relaxed)) {
            let rests = top.mapped().is_none_or(|device| device.is_suspended());
            assert!(rests, "a side comes or goes, and a top takes requests");
        }
        let delta = if live { 1 } else { u32::MAX };
        self.shared.sides.fetch_add(delta, Ordering::Relaxed);
    }
}

impl Target for TestTarget {
    fn type_name(&self) -> &'static str {
        if self.is_top { "top" } else { "side" }
    }
    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        self.disk.device.open(cx)
    }
    fn table(&self) -> String {
        self.disk.number.to_string()
    }
    fn limits(&self, below: LowerLimits<'_>) -> Limits {
        Limits { size: self.args.1, ..below.limits(&self.disk) }
    }
    fn devices(&self) -> Vec<DeviceRange> {
        vec![DeviceRange::new(&self.disk, Sector(0), self.args.1)]
    }
    fn attach(&self, notify: Arc<dyn TargetHostServices>) {
        let _ = self.place.notify.set(notify);
        if self.is_top {
            let mut tops = self.shared.tops.lock().unwrap();
            tops.retain(|top| top.strong_count() > 0);
            tops.push(Arc::downgrade(&self.place));
        }
    }
    fn resume(&self) {
        self.changes(true);
    }
    fn retired(&self) {
        self.changes(false);
    }
    fn partners(&self) -> Vec<Arc<MappedDevice>> {
        if self.is_top { Vec::new() } else { self.tops().iter().filter_map(|top| top.mapped()).collect() }
    }
}

fn over(args: &mut TargetArgs<'_>, is_top: bool) -> Result<Arc<dyn Target>, TargetError> {
    let disk = args.resolver.get(&args.args[0]).map_err(|e| TargetError::errno(e.errno))?;
    let shared = disk.device.shared_disk_state().unwrap().get_or_default();
    Ok(Arc::new(TestTarget { is_top, disk, args: (args.start, args.len), place: Arc::default(), shared }))
}

const TYPES: &[TargetType] = &[
    TargetType { name: "top", version: [1, 0, 0], new: |args| over(args, true) },
    TargetType { name: "side", version: [1, 0, 0], new: |args| over(args, false) },
];

const DISK: &str = "mem:64K";

fn rig() -> (Arc<StubCores>, Arc<DeviceRegistry>) {
    let cores = Arc::new(StubCores::default());
    let registry = DeviceRegistry::new(Arc::<StubCores>::clone(&cores) as Arc<dyn CoreCommandSender>, 1);
    (cores, registry)
}

fn load(registry: &DeviceRegistry, mapped: &Arc<RegisteredDevice>, kind: &str) {
    let lines = udm_wire::table::parse_table(&format!("0 8 {kind} {DISK}")).unwrap();
    let folder = BaseDir::none();
    let table =
        Table::build(TYPES, &lines, &mut TableResolver::new(registry, &folder), &TestControlIo::new(), 1)
            .unwrap();
    mapped.device.load(table).unwrap();
}

/// As `verbs::create`, with targets that have partners.
fn create(
    registry: &Arc<DeviceRegistry>,
    name: &str,
    kind: &str,
    cancel_token: &CancelToken,
) -> Result<(), VerbError> {
    let made = registry.begin_create(name, None, None).unwrap();
    load(registry, &made.mapped, kind);
    let one = [(name.to_owned(), Arc::clone(&made.mapped))];
    block_on_verb(run_change_with_device_locks(
        registry,
        &one,
        CancellableVerbKind::Create,
        cancel_token,
        begin_resume_transition,
    ))?;
    made.complete();
    Ok(())
}

fn never() -> CancelToken {
    CancelToken::default()
}

fn eventually(what: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !what() {
        assert!(Instant::now() < end, "it does not come");
        thread::yield_now();
    }
}

/// Two threads create and remove sides, while others create, suspend, reload and remove tops. Each
/// verb waits for the others; none fails with EBUSY, and none deadlocks.
#[test]
fn partners_are_waited_for_in_turn() {
    let (_cores, registry) = rig();
    let (ended, turns) = (AtomicBool::new(false), AtomicU32::new(0));
    // Its number is lower than all others.
    create(&registry, "low", "top", &never()).unwrap();
    thread::scope(|scope| {
        let (ended, turns) = (&ended, &turns);
        let rounds = move |f: &dyn Fn()| {
            while !ended.load(Ordering::Relaxed) {
                f();
                turns.fetch_add(1, Ordering::Relaxed);
            }
        };
        let registry = &registry;
        for name in ["s1", "s2"] {
            scope.spawn(move || {
                rounds(&|| {
                    create(registry, name, "side", &never()).unwrap();
                    load(registry, &registry.find(name).unwrap(), "side");
                    block_on_verb(resume_mapped_devices(registry, &[name])).unwrap();
                    block_on_verb(remove_mapped_device(registry, name)).unwrap();
                });
            });
        }
        scope.spawn(move || {
            rounds(&|| {
                create(registry, "t", "top", &never()).unwrap();
                block_on_verb(suspend_mapped_devices(registry, &["t"], true)).unwrap();
                block_on_verb(remove_mapped_device(registry, "t")).unwrap();
            });
        });
        scope.spawn(move || {
            rounds(&|| {
                block_on_verb(suspend_mapped_devices(registry, &["low"], true)).unwrap();
                load(registry, &registry.find("low").unwrap(), "top");
                block_on_verb(resume_mapped_devices(registry, &["low"])).unwrap();
            });
        });
        thread::sleep(Duration::from_secs(1));
        ended.store(true, Ordering::Relaxed);
    });
    assert!(turns.load(Ordering::Relaxed) > 20, "{turns:?}");
    let low = registry.find("low").unwrap();
    assert!(!low.device.is_suspended());
    create(&registry, "s", "side", &never()).unwrap();
    block_on_verb(remove_mapped_device(&registry, "s")).unwrap();
}

/// A verb that waits for a partner, for its lock or for its suspend, can be cancelled and changes
/// nothing.
#[test]
fn waiting_for_a_partner_is_called_off() {
    let (cores, registry) = rig();
    create(&registry, "t", "top", &never()).unwrap();
    create(&registry, "before", "side", &never()).unwrap();
    let top = registry.find("t").unwrap();
    let errno = |done: Result<(), VerbError>| done.unwrap_err().error.errno;
    for for_rest in [false, true] {
        let suspending = (!for_rest).then(|| top.changing.try_lock().unwrap());
        if for_rest {
            cores.hang(Some(top.device.id()));
        }
        for verb in [0, 1] {
            let cancel_token = never();
            let done = thread::scope(|scope| {
                let waits = scope.spawn(|| match verb {
                    0 => create(&registry, "s", "side", &cancel_token),
                    _ => block_on_verb(remove_device_cancellable(
                        &registry,
                        "before",
                        RemoveOptions::default(),
                        &cancel_token,
                    )),
                });
                if for_rest {
                    eventually(|| cores.is_asked());
                    assert!(top.device.is_suspended());
                }
                assert!(!waits.is_finished());
                cancel_token.cancel(interrupted_error("enough"));
                waits.join().unwrap()
            });
            assert_eq!(errno(done), EINTR);
            cores.waiting.lock().unwrap().clear();
            assert!(!top.device.is_suspended());
        }
        drop(suspending);
        cores.hang(None);
        assert_eq!(errno(registry.find("s").map(drop)), ENXIO);
        let before = registry.find("before").unwrap();
        assert!(!before.device.is_suspended() && before.device.live().is_some());
        create(&registry, "s", "side", &never()).unwrap();
        block_on_verb(remove_mapped_device(&registry, "s")).unwrap();
    }
    // The shutdown cancels also the verbs of a device that is not listed yet.
    cores.hang(Some(top.device.id()));
    thread::scope(|scope| {
        let waits = scope.spawn(|| create(&registry, "s", "side", &never()));
        eventually(|| cores.is_asked());
        super::cancel_all_pending_verbs(&registry);
        assert_eq!(errno(waits.join().unwrap()), EINTR);
    });
}

/// If a partner is removed while a create waits for it, the create continues without it.
#[test]
fn a_partner_that_is_removed_meanwhile_is_not_waited_for() {
    let (_cores, registry) = rig();
    create(&registry, "t", "top", &never()).unwrap();
    let top = registry.find("t").unwrap();
    let suspending = Arc::clone(&top.changing).try_lock_owned().unwrap();
    drop(top);
    thread::scope(|scope| {
        let retired = scope.spawn(|| block_on_verb(remove_mapped_device(&registry, "t")));
        thread::sleep(Duration::from_millis(20));
        let made = scope.spawn(|| create(&registry, "s", "side", &never()));
        thread::sleep(Duration::from_millis(20));
        assert!(!made.is_finished() && !retired.is_finished());
        drop(suspending);
        retired.join().unwrap().unwrap();
        made.join().unwrap().unwrap();
    });
    assert!(!registry.find("s").unwrap().device.is_suspended());
}
