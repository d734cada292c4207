//! Reads and writes of metadata on the cores when a table is loaded.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use udm_control::verbs::CancelToken;
use udm_control::{DeviceRegistry, TableLoadControlIo, verbs};
use udm_core::control_io::{flush_device, read_sector_ranges, read_sectors, write_sectors};
use udm_core::errno::{EBUSY, EINTR, EIO, ESHUTDOWN, ETIMEDOUT};
use udm_core::{
    Batch, Bio, Buf, CoreId, Device, DeviceControlError, Nanos, Op, SECTOR_SIZE, Sector, Sectors,
};
use udm_dm::TargetError;
use udm_dm::testing::TestDisk;
use udm_runtime::{CoreOptions, LocalCore, ProcessCores, Runtime, RuntimeOptions};

/// The cores and devices of a server.
struct Server {
    runtime: Option<Runtime>,
    core_set: Arc<ProcessCores>,
    registry: Arc<DeviceRegistry>,
    folder: TempDir,
}

impl Server {
    fn new(cores: usize) -> Server {
        let options =
            RuntimeOptions { cpus: vec![None; cores], poll: false, spin_max: Duration::from_micros(50) };
        let runtime = Runtime::start(&options).unwrap();
        let core_set = runtime.core_set().clone();
        let registry = DeviceRegistry::new(core_set.clone(), cores);
        Server { runtime: Some(runtime), core_set, registry, folder: TempDir::new().unwrap() }
    }

    fn io(&self) -> TableLoadControlIo<'_> {
        TableLoadControlIo::new(&*self.core_set)
    }

    fn file(&self, name: &str, bytes: u64) -> String {
        let path = self.folder.path().join(name);
        std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
        path.display().to_string()
    }

    /// Creates a mapped device with this table.
    fn make(&self, name: &str, table: &str) -> Arc<dyn Device> {
        verbs::block_on_verb(verbs::create_mapped_device(&self.registry, name, None, Some(table))).unwrap();
        Arc::clone(&self.registry.find(name).unwrap().device) as Arc<dyn Device>
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.stop();
        }
    }
}

fn bytes(len: u64) -> Vec<u8> {
    (0..len).map(|i| (i / 251 + i) as u8).collect()
}

/// A file, memory, and a mapped device over both.
#[test]
fn what_is_written_is_read() {
    let server = Server::new(2);
    let file = server.file("a", 8 << 20);
    let open = |word: &str| {
        udm_backends::open_standalone_device(&udm_wire::uri::parse_device_uri(word).unwrap()).unwrap()
    };
    let both = server.make("m", &format!("0 8192 linear {file} 64\n8192 8192 linear mem:8M 0"));
    let direct = open(&server.file("b", 8 << 20));
    for device in [direct, open("mem:8M"), both] {
        let io = server.io();
        let data = bytes(3 << 20);
        write_sectors(&io, &device, Sector(5000), &data).unwrap();
        flush_device(&io, &device).unwrap();
        assert!(read_sectors(&io, &device, Sector(5000), Sectors((3 << 20) / SECTOR_SIZE)).unwrap() == data);
        let ranges: Vec<_> = (0..600).map(|i| (Sector(5000 + i * 10), Sectors(8))).collect();
        let mut next = 0;
        read_sector_ranges(&io, &device, &ranges, |i, got| {
            assert!(got == &data[i * 5120..i * 5120 + 4096], "range {i}");
            next += 1;
            Ok::<_, DeviceControlError>(ControlFlow::Continue(()))
        })
        .unwrap();
        assert_eq!(next, 600);
        assert_eq!(
            read_sectors(&io, &device, device.limits().size.end(), Sectors(1)).unwrap_err().errno,
            EIO
        );
    }
    let on_disk = std::fs::read(&file).unwrap();
    assert!(on_disk[(64 + 5000) * 512..][..1 << 20] == bytes(1 << 20), "the mapped device's first half");
}

