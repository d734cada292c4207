//! The syntax of the file: a section is a name and lines in braces, each with a key and a value
//! (multipath.conf(5), SYNTAX).

use super::keys::{MultipathKeyOutcome, MultipathSectionKeys, quote_conf_word};
use super::{CONF_MAX, MAPS_MAX, MultipathConf, MultipathMapSection, WARNINGS_MAX};

/// A section of the file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MultipathConfSection {
    Defaults,
    Overrides,
    Multipaths,
    Multipath,
    /// A section that is ignored, with everything in it.
    Skipped,
}

/// Parses a file: see [`MultipathConf::parse`].
pub(super) fn parse_multipath_conf(text: &str) -> Result<MultipathConf, String> {
    if text.len() > CONF_MAX {
        return Err(format!("longer than {CONF_MAX} bytes"));
    }
    let (mut conf, mut open, mut dropped) = (MultipathConf::default(), Vec::new(), 0);
    for (at, line) in text.lines().enumerate() {
        let at = at + 1;
        let words = split_multipath_conf_line(line).map_err(|why| format!("line {at}: {why}"))?;
        let warning = apply_multipath_conf_line(&mut conf, &mut open, &words)
            .map_err(|why| format!("line {at}: {why}"))?;
        match warning {
            Some(why) if conf.warnings.len() < WARNINGS_MAX => {
                conf.warnings.push(format!("line {at}: {why}"));
            }
            Some(_) => dropped += 1,
            None => {}
        }
    }
    if !open.is_empty() {
        return Err("the last section has no closing brace".into());
    }
    if dropped > 0 {
        conf.warnings.push(format!("{dropped} more keys are ignored"));
    }
    conf.warnings.extend(warn_incomplete_marginal_keys(&conf));
    Ok(conf)
}

/// A warning if only some of the `marginal_path` keys are set, which work only together. It is
/// about the whole file if it applies to all devices, else about the first section with this error.
fn warn_incomplete_marginal_keys(conf: &MultipathConf) -> Option<String> {
    let all = conf.overrides.clone().or(conf.defaults.clone());
    let of = |map: &MultipathMapSection| {
        let name = map.alias.as_deref().or(map.wwid.as_deref()).unwrap_or_default();
        (format!("multipath {}: ", quote_conf_word(name)), map.keys.clone().or(all.clone()))
    };
    let mut views = std::iter::once((String::new(), all.clone())).chain(conf.maps.iter().map(of));
    views.find_map(|(whose, keys)| {
        let missing = keys.missing_marginal();
        let (last, rest) = missing.split_last()?;
        let names =
            if rest.is_empty() { (*last).to_owned() } else { format!("{} and {last}", rest.join(", ")) };
        let is = if rest.is_empty() { "is" } else { "are" };
        Some(format!("{whose}{names} {is} missing: without all four marginal_path keys no path is held back"))
    })
}

