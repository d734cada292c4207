//! The verbs that control clients call.

use super::observation::ListedDevices;
pub(super) use crate::wakeable::WakeableFuture;
use std::sync::Arc;
use udm_control::api::DeviceConfigChange;
use udm_control::error::VerbError;
use udm_control::registry::{BaseDir, NewName};
use udm_control::verbs::{self, CancelToken, PathGroupingOptions, RemoveOptions};
use udm_control::{DeviceRegistry, config};
use udm_core::DeviceId;

/// A verb with its arguments.
#[derive(Clone, Debug)]
pub(super) enum ControlVerb {
    Create {
        name: String,
        uuid: Option<String>,
        table: Option<String>,
    },
    /// Creation of a multipath device over paths, separated by spaces.
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
    /// A wait for events after number `event`. When drawn, `event` is the number of events to
    /// subtract from the present count.
    Wait {
        word: String,
        event: u32,
    },
    Reconfigure {
        dry_run: bool,
    },
}

/// Number of kinds of verbs.
pub(super) const KINDS: usize = 12;

impl ControlVerb {
    /// Names of the kinds.
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

    /// Index of the kind.
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

    /// The devices that the verb names, without the one that it creates.
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

    /// Name and uuid of the device that the verb creates.
    pub(super) fn makes(&self) -> Option<(&String, &Option<String>)> {
        match self {
            ControlVerb::Create { name, uuid, .. } | ControlVerb::Multipath { name, uuid, .. } => {
                Some((name, uuid))
            }
            _ => None,
        }
    }

    /// The table that the verb loads, or the arguments from which its table is made.
    pub(super) fn table(&self) -> Option<&str> {
        match self {
            ControlVerb::Multipath { paths, .. } => Some(paths),
            ControlVerb::Create { table, .. } => table.as_deref(),
            ControlVerb::Load { table, .. } => Some(table),
            _ => None,
        }
    }
}

/// Result of a verb. [`ControlVerb::Look`] returns the texts of the tables, [`ControlVerb::Wait`]
/// the number of events. [`ControlVerb::Reconfigure`] returns the number of unchanged devices, and
/// each change.
pub(super) type VerbOutcome = Result<Vec<String>, VerbError>;

/// A verb in progress.
pub(super) struct ControlVerbJob {
    pub(super) id: u64,
    pub(super) verb: ControlVerb,
    pub(super) off: CancelToken,
    pub(super) hung_up: bool,
    pub(super) waiting: WakeableFuture<VerbOutcome>,
    /// Progress of the verb; `None` before it begins.
    pub(super) began: Option<VerbProgress>,
}

/// Counts of disturbances that may be the reason of a refusal.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RefusalReasonCounts {
    /// Names that could not be opened.
    pub(super) failed: u64,
    /// Lanes that could not be opened.
    pub(super) refused: u64,
    /// Names that were changed to lead to another disk.
    pub(super) moved: u64,
}

/// State that a verb found at its start, and its progress since.
pub(super) struct VerbProgress {
    /// The devices that the verb names.
    pub(super) targets: Vec<DeviceId>,
    /// Minor number of the device that the verb creates.
    pub(super) minor: Option<u32>,
    /// Error with which the verb must end.
    pub(super) must: Option<i32>,
    /// Errors with which the verb may end, because of events since its start.
    pub(super) may: Vec<i32>,
    /// Number of the inspection at its start.
    pub(super) look: u64,
    /// Disturbances up to its start.
    pub(super) trouble: RefusalReasonCounts,
    /// True if a client cancelled the deferred removal of one of the devices.
    pub(super) kept: bool,
    /// Tables that were in the inactive slot of each device since the start.
    pub(super) waited: Vec<(DeviceId, Option<usize>)>,
    /// Devices that the verb has brought into the state that a resume must reach.
    pub(super) reached: Vec<DeviceId>,
    /// True if the verb has changed a live table.
    pub(super) swapped: bool,
    /// True if the verb has changed an inactive table.
    pub(super) loaded: bool,
}

impl VerbProgress {
    /// Records the inactive tables of the devices in `view`.
    pub(super) fn see(&mut self, view: &ListedDevices) {
        for id in &self.targets {
            let waits = view.get(*id).map(|seen| (*id, seen.inactive));
            self.waited.extend(waits.filter(|waits| !self.waited.contains(waits)));
        }
    }

