//! Resolution of names in tables and messages while files are created, removed, resized and
//! replaced.

use std::fs::{self, File};
use std::path::PathBuf;
use std::sync::Arc;
use tempfile::TempDir;
use udm_control::{DeviceRegistry, verbs};
use udm_core::{CoreCommandSender, CoreId, DeviceId, LaneCommand};

/// Cores without lanes: every command is acknowledged at once.
struct StubCores;

impl CoreCommandSender for StubCores {
    fn broadcast(&self, _: DeviceId, _: LaneCommand) {}
    fn wake_up(&self, _: CoreId, _: DeviceId) {}
    fn start(&self, _: udm_core::BioTaskFactory) -> udm_core::BioTaskHandle {
        udm_core::BioTaskHandle::new(drop)
    }
}

struct NamesFixture {
    registry: Arc<DeviceRegistry>,
    folder: TempDir,
}

impl NamesFixture {
    fn new() -> NamesFixture {
        NamesFixture {
            registry: DeviceRegistry::new(Arc::new(StubCores), 1),
            folder: TempDir::new().unwrap(),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().canonicalize().unwrap().join(name)
    }

    fn file(&self, name: &str, sectors: u64) {
        File::create(self.path(name)).unwrap().set_len(sectors * 512).unwrap();
    }

    /// A linear table over `word`: a number, or a path in the folder.
    fn table(&self, sectors: u64, word: &str) -> String {
        let is_number = word.starts_with(|c: char| c.is_ascii_digit());
        let word = if is_number { word.into() } else { self.path(word).display().to_string() };
        format!("0 {sectors} linear {word} 0")
    }

    /// Loads and resumes a table; the error as text.
    fn load(&self, name: &str, table: &str) -> Result<(), String> {
        let text = |e: udm_control::error::VerbError| e.to_string();
        if self.registry.find(name).is_err() {
            return verbs::block_on_verb(verbs::create_mapped_device(
                &self.registry,
                name,
                None,
                Some(table),
            ))
            .map_err(text);
        }
        verbs::load_inactive_table(&self.registry, name, table).map_err(text)?;
        verbs::block_on_verb(verbs::resume_mapped_devices(&self.registry, &[name])).map_err(text)
    }

    /// The device number in the table of `name`.
    fn number(&self, name: &str) -> String {
        let text = self.registry.find(name).unwrap().device.table_text(false);
        text.split(' ').find(|word| word.contains(':')).unwrap().into()
    }

    fn remove(&self, name: &str) {
        verbs::block_on_verb(verbs::remove_mapped_device(&self.registry, name)).unwrap();
    }
}

/// A number in a script never means another disk.
#[test]
fn a_file_that_is_replaced_has_another_number_and_its_old_one_when_it_is_back() {
    let world = NamesFixture::new();
    world.file("p", 8);
    world.load("d", &world.table(8, "p")).unwrap();
    assert_eq!(world.number("d"), "253:0");
    fs::rename(world.path("p"), world.path("old")).unwrap();
    world.file("new", 8);
    fs::rename(world.path("new"), world.path("p")).unwrap();
    assert_eq!(world.number("d"), "253:0", "nothing changes without a load");
    world.load("d", &world.table(8, "p")).unwrap();
    assert_eq!(world.number("d"), "253:1");
    let error = world.load("d", &world.table(8, "253:0")).unwrap_err();
    let p = world.path("p");
    let why = format!("253:0 was {}, which is another disk now; name it by its path", p.display());
    assert!(error.contains(&why), "{error}");
    fs::rename(world.path("old"), &p).unwrap();
    world.load("d", &world.table(8, "253:0")).unwrap();
    assert_eq!(world.number("d"), "253:0");
    world.load("d", &world.table(8, "p")).unwrap();
    assert_eq!(world.number("d"), "253:0");
    fs::remove_file(&p).unwrap();
    assert!(world.load("d", &world.table(8, "p")).unwrap_err().contains("No such file"));
    world.load("d", &world.table(8, "253:0")).expect("open, though its name is gone");
}

#[test]
fn names_of_one_disk_have_a_number_each_and_links_none_of_their_own() {
    let world = NamesFixture::new();
    world.file("a", 8);
    fs::hard_link(world.path("a"), world.path("b")).unwrap();
    std::os::unix::fs::symlink("a", world.path("link")).unwrap();
    for (device, name, number) in [("1", "a", "253:0"), ("2", "b", "253:1"), ("3", "link", "253:0")] {
        world.load(device, &world.table(8, name)).unwrap();
        assert_eq!(world.number(device), number, "{name}");
    }
    world.load("4", &world.table(8, "./b")).unwrap();
    assert_eq!(world.number("4"), "253:1");
    for device in ["1", "2", "3", "4"] {
        world.remove(device);
    }
    world.load("1", &world.table(8, "b")).unwrap();
    assert_eq!(world.number("1"), "253:1", "closed, and the same as before");
}

#[test]
fn a_device_grows_with_its_file_at_the_next_load() {
    let world = NamesFixture::new();
    world.file("p", 16);
    world.load("d", &world.table(16, "p")).unwrap();
    let file = File::options().write(true).open(world.path("p")).unwrap();
    file.set_len(32 * 512).unwrap();
    world.load("d", &world.table(32, "p")).unwrap();
    file.set_len(64 * 512).unwrap();
    world.load("d", &world.table(64, "253:0")).expect("by number as well");
    file.set_len(32 * 512).unwrap();
    let error = world.load("d", &world.table(64, "p")).unwrap_err();
    assert!(error.contains("p too small for target: start=0, len=64, dev_size=32"), "{error}");
    file.set_len(0).unwrap();
    let error = world.load("d", &world.table(32, "p")).unwrap_err();
    assert!(error.contains("shorter than a block"), "{error}");
}

/// A message finds the path in use, even if its name has led to other disks, without file system
/// access.
#[test]
fn messages_find_what_the_live_table_uses() {
    let world = NamesFixture::new();
    let p = world.path("p");
    // Not the canonical spelling.
    let spelt = format!("{}/./p", p.parent().unwrap().display());
    let table = format!("0 8 multipath 0 0 1 1 round-robin 0 2 0 {spelt} {}", world.path("q").display());
    world.file("p", 8);
    world.file("q", 8);
    world.load("mp", &table).unwrap();
    let status = || world.registry.find("mp").unwrap().device.status_text();
    let tell = |words: String| {
        verbs::send_target_message(&world.registry, "mp", 0, &words).map_err(|e| e.to_string())
    };
    // In the inactive table, that name leads to another disk.
    world.file("new", 8);
    fs::rename(world.path("new"), &p).unwrap();
    verbs::load_inactive_table(&world.registry, "mp", &table).unwrap();
    tell(format!("fail_path {}", p.display())).unwrap();
    assert!(status().contains("253:0 F") && status().contains("253:1 A"), "{}", status());
    fs::remove_file(&p).unwrap();
    for word in [p.display().to_string(), spelt, "253:0".into()] {
        tell(format!("reinstate_path {word}")).expect(&word);
        assert!(status().contains("253:0 A"), "{word}: {}", status());
        tell(format!("fail_path {word}")).expect(&word);
        assert!(status().contains("253:0 F"), "{word}: {}", status());
    }
    verbs::block_on_verb(verbs::resume_mapped_devices(&world.registry, &["mp"])).unwrap();
    tell(format!("fail_path {}", p.display())).unwrap();
    assert!(status().contains("253:2 F"), "{}", status());
}

/// Concurrent loads do not wait for each other, and still open a disk only once.
#[test]
fn loads_at_the_same_time_open_a_disk_once() {
    for round in 0..20 {
        let world = NamesFixture::new();
        world.file("p", 8);
        let barrier = std::sync::Barrier::new(4);
        std::thread::scope(|scope| {
            for i in 0..4 {
                let (world, barrier) = (&world, &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    world.load(&format!("d{i}"), &world.table(8, "p")).unwrap();
                });
            }
        });
        let ids = (0..4).map(|i| {
            assert_eq!(world.number(&format!("d{i}")), "253:0", "round {round}");
            let live = world.registry.find(&format!("d{i}")).unwrap().device.live().unwrap();
            live.targets()[0].target.devices()[0].device.device.id()
        });
        let ids: std::collections::BTreeSet<DeviceId> = ids.collect();
        assert_eq!(ids.len(), 1, "round {round}");
    }
}
