//! `udm demo cable`: two NBD servers of one file as paths, and a client's view when one is stopped,
//! killed or cut off, and when both fail for a time.
//!
//! The servers are nbdkit; the client is fio, which verifies its reads. The reference is plain NBD
//! with one server and without udm. It leaves nothing on the machine. The part with a network needs
//! root.

mod fio;
mod servers;

use super::demo_server::DemoServer;
use super::printer::DemoPrinter;
use anyhow::{Context, Result, bail};
use fio::{FioProcess, FioResult};
use serde::Serialize;
use servers::{FaultableServer, NbdkitServer, NetnsNbdkitServer};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use udm_control::registry::{PathMaintenanceSettings, PathWatchOptions};
use udm_control::verbs;
use udm_core::{Nanos, SECTOR_SIZE};
use udm_wire::multipath_conf::MultipathSettings;

/// The size in bytes of the file that all servers serve.
const BYTES: u64 = 64 << 20;

/// The deadline in the URI of each path, after which the path counts as silent.
const DEADLINE: &str = "300ms";

/// The name of the device with hedged reads.
const HEDGED: &str = "hedged";

/// Time from the start of a run to the fault, and the duration of the fault.
const LOST_AT: Duration = Duration::from_millis(700);
const AWAY: Duration = Duration::from_secs(1);

/// The name of the part without a fault.
const WHOLE: &str = "nothing is lost";

/// A part of the demo, for `--json`.
#[derive(Debug, Serialize)]
struct CableDemoFaultReport {
    what: &'static str,
    udm: FioResult,
    /// The same fault with plain NBD, if it was measured.
    plain: Option<FioResult>,
}

/// The server and its files.
struct CableDemoFixture {
    server: DemoServer,
    disk: PathBuf,
    fence: PathBuf,
}

impl CableDemoFixture {
    fn start() -> Result<CableDemoFixture> {
        for program in ["nbdkit", "fio"] {
            if !servers::is_program_installed(program) {
                bail!(
                    "demo cable: {program} is not installed; the servers are nbdkit, and the client is fio"
                );
            }
        }
        let server = DemoServer::start()?;
        let settings = MultipathSettings {
            polling_interval: Nanos::from_millis(500),
            max_polling_interval: Nanos::from_millis(2000),
            ..MultipathSettings::every(1)
        };
        let settings = Arc::new(settings);
        server.registry.set_maintenance(Box::new(move |name, _| PathMaintenanceSettings {
            paths: Some(Arc::clone(&settings)),
            watch: PathWatchOptions { hedge_reads: name == HEDGED, ..PathWatchOptions::default() },
        }));
        let disk = server.folder().join("disk.img");
        std::fs::File::create(&disk).and_then(|file| file.set_len(BYTES)).context("demo: image")?;
        let fence = servers::write_fence_script(server.folder()).context("demo: command that fences")?;
        Ok(CableDemoFixture { server, disk, fence })
    }

    fn start_server(&self, name: &str) -> Result<NbdkitServer> {
        NbdkitServer::start(&self.server.folder().join(name), &self.disk)
    }

    /// Creates a multipath device over two paths.
    fn map(&self, name: &str, paths: [&str; 2]) -> Result<()> {
        let fence = self.fence.display();
        let [a, b] = paths.map(|uri| {
            let separator = if uri.contains('?') { '&' } else { '?' };
            format!("{uri}{separator}deadline={DEADLINE}&fence=exec:{fence} 1")
        });
        let sectors = BYTES / SECTOR_SIZE;
        let table = format!("0 {sectors} multipath 1 queue_if_no_path 0 1 1 round-robin 0 2 1 {a} {b}");
        Ok(verbs::block_on_verb(verbs::create_mapped_device(
            &self.server.registry,
            name,
            None,
            Some(&table),
        ))?)
    }

    /// Runs fio on `uri`; `servers` fail for a time meanwhile.
    fn run(&self, uri: &str, servers: &mut [&mut dyn FaultableServer]) -> Result<FioResult> {
        let run = FioProcess::start(uri, self.server.folder())?;
        std::thread::sleep(LOST_AT);
        for server in &mut *servers {
            server.fail()?;
        }
        std::thread::sleep(AWAY);
        for server in servers {
            server.recover()?;
        }
        run.end()
    }

    fn uri(&self, device: &str) -> String {
        self.server.uri(device).to_string()
    }

