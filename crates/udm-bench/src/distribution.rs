//! The offsets of random requests: fio's `random_distribution`.
//!
//! Only `random` can draw with a map. `zipf`, `pareto` and `normal` draw the rank of a place. Ranks
//! are scattered over the region, as in fio. `zoned` and `zoned_abs` draw a zone first.

use crate::request_lengths::{ByteLength, PerDirection};
use rand::rngs::SmallRng;
use rand::{Rng, RngExt};
use std::str::FromStr;

/// Maximum number of zones per direction, as in fio.
const ZONES_MAX: usize = 256;

/// Number of terms of a sum that are added one by one. The others are approximated by an integral.
const TERMS: u64 = 10_000;

/// Number of uniform values whose mean approximates a value of a normal distribution.
const NORMAL_TERMS: u32 = 12;

/// The value of the option.
#[derive(Debug, Clone, PartialEq)]
pub enum RandomOffsetDistribution {
    /// All places are equally likely.
    Random,
    /// The probability of rank i is proportional to i to the power of minus theta.
    Zipf { theta: f64, center: Option<f64> },
    /// A share of 1 - h of the requests goes to a share h of the places, and so on inside that
    /// share.
    Pareto { h: f64, center: Option<f64> },
    /// A normal distribution around the center; `deviation` in percent of the region.
    Normal { deviation: f64, center: Option<f64> },
    /// Zones for each direction, with sizes in percent.
    Zoned(PerDirection<AccessZonesInPercent>),
    /// Zones for each direction, with sizes in bytes.
    ZonedAbs(PerDirection<AccessZonesInBytes>),
}

/// Zones: percentage of the requests, and size in percent of the region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccessZonesInPercent(Vec<(u32, u64)>);

/// Zones: percentage of the requests, and size in bytes. Size 0 is the rest of the region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccessZonesInBytes(Vec<(u32, u64)>);

impl FromStr for RandomOffsetDistribution {
    type Err = String;

    fn from_str(text: &str) -> Result<RandomOffsetDistribution, String> {
        let (kind, rest) = text.split_once(':').map_or((text, None), |(kind, rest)| (kind, Some(rest)));
        match kind {
            "random" if rest.is_none() => Ok(RandomOffsetDistribution::Random),
            "zipf" => {
                let (theta, center) = parse_number_and_center(rest, 1.1)?;
                let fits = theta > 0.0 && theta != 1.0;
                fits.then_some(RandomOffsetDistribution::Zipf { theta, center })
                    .ok_or("theta is above 0 and not 1".into())
            }
            "pareto" => {
                let (h, center) = parse_number_and_center(rest, 0.2)?;
                let fits = h > 0.0 && h < 1.0;
                fits.then_some(RandomOffsetDistribution::Pareto { h, center })
                    .ok_or("h is above 0 and below 1".into())
            }
            "normal" => {
                let (deviation, center) = parse_number_and_center(rest, 0.0)?;
                let fits = (0.0..100.0).contains(&deviation);
                let normal = RandomOffsetDistribution::Normal { deviation, center };
                fits.then_some(normal).ok_or("a deviation is at least 0 and below 100".into())
            }
            "zoned" => Ok(RandomOffsetDistribution::Zoned(rest.unwrap_or_default().parse()?)),
            "zoned_abs" => Ok(RandomOffsetDistribution::ZonedAbs(rest.unwrap_or_default().parse()?)),
            _ => Err("not one of random, zipf, pareto, normal, zoned, zoned_abs".into()),
        }
    }
}

/// Parses a number and a center, either of which may be left out.
fn parse_number_and_center(text: Option<&str>, default: f64) -> Result<(f64, Option<f64>), String> {
    let number = |text: &str| {
        let number: f64 = text.parse().map_err(|_| format!("{text}: not a number"))?;
        number.is_finite().then_some(number).ok_or(format!("{text}: not a number"))
    };
    let Some(text) = text else { return Ok((default, None)) };
    let (value, center) = text.split_once(':').map_or((text, None), |(value, center)| (value, Some(center)));
    let center = center.map(number).transpose()?;
    if center.is_some_and(|center| !(0.0..=1.0).contains(&center)) {
        return Err("a center is 0 to 1".into());
    }
    Ok((number(value)?, center))
}

