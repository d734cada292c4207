//! The system calls that a restricted server may make, by seccomp (`seccomp(2)`).
//!
//! Contract: what is not listed fails with EPERM. The list has what the server, the C library and
//! the ordinary programs that it starts need to work with files, sockets, memory, threads and
//! io_uring. It has nothing that mounts, changes users or namespaces, traces, loads code into the
//! kernel or configures the machine. Some calls are allowed in part ([`allowed_in_part`]):
//!
//! * `socket`: streams and datagrams of Unix, IPv4 and IPv6, with the usual protocols.
//! * `ioctl`: nothing that types into a terminal or takes it over (TIOCSTI and others).
//! * `fchmod` and `fchmodat`: not for set-user-ID and set-group-ID. No call changes owners but
//!   `fchownat`, for `--group`.
//! * `prlimit64` and `sched_setaffinity`: of the calling process.
//! * `clone`: without new namespaces. The flags of `clone3` are in memory, where the filter does
//!   not see them, so `clone3` is unknown (ENOSYS) and the C library uses `clone`.
//! * `mmap` and `mprotect`: not for memory that can be written and executed, or becomes executable.
//!
//! Requests on a ring of io_uring are no system calls, so this filter does not see them. The rules
//! for files hold for them all the same.

use anyhow::{Context, Result};
use libc::{
    SYS_clone, SYS_clone3, SYS_fchmod, SYS_fchmodat, SYS_ioctl, SYS_mmap, SYS_mprotect, SYS_prlimit64,
    SYS_sched_setaffinity, SYS_socket, c_long,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    apply_filter,
};
use std::collections::BTreeMap;

/// Calls that are allowed with all arguments.
const ALLOWED: &[c_long] = &[
    // Memory.
    libc::SYS_brk,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    libc::SYS_mincore,
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_mremap,
    libc::SYS_msync,
    libc::SYS_munlock,
    libc::SYS_munmap,
    // Files.
    libc::SYS_chdir,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_copy_file_range,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_fadvise64,
    libc::SYS_fallocate,
    libc::SYS_fchdir,
    libc::SYS_fchownat,
    libc::SYS_fcntl,
    libc::SYS_fdatasync,
    libc::SYS_fgetxattr,
    libc::SYS_flock,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    libc::SYS_getxattr,
    libc::SYS_inotify_add_watch,
    libc::SYS_inotify_init1,
    libc::SYS_inotify_rm_watch,
    libc::SYS_lgetxattr,
    libc::SYS_linkat,
    libc::SYS_lseek,
    libc::SYS_mkdirat,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_pipe2,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_read,
    libc::SYS_readlinkat,
    libc::SYS_readv,
    #[cfg(not(target_arch = "riscv64"))]
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_sendfile,
    libc::SYS_splice,
    libc::SYS_statfs,
    libc::SYS_statx,
    libc::SYS_symlinkat,
    libc::SYS_sync_file_range,
    libc::SYS_truncate,
    libc::SYS_umask,
    libc::SYS_unlinkat,
    libc::SYS_write,
    libc::SYS_writev,
    // Waiting and rings.
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    libc::SYS_futex,
    libc::SYS_futex_waitv,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_signalfd4,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    // Sockets.
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_getpeername,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_listen,
    libc::SYS_recvfrom,
    libc::SYS_recvmmsg,
    libc::SYS_recvmsg,
    libc::SYS_sendmmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_socketpair,
    // Threads and processes.
    libc::SYS_execve,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_get_robust_list,
    libc::SYS_getcpu,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getgroups,
    libc::SYS_getpgid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getresgid,
    libc::SYS_getresuid,
    libc::SYS_getrusage,
    libc::SYS_getsid,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_kill,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_send_signal,
    libc::SYS_prctl,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigsuspend,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_getparam,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_setpgid,
    libc::SYS_setsid,
    libc::SYS_sigaltstack,
    libc::SYS_tgkill,
    libc::SYS_wait4,
    libc::SYS_waitid,
    // Time and the machine.
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_getrandom,
    libc::SYS_gettimeofday,
    libc::SYS_nanosleep,
    libc::SYS_sysinfo,
    libc::SYS_times,
    libc::SYS_uname,
];

/// Older forms of allowed calls, which programs on x86-64 still use.
#[cfg(target_arch = "x86_64")]
const ALLOWED_OLD: &[c_long] = &[
    libc::SYS_access,
    libc::SYS_arch_prctl,
    libc::SYS_dup2,
    libc::SYS_epoll_wait,
    libc::SYS_fork,
    libc::SYS_getpgrp,
    libc::SYS_getrlimit,
    libc::SYS_link,
    libc::SYS_lstat,
    libc::SYS_mkdir,
    libc::SYS_open,
    libc::SYS_pipe,
    libc::SYS_poll,
    libc::SYS_readlink,
    libc::SYS_rename,
    libc::SYS_rmdir,
    libc::SYS_select,
    libc::SYS_setrlimit,
    libc::SYS_stat,
    libc::SYS_symlink,
    libc::SYS_time,
    libc::SYS_unlink,
    libc::SYS_vfork,
];
#[cfg(not(target_arch = "x86_64"))]
const ALLOWED_OLD: &[c_long] = &[];

/// Flags of `clone` for new namespaces.
const NAMESPACES: u64 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u64;

