//! Connect, the admin queue, and what a Linux host insists on.

use super::host::{
    Answer, Connection, ScriptedHost, command, connect_command, connect_data, identify, log_page,
    property_get, property_set, with_data,
};
use super::{HOST, SIZE, SUBSYSTEM, TargetFixture, options};
use crate::disk::{CompletionOrder, TestDisk};
use std::sync::Arc;
use std::time::Duration;
use udm_frontends::nbd::Exports;
use udm_frontends::nvme::{NvmeServer, NvmeServerOptions};
use udm_runtime::{Runtime, RuntimeOptions};
use udm_wire::nvme::{ConnectCommand, ConnectData, DISCOVERY_NQN, NvmeStatus};

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

/// The rules by which Linux accepts a controller, as one predicate over what it reads.
#[test]
fn a_linux_host_accepts_the_controller() {
    let target = TargetFixture::new();
    let mut host = target.host();
    let id = host.admin.read(identify(1, 0)).unwrap();
    let (mnan, groups) = (u32_at(&id, 540), u32_at(&id, 348));
    let checks = [
        ("the number of the controller", u16_at(&id, 78) == host.controller),
        ("keep alive", u16_at(&id, 320) > 0),
        ("capsules", u32_at(&id, 1792) >= 4 && u32_at(&id, 1796) >= 1),
        ("capsule data", (u32_at(&id, 1792) * 16 - 64) == 16 << 10 && u32_at(&id, 536) & 1 << 20 != 0),
        ("commands", u16_at(&id, 514) > 0 && u16_at(&id, 1800) == 0),
        ("SGLs", u32_at(&id, 536) & 1 == 1),
        ("ANA", id[76] & 8 == 8 && mnan > 0 && mnan <= u32_at(&id, 516) && id[342] > 0),
        ("the ANA log", 16 + groups * 32 + mnan * 4 <= 4096 << id[77]),
        ("the name", id[768..].starts_with(SUBSYSTEM.as_bytes())),
    ];
    for (what, is_right) in checks {
        assert!(is_right, "{what}");
    }
    // Namespaces and their identifiers.
    let list = host.admin.read(identify(2, 0)).unwrap();
    assert_eq!((u32_at(&list, 0), u32_at(&list, 4)), (1, 0));
    assert_eq!(u32_at(&host.admin.read(identify(2, 1)).unwrap(), 0), 0);
    let namespace = host.admin.read(identify(0, 1)).unwrap();
    assert_eq!((u32_at(&namespace, 0), namespace[130], u32_at(&namespace, 92)), ((SIZE / 512) as u32, 9, 1));
    let descriptors = host.admin.read(identify(3, 1)).unwrap();
    assert_eq!(
        (&descriptors[..2], &descriptors[20..22], &descriptors[40..42]),
        (&[2, 16][..], &[3, 16][..], &[4, 1][..])
    );
    assert_eq!(descriptors[4..20], namespace[104..120], "both are the same identifier");
    assert_ne!(descriptors[4..20], [0; 16]);
    assert_eq!(host.admin.read(identify(0, 7)), Ok(vec![0; 4096]), "an inactive namespace");
    let invalid = NvmeStatus::INVALID_NAMESPACE.permanent();
    for (structure, nsid) in [(0, 0), (0, u32::MAX), (0, 1025), (3, 2), (2, u32::MAX)] {
        assert_eq!(host.admin.read(identify(structure, nsid)), Err(invalid), "{structure} {nsid}");
    }
    // Log pages.
    let ana = host.admin.read(log_page(0x0c, 4096)).unwrap();
    assert_eq!((u16_at(&ana, 8), u32_at(&ana, 16), u32_at(&ana, 20)), (1, 1, 1));
    assert_eq!((ana[32], u32_at(&ana, 48)), (1, 1), "optimized, with namespace 1");
    for (page, len) in [(0x01, 64), (0x02, 512), (0x03, 512), (0x04, 4096)] {
        assert_eq!(host.admin.read(log_page(page, len)).map(|bytes| bytes.len()), Ok(len as usize));
    }
    assert_eq!(host.admin.read(log_page(0x70, 1024)), Err(NvmeStatus::INVALID_LOG_PAGE.permanent()));
    // Features: at most six queues are granted, two for each of two cores and two more.
    let queues = host.admin.ask(command(0x09, 0, &[0x07, 0x0007_0007]));
    assert_eq!((queues.status, queues.result), (NvmeStatus::SUCCESS, 0x0005_0005));
    assert_eq!(host.admin.ask(command(0x0a, 0, &[0x07])).result, 0x0005_0005);
    assert_eq!(host.admin.ask(command(0x0a, 0, &[0x06])).result, 1);
    assert!(host.admin.ask(command(0x18, 0, &[])).status.is_ok(), "keep alive");
    assert_eq!(host.admin.ask(command(0x08, 0, &[1 | 5 << 16])).result, 1, "not aborted");
    let host_id = host.admin.read(with_data(command(0x0a, 0, &[0x81, 1]), false, 16));
    assert_eq!(host_id, Ok(vec![7; 16]));
    assert_eq!(host.admin.ask(command(0x99, 0, &[])).status, NvmeStatus::INVALID_OPCODE.permanent());
    drop(host);
    target.end();
}

