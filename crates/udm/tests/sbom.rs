//! `packaging/dependencies`: the dependencies of the program and of libudm, as CycloneDX, and their
//! licence texts.

#[path = "support/project.rs"]
mod project;

use project::{root, text};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::process::Command;

/// The output of the script; `None` if python3 is missing.
fn dependencies(kind: &str) -> Option<String> {
    let mut script = Command::new("python3");
    script.arg(root().join("packaging/dependencies")).arg(kind).env("SOURCE_DATE_EPOCH", "1767323045");
    let Ok(out) = script.env("CARGO_NET_OFFLINE", "true").output() else {
        report_skip("python3 is not installed");
        return None;
    };
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    Some(String::from_utf8(out.stdout).unwrap())
}

#[expect(clippy::print_stderr, reason = "skips are reported in the output of the tests")]
fn report_skip(why: &str) {
    eprintln!("SKIPPED: {why}");
}

/// Checksums of Cargo.lock, by `name@version`; empty for the crates of this project.
fn locked() -> BTreeMap<String, String> {
    let lock = fs::read_to_string(root().join("Cargo.lock")).unwrap();
    let packages = lock.split("[[package]]").skip(1).map(|package| {
        let field = |name: &str| {
            let value = package.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" = \""));
            value.unwrap_or_default().trim_end_matches('"').to_owned()
        };
        (format!("{}@{}", field("name"), field("version")), field("checksum"))
    });
    packages.collect()
}

#[test]
fn the_list_of_dependencies_is_complete_and_valid() {
    let Some(output) = dependencies("sbom") else { return };
    assert_eq!(dependencies("sbom").unwrap(), output, "it is the same each time");
    let bom: Value = serde_json::from_str(&output).unwrap();
    assert_eq!((text(&bom, "bomFormat"), text(&bom, "specVersion")), ("CycloneDX", "1.5"));
    assert_eq!((bom["version"].as_u64(), &bom["serialNumber"]), (Some(1), &Value::Null));
    assert_eq!(text(&bom["metadata"], "timestamp"), "2026-01-02T03:04:05Z");
    let main = &bom["metadata"]["component"];
    assert_eq!((text(main, "type"), text(main, "name")), ("application", "udm"));
    assert_eq!(text(main, "version"), env!("CARGO_PKG_VERSION"));

    let locked = locked();
    let mut scopes = BTreeMap::from([(text(main, "bom-ref"), "required")]);
    for part in bom["components"].as_array().unwrap() {
        let reference = text(part, "bom-ref");
        assert_eq!(text(part, "type"), "library", "{reference}");
        assert_eq!(reference, format!("{}@{}", text(part, "name"), text(part, "version")));
        let checksum = locked.get(reference).unwrap_or_else(|| panic!("{reference}: not in Cargo.lock"));
        match checksum.as_str() {
            "" => assert!(part["purl"].is_null() && part["hashes"].is_null(), "{reference}"),
            sum => {
                assert_eq!(text(part, "purl"), format!("pkg:cargo/{}", reference.replace('+', "%2B")));
                assert_eq!(part["hashes"].as_array().unwrap().len(), 1, "{reference}");
                let hash = &part["hashes"][0];
                assert_eq!((text(hash, "alg"), text(hash, "content")), ("SHA-256", sum), "{reference}");
            }
        }
        let licence = text(&part["licenses"][0], "expression");
        assert!(!licence.is_empty() && !licence.contains('/'), "{reference}: {licence}");
        assert!(scopes.insert(reference, text(part, "scope")).is_none(), "{reference} occurs twice");
    }
    let scope = |name: &str| {
        let part = scopes.iter().find(|(reference, _)| reference.starts_with(&format!("{name}@")));
        part.map(|(_, &scope)| scope)
    };
    for name in ["io-uring", "ring", "rustls", "serde", "udm-capi", "udm-core"] {
        assert_eq!(scope(name), Some("required"), "{name}");
    }
    for name in ["cc", "serde_derive", "syn"] {
        assert_eq!(scope(name), Some("excluded"), "{name} runs in a build only");
    }
    for name in ["insta", "proptest", "udm-sim"] {
        assert_eq!(scope(name), None, "{name} is for tests");
    }

    let mut uses: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for row in bom["dependencies"].as_array().unwrap() {
        let used = row["dependsOn"].as_array().unwrap().iter().map(|used| used.as_str().unwrap());
        assert!(uses.insert(text(row, "ref"), used.collect()).is_none(), "{row}");
    }
    assert!(uses.keys().eq(scopes.keys()), "each part has a row");
    let version = env!("CARGO_PKG_VERSION");
    let products = [format!("udm@{version}"), format!("udm-capi@{version}")];
    let (mut reached, mut next) = (BTreeSet::new(), products.iter().map(String::as_str).collect::<Vec<_>>());
    while let Some(part) = next.pop() {
        if reached.insert(part) {
            next.extend(&uses[part]);
        }
    }
    assert!(reached.iter().eq(scopes.keys()), "each part is used");
}

/// Licences such as MIT require that their notice goes with the program.
#[test]
fn each_dependency_has_its_notice() {
    let Some(notices) = dependencies("notices") else { return };
    let bom: Value = serde_json::from_str(&dependencies("sbom").unwrap()).unwrap();
    let separator = format!("\n{}\n", "-".repeat(72));
    let mut with_text = BTreeSet::new();
    for part in notices.split(&separator).skip(1) {
        let (owners, text) = part.split_once("\n\n").unwrap_or((part, ""));
        with_text.extend(owners.lines().filter(|_| text.len() > 200).map(str::to_owned));
    }
    let parts = bom["components"].as_array().unwrap().iter();
    let parts = parts.filter(|part| !part["purl"].is_null() && text(part, "scope") == "required");
    let mut without = Vec::new();
    for part in parts {
        let owner = format!("{} {} (", text(part, "name"), text(part, "version"));
        assert!(notices.contains(&format!("\n{owner}")), "{owner}");
        if !with_text.iter().any(|line| line.starts_with(&owner)) {
            without.push(text(part, "name"));
        }
    }
    assert_eq!(
        without,
        ["crc-catalog", "virtio-driver"],
        "packages that come without the text of their licence"
    );
}
