//! What is asked for.

use super::look::RegistryView;
pub(super) use crate::waiting::WakeableFuture;
use std::sync::Arc;
use udm_control::error::VerbError;
use udm_control::http::api::Change;
use udm_control::registry::{BaseDir, NewName};
use udm_control::verbs::{self, CancelToken, MultipathOptions, RemoveOptions};
use udm_control::{Registry, config};
use udm_core::DeviceId;

/// A verb with its words.
#[derive(Clone, Debug)]
pub(super) enum ControlVerb {
    Create {
        name: String,
        uuid: Option<String>,
        table: Option<String>,
    },
    /// Over paths, with spaces between them.
    Multipath {
        name: String,
        uuid: Option<String>,
        paths: String,
        policy: Option<String>,
    },
    Load {
        word: String,
        table: String,
    },
    Clear {
        word: String,
    },
    Suspend {
        words: Vec<String>,
        noflush: bool,
    },
    Resume {
        words: Vec<String>,
    },
    Remove {
        word: String,
        how: RemoveOptions,
    },
    Message {
        word: String,
        text: String,
    },
    Rename {
        word: String,
        to: String,
        uuid: bool,
    },
    Look {
        word: String,
    },
    /// For the events behind number `event`; as it is drawn, how many have come since that.
    Wait {
        word: String,
        event: u32,
    },
    Reconfigure {
        dry_run: bool,
    },
}

/// How many kinds of verbs there are.
pub(super) const KINDS: usize = 12;

impl ControlVerb {
    /// The names of the kinds.
    pub(super) const NAMES: [&str; KINDS] = [
        "create",
        "load",
        "clear",
        "suspend",
        "resume",
        "remove",
        "message",
        "look",
        "rename",
        "multipath",
        "wait",
        "reconfigure",
    ];

    /// Which kind it is.
    pub(super) fn kind(&self) -> usize {
        match self {
            ControlVerb::Create { .. } => 0,
            ControlVerb::Load { .. } => 1,
            ControlVerb::Clear { .. } => 2,
            ControlVerb::Suspend { .. } => 3,
            ControlVerb::Resume { .. } => 4,
            ControlVerb::Remove { .. } => 5,
            ControlVerb::Message { .. } => 6,
            ControlVerb::Look { .. } => 7,
            ControlVerb::Rename { .. } => 8,
            ControlVerb::Multipath { .. } => 9,
            ControlVerb::Wait { .. } => 10,
            ControlVerb::Reconfigure { .. } => 11,
        }
    }

    /// The devices that it is about, but for the one that it makes.
    pub(super) fn words(&self) -> &[String] {
        match self {
            ControlVerb::Create { .. } | ControlVerb::Multipath { .. } | ControlVerb::Reconfigure { .. } => {
                &[]
            }
            ControlVerb::Suspend { words, .. } | ControlVerb::Resume { words } => words,
            ControlVerb::Load { word, .. }
            | ControlVerb::Clear { word }
            | ControlVerb::Remove { word, .. }
            | ControlVerb::Message { word, .. }
            | ControlVerb::Rename { word, .. }
            | ControlVerb::Look { word }
            | ControlVerb::Wait { word, .. } => std::slice::from_ref(word),
        }
    }

    /// The name and the uuid of the device that it makes.
    pub(super) fn makes(&self) -> Option<(&String, &Option<String>)> {
        match self {
            ControlVerb::Create { name, uuid, .. } | ControlVerb::Multipath { name, uuid, .. } => {
                Some((name, uuid))
            }
            _ => None,
        }
    }

    /// The table that it loads, or the words that its table is made from.
    pub(super) fn table(&self) -> Option<&str> {
        match self {
            ControlVerb::Multipath { paths, .. } => Some(paths),
            ControlVerb::Create { table, .. } => table.as_deref(),
            ControlVerb::Load { table, .. } => Some(table),
            _ => None,
        }
    }
}

/// What a verb says: of [`ControlVerb::Look`] the texts of its tables, of [`ControlVerb::Wait`] the number of
/// events, of [`ControlVerb::Reconfigure`] how many devices are unchanged, and each change.
pub(super) type VerbOutcome = Result<Vec<String>, VerbError>;

/// A verb under way.
pub(super) struct ControlVerbJob {
    pub(super) id: u64,
    pub(super) verb: ControlVerb,
    pub(super) off: CancelToken,
    pub(super) hung_up: bool,
    pub(super) waiting: WakeableFuture<VerbOutcome>,
    /// What it found when it began.
    pub(super) began: Option<VerbProgress>,
}

/// How often there was trouble that a refusal may come from.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DisturbanceCounts {
    /// Names that could not be opened.
    pub(super) failed: u64,
    /// Lanes that could not be opened.
    pub(super) refused: u64,
    /// Names that led to another disk from then on.
    pub(super) moved: u64,
}

