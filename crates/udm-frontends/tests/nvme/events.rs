//! Asynchronous events: namespaces that come, go or change, and ANA states.

use super::host::{Answer, ScriptedHost, WRITE, command, identify, log_page, rw};
use super::{SIZE, TargetFixture};
use crate::disk::{CompletionOrder, TestDisk};
use std::sync::Arc;
use udm_core::Device;
use udm_frontends::nbd::Export;
use udm_wire::nvme::{AnaState, NvmeStatus};

/// Asks for an event.
fn request(host: &mut ScriptedHost) -> u16 {
    host.admin.command(command(0x0c, 0, &[]), &[])
}

/// The result of the next completion.
fn event(host: &mut ScriptedHost) -> (u16, u64) {
    match host.admin.answer() {
        Answer::Response(completion) if completion.status.is_ok() => (completion.id, completion.result),
        other => panic!("expected an event: {other:?}"),
    }
}

fn changed_namespaces(host: &mut ScriptedHost) -> Vec<u32> {
    let page = host.admin.read(log_page(0x04, 4096)).unwrap();
    let entries = page.chunks(4).map(|entry| u32::from_le_bytes(entry.try_into().unwrap()));
    entries.take_while(|nsid| *nsid != 0).collect()
}

#[test]
fn namespaces_come_change_and_go() {
    let target = TargetFixture::new();
    let mut host = target.host();
    let mut queue = host.queue(1, false);
    assert!(host.admin.ask(command(0x09, 0, &[0x0b, 1 << 8 | 1 << 11])).status.is_ok());
    let first = request(&mut host);
    let second = Arc::new(TestDisk::new(SIZE / 2, CompletionOrder::AtOnce));
    let export = target.exports.add(Export::new("second", "", true, second.clone()).unwrap()).unwrap();
    assert_eq!(event(&mut host), (first, 0x0004_0002));
    assert_eq!(changed_namespaces(&mut host), [2]);
    assert_eq!(changed_namespaces(&mut host), [], "the page was read");
    let namespace = host.admin.read(identify(0, 2)).unwrap();
    assert_eq!(namespace[99], 1, "it is write protected");
    // It is used, and refuses writes.
    assert!(queue.ask(command(0x00, 2, &[])).status.is_ok());
    let mut write = *rw(WRITE, 0, 1, true).bytes();
    write[4] = 2;
    queue.command(udm_wire::nvme::NvmeCommand::from_bytes(write), &[0; 512]);
    assert_eq!(queue.answer().status(), NvmeStatus::WRITE_PROTECTED.permanent());
    assert_eq!(export.users(), 1);

    let second_request = request(&mut host);
    (target.server.refresh_hook())(second.id());
    assert_eq!(event(&mut host), (second_request, 0x0004_0002), "another size");
    // No event before the page was read.
    request(&mut host);
    target.exports.remove(&export);
    target.wait_for("the namespace stays open", |_| export.users() == 0);
    assert!(host.admin.ask(command(0x18, 0, &[])).status.is_ok());
    let id = host.admin.command(log_page(0x04, 4096), &[]);
    let Answer::Data { pdu, data, .. } = host.admin.answer() else { panic!("expected a log page") };
    assert_eq!((pdu.command, data[0], data[4]), (id, 2, 0));
    assert_eq!(event(&mut host).1, 0x0004_0002, "it has changed again meanwhile");
    assert_eq!(host.admin.read(identify(0, 2)), Ok(vec![0; 4096]));
    assert_eq!(queue.ask(command(0x00, 2, &[])).status, NvmeStatus::INVALID_NAMESPACE.permanent());
    // Another device gets another number.
    let third = Export::new("third", "", false, second).unwrap();
    let third = target.exports.add(third).unwrap();
    target.wait_for("a new namespace", |_| true);
    assert_ne!(host.admin.read(identify(0, 3)), Ok(vec![0; 4096]));
    target.exports.remove(&third);
    // The same export, listed again, has its number again.
    target.exports.put(&third, "third again").unwrap();
    assert_ne!(host.admin.read(identify(0, 3)), Ok(vec![0; 4096]));
    target.exports.remove(&third);
    drop((host, queue));
    target.end();
}

