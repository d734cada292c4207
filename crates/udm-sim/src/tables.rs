//! Random tables and their text. [`crate::table_map`] computes their mapping.

/// A device named in a table line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableLineDevice {
    /// A path, `pN`.
    Path(usize),
    /// A mapped device, `@dN`.
    Device(usize),
}

impl TableLineDevice {
    /// Name in a table.
    #[must_use]
    pub fn word(self) -> String {
        match self {
            TableLineDevice::Path(p) => format!("p{p}"),
            TableLineDevice::Device(d) => format!("@d{d}"),
        }
    }
}

/// A path selector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathSelector {
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

impl PathSelector {
    /// All selectors.
    pub const ALL: [PathSelector; 5] = [
        PathSelector::RoundRobin,
        PathSelector::QueueLength,
        PathSelector::ServiceTime,
        PathSelector::Historical,
        PathSelector::Affinity,
    ];

    /// Name in a table.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            PathSelector::RoundRobin => "round-robin",
            PathSelector::QueueLength => "queue-length",
            PathSelector::ServiceTime => "service-time",
            PathSelector::Historical => "historical-service-time",
            PathSelector::Affinity => "io-affinity",
        }
    }
}

/// A path group: its selector and its paths.
pub type SimPathGroup = (PathSelector, Vec<usize>);

/// A target that passes requests on, as linear does, and adds a fault or a delay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassThroughTarget {
    /// `delay`, in ms.
    Delay(u64),
    /// `flakey`: seconds up, seconds down, and the fault while down.
    Flakey(u64, u64, FlakeyFault),
    /// `dust` with blocks of this many bytes.
    Dust(u64),
    /// `log-writes` with the log on this path. It starts at sector 0 of the lower device.
    LogWrites(usize),
}

/// Fault of a flakey target while it is down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlakeyFault {
    /// Fails all requests.
    All,
    /// Fails reads.
    ErrorReads,
    /// Fails writes, discards, write-zeroes and flushes.
    ErrorWrites,
    /// Completes writes, discards, write-zeroes and flushes without passing them on.
    DropWrites,
    /// Sets one byte, counted from 1, of each read (false) or write (true) to a value.
    CorruptByte(u32, bool, u8),
    /// Sets a random byte to a random value in one of this many reads (false) or writes (true).
    RandomCorrupt(bool, u32),
}

impl FlakeyFault {
    /// True if the fault loses or changes data.
    #[must_use]
    pub fn is_lossy(self) -> bool {
        matches!(
            self,
            FlakeyFault::DropWrites | FlakeyFault::CorruptByte(..) | FlakeyFault::RandomCorrupt(..)
        )
    }

    /// Arguments in a table.
    fn words(self) -> String {
        let rw = |writes| if writes { 'w' } else { 'r' };
        match self {
            FlakeyFault::All => String::new(),
            FlakeyFault::ErrorReads => " 1 error_reads".into(),
            FlakeyFault::ErrorWrites => " 1 error_writes".into(),
            FlakeyFault::DropWrites => " 1 drop_writes".into(),
            FlakeyFault::CorruptByte(nth, writes, value) => {
                format!(" 5 corrupt_bio_byte {nth} {} {value} 0", rw(writes))
            }
            FlakeyFault::RandomCorrupt(true, one_in) => {
                format!(" 2 random_write_corrupt {}", 1_000_000_000 / one_in)
            }
            FlakeyFault::RandomCorrupt(false, one_in) => {
                format!(" 2 random_read_corrupt {}", 1_000_000_000 / one_in)
            }
        }
    }
}

impl PassThroughTarget {
    fn text(self, below: TableLineDevice, at: u64) -> String {
        let on = format!("{} {at}", below.word());
        match self {
            PassThroughTarget::Delay(ms) => format!("delay {on} {ms}"),
            PassThroughTarget::Flakey(up, down, flaw) => format!("flakey {on} {up} {down}{}", flaw.words()),
            PassThroughTarget::Dust(block) => format!("dust {on} {block}"),
            PassThroughTarget::LogWrites(log) => format!("log-writes {} p{log}", below.word()),
        }
    }
}

