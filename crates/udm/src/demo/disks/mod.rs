//! `udm demo disks`: a hundred writable disks from one image.
//!
//! Each is a persistent snapshot with a sparse store of its own, served over NBD. A client writes
//! to each and checks its reads. A diff of each reports its writes, and one disk is made again. It
//! needs no root and leaves nothing on the machine.

mod image;

use super::demo_server::DemoServer;
use super::printer::{Printer, thousands};
use anyhow::{Context, Result, bail};
use image::{IMAGE, IMAGE_BYTES, block, memory_bytes};
use serde::Serialize;
use std::time::{Duration, Instant};
use udm_control::api;
use udm_control::verbs::snapshot;

/// How many disks.
const DISKS: u64 = 100;

/// Blocks that a client writes, and their size.
const BLOCKS: u64 = 8;
const BLOCK: u64 = 4096;

/// How far apart they are: no two disks write the same place.
const STRIDE: u64 = 16 << 20;

/// What was seen, for `--json`.
#[derive(Debug, Serialize)]
struct DisksReport {
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
/// When something can't be done, or is wrong: that is a bug in udm.
pub fn run(json: bool) -> Result<()> {
    let paper = Printer::new(json);
    let scene = DemoServer::set()?;
    let image = scene.folder().join("image.img");
    image::make(&image).with_context(|| image.display().to_string())?;
    scene.map(IMAGE, &image, IMAGE_BYTES)?;
    paper.section("One image, a hundred disks")?;
    let image = format!("{} MiB, mostly holes, in {}", IMAGE_BYTES >> 20, scene.folder().display());
    paper.fact("image", &image)?;
    let mut report = DisksReport { disks: DISKS, image_bytes: IMAGE_BYTES, ..make(&paper, &scene)? };
    write_all(&paper, &scene, &mut report)?;
    compare_all(&paper, &scene, &mut report)?;
    reset(&paper, &scene, &mut report)?;
    remove_all(&paper, &scene, &mut report)?;
    if json {
        crate::output::say_json(&report)?;
    }
    if report.blocks_wrong + report.diffs_wrong > 0 {
        bail!("demo: blocks or diffs are wrong: this is a bug in udm");
    }
    Ok(())
}

fn name(disk: u64) -> String {
    format!("vm{disk:03}")
}

/// The places that the client of `disk` writes.
fn places(disk: u64) -> impl Iterator<Item = u64> {
    (0..BLOCKS).map(move |at| at * STRIDE + (disk + 1) * BLOCK)
}

/// What it writes there.
fn content(disk: u64, at: u64) -> Vec<u8> {
    [at.to_le_bytes(), disk.to_be_bytes()].concat().repeat(BLOCK as usize / 16)
}

fn create(scene: &DemoServer, disks: impl Iterator<Item = u64>) -> Result<Duration> {
    scene.take_snapshots(disks.map(|disk| (name(disk), IMAGE.into())))
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn millis(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1e3)
}

fn kib(bytes: u64) -> String {
    format!("{} KiB", thousands(bytes.div_ceil(1024)))
}

/// Makes the disks.
fn make(paper: &Printer, scene: &DemoServer) -> Result<DisksReport> {
    let before = memory_bytes()?;
    let time = create(scene, 0..DISKS)?;
    let exports = scene.registry.exports().len() as u64 - 1;
    let memory = memory_bytes()?.saturating_sub(before) / DISKS;
    let disk = scene.stores_bytes()? / DISKS;
    paper.fact("created", &format!("{DISKS} writable disks in {}, {exports} exported", millis(time)))?;
    paper.fact("a fresh disk", &format!("{} of memory, {} of disk", kib(memory), kib(disk)))?;
    if exports != DISKS {
        bail!("demo: {exports} of {DISKS} disks are exported");
    }
    Ok(DisksReport {
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

/// A client a disk: writes its blocks, and then each reads its own and its neighbour's places.
fn write_all(paper: &Printer, scene: &DemoServer, report: &mut DisksReport) -> Result<()> {
    let (begin, before) = (Instant::now(), memory_bytes()?);
    for disk in 0..DISKS {
        let mut client = scene.client(&name(disk))?;
        for at in places(disk) {
            client.write(at, &content(disk, at))?;
            report.blocks_written += 1;
        }
        client.flush()?;
    }
    for disk in 0..DISKS {
        check(scene, disk, true, report)?;
    }
    let mut image = scene.client(IMAGE)?;
    for at in (0..DISKS).flat_map(places) {
        count_block(report, image.read(at, BLOCK as u32)? == block(at));
    }
    report.used_memory_bytes_a_disk =
        report.fresh_memory_bytes_a_disk + memory_bytes()?.saturating_sub(before) / DISKS;
    report.used_disk_bytes_a_disk = scene.stores_bytes()? / DISKS;
    let (memory, disk) = (kib(report.used_memory_bytes_a_disk), kib(report.used_disk_bytes_a_disk));
    let written = thousands(report.blocks_written);
    paper.fact(
        "written",
        &format!("{written} blocks by {DISKS} NBD clients in {}", millis(begin.elapsed())),
    )?;
    paper.fact("a used disk", &format!("{memory} of memory with its client's buffers, {disk} of disk"))?;
    let (checked, wrong) = (thousands(report.blocks_checked), report.blocks_wrong);
    paper.verdict(wrong == 0, &format!("{checked} blocks read from disks and image, {wrong} wrong"))
}

/// Reads the places of `disk`, which has its blocks when it is `written`, and of the next one.
fn check(scene: &DemoServer, disk: u64, written: bool, report: &mut DisksReport) -> Result<()> {
    let mut client = scene.client(&name(disk))?;
    for at in places(disk) {
        let wanted = if written { content(disk, at) } else { block(at) };
        count_block(report, client.read(at, BLOCK as u32)? == wanted);
    }
    for at in places((disk + 1) % DISKS).chain([0, STRIDE]) {
        count_block(report, client.read(at, BLOCK as u32)? == block(at));
    }
    Ok(())
}

fn count_block(report: &mut DisksReport, right: bool) {
    report.blocks_checked += 1;
    report.blocks_wrong += u64::from(!right);
}

/// A diff of each disk is what its client wrote.
fn compare_all(paper: &Printer, scene: &DemoServer, report: &mut DisksReport) -> Result<()> {
    for disk in 0..DISKS {
        let found = snapshot::changes(&scene.registry, &name(disk), None, 0, snapshot::PAGE_MAX)?;
        let wanted = places(disk).map(|start_bytes| api::Range { start_bytes, length_bytes: BLOCK });
        report.diffs_wrong += u64::from(!found.ranges.into_iter().eq(wanted));
    }
    let wrong = report.diffs_wrong;
    paper.verdict(
        wrong == 0,
        &format!("{DISKS} diffs, each the {BLOCKS} blocks that were written: {wrong} wrong"),
    )
}

/// One disk is as fresh as on its first day.
fn reset(paper: &Printer, scene: &DemoServer, report: &mut DisksReport) -> Result<()> {
    let begin = Instant::now();
    scene.remove(&name(0))?;
    create(scene, 0..1)?;
    let time = begin.elapsed();
    report.reset_ns = nanos(time);
    let wrong = report.blocks_wrong;
    check(scene, 0, false, report)?;
    check(scene, 1, true, report)?;
    let good = wrong == report.blocks_wrong;
    paper.verdict(good, &format!("{} removed and made again in {}", name(0), millis(time)))
}

fn remove_all(paper: &Printer, scene: &DemoServer, report: &mut DisksReport) -> Result<()> {
    let begin = Instant::now();
    (0..DISKS).try_for_each(|disk| scene.remove(&name(disk)))?;
    report.remove_ns = nanos(begin.elapsed());
    let left = scene.stores_bytes()?;
    paper.verdict(left == 0, &format!("all removed in {}, {} left", millis(begin.elapsed()), kib(left)))
}
