//! The results as text.

use super::first_write_case::{FirstChunkWriteDeviceKind, FirstChunkWriteResult};
use super::{ExceptionLookupCost, SnapshotCostResults, SteadyOriginWriteCosts};
use std::fmt::Write;

impl SnapshotCostResults {
    /// The rows as text.
    pub fn table(&self) -> String {
        let mut out = String::new();
        let of_block =
            |a: &FirstChunkWriteResult, b: &FirstChunkWriteResult| (a.below, a.depth) == (b.below, b.depth);
        for block in self.first_writes.chunk_by(of_block) {
            // Writing to a string can't fail.
            let _ = self.block_text(&mut out, block);
        }
        for SteadyOriginWriteCosts { depth, linear, never, copied, removed } in &self.later_writes {
            let line = |name, ns: &f64| {
                format!("  {name:<24} {ns:>7.1} {:>+7.1} {:>6.1}%\n", ns - never, 100.0 * never / ns)
            };
            let _ = writeln!(out, "writes, depth {depth:<13}  ns each    more  throughput");
            for (name, ns) in [
                ("linear", linear),
                ("origin, never a snapshot", never),
                ("origin, every chunk copied", copied),
                ("origin, snapshot removed", removed),
            ] {
                out.push_str(&line(name, ns));
            }
            out.push('\n');
        }
        let least = self.lookups.first().map_or(0.0, |few| few.ns);
        for ExceptionLookupCost { exceptions, ns } in &self.lookups {
            let _ =
                writeln!(out, "{exceptions:>10} exceptions: {ns:.1} ns per read, {:.2} times", ns / least);
        }
        if self.stopped {
            out.push_str("stopped early\n");
        }
        out
    }

    fn block_text(&self, out: &mut String, block: &[FirstChunkWriteResult]) -> std::fmt::Result {
        let Some(first) = block.first() else { return Ok(()) };
        let threads: Vec<usize> =
            block.iter().filter(|row| row.device == first.device).map(|row| row.threads).collect();
        write!(out, "{:<24}", format!("{}, depth {}", first.below, first.depth))?;
        for n in &threads {
            let shared = if *n > self.cpus { format!(" on {}", self.cpus) } else { String::new() };
            write!(out, " {:>15}", format!("{n} thread{}{shared}", if *n == 1 { "" } else { "s" }))?;
        }
        writeln!(out, "   (thousand writes per second, each chunk once)")?;
        let of =
            |kind, n| block.iter().find(|row| row.device == kind && row.threads == n).map(|row| row.iops);
        for kind in FirstChunkWriteDeviceKind::ALL {
            write!(out, "{:<24}", kind.name())?;
            for &n in &threads {
                write!(out, " {:>15.1}", of(kind, n).unwrap_or_default() / 1e3)?;
            }
            writeln!(out)?;
        }
        write!(out, "{:<24}", "  N over one mutex")?;
        for &n in &threads {
            let [ours, theirs] =
                [FirstChunkWriteDeviceKind::OriginTransient, FirstChunkWriteDeviceKind::OneMutex]
                    .map(|kind| of(kind, n).unwrap_or(f64::NAN));
            write!(out, " {:>15.2}", ours / theirs)?;
        }
        writeln!(out, "\n")
    }
}
