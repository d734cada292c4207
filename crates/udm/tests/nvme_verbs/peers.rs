//! The folder of `--nvme-peers`: numbers of controllers, and what is answered about a server whose
//! requests hang at a disk after it was killed.

use super::host::{Answer, BLOCK, ScriptedHost, WRITE, command, identify, log_page, rw};
use super::support::mount::Mount;
use super::support::{Server, has, report_skip, text, udm, until};
use super::{SUBSYSTEM, address, list};
use rustix::process::Signal;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;
use tempfile::TempDir;
use udm_wire::nvme::{
    ControllerInstance, CrossControllerReset, CrossControllerResetStatus, FenceCapabilities, NvmeStatus,
    decode_cross_controller_reset_log,
};

fn peer(device: &str, folder: &Path) -> Server {
    let folder = folder.display().to_string();
    let options = ["--nvme", "127.0.0.1:0", "--nvme-subsystem", SUBSYSTEM, "--nvme-peers", &folder];
    Server::start_with(&[device], &options)
}

fn instance(host: &mut ScriptedHost) -> ControllerInstance {
    let id = host.admin.read(identify(1, 0)).unwrap();
    FenceCapabilities::decode(id[..].try_into().unwrap()).instance.unwrap()
}

/// Sends a reset. Returns its status and result.
fn reset(host: &mut ScriptedHost, impacted: ControllerInstance) -> (NvmeStatus, u64) {
    let id = host.admin.command(CrossControllerReset { impacted }.encode(0), &[]);
    match host.admin.answer() {
        Answer::Response(completion) if completion.id == id => (completion.status, completion.result),
        other => panic!("expected a response: {other:?}"),
    }
}

const DONE: (NvmeStatus, u64) = (NvmeStatus::SUCCESS, CrossControllerReset::DONE);

/// No two lives of servers give the same number to a controller. A controller of a life that has
/// ended is answered as reset, one of a folder that is not shared is refused, and one of another
/// host is not reset.
#[test]
fn lives_have_numbers_of_their_own() {
    let (folder, other) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let shared = folder.path().join("peers");
    let (mut first, second) = (peer("a=mem:1M", &shared), peer("a=mem:1M", &shared));
    let stranger = peer("a=mem:1M", other.path());
    let (mut a, mut b) =
        (ScriptedHost::connect(address(&first), 0), ScriptedHost::connect(address(&second), 0));
    let mut c = ScriptedHost::connect(address(&stranger), 0);
    let (of_a, of_c) = (instance(&mut a), instance(&mut c));
    assert_ne!(of_a.id, instance(&mut b).id);
    let invalid = (NvmeStatus::INVALID_FIELD.permanent(), 0);
    assert_eq!(reset(&mut b, of_c), invalid, "{}", second.log());
    let wrong = ControllerInstance { id: of_a.id ^ 0x4000, ..of_a };
    assert_eq!(reset(&mut b, wrong), invalid, "no controller of that server has this number");
    let strange = serde_json::json!({
        "subsystem": SUBSYSTEM, "cntlid": of_a.id, "uniquifier": of_a.uniquifier,
        "random": format!("{:016x}", of_a.random), "host_nqn": "nqn.2014-08.org.example:x",
        "host_id": "0".repeat(32),
    });
    let reply = first.http("POST", "/v1/nvme/reset", &strange.to_string());
    assert!(reply.0 == 200 && reply.2.contains("not one of this host"), "{reply:?}");
    for (key, value) in [("random", "x"), ("subsystem", "nqn.2014-08.org.example:x"), ("host_id", "0")] {
        let mut wrong = strange.clone();
        wrong[key] = value.into();
        let reply = first.http("POST", "/v1/nvme/reset", &wrong.to_string());
        assert!(reply.0 == 200 && reply.2.contains("refused"), "{reply:?}");
    }
    assert!(a.admin.ask(command(0x18, 0, &[])).status.is_ok(), "it was not reset");
    let mut numbers = vec![of_a.id];
    for _ in 0..3 {
        first.kill();
        assert_eq!(reset(&mut b, of_a), DONE, "{}", second.log());
        first = peer("a=mem:1M", &shared);
        let mut again = ScriptedHost::connect(address(&first), 0);
        numbers.push(instance(&mut again).id);
        assert_eq!(reset(&mut again, of_a), DONE, "the next life knows the last one: {}", first.log());
    }
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), 4, "{numbers:?}");
    assert_eq!(list(&second)["controllers"].as_array().unwrap().len(), 1);
}

