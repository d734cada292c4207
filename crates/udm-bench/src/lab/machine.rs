//! A description of the machine that was measured.

use serde::Serialize;
use std::fmt;
use std::time::Instant;

/// Number of clock readings for the measurement of their time.
const READINGS: u32 = 20_000;

/// Properties of the machine that can change the ratios.
#[derive(Debug, Clone, Serialize)]
pub struct MachineInfo {
    /// The model of its CPUs.
    pub cpu: String,
    /// Number of CPUs that this process may use.
    pub cpus: usize,
    /// The kernel, with its release and architecture.
    pub kernel: String,
    /// Nanoseconds per clock reading.
    pub clock_ns: f64,
    /// The version of udm.
    pub udm: &'static str,
    /// Whether the build is optimised. The figures of other builds have no meaning.
    pub optimised: bool,
}

impl MachineInfo {
    /// The machine on which the process runs.
    #[must_use]
    pub fn this() -> MachineInfo {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split(": ").nth(1));
        let uname = rustix::system::uname();
        let words = [uname.sysname(), uname.release(), uname.machine()].map(|word| word.to_string_lossy());
        let begin = Instant::now();
        let last = (0..READINGS).fold(begin, |_, _| Instant::now());
        MachineInfo {
            cpu: model.unwrap_or("unknown CPU").to_owned(),
            cpus: crate::device_contest::get_process_cpu_affinity().len().max(1),
            kernel: words.join(" "),
            clock_ns: last.duration_since(begin).as_nanos() as f64 / f64::from(READINGS),
            udm: env!("CARGO_PKG_VERSION"),
            optimised: !cfg!(debug_assertions),
        }
    }
}

impl fmt::Display for MachineInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MachineInfo { cpu, cpus, kernel, clock_ns, udm, optimised } = self;
        let s = if *cpus == 1 { "" } else { "s" };
        write!(
            f,
            "udm {udm} on {cpus} CPU{s} of {cpu}, {kernel}; reading the clock takes {clock_ns:.0} ns."
        )?;
        if *optimised { Ok(()) } else { f.write_str(" Not an optimised build: its figures have no meaning.") }
    }
}
