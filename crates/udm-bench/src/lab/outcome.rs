//! The outcome of an experiment as text, as JSON, and as a section of a page.

use super::{MachineInfo, PublishedExperiment};
use crate::page::{BarPlot, HtmlPage, LinePlot};
use serde::Serialize;
use std::fmt::Write;

/// Two ratios are alike if neither is more than this factor times the other.
const ALIKE: f64 = 1.1;

/// The outcome of an experiment.
#[derive(Debug, Serialize)]
pub struct ExperimentOutcome {
    /// The name of the experiment.
    pub name: &'static str,
    /// The question of the experiment.
    pub question: &'static str,
    /// The publication on which it is based.
    pub source: &'static str,
    /// The findings, each with the published result.
    pub findings: Vec<RatioVsPublished>,
    /// The measured values.
    pub tables: Vec<ResultTable>,
    /// Explanations of the findings.
    pub notes: Vec<String>,
    #[serde(skip)]
    plots: Vec<BarOrLinePlot>,
}

/// A plot of the page.
#[derive(Debug)]
enum BarOrLinePlot {
    Bars(BarPlot),
    Lines(LinePlot),
}

/// A measured ratio, and the published one.
#[derive(Debug, Clone, Serialize)]
pub struct RatioVsPublished {
    /// A description of the ratio.
    pub what: String,
    /// The ratio of this run.
    pub here: f64,
    /// The published ratio; `None` if the publication does not report it.
    pub original: Option<f64>,
    /// The ratio that udm aims for.
    pub aim: Option<f64>,
    /// If set, a larger ratio is better.
    pub more: bool,
    /// The verdict on the ratio.
    pub verdict: RatioVsPublishedVerdict,
}

/// The verdict on a ratio.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RatioVsPublishedVerdict {
    /// The aim is reached.
    Met,
    /// The aim is not reached.
    Missed,
    /// There is no aim, and the ratio is better than the published one.
    Better,
    /// There is no aim, and the ratio is close to the published one.
    Alike,
    /// There is no aim, and the ratio is worse than the published one.
    Worse,
    /// There is no aim and no published ratio.
    New,
}

impl RatioVsPublishedVerdict {
    fn of(here: f64, original: Option<f64>, aim: Option<f64>, more: bool) -> RatioVsPublishedVerdict {
        let reaches = |bar: f64| if more { here >= bar } else { here <= bar };
        match (aim, original) {
            (Some(aim), _) if reaches(aim) => RatioVsPublishedVerdict::Met,
            (Some(_), _) => RatioVsPublishedVerdict::Missed,
            (None, None) => RatioVsPublishedVerdict::New,
            (None, Some(original)) if here <= original * ALIKE && original <= here * ALIKE => {
                RatioVsPublishedVerdict::Alike
            }
            (None, Some(original)) if reaches(original) => RatioVsPublishedVerdict::Better,
            (None, Some(_)) => RatioVsPublishedVerdict::Worse,
        }
    }

    fn word(self) -> &'static str {
        match self {
            RatioVsPublishedVerdict::Met => "met",
            RatioVsPublishedVerdict::Missed => "missed",
            RatioVsPublishedVerdict::Better => "better",
            RatioVsPublishedVerdict::Alike => "alike",
            RatioVsPublishedVerdict::Worse => "worse",
            RatioVsPublishedVerdict::New => "",
        }
    }
}

impl RatioVsPublished {
    /// A ratio for which larger is better.
    pub(super) fn more(what: impl Into<String>, here: f64) -> RatioVsPublished {
        RatioVsPublished::new(what.into(), here, true)
    }

    /// A ratio for which smaller is better.
    pub(super) fn less(what: impl Into<String>, here: f64) -> RatioVsPublished {
        RatioVsPublished::new(what.into(), here, false)
    }

    fn new(what: String, here: f64, more: bool) -> RatioVsPublished {
        RatioVsPublished {
            what,
            here,
            original: None,
            aim: None,
            more,
            verdict: RatioVsPublishedVerdict::New,
        }
    }

    /// Adds the published ratio.
    pub(super) fn beside(self, original: f64) -> RatioVsPublished {
        RatioVsPublished { original: Some(original), ..self }.judged()
    }

