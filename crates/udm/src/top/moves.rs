//! The move of a device: its line on the page of the device.

use super::text::{ScreenLine, TextStyle, format_short_bytes, sanitize};
use serde::Serialize;
use udm_control::api::MoveDescription;

/// A move that is under way.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct MoveRates {
    /// "copying", "paused", "waiting" or "switching".
    pub state: String,
    /// The new place.
    pub to: String,
    /// Part of the disk that is in both places, in percent; 100 only if nothing is left.
    pub copied_percent: f64,
    /// Bytes copied per second.
    pub bytes: Option<f64>,
    /// Why it waits.
    pub error: Option<String>,
}

/// The move between two readings, which are `seconds` apart.
pub fn move_rates(was: Option<&MoveDescription>, is: &MoveDescription, seconds: Option<f64>) -> MoveRates {
    // A move that began again has copied less.
    let copied = was.and_then(|was| is.copied_bytes.checked_sub(was.copied_bytes));
    MoveRates {
        state: is.state.clone(),
        to: is.destination.clone(),
        copied_percent: (is.copied_bytes as f64 * 1000.0 / is.size_bytes.max(1) as f64).floor() / 10.0,
        bytes: copied.zip(seconds).map(|(copied, seconds)| copied as f64 / seconds),
        error: is.error.clone(),
    }
}

/// The style of the state of a move.
pub fn move_style(one: &MoveRates) -> TextStyle {
    match (one.error.is_some(), one.state.as_str()) {
        (true, _) | (_, "waiting") => TextStyle::Warn,
        _ => TextStyle::Plain,
    }
}

/// The line of a move on the page of its device.
pub fn draw_move_line(one: &MoveRates) -> ScreenLine {
    let rate = one.bytes.map(|bytes| format!(", {} bytes/s", format_short_bytes(bytes)));
    let error = one.error.as_ref().map(|error| format!(", {error}")).unwrap_or_default();
    let (state, percent, to) = (&one.state, one.copied_percent, &one.to);
    let line = format!("move to {to} {state}, {percent:.1} % copied{}{error}", rate.unwrap_or_default());
    ScreenLine::new(sanitize(&line), move_style(one))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_a_move() {
        let was = MoveDescription { copied_bytes: 1 << 20, ..MoveDescription::default() };
        let is = MoveDescription {
            state: "waiting".into(),
            destination: "nbd://b/disk".into(),
            copied_bytes: 3 << 20,
            size_bytes: 4 << 20,
            error: Some("a write failed".into()),
            ..MoveDescription::default()
        };
        let line = draw_move_line(&move_rates(Some(&was), &is, Some(2.0)));
        assert_eq!(line.text(), "move to nbd://b/disk waiting, 75.0 % copied, 1.0M bytes/s, a write failed");
        assert_eq!(line.pieces[0].1, TextStyle::Warn);
        assert_eq!(move_rates(Some(&is), &was, Some(2.0)).bytes, None, "it began again");
    }
}
