//! The rules for dependencies, from the lists of deny.toml: licences, versions, sources. `cargo deny
//! check` tests them too, and needs the network for the list of vulnerabilities.

#[path = "support/project.rs"]
mod project;

use project::{metadata, none, root, text};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;

/// Licences that require no more than the notice. deny.toml may list no other.
const PERMISSIVE: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unicode-DFS-2016",
    "Unlicense",
    "Zlib",
];

/// The strings in the list `key` of deny.toml; the first string of each line.
fn listed(key: &str) -> Vec<String> {
    let text = fs::read_to_string(root().join("deny.toml")).expect("deny.toml");
    let (_, list) = text.split_once(&format!("\n{key} = [")).expect("the list");
    let (list, _) = list.split_once("\n]").or_else(|| list.split_once(']')).expect("its end");
    list.lines().filter_map(|line| line.split('"').nth(1)).map(str::to_owned).collect()
}

/// The dependencies of a build for this machine. They are present if the whole workspace was built;
/// otherwise cargo downloads the rest.
fn packages() -> Vec<Value> {
    let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let arguments = ["--filter-platform", platform.as_str(), "--locked", "--offline"];
    let mut metadata = metadata(&arguments).or_else(|_| metadata(&arguments[..3])).expect("cargo metadata");
    let Value::Array(packages) = metadata["packages"].take() else { panic!("no packages") };
    assert!(packages.len() > 50, "only {} packages", packages.len());
    packages
}

#[test]
fn licences_are_permissive() {
    let (packages, allowed) = (packages(), listed("allow"));
    let allowed: Vec<&str> = allowed.iter().map(String::as_str).collect();
    let other = allowed.iter().filter(|name| !PERMISSIVE.contains(name)).map(|n| n.to_string());
    none("licences of deny.toml that are not permissive", &other.collect::<Vec<_>>());
    let broken: Vec<_> = packages
        .iter()
        .filter(|package| !is_permissive(text(package, "license"), &allowed))
        .map(|package| {
            format!("{} {}: {:?}", text(package, "name"), text(package, "version"), text(package, "license"))
        })
        .collect();
    none("dependencies without a licence that deny.toml allows", &broken);
    let needless = allowed.iter().filter(|licence| {
        let others: Vec<&str> = allowed.iter().filter(|other| other != licence).copied().collect();
        packages.iter().all(|package| is_permissive(text(package, "license"), &others))
    });
    none("licences that no dependency needs", &needless.map(|name| name.to_string()).collect::<Vec<_>>());
}

#[test]
fn second_versions_are_listed() {
    let mut versions: BTreeMap<String, BTreeSet<(Vec<u64>, String)>> = BTreeMap::new();
    for package in packages() {
        let version = text(&package, "version");
        let numbers = version.split(['.', '-', '+']).map_while(|number| number.parse().ok()).collect();
        let all = versions.entry(text(&package, "name").to_owned()).or_default();
        all.insert((numbers, version.to_owned()));
    }
    let mut older = BTreeSet::new();
    for (name, versions) in &versions {
        older.extend(versions.iter().rev().skip(1).map(|(_, version)| format!("{name}@{version}")));
    }
    assert_eq!(older, listed("skip").into_iter().collect(), "older versions, and `skip` of deny.toml");
}

#[test]
fn all_sources_are_crates_io() {
    let allowed: Vec<_> =
        listed("allow-registry").into_iter().map(|registry| format!("registry+{registry}")).collect();
    assert_eq!(allowed, ["registry+https://github.com/rust-lang/crates.io-index"]);
    let lock = fs::read_to_string(root().join("Cargo.lock")).expect("Cargo.lock");
    let sources = lock.lines().filter_map(|line| line.strip_prefix("source = \"")?.strip_suffix('"'));
    let other = sources.filter(|source| !allowed.iter().any(|allowed| allowed == source));
    none("other sources", &other.map(str::to_owned).collect::<Vec<_>>());
}

/// True if the SPDX expression allows a choice of the licences in `allowed`.
fn is_permissive(expression: &str, allowed: &[&str]) -> bool {
    // `MIT/Apache-2.0` is the old form of OR.
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut rest = &words[..];
    either(&mut rest, allowed) == Some(true) && rest.is_empty()
}

/// Parses `both { OR both }`; returns `None` if it is invalid.
fn either(words: &mut &[&str], allowed: &[&str]) -> Option<bool> {
    let mut good = both(words, allowed)?;
    while let ["OR", rest @ ..] = *words {
        *words = rest;
        good |= both(words, allowed)?;
    }
    Some(good)
}

/// Parses `licence { AND licence }`.
fn both(words: &mut &[&str], allowed: &[&str]) -> Option<bool> {
    let mut good = licence(words, allowed)?;
    while let ["AND", rest @ ..] = *words {
        *words = rest;
        good &= licence(words, allowed)?;
    }
    Some(good)
}

/// Parses a name, a name WITH an exception (which only allows more), or an expression in
/// parentheses.
fn licence(words: &mut &[&str], allowed: &[&str]) -> Option<bool> {
    let (&word, rest) = words.split_first()?;
    *words = rest;
    if word == "(" {
        let good = either(words, allowed)?;
        let [")", rest @ ..] = *words else { return None };
        *words = rest;
        return Some(good);
    }
    if let ["WITH", _, rest @ ..] = *words {
        *words = rest;
    }
    Some(allowed.contains(&word))
}

#[test]
fn licence_expressions() {
    for good in [
        "MIT",
        "MIT/Apache-2.0",
        "GPL-2.0 OR MIT",
        "(MIT OR GPL-3.0) AND Unicode-3.0",
        "Apache-2.0 WITH LLVM-exception OR LGPL-2.1",
    ] {
        assert!(is_permissive(good, PERMISSIVE), "{good}");
    }
    for bad in [
        "",
        "GPL-2.0-only",
        "MIT AND LGPL-2.1",
        "(MIT",
        "MIT)",
        "MIT MIT",
        "MIT OR",
        "AGPL-3.0/GPL-2.0",
        "MPL-2.0",
    ] {
        assert!(!is_permissive(bad, PERMISSIVE), "{bad}");
    }
}