/// Each wrong Connect command gets its status, and then its connection is closed.
#[test]
fn wrong_connects() {
    let mut only_this_host = options();
    only_this_host.allowed_hosts = Some(vec![HOST.into()]);
    let target = TargetFixture::with(TestDisk::new(SIZE, CompletionOrder::AtOnce), only_this_host);
    let host = target.host();
    let parameters = NvmeStatus::CONNECT_INVALID_PARAMETERS.permanent();
    let admin = connect_command(0);
    let any = || connect_data(0xffff);
    let own = || connect_data(host.controller);
    let named =
        |subsystem: &str, host: &str| ConnectData { subsystem: subsystem.into(), host: host.into(), ..any() };
    let long = format!("nqn.2014-08.{}", "x".repeat(230));
    let other_host = "nqn.2014-08.org.nvmexpress:uuid:99999999-2222-4333-8444-555555555555";
    let format = NvmeStatus::CONNECT_INCOMPATIBLE_FORMAT.permanent();
    let invalid_host = NvmeStatus::CONNECT_INVALID_HOST.permanent();
    for (what, connect, data, status, result) in [
        ("format", ConnectCommand { format: 1, ..admin }, any(), format, 40),
        ("size 0", ConnectCommand { queue_size: 0, ..admin }, any(), parameters, 44),
        ("size 129", ConnectCommand { queue_size: 128, ..admin }, any(), parameters, 44),
        ("subsystem", admin, named("nqn.2014-08.org.example:x", HOST), parameters, 256 | 1 << 16),
        ("no subsystem", admin, named("", HOST), parameters, 256 | 1 << 16),
        ("a long subsystem", admin, named(&long, HOST), parameters, 256 | 1 << 16),
        ("no host", admin, named(SUBSYSTEM, ""), parameters, 512 | 1 << 16),
        ("a host that is not allowed", admin, named(SUBSYSTEM, other_host), invalid_host, 512 | 1 << 16),
        ("a static controller", admin, connect_data(1), parameters, 16 | 1 << 16),
        ("an unknown controller", connect_command(1), connect_data(999), parameters, 16 | 1 << 16),
        ("a third queue", connect_command(3), own(), parameters, 42),
        (
            "another host identifier",
            connect_command(1),
            ConnectData { host_id: [8; 16], ..own() },
            parameters,
            512 | 1 << 16,
        ),
    ] {
        let mut connection = target.connection();
        connection.initialize(false);
        let completion = connection.connect(&connect, &data);
        assert_eq!((completion.status, completion.result), (status, result), "{what}");
        assert_eq!(connection.answer(), Answer::End, "{what}");
    }
    // A name that is not UTF-8.
    let mut connection = target.connection();
    connection.initialize(false);
    let mut data = any().encode();
    data[520] = 0xff;
    connection.command(admin.encode(0), &data);
    assert_eq!(connection.answer().status(), parameters);
    // A queue connects once, and again after it was closed.
    let queue = host.queue(1, false);
    let mut again = target.connection();
    again.initialize(false);
    assert_eq!(again.connect(&connect_command(1), &own()).status, parameters);
    drop(queue);
    target.wait_for("the queue stays", |stats| stats.connections == 1);
    drop(host.queue(1, false));
    drop(host);
    target.end();
}

