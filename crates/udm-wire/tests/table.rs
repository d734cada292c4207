//! Tables: quoting, errors with carets, and bounds, which the recordings do not cover.

use udm_wire::table::{self, TableLine};

fn error_of(text: &str) -> (String, String) {
    let error = table::parse_table(text).unwrap_err();
    (error.to_string(), error.caret())
}

#[test]
fn errors_show_the_word() {
    let (text, caret) = error_of("# a table\n0 8 zero\n8 x\tlinear a 0\n");
    assert_eq!(text, "Invalid format on line 3 of table: LEN \"x\" is not a number of sectors");
    assert_eq!(caret, "8 x\tlinear a 0\n  ^");
    let (text, caret) = error_of("0 8  ");
    assert_eq!(text, "Invalid format on line 1 of table: no TYPE; a line is START LEN TYPE ARGS...");
    assert_eq!(caret, "0 8  \n     ^");
    let (text, caret) = error_of("-1 8 zero");
    assert_eq!(text, "Invalid format on line 1 of table: START \"-1\" is not a number of sectors");
    assert_eq!(caret, "-1 8 zero\n^^");
    let (text, caret) = error_of("0 8 abcdefghijklmnop x");
    assert_eq!(text, "Target type name abcdefghijklmnop is too long.");
    assert_eq!(caret, "0 8 abcdefghijklmnop x\n    ^^^^^^^^^^^^^^^^");
    let (text, caret) = error_of("0 8 zero\0");
    assert_eq!(text, "Invalid format on line 1 of table: a NUL character");
    assert_eq!(caret, "0 8 zero?\n        ^");
    assert!(
        error_of("0 8\u{1b}[2Jx zero").0.contains("\\u{1b}"),
        "nothing of it reaches the terminal as it is"
    );
}

#[test]
fn carets_stand_under_arguments() {
    let lines = table::parse_table("0 8 zero\n0 16 linear  /dev/a\\ b 0 # why\n").unwrap();
    assert_eq!(lines[1].number, 2);
    assert_eq!(lines[1].args, ["/dev/a b", "0"]);
    assert_eq!(lines[1].caret(0).lines().nth(1), Some("             ^^^^^^^^^"));
    assert_eq!(lines[1].caret(1).lines().nth(1), Some("                       ^"));
    assert_eq!(lines[1].caret(2).lines().nth(1), Some("                         ^"), "what is missing");
    assert_eq!(lines[1].caret(usize::MAX).lines().nth(1), Some("                         ^"));
}

#[test]
fn a_backslash_quotes_as_in_the_kernel() {
    let lines = table::parse_table("0 8 linear a\\ b\\\\c\\#d\\e 0\\").unwrap();
    assert_eq!(lines[0].args, ["a b\\c#de", "0\\"]);
    assert_eq!(lines[0].to_string(), "0 8 linear a\\ b\\\\c\\#de 0\\\\");
    assert_eq!(
        lines[0],
        TableLine {
            text: lines[0].text.clone(),
            spans: lines[0].spans.clone(),
            ..TableLine::new(0, 8, "linear", ["a b\\c#de", "0\\"])
        }
    );
}

/// Found by fuzzing: a carriage return was removed from the end of the line before the words were
/// split. So a carriage return after a backslash was lost when the line was printed and parsed
/// again.
#[test]
fn a_quoted_carriage_return_is_part_of_its_word() {
    let lines = table::parse_table("0 8 linear a\\\r\r\n").unwrap();
    assert_eq!(lines[0].args, ["a\r"]);
    assert_eq!(table::parse_table(&lines[0].to_string()).unwrap()[0].args, ["a\r"]);
    assert_eq!(table::parse_table("0 8 linear a\r\n").unwrap()[0].caret(0), "0 8 linear a\n           ^");
}

#[test]
fn as_many_targets_as_the_kernel_takes() {
    let mut text = "0 1 zero\n".repeat(table::LINES_MAX);
    assert_eq!(table::parse_table(&text).unwrap().len(), 1_048_576);
    text.push_str("# a comment is no target\n");
    assert!(table::parse_table(&text).is_ok());
    text.push_str("0 1 zero");
    assert_eq!(error_of(&text).0, "a table of more than 1048576 targets");
}

#[test]
fn a_table_has_bounds() {
    let text = format!("0 1 error {}", "x ".repeat(table::WORDS_MAX));
    assert!(table::parse_table(&text).is_ok());
    let text = format!("{text} x");
    assert_eq!(error_of(&text).0, "a table of more than 4194304 words");
    let text = "#".repeat(table::TEXT_MAX + 1);
    assert_eq!(error_of(&text).0, "a table of more than 64 MiB");
    assert_eq!(table::parse_table(&text[1..]).unwrap(), []);
}
