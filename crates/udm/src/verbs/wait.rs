//! `udm wait`: waits for an event of a device.

use super::write_device_info;
use crate::args::{OutputFormatArgs, ServerArgs, parse_seconds};
use crate::output::{print_json_to_stdout, print_to_stdout};
use crate::requests::explain_client_error;
use anyhow::Result;
use clap::Args;
use std::time::{Duration, Instant};
use udm_control::api::{self, verbs};
use udm_control::client::ControlClientError;
use udm_core::errno::ETIMEDOUT;

/// The arguments of `udm wait`.
#[derive(Debug, Args)]
pub struct WaitArgs {
    #[command(flatten)]
    pub server: ServerArgs,
    #[command(flatten)]
    pub print: OutputFormatArgs,
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
pub fn run_wait_command(args: &WaitArgs) -> Result<()> {
    let (client, begun) = (args.server.client()?, Instant::now());
    let device = loop {
        let left = args.timeout.map(|timeout| timeout.saturating_sub(begun.elapsed()));
        let timeout_ms = left.map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX));
        let wait = api::WaitDeviceEventRequest { event_nr: args.event_nr, timeout_ms };
        match client.call(verbs::WAIT_EVENT.on(&args.name), &wait) {
            Ok(device) => break device,
            Err(ControlClientError::Refused(why))
                if why.errno == ETIMEDOUT.unsigned_abs()
                    && args.timeout.is_none_or(|timeout| begun.elapsed() < timeout) => {}
            Err(error) => return Err(explain_client_error(error, None)),
        }
    };
    if args.print.json {
        return print_json_to_stdout(&device);
    }
    let mut out = String::new();
    if args.verbose {
        write_device_info(&device, &mut out);
    }
    print_to_stdout(&out)
}
