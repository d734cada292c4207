//! The arguments of a multipath table line.
//!
//! ```text
//! params  = features handler ngroups initial group*
//! feature = queue_if_no_path | retain_attached_hw_handler | pg_init_retries N | pg_init_delay_msecs N | queue_mode bio|rq|mq
//! group   = selector S sarg{S}  P A  ( device parg{A} ){P}
//! ```
//! The parser reports the first error, in the kernel's order and words. It allocates only for words
//! that are present, never for the value of a count.

use super::selector::{SELECTORS, SharedPathSelector};
use std::ops::RangeInclusive;
use std::sync::Arc;
use udm_core::errno::{EINVAL, ENODEV, is_server_down};
use udm_dm::target::{ResolvedDevice, TargetArgs, parse_decimal_u64};
use udm_dm::{DeviceLookupError, TargetError};

/// Maximum of every count in a table: groups, paths, arguments.
const COUNT_MAX: u32 = 1024;

/// The kernel's queue mode. udm always works on whole bios; the mode decides which devices may be
/// stacked, whether a reload is allowed, and the printed table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueueMode {
    /// `bio`.
    Bio,
    /// `rq`, `mq` or no `queue_mode` feature.
    Request,
}

/// The feature arguments of a table line.
#[derive(Debug)]
pub(super) struct MultipathFeatures {
    pub(super) queue_if_no_path: bool,
    pub(super) retain_attached_hw_handler: bool,
    /// Range 1 to 50.
    pub(super) pg_init_retries: Option<u32>,
    /// Range 0 to 60000.
    pub(super) pg_init_delay_msecs: Option<u32>,
    pub(super) queue_mode: QueueMode,
}

/// A priority group of a table.
pub(super) struct PriorityGroup {
    pub(super) selector: Arc<dyn SharedPathSelector>,
    pub(super) paths: Vec<ResolvedDevice>,
}

/// A priority group whose paths are not all resolved.
struct UnresolvedGroup {
    selector: Arc<dyn SharedPathSelector>,
    paths: Vec<Result<ResolvedDevice, UnreachablePath>>,
}

/// A path whose server is down.
struct UnreachablePath {
    /// The word that names it.
    at: usize,
    error: DeviceLookupError,
}

/// A parsed table line with its devices resolved.
pub(super) struct MultipathTable {
    pub(super) features: MultipathFeatures,
    /// The hardware handler. Only a table without paths is accepted with a handler.
    pub(super) handler: Option<String>,
    /// The group to try first, counted from 0. `None` if the table names a group that does not
    /// exist.
    pub(super) initial: Option<usize>,
    pub(super) groups: Vec<PriorityGroup>,
}

/// Parses an unsigned 32-bit decimal without surrounding characters.
pub(super) fn parse_u32(word: &str) -> Option<u32> {
    parse_decimal_u64(word)?.try_into().ok()
}

/// A table error that blames word `word` of the arguments.
fn multipath_table_error(text: impl std::fmt::Display, word: usize) -> TargetError {
    TargetError::new(format!("multipath: {text}")).at(word)
}

/// A cursor over the words that are not parsed yet.
struct WordCursor<'a> {
    all: &'a [String],
    at: usize,
}

impl<'a> WordCursor<'a> {
    fn left(&self) -> usize {
        self.all.len() - self.at
    }

    fn take(&mut self, n: usize) -> &'a [String] {
        let taken = &self.all[self.at..self.at + n];
        self.at += n;
        taken
    }

    fn number(&mut self, range: RangeInclusive<u32>, text: &str) -> Result<u32, TargetError> {
        let value = self.all.get(self.at).and_then(|w| parse_u32(w)).filter(|n| range.contains(n));
        let value = value.ok_or_else(|| multipath_table_error(text, self.at))?;
        self.at += 1;
        Ok(value)
    }

    /// Parses a count and returns a cursor over that number of words.
    fn counted(&mut self, max: u32, text: &str) -> Result<WordCursor<'a>, TargetError> {
        let at = self.at;
        let count = self.number(0..=max, text)? as usize;
        if count > self.left() {
            return Err(multipath_table_error(text, at));
        }
        self.at += count;
        Ok(WordCursor { all: &self.all[..self.at], at: at + 1 })
    }
}