    /// Adds the published ratio without a verdict, because the measured ratio is that of a model.
    pub(super) fn of_model(self, original: f64) -> RatioVsPublished {
        RatioVsPublished { original: Some(original), ..self }
    }

    /// Adds the aim.
    pub(super) fn aim(self, aim: f64) -> RatioVsPublished {
        RatioVsPublished { aim: Some(aim), ..self }.judged()
    }

    fn judged(self) -> RatioVsPublished {
        RatioVsPublished {
            verdict: RatioVsPublishedVerdict::of(self.here, self.original, self.aim, self.more),
            ..self
        }
    }

    fn cells(&self) -> [String; 5] {
        let number = |n: Option<f64>| n.map_or_else(String::new, format_ratio);
        let mut here = format_ratio(self.here);
        if self.verdict == RatioVsPublishedVerdict::Missed && here == number(self.aim) {
            // With fewer digits the ratio would look as if it reached the aim.
            here = format!("{:.4}", self.here);
        }
        let aim = |aim| format!("{} {}", if self.more { "at least" } else { "at most" }, format_ratio(aim));
        let aim = self.aim.map_or_else(String::new, aim);
        [self.what.clone(), here, number(self.original), aim, self.verdict.word().to_owned()]
    }
}

/// A ratio with about three digits.
pub(super) fn format_ratio(n: f64) -> String {
    match n.abs() {
        n100 if n100 >= 100.0 => format!("{n:.0}"),
        n10 if n10 >= 10.0 => format!("{n:.1}"),
        _ => format!("{n:.2}"),
    }
}

/// A table of measured values.
#[derive(Debug, Clone, Serialize)]
pub struct ResultTable {
    /// The title.
    pub title: String,
    /// The heads of its columns. The first column has the names of the rows.
    pub heads: Vec<String>,
    /// The rows: name and values.
    pub rows: Vec<(String, Vec<f64>)>,
}

impl ResultTable {
    /// Creates a table without rows.
    pub(super) fn new<S: Into<String>>(
        title: impl Into<String>,
        heads: impl IntoIterator<Item = S>,
    ) -> ResultTable {
        ResultTable {
            title: title.into(),
            heads: heads.into_iter().map(Into::into).collect(),
            rows: Vec::new(),
        }
    }

    /// Adds a row.
    pub(super) fn row(&mut self, name: impl Into<String>, cells: impl IntoIterator<Item = f64>) {
        self.rows.push((name.into(), cells.into_iter().collect()));
    }

    fn cells(&self) -> impl Iterator<Item = Vec<String>> + '_ {
        let number = |n: &f64| if n.is_nan() { String::new() } else { format_ratio(*n) };
        self.rows
            .iter()
            .map(move |(name, cells)| std::iter::once(name.clone()).chain(cells.iter().map(number)).collect())
    }
}

const FINDING_HEADS: [&str; 5] = ["ratio", "here", "original", "aim", "verdict"];

impl ExperimentOutcome {
    pub(super) fn new(experiment: &PublishedExperiment) -> ExperimentOutcome {
        let PublishedExperiment { name, question, source, .. } = *experiment;
        let (findings, tables, notes) = (Vec::new(), Vec::new(), Vec::new());
        ExperimentOutcome { name, question, source, findings, tables, notes, plots: Vec::new() }
    }

    pub(super) fn found(&mut self, finding: RatioVsPublished) {
        self.findings.push(finding);
    }

    pub(super) fn table(&mut self, table: ResultTable) {
        self.tables.push(table);
    }

    pub(super) fn note(&mut self, text: impl Into<String>) {
        self.notes.push(text.into());
    }

    pub(super) fn bars(&mut self, plot: BarPlot) {
        self.plots.push(BarOrLinePlot::Bars(plot));
    }

    pub(super) fn lines(&mut self, plot: LinePlot) {
        self.plots.push(BarOrLinePlot::Lines(plot));
    }
}

