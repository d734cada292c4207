//! Loading and clearing tables, and messages.

use super::clone::record::record_message;
use super::{CancelToken, lane_guard, moves};
use crate::TableLoadControlIo;
use crate::error::{TextPosition, VerbError};
use crate::registry::{BaseDir, DeviceRegistry, MessageResolver, RegisteredDevice, TableResolver};
use std::sync::Arc;
use std::time::Duration;
use udm_core::AckOnLastDrop;
use udm_core::errno::{E2BIG, EINVAL, ENXIO, ETIMEDOUT};
use udm_dm::{
    DeviceNameResolver, EventKind, PathCommand, ResolvedDevice, Table, TargetError, TargetMessageWaitHandle,
};
use udm_wire::table::{TableLine, TableSyntaxError};
use udm_wire::words;

/// Maximum length of a table in bytes.
pub const TABLE_MAX: usize = 1 << 20;

/// Maximum length of a message in bytes: the kernel's limit for one ioctl.
const MESSAGE_MAX: usize = 16 << 10;

/// How long a message may wait for the cores, and how often the wait checks for a failed lane.
const MESSAGE_WAIT_MAX: Duration = Duration::from_secs(10);
const MESSAGE_WAIT_STEP: Duration = Duration::from_millis(50);

/// Loads `text` into the inactive slot of `name`. Relative paths are relative to the working
/// directory of the process. May block when the table opens devices.
///
/// # Errors
/// ENXIO if there is no such device; otherwise the table's error, with the position of the fault.
pub fn load_inactive_table(registry: &DeviceRegistry, name: &str, text: &str) -> Result<(), VerbError> {
    load_table_cancellable(registry, name, text, false, &BaseDir::own(), &CancelToken::default())
}

/// As [`load_inactive_table`], with relative paths based on `folder` and a cancel token. With
/// `read_only` the device can't be written while it has this table.
///
/// # Errors
/// As [`load_inactive_table`], and the error of the cancel token while a target waits for its
/// store; nothing is loaded then.
pub fn load_table_cancellable(
    registry: &DeviceRegistry,
    name: &str,
    text: &str,
    read_only: bool,
    folder: &BaseDir,
    cancel_token: &CancelToken,
) -> Result<(), VerbError> {
    let mapped = registry.find(name)?;
    build_and_load_table(registry, &mapped, name, (text, read_only), folder, cancel_token, |_| Ok(()))
        .map(drop)
}

/// A linear table over the whole device `word`, resolved from `folder`. Also returns that device,
/// which may have been opened for this. May block when it opens the device.
fn whole_device_table(
    registry: &DeviceRegistry,
    name: &str,
    word: &str,
    folder: &BaseDir,
) -> Result<(String, ResolvedDevice), VerbError> {
    let device = resolve_device_with_base_dir(registry, name, word, folder)?;
    Ok((format!("0 {} linear {} 0", device.device.limits().size.0, words::escape_table_word(word)), device))
}

/// Resolves `word` as in a table of `name`: `@` and a name, a number, a URI or a path. Opens the
/// device if it is not open, which may block. A mapped device counts as in use until the reference
/// is dropped.
///
/// # Errors
/// The error of the word or of its device.
pub fn resolve_device(
    registry: &DeviceRegistry,
    name: &str,
    word: &str,
) -> Result<ResolvedDevice, VerbError> {
    resolve_device_with_base_dir(registry, name, word, &BaseDir::own())
}

/// As [`resolve_device_with_base_dir`], with relative paths based on `folder`.
fn resolve_device_with_base_dir(
    registry: &DeviceRegistry,
    name: &str,
    word: &str,
    folder: &BaseDir,
) -> Result<ResolvedDevice, VerbError> {
    TableResolver::new(registry, folder).get(word).map_err(|e| {
        let reason = if e.reason.is_empty() { word.to_owned() } else { e.reason };
        VerbError::new(name, TargetError::errno(e.errno).because(reason))
    })
}

/// Parses `text`, a table of the device `name`, and checks that the target types exist. The word of
/// a single device gives one linear line of length 0. Devices are not looked up.
///
/// # Errors
/// E2BIG for more than [`TABLE_MAX`] bytes, EINVAL for a malformed table, with the position.
pub(crate) fn parse_table_or_device_word(name: &str, text: &str) -> Result<Vec<TableLine>, VerbError> {
    if !udm_wire::table::is_table_not_device_name(text) {
        let mut lines = parse_size_limited_table(
            name,
            &format!("0 1 linear {} 0", words::escape_table_word(text.trim())),
        )?;
        lines.iter_mut().for_each(|line| line.len = 0);
        return Ok(lines);
    }
    let lines = parse_size_limited_table(name, text)?;
    let unknown = |line: &&TableLine| !udm_targets::TARGETS.iter().any(|one| one.name == line.kind);
    match lines.iter().find(unknown) {
        None => Ok(lines),
        Some(line) => {
            let error = TargetError::new(format!("{}: unknown target type", line.kind));
            let at = line.spans.get(2).map(|span| span_to_text_position(line.number, &line.text, *span));
            Err(VerbError::new(name, error).at(at))
        }
    }
}

