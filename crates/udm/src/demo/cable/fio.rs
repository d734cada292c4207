//! The client: fio, which writes, reads and verifies.

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::Value;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Duration of a run in seconds.
const SECONDS: u32 = 3;

/// The result of a run.
#[derive(Debug, Serialize)]
pub(super) struct FioResult {
    /// No request failed, and all data read was correct.
    pub is_well: bool,
    pub requests: u64,
    /// The longest latency.
    pub read_ns_max: u64,
    pub write_ns_max: u64,
    /// The latency that 99.9 % of reads do not exceed.
    pub read_ns_p999: u64,
    /// fio's error messages; empty if there was no error.
    pub errors: String,
}

impl FioResult {
    pub fn read(&self) -> String {
        self.time(self.read_ns_max)
    }

    pub fn write(&self) -> String {
        self.time(self.write_ns_max)
    }

    /// The 99.9 % latency of reads, as text.
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

/// A running fio. Dropping it ends fio.
pub(super) struct FioProcess(Option<Child>);

impl FioProcess {
    /// Starts fio on the export of `uri`.
    pub fn start(uri: &str, folder: &Path) -> Result<FioProcess> {
        let words = "--name=cable --ioengine=nbd --rw=randrw --bs=4k --iodepth=16 --size=64m --time_based \
                     --verify=crc32c --verify_backlog=256 --verify_state_save=0 --output-format=json";
        let mut fio = Command::new("fio");
        fio.args(words.split_whitespace()).arg(format!("--runtime={SECONDS}")).arg(format!("--uri={uri}"));
        fio.current_dir(folder).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(FioProcess(Some(fio.spawn().context("demo: fio")?)))
    }

    /// Waits for the end of fio.
    pub fn end(mut self) -> Result<FioResult> {
        let child = self.0.take().context("demo: fio")?;
        let out = child.wait_with_output().context("demo: fio")?;
        let text = String::from_utf8_lossy(&out.stdout);
        // Error messages may precede the JSON.
        let report = text.find('{').and_then(|at| serde_json::from_str::<Value>(&text[at..]).ok());
        let job = report.as_ref().map_or(&Value::Null, |report| &report["jobs"][0]);
        let number = |value: &Value| value.as_u64().unwrap_or_default();
        let (read, write) = (&job["read"], &job["write"]);
        let is_well = out.status.success() && number(&job["error"]) == 0 && !job.is_null();
        let errors = String::from_utf8_lossy(&out.stderr);
        let errors = if is_well { String::new() } else { format!("{}: {}", out.status, errors.trim()) };
        Ok(FioResult {
            is_well,
            requests: number(&read["total_ios"]) + number(&write["total_ios"]),
            read_ns_max: number(&read["clat_ns"]["max"]),
            write_ns_max: number(&write["clat_ns"]["max"]),
            read_ns_p999: number(&read["clat_ns"]["percentile"]["99.900000"]),
            errors,
        })
    }
}

impl Drop for FioProcess {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
