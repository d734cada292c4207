//! The features of a flakey target: the faults while the device is down, their parsing and
//! printing.

use super::parse_number;
use std::fmt;
use udm_core::{Bio, BioFlags, Op};

/// Maximum number of words of the features.
const WORDS_MAX: usize = 11;

/// The base of probabilities.
pub(super) const PROBABILITY_BASE: u32 = 1_000_000_000;

/// The operation and flag bits of a request, as Linux 6.12 numbers them.
fn bio_opf(bio: &Bio) -> u32 {
    let op = match bio.op {
        Op::Read => 0,
        // The kernel's mapped devices send a flush as an empty write with PREFLUSH.
        Op::Write => 1,
        Op::Flush => 1 | 1 << 18,
        Op::Discard => 3,
        Op::WriteZeroes => 9,
    };
    let bits = [
        (BioFlags::META, 12),
        (BioFlags::FUA, 17),
        (BioFlags::PREFLUSH, 18),
        (BioFlags::RAHEAD, 19),
        (BioFlags::NOWAIT, 21),
        (BioFlags::NOUNMAP, 28),
    ];
    bits.iter().filter(|(flag, _)| bio.flags.contains(*flag)).fold(op, |bio_opf, (_, bit)| bio_opf | 1 << bit)
}

/// The action on writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FlakeyWriteAction {
    Pass,
    Drop,
    Fail,
}

/// The feature `corrupt_bio_byte`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CorruptByte {
    /// The byte, counted from 1.
    nth: u32,
    /// True for writes, false for reads.
    writes: bool,
    value: u8,
    flags: u32,
}

/// The faults while the device is down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FlakeyFeatures {
    pub(super) error_reads: bool,
    pub(super) writes: FlakeyWriteAction,
    corrupt: Option<CorruptByte>,
    /// Out of [`PROBABILITY_BASE`]; 0 is never.
    pub(super) random_read: u32,
    pub(super) random_write: u32,
}

