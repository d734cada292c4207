//! `-S`: selects devices by criteria such as `open>0 && (name=a || uuid=~^x)`.

use super::fields::{Field, FieldKind};
use super::regex::Regex;
use super::{ColumnError, DeviceRow, field};

/// A selection criterion.
#[derive(Debug)]
pub enum Selection {
    /// Both criteria hold.
    And(Box<Selection>, Box<Selection>),
    /// At least one of the criteria holds.
    Or(Box<Selection>, Box<Selection>),
    /// The criterion does not hold.
    Not(Box<Selection>),
    /// The comparison of a field with a value.
    Is(&'static Field, CompareOp, String),
    /// The field matches a regular expression.
    Matches(&'static Field, Regex),
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

impl From<String> for ColumnError {
    fn from(why: String) -> ColumnError {
        ColumnError::Word(why)
    }
}

impl std::fmt::Debug for Field {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl Selection {
    /// Parses criteria.
    ///
    /// # Errors
    /// The error lines of dmsetup.
    pub fn parse(text: &str) -> Result<Selection, ColumnError> {
        let mut parser = Parser { rest: text };
        let selection = parser.any(0)?;
        match parser.rest.trim_start() {
            "" => Ok(selection),
            rest => Err(ColumnError::Value(format!("Expecting logical operator\n{}", syntax(rest)))),
        }
    }

    /// The fields that the criteria use.
    pub fn fields(&self) -> Vec<&'static Field> {
        match self {
            Selection::And(a, b) | Selection::Or(a, b) => [a.fields(), b.fields()].concat(),
            Selection::Not(it) => it.fields(),
            Selection::Is(field, ..) | Selection::Matches(field, _) => vec![field],
        }
    }

    /// True if the criteria select `row`; a field without a value does not match.
    pub fn takes(&self, row: &DeviceRow) -> bool {
        match self {
            Selection::And(a, b) => a.takes(row) && b.takes(row),
            Selection::Or(a, b) => a.takes(row) || b.takes(row),
            Selection::Not(it) => !it.takes(row),
            Selection::Is(field, compare, expected) => {
                (field.value)(row).is_ok_and(|value| compare.holds(field.kind, &value, expected))
            }
            Selection::Matches(field, regex) => (field.value)(row).is_ok_and(|value| regex.is_match(&value)),
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

fn syntax(at: &str) -> String {
    format!("Selection syntax error at '{at}'.\nUse 'help' for selection to get more help.")
}

struct Parser<'a> {
    rest: &'a str,
}

impl Parser<'_> {
    fn eat(&mut self, tokens: &[&str]) -> bool {
        let rest = self.rest.trim_start();
        let found = tokens.iter().find_map(|token| rest.strip_prefix(token));
        self.rest = found.unwrap_or(self.rest);
        found.is_some()
    }

    fn any(&mut self, depth: usize) -> Result<Selection, ColumnError> {
        let mut left = self.all(depth)?;
        while self.eat(&["||", "#"]) {
            left = Selection::Or(Box::new(left), Box::new(self.all(depth)?));
        }
        Ok(left)
    }

    fn all(&mut self, depth: usize) -> Result<Selection, ColumnError> {
        let mut left = self.one(depth)?;
        while self.eat(&["&&", ","]) {
            left = Selection::And(Box::new(left), Box::new(self.one(depth)?));
        }
        Ok(left)
    }

    fn one(&mut self, depth: usize) -> Result<Selection, ColumnError> {
        let begin = self.rest.trim_start();
        if depth > DEPTH_MAX {
            return Err(syntax(begin).into());
        }
        if self.eat(&["!"]) {
            return Ok(Selection::Not(Box::new(self.one(depth + 1)?)));
        }
        if self.eat(&["("]) {
            let inner = self.any(depth + 1)?;
            return if self.eat(&[")"]) { Ok(inner) } else { Err(syntax(begin).into()) };
        }
        let end = begin.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(begin.len());
        let (name, rest) = begin.split_at(end);
        let field =
            field(name).ok_or_else(|| format!("Unrecognised selection field: {name}\n{}", syntax(begin)))?;
        self.rest = rest;
        if let Some(is) = [("=~", true), ("!~", false)].into_iter().find(|(token, _)| self.eat(&[token])) {
            let matches = Selection::Matches(field, self.regex(field, begin)?);
            return Ok(if is.1 { matches } else { Selection::Not(Box::new(matches)) });
        }
        let operator = OPERATORS.into_iter().find(|(token, _)| self.eat(&[token]));
        let (_, compare) = operator.ok_or_else(|| syntax(begin))?;
        let value = self.value().ok_or_else(|| syntax(begin))?;
        let fits = match field.kind {
            FieldKind::Number => value.parse::<u64>().is_ok(),
            FieldKind::Text => matches!(compare, CompareOp::Equal | CompareOp::NotEqual),
        };
        if fits { Ok(Selection::Is(field, compare, value)) } else { Err(syntax(begin).into()) }
    }

    /// Parses the regular expression of the criterion that begins at `begin`: up to an operator or
    /// a blank, or between quotes or brackets.
    fn regex(&mut self, field: &Field, begin: &str) -> Result<Regex, ColumnError> {
        let name = field.name;
        if field.kind == FieldKind::Number {
            return Err(ColumnError::Value(format!(
                "dm_report: incompatible comparison type for selection field {name}"
            )));
        }
        let no = |why: &str| Err(ColumnError::Value(format!("{why}\n{}", syntax(begin))));
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
        Regex::new(text).ok_or_else(|| ColumnError::Value(format!("{why} selection field {name}")))
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
            let Err(ColumnError::Value(why)) = Selection::parse(text) else { panic!("{text}") };
            assert_eq!(why, expected, "{text}");
        }
    }

    #[test]
    fn criteria() {
        let device = api::Device {
            name: "a".into(),
            number: "254:10".into(),
            open_count: 2,
            state: "active".into(),
            ..api::Device::default()
        };
        let row = DeviceRow { device, ..DeviceRow::default() };
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
            assert_eq!(Selection::parse(text).unwrap().takes(&row), takes, "{text}");
        }
        for text in ["", "open", "open>", "open=x", "name>a", "(open=1", "open=1)", "open=~1", "nosuch=1"] {
            assert!(Selection::parse(text).is_err(), "{text}");
        }
        assert!(Selection::parse(&"!".repeat(100_000)).is_err());
    }
}
