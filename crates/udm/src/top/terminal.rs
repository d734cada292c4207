//! The terminal: its modes, its size, its keys.
//!
//! Contract: the terminal is restored at any end of the program: normal, by a panic, or by a signal
//! that can be caught. Only changed lines are written.

use super::text::ScreenLine;
use super::view::KeyPress;
use anyhow::{Context, Result, bail};
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr};
use std::io::{Write, stdin, stdout};
use std::sync::{Mutex, PoisonError};

/// The original modes, while the terminal has others.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// Switches to the alternate screen without a cursor, and back.
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[2J";
const LEAVE: &str = "\x1b[0m\x1b[?25h\x1b[?1049l";

/// The terminal, while the program uses all of it.
pub struct Terminal {
    colour: bool,
    shown: Vec<String>,
}

/// Columns and lines of standard output; `None` if it is no terminal.
pub fn terminal_size() -> Option<(usize, usize)> {
    let size = tcgetwinsize(stdout()).ok()?;
    (size.ws_col > 0).then(|| (size.ws_col.into(), size.ws_row.into()))
}

fn write_to_terminal(text: &str) {
    // Errors are ignored: a closed terminal sends SIGHUP.
    let mut out = stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Restores the terminal if it is in use.
fn restore_terminal() {
    let before = BEFORE.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(before) = before {
        write_to_terminal(LEAVE);
        let _ = tcsetattr(stdin(), OptionalActions::Now, &before);
    }
}

impl Terminal {
    /// Takes control of the terminal.
    ///
    /// # Errors
    /// Standard input or standard output is no terminal.
    pub fn enter() -> Result<Terminal> {
        if !isatty(stdin()) || !isatty(stdout()) {
            bail!("top: standard input or output is not a terminal: use --once or --json in scripts");
        }
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            restore_terminal();
            hook(info);
        }));
        let colour = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let mut terminal = Terminal { colour, shown: Vec::new() };
        terminal.take()?;
        Ok(terminal)
    }

    /// Takes control again after [`Terminal::give_back`].
    pub fn take(&mut self) -> Result<()> {
        let before = tcgetattr(stdin()).context("top: the terminal's modes")?;
        let mut raw = before.clone();
        raw.make_raw();
        *BEFORE.lock().unwrap_or_else(PoisonError::into_inner) = Some(before);
        tcsetattr(stdin(), OptionalActions::Now, &raw).context("top: the terminal's modes")?;
        self.clear();
        Ok(())
    }

    /// Restores the terminal for a while.
    pub fn give_back(&mut self) {
        restore_terminal();
    }

    /// Clears the screen, so that the next update draws all lines, for example after a change of
    /// size.
    pub fn clear(&mut self) {
        self.shown.clear();
        write_to_terminal(ENTER);
    }

    /// Columns and lines.
    pub fn size(&self) -> (usize, usize) {
        terminal_size().unwrap_or((80, 24))
    }

    /// Shows `lines`.
    pub fn show(&mut self, lines: &[ScreenLine]) {
        let (width, _) = self.size();
        let lines: Vec<String> = lines.iter().map(|line| line.ansi(width, self.colour)).collect();
        let mut out = String::new();
        for (at, line) in lines.iter().enumerate().filter(|(at, line)| self.shown.get(*at) != Some(line)) {
            out.push_str(&format!("\x1b[{};1H\x1b[K{line}", at + 1));
        }
        if !out.is_empty() {
            write_to_terminal(&out);
        }
        self.shown = lines;
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        restore_terminal();
    }
}

/// An input of the user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TerminalInput {
    /// A key.
    Key(KeyPress),
    /// Ctrl-Z.
    Stop,
}

/// Parses input bytes of a terminal; unknown sequences are ignored.
pub fn parse_terminal_input(bytes: &[u8]) -> Vec<TerminalInput> {
    let mut keys = Vec::new();
    let mut rest = bytes;
    while let [first, more @ ..] = rest {
        rest = more;
        let key = match first {
            0x1b => match more {
                [b'[' | b'O', code @ ..] => {
                    let end = code.iter().position(|byte| (0x40..=0x7e).contains(byte));
                    let Some(end) = end else { break };
                    rest = &code[end + 1..];
                    match &code[..=end] {
                        b"A" => KeyPress::Up,
                        b"B" => KeyPress::Down,
                        b"C" => KeyPress::Right,
                        b"D" => KeyPress::Left,
                        b"H" | b"1~" => KeyPress::Home,
                        b"F" | b"4~" => KeyPress::End,
                        b"5~" => KeyPress::PageUp,
                        b"6~" => KeyPress::PageDown,
                        _ => continue,
                    }
                }
                _ => KeyPress::Escape,
            },
            b'\r' | b'\n' => KeyPress::Enter,
            0x03 => KeyPress::Char('q'),
            0x1a => {
                keys.push(TerminalInput::Stop);
                continue;
            }
            byte if byte.is_ascii_graphic() || *byte == b' ' => KeyPress::Char(char::from(*byte)),
            _ => continue,
        };
        keys.push(TerminalInput::Key(key));
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys() {
        let keys = |bytes: &[u8]| -> Vec<KeyPress> {
            let key = |input: &TerminalInput| match input {
                TerminalInput::Key(key) => *key,
                TerminalInput::Stop => KeyPress::Char('Z'),
            };
            parse_terminal_input(bytes).iter().map(key).collect()
        };
        assert_eq!(
            keys(b"\x1b[A\x1bOB\x1b[5~q"),
            [KeyPress::Up, KeyPress::Down, KeyPress::PageUp, KeyPress::Char('q')]
        );
        assert_eq!(keys(b"\x1b"), [KeyPress::Escape]);
        assert_eq!(keys(b"\x1b\x1b[1;5C \r"), [KeyPress::Escape, KeyPress::Char(' '), KeyPress::Enter]);
        assert_eq!(keys(b"\x03\x1a\xc3\xa4\x00\x1b[9999"), [KeyPress::Char('q'), KeyPress::Char('Z')]);
    }
}