/// Parses a table line and resolves its devices.
///
/// # Errors
/// The kernel's, with the word to blame.
pub(super) fn parse_multipath_table(args: &mut TargetArgs<'_>) -> Result<MultipathTable, TargetError> {
    let mut words = WordCursor { all: args.args, at: 0 };
    let features = parse_multipath_features(words.counted(8, "invalid number of feature args")?)?;
    let mut handler_words = words.counted(COUNT_MAX, "invalid number of hardware handler args")?;
    let mut handler = None;
    if handler_words.left() > 0 {
        if features.queue_mode == QueueMode::Bio {
            tracing::warn!("multipath: bio-based multipath doesn't allow hardware handler args");
        } else {
            handler = Some((handler_words.at, handler_words.take(1)[0].clone()));
        }
    }
    let count = words.number(0..=COUNT_MAX, "invalid number of priority groups")? as usize;
    let initial_at = words.at;
    let initial = words.number(0..=COUNT_MAX, "invalid initial priority group number")? as usize;
    if (count == 0) != (initial == 0) {
        return Err(multipath_table_error("invalid initial priority group", initial_at));
    }
    let mut groups = Vec::new();
    while words.left() > 0 {
        groups.push(parse_priority_group(&mut words, args, handler.as_ref().map(|h| h.0))?);
    }
    if groups.len() != count {
        return Err(multipath_table_error("priority group count mismatch", initial_at - 1));
    }
    let initial = initial.checked_sub(1).filter(|&i| i < count);
    let groups = resolve_unreachable_paths(groups, args)?;
    check_same_disk(&groups)?;
    Ok(MultipathTable { features, handler: handler.map(|h| h.1), initial, groups })
}

/// Replaces the paths whose servers are down by devices like the other paths. Where multipathd
/// leaves a missing path out and adds it when it appears, the path is there from the beginning and
/// fails until its server answers.
fn resolve_unreachable_paths(
    groups: Vec<UnresolvedGroup>,
    args: &mut TargetArgs<'_>,
) -> Result<Vec<PriorityGroup>, TargetError> {
    let found: Vec<ResolvedDevice> =
        groups.iter().flat_map(|group| &group.paths).filter_map(|path| path.as_ref().ok().cloned()).collect();
    let others: Vec<&ResolvedDevice> = found.iter().collect();
    let mut resolve = |path| match path {
        Ok(path) => Ok(path),
        Err(UnreachablePath { at, error }) => {
            args.resolver.get_like(&args.args[at], &others).ok_or_else(|| path_lookup_error(at, error))
        }
    };
    let resolved = groups.into_iter().map(|UnresolvedGroup { selector, paths }| {
        let paths = paths.into_iter().map(&mut resolve).collect::<Result<_, _>>()?;
        Ok(PriorityGroup { selector, paths })
    });
    resolved.collect()
}

/// Checks that no two paths report the names of different disks: a write would go to one of them.
fn check_same_disk(groups: &[PriorityGroup]) -> Result<(), TargetError> {
    let mut named = groups
        .iter()
        .flat_map(|group| &group.paths)
        .filter_map(|path| Some((&path.name, path.device.wwid()?)));
    let Some((first, disk)) = named.next() else { return Ok(()) };
    match named.find(|(_, other)| *other != disk) {
        None => Ok(()),
        Some((path, other)) => {
            let why = format!("{first} is {disk}, and {path} is {other}");
            Err(TargetError::new(format!("multipath: paths lead to different disks: {why}"))
                .with_errno(EINVAL))
        }
    }
}

