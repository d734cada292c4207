//! The devices below a device under test: disks, files, loop devices and mapped devices. They are
//! created on demand from the words of its line, and removed with it.

use crate::disk::SharedDiskMedium;
use crate::object_server::ObjectTestServer;
use crate::qcow2_image;
use crate::test_server::{NbdTestServer, NvmeTestTarget};
use crate::world::CoresWithoutDevices;
use crate::{STAMP, StrictMemoryDisk};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use tempfile::TempDir;
use udm_backends::BackendDeviceRegistry;
use udm_core::errno::ENOENT;
use udm_core::{DevNo, Device, Limits, Sectors, Status};
use udm_dm::{DeviceLookupError, DeviceNameResolver, MappedDevice, ResolvedDevice, Table};
use udm_object::ObjectClient;
use udm_runtime::TemporaryCoreIo;
use udm_wire::uri::{self, DeviceUri};

/// Sectors of each disk in memory. Devices under test leave a margin at both ends.
pub const DISK: u64 = 4224;

/// Bytes of each file.
const FILE: u64 = 2 << 20;

/// Cores of each world.
const CORES: usize = 2;

/// The devices below a device under test.
#[derive(Default)]
pub struct UnderlyingDevices {
    folder: Option<TempDir>,
    files: usize,
    loops: Vec<PathBuf>,
    servers: Vec<NbdTestServer>,
    targets: Vec<NvmeTestTarget>,
    object_servers: Vec<ObjectTestServer>,
    media: BTreeMap<String, Arc<SharedDiskMedium>>,
    known: BTreeMap<String, ResolvedDevice>,
    mapped: BTreeMap<String, Arc<MappedDevice>>,
}

/// The limits of the disk `/NAME`. The first letter selects its abilities. The number distinguishes
/// disks, and a letter after it paths to one disk.
fn disk_limits_by_name(name: &str) -> Limits {
    let base = Limits {
        max_sectors: Sectors(128),
        max_discard: Sectors(256),
        max_write_zeroes: Sectors(64),
        write_cache: true,
        ..Limits::new(Sectors(DISK))
    };
    match name.chars().next() {
        // No limits and no cache.
        Some('d') => Limits::new(Sectors(DISK)),
        // A cache, FUA and short requests.
        Some('c') => base,
        // A cache, no FUA, and odd lengths.
        Some('n') => Limits { fua: false, max_sectors: Sectors(31), ..base },
        // Blocks of 4096 bytes.
        Some('k') => Limits { logical_block: 4096, physical_block: 4096, io_min: 4096, ..base },
        // Neither discards nor zeroes.
        Some('p') => Limits { max_discard: Sectors::ZERO, max_write_zeroes: Sectors::ZERO, ..base },
        Some('r') => Limits { read_only: true, ..base },
        _ => panic!("no such disk: {name}"),
    }
}

impl UnderlyingDevices {
    /// Creates an empty fixture.
    #[must_use]
    pub fn new() -> UnderlyingDevices {
        UnderlyingDevices::default()
    }

    /// The folder for its files.
    pub fn folder(&mut self) -> &Path {
        self.folder.get_or_insert_with(|| TempDir::new().expect("a folder")).path()
    }

    /// Creates a sparse file of `bytes` bytes.
    pub fn file(&mut self, bytes: u64) -> PathBuf {
        self.files += 1;
        let name = format!("file{}", self.files);
        let path = self.folder().join(name);
        let file = std::fs::File::create(&path).expect("a file");
        file.set_len(bytes).expect("a file of that length");
        path
    }

    /// Creates a loop device over a new file.
    fn loop_device(&mut self, block: &str) -> PathBuf {
        let file = self.file(FILE);
        let (path, args) = (file.display().to_string(), ["--find", "--show", "-b", block]);
        let device = PathBuf::from(run_system_program("losetup", &[&args[..], &[&path]].concat()).trim());
        self.loops.push(device.clone());
        device
    }

    /// Starts an NBD server, which may require TLS, and returns the URI of its export.
    fn served(&mut self, has_tls: bool) -> String {
        let name = format!("nbd{}", self.servers.len());
        let path = self.folder().join(name);
        let (server, uri) = match has_tls {
            true => NbdTestServer::start_with_tls("mem:2M", &path),
            false => NbdTestServer::start("mem:2M", &path),
        };
        self.servers.push(server);
        uri.to_string()
    }

