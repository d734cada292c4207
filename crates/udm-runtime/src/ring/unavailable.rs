//! Explains why io_uring is not available, and how to enable it.

use rustix::io::Errno;
use std::io;

/// Sysctl that disables io_uring: 1 for unprivileged processes, 2 for all.
const DISABLED: &str = "/proc/sys/kernel/io_uring_disabled";

/// A one-line explanation of `error`.
pub(crate) fn explain_uring_unavailable(error: &io::Error) -> String {
    let disabled = std::fs::read_to_string(DISABLED).ok();
    format_uring_error_advice(error, disabled.as_deref().map_or("", str::trim))
}

fn format_uring_error_advice(error: &io::Error, disabled: &str) -> String {
    let advice = match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::PERM | Errno::ACCESS) if !matches!(disabled, "" | "0") => {
            format!("kernel.io_uring_disabled is {disabled}: `sysctl kernel.io_uring_disabled=0` allows it")
        }
        Some(Errno::PERM | Errno::ACCESS) => {
            "a seccomp filter forbids it, as in most containers: allow io_uring_setup, io_uring_enter and \
             io_uring_register (docker and podman: --security-opt seccomp=unconfined)"
                .into()
        }
        Some(Errno::NOMEM) => {
            "raise the limit of locked memory: `ulimit -l unlimited`, or LimitMEMLOCK= of a unit".into()
        }
        Some(Errno::NOSYS) => {
            "this kernel has none, or a seccomp filter hides it: Linux 5.19 or later is needed".into()
        }
        _ => return format!("io_uring is not available: {error}"),
    };
    format!("io_uring is not available: {error}: {advice}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_says_what_to_do() {
        let said = |errno: Errno, disabled| format_uring_error_advice(&io::Error::from(errno), disabled);
        assert!(said(Errno::PERM, "2").contains("sysctl kernel.io_uring_disabled=0"));
        assert!(said(Errno::PERM, "0").contains("seccomp"));
        assert!(said(Errno::PERM, "").contains("seccomp"));
        assert!(said(Errno::NOMEM, "0").contains("ulimit -l"));
        assert!(said(Errno::NOSYS, "").contains("5.19"));
        let other = io::Error::from(Errno::MFILE);
        assert_eq!(format_uring_error_advice(&other, "0"), format!("io_uring is not available: {other}"));
    }
}
