//! The verbs that clients of the control socket call.

use crate::wakeable::WakeableFuture;
use std::sync::Arc;
use udm_control::api::{CreateSnapshotsRequest, NewSnapshot};
use udm_control::error::VerbError;
use udm_control::registry::{BaseDir, NewName};
use udm_control::verbs::snapshot::{self, PendingMerge};
use udm_control::verbs::{self, CancelToken};
use udm_control::{DeviceRegistry, config};

/// A verb with its arguments.
#[derive(Clone, Debug)]
pub(super) enum ServerVerb {
    /// Creation of the devices of the configuration file, at the start of the server.
    Start,
    Reconfigure,
    Snapshot {
        names: Vec<String>,
        of: String,
        store: Option<String>,
    },
    Discard {
        name: String,
        keep_store: bool,
    },
    Merge {
        name: String,
    },
    /// Replacement of the table of a completed merge.
    Finish,
    Create {
        name: String,
        table: Option<String>,
    },
    Load {
        word: String,
        table: String,
    },
    Clear {
        word: String,
    },
    Suspend {
        word: String,
    },
    Resume {
        words: Vec<String>,
    },
    Remove {
        word: String,
    },
    Rename {
        word: String,
        to: String,
    },
}

/// Number of kinds of verbs.
pub(super) const KINDS: usize = 13;

impl ServerVerb {
    /// Names of the kinds.
    pub(super) const NAMES: [&str; KINDS] = [
        "start",
        "reconfigure",
        "snapshot create",
        "snapshot remove",
        "snapshot merge",
        "merge end",
        "create",
        "load",
        "clear",
        "suspend",
        "resume",
        "remove",
        "rename",
    ];

    /// Index of the kind.
    pub(super) fn kind(&self) -> usize {
        match self {
            ServerVerb::Start => 0,
            ServerVerb::Reconfigure => 1,
            ServerVerb::Snapshot { .. } => 2,
            ServerVerb::Discard { .. } => 3,
            ServerVerb::Merge { .. } => 4,
            ServerVerb::Finish => 5,
            ServerVerb::Create { .. } => 6,
            ServerVerb::Load { .. } => 7,
            ServerVerb::Clear { .. } => 8,
            ServerVerb::Suspend { .. } => 9,
            ServerVerb::Resume { .. } => 10,
            ServerVerb::Remove { .. } => 11,
            ServerVerb::Rename { .. } => 12,
        }
    }
}

/// Reply of a verb: the pending merge, or the devices of the file that failed.
pub(super) enum VerbReply {
    Nothing,
    Merging(PendingMerge),
    Applied(Vec<String>),
}

/// A verb in progress.
pub(super) struct ServerVerbJob {
    pub(super) id: u64,
    pub(super) verb: ServerVerb,
    pub(super) waiting: WakeableFuture<Result<VerbReply, VerbError>>,
    /// The snapshot that the verb removes or merges.
    pub(super) about: Option<usize>,
}

impl ServerVerbJob {
    pub(super) fn new(
        id: u64,
        verb: ServerVerb,
        registry: &Arc<DeviceRegistry>,
        wish: &config::DesiredState,
    ) -> ServerVerbJob {
        let waiting = WakeableFuture::new(execute_server_verb(registry.clone(), verb.clone(), wish.clone()));
        ServerVerbJob { id, verb, waiting, about: None }
    }

    /// Finishes a merge that has completed.
    pub(super) fn finish(id: u64, registry: &Arc<DeviceRegistry>, end: PendingMerge) -> ServerVerbJob {
        let registry = registry.clone();
        let waiting = WakeableFuture::new(async move {
            snapshot::finish_completed_merge(&registry, &end).map(|()| VerbReply::Nothing)
        });
        ServerVerbJob { id, verb: ServerVerb::Finish, waiting, about: None }
    }
}

fn make_reconfigure_reply(done: udm_control::api::ReconfigureReport) -> VerbReply {
    let failed = done.changes.into_iter().filter_map(|c| Some(format!("{}: {}", c.name, c.error?)));
    VerbReply::Applied(failed.collect())
}

async fn execute_server_verb(
    registry: Arc<DeviceRegistry>,
    verb: ServerVerb,
    wish: config::DesiredState,
) -> Result<VerbReply, VerbError> {
    let (r, off, folder) = (&registry, CancelToken::default(), BaseDir::none());
    match verb {
        ServerVerb::Start => {
            return config::create_declared_devices(r, &wish).await.map(make_reconfigure_reply);
        }
        ServerVerb::Reconfigure => {
            return config::apply_config_file(r, false, &off).await.map(make_reconfigure_reply);
        }
        ServerVerb::Snapshot { names, of, store } => {
            let new = |name: String| NewSnapshot { name, of: of.clone() };
            let snapshots = names.into_iter().map(new).collect();
            let wanted = CreateSnapshotsRequest { snapshots, store, ..CreateSnapshotsRequest::default() };
            snapshot::create_snapshots(r, &wanted, &folder, &off)?;
        }
        ServerVerb::Discard { name, keep_store } => snapshot::remove_snapshot(r, &name, keep_store, &off)?,
        ServerVerb::Merge { name } => {
            return snapshot::start_snapshot_merge(r, &name, &off).map(|(_, end)| VerbReply::Merging(end));
        }
        ServerVerb::Finish => {}
        ServerVerb::Create { name, table } => {
            verbs::create_device_cancellable(r, &name, None, table.as_deref(), &folder, &off).await?;
        }
        ServerVerb::Load { word, table } => {
            verbs::load_table_cancellable(r, &word, &table, false, &folder, &off)?;
        }
        ServerVerb::Clear { word } => verbs::clear_inactive_table(r, &word)?,
        ServerVerb::Suspend { word } => verbs::suspend_devices_cancellable(r, &[&word], false, &off).await?,
        ServerVerb::Resume { words } => {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            verbs::resume_devices_cancellable(r, &words, &off).await?;
        }
        ServerVerb::Remove { word } => {
            verbs::remove_mapped_device(r, &word).await?;
        }
        ServerVerb::Rename { word, to } => verbs::rename_mapped_device(r, &word, NewName::Name(&to))?,
    }
    Ok(VerbReply::Nothing)
}
