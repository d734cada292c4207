//! `udm snapshot diff`: requests the ranges page by page and prints each page as it arrives.

use super::SnapshotDiffArgs;
use crate::output::{print_json_to_stdout, with_stdout_ignoring_epipe};
use crate::requests::call_verb_without_body;
use anyhow::{Context, Result};
use serde::Serialize;
use std::io::Write;
use udm_control::api::{self, verbs};
use udm_control::client::ControlClient;

/// The complete result, for `--json`.
#[derive(Debug, Serialize)]
struct SnapshotDiffReport {
    size_bytes: u64,
    chunk_bytes: u64,
    /// Sum of the lengths of the ranges, in bytes.
    changed_bytes: u64,
    ranges: Vec<api::ChangedByteRange>,
}

/// The ranges that may differ between a snapshot and its origin, or another snapshot, in pages.
pub(super) struct SnapshotDiffPages<'a> {
    client: &'a ControlClient,
    name: &'a str,
    against: Option<&'a str>,
    next: Option<u64>,
}

impl<'a> SnapshotDiffPages<'a> {
    pub(super) fn new(
        client: &'a ControlClient,
        name: &'a str,
        against: Option<&'a str>,
    ) -> SnapshotDiffPages<'a> {
        SnapshotDiffPages { client, name, against, next: Some(0) }
    }

    pub(super) fn next(&mut self) -> Result<Option<api::ChangedRangesPage>> {
        let Some(from) = self.next else { return Ok(None) };
        let query =
            api::ChangedRangesQuery { against: self.against.map(str::to_owned), from: Some(from), max: None };
        let page = call_verb_without_body(self.client, verbs::GET_CHANGES.on(self.name).with(&query))?;
        // Stops if the server makes no progress, so that a faulty server cannot cause an endless
        // loop.
        self.next = page.next_bytes.filter(|next| *next > from);
        Ok(Some(page))
    }
}

pub(super) fn run(args: &SnapshotDiffArgs) -> Result<()> {
    let client = args.server.client()?;
    let mut pages = SnapshotDiffPages::new(&client, &args.name, args.against.as_deref());
    if args.print.json {
        let mut report =
            SnapshotDiffReport { size_bytes: 0, chunk_bytes: 0, changed_bytes: 0, ranges: Vec::new() };
        while let Some(page) = pages.next()? {
            (report.size_bytes, report.chunk_bytes) = (page.size_bytes, page.chunk_bytes);
            report.ranges.extend(page.ranges);
        }
        report.changed_bytes = report.ranges.iter().map(|range| range.length_bytes).sum();
        return print_json_to_stdout(&report);
    }
    with_stdout_ignoring_epipe(|out| {
        while let Some(page) = pages.next()? {
            for api::ChangedByteRange { start_bytes, length_bytes } in page.ranges {
                writeln!(out, "{start_bytes}\t{length_bytes}").context("standard output")?;
            }
        }
        Ok(())
    })
}
