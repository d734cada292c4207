//! The list of devices that the conformance suite tests. One line here runs the whole suite on a
//! new backend or target. `tests/battery.rs` has a test that fails if one has no line.
//!
//! Words in tables refer to disks in memory by a letter (see `fixture`):
//! * `/d0` accepts all requests;
//! * `/c0` has a cache;
//! * `/n0` has no FUA;
//! * `/k0` has blocks of 4096 bytes;
//! * `/p0` supports neither discards nor zeroes;
//! * `/r0` is read-only.
//!
//! A letter at the end (`/c0a`, `/c0b`) means a path to the same disk. `{file}`, `{huge}`,
//! `{loop}`, `{loop4k}` and `{nbd}` are created for each use.

use crate::fixture::Fixture;
use crate::world::{WorldKind, lane_facts};
use crate::{CheckingLayer, DeviceFacts, InitialContent};
use std::sync::Arc;
use udm_core::Device;
use udm_dm::MappedDevice;

/// A device under test.
#[derive(Clone, Copy, Debug)]
pub struct DeviceUnderTest {
    /// The name, used in the names of tests.
    pub name: &'static str,
    what: DeviceSpec,
    fresh: InitialContent,
    atom: usize,
    /// Whether the device needs a core with a ring.
    ring: bool,
}

#[derive(Clone, Copy, Debug)]
enum DeviceSpec {
    /// A device by its URI.
    Device(&'static str),
    /// Mapped devices from the bottom up, with name and table. The last one is the device under
    /// test.
    Tables(&'static [(&'static str, &'static str)]),
}

/// A device under test that exists, with its fixture.
pub struct CreatedDevice {
    /// The devices below.
    pub ground: Fixture,
    /// The device.
    pub device: Arc<dyn Device>,
    /// The same device, if it is a mapped device.
    pub mapped: Option<Arc<MappedDevice>>,
    /// The properties of the device.
    pub facts: DeviceFacts,
}

impl CreatedDevice {
    /// Makes a mapped device with a table of these lines over `ground`.
    #[must_use]
    pub fn table(mut ground: Fixture, lines: &str, fresh: InitialContent) -> CreatedDevice {
        let mapped = ground.mapped("s", lines);
        let facts = lane_facts(&*mapped, CheckingLayer::Table, fresh, 512);
        CreatedDevice { ground, device: mapped.clone(), mapped: Some(mapped), facts }
    }
}

const fn device(name: &'static str, uri: &'static str) -> DeviceUnderTest {
    DeviceUnderTest {
        name,
        what: DeviceSpec::Device(uri),
        fresh: InitialContent::Zeroes,
        atom: 512,
        ring: false,
    }
}

const fn table(name: &'static str, tables: &'static [(&'static str, &'static str)]) -> DeviceUnderTest {
    DeviceUnderTest {
        name,
        what: DeviceSpec::Tables(tables),
        fresh: InitialContent::Zeroes,
        atom: 512,
        ring: false,
    }
}

impl DeviceUnderTest {
    const fn fresh(self, fresh: InitialContent) -> DeviceUnderTest {
        DeviceUnderTest { fresh, ..self }
    }

    const fn atom(self, atom: usize) -> DeviceUnderTest {
        DeviceUnderTest { atom, ..self }
    }

    const fn ring(self) -> DeviceUnderTest {
        DeviceUnderTest { ring: true, ..self }
    }

    /// The reason why the device is not available on this machine or in this world; `None` if it
    /// is.
    #[must_use]
    pub fn unmet_requirement(&self, kind: WorldKind) -> Option<&'static str> {
        if self.ring && kind == WorldKind::Stepped {
            return Some("it needs a ring");
        }
        let needs_loop = self.words().any(|words| words.contains("{loop"));
        let has_loop =
            rustix::process::getuid().is_root() && std::path::Path::new("/dev/loop-control").exists();
        (needs_loop && !has_loop).then_some("it needs root and loop devices")
    }

    /// The words of its line: a URI, or its tables.
    pub fn words(&self) -> impl Iterator<Item = &'static str> {
        let (uri, tables) = match self.what {
            DeviceSpec::Device(uri) => (Some(uri), &[][..]),
            DeviceSpec::Tables(tables) => (None, tables),
        };
        uri.into_iter().chain(tables.iter().map(|(_, lines)| *lines))
    }

    /// Makes the device for a world of `kind`. A server exports mapped devices, so a backend gets a
    /// table of one line.
    #[must_use]
    pub fn make(&self, kind: WorldKind) -> CreatedDevice {
        let mut ground = Fixture::new();
        let (device, mapped) = match self.what {
            DeviceSpec::Device(uri) if kind.is_served() => {
                let (word, size) = ground.device(uri);
                let mapped = ground.mapped("s", &format!("0 {size} linear {word} 0"));
                (mapped.clone() as Arc<dyn Device>, Some(mapped))
            }
            DeviceSpec::Device(uri) => {
                let (word, _) = ground.device(uri);
                (ground.known(&word), None)
            }
            DeviceSpec::Tables(tables) => {
                let made = tables.iter().map(|(name, lines)| ground.mapped(name, lines)).last();
                let mapped = made.expect("a subject has a table");
                (mapped.clone() as Arc<dyn Device>, Some(mapped))
            }
        };
        let boundary = if mapped.is_some() { CheckingLayer::Table } else { CheckingLayer::Backend };
        let facts = lane_facts(&*device, boundary, self.fresh, self.atom);
        CreatedDevice { ground, device, mapped, facts }
    }
}