/// The target of a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TableLineTarget {
    /// One range of one device.
    Linear(TableLineDevice, u64),
    /// One range of one device, through a pass-through target.
    PassThrough(PassThroughTarget, TableLineDevice, u64),
    /// Stripes over several devices.
    Striped {
        /// Chunk length in sectors.
        chunk: u64,
        /// Each device, and the start of its part.
        of: Vec<(TableLineDevice, u64)>,
    },
    /// Zeroes.
    Zero,
    /// All requests fail.
    Error,
    /// Several paths to one disk.
    Multipath {
        /// The disk below all paths.
        disk: usize,
        /// `queue_if_no_path`.
        queue: bool,
        /// Groups: a selector and paths.
        groups: Vec<SimPathGroup>,
        /// Paths that are mapped devices: a path, and the device over it.
        via: Vec<(usize, usize)>,
    },
}

/// A table of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableSpec {
    /// Length and target of each line, from sector 0 on.
    pub lines: Vec<(u64, TableLineTarget)>,
}

impl TableSpec {
    /// Length in sectors.
    #[must_use]
    pub fn sectors(&self) -> u64 {
        self.lines.iter().map(|(len, _)| len).sum()
    }

    /// Text of the table in the kernel's syntax.
    #[must_use]
    pub fn text(&self, cores: usize) -> String {
        let mut start = 0;
        let mut lines = Vec::new();
        for (len, kind) in &self.lines {
            let rest = match kind {
                TableLineTarget::Linear(below, at) => format!("linear {} {at}", below.word()),
                TableLineTarget::PassThrough(what, below, at) => what.text(*below, *at),
                TableLineTarget::Striped { chunk, of } => {
                    let parts: Vec<_> = of.iter().map(|(b, at)| format!("{} {at}", b.word())).collect();
                    format!("striped {} {chunk} {}", of.len(), parts.join(" "))
                }
                TableLineTarget::Zero => "zero".into(),
                TableLineTarget::Error => "error".into(),
                TableLineTarget::Multipath { queue, groups, via, .. } => {
                    multipath_text(*queue, groups, via, cores)
                }
            };
            lines.push(format!("{start} {len} {rest}"));
            start += len;
        }
        lines.join("\n")
    }

    /// The paths named in the table.
    #[must_use]
    pub fn paths(&self) -> Vec<usize> {
        let mut all = Vec::new();
        for (_, kind) in &self.lines {
            if let TableLineTarget::PassThrough(PassThroughTarget::LogWrites(log), ..) = kind {
                all.push(*log);
            }
            match kind {
                TableLineTarget::Linear(TableLineDevice::Path(p), _)
                | TableLineTarget::PassThrough(_, TableLineDevice::Path(p), _) => all.push(*p),
                TableLineTarget::Striped { of, .. } => all.extend(of.iter().filter_map(|(b, _)| match b {
                    TableLineDevice::Path(p) => Some(*p),
                    TableLineDevice::Device(_) => None,
                })),
                TableLineTarget::Multipath { groups, via, .. } if via.is_empty() => {
                    all.extend(groups.iter().flat_map(|(_, p)| p.iter().copied()));
                }
                _ => {}
            }
        }
        all.sort_unstable();
        all.dedup();
        all
    }

    /// The mapped devices named in the table.
    #[must_use]
    pub fn devices(&self) -> Vec<usize> {
        let mut all = Vec::new();
        for (_, kind) in &self.lines {
            match kind {
                TableLineTarget::Linear(TableLineDevice::Device(d), _)
                | TableLineTarget::PassThrough(_, TableLineDevice::Device(d), _) => all.push(*d),
                TableLineTarget::Striped { of, .. } => all.extend(of.iter().filter_map(|(b, _)| match b {
                    TableLineDevice::Device(d) => Some(*d),
                    TableLineDevice::Path(_) => None,
                })),
                TableLineTarget::Multipath { via, .. } => all.extend(via.iter().map(|(_, d)| *d)),
                _ => {}
            }
        }
        all
    }

