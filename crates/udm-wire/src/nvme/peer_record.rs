//! The record of a server in the folder that the servers of one subsystem share: how the others
//! reach it, and what they know when it has ended.
//!
//! Lines of text, in this order:
//!
//! ```text
//! udm-nvme-peer 1
//! subsystem NQN
//! boot-id ID
//! inode DEVICE NUMBER
//! controllers FIRST LAST
//! control PATH
//! remote URI
//! ```
//!
//! The last line is appended when the server first uses a disk of another server; without it there
//! is none. A reader that holds the lock of the file knows that the server has ended and appends
//! nothing more.

use super::nqn::check_nqn;
use std::fmt;
use std::ops::RangeInclusive;

/// The longest record in bytes.
pub const PEER_RECORD_MAX: usize = 8192;

/// The first line of this version.
const HEADER: &str = "udm-nvme-peer 1";

/// The longest value of a line in bytes: a path of the kernel.
const VALUE_MAX: usize = 4096;

/// The longest URI that is recorded in bytes.
const URI_MAX: usize = 1024;

/// The largest number of a controller (*Base* 3.1.1).
pub const CONTROLLER_MAX: u16 = 0xffef;

/// A server of a subsystem, as the other servers of it see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerRecord {
    /// Name of the subsystem.
    pub subsystem: String,
    /// The boot of the machine in which the server runs (`/proc/sys/kernel/random/boot_id`).
    pub boot_id: String,
    /// Device and inode number of the file (`st_dev`, `st_ino`): a copy of the file or a snapshot
    /// of its file system has others, and nobody has locked it.
    pub inode: (u64, u64),
    /// Numbers that the server gives to its controllers.
    pub controllers: RangeInclusive<u16>,
    /// Path of its control socket.
    pub control: String,
    /// The first disk of another server that it has used; `None` if it has used none.
    pub remote: Option<String>,
}

/// Error: the file of a server cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PeerRecordError {
    /// The server writes another version, or the file is something else.
    #[error("it is no record of this version of udm: expected {HEADER:?}")]
    Version,
    /// A line is missing or damaged.
    #[error("line {0} of the record is damaged")]
    Line(usize),
}

impl PeerRecord {
    /// Reads a record.
    ///
    /// # Errors
    /// It is one of another version, or damaged.
    pub fn parse(bytes: &[u8]) -> Result<PeerRecord, PeerRecordError> {
        let text = std::str::from_utf8(bytes).ok().filter(|text| text.len() <= PEER_RECORD_MAX);
        let text = text.ok_or(PeerRecordError::Version)?;
        let mut lines = text.split_inclusive('\n').enumerate();
        // A line without its end is not complete.
        let mut value = |key: &str| {
            let (at, line) = lines.next()?;
            let value = line.strip_suffix('\n')?.strip_prefix(key)?.strip_prefix(' ')?;
            is_value(value).then_some((at + 1, value))
        };
        let (name, version) = HEADER.split_once(' ').expect("two words");
        if value(name).is_none_or(|(_, is)| is != version) {
            return Err(PeerRecordError::Version);
        }
        let mut expect = |at: usize, key: &str| value(key).ok_or(PeerRecordError::Line(at));
        let (at, subsystem) = expect(2, "subsystem")?;
        check_nqn(subsystem).map_err(|_| PeerRecordError::Line(at))?;
        let (_, boot_id) = expect(3, "boot-id")?;
        let (at, inode) = expect(4, "inode")?;
        let inode = parse_numbers(inode).ok_or(PeerRecordError::Line(at))?;
        let (at, controllers) = expect(5, "controllers")?;
        let controllers = parse_range(controllers).ok_or(PeerRecordError::Line(at))?;
        let (at, control) = expect(6, "control")?;
        if !control.starts_with('/') {
            return Err(PeerRecordError::Line(at));
        }
        let remote = match lines.next() {
            None => None,
            Some((at, line)) => {
                let uri = line.strip_prefix("remote ").map(|uri| uri.trim_end_matches('\n'));
                // The server may have ended while it wrote the line: what there is of it counts.
                Some(uri.filter(|uri| uri.len() <= URI_MAX).ok_or(PeerRecordError::Line(at + 1))?.to_owned())
            }
        };
        if let Some((at, _)) = lines.next() {
            return Err(PeerRecordError::Line(at + 1));
        }
        let (subsystem, boot_id, control) = (subsystem.to_owned(), boot_id.to_owned(), control.to_owned());
        Ok(PeerRecord { subsystem, boot_id, inode, controllers, control, remote })
    }

