//! The Debian packages, made from the program and the archive of this build: their files and control
//! fields, that they are the same each time, and that they can be installed, upgraded and purged.

mod support;

use rustix::process::geteuid;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use support::{UDM, has, report_skip, text};
use tempfile::TempDir;

const PACKAGES: [&str; 3] = ["libudm-dev", "libudm0", "udm"];
const MAINTAINER: &str = "J. O'Example & Co. <packages@udm.example>";
/// 2026-01-02 03:04:05.
const TIME: &str = "1767323045";
const TIME_TEXT: &str = "2026-01-02 03:04";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap()
}

/// The standard output of a command that must succeed.
fn run(command: &mut Command) -> String {
    let out = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let output = text(&out.stdout) + &text(&out.stderr);
    assert!(out.status.success(), "{command:?}: {}\n{output}", out.status);
    text(&out.stdout)
}

/// The archive of this build: the newest one beside the test, under cargo's name for it.
fn archive() -> Option<PathBuf> {
    let test = std::env::current_exe().unwrap();
    let files = test.parent().unwrap().read_dir().unwrap().map(|entry| entry.unwrap().path());
    let is_archive = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy();
        name.starts_with("libudm-") && name.ends_with(".a")
    };
    files.filter(is_archive).max_by_key(|path| path.metadata().unwrap().modified().unwrap())
}

/// Packages in `folder`, with little compression. The masks of files and the time zones of builds
/// differ.
fn make(folder: &Path, archive: &Path, umask: &str, zone: &str) {
    let mut make = Command::new("sh");
    make.args(["-c", &format!("umask {umask}; exec make -s deb-files \"$@\""), "sh"]);
    make.arg(format!("TARGET_DIR={}", folder.display()));
    make.arg(format!("UDM={UDM}")).arg(format!("ARCHIVE={}", archive.display()));
    make.env("DEB_MAINTAINER", MAINTAINER).env("SOURCE_DATE_EPOCH", TIME).env("TZ", zone);
    make.env("DPKG_DEB_COMPRESSOR_TYPE", "gzip").env("DPKG_DEB_COMPRESSOR_LEVEL", "1");
    make.env_remove("MAKEFLAGS").env_remove("MAKELEVEL").env_remove("DESTDIR");
    run(make.current_dir(root()).env("CARGO_NET_OFFLINE", "true"));
}

/// The packages, and their files, extracted into one folder per package.
struct BuiltPackages {
    folder: TempDir,
    archive: PathBuf,
}

impl BuiltPackages {
    fn deb(&self, package: &str) -> PathBuf {
        let arch = run(Command::new("dpkg").arg("--print-architecture"));
        let name = format!("{package}_{}_{}.deb", env!("CARGO_PKG_VERSION"), arch.trim());
        self.folder.path().join("debian").join(name)
    }

    fn extracted(&self, package: &str) -> PathBuf {
        self.folder.path().join("extracted").join(package)
    }

    fn read(&self, package: &str, file: &str) -> String {
        fs::read_to_string(self.extracted(package).join(file)).unwrap_or_else(|e| panic!("{file}: {e}"))
    }

    fn field(&self, package: &str, field: &str) -> String {
        run(Command::new("dpkg-deb").arg("--field").arg(self.deb(package)).arg(field)).trim_end().to_owned()
    }
}

/// The packages; `None` if the programs that make them are missing.
fn built() -> Option<&'static BuiltPackages> {
    static BUILT: LazyLock<Option<BuiltPackages>> = LazyLock::new(|| {
        let programs = ["make", "cc", "strip", "gzip", "python3", "dpkg-deb", "dpkg-shlibdeps"];
        if !programs.into_iter().all(has) {
            return None;
        }
        if !Path::new("/etc/debian_version").exists() {
            report_skip("the packages of this system are not Debian's");
            return None;
        }
        let Some(archive) = archive() else {
            report_skip("libudm.a is not built; `cargo test --workspace` builds it");
            return None;
        };
        let built = BuiltPackages { folder: tempfile::tempdir().unwrap(), archive };
        make(built.folder.path(), &built.archive, "022", "UTC");
        for package in PACKAGES {
            fs::create_dir_all(built.extracted(package)).unwrap();
            let mut extract = Command::new("dpkg-deb");
            run(extract.arg("-R").arg(built.deb(package)).arg(built.extracted(package)));
        }
        Some(built)
    });
    BUILT.as_ref()
}