/// The error for `text` that is neither a device nor a table.
fn not_a_table(name: &str, text: &str) -> VerbError {
    let error = parse_size_limited_table(name, text).err();
    error.unwrap_or_else(|| {
        VerbError::new(name, TargetError::errno(EINVAL).because("a table is START LENGTH TYPE ARGUMENTS"))
    })
}

fn parse_size_limited_table(name: &str, text: &str) -> Result<Vec<TableLine>, VerbError> {
    if text.len() > TABLE_MAX {
        let error = TargetError::errno(E2BIG).because(format!("the table is longer than {TABLE_MAX} bytes"));
        return Err(VerbError::new(name, error));
    }
    udm_wire::table::parse_table(text).map_err(|e| table_syntax_verb_error(name, &e))
}

/// As [`load_table_cancellable`], for a device already looked up. Returns the table.
pub(crate) fn load_into(
    registry: &DeviceRegistry,
    mapped: &Arc<RegisteredDevice>,
    name: &str,
    text: &str,
    folder: &BaseDir,
    cancel_token: &CancelToken,
) -> Result<Arc<Table>, VerbError> {
    build_and_load_table(registry, mapped, name, (text, false), folder, cancel_token, |_| Ok(()))
}

/// As [`load_into`], but `may` can refuse after the table is built.
pub(super) fn load_if(
    registry: &DeviceRegistry,
    mapped: &Arc<RegisteredDevice>,
    name: &str,
    text: &str,
    folder: &BaseDir,
    cancel_token: &CancelToken,
    may: impl FnOnce(&RegisteredDevice) -> Result<(), TargetError>,
) -> Result<Arc<Table>, VerbError> {
    build_and_load_table(registry, mapped, name, (text, false), folder, cancel_token, may)
}

/// The table of the place to which the disk of `text` was moved; `None` if it was not moved, or if
/// `text` is wrong.
fn moved_table(
    registry: &DeviceRegistry,
    name: &str,
    text: &str,
    folder: &BaseDir,
) -> Result<Option<String>, VerbError> {
    match parse_table_or_device_word(name, text) {
        Ok(lines) => moves::redirect_to_current_place(registry, name, &lines, folder),
        Err(_) => Ok(None),
    }
}

fn build_and_load_table(
    registry: &DeviceRegistry,
    mapped: &Arc<RegisteredDevice>,
    name: &str,
    (text, read_only): (&str, bool),
    folder: &BaseDir,
    cancel_token: &CancelToken,
    may: impl FnOnce(&RegisteredDevice) -> Result<(), TargetError>,
) -> Result<Arc<Table>, VerbError> {
    let moved;
    let (text, is_moved) = match moved_table(registry, name, text, folder)? {
        Some(table) => {
            moved = table;
            (moved.as_str(), true)
        }
        None => (text, false),
    };
    let is_short = !udm_wire::table::is_table_not_device_name(text);
    let (short, _open);
    let text = if is_short {
        (short, _open) = match whole_device_table(registry, name, text.trim(), folder) {
            // Several words that name no device were meant as a table.
            Err(_) if text.trim().contains(char::is_whitespace) => return Err(not_a_table(name, text)),
            found => found?,
        };
        &short
    } else {
        text
    };
    let lines = parse_size_limited_table(name, text)?;
    let refused = |error: TargetError| {
        // The position refers to a generated table, not to the user's text.
        let position = error_text_position(&lines, &error).filter(|_| !is_short && !is_moved);
        VerbError::new(name, error).at(position)
    };
    // Loads run concurrently, because the file system may hang during one.
    let mut opening = TableResolver::new(registry, folder).of(mapped);
    let io = TableLoadControlIo::new(registry.cores()).until(cancel_token);
    let table = Table::build(udm_targets::TARGETS, &lines, &mut opening, &io, registry.core_count())
        .map_err(refused)?;
    moves::check_old_places(registry, mapped, name, &table)?;
    if read_only {
        table.set_read_only();
    }
    // A replaced or refused table is dropped after the lock is released, because that closes
    // devices.
    let given = Arc::clone(&table);
    let _replaced;
    let _linked = registry.linking();
    _replaced = mapped.device.inactive();
    if !registry.is_active(mapped) {
        let error = TargetError::errno(ENXIO).because("it has been removed meanwhile");
        return Err(VerbError::new(name, error));
    }
    may(mapped).and_then(|()| mapped.device.load(table)).map_err(refused)?;
    if !registry.is_being_created(mapped) {
        mapped.publish(EventKind::Loaded, "a table was loaded");
    }
    Ok(given)
}

