//! The recipe of docs/log-writes.md with the real programs.

use crate::server::UDM;
use libtest_mimic::Failed;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A folder in which the recipe mounts file systems; they are unmounted on drop.
pub struct MountGuard(pub TempDir);

impl Drop for MountGuard {
    fn drop(&mut self) {
        for name in ["mnt", "nbd"] {
            let place = self.0.path().join(name);
            // In most cases it is not mounted, and this fails as expected.
            let _ = Command::new("fusermount3").arg("-uzq").arg(place).stderr(Stdio::null()).status();
        }
    }
}

/// Runs `script` with the shell in `folder`, for at most a minute, and returns its output.
pub fn shell(folder: &Path, script: &str) -> Result<String, String> {
    // Output to a file: daemons of the script would keep a pipe open.
    let out = folder.join("out");
    let file = File::create(&out).unwrap();
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let mut child = Command::new("/bin/sh")
        .args(["-c", script])
        .current_dir(folder)
        .env("PATH", path)
        .env("udm", UDM)
        .stdin(Stdio::null())
        .stdout(file.try_clone().unwrap())
        .stderr(file)
        .spawn()
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break Some(status),
            None if Instant::now() > deadline => {
                child.kill().unwrap();
                child.wait().unwrap();
                break None;
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    let output = fs::read_to_string(out).unwrap();
    match status {
        Some(status) if status.success() => Ok(output),
        Some(status) => Err(format!("{status}\n{output}")),
        None => Err(format!("not done in time\n{output}")),
    }
}

const WORKLOAD: &str = r#"
truncate -s 32M disk.img; truncate -s 256M log.img; touch nbd; mkdir -p mnt
exec $udm serve --device d='0 65536 log-writes disk.img log.img' --run 'set -e
  nbdfuse nbd "$uri" & until [ -s nbd ]; do sleep 0.1; done
  mke2fs -q -E root_owner nbd; $udm message d 0 mark mkfs; fuse2fs nbd mnt -o rw
  sqlite3 mnt/t.db "create table t(a)"
  for i in 1 2 3 4 5 6 7 8; do sqlite3 mnt/t.db "insert into t values($i)"; echo $i > mnt/acknowledged; done
  $udm status d
  fusermount3 -u mnt; until fusermount3 -u nbd; do sleep 0.1; done 2>/dev/null; wait'
"#;

/// Prints the number of rows in the state; fails if SQLite finds an error.
const CHECK: &str = r#"
set -e; d=$(mktemp -d); trap 'rm -r $d' EXIT
debugfs -R "rdump / $d" $image 2>/dev/null
sqlite3 $d/t.db "pragma integrity_check" | grep -qx ok
echo rows $(sqlite3 $d/t.db "select count(*) from t" 2>/dev/null)
"#;

/// Every state that a power cut at a flush could leave has a valid database, and no row is missing
/// in a later state.
pub fn sqlite_survives_a_cut_at_every_flush() -> Result<(), Failed> {
    let folder = MountGuard(TempDir::new().unwrap());
    let place = folder.0.path();
    let output = shell(place, WORKLOAD).unwrap_or_else(|output| panic!("the workload: {output}"));
    assert!(output.contains("0 65536 log-writes ") && !output.contains("logging_disabled"), "{output}");
    fs::write(place.join("check"), CHECK).unwrap();
    shell(place, "$udm log-writes replay log.img state.img --size 32M --upto-mark mkfs").unwrap();
    let replay = "$udm log-writes replay log.img state.img --start-mark mkfs --each-flush --check 'sh check'";
    let output = shell(place, replay).unwrap_or_else(|output| panic!("{output}"));
    let rows = output.lines().filter_map(|line| line.strip_prefix("rows"));
    let rows: Vec<u64> = rows.map(|n| n.trim().parse().unwrap_or(0)).collect();
    assert!(rows.is_sorted(), "rows went away: {rows:?}");
    assert_eq!((rows.first(), rows.last()), (Some(&0), Some(&8)), "{rows:?}");
    assert!((1..8).all(|n| rows.contains(&n)), "each commit shows: {rows:?}");
    let (state, disk) =
        (fs::read(place.join("state.img")).unwrap(), fs::read(place.join("disk.img")).unwrap());
    assert!(state == disk, "the whole log is the whole device");
    Ok(())
}

/// A killed server leaves a log of everything that it acknowledged.
pub fn a_killed_server_leaves_a_log() -> Result<(), Failed> {
    let folder = TempDir::new().unwrap();
    let script = r#"
truncate -s 1M disk.img; truncate -s 4M log.img
$udm serve --device d='0 2048 log-writes disk.img log.img' --unix sock --socket control > served 2>&1 & server=$!
n=0; until grep -q nbd+unix served; do n=$((n + 1)); test $n -lt 100; sleep 0.1; done
qemu-io -f raw -t writeback -c 'write -P 7 4k 4k' -c flush -c 'write -f -P 8 8k 512' -c 'write -P 9 64k 4k' -c 'sigraise 9' "nbd+unix:///d?socket=$PWD/sock"
kill -9 $server; wait $server; $udm log-writes list log.img"#;
    let output = shell(folder.path(), script).unwrap_or_else(|output| panic!("{output}"));
    let list = &output[output.find("# sectors").unwrap_or_else(|| panic!("{output}"))..];
    assert!(list.ends_with("\n0 8 8 -\n1 0 0 flush #1\n2 16 1 fua\n"), "{output}");
    Ok(())
}