/// The caller waits until its time limit. The cancelled write is performed when the device is
/// resumed, before any later one, so the later write wins.
#[test]
fn a_suspended_device_does_not_answer() {
    let server = Server::new(2);
    let device = server.make("m", "0 2048 linear mem:1M 0");
    verbs::block_on_verb(verbs::suspend_mapped_devices(&server.registry, &["m"], false)).unwrap();
    let io = server.io().with_patience(Duration::from_millis(100));
    let error = write_sectors(&io, &device, Sector(8), &[1; 4096]).unwrap_err();
    assert_eq!((error.errno, &*error.text), (ETIMEDOUT, "the store does not answer"));
    let error = write_sectors(&io, &device, Sector(8), &[2; 4096]).unwrap_err();
    assert_eq!((error.errno, &*error.text), (EBUSY, "the store has not answered an earlier load yet"));
    verbs::block_on_verb(verbs::resume_mapped_devices(&server.registry, &["m"])).unwrap();
    until("the completion of what was in flight", || {
        match write_sectors(&server.io(), &device, Sector(8), &[3; 4096]) {
            Ok(()) => true,
            Err(error) => error.errno != EBUSY && panic!("{error}"),
        }
    });
    assert_eq!(read_sectors(&server.io(), &device, Sector(8), Sectors(8)).unwrap(), [3; 4096]);
}

/// A cancelled caller returns at once.
#[test]
fn a_load_is_called_off() {
    let server = Server::new(1);
    let disk = TestDisk::new(64);
    disk.hold(true);
    let device: Arc<dyn Device> = disk.clone();
    let cancel_token = CancelToken::default();
    thread::scope(|scope| {
        let waits =
            scope.spawn(|| read_sectors(&server.io().until(&cancel_token), &device, Sector(0), Sectors(8)));
        until("the read has come", || disk.waiting() > 0);
        cancel_token.cancel(TargetError::errno(EINTR).because("nobody asks any more"));
        assert_eq!(waits.join().unwrap(), Err(DeviceControlError::new(EINTR, "nobody asks any more")));
    });
    // It also begins no further requests.
    disk.hold(false);
    assert_eq!(
        write_sectors(&server.io().until(&cancel_token), &device, Sector(0), &[0; 512]).unwrap_err().errno,
        EINTR
    );
    assert!(disk.take_log().iter().all(|seen| seen.op == Op::Read));
}

