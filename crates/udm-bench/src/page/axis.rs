//! Axes: positions of values, and ticks.

/// The unit of values, which determines their text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AxisUnit {
    /// A number: `12`, `340k`.
    Number,
    /// Bytes, in powers of 1024: `4 MiB`.
    Bytes,
    /// Nanoseconds, as `3 µs`.
    Nanos,
    /// Seconds.
    Seconds,
    /// Percent.
    Percent,
    /// A ratio: `0.97×`.
    Ratio,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AxisScale {
    Linear,
    /// A logarithmic scale, with ticks at powers of this base.
    Log(u8),
    /// Percentages by their distance from 100: 90, 99, 99.9 ... are equally far apart.
    Nines,
}

/// An axis: title, unit and scale.
#[derive(Debug, Clone)]
pub struct Axis {
    title: String,
    unit: AxisUnit,
    scale: AxisScale,
}

/// An axis with a range. `low` and `high` are scaled.
pub(super) struct AxisRange<'a> {
    axis: &'a Axis,
    low: f64,
    high: f64,
    /// Values of the ticks, and their positions from 0 to 1.
    pub ticks: Vec<(f64, f64)>,
}

impl Axis {
    /// A linear axis. It begins at 0 unless a value is lower.
    #[must_use]
    pub fn new(title: impl Into<String>, unit: AxisUnit) -> Axis {
        Axis { title: title.into(), unit, scale: AxisScale::Linear }
    }

    /// A logarithmic axis. Values up to 0 have no position on it and are left out.
    #[must_use]
    pub fn log(self) -> Axis {
        Axis { scale: AxisScale::Log(10), ..self }
    }

    /// A logarithmic axis with ticks at powers of two.
    #[must_use]
    pub fn log2(self) -> Axis {
        Axis { scale: AxisScale::Log(2), ..self }
    }

    /// An axis of percentiles, on which 90, 99 and 99.9 are equally far apart. 100 has no position
    /// on it.
    #[must_use]
    pub fn nines(self) -> Axis {
        Axis { scale: AxisScale::Nines, ..self }
    }

    pub(super) fn is_linear(&self) -> bool {
        self.scale == AxisScale::Linear
    }

    /// The title, as printed next to the axis.
    pub(super) fn title(&self) -> &str {
        &self.title
    }

    /// Whether the axis has no zero. On such an axis only the end of a bar has a meaning, not its
    /// length.
    pub(super) fn has_no_zero(&self) -> bool {
        self.scale != AxisScale::Linear
    }

    /// A value as text.
    #[must_use]
    pub fn text(&self, value: f64) -> String {
        match self.unit {
            AxisUnit::Number => format_axis_value_with_prefix(value, 1000.0, &["", "k", "M", "G", "T"]),
            AxisUnit::Bytes => {
                format_axis_value_with_prefix(value, 1024.0, &[" B", " KiB", " MiB", " GiB", " TiB"])
            }
            AxisUnit::Nanos => format_axis_value_with_prefix(value, 1000.0, &[" ns", " µs", " ms", " s"]),
            AxisUnit::Seconds => format!("{} s", format_three_digits(value)),
            AxisUnit::Percent if self.scale == AxisScale::Nines => {
                format!("{}%", format_all_significant_digits(value))
            }
            AxisUnit::Percent => format!("{}%", format_three_digits(value)),
            AxisUnit::Ratio => format!("{}×", format_three_digits(value)),
        }
    }

    /// The scaled value; `None` if it has no position.
    fn scaled(&self, value: f64) -> Option<f64> {
        let place = match self.scale {
            AxisScale::Linear => value,
            AxisScale::Log(_) => value.log10(),
            AxisScale::Nines => -(1.0 - value / 100.0).log10(),
        };
        place.is_finite().then_some(place)
    }

