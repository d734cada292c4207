//! Reports in columns, printed once or repeatedly.

use super::options::OptionName;
use super::session::{CommandError, CommandResult, Session};
use crate::columns::{ColumnError, ColumnLayout, Columns, list_of_fields};
use crate::output;
use std::time::{Duration, Instant};

/// The number of reports, and the interval between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Repeat {
    count: u64,
    interval: Duration,
}

/// True if a command prints a report.
pub fn is_report(session: &Session, command: &str) -> bool {
    command == "splitname" || command == "info" && session.has(OptionName::Columns)
}

/// Parses a number like C's `atoi`.
fn atoi(text: &str) -> i64 {
    let text = text.trim_start();
    let (sign, digits) =
        text.strip_prefix('-').map_or((1, text.strip_prefix('+').unwrap_or(text)), |t| (-1, t));
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    sign * digits[..end].parse().unwrap_or(if end == 0 { 0 } else { i64::from(i32::MAX) })
}

impl Repeat {
    /// Parses `--count` and `--interval`. Without a count, or with 0, reports repeat without end.
    fn new(count: Option<&str>, interval: Option<&str>) -> Result<Repeat, CommandError> {
        let bad = |why: &str| Err(CommandError::Line(why.into()));
        let interval = interval.map_or(1, atoi);
        let count = match (count.map(atoi), interval) {
            (Some(..0), _) => return bad("Count must be zero or greater."),
            (_, ..=0) => return bad("Interval must be a positive integer."),
            (Some(0), _) => u64::MAX,
            (Some(count), _) => count.unsigned_abs(),
            (None, _) => 1,
        };
        Ok(Repeat { count, interval: Duration::from_secs(interval.unsigned_abs()) })
    }

    fn of(session: &Session) -> Result<Repeat, CommandError> {
        // An interval without a count also repeats without end.
        let count = session.value(OptionName::Count).or(session.has(OptionName::Interval).then_some("0"));
        Repeat::new(count, session.value(OptionName::Interval))
    }
}

/// True if a command is to be repeated.
///
/// # Errors
/// `--count` or `--interval` is invalid.
pub fn is_repeated(session: &Session) -> Result<bool, CommandError> {
    Ok(Repeat::of(session)?.count > 1)
}

/// Prints a report as often as the options say, until one fails or the output is closed. An empty
/// line follows each report except the last.
///
/// # Errors
/// The errors of `report`.
pub fn repeat_report(
    session: &mut Session,
    mut report: impl FnMut(&mut Session) -> CommandResult,
) -> CommandResult {
    let Repeat { count, interval } = Repeat::of(session)?;
    let begin = Instant::now();
    let mut gone_by = 0;
    for nth in 1..=count {
        report(session)?;
        if nth == count {
            break;
        }
        session.out.push('\n');
        let printed = output::say(&std::mem::take(&mut session.out));
        printed.map_err(|error| CommandError::Failed(crate::strip_os_error(&format!("{error:#}"))))?;
        // If a report takes longer than the interval, the next one follows at once.
        let by_now = begin.elapsed().as_secs() / interval.as_secs();
        let missed = by_now.saturating_sub(gone_by + 1);
        if missed > 0 {
            Session::warn(&format!("WARNING: Try increasing --interval ({missed} missed timer events)."));
        }
        if by_now > gone_by {
            gone_by = by_now;
        } else {
            gone_by += 1;
            let next = interval.saturating_mul(u32::try_from(gone_by).unwrap_or(u32::MAX));
            if output::reader_closed(Some(next.saturating_sub(begin.elapsed()))) {
                break;
            }
        }
    }
    Ok(())
}

/// The layout of the columns from the options.
fn layout(session: &Session) -> ColumnLayout {
    ColumnLayout {
        no_headings: session.has(OptionName::NoHeadings),
        separator: session.value(OptionName::Separator).map(String::from),
        name_prefixes: session.has(OptionName::Prefixes),
        unquoted: session.has(OptionName::Unquoted),
        rows: session.has(OptionName::Rows),
    }
}

/// The columns of `fields`, or the default ones.
///
/// # Errors
/// A field or criterion is invalid.
pub fn columns_of(session: &Session, fields: Option<&str>) -> Result<Columns, CommandError> {
    let columns = Columns::new(
        fields,
        session.value(OptionName::Sort),
        session.value(OptionName::Select),
        layout(session),
    );
    // As dmsetup, prints the list of fields and the error, without a last line.
    columns.map_err(|wrong| match wrong {
        ColumnError::Word(why) => CommandError::Silent(format!("{}\n{why}", list_of_fields())),
        ColumnError::Value(why) => CommandError::Silent(why),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_often() {
        let times = |count, interval| {
            Repeat::new(count, interval).map(|times| (times.count, times.interval.as_secs()))
        };
        assert_eq!(times(None, None), Ok((1, 1)));
        assert_eq!(times(Some("3"), Some("2x")), Ok((3, 2)));
        assert_eq!(times(Some("x"), None), Ok((u64::MAX, 1)));
        let bad = |why: &str| Err(CommandError::Line(why.into()));
        assert_eq!(times(Some("-1"), None), bad("Count must be zero or greater."));
        assert_eq!(times(None, Some("x")), bad("Interval must be a positive integer."));
    }
}
