//! Tables as the simulator makes them: the text that the targets are given. What it means,
//! [`crate::map`] says.

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

/// A target that passes on what it is given, as linear does, and makes trouble of its own on the
/// way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Through {
    /// `delay`, this many ms.
    Delay(u64),
    /// `flakey`: good for so many seconds, then bad for so many; what it does while it is bad.
    Flakey(u64, u64, Flaw),
    /// `dust` with blocks of this many bytes.
    Dust(u64),
    /// `log-writes` with the log on this path; from sector 0 only.
    LogWrites(usize),
}

/// What a flakey target does while it is bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// Fails everything.
    All,
    /// Fails reads.
    ErrorReads,
    /// Fails whatever changes the device, and flushes.
    ErrorWrites,
    /// Says of those that they are done, and forgets them.
    DropWrites,
    /// Puts a value into a byte, counted from 1, of each read (false) or write.
    CorruptByte(u32, bool, u8),
    /// Puts any value into any byte of one read (false) or write in so many.
    RandomCorrupt(bool, u32),
}

impl Flaw {
    /// It loses or changes data.
    #[must_use]
    pub fn is_lossy(self) -> bool {
        matches!(self, Flaw::DropWrites | Flaw::CorruptByte(..) | Flaw::RandomCorrupt(..))
    }

    /// The words for it in a table.
    fn words(self) -> String {
        let rw = |writes| if writes { 'w' } else { 'r' };
        match self {
            Flaw::All => String::new(),
            Flaw::ErrorReads => " 1 error_reads".into(),
            Flaw::ErrorWrites => " 1 error_writes".into(),
            Flaw::DropWrites => " 1 drop_writes".into(),
            Flaw::CorruptByte(nth, writes, value) => {
                format!(" 5 corrupt_bio_byte {nth} {} {value} 0", rw(writes))
            }
            Flaw::RandomCorrupt(true, one_in) => {
                format!(" 2 random_write_corrupt {}", 1_000_000_000 / one_in)
            }
            Flaw::RandomCorrupt(false, one_in) => {
                format!(" 2 random_read_corrupt {}", 1_000_000_000 / one_in)
            }
        }
    }
}

impl Through {
    fn text(self, below: Below, at: u64) -> String {
        let on = format!("{} {at}", below.word());
        match self {
            Through::Delay(ms) => format!("delay {on} {ms}"),
            Through::Flakey(up, down, flaw) => format!("flakey {on} {up} {down}{}", flaw.words()),
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
        /// Where its paths are mapped devices: a path and the device over it.
        via: Vec<(usize, usize)>,
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
                Kind::Multipath { queue, groups, via, .. } => multipath_text(*queue, groups, via, cores),
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
                Kind::Multipath { groups, via, .. } if via.is_empty() => {
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
                Kind::Multipath { via, .. } => all.extend(via.iter().map(|(_, d)| *d)),
                _ => {}
            }
        }
        all
    }

    /// How many lanes of path `p` a lane of this table opens; `below` says how many one of a device
    /// does. Linear lines share one of their device, if no two of them overlap there.
    #[must_use]
    pub fn lanes(&self, p: usize, below: &dyn Fn(usize) -> usize) -> usize {
        let of = |b: &Below| match b {
            Below::Path(q) => usize::from(*q == p),
            Below::Device(d) => below(*d),
        };
        let line = |kind: &Kind| match kind {
            Kind::Through(Through::LogWrites(log), b, _) => usize::from(*log == p) + of(b),
            Kind::Through(_, b, _) => of(b),
            Kind::Striped { of: parts, .. } => parts.iter().map(|(b, _)| of(b)).sum(),
            Kind::Multipath { groups, via, .. } if via.is_empty() => {
                groups.iter().flat_map(|(_, paths)| paths).filter(|q| **q == p).count()
            }
            Kind::Multipath { via, .. } => via.iter().map(|(_, d)| below(*d)).sum(),
            Kind::Linear(..) | Kind::Zero | Kind::Error => 0,
        };
        let linear: Vec<(Below, u64, u64)> = self.lines.iter().filter_map(linear_range).collect();
        let shares = |(i, (b, ..)): (usize, &(Below, u64, u64))| {
            let same: Vec<_> = linear.iter().filter(|(other, ..)| other == b).collect();
            let apart = |(n, (_, from, to)): (usize, &&(Below, u64, u64))| {
                same[..n].iter().all(|(_, start, end)| to <= start || end <= from)
            };
            let first = linear[..i].iter().all(|(other, ..)| other != b);
            !first && same.iter().enumerate().all(apart)
        };
        let linear_lanes = linear.iter().enumerate().filter(|&line| !shares(line)).map(|(_, (b, ..))| of(b));
        self.lines.iter().map(|(_, kind)| line(kind)).sum::<usize>() + linear_lanes.sum::<usize>()
    }

    /// The word for path `p` of a multipath target.
    #[must_use]
    pub fn path_word(&self, p: usize) -> String {
        let via = match self.lines.first() {
            Some((_, Kind::Multipath { via, .. })) => via.as_slice(),
            _ => &[],
        };
        path_word(p, via)
    }

    /// Its paths are mapped devices.
    #[must_use]
    pub fn is_loose(&self) -> bool {
        matches!(self.lines.first(), Some((_, Kind::Multipath { via, .. })) if !via.is_empty())
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
            Some((_, Kind::Multipath { disk, queue, groups, .. })) => Some((*disk, *queue, groups)),
            _ => None,
        }
    }
}

/// The device of a linear line, and its range there.
fn linear_range((len, kind): &(u64, Kind)) -> Option<(Below, u64, u64)> {
    match kind {
        Kind::Linear(below, at) => Some((*below, *at, at + len)),
        _ => None,
    }
}

fn path_word(p: usize, via: &[(usize, usize)]) -> String {
    let device = via.iter().find(|(path, _)| *path == p).map(|(_, d)| Below::Device(*d));
    device.unwrap_or(Below::Path(p)).word()
}

fn multipath_text(queue: bool, groups: &[Group], via: &[(usize, usize)], cores: usize) -> String {
    let features = match (queue, via.is_empty()) {
        (false, true) => "0",
        (true, true) => "1 queue_if_no_path",
        // Mapped devices are bio-based.
        (false, false) => "2 queue_mode bio",
        (true, false) => "3 queue_if_no_path queue_mode bio",
    };
    let mut text = format!("multipath {features} 0 {} {}", groups.len(), usize::from(!groups.is_empty()));
    for (selector, paths) in groups {
        let args = usize::from(*selector == Selector::Affinity);
        text += &format!(" {} 0 {} {args}", selector.name(), paths.len());
        for (i, path) in paths.iter().enumerate() {
            text += &format!(" {}", path_word(*path, via));
            if args == 1 {
                // Core i, i + paths, ...: each path owns at least one as long as there are no more
                // paths than cores.
                let mask = (0..cores).filter(|c| c % paths.len() == i).fold(0u64, |m, c| m | 1 << c);
                text += &format!(" {mask:x}");
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn affinity_masks_cover_the_cores() {
        let spec = TableSpec {
            lines: vec![(
                8,
                Kind::Multipath {
                    disk: 0,
                    queue: true,
                    groups: vec![(Selector::Affinity, vec![3, 4])],
                    via: Vec::new(),
                },
            )],
        };
        assert_eq!(spec.text(4), "0 8 multipath 1 queue_if_no_path 0 1 1 io-affinity 0 2 1 p3 5 p4 a");
    }
}
