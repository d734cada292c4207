//! The client: fio, which writes, reads and verifies.

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::Value;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// How long a run takes, in seconds.
const SECONDS: u32 = 3;

/// What it saw.
#[derive(Debug, Serialize)]
pub(super) struct FioResult {
    /// No request failed, and what was read is what was written.
    pub is_well: bool,
    pub requests: u64,
    /// The longest that a request took.
    pub read_ns_max: u64,
    pub write_ns_max: u64,
    /// Of a thousand reads 999 took no longer.
    pub read_ns_p999: u64,
    /// What it said of errors; empty when all is well.
    pub said: String,
}

impl FioResult {
    pub fn read(&self) -> String {
        self.time(self.read_ns_max)
    }

    pub fn write(&self) -> String {
        self.time(self.write_ns_max)
    }

    /// What reads took, but for one in a thousand.
    pub fn usual(&self) -> String {
        self.time(self.read_ns_p999)
    }

    fn time(&self, ns: u64) -> String {
        match self.is_well {
            true => format!("{:.1} ms", ns as f64 / 1e6),
            false => "I/O error".into(),
        }
    }
}

/// A run under way. Dropping it ends it.
pub(super) struct FioRun(Option<Child>);

impl FioRun {
    /// On the export of `uri`.
    pub fn start(uri: &str, folder: &Path) -> Result<FioRun> {
        let words = "--name=cable --ioengine=nbd --rw=randrw --bs=4k --iodepth=16 --size=64m --time_based \
                     --verify=crc32c --verify_backlog=256 --verify_state_save=0 --output-format=json";
        let mut fio = Command::new("fio");
        fio.args(words.split_whitespace()).arg(format!("--runtime={SECONDS}")).arg(format!("--uri={uri}"));
        fio.current_dir(folder).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(FioRun(Some(fio.spawn().context("demo: fio")?)))
    }

    /// Waits for its end.
    pub fn end(mut self) -> Result<FioResult> {
        let child = self.0.take().context("demo: fio")?;
        let out = child.wait_with_output().context("demo: fio")?;
        let text = String::from_utf8_lossy(&out.stdout);
        // In front of it may stand what it has to say of errors.
        let report = text.find('{').and_then(|at| serde_json::from_str::<Value>(&text[at..]).ok());
        let job = report.as_ref().map_or(&Value::Null, |report| &report["jobs"][0]);
        let number = |value: &Value| value.as_u64().unwrap_or_default();
        let (read, write) = (&job["read"], &job["write"]);
        let is_well = out.status.success() && number(&job["error"]) == 0 && !job.is_null();
        let said = String::from_utf8_lossy(&out.stderr);
        let said = if is_well { String::new() } else { format!("{}: {}", out.status, said.trim()) };
        Ok(FioResult {
            is_well,
            requests: number(&read["total_ios"]) + number(&write["total_ios"]),
            read_ns_max: number(&read["clat_ns"]["max"]),
            write_ns_max: number(&write["clat_ns"]["max"]),
            read_ns_p999: number(&read["clat_ns"]["percentile"]["99.900000"]),
            said,
        })
    }
}

impl Drop for FioRun {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
