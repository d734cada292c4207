//! `udm demo disks`: a hundred writable disks from one image.
//!
//! Each disk is a persistent snapshot with its own sparse store, served over NBD. A client writes
//! to each disk and checks its reads. A diff of each disk reports its writes, and one disk is
//! created again. It needs no root and leaves nothing on the machine.

mod image;

use super::demo_server::DemoServer;
use super::printer::{DemoPrinter, thousands};
use anyhow::{Context, Result, bail};
use image::{IMAGE, IMAGE_BYTES, image_block_content, read_rss_anon_bytes};
use serde::Serialize;
use std::time::{Duration, Instant};
use udm_control::api;
use udm_control::verbs::snapshot;

/// Number of disks.
const DISKS: u64 = 100;

/// Blocks that a client writes, and their size in bytes.
const BLOCKS: u64 = 8;
const BLOCK: u64 = 4096;

/// Distance between the blocks of a disk, in bytes; no two disks write the same block.
const STRIDE: u64 = 16 << 20;

/// The results, for `--json`.
#[derive(Debug, Serialize)]
struct DisksDemoReport {
    disks: u64,
    image_bytes: u64,
    create_ns: u64,
    reset_ns: u64,
    remove_ns: u64,
    blocks_written: u64,
    blocks_checked: u64,
    blocks_wrong: u64,
    diffs_wrong: u64,
    fresh_memory_bytes_a_disk: u64,
    fresh_disk_bytes_a_disk: u64,
    used_memory_bytes_a_disk: u64,
    used_disk_bytes_a_disk: u64,
}

/// Runs the demo.
///
/// # Errors
/// A step fails, or a result is wrong, which is a bug in udm.
pub fn run(json: bool) -> Result<()> {
    let printer = DemoPrinter::new(json);
    let server = DemoServer::start()?;
    let image = server.folder().join("image.img");
    image::create_sparse_image(&image).with_context(|| image.display().to_string())?;
    server.map(IMAGE, &image, IMAGE_BYTES)?;
    printer.section("One image, a hundred disks")?;
    let image = format!("{} MiB, mostly holes, in {}", IMAGE_BYTES >> 20, server.folder().display());
    printer.fact("image", &image)?;
    let mut report = DisksDemoReport {
        disks: DISKS,
        image_bytes: IMAGE_BYTES,
        ..create_and_measure_disks(&printer, &server)?
    };
    write_and_check_disks(&printer, &server, &mut report)?;
    check_disk_diffs(&printer, &server, &mut report)?;
    reset_disk_to_image(&printer, &server, &mut report)?;
    remove_demo_disks(&printer, &server, &mut report)?;
    if json {
        crate::output::print_json_to_stdout(&report)?;
    }
    if report.blocks_wrong + report.diffs_wrong > 0 {
        bail!("demo: blocks or diffs are wrong: this is a bug in udm");
    }
    Ok(())
}

fn demo_disk_name(disk: u64) -> String {
    format!("vm{disk:03}")
}

/// The offsets that the client of `disk` writes.
fn disk_write_offsets(disk: u64) -> impl Iterator<Item = u64> {
    (0..BLOCKS).map(move |at| at * STRIDE + (disk + 1) * BLOCK)
}

/// The content that it writes at an offset.
fn written_block_content(disk: u64, at: u64) -> Vec<u8> {
    [at.to_le_bytes(), disk.to_be_bytes()].concat().repeat(BLOCK as usize / 16)
}

fn create_demo_disks(server: &DemoServer, disks: impl Iterator<Item = u64>) -> Result<Duration> {
    server.take_snapshots(disks.map(|disk| (demo_disk_name(disk), IMAGE.into())))
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn format_millis(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1e3)
}

fn format_kib(bytes: u64) -> String {
    format!("{} KiB", thousands(bytes.div_ceil(1024)))
}

/// Creates the disks.
fn create_and_measure_disks(printer: &DemoPrinter, server: &DemoServer) -> Result<DisksDemoReport> {
    let before = read_rss_anon_bytes()?;
    let time = create_demo_disks(server, 0..DISKS)?;
    let exports = server.registry.exports().len() as u64 - 1;
    let memory = read_rss_anon_bytes()?.saturating_sub(before) / DISKS;
    let disk = server.stores_bytes()? / DISKS;
    printer
        .fact("created", &format!("{DISKS} writable disks in {}, {exports} exported", format_millis(time)))?;
    printer
        .fact("a fresh disk", &format!("{} of memory, {} of disk", format_kib(memory), format_kib(disk)))?;
    if exports != DISKS {
        bail!("demo: {exports} of {DISKS} disks are exported");
    }
    Ok(DisksDemoReport {
        disks: DISKS,
        image_bytes: IMAGE_BYTES,
        create_ns: nanos(time),
        reset_ns: 0,
        remove_ns: 0,
        blocks_written: 0,
        blocks_checked: 0,
        blocks_wrong: 0,
        diffs_wrong: 0,
        fresh_memory_bytes_a_disk: memory,
        fresh_disk_bytes_a_disk: disk,
        used_memory_bytes_a_disk: 0,
        used_disk_bytes_a_disk: 0,
    })
}

