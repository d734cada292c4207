//! How a host fences the writes of a controller that it has lost: Cross-Controller Reset, and the
//! status of a shutdown.

use super::host::{
    Answer, BLOCK, Connection, ScriptedHost, WRITE, command, identify, log_page, property_set, rw,
};
use super::{SIZE, TargetFixture, options};
use crate::disk::{CompletionOrder, TestDisk};
use std::time::{Duration, Instant};
use udm_wire::nvme::{
    ControllerInstance, CrossControllerReset, CrossControllerResetEntry, CrossControllerResetStatus,
    FenceCapabilities, NvmeStatus, decode_cross_controller_reset_log,
};

fn capabilities(host: &mut ScriptedHost) -> FenceCapabilities {
    let id = host.admin.read(identify(1, 0)).unwrap();
    FenceCapabilities::decode(id[..].try_into().unwrap())
}

pub fn instance(host: &mut ScriptedHost) -> ControllerInstance {
    capabilities(host).instance.expect("an I/O controller")
}

/// Sends a reset. Returns the identifier of the command.
pub fn reset(host: &mut ScriptedHost, impacted: ControllerInstance) -> u16 {
    host.admin.command(CrossControllerReset { impacted }.encode(0), &[])
}

pub fn answer(connection: &mut Connection) -> (u16, NvmeStatus, u64) {
    match connection.answer() {
        Answer::Response(completion) => (completion.id, completion.status, completion.result),
        other => panic!("expected a response: {other:?}"),
    }
}

pub fn log(host: &mut ScriptedHost, removes_completed: bool) -> Vec<CrossControllerResetEntry> {
    let removes = u32::from(removes_completed) << 8;
    decode_cross_controller_reset_log(&host.admin.read(log_page(0x1e | removes, 256)).unwrap())
}

/// A reset is answered when no request of the other controller is at a device.
#[test]
fn a_reset_waits_for_requests() {
    let target = TargetFixture::new();
    let (mut lost, mut healthy) = (target.host(), target.host());
    let impacted = instance(&mut lost);
    assert_eq!((impacted.id, impacted.uniquifier), (lost.controller, 1));
    let mut queue = lost.queue(1, false);
    target.disk.hold_requests();
    queue.command(rw(WRITE, 0, 8, true), &[1; 8 * BLOCK]);
    target.wait_for("a request", |_| target.disk.held() == 1);
    let id = reset(&mut healthy, impacted);
    assert_eq!((queue.answer(), lost.admin.answer()), (Answer::End, Answer::End), "they receive no more");
    let again = reset(&mut healthy, impacted);
    let in_progress = NvmeStatus::CROSS_CONTROLLER_RESET_IN_PROGRESS;
    assert_eq!(answer(&mut healthy.admin), (again, in_progress, 0));
    let begun = Instant::now();
    healthy.admin.stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    assert_eq!(healthy.admin.answer(), Answer::End, "the write may still land");
    healthy.admin.stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    assert!(begun.elapsed() < Duration::from_millis(900), "this machine is too slow for the test");
    target.disk.release_requests();
    assert_eq!(answer(&mut healthy.admin), (id, NvmeStatus::SUCCESS, CrossControllerReset::DONE));
    assert_eq!(target.server.stats().controllers, 1);
    let id = reset(&mut healthy, impacted);
    let done = (id, NvmeStatus::SUCCESS, CrossControllerReset::DONE);
    assert_eq!(answer(&mut healthy.admin), done, "it is gone already");
    assert_eq!(log(&mut healthy, false), []);
    drop((lost, healthy, queue));
    target.end();
}

/// A reset that takes long is answered before its end; an event and the log page tell it.
#[test]
fn a_long_reset_completes_with_an_event() {
    let target = TargetFixture::new();
    let (mut lost, mut healthy) = (target.host(), target.host());
    let impacted = instance(&mut lost);
    assert!(healthy.admin.ask(command(0x09, 0, &[0x0b, 1 << 20])).status.is_ok());
    let event = healthy.admin.command(command(0x0c, 0, &[]), &[]);
    let mut queue = lost.queue(2, false);
    target.disk.hold_requests();
    queue.command(rw(WRITE, 0, 8, true), &[1; 8 * BLOCK]);
    target.wait_for("a request", |_| target.disk.held() == 1);
    let id = reset(&mut healthy, impacted);
    assert_eq!(answer(&mut healthy.admin), (id, NvmeStatus::SUCCESS, 0), "in progress");
    let entry = CrossControllerResetEntry {
        impacted: impacted.id,
        uniquifier: impacted.uniquifier,
        source: healthy.controller,
        status: CrossControllerResetStatus::InProgress,
    };
    assert_eq!(log(&mut healthy, true), [entry]);
    target.disk.release_requests();
    assert_eq!(answer(&mut healthy.admin), (event, NvmeStatus::SUCCESS, 0x001e_f402));
    let done = CrossControllerResetEntry { status: CrossControllerResetStatus::Succeeded, ..entry };
    assert_eq!(log(&mut healthy, false), [done]);
    assert_eq!(log(&mut healthy, true), [done]);
    assert_eq!(log(&mut healthy, false), [], "completed entries were removed");
    drop((lost, healthy, queue));
    target.end();
}