/// The folder of libraries, such as `usr/lib/x86_64-linux-gnu`.
fn libraries() -> String {
    format!("usr/lib/{}", run(Command::new("dpkg-architecture").arg("-qDEB_HOST_MULTIARCH")).trim())
}

/// All files and links below a folder, by their path in it, but not those of dpkg.
fn files(folder: &Path) -> BTreeSet<String> {
    let (mut found, mut folders) = (BTreeSet::new(), vec![folder.to_owned()]);
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(folder).unwrap().display().to_string();
            match path.symlink_metadata().unwrap().is_dir() {
                true if ["DEBIAN", "var/lib/dpkg"].contains(&name.as_str()) => {}
                true => folders.push(path),
                false => _ = found.insert(name),
            }
        }
    }
    found
}

#[test]
fn packages_have_control_fields() {
    let Some(built) = built() else { return };
    let version = env!("CARGO_PKG_VERSION");
    for package in PACKAGES {
        let field = |name| built.field(package, name);
        assert_eq!(field("Package"), package);
        assert_eq!(field("Version"), version);
        assert_eq!(field("Maintainer"), MAINTAINER);
        assert_eq!(field("Homepage"), "", "the project has no public home yet");
        assert!(field("Description").lines().count() > 2, "{package}");
        let bytes = files(&built.extracted(package)).into_iter().map(|file| {
            built.extracted(package).join(file).symlink_metadata().map(|data| data.len()).unwrap()
        });
        let (bytes, size) = (bytes.sum::<u64>(), field("Installed-Size").parse::<u64>().unwrap());
        assert!(size >= bytes / 1024 && size < bytes / 1024 + 1000, "{package}: {size} KiB, {bytes} bytes");
    }
    let needs = |package| built.field(package, "Depends");
    for package in ["udm", "libudm0"] {
        assert!(needs(package).starts_with("libc6 (>= "), "{package}: {}", needs(package));
    }
    assert!(needs("udm").contains("systemd-sysusers"));
    assert_eq!(needs("libudm-dev"), format!("libudm0 (= {version})"));
    assert_eq!(built.read("libudm0", "DEBIAN/shlibs"), format!("libudm 0 libudm0 (>= {version})\n"));
    assert_eq!(built.read("libudm0", "DEBIAN/triggers"), "activate-noawait ldconfig\n");
    assert_eq!(built.read("udm", "DEBIAN/conffiles"), "/etc/udm/udm.toml\n");
}

