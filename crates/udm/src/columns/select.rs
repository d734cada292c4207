//! `-S`: selects devices by criteria such as `open>0 && (name=a || uuid=~^x)`.

use super::fields::{FieldKind, ReportField};
use super::regex::Regex;
use super::{ColumnReportArgError, DeviceReportRow, find_report_field};

/// A selection criterion.
#[derive(Debug)]
pub enum SelectionCriterion {
    /// Both criteria hold.
    And(Box<SelectionCriterion>, Box<SelectionCriterion>),
    /// At least one of the criteria holds.
    Or(Box<SelectionCriterion>, Box<SelectionCriterion>),
    /// The criterion does not hold.
    Not(Box<SelectionCriterion>),
    /// The comparison of a field with a value.
    Is(&'static ReportField, CompareOp, String),
    /// The field matches a regular expression.
    Matches(&'static ReportField, Regex),
}

/// A comparison operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompareOp {
    Equal,
    NotEqual,
    AtLeast,
    AtMost,
    More,
    Less,
}

/// All operators; an operator that is a prefix of another comes after it.
const OPERATORS: [(&str, CompareOp); 6] = [
    ("!=", CompareOp::NotEqual),
    (">=", CompareOp::AtLeast),
    ("<=", CompareOp::AtMost),
    ("=", CompareOp::Equal),
    (">", CompareOp::More),
    ("<", CompareOp::Less),
];

/// Maximum depth of nested criteria.
const DEPTH_MAX: usize = 100;

impl From<String> for ColumnReportArgError {
    fn from(why: String) -> ColumnReportArgError {
        ColumnReportArgError::Word(why)
    }
}

impl std::fmt::Debug for ReportField {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl SelectionCriterion {
    /// Parses criteria.
    ///
    /// # Errors
    /// The error lines of dmsetup.
    pub fn parse(text: &str) -> Result<SelectionCriterion, ColumnReportArgError> {
        let mut parser = SelectionParser { rest: text };
        let selection = parser.any(0)?;
        match parser.rest.trim_start() {
            "" => Ok(selection),
            rest => Err(ColumnReportArgError::Value(format!(
                "Expecting logical operator\n{}",
                selection_syntax_error(rest)
            ))),
        }
    }

    /// The fields that the criteria use.
    pub fn fields(&self) -> Vec<&'static ReportField> {
        match self {
            SelectionCriterion::And(a, b) | SelectionCriterion::Or(a, b) => [a.fields(), b.fields()].concat(),
            SelectionCriterion::Not(it) => it.fields(),
            SelectionCriterion::Is(field, ..) | SelectionCriterion::Matches(field, _) => vec![field],
        }
    }

    /// True if the criteria select `row`; a field without a value does not match.
    pub fn takes(&self, row: &DeviceReportRow) -> bool {
        match self {
            SelectionCriterion::And(a, b) => a.takes(row) && b.takes(row),
            SelectionCriterion::Or(a, b) => a.takes(row) || b.takes(row),
            SelectionCriterion::Not(it) => !it.takes(row),
            SelectionCriterion::Is(field, compare, expected) => {
                (field.value)(row).is_ok_and(|value| compare.holds(field.kind, &value, expected))
            }
            SelectionCriterion::Matches(field, regex) => {
                (field.value)(row).is_ok_and(|value| regex.is_match(&value))
            }
        }
    }
}

impl CompareOp {
    fn holds(self, kind: FieldKind, value: &str, expected: &str) -> bool {
        let order = match kind {
            FieldKind::Number => value.parse::<u64>().ok().cmp(&expected.parse().ok()),
            FieldKind::Text => value.cmp(expected),
        };
        match self {
            CompareOp::Equal => order.is_eq(),
            CompareOp::NotEqual => order.is_ne(),
            CompareOp::AtLeast => order.is_ge(),
            CompareOp::AtMost => order.is_le(),
            CompareOp::More => order.is_gt(),
            CompareOp::Less => order.is_lt(),
        }
    }
}

fn selection_syntax_error(at: &str) -> String {
    format!("Selection syntax error at '{at}'.\nUse 'help' for selection to get more help.")
}

struct SelectionParser<'a> {
    rest: &'a str,
}

