//! The lines of the screen: the rates in columns.

use super::clones::{clone_style, draw_clone_line};
use super::moves::{draw_move_line, move_style};
use super::rates::{AllDeviceRates, DeviceRates, IoRates, LatencyPercentiles};
use super::text::{
    ScreenLine, TextStyle, align_left, align_right, format_latency_ns, format_short_bytes,
    format_short_count, format_uptime_ns, sanitize, truncate_start_to_width,
};
use super::view::{DeviceSortKey, TopListRow, TopListState};
use crate::output::count_noun;
use crate::verbs::throttle::format_device_throttle;

/// Columns of numbers: width and heading.
const COLUMNS: [(usize, &str); 8] = [
    (9, "STATE"),
    (6, "REQ/S"),
    (7, "BYTES/S"),
    (6, "P50"),
    (6, "P99"),
    (6, "FLIGHT"),
    (6, "ERRORS"),
    (6, "PATHS"),
];

/// Minimum width of the name column.
const NAME_MIN: usize = 8;

/// Number of lines above and below the rows.
const HEAD: usize = 3;
const FOOT: usize = 1;

/// Data of the screen besides the rates.
pub struct ScreenContext<'a> {
    /// The path of the control socket.
    pub socket: &'a str,
    /// The name of a row: "device" or "host".
    pub noun: &'a str,
    /// The uptime of the server in ns.
    pub up_ns: u64,
    /// Seconds between updates.
    pub interval: f64,
    /// The reason why the rates are not current.
    pub trouble: Option<&'a str>,
}

/// Number of rows that fit into `height` lines.
pub fn rows_per_page(height: usize) -> usize {
    height.saturating_sub(HEAD + FOOT).max(1)
}

/// The whole screen: at most `height` lines.
pub fn draw_top_screen(
    view: &mut TopListState,
    rates: &AllDeviceRates,
    context: &ScreenContext<'_>,
    width: usize,
    height: usize,
) -> Vec<ScreenLine> {
    let mut lines = vec![draw_top_header_line(rates, context, view.order, width), draw_io_totals_line(rates)];
    let alone = view.alone.as_ref().map(|number| rates.devices.iter().find(|one| one.number == *number));
    match alone {
        _ if view.help => lines.extend(draw_key_help()),
        Some(Some(device)) => lines.extend(draw_device_page(device, width)),
        Some(None) => lines.push(ScreenLine::new("The device is gone; Esc goes back", TextStyle::Warn)),
        None => {
            lines.push(draw_column_headings(width));
            let (rows, page) = (view.rows(rates), rows_per_page(height));
            let top = view.scroll(&rows, page);
            let chosen = view.chosen(&rows);
            for (at, row) in rows.iter().enumerate().skip(top).take(page) {
                lines.push(ScreenLine { chosen: at == chosen, ..draw_device_list_row(*row, view, width) });
            }
        }
    }
    lines.truncate(height.saturating_sub(FOOT));
    lines.resize(height.saturating_sub(FOOT), ScreenLine::default());
    let keys = " q quit  space fold  enter details  n r b l i e o sort  a busy  f all  ? keys";
    lines.push(match context.trouble {
        Some(why) => ScreenLine::new(sanitize(why), TextStyle::Bad),
        None => ScreenLine::new(keys, TextStyle::Dim),
    });
    lines.truncate(height);
    lines
}

/// The totals and all rows with their heading, for a file or a log of a script.
pub fn draw_device_list(view: &TopListState, rates: &AllDeviceRates, width: usize) -> Vec<ScreenLine> {
    let rows = view.rows(rates).into_iter().map(|row| draw_device_list_row(row, view, width));
    [draw_io_totals_line(rates), draw_column_headings(width)].into_iter().chain(rows).collect()
}

fn draw_top_header_line(
    rates: &AllDeviceRates,
    context: &ScreenContext<'_>,
    order: DeviceSortKey,
    width: usize,
) -> ScreenLine {
    let mut line = ScreenLine::new("udm top", TextStyle::Head);
    let devices = count_noun(rates.devices.len() as u64, context.noun);
    let clients = count_noun(rates.connections, "client");
    let (order, up) = (order.text(), format_uptime_ns(context.up_ns));
    let text = format!("  {devices} by {order}, {clients}, up {up}, every {} s  ", context.interval);
    // If there is not enough room, the end of the path is kept, because the file name identifies
    // the server.
    let room = width.saturating_sub(line.text().len() + text.len());
    line.push(text + &truncate_start_to_width(context.socket, room), TextStyle::Plain);
    line
}