/// The kernel's message and the word to blame, counted from the number of words.
type FlakeyFeatureError = (&'static str, usize);

impl FlakeyFeatures {
    const NONE: FlakeyFeatures = FlakeyFeatures {
        error_reads: false,
        writes: FlakeyWriteAction::Pass,
        corrupt: None,
        random_read: 0,
        random_write: 0,
    };

    /// Parses `[<#words> <feature>...]`.
    pub(super) fn parse(words: &[String]) -> Result<FlakeyFeatures, FlakeyFeatureError> {
        let mut features = FlakeyFeatures::NONE;
        if let Some(count) = words.first() {
            let count =
                parse_number(count).filter(|&count: &usize| count <= WORDS_MAX && count < words.len());
            let count = count.ok_or(("Invalid number of feature args", 0))?;
            features.read(&words[..=count], words)?;
        }
        if features == FlakeyFeatures::NONE {
            features =
                FlakeyFeatures { error_reads: true, writes: FlakeyWriteAction::Fail, ..FlakeyFeatures::NONE };
        }
        Ok(features)
    }

    /// Parses the features from word 1 of `announced`, which has the announced number of words.
    /// `words` has all words.
    fn read(&mut self, announced: &[String], words: &[String]) -> Result<(), FlakeyFeatureError> {
        let mut at = 1;
        while at < announced.len() {
            let name = at;
            at += 1;
            // Returns a parameter of a feature, or the error for a missing one.
            let mut parameter = |text| {
                let text = if at < words.len() { "Insufficient feature arguments" } else { text };
                let word = announced.get(at).ok_or((text, at));
                at += 1;
                word
            };
            match words[name].to_ascii_lowercase().as_str() {
                "error_reads" if self.error_reads => return Err(("Feature error_reads duplicated", name)),
                "error_reads" => self.error_reads = true,
                "drop_writes" => match self.writes {
                    FlakeyWriteAction::Drop => return Err(("Feature drop_writes duplicated", name)),
                    FlakeyWriteAction::Fail => {
                        return Err(("Feature drop_writes conflicts with feature error_writes", name));
                    }
                    FlakeyWriteAction::Pass => self.writes = FlakeyWriteAction::Drop,
                },
                "error_writes" => match self.writes {
                    FlakeyWriteAction::Fail => return Err(("Feature error_writes duplicated", name)),
                    FlakeyWriteAction::Drop => {
                        return Err(("Feature error_writes conflicts with feature drop_writes", name));
                    }
                    FlakeyWriteAction::Pass => self.writes = FlakeyWriteAction::Fail,
                },
                "corrupt_bio_byte" => {
                    if name + 1 == announced.len() {
                        return Err(("Feature corrupt_bio_byte requires parameters", name + 1));
                    }
                    let text = "Invalid corrupt bio byte";
                    let nth =
                        parse_number(parameter(text)?).filter(|&nth| nth >= 1).ok_or((text, name + 1))?;
                    let text = "Invalid corrupt bio direction (r or w)";
                    let writes = match parameter(text)?.as_str() {
                        "w" | "W" => true,
                        "r" | "R" => false,
                        _ => return Err((text, name + 2)),
                    };
                    let text = "Invalid corrupt value to write into bio byte (0-255)";
                    let value = parse_number(parameter(text)?).ok_or((text, name + 3))?;
                    let text = "Invalid corrupt bio flags mask";
                    let flags = parse_number(parameter(text)?).ok_or((text, name + 4))?;
                    self.corrupt = Some(CorruptByte { nth, writes, value, flags });
                }
                feature @ ("random_read_corrupt" | "random_write_corrupt") => {
                    let read = feature == "random_read_corrupt";
                    if name + 1 == announced.len() {
                        let text = if read {
                            "Feature random_read_corrupt requires a parameter"
                        } else {
                            "Feature random_write_corrupt requires a parameter"
                        };
                        return Err((text, name + 1));
                    }
                    let text = "Invalid random corrupt argument";
                    let p = parse_number(parameter(text)?)
                        .filter(|&p| p <= PROBABILITY_BASE)
                        .ok_or((text, name + 1))?;
                    *(if read { &mut self.random_read } else { &mut self.random_write }) = p;
                }
                _ => return Err(("Unrecognised flakey feature requested", name)),
            }
        }
        if self.corrupt.is_some_and(|corrupt| corrupt.writes) {
            match self.writes {
                FlakeyWriteAction::Drop => {
                    return Err((
                        "drop_writes is incompatible with corrupt_bio_byte with the WRITE flag set",
                        0,
                    ));
                }
                FlakeyWriteAction::Fail => {
                    return Err((
                        "error_writes is incompatible with corrupt_bio_byte with the WRITE flag set",
                        0,
                    ));
                }
                FlakeyWriteAction::Pass => {}
            }
        }
        Ok(())
    }

    /// The byte to replace in `bio`, counted from 0, and its new value, if `corrupt_bio_byte`
    /// applies.
    pub(super) fn corrupt_byte(&self, bio: &Bio) -> Option<(usize, u8)> {
        let corrupt = self.corrupt.filter(|c| c.writes == (bio.op != Op::Read))?;
        let at = corrupt.nth as usize - 1;
        (bio_opf(bio) & corrupt.flags == corrupt.flags && at < bio.data.len()).then_some((at, corrupt.value))
    }
}

impl fmt::Display for FlakeyFeatures {
    /// The canonical words, in the kernel's order.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = usize::from(self.error_reads)
            + usize::from(self.writes != FlakeyWriteAction::Pass)
            + 5 * usize::from(self.corrupt.is_some())
            + 2 * usize::from(self.random_read > 0)
            + 2 * usize::from(self.random_write > 0);
        write!(f, "{words}")?;
        if self.error_reads {
            f.write_str(" error_reads")?;
        }
        match self.writes {
            FlakeyWriteAction::Pass => {}
            FlakeyWriteAction::Drop => f.write_str(" drop_writes")?,
            FlakeyWriteAction::Fail => f.write_str(" error_writes")?,
        }
        if let Some(CorruptByte { nth, writes, value, flags }) = self.corrupt {
            write!(f, " corrupt_bio_byte {nth} {} {value} {flags}", if writes { 'w' } else { 'r' })?;
        }
        if self.random_read > 0 {
            write!(f, " random_read_corrupt {}", self.random_read)?;
        }
        if self.random_write > 0 {
            write!(f, " random_write_corrupt {}", self.random_write)?;
        }
        Ok(())
    }
}
