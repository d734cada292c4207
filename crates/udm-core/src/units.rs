//! Newtypes for units, so that a sector is never taken for a byte.

use std::fmt;
use std::ops::{Add, AddAssign, Sub, SubAssign};

/// Bytes per sector: the unit of every table, whatever the block size of the device.
pub const SECTOR_SIZE: u64 = 512;

/// A position on a device, in sectors of 512 bytes from its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sector(pub u64);

/// A length in sectors of 512 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sectors(pub u64);

impl Sector {
    /// The byte offset of the position.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0 * SECTOR_SIZE
    }
}

impl Sectors {
    /// No sectors.
    pub const ZERO: Sectors = Sectors(0);

    /// The length in bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0 * SECTOR_SIZE
    }

    /// The whole sectors in `bytes`; a remainder is dropped.
    #[must_use]
    pub const fn from_bytes(bytes: u64) -> Sectors {
        Sectors(bytes / SECTOR_SIZE)
    }

    /// The end of a device of this length: the first position after it.
    #[must_use]
    pub const fn end(self) -> Sector {
        Sector(self.0)
    }
}

impl Add<Sectors> for Sector {
    type Output = Sector;
    fn add(self, n: Sectors) -> Sector {
        Sector(self.0 + n.0)
    }
}

impl AddAssign<Sectors> for Sector {
    fn add_assign(&mut self, n: Sectors) {
        self.0 += n.0;
    }
}

impl Sub<Sectors> for Sector {
    type Output = Sector;
    fn sub(self, n: Sectors) -> Sector {
        Sector(self.0 - n.0)
    }
}

impl SubAssign<Sectors> for Sector {
    fn sub_assign(&mut self, n: Sectors) {
        self.0 -= n.0;
    }
}

impl Sub for Sector {
    type Output = Sectors;
    fn sub(self, start: Sector) -> Sectors {
        Sectors(self.0 - start.0)
    }
}

impl Add for Sectors {
    type Output = Sectors;
    fn add(self, n: Sectors) -> Sectors {
        Sectors(self.0 + n.0)
    }
}

impl AddAssign for Sectors {
    fn add_assign(&mut self, n: Sectors) {
        self.0 += n.0;
    }
}

impl Sub for Sectors {
    type Output = Sectors;
    fn sub(self, n: Sectors) -> Sectors {
        Sectors(self.0 - n.0)
    }
}

impl SubAssign for Sectors {
    fn sub_assign(&mut self, n: Sectors) {
        self.0 -= n.0;
    }
}

impl fmt::Display for Sector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Sectors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A time or a duration in nanoseconds, from the core's clock: monotonic, with an arbitrary origin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanos(pub u64);

impl Nanos {
    /// Later than any time.
    pub const NEVER: Nanos = Nanos(u64::MAX);

    /// A duration in milliseconds.
    #[must_use]
    pub const fn from_millis(ms: u64) -> Nanos {
        Nanos(ms * 1_000_000)
    }

    /// The duration from `earlier` to `self`; zero if `earlier` is later.
    #[must_use]
    pub const fn since(self, earlier: Nanos) -> Nanos {
        Nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add for Nanos {
    type Output = Nanos;
    /// Saturates at [`Nanos::NEVER`].
    fn add(self, n: Nanos) -> Nanos {
        Nanos(self.0.saturating_add(n.0))
    }
}

/// The index of a core, from 0, dense: bit i of an io-affinity mask is core i.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CoreId(pub u16);

impl CoreId {
    /// The id as an index into a table of cores.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A device number, `major:minor`, in udm's own numbering. Tables and status lines print it in
/// place of the kernel's number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DevNo {
    /// Major number: the kind of device.
    pub major: u32,
    /// Minor number: the device of that kind.
    pub minor: u32,
}

impl fmt::Display for DevNo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)
    }
}

impl std::str::FromStr for DevNo {
    type Err = ();
    fn from_str(s: &str) -> Result<DevNo, ()> {
        let digits = |s: &str| {
            (!s.is_empty() && s.bytes().all(|b| b.is_ascii_digit()))
                .then(|| s.parse().ok())
                .flatten()
                .ok_or(())
        };
        let (major, minor) = s.split_once(':').ok_or(())?;
        Ok(DevNo { major: digits(major)?, minor: digits(minor)? })
    }
}
