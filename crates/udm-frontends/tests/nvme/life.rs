//! The end of associations: lost connections, keep-alive timers, requests that take long.

use super::host::{Answer, READ, ScriptedHost, WRITE, command, rw};
use super::{SIZE, TargetFixture, options};
use crate::disk::{CompletionOrder, TestDisk};
use std::time::Duration;
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
    target.wait_for("the admin queue stays", |stats| stats.connections == 1);
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
