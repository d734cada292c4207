//! Block status of an export (`base:allocation`), on a separate connection.

use super::client::{BlockingNbdClient, NbdClientError};
use super::remote_export::RemoteExport;
use std::sync::{Arc, Mutex, PoisonError};
use udm_core::{ExtentKind, Extents, SECTOR_SIZE, Sector, Sectors};
use udm_wire::nbd::client::ReplyEvent;
use udm_wire::nbd::{CONTEXT_ALLOCATION, NbdCommand, STATE_ZERO};

/// The longest range of one query, in bytes.
const RANGE_MAX: u64 = 1 << 30;

/// Queries block status over a connection that is kept for reuse.
pub(super) struct BlockStatusClient {
    server: Arc<RemoteExport>,
    client: Mutex<Option<BlockingNbdClient>>,
}

impl BlockStatusClient {
    pub(super) fn new(server: &Arc<RemoteExport>) -> BlockStatusClient {
        BlockStatusClient { server: Arc::clone(server), client: Mutex::default() }
    }

    /// As [`udm_core::Device::extents`].
    pub(super) fn extents(
        &self,
        from: Sector,
        len: Sectors,
        out: &mut Extents,
    ) -> Result<(), NbdClientError> {
        let mut kept = self.client.lock().unwrap_or_else(PoisonError::into_inner);
        let mut client = match kept.take() {
            Some(client) => client,
            None => BlockingNbdClient::connect(&self.server.uri, &[CONTEXT_ALLOCATION])?,
        };
        let (mut at, end) = (from.bytes(), (from + len).bytes());
        while at < end && !out.is_full() {
            at += fetch_block_status(&mut client, at, end - at, out)?;
        }
        // A connection that failed is dropped.
        *kept = Some(client);
        Ok(())
    }
}

/// Queries a range that starts at `at`. Returns the number of bytes for which extents were
/// appended.
fn fetch_block_status(
    client: &mut BlockingNbdClient,
    at: u64,
    left: u64,
    out: &mut Extents,
) -> Result<u64, NbdClientError> {
    let Some(allocation) = client.export().contexts.first().map(|(id, _)| *id) else {
        out.push(Sectors::from_bytes(left), ExtentKind::Data);
        return Ok(left);
    };
    let len = left.min(RANGE_MAX);
    let mut runs = ExtentSectorRounder { total: 0, part: 0, content: ExtentKind::Hole };
    client.ask(NbdCommand::BlockStatus, at, len as u32, &[], |event| {
        if let ReplyEvent::Status { context, descriptors, .. } = event
            && context == allocation
        {
            for (n, state) in descriptors {
                let content = if state & STATE_ZERO != 0 { ExtentKind::Hole } else { ExtentKind::Data };
                runs.add(u64::from(n).min(len - runs.total), content, out);
            }
        }
    })?;
    let whole = runs.total - runs.part;
    if whole == 0 {
        // The reply covers less than a sector: counts this sector as data and continues after it.
        out.push(Sectors(1), ExtentKind::Data);
        return Ok(SECTOR_SIZE);
    }
    Ok(whole)
}

/// Merges runs of bytes into whole sectors. A sector with both kinds of content is data.
struct ExtentSectorRounder {
    /// Total bytes so far.
    total: u64,
    /// Bytes of the last, incomplete sector.
    part: u64,
    content: ExtentKind,
}

impl ExtentSectorRounder {
    fn add(&mut self, bytes: u64, content: ExtentKind, out: &mut Extents) {
        self.total += bytes;
        let fills = bytes.min((SECTOR_SIZE - self.part) % SECTOR_SIZE);
        if self.part > 0 {
            if self.content != content {
                self.content = ExtentKind::Data;
            }
            self.part += fills;
            if self.part < SECTOR_SIZE {
                return;
            }
            out.push(Sectors(1), self.content);
        }
        let rest = bytes - fills;
        out.push(Sectors::from_bytes(rest), content);
        (self.part, self.content) = (rest % SECTOR_SIZE, content);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use udm_core::Extent;

    /// If runs end within a sector, each byte counts for its sector.
    #[test]
    fn runs_become_sectors() {
        use ExtentKind::{Data, Hole};
        let mut out = Extents::new(100);
        let mut runs = ExtentSectorRounder { total: 0, part: 0, content: Hole };
        for (bytes, content) in [
            (512, Hole),
            (100, Hole),
            (412, Data),
            (1024, Hole),
            (1, Hole),
            (2, Data),
            (509, Hole),
            (700, Data),
        ] {
            runs.add(bytes, content, &mut out);
        }
        let want = [(1, Hole), (1, Data), (2, Hole), (2, Data)];
        let want: Vec<_> = want.map(|(len, content)| Extent { len: Sectors(len), content }).into();
        assert_eq!(out.list(), want);
        assert_eq!((runs.total, runs.part), (3260, 188));
    }
}
