//! `udm power`: shows or switches the power of disks.

use crate::args::{OutputFormatArgs, ServerArgs};
use crate::output::{print_json_to_stdout, print_to_stdout};
use crate::requests::explain_client_error;
use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use std::fmt::Write;
use udm_control::api::{self, verbs};

/// The arguments of `udm power`.
#[derive(Debug, Args)]
pub struct PowerArgs {
    #[command(flatten)]
    pub server: ServerArgs,
    #[command(flatten)]
    pub print: OutputFormatArgs,
    /// The device
    pub name: String,
    /// The new state of the switch [default: show the present one]
    pub switch: Option<PowerSwitchState>,
    /// Only this disk, by number or URI as udm power shows them
    #[arg(long, value_name = "DISK")]
    pub disk: Option<String>,
}

/// The state of a power switch; null_blk's attribute has 1 and 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PowerSwitchState {
    /// The disk has power
    #[value(alias = "1")]
    On,
    /// The disk has no power
    #[value(alias = "0")]
    Off,
}

/// Runs `udm power`.
pub fn run_power_command(args: &PowerArgs) -> Result<()> {
    let client = args.server.client()?;
    let device = match args.switch {
        None => client.call(verbs::GET_DEVICE.on(&args.name), &()),
        Some(switch) => {
            let body =
                api::SetDiskPowerRequest { on: switch == PowerSwitchState::On, disk: args.disk.clone() };
            client.call(verbs::TURN_POWER.on(&args.name), &body)
        }
    };
    let mut power = device.map_err(|e| explain_client_error(e, None))?.power;
    if let Some(disk) = &args.disk {
        power.retain(|power| power.number == *disk || power.uri == *disk);
        if power.is_empty() {
            bail!("{}: its table uses no {disk:?} with a power switch", args.name);
        }
    }
    if args.print.json {
        return print_json_to_stdout(&power);
    }
    let mut out = String::new();
    if args.switch.is_none() {
        power.iter().for_each(|power| format_disk_power_state(power, &mut out));
    }
    print_to_stdout(&out)
}

/// Prints the power state of one disk.
pub fn format_disk_power_state(power: &api::DiskPowerState, out: &mut String) {
    let api::DiskPowerState { number, uri, on } = power;
    // Writing to a String can't fail.
    let _ = writeln!(out, "Power of {number} {uri}: {}", if *on { "on" } else { "off" });
}
