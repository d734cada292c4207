//! The percentiles of a report: fio's `percentile_list`.

use std::fmt;
use std::str::FromStr;

/// Maximum number of percentiles, as in fio.
const LIST_MAX: usize = 20;

/// Maximum number of digits after the point. A JSON report has as many.
const DIGITS_MAX: usize = 6;

/// Percentiles in rising order. As in fio, a 0 ends the given list, so the list may be empty.
#[derive(Debug, Clone, PartialEq)]
pub struct PercentileList {
    pub list: Vec<f64>,
    /// Digits after the point in the report: the most that a given percentile has.
    pub digits: usize,
}

impl Default for PercentileList {
    /// fio's default list.
    fn default() -> PercentileList {
        let list = vec![
            1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95,
            99.99,
        ];
        PercentileList { list, digits: 2 }
    }
}

impl fmt::Display for PercentileList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<_> = self.list.iter().map(f64::to_string).collect();
        f.write_str(&words.join(":"))
    }
}

impl FromStr for PercentileList {
    type Err = String;

    fn from_str(text: &str) -> Result<PercentileList, String> {
        let percentile = |word: &str| match word.parse::<f64>() {
            Ok(n) if (0.0..=100.0).contains(&n) => Ok(n),
            _ => Err("a percentile is a number from 0 to 100".to_owned()),
        };
        let mut list = text.split(':').map(percentile).collect::<Result<Vec<_>, _>>()?;
        if list.len() > LIST_MAX {
            return Err(format!("more than {LIST_MAX} percentiles"));
        }
        list.truncate(list.iter().position(|n| *n == 0.0).unwrap_or(LIST_MAX));
        list.sort_by(f64::total_cmp);
        let behind = |word: &str| word.split_once('.').map_or(0, |(_, digits)| digits.len());
        let digits = text.split(':').map(behind).max().unwrap_or(0).min(DIGITS_MAX);
        Ok(PercentileList { list, digits })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists() {
        assert_eq!("99.9:1:50".parse::<PercentileList>().unwrap().to_string(), "1:50:99.9");
        let default = PercentileList::default();
        assert_eq!(default.to_string().parse(), Ok(default));
        let digits = |text: &str| text.parse::<PercentileList>().unwrap().digits;
        assert_eq!((digits("1:50"), digits("1:50.5:0.001"), digits("1e0:2")), (0, 3, 0));
        let ended = |text: &str| text.parse::<PercentileList>().unwrap().list;
        assert_eq!((ended("99:5:0:1"), ended("0:50"), ended("0.0")), (vec![5.0, 99.0], vec![], vec![]));
        for bad in ["", "1:", "101", "0:x", "-1", "x", "nan", "inf", "1,2"] {
            assert!(bad.parse::<PercentileList>().is_err(), "{bad}");
        }
        assert!(["1"; 21].join(":").parse::<PercentileList>().is_err());
    }
}
