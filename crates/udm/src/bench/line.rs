//! The jobs of the command line. As with fio, there may be several: each begins with `--name`.
//! Options before the first job, or after `--name=global`, apply to all jobs that follow.

use super::BenchArgs;
use anyhow::Result;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, FromArgMatches, Parser};
use std::ffi::OsString;
use udm_bench::{JobFile, JobOptions, WAY_OUT};

/// The options of one job.
#[derive(Parser)]
#[command(args_override_self = true)]
struct BenchJobArgs {
    #[command(flatten)]
    args: BenchArgs,
}

/// Parses the jobs from the words after `udm bench`, which `args` has parsed as one job.
///
/// # Errors
/// One line that names the option.
pub fn parse_bench_jobs_from_args(
    args: &BenchArgs,
    words: impl Iterator<Item = OsString>,
) -> Result<JobFile> {
    let words: Vec<String> = words.map(|word| word.to_string_lossy().into_owned()).collect();
    let mut file = JobFile::default();
    let parts = split_bench_args_by_job(&words);
    if parts.len() < 2 {
        file.add(args.options.clone())?;
        return Ok(file);
    }
    for words in parts {
        file.add(parse_bench_job_options(&words)?)?;
    }
    Ok(file)
}

/// Options that measure a connection, and need no device.
const CONNECTIONS: [&str; 3] = ["--floor", "--nbd", "--vhost-user"];

fn parse_bench_job_options(words: &[String]) -> Result<JobOptions> {
    // The device may be given for the whole line, so each job gets a placeholder.
    let device = ["--device", "@"]
        .into_iter()
        .filter(|_| !words.iter().any(|word| CONNECTIONS.iter().any(|option| word.starts_with(option))));
    let words = std::iter::once("bench").chain(device).chain(words.iter().map(String::as_str));
    let line = BenchJobArgs::command()
        .try_get_matches_from(words)
        .and_then(|m| BenchJobArgs::from_arg_matches(&m))?;
    Ok(line.args.options)
}

/// Splits the words into jobs; each begins with the global words.
fn split_bench_args_by_job(words: &[String]) -> Vec<Vec<String>> {
    let (mut global, mut jobs) = (Vec::new(), Vec::<Vec<String>>::new());
    let mut for_all = true;
    let mut words = words.iter().peekable();
    while let Some(word) = words.next() {
        let name = match word.strip_prefix("--name") {
            Some("") => words.next().cloned(),
            Some(rest) => rest.strip_prefix('=').map(str::to_owned),
            None => None,
        };
        match name {
            Some(name) => {
                for_all = name.starts_with("global");
                if !for_all {
                    jobs.push(global.clone());
                    jobs.last_mut().expect("one was added").push(format!("--name={name}"));
                }
            }
            None if for_all => global.push(word.clone()),
            None => jobs.last_mut().expect("not for all is for one").push(word.clone()),
        }
    }
    jobs
}

/// Adds a hint to an error about an option that `udm bench` does not have.
pub fn add_unknown_option_hint(mut error: clap::Error) -> clap::Error {
    let known = error.get(ContextKind::ValidValue).is_some();
    if error.kind() == ErrorKind::UnknownArgument || (error.kind() == ErrorKind::InvalidValue && known) {
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![WAY_OUT.into()]));
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(line: &str) -> Vec<String> {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        split_bench_args_by_job(&words).iter().map(|words| words.join(" ")).collect()
    }

    #[test]
    fn jobs_begin_with_their_names() {
        assert_eq!(
            split("--bs 4k --name=a --rw=read --name b --rw=write"),
            ["--bs 4k --name=a --rw=read", "--bs 4k --name=b --rw=write"]
        );
        assert_eq!(
            split("--name=global --bs=8k --name=a --name=global --rw=read --name=b"),
            ["--bs=8k --name=a", "--bs=8k --rw=read --name=b"]
        );
        assert!(split("--bs=4k").is_empty());
    }
}