    /// True if `table` was in the inactive slot of `device` since the start. If `alone`, true only
    /// if no other table was.
    pub(super) fn saw(&self, device: DeviceId, table: Option<usize>, alone: bool) -> bool {
        let mut of = self.waited.iter().filter(|(id, _)| *id == device);
        if alone { of.all(|(_, waited)| *waited == table) } else { of.any(|(_, waited)| *waited == table) }
    }
}

impl ControlVerbJob {
    /// True if the verb is creating a device.
    pub(super) fn is_making(&self) -> bool {
        self.began.as_ref().is_some_and(|began| began.minor.is_some())
    }

    /// True if the verb waits for an event that need not occur.
    pub(super) fn waits_for_event(&self) -> bool {
        matches!(self.verb, ControlVerb::Wait { .. }) && self.began.is_some() && !self.waiting.is_woken()
    }

    /// True if the verb changes or will change `device`.
    pub(super) fn is_about(&self, device: DeviceId) -> bool {
        let looks = matches!(self.verb, ControlVerb::Look { .. } | ControlVerb::Wait { .. });
        !looks && self.began.as_ref().is_some_and(|began| began.targets.contains(&device))
    }

    pub(super) fn new(id: u64, verb: ControlVerb, registry: &Arc<DeviceRegistry>) -> ControlVerbJob {
        let off = CancelToken::default();
        let waiting = WakeableFuture::new(execute_control_verb(registry.clone(), verb.clone(), off.clone()));
        ControlVerbJob { id, verb, off, hung_up: false, waiting, began: None }
    }
}

async fn execute_control_verb(
    registry: Arc<DeviceRegistry>,
    verb: ControlVerb,
    off: CancelToken,
) -> VerbOutcome {
    let folder = BaseDir::none();
    let (r, off) = (&registry, &off);
    match &verb {
        ControlVerb::Create { name, uuid, table } => {
            verbs::create_device_cancellable(r, name, uuid.as_deref(), table.as_deref(), &folder, off)
                .await?;
        }
        ControlVerb::Multipath { name, uuid, paths, policy } => {
            let paths: Vec<String> = paths.split_whitespace().map(String::from).collect();
            let how = PathGroupingOptions { policy: policy.clone(), ..PathGroupingOptions::default() };
            verbs::create_multipath_cancellable(r, name, uuid.as_deref(), &paths, &how, &folder, off).await?;
        }
        ControlVerb::Reconfigure { dry_run } => {
            let done = config::apply_config_file(r, *dry_run, off).await?;
            let line =
                |c: DeviceConfigChange| format!("{}\t{}\t{}", c.change, c.name, c.error.unwrap_or_default());
            let changes = done.changes.into_iter().map(line);
            return Ok([done.unchanged.to_string()].into_iter().chain(changes).collect());
        }
        ControlVerb::Wait { word, event } => {
            let device = verbs::wait_device_event(r, word, *event, off).await?;
            return Ok(vec![device.event_nr.to_string()]);
        }
        ControlVerb::Load { word, table } => {
            verbs::load_table_cancellable(r, word, table, false, &folder, off)?;
        }
        ControlVerb::Clear { word } => verbs::clear_inactive_table(r, word)?,
        ControlVerb::Suspend { words, noflush } => {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            verbs::suspend_devices_cancellable(r, &words, *noflush, off).await?;
        }
        ControlVerb::Resume { words } => {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            verbs::resume_devices_cancellable(r, &words, off).await?;
        }
        ControlVerb::Remove { word, how } => verbs::remove_device_cancellable(r, word, *how, off).await?,
        ControlVerb::Message { word, text } => {
            return Ok(vec![verbs::send_message_with_base_dir(r, word, 0, text, &folder)?]);
        }
        ControlVerb::Rename { word, to, uuid: false } => {
            verbs::rename_mapped_device(r, word, NewName::Name(to))?;
        }
        ControlVerb::Rename { word, to, uuid: true } => {
            verbs::rename_mapped_device(r, word, NewName::Uuid(to))?;
        }
        ControlVerb::Look { word } => {
            let status = verbs::table_status_by_device_name(r, word, false)?;
            let tables =
                [verbs::table_by_device_name(r, word, false)?, verbs::table_by_device_name(r, word, true)?];
            return Ok(vec![status.text, tables[0].text.clone(), tables[1].text.clone()]);
        }
    }
    Ok(Vec::new())
}
