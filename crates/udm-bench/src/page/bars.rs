//! Horizontal bars in groups, each with its value and an optional mark of a reference. On a
//! logarithmic axis they are points.

use super::axis::Axis;
use super::{EscapedText, Plot, WIDTH, series_css_class, write_figure_caption, write_svg_start_tag};
use std::fmt::{self, Write};

/// Height of a bar, and gaps between bars and between groups.
const BAR: f64 = 16.0;
const GAP: f64 = 2.0;
const GROUP_GAP: f64 = 12.0;
/// Space below the bars, for the axis.
const BOTTOM: f64 = 44.0;
/// Space to the right of the longest bar, for its value.
const RIGHT: f64 = 70.0;
/// Maximum width of the names of groups.
const NAMES_MAX: f64 = 240.0;

/// One bar.
#[derive(Debug, Clone, Copy)]
pub struct Bar {
    value: f64,
    reference: Option<f64>,
}

impl Bar {
    /// Creates a bar. If the value is NaN, no bar is drawn and its place stays empty.
    #[must_use]
    pub fn new(value: f64) -> Bar {
        Bar { value, reference: None }
    }

    /// Adds a mark at `reference`.
    #[must_use]
    pub fn beside(self, reference: f64) -> Bar {
        Bar { reference: Some(reference), ..self }
    }
}

/// A plot of bars.
#[derive(Debug, Clone)]
pub struct BarPlot {
    title: String,
    axis: Axis,
    series: Vec<String>,
    reference: String,
    groups: Vec<(String, Vec<Bar>)>,
}

impl BarPlot {
    /// A plot without bars. Each group has one bar per name in `series`.
    #[must_use]
    pub fn new<S: Into<String>>(
        title: impl Into<String>,
        axis: Axis,
        series: impl IntoIterator<Item = S>,
    ) -> BarPlot {
        let series = series.into_iter().map(Into::into).collect();
        BarPlot { title: title.into(), axis, series, reference: "reference".into(), groups: Vec::new() }
    }

    /// Names the marks in the legend.
    #[must_use]
    pub fn reference(self, name: impl Into<String>) -> BarPlot {
        BarPlot { reference: name.into(), ..self }
    }

    /// Adds a group.
    #[must_use]
    pub fn group(mut self, name: impl Into<String>, bars: impl IntoIterator<Item = Bar>) -> BarPlot {
        self.groups.push((name.into(), bars.into_iter().collect()));
        self
    }
}

impl Plot for BarPlot {
    fn draw(&self, out: &mut String) -> fmt::Result {
        let bars = || self.groups.iter().flat_map(|(_, bars)| bars);
        let axis = self.axis.covering(bars().flat_map(|b| [Some(b.value), b.reference]).flatten(), true);
        let marked = bars().any(|b| b.reference.is_some());
        let names: Vec<&str> = self.series.iter().map(String::as_str).collect();
        write_figure_caption(out, "bars", &self.title, &names, marked.then_some(self.reference.as_str()))?;
        let longest = self.groups.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        let left = (7.2 * longest as f64 + 12.0).min(NAMES_MAX);
        let across = WIDTH - left - RIGHT;
        let height = |bars: &[Bar]| bars.len() as f64 * (BAR + GAP) + GROUP_GAP;
        let bottom: f64 = self.groups.iter().map(|(_, bars)| height(bars)).sum();
        write_svg_start_tag(out, &self.title, bottom + BOTTOM)?;
        for (value, place) in &axis.ticks {
            let at = left + place * across;
            write!(
                out,
                "<line class=\"grid\" x1=\"{at:.1}\" y1=\"0\" x2=\"{at:.1}\" y2=\"{:.1}\"/>",
                bottom + 4.0
            )?;
            let text = axis.text(*value);
            writeln!(
                out,
                "<text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{text}</text>",
                bottom + 18.0
            )?;
        }
        let (middle, title) = (left + across / 2.0, EscapedText(self.axis.title()));
        let under = bottom + BOTTOM - 6.0;
        writeln!(out, "<text x=\"{middle:.1}\" y=\"{under:.1}\" text-anchor=\"middle\">{title}</text>")?;
        let begin = axis.place(0.0).unwrap_or(0.0);
        let mut top = GROUP_GAP / 2.0;
        for (name, bars) in &self.groups {
            let centre = top + (height(bars) - GROUP_GAP) / 2.0 + 3.0;
            let (at, name) = (left - 10.0, EscapedText(name));
            writeln!(
                out,
                "<text class=\"name\" x=\"{at:.1}\" y=\"{centre:.1}\" text-anchor=\"end\">{name}</text>"
            )?;
            for (i, bar) in bars.iter().enumerate() {
                let y = top + i as f64 * (BAR + GAP);
                let end = axis.place(bar.value);
                if let Some(end) = end {
                    let (from, to) = (begin.min(end), begin.max(end));
                    let (x, width) = (left + from * across, ((to - from) * across).max(1.0));
                    let series = self.series.get(i).map_or("", String::as_str);
                    let text = axis.text(bar.value);
                    // On such an axis the length of a bar would be misread as its share.
                    let shape = if self.axis.has_no_zero() { "circle" } else { "rect" };
                    write!(out, "<{shape} class=\"bar {}\" ", series_css_class(i))?;
                    if self.axis.has_no_zero() {
                        let (x, y) = (left + end * across, y + BAR / 2.0);
                        write!(out, "cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{:.1}\">", BAR / 2.0 - 2.0)?;
                    } else {
                        write!(out, "x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" ")?;
                        write!(out, "height=\"{BAR}\" rx=\"2\">")?;
                    }
                    write!(out, "<title>{name} {}: {text}</title></{shape}>", EscapedText(series))?;
                }
                let reference = bar.reference.and_then(|r| Some((r, axis.place(r)?)));
                if let Some((value, place)) = reference {
                    let x = left + place * across;
                    write!(out, "<line class=\"mark\" x1=\"{x:.1}\" y1=\"{:.1}\" x2=\"{x:.1}\" ", y - 1.0)?;
                    let title = format!("{}: {}", self.reference, axis.text(value));
                    write!(out, "y2=\"{:.1}\"><title>{}</title></line>", y + BAR + 1.0, EscapedText(&title))?;
                }
                if let Some(end) = end {
                    // The text is to the right of the bar, or of a mark at this position.
                    let (end, text) = (end.max(begin), axis.text(bar.value));
                    let width = (7.0 * text.chars().count() as f64 + 10.0) / across;
                    let clear = reference
                        .map_or(end, |(_, at)| if at > end - 0.01 && at < end + width { at } else { end });
                    let radius = if self.axis.has_no_zero() { BAR / 2.0 } else { 0.0 };
                    let x = left + clear * across + radius + 6.0;
                    write!(
                        out,
                        "<text class=\"value\" x=\"{x:.1}\" y=\"{:.1}\">{text}</text>",
                        y + BAR - 4.0
                    )?;
                }
                out.push('\n');
            }
            top += height(bars);
        }
        writeln!(out, "</svg></figure>")
    }
}