/// A controller executes nothing but commands of fabrics before it is enabled and after it is
/// disabled or shut down.
#[test]
fn enable_and_shut_down() {
    let target = TargetFixture::new();
    let mut connection = target.connection();
    connection.initialize(false);
    let controller = connection.connect(&connect_command(0), &connect_data(0xffff)).result as u16;
    let sequence = NvmeStatus::COMMAND_SEQUENCE_ERROR.permanent();
    assert_eq!(connection.read(identify(1, 0)), Err(sequence));
    let mut early = target.connection();
    early.initialize(false);
    assert_eq!(early.connect(&connect_command(1), &connect_data(controller)).status, sequence);
    assert_eq!(connection.ask(property_get(0x08)).result, 0x0001_0400);
    let capabilities = connection.ask(command(0x7f, 4, &[1, 0])).result;
    assert_eq!((capabilities & 0xffff, capabilities >> 37 & 1), (127, 1));
    let invalid = NvmeStatus::INVALID_FIELD.permanent();
    for wrong in [property_get(0x24), property_get(0), property_set(0x1c, 1), property_set(0x14, 0x0046_0011)]
    {
        assert_eq!(connection.ask(wrong).status, invalid);
    }
    let mut host = ScriptedHost::connect(target.server.bound()[0], 0);
    let mut queue: Connection = host.queue(1, false);
    assert!(queue.ask(command(0x00, 1, &[])).status.is_ok());
    assert_eq!(queue.ask(command(0x18, 0, &[])).status, NvmeStatus::INVALID_NAMESPACE.permanent());
    assert!(host.admin.ask(property_set(0x14, 0x0046_4001)).status.is_ok(), "shut down");
    host.wait_for_status(8);
    assert_eq!(queue.answer(), Answer::End, "its queues end");
    assert!(host.admin.ask(property_set(0x14, 0x0046_0000)).status.is_ok(), "disabled");
    host.wait_for_status(0);
    host.enable();
    let mut queue = host.queue(1, false);
    assert!(queue.ask(command(0x00, 1, &[])).status.is_ok());
    drop((connection, host, queue));
    target.end();
}

/// The discovery subsystem lists itself and, for a host that may use it, the other one.
#[test]
fn discovery() {
    let mut only_this_host = options();
    only_this_host.allowed_hosts = Some(vec![HOST.into()]);
    let target = TargetFixture::with(TestDisk::new(SIZE, CompletionOrder::AtOnce), only_this_host);
    for (name, count) in [(HOST, 2), ("nqn.2014-08.org.example:other", 1)] {
        let mut connection = target.connection();
        connection.initialize(false);
        let data = ConnectData { subsystem: DISCOVERY_NQN.into(), host: name.into(), ..connect_data(0xffff) };
        assert!(connection.connect(&connect_command(0), &data).status.is_ok());
        assert!(connection.ask(property_set(0x14, 0x0046_0001)).status.is_ok());
        let id = connection.read(identify(1, 0)).unwrap();
        assert_eq!((id[111], id[768..].starts_with(DISCOVERY_NQN.as_bytes())), (2, true));
        let log = connection.read(log_page(0x70, 3072)).unwrap();
        assert_eq!(u32_at(&log, 8), count);
        let port = target.server.bound()[0].port().to_string();
        let entry = &log[1024 * count as usize..];
        assert!(entry.starts_with(&[3, 1, if count == 2 { 2 } else { 3 }]), "{:?}", &entry[..8]);
        assert!(entry[32..].starts_with(port.as_bytes()) && entry[512..].starts_with(b"127.0.0.1 "));
        assert_eq!(entry[256..].starts_with(SUBSYSTEM.as_bytes()), count == 2);
        assert_eq!(connection.read(identify(0, 1)), Err(NvmeStatus::INVALID_FIELD.permanent()));
        assert_eq!(connection.read(log_page(0x0c, 64)), Err(NvmeStatus::INVALID_LOG_PAGE.permanent()));
    }
    target.end();
}

/// Names that no target can have.
#[test]
fn wrong_names_are_refused() {
    let spin_max = Duration::from_micros(20);
    let runtime = Runtime::start(&RuntimeOptions { cpus: vec![None], poll: false, spin_max }).unwrap();
    let start = |subsystem: &str, host: Option<&str>| {
        let options = NvmeServerOptions {
            subsystem: subsystem.into(),
            allowed_hosts: host.map(|host| vec![host.into()]),
            ..options()
        };
        let server = NvmeServer::start(runtime.core_set(), &Arc::new(Exports::new()), options, &[]);
        server.map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(start(SUBSYSTEM, Some(HOST)), Ok(()));
    for (subsystem, host, why) in [
        ("disks", None, "\"disks\": a name begins with nqn.YYYY-MM."),
        ("", None, "\"\": a name has 1 to 223 bytes"),
        (
            SUBSYSTEM,
            Some("nqn.2014-08.a\nb"),
            "\"nqn.2014-08.a\\nb\": a name is UTF-8 without control characters",
        ),
        (
            DISCOVERY_NQN,
            None,
            "nqn.2014-08.org.nvmexpress.discovery is the name of the discovery subsystem: choose another one",
        ),
    ] {
        assert_eq!(start(subsystem, host), Err(why.to_owned()));
    }
    runtime.stop();
}
