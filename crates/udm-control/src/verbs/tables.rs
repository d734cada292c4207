//! Loading and clearing tables, and messages.

use super::{CancelToken, lane_guard};
use crate::CoresIo;
use crate::error::{TextPosition, VerbError};
use crate::registry::{BaseDir, Mapped, MessageResolver, Registry, TableResolver};
use std::sync::Arc;
use std::time::Duration;
use udm_core::Ack;
use udm_core::bugs::{self, Bug};
use udm_core::errno::{E2BIG, ENXIO, ETIMEDOUT};
use udm_dm::{CompletionHandle, DeviceRef, EventKind, PathCommand, Resolver, Table, TargetError};
use udm_wire::table::{TableLine, TableSyntaxError};
use udm_wire::words;

/// The longest table in bytes that the control socket takes.
pub const TABLE_MAX: usize = 1 << 20;

/// The longest message in bytes: the kernel's room for one ioctl.
const MESSAGE_MAX: usize = 16 << 10;

/// How long a message may wait for the cores, and how often it looks whether they can do it at all.
const MESSAGE_WAIT_MAX: Duration = Duration::from_secs(10);
const MESSAGE_WAIT_STEP: Duration = Duration::from_millis(50);

/// Loads `text` into the inactive slot of `name`; relative paths count from our own folder. May
/// block on what the table opens.
///
/// # Errors
/// ENXIO when there is no such device; the table's own otherwise, with the position to blame.
pub fn load(registry: &Registry, name: &str, text: &str) -> Result<(), VerbError> {
    load_cancellable(registry, name, text, false, &BaseDir::own(), &CancelToken::default())
}

/// As [`load`], with paths from another folder, until it is called off. With `read_only` the device
/// can't be written to while it has this table.
///
/// # Errors
/// As [`load`]'s, and what it was called off with, where a target of it waits for its store:
/// nothing is loaded then.
pub fn load_cancellable(
    registry: &Registry,
    name: &str,
    text: &str,
    read_only: bool,
    folder: &BaseDir,
    cancel_token: &CancelToken,
) -> Result<(), VerbError> {
    let mapped = registry.find(name)?;
    load_as(registry, &mapped, name, (text, read_only), folder, cancel_token, |_| Ok(())).map(drop)
}

/// The table of a device `name` that is all of the device `word`, seen from `folder`; and that
/// device, which may have been opened for it. May block on that.
fn whole_device_table(
    registry: &Registry,
    name: &str,
    word: &str,
    folder: &BaseDir,
) -> Result<(String, DeviceRef), VerbError> {
    let device = resolve_device_in(registry, name, word, folder)?;
    Ok((format!("0 {} linear {} 0", device.device.limits().size.0, words::escape(word)), device))
}

/// What `word` means in a table of `name`: `@` and a name, a number, a URI or a path; opened if it
/// is not open, and may block on that. A mapped device is in use for as long as its `lane_guard` is
/// there.
///
/// # Errors
/// What is wrong with the word or with its device.
pub fn device(registry: &Registry, name: &str, word: &str) -> Result<DeviceRef, VerbError> {
    resolve_device_in(registry, name, word, &BaseDir::own())
}

/// As [`device`], seen from `folder`.
fn resolve_device_in(
    registry: &Registry,
    name: &str,
    word: &str,
    folder: &BaseDir,
) -> Result<DeviceRef, VerbError> {
    TableResolver::new(registry, folder).get(word).map_err(|e| {
        let reason = if e.reason.is_empty() { word.to_owned() } else { e.reason };
        VerbError::new(name, TargetError::errno(e.errno).because(reason))
    })
}

/// The lines of `text`, a table of device `name`, of types that there are; of a device that is to
/// be served as it is, a linear one of length 0. Nothing is looked up.
///
/// # Errors
/// E2BIG for more than [`TABLE_MAX`] bytes, EINVAL for what is no table, with the position.
pub(crate) fn lines_of(name: &str, text: &str) -> Result<Vec<TableLine>, VerbError> {
    if !udm_wire::table::is_table(text) {
        let mut lines = parse(name, &format!("0 1 linear {} 0", words::escape(text.trim())))?;
        lines.iter_mut().for_each(|line| line.len = 0);
        return Ok(lines);
    }
    let lines = parse(name, text)?;
    let unknown = |line: &&TableLine| !udm_targets::TARGETS.iter().any(|one| one.name == line.kind);
    match lines.iter().find(unknown) {
        None => Ok(lines),
        Some(line) => {
            let error = TargetError::new(format!("{}: unknown target type", line.kind));
            let at = line.spans.get(2).map(|span| in_line(line.number, &line.text, *span));
            Err(VerbError::new(name, error).at(at))
        }
    }
}

