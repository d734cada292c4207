//! Man pages that describe no verb, converted from docs/ to roff.
//!
//! Contract: a man page has the whole text of its page in docs/. The converter knows only the
//! Markdown that these pages use: headings, paragraphs, lists, tables, code blocks, and code, bold
//! and links inside a line.

use clap_mangen::roff::{Inline, Roff, bold, roman};

/// A man page.
pub struct ManPageSource {
    name: &'static str,
    section: &'static str,
    about: &'static str,
    text: &'static str,
    see: &'static str,
}

/// All pages.
pub const PAGES: [ManPageSource; 2] = [
    ManPageSource {
        name: "udm.toml",
        section: "5",
        about: "configuration of udm serve and its devices",
        text: include_str!("../../../../docs/config.md"),
        see: "udm-serve(1), udm-reconfigure(1), systemd.service(5)",
    },
    ManPageSource {
        name: "udm-dmsetup",
        section: "1",
        about: "udm called as dmsetup",
        text: include_str!("../../../../docs/dmsetup.md"),
        see: "udm(1), udm-serve(1), dmsetup(8)",
    },
];

impl ManPageSource {
    /// The file name of the page.
    pub fn file(&self) -> String {
        format!("{}.{}", self.name, self.section)
    }

    /// The roff text of the page.
    pub fn roff(&self) -> String {
        let mut roff = Roff::new();
        let version = concat!("udm ", env!("CARGO_PKG_VERSION"));
        roff.control("TH", [self.name, self.section, "", version]);
        roff.control("SH", ["NAME"]).text([roman(format!("{} - {}", self.name, self.about))]);
        roff.control("SH", ["DESCRIPTION"]);
        let mut lines = self.text.lines().skip(1).peekable();
        while let Some(line) = lines.next() {
            if line.starts_with("```") {
                roff.control("PP", []).control("nf", []);
                for code in lines.by_ref().take_while(|line| !line.starts_with("```")) {
                    roff.text([roman(code)]);
                }
                roff.control("fi", []);
            } else if let Some(heading) = line.strip_prefix("## ") {
                roff.control("SH", [heading.to_uppercase().as_str()]);
            } else if let Some(point) = line.strip_prefix("* ") {
                roff.control("IP", ["*", "2"]).text(markdown_to_roff_inlines(point));
            } else if line.starts_with('|') {
                // The row above a separator is the heading, and is skipped.
                if lines.next_if(|next| next.starts_with("|---")).is_none() {
                    append_roff_table_row(line, &mut roff);
                }
            } else if line.is_empty() {
                roff.control("PP", []);
            } else {
                roff.text(markdown_to_roff_inlines(line.trim_start()));
            }
        }
        roff.control("SH", ["SEE ALSO"]).text([roman(self.see)]);
        roff.to_roff()
    }
}

/// A row of a table: the first cell as a tag, the others indented below it.
fn append_roff_table_row(line: &str, roff: &mut Roff) {
    let line = line.trim_matches('|').replace("\\|", "\u{1}");
    let mut cells = line.split('|').map(|cell| cell.trim().replace('\u{1}', "|"));
    roff.control("TP", []).text(markdown_to_roff_inlines(&cells.next().unwrap_or_default()));
    cells.for_each(|cell| {
        roff.text(markdown_to_roff_inlines(&cell));
    });
}

/// Code and bold text become bold; a link becomes its text.
fn markdown_to_roff_inlines(text: &str) -> Vec<Inline> {
    let mut out = Vec::new();
    for (nth, part) in text.split('`').enumerate() {
        if nth % 2 == 1 {
            out.push(bold(part));
            continue;
        }
        for (nth, part) in part.split("**").enumerate() {
            let part = strip_markdown_links(part);
            out.push(if nth % 2 == 1 { bold(part) } else { roman(part) });
        }
    }
    out
}

fn strip_markdown_links(text: &str) -> String {
    let Some((before, rest)) = text.split_once('[') else { return text.to_owned() };
    match rest.split_once("](").and_then(|(name, rest)| Some((name, rest.split_once(')')?.1))) {
        Some((name, behind)) => format!("{before}{name}{}", strip_markdown_links(behind)),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_is_said_is_on_the_page() {
        let page = ManPageSource {
            name: "n",
            section: "5",
            about: "about",
            text: "# Left out\nA `b` **c** [d](e) f,\ng.\n\n## Part\n* one\n  two\n\n| h | i |\n|---|---|\n| `j` | K\\|L |\n\n```x\n.m  n\n```\n",
            see: "o(1)",
        };
        let text = page.roff();
        let body = text.split_once("\n.SH NAME").unwrap().1;
        let expected = "\nn \\- about\n.SH DESCRIPTION\nA \\fBb\\fR \\fBc\\fR d f,\ng.\n.PP\n.SH PART\n.IP * 2\none\ntwo\n\
                      .PP\n.TP\n\\fBj\\fR\nK|L\n.PP\n.PP\n.nf\n\\&.m  n\n.fi\n.SH \"SEE ALSO\"\no(1)\n";
        assert_eq!(body, expected);
    }
}
