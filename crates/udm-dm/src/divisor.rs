//! Division by a number that is fixed when a table is loaded.

/// A divisor as a multiplication and two shifts. For any divisor, this is several times faster than
/// the processor's division of 64-bit numbers. The dividend must be less than [`Divisor::MAX`]; all
/// sectors are.
#[derive(Clone, Copy, Debug)]
pub struct Divisor {
    by: u64,
    /// 2^(63 + `shift`) / `by`, rounded up.
    factor: u64,
    /// The smallest value for which 2^`shift` >= `by`.
    shift: u32,
}

impl Divisor {
    /// Exclusive upper bound of dividends, and the largest divisor.
    pub const MAX: u64 = 1 << 63;

    /// Creates a divisor; `by` is from 1 to [`Divisor::MAX`].
    pub fn new(by: u64) -> Divisor {
        let shift = by.next_power_of_two().trailing_zeros();
        let factor = (1u128 << (63 + shift)).div_ceil(u128::from(by)) as u64;
        Divisor { by, factor, shift }
    }

    /// The divisor.
    pub fn get(self) -> u64 {
        self.by
    }

    /// `n` divided by the divisor, rounded down.
    #[inline]
    pub fn quotient(self, n: u64) -> u64 {
        debug_assert!(n < Divisor::MAX, "{n}: too large to be divided");
        // The factor was rounded up. So the product is too large by less than n / 2^(63 + shift),
        // which is less than 1 / by. This error never reaches the next integer.
        ((u128::from(n) * u128::from(self.factor)) >> 63) as u64 >> self.shift
    }

    /// Quotient and remainder.
    #[inline]
    pub fn div_rem(self, n: u64) -> (u64, u64) {
        let quotient = self.quotient(n);
        (quotient, n - quotient * self.by)
    }

    /// True if the divisor is a power of two.
    pub fn is_shift(self) -> bool {
        self.by.is_power_of_two()
    }

    /// As [`Divisor::div_rem`]. If `SHIFT` is true, it uses only shifts and masks; the divisor must
    /// then be a power of two ([`Divisor::is_shift`]).
    #[inline(always)]
    pub fn div_rem_by<const SHIFT: bool>(self, n: u64) -> (u64, u64) {
        debug_assert!(!SHIFT || self.is_shift(), "{} is not a power of two", self.by);
        if SHIFT { (n >> self.shift, n & (self.by - 1)) } else { self.div_rem(n) }
    }

    /// The remainder.
    #[inline]
    pub fn remainder(self, n: u64) -> u64 {
        self.div_rem(n).1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn check(n: u64, by: u64) {
        let divisor = Divisor::new(by);
        assert_eq!(divisor.div_rem(n), (n / by, n % by), "{n} by {by}");
        if divisor.is_shift() {
            assert_eq!(divisor.div_rem_by::<true>(n), divisor.div_rem(n), "{n} by {by}");
        }
    }

    #[test]
    fn at_the_edges() {
        let last = Divisor::MAX - 1;
        let edges =
            |by: u64| [0, 1, by - 1, by, by.saturating_add(1), last - by.min(last), last / by * by, last];
        for by in
            [1, 2, 3, 7, 128, 1 << 32, (1 << 32) + 1, (1 << 62) - 1, 1 << 62, (1 << 62) + 1, last, last + 1]
        {
            edges(by).into_iter().for_each(|n| check(n.min(last), by));
            edges(by).into_iter().for_each(|n| check(n.min(last).saturating_sub(1), by));
        }
    }

    proptest! {
        #[test]
        fn anywhere(n in 0..Divisor::MAX, by in 1..=Divisor::MAX, less in 0..63u32) {
            check(n, (by >> less).max(1));
            check(n >> less, by);
        }

        #[test]
        fn around_whole_quotients(times: u64, by in 1..=Divisor::MAX, less in 0..63u32) {
            let by = (by >> less).max(1);
            let whole = times % (Divisor::MAX / by).max(1) * by;
            check(whole, by);
            check(whole.saturating_sub(1), by);
        }
    }
}