impl FromStr for AccessZonesInPercent {
    type Err = String;

    fn from_str(text: &str) -> Result<AccessZonesInPercent, String> {
        let percent = |text: &str| match text.parse::<u64>() {
            Ok(n @ 1..=100) => Ok(n),
            _ => Err(format!("{text}: a percentage is 1 to 100")),
        };
        let zones = parse_access_zones(text, percent)?;
        let given: u64 = zones.iter().filter_map(|zone| zone.1).sum();
        let unsaid = zones.iter().filter(|zone| zone.1.is_none()).count() as u64;
        if given > 100 {
            return Err(format!("zones of {given} percent in all"));
        }
        let share = (100 - given).checked_div(unsaid).unwrap_or(0);
        Ok(AccessZonesInPercent(
            zones.into_iter().map(|(access, size)| (access, size.unwrap_or(share))).collect(),
        ))
    }
}

impl FromStr for AccessZonesInBytes {
    type Err = String;

    fn from_str(text: &str) -> Result<AccessZonesInBytes, String> {
        let zones = parse_access_zones(text, |text| text.parse::<ByteLength>().map(|one| one.0))?;
        Ok(AccessZonesInBytes(zones.into_iter().map(|(access, size)| (access, size.unwrap_or(0))).collect()))
    }
}

/// Parses `ACCESS/SIZE:...`. The access percentages must add up to 100.
fn parse_access_zones(
    text: &str,
    size: impl Fn(&str) -> Result<u64, String>,
) -> Result<Vec<(u32, Option<u64>)>, String> {
    let mut zones = Vec::new();
    for zone in text.split(':') {
        let (access, long) = zone.split_once('/').unwrap_or((zone, ""));
        let access: u32 = access.parse().map_err(|_| format!("{zone}: a zone is ACCESS/SIZE"))?;
        let long = if long.is_empty() { None } else { Some(size(long)?) };
        zones.push((access, long));
    }
    let all: u64 = zones.iter().map(|zone| u64::from(zone.0)).sum();
    if all != 100 || zones.len() > ZONES_MAX {
        return Err(format!("{} zones with {all} percent of the requests, not 100", zones.len()));
    }
    Ok(zones)
}

/// Draws places of one direction.
#[derive(Debug, Clone)]
pub struct OffsetGenerator {
    /// Number of places, at least one. `align` is the distance between two places in bytes.
    count: u64,
    align: u64,
    draw: OffsetDistributionSampler,
}

#[derive(Debug, Clone)]
enum OffsetDistributionSampler {
    Uniform,
    Zipf {
        theta: f64,
        zeta: f64,
        offset: u64,
    },
    Pareto {
        power: f64,
        offset: u64,
    },
    Normal {
        deviation: f64,
        offset: u64,
    },
    /// Zones: upper bound of the drawn percentage, first place, number of places.
    Zoned(Vec<(u32, u64, u64)>),
}

impl OffsetGenerator {
    /// Creates the generator of a distribution.
    pub fn new(
        of: &RandomOffsetDistribution,
        direction: usize,
        count: u64,
        align: u64,
        rng: &mut SmallRng,
    ) -> OffsetGenerator {
        let mut offset = |center: &Option<f64>, drawn: bool| match center {
            Some(center) => (count as f64 * center) as u64,
            None if drawn => rng.next_u64() % count,
            None => 0,
        };
        let draw = match of {
            RandomOffsetDistribution::Random => OffsetDistributionSampler::Uniform,
            RandomOffsetDistribution::Zipf { theta, center } => OffsetDistributionSampler::Zipf {
                theta: *theta,
                zeta: zeta(count, *theta),
                offset: offset(center, true),
            },
            RandomOffsetDistribution::Pareto { h, center } => OffsetDistributionSampler::Pareto {
                power: h.ln() / (1.0 - h).ln(),
                offset: offset(center, true),
            },
            RandomOffsetDistribution::Normal { deviation, center } => {
                let deviation = (count as f64 * deviation / 100.0).ceil().min((count / 2) as f64);
                OffsetDistributionSampler::Normal { deviation, offset: offset(center, false) }
            }
            RandomOffsetDistribution::Zoned(parts) => parts.of[direction].as_ref().map_or(
                OffsetDistributionSampler::Uniform,
                |AccessZonesInPercent(zones)| {
                    let places = |percent: u64| (u128::from(count) * u128::from(percent) / 100) as u64;
                    let percents = zones.iter().map(|(access, percent)| (*access, places(*percent)));
                    OffsetDistributionSampler::zoned(percents, count)
                },
            ),
            RandomOffsetDistribution::ZonedAbs(parts) => parts.of[direction].as_ref().map_or(
                OffsetDistributionSampler::Uniform,
                |AccessZonesInBytes(zones)| {
                    let places = |bytes: u64| if bytes == 0 { count } else { bytes / align };
                    OffsetDistributionSampler::zoned(
                        zones.iter().map(|(access, bytes)| (*access, places(*bytes))),
                        count,
                    )
                },
            ),
        };
        OffsetGenerator { count, align, draw }
    }

