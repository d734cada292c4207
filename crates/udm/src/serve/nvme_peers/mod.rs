//! The other servers of the NVMe subsystem (`--nvme-peers`), and resets of their controllers.
//!
//! A host that has lost a controller of one server asks another server to reset it. That one looks
//! for the record of the first one in the shared folder ([`folder`]):
//!
//! * Its lock is free: the server has ended, and none of its requests is at a disk of this machine.
//!   Unless it has used disks of other servers, the controller is answered as reset at once.
//! * It is locked: the server is asked over its control socket. It ends the controller, waits until
//!   none of its requests is at a disk, and answers. If it ends meanwhile, its lock becomes free.
//! * It does not answer, because it is stopped or stuck: the reset has failed, and the host waits
//!   for the time that its controllers promise, as without peers.
//! * There is no record, or one of another release or boot: the reset is refused.
//!
//! Threads ask, at most [`RESETS_MAX`] at a time; the cores only get the outcome.

mod folder;

use anyhow::{Context, Result};
use folder::{OtherRecord, OwnRecord, PeerFolder};
use std::ops::RangeInclusive;
use std::os::fd::IntoRawFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};
use udm_backends::RemoteDisks;
use udm_control::api::{self, verbs};
use udm_control::client::{ControlClient, ControlClientError};
use udm_frontends::nvme::{NvmePeerReset, NvmePeers, NvmeResetOutcome, NvmeResetReply};
use udm_runtime::ProcessCores;
use udm_wire::nvme::PeerRecord;

/// Limit of resets at a time. Further ones fail.
const RESETS_MAX: usize = 32;

/// Limit of the wait for the lock of a server that has not reset its controller: it may be ending,
/// and have requests at a disk that hangs.
const END_MAX: Duration = Duration::from_secs(30);

/// Limit of this wait after a refusal: it may come from the next life of a server that is ending.
/// Hosts may cause refusals, and a wait takes the place of another reset.
const REFUSED_END_MAX: Duration = Duration::from_secs(1);

/// Pause between looks at a lock.
const END_PAUSE: Duration = Duration::from_millis(5);

/// Limit of the answers of cores when they register the record.
const REGISTER_MAX: Duration = Duration::from_secs(10);

/// The other servers of the subsystem.
#[derive(Debug)]
pub(super) struct NvmePeerServers {
    shared: Arc<PeerResets>,
}

#[derive(Debug)]
struct PeerResets {
    folder: PeerFolder,
    subsystem: String,
    /// Number of threads that ask.
    asking: AtomicUsize,
}

impl NvmePeerServers {
    /// Joins the servers that use the folder `path`. Returns them, and the numbers for the
    /// controllers of this server, which are known by `tag`.
    ///
    /// # Errors
    /// The folder cannot be used, or the kernel cannot tie the record to the rings.
    pub(super) fn join(
        path: &Path,
        subsystem: &str,
        tag: u32,
        control: &Path,
        core_set: &ProcessCores,
        remote_disks: &RemoteDisks,
    ) -> Result<(NvmePeerServers, RangeInclusive<u16>)> {
        let folder = PeerFolder::open(path)?;
        let own = folder.join(tag, subsystem, control)?;
        core_set.register_file(&own.file, REGISTER_MAX).context("io_uring")?;
        // Open until the process has ended, whatever ends before.
        let _ = own.file.try_clone()?.into_raw_fd();
        let file = Arc::clone(&own.file);
        let observer = move |uri: &str| {
            tracing::warn!(
                "nvme: {uri} is no disk of this machine: if this server is killed, its peers cannot know when its \
                 writes are over, and hosts wait for the quiesce time"
            );
            OwnRecord::append_remote(&file, uri)
        };
        remote_disks.observe(observer)?;
        tracing::info!(
            "nvme: {}: {} other servers; controllers {} to {}",
            folder.path().display(),
            own.others,
            own.controllers.start(),
            own.controllers.end()
        );
        let (subsystem, asking) = (subsystem.to_owned(), AtomicUsize::new(0));
        Ok((NvmePeerServers { shared: Arc::new(PeerResets { folder, subsystem, asking }) }, own.controllers))
    }
}

impl NvmePeers for NvmePeerServers {
    fn reset(&self, request: NvmePeerReset, reply: NvmeResetReply) {
        let place = AskingPlace::take(&self.shared);
        if place.before >= RESETS_MAX {
            tracing::warn!("nvme: {}: {RESETS_MAX} resets of peers are in progress: one fails", request.host);
            return;
        }
        let ask = move || {
            let outcome = place.shared.reset(&request);
            drop(place);
            reply.send(outcome);
        };
        // Without a thread, the reply is dropped, and the reset has failed.
        if let Err(error) = std::thread::Builder::new().name("udm-nvme-peer".into()).spawn(ask) {
            tracing::warn!("nvme: asking a peer: {error}");
        }
    }
}

