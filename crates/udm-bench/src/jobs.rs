//! Several loads in one run, and fio's job files, which name them.

use crate::load::Load;
use anyhow::{Context, Result, bail, ensure};
use clap::{CommandFactory, FromArgMatches, Parser};
use udm_wire::uri::{self, DeviceUri, FileUri};

/// The longest job file in bytes.
pub const TEXT_MAX: usize = 256 << 10;

/// Threads of all jobs of a run at the most.
pub const JOBS_MAX: usize = 1024;

/// Options of a job at the most, with those of `[global]`.
const OPTIONS_MAX: usize = 256;

/// Characters of the file in an error at the most.
const SHOWN_MAX: usize = 300;

/// The longest line in bytes, with its variables put in.
const LINE_MAX: usize = 64 << 10;

/// All lines, with their variables put in.
const EXPANDED_MAX: usize = 2 * TEXT_MAX;

/// A load of a run, and where it belongs.
#[derive(Debug, Clone)]
pub struct Job {
    /// What it does.
    pub load: Load,
    /// Which of the run's devices it goes to.
    pub device: usize,
    /// It begins when all jobs of the stages before are over.
    pub stage: usize,
    /// Jobs of one group are summed up together.
    pub group: usize,
}

impl Job {
    /// The only job of a run.
    #[must_use]
    pub fn alone(load: Load) -> Job {
        Job { load, device: 0, stage: 0, group: 0 }
    }
}

/// What a job file says.
#[derive(Debug)]
pub struct JobFile {
    /// The jobs. Their devices are places in `devices`.
    pub jobs: Vec<Job>,
    /// The devices that the file names; `None` is the one of the command line.
    pub devices: Vec<Option<String>>,
    /// A job that names no device wants one past the page cache, or through it.
    pub direct: Option<bool>,
    /// Options that mean something to fio and nothing here, once each.
    pub ignored: Vec<String>,
}

/// Options about how fio reaches a file, or measures: there is one way here. All others that are
/// not [`Load`]'s change what a load does, and are refused, as fio refuses what it does not know.
const IGNORED: &[&str] = &[
    "ioengine",
    "thread",
    "invalidate",
    "refill_buffers",
    "scramble_buffers",
    "zero_buffers",
    "create_on_open",
    "create_serialize",
    "fallocate",
    "overwrite",
    "gtod_reduce",
    "gtod_cpu",
    "clocksource",
    "disk_util",
    "description",
    "unlink",
    "hipri",
    "registerfiles",
    "fixedbufs",
    "sqthread_poll",
    "mem",
    "iomem",
];

/// A section of a file: its name, and its options in order.
struct Section {
    name: String,
    options: Vec<(String, Option<String>)>,
}

#[derive(Parser)]
struct Words {
    #[command(flatten)]
    load: Load,
}

/// The load of a line of options.
#[cfg(test)]
pub(crate) fn load_of(text: &str) -> Load {
    Words::try_parse_from(std::iter::once("bench").chain(text.split_whitespace())).unwrap().load
}

