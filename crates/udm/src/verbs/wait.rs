//! `udm wait`: waits for an event of a device.

use super::describe;
use crate::args::{PrintArgs, ServerArgs, parse_seconds};
use crate::output::{say, say_json};
use crate::requests::explain;
use anyhow::Result;
use clap::Args;
use std::time::{Duration, Instant};
use udm_control::api::{self, verbs};
use udm_control::client::ClientError;
use udm_core::errno::ETIMEDOUT;

/// The arguments of `udm wait`.
#[derive(Debug, Args)]
pub struct WaitArgs {
    #[command(flatten)]
    pub server: ServerArgs,
    #[command(flatten)]
    pub print: PrintArgs,
    /// The device
    pub name: String,
    /// The event number that you saw last
    #[arg(default_value_t = 0)]
    pub event_nr: u32,
    /// Then print the device, as udm info does
    #[arg(short, long)]
    pub verbose: bool,
    /// Fail after so many seconds [default: no limit]
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub timeout: Option<Duration>,
}

/// Waits for an event of a device. The server limits the time of a request, so the request is
/// repeated.
pub fn wait(args: &WaitArgs) -> Result<()> {
    let (client, begun) = (args.server.client()?, Instant::now());
    let device = loop {
        let left = args.timeout.map(|timeout| timeout.saturating_sub(begun.elapsed()));
        let timeout_ms = left.map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX));
        let wait = api::Wait { event_nr: args.event_nr, timeout_ms };
        match client.call(verbs::WAIT_EVENT.on(&args.name), &wait) {
            Ok(device) => break device,
            Err(ClientError::Refused(why))
                if why.errno == ETIMEDOUT.unsigned_abs()
                    && args.timeout.is_none_or(|timeout| begun.elapsed() < timeout) => {}
            Err(error) => return Err(explain(error, None)),
        }
    };
    if args.print.json {
        return say_json(&device);
    }
    let mut out = String::new();
    if args.verbose {
        describe(&device, &mut out);
    }
    say(&out)
}
