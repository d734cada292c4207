//! `udm throttle`: shows or changes limits of requests and bytes per second.

use super::show::find_devices;
use crate::args::{OutputFormatArgs, ServerArgs};
use crate::output::{print_json_to_stdout, print_to_stdout};
use crate::requests::explain_client_error;
use anyhow::{Result, bail};
use clap::Args;
use std::fmt::Write;
use udm_control::api::{self, verbs};

/// The arguments of `udm throttle`.
#[derive(Debug, Args)]
pub struct ThrottleArgs {
    #[command(flatten)]
    pub server: ServerArgs,
    #[command(flatten)]
    pub print: OutputFormatArgs,
    /// The device [default: show all that have limits]
    pub name: Option<String>,
    /// Limits, or none [default: show the present ones]
    #[arg(value_name = "LIMIT")]
    pub limits: Vec<String>,
    /// Share the limits of this group of devices
    #[arg(long, value_name = "GROUP")]
    pub group: Option<String>,
}

/// Runs `udm throttle`.
pub fn run_throttle_command(args: &ThrottleArgs) -> Result<()> {
    let client = args.server.client()?;
    let changes = !args.limits.is_empty() || args.group.is_some();
    let devices = match &args.name {
        None if args.group.is_some() => bail!("--group: name the device that joins the group"),
        None => find_devices(&client, &[])?,
        Some(name) if changes => {
            let limits = (!args.limits.is_empty()).then(|| args.limits.join(" "));
            let body = api::ThrottleDeviceRequest { limits, group: args.group.clone() };
            let device = client.call(verbs::THROTTLE_DEVICE.on(name), &body);
            vec![device.map_err(|e| explain_client_error(e, None))?]
        }
        Some(name) => find_devices(&client, std::slice::from_ref(name))?,
    };
    if args.print.json {
        let throttles: serde_json::Map<String, serde_json::Value> = devices
            .into_iter()
            .filter_map(|device| Some((device.name, serde_json::to_value(device.throttle?).ok()?)))
            .collect();
        return print_json_to_stdout(&throttles);
    }
    let mut out = String::new();
    if !changes {
        for device in &devices {
            match &device.throttle {
                Some(throttle) => {
                    let _ = writeln!(out, "{}: {}", device.name, format_device_throttle(throttle));
                }
                None if args.name.is_some() => {
                    let _ = writeln!(out, "{}: none", device.name);
                }
                None => {}
            }
        }
        if out.is_empty() {
            out.push_str("No device has limits\n");
        }
    }
    print_to_stdout(&out)
}

/// One line: the limits, the group, and how many requests wait.
pub fn format_device_throttle(throttle: &api::DeviceThrottle) -> String {
    let api::DeviceThrottle { limits, group, waiting, delayed, .. } = throttle;
    let mut line = limits.clone();
    if let Some(group) = group {
        // Writing to a String can't fail.
        let _ = write!(line, ", shared by group {group}");
    }
    let _ = write!(line, "; {waiting} waiting, {delayed} delayed");
    line
}
