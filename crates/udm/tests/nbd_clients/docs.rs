//! The examples of the documentation, run like a reader runs them: each command in order, in one
//! shell, in an empty folder.
//!
//! In a block of `sh` each command must succeed. In a block of `console`, a line after `$ ` is a
//! command, and the lines up to the next command are its output; if these contain `udm: ...`, the
//! command must fail. Numbers are not compared, and `...` matches the rest of a line. Blocks that
//! begin with `make` are skipped: they are for the Makefile. Blocks that begin with `# as root` run
//! only as root, and blocks that begin with `# with /dev/fuse` only if that can be opened. A block
//! of `python NAME` is the file of that name.

use super::server::{UDM, sh};
use super::{Outcome, check};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use tempfile::TempDir;

pub fn readme() -> Outcome {
    run_document("README.md")
}

pub fn tour() -> Outcome {
    run_document("docs/tour.md")
}

pub fn recipes() -> Outcome {
    run_document("docs/recipes.md")
}

pub fn targets() -> Outcome {
    run_document("docs/targets.md")
}

pub fn multipath() -> Outcome {
    run_document("docs/multipath.md")
}

pub fn vhost_user() -> Outcome {
    run_document("docs/vhost-user.md")
}

pub fn nvme() -> Outcome {
    run_document("docs/nvme.md")
}

pub fn upgrade() -> Outcome {
    run_document("docs/upgrade.md")
}

pub fn tls() -> Outcome {
    run_document("docs/tls.md")
}

pub fn throttle() -> Outcome {
    run_document("docs/throttle.md")
}

pub fn sandbox() -> Outcome {
    // It ends after the restriction, because there are no certificates.
    let options = "--sandbox --device d=mem:1M --port 0 --tls require --tls-certificates /nonexistent";
    let said = sh(&format!("UDM_SOCKET=/tmp/none {UDM} serve {options} 2>&1 || true"))?;
    if said.contains("no Landlock") {
        return Ok(());
    }
    run_document("docs/sandbox.md")
}

pub fn bench() -> Outcome {
    run_document("docs/bench.md")
}

pub fn config() -> Outcome {
    run_document("docs/config.md")
}

pub fn images() -> Outcome {
    run_document("docs/images.md")
}

pub fn clone() -> Outcome {
    run_document("docs/clone.md")
}

pub fn moves() -> Outcome {
    run_document("docs/move.md")
}

pub fn snapshots() -> Outcome {
    run_document("docs/snapshots.md")
}

/// A command, and its output if the page shows it.
struct DocCommand {
    line: usize,
    command: String,
    prints: Option<String>,
}

fn steps(text: &str) -> Vec<DocCommand> {
    let mut steps: Vec<DocCommand> = Vec::new();
    let mut lines = text.lines().enumerate().peekable();
    while let Some((begin, line)) = lines.next() {
        if let Some(name) = line.strip_prefix("```python ") {
            let file: String = lines
                .by_ref()
                .map(|(_, line)| line)
                .take_while(|line| *line != "```")
                .fold(String::new(), |all, line| all + line + "\n");
            let command = format!("cat >{name} <<'END'\n{file}END");
            steps.push(DocCommand { line: begin + 1, command, prints: None });
            continue;
        }
        let console = line == "```console";
        if !console && line != "```sh" {
            continue;
        }
        let block: Vec<(usize, &str)> = lines.by_ref().take_while(|(_, line)| *line != "```").collect();
        let first = block.first().map_or("", |(_, line)| *line);
        let root = rustix::process::getuid().is_root() && Path::new("/dev/loop0").exists();
        let fuse = || fs::File::options().read(true).write(true).open("/dev/fuse").is_ok();
        let skipped = first.starts_with("make")
            || first == "# as root" && !root
            || first == "# with /dev/fuse" && !fuse();
        if skipped {
            continue;
        }
        // A command continues after a backslash, and up to the last line of a here-document.
        let (mut goes_on, mut here_ends) = (false, None);
        for (number, line) in block {
            let command = if console { line.strip_prefix("$ ") } else { Some(line) };
            match (command, steps.last_mut()) {
                (_, Some(step)) if goes_on || here_ends.is_some() => step.command += &format!("\n{line}"),
                (Some(command), _) if command.is_empty() || command.starts_with('#') => {}
                (Some(command), _) => {
                    let prints = console.then(String::new);
                    steps.push(DocCommand { line: number + 1, command: command.into(), prints });
                }
                (None, Some(DocCommand { prints: Some(prints), .. })) => *prints += &format!("{line}\n"),
                (None, _) => panic!("line {}: output of no command", number + 1),
            }
            here_ends = match here_ends {
                Some(end) if line == end => None,
                Some(end) => Some(end),
                None => line.split_once("<<'").and_then(|(_, end)| end.strip_suffix('\'')),
            };
            goes_on = line.ends_with('\\');
        }
    }
    steps
}

