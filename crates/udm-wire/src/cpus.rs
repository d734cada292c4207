//! Lists of CPUs in the kernel's format: `0-3,8`.

use std::str::FromStr;

/// CPU numbers are below this.
const CPUS_MAX: usize = 1024;

/// CPU numbers in the given order, each once; at least one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuList(Vec<usize>);

impl CpuList {
    /// The CPU numbers.
    #[must_use]
    pub fn numbers(&self) -> &[usize] {
        &self.0
    }
}

impl FromStr for CpuList {
    /// One line that names the invalid part.
    type Err = String;

    fn from_str(text: &str) -> Result<CpuList, String> {
        let number = |s: &str| match s.parse::<usize>() {
            Ok(n) if n < CPUS_MAX => Ok(n),
            _ => Err(format!("'{s}' is not a CPU number below {CPUS_MAX}")),
        };
        let mut cpus = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(format!("'{part}': the first CPU is above the last"));
            }
            for cpu in first..=last {
                if cpus.contains(&cpu) {
                    return Err(format!("CPU {cpu} is named twice"));
                }
                cpus.push(cpu);
            }
        }
        Ok(CpuList(cpus))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists() {
        assert_eq!("0-2,7".parse::<CpuList>().unwrap().numbers(), [0, 1, 2, 7]);
        for bad in ["", "1-", "3-1", "0,0", "x", "0-99999999", "-1"] {
            assert!(bad.parse::<CpuList>().is_err(), "{bad}");
        }
    }
}