/// Restricts this thread to the allowed system calls.
///
/// # Errors
/// The processor is not known, or the kernel has no seccomp.
pub(super) fn restrict_system_calls() -> Result<()> {
    let unknown = BTreeMap::from([(SYS_clone3, vec![])]);
    let unknown =
        compile_seccomp_filter(unknown, SeccompAction::Allow, SeccompAction::Errno(libc::ENOSYS as u32))?;
    let rules = allowed_calls().context("system calls")?;
    let allowed =
        compile_seccomp_filter(rules, SeccompAction::Errno(libc::EPERM as u32), SeccompAction::Allow)?;
    // The kernel takes the strictest action of all filters. The last one forbids further filters.
    for filter in [&unknown, &allowed] {
        apply_filter(filter).context("system calls: is CONFIG_SECCOMP_FILTER set in this kernel?")?;
    }
    Ok(())
}

/// The allowed calls, with conditions for the arguments of some; none means all arguments.
fn allowed_calls() -> Result<BTreeMap<c_long, Vec<SeccompRule>>, seccompiler::BackendError> {
    let mut rules: BTreeMap<c_long, Vec<SeccompRule>> =
        ALLOWED.iter().chain(ALLOWED_OLD).map(|call| (*call, vec![])).collect();
    rules.insert(SYS_clone3, vec![]);
    rules.extend(allowed_in_part()?);
    Ok(rules)
}

/// Calls with conditions: one of the rules must hold, and of a rule all conditions.
fn allowed_in_part() -> Result<BTreeMap<c_long, Vec<SeccompRule>>, seccompiler::BackendError> {
    use SeccompCmpOp::{Eq, MaskedEq, Ne};
    let (writable, executable) = (libc::PROT_WRITE as u64, libc::PROT_EXEC as u64);
    let argument = |number: u8, is: SeccompCmpOp, value: u64| {
        SeccompCondition::new(number, SeccompCmpArgLen::Dword, is, value)
    };
    let when =
        |number: u8, is: SeccompCmpOp, value: u64| SeccompRule::new(vec![argument(number, is, value)?]);
    let mut sockets = Vec::new();
    for family in [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_VSOCK] {
        for kind in [libc::SOCK_STREAM, libc::SOCK_DGRAM] {
            for protocol in [0, libc::IPPROTO_TCP, libc::IPPROTO_UDP] {
                sockets.push(SeccompRule::new(vec![
                    argument(0, Eq, family as u64)?,
                    // Without SOCK_CLOEXEC and SOCK_NONBLOCK.
                    argument(1, MaskedEq(0xf), kind as u64)?,
                    argument(2, Eq, protocol as u64)?,
                ])?);
            }
        }
    }
    // From linux/ioctls.h.
    let terminal = [libc::TIOCSTI, libc::TIOCLINUX, libc::TIOCCONS, TIOCSETD];
    let not_terminal = terminal.iter().map(|request| argument(1, Ne, *request)).collect::<Result<_, _>>()?;
    let set_id = u64::from(libc::S_ISUID | libc::S_ISGID);
    #[allow(unused_mut, reason = "x86-64 has one more")]
    let mut rules = BTreeMap::from([
        (SYS_socket, sockets),
        (SYS_ioctl, vec![SeccompRule::new(not_terminal)?]),
        (SYS_fchmod, vec![when(1, MaskedEq(set_id), 0)?]),
        (SYS_fchmodat, vec![when(2, MaskedEq(set_id), 0)?]),
        (SYS_prlimit64, vec![when(0, Eq, 0)?]),
        (SYS_sched_setaffinity, vec![when(0, Eq, 0)?]),
        (SYS_clone, vec![when(0, MaskedEq(NAMESPACES), 0)?]),
        // One of the two is missing.
        (SYS_mmap, vec![when(2, MaskedEq(writable), 0)?, when(2, MaskedEq(executable), 0)?]),
        (SYS_mprotect, vec![when(2, MaskedEq(executable), 0)?]),
    ]);
    #[cfg(target_arch = "x86_64")]
    rules.insert(libc::SYS_chmod, vec![when(1, MaskedEq(set_id), 0)?]);
    Ok(rules)
}

/// Sets the line discipline of a terminal.
const TIOCSETD: u64 = 0x5423;

/// A filter with the action `other` for calls that no rule matches, and `matched` for the others.
fn compile_seccomp_filter(
    rules: BTreeMap<c_long, Vec<SeccompRule>>,
    other: SeccompAction,
    matched: SeccompAction,
) -> Result<BpfProgram> {
    let machine = std::env::consts::ARCH.try_into().context("system calls")?;
    let filter = SeccompFilter::new(rules, other, matched, machine).context("system calls")?;
    filter.try_into().context("system calls")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// docs/sandbox.md lists the system calls, and says how many there are.
    #[test]
    #[cfg(target_arch = "x86_64")]
    fn the_docs_list_the_system_calls() {
        let docs = include_str!("../../../../../docs/sandbox.md");
        let (text, list) = docs.split_once("```text\n").unwrap();
        let listed: BTreeSet<&str> = list.split_once("```").unwrap().0.split_whitespace().collect();
        let names = include_str!("system_calls.rs").split("libc::SYS_").skip(1);
        let end = |name: &str| name.find(|c: char| c != '_' && !c.is_ascii_alphanumeric());
        let names = names.filter_map(|name| name.get(..end(name)?)).filter(|name| !name.is_empty());
        let mut allowed: BTreeSet<&str> = names.collect();
        let in_part = ["chmod", "clone", "fchmod", "fchmodat", "ioctl", "mmap", "mprotect", "prlimit64"];
        allowed.extend(in_part.iter().chain(&["sched_setaffinity", "socket"]));
        assert_eq!(allowed_in_part().unwrap().len(), in_part.len() + 2);
        assert_eq!(listed, allowed);
        assert!(text.contains(&format!("one of {}:", allowed.len())));
        // With clone3, which is unknown.
        assert_eq!(allowed_calls().unwrap().len(), allowed.len() + 1);
    }
}
