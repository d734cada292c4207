//! `udm events`: events of a server, one per line.

use crate::args::ServerArgs;
use crate::output::{print_to_stdout, wait_stdout_pipe_closed_async};
use crate::requests::explain_client_error;
use anyhow::Result;
use clap::Args;
use std::ops::ControlFlow;
use udm_control::api::DeviceEventDescription;

/// The arguments of `udm events`.
#[derive(Debug, Args)]
pub struct EventsArgs {
    #[command(flatten)]
    pub server: ServerArgs,
    /// Print JSON, one object per line
    #[arg(long)]
    pub json: bool,
    /// Begin after the event with this number
    #[arg(long, value_name = "ID")]
    pub after: Option<u64>,
    /// End after so many events
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// Only events of these devices, by name, uuid or number [default: all]
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,
}

/// Prints events until their number reaches `--count` or nobody reads the output.
pub fn print_events(args: &EventsArgs) -> Result<()> {
    let client = args.server.client()?;
    let mut left = args.count;
    let on_event = |event: DeviceEventDescription| {
        if !is_event_selected(args, &event) {
            return ControlFlow::Continue(());
        }
        if let Err(error) = print_device_event(args, &event) {
            return ControlFlow::Break(Err(error));
        }
        left = left.map(|left| left - 1);
        if left == Some(0) { ControlFlow::Break(Ok(())) } else { ControlFlow::Continue(()) }
    };
    let done = client.listen(args.after, on_event, async {
        wait_stdout_pipe_closed_async().await;
        Ok(())
    });
    done.map_err(|error| explain_client_error(error, None))?
}

fn is_event_selected(args: &EventsArgs, event: &DeviceEventDescription) -> bool {
    let is =
        |name: &String| [Some(&event.device), event.uuid.as_ref(), Some(&event.number)].contains(&Some(name));
    args.names.is_empty() || event.kind == "lost" || args.names.iter().any(is)
}

fn print_device_event(args: &EventsArgs, event: &DeviceEventDescription) -> Result<()> {
    if args.json {
        return print_to_stdout(&format!("{}\n", serde_json::to_string(event)?));
    }
    let device = if event.device.is_empty() { String::new() } else { format!("{}: ", event.device) };
    print_to_stdout(&format!("{} {device}{}\n", format_utc_timestamp(event.time_ms), event.line))
}

/// Formats a time in UTC: `2026-11-21T18:33:57.123Z`.
fn format_utc_timestamp(ms: u64) -> String {
    let (days, of_day) = (ms / 86_400_000, ms % 86_400_000);
    let (year, month, day) = date_from_unix_days(days);
    let (seconds, ms) = (of_day / 1000, of_day % 1000);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{ms:03}Z")
}

/// The date that is `days` days after 1 January 1970. The computation lets years begin in March, so
/// that a leap day is the last day of a year; 400 years have 146,097 days.
fn date_from_unix_days(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_utc() {
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00.007Z"),
            (951_782_400, "2000-02-29T00:00:00.007Z"),
            (1_763_908_437, "2025-11-23T14:33:57.007Z"),
            (4_107_542_399, "2100-02-28T23:59:59.007Z"),
            (4_107_542_400, "2100-03-01T00:00:00.007Z"),
        ] {
            assert_eq!(format_utc_timestamp(seconds * 1000 + 7), expected);
        }
    }
}
