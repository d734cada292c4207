//! Log lines about paths that fail without a message, under load of several cores.

use super::server::{Server, text};
use super::{Outcome, check};
use libtest_mimic::Failed;
use std::process::Stdio;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const GOOD: &str = "0 32768 linear @disk 0";
const BAD: &str = "0 32768 error";

/// One line for each path that fails or is reinstated, one line when no path is left, and no line
/// per request.
pub fn paths_that_fail_by_themselves_are_logged() -> Outcome {
    let folder = TempDir::new()?;
    let mp = "mp=0 32768 multipath 3 queue_if_no_path queue_mode bio 0 1 1 round-robin 0 2 1 @a 1 @b 1";
    let devices = ["disk=0 32768 linear mem:16M 0", &format!("a={GOOD}"), &format!("b={GOOD}"), mp];
    let server = Server::start(folder.path(), &devices)?;
    let fio = server
        .command("timeout")
        .args(
            "-k 5 60 fio --name=t --ioengine=nbd --rw=randrw --bs=4k --iodepth=16 --numjobs=4 --size=16M"
                .split(' '),
        )
        .args("--thread --time_based --runtime=4 --group_reporting".split(' '))
        .arg(format!("--uri={}", server.uri("mp")))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    std::thread::sleep(Duration::from_millis(500));
    change(&server, "b", BAD)?;
    logged(&server, "multipath: mp: Failing path 254:2 (b): I/O error, ", ": 1 of 2 paths left")?;
    change(&server, "a", BAD)?;
    logged(&server, "multipath: mp: Failing path 254:1 (a): I/O error, ", ": no path left")?;
    logged(&server, "multipath: mp: no path left: ", " requests wait, and those that come")?;
    // Waits until all requests in flight are queued.
    std::thread::sleep(Duration::from_millis(300));
    change(&server, "a", GOOD)?;
    server.udm(&["message", "mp", "0", "reinstate_path", "254:1"])?;
    logged(
        &server,
        "multipath: mp: Reinstating path 254:1 (a): 1 of 2 paths up, ",
        " requests that waited go on",
    )?;
    change(&server, "b", GOOD)?;
    server.udm(&["message", "mp", "0", "reinstate_path", "254:2"])?;
    logged(&server, "multipath: mp: Reinstating path 254:2 (b): 2 of 2 paths up", "")?;
    let out = text(&fio.wait_with_output()?.stdout);
    check(out.contains("err= 0"), &out)?;

    // Without queueing, requests fail, and the line about the reinstated path has their number.
    server.udm(&["message", "mp", "0", "fail_if_no_path"])?;
    server.udm(&["message", "mp", "0", "fail_path", "254:1"])?;
    logged(&server, "multipath: mp: Failing path 254:1 (a): by message: 1 of 2 paths left", "")?;
    change(&server, "b", BAD)?;
    let failing = server
        .command("timeout")
        .args("-k 5 60 fio --name=t --ioengine=nbd --rw=read --bs=4k --size=4k".split(' '))
        .arg(format!("--uri={}", server.uri("mp")))
        .output()?;
    check(!failing.status.success(), &text(&failing.stdout))?;
    logged(&server, "multipath: mp: Failing path 254:2 (b): I/O error, Read at sector 0: no path left", "")?;
    logged(&server, "multipath: mp: no path left: 1 requests failed, and those that come will", "")?;
    server.udm(&["message", "mp", "0", "reinstate_path", "254:1"])?;
    logged(&server, "multipath: mp: Reinstating path 254:1 (a): 1 of 2 paths up", "")?;

    let log = server.log();
    let lines = log.lines().filter(|line| line.contains("multipath:")).count();
    check(lines == 9, &format!("{lines} lines, not one for each of nine changes:\n{log}"))?;
    let timed =
        |line: &str| line.split('T').next().is_some_and(|day| day.len() == 10 && day.starts_with("20"));
    check(log.lines().filter(|l| l.contains("WARN")).all(timed), &format!("lines without a time:\n{log}"))?;
    server.stop()
}

fn change(server: &Server, device: &str, table: &str) -> Outcome {
    server.udm(&["load", device, "--table", table])?;
    server.udm(&["resume", device]).map(drop)
}

/// Waits for a line of the log.
fn logged(server: &Server, begin: &str, end: &str) -> Result<(), Failed> {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let log = server.log();
        if log.lines().any(|line| line.find(begin).is_some_and(|at| line[at..].contains(end))) {
            return Ok(());
        }
        check(Instant::now() < deadline, &format!("no line '{begin}...{end}' in\n{log}"))?;
        std::thread::sleep(Duration::from_millis(20));
    }
}
