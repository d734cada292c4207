//! A store has one owner, in whatever order its tables are loaded, become live and are removed.

use crate::rig::{SIZE, SnapshotRig, filled_write};
use udm_core::Status;
use udm_core::errno::EINVAL;

const TABLE: &str = "0 128 snapshot O W P 8";
const CHUNKS: u64 = 16;

/// An action of one of two clients on one of two devices.
#[derive(Clone, Copy, Debug, PartialEq)]
enum ClientAction {
    Load(usize),
    Resume(usize),
    Suspend(usize),
    Remove(usize),
    /// Both devices in one change.
    ResumeBoth,
}

const NAMES: [&str; 2] = ["a", "b"];

const VERBS: [ClientAction; 9] = [
    ClientAction::Load(0),
    ClientAction::Load(1),
    ClientAction::Resume(0),
    ClientAction::Resume(1),
    ClientAction::Suspend(0),
    ClientAction::Suspend(1),
    ClientAction::Remove(0),
    ClientAction::Remove(1),
    ClientAction::ResumeBoth,
];

struct OwnershipModel {
    host: SnapshotRig,
    /// The content of each chunk of the snapshot, from its first resume on.
    snapshot: Option<Vec<u8>>,
    origin: Vec<u8>,
    /// The origin was written while no device had the snapshot: the snapshot is no instant any
    /// more.
    is_tainted: bool,
    byte: u8,
}

impl OwnershipModel {
    fn new() -> OwnershipModel {
        let mut host = SnapshotRig::new(1);
        host.disk("O", CHUNKS * 8);
        host.disk("W", 64 * 8);
        host.create("od", "0 128 snapshot-origin O").unwrap();
        NAMES.iter().for_each(|name| host.make(name));
        OwnershipModel { host, snapshot: None, origin: vec![0; CHUNKS as usize], is_tainted: false, byte: 0 }
    }

    /// The devices that own the snapshot and are in use.
    fn owners(&self) -> Vec<&'static str> {
        let has_it = |name: &&str| {
            let device = self.host.device(name);
            device.live().is_some() && self.host.status(name) != "Invalid"
        };
        NAMES.into_iter().filter(has_it).collect()
    }

    fn take(&mut self, verb: ClientAction) {
        match verb {
            ClientAction::Load(which) => drop(self.host.load(NAMES[which], TABLE)),
            ClientAction::Resume(which) => drop(self.host.resume(&[NAMES[which]])),
            ClientAction::ResumeBoth => drop(self.host.resume(&NAMES)),
            ClientAction::Suspend(which) => drop(self.host.suspend(&[NAMES[which]])),
            ClientAction::Remove(which) => {
                self.host.remove(NAMES[which]);
                self.host.make(NAMES[which]);
            }
        }
    }

    /// Writes the origin and the snapshot, and reads both.
    fn check(&mut self, said: &dyn Fn() -> String) {
        let owners = self.owners();
        assert!(owners.len() <= 1, "{owners:?} have one store: {}", said());
        if self.snapshot.is_none() && !owners.is_empty() {
            self.snapshot = Some(self.origin.clone());
        }
        self.is_tainted |= self.snapshot.is_some() && owners.is_empty();
        self.byte += 1;
        let at = u64::from(self.byte) * 3 % CHUNKS;
        assert_eq!(self.host.write("od", at * 8, 8, self.byte), Status::Ok, "{}", said());
        self.origin[at as usize] = self.byte;
        let running = owners.first().copied().filter(|name| !self.host.device(name).is_suspended());
        let Some((name, snapshot)) = running.zip(self.snapshot.as_mut()).filter(|_| !self.is_tainted) else {
            return;
        };
        let at = u64::from(self.byte) * 5 % CHUNKS;
        let status = self.host.write(name, at * 8, 8, 100 + self.byte);
        assert_eq!(status, Status::Ok, "{}", said());
        snapshot[at as usize] = 100 + self.byte;
        for chunk in 0..CHUNKS {
            let found = self.host.read(name, chunk * 8, 1).unwrap()[0];
            assert_eq!(found, snapshot[chunk as usize], "chunk {chunk} of {name}: {}", said());
        }
    }
}

