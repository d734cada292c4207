//! `udm demo images`: machines that start from an image on a slow web server.
//!
//! A clone of the image is read as it is copied, and a hundred snapshots over it are the disks of
//! machines. The same boot is replayed without and with a boot profile and after the copy, beside
//! nbdkit's curl plugin and a full download. It needs no root and leaves nothing on the machine.

mod boot;
mod web_server;

use super::demo_server::DemoServer;
use super::printer::DemoPrinter;
use anyhow::{Context, Result, bail};
use boot::{BOOT_READS, BootTimes, boot};
use serde::Serialize;
use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use udm_backends::nbd::BlockingNbdClient;
use udm_control::api;
use udm_control::registry::BaseDir;
use udm_control::verbs::{CancelToken, block_on_verb, clone, create_mapped_device};
use udm_core::SECTOR_SIZE;
use udm_wire::uri::{NbdAddress, NbdUri};
use web_server::{DELAY, DelayedWebServer, IMAGE_BYTES};

/// Number of disks over the clone.
const DISKS: usize = 100;

/// Maximum time of a copy.
const COPY_MAX: Duration = Duration::from_secs(120);

/// A row of the table, for `--json`.
#[derive(Debug, Serialize)]
struct ImageDemoRow {
    what: &'static str,
    /// Time until the first machine could send its first read.
    ready_ns: u64,
    /// Time of this read.
    first_read_ns: u64,
    /// Time of all reads of a boot.
    boot_ns: u64,
    /// The same again.
    again_ns: u64,
    /// Requests to the web server.
    requests: u64,
}

/// The results, for `--json`.
#[derive(Debug, Serialize)]
struct ImagesDemoReport {
    image_bytes: u64,
    boot_reads: u64,
    disks: usize,
    create_disks_ns: u64,
    copy_ns: u64,
    rows: Vec<ImageDemoRow>,
}

/// Runs the demo.
///
/// # Errors
/// A step fails, or data is wrong, which is a bug in udm.
pub fn run(json: bool) -> Result<()> {
    let printer = DemoPrinter::new(json);
    let web = DelayedWebServer::start().context("demo: web server")?;
    let server = DemoServer::start()?;
    let mut demo = ImagesDemo { printer: &printer, web: &web, server: &server, rows: Vec::new() };
    let wait = DELAY.as_millis();
    printer.section("Machines from an image on a web server")?;
    printer.fact("image", &format!("{} MiB, {wait} ms per request", IMAGE_BYTES >> 20))?;
    printer.fact("a boot", &format!("{BOOT_READS} reads of 32 KiB at 80 places, one after the other"))?;
    let (profile, create_disks) = demo.boot_without_profile()?;
    demo.boot_with_profile(&profile)?;
    let copy = demo.boot_after_copy()?;
    demo.boot_of_nbdkit()?;
    demo.boot_after_download()?;
    let rows = demo.rows;
    print_table(&printer, &rows)?;
    printer.fact("disks", &format!("{DISKS} snapshots of the clone in {}", millis(create_disks)))?;
    printer.fact("copy", &format!("all of the image in {:.1} s", copy.as_secs_f64()))?;
    let report = ImagesDemoReport {
        image_bytes: IMAGE_BYTES,
        boot_reads: BOOT_READS,
        disks: DISKS,
        create_disks_ns: nanos(create_disks),
        copy_ns: nanos(copy),
        rows,
    };
    if json { crate::output::print_json_to_stdout(&report) } else { Ok(()) }
}

struct ImagesDemo<'a> {
    printer: &'a DemoPrinter,
    web: &'a DelayedWebServer,
    server: &'a DemoServer,
    rows: Vec<ImageDemoRow>,
}

