//! Tables as the simulator makes them: the text that the targets are given, and what the text means.
//!
//! The meaning is worked out here, sector by sector and without any of the code under test: a [`Map`] says for each sector of a device
//! which sector of which disk it is.

use crate::cells::Cells;
use std::sync::Arc;

/// A device that a line names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Below {
    /// A path, `pN`.
    Path(usize),
    /// A mapped device, `@dN`.
    Device(usize),
}

impl Below {
    /// The word for it in a table.
    #[must_use]
    pub fn word(self) -> String {
        match self {
            Below::Path(p) => format!("p{p}"),
            Below::Device(d) => format!("@d{d}"),
        }
    }
}

/// A path selector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selector {
    /// `round-robin`.
    RoundRobin,
    /// `queue-length`.
    QueueLength,
    /// `service-time`.
    ServiceTime,
    /// `historical-service-time`.
    Historical,
    /// `io-affinity`.
    Affinity,
}

impl Selector {
    /// Every selector.
    pub const ALL: [Selector; 5] = [
        Selector::RoundRobin,
        Selector::QueueLength,
        Selector::ServiceTime,
        Selector::Historical,
        Selector::Affinity,
    ];

    /// Its word in a table.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Selector::RoundRobin => "round-robin",
            Selector::QueueLength => "queue-length",
            Selector::ServiceTime => "service-time",
            Selector::Historical => "historical-service-time",
            Selector::Affinity => "io-affinity",
        }
    }
}

/// A path group: its selector and its paths.
pub type Group = (Selector, Vec<usize>);

/// A target that passes on what it is given, as linear does, and makes trouble of its own on the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Through {
    /// `delay`, this many ms.
    Delay(u64),
    /// `flakey`: good for so many seconds, then bad for so many; a feature or none.
    Flakey(u64, u64, &'static str),
    /// `dust` with blocks of this many bytes.
    Dust(u64),
    /// `log-writes` with the log on this path; from sector 0 only.
    LogWrites(usize),
}

impl Through {
    fn text(self, below: Below, at: u64) -> String {
        let on = format!("{} {at}", below.word());
        match self {
            Through::Delay(ms) => format!("delay {on} {ms}"),
            Through::Flakey(up, down, "") => format!("flakey {on} {up} {down}"),
            Through::Flakey(up, down, feature) => format!("flakey {on} {up} {down} 1 {feature}"),
            Through::Dust(block) => format!("dust {on} {block}"),
            Through::LogWrites(log) => format!("log-writes {} p{log}", below.word()),
        }
    }
}

/// What a line does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One range of one device.
    Linear(Below, u64),
    /// One range of one device, through something.
    Through(Through, Below, u64),
    /// Chunks in turn from several devices.
    Striped {
        /// Chunk length in sectors.
        chunk: u64,
        /// Devices and where their part starts.
        of: Vec<(Below, u64)>,
    },
    /// Zeroes.
    Zero,
    /// Nothing but errors.
    Error,
    /// Several paths to one disk.
    Multipath {
        /// The disk behind all paths.
        disk: usize,
        /// `queue_if_no_path`.
        queue: bool,
        /// Groups: a selector and paths.
        groups: Vec<Group>,
    },
}

/// A table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableSpec {
    /// Lengths and what stands there, from sector 0 on.
    pub lines: Vec<(u64, Kind)>,
}

impl TableSpec {
    /// Length in sectors.
    #[must_use]
    pub fn sectors(&self) -> u64 {
        self.lines.iter().map(|(len, _)| len).sum()
    }

    /// The table in the kernel's syntax.
    #[must_use]
    pub fn text(&self, cores: usize) -> String {
        let mut start = 0;
        let mut lines = Vec::new();
        for (len, kind) in &self.lines {
            let rest = match kind {
                Kind::Linear(below, at) => format!("linear {} {at}", below.word()),
                Kind::Through(what, below, at) => what.text(*below, *at),
                Kind::Striped { chunk, of } => {
                    let parts: Vec<_> = of.iter().map(|(b, at)| format!("{} {at}", b.word())).collect();
                    format!("striped {} {chunk} {}", of.len(), parts.join(" "))
                }
                Kind::Zero => "zero".into(),
                Kind::Error => "error".into(),
                Kind::Multipath { queue, groups, .. } => multipath_text(*queue, groups, cores),
            };
            lines.push(format!("{start} {len} {rest}"));
            start += len;
        }
        lines.join("\n")
    }

    /// The paths that the table names itself.
    #[must_use]
    pub fn paths(&self) -> Vec<usize> {
        let mut all = Vec::new();
        for (_, kind) in &self.lines {
            if let Kind::Through(Through::LogWrites(log), ..) = kind {
                all.push(*log);
            }
            match kind {
                Kind::Linear(Below::Path(p), _) | Kind::Through(_, Below::Path(p), _) => all.push(*p),
                Kind::Striped { of, .. } => all.extend(of.iter().filter_map(|(b, _)| match b {
                    Below::Path(p) => Some(*p),
                    Below::Device(_) => None,
                })),
                Kind::Multipath { groups, .. } => {
                    all.extend(groups.iter().flat_map(|(_, p)| p.iter().copied()));
                }
                _ => {}
            }
        }
        all.sort_unstable();
        all.dedup();
        all
    }

    /// The mapped devices that the table names itself.
    #[must_use]
    pub fn devices(&self) -> Vec<usize> {
        let mut all = Vec::new();
        for (_, kind) in &self.lines {
            match kind {
                Kind::Linear(Below::Device(d), _) | Kind::Through(_, Below::Device(d), _) => all.push(*d),
                Kind::Striped { of, .. } => all.extend(of.iter().filter_map(|(b, _)| match b {
                    Below::Device(d) => Some(*d),
                    Below::Path(_) => None,
                })),
                _ => {}
            }
        }
        all
    }

