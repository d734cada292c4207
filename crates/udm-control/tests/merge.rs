//! Clients that come to a snapshot while it is merged. Cores and control I/O run on the test's
//! thread, in the hook that runs while a verb waits. So the moment of a connection is exact.

use std::cell::RefCell;
use std::sync::Arc;
use udm_control::exports::{DeviceExporter, ExportOptions};
use udm_control::verbs::snapshot::{
    final_merge_state, finish_completed_merge, list_live_snapshots, start_snapshot_merge,
};
use udm_control::verbs::{self, CancelToken, block_on_verb};
use udm_control::{DeviceRegistry, wait_hook};
use udm_core::errno::EBUSY;
use udm_core::{Batch, CoreCommandSender, Lane, Status};
use udm_dm::SnapshotState;
use udm_dm::testing::{SteppedTestCores, make_test_read_bio, make_test_write_bio};
use udm_frontends::nbd::{ExportRef, Exports};

/// The core, and a client of the snapshot.
struct MergeFixture {
    core: SteppedTestCores,
    registry: Arc<DeviceRegistry>,
    exports: Arc<Exports>,
    /// True until the client connects: it does so as soon as the snapshot is suspended.
    waits_for_suspend: bool,
    client: Option<(ExportRef, Box<dyn Lane>)>,
    done: Batch,
}

thread_local! {
    /// The fixture of this test. It is leaked, because a test that fails has bios in flight.
    static FIXTURE: RefCell<Option<&'static mut MergeFixture>> = const { RefCell::new(None) };
}

fn with_fixture<T>(f: impl FnOnce(&mut MergeFixture) -> T) -> T {
    FIXTURE.with_borrow_mut(|fixture| f(fixture.as_mut().unwrap()))
}

impl MergeFixture {
    /// A server of one core, with the origin `o` and its snapshot `s`.
    fn start() -> Arc<DeviceRegistry> {
        let core = SteppedTestCores::new(1);
        let registry = DeviceRegistry::new(core.cores() as Arc<dyn CoreCommandSender>, 1);
        let exports = Arc::new(Exports::new());
        registry.set_exporter(DeviceExporter::new(Arc::clone(&exports), ExportOptions::default()));
        FIXTURE.set(Some(Box::leak(Box::new(MergeFixture {
            core,
            registry: Arc::clone(&registry),
            exports,
            waits_for_suspend: false,
            client: None,
            done: Batch::new(),
        }))));
        wait_hook::set_wait_hook(Some(|| with_fixture(MergeFixture::turn)));
        for (name, table) in [
            ("disk", "0 8192 linear mem:4M 0"),
            ("store", "0 8192 linear mem:4M 0"),
            ("o", "0 8192 snapshot-origin @disk"),
            ("s", "0 8192 snapshot @disk @store P 8"),
        ] {
            block_on_verb(verbs::create_mapped_device(&registry, name, None, Some(table))).unwrap();
        }
        registry
    }

    /// One turn of the core.
    fn turn(&mut self) {
        self.core.run_tasks();
        self.core.deliver(0);
        if self.waits_for_suspend && state(&self.registry, "s") == "suspended" {
            self.waits_for_suspend = false;
            self.connect();
            let (_, lane) = self.client.as_mut().unwrap();
            self.core.submit(0, &mut **lane, [make_test_read_bio(0, 8)]);
        }
        if let Some((_, lane)) = &mut self.client {
            self.done.extend(self.core.poll(0, &mut **lane));
        }
    }

    fn connect(&mut self) {
        let export = self.exports.acquire("s").expect("it is listed");
        let lane = self.core.open(0, &**export.device()).unwrap();
        self.client = Some((export, lane));
    }

    fn disconnect(&mut self) {
        let (export, lane) = self.client.take().unwrap();
        self.core.turn(0, |_| drop(lane));
        drop(export);
    }
}

fn state(registry: &Arc<DeviceRegistry>, name: &str) -> String {
    verbs::describe_device_by_name(registry, name).map_or_else(|e| e.to_string(), |device| device.state)
}

fn turns() {
    (0..100).for_each(|_| with_fixture(MergeFixture::turn));
}

/// A client connects after the merge has counted the users of the snapshot, and before it removes
/// the snapshot's device. The device stays, and its requests end: it may not stay suspended.
#[test]
fn a_client_that_comes_between_the_count_and_the_removal_gets_errors() {
    let registry = MergeFixture::start();
    with_fixture(|fixture| {
        fixture.connect();
        let (_, lane) = fixture.client.as_mut().unwrap();
        fixture.core.submit(0, &mut **lane, [make_test_write_bio(0, 8, 7)]);
    });
    turns();
    assert_eq!(with_fixture(|fixture| fixture.done.pop().unwrap().status), Status::Ok);
    let merge = || start_snapshot_merge(&registry, "s", &CancelToken::default());
    assert_eq!(merge().err().unwrap().error.errno, EBUSY, "this client was counted");
    with_fixture(MergeFixture::disconnect);

    with_fixture(|fixture| fixture.waits_for_suspend = true);
    let (_, end) = merge().unwrap();
    assert!(with_fixture(|fixture| !fixture.waits_for_suspend), "the client came during the merge");
    let device = verbs::describe_device_by_name(&registry, "s").unwrap();
    assert_eq!((device.state.as_str(), device.open_count), ("active", 1));
    turns();
    let statuses = with_fixture(|fixture| fixture.done.drain(..).map(|bio| bio.status).collect::<Vec<_>>());
    assert_eq!(statuses, [Status::IoErr], "the request of the client ends");

    assert_eq!(final_merge_state(&registry, &end), Some(SnapshotState::Merged));
    finish_completed_merge(&registry, &end).unwrap();
    with_fixture(MergeFixture::disconnect);
    block_on_verb(verbs::remove_mapped_device(&registry, "s")).unwrap();
    assert!(list_live_snapshots(&registry).is_empty(), "the origin has its own table again");
}

/// Without a client, the snapshot's device goes.
#[test]
fn the_device_of_a_merged_snapshot_is_removed() {
    let registry = MergeFixture::start();
    start_snapshot_merge(&registry, "s", &CancelToken::default()).unwrap();
    verbs::describe_device_by_name(&registry, "s").unwrap_err();
    assert_eq!(state(&registry, "o"), "active");
}

/// A table that waits in the origin's device, and a suspend by a user, are left alone by the end of
/// a merge.
#[test]
fn the_end_of_a_merge_leaves_changes_of_users_alone() {
    let registry = MergeFixture::start();
    let (_, end) = start_snapshot_merge(&registry, "s", &CancelToken::default()).unwrap();
    turns();
    assert_eq!(final_merge_state(&registry, &end), Some(SnapshotState::Merged));
    let inactive = || verbs::table_by_device_name(&registry, "o", true).unwrap().text;
    verbs::load_inactive_table(&registry, "o", "0 8 zero").unwrap();
    let loaded = inactive();
    assert_eq!(finish_completed_merge(&registry, &end).unwrap_err().error.errno, EBUSY);
    assert_eq!(inactive(), loaded);
    verbs::clear_inactive_table(&registry, "o").unwrap();
    block_on_verb(verbs::suspend_mapped_devices(&registry, &["o"], false)).unwrap();
    assert_eq!(finish_completed_merge(&registry, &end).unwrap_err().error.errno, EBUSY);
    assert_eq!(state(&registry, "o"), "suspended");
    block_on_verb(verbs::resume_mapped_devices(&registry, &["o"])).unwrap();
    finish_completed_merge(&registry, &end).unwrap();
    assert!(list_live_snapshots(&registry).is_empty());
}