/// What is wrong with `text`, which names no device, as a table.
fn not_a_table(name: &str, text: &str) -> VerbError {
    let error = parse(name, text).err();
    error.unwrap_or_else(|| VerbError::new(name, TargetError::new("a table is START LENGTH TYPE ARGUMENTS")))
}

fn parse(name: &str, text: &str) -> Result<Vec<TableLine>, VerbError> {
    if text.len() > TABLE_MAX {
        let error = TargetError::errno(E2BIG).because(format!("the table is longer than {TABLE_MAX} bytes"));
        return Err(VerbError::new(name, error));
    }
    udm_wire::table::parse(text).map_err(|e| syntax_error(name, &e))
}

/// As [`load_cancellable`], into a device that was found before; the table.
pub(crate) fn load_into(
    registry: &Registry,
    mapped: &Arc<Mapped>,
    name: &str,
    text: &str,
    folder: &BaseDir,
    cancel_token: &CancelToken,
) -> Result<Arc<Table>, VerbError> {
    load_as(registry, mapped, name, (text, false), folder, cancel_token, |_| Ok(()))
}

/// As [`load_into`], if the slot `may` take a table when that is built.
pub(super) fn load_if(
    registry: &Registry,
    mapped: &Arc<Mapped>,
    name: &str,
    text: &str,
    folder: &BaseDir,
    cancel_token: &CancelToken,
    may: impl FnOnce(&Mapped) -> Result<(), TargetError>,
) -> Result<Arc<Table>, VerbError> {
    load_as(registry, mapped, name, (text, false), folder, cancel_token, may)
}

fn load_as(
    registry: &Registry,
    mapped: &Arc<Mapped>,
    name: &str,
    (text, read_only): (&str, bool),
    folder: &BaseDir,
    cancel_token: &CancelToken,
    may: impl FnOnce(&Mapped) -> Result<(), TargetError>,
) -> Result<Arc<Table>, VerbError> {
    let is_short = !udm_wire::table::is_table(text);
    let (short, _open);
    let text = if is_short {
        (short, _open) = match whole_device_table(registry, name, text.trim(), folder) {
            // Words that name nothing were meant as a table.
            Err(_) if text.trim().contains(char::is_whitespace) => return Err(not_a_table(name, text)),
            found => found?,
        };
        &short
    } else {
        text
    };
    let lines = parse(name, text)?;
    let refused = |error: TargetError| {
        // The text that it speaks of is not what was given.
        let position = position(&lines, &error).filter(|_| !is_short);
        VerbError::new(name, error).at(position)
    };
    // Loads do not wait for each other: the file system may hang under one.
    let mut opening = TableResolver::new(registry, folder).of(mapped);
    let io = CoresIo::new(registry.cores()).until(cancel_token);
    let table = Table::build(udm_targets::TARGETS, &lines, &mut opening, &io, registry.core_count())
        .map_err(refused)?;
    if read_only {
        table.set_read_only();
    }
    // What is replaced, or refused, is dropped behind the lock: dropping a table closes devices.
    let given = Arc::clone(&table);
    let _replaced;
    let _linked = registry.linking();
    _replaced = mapped.device.inactive();
    if !registry.is_active(mapped) && !bugs::on(Bug::LoadIntoGone) {
        let error = TargetError::errno(ENXIO).because("it has been removed meanwhile");
        return Err(VerbError::new(name, error));
    }
    may(mapped).and_then(|()| mapped.device.load(table)).map_err(refused)?;
    if !registry.is_being_created(mapped) {
        mapped.tell(EventKind::Loaded, "a table was loaded");
    }
    Ok(given)
}

/// Empties the inactive slot.
///
/// # Errors
/// ENXIO when there is no such device.
pub fn clear(registry: &Registry, name: &str) -> Result<(), VerbError> {
    let mapped = registry.find(name)?;
    let was = mapped.device.inactive();
    mapped.device.clear();
    if was.is_some() {
        mapped.tell(EventKind::Cleared, "the loaded table was let go");
    }
    Ok(())
}

/// Sends a message to the target at `sector`, and gives back its answer when the message is done:
/// what the cores have to do for it, they have done. Relative paths count from our own folder. May
/// block for the cores, and on a path that no table wrote so.
///
/// # Errors
/// ENXIO when there is no such device; EINVAL for what the target does not know; ETIMEDOUT when the
/// cores do not get it done; the target's own otherwise.
pub fn message(registry: &Registry, name: &str, sector: u64, text: &str) -> Result<String, VerbError> {
    message_from(registry, name, sector, text, &BaseDir::own())
}

