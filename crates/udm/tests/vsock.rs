//! NBD over vsock: what is refused everywhere, and clients of a real kernel.
//!
//! The test with clients runs only if `UDM_TEST_KERNEL` is a folder with an unpacked kernel package
//! (docs/internals/kernel-rows.md); otherwise it reports that it was skipped. udm and its clients run
//! in the emulated machine, over the loopback of vsock, where the host's CID 2 is 1.

mod support;

use support::guest::{GuestKernel, finish};
use support::{Server, UDM, has, report_skip, text, udm};
use tempfile::TempDir;

/// In the order of their dependencies.
const MODULES: [&str; 3] = ["vsock", "vmw_vsock_virtio_transport_common", "vsock_loopback"];

/// A port is served with its URI, and is free for one server only.
#[test]
fn a_port_of_vsock_is_served_once() {
    const PORT: &str = "47110";
    let folder = TempDir::new().unwrap();
    let mut probe = udm(&["serve", "--device", "d=mem:1M", "--vsock", PORT, "--run", "echo $uri"]);
    let probe = probe.output().unwrap();
    let why = text(&probe.stderr);
    if why.contains("Address family not supported") {
        return report_skip("this kernel has no vsock");
    }
    assert!(text(&probe.stdout).starts_with("nbd+vsock://2:47110/"), "{why}");
    let server = Server::start_with(&["d=mem:1M"], &["--vsock", PORT]);
    let exports = server.says(&["exports"]);
    assert!(exports.contains("nbd+vsock://2:47110/d"), "{exports}");
    let mut second = udm(&["serve", "--device", "d=mem:1M", "--vsock", PORT, "--socket"]);
    let out = second.arg(folder.path().join("control")).output().unwrap();
    let why = text(&out.stderr);
    assert!(!out.status.success() && why.contains("vsock port 47110: Address already in use"), "{why}");
    let out = udm(&["serve", "--device", "d=mem:1M", "--vsock", "0"]).output().unwrap();
    assert_eq!(out.status.code(), Some(2), "{}", text(&out.stderr));
    // A path over vsock is refused as another scheme is.
    let why = server.refuses(&["create", "p", "--table", "nbd+vsock://2:47110/d"]);
    assert!(why.contains("\"nbd+vsock\": unknown kind of device"), "{why}");
}

/// Clients read and write over vsock, under the sandbox and over an upgrade. A device is for the
/// machines that it names.
#[test]
fn machines_are_served_over_vsock() {
    let Some(kernel) = GuestKernel::find() else { return };
    let programs = ["nbdinfo", "nbdcopy"];
    let is_complete = has("xz")
        && programs.iter().all(|program| has(program))
        && MODULES.iter().all(|module| kernel.has_module(module));
    if !is_complete {
        return;
    }
    let script = r#"
        export UDM_STATE=/tmp/state UDM_SOCKET=/tmp/control
        fail() { echo "FAILED: $*"; tail -n 9 /tmp/log; }
        dd if=/dev/zero of=/tmp/img bs=1M count=0 seek=8 2>/dev/null
        cat > /tmp/udm.toml <<END
[serve]
vsock = 10809
sandbox = true
[devices.disk]
table = "/tmp/img"
[devices.mine]
table = "0 2048 zero"
allow = ["vsock:1"]
[devices.other]
table = "0 2048 zero"
allow = ["vsock:3"]
END
        udm serve /tmp/udm.toml 2> /tmp/log & P=$!
        for i in $(seq 300); do grep -q 'control socket' /tmp/log && break; sleep 0.1; done
        U=nbd+vsock://1:10809
        dd if=/dev/urandom of=/tmp/data bs=1M count=8 2>/dev/null
        nbdcopy /tmp/data $U/disk 2> /tmp/why || fail "copy: $(cat /tmp/why)"
        for life in 1 2; do
          nbdcopy $U/disk /tmp/back && cmp /tmp/data /tmp/back || fail "other data in life $life"
          # A client that disconnects sees no error, whoever closes first.
          for i in $(seq 20); do [ "$(nbdinfo --size $U/mine)" = 1048576 ] || fail "mine in life $life"; done
          nbdinfo --size $U/other 2> /tmp/why && fail "other in life $life"
          grep -q 'no export named' /tmp/why || fail "$(cat /tmp/why)"
          grep -q 'machine 1 (vsock) is not allowed' /tmp/log || fail "no line"
          [ $life = 2 ] || udm upgrade || fail upgrade
        done
        udm exports | grep disk
        echo FINISHED
    "#;
    let folder = TempDir::new().unwrap();
    let programs = [&[UDM], &programs[..]].concat();
    let mut qemu = kernel.machine(folder.path(), &MODULES, &programs, script);
    qemu.args(["-m", "768"]);
    let output = finish(qemu.spawn().unwrap(), folder.path());
    let is_good = output.contains("FINISHED") && !output.contains("FAILED");
    assert!(is_good, "{output}");
}
