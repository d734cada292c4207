//! Tests of the facts: what our own controller reports is accepted, and each violation is refused.

use super::*;
use crate::nvme::{
    AnaGroup, ControllerKind, FenceCapabilities, IdentifyController, IdentifyNamespace, encode_ana_log,
    encode_namespace_descriptors,
};

const CAPABILITIES: u64 = 127;

fn controller() -> [u8; IDENTIFY_SIZE] {
    IdentifyController {
        kind: ControllerKind::Io,
        serial: "1",
        model: "m",
        firmware: "1",
        subsystem: "nqn.2014-08.x",
        id: 7,
        version: 0x0002_0000,
        transfer_max_log2: 8,
        capsule_data_max: 16 << 10,
        commands_max: 128,
        namespaces_max: 1024,
        event_requests_max: 4,
        ana_transition_max: 10,
        ana_groups: 2,
        keep_alive_granularity: 10,
        fence: FenceCapabilities { instance: None, resets_max: 0, quiesce_time_ms: 700 },
    }
    .encode()
}

fn namespace() -> [u8; IDENTIFY_SIZE] {
    IdentifyNamespace {
        blocks: 1000,
        block_log2: 12,
        preferred_write: 1,
        optimal_write: 0,
        is_thin: true,
        is_read_only: false,
        ana_group: 2,
        nguid: [3; 16],
    }
    .encode()
}

#[test]
fn our_own_controller_is_accepted() {
    let facts = ControllerFacts::decode(&controller(), 7, CAPABILITIES).unwrap();
    assert_eq!((facts.queue_entries, facts.transfer_max), (128, 1 << 20));
    assert_eq!((facts.capsule_data_max, facts.ana_groups), (16 << 10, 2));
    assert_eq!((facts.quiesce, facts.keep_alive_step), (Nanos::from_millis(700), Nanos::from_millis(1000)));
    assert!(facts.has_ana && !facts.is_traffic_based && facts.reports_changes);
    let descriptors = encode_namespace_descriptors(&[3; 16], &[4; 16]);
    let found = NamespaceFacts::decode(1, &namespace(), &descriptors, &facts).unwrap();
    assert_eq!((found.size, found.limits.logical_block, found.ana_group), (4_096_000, 4096, 2));
    assert_eq!(found.id, NamespaceId { nguid: [3; 16], eui64: [0; 8], uuid: [4; 16] });
    assert_eq!(found.id.wwid().unwrap(), "uuid.04040404-0404-0404-0404-040404040404");
    assert_eq!(found.limits.max_sectors, Sectors::from_bytes(1 << 20));
    assert!(found.limits.write_cache && !found.limits.read_only && !found.zeroes_deallocate);
}

/// Each field that Linux insists on, with a wrong value.
#[test]
fn a_controller_that_linux_refuses_is_refused() {
    for (at, bytes, why) in [
        (78, &[8, 0][..], "Identify says 8"),
        (111, &[2], "discovery"),
        (320, &[0, 0], "KAS"),
        (1792, &[3, 0, 0, 0], "IOCCSZ"),
        (1796, &[0, 0, 0, 0], "IORCSZ"),
        (1800, &[1, 0], "ICDOFF"),
        (514, &[0, 0], "MAXCMD"),
        (536, &[0, 0, 0, 0], "SGLs"),
    ] {
        let mut wrong = controller();
        wrong[at..at + bytes.len()].copy_from_slice(bytes);
        let error = ControllerFacts::decode(&wrong, 7, CAPABILITIES).unwrap_err();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn a_namespace_that_udm_cannot_use_is_refused() {
    let facts = ControllerFacts::decode(&controller(), 7, CAPABILITIES).unwrap();
    let none = [0; IDENTIFY_SIZE];
    for (at, bytes, why) in [
        (0, &[0; 8][..], "no namespace 5"),
        (128, &[8, 0, 12, 0], "metadata"),
        (130, &[8], "2^8"),
        (130, &[17], "2^17"),
        (0, &[0xff; 8], "EiB"),
    ] {
        let mut wrong = namespace();
        wrong[at..at + bytes.len()].copy_from_slice(bytes);
        let error = NamespaceFacts::decode(5, &wrong, &none, &facts).unwrap_err();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn the_state_of_a_group_is_found() {
    let group =
        |id, state, namespaces: &[u32]| AnaGroup { id, changes: 1, state, namespaces: namespaces.into() };
    let groups = [group(1, AnaState::Inaccessible, &[1, 2, 3]), group(2, AnaState::NonOptimized, &[4])];
    for groups_only in [false, true] {
        let log = encode_ana_log(3, &groups, groups_only);
        assert_eq!(find_ana_state(&log, 1), Some(AnaState::Inaccessible));
        assert_eq!(find_ana_state(&log, 2), Some(AnaState::NonOptimized));
        assert_eq!(find_ana_state(&log, 3), None);
        assert_eq!(find_ana_state(&log[..log.len() - 30], 2), None, "cut");
    }
    // A number of namespaces that no log can have.
    let mut log = encode_ana_log(3, &groups, false);
    log[20..24].fill(0xff);
    assert_eq!(find_ana_state(&log, 2), None);
    assert_eq!(find_ana_state(&[], 1), None);
    let states = [
        AnaState::Optimized,
        AnaState::NonOptimized,
        AnaState::Inaccessible,
        AnaState::PersistentLoss,
        AnaState::Change,
    ];
    assert_eq!(states.map(ana_priority), [50, 10, 5, 1, 0]);
    assert_eq!(states.map(is_usable), [true, true, false, false, false]);
}
