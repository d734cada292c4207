//! dmsetup's options, parsed as by getopt: anywhere among the words, short options together, long
//! ones with `=` and abbreviated.

/// An option of dmsetup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DmsetupOption {
    Columns,
    Concise,
    Count,
    Deferred,
    Exec,
    Force,
    Help,
    Inactive,
    Interval,
    Major,
    Minor,
    Prefixes,
    NoFlush,
    NoHeadings,
    NoTable,
    Options,
    ReadOnly,
    Retry,
    Rows,
    Select,
    Separator,
    SetUuid,
    Sort,
    Table,
    Target,
    Tree,
    Unquoted,
    Uuid,
    Verbose,
    Version,
    /// Accepted without effect: udm has no device nodes, no udev and no file system.
    Ignored,
}

/// All options: the long name, the short letters, whether it takes a value, and the option.
const OPTIONS: [(&str, &str, bool, DmsetupOption); 47] = [
    ("addnodeoncreate", "", false, DmsetupOption::Ignored),
    ("addnodeonresume", "", false, DmsetupOption::Ignored),
    ("checks", "", false, DmsetupOption::Ignored),
    ("columns", "cC", false, DmsetupOption::Columns),
    ("concise", "", false, DmsetupOption::Concise),
    ("count", "", true, DmsetupOption::Count),
    ("deferred", "", false, DmsetupOption::Deferred),
    ("exec", "", true, DmsetupOption::Exec),
    ("force", "f", false, DmsetupOption::Force),
    ("gid", "G", true, DmsetupOption::Ignored),
    ("help", "h?", false, DmsetupOption::Help),
    ("inactive", "", false, DmsetupOption::Inactive),
    ("interval", "", true, DmsetupOption::Interval),
    ("major", "j", true, DmsetupOption::Major),
    ("manglename", "", true, DmsetupOption::Ignored),
    ("minor", "m", true, DmsetupOption::Minor),
    ("mode", "M", true, DmsetupOption::Ignored),
    ("nameprefixes", "", false, DmsetupOption::Prefixes),
    ("noflush", "", false, DmsetupOption::NoFlush),
    ("noheadings", "", false, DmsetupOption::NoHeadings),
    ("nolockfs", "", false, DmsetupOption::Ignored),
    ("noopencount", "", false, DmsetupOption::Ignored),
    ("notable", "n", false, DmsetupOption::NoTable),
    ("noudevrules", "", false, DmsetupOption::Ignored),
    ("noudevsync", "", false, DmsetupOption::Ignored),
    ("options", "o", true, DmsetupOption::Options),
    ("readahead", "", true, DmsetupOption::Ignored),
    ("readonly", "r", false, DmsetupOption::ReadOnly),
    ("retry", "", false, DmsetupOption::Retry),
    ("rows", "", false, DmsetupOption::Rows),
    ("select", "S", true, DmsetupOption::Select),
    ("separator", "", true, DmsetupOption::Separator),
    ("setuuid", "", false, DmsetupOption::SetUuid),
    ("showkeys", "", false, DmsetupOption::Ignored),
    ("sort", "O", true, DmsetupOption::Sort),
    ("table", "", true, DmsetupOption::Table),
    ("target", "", true, DmsetupOption::Target),
    ("tree", "", false, DmsetupOption::Tree),
    ("udevcookie", "", true, DmsetupOption::Ignored),
    ("uid", "U", true, DmsetupOption::Ignored),
    ("unbuffered", "", false, DmsetupOption::Ignored),
    ("unquoted", "", false, DmsetupOption::Unquoted),
    ("uuid", "u", true, DmsetupOption::Uuid),
    ("verbose", "v", false, DmsetupOption::Verbose),
    ("verifyudev", "", false, DmsetupOption::Ignored),
    ("version", "", false, DmsetupOption::Version),
    ("yes", "y", false, DmsetupOption::Ignored),
];

/// A parsed command line.
#[derive(Debug, Default)]
pub struct DmsetupCommandLine {
    given: Vec<(DmsetupOption, String)>,
    /// The words that are not options: the command and its arguments.
    pub words: Vec<String>,
}