/// The place of a thread among those that ask; dropping it makes room, also after a panic.
struct AskingPlace {
    shared: Arc<PeerResets>,
    /// Number of threads that asked before.
    before: usize,
}

impl AskingPlace {
    fn take(shared: &Arc<PeerResets>) -> AskingPlace {
        let before = shared.asking.fetch_add(1, Ordering::AcqRel);
        AskingPlace { shared: Arc::clone(shared), before }
    }
}

impl Drop for AskingPlace {
    fn drop(&mut self) {
        self.shared.asking.fetch_sub(1, Ordering::AcqRel);
    }
}

impl PeerResets {
    /// Resets a controller of another server. Blocks.
    fn reset(&self, request: &NvmePeerReset) -> NvmeResetOutcome {
        let id = request.impacted.id;
        let found = self.folder.find(request.tag());
        let found = found.filter(|other| {
            other.record.subsystem == self.subsystem && other.record.controllers.contains(&id)
        });
        let Some(other) = found else {
            tracing::warn!(
                "nvme: {}: controller {id} is not reset: {} has no record of its server",
                request.host,
                self.folder.path().display()
            );
            return NvmeResetOutcome::Refused;
        };
        if let Some(record) = other.of_ended_server() {
            return outcome_of_ended_server(request, &record);
        }
        let control = &other.record.control;
        let (outcome, limit, why) = match self.ask(control, request) {
            Ok(reply) if reply.outcome == "done" => {
                tracing::warn!("nvme: {}: controller {id} was reset by its server ({control})", request.host);
                return NvmeResetOutcome::Done;
            }
            Ok(reply) if reply.outcome == "refused" => {
                (NvmeResetOutcome::Refused, REFUSED_END_MAX, reply.why)
            }
            Ok(reply) => (NvmeResetOutcome::Failed, END_MAX, reply.why),
            Err(error) => (NvmeResetOutcome::Failed, END_MAX, error.to_string()),
        };
        // It may be about to end: then its next life may have the control socket already.
        if let Some(record) = wait_for_end(&other, limit) {
            return outcome_of_ended_server(request, &record);
        }
        tracing::warn!(
            "nvme: {}: controller {id} is not reset by its server ({control}): {why}",
            request.host
        );
        outcome
    }

    fn ask(
        &self,
        control: &str,
        request: &NvmePeerReset,
    ) -> Result<api::ResetNvmeControllerReply, ControlClientError> {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let body = api::ResetNvmeControllerRequest {
            subsystem: self.subsystem.clone(),
            cntlid: request.impacted.id,
            uniquifier: request.impacted.uniquifier,
            random: hex(&request.impacted.random.to_be_bytes()),
            host_nqn: request.host.clone(),
            host_id: hex(&request.host_id),
        };
        ControlClient::new(control).call(verbs::RESET_NVME_CONTROLLER, &body)
    }
}

/// The outcome for a controller of a server that has ended with this record.
fn outcome_of_ended_server(request: &NvmePeerReset, record: &PeerRecord) -> NvmeResetOutcome {
    let (id, control) = (request.impacted.id, &record.control);
    match &record.remote {
        None => {
            tracing::warn!(
                "nvme: {}: controller {id} is over: its server ({control}) has ended",
                request.host
            );
            NvmeResetOutcome::Done
        }
        Some(uri) => {
            tracing::warn!(
                "nvme: {}: controller {id} is not reset: its server ({control}) has ended, but has used {uri}, which \
                 may carry out writes later",
                request.host
            );
            NvmeResetOutcome::Refused
        }
    }
}

/// Waits for the end of a server, for `limit` at most. Returns its record then.
fn wait_for_end(other: &OtherRecord, limit: Duration) -> Option<PeerRecord> {
    let end = Instant::now() + limit;
    loop {
        let record = other.of_ended_server();
        if record.is_some() || Instant::now() >= end {
            return record;
        }
        sleep(END_PAUSE);
    }
}

/// The request of another server, as the front end takes it.
pub(super) fn parse_reset_request(request: &api::ResetNvmeControllerRequest) -> Option<NvmePeerReset> {
    let hex = |text: &str, digits: usize| {
        let is_hex = text.len() == digits && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_hex.then(|| u128::from_str_radix(text, 16).ok())?
    };
    let (random, host_id) = (hex(&request.random, 16)? as u64, hex(&request.host_id, 32)?.to_be_bytes());
    let (id, uniquifier) = (request.cntlid, request.uniquifier);
    let impacted = udm_wire::nvme::ControllerInstance { id, uniquifier, random };
    Some(NvmePeerReset { impacted, host: request.host_nqn.clone(), host_id })
}
