//! Waits for the end of a merge.

use crate::progress::{ByteProgress, ProgressBars};
use crate::requests::explain_client_error;
use anyhow::{Result, bail};
use std::thread::sleep;
use std::time::Duration;
use udm_control::api::{self, verbs};
use udm_control::client::{ControlClient, ControlClientError};
use udm_core::errno::EINVAL;

/// Time between two queries of the server.
const TICK: Duration = Duration::from_millis(50);

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
    let mut shown = ByteProgress::new(&ProgressBars::new(), "merged", total);
    // Uses the device number: the device may be renamed meanwhile.
    let number = client.call(verbs::GET_DEVICE.on(&begun.name), &()).map(|origin| origin.number);
    let number = number.map_err(|error| explain_client_error(error, None))?;
    let mut now = begun;
    loop {
        match now.state.as_str() {
            "merging" | "merged" => shown.show(total.saturating_sub(merge_bytes_left(&now)), "")?,
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
    shown.show(total, "")
}

/// Bytes that are still to be merged.
fn merge_bytes_left(merge: &api::SnapshotDescription) -> u64 {
    merge.used_bytes.saturating_sub(merge.metadata_bytes)
}