/// Every order of five verbs of two clients.
#[test]
fn no_order_of_verbs_loses_a_write() {
    let mut worlds = 0;
    for number in 0..VERBS.len().pow(5) {
        let verbs: Vec<ClientAction> =
            (0..5).map(|at| VERBS[number / VERBS.len().pow(at) % VERBS.len()]).collect();
        // The devices are symmetric, so only sequences that begin with the first are tried.
        if !matches!(verbs[0], ClientAction::Load(0)) {
            continue;
        }
        let mut world = OwnershipModel::new();
        for at in 0..verbs.len() {
            world.take(verbs[at]);
            world.check(&|| format!("{:?}", &verbs[..=at]));
        }
        worlds += 1;
    }
    assert_eq!(worlds, VERBS.len().pow(4));
}

fn world() -> SnapshotRig {
    OwnershipModel::new().host
}

/// Two clients load and resume the same table at once.
#[test]
fn of_two_loads_for_one_handover_both_have_it() {
    let mut host = world();
    host.load("a", TABLE).unwrap();
    host.resume(&["a"]).unwrap();
    assert_eq!(host.write("a", 0, 8, b'1'), Status::Ok);
    // Two tables are built while the first is live. The second is loaded after the first took over.
    let second = host.build(TABLE).unwrap();
    host.load("a", TABLE).unwrap();
    host.resume(&["a"]).unwrap();
    assert_eq!(host.write("a", 8, 8, b'2'), Status::Ok);
    host.load_built("a", second).unwrap();
    host.resume(&["a"]).unwrap();
    assert_eq!(host.write("od", 16, 8, b'X'), Status::Ok);
    assert_eq!((host.read("a", 0, 1).unwrap()[0], host.read("a", 8, 1).unwrap()[0]), (b'1', b'2'));
    assert_eq!(host.read("a", 16, 1).unwrap()[0], 0);
}

#[test]
fn a_store_that_was_in_use_since_is_read_again() {
    let mut host = world();
    host.load("a", TABLE).unwrap();
    host.load("b", TABLE).unwrap();
    host.resume(&["b"]).unwrap();
    assert_eq!(host.write("od", 0, 8, b'X'), Status::Ok);
    host.remove("b");
    let error = host.resume(&["a"]).unwrap_err();
    assert_eq!(error.errno, EINVAL);
    assert!(error.to_string().contains("since this table was loaded: load it again"), "{error}");
    host.load("a", TABLE).unwrap();
    host.resume(&["a"]).unwrap();
    assert_eq!(host.read("a", 0, 1).unwrap()[0], 0, "what was copied for b");
}

#[test]
fn two_of_one_change_have_no_store_in_common() {
    let mut host = world();
    NAMES.iter().for_each(|name| host.load(name, TABLE).unwrap());
    let error = host.resume(&NAMES).unwrap_err();
    assert!(error.to_string().contains("becomes live at the same time"), "{error}");
    host.resume(&["b"]).unwrap();
    assert_eq!(host.status("b"), "16/512 16");
    let error = host.resume(&["a"]).unwrap_err();
    assert!(error.to_string().contains("pairing"), "{error}");
}

/// The table that takes a snapshot over may be longer, up to the capacity of the map.
#[test]
fn a_longer_table_takes_over() {
    let mut host = SnapshotRig::new(1);
    let origin = host.disk("O", 3 << 20);
    host.disk("W", SIZE);
    host.create("od", "0 3145728 snapshot-origin O").unwrap();
    host.disk("small", 64);
    host.create("lv", "0 64 linear small 0").unwrap();
    host.create("lo", "0 64 snapshot-origin @lv").unwrap();
    host.attach("lo", "s", "0 64 snapshot @lv W P 8").unwrap();
    // The device below grows.
    origin.put(64, &[b'o'; 4096]);
    host.load("lv", "0 3145728 linear O 0").unwrap();
    host.resume(&["lv"]).unwrap();
    let error = host.load("s", "0 3145728 snapshot @lv W P 8").unwrap_err();
    assert!(error.to_string().contains("2097152 sectors at the most"), "{error}");
    host.load("lo", "0 128 snapshot-origin @lv").unwrap();
    host.load("s", "0 128 snapshot @lv W P 8").unwrap();
    host.resume(&["lo", "s"]).unwrap();
    assert_eq!(host.write("lo", 64, 8, b'X'), Status::Ok);
    assert_eq!(host.read("s", 64, 8).unwrap(), [b'o'; 4096]);
    assert_eq!(host.read("s", 120, 8).unwrap(), [0; 4096]);
}

