//! Null devices with a limit on the request size: how long requests are split.

mod support;

use serde_json::Value;
use support::{Server, text, udm};

/// Reads 128 KiB at once from a multipath device over null devices with these limits in sectors.
/// Returns the requests and bytes of each path.
fn served(max_sectors: &[u32]) -> Vec<(u64, u64)> {
    let paths: Vec<_> = max_sectors.iter().map(|n| format!("null:size=4M,max_sectors={n} 1")).collect();
    let table = format!("d=0 8192 multipath 0 0 1 1 round-robin 0 {} 1 {}", paths.len(), paths.join(" "));
    let server = Server::start(&[&table]);
    let uri = format!("nbd+unix:///d?socket={}", server.nbd.display());
    let load = ["--rw", "read", "--bs", "128k", "--number_ios", "1"];
    let out = udm(&["bench", "--nbd", &uri]).args(load).output().unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    let status: Value = serde_json::from_str(&server.says(&["status", "d", "--json"])).unwrap();
    let number = |path: &Value, key: &str| path["served"]["read"][key].as_u64().unwrap();
    let paths = status[0]["paths"].as_array().unwrap().iter();
    paths.map(|path| (number(path, "requests"), number(path, "bytes"))).collect()
}

#[test]
fn b04_a_request_longer_than_the_device_takes() {
    assert_eq!(served(&[255]), [(2, 128 << 10)], "127.5 KiB, then the rest");
    assert_eq!(served(&[256]), [(1, 128 << 10)]);
}

#[test]
fn b05_the_shortest_limit_of_the_paths() {
    assert_eq!(served(&[254, 64]), [(2, 64 << 10); 2], "32 KiB each");
}
