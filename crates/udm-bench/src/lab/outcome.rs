//! The outcome of an experiment as text, as JSON, and as a section of a page.

use super::{Experiment, MachineInfo};
use crate::page::{Bars, Lines, Page};
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
    /// The findings, each with the original's result.
    pub findings: Vec<Finding>,
    /// The measured values.
    pub tables: Vec<ResultTable>,
    /// Explanations of the findings.
    pub notes: Vec<String>,
    #[serde(skip)]
    plots: Vec<PlotKind>,
}

/// A plot of the page.
#[derive(Debug)]
enum PlotKind {
    Bars(Bars),
    Lines(Lines),
}

/// A ratio, and the original's.
#[derive(Debug, Clone, Serialize)]
pub struct Finding {
    /// A description of the ratio.
    pub what: String,
    /// The ratio of this run.
    pub here: f64,
    /// The ratio of the original; `None` if the original does not report it.
    pub original: Option<f64>,
    /// The ratio that udm aims for.
    pub aim: Option<f64>,
    /// If set, a larger ratio is better.
    pub more: bool,
    /// The verdict on the ratio.
    pub verdict: FindingVerdict,
}

/// The verdict on a ratio.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FindingVerdict {
    /// The aim is reached.
    Met,
    /// The aim is not reached.
    Missed,
    /// There is no aim, and the ratio is better than the original's.
    Better,
    /// There is no aim, and the ratio is about the original's.
    Alike,
    /// There is no aim, and the ratio is worse than the original's.
    Worse,
    /// There is no aim and no original.
    New,
}

impl FindingVerdict {
    fn of(here: f64, original: Option<f64>, aim: Option<f64>, more: bool) -> FindingVerdict {
        let reaches = |bar: f64| if more { here >= bar } else { here <= bar };
        match (aim, original) {
            (Some(aim), _) if reaches(aim) => FindingVerdict::Met,
            (Some(_), _) => FindingVerdict::Missed,
            (None, None) => FindingVerdict::New,
            (None, Some(original)) if here <= original * ALIKE && original <= here * ALIKE => {
                FindingVerdict::Alike
            }
            (None, Some(original)) if reaches(original) => FindingVerdict::Better,
            (None, Some(_)) => FindingVerdict::Worse,
        }
    }

    fn word(self) -> &'static str {
        match self {
            FindingVerdict::Met => "met",
            FindingVerdict::Missed => "missed",
            FindingVerdict::Better => "better",
            FindingVerdict::Alike => "alike",
            FindingVerdict::Worse => "worse",
            FindingVerdict::New => "",
        }
    }
}

impl Finding {
    /// A ratio for which larger is better.
    pub(super) fn more(what: impl Into<String>, here: f64) -> Finding {
        Finding::new(what.into(), here, true)
    }

    /// A ratio for which smaller is better.
    pub(super) fn less(what: impl Into<String>, here: f64) -> Finding {
        Finding::new(what.into(), here, false)
    }

    fn new(what: String, here: f64, more: bool) -> Finding {
        Finding { what, here, original: None, aim: None, more, verdict: FindingVerdict::New }
    }

    /// Adds the original's ratio.
    pub(super) fn beside(self, original: f64) -> Finding {
        Finding { original: Some(original), ..self }.judged()
    }

    /// Adds the original's ratio without a verdict, because the ratio is that of a model.
    pub(super) fn of_model(self, original: f64) -> Finding {
        Finding { original: Some(original), ..self }
    }

    /// Adds the aim.
    pub(super) fn aim(self, aim: f64) -> Finding {
        Finding { aim: Some(aim), ..self }.judged()
    }

    fn judged(self) -> Finding {
        Finding { verdict: FindingVerdict::of(self.here, self.original, self.aim, self.more), ..self }
    }

    fn cells(&self) -> [String; 5] {
        let number = |n: Option<f64>| n.map_or_else(String::new, ratio);
        let mut here = ratio(self.here);
        if self.verdict == FindingVerdict::Missed && here == number(self.aim) {
            // With fewer digits the ratio would look as if it reached the aim.
            here = format!("{:.4}", self.here);
        }
        let aim = |aim| format!("{} {}", if self.more { "at least" } else { "at most" }, ratio(aim));
        let aim = self.aim.map_or_else(String::new, aim);
        [self.what.clone(), here, number(self.original), aim, self.verdict.word().to_owned()]
    }
}

