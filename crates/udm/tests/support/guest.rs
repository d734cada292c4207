//! A machine with a real kernel, emulated by QEMU.
//!
//! `UDM_TEST_KERNEL` names a folder with an unpacked kernel package
//! (docs/internals/kernel-rows.md). The machine boots in a few seconds and runs a script.

use super::{has, report_skip, text};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Time limit of a machine.
const LIMIT: Duration = Duration::from_secs(400);

/// Modules of every machine, in the order of their dependencies; one that is built in is missing
/// from the package.
const MODULES: [&str; 6] =
    ["virtio_ring", "virtio", "virtio_pci_modern_dev", "virtio_pci_legacy_dev", "virtio_pci", "virtio_blk"];

/// Commands of busybox that scripts may use.
const COMMANDS: [&str; 28] = [
    "sh",
    "mount",
    "umount",
    "insmod",
    "cat",
    "echo",
    "cmp",
    "dd",
    "poweroff",
    "sleep",
    "seq",
    "sync",
    "fstrim",
    "blkdiscard",
    "grep",
    "cp",
    "awk",
    "chmod",
    "chown",
    "head",
    "kill",
    "ls",
    "mkdir",
    "readlink",
    "rm",
    "su",
    "switch_root",
    "tail",
];

/// A kernel package.
pub struct GuestKernel(PathBuf);

impl GuestKernel {
    /// The kernel of `UDM_TEST_KERNEL`; reports the skip if it or a program is missing.
    pub fn find() -> Option<GuestKernel> {
        let Some(kernel) = std::env::var_os("UDM_TEST_KERNEL") else {
            report_skip("UDM_TEST_KERNEL names no unpacked kernel package");
            return None;
        };
        let tools = ["qemu-system-x86_64", "cpio", "busybox"];
        tools.iter().all(|tool| has(tool)).then(|| GuestKernel(kernel.into()))
    }

    /// True if the package has the module; otherwise reports the skip.
    pub fn has_module(&self, module: &str) -> bool {
        let found = self.module(module).is_some();
        if !found {
            report_skip(&format!("the kernel of UDM_TEST_KERNEL has no module {module}"));
        }
        found
    }

    /// The file of a module, which may be compressed.
    fn module(&self, module: &str) -> Option<PathBuf> {
        let names = [format!("{module}.ko"), format!("{module}.ko.xz")];
        let found =
            names.map(|name| Command::new("find").arg(&self.0).arg("-name").arg(&name).output().unwrap());
        found.iter().find_map(|found| text(&found.stdout).lines().next().map(PathBuf::from))
    }

    fn image(&self) -> PathBuf {
        let mut images = fs::read_dir(self.0.join("boot")).unwrap().map(|entry| entry.unwrap().path());
        images.find(|path| path.display().to_string().contains("vmlinuz")).expect("boot/vmlinuz-*")
    }

    /// A machine that runs `script` with the modules and programs, and ends. Its output goes to a
    /// file in `folder` ([`output`]).
    pub fn machine(&self, folder: &Path, modules: &[&str], programs: &[&str], script: &str) -> Command {
        let initrd = self.initrd(folder, modules, programs, script);
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args([
            "-accel",
            "tcg",
            "-display",
            "none",
            "-nodefaults",
            "-no-reboot",
            "-M",
            "q35",
            "-m",
            "256",
        ]);
        qemu.arg("-serial").arg(format!("file:{}", folder.join("said").display()));
        qemu.arg("-kernel").arg(self.image()).arg("-initrd").arg(initrd);
        qemu.args(["-append", "console=ttyS0 panic=-1 quiet"]).stdin(Stdio::null()).stdout(Stdio::null());
        qemu
    }

    /// The initramfs: a shell, the modules and programs, and the script.
    fn initrd(&self, folder: &Path, modules: &[&str], programs: &[&str], script: &str) -> PathBuf {
        let root = folder.join("root");
        for place in ["bin", "dev", "proc", "sys", "mod", "mnt", "tmp", "etc"] {
            fs::create_dir_all(root.join(place)).unwrap();
        }
        for program in ["busybox"].iter().chain(programs) {
            copy_with_libraries(program, &root);
        }
        link_commands(&root);
        let mut loads = String::new();
        for module in MODULES.iter().chain(modules) {
            let Some(path) = self.module(module) else { continue };
            let name = format!("{module}.ko");
            let copy = root.join("mod").join(&name);
            if path.extension().is_some_and(|extension| extension == "xz") {
                let plain = Command::new("xz").arg("-dc").arg(&path).output().unwrap();
                assert!(plain.status.success(), "{}", text(&plain.stderr));
                fs::write(copy, plain.stdout).unwrap();
            } else {
                fs::copy(path, copy).unwrap();
            }
            loads += &format!("insmod /mod/{name}\n");
        }
        let init = format!(
            "#!/bin/sh\nmount -t devtmpfs d /dev; mount -t proc p /proc; mount -t sysfs s /sys\n{loads}\
             for i in $(seq 50); do [ -b /dev/vda ] && break; sleep 0.1; done\n{script}\npoweroff -f\n"
        );
        fs::write(root.join("init"), init).unwrap();
        fs::set_permissions(root.join("init"), fs::Permissions::from_mode(0o755)).unwrap();
        let packed = folder.join("initrd");
        let pack = format!("find . | cpio -o -H newc --quiet > '{}'", packed.display());
        assert!(Command::new("sh").args(["-c", &pack]).current_dir(&root).status().unwrap().success());
        packed
    }
}

/// Links the commands of busybox, which is in `root` already.
pub fn link_commands(root: &Path) {
    for command in COMMANDS {
        std::os::unix::fs::symlink("busybox", root.join("bin").join(command)).unwrap();
    }
}

/// Copies a program to `bin` of `root`, and the libraries that it needs.
pub fn copy_with_libraries(program: &str, root: &Path) {
    let look = format!("PATH=$PATH:/usr/sbin:/sbin command -v {program}");
    let found = text(&Command::new("sh").args(["-c", &look]).output().unwrap().stdout);
    let copy = root.join("bin").join(Path::new(program).file_name().unwrap());
    fs::copy(found.trim_end(), &copy).unwrap();
    let libraries = Command::new("ldd").arg(&copy).output().unwrap();
    for library in text(&libraries.stdout).split_whitespace().filter(|word| word.starts_with('/')) {
        let to = root.join(&library[1..]);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(library, to).unwrap();
    }
}

/// The output of the machine so far.
pub fn output(folder: &Path) -> String {
    text(&fs::read(folder.join("said")).unwrap_or_default())
}

/// Waits for the end of the machine; returns its output.
pub fn finish(mut machine: Child, folder: &Path) -> String {
    let begin = Instant::now();
    while machine.try_wait().unwrap().is_none() {
        if begin.elapsed() > LIMIT {
            machine.kill().unwrap();
            machine.wait().unwrap();
            panic!("the machine does not end: {}", output(folder));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    output(folder)
}