/// A controller of a server that runs is reset over its control socket.
#[test]
fn a_server_resets_its_controller_for_another_one() {
    let folder = TempDir::new().unwrap();
    let (first, second) = (peer("a=mem:1M", folder.path()), peer("a=mem:1M", folder.path()));
    let (mut a, mut b) =
        (ScriptedHost::connect(address(&first), 0), ScriptedHost::connect(address(&second), 0));
    let (of_a, of_b) = (instance(&mut a), instance(&mut b));
    assert_eq!(reset(&mut b, of_a), DONE, "{}{}", first.log(), second.log());
    assert_eq!(a.admin.answer(), Answer::End);
    let mut a = ScriptedHost::connect(address(&first), 0);
    // Both at once: each server waits for the other one.
    let id = b.admin.command(CrossControllerReset { impacted: instance(&mut a) }.encode(0), &[]);
    let back = a.admin.command(CrossControllerReset { impacted: of_b }.encode(0), &[]);
    let is_done = |answer: Answer, id: u16| match answer {
        Answer::Response(one) => one.id == id && (one.status, one.result) == DONE,
        Answer::End => true,
        _ => false,
    };
    assert!(is_done(b.admin.answer(), id) && is_done(a.admin.answer(), back));
    let mut b = ScriptedHost::connect(address(&second), 0);
    assert_eq!(reset(&mut b, of_a), DONE, "the server runs, and the controller is gone");
}

/// A server is killed while its write is at a disk that hangs. Its process is gone, but its lock is
/// not free: the reset goes on until the disk has done the write.
#[test]
fn a_killed_server_with_a_request_at_a_hanging_disk() {
    if !has("losetup") {
        return;
    }
    let Some(mount) = Mount::new() else { return };
    let out = Command::new("losetup").args(["-f", "--show"]).arg(mount.file()).output().unwrap();
    if !out.status.success() {
        return report_skip("losetup needs root");
    }
    let device = LoopDevice(text(&out.stdout).trim().to_owned());
    let folder = TempDir::new().unwrap();
    let (mut first, second) =
        (peer(&format!("a={}", device.0), folder.path()), peer("a=mem:1M", folder.path()));
    let mut a = ScriptedHost::connect(address(&first), 0);
    let mut b = ScriptedHost::connect(address(&second), 0);
    let of_a = instance(&mut a);
    mount.signal_behind(Signal::STOP);
    let mut queue = a.queue(1, false);
    queue.command(rw(WRITE, 0, 8, true), &[1; 8 * BLOCK]);
    until("a write at the disk", || {
        let stats = first.http("GET", "/v1/stats", "").2;
        stats.contains("\"in_flight\":1").then_some(())
    });
    first.child.kill().unwrap();
    assert_eq!(reset(&mut b, of_a), (NvmeStatus::SUCCESS, 0), "it is in progress: {}", second.log());
    sleep(Duration::from_millis(500));
    let status = |b: &mut ScriptedHost| {
        let log = decode_cross_controller_reset_log(&b.admin.read(log_page(0x1e, 256)).unwrap());
        assert_eq!(log.len(), 1);
        log[0].status
    };
    assert_eq!(status(&mut b), CrossControllerResetStatus::InProgress, "{}", second.log());
    mount.signal_behind(Signal::CONT);
    let is_over = |b: &mut ScriptedHost| (status(b) == CrossControllerResetStatus::Succeeded).then_some(());
    until("the end of the reset", || is_over(&mut b));
    drop(queue);
}

/// A loop device; dropping it detaches it.
struct LoopDevice(String);

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["-d", &self.0]).output();
    }
}

/// A folder that others may write, and one on a file system that other machines may share, are
/// refused at the start; what is no record is ignored.
#[test]
fn folders_are_checked() {
    let folder = TempDir::new().unwrap();
    let refuses = |path: &str, why: &str| {
        let mut serve = udm(&["serve", "--nvme", "127.0.0.1:0", "--nvme-peers", path, "--cores", "0"]);
        serve.arg("--unix").arg(folder.path().join("n")).arg("--socket").arg(folder.path().join("c"));
        let out =
            serve.args(["--device", "a=mem:1M"]).env("UDM_STATE", folder.path().join("s")).output().unwrap();
        let said = text(&out.stderr);
        assert!(!out.status.success() && said.contains(why), "{said}");
    };
    let open = folder.path().join("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
    refuses(open.to_str().unwrap(), "other users may write this folder");
    refuses("/proc/self", "file system");
    fs::set_permissions(&open, fs::Permissions::from_mode(0o700)).unwrap();
    fs::write(open.join("00000001.peer"), "garbage").unwrap();
    fs::write(open.join("00000002.peer"), vec![b'x'; 1 << 20]).unwrap();
    fs::create_dir(open.join("00000003.peer")).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", open.join("00000004.peer")).unwrap();
    let server = peer("a=mem:1M", &open);
    let mut host = ScriptedHost::connect(address(&server), 0);
    let own = instance(&mut host);
    for tag in 1..=4_u64 {
        let impacted = ControllerInstance { random: tag << 32, id: own.id + 1, ..own };
        assert_eq!(reset(&mut host, impacted).0, NvmeStatus::INVALID_FIELD.permanent());
    }
}