/// All devices under test.
pub const DEVICES_UNDER_TEST: &[DeviceUnderTest] = &[
    // Backends.
    device("null", "null:size=2M").fresh(InitialContent::AlwaysZeroes),
    device("null_timer", "null:size=2M,irqmode=2,completion_nsec=2000,hw_queue_depth=3")
        .fresh(InitialContent::AlwaysZeroes),
    device("null_memory", "null:size=2M,memory_backed=1,discard=1,cache_size=1M").atom(8),
    device("null_blocks", "null:size=2M,bs=4096,memory_backed=1,max_sectors=256,fua=0,cache_size=1M").atom(8),
    device("null_huge", "null:size=8388607T").fresh(InitialContent::AlwaysZeroes),
    device("mem", "mem:2M").atom(8),
    device("mem_huge", "mem:64T").atom(8),
    device("pattern", "pattern:2M").fresh(InitialContent::Offsets),
    device("pattern_huge", "pattern:8388607T").fresh(InitialContent::Offsets),
    device("file", "{file}").ring(),
    device("file_direct", "file:{file}?direct=on").ring(),
    device("file_readonly", "file:{file}?readonly=on").ring(),
    device("file_huge", "{huge}").ring(),
    device("nbd", "{nbd}").atom(8).ring(),
    device("block", "file:{loop}").ring(),
    device("block_buffered", "file:{loop}?direct=off").ring(),
    device("block_4k", "file:{loop4k}?direct=on").ring(),
    // Targets over strict disks.
    table("linear", &[("s", "0 4096 linear /d0 24")]),
    table("linear_cache", &[("s", "0 4096 linear /c0 24")]),
    table("linear_no_fua", &[("s", "0 4095 linear /n0 33")]),
    table("linear_blocks", &[("s", "0 4096 linear /k0 24")]),
    table("linear_plain", &[("s", "0 4096 linear /p0 24")]),
    table("linear_readonly", &[("s", "0 4096 linear /r0 24")]),
    table(
        "lines",
        &[(
            "s",
            "0 1 linear /c0 4000\n1 9 linear /n0 7\n10 1002 striped 3 1 /c0 20 /c1 1000 /n0 2000\n1012 2600 linear /c1 1500",
        )],
    ),
    table("striped", &[("s", "0 4096 striped 2 8 /c0 24 /c1 48")]),
    table("striped_odd", &[("s", "0 4095 striped 3 7 /c0 1 /n0 0 /p0 3")]),
    table("round_robin", &[("s", "0 4096 multipath 0 0 1 1 round-robin 0 2 1 /c0a 3 /c0b 1")]),
    table("queue_length", &[("s", "0 4096 multipath 0 0 1 1 queue-length 0 2 1 /c0a 128 /c0b 128")]),
    table("service_time", &[("s", "0 4096 multipath 0 0 1 1 service-time 0 2 2 /c0a 128 1 /c0b 64 2")]),
    table(
        "historical_service_time",
        &[("s", "0 4096 multipath 0 0 1 1 historical-service-time 0 2 1 /c0a 1 /c0b 1")],
    ),
    table("io_affinity", &[("s", "0 4096 multipath 0 0 1 1 io-affinity 0 2 1 /c0a 1 /c0b 2")]),
    table(
        "multipath_bio",
        &[(
            "s",
            "0 4096 multipath 3 queue_if_no_path queue_mode bio 0 2 2 round-robin 0 1 1 /n0a 1 round-robin 0 1 1 /n0b 1",
        )],
    ),
    table("delay", &[("s", "0 4096 delay /c0 24 0")]),
    table("delay_apart", &[("s", "0 4096 delay /c0 24 0 /c0 24 1 /c0 24 0")]),
    table("flakey_up", &[("s", "0 4096 flakey /c0 24 3600 0")]),
    table("dust_off", &[("s", "0 4096 dust /c0 24 512")]),
    table("dust_blocks", &[("s", "0 4096 dust /c0 24 4096")]),
    table("log_writes", &[("s", "0 4096 log-writes /c0 mem:1G")]),
    table("snapshot_origin", &[("s", "0 4096 snapshot-origin /c0")]),
    table(
        "snapshot_origin_copies",
        &[("k", "0 4096 snapshot /c0 /c1 N 8"), ("s", "0 4096 snapshot-origin /c0")],
    ),
    table("snapshot", &[("s", "0 4096 snapshot /c0 /c1 P 8")]),
    table("snapshot_merge", &[("s", "0 4096 snapshot-merge /c0 /c1 P 8")]),
    table("zero", &[("s", "0 4096 zero")]).fresh(InitialContent::AlwaysZeroes),
    table("stacked", &[("low", "0 4200 linear /c0 24"), ("s", "0 4096 striped 1 16 @low 8")]),
    table(
        "tower",
        &[
            ("a", "0 2100 linear /n0 24\n2100 2100 linear /c1 0"),
            ("b", "0 4200 delay @a 0 0"),
            ("c", "0 4096 multipath 2 queue_mode bio 0 1 1 round-robin 0 1 1 @b 1"),
            ("s", "0 4000 dust @c 8 4096"),
        ],
    ),
    // Targets over real devices.
    table("linear_nbd", &[("s", "0 4000 linear {nbd} 8")]).atom(8).ring(),
    table("linear_file", &[("s", "0 4000 linear {file} 8")]).ring(),
    table(
        "striped_direct",
        &[("s", "0 4096 striped 2 16 file:{file}?direct=on 0 file:{file}?direct=on 512")],
    )
    .ring(),
    table("linear_huge", &[("s", "0 130000000000 linear mem:64T 8")]).atom(8),
    table("striped_huge", &[("s", "0 20000000000 striped 2 8 mem:6T 0 mem:7T 4096")]).atom(8),
];
