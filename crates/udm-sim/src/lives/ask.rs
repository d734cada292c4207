//! The verbs that clients of the control socket ask for.

use crate::waiting::Waiting;
use std::sync::Arc;
use udm_control::error::VerbError;
use udm_control::http::api::{CreateSnapshots, NewSnapshot};
use udm_control::registry::{Folder, NewName};
use udm_control::verbs::snapshot::{self, MergeEnd};
use udm_control::verbs::{self, CallOff, Removal};
use udm_control::{Registry, config};

/// A verb with its words.
#[derive(Clone, Debug)]
pub(super) enum Verb {
    /// The server makes the devices of its file.
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
    /// The table of a merge that is over goes.
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

/// How many kinds of verbs there are.
pub(super) const KINDS: usize = 13;

impl Verb {
    /// The names of the kinds.
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

    /// Which kind it is.
    pub(super) fn kind(&self) -> usize {
        match self {
            Verb::Start => 0,
            Verb::Reconfigure => 1,
            Verb::Snapshot { .. } => 2,
            Verb::Discard { .. } => 3,
            Verb::Merge { .. } => 4,
            Verb::Finish => 5,
            Verb::Create { .. } => 6,
            Verb::Load { .. } => 7,
            Verb::Clear { .. } => 8,
            Verb::Suspend { .. } => 9,
            Verb::Resume { .. } => 10,
            Verb::Remove { .. } => 11,
            Verb::Rename { .. } => 12,
        }
    }
}

/// What a verb says: of a merge, how it is seen to; of the file, what could not be done.
pub(super) enum Said {
    Nothing,
    Merging(MergeEnd),
    Applied(Vec<String>),
}

/// A verb under way.
pub(super) struct Job {
    pub(super) id: u64,
    pub(super) verb: Verb,
    pub(super) waiting: Waiting<Result<Said, VerbError>>,
    /// The snapshot that it removes or merges.
    pub(super) about: Option<usize>,
}

impl Job {
    pub(super) fn new(id: u64, verb: Verb, registry: &Arc<Registry>, wish: &config::Wish) -> Job {
        let waiting = Waiting::new(run(registry.clone(), verb.clone(), wish.clone()));
        Job { id, verb, waiting, about: None }
    }

    /// Sees to a merge that is over.
    pub(super) fn finish(id: u64, registry: &Arc<Registry>, end: MergeEnd) -> Job {
        let registry = registry.clone();
        let waiting = Waiting::new(async move { snapshot::finish(&registry, &end).map(|()| Said::Nothing) });
        Job { id, verb: Verb::Finish, waiting, about: None }
    }
}

fn applied(done: udm_control::http::api::Reconfigured) -> Said {
    let failed = done.changes.into_iter().filter_map(|c| Some(format!("{}: {}", c.name, c.error?)));
    Said::Applied(failed.collect())
}

async fn run(registry: Arc<Registry>, verb: Verb, wish: config::Wish) -> Result<Said, VerbError> {
    let (r, off, folder) = (&registry, CallOff::default(), Folder::none());
    match verb {
        Verb::Start => return config::start(r, &wish).await.map(applied),
        Verb::Reconfigure => return config::reconfigure(r, false, &off).await.map(applied),
        Verb::Snapshot { names, of, store } => {
            let new = |name: String| NewSnapshot { name, of: of.clone() };
            let snapshots = names.into_iter().map(new).collect();
            let wanted = CreateSnapshots { snapshots, store, ..CreateSnapshots::default() };
            snapshot::create(r, &wanted, &folder, &off)?;
        }
        Verb::Discard { name, keep_store } => snapshot::remove(r, &name, keep_store, &off)?,
        Verb::Merge { name } => return snapshot::merge(r, &name, &off).map(|(_, end)| Said::Merging(end)),
        Verb::Finish => {}
        Verb::Create { name, table } => {
            verbs::create_until(r, &name, None, table.as_deref(), &folder, &off).await?;
        }
        Verb::Load { word, table } => verbs::load_until(r, &word, &table, false, &folder, &off)?,
        Verb::Clear { word } => verbs::clear(r, &word)?,
        Verb::Suspend { word } => verbs::suspend_until(r, &[&word], false, &off).await?,
        Verb::Resume { words } => {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            verbs::resume_until(r, &words, &off).await?;
        }
        Verb::Remove { word } => verbs::remove_until(r, &word, Removal::default(), &off).await?,
        Verb::Rename { word, to } => verbs::rename(r, &word, NewName::Name(&to))?,
    }
    Ok(Said::Nothing)
}
