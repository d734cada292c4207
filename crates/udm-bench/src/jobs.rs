//! Several loads in one run, and fio's job files.

use crate::load::{BytesOrPercent, FioLoadOptions};
use crate::options::{JobOptions, WAY_OUT};
use anyhow::{Context, Result, bail, ensure};
use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches, Parser};
use std::path::PathBuf;
use udm_wire::uri::DeviceUri;

/// Maximum length of a job file in bytes.
pub const TEXT_MAX: usize = 256 << 10;

/// Maximum number of threads of all jobs of a run.
pub const JOBS_MAX: usize = 1024;

/// Maximum number of options of a job, including those of `[global]`.
const OPTIONS_MAX: usize = 256;

/// Maximum number of characters of the file in an error.
const SHOWN_MAX: usize = 300;

/// Maximum length of a line in bytes, after variables are expanded.
const LINE_MAX: usize = 64 << 10;

/// Maximum length of all lines in bytes, after variables are expanded.
const EXPANDED_MAX: usize = 2 * TEXT_MAX;

/// A load of a run, with its device, stage and group.
#[derive(Debug, Clone)]
pub struct BenchJob {
    /// The load.
    pub load: FioLoadOptions,
    /// Index of the device of the job.
    pub device: usize,
    /// The stage: a job begins when all jobs of earlier stages have ended.
    pub stage: usize,
    /// The group: the results of its jobs are summed up.
    pub group: usize,
    /// The file whose page cache is dropped before the job begins.
    pub invalidate: Option<PathBuf>,
}

impl BenchJob {
    /// The only job of a run.
    #[must_use]
    pub fn alone(load: FioLoadOptions) -> BenchJob {
        BenchJob { load, device: 0, stage: 0, group: 0, invalidate: None }
    }
}

/// A device of jobs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobDevice {
    /// The name of the device; `None` is the device of the command line.
    pub filename: Option<String>,
    /// Whether to bypass the page cache; `None` if the option is not given.
    pub direct: Option<bool>,
    /// Minimum size in bytes that its jobs need.
    pub bytes: u64,
    /// If set, a job reads the device, so the device must have data.
    pub is_read: bool,
}

/// Jobs, and the devices that they name.
#[derive(Debug, Default)]
pub struct JobFile {
    /// The jobs. Their devices are indices into `devices`.
    pub jobs: Vec<BenchJob>,
    /// The devices.
    pub devices: Vec<JobDevice>,
    /// fio's options that have no effect here, each once.
    pub ignored: Vec<String>,
    /// The stage of the last job. `group` is its group.
    stage: usize,
    group: usize,
    threads: usize,
}

impl JobFile {
    /// Adds a job after all others.
    ///
    /// # Errors
    /// If there are too many threads, or the engine does not fit the options.
    pub fn add(&mut self, mut options: JobOptions) -> Result<()> {
        options.apply_engine(min_device_bytes_for_load(&options.load)).map_err(anyhow::Error::msg)?;
        let first = self.jobs.is_empty();
        if options.stonewall && !first {
            (self.stage, self.group) = (self.stage + 1, self.group + 1);
        } else if options.new_group && !first {
            self.group += 1;
        }
        self.threads += usize::from(options.load.numjobs);
        ensure!(self.threads <= JOBS_MAX, "more than {JOBS_MAX} jobs");
        for name in &options.ignored.0 {
            if !self.ignored.contains(name) {
                self.ignored.push(name.clone());
            }
        }
        let direct = options.is_direct();
        let (load, filename) = (options.load, options.filename);
        let device = self.device(filename, direct, &load);
        let file = self.devices[device].filename.as_deref().and_then(page_cached_file_path);
        let invalidates = options.invalidate && direct != Some(true);
        let invalidate = file.filter(|_| invalidates);
        self.jobs.push(BenchJob { load, device, stage: self.stage, group: self.group, invalidate });
        Ok(())
    }

    /// The index of the device that a job needs. Adds the device if it is new.
    fn device(&mut self, filename: Option<String>, direct: Option<bool>, load: &FioLoadOptions) -> usize {
        // fio separates several files by colons. A colon inside a name is written as \:
        let filename = filename.map(|name| name.replace("\\:", ":"));
        let same = |device: &JobDevice| device.filename == filename && device.direct == direct;
        let at = self.devices.iter().position(same).unwrap_or_else(|| {
            self.devices.push(JobDevice { filename, direct, bytes: 0, is_read: false });
            self.devices.len() - 1
        });
        let device = &mut self.devices[at];
        device.bytes = device.bytes.max(min_device_bytes_for_load(load));
        device.is_read |= load.does(udm_core::Op::Read);
        at
    }
}

/// The minimum length of the device for a load; 0 for any length.
fn min_device_bytes_for_load(load: &FioLoadOptions) -> u64 {
    let size = match load.size {
        Some(BytesOrPercent::Bytes(size)) => size,
        _ => 0,
    };
    let offset = match load.offset {
        Some(BytesOrPercent::Bytes(offset)) if size > 0 => offset,
        _ => 0,
    };
    load.filesize.unwrap_or_else(|| size.saturating_add(offset))
}

