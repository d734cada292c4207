//! The copy of a clone: its rate, and its line on the page of a device.

use super::text::{ScreenLine, TextStyle, format_short_bytes};
use serde::Serialize;
use udm_control::api::CloneDescription;

/// The copy of a clone.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct CloneRates {
    /// "hydrating", "stopped", "done", "ro" or "Fail".
    pub state: String,
    /// Part of the clone that is in its destination, in percent; 100 only if no region is left.
    pub hydrated_percent: f64,
    /// Bytes per second that were added to the destination.
    pub bytes: Option<f64>,
    /// Reads of the source that failed a copy, since the start.
    pub source_errors: u64,
}

/// The copy between two readings, which are `seconds` apart.
pub fn clone_rates(
    was: Option<&CloneDescription>,
    is: &CloneDescription,
    seconds: Option<f64>,
) -> CloneRates {
    // Another clone of the name may have less.
    let copied = was.and_then(|was| is.hydrated_bytes.checked_sub(was.hydrated_bytes));
    CloneRates {
        state: is.state.clone(),
        hydrated_percent: (is.hydrated_regions as f64 * 1000.0 / is.regions.max(1) as f64).floor() / 10.0,
        bytes: copied.zip(seconds).map(|(copied, seconds)| copied as f64 / seconds),
        source_errors: is.source_errors,
    }
}

/// The style of the state of a clone.
pub fn clone_style(clone: &CloneRates) -> TextStyle {
    match clone.state.as_str() {
        "ro" | "Fail" => TextStyle::Bad,
        _ if clone.source_errors > 0 => TextStyle::Warn,
        "done" => TextStyle::Good,
        _ => TextStyle::Plain,
    }
}

/// The line of a clone on the page of its device.
pub fn draw_clone_line(clone: &CloneRates) -> ScreenLine {
    let rate = clone.bytes.map(|bytes| format!(", {} bytes/s", format_short_bytes(bytes)));
    let errors = match clone.source_errors {
        0 => String::new(),
        errors => format!(", {errors} errors of its source"),
    };
    let (state, percent) = (&clone.state, clone.hydrated_percent);
    let line = format!("clone {state}, {percent:.1} % copied{}{errors}", rate.unwrap_or_default());
    ScreenLine::new(line, clone_style(clone))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_and_the_line_of_a_clone() {
        let was = CloneDescription { hydrated_bytes: 1 << 20, ..CloneDescription::default() };
        let is = CloneDescription {
            state: "hydrating".into(),
            hydrated_bytes: 3 << 20,
            hydrated_regions: 9_999,
            regions: 10_000,
            source_errors: 2,
            ..CloneDescription::default()
        };
        let rates = clone_rates(Some(&was), &is, Some(2.0));
        assert_eq!((rates.bytes, rates.hydrated_percent), (Some(f64::from(1 << 20)), 99.9));
        let line = draw_clone_line(&rates);
        assert_eq!(line.text(), "clone hydrating, 99.9 % copied, 1.0M bytes/s, 2 errors of its source");
        assert_eq!(line.pieces[0].1, TextStyle::Warn);
        assert_eq!(clone_rates(Some(&is), &was, Some(2.0)).bytes, None, "it is another clone");
        assert_eq!(clone_rates(None, &is, None).bytes, None);
    }
}