/// Reads a job file: `[global]` and a section a job, `key=value` or `key` a line, `;` and `#` for
/// comments, `${NAME}` for what `variable` says.
///
/// # Errors
/// One line with the number of the line or the name of the job.
pub fn read_jobs(text: &str, variable: impl Fn(&str) -> Option<String>) -> Result<JobFile> {
    ensure!(text.len() <= TEXT_MAX, "more than {TEXT_MAX} bytes");
    let mut threads = 0;
    let mut file = JobFile { jobs: Vec::new(), devices: Vec::new(), direct: None, ignored: Vec::new() };
    let mut global: Vec<(String, Option<String>)> = Vec::new();
    let (mut stage, mut group) = (0, 0);
    for section in sections(text, variable)? {
        let name = plain(&section.name);
        let all = global.len() + section.options.len();
        ensure!(all <= OPTIONS_MAX, "section {name}: more than {OPTIONS_MAX} options");
        if section.name == "global" {
            global.extend(section.options);
            continue;
        }
        let options = global.iter().chain(&section.options);
        let words = Options::of(options, &mut file.ignored).with_context(|| format!("job {name}"))?;
        let first = file.jobs.is_empty();
        if words.stonewall && !first {
            (stage, group) = (stage + 1, group + 1);
        } else if words.new_group && !first {
            group += 1;
        }
        let mut line = vec!["bench".to_owned(), format!("--name={}", section.name)];
        line.extend(words.load);
        let load = load(line).with_context(|| format!("job {name}"))?;
        threads += usize::from(load.numjobs);
        file.direct = file.direct.or(words.direct.filter(|_| words.device.is_none()));
        ensure!(threads <= JOBS_MAX, "more than {JOBS_MAX} jobs");
        let at = file.devices.iter().position(|device| *device == words.device);
        let device = at.unwrap_or_else(|| {
            file.devices.push(words.device);
            file.devices.len() - 1
        });
        file.jobs.push(Job { load, device, stage, group });
    }
    ensure!(!file.jobs.is_empty(), "no jobs: a job begins with [NAME]");
    Ok(file)
}

/// The options of one job, by who they are for.
#[derive(Default)]
struct Options {
    /// As words of a command line.
    load: Vec<String>,
    device: Option<String>,
    /// Past the page cache, or through it, where that is said.
    direct: Option<bool>,
    stonewall: bool,
    new_group: bool,
}

impl Options {
    fn of<'a>(
        options: impl Iterator<Item = &'a (String, Option<String>)>,
        ignored: &mut Vec<String>,
    ) -> Result<Options> {
        let mut out = Options::default();
        let on = |value: &Option<String>| value.as_deref() != Some("0");
        for (key, value) in options {
            match key.as_str() {
                "stonewall" | "wait_for_previous" => out.stonewall = on(value),
                "new_group" => out.new_group = on(value),
                // fio has several files between colons, and writes one that has some with \:
                "filename" | "device" => {
                    let value = value.as_deref().with_context(|| format!("{key}: a device is wanted"))?;
                    out.device = Some(value.replace("\\:", ":"));
                }
                "direct" => out.direct = Some(on(value)),
                "buffered" => out.direct = Some(!on(value)),
                key if IGNORED.contains(&key) => {
                    if !ignored.iter().any(|k| k == key) {
                        ignored.push(key.to_owned());
                    }
                }
                key => out.load.push(match value {
                    Some(value) => format!("--{key}={value}"),
                    None => format!("--{key}"),
                }),
            }
        }
        if let (Some(device), Some(direct)) = (&mut out.device, out.direct)
            && let Ok(DeviceUri::File(file)) = uri::parse(device)
        {
            *device = DeviceUri::File(FileUri { direct: Some(direct), ..file }).to_string();
        }
        Ok(out)
    }
}

/// A load from the words of a command line; of an option that is there twice the last counts.
fn load(words: Vec<String>) -> Result<Load> {
    let command = Words::command().args_override_self(true).disable_help_flag(true).no_binary_name(false);
    match command.try_get_matches_from(words).and_then(|m| Words::from_arg_matches(&m)) {
        Ok(words) => Ok(words.load),
        Err(error) => {
            let text = error.to_string();
            let (line, rest) = text.split_once('\n').unwrap_or((&text, ""));
            let known = rest.lines().next().map(str::trim).filter(|line| line.starts_with("[possible"));
            let line = line.strip_prefix("error: ").unwrap_or(line);
            bail!("{}", plain(&[line, known.unwrap_or_default()].join(" ")).trim_end())
        }
    }
}