impl ImagesDemo<'_> {
    /// Creates the clone `name` of an object of this name. Returns the time that it took.
    fn create_clone(&self, name: &str, paused: bool, profile: Option<&str>) -> Result<Duration> {
        let to = self.server.folder().join(format!("{name}.img"));
        let new = api::CreateCloneRequest {
            name: name.into(),
            source: self.web.url(name),
            destination: to.display().to_string(),
            paused: Some(paused),
            hydrate_first: profile.map(String::from),
            ..api::CreateCloneRequest::default()
        };
        let begin = Instant::now();
        clone::create_clone(&self.server.registry, &new, &BaseDir::own(), &CancelToken::default())?;
        Ok(begin.elapsed())
    }

    /// Adds a row: two boots of `client`, which could begin after `ready`.
    fn measure(
        &mut self,
        what: &'static str,
        ready: Duration,
        before: u64,
        client: &mut BlockingNbdClient,
    ) -> Result<()> {
        let BootTimes { first, all } = boot(client)?;
        let requests = self.web.requests() - before;
        let again = boot(client)?.all;
        self.rows.push(ImageDemoRow {
            what,
            ready_ns: nanos(ready),
            first_read_ns: nanos(first),
            boot_ns: nanos(all),
            again_ns: nanos(again),
            requests,
        });
        Ok(())
    }

    /// The first machine: a disk over a clone that copies only on request. Returns its boot
    /// profile, and the time in which the disks were created.
    fn boot_without_profile(&mut self) -> Result<(String, Duration)> {
        let before = self.web.requests();
        let ready = self.create_clone("plain", true, None)?;
        let origin = format!("0 {} snapshot-origin @plain", IMAGE_BYTES / SECTOR_SIZE);
        block_on_verb(create_mapped_device(&self.server.registry, "image", None, Some(&origin)))?;
        let disks = (0..DISKS).map(|disk| (format!("vm{disk:02}"), "image".to_owned()));
        let create_disks = self.server.take_snapshots(disks)?;
        let mut client = self.server.client("vm00")?;
        self.measure("clone, nothing copied", ready + create_disks, before, &mut client)?;
        let profile = clone::clone_boot_profile(&self.server.registry, "plain")?;
        self.printer.fact("boot profile", &format!("{} ranges of the image", profile.ranges))?;
        Ok((profile.profile, create_disks))
    }

    /// A machine on another host, whose clone copies the profile first.
    fn boot_with_profile(&mut self, profile: &str) -> Result<()> {
        let before = self.web.requests();
        let ready = self.create_clone("profiled", false, Some(profile))?;
        let mut client = self.server.client("profiled")?;
        self.measure("clone with a boot profile", ready, before, &mut client)
    }

    /// The same clone when all is copied. Returns the time of the rest of the copy.
    fn boot_after_copy(&mut self) -> Result<Duration> {
        let (begin, registry) = (Instant::now(), &self.server.registry);
        loop {
            let found = clone::describe_clone_by_name(registry, "profiled")?;
            if found.state == "done" {
                break;
            }
            if begin.elapsed() > COPY_MAX {
                bail!("demo: {} of {} bytes are copied", found.hydrated_bytes, found.size_bytes);
            }
            sleep(Duration::from_millis(5));
        }
        let copy = begin.elapsed();
        clone::finish_clone(registry, "profiled", &CancelToken::default())?;
        let before = self.web.requests();
        let mut client = self.server.client("profiled")?;
        self.measure("after the copy, as linear", Duration::ZERO, before, &mut client)?;
        Ok(copy)
    }

    /// nbdkit's curl plugin, which keeps what it has read.
    fn boot_of_nbdkit(&mut self) -> Result<()> {
        let socket = self.server.folder().join("nbdkit.sock");
        let (before, begin) = (self.web.requests(), Instant::now());
        let Some(nbdkit) = CachingNbdkit::start(&socket, &self.web.url("nbdkit"))? else {
            return self.printer.fact("nbdkit", "not measured: nbdkit with its curl plugin is not here");
        };
        let ready = begin.elapsed();
        let mut client = BlockingNbdClient::connect(&NbdUri::new(NbdAddress::Unix(socket), ""), &[])?;
        self.measure("nbdkit curl, cache-on-read", ready, before, &mut client)?;
        drop(nbdkit);
        Ok(())
    }

    /// A download of everything before the start.
    fn boot_after_download(&mut self) -> Result<()> {
        let path = self.server.folder().join("download.img");
        let (before, begin) = (self.web.requests(), Instant::now());
        let mut file = File::create(&path)?;
        self.web.download(&mut file).context("demo: download")?;
        let ready = begin.elapsed();
        self.server.map("download", &path, IMAGE_BYTES)?;
        let mut client = self.server.client("download")?;
        self.measure("full download", ready, before, &mut client)
    }
}

/// nbdkit over the image. Dropping it ends the process.
struct CachingNbdkit(Child);

impl CachingNbdkit {
    /// Starts it; `None` if it is not installed.
    fn start(socket: &Path, url: &str) -> Result<Option<CachingNbdkit>> {
        let mut nbdkit = Command::new("nbdkit");
        nbdkit.arg("-f").arg("-U").arg(socket).args(["--filter=cache", "curl", "cache-on-read=true"]);
        nbdkit.arg(format!("url={url}")).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let Ok(child) = nbdkit.spawn() else { return Ok(None) };
        let mut nbdkit = CachingNbdkit(child);
        for _ in 0..5000 {
            if UnixStream::connect(socket).is_ok() {
                return Ok(Some(nbdkit));
            }
            if nbdkit.0.try_wait()?.is_some() {
                return Ok(None);
            }
            sleep(Duration::from_millis(1));
        }
        bail!("demo: nbdkit does not answer")
    }
}

impl Drop for CachingNbdkit {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn print_table(printer: &DemoPrinter, rows: &[ImageDemoRow]) -> Result<()> {
    printer.section("From the command to a machine that has booted")?;
    printer.head(&["", "ready after", "first read", "boot", "boot again", "web requests"])?;
    let time = |ns: u64| millis(Duration::from_nanos(ns));
    rows.iter().try_for_each(|row| {
        let times = [row.ready_ns, row.first_read_ns, row.boot_ns, row.again_ns].map(time);
        let mut cells = vec![row.what.to_owned()];
        cells.extend(times);
        cells.push(row.requests.to_string());
        printer.row(&cells)
    })
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn millis(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1e3)
}
