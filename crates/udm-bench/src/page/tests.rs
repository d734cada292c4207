//! Tests of the elements of a page and its plots, and of the escaping of text.

use super::*;
use std::collections::BTreeSet;

/// A page with all kinds of elements.
fn everything() -> HtmlPage {
    let mut page = HtmlPage::new("udm lab: <lockless> & \"more\"");
    page.text("A machine with 2 CPUs, Linux 6.1.\nudm 0.1.0");
    let section = page.section("Lane against lock");
    section.text("Each selector beside the same with one lock per device, at depth 32, as a share of the bare null device.");
    section.table(
        &["case", "IOPS", "of null", "the original's"],
        [["null", "10.2M", "1", "1"], ["service-time", "9.9M", "0.97", "0.46"], ["a<b", "1", "2", "3"]],
    );
    let ratio = Axis::new("share of the bare null device", AxisUnit::Ratio);
    let bars = BarPlot::new("Throughput with 2 cores", ratio, ["udm's lanes", "one lock per device"]);
    section.plot(
        &bars
            .reference("the original's, 192 threads")
            .group("service-time", [Bar::new(0.97), Bar::new(0.12).beside(0.46)])
            .group("queue-length", [Bar::new(0.98), Bar::new(0.11).beside(0.47)])
            .group("historical-service-time", [Bar::new(0.91), Bar::new(0.13).beside(0.145)])
            .group("round-robin", [Bar::new(1.02), Bar::new(f64::NAN).beside(0.69)]),
    );
    let switches = BarPlot::new("Context switches", Axis::new("of raw", AxisUnit::Ratio).log(), ["udm"]);
    section.plot(
        &switches
            .group("1 queue", [Bar::new(1.02).beside(339.0)])
            .group("4 queues", [Bar::new(1.1).beside(1175.0)]),
    );
    let section = page.section("Latency");
    let (x, y) =
        (Axis::new("percentile", AxisUnit::Percent).nines(), Axis::new("latency", AxisUnit::Nanos).log());
    let at = [0.0, 1.0, 5.0, 50.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95, 99.99];
    let curve = |by: f64| at.map(|p| (p, by * (300.0 + 10_000.0 / (100.3 - p))));
    section.plot(
        &LinePlot::new("Latency by percentile", x, y).line("read", curve(1.0)).line("write", curve(9.0)),
    );
    let mut lines = LinePlot::new(
        "Throughput",
        Axis::new("time", AxisUnit::Seconds),
        Axis::new("bytes per second", AxisUnit::Bytes),
    );
    for n in 1..=3 {
        let wave = move |t: f64| 4e9 / f64::from(n) + 3e8 * (t / f64::from(n)).sin();
        lines = lines
            .line(format!("path {n}"), (0..300).map(|t| (f64::from(t) / 10.0, wave(f64::from(t) / 10.0))));
    }
    section.plot(&lines);
    let depth = Axis::new("paths", AxisUnit::Number).log2();
    let mut lines = LinePlot::new("Time per request, ten lines", depth, Axis::new("time", AxisUnit::Nanos));
    for n in 1..=10 {
        lines = lines.line(
            format!("selector {n}"),
            [1.0, 4.0, 16.0, 64.0f64].map(|p| (p, p.sqrt() * 4.0 + f64::from(n))),
        );
    }
    section.plot(&lines);
    page
}

/// On a logarithmic axis, the length of a bar for 1.02 next to a mark at 339 would mislead.
#[test]
fn a_logarithmic_axis_has_points_and_no_bars() {
    let html = everything().html();
    let figure = |title: &str| html.split("<figure").find(|f| f.contains(title)).unwrap().to_owned();
    let (log, linear) = (figure("Context switches"), figure("Throughput with 2 cores"));
    let shapes =
        |figure: &str| ["<circle class=\"bar", "<rect class=\"bar"].map(|s| figure.matches(s).count());
    assert_eq!((shapes(&log), shapes(&linear)), ([2, 0], [0, 7]));
}

#[test]
fn no_text_is_markup() {
    let html = everything().html();
    assert!(html.contains("<title>udm lab: &lt;lockless&gt; &amp; &quot;more&quot;</title>"));
    assert!(html.contains("<td>a&lt;b</td>") && !html.contains("a<b"));
    let hostile = "</title><script>alert('1')</script>\u{1}\"&";
    let mut page = HtmlPage::new(hostile);
    page.text(hostile);
    let section = page.section(hostile);
    section.table(&[hostile], [[hostile]]);
    let axis = || Axis::new(hostile, AxisUnit::Number);
    section.plot(&LinePlot::new(hostile, axis(), axis()).line(hostile, [(1.0, 1.0)]).line(hostile, []));
    let bars = BarPlot::new(hostile, axis(), [hostile, hostile]).reference(hostile);
    section.plot(&bars.group(hostile, [Bar::new(1.0).beside(2.0)]));
    let html = page.html();
    assert!(!html.contains("<script") && !html.contains('\u{1}') && !html.contains("\"&\n"));
    assert!(html.matches("&lt;script&gt;").count() >= 14);
}

