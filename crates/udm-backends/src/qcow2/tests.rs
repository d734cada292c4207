//! Images made by qemu-img read as `qemu-img convert` reads them; others are refused.

use crate::BackendDeviceRegistry;
use crate::testing::make_zeroed_segments;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use tempfile::TempDir;
use udm_core::errno::{EBUSY, EINVAL, ELOOP};
use udm_core::{
    Batch, Bio, CoreId, Device, DeviceControlError, ExtentKind, Extents, Op, Sector, Sectors, Status,
};
use udm_runtime::{CoreOptions, LocalCore, ProcessCores};

/// True if QEMU's programs exist.
fn has_qemu() -> bool {
    Command::new("qemu-img").arg("--version").output().is_ok()
}

/// Runs a program of QEMU in `folder`.
fn qemu(folder: &Path, line: &str) {
    let words = line.split(' ');
    let mut words = words.filter(|word| !word.is_empty());
    let program = words.next().unwrap();
    let out = Command::new(program).args(words).current_dir(folder).output().unwrap();
    let error = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success(), "{line}: {error}");
}

/// Runs commands of qemu-io on an image.
fn qemu_io(folder: &Path, image: &str, commands: &[String]) {
    let mut qemu_io = Command::new("qemu-io");
    commands.iter().for_each(|command| {
        qemu_io.args(["-c", command]);
    });
    let out = qemu_io.args(["-f", "qcow2", image]).current_dir(folder).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

fn open(path: &Path, options: &str) -> Result<Arc<dyn Device>, DeviceControlError> {
    let uri = format!("file:{}?format=qcow2{options}", path.display()).parse().unwrap();
    BackendDeviceRegistry::new(1).open(&uri).map(|opened| opened.device)
}

fn refused(path: &Path, options: &str) -> (i32, String) {
    match open(path, options) {
        Ok(_) => panic!("{} was accepted", path.display()),
        Err(error) => {
            assert_eq!(error.text.lines().count(), 1, "{error}");
            (error.errno, error.text)
        }
    }
}

fn run(device: &dyn Device, mut batch: Batch) -> Batch {
    let cores = ProcessCores::new(1).unwrap();
    let mut core = LocalCore::attach(&cores, CoreId(0), CoreOptions::default()).unwrap();
    let mut lane = core.open(device).unwrap();
    let (n, mut done) = (batch.len(), Batch::new());
    batch.iter_mut().for_each(|bio| bio.start());
    core.turn(|cx| lane.submit(&mut batch, cx));
    for _ in 0..1_000_000 {
        core.turn(|cx| lane.poll(&mut done, cx));
        if done.len() == n {
            break;
        }
        core.park();
    }
    assert_eq!(done.len(), n, "requests are missing");
    done.iter_mut().for_each(|bio| bio.finish());
    done
}

/// Reads the whole device by requests of random lengths, all in flight at once.
fn read_all(device: &dyn Device, rng: &mut SmallRng) -> Vec<u8> {
    let size = device.limits().size.0;
    let (mut batch, mut at) = (Batch::new(), 0);
    while at < size {
        let len = rng.random_range(1..=2048_u64).min(size - at);
        let mut data = make_zeroed_segments(len as usize * 512, &[512, 1536]);
        data.fill(0xa5);
        batch.push(Bio::read(Sector(at), Sectors(len), data));
        at += len;
    }
    let mut bytes = vec![0; size as usize * 512];
    for bio in run(device, batch) {
        assert_eq!(bio.status, Status::Ok, "{} +{}", bio.sector, bio.sectors);
        let at = bio.sector.0 as usize * 512;
        bio.data.copy_to(&mut bytes[at..at + bio.sectors.0 as usize * 512]);
    }
    bytes
}

/// Checks that the device of `image` has the data of `qemu-img convert`.
fn assert_as_qemu(folder: &Path, image: &str, rng: &mut SmallRng, about: &str) {
    qemu(folder, &format!("qemu-img convert -f qcow2 -O raw {image} want.raw"));
    let want = fs::read(folder.join("want.raw")).unwrap();
    let device = open(&folder.join(image), "&backing=allow").unwrap_or_else(|e| panic!("{about}: {e}"));
    let got = read_all(&*device, rng);
    assert_eq!(got.len(), want.len(), "{about}");
    let differs = got.iter().zip(&want).position(|(got, want)| got != want);
    assert_eq!(differs, None, "{about}: first different byte");
    assert_extents(&*device, &want, about);
}

/// Checks that holes are zeroes, and that the extents cover the disk.
fn assert_extents(device: &dyn Device, want: &[u8], about: &str) {
    let size = device.limits().size;
    let mut at = 0;
    while at < size.0 {
        let mut out = Extents::new(5);
        device.extents(Sector(at), Sectors(size.0 - at), &mut out);
        assert!(!out.list().is_empty(), "{about}: no extent at {at}");
        for extent in out.list() {
            let bytes = &want[at as usize * 512..(at + extent.len.0) as usize * 512];
            if extent.content == ExtentKind::Hole {
                assert!(bytes.iter().all(|byte| *byte == 0), "{about}: data at {at} is called a hole");
            }
            at += extent.len.0;
        }
    }
    assert_eq!(at, size.0, "{about}");
}

/// Writes a raw disk of runs of random bytes, equal bytes and zeroes.
fn write_raw(path: &Path, sectors: u64, rng: &mut SmallRng) {
    let file = fs::File::create(path).unwrap();
    file.set_len(sectors * 512).unwrap();
    let mut at = 0;
    while at < sectors {
        let len = rng.random_range(1..=600_u64).min(sectors - at);
        let mut bytes = vec![0; len as usize * 512];
        match rng.random_range(0..3) {
            0 => rng.fill(&mut bytes[..]),
            1 => bytes.fill(rng.random()),
            _ => {}
        }
        file.write_all_at(&bytes, at * 512).unwrap();
        at += len;
    }
}

/// Random writes, zeroes and discards, as commands of qemu-io.
fn random_commands(sectors: u64, rng: &mut SmallRng) -> Vec<String> {
    let mut commands = Vec::new();
    for _ in 0..rng.random_range(3..12) {
        let at = rng.random_range(0..sectors);
        let len = rng.random_range(1..=300_u64).min(sectors - at) * 512;
        let at = at * 512;
        commands.push(match rng.random_range(0..4) {
            0 => format!("write -z {at} {len}"),
            1 => format!("discard {at} {len}"),
            _ => format!("write -P {} {at} {len}", rng.random_range(1..256)),
        });
    }
    commands
}

#[test]
fn random_images_read_as_qemu_reads_them() {
    if !has_qemu() {
        return;
    }
    let mut rng = SmallRng::seed_from_u64(1);
    for (round, cluster) in [512, 4096, 65536, 2 << 20, 1024, 16384, 65536, 65536].into_iter().enumerate() {
        let folder = TempDir::new().unwrap();
        let folder = folder.path();
        let compat = ["1.1", "0.10"][round / 2 % 2];
        let options = format!("cluster_size={cluster},compat={compat}");
        let sectors = rng.random_range(5000..9000);
        write_raw(&folder.join("raw"), sectors, &mut rng);
        for compress in ["", "-c"] {
            let about = format!("clusters of {cluster}, compat {compat} {compress}");
            let convert = "qemu-img convert -f raw -O qcow2";
            qemu(folder, &format!("{convert} {compress} -o {options} raw base.qcow2"));
            assert_as_qemu(folder, "base.qcow2", &mut rng, &about);
            // A chain of three, the upper ones of other sizes and clusters.
            let mut below = "base.qcow2".to_owned();
            for layer in ["one.qcow2", "two.qcow2"] {
                let size = (sectors + rng.random_range(0..400)) * 512 - 200 * 512;
                let cluster = 512 << rng.random_range(0..10);
                qemu(
                    folder,
                    &format!(
                        "qemu-img create -f qcow2 -F qcow2 -b {below} -o cluster_size={cluster},compat={compat} {layer} {size}"
                    ),
                );
                qemu_io(folder, layer, &random_commands(size / 512, &mut rng));
                assert_as_qemu(folder, layer, &mut rng, &format!("{about}, layer {layer}"));
                below = layer.to_owned();
            }
        }
    }
}

#[test]
fn images_with_raw_backing_data_files_and_preallocation_read_as_qemu_reads_them() {
    if !has_qemu() {
        return;
    }
    let mut rng = SmallRng::seed_from_u64(2);
    let folder = TempDir::new().unwrap();
    let folder = folder.path();
    write_raw(&folder.join("raw"), 5000, &mut rng);
    let made = [
        ("raw.qcow2", "-F raw -b raw"),
        ("metadata.qcow2", "-o preallocation=metadata"),
        ("falloc.qcow2", "-o preallocation=falloc"),
        ("lazy.qcow2", "-o lazy_refcounts=on"),
        ("data.qcow2", "-o data_file=data.bin"),
        ("data_raw.qcow2", "-o data_file=data_raw.bin,data_file_raw=on"),
    ];
    for (image, options) in made {
        let create = format!("qemu-img create -f qcow2 {options} {image} {}", 5100 * 512);
        qemu(folder, &create);
        assert_as_qemu(folder, image, &mut rng, image);
        qemu_io(folder, image, &random_commands(5100, &mut rng));
        assert_as_qemu(folder, image, &mut rng, image);
    }
}

/// A snapshot inside the image changes nothing: the active disk is served.
#[test]
fn an_image_with_internal_snapshots_serves_its_active_disk() {
    if !has_qemu() {
        return;
    }
    let mut rng = SmallRng::seed_from_u64(3);
    let folder = TempDir::new().unwrap();
    let folder = folder.path();
    qemu(folder, "qemu-img create -f qcow2 a.qcow2 2M");
    qemu_io(folder, "a.qcow2", &["write -P 1 0 1M".into()]);
    qemu(folder, "qemu-img snapshot -c first a.qcow2");
    qemu_io(folder, "a.qcow2", &["write -P 2 512k 1M".into()]);
    assert_as_qemu(folder, "a.qcow2", &mut rng, "snapshot");
}

fn plain_image(folder: &Path) -> PathBuf {
    qemu(folder, "qemu-img create -f qcow2 a.qcow2 2M");
    qemu_io(folder, "a.qcow2", &["write -P 1 0 1M".into()]);
    folder.join("a.qcow2")
}

#[test]
fn nothing_but_reads_and_flushes_succeeds() {
    if !has_qemu() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let device = open(&plain_image(folder.path()), "").unwrap();
    assert!(device.limits().read_only);
    let data = |n| make_zeroed_segments(n, &[]);
    let mut beyond = Bio::read(Sector(4095), Sectors(2), data(1024));
    beyond.cookie = 1;
    let done = run(
        &*device,
        vec![
            beyond,
            Bio::write(Sector(0), Sectors(1), data(512)),
            crate::testing::bio_without_data(Op::Discard, 0, 8),
            crate::testing::bio_without_data(Op::WriteZeroes, 0, 8),
            crate::testing::bio_without_data(Op::Flush, 0, 0),
        ],
    );
    for bio in done {
        let want = match bio.op {
            Op::Read => Status::IoErr,
            Op::Flush => Status::Ok,
            _ => Status::ReadOnly,
        };
        assert_eq!(bio.status, want, "{:?}", bio.op);
    }
}

#[test]
fn images_that_are_not_supported_are_refused_with_the_way_out() {
    if !has_qemu() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let folder = folder.path();
    let image = plain_image(folder);
    let secret =
        "--object secret,id=s,data=x -o encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
    qemu(folder, &format!("qemu-img create -f qcow2 {secret} luks.qcow2 2M"));
    qemu(folder, "qemu-img create -f qcow2 -o extended_l2=on subclusters.qcow2 2M");
    qemu(folder, "qemu-img create -f qcow2 -o compression_type=zstd zstd.qcow2 2M");
    qemu(folder, "qemu-img create -f qcow2 -F qcow2 -b a.qcow2 over.qcow2");
    qemu(folder, "qemu-img create -f qcow2 -o data_file=d data.qcow2 2M");
    let cases = [
        ("luks", "encrypted with LUKS: make a copy with \"qemu-img convert"),
        ("subclusters", "subclusters (extended_l2=on): make a copy with \"qemu-img convert"),
        ("zstd", "compressed with zstd: make a copy with \"qemu-img convert"),
        ("over", "it needs the backing file \"a.qcow2\": backing=allow opens it"),
        ("data", "it needs the data file \"d\": backing=allow opens it"),
    ];
    for (name, why) in cases {
        let (errno, text) = refused(&folder.join(format!("{name}.qcow2")), "");
        assert!(errno == EINVAL && text.contains(why), "{text}");
    }
    // Bits of the header.
    for (at, byte, why) in [
        (79, 1, "marked as dirty"),
        (79, 2, "marked as corrupt: \"qemu-img check -r all"),
        (79, 128, "unknown features 0x80"),
        (7, 4, "version 4 of qcow2"),
        (0, b'X', "not a qcow2 image (format=raw serves"),
        (23, 30, "clusters of 2^30 bytes"),
        (35, 1, "encrypted with AES"),
    ] {
        let copy = folder.join("copy.qcow2");
        fs::copy(&image, &copy).unwrap();
        let file = fs::OpenOptions::new().write(true).open(&copy).unwrap();
        file.write_all_at(&[byte], at).unwrap();
        let (errno, text) = refused(&copy, "");
        assert!(errno == EINVAL && text.contains(why), "{text}");
    }
    // A copy that was cut.
    let copy = folder.join("cut.qcow2");
    fs::copy(&image, &copy).unwrap();
    let cut = |len| fs::OpenOptions::new().write(true).open(&copy).unwrap().set_len(len).unwrap();
    for (len, why) in
        [(900 << 10, "is beyond the end of its file"), (600, "damaged"), (100, "shorter than a block")]
    {
        cut(len);
        let (errno, text) = refused(&copy, "");
        assert!(errno == EINVAL && text.contains(why), "{len}: {text}");
    }
}

#[test]
fn backing_files_are_bounded_and_named() {
    if !has_qemu() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let folder = folder.path();
    plain_image(folder);
    qemu(folder, "qemu-img create -f qcow2 -F qcow2 -b a.qcow2 b.qcow2");
    qemu(folder, "qemu-img rebase -u -f qcow2 -F qcow2 -b b.qcow2 a.qcow2");
    let (errno, text) = refused(&folder.join("b.qcow2"), "&backing=allow");
    assert!(errno == ELOOP && text.contains("refer to each other in a circle"), "{text}");
    for (name, why) in [
        ("-F qcow2 -b nbd://localhost/x", "names \"nbd://localhost/x\", which is not a file"),
        ("-F vmdk -b x", "in format \"vmdk\", not raw or qcow2"),
        ("-F raw -b not-there", "No such file"),
    ] {
        qemu(folder, &format!("qemu-img create -u -f qcow2 {name} c.qcow2 1M"));
        let (_, text) = refused(&folder.join("c.qcow2"), "&backing=allow");
        assert!(text.contains(why), "{text}");
    }
    // The name of the format was removed: qemu-img adds it always.
    let bytes = fs::read(folder.join("b.qcow2")).unwrap();
    let at = bytes.windows(4).position(|word| word == 0xe279_2aca_u32.to_be_bytes()).unwrap();
    let file = fs::OpenOptions::new().write(true).open(folder.join("b.qcow2")).unwrap();
    file.write_all_at(&[0x11], at as u64).unwrap();
    let (errno, text) = refused(&folder.join("b.qcow2"), "&backing=allow");
    assert!(errno == EINVAL && text.contains("does not name the format of its backing file"), "{text}");
    // A chain that is too long.
    let mut below = "long0.qcow2".to_owned();
    qemu(folder, "qemu-img create -f qcow2 long0.qcow2 1M");
    for n in 1..=16 {
        let next = format!("long{n}.qcow2");
        qemu(folder, &format!("qemu-img create -u -f qcow2 -F qcow2 -b {below} {next} 1M"));
        below = next;
    }
    assert!(open(&folder.join("long15.qcow2"), "&backing=allow").is_ok());
    let (errno, text) = refused(&folder.join("long16.qcow2"), "&backing=allow");
    assert!(errno == ELOOP && text.contains("more than 16 files"), "{text}");
}

#[test]
fn a_served_image_has_no_writer() {
    if !has_qemu() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let image = plain_image(folder.path());
    let write = |ok: bool| {
        let mut qemu_io = Command::new("qemu-io");
        let out = qemu_io.args(["-f", "qcow2", "-c", "write 0 512"]).arg(&image).output().unwrap();
        assert_eq!(out.status.success(), ok, "{}", String::from_utf8_lossy(&out.stderr));
    };
    let device = open(&image, "").unwrap();
    let other = open(&image, "").unwrap();
    write(false);
    drop((device, other));
    write(true);
    let writer = BackendDeviceRegistry::new(1);
    let uri = image.display().to_string().parse().unwrap();
    let writer = writer.open(&uri).map(|opened| opened.device).unwrap();
    let (errno, text) = refused(&image, "");
    assert!(errno == EBUSY && text.contains("in use: another program writes it"), "{text}");
    assert!(open(&image, "&exclusive=off").is_ok());
    drop(writer);
}

/// Damaged data of a compressed cluster is an error of the medium, not of the path.
#[test]
fn damaged_compressed_data_is_an_error() {
    if !has_qemu() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let folder = folder.path();
    write_raw(&folder.join("raw"), 2000, &mut SmallRng::seed_from_u64(4));
    fs::write(folder.join("raw"), vec![7; 1 << 20]).unwrap();
    qemu(folder, "qemu-img convert -c -f raw -O qcow2 raw a.qcow2");
    let image = folder.join("a.qcow2");
    let file = fs::OpenOptions::new().read(true).write(true).open(&image).unwrap();
    // The first compressed cluster is the first data after the tables.
    let mut bytes = fs::read(&image).unwrap();
    let from = 5 << 16;
    bytes[from..].fill(0xff);
    file.write_all_at(&bytes, 0).unwrap();
    let device = open(&image, "").unwrap();
    let done = run(&*device, vec![Bio::read(Sector(0), Sectors(8), make_zeroed_segments(4096, &[]))]);
    assert_eq!(done[0].status, Status::Medium);
}