/// A ratio with about three digits.
pub(super) fn ratio(n: f64) -> String {
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
        let number = |n: &f64| if n.is_nan() { String::new() } else { ratio(*n) };
        self.rows
            .iter()
            .map(move |(name, cells)| std::iter::once(name.clone()).chain(cells.iter().map(number)).collect())
    }
}

const FINDING_HEADS: [&str; 5] = ["ratio", "here", "original", "aim", "verdict"];

impl ExperimentOutcome {
    pub(super) fn new(experiment: &Experiment) -> ExperimentOutcome {
        let Experiment { name, question, source, .. } = *experiment;
        let (findings, tables, notes) = (Vec::new(), Vec::new(), Vec::new());
        ExperimentOutcome { name, question, source, findings, tables, notes, plots: Vec::new() }
    }

    pub(super) fn found(&mut self, finding: Finding) {
        self.findings.push(finding);
    }

    pub(super) fn table(&mut self, table: ResultTable) {
        self.tables.push(table);
    }

    pub(super) fn note(&mut self, text: impl Into<String>) {
        self.notes.push(text.into());
    }

    pub(super) fn bars(&mut self, plot: Bars) {
        self.plots.push(PlotKind::Bars(plot));
    }

    pub(super) fn lines(&mut self, plot: Lines) {
        self.plots.push(PlotKind::Lines(plot));
    }
}

/// The outcomes of a run as text for a terminal.
#[must_use]
pub fn text(machine: &MachineInfo, outcomes: &[ExperimentOutcome]) -> String {
    let mut out = format!("{machine}\n");
    for outcome in outcomes {
        let ExperimentOutcome { name, question, source, .. } = outcome;
        let _ = writeln!(out, "\n{name}: {question}\n({source})\n");
        for table in &outcome.tables {
            let heads = std::iter::once(&table.title).chain(table.heads.iter().skip(1)).cloned().collect();
            columns(&mut out, heads, table.cells());
        }
        let heads = FINDING_HEADS.map(str::to_owned).to_vec();
        columns(&mut out, heads, outcome.findings.iter().map(|finding| finding.cells().to_vec()));
        for note in &outcome.notes {
            let _ = writeln!(out, "{note}");
        }
    }
    out
}

/// Writes a table. The first column is aligned to the left, the others to the right.
fn columns(out: &mut String, heads: Vec<String>, rows: impl Iterator<Item = Vec<String>>) {
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
pub fn page(machine: &MachineInfo, outcomes: &[ExperimentOutcome]) -> String {
    let mut page = Page::new("udm lab");
    page.text(
        "The experiments of the publications on which udm is based, repeated. Compared devices were measured \
         in rotation in one run; figures are medians.",
    );
    page.text(&machine.to_string());
    for outcome in outcomes {
        let section = page.section(outcome.name);
        section.text(&format!("{} ({})", outcome.question, outcome.source));
        section.table(&FINDING_HEADS, outcome.findings.iter().map(Finding::cells));
        for plot in &outcome.plots {
            match plot {
                PlotKind::Bars(bars) => section.plot(bars),
                PlotKind::Lines(lines) => section.plot(lines),
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
        let of = |finding: Finding| finding.verdict;
        assert_eq!(of(Finding::more("a", 8.0).beside(1.7).aim(8.0)), FindingVerdict::Met);
        assert_eq!(of(Finding::more("a", 7.9).beside(1.7).aim(8.0)), FindingVerdict::Missed);
        assert_eq!(of(Finding::less("a", 1.2).aim(1.1)), FindingVerdict::Missed);
        assert_eq!(of(Finding::less("a", 1.2).beside(1.3)), FindingVerdict::Alike);
        assert_eq!(of(Finding::less("a", 1.0).beside(1.3)), FindingVerdict::Better);
        assert_eq!(of(Finding::more("a", 1.0).beside(1.3)), FindingVerdict::Worse);
        assert_eq!(of(Finding::more("a", 1.0)), FindingVerdict::New);
        assert_eq!(Finding::more("a", 0.9668).aim(0.97).cells()[1], "0.9668");
        assert_eq!(Finding::more("a", 0.9712).aim(0.97).cells()[1], "0.97");
    }

    #[test]
    fn columns_stand_below_each_other() {
        let mut out = String::new();
        let row = |cells: [&str; 3]| cells.map(str::to_owned).to_vec();
        columns(&mut out, row(["ratio", "here", ""]), [row(["a", "1.25", "met"])].into_iter());
        assert_eq!(out, "ratio  here\na      1.25  met\n\n");
    }
}