/// The page loads nothing: no link, no script, no address.
#[test]
fn nothing_comes_from_outside() {
    let html = everything().html();
    for word in ["http", "url(", "src=", "href", "<link", "<script", "@import", "xmlns"] {
        assert!(!html.contains(word), "{word}");
    }
    assert!(html.contains("prefers-color-scheme: dark"));
}

/// All elements are closed, in order, and all classes in use have a rule.
#[test]
fn the_markup_is_whole() {
    let html = everything().html();
    let body = &html[html.find("</style>").unwrap() + 8..];
    let (mut open, mut classes) = (Vec::new(), BTreeSet::new());
    for tag in body.split('<').skip(1) {
        let (tag, _) = tag.split_once('>').expect("a tag ends");
        if let Some((_, rest)) = tag.split_once("class=\"") {
            classes.extend(rest.split('"').next().unwrap().split(' ').map(str::to_owned));
        }
        match tag.strip_prefix('/') {
            Some("html") => assert_eq!(open.pop(), None),
            Some(name) => assert_eq!(open.pop(), Some(name)),
            None if tag.ends_with('/') => {}
            None => open.push(tag.split(' ').next().unwrap()),
        }
    }
    assert!(open.is_empty(), "{open:?}");
    for class in classes.iter().filter(|c| !["bars", "wide"].contains(&c.as_str())) {
        assert!(html.contains(&format!(".{class}")), "no rule for {class}");
    }
}

/// Positions on an axis rise with the values and end within the image. Ticks are round and few.
#[test]
fn ticks_are_round_and_few() {
    let texts = |axis: &Axis, values: &[f64]| -> Vec<String> {
        let range = axis.covering(values.iter().copied(), axis.is_linear());
        values.iter().for_each(|v| assert!(range.place(*v).is_some(), "{v} is on the axis"));
        assert!(range.ticks.windows(2).all(|w| w[0].1 < w[1].1) || !axis.is_linear());
        range.ticks.iter().map(|(t, _)| range.text(*t)).collect()
    };
    assert_eq!(texts(&Axis::new("", AxisUnit::Number), &[3.0, 9.7]), ["0", "2", "4", "6", "8", "10"]);
    assert_eq!(
        texts(&Axis::new("", AxisUnit::Number), &[0.0, 2.1e6]),
        ["0", "500k", "1M", "1.5M", "2M", "2.5M"]
    );
    assert_eq!(
        texts(&Axis::new("", AxisUnit::Bytes), &[3e9]),
        ["0 B", "512 MiB", "1 GiB", "1.5 GiB", "2 GiB", "2.5 GiB", "3 GiB"]
    );
    assert_eq!(
        texts(&Axis::new("", AxisUnit::Nanos).log(), &[120.0, 9e6]),
        ["1 µs", "10 µs", "100 µs", "1 ms", "10 ms"]
    );
    assert_eq!(
        texts(&Axis::new("", AxisUnit::Number).log2(), &[1.0, 64.0]),
        ["1", "2", "4", "8", "16", "32", "64"]
    );
    assert_eq!(
        texts(&Axis::new("", AxisUnit::Percent).nines(), &[0.0, 99.99]),
        ["0%", "90%", "99%", "99.9%", "99.99%", "50%"]
    );
    assert_eq!(texts(&Axis::new("", AxisUnit::Ratio), &[1.0]).last().unwrap(), "1×");
    // No values, equal values, and values without a position.
    assert!(!texts(&Axis::new("", AxisUnit::Number), &[]).is_empty());
    assert!(texts(&Axis::new("", AxisUnit::Number).log(), &[7.0, 7.0]).len() > 1);
    let log = Axis::new("", AxisUnit::Number).log();
    let range = log.covering([0.0, -3.0, f64::NAN, f64::INFINITY, 5.0].into_iter(), false);
    assert!(range.place(0.0).is_none() && range.place(f64::NAN).is_none() && range.place(5.0).is_some());
}

#[test]
fn numbers_are_short() {
    let number = |v| Axis::new("", AxisUnit::Number).text(v);
    assert_eq!(
        [0.0, 0.047, 1.0, 9.999, 99.96, 999.9, 1234.0].map(number),
        ["0", "0.047", "1", "10", "100", "1k", "1.23k"]
    );
    assert_eq!(Axis::new("", AxisUnit::Nanos).text(3_400_000.0), "3.4 ms");
    assert_eq!(Axis::new("", AxisUnit::Percent).nines().text(99.95), "99.95%");
    assert_eq!(Axis::new("", AxisUnit::Percent).text(82.31801), "82.3%");
    assert_eq!(Axis::new("", AxisUnit::Ratio).text(0.456), "0.456×");
}

/// For a visual check: `UDM_PAGE=FILE cargo test -p udm-bench page_to_look_at` writes the page.
#[test]
fn a_page_to_look_at() {
    if let Some(file) = std::env::var_os("UDM_PAGE") {
        std::fs::write(file, everything().html()).unwrap();
    }
}
