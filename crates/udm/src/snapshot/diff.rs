//! `udm snapshot diff`: requests the ranges page by page and prints each page as it arrives.

use super::DiffArgs;
use crate::output::{say_json, to_stdout};
use crate::requests::ask;
use anyhow::{Context, Result};
use serde::Serialize;
use std::io::Write;
use udm_control::api::{self, verbs};
use udm_control::client::ControlClient;

/// The complete result, for `--json`.
#[derive(Debug, Serialize)]
struct DiffReport {
    size_bytes: u64,
    chunk_bytes: u64,
    /// Sum of the lengths of the ranges, in bytes.
    changed_bytes: u64,
    ranges: Vec<api::Range>,
}

/// The ranges that may differ between a snapshot and its origin, or another snapshot, in pages.
pub(super) struct DiffPages<'a> {
    client: &'a ControlClient,
    name: &'a str,
    against: Option<&'a str>,
    next: Option<u64>,
}

impl<'a> DiffPages<'a> {
    pub(super) fn new(client: &'a ControlClient, name: &'a str, against: Option<&'a str>) -> DiffPages<'a> {
        DiffPages { client, name, against, next: Some(0) }
    }

    pub(super) fn next(&mut self) -> Result<Option<api::Changes>> {
        let Some(from) = self.next else { return Ok(None) };
        let query =
            api::ChangesQuery { against: self.against.map(str::to_owned), from: Some(from), max: None };
        let page = ask(self.client, verbs::GET_CHANGES.on(self.name).with(&query))?;
        // Stops if the server makes no progress, so that a faulty server cannot cause an endless
        // loop.
        self.next = page.next_bytes.filter(|next| *next > from);
        Ok(Some(page))
    }
}

pub(super) fn run(args: &DiffArgs) -> Result<()> {
    let client = args.server.client()?;
    let mut pages = DiffPages::new(&client, &args.name, args.against.as_deref());
    if args.print.json {
        let mut report = DiffReport { size_bytes: 0, chunk_bytes: 0, changed_bytes: 0, ranges: Vec::new() };
        while let Some(page) = pages.next()? {
            (report.size_bytes, report.chunk_bytes) = (page.size_bytes, page.chunk_bytes);
            report.ranges.extend(page.ranges);
        }
        report.changed_bytes = report.ranges.iter().map(|range| range.length_bytes).sum();
        return say_json(&report);
    }
    to_stdout(|out| {
        while let Some(page) = pages.next()? {
            for api::Range { start_bytes, length_bytes } in page.ranges {
                writeln!(out, "{start_bytes}\t{length_bytes}").context("standard output")?;
            }
        }
        Ok(())
    })
}
