//! Files that cargo has built for these tests.

use std::path::{Path, PathBuf};

/// The root folder of the project.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("crates/udm-capi in the root")
}

/// The archive of this build: the newest one beside the test, under cargo's name for it. `libudm.a`
/// above it exists only after a `cargo build`.
pub fn archive() -> PathBuf {
    let test = std::env::current_exe().expect("this test");
    let folder = test.parent().expect("the folder deps").read_dir().expect("it can be read");
    let is_archive = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("libudm-") && name.ends_with(".a")
    };
    let all = folder.filter_map(|entry| Some(entry.ok()?.path())).filter(is_archive);
    let age = |path: &PathBuf| path.metadata().and_then(|data| data.modified()).expect("when it was built");
    all.max_by_key(age).expect("cargo builds the library for its tests")
}
