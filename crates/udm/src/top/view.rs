//! The state of the list: order, filter, unfolded devices, and the device on the detail page.
//!
//! Pure functions of keys and rates.

use super::rates::{AllDeviceRates, DeviceRates, PathRates};
use std::cmp::Ordering;
use std::collections::HashSet;

/// A key that was pressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyPress {
    /// A character.
    Char(char),
    /// Up by one row.
    Up,
    /// Down by one row.
    Down,
    /// Up by one page.
    PageUp,
    /// Down by one page.
    PageDown,
    /// To the first row.
    Home,
    /// To the last row.
    End,
    /// Unfold the paths of a device.
    Right,
    /// Fold the paths of a device, or leave its page.
    Left,
    /// Show only one device.
    Enter,
    /// Leave the page of a device.
    Escape,
}

/// The action for the caller after a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyAction {
    /// Draw the screen.
    Show,
    /// End the program.
    Quit,
    /// Halve the update interval.
    Faster,
    /// Double the update interval.
    Slower,
}

/// The sort key of devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceSortKey {
    /// The device number, which is the order of creation.
    #[default]
    Number,
    /// The name.
    Name,
    /// Requests per second.
    Requests,
    /// Bytes per second.
    Bytes,
    /// The 99 % latency.
    Latency,
    /// Requests in flight.
    InFlight,
    /// Failed requests.
    Errors,
}

impl DeviceSortKey {
    /// All orders, with their keys and their names on the screen.
    pub const ALL: [(char, DeviceSortKey, &'static str); 7] = [
        ('o', DeviceSortKey::Number, "number"),
        ('n', DeviceSortKey::Name, "name"),
        ('r', DeviceSortKey::Requests, "requests"),
        ('b', DeviceSortKey::Bytes, "bandwidth"),
        ('l', DeviceSortKey::Latency, "latency"),
        ('i', DeviceSortKey::InFlight, "in flight"),
        ('e', DeviceSortKey::Errors, "errors"),
    ];

    /// The name on the screen.
    pub fn text(self) -> &'static str {
        DeviceSortKey::ALL.iter().find(|(_, order, _)| *order == self).map_or("", |(.., text)| text)
    }

    /// Highest value first; names in ascending order.
    fn compare(self, a: &DeviceRates, b: &DeviceRates) -> Ordering {
        let most = |of: &dyn Fn(&DeviceRates) -> f64| of(b).total_cmp(&of(a));
        match self {
            DeviceSortKey::Number => Ordering::Equal,
            DeviceSortKey::Name => a.name.cmp(&b.name),
            DeviceSortKey::Requests => most(&|one| one.flow.map_or(-1.0, |flow| flow.requests)),
            DeviceSortKey::Bytes => most(&|one| one.flow.map_or(-1.0, |flow| flow.bytes)),
            DeviceSortKey::Latency => b.latency.map(|l| l.p99_ns).cmp(&a.latency.map(|l| l.p99_ns)),
            DeviceSortKey::InFlight => b.in_flight.cmp(&a.in_flight),
            DeviceSortKey::Errors => {
                let rate = most(&|one| one.flow.map_or(-1.0, |flow| flow.errors));
                rate.then(b.errors.cmp(&a.errors))
            }
        }
    }
}

/// A row of the list.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TopListRow<'a> {
    /// A device.
    Device(&'a DeviceRates),
    /// A path of the device, with its index.
    Path(&'a DeviceRates, usize, &'a PathRates),
}

impl<'a> TopListRow<'a> {
    /// The device of the row.
    pub fn device(self) -> &'a DeviceRates {
        match self {
            TopListRow::Device(device) | TopListRow::Path(device, ..) => device,
        }
    }

    fn place(self) -> (String, Option<usize>) {
        match self {
            TopListRow::Device(device) => (device.number.clone(), None),
            TopListRow::Path(device, nth, _) => (device.number.clone(), Some(nth)),
        }
    }
}