/// Empties the inactive slot.
///
/// # Errors
/// ENXIO if there is no such device.
pub fn clear_inactive_table(registry: &DeviceRegistry, name: &str) -> Result<(), VerbError> {
    let mapped = registry.find(name)?;
    let was = mapped.device.inactive();
    mapped.device.clear();
    if was.is_some() {
        mapped.publish(EventKind::Cleared, "the loaded table was cleared");
    }
    Ok(())
}

/// Sends a message to the target at `sector` and returns its answer. Returns when the message and
/// the work of the cores for it are complete. Relative paths are relative to the working directory
/// of the process. May block for the cores, and to look up a path that is written differently from
/// the table.
///
/// # Errors
/// ENXIO if there is no such device; EINVAL for an unknown message; ETIMEDOUT if the cores do not
/// complete it within 10 s; otherwise the target's error.
pub fn send_target_message(
    registry: &DeviceRegistry,
    name: &str,
    sector: u64,
    text: &str,
) -> Result<String, VerbError> {
    send_message_with_base_dir(registry, name, sector, text, &BaseDir::own())
}

/// As [`send_target_message`], with relative paths based on `folder`.
///
/// # Errors
/// As [`send_target_message`].
pub fn send_message_with_base_dir(
    registry: &DeviceRegistry,
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
    let words = words::split_message_words(text);
    if let Some(outcome) = run_cancel_deferred_message(registry, &mapped, &words) {
        return outcome.map(|()| String::new()).map_err(|e| VerbError::new(name, e));
    }
    let in_use = &mut MessageResolver { registry, mapped: &mapped, folder };
    let sent = mapped.device.send(sector, &words, in_use, registry.cores());
    let done = sent.and_then(|(answer, pending)| match pending {
        Some(pending) => wait_until_cores_completed_message(registry, &mapped, &pending).map(|()| answer),
        None => Ok(answer),
    });
    let answer = done.map_err(|e| VerbError::new(name, e))?;
    record_message(registry, &mapped, &words)?;
    Ok(answer)
}

/// Applies `action`, "fail" or "reinstate", to the paths of `name` over one device. `path` is the
/// number of that device or a table's word for it, with relative paths based on `folder`. Path
/// checks do not reinstate a path that was failed this way. May block to look up a path that is
/// written differently from the table.
///
/// # Errors
/// ENXIO if there is no such device; EBUSY while it is suspended; EINVAL if it has no such path,
/// and for another action; the error of looking the word up.
pub fn fail_or_reinstate_path(
    registry: &DeviceRegistry,
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
    // Checked also while the device is suspended.
    if !used.any(|used| used.device.number == number) {
        return Err(refused(TargetError::new(format!("multipath: no path over device {path}"))));
    }
    mapped.device.command_path(number, command, registry.cores()).map_err(refused)
}

/// Handles the message to the device itself that cancels `remove --deferred`. `None` if `words` are
/// another message.
fn run_cancel_deferred_message(
    registry: &DeviceRegistry,
    mapped: &Arc<RegisteredDevice>,
    words: &[String],
) -> Option<Result<(), TargetError>> {
    let (first, rest) = words.split_first()?;
    if !first.eq_ignore_ascii_case("@cancel_deferred_remove") {
        return None;
    }
    if !rest.is_empty() {
        return Some(Err(TargetError::new(format!("Invalid arguments for {first}")).at(1)));
    }
    Some(registry.cancel_deferred_removal(mapped))
}

/// Waits until the cores have completed a message. Keeps a lane open, in case no client uses the
/// device.
fn wait_until_cores_completed_message(
    registry: &DeviceRegistry,
    mapped: &RegisteredDevice,
    pending: &TargetMessageWaitHandle,
) -> Result<(), TargetError> {
    let lane = lane_guard::open_lane(registry, &mapped.device, AckOnLastDrop::new(|| {}));
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

/// Line and column in the text that `error` refers to.
fn error_text_position(lines: &[TableLine], error: &TargetError) -> Option<TextPosition> {
    let line = lines.get(error.line?)?;
    // If the error names no word, it refers to the line: the position of its target type.
    let span = error.word.map_or_else(|| line.spans.get(2).copied(), |word| Some(line.arg_span(word)))?;
    Some(span_to_text_position(line.number, &line.text, span))
}

fn span_to_text_position(number: usize, text: &str, span: words::WordSpan) -> TextPosition {
    let column = |byte: usize| text.char_indices().take_while(|(i, _)| *i < byte).count();
    // A missing word is placed after the end of the text.
    let from = column(span.start) + span.start.saturating_sub(text.len());
    let width = column(span.end).saturating_sub(column(span.start)).max(1);
    TextPosition { line: number, column: from + 1, width }
}

/// The error for a text that is no table, in dmsetup's words.
fn table_syntax_verb_error(name: &str, error: &TableSyntaxError) -> VerbError {
    let position = (error.number > 0).then(|| span_to_text_position(error.number, &error.text, error.span));
    VerbError::new(name, TargetError::new(error.to_string())).at(position)
}