    /// Something in it fails requests with EIO at will.
    #[must_use]
    pub fn is_flaky(&self) -> bool {
        self.lines.iter().any(|(_, k)| matches!(k, Kind::Through(Through::Flakey(..), ..)))
    }

    /// The groups, when the table is one multipath target.
    #[must_use]
    pub fn multipath(&self) -> Option<(usize, bool, &[Group])> {
        match self.lines.first() {
            Some((_, Kind::Multipath { disk, queue, groups })) => Some((*disk, *queue, groups)),
            _ => None,
        }
    }
}

fn multipath_text(queue: bool, groups: &[Group], cores: usize) -> String {
    let mut text = format!(
        "multipath {} 0 {} {}",
        if queue { "1 queue_if_no_path" } else { "0" },
        groups.len(),
        usize::from(!groups.is_empty())
    );
    for (selector, paths) in groups {
        let args = usize::from(*selector == Selector::Affinity);
        text += &format!(" {} 0 {} {args}", selector.name(), paths.len());
        for (i, path) in paths.iter().enumerate() {
            text += &format!(" p{path}");
            if args == 1 {
                // Core i, i + paths, ...: each path owns at least one as long as there are no more paths than cores.
                let mask = (0..cores).filter(|c| c % paths.len() == i).fold(0u64, |m, c| m | 1 << c);
                text += &format!(" {mask:x}");
            }
        }
    }
    text
}

/// A sector that reads as zeroes and forgets what is written.
pub const ZERO: u32 = u32::MAX;

/// A sector that fails.
pub const ERROR: u32 = u32::MAX - 1;

/// What a table means.
#[derive(Debug, PartialEq, Eq)]
pub struct Map {
    /// The cell behind each sector, or [`ZERO`], or [`ERROR`].
    pub cells: Vec<u32>,
    /// The disks behind the device.
    pub disks: Vec<usize>,
    /// There are sectors without a disk.
    pub bare: bool,
}

impl Map {
    /// Works out what `spec` means; `below` gives the maps of the devices.
    #[must_use]
    pub fn of(
        spec: &TableSpec,
        disk_of_path: &[usize],
        cells: &Cells,
        below: &dyn Fn(usize) -> Arc<Map>,
    ) -> Map {
        let mut map = Map { cells: Vec::new(), disks: Vec::new(), bare: false };
        let find = |b: Below, sector: u64| match b {
            Below::Path(p) => cells.index(disk_of_path[p], sector),
            Below::Device(d) => below(d).cells[sector as usize],
        };
        for (len, kind) in &spec.lines {
            for s in 0..*len {
                map.cells.push(match kind {
                    Kind::Linear(b, at) | Kind::Through(_, b, at) => find(*b, at + s),
                    Kind::Striped { chunk, of } => {
                        let (nr, rest) = (s / chunk, s % chunk);
                        let (b, at) = of[(nr % of.len() as u64) as usize];
                        find(b, at + nr / of.len() as u64 * chunk + rest)
                    }
                    Kind::Zero => ZERO,
                    Kind::Error => ERROR,
                    Kind::Multipath { disk, .. } => cells.index(*disk, s),
                });
            }
            if let Kind::Multipath { disk, .. } = kind {
                map.disks.push(*disk);
            }
        }
        map.disks.extend(spec.paths().iter().map(|p| disk_of_path[*p]));
        for d in spec.devices() {
            let lower = below(d);
            map.disks.extend(&lower.disks);
            map.bare |= lower.bare;
        }
        map.disks.sort_unstable();
        map.disks.dedup();
        map.bare |= spec.lines.iter().any(|(_, k)| matches!(k, Kind::Zero | Kind::Error));
        map
    }

    /// What is behind `sector`. A sector beyond the end fails.
    #[must_use]
    pub fn cell(&self, sector: u64) -> u32 {
        self.cells.get(sector as usize).copied().unwrap_or(ERROR)
    }

    /// The size of the device in sectors.
    #[must_use]
    pub fn sectors(&self) -> u64 {
        self.cells.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stripes_are_dealt_in_turn() {
        let cells = Cells::new(&[64, 64], |_, s| s);
        let spec = TableSpec {
            lines: vec![
                (8, Kind::Zero),
                (32, Kind::Striped { chunk: 8, of: vec![(Below::Path(0), 16), (Below::Path(1), 0)] }),
            ],
        };
        assert_eq!(spec.text(1), "0 8 zero\n8 32 striped 2 8 p0 16 p1 0");
        let map = Map::of(&spec, &[0, 1], &cells, &|_| unreachable!());
        assert_eq!((map.sectors(), map.disks.as_slice(), map.bare), (40, &[0, 1][..], true));
        assert_eq!(map.cells[7..10], [ZERO, 16, 17]);
        assert_eq!(map.cells[16], 64);
        assert_eq!(map.cells[24], 24);
        assert_eq!(map.cells[39], 64 + 15);
    }

    #[test]
    fn affinity_masks_cover_the_cores() {
        let spec = TableSpec {
            lines: vec![(
                8,
                Kind::Multipath { disk: 0, queue: true, groups: vec![(Selector::Affinity, vec![3, 4])] },
            )],
        };
        assert_eq!(spec.text(4), "0 8 multipath 1 queue_if_no_path 0 1 1 io-affinity 0 2 1 p3 5 p4 a");
    }
}