/// Writes the blocks of each disk with one client per disk. Then each client reads its own blocks
/// and those of the next disk.
fn write_and_check_disks(
    printer: &DemoPrinter,
    server: &DemoServer,
    report: &mut DisksDemoReport,
) -> Result<()> {
    let (begin, before) = (Instant::now(), read_rss_anon_bytes()?);
    for disk in 0..DISKS {
        let mut client = server.client(&demo_disk_name(disk))?;
        for at in disk_write_offsets(disk) {
            client.write(at, &written_block_content(disk, at))?;
            report.blocks_written += 1;
        }
        client.flush()?;
    }
    for disk in 0..DISKS {
        check_disk_blocks(server, disk, true, report)?;
    }
    let mut image = server.client(IMAGE)?;
    for at in (0..DISKS).flat_map(disk_write_offsets) {
        count_checked_block(report, image.read(at, BLOCK as u32)? == image_block_content(at));
    }
    report.used_memory_bytes_a_disk =
        report.fresh_memory_bytes_a_disk + read_rss_anon_bytes()?.saturating_sub(before) / DISKS;
    report.used_disk_bytes_a_disk = server.stores_bytes()? / DISKS;
    let (memory, disk) =
        (format_kib(report.used_memory_bytes_a_disk), format_kib(report.used_disk_bytes_a_disk));
    let written = thousands(report.blocks_written);
    printer.fact(
        "written",
        &format!("{written} blocks by {DISKS} NBD clients in {}", format_millis(begin.elapsed())),
    )?;
    printer.fact("a used disk", &format!("{memory} of memory with its client's buffers, {disk} of disk"))?;
    let (checked, wrong) = (thousands(report.blocks_checked), report.blocks_wrong);
    printer.verdict(wrong == 0, &format!("{checked} blocks read from disks and image, {wrong} wrong"))
}

/// Checks the blocks of `disk`, which are new if `written`, and the unwritten blocks of the next
/// disk.
fn check_disk_blocks(
    server: &DemoServer,
    disk: u64,
    written: bool,
    report: &mut DisksDemoReport,
) -> Result<()> {
    let mut client = server.client(&demo_disk_name(disk))?;
    for at in disk_write_offsets(disk) {
        let expected = if written { written_block_content(disk, at) } else { image_block_content(at) };
        count_checked_block(report, client.read(at, BLOCK as u32)? == expected);
    }
    for at in disk_write_offsets((disk + 1) % DISKS).chain([0, STRIDE]) {
        count_checked_block(report, client.read(at, BLOCK as u32)? == image_block_content(at));
    }
    Ok(())
}

fn count_checked_block(report: &mut DisksDemoReport, right: bool) {
    report.blocks_checked += 1;
    report.blocks_wrong += u64::from(!right);
}

/// Checks that the diff of each disk is exactly the written blocks.
fn check_disk_diffs(printer: &DemoPrinter, server: &DemoServer, report: &mut DisksDemoReport) -> Result<()> {
    for disk in 0..DISKS {
        let found = snapshot::list_changed_ranges(
            &server.registry,
            &demo_disk_name(disk),
            None,
            0,
            snapshot::PAGE_MAX,
        )?;
        let expected = disk_write_offsets(disk)
            .map(|start_bytes| api::ChangedByteRange { start_bytes, length_bytes: BLOCK });
        report.diffs_wrong += u64::from(!found.ranges.into_iter().eq(expected));
    }
    let wrong = report.diffs_wrong;
    printer.verdict(
        wrong == 0,
        &format!("{DISKS} diffs compared with the {BLOCKS} blocks written to each disk, {wrong} wrong"),
    )
}

/// Resets one disk to the image.
fn reset_disk_to_image(
    printer: &DemoPrinter,
    server: &DemoServer,
    report: &mut DisksDemoReport,
) -> Result<()> {
    let begin = Instant::now();
    server.remove(&demo_disk_name(0))?;
    create_demo_disks(server, 0..1)?;
    let time = begin.elapsed();
    report.reset_ns = nanos(time);
    let wrong = report.blocks_wrong;
    check_disk_blocks(server, 0, false, report)?;
    check_disk_blocks(server, 1, true, report)?;
    let good = wrong == report.blocks_wrong;
    printer
        .verdict(good, &format!("{} removed and created again in {}", demo_disk_name(0), format_millis(time)))
}

fn remove_demo_disks(printer: &DemoPrinter, server: &DemoServer, report: &mut DisksDemoReport) -> Result<()> {
    let begin = Instant::now();
    (0..DISKS).try_for_each(|disk| server.remove(&demo_disk_name(disk)))?;
    report.remove_ns = nanos(begin.elapsed());
    let left = server.stores_bytes()?;
    printer.verdict(
        left == 0,
        &format!("all removed in {}, {} left", format_millis(begin.elapsed()), format_kib(left)),
    )
}