fn draw_io_totals_line(rates: &AllDeviceRates) -> ScreenLine {
    if rates.seconds.is_none() {
        return ScreenLine::new("The first look: rates come with the next", TextStyle::Dim);
    }
    let sum =
        |of: &dyn Fn(IoRates) -> f64| rates.devices.iter().filter_map(|one| one.flow).map(of).sum::<f64>();
    let in_flight: u64 = rates.devices.iter().map(|one| one.in_flight).sum();
    let text = format!(
        "req/s {} (read {}, write {})  bytes/s {}  in flight {in_flight}  errors/s {}",
        format_short_count(sum(&|flow| flow.requests)),
        format_short_count(sum(&|flow| flow.reads)),
        format_short_count(sum(&|flow| flow.writes)),
        format_short_bytes(sum(&|flow| flow.bytes)),
        format_short_count(sum(&|flow| flow.errors)),
    );
    ScreenLine::new(text, TextStyle::Plain)
}

fn name_width(width: usize) -> usize {
    let others: usize = COLUMNS.iter().map(|(width, _)| width + 1).sum();
    width.saturating_sub(others).max(NAME_MIN)
}

fn draw_column_headings(width: usize) -> ScreenLine {
    let mut text = align_left("NAME", name_width(width));
    for (nth, (width, title)) in COLUMNS.iter().enumerate() {
        let title = if nth == 0 { align_left(title, *width) } else { align_right(title, *width) };
        text.push_str(&format!(" {title}"));
    }
    ScreenLine::new(text, TextStyle::Head)
}

/// The values of the numeric columns.
struct NumericColumnValues<'a> {
    state: &'a str,
    style: TextStyle,
    flow: Option<IoRates>,
    latency: Option<LatencyPercentiles>,
    in_flight: u64,
    errors: u64,
    last: (String, TextStyle),
}

impl NumericColumnValues<'_> {
    fn put(self, line: &mut ScreenLine) {
        let known = |of: &dyn Fn(IoRates) -> String| self.flow.map_or("-".into(), of);
        let took = |of: &dyn Fn(LatencyPercentiles) -> u64| {
            self.latency.map_or("-".into(), |latency| format_latency_ns(of(latency)))
        };
        let errors =
            if self.flow.is_some_and(|flow| flow.errors > 0.0) { TextStyle::Bad } else { TextStyle::Plain };
        let cells = [
            (align_left(self.state, COLUMNS[0].0), self.style),
            (align_right(&known(&|flow| format_short_count(flow.requests)), COLUMNS[1].0), TextStyle::Plain),
            (align_right(&known(&|flow| format_short_bytes(flow.bytes)), COLUMNS[2].0), TextStyle::Plain),
            (align_right(&took(&|latency| latency.p50_ns), COLUMNS[3].0), TextStyle::Plain),
            (align_right(&took(&|latency| latency.p99_ns), COLUMNS[4].0), TextStyle::Plain),
            (align_right(&format_short_count(self.in_flight as f64), COLUMNS[5].0), TextStyle::Plain),
            (align_right(&format_short_count(self.errors as f64), COLUMNS[6].0), errors),
            (align_right(&self.last.0, COLUMNS[7].0), self.last.1),
        ];
        for (text, style) in cells {
            line.push(" ", TextStyle::Plain);
            line.push(text, style);
        }
    }
}

fn draw_device_list_row(row: TopListRow<'_>, view: &TopListState, width: usize) -> ScreenLine {
    let width = name_width(width);
    match row {
        TopListRow::Device(device) => {
            let mark = match (device.paths.is_empty(), view.is_unfolded(&device.number)) {
                (true, _) => "  ",
                (_, true) => "- ",
                (_, false) => "+ ",
            };
            let mut line =
                ScreenLine::new(align_left(&format!("{mark}{}", device.name), width), TextStyle::Plain);
            numeric_columns_of_device(device).put(&mut line);
            line
        }
        TopListRow::Path(_, _, path) => {
            let name = format!("    {} {}", path.number, path.name);
            let mut line = ScreenLine::new(align_left(&name, width), TextStyle::Dim);
            let style = match path.state.as_str() {
                "active" => TextStyle::Good,
                "ejected" => TextStyle::Warn,
                _ => TextStyle::Bad,
            };
            let numbers = NumericColumnValues {
                state: &path.state,
                style,
                flow: path.flow,
                latency: path.latency,
                in_flight: path.in_flight,
                errors: path.errors,
                last: (format!("grp {}", path.group), TextStyle::Dim),
            };
            numbers.put(&mut line);
            line
        }
    }
}