/// The path of the device if it is a file that uses the page cache.
fn page_cached_file_path(device: &str) -> Option<PathBuf> {
    match udm_wire::uri::parse_device_uri(device) {
        Ok(DeviceUri::File(file)) if file.direct != Some(true) => Some(file.path),
        _ => None,
    }
}

/// A section of a file: its name, and its options in order.
struct JobFileSection {
    name: String,
    options: Vec<(String, Option<String>)>,
}

#[derive(Parser)]
struct JobOptionParser {
    #[command(flatten)]
    options: JobOptions,
}

/// Parses the load of a line of options.
#[cfg(test)]
pub(crate) fn parse_fio_load_options(text: &str) -> FioLoadOptions {
    JobOptionParser::try_parse_from(std::iter::once("bench").chain(text.split_whitespace()))
        .unwrap()
        .options
        .load
}

/// Reads a job file. The file has `[global]`, one section per job, and one `key=value` or `key` per
/// line. `;` and `#` begin comments. `${NAME}` is replaced with the value from `variable`.
///
/// # Errors
/// One line with the number of the line or the name of the job.
pub fn parse_job_file(text: &str, variable: impl Fn(&str) -> Option<String>) -> Result<JobFile> {
    ensure!(text.len() <= TEXT_MAX, "more than {TEXT_MAX} bytes");
    let mut file = JobFile::default();
    let mut global: Vec<(String, Option<String>)> = Vec::new();
    for section in parse_job_file_sections(text, variable)? {
        let name = make_printable_excerpt(&section.name);
        let all = global.len() + section.options.len();
        ensure!(all <= OPTIONS_MAX, "section {name}: more than {OPTIONS_MAX} options");
        if section.name == "global" {
            // In fio, too, `name` in [global] does not name the jobs.
            global.extend(section.options.into_iter().filter(|(key, _)| key != "name"));
            continue;
        }
        let mut line = vec!["bench".to_owned(), format!("--name={}", section.name)];
        line.extend(global.iter().chain(&section.options).map(job_option_to_argument));
        let options = parse_job_option_words(line).with_context(|| format!("job {name}"))?;
        file.add(options).with_context(|| format!("job {name}"))?;
    }
    ensure!(!file.jobs.is_empty(), "no jobs: a job begins with [NAME]");
    Ok(file)
}

/// An option as a word of a command line.
fn job_option_to_argument((key, value): &(String, Option<String>)) -> String {
    let key = if key == "device" { "filename" } else { key };
    value.as_ref().map_or_else(|| format!("--{key}"), |value| format!("--{key}={value}"))
}

/// Parses the words of a command line. If an option occurs twice, the last one counts.
fn parse_job_option_words(words: Vec<String>) -> Result<JobOptions> {
    let command =
        JobOptionParser::command().args_override_self(true).disable_help_flag(true).no_binary_name(false);
    match command.try_get_matches_from(words).and_then(|m| JobOptionParser::from_arg_matches(&m)) {
        Ok(words) => Ok(words.options),
        Err(error) => {
            let text = error.to_string();
            let (line, rest) = text.split_once('\n').unwrap_or((&text, ""));
            let known = rest.lines().next().map(str::trim).filter(|line| line.starts_with("[possible"));
            let line = line.strip_prefix("error: ").unwrap_or(line);
            let line = make_printable_excerpt([line, known.unwrap_or_default()].join(" ").trim_end());
            match error.kind() {
                ErrorKind::UnknownArgument => bail!("{line}. {WAY_OUT}"),
                _ if known.is_some() => bail!("{line}. {WAY_OUT}"),
                _ => bail!("{line}"),
            }
        }
    }
}

