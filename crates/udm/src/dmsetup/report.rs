//! Reports in columns, printed once or repeatedly.

use super::options::DmsetupOption;
use super::session::{DmsetupError, DmsetupInvocation, DmsetupResult};
use crate::columns::{ColumnReport, ColumnReportArgError, ColumnReportLayout, report_fields_help};
use crate::output;
use std::time::{Duration, Instant};

/// The number of reports, and the interval between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ReportRepetition {
    count: u64,
    interval: Duration,
}

/// True if a command prints a report.
pub fn command_prints_report(session: &DmsetupInvocation, command: &str) -> bool {
    command == "splitname" || command == "info" && session.has(DmsetupOption::Columns)
}

/// Parses a number like C's `atoi`.
fn atoi(text: &str) -> i64 {
    let text = text.trim_start();
    let (sign, digits) =
        text.strip_prefix('-').map_or((1, text.strip_prefix('+').unwrap_or(text)), |t| (-1, t));
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    sign * digits[..end].parse().unwrap_or(if end == 0 { 0 } else { i64::from(i32::MAX) })
}

impl ReportRepetition {
    /// Parses `--count` and `--interval`. Without a count, or with 0, reports repeat without end.
    fn new(count: Option<&str>, interval: Option<&str>) -> Result<ReportRepetition, DmsetupError> {
        let bad = |why: &str| Err(DmsetupError::Line(why.into()));
        let interval = interval.map_or(1, atoi);
        let count = match (count.map(atoi), interval) {
            (Some(..0), _) => return bad("Count must be zero or greater."),
            (_, ..=0) => return bad("Interval must be a positive integer."),
            (Some(0), _) => u64::MAX,
            (Some(count), _) => count.unsigned_abs(),
            (None, _) => 1,
        };
        Ok(ReportRepetition { count, interval: Duration::from_secs(interval.unsigned_abs()) })
    }

    fn of(session: &DmsetupInvocation) -> Result<ReportRepetition, DmsetupError> {
        // An interval without a count also repeats without end.
        let count =
            session.value(DmsetupOption::Count).or(session.has(DmsetupOption::Interval).then_some("0"));
        ReportRepetition::new(count, session.value(DmsetupOption::Interval))
    }
}

/// True if a command is to be repeated.
///
/// # Errors
/// `--count` or `--interval` is invalid.
pub fn is_report_repeated(session: &DmsetupInvocation) -> Result<bool, DmsetupError> {
    Ok(ReportRepetition::of(session)?.count > 1)
}

/// Prints a report as often as the options say, until one fails or the output is closed. An empty
/// line follows each report except the last.
///
/// # Errors
/// The errors of `report`.
pub fn repeat_report(
    session: &mut DmsetupInvocation,
    mut report: impl FnMut(&mut DmsetupInvocation) -> DmsetupResult,
) -> DmsetupResult {
    let ReportRepetition { count, interval } = ReportRepetition::of(session)?;
    let begin = Instant::now();
    let mut gone_by = 0;
    for nth in 1..=count {
        report(session)?;
        if nth == count {
            break;
        }
        session.out.push('\n');
        let printed = output::print_to_stdout(&std::mem::take(&mut session.out));
        printed.map_err(|error| DmsetupError::Failed(crate::strip_os_error(&format!("{error:#}"))))?;
        // If a report takes longer than the interval, the next one follows at once.
        let by_now = begin.elapsed().as_secs() / interval.as_secs();
        let missed = by_now.saturating_sub(gone_by + 1);
        if missed > 0 {
            DmsetupInvocation::warn(&format!(
                "WARNING: Try increasing --interval ({missed} missed timer events)."
            ));
        }
        if by_now > gone_by {
            gone_by = by_now;
        } else {
            gone_by += 1;
            let next = interval.saturating_mul(u32::try_from(gone_by).unwrap_or(u32::MAX));
            if output::wait_stdout_pipe_closed(Some(next.saturating_sub(begin.elapsed()))) {
                break;
            }
        }
    }
    Ok(())
}

/// The layout of the columns from the options.
fn column_layout_from_options(session: &DmsetupInvocation) -> ColumnReportLayout {
    ColumnReportLayout {
        no_headings: session.has(DmsetupOption::NoHeadings),
        separator: session.value(DmsetupOption::Separator).map(String::from),
        name_prefixes: session.has(DmsetupOption::Prefixes),
        unquoted: session.has(DmsetupOption::Unquoted),
        rows: session.has(DmsetupOption::Rows),
    }
}

/// The columns of `fields`, or the default ones.
///
/// # Errors
/// A field or criterion is invalid.
pub fn build_column_report(
    session: &DmsetupInvocation,
    fields: Option<&str>,
) -> Result<ColumnReport, DmsetupError> {
    let columns = ColumnReport::new(
        fields,
        session.value(DmsetupOption::Sort),
        session.value(DmsetupOption::Select),
        column_layout_from_options(session),
    );
    // As dmsetup, prints the list of fields and the error, without a last line.
    columns.map_err(|wrong| match wrong {
        ColumnReportArgError::Word(why) => DmsetupError::Silent(format!("{}\n{why}", report_fields_help())),
        ColumnReportArgError::Value(why) => DmsetupError::Silent(why),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_often() {
        let times = |count, interval| {
            ReportRepetition::new(count, interval).map(|times| (times.count, times.interval.as_secs()))
        };
        assert_eq!(times(None, None), Ok((1, 1)));
        assert_eq!(times(Some("3"), Some("2x")), Ok((3, 2)));
        assert_eq!(times(Some("x"), None), Ok((u64::MAX, 1)));
        let bad = |why: &str| Err(DmsetupError::Line(why.into()));
        assert_eq!(times(Some("-1"), None), bad("Count must be zero or greater."));
        assert_eq!(times(None, Some("x")), bad("Interval must be a positive integer."));
    }
}
