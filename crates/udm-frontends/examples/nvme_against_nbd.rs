//! Compares the NVMe/TCP target with the NBD server: reads of 4 KiB from a null device over
//! loopback, one core, one connection, in turns. `nvme_against_nbd [SECONDS]` prints requests per
//! second for each depth.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};
use udm_frontends::nbd::{BoundAddress, Export, Exports, ListenAddress, NbdServer, NbdServerLimits};
use udm_frontends::nvme::{NvmeServer, NvmeServerOptions, default_subsystem_nqn};
use udm_runtime::{Runtime, RuntimeOptions};
use udm_wire::nvme::{
    ConnectCommand, ConnectData, InitializeRequest, NvmeCommand, PduLimits, encode_capsule_command,
};

const BLOCK: usize = 4096;
const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-555555555555";
const LIMITS: PduLimits =
    PduLimits { header_digest: false, data_digest: false, capsule_data_max: 8192, data_max: 1 << 20 };

/// Sends a command, with data in its capsule.
fn send(stream: &mut TcpStream, bytes: [u8; 64], data: &[u8]) {
    let mut header = [0; 128];
    let len = (!data.is_empty()).then_some(data.len() as u32);
    let header_len = encode_capsule_command(&mut header, &NvmeCommand::from_bytes(bytes), len, &LIMITS);
    stream.write_all(&[&header[..header_len], data].concat()).expect("the target");
}

/// A connected queue of `controller`, and the controller that it belongs to.
fn nvme_queue(address: SocketAddr, subsystem: &str, queue: u16, controller: u16) -> (TcpStream, u16) {
    let mut stream = TcpStream::connect(address).expect("the target");
    stream.set_nodelay(true).expect("a TCP socket");
    let request = InitializeRequest {
        version: 0,
        host_alignment: 0,
        header_digest: false,
        data_digest: false,
        max_r2t: 0,
    };
    stream.write_all(&request.encode()).expect("the target");
    stream.read_exact(&mut [0; 128]).expect("ICResp");
    let connect =
        ConnectCommand { format: 0, queue, queue_size: 127, no_flow_control: true, keep_alive_ms: 0 };
    let data =
        ConnectData { host_id: [1; 16], controller, subsystem: subsystem.to_owned(), host: HOST.to_owned() };
    send(&mut stream, *connect.encode(1).bytes(), &data.encode());
    let mut response = [0; 24];
    stream.read_exact(&mut response).expect("a response");
    assert_eq!(response[22..], [0, 0], "the status of Connect");
    (stream, u16::from_le_bytes([response[8], response[9]]))
}

/// Sends `request` again and again, `depth` at a time, and reads `answer` bytes for each. Returns
/// requests per second.
fn measure(stream: &mut TcpStream, request: &[u8], answer: usize, depth: usize, time: Duration) -> f64 {
    let mut buffer = vec![0; 1 << 20];
    let (mut received, mut answered, begin) = (0, 0, Instant::now());
    let all = request.repeat(depth);
    stream.write_all(&all).expect("the server");
    while begin.elapsed() < time {
        received += stream.read(&mut buffer).expect("the server");
        let done = received / answer - answered;
        answered += done;
        stream.write_all(&all[..done * request.len()]).expect("the server");
    }
    let rate = answered as f64 / begin.elapsed().as_secs_f64();
    while received < (answered + depth) * answer {
        received += stream.read(&mut buffer).expect("the server");
    }
    rate
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let seconds: f64 = std::env::args().nth(1).map_or(Ok(2.0), |word| word.parse())?;
    let time = Duration::from_secs_f64(seconds);
    let options = RuntimeOptions { cpus: vec![None], poll: false, spin_max: Duration::from_micros(50) };
    let runtime = Runtime::start(&options)?;
    let exports = Arc::new(Exports::new());
    let device = udm_backends::open_standalone_device(&udm_wire::uri::parse_device_uri("null:1G")?)?;
    exports.add(Export::new("disk", "", false, device)?)?;
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let listen = [ListenAddress::Tcp(any)];
    let nbd = NbdServer::start(runtime.core_set(), exports.clone(), NbdServerLimits::default(), &listen)?;
    let options =
        NvmeServerOptions { subsystem: default_subsystem_nqn(&["example"]), ..NvmeServerOptions::default() };
    let nvme = NvmeServer::start(runtime.core_set(), &exports, options, &[any])?;

    // NBD: the handshake with EXPORT_NAME, then simple replies.
    let BoundAddress::Tcp(address) = nbd.bound()[0].clone() else { return Err("no TCP".into()) };
    let mut nbd_stream = TcpStream::connect(address)?;
    nbd_stream.set_nodelay(true)?;
    nbd_stream.read_exact(&mut [0; 18])?;
    nbd_stream.write_all(&[&[0, 0, 0, 3][..], b"IHAVEOPT", &[0, 0, 0, 1, 0, 0, 0, 4], b"disk"].concat())?;
    nbd_stream.read_exact(&mut [0; 10])?;
    let nbd_read = [&[0x25, 0x60, 0x95, 0x13][..], &[0; 20], &(BLOCK as u32).to_be_bytes()].concat();

    let (mut admin, controller) = nvme_queue(nvme.bound()[0], nvme.subsystem(), 0, 0xffff);
    let mut enable = [0; 64];
    (enable[0], enable[1], enable[44]) = (0x7f, 0x40, 0x14);
    enable[48..52].copy_from_slice(&0x0046_0001_u32.to_le_bytes());
    send(&mut admin, enable, &[]);
    admin.read_exact(&mut [0; 24])?;
    let (mut nvme_stream, _) = nvme_queue(nvme.bound()[0], nvme.subsystem(), 1, controller);
    let mut read = [0; 64];
    (read[0], read[1], read[4], read[39], read[48]) = (2, 0x40, 1, 0x5a, (BLOCK / 512 - 1) as u8);
    read[32..36].copy_from_slice(&(BLOCK as u32).to_le_bytes());
    let mut nvme_read = [0; 128];
    let len = encode_capsule_command(&mut nvme_read, &NvmeCommand::from_bytes(read), None, &LIMITS);

    for depth in [1, 32, 128] {
        let (mut nbd_rate, mut nvme_rate) = (0_f64, 0_f64);
        for _ in 0..3 {
            nbd_rate = nbd_rate.max(measure(&mut nbd_stream, &nbd_read, 16 + BLOCK, depth, time));
            nvme_rate = nvme_rate.max(measure(&mut nvme_stream, &nvme_read[..len], 24 + BLOCK, depth, time));
        }
        let line = format!(
            "depth {depth}: nbd {nbd_rate:.0}/s, nvme {nvme_rate:.0}/s, ratio {:.2}\n",
            nvme_rate / nbd_rate
        );
        std::io::stdout().write_all(line.as_bytes())?;
    }
    drop((admin, nvme_stream, nbd_stream, nvme));
    nbd.stop();
    runtime.stop();
    Ok(())
}