/// As [`message`], with paths from another folder.
///
/// # Errors
/// As [`message`].
pub fn message_from(
    registry: &Registry,
    name: &str,
    sector: u64,
    text: &str,
    folder: &BaseDir,
) -> Result<String, VerbError> {
    let mapped = registry.find(name)?;
    if text.len() > MESSAGE_MAX {
        let error =
            TargetError::errno(E2BIG).because(format!("the message is longer than {MESSAGE_MAX} bytes"));
        return Err(VerbError::new(name, error));
    }
    let words = words::words(text);
    if let Some(outcome) = cancel_deferred(registry, &mapped, &words) {
        return outcome.map(|()| String::new()).map_err(|e| VerbError::new(name, e));
    }
    let in_use = &mut MessageResolver { registry, mapped: &mapped, folder };
    let sent = mapped.device.send(sector, &words, in_use, registry.cores());
    let done = sent.and_then(|(answer, pending)| match pending {
        Some(pending) => finish(registry, &mapped, &pending).map(|()| answer),
        None => Ok(answer),
    });
    done.map_err(|e| VerbError::new(name, e))
}

/// Does `action`, "fail" or "reinstate", to the paths of `name` over the device that `path` is the
/// number of, or a table's word for, seen from `folder`: no check reinstates what it failed. May
/// block on a path that no table wrote so.
///
/// # Errors
/// ENXIO when there is no such device; EBUSY while it is suspended; EINVAL when it has no such
/// path, and for another action; what looking up the word ends with.
pub fn command_path(
    registry: &Registry,
    name: &str,
    path: &str,
    action: &str,
    folder: &BaseDir,
) -> Result<(), VerbError> {
    let mapped = registry.find(name)?;
    let refused = |error: TargetError| VerbError::new(name, error);
    let command = match action {
        "fail" => PathCommand::Fail,
        "reinstate" => PathCommand::Reinstate,
        _ => return Err(refused(TargetError::new(format!("{action}: neither fail nor reinstate")))),
    };
    let number = match path.parse() {
        Ok(number) => number,
        Err(_) => MessageResolver { registry, mapped: &mapped, folder }
            .get(path)
            .map(|found| found.number)
            .map_err(|e| {
            let text = format!("error getting device {path}");
            refused(TargetError::new(text).with_errno(e.errno).because(e.reason))
        })?,
    };
    let live = mapped.device.live();
    let mut used = live.iter().flat_map(|table| table.targets()).flat_map(|entry| entry.target.devices());
    // Whether it is suspended or not.
    if !used.any(|used| used.device.number == number) {
        return Err(refused(TargetError::new(format!("multipath: no path over device {path}"))));
    }
    mapped.device.command_path(number, command, registry.cores()).map_err(refused)
}

/// The message to the device itself that undoes `remove --deferred_removals`, if `words` are that.
fn cancel_deferred(
    registry: &Registry,
    mapped: &Arc<Mapped>,
    words: &[String],
) -> Option<Result<(), TargetError>> {
    let (first, rest) = words.split_first()?;
    if !first.eq_ignore_ascii_case("@cancel_deferred_remove") {
        return None;
    }
    if !rest.is_empty() {
        return Some(Err(TargetError::new(format!("Invalid arguments for {first}")).at(1)));
    }
    Some(registry.keep(mapped))
}

/// Waits until the cores have done what a message asks for. With a lane for it, in case that nobody
/// uses the device.
fn finish(registry: &Registry, mapped: &Mapped, pending: &CompletionHandle) -> Result<(), TargetError> {
    let lane = lane_guard::lane(registry, &mapped.device, Ack::new(|| {}));
    let mut waited = Duration::ZERO;
    while waited < MESSAGE_WAIT_MAX {
        if let Some(outcome) = pending.wait(MESSAGE_WAIT_STEP) {
            return outcome;
        }
        if let Some(error) = lane.failure.take() {
            return Err(TargetError::errno(error.errno).because(error.text));
        }
        waited += MESSAGE_WAIT_STEP;
    }
    Err(TargetError::errno(ETIMEDOUT)
        .because("it has been taken, and is not done yet: the storage does not answer"))
}

/// Where in the text the fault is that `error` speaks of.
fn position(lines: &[TableLine], error: &TargetError) -> Option<TextPosition> {
    let line = lines.get(error.line?)?;
    // Without a word the line as a whole is to blame: its type stands for it.
    let span = error.word.map_or_else(|| line.spans.get(2).copied(), |word| Some(line.arg_span(word)))?;
    Some(in_line(line.number, &line.text, span))
}

fn in_line(number: usize, text: &str, span: words::Span) -> TextPosition {
    let column = |byte: usize| text.char_indices().take_while(|(i, _)| *i < byte).count();
    // What is missing stands behind the end of the text.
    let from = column(span.start) + span.start.saturating_sub(text.len());
    let width = column(span.end).saturating_sub(column(span.start)).max(1);
    TextPosition { line: number, column: from + 1, width }
}

/// A text that is no table at all, in dmsetup's words.
fn syntax_error(name: &str, error: &TableSyntaxError) -> VerbError {
    let position = (error.number > 0).then(|| in_line(error.number, &error.text, error.span));
    VerbError::new(name, TargetError::new(error.to_string())).at(position)
}
