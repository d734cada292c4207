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
//! `{object}`, `{qcow2}`, `{loop}`, `{loop4k}`, `{nbd}`, `{nbds}`, `{nvme}` and `{nvme_digests}`
//! are created for each use.

use crate::fixture::UnderlyingDevices;
use crate::world::CoresWithoutDevices;
use crate::world::{WorldKind, device_facts_over_lanes};
use crate::{DeviceFacts, InitialContent, RequestCheckingLayer};
use std::sync::Arc;
use udm_core::Device;
use udm_dm::MappedDevice;
use udm_dm::throttle::Throttle;

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
    /// Whether a virtual machine uses the device too.
    machine: bool,
    /// Limits of requests and bytes per second; empty for none.
    throttle: &'static str,
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
    pub ground: UnderlyingDevices,
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
    pub fn table(mut ground: UnderlyingDevices, lines: &str, fresh: InitialContent) -> CreatedDevice {
        let mapped = ground.mapped("s", lines);
        let facts = device_facts_over_lanes(&*mapped, RequestCheckingLayer::Table, fresh, 512);
        CreatedDevice { ground, device: mapped.clone(), mapped: Some(mapped), facts }
    }
}

const fn define_uri_device(name: &'static str, uri: &'static str) -> DeviceUnderTest {
    DeviceUnderTest {
        name,
        what: DeviceSpec::Device(uri),
        fresh: InitialContent::Zeroes,
        atom: 512,
        ring: false,
        machine: false,
        throttle: "",
    }
}

const fn define_table_device(
    name: &'static str,
    tables: &'static [(&'static str, &'static str)],
) -> DeviceUnderTest {
    DeviceUnderTest {
        name,
        what: DeviceSpec::Tables(tables),
        fresh: InitialContent::Zeroes,
        atom: 512,
        ring: false,
        machine: false,
        throttle: "",
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

    /// The device, a mapped one, has these limits of requests and bytes per second.
    const fn throttle(self, throttle: &'static str) -> DeviceUnderTest {
        DeviceUnderTest { throttle, ..self }
    }

    /// The device is also used by a virtual machine. To a front end, other devices are as one of
    /// these: they differ in limits, in how they store data, and in when requests wait or fail.
    const fn machine(self) -> DeviceUnderTest {
        DeviceUnderTest { machine: true, ..self }
    }

    /// True if the device has limits of requests or bytes per second.
    #[must_use]
    pub fn is_throttled(&self) -> bool {
        !self.throttle.is_empty()
    }

    /// The reason why the device is not available on this machine or in this world; `None` if it
    /// is.
    #[must_use]
    pub fn unmet_requirement(&self, kind: WorldKind) -> Option<&'static str> {
        if self.ring && kind == WorldKind::Stepped {
            return Some("it needs a ring");
        }
        if matches!(kind, WorldKind::VhostUser | WorldKind::Nvme) && !self.machine {
            return Some("to a virtual machine or host it is as another device");
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
        let mut ground = UnderlyingDevices::new();
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
                let mapped = made.expect("a device under test has at least one table");
                (mapped.clone() as Arc<dyn Device>, Some(mapped))
            }
        };
        if let (Some(mapped), Ok(limits)) = (&mapped, self.throttle.parse()) {
            mapped.set_throttle(Some(Throttle::new(limits)), &CoresWithoutDevices);
        }
        let boundary =
            if mapped.is_some() { RequestCheckingLayer::Table } else { RequestCheckingLayer::Backend };
        let facts = device_facts_over_lanes(&*device, boundary, self.fresh, self.atom);
        CreatedDevice { ground, device, mapped, facts }
    }
}