    /// The byte offset of the next request.
    #[inline]
    pub fn next(&self, rng: &mut SmallRng) -> u64 {
        let place = match self.draw {
            OffsetDistributionSampler::Uniform => rng.random_range(0..self.count),
            _ => self.next_of_some(rng),
        };
        place * self.align
    }

    #[inline(never)]
    fn next_of_some(&self, rng: &mut SmallRng) -> u64 {
        let n = self.count as f64;
        let (rank, offset) = match &self.draw {
            OffsetDistributionSampler::Zipf { theta, zeta, offset } => {
                (draw_zipf_rank(self.count, *theta, *zeta, rng.random()), *offset)
            }
            OffsetDistributionSampler::Pareto { power, offset } => {
                (((n - 1.0) * rng.random::<f64>().powf(*power)) as u64, *offset)
            }
            OffsetDistributionSampler::Normal { deviation, offset } => {
                let mean = (0..NORMAL_TERMS).map(|_| rng.random::<f64>()).sum::<f64>() / 12.0;
                let around = (rng.random::<f64>() - 0.5) * deviation;
                ((mean * n + around).clamp(0.0, n - 1.0) as u64, *offset)
            }
            OffsetDistributionSampler::Zoned(zones) => {
                let drawn = rng.random_range(0..100u32);
                let zone = zones.iter().find(|zone| drawn < zone.0).or(zones.last());
                return zone.map_or(0, |(_, first, places)| first + rng.random_range(0..*places));
            }
            OffsetDistributionSampler::Uniform => return 0,
        };
        // The increment of Weyl's sequence places neighbouring ranks far apart.
        (rank.wrapping_mul(0x9E37_79B9_7F4A_7C15) % self.count + offset) % self.count
    }
}

impl OffsetDistributionSampler {
    /// Places zones of (percentage, length) one after another, up to `count` places.
    fn zoned(zones: impl Iterator<Item = (u32, u64)>, count: u64) -> OffsetDistributionSampler {
        let (mut up_to, mut first) = (0, 0);
        let place = |(access, places): (u32, u64)| {
            up_to += access;
            let begin = first.min(count - 1);
            first = (begin + places).min(count);
            (up_to, begin, (first - begin).max(1))
        };
        OffsetDistributionSampler::Zoned(zones.map(place).collect())
    }
}

/// The sum of i to the power of minus theta, for i from 1 to `count`.
fn zeta(count: u64, theta: f64) -> f64 {
    let terms = count.min(TERMS);
    let sum: f64 = (1..=terms).map(|i| (i as f64).powf(-theta)).sum();
    let integral = |x: f64| x.powf(1.0 - theta) / (1.0 - theta);
    sum + integral(count as f64 + 0.5) - integral(terms as f64 + 0.5)
}