    /// Waits until all paths of a device work.
    fn wait_until_healthy(&self, device: &str) -> Result<()> {
        for _ in 0..600 {
            let status = verbs::table_status_by_device_name(&self.server.registry, device, false)?;
            if !status.text.contains(" F ") {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        bail!("demo: a path of {device} does not come back")
    }
}

/// Runs the demo.
///
/// # Errors
/// A program is missing, a step fails, or a block is wrong or a request failed. The last two are
/// bugs in udm.
pub fn run(json: bool) -> Result<()> {
    let printer = DemoPrinter::new(json);
    let fixture = CableDemoFixture::start()?;
    let (mut a, mut b) = (fixture.start_server("a")?, fixture.start_server("b")?);
    fixture.map("mp", [&a.uri(), &b.uri()])?;
    print_cable_demo_intro(&printer, &fixture)?;
    let (device, alone) = (fixture.uri("mp"), a.uri());
    let mut parts = Vec::new();
    let mut part = |what, udm: FioResult, plain: Option<FioResult>| -> Result<()> {
        let mut row = vec![String::from(what), udm.read(), udm.write()];
        row.extend(plain.iter().flat_map(|plain| [plain.read(), plain.write()]));
        printer.row(&row)?;
        parts.push(CableDemoFaultReport { what, udm, plain });
        Ok(())
    };
    part(WHOLE, fixture.run(&device, &mut [])?, Some(fixture.run(&alone, &mut [])?))?;
    let udm = fixture.run(&device, &mut [&mut a.stop_and_restart()])?;
    fixture.wait_until_healthy("mp")?;
    part("a server is stopped for 1 s", udm, Some(fixture.run(&alone, &mut [&mut a.pause()])?))?;
    fixture.map(HEDGED, [&a.uri(), &b.uri()])?;
    let hedged = fixture.uri(HEDGED);
    part("the same, with hedged reads", fixture.run(&hedged, &mut [&mut a.stop_and_restart()])?, None)?;
    fixture.wait_until_healthy(HEDGED)?;
    fixture.wait_until_healthy("mp")?;
    let udm = fixture.run(&device, &mut [&mut b.kill()])?;
    fixture.wait_until_healthy("mp")?;
    part("a server is killed", udm, Some(fixture.run(&alone, &mut [&mut a.kill()])?))?;
    fixture.wait_until_healthy("mp")?;
    part("both are killed for 1 s", fixture.run(&device, &mut [&mut a.kill(), &mut b.kill()])?, None)?;
    fixture.wait_until_healthy("mp")?;
    match NetnsNbdkitServer::missing() {
        Some(why) => {
            printer.fact("skipped", &format!("a server that is cut off from the network: {why}"))?;
        }
        None => {
            let mut net = NetnsNbdkitServer::start(&fixture.server.folder().join("net"), &fixture.disk)?;
            fixture.map("net", [&net.uri(), &b.uri()])?;
            let udm = fixture.run(&fixture.uri("net"), &mut [&mut net])?;
            part("a server is cut off", udm, None)?;
        }
    }
    print_cable_demo_summary(&printer, &parts, json)
}

fn print_cable_demo_intro(printer: &DemoPrinter, fixture: &CableDemoFixture) -> Result<()> {
    printer.section("One file, two servers, one device over both")?;
    printer.fact("servers", &format!("nbdkit, twice, over one file of {} MiB", BYTES >> 20))?;
    printer.fact(
        "device",
        "mp = multipath over both, round-robin, queue_if_no_path; paths are checked each 0.5 s",
    )?;
    let fence = fixture.fence.file_name().map(Path::new).unwrap_or(&fixture.fence).display();
    printer.fact(
        "silence",
        &format!(
            "after {DEADLINE}, reads use the other path; writes too, once \"{fence}\" has ended the server"
        ),
    )?;
    printer.fact(
        "hedged reads",
        "a read that takes long is also sent on the other path; otherwise the device is as mp",
    )?;
    printer
        .fact("client", "fio over NBD, 16 requests in flight, half are writes; every block is verified")?;
    printer.section("The longest that a request took")?;
    printer.head(&["", "udm: read", "write", "plain NBD: read", "write"])
}

fn print_cable_demo_summary(printer: &DemoPrinter, parts: &[CableDemoFaultReport], json: bool) -> Result<()> {
    printer.section("What the client saw")?;
    let whole = parts.iter().find(|part| part.what == WHOLE);
    if let Some(whole) = whole.filter(|part| part.udm.is_well) {
        printer.fact("p99.9", &format!("of reads when nothing is lost: {}", whole.udm.usual()))?;
    }
    let good = parts.iter().all(|part| part.udm.is_well);
    let requests: u64 = parts.iter().map(|part| part.udm.requests).sum();
    printer.verdict(
        good,
        &format!(
            "{} requests through udm, no error, all blocks verified",
            super::printer::thousands(requests)
        ),
    )?;
    if json {
        crate::output::print_json_to_stdout(&parts)?;
    }
    if let Some(part) = parts.iter().find(|part| !part.udm.is_well) {
        bail!("demo: {}: {}: this is a bug in udm", part.what, part.udm.errors);
    }
    Ok(())
}