    /// Starts an NVMe/TCP target, and returns the URI of its namespace.
    fn namespace(&mut self) -> String {
        let (target, uri) = NvmeTestTarget::start("mem:2M");
        self.targets.push(target);
        uri.to_string()
    }

    /// Starts a web server, and returns the URI of its object, with the content of `pattern:2M`.
    fn object(&mut self) -> String {
        let server = ObjectTestServer::start(2 << 20);
        let uri = server.uri();
        self.object_servers.push(server);
        uri
    }

    /// Creates a qcow2 image with plain and compressed clusters, with the content of `pattern:2M`.
    fn qcow2(&mut self) -> PathBuf {
        let path = self.file(0);
        std::fs::write(&path, qcow2_image::make_pattern_image(2 << 20)).expect("an image");
        path
    }

    /// Replaces the placeholders in `words`: `{file}`, `{huge}` (a sparse file), `{object}`,
    /// `{qcow2}`, `{loop}`, `{loop4k}`, `{nbd}` (an export of a disk in memory), `{nbds}` (the same
    /// over TLS), `{nvme}` (a namespace with a disk in memory), `{nvme_digests}` (the same with
    /// digests and one queue).
    fn fill_in(&mut self, words: &str) -> String {
        let mut words = words.to_owned();
        while let Some(at) = words.find('{') {
            let end = at + words[at..].find('}').expect("a closing brace");
            let name = |path: PathBuf| path.display().to_string();
            let made = match &words[at + 1..end] {
                "file" => name(self.file(FILE)),
                "object" => self.object(),
                "qcow2" => name(self.qcow2()),
                "huge" => name(self.file(3 << 40)),
                "loop" => name(self.loop_device("512")),
                "loop4k" => name(self.loop_device("4096")),
                "nbd" => self.served(false),
                "nbds" => self.served(true),
                "nvme" => self.namespace(),
                "nvme_digests" => format!("{}?digest=header,data&queues=1", self.namespace()),
                other => panic!("no such place: {other}"),
            };
            words.replace_range(at..=end, &made);
        }
        words
    }

    /// Opens the device of a URI with placeholders. Returns its resolved URI and its size.
    pub fn device(&mut self, words: &str) -> (String, Sectors) {
        let words = self.fill_in(words);
        let size = self.known(&words).limits().size;
        (words, size)
    }

    /// The device for `word`, opened if necessary.
    pub fn known(&mut self, word: &str) -> Arc<dyn Device> {
        self.get(word).unwrap_or_else(|e| panic!("{word}: {} ({})", e.reason, e.errno)).device
    }

    /// Builds a table of these lines.
    pub fn table(&mut self, lines: &str) -> Arc<Table> {
        let lines = udm_wire::table::parse_table(&self.fill_in(lines)).expect("lines of a table");
        Table::build(udm_targets::TARGETS, &lines, self, &TemporaryCoreIo, CORES)
            .unwrap_or_else(|e| panic!("{e}"))
    }

    /// Makes an active mapped device with these lines. Tables can refer to it as `@name`.
    pub fn mapped(&mut self, name: &str, lines: &str) -> Arc<MappedDevice> {
        let number = DevNo { major: 254, minor: self.mapped.len() as u32 };
        let device = MappedDevice::new(name, None, number).expect("a good name");
        device.load(self.table(lines)).unwrap_or_else(|e| panic!("{e}"));
        let mut change = device.resume(Arc::new(|| {})).expect("nothing else changes it");
        change.step(&CoresWithoutDevices).expect("no core has to answer").expect("a resume");
        self.mapped.insert(format!("@{name}"), device.clone());
        device
    }

    /// Whether there are disks that lose their cache, and all other devices below lose no data.
    #[must_use]
    pub fn has_disks(&self) -> bool {
        let is_disk = |word: &str| word.starts_with('/') && self.media.contains_key(parse_disk_name(word));
        !self.media.is_empty() && self.known.keys().all(|word| is_disk(word) || word.starts_with("mem:"))
    }

    /// Whether the power of the devices below can be cut: all of them are disks, or have a power
    /// switch.
    #[must_use]
    pub fn has_power(&self) -> bool {
        let switched = |one: &ResolvedDevice| one.device.power().is_some();
        self.has_disks() || !self.known.is_empty() && self.known.values().all(switched)
    }