/// The rank, from 0, for a number from 0 to 1. Uses the approximation of Gray and others ("Quickly
/// generating billion-record synthetic databases", 1994), as fio does.
fn draw_zipf_rank(count: u64, theta: f64, zeta: f64, drawn: f64) -> u64 {
    let second = 0.5f64.powf(theta);
    let sum = drawn * zeta;
    if sum < 1.0 || count < 3 {
        return u64::from(sum >= 1.0) % count;
    }
    if sum < 1.0 + second {
        return 1;
    }
    let n = count as f64;
    let eta = (1.0 - (2.0 / n).powf(1.0 - theta)) / (1.0 - (1.0 + second) / zeta);
    ((n * (eta * drawn - eta + 1.0).powf(1.0 / (1.0 - theta))) as u64).min(count - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    /// How often each place is drawn in a million draws.
    fn counts(text: &str, count: u64) -> Vec<u64> {
        let mut rng = SmallRng::seed_from_u64(3);
        let places = OffsetGenerator::new(&text.parse().unwrap(), 0, count, 512, &mut rng);
        let mut counts = vec![0; count as usize];
        for _ in 0..1_000_000 {
            counts[(places.next(&mut rng) / 512) as usize] += 1;
        }
        counts
    }

    fn sorted(text: &str, count: u64) -> Vec<u64> {
        let mut counts = counts(text, count);
        counts.sort_by_key(|n| std::cmp::Reverse(*n));
        counts
    }

    /// Ranks stay distinct if the number of places is a power of two.
    #[test]
    fn zipf_ranks_fall_by_their_power() {
        let all = sorted("zipf:0.8", 1024);
        let whole = zeta(1024, 0.8);
        let want = |ranks: u64| 1e6 * zeta(ranks, 0.8) / whole;
        for ranks in [1, 2, 100, 500] {
            let is = all[..ranks as usize].iter().sum::<u64>() as f64;
            assert!((is / want(ranks) - 1.0).abs() < 0.05, "{ranks}: {is}, not {}", want(ranks));
        }
        assert!(sorted("zipf", 1024)[0] > 150_000 && sorted("random", 1024)[0] < 1300);
        // The integral agrees with the sum.
        let sum: f64 = (1..=1_000_000u32).map(|i| f64::from(i).powf(-1.2)).sum();
        assert!((zeta(1_000_000, 1.2) - sum).abs() < 1e-6);
    }

    #[test]
    fn a_fifth_of_the_places_has_four_fifths() {
        let all = sorted("pareto:0.2", 1024);
        let first: u64 = all[..205].iter().sum();
        assert!(first.abs_diff(800_000) < 10_000, "{first}");
        let all = sorted("normal", 1024);
        // Within one deviation, a twelfth of the region, on both sides of the mean.
        let first: u64 = all[..171].iter().sum();
        assert!(first.abs_diff(683_000) < 15_000, "{first}");
    }

    #[test]
    fn zones_lie_one_behind_the_other() {
        let all = counts("zoned:60/10:30/20:8/30:2/40", 1000);
        let of = |from: usize, to: usize| all[from..to].iter().sum::<u64>();
        for (is, want) in [(of(0, 100), 60), (of(100, 300), 30), (of(300, 600), 8), (of(600, 1000), 2)] {
            assert!(is.abs_diff(want * 10_000) < 3000, "{is}, not {want} %");
        }
        let all = counts("zoned_abs:90/51200:10/", 1000);
        assert!(all[..100].iter().sum::<u64>().abs_diff(900_000) < 3000 && all[999] > 0);
        assert!(counts("zoned:100/50", 1).len() == 1 && counts("zipf:1.2", 2)[0] > 0);
    }

    #[test]
    fn what_is_wrong_is_refused() {
        for bad in [
            "",
            "flat",
            "random:1",
            "zipf:1",
            "zipf:-1",
            "zipf:x",
            "zipf:0.5:2",
            "pareto:0",
            "pareto:1",
            "normal:100",
            "normal:nan",
            "zoned",
            "zoned:50/10",
            "zoned:60/60:40/60",
            "zoned:100/0",
            "zoned:100/1%",
            "zoned_abs:100/x",
        ] {
            assert!(bad.parse::<RandomOffsetDistribution>().is_err(), "{bad}");
        }
        for good in ["zoned:100,50/5:50/95", "zipf:1.2:0.5", "normal:10:0.3", "pareto", "zoned_abs:95/50G:5/"]
        {
            assert!(good.parse::<RandomOffsetDistribution>().is_ok(), "{good}");
        }
    }
}
