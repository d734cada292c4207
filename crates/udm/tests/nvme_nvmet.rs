//! The NVMe/TCP initiator and the target of a real kernel, which nobody here wrote. The test runs
//! only if `UDM_TEST_KERNEL` is a folder with an unpacked kernel package
//! (docs/internals/kernel-rows.md).

mod support;

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use support::guest::{GuestKernel, output};
use support::servers::fio;
use support::{Server, has, text, until};
use tempfile::TempDir;

/// The modules of a target, in the order of their dependencies; those that are built in are missing
/// from the package.
const TARGET: [&str; 11] = [
    "failover",
    "net_failover",
    "virtio_net",
    "crc32c_generic",
    "configfs",
    "nvme-common",
    "nvme-keyring",
    "nvme-auth",
    "nvme-core",
    "nvmet",
    "nvmet-tcp",
];

const SUBSYSTEM: &str = "nqn.2026-11.org.example:nvmet";

/// Sectors of the disk.
const SECTORS: u64 = (32 << 20) / 512;

/// Times that each port is removed and added again.
const ROUNDS: usize = 2;

/// The target's subsystem with one disk on two ports. Each port is removed for a while in turn.
const SCRIPT: &str = "\
    busybox ip link set lo up; busybox ip addr add 10.0.2.15/24 dev eth0; busybox ip link set eth0 up\n\
    mount -t configfs c /sys/kernel/config; cd /sys/kernel/config/nvmet || echo FAILED configfs\n\
    S=subsystems/SUBSYSTEM; mkdir $S; echo 1 > $S/attr_allow_any_host; mkdir $S/namespaces/1\n\
    echo -n /dev/vda > $S/namespaces/1/device_path; echo 1 > $S/namespaces/1/enable || echo FAILED namespace\n\
    add() { busybox ln -s $PWD/$S ports/$1/subsystems/SUBSYSTEM && echo ADDED $1 || echo FAILED port; }\n\
    for p in 1 2; do\n\
      mkdir ports/$p; echo ipv4 > ports/$p/addr_adrfam; echo tcp > ports/$p/addr_trtype\n\
      echo 10.0.2.15 > ports/$p/addr_traddr; echo $((4419+p)) > ports/$p/addr_trsvcid; add $p\n\
    done\n\
    echo READY\n\
    sleep 40\n\
    for round in $(seq ROUNDS); do for p in 1 2; do\n\
      sleep 3; rm ports/$p/subsystems/SUBSYSTEM; echo REMOVED $p; sleep 3; add $p; sleep 6\n\
    done; echo ROUND $round; done\n\
    sleep 600\n";

const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-555555555555";
const SECRET: &str = "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:";
const OTHER: &str = "DHHC-1:02:d4gmzh5i0I3npDMWAmJX/nAvAw7ioKmS2w44ceutFeObYDFG/r6zOB3UW0FLzevsI7XDJg==:";

/// The hashes that a target may ask for.
const HASHES: [&str; 3] = ["hmac(sha256)", "hmac(sha384)", "hmac(sha512)"];

/// A target that asks one host for its secret, with each hash for a while.
const SECRETS: &str = "\
    busybox ip link set lo up; busybox ip addr add 10.0.2.15/24 dev eth0; busybox ip link set eth0 up\n\
    mount -t configfs c /sys/kernel/config; cd /sys/kernel/config/nvmet || echo FAILED configfs\n\
    S=subsystems/SUBSYSTEM; mkdir $S; mkdir $S/namespaces/1\n\
    echo -n /dev/vda > $S/namespaces/1/device_path; echo 1 > $S/namespaces/1/enable || echo FAILED namespace\n\
    H=hosts/HOST; mkdir $H; echo SECRET > $H/dhchap_key || echo FAILED key\n\
    echo OTHER > $H/dhchap_ctrl_key || echo FAILED controller key\n\
    busybox ln -s $PWD/$H $S/allowed_hosts/HOST || echo FAILED host\n\
    mkdir ports/1; echo ipv4 > ports/1/addr_adrfam; echo tcp > ports/1/addr_trtype\n\
    echo 10.0.2.15 > ports/1/addr_traddr; echo 4420 > ports/1/addr_trsvcid\n\
    busybox ln -s $PWD/$S ports/1/subsystems/SUBSYSTEM || echo FAILED port\n\
    for hash in HASHES; do echo $hash > $H/dhchap_hash || echo FAILED hash; echo HASH $hash; sleep 15; done\n\
    sleep 600\n";

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A disk of a Linux target keeps its data, as a device alone and over two paths of which one is
/// removed and added again in turn.
#[test]
fn a_real_target_keeps_the_data() {
    let Some(kernel) = GuestKernel::find() else { return };
    if !["nvmet-tcp", "virtio_net"].iter().all(|module| kernel.has_module(module)) || !has("fio") {
        return;
    }
    let folder = TempDir::new().unwrap();
    let image = folder.path().join("disk");
    fs::File::create(&image).unwrap().set_len(SECTORS * 512).unwrap();
    let script = SCRIPT.replace("SUBSYSTEM", SUBSYSTEM).replace("ROUNDS", &ROUNDS.to_string());
    let mut qemu = kernel.machine(folder.path(), &TARGET, &[], &script);
    let ports = [free_port(), free_port()];
    let [a, b] = ports;
    let network = format!("user,id=n,hostfwd=tcp:127.0.0.1:{a}-:4420,hostfwd=tcp:127.0.0.1:{b}-:4421");
    qemu.args(["-smp", "2", "-device", "virtio-net-pci,netdev=n", "-netdev", &network]);
    let drive = format!("file={},if=virtio,format=raw,cache=writeback", image.display());
    let mut machine = qemu.args(["-drive", &drive]).spawn().unwrap();
    let says = |text: &str| {
        let all = output(folder.path());
        assert!(!all.contains("FAILED"), "{all}");
        all.contains(text)
    };
    let wait = |line: &str| {
        let begun = std::time::Instant::now();
        while !says(line) {
            assert!(begun.elapsed().as_secs() < 200, "no {line}: {}", output(folder.path()));
            std::thread::sleep(std::time::Duration::from_millis(200));
        }
    };
    wait("READY");
    let uri = |port: u16, more: &str| format!("nvme+tcp://127.0.0.1:{port}/{SUBSYSTEM}/1?kato=3s{more}");
    for more in ["", "&digest=header,data"] {
        let server = Server::start(&[&format!("d=0 {SECTORS} linear {} 0", uri(a, more))]);
        let out = fio(&server, "d", "--rw=randrw --size=4m --bs=4k-64k --fsync=16").output().unwrap();
        assert!(out.status.success(), "{more}: {}{}{}", text(&out.stdout), text(&out.stderr), server.log());
        assert!(!server.log().contains("WARN"), "{}", server.log());
    }
    let paths = ports.map(|port| format!("{} 1", uri(port, "&deadline=10s"))).join(" ");
    let table = format!("m=0 {SECTORS} multipath 1 queue_if_no_path 0 1 1 round-robin 0 2 1 {paths}");
    let server = Server::start_with(&[&table], &["--check-paths", "1", "--cores", "0,1"]);
    let mut runs = 0;
    while !says(&format!("ROUND {ROUNDS}")) {
        let out = fio(&server, "m", "--rw=randrw --size=8m --bs=4k-64k --fsync=16").output().unwrap();
        assert!(out.status.success(), "{}{}{}", text(&out.stdout), text(&out.stderr), server.log());
        runs += 1;
    }
    let log = server.log();
    machine.kill().unwrap();
    machine.wait().unwrap();
    assert!(runs > 1 && log.matches("connected again").count() >= ROUNDS * 2, "{log}");
    until("the end of the paths", || {
        let status = server.says(&["status", "m"]);
        (status.matches(" F ").count() == 2).then_some(())
    });
}