fn numeric_columns_of_device(device: &DeviceRates) -> NumericColumnValues<'_> {
    let up = device.paths.iter().filter(|path| path.usable).count();
    let paths =
        (format!("{up}/{}", device.paths.len()), if up == 0 { TextStyle::Bad } else { TextStyle::Warn });
    let last = match (device.filled_percent, device.paths.len()) {
        (Some(filled), _) => {
            let style = if filled >= 80.0 { TextStyle::Warn } else { TextStyle::Plain };
            (format!("{filled:.0}%"), style)
        }
        (None, 0) => match (&device.clone, &device.moving) {
            (Some(clone), _) => (format!("{:.0}%", clone.hydrated_percent.floor()), clone_style(clone)),
            (None, Some(one)) => (format!("{:.0}%", one.copied_percent.floor()), move_style(one)),
            (None, None) => (String::new(), TextStyle::Plain),
        },
        (None, all) if up == all => (paths.0, TextStyle::Good),
        (None, _) => paths,
    };
    // A problem of a snapshot matters more than the state "active" of its device.
    let odd = device.snapshot.as_deref().filter(|state| *state != "active" && device.state == "active");
    let state = odd.unwrap_or(&device.state);
    let style = match state {
        "active" => TextStyle::Good,
        "suspended" | "removing" | "throttled" | "merging" | "merged" => TextStyle::Warn,
        "no table" => TextStyle::Dim,
        _ => TextStyle::Bad,
    };
    let DeviceRates { flow, latency, in_flight, errors, .. } = *device;
    NumericColumnValues { state, style, flow, latency, in_flight, errors, last }
}

/// The page of a single device.
fn draw_device_page(device: &DeviceRates, width: usize) -> Vec<ScreenLine> {
    let mut lines = vec![ScreenLine::new(align_left(&device.name, width), TextStyle::Head)];
    let uuid = device.uuid.as_deref().map_or(String::new(), |uuid| format!(", uuid {}", sanitize(uuid)));
    lines.push(ScreenLine::new(
        format!(
            "{}{uuid}, {}, {} bytes, {}, used by {}, {} in flight",
            device.number,
            device.state,
            format_short_bytes(device.size_bytes as f64),
            device.target_types.join(" "),
            device.open_count,
            device.in_flight
        ),
        TextStyle::Plain,
    ));
    if let (Some(state), Some(filled)) = (&device.snapshot, device.filled_percent) {
        lines.push(ScreenLine::new(
            format!("snapshot {state}, its store filled to {filled:.1} %"),
            TextStyle::Plain,
        ));
    }
    lines.extend(device.clone.as_ref().map(draw_clone_line));
    lines.extend(device.moving.as_ref().map(draw_move_line));
    if let Some(throttle) = &device.throttle {
        let limits = format!("limits: {}", format_device_throttle(throttle));
        lines.push(ScreenLine::new(sanitize(&limits), TextStyle::Plain));
    }
    lines.push(ScreenLine::default());
    let row = |cells: [&str; 7], style| {
        let cells = cells.iter().enumerate();
        let cells: Vec<String> = cells
            .map(|(nth, cell)| if nth == 0 { align_left(cell, 14) } else { align_right(cell, 9) })
            .collect();
        ScreenLine::new(cells.join(" "), style)
    };
    lines.push(row(["OPERATION", "REQ/S", "BYTES/S", "ERRORS/S", "P50", "P95", "P99"], TextStyle::Head));
    for op in &device.ops {
        let took = |of: &dyn Fn(&LatencyPercentiles) -> u64| {
            op.latency.as_ref().map_or("-".into(), |l| format_latency_ns(of(l)))
        };
        let cells = [
            &op.op,
            &format_short_count(op.requests),
            &format_short_bytes(op.bytes),
            &format_short_count(op.errors),
            &took(&|latency| latency.p50_ns),
            &took(&|latency| latency.p95_ns),
            &took(&|latency| latency.p99_ns),
        ];
        lines.push(row(cells.map(String::as_str), TextStyle::Plain));
    }
    if !device.paths.is_empty() {
        lines.push(ScreenLine::default());
        lines.push(ScreenLine::new(
            "PATH        GROUP STATE     CHECKER      REQ/S BYTES/S FLIGHT ERRORS FAILED NAME",
            TextStyle::Head,
        ));
    }
    for path in &device.paths {
        let known = |of: &dyn Fn(IoRates) -> String| path.flow.map_or("-".into(), of);
        let text = format!(
            "{} {} {} {} {} {} {} {} {} {}",
            align_left(&path.number, 11),
            align_right(&path.group.to_string(), 5),
            align_left(&path.state, 9),
            align_left(&path.checker, 11),
            align_right(&known(&|flow| format_short_count(flow.requests)), 6),
            align_right(&known(&|flow| format_short_bytes(flow.bytes)), 7),
            align_right(&format_short_count(path.in_flight as f64), 6),
            align_right(&format_short_count(path.errors as f64), 6),
            align_right(&format_short_count(path.failures as f64), 6),
            sanitize(&path.name)
        );
        lines.push(ScreenLine::new(
            text,
            if path.state == "active" { TextStyle::Plain } else { TextStyle::Bad },
        ));
    }
    lines
}