#[test]
fn ana_states() {
    let target = TargetFixture::new();
    let mut host = target.host();
    let mut queue = host.queue(2, false);
    assert!(host.admin.ask(command(0x09, 0, &[0x0b, 1 << 11])).status.is_ok());
    for (changes, state, number, status) in [
        (1, AnaState::Inaccessible, 3, NvmeStatus::ANA_INACCESSIBLE),
        (2, AnaState::NonOptimized, 2, NvmeStatus::SUCCESS),
        (3, AnaState::PersistentLoss, 4, NvmeStatus::ANA_PERSISTENT_LOSS),
        (4, AnaState::Change, 15, NvmeStatus::ANA_TRANSITION),
        (5, AnaState::Optimized, 1, NvmeStatus::SUCCESS),
    ] {
        let id = request(&mut host);
        target.server.set_ana_state(None, None, state).unwrap();
        assert_eq!(event(&mut host), (id, 0x000c_0302));
        let page = host.admin.read(log_page(0x0c, 64)).unwrap();
        assert_eq!((page[0], page[32]), (changes, number));
        assert_eq!(queue.ask(command(0x00, 1, &[])).status, status, "{state:?}");
    }
    drop((host, queue));
    target.end();
}

/// Each device has a state of its own on each port.
#[test]
fn ana_states_of_devices_and_ports() {
    let target = TargetFixture::new();
    let second = Arc::new(TestDisk::new(SIZE, CompletionOrder::AtOnce));
    target.exports.add(Export::new("second", "", false, second).unwrap()).unwrap();
    let ports = target.server.bound().to_vec();
    assert_eq!(ports.len(), 2);
    let mut hosts = [0, 1].map(|port| ScriptedHost::connect(ports[port], 0));
    let mut queues = hosts.each_ref().map(|host| host.queue(1, false));
    for host in &mut hosts {
        assert!(host.admin.ask(command(0x09, 0, &[0x0b, 1 << 11])).status.is_ok());
    }
    let ids = hosts.each_mut().map(request);
    target.server.set_ana_state(Some(ports[1]), Some("second"), AnaState::Inaccessible).unwrap();
    assert_eq!(event(&mut hosts[1]), (ids[1], 0x000c_0302));
    let statuses = queues.each_mut().map(|queue| [1, 2].map(|nsid| queue.ask(command(0, nsid, &[])).status));
    let ok = NvmeStatus::SUCCESS;
    assert_eq!(statuses, [[ok, ok], [ok, NvmeStatus::ANA_INACCESSIBLE]]);
    let page = hosts[1].admin.read(log_page(0x0c, 96)).unwrap();
    // The number of changes of all, then group 1 and group 2 with their changes and states.
    assert_eq!((page[0], page[8], page[16], page[24], page[32]), (1, 2, 1, 0, 1));
    assert_eq!((page[52], page[60], page[68], page[84]), (2, 1, 3, 2));
    // The other port has not changed: its host gets no event.
    assert!(hosts[0].admin.ask(command(0x18, 0, &[])).status.is_ok());
    let unknown = "127.0.0.1:1".parse().unwrap();
    let error = target.server.set_ana_state(Some(unknown), None, AnaState::Optimized).unwrap_err();
    let known = format!("{}, {}", ports[0], ports[1]);
    assert_eq!(
        error.to_string(),
        format!("the target does not listen on {unknown}: its addresses are {known}")
    );
    drop((hosts, queues));
    target.end();
}

/// More requests than allowed are refused.
#[test]
fn event_requests_are_limited() {
    let target = TargetFixture::new();
    let mut host = target.host();
    for _ in 0..4 {
        request(&mut host);
    }
    let id = request(&mut host);
    let Answer::Response(completion) = host.admin.answer() else { panic!("expected a response") };
    let limit = NvmeStatus::ASYNC_EVENT_LIMIT_EXCEEDED.permanent();
    assert_eq!((completion.id, completion.status), (id, limit));
    drop(host);
    target.end();
}