impl SelectionParser<'_> {
    fn eat(&mut self, tokens: &[&str]) -> bool {
        let rest = self.rest.trim_start();
        let found = tokens.iter().find_map(|token| rest.strip_prefix(token));
        self.rest = found.unwrap_or(self.rest);
        found.is_some()
    }

    fn any(&mut self, depth: usize) -> Result<SelectionCriterion, ColumnReportArgError> {
        let mut left = self.all(depth)?;
        while self.eat(&["||", "#"]) {
            left = SelectionCriterion::Or(Box::new(left), Box::new(self.all(depth)?));
        }
        Ok(left)
    }

    fn all(&mut self, depth: usize) -> Result<SelectionCriterion, ColumnReportArgError> {
        let mut left = self.one(depth)?;
        while self.eat(&["&&", ","]) {
            left = SelectionCriterion::And(Box::new(left), Box::new(self.one(depth)?));
        }
        Ok(left)
    }

    fn one(&mut self, depth: usize) -> Result<SelectionCriterion, ColumnReportArgError> {
        let begin = self.rest.trim_start();
        if depth > DEPTH_MAX {
            return Err(selection_syntax_error(begin).into());
        }
        if self.eat(&["!"]) {
            return Ok(SelectionCriterion::Not(Box::new(self.one(depth + 1)?)));
        }
        if self.eat(&["("]) {
            let inner = self.any(depth + 1)?;
            return if self.eat(&[")"]) { Ok(inner) } else { Err(selection_syntax_error(begin).into()) };
        }
        let end = begin.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(begin.len());
        let (name, rest) = begin.split_at(end);
        let field = find_report_field(name).ok_or_else(|| {
            format!("Unrecognised selection field: {name}\n{}", selection_syntax_error(begin))
        })?;
        self.rest = rest;
        if let Some(is) = [("=~", true), ("!~", false)].into_iter().find(|(token, _)| self.eat(&[token])) {
            let matches = SelectionCriterion::Matches(field, self.regex(field, begin)?);
            return Ok(if is.1 { matches } else { SelectionCriterion::Not(Box::new(matches)) });
        }
        let operator = OPERATORS.into_iter().find(|(token, _)| self.eat(&[token]));
        let (_, compare) = operator.ok_or_else(|| selection_syntax_error(begin))?;
        let value = self.value().ok_or_else(|| selection_syntax_error(begin))?;
        let fits = match field.kind {
            FieldKind::Number => value.parse::<u64>().is_ok(),
            FieldKind::Text => matches!(compare, CompareOp::Equal | CompareOp::NotEqual),
        };
        if fits {
            Ok(SelectionCriterion::Is(field, compare, value))
        } else {
            Err(selection_syntax_error(begin).into())
        }
    }

    /// Parses the regular expression of the criterion that begins at `begin`: up to an operator or
    /// a blank, or between quotes or brackets.
    fn regex(&mut self, field: &ReportField, begin: &str) -> Result<Regex, ColumnReportArgError> {
        let name = field.name;
        if field.kind == FieldKind::Number {
            return Err(ColumnReportArgError::Value(format!(
                "dm_report: incompatible comparison type for selection field {name}"
            )));
        }
        let no =
            |why: &str| Err(ColumnReportArgError::Value(format!("{why}\n{}", selection_syntax_error(begin))));
        let rest = self.rest.trim_start();
        let quotes = ["()", "{}", "[]", "\"\"", "''"];
        let quote = quotes.iter().find(|quote| rest.starts_with(&quote[..1]));
        let (text, left) = match quote {
            _ if rest.is_empty() => {
                return no(&format!("Regular expression expected for selection field {name}"));
            }
            Some(quote) => match rest[1..].split_once(&quote[1..]) {
                Some(found) => found,
                None => {
                    let why = "Missing end quote.\nFailed to parse regex value for selection field";
                    return no(&format!("{why} {name}."));
                }
            },
            None => {
                let ends = ["&&", "||", ",", "#", ")", " "];
                rest.split_at(ends.iter().filter_map(|end| rest.find(end)).min().unwrap_or(rest.len()))
            }
        };
        self.rest = left;
        let why = "Parse error in regex\nCouldn't parse regex\ndm_report: failed to create regex matcher for";
        Regex::new(text).ok_or_else(|| ColumnReportArgError::Value(format!("{why} selection field {name}")))
    }

    /// Reads a word or a quoted text; returns `None` if there is neither.
    fn value(&mut self) -> Option<String> {
        let rest = self.rest.trim_start();
        let quote = rest.chars().next().filter(|c| matches!(c, '"' | '\''));
        let (value, left) = match quote {
            Some(quote) => rest[1..].split_once(quote)?,
            None => {
                let end = rest.find(|c: char| c.is_whitespace() || "&|,#()".contains(c));
                let (value, left) = rest.split_at(end.unwrap_or(rest.len()));
                if value.is_empty() {
                    return None;
                }
                (value, left)
            }
        };
        self.rest = left;
        Some(value.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use udm_control::api;

    /// The error lines are dmsetup's.
    #[test]
    fn what_is_no_regular_expression() {
        let end = "Selection syntax error at 'name=~";
        let help = "Use 'help' for selection to get more help.";
        for (text, expected) in [
            ("name=~", format!("Regular expression expected for selection field name\n{end}'.\n{help}")),
            (
                "name=~(a",
                format!(
                    "Missing end quote.\nFailed to parse regex value for selection field name.\n{end}(a'.\n{help}"
                ),
            ),
            ("name=~[fg]x", format!("Expecting logical operator\nSelection syntax error at 'x'.\n{help}")),
            (
                "name=~'*'",
                "Parse error in regex\nCouldn't parse regex\ndm_report: failed to create regex matcher for \
                 selection field name"
                    .to_owned(),
            ),
            ("open=~1", "dm_report: incompatible comparison type for selection field open".to_owned()),
        ] {
            let Err(ColumnReportArgError::Value(why)) = SelectionCriterion::parse(text) else {
                panic!("{text}")
            };
            assert_eq!(why, expected, "{text}");
        }
    }

    #[test]
    fn criteria() {
        let device = api::DeviceDescription {
            name: "a".into(),
            number: "254:10".into(),
            open_count: 2,
            state: "active".into(),
            ..api::DeviceDescription::default()
        };
        let row = DeviceReportRow { device, ..DeviceReportRow::default() };
        for (text, takes) in [
            ("name=a", true),
            ("name!=a", false),
            ("open>1", true),
            ("open>=2 && minor<11", true),
            ("open=1 || minor=10", true),
            ("!(open=2)", false),
            ("name=a,open=3", false),
            ("name=b # open=2", true),
            ("uuid=\"\"", true),
            ("suspended='Active'", true),
            ("name=~^a$ && uuid!~x", true),
            ("name=~[b-c]", false),
            ("name=~a|b,open=2", true),
            ("!(name=~(a)) || name !~ 'a'", false),
        ] {
            assert_eq!(SelectionCriterion::parse(text).unwrap().takes(&row), takes, "{text}");
        }
        for text in ["", "open", "open>", "open=x", "name>a", "(open=1", "open=1)", "open=~1", "nosuch=1"] {
            assert!(SelectionCriterion::parse(text).is_err(), "{text}");
        }
        assert!(SelectionCriterion::parse(&"!".repeat(100_000)).is_err());
    }
}