    /// The axis with a range for these values, and with room above.
    pub(super) fn covering(&self, values: impl Iterator<Item = f64>, to_zero: bool) -> AxisRange<'_> {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for place in values.filter_map(|v| self.scaled(v)) {
            (low, high) = (low.min(place), high.max(place));
        }
        if low > high {
            (low, high) = (0.0, 1.0);
        }
        match self.scale {
            AxisScale::Linear if to_zero => (low, high) = (low.min(0.0), high.max(0.0)),
            // A bar must begin at some value.
            AxisScale::Log(_) if to_zero => low = (low - 0.3).floor(),
            _ => {}
        }
        if high - low < 1e-9 {
            high = low + if self.scale == AxisScale::Linear { low.abs().max(1.0) } else { 1.0 };
        }
        let (mut ticks, end) = self.ticks(low, high);
        // Lines end at their last values.
        high = if to_zero || self.scale != AxisScale::Linear { high.max(end) } else { high };
        let range = AxisRange { axis: self, low, high, ticks: Vec::new() };
        ticks.retain(|t| range.place(*t).is_some());
        let ticks = ticks.into_iter().filter_map(|t| Some((t, range.place(t)?))).collect();
        AxisRange { ticks, ..range }
    }

    /// Ticks from about `low` to about `high`, and the scaled end of the axis.
    fn ticks(&self, low: f64, high: f64) -> (Vec<f64>, f64) {
        match self.scale {
            AxisScale::Linear => {
                let step = round_up_to_tick_step((high - low) / 6.0, self.unit == AxisUnit::Bytes);
                let (first, last) = ((low / step).floor() as i64, (high / step).ceil() as i64);
                ((first..=last).map(|i| i as f64 * step).collect(), last as f64 * step)
            }
            AxisScale::Nines => {
                let nines = (0..=(high + 1e-9).floor() as i32).map(|n| 100.0 - 10f64.powi(2 - n));
                let mut ticks: Vec<f64> = nines.collect();
                ticks.push(50.0);
                (ticks, high)
            }
            AxisScale::Log(2) => {
                let log2 = 2f64.log10();
                let (first, last) = ((low / log2 - 0.01).ceil() as i32, (high / log2 + 0.01).floor() as i32);
                let every = ((last - first) / 10 + 1) as usize;
                ((first..=last).step_by(every).map(|n| 2f64.powi(n)).collect(), high)
            }
            AxisScale::Log(_) => {
                let (first, last) = (low.floor() as i32, (high - 1e-9).ceil() as i32);
                let within: &[f64] = if last - first <= 2 { &[1.0, 2.0, 5.0] } else { &[1.0] };
                let every = ((last - first) / 8 + 1) as usize;
                let powers = (first..=last).step_by(every).map(|n| 10f64.powi(n));
                let ticks: Vec<f64> = powers.flat_map(|p| within.iter().map(move |w| w * p)).collect();
                let reach = ticks.iter().map(|t| t.log10()).find(|t| *t >= high - 1e-9).unwrap_or(high);
                (ticks, reach)
            }
        }
    }
}

impl AxisRange<'_> {
    /// The position of a value from 0 to 1; `None` if it has none.
    pub fn place(&self, value: f64) -> Option<f64> {
        let place = (self.axis.scaled(value)? - self.low) / (self.high - self.low);
        (-1e-9..=1.0 + 1e-9).contains(&place).then_some(place)
    }

    /// A value as text.
    pub fn text(&self, value: f64) -> String {
        self.axis.text(value)
    }

    /// The approximate width of the widest tick text in pixels.
    pub fn text_width(&self) -> f64 {
        let widest = self.ticks.iter().map(|(t, _)| self.text(*t).chars().count()).max();
        7.0 * widest.unwrap_or(0) as f64
    }
}

/// The next step of 1, 2, 5, 10 ... (for bytes: 1, 2, 4 ...) that is at least `at_least`.
fn round_up_to_tick_step(at_least: f64, binary: bool) -> f64 {
    if binary {
        return 2f64.powi(at_least.max(1.0).log2().ceil() as i32);
    }
    let power = 10f64.powf(at_least.log10().floor());
    [1.0, 2.0, 5.0].map(|n| n * power).into_iter().find(|n| *n >= at_least * 0.999).unwrap_or(10.0 * power)
}

/// A number with the largest prefix that fits.
fn format_axis_value_with_prefix(value: f64, thousand: f64, prefixes: &[&str]) -> String {
    let mut unit = 0;
    let mut value = value;
    while value.abs() >= thousand * 0.9995 && unit + 1 < prefixes.len() {
        value /= thousand;
        unit += 1;
    }
    format!("{}{}", format_three_digits(value), prefixes[unit])
}

/// A number with three digits.
fn format_three_digits(value: f64) -> String {
    let places = match value.abs() {
        v if v >= 99.95 => 0,
        v if v >= 9.995 => 1,
        v if v >= 0.9995 || v == 0.0 => 2,
        v => (1.0 - v.log10()).floor().clamp(2.0, 9.0) as usize + 1,
    };
    trim_trailing_zeros(format!("{value:.places$}"))
}

/// A number with all significant digits.
fn format_all_significant_digits(value: f64) -> String {
    trim_trailing_zeros(format!("{value:.6}"))
}

fn trim_trailing_zeros(text: String) -> String {
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}