fn sections(text: &str, variable: impl Fn(&str) -> Option<String>) -> Result<Vec<Section>> {
    let mut sections: Vec<Section> = Vec::new();
    let mut expanded_so_far = 0;
    for (i, line) in text.lines().enumerate() {
        let at = || format!("line {}", i + 1);
        let line = line.split([';', '#']).next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        ensure!(is_shown(line), "{}: a control character", at());
        if let Some(name) = line.strip_prefix('[') {
            let name = name.split(']').next().filter(|n| n.len() < name.len());
            let name = name.with_context(|| format!("{}: [ without ]", at()))?.trim();
            sections.push(Section { name: name.to_owned(), options: Vec::new() });
            continue;
        }
        let line = expanded(line, &variable).with_context(at)?;
        expanded_so_far += line.len();
        let short = expanded_so_far <= EXPANDED_MAX;
        ensure!(short, "{}: with variables put in more than {EXPANDED_MAX} bytes", at());
        ensure!(is_shown(&line), "{}: a control character in a variable", at());
        let (key, value) = match line.split_once('=') {
            Some((key, value)) => (key.trim(), Some(value.trim().to_owned())),
            None => (line.as_str(), None),
        };
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let is_key = !key.is_empty() && key.chars().all(is_word);
        ensure!(is_key, "{}: {:?} is no option", at(), plain(key));
        let section = sections.last_mut();
        let section =
            section.with_context(|| format!("{}: {} outside of [] job section", at(), plain(key)))?;
        section.options.push((key.to_owned(), value));
    }
    Ok(sections)
}

/// Fit for a report, and for what a device says of its name.
fn is_shown(line: &str) -> bool {
    !line.contains(|c: char| c.is_control() && c != '\t')
}