/// A Linux target asks for the secret, and proves that it knows its own, with each hash. Wrong
/// secrets are refused on both sides.
#[test]
fn a_real_target_asks_for_secrets() {
    let Some(kernel) = GuestKernel::find() else { return };
    if !["nvmet-tcp", "virtio_net"].iter().all(|module| kernel.has_module(module)) {
        return;
    }
    let folder = TempDir::new().unwrap();
    let image = folder.path().join("disk");
    fs::File::create(&image).unwrap().set_len(SECTORS * 512).unwrap();
    let hashes = HASHES.map(|hash| format!("'{hash}'")).join(" ");
    let script = SECRETS.replace("SUBSYSTEM", SUBSYSTEM).replace("HASHES", &hashes);
    let script = script.replace("HOST", HOST).replace("SECRET", SECRET).replace("OTHER", OTHER);
    let mut qemu = kernel.machine(folder.path(), &TARGET, &[], &script);
    let port = free_port();
    let network = format!("user,id=n,hostfwd=tcp:127.0.0.1:{port}-:4420");
    qemu.args(["-smp", "2", "-device", "virtio-net-pci,netdev=n", "-netdev", &network]);
    let drive = format!("file={},if=virtio,format=raw,cache=writeback", image.display());
    let mut machine = qemu.args(["-drive", &drive]).spawn().unwrap();
    let secret = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        path.display().to_string()
    };
    let (good, other) = (secret("good", SECRET), secret("other", OTHER));
    let server = Server::start(&[]);
    let table = |more: &str| {
        format!("0 {SECTORS} linear nvme+tcp://127.0.0.1:{port}/{SUBSYSTEM}/1?hostnqn={HOST}{more} 0")
    };
    for (round, hash) in HASHES.into_iter().enumerate() {
        let begun = std::time::Instant::now();
        let line = format!("HASH {hash}");
        while !output(folder.path()).contains(&line) {
            let all = output(folder.path());
            assert!(begun.elapsed().as_secs() < 200 && !all.contains("FAILED"), "no {line}: {all}");
            std::thread::sleep(std::time::Duration::from_millis(200));
        }
        for (device, more) in [
            ("one", format!("&dhchap-secret={good}")),
            ("two", format!("&dhchap-secret={good}&dhchap-ctrl-secret={other}&digest=header")),
        ] {
            server.says(&["create", device, "--table", &table(&more)]);
            let mut client = support::nbd::Client::connect(&server.nbd, device);
            assert_eq!(client.read(5), 0, "{hash}: {}", server.log());
            drop(client);
            server.says(&["remove", device]);
        }
        if round == 0 {
            for (more, why) in [
                (String::new(), "the controller asks for authentication"),
                (format!("&dhchap-secret={other}"), "does not accept the secret"),
                (format!("&dhchap-secret={good}&dhchap-ctrl-secret={good}"), "does not know the secret"),
            ] {
                let said = server.refuses(&["create", "d", "--table", &table(&more)]);
                assert!(said.contains(why), "{said}");
            }
        }
    }
    machine.kill().unwrap();
    machine.wait().unwrap();
}
