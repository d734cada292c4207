//! `udm top`: devices and paths at work, in a terminal or for scripts.
//!
//! One thread draws. Other threads wait for keys, signals and the server, so no slow part delays a
//! key.
//!
//! `terminal` needs only modes, keys and changed lines, over rustix, which udm uses anyway. A
//! library such as crossterm would add dependencies, a signal handler and global state. The most
//! important property, a terminal that is restored after any end of the program, would still be
//! udm's own work.

mod clones;
mod moves;
mod rates;
mod screen;
mod stats_source;
mod terminal;
mod text;
mod view;

use crate::args::{ServerArgs, parse_seconds};
use crate::output::{print_json_to_stdout, print_to_stdout};
use crate::requests::explain_client_error;
use anyhow::{Context, Result};
use clap::Args;
use rates::AllDeviceRates;
use rustix::process::{Signal, getpid, kill_process};
use screen::ScreenContext;
use stats_source::StatsSource;
use std::io::Read;
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};
use terminal::{Terminal, TerminalInput};
use tokio::signal::unix::{SignalKind, signal};
use udm_control::api::ServerStatsReport;
use udm_control::client::ControlClientError;
use view::{KeyAction, TopListState};

/// Width of the output if it is no terminal.
const WIDTH: usize = 100;

/// Shortest and longest interval between two updates.
const OFTEN: Duration = Duration::from_millis(100);
const RARELY: Duration = Duration::from_secs(3600);

/// Maximum time to wait for the stop after SIGTSTP.
const STOP_MAX: Duration = Duration::from_millis(500);

/// The arguments of `udm top`.
#[derive(Debug, Args)]
pub struct TopArgs {
    #[command(flatten)]
    pub server: ServerArgs,
    /// Print the figures of one interval, and exit
    #[arg(long)]
    pub once: bool,
    /// Print JSON: one line per interval, or with --once one object over several lines
    #[arg(long)]
    pub json: bool,
    /// Show NVMe/TCP hosts instead of devices
    #[arg(long)]
    pub hosts: bool,
    /// Seconds between updates (0.1 to 3600)
    #[arg(short, long, value_name = "SECONDS", default_value = "1", value_parser = parse_interval)]
    pub interval: Duration,
}

/// Parses an interval, in seconds.
fn parse_interval(word: &str) -> Result<Duration, String> {
    let range = Duration::from_millis(100)..=Duration::from_secs(3600);
    parse_seconds(word).and_then(|d| if range.contains(&d) { Ok(d) } else { Err("not in 0.1..=3600".into()) })
}

/// Shows live figures until the user or a signal ends the program.
pub fn run(args: &TopArgs) -> Result<ExitCode> {
    let source = StatsSource { client: args.server.client()?, by_host: args.hosts };
    let first = source.fetch().map_err(|error| explain_client_error(error, None))?;
    if args.once || args.json {
        return print_io_rates_repeatedly(args, &source, first).map(|()| ExitCode::SUCCESS);
    }
    run_top_screen(source, first, args.interval)
}

/// Prints the figures without a terminal; with `--once` only one interval.
fn print_io_rates_repeatedly(
    args: &TopArgs,
    source: &StatsSource,
    mut before: ServerStatsReport,
) -> Result<()> {
    loop {
        std::thread::sleep(args.interval);
        let after = source.fetch().map_err(|error| explain_client_error(error, None))?;
        let rates = rates::compute_rates(Some(&before), &after);
        match (args.json, args.once) {
            (true, true) => print_json_to_stdout(&rates)?,
            (true, false) => print_to_stdout(&format!("{}\n", serde_json::to_string(&rates)?))?,
            (false, _) => {
                let mut view = TopListState::default();
                view.press(view::KeyPress::Char('f'), &rates, 1);
                let width = terminal::terminal_size().map_or(WIDTH, |(width, _)| width);
                let lines = screen::draw_device_list(&view, &rates, width);
                print_to_stdout(&lines.iter().map(|line| line.text() + "\n").collect::<String>())?;
            }
        }
        if args.once {
            return Ok(());
        }
        before = after;
    }
}

/// The events for the drawing thread.
enum TopScreenEvent {
    TypedInput(TerminalInput),
    /// The size of the terminal changed.
    Resized,
    /// The program was stopped and now continues.
    Continued,
    /// A signal that ends the program.
    Signal(i32),
    /// Standard input has ended.
    HungUp,
    Stats(Result<Box<ServerStatsReport>, String>),
}

