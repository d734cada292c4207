//! A running `udm serve`, and shell commands with a time limit.

use libtest_mimic::Failed;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The program under test.
pub const UDM: &str = env!("CARGO_BIN_EXE_udm");

/// Time limit of a command; none takes more than a few seconds unless it hangs.
const COMMAND_SECONDS: u32 = 120;

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs a shell command; returns its standard output, or its error text if it fails.
pub fn sh(command: &str) -> Result<String, Failed> {
    sh_in(Path::new("."), command)
}

/// The same as [`sh`], in a folder.
pub fn sh_in(folder: &Path, command: &str) -> Result<String, Failed> {
    let out = Command::new("timeout")
        .args(["-k", "5", &COMMAND_SECONDS.to_string(), "sh", "-c", command])
        .current_dir(folder)
        .stdin(Stdio::null())
        .output()?;
    if out.status.success() {
        Ok(text(&out.stdout))
    } else {
        Err(format!("{command}: {}\n{}{}", out.status, text(&out.stdout), text(&out.stderr)).into())
    }
}

/// A server in the background. Dropping it ends the server.
pub struct Server {
    child: Child,
    folder: PathBuf,
}

impl Server {
    /// Serves `devices` on sockets in `folder`, and waits until the server is ready.
    pub fn start(folder: &Path, devices: &[&str]) -> Result<Server, Failed> {
        let log = fs::File::create(folder.join("serve.log"))?;
        Server::start_with(folder, devices, log.into(), "warn")
    }

    /// The same as [`Server::start`], on these CPUs.
    pub fn start_on(folder: &Path, devices: &[&str], cpus: &str) -> Result<Server, Failed> {
        let log = fs::File::create(folder.join("serve.log"))?;
        Server::start_as(folder, &["--cores", cpus], devices, log.into(), "warn")
    }

    /// The same as [`Server::start`], with path checks every second.
    pub fn start_checking(folder: &Path, devices: &[&str]) -> Result<Server, Failed> {
        let log = fs::File::create(folder.join("serve.log"))?;
        Server::start_as(folder, &["--check-paths", "1"], devices, log.into(), "warn")
    }

    /// The same as [`Server::start`], with a log of this level to `stderr`.
    pub fn start_with(folder: &Path, devices: &[&str], stderr: Stdio, level: &str) -> Result<Server, Failed> {
        Server::start_as(folder, &[], devices, stderr, level)
    }

    fn start_as(
        folder: &Path,
        options: &[&str],
        devices: &[&str],
        stderr: Stdio,
        level: &str,
    ) -> Result<Server, Failed> {
        let mut command = Command::new(UDM);
        // By default the test controls the states of paths.
        let off = if options.contains(&"--check-paths") { &[][..] } else { &["--check-paths", "off"] };
        if std::env::var_os("UDM_TEST_SANDBOX").is_some() {
            command.arg("serve").args(["--sandbox", "--sandbox-path", "/tmp"]);
        } else {
            command.arg("serve");
        }
        command.args(off).args(options).args(devices.iter().flat_map(|d| ["--device", d]));
        command
            .args(["--unix", "nbd.sock", "--socket", "udm.sock"])
            .current_dir(folder)
            .env("UDM_LOG", level);
        let child = command.stdin(Stdio::null()).stderr(stderr).spawn()?;
        let server = Server { child, folder: folder.to_owned() };
        let deadline = Instant::now() + Duration::from_secs(20);
        while server.udm(&["ls"]).is_err() {
            if Instant::now() > deadline {
                return Err(format!("no answer: {}", server.log()).into());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(server)
    }

    /// The URI of an export.
    pub fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.folder.join("nbd.sock").display())
    }

    /// A command in the server's folder.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.folder).stdin(Stdio::null());
        command
    }

    /// Runs a verb against this server.
    pub fn udm(&self, words: &[&str]) -> Result<String, Failed> {
        let mut command = self.command("timeout");
        command.args(["-k", "5", "30", UDM]).args(words).env("UDM_SOCKET", self.folder.join("udm.sock"));
        let out = command.output()?;
        if out.status.success() {
            Ok(text(&out.stdout))
        } else {
            Err(format!("udm {words:?}: {}", text(&out.stderr)).into())
        }
    }

    /// The log so far, if it goes to the file.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.join("serve.log")).unwrap_or_default()
    }

    /// The CPU time that each core has used so far, in ticks.
    pub fn cores(&self) -> Result<Vec<u64>, Failed> {
        let mut spent = Vec::new();
        for task in fs::read_dir(format!("/proc/{}/task", self.child.id()))? {
            let stat = fs::read_to_string(task?.path().join("stat"))?;
            let Some((name, rest)) = stat.split_once('(').and_then(|(_, s)| s.rsplit_once(')')) else {
                continue;
            };
            if name.starts_with("udm-core") {
                // proc(5): user and system time are fields 14 and 15; the state, after the name, is
                // field 3.
                let ticks = rest.split_whitespace().skip(11).take(2).filter_map(|n| n.parse::<u64>().ok());
                spent.push(ticks.sum());
            }
        }
        Ok(spent)
    }

    /// Context switches of all threads so far.
    pub fn switches(&self) -> Result<u64, Failed> {
        let mut sum = 0;
        for task in fs::read_dir(format!("/proc/{}/task", self.child.id()))? {
            let status = fs::read_to_string(task?.path().join("status"))?;
            let counts = status.lines().filter(|l| l.contains("ctxt_switches"));
            sum += counts.filter_map(|l| l.split_whitespace().last()?.parse::<u64>().ok()).sum::<u64>();
        }
        Ok(sum)
    }

    /// Ends the server with SIGTERM, and checks its status.
    pub fn stop(mut self) -> Result<(), Failed> {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(status) = self.child.try_wait()? {
                let log = self.log();
                return if status.success() { Ok(()) } else { Err(format!("{status}: {log}").into()) };
            }
            if Instant::now() > deadline {
                return Err("the server does not end".into());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