#[test]
fn packages_have_their_files() {
    let Some(built) = built() else { return };
    let lib = libraries();
    let man = fs::read_dir(built.folder.path().join("man")).unwrap().map(|page| {
        let name = page.unwrap().file_name().into_string().unwrap();
        format!("usr/share/man/man{}/{name}.gz", &name[name.len() - 1..])
    });
    let man: Vec<String> = man.collect();
    assert!(man.len() > 20, "{man:?}");
    let names = |list: &[&str]| list.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
    let mut expected = BTreeMap::from([
        ("libudm0", vec![format!("{lib}/libudm.so.0")]),
        (
            "libudm-dev",
            ["usr/include/udm.h".to_owned()]
                .into_iter()
                .chain(["libudm.a", "libudm.so", "pkgconfig/udm.pc"].map(|name| format!("{lib}/{name}")))
                .collect(),
        ),
        (
            "udm",
            names(&[
                "etc/udm/udm.toml",
                "usr/bin/udm",
                "usr/lib/systemd/system/udm-control.socket",
                "usr/lib/systemd/system/udm.service",
                "usr/lib/systemd/system/udm.socket",
                "usr/lib/sysusers.d/udm.conf",
                "usr/lib/udm/dmsetup",
                "usr/lib/udm/vhost-user-blk",
                "usr/share/bash-completion/completions/udm",
                "usr/share/fish/vendor_completions.d/udm.fish",
                "usr/share/qemu/vhost-user/50-udm-blk.json",
                "usr/share/zsh/vendor-completions/_udm",
            ]),
        ),
    ]);
    expected.get_mut("udm").unwrap().extend(man);
    for (package, expected) in expected {
        let mut found = files(&built.extracted(package));
        let documents = format!("usr/share/doc/{package}");
        for name in ["CHANGELOG.md.gz", "changelog.gz", "copyright", "third-party-notices.gz"] {
            assert!(found.contains(&format!("{documents}/{name}")), "{package}: {name}");
        }
        if package == "udm" {
            for name in ["sbom.cdx.json", "config.md", "internals/simulator.md", "examples/udm.service.conf"]
            {
                assert!(found.contains(&format!("{documents}/{name}")), "{name}");
            }
        }
        found.retain(|file| !file.starts_with(&documents));
        assert_eq!(found, expected.into_iter().collect(), "{package}");
        for file in files(&built.extracted(package)).iter().filter(|file| file.ends_with(".gz")) {
            run(Command::new("gzip").arg("-t").arg(built.extracted(package).join(file)));
        }
    }
    assert!(built.extracted("udm").join("etc/udm/conf.d").is_dir());
    let config = built.read("libudm-dev", &format!("{lib}/pkgconfig/udm.pc"));
    assert!(config.contains("prefix=/usr\n") && config.contains(&format!("libdir=/{lib}\n")), "{config}");
    assert!(config.contains(&format!("Version: {}\n", env!("CARGO_PKG_VERSION"))), "{config}");
    let back_end = built.read("udm", "usr/share/qemu/vhost-user/50-udm-blk.json");
    assert!(back_end.contains("\"/usr/lib/udm/vhost-user-blk\""), "{back_end}");
    // The links lead to the program in the same package.
    let help = Command::new(built.extracted("udm").join("usr/lib/udm/dmsetup")).arg("--help").output();
    let help = text(&help.unwrap().stderr);
    assert!(help.contains("dmsetup [OPTIONS] COMMAND"), "{help}");
    let link = fs::read_link(built.extracted("libudm-dev").join(&lib).join("libudm.so")).unwrap();
    assert_eq!(link, Path::new("libudm.so.0"));
    for file in ["udm/usr/bin/udm".to_owned(), format!("libudm0/{lib}/libudm.so.0")] {
        let object = built.folder.path().join("extracted").join(&file);
        let sections = run(Command::new("readelf").arg("--sections").arg("--dynamic").arg("-W").arg(object));
        assert!(!sections.contains(".debug_info") && !sections.contains(".symtab"), "{file} is stripped");
        assert_eq!(sections.contains("soname: [libudm.so.0]"), file.contains(".so"), "{file}");
    }
}

#[test]
fn files_have_sums_modes_and_one_time() {
    let Some(built) = built() else { return };
    for package in PACKAGES {
        let folder = built.extracted(package);
        let sums = built.read(package, "DEBIAN/md5sums");
        let summed: BTreeSet<String> = sums.lines().map(|line| line[34..].to_owned()).collect();
        let is_file = |file: &String| !folder.join(file).symlink_metadata().unwrap().is_symlink();
        assert_eq!(summed, files(&folder).into_iter().filter(is_file).collect(), "{package}");
        run(Command::new("md5sum").args(["--check", "--quiet", "DEBIAN/md5sums"]).current_dir(&folder));

        let list = run(Command::new("dpkg-deb").arg("--contents").arg(built.deb(package)).env("TZ", "UTC"));
        assert!(list.lines().count() > 5, "{list}");
        for line in list.lines() {
            let is_program = line.ends_with("./usr/bin/udm");
            let mode = match &line[..1] {
                "d" => "drwxr-xr-x",
                "l" => "lrwxrwxrwx",
                _ if is_program => "-rwxr-xr-x",
                _ => "-rw-r--r--",
            };
            assert!(line.starts_with(&format!("{mode} root/root ")), "{line}");
            assert!(line.contains(TIME_TEXT), "{line}");
        }
    }
}

/// Two builds with the same program and time give the same bytes, and none names its folder.
#[test]
fn packages_are_the_same_each_time() {
    let Some(built) = built() else { return };
    let again = tempfile::tempdir().unwrap();
    make(again.path(), &built.archive, "077", "Asia/Kolkata");
    for package in PACKAGES {
        let deb = built.deb(package);
        let other = again.path().join("debian").join(deb.file_name().unwrap());
        assert!(fs::read(&deb).unwrap() == fs::read(other).unwrap(), "{package} differs");
        for path in [built.folder.path(), root()] {
            let mut grep = Command::new("grep");
            grep.args(["-rlF", "--"]).arg(path).arg(built.extracted(package));
            assert_eq!(text(&grep.output().unwrap().stdout), "", "files with {}", path.display());
        }
    }
}