/// Requests the figures of the server without end, at an interval that the drawing thread sets.
fn poll_stats(
    source: &StatsSource,
    mut interval: Duration,
    intervals: &Receiver<Duration>,
    events: &Sender<TopScreenEvent>,
) {
    loop {
        match intervals.recv_timeout(interval) {
            Ok(other) => interval = other,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        let looked = source.fetch().map(Box::new).map_err(|error| match error {
            // The screen shows the path, and is too narrow for advice.
            ControlClientError::Unreachable { why, .. } => format!("can't reach udm serve: {why}"),
            error => error.to_string(),
        });
        if events.send(TopScreenEvent::Stats(looked)).is_err() {
            return;
        }
    }
}

fn read_terminal_input(events: &Sender<TopScreenEvent>) {
    let mut bytes = [0; 256];
    loop {
        match std::io::stdin().lock().read(&mut bytes) {
            Ok(0) => break,
            Ok(n)
                if terminal::parse_terminal_input(&bytes[..n])
                    .into_iter()
                    .any(|key| events.send(TopScreenEvent::TypedInput(key)).is_err()) =>
            {
                return;
            }
            Err(error) if error.kind() != std::io::ErrorKind::Interrupted => break,
            _ => {}
        }
    }
    let _ = events.send(TopScreenEvent::HungUp);
}

/// Sends signals as events; from here on they no longer end the program.
fn forward_signals_as_events(events: Sender<TopScreenEvent>) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let inside = runtime.enter();
    let of = |kind| signal(kind).context("top: signals");
    let (mut interrupt, mut terminate) = (of(SignalKind::interrupt())?, of(SignalKind::terminate())?);
    let (mut hangup, mut resized) = (of(SignalKind::hangup())?, of(SignalKind::window_change())?);
    let mut continued = of(SignalKind::from_raw(Signal::CONT.as_raw()))?;
    drop(inside);
    let forward = move || {
        runtime.block_on(async {
            loop {
                let event = tokio::select! {
                    _ = interrupt.recv() => TopScreenEvent::Signal(SignalKind::interrupt().as_raw_value()),
                    _ = terminate.recv() => TopScreenEvent::Signal(SignalKind::terminate().as_raw_value()),
                    _ = hangup.recv() => TopScreenEvent::Signal(SignalKind::hangup().as_raw_value()),
                    _ = resized.recv() => TopScreenEvent::Resized,
                    _ = continued.recv() => TopScreenEvent::Continued,
                };
                if events.send(event).is_err() {
                    return;
                }
            }
        });
    };
    std::thread::Builder::new().name("udm-signals".into()).spawn(forward).context("top: signals").map(drop)
}

/// Stops the program, as Ctrl-Z does by default. Another thread may take the signal, so this thread
/// waits until the program continues. If no shell can continue the program, the system does not
/// stop it, and the wait ends after `STOP_MAX`.
fn suspend_program(inbox: &Receiver<TopScreenEvent>) {
    let until = Instant::now() + STOP_MAX;
    let _ = kill_process(getpid(), Signal::TSTP);
    while let Ok(event) = inbox.recv_timeout(until.saturating_duration_since(Instant::now())) {
        if matches!(event, TopScreenEvent::Continued) {
            return;
        }
    }
}

fn run_top_screen(source: StatsSource, first: ServerStatsReport, mut interval: Duration) -> Result<ExitCode> {
    let (socket, noun) = (source.client.path().display().to_string(), source.noun());
    let (events, inbox) = channel();
    let (set_interval, intervals) = channel();
    let mut terminal = Terminal::enter()?;
    forward_signals_as_events(events.clone())?;
    let keys = events.clone();
    std::thread::Builder::new().name("udm-keys".into()).spawn(move || read_terminal_input(&keys))?;
    let poll = move || poll_stats(&source, interval, &intervals, &events);
    std::thread::Builder::new().name("udm-looks".into()).spawn(poll)?;

    let mut view = TopListState::default();
    let mut rates: AllDeviceRates = rates::compute_rates(None, &first);
    let mut before = first;
    let mut trouble: Option<String> = None;
    loop {
        let (width, height) = terminal.size();
        let context = ScreenContext {
            socket: &socket,
            noun,
            up_ns: before.up_ns,
            interval: interval.as_secs_f64(),
            trouble: trouble.as_deref(),
        };
        terminal.show(&screen::draw_top_screen(&mut view, &rates, &context, width, height));
        // All events that have arrived are handled before the next draw.
        let first = inbox.recv().context("top: the event threads have ended")?;
        for event in std::iter::once(first).chain(inbox.try_iter()) {
            match event {
                TopScreenEvent::Stats(Ok(stats)) => {
                    rates = rates::compute_rates(Some(&before), &stats);
                    (before, trouble) = (*stats, None);
                }
                TopScreenEvent::Stats(Err(why)) => trouble = Some(format!("{why}; trying again")),
                TopScreenEvent::TypedInput(TerminalInput::Key(key)) => {
                    let act = view.press(key, &rates, screen::rows_per_page(height));
                    interval = match act {
                        KeyAction::Quit => return Ok(ExitCode::SUCCESS),
                        KeyAction::Faster => (interval / 2).max(OFTEN),
                        KeyAction::Slower => (interval * 2).min(RARELY),
                        KeyAction::Show => continue,
                    };
                    let _ = set_interval.send(interval);
                }
                TopScreenEvent::TypedInput(TerminalInput::Stop) => {
                    terminal.give_back();
                    suspend_program(&inbox);
                    terminal.take()?;
                }
                TopScreenEvent::Resized | TopScreenEvent::Continued => terminal.clear(),
                TopScreenEvent::Signal(number) => {
                    return Ok(ExitCode::from(u8::try_from(128 + number).unwrap_or(u8::MAX)));
                }
                TopScreenEvent::HungUp => return Ok(ExitCode::SUCCESS),
            }
        }
    }
}