fn path_lookup_error(at: usize, error: DeviceLookupError) -> TargetError {
    multipath_table_error("error getting device", at).with_errno(error.errno).because(error.reason)
}

fn parse_multipath_features(mut words: WordCursor<'_>) -> Result<MultipathFeatures, TargetError> {
    let mut f = MultipathFeatures {
        queue_if_no_path: false,
        retain_attached_hw_handler: false,
        pg_init_retries: None,
        pg_init_delay_msecs: None,
        queue_mode: QueueMode::Request,
    };
    while words.left() > 0 {
        let at = words.at;
        // A feature with a value needs a further word within the count.
        match (words.take(1)[0].to_ascii_lowercase().as_str(), words.left()) {
            ("queue_if_no_path", _) => f.queue_if_no_path = true,
            ("retain_attached_hw_handler", _) => f.retain_attached_hw_handler = true,
            ("pg_init_retries", 1..) => {
                let text = "pg_init_retries must be between 1 and 50";
                f.pg_init_retries = Some(words.number(1..=50, text)?);
            }
            ("pg_init_delay_msecs", 1..) => {
                let text = "pg_init_delay_msecs must be between 0 and 60000";
                f.pg_init_delay_msecs = Some(words.number(0..=60000, text)?);
            }
            ("queue_mode", 1..) => {
                f.queue_mode = match words.take(1)[0].to_ascii_lowercase().as_str() {
                    "bio" => QueueMode::Bio,
                    "rq" | "mq" => QueueMode::Request,
                    _ => return Err(multipath_table_error("Unknown 'queue_mode' requested", at + 1)),
                }
            }
            _ => return Err(multipath_table_error("Unrecognised multipath feature request", at)),
        }
    }
    // In bio mode no handler can be attached, so an attached handler is always retained.
    f.retain_attached_hw_handler |= f.queue_mode == QueueMode::Bio;
    Ok(f)
}

fn parse_priority_group(
    words: &mut WordCursor<'_>,
    args: &mut TargetArgs<'_>,
    handler: Option<usize>,
) -> Result<UnresolvedGroup, TargetError> {
    if words.left() < 2 {
        return Err(multipath_table_error("not enough priority group arguments", words.all.len()));
    }
    let at = words.at;
    let name = &words.take(1)[0];
    let Some(kind) = SELECTORS.iter().find(|s| s.name == name) else {
        let names: Vec<_> = SELECTORS.iter().map(|s| s.name).collect();
        let known = format!("known are {}", names.join(", "));
        return Err(multipath_table_error("unknown path selector type", at).because(known));
    };
    let mut selector_args = words.counted(COUNT_MAX, "invalid number of path selector args")?;
    let selector_at = selector_args.at;
    let selector_args = selector_args.take(selector_args.left());
    let mut selector = (kind.new)(selector_args)
        .map_err(|arg| multipath_table_error("path selector constructor failed", selector_at + arg))?;
    let path_count = words.number(1..=COUNT_MAX, "invalid number of paths")?;
    let arg_count = words.number(0..=COUNT_MAX, "invalid number of selector args")? as usize;
    let mut paths = Vec::new();
    for _ in 0..path_count {
        if words.left() < 1 + arg_count {
            return Err(multipath_table_error("not enough path parameters", words.all.len()));
        }
        let at = words.at;
        let path = match args.resolver.get(&words.take(1)[0]) {
            Err(error) if is_server_down(error.errno) => Err(UnreachablePath { at, error }),
            found => Ok(found.map_err(|error| path_lookup_error(at, error))?),
        };
        if let Some(handler) = handler {
            return Err(multipath_table_error("error attaching hardware handler", handler).with_errno(ENODEV));
        }
        selector.add_path(words.take(arg_count), args.cores).map_err(|e| {
            multipath_table_error(format_args!("{} ps: {}", kind.name, e.text), at + 1 + e.arg)
        })?;
        paths.push(path);
    }
    Ok(UnresolvedGroup { selector: Arc::from(selector), paths })
}
