//! The end of associations: lost connections, keep-alive timers, requests that take long.

use super::host::{Answer, BLOCK, READ, ScriptedHost, WRITE, command, rw};
use super::{SIZE, TargetFixture, options};
use crate::disk::{CompletionOrder, TestDisk};
use std::time::Duration;
use udm_core::Sectors;
use udm_frontends::nbd::Exports;
use udm_wire::nvme::NvmeStatus;

/// A host that sends nothing is given up; one that sends Keep Alive is not.
#[test]
fn the_keep_alive_timer() {
    let target = TargetFixture::new();
    let address = target.server.bound()[0];
    let mut silent = ScriptedHost::connect(address, 1);
    let mut queue = silent.queue(1, false);
    let mut alive = ScriptedHost::connect(address, 1000);
    let mut forever = ScriptedHost::connect(address, 0);
    for _ in 0..6 {
        std::thread::sleep(Duration::from_millis(300));
        assert!(alive.admin.ask(command(0x18, 0, &[])).status.is_ok());
    }
    assert_eq!(silent.admin.answer(), Answer::End);
    assert_eq!(queue.answer(), Answer::End, "its other queues end, too");
    assert!(forever.admin.ask(command(0x18, 0, &[])).status.is_ok());
    drop((silent, alive, forever, queue));
    target.end();
}

/// A controller is forgotten only when none of its requests is at the device.
#[test]
fn a_lost_host_waits_for_its_requests() {
    let target = TargetFixture::new();
    let mut first = target.host();
    let mut queue = first.queue(1, false);
    target.disk.hold_requests();
    queue.command(rw(WRITE, 0, 8, true), &[1; 4096]);
    queue.command(rw(READ, 0, 8, false), &[]);
    target.wait_for("requests", |_| target.disk.held() == 2);
    let number = first.controller;
    assert!(first.admin.ask(command(0x18, 0, &[])).status.is_ok());
    drop((first, queue));
    target.wait_for("the queues stay", |stats| (stats.connections, stats.orphans) == (0, 1));
    assert_eq!(target.server.stats().controllers, 1, "its write may still land");
    let second = target.host();
    assert_ne!(second.controller, number);
    target.disk.release_requests();
    target.wait_for("the first controller stays", |stats| stats.controllers == 1);
    drop(second);
    target.end();
}

/// If requests of an export must fail, those in flight fail at once.
#[test]
fn requests_of_an_export_fail() {
    let target = TargetFixture::new();
    let host = target.host();
    let mut queue = host.queue(1, false);
    target.disk.hold_requests();
    queue.command(rw(READ, 0, 8, false), &[]);
    target.wait_for("a request", |_| target.disk.held() == 1);
    let export = target.exports.get("disk").unwrap();
    let failing = Exports::fail_requests(&target.exports, &export);
    assert_eq!(queue.answer().status(), NvmeStatus::INTERNAL_ERROR);
    assert_eq!(queue.read(rw(READ, 0, 8, false)), Err(NvmeStatus::INTERNAL_ERROR));
    drop(failing);
    target.disk.release_requests();
    let mut data = queue.read(rw(READ, 0, 8, false));
    // The message that requests do not fail any more may come a little later.
    for _ in 0..1000 {
        if data.is_ok() {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
        data = queue.read(rw(READ, 0, 8, false));
    }
    assert_eq!(data.map(|data| data.len()), Ok(4096));
    drop((host, queue));
    target.end();
}

/// When the server stops, requests in flight are answered, and then the connections end.
#[test]
fn a_server_that_stops_answers_first() {
    let target = TargetFixture::with(TestDisk::new(SIZE, CompletionOrder::Shuffled), options());
    let mut host = target.host();
    let mut queue = host.queue(1, false);
    target.disk.hold_requests();
    queue.command(rw(READ, 0, 8, false), &[]);
    target.wait_for("a request", |_| target.disk.held() == 1);
    let TargetFixture { disk, server, runtime, .. } = target;
    drop(server);
    runtime.end();
    let stopping = std::thread::spawn(move || runtime.stop());
    std::thread::sleep(Duration::from_millis(50));
    disk.release_requests();
    assert!(matches!(queue.answer(), Answer::Data { .. }));
    assert_eq!((queue.answer(), host.admin.answer()), (Answer::End, Answer::End));
    stopping.join().unwrap();
}

/// If the keep-alive timer expires while a long write is at the device, no further part of it
/// reaches the device, and the controller stays until the part in flight has completed.
#[test]
fn the_timer_expires_during_a_write() {
    let mut disk = TestDisk::new(SIZE, CompletionOrder::AtOnce);
    disk.limits_mut().max_sectors = Sectors(8);
    let target = TargetFixture::with(disk, options());
    let host = ScriptedHost::connect(target.server.bound()[0], 1000);
    let mut queue = host.queue(1, false);
    target.disk.hold_requests();
    queue.command(rw(WRITE, 0, 32, true), &[1; 32 * BLOCK]);
    target.wait_for("a request", |_| target.disk.held() == 1);
    assert_eq!(queue.answer(), Answer::End);
    target.wait_for("the queues stay", |stats| (stats.connections, stats.orphans) == (0, 1));
    assert_eq!(target.server.stats().controllers, 1);
    target.disk.release_requests();
    target.wait_for("the controller stays", |stats| stats.controllers == 0);
    assert_eq!(target.disk.seen().len(), 1, "parts of the write");
    drop((host, queue));
    target.end();
}

/// A write whose data arrives after the requests of its export have begun to fail does not wait
/// for the device.
#[test]
fn data_that_arrives_too_late_fails() {
    let target = TargetFixture::new();
    let host = target.host();
    let mut queue = host.queue(1, false);
    queue.command(rw(WRITE, 0, 64, false), &[]);
    let Answer::ReadyToTransfer(r2t) = queue.answer() else { panic!("expected R2T") };
    let export = target.exports.get("disk").unwrap();
    let failing = Exports::fail_requests(&target.exports, &export);
    for _ in 0..1000 {
        if queue.read(rw(READ, 0, 8, false)).is_err() {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    target.disk.hold_requests();
    queue.data(r2t, &[1; 64 * BLOCK], true);
    queue.stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    assert_eq!(queue.answer().status(), NvmeStatus::INTERNAL_ERROR);
    target.disk.release_requests();
    drop((failing, host, queue));
    target.end();
}

/// A lost queue returns the memory of its writes whose data has not arrived, even while another
/// request of it is at the device.
#[test]
fn a_lost_queue_returns_memory() {
    let mut limits = options();
    limits.limits.core_bytes_max = 1 << 20;
    let target = TargetFixture::with(TestDisk::new(SIZE, CompletionOrder::AtOnce), limits);
    let (first, second) = (target.host(), target.host());
    let mut lost = first.queue(1, false);
    target.disk.hold_requests();
    lost.command(rw(READ, 0, 8, false), &[]);
    lost.command(rw(WRITE, 0, 1024, false), &[]);
    assert!(matches!(lost.answer(), Answer::ReadyToTransfer(_)));
    drop(lost);
    target.wait_for("the queue stays", |stats| stats.orphans == 1);
    let mut queue = second.queue(1, false);
    queue.stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    queue.command(rw(WRITE, 0, 1024, false), &[]);
    assert!(matches!(queue.answer(), Answer::ReadyToTransfer(_)), "it waits for memory");
    target.disk.release_requests();
    drop((first, second, queue));
    target.end();
}