fn parse_job_file_sections(
    text: &str,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Vec<JobFileSection>> {
    let mut sections: Vec<JobFileSection> = Vec::new();
    let mut expanded_so_far = 0;
    for (i, line) in text.lines().enumerate() {
        let at = || format!("line {}", i + 1);
        let line = line.split([';', '#']).next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        ensure!(has_no_control_chars(line), "{}: a control character", at());
        if let Some(name) = line.strip_prefix('[') {
            let name = name.split(']').next().filter(|n| n.len() < name.len());
            let name = name.with_context(|| format!("{}: [ without ]", at()))?.trim();
            sections.push(JobFileSection { name: name.to_owned(), options: Vec::new() });
            continue;
        }
        let line = expand_variables(line, &variable).with_context(at)?;
        expanded_so_far += line.len();
        let short = expanded_so_far <= EXPANDED_MAX;
        ensure!(short, "{}: more than {EXPANDED_MAX} bytes after variables are expanded", at());
        ensure!(has_no_control_chars(&line), "{}: a control character in a variable", at());
        let (key, value) = match line.split_once('=') {
            Some((key, value)) => (key.trim(), Some(value.trim().to_owned())),
            None => (line.as_str(), None),
        };
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let is_key = !key.is_empty() && key.chars().all(is_word);
        ensure!(is_key, "{}: {:?} is not an option", at(), make_printable_excerpt(key));
        let section = sections.last_mut();
        let section = section.with_context(|| {
            format!("{}: {} outside of [] job section", at(), make_printable_excerpt(key))
        })?;
        section.options.push((key.to_owned(), value));
    }
    Ok(sections)
}

/// Whether a line has no control characters except tabs.
fn has_no_control_chars(line: &str) -> bool {
    !line.contains(|c: char| c.is_control() && c != '\t')
}

/// Text of the file, made fit for a one-line error.
fn make_printable_excerpt(text: &str) -> String {
    text.chars().take(SHOWN_MAX).map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Expands variables. A variable that is not set expands to nothing, as in fio.
fn expand_variables(line: &str, variable: impl Fn(&str) -> Option<String>) -> Result<String> {
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
        parse_job_file(text, |name| value(name).map(|(_, value)| (*value).to_owned()))
    }

    fn refused(text: &str) -> String {
        format!("{:#}", read(text).expect_err("this must be refused"))
    }

    #[test]
    fn globals_are_for_the_jobs_behind_them() {
        let file = read(
            "# a comment\n[global]\nrw=randread ; and another\nsize=${SIZE}k${NONE}\nioengine=libaio\n\
             direct=1\n[a]\ntime_based=0\nnorandommap\n[b]\nrw=write\nname=other\n[global]\niodepth=4\n\
             ioengine=sync\nname=nobody\n[ c ]\nnumjobs=3",
        )
        .unwrap();
        let names: Vec<_> = file.jobs.iter().map(|j| (j.load.name.as_str(), j.load.rw.name())).collect();
        assert_eq!(names, [("a", "randread"), ("other", "write"), ("c", "randread")]);
        let depths: Vec<_> = file.jobs.iter().map(|j| (j.load.iodepth, j.load.numjobs)).collect();
        assert_eq!(depths, [(1, 1), (1, 1), (1, 3)]);
        assert!(file.jobs[0].load.norandommap && !file.jobs[2].load.norandommap);
        assert!(file.jobs.iter().all(|j| j.load.size == Some(crate::load::BytesOrPercent::Bytes(8192))));
        assert_eq!(file.ignored, ["ioengine".to_owned(), "iodepth (1 with ioengine=sync)".into()]);
        let devices: Vec<_> =
            file.devices.iter().map(|d| (d.filename.as_deref(), d.direct, d.bytes)).collect();
        assert_eq!(devices, [(None, Some(true), 8192)]);
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
        let names: Vec<_> = file.devices.iter().map(|d| d.filename.as_deref()).collect();
        assert_eq!(names, [Some("null:size=1M"), None]);
        assert_eq!(file.jobs.iter().map(|j| j.device).collect::<Vec<_>>(), [0, 1, 0, 1]);
    }

    #[test]
    fn what_is_wrong_is_named() {
        assert_eq!(refused("[global]\nbs=4k"), "no jobs: a job begins with [NAME]");
        assert_eq!(refused("bs=4k\n[a]"), "line 1: bs outside of [] job section");
        assert_eq!(refused("[a]\n\nfoo=1"), format!("job a: unexpected argument '--foo' found. {WAY_OUT}"));
        assert!(refused("[a]\nverify=md5").ends_with(&format!("[possible values: crc32c]. {WAY_OUT}")));
        assert!(refused("[a]\nioengine=null").contains("it needs size in bytes"));
        assert!(refused("[a]\nioengine=net").ends_with(WAY_OUT));
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
        for (option, value) in [
            ("ba", "16k"),
            ("blockalign", "16k"),
            ("bsrange", "4k-64k"),
            ("bssplit", "4k/70:64k/30"),
            ("io_size", "1m"),
            ("random_distribution", "zipf:1.2"),
            ("rate_ignore_thinktime", "1"),
            ("rate_process", "poisson"),
            ("thinktime", "100"),
            ("thinktime_blocks", "2"),
        ] {
            let want = format!("job a: unexpected argument '--{option}' found. {WAY_OUT}");
            assert_eq!(refused(&format!("[a]\n{option}={value}")), want);
        }
        let cpus = |list: &str| read(&format!("[a]\ncpus_allowed={list}")).unwrap().jobs[0].load.cpus(0);
        assert_eq!((cpus("3,0-1,1"), cpus("1,")), (vec![0, 1, 3], vec![1]));
        assert_eq!(refused("[a\nbs=4k"), "line 1: [ without ]");
        assert_eq!(refused("[a]\nbs=${X"), "line 2: ${ without }");
        assert_eq!(refused("[a\u{1b}]"), "line 1: a control character");
        assert_eq!(refused("[a]\r\nname=\tb\tc\r\nfilename=\u{7}"), "line 3: a control character");
        assert_eq!(refused("[a]\nname=${BELL}"), "line 2: a control character in a variable");
        assert_eq!(refused("[a]\n-x=1"), "line 2: \"-x\" is not an option");
        assert!(refused("[a]\nfilename").starts_with("job a: a value is required for '--filename"));
    }
}