/// Resets that must not be answered with success: that of the own controller, of another server's,
/// of another instance of this server that still runs, and too many.
#[test]
fn wrong_resets() {
    let target = TargetFixture::new();
    let (mut other, mut host) = (target.host(), target.host());
    let (own, running) = (instance(&mut host), instance(&mut other));
    let invalid = NvmeStatus::INVALID_FIELD.permanent();
    let foreign = ControllerInstance { random: running.random ^ 1 << 63, ..running };
    for impacted in [own, foreign, ControllerInstance { id: 999, ..foreign }] {
        let id = reset(&mut host, impacted);
        assert_eq!(answer(&mut host.admin), (id, invalid, 0), "{impacted:?}");
    }
    // An instance that was reset since is gone, and the present one stays.
    assert!(other.admin.ask(property_set(0x14, 0x0046_0000)).status.is_ok());
    other.enable();
    let next = instance(&mut other);
    assert_eq!((next.id, next.uniquifier, next.random >> 32), (running.id, 2, running.random >> 32));
    assert_ne!(next.random, running.random);
    let id = reset(&mut host, running);
    assert_eq!(answer(&mut host.admin), (id, NvmeStatus::SUCCESS, CrossControllerReset::DONE));
    assert!(other.admin.ask(command(0x18, 0, &[])).status.is_ok());
    let can = capabilities(&mut host);
    assert_eq!((can.resets_max, can.quiesce_time_ms), (4, 30_000));
    target.disk.hold_requests();
    let mut lost: Vec<_> = (0..5).map(|_| target.host()).collect();
    let mut queues: Vec<Connection> = lost.iter().map(|host| host.queue(1, false)).collect();
    for queue in &mut queues {
        queue.command(rw(WRITE, 0, 8, true), &[1; 8 * BLOCK]);
    }
    target.wait_for("requests", |_| target.disk.held() == 5);
    let instances: Vec<_> = lost.iter_mut().map(instance).collect();
    for impacted in &instances[..4] {
        reset(&mut host, *impacted);
    }
    let id = reset(&mut host, instances[4]);
    let limit = NvmeStatus::CROSS_CONTROLLER_RESET_LIMIT_EXCEEDED;
    assert_eq!(answer(&mut host.admin), (id, limit, 0));
    target.disk.release_requests();
    for _ in 0..4 {
        assert_eq!(answer(&mut host.admin).1, NvmeStatus::SUCCESS);
    }
    drop((other, host, lost, queues));
    target.end();
}

/// Two hosts' controllers that reset each other both end, and nothing waits for anything.
#[test]
fn resets_against_each_other() {
    let target = TargetFixture::new();
    let (mut first, mut second) = (target.host(), target.host());
    let (one, two) = (instance(&mut first), instance(&mut second));
    let mut queues = [first.queue(1, false), second.queue(1, false)];
    target.disk.hold_requests();
    for queue in &mut queues {
        queue.command(rw(WRITE, 0, 8, true), &[1; 8 * BLOCK]);
    }
    target.wait_for("requests", |_| target.disk.held() == 2);
    reset(&mut first, two);
    reset(&mut second, one);
    target.wait_for("one has ended", |stats| stats.connections <= 2);
    target.disk.release_requests();
    drop((first, second, queues));
    target.end();
}

/// A shutdown is complete, and a reset controller is not ready any more, only when the writes of
/// its queues have left the devices, also of a queue that the host has closed.
#[test]
fn a_shutdown_waits_for_requests() {
    let target = TargetFixture::with(TestDisk::new(SIZE, CompletionOrder::AtOnce), options());
    for (configuration, occurring, complete) in [(0x0046_4001, 4, 8), (0x0046_0000, 1, 0)] {
        let mut host = target.host();
        let mut queue = host.queue(1, false);
        target.disk.hold_requests();
        queue.command(rw(WRITE, 0, 8, true), &[1; 8 * BLOCK]);
        target.wait_for("a request", |_| target.disk.held() == 1);
        drop(queue);
        assert!(host.admin.ask(property_set(0x14, configuration)).status.is_ok());
        for _ in 0..20 {
            host.wait_for_status(occurring);
            std::thread::sleep(Duration::from_millis(5));
        }
        target.disk.release_requests();
        host.wait_for_status(complete);
        drop(host);
    }
    target.end();
}