/// Applies one line. Returns a warning, if there is one.
fn apply_multipath_conf_line(
    conf: &mut MultipathConf,
    open: &mut Vec<MultipathConfSection>,
    words: &[MultipathConfWord],
) -> Result<Option<String>, String> {
    match words {
        [] => return Ok(None),
        [brace] if brace.is("}") => {
            open.pop().ok_or("a closing brace with nothing open")?;
            return Ok(None);
        }
        [name, brace] if brace.is("{") => {
            let skips = open.last() == Some(&MultipathConfSection::Skipped);
            let inner = match (open.last(), name.text.as_str()) {
                (None, "defaults") => MultipathConfSection::Defaults,
                (None, "overrides") => MultipathConfSection::Overrides,
                (None, "multipaths") => MultipathConfSection::Multipaths,
                (Some(MultipathConfSection::Multipaths), "multipath") => {
                    if conf.maps.len() == MAPS_MAX {
                        return Err(format!("more than {MAPS_MAX} multipath sections"));
                    }
                    conf.maps.push(MultipathMapSection::default());
                    MultipathConfSection::Multipath
                }
                _ => MultipathConfSection::Skipped,
            };
            open.push(inner);
            let warns = inner == MultipathConfSection::Skipped && !skips;
            return Ok(warns.then(|| format!("{}: udm ignores this section", name.plain())));
        }
        _ => {}
    }
    if open.last() == Some(&MultipathConfSection::Skipped) && !words.iter().any(MultipathConfWord::is_brace) {
        return Ok(None);
    }
    let [key, value, extra @ ..] = words else {
        return Err("expected a key and a value, or a section with its brace".into());
    };
    if extra.iter().any(MultipathConfWord::is_brace) {
        return Err("expected a key and a value, or a section with its brace".into());
    }
    if key.is_brace() || value.is_brace() {
        return Err(
            "an opening brace follows the name of a section, a closing brace is alone on its line".into()
        );
    }
    let keys: &mut MultipathSectionKeys = match (open.last(), conf.maps.last_mut()) {
        (Some(MultipathConfSection::Defaults), _) => &mut conf.defaults,
        (Some(MultipathConfSection::Overrides), _) => &mut conf.overrides,
        (Some(MultipathConfSection::Multipath), Some(map)) => {
            let slot = match key.text.as_str() {
                "wwid" => Some(&mut map.wwid),
                "alias" => Some(&mut map.alias),
                _ => None,
            };
            if let Some(slot) = slot {
                *slot = Some(value.text.clone());
                return Ok(extra.first().map(|word| format_extra_words_warning(key, value, word)));
            }
            &mut map.keys
        }
        _ => return Err(format!("{} is outside of the sections that have keys", key.plain())),
    };
    let said = match keys.set(&key.text, &value.text) {
        // The value may lack its quotes, so its first word may be invalid.
        Err(_) if !extra.is_empty() => MultipathKeyOutcome::Ignored(QUOTES),
        said => said.map_err(|why| format!("{}: {why}", key.plain()))?,
    };
    Ok(match said {
        MultipathKeyOutcome::Applied => {
            extra.first().map(|word| format_extra_words_warning(key, value, word))
        }
        MultipathKeyOutcome::Ignored(why) => {
            Some(format!("{} {} is ignored: {why}", key.plain(), value.plain()))
        }
        MultipathKeyOutcome::Unknown => Some(format!("{} is not a key that udm knows", key.plain())),
    })
}

/// The hint for an unquoted value of several words. multipathd takes the first word.
const QUOTES: &str = "a value of several words is written in double quotes";

/// The warning for a line with more words, from `word` on, after its value.
fn format_extra_words_warning(
    key: &MultipathConfWord,
    value: &MultipathConfWord,
    word: &MultipathConfWord,
) -> String {
    let [key, value, word] = [key, value, word].map(MultipathConfWord::plain);
    format!("{key} {value}: ignored from {word} on: {QUOTES}")
}

/// A word of a line.
struct MultipathConfWord {
    text: String,
    quoted: bool,
}

impl MultipathConfWord {
    fn is(&self, text: &str) -> bool {
        !self.quoted && self.text == text
    }

    fn is_brace(&self) -> bool {
        self.is("{") || self.is("}")
    }

    /// The word, quoted if it is unsafe in a message.
    fn plain(&self) -> String {
        let plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        match !self.text.is_empty() && self.text.len() <= 64 && self.text.chars().all(plain) {
            true => self.text.clone(),
            false => quote_conf_word(&self.text),
        }
    }
}

/// The words of a line: plain, or in double quotes. Two double quotes inside quotes stand for one.
fn split_multipath_conf_line(line: &str) -> Result<Vec<MultipathConfWord>, &'static str> {
    let mut words: Vec<MultipathConfWord> = Vec::new();
    let mut chars = line.chars().peekable();
    while let Some(&c) = chars.peek() {
        if c.is_whitespace() {
            chars.next();
        } else if c == '#' || c == '!' {
            break;
        } else if c == '"' {
            chars.next();
            let mut text = String::new();
            loop {
                match chars.next() {
                    Some('"') if chars.peek() == Some(&'"') => text.extend(chars.next()),
                    Some('"') => break,
                    Some(c) => text.push(c),
                    None => return Err("a quote that is not closed"),
                }
            }
            words.push(MultipathConfWord { text, quoted: true });
        } else if c == '{' || c == '}' {
            chars.next();
            words.push(MultipathConfWord { text: c.into(), quoted: false });
        } else {
            let mut text = String::new();
            while let Some(c) = chars.next_if(|c| !c.is_whitespace() && !"\"#!{}".contains(*c)) {
                text.push(c);
            }
            words.push(MultipathConfWord { text, quoted: false });
        }
    }
    Ok(words)
}