#[test]
fn maintainer_scripts_are_good() {
    let Some(built) = built() else { return };
    for script in ["postinst", "prerm", "postrm"] {
        let script = built.extracted("udm").join("DEBIAN").join(script);
        run(Command::new("sh").arg("-n").arg(&script));
        if has("shellcheck") {
            run(Command::new("shellcheck").arg(&script));
        }
    }
}

/// The package libudm-dev is left out: lintian takes minutes for the archive of a debug build.
#[test]
fn lintian_finds_nothing() {
    let Some(built) = built() else { return };
    if !has("lintian") {
        return;
    }
    let mut lintian = Command::new("lintian");
    lintian.args(["--no-cfg", "--allow-root", "--fail-on", "error,warning"]);
    run(lintian.arg(built.deb("udm")).arg(built.deb("libudm0")));
}

/// dpkg on the files of another root. The maintainer scripts get its path in `DPKG_ROOT`, and run
/// with the programs of this system.
fn dpkg(root: &Path, arguments: &[&str], packages: &[PathBuf]) -> String {
    let mut dpkg = Command::new("dpkg");
    dpkg.arg(format!("--root={}", root.display())).args(["--force-depends", "--force-script-chrootless"]);
    let path = std::env::var("PATH").unwrap_or_default();
    dpkg.args(arguments).args(packages).env("PATH", path + ":/usr/sbin:/sbin");
    run(dpkg.env("LC_ALL", "C.UTF-8").env("DEBIAN_FRONTEND", "noninteractive"))
}

#[test]
fn packages_are_installed_upgraded_and_purged() {
    let Some(built) = built() else { return };
    if !has("systemd-sysusers") || !has("deb-systemd-helper") {
        return;
    }
    if !geteuid().is_root() {
        report_skip("only root can install packages, also in another folder");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    fs::create_dir_all(root.join("var/lib/dpkg/info")).unwrap();
    fs::create_dir_all(root.join("var/lib/dpkg/updates")).unwrap();
    fs::write(root.join("var/lib/dpkg/status"), "").unwrap();
    let debs = PACKAGES.map(|package| built.deb(package));
    let read = |file: &str| fs::read_to_string(root.join(file)).unwrap();

    dpkg(root, &["--install"], &debs);
    let status = read("var/lib/dpkg/status");
    assert_eq!(status.matches("Status: install ok installed\n").count(), 3, "{status}");
    assert!(read("etc/passwd").contains("udm:x:") && read("etc/passwd").lines().count() == 1);
    assert!(read("etc/group").lines().any(|line| line.starts_with("disk:") && line.ends_with(":udm")));
    let version = run(Command::new(root.join("usr/bin/udm")).arg("--version"));
    assert_eq!(version, format!("udm {}\n", env!("CARGO_PKG_VERSION")));

    // What an administrator changes survives an upgrade, and nothing is done twice.
    fs::write(root.join("etc/udm/udm.toml"), "# changed\n").unwrap();
    let wants = root.join("etc/systemd/system/multi-user.target.wants");
    fs::create_dir_all(&wants).unwrap();
    symlink("/usr/lib/systemd/system/udm.service", wants.join("udm.service")).unwrap();
    let (before, users) = (files(root), read("etc/passwd") + &read("etc/group"));
    dpkg(root, &["--install"], &debs);
    assert_eq!(files(root), before);
    assert_eq!(read("etc/passwd") + &read("etc/group"), users);
    assert_eq!(read("etc/udm/udm.toml"), "# changed\n");

    fs::create_dir_all(root.join("var/lib/udm")).unwrap();
    fs::write(root.join("var/lib/udm/record"), "").unwrap();
    dpkg(root, &["--remove", "libudm-dev", "libudm0", "udm"], &[]);
    let left = files(root);
    for file in ["etc/udm/udm.toml", "var/lib/udm/record"] {
        assert!(left.contains(file), "{file} is gone after a removal: {left:?}");
    }
    assert!(!left.iter().any(|file| file.starts_with("usr/")), "{left:?}");

    dpkg(root, &["--purge", "udm"], &[]);
    let accounts = [".pwd.lock", "group", "gshadow", "passwd", "shadow"].map(|name| format!("etc/{name}"));
    let left = files(root);
    let left = left.iter().filter(|file| !accounts.contains(&file.trim_end_matches('-').into()));
    assert_eq!(left.collect::<Vec<_>>(), Vec::<&String>::new(), "after a purge");
    assert!(!root.join("var/lib/udm").exists() && !root.join("etc/udm").exists());
}
