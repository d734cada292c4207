//! The smallest server: `nbd_serve SOCKET DEVICE [CORES [SPIN_US]]`, for example `nbd_serve
//! /tmp/nbd.sock mem:1G`. It serves until it is killed or its standard input ends.

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;
use udm_frontends::nbd::{Export, Exports, ListenAddress, NbdServer, NbdServerLimits};
use udm_runtime::{Runtime, RuntimeOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [socket, device, rest @ ..] = &args[..] else {
        return Err("usage: nbd_serve SOCKET DEVICE [CORES [SPIN_US]]".into());
    };
    let cores = rest.first().map_or(Ok(1), |n| n.parse())?;
    let spin = rest.get(1).map_or(Ok(50), |n| n.parse())?;
    let options =
        RuntimeOptions { cpus: vec![None; cores], poll: false, spin_max: Duration::from_micros(spin) };
    let runtime = Runtime::start(&options)?;
    let exports = Arc::new(Exports::new());
    let device = udm_backends::open_standalone_device(&udm_wire::uri::parse_device_uri(device)?)?;
    exports.add(Export::new("disk", "", false, device)?)?;
    let listen = [ListenAddress::Unix(socket.into())];
    let server = NbdServer::start(runtime.core_set(), exports, NbdServerLimits::default(), &listen)?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    server.stop();
    runtime.stop();
    Ok(())
}