/// All devices under test.
pub const DEVICES_UNDER_TEST: &[DeviceUnderTest] = &[
    // Backends.
    define_uri_device("null", "null:size=2M").fresh(InitialContent::AlwaysZeroes),
    define_uri_device("null_timer", "null:size=2M,irqmode=2,completion_nsec=2000,hw_queue_depth=3")
        .fresh(InitialContent::AlwaysZeroes),
    define_uri_device("null_memory", "null:size=2M,memory_backed=1,discard=1,cache_size=1M").atom(8).machine(),
    define_uri_device(
        "null_blocks",
        "null:size=2M,bs=4096,memory_backed=1,max_sectors=256,fua=0,cache_size=1M",
    )
    .atom(8).machine(),
    define_uri_device("null_huge", "null:size=8388607T").fresh(InitialContent::AlwaysZeroes).machine(),
    define_uri_device("mem", "mem:2M").atom(8).machine(),
    define_uri_device("mem_huge", "mem:64T").atom(8),
    define_uri_device("pattern", "pattern:2M").fresh(InitialContent::Offsets).machine(),
    define_uri_device("pattern_huge", "pattern:8388607T").fresh(InitialContent::Offsets),
    define_uri_device("file", "{file}").ring().machine(),
    define_uri_device("file_direct", "file:{file}?direct=on").ring().machine(),
    define_uri_device("file_readonly", "file:{file}?readonly=on").ring().machine(),
    define_uri_device("file_huge", "{huge}").ring(),
    define_uri_device("qcow2", "file:{qcow2}?format=qcow2").fresh(InitialContent::Offsets).ring().machine(),
    define_uri_device("object", "{object}").fresh(InitialContent::Offsets).ring().machine(),
    define_uri_device("nbd", "{nbd}").atom(8).ring(),
    define_uri_device("nbd_tls", "{nbds}").atom(8).ring(),
    define_uri_device("nvme", "{nvme}").atom(8).ring(),
    define_uri_device("nvme_digests", "{nvme_digests}").atom(8).ring(),
    define_uri_device("block", "file:{loop}").ring(),
    define_uri_device("block_buffered", "file:{loop}?direct=off").ring(),
    define_uri_device("block_4k", "file:{loop4k}?direct=on").ring(),
    // Targets over strict disks.
    define_table_device("linear", &[("s", "0 4096 linear /d0 24")]),
    define_table_device("linear_cache", &[("s", "0 4096 linear /c0 24")]).machine(),
    define_table_device("linear_no_fua", &[("s", "0 4095 linear /n0 33")]).machine(),
    define_table_device("linear_blocks", &[("s", "0 4096 linear /k0 24")]).machine(),
    define_table_device("linear_plain", &[("s", "0 4096 linear /p0 24")]).machine(),
    define_table_device("throttled", &[("s", "0 4096 linear /d0 24")]).throttle("iops=500000:2 wbps=4G:64K").machine(),
    define_table_device("linear_readonly", &[("s", "0 4096 linear /r0 24")]).machine(),
    define_table_device(
        "lines",
        &[(
            "s",
            "0 1 linear /c0 4000\n1 9 linear /n0 7\n10 1002 striped 3 1 /c0 20 /c1 1000 /n0 2000\n1012 2600 linear /c1 1500",
        )],
    ).machine(),
    define_table_device("striped", &[("s", "0 4096 striped 2 8 /c0 24 /c1 48")]),
    define_table_device("striped_odd", &[("s", "0 4095 striped 3 7 /c0 1 /n0 0 /p0 3")]),
    define_table_device("round_robin", &[("s", "0 4096 multipath 0 0 1 1 round-robin 0 2 1 /c0a 3 /c0b 1")]).machine(),
    define_table_device(
        "queue_length",
        &[("s", "0 4096 multipath 0 0 1 1 queue-length 0 2 1 /c0a 128 /c0b 128")],
    ),
    define_table_device(
        "service_time",
        &[("s", "0 4096 multipath 0 0 1 1 service-time 0 2 2 /c0a 128 1 /c0b 64 2")],
    ),
    define_table_device(
        "historical_service_time",
        &[("s", "0 4096 multipath 0 0 1 1 historical-service-time 0 2 1 /c0a 1 /c0b 1")],
    ),
    define_table_device("io_affinity", &[("s", "0 4096 multipath 0 0 1 1 io-affinity 0 2 1 /c0a 1 /c0b 2")]),
    define_table_device(
        "multipath_bio",
        &[(
            "s",
            "0 4096 multipath 3 queue_if_no_path queue_mode bio 0 2 2 round-robin 0 1 1 /n0a 1 round-robin 0 1 1 /n0b 1",
        )],
    ),
    define_table_device("delay", &[("s", "0 4096 delay /c0 24 0")]),
    define_table_device("delay_apart", &[("s", "0 4096 delay /c0 24 0 /c0 24 1 /c0 24 0")]),
    define_table_device("flakey_up", &[("s", "0 4096 flakey /c0 24 3600 0")]),
    define_table_device("dust_off", &[("s", "0 4096 dust /c0 24 512")]),
    define_table_device("dust_blocks", &[("s", "0 4096 dust /c0 24 4096")]),
    define_table_device("log_writes", &[("s", "0 4096 log-writes /c0 mem:1G")]),
    define_table_device("snapshot_origin", &[("s", "0 4096 snapshot-origin /c0")]),
    define_table_device(
        "snapshot_origin_copies",
        &[("k", "0 4096 snapshot /c0 /c1 N 8"), ("s", "0 4096 snapshot-origin /c0")],
    ),
    define_table_device("snapshot", &[("s", "0 4096 snapshot /c0 /c1 P 8")]).machine(),
    define_table_device("snapshot_merge", &[("s", "0 4096 snapshot-merge /c0 /c1 P 8")]),
    define_table_device("clone", &[("s", "0 4096 clone /c1 /c0 /d0 8")]),
    define_table_device("clone_no_fua", &[("s", "0 4089 clone /c1 /n0 /p0 8 1 no_hydration")]).machine(),
    define_table_device("clone_blocks", &[("s", "0 4096 clone /c1 /k0 /p0 8 0 2 hydration_threshold 64")]),
    define_table_device("mirror", &[("s", "0 4096 mirror core 1 8 2 /c0 24 /c1 0")]).machine(),
    define_table_device("mirror_no_fua", &[("s", "0 4089 mirror core 2 16 sync 2 /d0 0 /n0 7")]),
    define_table_device("mirror_plain", &[("s", "0 4096 mirror core 1 8 2 /k0 8 /p0 0 1 handle_errors")]),
    define_table_device("mirror_in_sync", &[("s", "0 4096 mirror core 2 64 nosync 2 /c0 0 /c1 0")]),
    define_table_device(
        "clone_profile",
        &[("s", "0 4096 clone /c1 /c0 /d0 8 0 4 hydration_threshold 64 hydrate_first 3,100-200,9")],
    ),
    define_table_device("zero", &[("s", "0 4096 zero")]).fresh(InitialContent::AlwaysZeroes),
    define_table_device("stacked", &[("low", "0 4200 linear /c0 24"), ("s", "0 4096 striped 1 16 @low 8")]),
    define_table_device(
        "tower",
        &[
            ("a", "0 2100 linear /n0 24\n2100 2100 linear /c1 0"),
            ("b", "0 4200 delay @a 0 0"),
            ("c", "0 4096 multipath 2 queue_mode bio 0 1 1 round-robin 0 1 1 @b 1"),
            ("s", "0 4000 dust @c 8 4096"),
        ],
    ).machine(),
    // Targets over real devices.
    define_table_device("linear_nbd", &[("s", "0 4000 linear {nbd} 8")]).atom(8).ring(),
    define_table_device("linear_nvme", &[("s", "0 4000 linear {nvme} 8")]).atom(8).ring(),
    define_table_device("linear_file", &[("s", "0 4000 linear {file} 8")]).ring(),
    define_table_device(
        "striped_direct",
        &[("s", "0 4096 striped 2 16 file:{file}?direct=on 0 file:{file}?direct=on 512")],
    )
    .ring(),
    define_table_device("linear_huge", &[("s", "0 130000000000 linear mem:64T 8")]).atom(8).machine(),
    define_table_device("striped_huge", &[("s", "0 20000000000 striped 2 8 mem:6T 0 mem:7T 4096")]).atom(8),
];