fn run_document(document: &str) -> Outcome {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("crates/udm in the root");
    let steps = steps(&fs::read_to_string(root.join(document))?);
    check(steps.len() >= 3, "too few commands found")?;
    let (folder, reply) = (TempDir::new()?, TempDir::new()?);
    let mut script = String::new();
    for (i, step) in steps.iter().enumerate() {
        let at = reply.path().join(i.to_string()).display().to_string();
        let command = format!("{{ {}\n}} >'{at}' 2>&1 </dev/null; echo $? >'{at}.status'", step.command);
        // The log is written some time after the event.
        let lines = step.prints.iter().flat_map(|shown| shown.lines()).count();
        script += &match step.command.contains("udm.log") {
            true => format!(
                "for n in $(seq 100); do {command}; [ $(wc -l <'{at}') -ge {lines} ] && break; sleep 0.1; done\n"
            ),
            false => format!("{command}\n"),
        };
    }
    let bin = Path::new(UDM).parent().expect("a folder").display().to_string();
    let path = std::env::var("PATH").unwrap_or_default();
    let place = folder.path();
    let log = fs::File::create(reply.path().join("log"))?;
    let ended = Command::new("timeout")
        .args(["-k", "5", "200", "sh", "-c", &script])
        .current_dir(place)
        .env("PATH", format!("{bin}:/usr/bin:{path}:/usr/sbin:/sbin"))
        .env("HOME", place)
        .env("TMPDIR", place)
        .env("XDG_RUNTIME_DIR", place)
        .env("UDM_SOCKET", place.join("control.sock"))
        .env_remove("UDM_LOG")
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .status()?;
    let checked =
        steps.iter().enumerate().try_for_each(|(i, step)| matches(step, &reply.path().join(i.to_string())));
    let left = end_what_is_left(place);
    check(ended.success(), &format!("{document}: {ended}"))?;
    checked.map_err(|e| format!("{document}: {}", e.message().unwrap_or_default()))?;
    check(left == 0, &format!("{document}: {left} servers are left running"))
}

/// Checks status and output of a command against the page.
fn matches(step: &DocCommand, reply: &Path) -> Outcome {
    let output = fs::read_to_string(reply).unwrap_or_default();
    let status = fs::read_to_string(reply.with_extension("status")).unwrap_or_else(|_| "none".into());
    let shown = step.prints.as_deref().unwrap_or_default();
    let fails = shown.starts_with("udm: ") && step.command.contains("--unix -");
    let context = || format!("line {}: {}\nstatus {status}{output}", step.line, step.command);
    check((status.trim() == "0") != fails, &context())?;
    let Some(shown) = &step.prints else { return Ok(()) };
    let (want, got) = (normalize_output(shown), normalize_output(&output));
    let same = want.len() == got.len()
        && want.iter().zip(&got).all(|(want, got)| match want.strip_suffix("...") {
            Some(begin) => got.starts_with(begin),
            None => want == got,
        });
    check(same, &format!("{}\nand not\n{shown}", context()))
}

/// Lines without trailing blanks, with each number reduced to one digit.
fn normalize_output(text: &str) -> Vec<String> {
    let plain = |line: &str| {
        let mut out = String::new();
        for c in line.trim_end().chars() {
            let c = if c.is_ascii_digit() { '0' } else { c };
            if c != '0' || !out.ends_with('0') {
                out.push(c);
            }
        }
        out
    };
    text.lines().map(plain).collect()
}

/// Ends the servers that the page left running, by its pid files; returns their number.
fn end_what_is_left(folder: &Path) -> usize {
    let mut left = 0;
    let folders =
        fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path()).chain([folder.to_owned()]);
    for pid in folders.filter_map(|f| fs::read_to_string(f.join("udm.pid")).ok()) {
        let Some(pid) = pid.trim().parse().ok().and_then(rustix::process::Pid::from_raw) else { continue };
        for _ in 0..200 {
            if rustix::process::test_kill_process(pid).is_err() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        left += usize::from(rustix::process::kill_process(pid, rustix::process::Signal::KILL).is_ok());
    }
    left
}