impl DmsetupCommandLine {
    /// Parses the words after the program's name.
    ///
    /// # Errors
    /// getopt's message for an unknown option.
    pub fn parse(words: impl IntoIterator<Item = String>) -> Result<DmsetupCommandLine, String> {
        let mut line = DmsetupCommandLine::default();
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            if word == "--" {
                line.words.extend(words);
                break;
            }
            if let Some(long) = word.strip_prefix("--") {
                line.long(long, &mut words)?;
            } else if word.len() > 1 && word.starts_with('-') {
                line.letters(&word[1..], &mut words)?;
            } else {
                line.words.push(word);
            }
        }
        Ok(line)
    }

    fn long(&mut self, word: &str, words: &mut impl Iterator<Item = String>) -> Result<(), String> {
        let (key, value) = word.split_once('=').map_or((word, None), |(key, value)| (key, Some(value)));
        let mut like = OPTIONS.iter().filter(|option| option.0.starts_with(key));
        let exact = OPTIONS.iter().find(|option| option.0 == key);
        let (long, _, wants, name) = match (exact, like.next(), like.next()) {
            (Some(option), ..) | (None, Some(option), None) => option,
            (None, None, _) => return Err(format!("unrecognized option '--{key}'")),
            (None, Some(_), Some(_)) => {
                let all = OPTIONS.iter().filter(|option| option.0.starts_with(key));
                let all: String = all.map(|option| format!(" '--{}'", option.0)).collect();
                return Err(format!("option '--{key}' is ambiguous; possibilities:{all}"));
            }
        };
        let value = match (wants, value) {
            (false, Some(_)) => return Err(format!("option '--{long}' doesn't allow an argument")),
            (true, None) => words.next().ok_or_else(|| format!("option '--{long}' requires an argument"))?,
            (_, value) => value.unwrap_or_default().to_owned(),
        };
        self.given.push((*name, value));
        Ok(())
    }

    fn letters(&mut self, letters: &str, words: &mut impl Iterator<Item = String>) -> Result<(), String> {
        for (place, letter) in letters.char_indices() {
            let Some((_, _, wants, name)) = OPTIONS.iter().find(|option| option.1.contains(letter)) else {
                return Err(format!("invalid option -- '{letter}'"));
            };
            if !wants {
                self.given.push((*name, String::new()));
                continue;
            }
            let rest = &letters[place + letter.len_utf8()..];
            let value = if rest.is_empty() { words.next() } else { Some(rest.to_owned()) };
            let value = value.ok_or_else(|| format!("option requires an argument -- '{letter}'"))?;
            self.given.push((*name, value));
            break;
        }
        Ok(())
    }

    /// True if `name` was given.
    #[must_use]
    pub fn has(&self, name: DmsetupOption) -> bool {
        self.given.iter().any(|(given, _)| *given == name)
    }

    /// The last value of `name`.
    #[must_use]
    pub fn value(&self, name: DmsetupOption) -> Option<&str> {
        self.given.iter().rev().find(|(given, _)| *given == name).map(|(_, value)| value.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> Result<DmsetupCommandLine, String> {
        DmsetupCommandLine::parse(words.iter().map(|word| (*word).to_owned()))
    }

    #[test]
    fn options_stand_anywhere() {
        let line = parse(&["-v", "info", "-Coname", "a", "--sep=:", "--nohead", "--", "-b"]).unwrap();
        assert_eq!(line.words, ["info", "a", "-b"]);
        assert!(
            line.has(DmsetupOption::Verbose)
                && line.has(DmsetupOption::Columns)
                && line.has(DmsetupOption::NoHeadings)
        );
        assert_eq!(line.value(DmsetupOption::Options), Some("name"));
        assert_eq!(line.value(DmsetupOption::Separator), Some(":"));
        assert_eq!(parse(&["-j", "254", "-m0"]).unwrap().value(DmsetupOption::Minor), Some("0"));
        assert_eq!(parse(&["-o", "a", "-o", "b"]).unwrap().value(DmsetupOption::Options), Some("b"));
    }

    #[test]
    fn what_getopt_says() {
        for (words, message) in [
            (&["--nosuch"][..], "unrecognized option '--nosuch'"),
            (&["-Z"], "invalid option -- 'Z'"),
            (&["--table"], "option '--table' requires an argument"),
            (&["-o"], "option requires an argument -- 'o'"),
            (&["--force=1"], "option '--force' doesn't allow an argument"),
            (
                &["--ver"],
                "option '--ver' is ambiguous; possibilities: '--verbose' '--verifyudev' '--version'",
            ),
        ] {
            assert_eq!(parse(words).unwrap_err(), message);
        }
    }
}