/// The outcomes of a run as text for a terminal.
#[must_use]
pub fn render_experiments_text(machine: &MachineInfo, outcomes: &[ExperimentOutcome]) -> String {
    let mut out = format!("{machine}\n");
    for outcome in outcomes {
        let ExperimentOutcome { name, question, source, .. } = outcome;
        let _ = writeln!(out, "\n{name}: {question}\n({source})\n");
        for table in &outcome.tables {
            let heads = std::iter::once(&table.title).chain(table.heads.iter().skip(1)).cloned().collect();
            write_aligned_text_table(&mut out, heads, table.cells());
        }
        let heads = FINDING_HEADS.map(str::to_owned).to_vec();
        write_aligned_text_table(
            &mut out,
            heads,
            outcome.findings.iter().map(|finding| finding.cells().to_vec()),
        );
        for note in &outcome.notes {
            let _ = writeln!(out, "{note}");
        }
    }
    out
}

/// Writes a table. The first column is aligned to the left, the others to the right.
fn write_aligned_text_table(out: &mut String, heads: Vec<String>, rows: impl Iterator<Item = Vec<String>>) {
    let rows: Vec<Vec<String>> = std::iter::once(heads).chain(rows).collect();
    let width = |c: usize| rows.iter().filter_map(|row| row.get(c)).map(|cell| cell.chars().count()).max();
    for row in &rows {
        let mut line = String::new();
        for (c, cell) in row.iter().enumerate() {
            let width = width(c).unwrap_or(0);
            let _ = if c == 0 { write!(line, "{cell:<width$}") } else { write!(line, "  {cell:>width$}") };
        }
        let _ = writeln!(out, "{}", line.trim_end());
    }
    out.push('\n');
}

/// The outcomes of a run as an HTML page.
#[must_use]
pub fn render_experiments_html(machine: &MachineInfo, outcomes: &[ExperimentOutcome]) -> String {
    let mut page = HtmlPage::new("udm lab");
    page.text(
        "The experiments of the publications on which udm is based, repeated. Compared devices were measured \
         in rotation in one run; figures are medians.",
    );
    page.text(&machine.to_string());
    for outcome in outcomes {
        let section = page.section(outcome.name);
        section.text(&format!("{} ({})", outcome.question, outcome.source));
        section.table(&FINDING_HEADS, outcome.findings.iter().map(RatioVsPublished::cells));
        for plot in &outcome.plots {
            match plot {
                BarOrLinePlot::Bars(bars) => section.plot(bars),
                BarOrLinePlot::Lines(lines) => section.plot(lines),
            }
        }
        for note in &outcome.notes {
            section.text(note);
        }
        for table in &outcome.tables {
            let heads: Vec<&str> =
                std::iter::once(&table.title).chain(table.heads.iter().skip(1)).map(String::as_str).collect();
            section.table(&heads, table.cells());
        }
    }
    page.html()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts() {
        let of = |finding: RatioVsPublished| finding.verdict;
        assert_eq!(of(RatioVsPublished::more("a", 8.0).beside(1.7).aim(8.0)), RatioVsPublishedVerdict::Met);
        assert_eq!(
            of(RatioVsPublished::more("a", 7.9).beside(1.7).aim(8.0)),
            RatioVsPublishedVerdict::Missed
        );
        assert_eq!(of(RatioVsPublished::less("a", 1.2).aim(1.1)), RatioVsPublishedVerdict::Missed);
        assert_eq!(of(RatioVsPublished::less("a", 1.2).beside(1.3)), RatioVsPublishedVerdict::Alike);
        assert_eq!(of(RatioVsPublished::less("a", 1.0).beside(1.3)), RatioVsPublishedVerdict::Better);
        assert_eq!(of(RatioVsPublished::more("a", 1.0).beside(1.3)), RatioVsPublishedVerdict::Worse);
        assert_eq!(of(RatioVsPublished::more("a", 1.0)), RatioVsPublishedVerdict::New);
        assert_eq!(RatioVsPublished::more("a", 0.9668).aim(0.97).cells()[1], "0.9668");
        assert_eq!(RatioVsPublished::more("a", 0.9712).aim(0.97).cells()[1], "0.97");
    }

    #[test]
    fn columns_stand_below_each_other() {
        let mut out = String::new();
        let row = |cells: [&str; 3]| cells.map(str::to_owned).to_vec();
        write_aligned_text_table(
            &mut out,
            row(["ratio", "here", ""]),
            [row(["a", "1.25", "met"])].into_iter(),
        );
        assert_eq!(out, "ratio  here\na      1.25  met\n\n");
    }
}
