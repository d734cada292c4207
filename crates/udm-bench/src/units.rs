//! Numbers in fio's formats.

const PREFIXES: [&str; 7] = ["", "k", "M", "G", "T", "P", "E"];
const BINARY: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];

/// Formats `number` in at most `width` characters, including a point, with a prefix for powers of
/// 1000: `2040k`, `8356M`.
pub fn format_with_decimal_prefix(number: f64, width: usize) -> String {
    format_number_to_width(number, width, 1000, &PREFIXES)
}

/// Formats `number` like [`format_with_decimal_prefix`], with a prefix for powers of 1024:
/// `31.9Mi`.
pub fn format_with_binary_prefix(number: f64, width: usize) -> String {
    format_number_to_width(number, width, 1024, &BINARY)
}

fn format_number_to_width(number: f64, width: usize, thousand: u64, prefixes: &[&str]) -> String {
    let (mut whole, mut unit, mut rest) = (number.max(0.0) as u64, 0, None);
    while whole.to_string().len() > width && unit + 1 < prefixes.len() {
        rest = Some(whole % thousand);
        whole /= thousand;
        unit += 1;
    }
    let places = width.saturating_sub(whole.to_string().len() + 1);
    match rest {
        None => format!("{whole}{}", prefixes[unit]),
        Some(rest) if places == 0 => format!("{}{}", whole + u64::from(rest >= thousand / 2), prefixes[unit]),
        Some(rest) => {
            let value = whole as f64 + rest as f64 / thousand as f64;
            format!("{value:.places$}{}", prefixes[unit])
        }
    }
}

/// Formats a bandwidth, as in `BW=7969MiB/s (8356MB/s)`.
pub fn format_fio_bandwidth(bytes_per_second: f64) -> String {
    format!(
        "{}B/s ({}B/s)",
        format_with_binary_prefix(bytes_per_second, 4),
        format_with_decimal_prefix(bytes_per_second, 4)
    )
}

/// The unit of time for values from `min` to `max` nanoseconds: its name, and its length in
/// nanoseconds.
pub fn time_unit(min: u64, max: u64) -> (&'static str, u64) {
    match (min, max) {
        (2_000_001.., 100_000_000..) => ("msec", 1_000_000),
        (2_001.., 100_000..) => ("usec", 1_000),
        _ => ("nsec", 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pairs from reports of fio 3.33.
    #[test]
    fn as_fio() {
        assert_eq!(format_with_decimal_prefix(2_040_000.0, 4), "2040k");
        assert_eq!(format_with_decimal_prefix(4_819_123.0, 4), "4819k");
        assert_eq!(format_with_binary_prefix(33_423_360.0, 4), "31.9Mi");
        assert_eq!(format_with_decimal_prefix(33_423_360.0, 4), "33.4M");
        assert_eq!(format_fio_bandwidth(8_355_840_000.0), "7969MiB/s (8356MB/s)");
        assert_eq!(format_with_binary_prefix(19_700_000_000.0, 4), "18.3Gi");
        assert_eq!(format_with_decimal_prefix(41051.0, 6), "41051");
        assert_eq!(format_with_decimal_prefix(0.0, 4), "0");
    }
}