/// The state of the list, which keys change.
#[derive(Debug, Clone, Default)]
pub struct TopListState {
    /// The sort key of devices.
    pub order: DeviceSortKey,
    /// The order is reversed.
    pub reversed: bool,
    /// Idle devices are hidden.
    pub busy_only: bool,
    /// The help page with the keys is shown.
    pub help: bool,
    /// The number of the device whose page is shown.
    pub alone: Option<String>,
    /// Paths are shown, except for the devices in `folded`. If false, only those devices show
    /// paths.
    unfold: bool,
    folded: HashSet<String>,
    /// The selected row: the number of its device and the index of its path. `at` is its last
    /// position.
    chosen: Option<(String, Option<usize>)>,
    at: usize,
    /// The first row on the screen.
    top: usize,
}

impl TopListState {
    /// True if the paths of the device `number` are shown.
    pub fn is_unfolded(&self, number: &str) -> bool {
        self.unfold != self.folded.contains(number)
    }

    /// All rows, in order.
    pub fn rows<'a>(&self, rates: &'a AllDeviceRates) -> Vec<TopListRow<'a>> {
        let is_busy = |one: &&DeviceRates| {
            !self.busy_only || one.in_flight > 0 || one.flow.is_some_and(|flow| flow.requests > 0.0)
        };
        let mut devices: Vec<&DeviceRates> = rates.devices.iter().filter(is_busy).collect();
        devices.sort_by(|a, b| self.order.compare(a, b));
        if self.reversed {
            devices.reverse();
        }
        let mut rows = Vec::with_capacity(devices.len());
        for device in devices {
            rows.push(TopListRow::Device(device));
            if self.is_unfolded(&device.number) {
                rows.extend(
                    device.paths.iter().enumerate().map(|(nth, path)| TopListRow::Path(device, nth, path)),
                );
            }
        }
        rows
    }

    /// The position of the selected row. If that row no longer exists, the row at its last position
    /// is selected.
    pub fn chosen(&self, rows: &[TopListRow<'_>]) -> usize {
        let same = self.chosen.as_ref().and_then(|chosen| rows.iter().position(|row| row.place() == *chosen));
        same.unwrap_or(self.at).min(rows.len().saturating_sub(1))
    }

    /// Scrolls so that the selected row is visible in `height` rows; returns the position of the
    /// first row.
    pub fn scroll(&mut self, rows: &[TopListRow<'_>], height: usize) -> usize {
        let chosen = self.chosen(rows);
        self.at = chosen;
        self.top = self.top.min(chosen).max((chosen + 1).saturating_sub(height));
        self.top = self.top.min(rows.len().saturating_sub(height));
        self.top
    }

    fn choose(&mut self, rows: &[TopListRow<'_>], at: usize) {
        self.at = at.min(rows.len().saturating_sub(1));
        self.chosen = rows.get(self.at).map(|row| row.place());
    }

    /// Handles a key; `page` is the number of rows on the screen.
    pub fn press(&mut self, key: KeyPress, rates: &AllDeviceRates, page: usize) -> KeyAction {
        if std::mem::take(&mut self.help) && key != KeyPress::Char('q') {
            return KeyAction::Show;
        }
        let rows = self.rows(rates);
        let at = self.chosen(&rows);
        match key {
            KeyPress::Char('q') => return KeyAction::Quit,
            KeyPress::Char('+') => return KeyAction::Faster,
            KeyPress::Char('-') => return KeyAction::Slower,
            KeyPress::Char('?' | 'h') => self.help = true,
            KeyPress::Escape | KeyPress::Left | KeyPress::Enter if self.alone.is_some() => self.alone = None,
            KeyPress::Up | KeyPress::Char('k') => self.choose(&rows, at.saturating_sub(1)),
            KeyPress::Down | KeyPress::Char('j') => self.choose(&rows, at + 1),
            KeyPress::PageUp => self.choose(&rows, at.saturating_sub(page)),
            KeyPress::PageDown => self.choose(&rows, at + page),
            KeyPress::Home | KeyPress::Char('g') => self.choose(&rows, 0),
            KeyPress::End | KeyPress::Char('G') => self.choose(&rows, usize::MAX),
            KeyPress::Enter => self.alone = rows.get(at).map(|row| row.device().number.clone()),
            KeyPress::Right | KeyPress::Char(' ') | KeyPress::Left => {
                let Some(row) = rows.get(at) else { return KeyAction::Show };
                let number = row.device().number.clone();
                let is = self.is_unfolded(&number);
                if key == KeyPress::Char(' ') || is != (key == KeyPress::Right) {
                    let folds = is;
                    if !self.folded.remove(&number) {
                        self.folded.insert(number.clone());
                    }
                    if folds {
                        self.chosen = Some((number, None));
                    }
                }
            }
            KeyPress::Char('f') => {
                self.unfold = !self.unfold;
                self.folded.clear();
                self.chosen = rows.get(at).map(|row| (row.device().number.clone(), None));
            }
            KeyPress::Char('a') => self.busy_only = !self.busy_only,
            KeyPress::Char(letter) => {
                if let Some((_, order, _)) = DeviceSortKey::ALL.iter().find(|(key, ..)| *key == letter) {
                    self.reversed = self.order == *order && !self.reversed;
                    self.order = *order;
                }
            }
            KeyPress::Escape => {}
        }
        KeyAction::Show
    }
}

#[cfg(test)]
mod tests {
    use super::super::rates::{IoRates, LatencyPercentiles};
    use super::*;

    fn device(number: usize, name: &str, requests: f64, paths: usize) -> DeviceRates {
        DeviceRates {
            name: name.into(),
            number: format!("254:{number}"),
            flow: Some(IoRates { requests, bytes: 100.0 - requests, ..IoRates::default() }),
            latency: (requests > 0.0)
                .then(|| LatencyPercentiles { p99_ns: number as u64, ..LatencyPercentiles::default() }),
            errors: number as u64,
            paths: vec![PathRates::default(); paths],
            ..DeviceRates::default()
        }
    }

    fn three() -> AllDeviceRates {
        let devices = vec![device(0, "b", 5.0, 2), device(1, "c", 9.0, 0), device(2, "a", 0.0, 3)];
        AllDeviceRates { devices, ..AllDeviceRates::default() }
    }

    fn names(view: &TopListState, rates: &AllDeviceRates) -> String {
        let name = |row: &TopListRow<'_>| match row {
            TopListRow::Device(device) => device.name.clone(),
            TopListRow::Path(_, nth, _) => nth.to_string(),
        };
        view.rows(rates).iter().map(name).collect()
    }

    fn keys(view: &mut TopListState, rates: &AllDeviceRates, keys: &str) {
        keys.chars().for_each(|key| assert_eq!(view.press(KeyPress::Char(key), rates, 10), KeyAction::Show));
    }

    #[test]
    fn each_order_and_back() {
        let (rates, mut view) = (three(), TopListState::default());
        for (key, first, again) in [
            ("n", "abc", "cba"),
            ("r", "cba", "abc"),
            ("b", "abc", "cba"),
            ("l", "cba", "abc"),
            ("e", "acb", "bca"),
            ("i", "bca", "acb"),
            ("o", "bca", "acb"),
        ] {
            keys(&mut view, &rates, key);
            assert_eq!(names(&view, &rates), first, "{key}");
            keys(&mut view, &rates, key);
            assert_eq!(names(&view, &rates), again, "{key} again");
        }
    }

    #[test]
    fn folding() {
        let (rates, mut view) = (three(), TopListState::default());
        assert_eq!(names(&view, &rates), "bca");
        keys(&mut view, &rates, " ");
        assert_eq!(names(&view, &rates), "b01ca");
        // On a path, Left folds its device and selects it.
        keys(&mut view, &rates, "jj");
        view.press(KeyPress::Left, &rates, 10);
        assert_eq!((names(&view, &rates).as_str(), view.chosen(&view.rows(&rates))), ("bca", 0));
        view.press(KeyPress::Left, &rates, 10);
        assert_eq!(names(&view, &rates), "bca");
        keys(&mut view, &rates, "f");
        assert_eq!(names(&view, &rates), "b01ca012");
        view.press(KeyPress::End, &rates, 10);
        keys(&mut view, &rates, " ");
        assert_eq!((names(&view, &rates).as_str(), view.chosen(&view.rows(&rates))), ("b01ca", 4));
        keys(&mut view, &rates, "f");
        assert_eq!(names(&view, &rates), "bca");
        keys(&mut view, &rates, "a");
        assert_eq!(names(&view, &rates), "bc");
    }

    #[test]
    fn what_is_chosen_stays_chosen() {
        let (mut rates, mut view) = (three(), TopListState::default());
        keys(&mut view, &rates, "j");
        keys(&mut view, &rates, "n");
        let chosen = |view: &TopListState, rates: &AllDeviceRates| {
            let rows = view.rows(rates);
            rows.get(view.chosen(&rows)).map(|row| row.device().name.clone())
        };
        assert_eq!(chosen(&view, &rates), Some("c".into()), "wherever it is");
        // The device is renamed. Then it is removed, and the next row is selected.
        rates.devices[1].name = "0".into();
        assert_eq!(chosen(&view, &rates), Some("0".into()));
        let rows = view.rows(&rates);
        view.scroll(&rows, 10);
        rates.devices.remove(1);
        assert_eq!(chosen(&view, &rates), Some("a".into()));
        rates.devices.clear();
        assert_eq!(chosen(&view, &rates), None);
        for key in [
            KeyPress::Down,
            KeyPress::End,
            KeyPress::PageDown,
            KeyPress::Enter,
            KeyPress::Right,
            KeyPress::Left,
            KeyPress::Up,
        ] {
            assert_eq!(view.press(key, &rates, 10), KeyAction::Show);
        }
    }

    #[test]
    fn the_screen_follows() {
        let devices = (0..1000).map(|n| device(n, &format!("{n:04}"), 1.0, 0)).collect();
        let (rates, mut view) =
            (AllDeviceRates { devices, ..AllDeviceRates::default() }, TopListState::default());
        let top = |view: &mut TopListState| {
            let rows = view.rows(&rates);
            let (top, chosen) = (view.scroll(&rows, 20), view.chosen(&rows));
            assert!((top..top + 20).contains(&chosen));
            (top, chosen)
        };
        assert_eq!(top(&mut view), (0, 0));
        view.press(KeyPress::PageDown, &rates, 20);
        assert_eq!(top(&mut view), (1, 20));
        view.press(KeyPress::End, &rates, 20);
        assert_eq!(top(&mut view), (980, 999));
        view.press(KeyPress::Up, &rates, 20);
        assert_eq!(top(&mut view), (980, 998));
        view.press(KeyPress::Home, &rates, 20);
        assert_eq!(top(&mut view), (0, 0));
    }

    #[test]
    fn one_alone_and_help() {
        let (rates, mut view) = (three(), TopListState::default());
        keys(&mut view, &rates, "j");
        view.press(KeyPress::Enter, &rates, 10);
        assert_eq!(view.alone.as_deref(), Some("254:1"));
        view.press(KeyPress::Escape, &rates, 10);
        keys(&mut view, &rates, "?");
        assert!(view.alone.is_none() && view.help);
        keys(&mut view, &rates, "n");
        assert_eq!((view.help, view.order), (false, DeviceSortKey::Number), "any key leaves the help");
        assert_eq!(view.press(KeyPress::Char('q'), &rates, 10), KeyAction::Quit);
        assert_eq!(view.press(KeyPress::Char('+'), &rates, 10), KeyAction::Faster);
    }
}
