//! Lines over two axes.

use super::axis::{Axis, AxisRange};
use super::{EscapedText, Plot, WIDTH, series_css_class, write_figure_caption, write_svg_start_tag};
use std::fmt::{self, Write};

/// Height of the image, and margins of the lines.
const HEIGHT: f64 = 306.0;
const TOP: f64 = 28.0;
const BOTTOM: f64 = 42.0;
const RIGHT: f64 = 24.0;

/// Lines with at most this number of points show each point.
const POINTS: usize = 40;

/// A plot of lines.
#[derive(Debug, Clone)]
pub struct LinePlot {
    title: String,
    x: Axis,
    y: Axis,
    series: Vec<(String, Vec<(f64, f64)>)>,
}

impl LinePlot {
    /// A plot without lines.
    #[must_use]
    pub fn new(title: impl Into<String>, x: Axis, y: Axis) -> LinePlot {
        LinePlot { title: title.into(), x, y, series: Vec::new() }
    }

    /// Adds a line.
    #[must_use]
    pub fn line(mut self, name: impl Into<String>, points: impl IntoIterator<Item = (f64, f64)>) -> LinePlot {
        self.series.push((name.into(), points.into_iter().collect()));
        self
    }

    fn axes(&self, out: &mut String, x: &AxisRange<'_>, y: &AxisRange<'_>, left: f64) -> fmt::Result {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for (value, place) in &y.ticks {
            let at = bottom - place * (bottom - TOP);
            write!(
                out,
                "<line class=\"grid\" x1=\"{left:.1}\" y1=\"{at:.1}\" x2=\"{right:.1}\" y2=\"{at:.1}\"/>"
            )?;
            let (text, x) = (y.text(*value), left - 8.0);
            writeln!(out, "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>", at + 4.0)?;
        }
        let mut free = f64::NEG_INFINITY;
        let mut ticks = x.ticks.clone();
        ticks.sort_by(|a, b| a.1.total_cmp(&b.1));
        for (value, place) in ticks {
            let at = left + place * (right - left);
            let text = x.text(value);
            let half = 3.5 * text.chars().count() as f64;
            write!(
                out,
                "<line class=\"grid\" x1=\"{at:.1}\" y1=\"{bottom}\" x2=\"{at:.1}\" y2=\"{:.1}\"/>",
                bottom + 4.0
            )?;
            if at - half > free {
                free = at + half + 6.0;
                write!(
                    out,
                    "<text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{text}</text>",
                    bottom + 18.0
                )?;
            }
            out.push('\n');
        }
        let middle = (left + right) / 2.0;
        let (across, up) = (EscapedText(self.x.title()), EscapedText(self.y.title()));
        writeln!(
            out,
            "<text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{across}</text>",
            HEIGHT - 6.0
        )?;
        writeln!(out, "<text x=\"0\" y=\"12\">{up}</text>")
    }
}

impl Plot for LinePlot {
    fn draw(&self, out: &mut String) -> fmt::Result {
        let points = || self.series.iter().flat_map(|(_, points)| points);
        let x = self.x.covering(points().map(|p| p.0), false);
        let y = self.y.covering(points().map(|p| p.1), self.y.is_linear());
        let left = y.text_width() + 14.0;
        let names: Vec<&str> = self.series.iter().map(|(name, _)| name.as_str()).collect();
        write_figure_caption(out, "lines", &self.title, &names, None)?;
        write_svg_start_tag(out, &self.title, HEIGHT)?;
        self.axes(out, &x, &y, left)?;
        let (across, up) = (WIDTH - RIGHT - left, HEIGHT - BOTTOM - TOP);
        for (i, (name, points)) in self.series.iter().enumerate() {
            // Values without a position on the axes are left out, and the line continues after
            // them.
            let places: Vec<_> = points
                .iter()
                .filter_map(|p| Some((left + x.place(p.0)? * across, TOP + (1.0 - y.place(p.1)?) * up, p)))
                .collect();
            write!(out, "<g class=\"{}\"><polyline class=\"line\" points=\"", series_css_class(i))?;
            for (x, y, _) in &places {
                write!(out, "{x:.1},{y:.1} ")?;
            }
            write!(out, "\"><title>{}</title></polyline>", EscapedText(name))?;
            if places.len() <= POINTS {
                for (at, height, (px, py)) in &places {
                    write!(out, "<circle class=\"point\" cx=\"{at:.1}\" cy=\"{height:.1}\" r=\"4\"><title>")?;
                    write!(out, "{}: {}, {}</title></circle>", EscapedText(name), x.text(*px), y.text(*py))?;
                }
            }
            writeln!(out, "</g>")?;
        }
        writeln!(out, "</svg></figure>")
    }
}
