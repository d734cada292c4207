//! libudm as C programs use it: installed by `make`, found by pkg-config, compiled by cc.

#![expect(clippy::print_stdout, reason = "what is skipped says so")]

mod built;

use built::{archive, root};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use tempfile::TempDir;

/// The output of a command that must succeed.
fn run(command: &mut Command) -> String {
    let out = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let output = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{command:?}: {}\n{output}", out.status);
    output
}

fn is_there(program: &str) -> bool {
    let there = Command::new(program).arg("--version").output().is_ok_and(|out| out.status.success());
    if !there {
        println!("skipped: {program} is not installed");
    }
    there
}

/// Prefix of the installed library; `None` if the tools for that are missing.
fn installed() -> Option<&'static Path> {
    static INSTALLED: LazyLock<Option<TempDir>> = LazyLock::new(|| {
        if !["cc", "make", "pkg-config"].into_iter().all(is_there) {
            return None;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let mut make = Command::new("make");
        make.current_dir(root()).arg("install-library").env_remove("MAKEFLAGS").env_remove("MAKELEVEL");
        make.arg(format!("PREFIX={}", folder.path().display()));
        run(make.arg(format!("ARCHIVE={}", archive().display())));
        Some(folder)
    });
    INSTALLED.as_ref().map(TempDir::path)
}

/// Compiles a program against the installed library; returns its path.
fn compiled(name: &str, source: &str, more: &[&str]) -> Option<PathBuf> {
    let prefix = installed()?;
    let (from, to) = (prefix.join(format!("{name}.c")), prefix.join(name));
    std::fs::write(&from, source).expect("a source");
    let mut ask = Command::new("pkg-config");
    let flags =
        run(ask.env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig")).args(["--cflags", "--libs", "udm"]));
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"]).arg(&to).arg(&from);
    run(cc.args(more).args(flags.split_whitespace()));
    Some(to)
}

fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("LD_LIBRARY_PATH", installed().expect("what was compiled against").join("lib"));
    command
}

/// The program of docs/library.md.
fn example() -> String {
    let page = std::fs::read_to_string(root().join("docs/library.md")).expect("the page");
    let program = page.split("```c\n").nth(1).and_then(|rest| rest.split("```").next());
    program.expect("a program").to_owned()
}

#[test]
fn the_example_of_the_manual_runs() {
    let Some(program) = compiled("example", &example(), &[]) else { return };
    let output = run(&mut command(&program));
    assert!(output.starts_with("all came back\n0 16384 linear ") && output.lines().count() == 3, "{output}");
}

#[test]
fn what_is_wrong_is_refused() {
    let Some(program) = compiled("hostile", include_str!("programs/hostile.c"), &[]) else { return };
    assert_eq!(run(&mut command(&program)), "refused what had to be\n");
}

/// A program whose buffer is shorter than its request.
const SHORT: &str = r#"
#include <stdlib.h>
#include <udm.h>
int main(void)
{
	int context = udm_open(NULL), made = udm_create(context, "vol", "mem:1M");
	int core = udm_core_open(context, UDM_ANY, UDM_ANY), lane = udm_lane_open(core, "vol");
	struct udm_request r = { .op = UDM_READ, .sectors = 8, .buffer = malloc(1000) };
	struct udm_completion c;
	return made || udm_submit(core, lane, &r, 1) != 1 || udm_wait(core, &c, 1, 1, UDM_FOREVER) != 1;
}
"#;

/// The hostile program with the address sanitizer: udm accesses only memory that the program
/// passed, and leaks none. (valgrind can't be used: a thread that waits in an io_uring stops all
/// other threads there.)
#[test]
fn memory_is_let_alone() {
    let watch = ["-fsanitize=address"];
    let Some(prefix) = installed() else { return };
    let probe =
        Command::new("cc").args(watch).args(["-x", "c", "-", "-o"]).arg(prefix.join("probe")).output();
    if !probe.is_ok_and(|out| !String::from_utf8_lossy(&out.stderr).contains("asan")) {
        println!("skipped: cc has no address sanitizer");
        return;
    }
    let Some(program) = compiled("watched", include_str!("programs/hostile.c"), &watch) else { return };
    assert_eq!(run(&mut command(&program)), "refused what had to be\n");
    let Some(short) = compiled("short", SHORT, &watch) else { return };
    let out = command(&short).output().expect("it runs");
    let output = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && output.contains("heap-buffer-overflow"), "nobody watches: {output}");
}

#[test]
fn it_can_be_linked_into_the_program() {
    let Some(prefix) = installed() else { return };
    let archive = prefix.join("lib/libudm.a");
    let libs = ["-Wl,--gc-sections", archive.to_str().expect("a path"), "-lgcc_s", "-lm", "-ldl", "-lrt"];
    let Some(program) = compiled("linked", &example(), &libs) else { return };
    // No shared library can be found there.
    let output = run(Command::new(program).env("LD_LIBRARY_PATH", "/nowhere"));
    assert!(output.starts_with("all came back\n"), "{output}");
}

/// The library exports each function of the header with its version, and no other symbol.
#[test]
fn symbols_have_their_version() {
    let Some(prefix) = installed() else { return };
    if !is_there("nm") || !is_there("readelf") {
        return;
    }
    let library = prefix.join("lib/libudm.so.0");
    let symbols =
        run(Command::new("nm").args(["-D", "--defined-only", "--with-symbol-versions"]).arg(&library));
    let mut given: Vec<&str> = symbols.lines().filter_map(|line| line.split(' ').nth(2)).collect();
    let header = std::fs::read_to_string(prefix.join("include/udm.h")).expect("the header");
    let functions = header.lines().filter(|line| !line.starts_with(['/', ' ', '\t', '#']));
    let mut wanted: Vec<String> = functions
        .filter_map(|line| line.split_once('(')?.0.rsplit([' ', '*']).next().map(String::from))
        .filter(|name| name.starts_with("udm_"))
        .map(|name| format!("{name}@@UDM_0"))
        .collect();
    wanted.push("UDM_0".into());
    given.sort_unstable();
    wanted.sort_unstable();
    assert_eq!(given, wanted);
    let soname = run(Command::new("readelf").arg("-d").arg(&library));
    assert!(soname.contains("Library soname: [libudm.so.0]"), "{soname}");
}