fn draw_key_help() -> Vec<ScreenLine> {
    let mut lines = vec![ScreenLine::default(), ScreenLine::new("Keys", TextStyle::Head)];
    for (key, meaning) in [
        ("up down k j", "the row above, below"),
        ("PgUp PgDn g G", "a page, the first and the last row"),
        ("space left right", "fold and unfold the paths of a device"),
        ("f", "fold and unfold all"),
        ("Enter, Esc", "one device alone, and back"),
        ("a", "leave out what does nothing"),
        ("+ -", "look more often, less often"),
        ("q, Ctrl-C", "the end"),
    ] {
        lines.push(ScreenLine::new(format!("  {key:<18}{meaning}"), TextStyle::Plain));
    }
    for (key, _, meaning) in DeviceSortKey::ALL {
        lines.push(ScreenLine::new(
            format!("  {key:<18}sort by {meaning}; again: the other way round"),
            TextStyle::Plain,
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::super::rates::{OpRates, PathRates};
    use super::super::view::KeyPress;
    use super::*;
    use unicode_width::UnicodeWidthStr;

    fn some() -> AllDeviceRates {
        let flow = IoRates { reads: 100.0, writes: 20.0, requests: 120.0, bytes: 491_520.0, errors: 0.0 };
        let latency = LatencyPercentiles { p50_ns: 20_480, p95_ns: 40_960, p99_ns: 1_310_720 };
        let path = |number: &str, state: &str| PathRates {
            number: number.into(),
            name: "nbd+unix:///?socket=/a/long/path/to/a.sock".into(),
            state: state.into(),
            usable: state != "failed",
            checker: "ready".into(),
            group: 1,
            ..PathRates::default()
        };
        let mp = DeviceRates {
            name: "mp".into(),
            number: "254:0".into(),
            state: "active".into(),
            flow: Some(flow),
            latency: Some(latency),
            ops: vec![OpRates {
                op: "read".into(),
                requests: 100.0,
                latency: Some(latency),
                ..OpRates::default()
            }],
            paths: vec![path("253:0", "active"), path("253:1", "failed")],
            ..DeviceRates::default()
        };
        let snap = DeviceRates {
            name: "\x1b[2J日本\u{202e}x".into(),
            number: "254:1".into(),
            state: "active".into(),
            snapshot: Some("invalid".into()),
            filled_percent: Some(97.0),
            ..DeviceRates::default()
        };
        AllDeviceRates { seconds: Some(1.0), connections: 3, devices: vec![mp, snap] }
    }

    const CONTEXT: ScreenContext<'_> = ScreenContext {
        socket: "/run/udm/udm.sock",
        noun: "device",
        up_ns: 61_000_000_000,
        interval: 1.0,
        trouble: None,
    };

    fn text(view: &mut TopListState, rates: &AllDeviceRates) -> Vec<String> {
        let lines = draw_top_screen(view, rates, &CONTEXT, 80, 24);
        assert_eq!(lines.len(), 24);
        lines.iter().map(ScreenLine::text).collect()
    }

    #[test]
    fn a_screen() {
        let (rates, mut view) = (some(), TopListState::default());
        view.press(KeyPress::Right, &rates, 20);
        let text = text(&mut view, &rates);
        assert_eq!(
            text[0],
            "udm top  2 devices by number, 3 clients, up 1m01s, every 1 s  /run/udm/udm.sock"
        );
        let context = ScreenContext { socket: "/tmp/udm-4711/long/udm.sock", ..CONTEXT };
        let one = AllDeviceRates { connections: 1, devices: Vec::new(), ..rates.clone() };
        assert_eq!(
            draw_top_screen(&mut TopListState::default(), &one, &context, 80, 24)[0].text(),
            "udm top  0 devices by number, 1 client, up 1m01s, every 1 s  …4711/long/udm.sock"
        );
        assert_eq!(text[1], "req/s 120 (read 100, write 20)  bytes/s 480K  in flight 0  errors/s 0");
        assert_eq!(
            text[2..7],
            [
                "NAME                 STATE      REQ/S BYTES/S    P50    P99 FLIGHT ERRORS  PATHS",
                "- mp                 active       120    480K   20us  1.3ms      0      0    1/2",
                "    253:0 nbd+unix:… active         -       -      -      -      0      0  grp 1",
                "    253:1 nbd+unix:… failed         -       -      -      -      0      0  grp 1",
                "  \u{fffd}[2J日本\u{fffd}x         invalid        -       -      -      -      0      0    97%",
            ]
        );
        assert!(text[23].starts_with(" q quit"));
        view.press(KeyPress::Enter, &rates, 20);
        let text = self::text(&mut view, &rates);
        assert!(text[2] == "mp" && text[6].starts_with("read                 100"), "{text:#?}");
        view.press(KeyPress::Escape, &rates, 20);
        view.press(KeyPress::Char('?'), &rates, 20);
        assert!(self::text(&mut view, &rates).iter().any(|line| line.contains("sort by latency")));
        view.press(KeyPress::Enter, &rates, 20);
        let lines = draw_device_list(&view, &rates, 100);
        assert_eq!(lines.len(), 6);
    }

    #[test]
    fn paths_that_requests_are_given_to_are_counted() {
        let path = |usable| PathRates { state: "ejected".into(), usable, ..PathRates::default() };
        let last = |paths| numeric_columns_of_device(&DeviceRates { paths, ..DeviceRates::default() }).last;
        assert_eq!(last(vec![path(true), path(false)]), ("1/2".into(), TextStyle::Warn));
        assert_eq!(last(vec![path(true), path(true)]), ("2/2".into(), TextStyle::Good));
    }

    /// No line is wider than the screen, and no name contains a terminal command, at any size.
    #[test]
    fn any_size() {
        let rates = some();
        for (width, height) in [(80, 24), (20, 5), (1, 1), (0, 0), (300, 100), (81, 2)] {
            for keys in [
                vec![],
                vec![KeyPress::Char('f')],
                vec![KeyPress::Enter],
                vec![KeyPress::End, KeyPress::Enter],
                vec![KeyPress::Char('?')],
            ] {
                let mut view = TopListState::default();
                for key in keys {
                    view.press(key, &rates, rows_per_page(height));
                }
                let lines = draw_top_screen(&mut view, &rates, &CONTEXT, width, height);
                assert!(lines.len() <= height, "{width}x{height}");
                for line in lines {
                    let ansi = line.ansi(width, false);
                    let mut seen = ansi.replace("\x1b[0m", "");
                    for code in ["\x1b[7m", "\x1b[1m", "\x1b[2m"] {
                        seen = seen.replace(code, "");
                    }
                    assert!(!seen.chars().any(char::is_control), "{ansi:?}");
                    assert!(seen.width() <= width, "{width}x{height}: {seen:?}");
                }
            }
        }
    }

    #[test]
    fn trouble_is_said_and_what_was_is_kept() {
        let (rates, mut view) = (some(), TopListState::default());
        let context = ScreenContext { trouble: Some("gone\x1b[2J"), ..CONTEXT };
        let lines = draw_top_screen(&mut view, &rates, &context, 80, 24);
        assert_eq!((lines[23].text(), lines[3].text().starts_with("+ mp")), ("gone\u{fffd}[2J".into(), true));
        let first = AllDeviceRates { seconds: None, ..some() };
        assert!(draw_top_screen(&mut view, &first, &CONTEXT, 80, 24)[1].text().starts_with("The first look"));
    }
}