    /// Cuts the power of all disks.
    pub fn cut_power(&self) {
        self.media.values().for_each(|medium| medium.cut_power());
        for power in self.known.values().filter_map(|one| one.device.power()) {
            power.turn(false);
            power.turn(true);
        }
    }

    /// While `hold` is set, no disk completes requests.
    pub fn hold(&self, hold: bool) {
        self.media.values().for_each(|medium| medium.hold(hold));
    }

    /// Makes the sector that begins with `stamp` fail, on any disk.
    ///
    /// # Panics
    /// If no disk has the sector.
    pub fn inject_error(&self, stamp: [u8; STAMP], status: Status) {
        assert!(
            self.media.values().filter(|m| m.inject_error(stamp, status)).count() > 0,
            "the data is on no disk"
        );
    }

    /// The words of the paths to disks with more than one path.
    #[must_use]
    pub fn paths(&self) -> Vec<String> {
        let path = |word: &&String| word.starts_with('/') && self.media.contains_key(parse_disk_name(word));
        let words: Vec<&String> = self.known.keys().filter(path).collect();
        let several = |word: &&String| {
            words.iter().filter(|other| parse_disk_name(other) == parse_disk_name(word)).count() > 1
        };
        words.iter().copied().filter(several).cloned().collect()
    }

    /// Makes all requests to the path `word` fail with `status`.
    pub fn fail_path(&self, word: &str, status: Status) {
        self.media[parse_disk_name(word)].fail_path(self.known[word].device.id(), status);
    }

    /// Removes all injected errors.
    pub fn heal(&self) {
        self.media.values().for_each(|medium| medium.heal());
    }

    /// Checks that nothing is open.
    ///
    /// # Panics
    /// If a lane is open or a request is still in a disk.
    pub fn assert_unused(&self) {
        for (name, medium) in &self.media {
            assert_eq!(medium.in_use(), (0, 0), "lanes and requests of {name} after the end");
        }
    }
}

/// The disk of a word such as `/c0b`: its letter and number.
fn parse_disk_name(word: &str) -> &str {
    word.trim_start_matches('/').trim_end_matches(|c: char| c.is_ascii_alphabetic())
}

impl DeviceNameResolver for UnderlyingDevices {
    fn get(&mut self, word: &str) -> Result<ResolvedDevice, DeviceLookupError> {
        // A printed table has device numbers instead of names.
        let mapped = self.mapped.iter().map(|(name, device)| {
            let (number, name, device) = (device.number(), name.clone(), device.clone());
            ResolvedDevice { number, name, device, hold: None }
        });
        let mut all = self.known.values().cloned().chain(mapped);
        if let Some(known) = all.find(|known| known.name == word || known.number.to_string() == word) {
            return Ok(known);
        }
        let disk = parse_disk_name(word);
        let device: Arc<dyn Device> = if word.starts_with('/') && word.len() <= 4 {
            let medium = self
                .media
                .entry(disk.into())
                .or_insert_with(|| SharedDiskMedium::new(disk_limits_by_name(disk)));
            let path: Arc<StrictMemoryDisk> = medium.path();
            path
        } else {
            let uri: DeviceUri = uri::parse_device_uri(word)
                .map_err(|e| DeviceLookupError { errno: ENOENT, reason: e.to_string() })?;
            let objects = Box::new(ObjectClient::default());
            BackendDeviceRegistry::new(CORES)
                .with_objects(objects)
                .open(&uri)
                .map(|opened| opened.device)
                .map_err(|e| DeviceLookupError { errno: e.errno, reason: e.text })?
        };
        let number = DevNo { major: 253, minor: self.known.len() as u32 };
        let found = ResolvedDevice { number, name: word.into(), device, hold: None };
        self.known.insert(word.into(), found.clone());
        Ok(found)
    }
}

/// Runs a program of the system and returns its output.
///
/// # Panics
/// If the program fails.
pub fn run_system_program(program: &str, args: &[&str]) -> String {
    let out = Command::new(program).args(args).env("PATH", "/sbin:/usr/sbin:/bin:/usr/bin").output();
    let out = out.unwrap_or_else(|e| panic!("{program}: {e}"));
    assert!(out.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).into_owned()
}

impl Drop for UnderlyingDevices {
    fn drop(&mut self) {
        self.known.clear();
        self.mapped.clear();
        self.servers.clear();
        for device in &self.loops {
            let _ = Command::new("losetup").arg("-d").arg(device).env("PATH", "/sbin:/usr/sbin").status();
        }
    }
}
