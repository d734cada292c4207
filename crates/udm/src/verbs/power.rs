//! The power of disks: `udm power`, and how people read it.

use super::explain;
use crate::cli::{PowerArgs, PowerSwitch};
use crate::output::{say, say_json};
use anyhow::{Result, bail};
use std::fmt::Write;
use udm_control::api::{self, verbs};

/// `udm power`.
pub fn power(args: &PowerArgs) -> Result<()> {
    let client = args.talk.client()?;
    let device = match args.switch {
        None => client.call(verbs::GET_DEVICE.on(&args.name), &()),
        Some(switch) => {
            let body = api::TurnPower { on: switch == PowerSwitch::On, disk: args.disk.clone() };
            client.call(verbs::TURN_POWER.on(&args.name), &body)
        }
    };
    let mut power = device.map_err(|e| explain(e, None))?.power;
    if let Some(disk) = &args.disk {
        power.retain(|power| power.number == *disk || power.uri == *disk);
        if power.is_empty() {
            bail!("{}: its table uses no {disk:?} with a power switch", args.name);
        }
    }
    if args.print.json {
        return say_json(&power);
    }
    let mut out = String::new();
    if args.switch.is_none() {
        power.iter().for_each(|power| power_line(power, &mut out));
    }
    say(&out)
}

/// The line of one disk.
pub fn power_line(power: &api::Power, out: &mut String) {
    let api::Power { number, uri, on } = power;
    // Writing to a String can't fail.
    let _ = writeln!(out, "Power of {number} {uri}: {}", if *on { "on" } else { "off" });
}
