//! Clients that move to another core: because they are busy, or continuously.

use super::server::{Server, sh_in, text};
use super::support::nbd::Client;
use super::{Outcome, check, folder_with_image};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use udm_frontends::nbd::{Export, Exports, ListenAddress, NbdServer, NbdServerLimits};
use udm_runtime::{Runtime, RuntimeOptions};

/// Two busy fio and fourteen idle clients, in two orders: once the two start on different cores,
/// once on the same core.
pub fn two_hot_and_fourteen_idle() -> Outcome {
    for idle_between in [0, 1] {
        let folder = folder_with_image(1 << 20);
        let server = Server::start_on(folder.path(), &["null=0 2097152 linear null:size=1G 0"], "0,1")?;
        let socket = folder.path().join("nbd.sock");
        let connect =
            |n: usize| -> Vec<Client> { (0..n).map(|_| Client::connect(&socket, "null")).collect() };
        let mut hot = vec![Fio::start(&server)?];
        poll_until("fio connects", || Ok(server.cores()?.iter().sum::<u64>() > 10))?;
        let mut idle = connect(idle_between);
        hot.push(Fio::start(&server)?);
        idle.extend(connect(14 - idle_between));
        let parted = poll_until("the hot clients are on one core", || {
            let before = server.cores()?;
            std::thread::sleep(Duration::from_millis(400));
            let after = server.cores()?;
            let did: Vec<u64> = after.iter().zip(&before).map(|(a, b)| a - b).collect();
            Ok(did.len() == 2 && did.iter().all(|&ticks| ticks * 4 > did.iter().sum()))
        });
        drop(hot);
        parted?;
        drop(idle);
        server.stop()?;
    }
    Ok(())
}

/// fio with random reads until it is dropped.
struct Fio(Child);

impl Fio {
    fn start(server: &Server) -> std::io::Result<Fio> {
        let mut fio = server.command("fio");
        fio.args(
            "--name=hot --ioengine=nbd --rw=randread --bs=4k --iodepth=8 --time_based --runtime=300"
                .split(' '),
        );
        let fio =
            fio.arg(format!("--uri={}", server.uri("null"))).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Fio(fio.spawn()?))
    }
}

impl Drop for Fio {
    fn drop(&mut self) {
        // At SIGTERM fio ends its job processes.
        let _ = rustix::process::kill_process(
            rustix::process::Pid::from_child(&self.0),
            rustix::process::Signal::TERM,
        );
        let _ = self.0.wait();
    }
}

/// Polls until `so` is true; fails after 30 s, which only limits a hang.
fn poll_until(name: &str, mut so: impl FnMut() -> Result<bool, libtest_mimic::Failed>) -> Outcome {
    let end = Instant::now() + Duration::from_secs(30);
    while !so()? {
        check(Instant::now() < end, name)?;
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// fio writes and verifies, nbdcopy copies in both directions over several connections, and qemu-io
/// reads and writes at any byte, while every client moves to another core thousands of times.
pub fn moved_all_the_time() -> Outcome {
    let folder = folder_with_image(64 << 20);
    sh_in(folder.path(), "head -c 50331648 /dev/urandom > source.img")?;
    let path = folder.path().join("nbd.sock");
    let uri = format!("nbd+unix:///disk?socket={}", path.display());
    let options = RuntimeOptions { cpus: vec![None; 2], poll: false, spin_max: Duration::from_micros(50) };
    let runtime = Runtime::start(&options)?;
    let exports = Arc::new(Exports::new());
    exports.add(Export::new("disk", "", false, open(&folder.path().join("disk.img"))?)?)?;
    let listen = [ListenAddress::Unix(path)];
    let server = NbdServer::start(runtime.core_set(), exports, NbdServerLimits::default(), &listen)?;
    let over = AtomicBool::new(false);
    let outcome = std::thread::scope(|s| {
        s.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                server.rotate();
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let outcome = clients(folder.path(), &uri);
        over.store(true, Ordering::Relaxed);
        outcome
    });
    let stats = server.stats();
    server.stop();
    runtime.stop();
    outcome?;
    check(stats.moves > 1000 && stats.errors == 0, &format!("{stats:?}"))
}

fn open(image: &Path) -> Result<Arc<dyn udm_core::Device>, libtest_mimic::Failed> {
    Ok(udm_backends::open_standalone_device(&udm_wire::uri::parse_device_uri(&format!(
        "file:{}",
        image.display()
    ))?)?)
}

fn clients(folder: &Path, uri: &str) -> Outcome {
    let fio = "--ioengine=nbd --bsrange=512-256k --iodepth=32 --numjobs=3 --size=12M --offset_increment=16M \
               --verify=crc32c --verify_fatal=1 --do_verify=1 --group_reporting --rw=randwrite";
    let out = sh_in(folder, &format!("fio --name=verify {fio} --uri='{uri}' 2>&1"))?;
    check(out.contains("err= 0"), &out)?;
    for size in ["4096", "262144", "4194304"] {
        let copy = format!("nbdcopy --request-size={size}");
        sh_in(folder, &format!("{copy} --flush source.img '{uri}' && {copy} '{uri}' copy.img"))?;
        sh_in(folder, "cmp -n 50331648 source.img copy.img && cmp -n 50331648 source.img disk.img")?;
    }
    let bytes: Vec<String> = (0..200)
        .flat_map(|i| {
            let at = 1000 + i * 3001;
            [format!("write -P {} {at} 3001", i % 251), format!("read -P {} {at} 3001", i % 251)]
        })
        .collect();
    let mut command = Command::new("qemu-io");
    command.args(["-f", "raw", uri]).args(bytes.iter().flat_map(|b| ["-c", b])).current_dir(folder);
    let out = command.output()?;
    let output = text(&out.stdout) + &text(&out.stderr);
    check(out.status.success() && !output.contains("failed"), &output)
}
