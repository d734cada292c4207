//! Progress of a merge: a bar on a terminal, otherwise lines.

use super::print::format_bytes;
use crate::output::print_to_stdout;
use crate::requests::explain_client_error;
use anyhow::{Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::thread::sleep;
use std::time::Duration;
use udm_control::api::{self, verbs};
use udm_control::client::{ControlClient, ControlClientError};
use udm_core::errno::EINVAL;

/// Time between two queries of the server.
const TICK: Duration = Duration::from_millis(50);

/// A line is printed each time this many more percent are done.
const LINE_EVERY: u64 = 10;

/// How the progress is shown.
enum MergeProgressDisplay {
    Bar(ProgressBar),
    /// The percent of the last line.
    Lines(u64),
}

/// Waits until the merge `begun` has ended; `before` describes the snapshot before the merge.
///
/// # Errors
/// If the merge fails, or the server does.
pub(super) fn wait_for_snapshot_merge(
    client: &ControlClient,
    before: &api::SnapshotDescription,
    begun: api::SnapshotDescription,
) -> Result<()> {
    let total = merge_bytes_left(before);
    let mut shown = if std::io::stderr().is_terminal() {
        let bar = ProgressBar::new(total);
        let style = ProgressStyle::with_template("{bar:30} {percent}% {msg} ({eta})");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        MergeProgressDisplay::Bar(bar)
    } else {
        MergeProgressDisplay::Lines(0)
    };
    // Uses the device number: the device may be renamed meanwhile.
    let number = client.call(verbs::GET_DEVICE.on(&begun.name), &()).map(|origin| origin.number);
    let number = number.map_err(|error| explain_client_error(error, None))?;
    let mut now = begun;
    loop {
        match now.state.as_str() {
            "merging" | "merged" => shown.show(total, merge_bytes_left(&now))?,
            state => bail!("{}: {state}", now.name),
        }
        sleep(TICK);
        match client.call(verbs::GET_SNAPSHOT.on(&number), &()) {
            Ok(next) => now = next,
            // The merge is over: the origin has its own table again.
            Err(ControlClientError::Refused(why)) if why.errno == EINVAL.unsigned_abs() => break,
            Err(error) => return Err(explain_client_error(error, None)),
        }
    }
    shown.show(total, 0)
}

/// Bytes that are still to be merged.
fn merge_bytes_left(merge: &api::SnapshotDescription) -> u64 {
    merge.used_bytes.saturating_sub(merge.metadata_bytes)
}

impl MergeProgressDisplay {
    fn show(&mut self, total: u64, left: u64) -> Result<()> {
        let done = total.saturating_sub(left);
        match self {
            MergeProgressDisplay::Bar(bar) => {
                bar.set_position(done);
                bar.set_message(format!("{}B of {}B", format_bytes(done), format_bytes(total)));
                if left == 0 {
                    bar.finish_and_clear();
                }
                Ok(())
            }
            MergeProgressDisplay::Lines(last) => {
                let percent = (done * 100).checked_div(total).unwrap_or(100);
                if percent < *last + LINE_EVERY {
                    return Ok(());
                }
                *last = percent;
                print_to_stdout(&format!(
                    "merged {percent}%, {}B of {}B\n",
                    format_bytes(done),
                    format_bytes(total)
                ))
            }
        }
    }
}

/// A bar on a terminal, and nothing elsewhere.
pub(super) fn bytes_bar(total: u64) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:30} {percent}% {bytes} of {total_bytes} ({eta})");
    ProgressBar::new(total).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// A bar with a message on a terminal, and nothing elsewhere.
pub fn progress_bar(total: u64) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:30} {percent}% {bytes} of {total_bytes} {msg}");
    ProgressBar::new(total).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
