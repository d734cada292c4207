//! A table's line with carets under the word to blame.

use udm_control::error::Place;
use udm_wire::words::{Span, caret};

/// The line of `table` that `place` names and carets below it. `None` when the table has no such line.
pub fn mark(table: &str, place: Place) -> Option<String> {
    let line = table.split('\n').nth(place.line.checked_sub(1)?)?;
    let line = line.strip_suffix('\r').unwrap_or(line);
    // The place counts characters, the span bytes.
    let byte = |column: usize| line.char_indices().nth(column).map_or(line.len(), |(i, _)| i);
    let from = place.column.saturating_sub(1);
    Some(caret(line, Span { start: byte(from), end: byte(from.saturating_add(place.width)) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(line: usize, column: usize, width: usize) -> Place {
        Place { line, column, width }
    }

    #[test]
    fn under_the_word() {
        let table = "# a comment\r\n0 8 lineär x y\n";
        assert_eq!(mark(table, at(2, 12, 1)).unwrap(), "0 8 lineär x y\n           ^");
        assert_eq!(mark(table, at(2, 5, 6)).unwrap(), "0 8 lineär x y\n    ^^^^^^");
        assert_eq!(mark(table, at(2, 99, 1)).unwrap(), "0 8 lineär x y\n              ^", "behind the end");
    }

    #[test]
    fn nonsense_places_are_harmless() {
        assert_eq!(mark("0 8 error", at(0, 1, 1)), None);
        assert_eq!(mark("0 8 error", at(2, 1, 1)), None);
        assert!(mark("0 8 error", at(1, usize::MAX, usize::MAX)).is_some());
        assert!(mark("0 8 error", at(1, 0, 0)).is_some());
    }
}