/// A snapshot is loaded before its origin has a table; the origin becomes live later.
#[test]
fn an_origin_that_has_its_size_later() {
    for together in [true, false] {
        let mut host = SnapshotRig::new(1);
        host.disk("O", 128).put(64, &[b'o'; 4096]);
        host.disk("W", 512);
        ["low", "org", "s"].iter().for_each(|name| host.make(name));
        host.load("low", "0 128 linear O 0").unwrap();
        host.load("org", "0 128 snapshot-origin @low").unwrap();
        host.load("s", "0 128 snapshot @low W P 8").unwrap();
        match together {
            true => host.resume(&["low", "org", "s"]).unwrap(),
            false => ["low", "org", "s"].iter().for_each(|name| host.resume(&[name]).unwrap()),
        }
        assert_eq!(host.write("org", 64, 8, b'X'), Status::Ok);
        assert_eq!(host.read("s", 64, 8).unwrap(), [b'o'; 4096]);
        assert_eq!(host.write("s", 72, 8, b'Y'), Status::Ok);
        assert_eq!(host.read("s", 72, 8).unwrap(), [b'Y'; 4096]);
    }
}

/// Two snapshots with the same chunk size, the first from before the origin grew. Copies for both
/// are complete for the second.
#[test]
fn snapshots_from_before_and_behind_a_growth() {
    let mut host = SnapshotRig::new(1);
    host.disk("O", 256).put(96, &[b'o'; 8192]);
    host.disk("W", 512);
    host.disk("V", 512).put(0, &[0; 512]);
    host.get_disk("V").put(16, &[b'?'; 16384]);
    host.create("lv", "0 100 linear O 0").unwrap();
    host.create("lo", "0 100 snapshot-origin @lv").unwrap();
    host.attach("lo", "s1", "0 100 snapshot @lv W P 8").unwrap();
    host.load("lv", "0 256 linear O 0").unwrap();
    host.resume(&["lv"]).unwrap();
    host.load("lo", "0 256 snapshot-origin @lv").unwrap();
    host.resume(&["lo"]).unwrap();
    host.attach("lo", "s2", "0 256 snapshot @lv V P 8").unwrap();
    let sent = host.send("lo", 0, filled_write(96, 8, b'X'));
    assert_eq!(host.wait(sent).status, Status::Ok);
    assert_eq!(host.read("s2", 96, 8).unwrap(), [b'o'; 4096]);
    assert_eq!(host.read("s1", 96, 4).unwrap(), [b'o'; 2048]);
}

/// The stores of the snapshots count as devices below the origin.
#[test]
fn a_store_lies_below_the_origin() {
    let mut host = SnapshotRig::new(1);
    host.disk("O", 128);
    host.disk("X", 512);
    host.create("od", "0 128 snapshot-origin O").unwrap();
    host.create("x", "0 512 linear X 0").unwrap();
    host.attach("od", "s", "0 128 snapshot O @x P 8").unwrap();
    let error = host.load("x", "0 128 linear @od 0").unwrap_err();
    assert!(error.to_string().contains("on top of x already"), "{error}");
    assert_eq!(host.write("od", 0, 8, b'X'), Status::Ok);
    // In either order, the origin is quiesced while its store still serves.
    for names in [["od", "x"], ["x", "od"]] {
        let sent = host.send("od", 0, filled_write(64 + 8 * u64::from(names[0] == "x"), 8, b'X'));
        host.suspend(&names).unwrap();
        assert_eq!(host.wait(sent).status, Status::Ok);
        host.resume(&names).unwrap();
    }
    assert_eq!(host.read("s", 64, 16).unwrap(), [0; 8192]);
}

/// Two stores, each on the origin of the other: a copy of one would need a copy of the other.
#[test]
fn stores_on_each_others_origins_are_refused() {
    let mut host = SnapshotRig::new(1);
    for (disk, origin, part) in [("A", "a", "as"), ("B", "b", "bs")] {
        host.disk(disk, 1024);
        host.create(origin, &format!("0 1024 snapshot-origin {disk}")).unwrap();
        host.create(part, &format!("0 512 linear @{origin} 512")).unwrap();
    }
    host.attach("a", "sa", "0 512 snapshot A @bs P 8").unwrap();
    let error = host.attach("b", "sb", "0 512 snapshot B @as P 8").unwrap_err();
    assert!(
        error.to_string().contains("lies on its own origin") || error.to_string().contains("on top of"),
        "{error}"
    );
    assert_eq!(host.write("a", 0, 8, b'X'), Status::Ok);
    assert_eq!(host.write("b", 0, 8, b'X'), Status::Ok);
}
