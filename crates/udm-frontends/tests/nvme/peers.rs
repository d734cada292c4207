//! Resets of controllers of other servers, with servers that answer what a test says, and resets
//! that another server asks for.

use super::fence::{answer, instance, log, reset};
use super::host::{Answer, BLOCK, WRITE, command, rw};
use super::{HOST, SIZE, TargetFixture, options};
use crate::disk::{CompletionOrder, TestDisk};
use std::sync::{Arc, Mutex};
use udm_frontends::nvme::{
    NvmePeerReset, NvmePeers, NvmeResetOutcome, NvmeResetReply, NvmeServerOptions, instance_tag,
};
use udm_wire::nvme::{
    ControllerInstance, CrossControllerReset, CrossControllerResetEntry, CrossControllerResetStatus,
    NvmeStatus,
};

/// Keeps the requests for the test.
#[derive(Debug, Default)]
struct ScriptedPeers(Mutex<Vec<(NvmePeerReset, NvmeResetReply)>>);

impl ScriptedPeers {
    fn take(&self) -> Option<(NvmePeerReset, NvmeResetReply)> {
        self.0.lock().unwrap().pop()
    }
}

impl NvmePeers for ScriptedPeers {
    fn reset(&self, request: NvmePeerReset, reply: NvmeResetReply) {
        self.0.lock().unwrap().push((request, reply));
    }
}

const OTHER: ControllerInstance = ControllerInstance { id: 5000, uniquifier: 3, random: 7 << 32 | 9 };

fn target(peers: &Arc<ScriptedPeers>) -> TargetFixture {
    let peers = Some(Arc::clone(peers) as Arc<dyn NvmePeers>);
    let options = NvmeServerOptions { controllers: 100..=102, peers, ..options() };
    TargetFixture::with(TestDisk::new(SIZE, CompletionOrder::AtOnce), options)
}

/// The command has the outcome that the other server tells; without an outcome it fails.
#[test]
fn a_peer_tells_the_outcome() {
    let peers = Arc::default();
    let target = target(&peers);
    let mut host = target.host();
    assert_eq!(host.controller, 100);
    let (success, invalid) = (NvmeStatus::SUCCESS, NvmeStatus::INVALID_FIELD.permanent());
    let failed = (NvmeStatus::INTERNAL_ERROR.permanent(), 0);
    for (outcome, expected) in [
        (Some(NvmeResetOutcome::Done), (success, CrossControllerReset::DONE)),
        (Some(NvmeResetOutcome::Refused), (invalid, 0)),
        (Some(NvmeResetOutcome::Failed), failed),
        (None, failed),
    ] {
        let id = reset(&mut host, OTHER);
        target.wait_for("a request to the peer", |_| !peers.0.lock().unwrap().is_empty());
        let again = reset(&mut host, OTHER);
        let in_progress = NvmeStatus::CROSS_CONTROLLER_RESET_IN_PROGRESS;
        assert_eq!(answer(&mut host.admin), (again, in_progress, 0));
        let (request, reply) = peers.take().unwrap();
        assert_eq!((request.impacted, request.tag(), &*request.host), (OTHER, 7, HOST));
        match outcome {
            Some(outcome) => reply.send(outcome),
            None => drop(reply),
        }
        assert_eq!(answer(&mut host.admin), (id, expected.0, expected.1), "{outcome:?}");
    }
    drop(host);
    target.end();
}

/// Resets that take long end with an event, and the log page has the outcomes. A reply for a host
/// that has gone has no effect.
#[test]
fn a_slow_peer() {
    let peers = Arc::default();
    let target = target(&peers);
    let mut host = target.host();
    assert!(host.admin.ask(command(0x09, 0, &[0x0b, 1 << 20])).status.is_ok());
    let event = host.admin.command(command(0x0c, 0, &[]), &[]);
    let other = ControllerInstance { id: 5001, ..OTHER };
    for impacted in [OTHER, other] {
        let id = reset(&mut host, impacted);
        assert_eq!(answer(&mut host.admin), (id, NvmeStatus::SUCCESS, 0), "in progress");
    }
    for (impacted, outcome) in [(other, NvmeResetOutcome::Done), (OTHER, NvmeResetOutcome::Failed)] {
        let (request, reply) = peers.take().unwrap();
        assert_eq!(request.impacted, impacted);
        reply.send(outcome);
    }
    assert_eq!(answer(&mut host.admin), (event, NvmeStatus::SUCCESS, 0x001e_f402));
    let entry = |impacted: ControllerInstance, status| CrossControllerResetEntry {
        impacted: impacted.id,
        uniquifier: impacted.uniquifier,
        source: host.controller,
        status,
    };
    let expected = [
        entry(OTHER, CrossControllerResetStatus::Failed),
        entry(other, CrossControllerResetStatus::Succeeded),
    ];
    let mut entries = log(&mut host, false);
    while entries != expected
        && entries.iter().any(|one| one.status == CrossControllerResetStatus::InProgress)
    {
        entries = log(&mut host, false);
    }
    assert_eq!(entries, expected);
    reset(&mut host, OTHER);
    target.wait_for("a request to the peer", |_| !peers.0.lock().unwrap().is_empty());
    drop(host);
    target.wait_for("the end of the host", |stats| stats.controllers == 0);
    peers.take().unwrap().1.send(NvmeResetOutcome::Done);
    target.end();
}

/// Another server asks for a reset: it is done when no request of the controller is at a device.
#[test]
fn a_peer_asks() {
    let peers = Arc::default();
    let target = target(&peers);
    let (mut lost, mut other) = (target.host(), target.host());
    let impacted = instance(&mut lost);
    assert_eq!((impacted.random >> 32) as u32, instance_tag(&[0; 32]));
    let mut queue = lost.queue(1, false);
    target.disk.hold_requests();
    queue.command(rw(WRITE, 0, 8, true), &[1; 8 * BLOCK]);
    target.wait_for("a request", |_| target.disk.held() == 1);
    let request = NvmePeerReset { impacted, host: HOST.into(), host_id: [9; 16] };
    let host_id = super::host::connect_data(0).host_id;
    assert!(target.server.reset_own_controller(&request).is_err(), "another host");
    let request = NvmePeerReset { host_id, ..request };
    let strange = ControllerInstance { random: impacted.random ^ 1 << 40, ..impacted };
    let strange = NvmePeerReset { impacted: strange, ..request.clone() };
    assert!(target.server.reset_own_controller(&strange).is_err(), "another server");
    let old = ControllerInstance { uniquifier: 9, ..impacted };
    let old = target.server.reset_own_controller(&NvmePeerReset { impacted: old, ..request.clone() });
    assert!(old.is_ok_and(|reset| reset.is_done()), "an instance that is gone");
    let reset = target.server.reset_own_controller(&request).unwrap_or_else(|why| panic!("{why}"));
    assert_eq!((queue.answer(), lost.admin.answer()), (Answer::End, Answer::End));
    assert!(!reset.is_done(), "the write may still land");
    target.disk.release_requests();
    target.wait_for("the end of the reset", |_| reset.is_done());
    assert!(other.admin.ask(command(0x18, 0, &[])).status.is_ok());
    drop((lost, other, queue));
    // Numbers of controllers stay in their range, and are used again.
    for _ in 0..4 {
        let host = target.host();
        assert!((100..=102).contains(&host.controller), "{}", host.controller);
    }
    target.end();
}
