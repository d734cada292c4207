//! An HTML page: headings, text, tables and plots in one file without external resources. It
//! follows the reader's choice of light or dark. Plots are SVG in the page's colours.
//!
//! The plots are the crate's own code and not `plotters`, which writes fixed colours into each
//! element and guesses the width of text. Here the legend is text that wraps.
//!
//! ```
//! use udm_bench::page::{Axis, AxisUnit, HtmlPage, LinePlot};
//!
//! let mut page = HtmlPage::new("Cost of a layer");
//! page.text("A machine with two CPUs.");
//! let section = page.section("Depth");
//! section.table(&["depth", "ns"], [["1", "19"], ["32", "5"]]);
//! let depth = Axis::new("depth", AxisUnit::Number).log2();
//! let time = Axis::new("time", AxisUnit::Nanos);
//! section.plot(
//!     &LinePlot::new("Time per request", depth, time).line("null", [(1.0, 19.0), (32.0, 5.0)]),
//! );
//! assert!(page.html().starts_with("<!doctype html>"));
//! ```

mod axis;
mod bars;
mod lines;
#[cfg(test)]
mod tests;

pub use axis::{Axis, AxisUnit};
pub use bars::{Bar, BarPlot};
pub use lines::LinePlot;

use std::fmt::{self, Display, Write};

/// Number of colours for the series of one plot.
const COLOURS: usize = 8;

/// Width of a plot in pixels. The browser scales it.
const WIDTH: f64 = 760.0;

/// An HTML page.
pub struct HtmlPage {
    title: String,
    /// The sections. The first one has no heading and holds the text below the title.
    sections: Vec<HtmlPageSection>,
}

/// A section of a page, with a heading.
pub struct HtmlPageSection {
    heading: String,
    body: String,
}

impl HtmlPage {
    /// Creates a page that has only a title.
    #[must_use]
    pub fn new(title: impl Into<String>) -> HtmlPage {
        let head = HtmlPageSection { heading: String::new(), body: String::new() };
        HtmlPage { title: title.into(), sections: vec![head] }
    }

    /// Adds a paragraph below the title.
    pub fn text(&mut self, text: &str) {
        self.sections[0].text(text);
    }

    /// Adds a section at the end.
    pub fn section(&mut self, heading: impl Into<String>) -> &mut HtmlPageSection {
        self.sections.push(HtmlPageSection { heading: heading.into(), body: String::new() });
        self.sections.last_mut().expect("one was pushed")
    }

    /// The whole file.
    #[must_use]
    pub fn html(&self) -> String {
        let title = EscapedText(&self.title);
        let mut out = format!(
            "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width\">\n<title>{title}</title>\n\
             <style>\n{}</style>\n<h1>{title}</h1>\n",
            include_str!("page.css")
        );
        for section in &self.sections {
            if !section.heading.is_empty() {
                append_fmt_to_string(&mut out, format_args!("<h2>{}</h2>\n", EscapedText(&section.heading)));
            }
            out.push_str(&section.body);
        }
        out.push_str("</html>\n");
        out
    }
}

impl HtmlPageSection {
    /// Adds a paragraph.
    pub fn text(&mut self, text: &str) {
        append_fmt_to_string(&mut self.body, format_args!("<p>{}</p>\n", EscapedText(text)));
    }

    /// Adds a table: the heads of its columns, and its rows. The first column is text, the others
    /// are numbers.
    pub fn table<R: IntoIterator<Item: Display>>(
        &mut self,
        heads: &[&str],
        rows: impl IntoIterator<Item = R>,
    ) {
        self.body.push_str("<div class=\"wide\"><table>\n<tr>");
        for head in heads {
            append_fmt_to_string(&mut self.body, format_args!("<th>{}</th>", EscapedText(head)));
        }
        self.body.push_str("</tr>\n");
        for row in rows {
            self.body.push_str("<tr>");
            for cell in row {
                append_fmt_to_string(
                    &mut self.body,
                    format_args!("<td>{}</td>", EscapedText(&cell.to_string())),
                );
            }
            self.body.push_str("</tr>\n");
        }
        self.body.push_str("</table></div>\n");
    }

    /// Adds a plot.
    pub fn plot(&mut self, plot: &impl Plot) {
        plot.draw(&mut self.body).expect("a string takes everything");
    }
}

/// A drawing: [`LinePlot`] or [`BarPlot`].
pub trait Plot {
    /// Writes a `figure`.
    ///
    /// # Errors
    /// If `out` fails.
    fn draw(&self, out: &mut String) -> fmt::Result;
}

/// Appends to a string, which can't fail.
fn append_fmt_to_string(out: &mut String, what: fmt::Arguments<'_>) {
    out.write_fmt(what).expect("a string takes everything");
}

/// Writes the head of a figure: its title, and a legend if there are several series or a mark.
fn write_figure_caption(
    out: &mut String,
    kind: &str,
    title: &str,
    series: &[&str],
    mark: Option<&str>,
) -> fmt::Result {
    writeln!(out, "<figure><figcaption>{}</figcaption>", EscapedText(title))?;
    if series.len() > 1 || mark.is_some() {
        write!(out, "<div class=\"legend {kind}\">")?;
        for (i, name) in series.iter().enumerate().filter(|_| series.len() > 1) {
            write!(out, "<span><i class=\"{}\"></i>{}</span>", series_css_class(i), EscapedText(name))?;
        }
        if let Some(mark) = mark {
            write!(out, "<span><i class=\"mark\"></i>{}</span>", EscapedText(mark))?;
        }
        writeln!(out, "</div>")?;
    }
    Ok(())
}

/// The class of a series: its colour, and a pattern when the colours repeat.
fn series_css_class(series: usize) -> String {
    format!("s{}{}", series % COLOURS, if series >= COLOURS { " dashed" } else { "" })
}

/// Writes the start tag of an image of this height.
fn write_svg_start_tag(out: &mut String, title: &str, height: f64) -> fmt::Result {
    writeln!(out, "<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{}\">", EscapedText(title))
}

/// Text that is escaped for any place in the page.
struct EscapedText<'a>(&'a str);

impl Display for EscapedText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            match c {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                // Characters that neither HTML nor XML may contain.
                c if c.is_control() && c != '\n' && c != '\t' => f.write_char('\u{fffd}')?,
                c => f.write_char(c)?,
            }
        }
        Ok(())
    }
}
