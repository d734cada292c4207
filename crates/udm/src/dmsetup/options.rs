//! dmsetup's options, parsed as by getopt: anywhere among the words, short options together, long
//! ones with `=` and abbreviated.

/// An option of dmsetup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OptionName {
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
const OPTIONS: [(&str, &str, bool, OptionName); 47] = [
    ("addnodeoncreate", "", false, OptionName::Ignored),
    ("addnodeonresume", "", false, OptionName::Ignored),
    ("checks", "", false, OptionName::Ignored),
    ("columns", "cC", false, OptionName::Columns),
    ("concise", "", false, OptionName::Concise),
    ("count", "", true, OptionName::Count),
    ("deferred", "", false, OptionName::Deferred),
    ("exec", "", true, OptionName::Exec),
    ("force", "f", false, OptionName::Force),
    ("gid", "G", true, OptionName::Ignored),
    ("help", "h?", false, OptionName::Help),
    ("inactive", "", false, OptionName::Inactive),
    ("interval", "", true, OptionName::Interval),
    ("major", "j", true, OptionName::Major),
    ("manglename", "", true, OptionName::Ignored),
    ("minor", "m", true, OptionName::Minor),
    ("mode", "M", true, OptionName::Ignored),
    ("nameprefixes", "", false, OptionName::Prefixes),
    ("noflush", "", false, OptionName::NoFlush),
    ("noheadings", "", false, OptionName::NoHeadings),
    ("nolockfs", "", false, OptionName::Ignored),
    ("noopencount", "", false, OptionName::Ignored),
    ("notable", "n", false, OptionName::NoTable),
    ("noudevrules", "", false, OptionName::Ignored),
    ("noudevsync", "", false, OptionName::Ignored),
    ("options", "o", true, OptionName::Options),
    ("readahead", "", true, OptionName::Ignored),
    ("readonly", "r", false, OptionName::ReadOnly),
    ("retry", "", false, OptionName::Retry),
    ("rows", "", false, OptionName::Rows),
    ("select", "S", true, OptionName::Select),
    ("separator", "", true, OptionName::Separator),
    ("setuuid", "", false, OptionName::SetUuid),
    ("showkeys", "", false, OptionName::Ignored),
    ("sort", "O", true, OptionName::Sort),
    ("table", "", true, OptionName::Table),
    ("target", "", true, OptionName::Target),
    ("tree", "", false, OptionName::Tree),
    ("udevcookie", "", true, OptionName::Ignored),
    ("uid", "U", true, OptionName::Ignored),
    ("unbuffered", "", false, OptionName::Ignored),
    ("unquoted", "", false, OptionName::Unquoted),
    ("uuid", "u", true, OptionName::Uuid),
    ("verbose", "v", false, OptionName::Verbose),
    ("verifyudev", "", false, OptionName::Ignored),
    ("version", "", false, OptionName::Version),
    ("yes", "y", false, OptionName::Ignored),
];

/// A parsed command line.
#[derive(Debug, Default)]
pub struct CommandLine {
    given: Vec<(OptionName, String)>,
    /// The words that are not options: the command and its arguments.
    pub words: Vec<String>,
}

impl CommandLine {
    /// Parses the words after the program's name.
    ///
    /// # Errors
    /// getopt's message for an unknown option.
    pub fn parse(words: impl IntoIterator<Item = String>) -> Result<CommandLine, String> {
        let mut line = CommandLine::default();
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
    pub fn has(&self, name: OptionName) -> bool {
        self.given.iter().any(|(given, _)| *given == name)
    }

    /// The last value of `name`.
    #[must_use]
    pub fn value(&self, name: OptionName) -> Option<&str> {
        self.given.iter().rev().find(|(given, _)| *given == name).map(|(_, value)| value.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> Result<CommandLine, String> {
        CommandLine::parse(words.iter().map(|word| (*word).to_owned()))
    }

    #[test]
    fn options_stand_anywhere() {
        let line = parse(&["-v", "info", "-Coname", "a", "--sep=:", "--nohead", "--", "-b"]).unwrap();
        assert_eq!(line.words, ["info", "a", "-b"]);
        assert!(
            line.has(OptionName::Verbose)
                && line.has(OptionName::Columns)
                && line.has(OptionName::NoHeadings)
        );
        assert_eq!(line.value(OptionName::Options), Some("name"));
        assert_eq!(line.value(OptionName::Separator), Some(":"));
        assert_eq!(parse(&["-j", "254", "-m0"]).unwrap().value(OptionName::Minor), Some("0"));
        assert_eq!(parse(&["-o", "a", "-o", "b"]).unwrap().value(OptionName::Options), Some("b"));
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