    /// Number of lanes of path `p` that one lane of this table opens. `below` returns this number
    /// for lower devices. Linear lines over the same device share a lane if their ranges do not
    /// overlap.
    #[must_use]
    pub fn lanes(&self, p: usize, below: &dyn Fn(usize) -> usize) -> usize {
        let of = |b: &TableLineDevice| match b {
            TableLineDevice::Path(q) => usize::from(*q == p),
            TableLineDevice::Device(d) => below(*d),
        };
        let line = |kind: &TableLineTarget| match kind {
            TableLineTarget::PassThrough(PassThroughTarget::LogWrites(log), b, _) => {
                usize::from(*log == p) + of(b)
            }
            TableLineTarget::PassThrough(_, b, _) => of(b),
            TableLineTarget::Striped { of: parts, .. } => parts.iter().map(|(b, _)| of(b)).sum(),
            TableLineTarget::Multipath { groups, via, .. } if via.is_empty() => {
                groups.iter().flat_map(|(_, paths)| paths).filter(|q| **q == p).count()
            }
            TableLineTarget::Multipath { via, .. } => via.iter().map(|(_, d)| below(*d)).sum(),
            TableLineTarget::Linear(..) | TableLineTarget::Zero | TableLineTarget::Error => 0,
        };
        let linear: Vec<(TableLineDevice, u64, u64)> = self.lines.iter().filter_map(linear_range).collect();
        let shares = |(i, (b, ..)): (usize, &(TableLineDevice, u64, u64))| {
            let same: Vec<_> = linear.iter().filter(|(other, ..)| other == b).collect();
            let apart = |(n, (_, from, to)): (usize, &&(TableLineDevice, u64, u64))| {
                same[..n].iter().all(|(_, start, end)| to <= start || end <= from)
            };
            let first = linear[..i].iter().all(|(other, ..)| other != b);
            !first && same.iter().enumerate().all(apart)
        };
        let linear_lanes = linear.iter().enumerate().filter(|&line| !shares(line)).map(|(_, (b, ..))| of(b));
        self.lines.iter().map(|(_, kind)| line(kind)).sum::<usize>() + linear_lanes.sum::<usize>()
    }

    /// Name of path `p` of a multipath target.
    #[must_use]
    pub fn path_word(&self, p: usize) -> String {
        let via = match self.lines.first() {
            Some((_, TableLineTarget::Multipath { via, .. })) => via.as_slice(),
            _ => &[],
        };
        format_table_path_name(p, via)
    }

    /// True if the paths are mapped devices.
    #[must_use]
    pub fn is_loose(&self) -> bool {
        matches!(self.lines.first(), Some((_, TableLineTarget::Multipath { via, .. })) if !via.is_empty())
    }

    /// True if a target fails requests with EIO on purpose.
    #[must_use]
    pub fn is_flaky(&self) -> bool {
        self.lines
            .iter()
            .any(|(_, k)| matches!(k, TableLineTarget::PassThrough(PassThroughTarget::Flakey(..), ..)))
    }

    /// The disk, the queue flag and the groups, if the table is one multipath target.
    #[must_use]
    pub fn multipath(&self) -> Option<(usize, bool, &[SimPathGroup])> {
        match self.lines.first() {
            Some((_, TableLineTarget::Multipath { disk, queue, groups, .. })) => {
                Some((*disk, *queue, groups))
            }
            _ => None,
        }
    }
}

/// Device and range of a linear line.
fn linear_range((len, kind): &(u64, TableLineTarget)) -> Option<(TableLineDevice, u64, u64)> {
    match kind {
        TableLineTarget::Linear(below, at) => Some((*below, *at, at + len)),
        _ => None,
    }
}

fn format_table_path_name(p: usize, via: &[(usize, usize)]) -> String {
    let device = via.iter().find(|(path, _)| *path == p).map(|(_, d)| TableLineDevice::Device(*d));
    device.unwrap_or(TableLineDevice::Path(p)).word()
}

fn multipath_text(queue: bool, groups: &[SimPathGroup], via: &[(usize, usize)], cores: usize) -> String {
    let features = match (queue, via.is_empty()) {
        (false, true) => "0",
        (true, true) => "1 queue_if_no_path",
        // Mapped devices of this world are bio-based.
        (false, false) => "2 queue_mode bio",
        (true, false) => "3 queue_if_no_path queue_mode bio",
    };
    let mut text = format!("multipath {features} 0 {} {}", groups.len(), usize::from(!groups.is_empty()));
    for (selector, paths) in groups {
        let args = usize::from(*selector == PathSelector::Affinity);
        text += &format!(" {} 0 {} {args}", selector.name(), paths.len());
        for (i, path) in paths.iter().enumerate() {
            text += &format!(" {}", format_table_path_name(*path, via));
            if args == 1 {
                // Path i gets the cores i, i + paths, and so on. So each path has a core if there
                // are at least as many cores as paths.
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
                TableLineTarget::Multipath {
                    disk: 0,
                    queue: true,
                    groups: vec![(PathSelector::Affinity, vec![3, 4])],
                    via: Vec::new(),
                },
            )],
        };
        assert_eq!(spec.text(4), "0 8 multipath 1 queue_if_no_path 0 1 1 io-affinity 0 2 1 p3 5 p4 a");
    }
}