/// What a verb found when it began, and has done since.
pub(super) struct VerbProgress {
    /// The devices that it is about.
    pub(super) targets: Vec<DeviceId>,
    /// Of a create: the number that its device has.
    pub(super) minor: Option<u32>,
    /// The error that it must end with.
    pub(super) must: Option<i32>,
    /// Errors that it may end with, for what happened since.
    pub(super) may: Vec<i32>,
    /// The look at which it did.
    pub(super) look: u64,
    /// The trouble by then.
    pub(super) trouble: DisturbanceCounts,
    /// Somebody has had a removal of one of them not come.
    pub(super) kept: bool,
    /// What has been in the inactive slot of each of them since.
    pub(super) waited: Vec<(DeviceId, Option<usize>)>,
    /// The targets that it has brought to where a resume is to bring them.
    pub(super) reached: Vec<DeviceId>,
    /// It has changed a table that is in use.
    pub(super) swapped: bool,
    /// It has changed a table that waits.
    pub(super) loaded: bool,
}

impl VerbProgress {
    /// What waits in the slots of the targets in `view` has waited.
    pub(super) fn see(&mut self, view: &RegistryView) {
        for id in &self.targets {
            let waits = view.get(*id).map(|seen| (*id, seen.inactive));
            self.waited.extend(waits.filter(|waits| !self.waited.contains(waits)));
        }
    }

    /// Has `table` been in the inactive slot of `device`, and `name_locks`?
    pub(super) fn saw(&self, device: DeviceId, table: Option<usize>, alone: bool) -> bool {
        let mut of = self.waited.iter().filter(|(id, _)| *id == device);
        if alone { of.all(|(_, waited)| *waited == table) } else { of.any(|(_, waited)| *waited == table) }
    }
}

impl ControlVerbJob {
    /// Is it making a device?
    pub(super) fn is_making(&self) -> bool {
        self.began.as_ref().is_some_and(|began| began.minor.is_some())
    }

    /// Does it wait for an event, which nobody has to raise?
    pub(super) fn waits_for_event(&self) -> bool {
        matches!(self.verb, ControlVerb::Wait { .. }) && self.began.is_some() && !self.waiting.is_woken()
    }

    /// Does it change `device`, or is it about to?
    pub(super) fn is_about(&self, device: DeviceId) -> bool {
        let looks = matches!(self.verb, ControlVerb::Look { .. } | ControlVerb::Wait { .. });
        !looks && self.began.as_ref().is_some_and(|began| began.targets.contains(&device))
    }

    pub(super) fn new(id: u64, verb: ControlVerb, registry: &Arc<Registry>) -> ControlVerbJob {
        let off = CancelToken::default();
        let waiting = WakeableFuture::new(run(registry.clone(), verb.clone(), off.clone()));
        ControlVerbJob { id, verb, off, hung_up: false, waiting, began: None }
    }
}

async fn run(registry: Arc<Registry>, verb: ControlVerb, off: CancelToken) -> VerbOutcome {
    let folder = BaseDir::none();
    let (r, off) = (&registry, &off);
    match &verb {
        ControlVerb::Create { name, uuid, table } => {
            verbs::create_cancellable(r, name, uuid.as_deref(), table.as_deref(), &folder, off).await?;
        }
        ControlVerb::Multipath { name, uuid, paths, policy } => {
            let paths: Vec<String> = paths.split_whitespace().map(String::from).collect();
            let how = MultipathOptions { policy: policy.clone(), ..MultipathOptions::default() };
            verbs::create_multipath_cancellable(r, name, uuid.as_deref(), &paths, &how, &folder, off).await?;
        }
        ControlVerb::Reconfigure { dry_run } => {
            let done = config::reconfigure(r, *dry_run, off).await?;
            let line = |c: Change| format!("{}\t{}\t{}", c.change, c.name, c.error.unwrap_or_default());
            let changes = done.changes.into_iter().map(line);
            return Ok([done.unchanged.to_string()].into_iter().chain(changes).collect());
        }
        ControlVerb::Wait { word, event } => {
            let device = verbs::wait_event(r, word, *event, off).await?;
            return Ok(vec![device.event_nr.to_string()]);
        }
        ControlVerb::Load { word, table } => verbs::load_cancellable(r, word, table, false, &folder, off)?,
        ControlVerb::Clear { word } => verbs::clear(r, word)?,
        ControlVerb::Suspend { words, noflush } => {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            verbs::suspend_cancellable(r, &words, *noflush, off).await?;
        }
        ControlVerb::Resume { words } => {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            verbs::resume_cancellable(r, &words, off).await?;
        }
        ControlVerb::Remove { word, how } => verbs::remove_cancellable(r, word, *how, off).await?,
        ControlVerb::Message { word, text } => {
            return Ok(vec![verbs::message_from(r, word, 0, text, &folder)?]);
        }
        ControlVerb::Rename { word, to, uuid: false } => verbs::rename(r, word, NewName::Name(to))?,
        ControlVerb::Rename { word, to, uuid: true } => verbs::rename(r, word, NewName::Uuid(to))?,
        ControlVerb::Look { word } => {
            let status = verbs::status(r, word, false)?;
            let tables = [verbs::table(r, word, false)?, verbs::table(r, word, true)?];
            return Ok(vec![status.text, tables[0].text.clone(), tables[1].text.clone()]);
        }
    }
    Ok(Vec::new())
}