/// What the file says, fit for an error's one line.
fn plain(text: &str) -> String {
    text.chars().take(SHOWN_MAX).map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// With variables put in; one that is not set is nothing, as in fio.
fn expanded(line: &str, variable: impl Fn(&str) -> Option<String>) -> Result<String> {
    let mut out = String::new();
    let mut rest = line;
    while let Some((before, after)) = rest.split_once("${") {
        let (name, behind) = after.split_once('}').context("${ without }")?;
        out.push_str(before);
        out.push_str(&variable(name).unwrap_or_default());
        ensure!(out.len() <= LINE_MAX, "longer than {LINE_MAX} bytes");
        rest = behind;
    }
    out.push_str(rest);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<JobFile> {
        let variables = [("SIZE", "8"), ("BELL", "\u{7}")];
        let value = |name: &str| variables.iter().find(|(known, _)| *known == name);
        read_jobs(text, |name| value(name).map(|(_, value)| (*value).to_owned()))
    }

    fn refused(text: &str) -> String {
        format!("{:#}", read(text).expect_err("this must be refused"))
    }

    #[test]
    fn globals_are_for_the_jobs_behind_them() {
        let file = read(
            "# a comment\n[global]\nrw=randread ; and another\nsize=${SIZE}k${NONE}\nioengine=libaio\n\
             direct=1\n[a]\ntime_based=0\nnorandommap\n[b]\nrw=write\nname=other\n[global]\niodepth=4\n\
             ioengine=sync\n[ c ]\nnumjobs=3",
        )
        .unwrap();
        let names: Vec<_> = file.jobs.iter().map(|j| (j.load.name.as_str(), j.load.rw.name())).collect();
        assert_eq!(names, [("a", "randread"), ("other", "write"), ("c", "randread")]);
        let depths: Vec<_> = file.jobs.iter().map(|j| (j.load.iodepth, j.load.numjobs)).collect();
        assert_eq!(depths, [(1, 1), (1, 1), (4, 3)]);
        assert!(file.jobs[0].load.norandommap && !file.jobs[2].load.norandommap);
        assert!(file.jobs.iter().all(|j| j.load.size == Some(crate::load::Part::Bytes(8192))));
        assert_eq!((file.ignored, file.devices), (vec!["ioengine".to_owned()], vec![None]));
        assert_eq!(file.direct, Some(true));
    }

    #[test]
    fn direct_is_past_the_page_cache() {
        let devices = |text: &str| read(text).unwrap().devices;
        let direct = |device: &str| Some(device.to_owned());
        assert_eq!(devices("[a]\nfilename=/x/d\ndirect=1"), [direct("file:/x/d?direct=on")]);
        assert_eq!(devices("[a]\nfilename=/x/d\nbuffered=0"), [direct("file:/x/d?direct=on")]);
        assert_eq!(devices("[a]\nfilename=/x/d\ndirect=0"), [direct("file:/x/d?direct=off")]);
        assert_eq!(devices("[global]\ndirect=1\n[a]\nfilename=null\\:size=1M"), [direct("null:size=1M")]);
    }

    #[test]
    fn walls_and_groups() {
        let file = read("[a]\nstonewall\n[b]\n[c]\nnew_group\n[d]\nstonewall=1\n[e]\nstonewall=0").unwrap();
        let places: Vec<_> = file.jobs.iter().map(|j| (j.stage, j.group)).collect();
        assert_eq!(places, [(0, 0), (0, 0), (0, 1), (1, 2), (1, 2)]);
    }

    #[test]
    fn jobs_share_the_devices_they_name() {
        let file = read("[a]\nfilename=null\\:size=1M\n[b]\n[c]\ndevice=null:size=1M\n[d]").unwrap();
        assert_eq!(file.devices, [Some("null:size=1M".into()), None]);
        assert_eq!(file.jobs.iter().map(|j| j.device).collect::<Vec<_>>(), [0, 1, 0, 1]);
    }

    #[test]
    fn what_is_wrong_is_named() {
        assert_eq!(refused("[global]\nbs=4k"), "no jobs: a job begins with [NAME]");
        assert_eq!(refused("bs=4k\n[a]"), "line 1: bs outside of [] job section");
        assert_eq!(refused("[a]\n\nfoo=1"), "job a: unexpected argument '--foo' found");
        assert!(refused("[a]\nbs=x").starts_with("job a: invalid value 'x' for '--bs <SIZE>'"));
        assert!(refused("[a]\nbs").contains("a value is required"));
        for bad in [
            "rate=-1",
            "rate=",
            "rate=,",
            "rate=16e",
            "rate=1m,x",
            "rate=1m:2m",
            "rate_iops=1,2,3,4",
            "rate_iops=1.5",
            "ba=0",
            "ba=4k,0",
            "ba=x",
            "blockalign=",
            "bssplit=4k/60:8k/60",
            "bssplit=4k/0.5:8k",
            "cpus_allowed=0:1",
            "cpus_allowed=0,,1",
            "cpus_allowed=",
            "cpus_allowed=-1",
            "percentile_list=-1",
            "rate_min=1k",
        ] {
            let said = refused(&format!("[a]\n{bad}"));
            assert!(said.starts_with("job a: ") && !said.contains('\n'), "{bad}: {said}");
        }
        let cpus = |list: &str| read(&format!("[a]\ncpus_allowed={list}")).unwrap().jobs[0].load.cpus(0);
        assert_eq!((cpus("3,0-1,1"), cpus("1,")), (vec![0, 1, 3], vec![1]));
        assert_eq!(refused("[a\nbs=4k"), "line 1: [ without ]");
        assert_eq!(refused("[a]\nbs=${X"), "line 2: ${ without }");
        assert_eq!(refused("[a\u{1b}]"), "line 1: a control character");
        assert_eq!(refused("[a]\r\nname=\tb\tc\r\nfilename=\u{7}"), "line 3: a control character");
        assert_eq!(refused("[a]\nname=${BELL}"), "line 2: a control character in a variable");
        assert_eq!(refused("[a]\n-x=1"), "line 2: \"-x\" is no option");
        assert_eq!(refused("[a]\nfilename"), "job a: filename: a device is wanted");
    }
}