    /// True if each value fits a line.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        check_nqn(&self.subsystem).is_ok()
            && is_value(&self.boot_id)
            && is_value(&self.control)
            && self.control.starts_with('/')
    }

    /// The line that says that the server uses a disk of another server. The URI is cut, and its
    /// control characters are replaced.
    #[must_use]
    pub fn remote_line(uri: &str) -> String {
        let mut line = "remote ".to_owned();
        for char in uri.chars().map(|char| if char.is_control() { '?' } else { char }) {
            if line.len() + char.len_utf8() > URI_MAX {
                break;
            }
            line.push(char);
        }
        line + "\n"
    }
}

impl fmt::Display for PeerRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PeerRecord { subsystem, boot_id, inode, controllers, control, remote } = self;
        writeln!(f, "{HEADER}\nsubsystem {subsystem}\nboot-id {boot_id}\ninode {} {}", inode.0, inode.1)?;
        writeln!(f, "controllers {} {}\ncontrol {control}", controllers.start(), controllers.end())?;
        remote.iter().try_for_each(|uri| f.write_str(&PeerRecord::remote_line(uri)))
    }
}

/// True if `value` fits a line.
fn is_value(value: &str) -> bool {
    !value.is_empty() && value.len() <= VALUE_MAX && !value.contains(char::is_control)
}

fn parse_range(text: &str) -> Option<RangeInclusive<u16>> {
    let (first, last) = parse_numbers(text)?;
    (1 <= first && first <= last && last <= CONTROLLER_MAX.into()).then_some(first as u16..=last as u16)
}

fn parse_numbers(text: &str) -> Option<(u64, u64)> {
    let (first, second) = text.split_once(' ')?;
    Some((parse_number(first)?, parse_number(second)?))
}

/// A number in the one form in which it is written.
fn parse_number(text: &str) -> Option<u64> {
    text.parse().ok().filter(|number: &u64| number.to_string() == text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> PeerRecord {
        PeerRecord {
            subsystem: "nqn.2026-11.org.example:disks".into(),
            boot_id: "5b0ab1b4-6de5-4c56-9b0c-5b2f0c1f6a9b".into(),
            inode: (8, 77),
            controllers: 2048..=4094,
            control: "/run/udm/control.sock".into(),
            remote: None,
        }
    }

    #[test]
    fn a_record_reads_back() {
        let text = record().to_string();
        assert_eq!(PeerRecord::parse(text.as_bytes()), Ok(record()));
        let remote = PeerRecord { remote: Some("nbd://host/disk".into()), ..record() };
        let appended = text + &PeerRecord::remote_line("nbd://host/disk");
        assert_eq!(appended, remote.to_string());
        assert_eq!(PeerRecord::parse(appended.as_bytes()), Ok(remote));
        let long = PeerRecord::remote_line(&"ä\n".repeat(5000));
        assert!(long.len() <= URI_MAX + 1 && long.matches('\n').count() == 1);
        assert!(PeerRecord::parse((record().to_string() + &long).as_bytes()).unwrap().remote.is_some());
    }

    /// A record that is cut anywhere is no complete one, unless the cut is in the line that only
    /// needs to begin.
    #[test]
    fn a_cut_record_is_refused() {
        let text = record().to_string();
        for len in 0..text.len() {
            assert!(PeerRecord::parse(&text.as_bytes()[..len]).is_err(), "{len}");
        }
        let line = PeerRecord::remote_line("nbd://host/disk");
        for len in 1..line.len() {
            let found = PeerRecord::parse((text.clone() + &line[..len]).as_bytes());
            assert!(found.is_err() || found.is_ok_and(|one| one.remote.is_some()), "{len}");
        }
    }

    #[test]
    fn a_damaged_record_is_refused() {
        let text = record().to_string();
        let changed = |from: &str, to: &str| PeerRecord::parse(text.replacen(from, to, 1).as_bytes());
        assert_eq!(changed("peer 1", "peer 2"), Err(PeerRecordError::Version));
        assert_eq!(changed("nqn.", "x."), Err(PeerRecordError::Line(2)));
        assert_eq!(changed("inode 8 77", "inode 8 077"), Err(PeerRecordError::Line(4)));
        for range in ["4094 2048", "0 5", "1 65520", "1", "1 2 3"] {
            assert_eq!(changed("2048 4094", range), Err(PeerRecordError::Line(5)), "{range}");
        }
        assert_eq!(changed("control /run", "control run"), Err(PeerRecordError::Line(6)));
        assert_eq!(PeerRecord::parse((text.clone() + "x\n").as_bytes()), Err(PeerRecordError::Line(7)));
        let two = text.clone() + "remote a\nremote b\n";
        assert_eq!(PeerRecord::parse(two.as_bytes()), Err(PeerRecordError::Line(8)));
        assert_eq!(PeerRecord::parse(&[0xff]), Err(PeerRecordError::Version));
        let long = text.replace("/run", &format!("/{}", "a".repeat(2 * VALUE_MAX)));
        assert!(PeerRecord::parse(long.as_bytes()).is_err());
    }
}
