//! `udm queue`: shows or changes the request queues in front of disks.

use crate::args::{OutputFormatArgs, ServerArgs};
use crate::output::{print_json_to_stdout, print_to_stdout};
use crate::requests::explain_client_error;
use anyhow::{Result, bail};
use clap::Args;
use std::collections::BTreeMap;
use std::fmt::Write;
use udm_control::api::{self, verbs};

/// The arguments of `udm queue`.
#[derive(Debug, Args)]
pub struct QueueArgs {
    #[command(flatten)]
    pub server: ServerArgs,
    #[command(flatten)]
    pub print: OutputFormatArgs,
    /// The device
    pub name: String,
    /// Settings to change [default: show the present ones]
    #[arg(value_name = "SETTING")]
    pub settings: Vec<String>,
    /// Only this queue, by number or URI as udm queue shows them
    #[arg(long, value_name = "DISK")]
    pub disk: Option<String>,
}

/// Runs `udm queue`.
pub fn run_queue_command(args: &QueueArgs) -> Result<()> {
    let client = args.server.client()?;
    let mut settings = BTreeMap::new();
    for setting in &args.settings {
        let Some((name, value)) = setting.split_once('=') else {
            bail!("{setting:?} is not NAME=VALUE");
        };
        if settings.insert(name.to_owned(), value.to_owned()).is_some() {
            bail!("{name} is given twice");
        }
    }
    let device = if settings.is_empty() {
        client.call(verbs::GET_DEVICE.on(&args.name), &())
    } else {
        let change = api::ChangeQueueSettingsRequest { settings, disk: args.disk.clone() };
        client.call(verbs::CHANGE_QUEUE.on(&args.name), &change)
    };
    let mut queues = device.map_err(|e| explain_client_error(e, None))?.queues;
    if let Some(disk) = &args.disk {
        queues.retain(|queue| queue.number == *disk || queue.uri == *disk);
        if queues.is_empty() {
            bail!("{}: its table uses no {disk:?} with a queue in front", args.name);
        }
    }
    if args.print.json {
        return print_json_to_stdout(&queues);
    }
    let mut out = String::new();
    if args.settings.is_empty() {
        queues.iter().for_each(|queue| format_request_queue(queue, &mut out));
    }
    print_to_stdout(&out)
}

/// Prints one queue: its disk, its settings, and one line per hardware queue.
pub fn format_request_queue(queue: &api::RequestQueueReport, out: &mut String) {
    let api::RequestQueueReport { number, uri, scheduler, settings, hw_queues } = queue;
    // Writing to a String can't fail.
    let _ = write!(out, "Queue of {number} {uri}:\n  scheduler={scheduler}");
    for (name, value) in settings {
        let _ = write!(out, " {name}={value}");
    }
    out.push('\n');
    for hw in hw_queues {
        let cores: Vec<String> = hw.cores.iter().map(u64::to_string).collect();
        let (s, cores) = (if cores.len() == 1 { "" } else { "s" }, cores.join(","));
        let (used, tags) = (hw.tags_in_use, hw.tags);
        let _ = write!(out, "  core{s} {cores}: {used} of {tags} tags in use");
        if hw.in_line > 0 {
            let _ = write!(out, ", {} in line", hw.in_line);
        }
        if let Some(api::SharedTagUsage { held, most, tags, disks }) = &hw.shared {
            let _ =
                write!(out, "; {held} of {tags} shared with other disks, {most} at the most, {disks} active");
        }
        out.push('\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_is_a_few_lines() {
        let hw = |cores: &[u64], in_line| api::HwQueue {
            cores: cores.to_vec(),
            tags: 4,
            tags_in_use: 4,
            in_line,
            shared: None,
        };
        let queue = api::RequestQueueReport {
            number: "253:0".into(),
            uri: "mem:1M,queue_depth=4".into(),
            scheduler: "none".into(),
            settings: [("nomerges".to_owned(), 0), ("queue_depth".to_owned(), 4)].into(),
            hw_queues: vec![hw(&[0, 1], 2), hw(&[2], 0)],
        };
        let mut out = String::new();
        format_request_queue(&queue, &mut out);
        let expected = "Queue of 253:0 mem:1M,queue_depth=4:\n  scheduler=none nomerges=0 queue_depth=4\n  \
                      cores 0,1: 4 of 4 tags in use, 2 in line\n  core 2: 4 of 4 tags in use\n";
        assert_eq!(out, expected);
    }
}
