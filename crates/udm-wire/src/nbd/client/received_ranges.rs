//! The bytes of a read that have arrived, in any order.

/// Maximum number of gaps between received ranges. A server has no reason to leave so many.
const GAPS_MAX: usize = 1024;

/// Received byte ranges of one read.
#[derive(Debug, Default)]
pub(super) struct ReceivedRanges {
    /// All bytes before this offset have arrived.
    upto: u32,
    /// Ranges that have arrived after `upto`, in order and with gaps between them: begin and end.
    later: Vec<(u32, u32)>,
}

impl ReceivedRanges {
    /// Adds a range of received bytes.
    ///
    /// # Errors
    /// A byte arrived twice, or there are too many gaps.
    pub(super) fn add(&mut self, from: u32, len: u32) -> Result<(), &'static str> {
        const TWICE: &str = "bytes of a read that come twice";
        let end = from + len;
        if from != self.upto {
            self.add_later(from, end).ok_or(TWICE)?;
            return if self.later.len() > GAPS_MAX { Err("a read in too many pieces") } else { Ok(()) };
        }
        match self.later.first() {
            Some(&(start, _)) if start < end => return Err(TWICE),
            Some(&(start, last)) if start == end => {
                self.later.remove(0);
                self.upto = last;
            }
            _ => self.upto = end,
        }
        Ok(())
    }

    fn add_later(&mut self, from: u32, end: u32) -> Option<()> {
        let at = self.later.partition_point(|&(start, _)| start < from);
        let before = if at == 0 { self.upto } else { self.later[at - 1].1 };
        let behind = self.later.get(at).map_or(u32::MAX, |&(start, _)| start);
        if from < before || end > behind {
            return None;
        }
        match (at > 0 && from == before, end == behind) {
            (true, true) => {
                let (_, last) = self.later.remove(at);
                self.later[at - 1].1 = last;
            }
            (true, false) => self.later[at - 1].1 = end,
            (false, true) => self.later[at].0 = from,
            (false, false) => self.later.insert(at, (from, end)),
        }
        Some(())
    }

    /// True if the first `len` bytes have arrived.
    pub(super) fn is_whole(&self, len: u32) -> bool {
        self.upto >= len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every order of five pieces is complete at the end, and a repeated byte is detected.
    #[test]
    fn any_order_and_nothing_twice() {
        let pieces = [(0u32, 3u32), (3, 1), (4, 10), (14, 2), (16, 4)];
        let mut order = [0, 1, 2, 3, 4];
        let mut seen = 0;
        permute(&mut order, 0, &mut |order| {
            seen += 1;
            let mut covered = ReceivedRanges::default();
            for (n, &i) in order.iter().enumerate() {
                assert!(!covered.is_whole(20));
                covered.add(pieces[i].0, pieces[i].1).unwrap();
                for &j in &order[..=n] {
                    let (from, len) = pieces[j];
                    assert!(covered.add(from, len).is_err() && covered.add(from + len - 1, 1).is_err());
                }
            }
            assert!(covered.is_whole(20) && covered.later.is_empty());
        });
        assert_eq!(seen, 120);
    }

    fn permute(order: &mut [usize; 5], at: usize, each: &mut impl FnMut(&[usize; 5])) {
        if at == order.len() {
            return each(order);
        }
        for i in at..order.len() {
            order.swap(at, i);
            permute(order, at + 1, each);
            order.swap(at, i);
        }
    }

    #[test]
    fn gaps_are_bounded() {
        let mut covered = ReceivedRanges::default();
        let refused = (0..).map(|n| covered.add(n * 2 + 1, 1)).position(|added| added.is_err());
        assert_eq!(refused, Some(GAPS_MAX));
    }
}
