//! Hosts that take all places: of connections, of queues, of controllers, of memory.

use super::host::{
    Answer, Connection, ScriptedHost, command, connect_command, connect_data, log_page, property_set,
};
use super::{SIZE, TargetFixture, options};
use crate::disk::{CompletionOrder, TestDisk};
use std::time::Duration;
use udm_frontends::nbd::AllowedClients;
use udm_frontends::nvme::NvmeServerLimits;
use udm_wire::nvme::{ConnectCommand, NvmeStatus};

const OTHER: [u8; 4] = [127, 0, 0, 2];

fn target(limit: impl Fn(&mut NvmeServerLimits)) -> TargetFixture {
    let mut options = options();
    limit(&mut options.limits);
    TargetFixture::with(TestDisk::new(SIZE, CompletionOrder::AtOnce), options)
}

/// Connects a queue, and returns the status.
fn connect(mut connection: Connection, queue: u16, controller: u16) -> (Connection, NvmeStatus) {
    connection.initialize(false);
    let status = connection.connect(&connect_command(queue), &connect_data(controller)).status;
    (connection, status)
}

/// Connections that send nothing do not keep hosts out.
#[test]
fn silent_connections_make_room() {
    let target = target(|limits| limits.handshakes_max = 4);
    let silent: Vec<Connection> = (0..4).map(|_| target.connection()).collect();
    target.wait_for("silent connections", |stats| stats.handshakes == 4);
    drop(target.host());
    drop(silent);
    target.end();
}

/// One address does not get all queues.
#[test]
fn queues_of_an_address_are_limited() {
    let target = target(|limits| limits.peer_connections_max = 2);
    let host = target.host();
    let (queue, status) = connect(target.connection(), 1, host.controller);
    assert!(status.is_ok());
    let (mut third, status) = connect(target.connection(), 2, host.controller);
    assert_eq!(status, NvmeStatus::CONNECT_CONTROLLER_BUSY);
    assert_eq!(third.answer(), Answer::End);
    target.wait_for("the refused queue stays", |stats| (stats.connections, stats.refused) == (2, 1));
    let other = Connection::open_from(OTHER, target.server.bound()[0]);
    let (other, status) = connect(other, 0, 0xffff);
    assert!(status.is_ok(), "another address has room");
    drop(queue);
    target.wait_for("the queue stays", |stats| stats.connections == 2);
    drop(host.queue(2, false));
    drop((host, other));
    target.end();
}

/// One address does not get all controllers.
#[test]
fn controllers_of_an_address_are_limited() {
    let target = target(|limits| limits.controllers_max = 4);
    let hosts: Vec<ScriptedHost> = (0..3).map(|_| target.host()).collect();
    let (_, status) = connect(target.connection(), 0, 0xffff);
    assert_eq!(status, NvmeStatus::CONNECT_CONTROLLER_BUSY);
    let from_other = || Connection::open_from(OTHER, target.server.bound()[0]);
    let (other, status) = connect(from_other(), 0, 0xffff);
    assert!(status.is_ok(), "another address has room");
    let (_, status) = connect(from_other(), 0, 0xffff);
    assert_eq!(status, NvmeStatus::CONNECT_CONTROLLER_BUSY, "there are no more in all");
    drop((hosts, other));
    target.end();
}

/// A host that reads none of its log pages does not fill the memory of the target: its admin queue
/// stops, here before the command that disables the controller.
#[test]
fn unread_log_pages_are_limited() {
    let target = target(|_| ());
    let mut admin = target.connection();
    admin.initialize(false);
    let connect = ConnectCommand { queue_size: 127, ..connect_command(0) };
    let controller = admin.connect(&connect, &connect_data(0xffff)).result as u16;
    assert!(admin.ask(property_set(0x14, 0x0046_0001)).status.is_ok());
    let (mut queue, status) = self::connect(target.connection(), 1, controller);
    assert!(status.is_ok());
    for _ in 0..250 {
        admin.command(log_page(0x0c, 64 << 10), &[]);
    }
    admin.command(property_set(0x14, 0x0046_0000), &[]);
    std::thread::sleep(Duration::from_millis(300));
    assert!(queue.ask(command(0x00, 1, &[])).status.is_ok(), "all 16 MB of pages were queued");
    for _ in 0..250 {
        assert!(matches!(admin.answer(), Answer::Data { .. }));
    }
    assert!(admin.answer().status().is_ok());
    assert_eq!(queue.answer(), Answer::End, "the controller is disabled now");
    drop((admin, queue));
    target.end();
}

/// A device that gets a list of allowed clients is not opened any more, even before the target has
/// compared the lists; then it is closed for hosts that have opened it.
#[test]
fn a_device_that_is_not_for_all_any_more() {
    let target = target(|_| ());
    let host = target.host();
    let (mut early, mut late) = (host.queue(1, false), host.queue(2, false));
    assert!(early.ask(command(0x00, 1, &[])).status.is_ok());
    let allowed: &AllowedClients = target.allowed.as_ref();
    allowed.set(Some(["alice".to_owned()].into()));
    let invalid = NvmeStatus::INVALID_NAMESPACE.permanent();
    assert_eq!(late.ask(command(0x00, 1, &[])).status, invalid);
    let device = target.exports.get("disk").unwrap().device().id();
    target.server.refresh_hook()(device);
    target.wait_for("a user", |_| target.exports.get("disk").unwrap().users() == 0);
    assert_eq!(early.ask(command(0x00, 1, &[])).status, invalid);
    drop((host, early, late));
    target.end();
}