/// Waits until `is` is true; panics after 60 s.
fn until(name: &str, mut is: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{name}: it never was");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Many runs at once on few cores, each with its own store.
#[test]
fn hundreds_at_once() {
    let server = Server::new(2);
    let each = |i: u64| {
        let device =
            udm_backends::open_standalone_device(&udm_wire::uri::parse_device_uri("mem:1M").unwrap())
                .unwrap();
        let (io, data) = (server.io(), bytes(100_352 + i * 512));
        for _ in 0..5 {
            write_sectors(&io, &device, Sector(i), &data).unwrap();
            flush_device(&io, &device).unwrap();
            assert!(
                read_sectors(&io, &device, Sector(i), Sectors::from_bytes(data.len() as u64)).unwrap()
                    == data
            );
        }
    };
    let each = &each;
    thread::scope(|scope| (0..200).for_each(|i| drop(scope.spawn(move || each(i)))));
}

/// Runs on the same store take turns or are refused; storage that hangs delays only few of them.
#[test]
fn one_store_holds_up_few() {
    let server = Server::new(1);
    let disk = TestDisk::new(64);
    disk.hold(true);
    let device: Arc<dyn Device> = disk.clone();
    let one = || write_sectors(&server.io(), &device, Sector(0), &[7; 4096]);
    thread::scope(|scope| {
        let waiting: Vec<_> = (0..4).map(|_| scope.spawn(one)).collect();
        until("they wait", || disk.waiting() == 4);
        let error = one().unwrap_err();
        assert_eq!((error.errno, &*error.text), (EBUSY, "other loads wait for the store"));
        disk.hold(false);
        // The lane is polled only when its core has something to do.
        let other = udm_backends::open_standalone_device(&udm_wire::uri::parse_device_uri("mem:1M").unwrap())
            .unwrap();
        until("they are done", || {
            flush_device(&server.io(), &other).unwrap();
            waiting.iter().all(|one| one.is_finished())
        });
        waiting.into_iter().for_each(|one| one.join().unwrap().unwrap());
        one().unwrap();
    });
}

/// The end of the program ends a waiting run, and all later ones.
#[test]
fn the_end_ends_runs() {
    let mut server = Server::new(1);
    let disk = TestDisk::new(64);
    disk.hold(true);
    let device: Arc<dyn Device> = disk.clone();
    let core_set = server.core_set.clone();
    let runtime = server.runtime.take().unwrap();
    thread::scope(|scope| {
        let waits = scope
            .spawn(|| read_sectors(&TableLoadControlIo::new(&*core_set), &device, Sector(0), Sectors(8)));
        until("the read has come", || disk.waiting() > 0);
        runtime.end();
        assert_eq!(waits.join().unwrap().unwrap_err().errno, ESHUTDOWN);
    });
    disk.hold(false);
    let other = TestDisk::new(64);
    let device: Arc<dyn Device> = other.clone();
    assert_eq!(
        write_sectors(&TableLoadControlIo::new(&*core_set), &device, Sector(0), &[0; 512]).unwrap_err().errno,
        ESHUTDOWN
    );
    runtime.stop();
    assert_eq!(
        write_sectors(&TableLoadControlIo::new(&*core_set), &device, Sector(0), &[0; 512]).unwrap_err().errno,
        ESHUTDOWN
    );
}

/// In library mode, threads that drive their own lanes also perform the reads and writes of a load.
#[test]
fn library_cores_do_it_beside_their_own_lanes() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("a");
    std::fs::File::create(&path).unwrap().set_len(8 << 20).unwrap();
    let open = |word: &str| {
        udm_backends::open_standalone_device(&udm_wire::uri::parse_device_uri(word).unwrap()).unwrap()
    };
    let (file, memory) = (open(&path.display().to_string()), open("mem:8M"));
    let core_set = ProcessCores::new(2).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for id in 0..2 {
            let (core_set, stop, memory) = (&core_set, &stop, &memory);
            scope.spawn(move || {
                let mut core = LocalCore::attach(core_set, CoreId(id), CoreOptions::default()).unwrap();
                drive(&mut core, &**memory, stop);
            });
        }
        for (device, sector) in [(&file, 5000), (&memory, 9000)] {
            let io = TableLoadControlIo::new(&*core_set);
            let data = bytes(2 << 20);
            write_sectors(&io, device, Sector(sector), &data).unwrap();
            flush_device(&io, device).unwrap();
            assert!(read_sectors(&io, device, Sector(sector), Sectors::from_bytes(2 << 20)).unwrap() == data);
        }
        stop.store(true, Ordering::Relaxed);
    });
    // The cores have ended, so nobody reads their messages.
    let io = TableLoadControlIo::new(&*core_set).with_patience(Duration::from_millis(50));
    assert_eq!(read_sectors(&io, &memory, Sector(0), Sectors(8)).unwrap_err().errno, ETIMEDOUT);
}

/// The load of a thread: reads, one at a time, with a pause now and then.
fn drive(core: &mut LocalCore, device: &dyn Device, stop: &AtomicBool) {
    let mut lane = core.open(device).unwrap();
    let (mut batch, mut done) = (Batch::new(), Batch::new());
    while !stop.load(Ordering::Relaxed) {
        let mut bio = Bio::read(Sector(0), Sectors(8), Buf::zeroed(4096).into());
        bio.start();
        batch.push(bio);
        while done.is_empty() {
            core.turn(|cx| {
                if !batch.is_empty() {
                    lane.submit(&mut batch, cx);
                }
                lane.poll(&mut done, cx);
                cx.wake_at(cx.now() + Nanos::from_millis(1));
            });
        }
        done.drain(..).for_each(|mut bio| bio.finish());
        core.park();
    }
}
