//! The power switch of null devices with a cache, through the program: flushed writes survive a
//! power cut, unflushed ones are lost.

mod support;

use serde_json::{Value, json};
use std::fs;
use support::nbd::Client;
use support::{Server, has, report_skip};
use udm_wire::nbd::{CommandFlags, NbdCommand};

const DISK: &str = "null:size=4M,memory_backed=1,discard=1,cache_size=1M";

/// Copies with nbdcopy, which flushes only if told to; returns true on success.
fn copy(words: &[&str]) -> bool {
    std::process::Command::new("nbdcopy").args(words).output().unwrap().status.success()
}

/// Directly over the disk, and through a queue.
#[test]
fn b13_a_power_cut_loses_what_was_not_flushed() {
    if !has("nbdcopy") || !has("qemu-io") {
        return report_skip("nbdcopy or qemu-io is not installed");
    }
    let device = |name: &str, disk: &str| format!("{name}=0 8192 linear {disk} 0");
    let devices = [device("d", DISK), device("q", &format!("{DISK},scheduler=none,irqmode=2"))];
    let devices = devices.each_ref().map(String::as_str);
    let server = Server::start_with(&devices, &["--cores", "0,1"]);
    let folder = tempfile::tempdir().unwrap();
    let (first, back) = (folder.path().join("first.img"), folder.path().join("back.img"));
    let [first, back] = [&first, &back].map(|path| path.to_str().unwrap());
    for name in ["d", "q"] {
        let uri = format!("nbd+unix:///{name}?socket={}", server.nbd.display());
        let write = |with: u8, len: usize, how: &[&str]| {
            fs::write(first, vec![with; len]).unwrap();
            assert!(copy(&[how, &[first, &uri]].concat()));
        };
        let holds = |with: u8, len: usize| {
            assert!(copy(&[&uri, back]));
            fs::read(back).unwrap()[..len].iter().filter(|byte| **byte == with).count() == len
        };
        let cycle = || {
            assert_eq!(server.says(&["power", name, "off"]), "");
            assert!(!copy(&[&uri, back]) && !copy(&[first, &uri]), "it has no power");
            assert_eq!(server.says(&["power", name, "1"]), "");
        };
        write(0x11, 256 << 10, &[]);
        assert!(holds(0x11, 256 << 10), "another client finds it");
        cycle();
        assert!(holds(0, 4 << 20), "it was in the cache alone");
        write(0x22, 256 << 10, &["--flush"]);
        write(0x33, 128 << 10, &[]);
        cycle();
        assert!(holds(0x22, 256 << 10));
        // A FUA write after a normal one, in the same connection.
        let mut client = Client::connect(&server.nbd, name);
        for (flags, with) in [(CommandFlags::empty(), 0x44), (CommandFlags::FUA, 0x55)] {
            client.send(flags, NbdCommand::Write, 0, 4096, &[with; 4096]).unwrap();
            assert_eq!(client.error(), 0);
        }
        cycle();
        assert!(holds(0x55, 4096));
        // Data beyond the size of the cache is written back: at most 1 of 4 MiB is lost.
        write(0x66, 4 << 20, &[]);
        assert!(holds(0x66, 4 << 20));
        cycle();
        assert!(copy(&[&uri, back]) && !holds(0x66, 4 << 20));
        let survived = fs::read(back).unwrap().iter().filter(|byte| **byte == 0x66).count();
        assert!(survived >= 3 << 20, "{survived}");
        let write = ["-f", "raw", "-c", "write -P 0x77 0 1M", "-c", "flush", &uri];
        assert!(std::process::Command::new("qemu-io").args(write).output().unwrap().status.success());
        cycle();
        assert!(holds(0x77, 1 << 20));
    }
}

#[test]
fn the_switch_is_shown_and_refused_where_there_is_none() {
    let table = format!("d=0 8 linear {DISK} 0\n8 8 linear {DISK} 8\n16 8 linear mem:1M 0");
    let server = Server::start(&[&table, "none=0 8 linear null:size=1M,memory_backed=1 0"]);
    let shown = |word: &str| format!("Power of 253:0 {DISK}: {word}\n");
    assert_eq!(server.says(&["power", "d"]), shown("on"));
    assert_eq!(server.says(&["power", "d", "off", "--disk", "253:0"]), "");
    assert_eq!(server.says(&["power", "d"]), shown("off"));
    assert!(server.says(&["info", "d"]).ends_with(&format!("Number of targets: 3\n{}\n", shown("off"))));
    let power: Value = serde_json::from_str(&server.says(&["power", "d", "0", "--json"])).unwrap();
    assert_eq!(power, json!([{"number": "253:0", "uri": DISK, "on": false}]));
    let (status, _, body) = server.http("POST", "/v1/devices/d/power", "{\"on\":true}");
    assert_eq!(status, 200, "{body}");
    assert_eq!(server.says(&["power", "d"]), shown("on"));
    assert_eq!(
        server.refuses(&["power", "none", "off"]),
        "udm: none: its table uses no disk with a power switch, as a null device with cache_size has\n"
    );
    assert_eq!(
        server.refuses(&["power", "d", "off", "--disk", "253:9"]),
        "udm: d: its table uses no \"253:9\" with a power switch, as a null device with cache_size has\n"
    );
    assert!(server.refuses(&["power", "x", "on"]).starts_with("udm: x: "));
}
