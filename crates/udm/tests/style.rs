//! The rules of the project as tests: imports between crates, places of `unsafe`, headers and
//! lengths of files. `licences.rs` has those for dependencies.
//!
//! A rule that needs an exception is changed here, in its list, with the reason next to it.

#[path = "support/project.rs"]
mod project;

use project::{metadata, none, root, text};
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

/// Each crate with the crates of the project that it may import.
const IMPORTS: &[(&str, &[&str])] = &[
    ("udm-buf", &[]),
    ("udm-core", &["udm-buf"]),
    ("udm-wire", &["udm-core"]),
    ("udm-tls", &["udm-buf"]),
    ("udm-dm", &["udm-core", "udm-wire"]),
    ("udm-targets", &["udm-core", "udm-dm", "udm-wire"]),
    ("udm-runtime", &["udm-core"]),
    ("udm-queue", &["udm-core", "udm-wire"]),
    ("udm-backends", &["udm-core", "udm-queue", "udm-runtime", "udm-tls", "udm-wire"]),
    ("udm-frontends", &["udm-buf", "udm-core", "udm-runtime", "udm-tls", "udm-wire"]),
    ("udm-object", &["udm-backends", "udm-core", "udm-wire"]),
    (
        "udm-control",
        &["udm-backends", "udm-core", "udm-dm", "udm-frontends", "udm-queue", "udm-targets", "udm-wire"],
    ),
    ("udm-capi", &["udm-control", "udm-core", "udm-dm", "udm-runtime"]),
    (
        "udm-bench",
        &[
            "udm-backends",
            "udm-buf",
            "udm-control",
            "udm-dm",
            "udm-targets",
            "udm-core",
            "udm-runtime",
            "udm-wire",
        ],
    ),
    (
        "udm-sim",
        &[
            "udm-backends",
            "udm-buf",
            "udm-control",
            "udm-core",
            "udm-dm",
            "udm-frontends",
            "udm-object",
            "udm-queue",
            "udm-runtime",
            "udm-targets",
            "udm-wire",
        ],
    ),
    // Test support: it imports the crates that it tests, and no crate imports it.
    (
        "udm-conformance",
        &[
            "udm-backends",
            "udm-core",
            "udm-dm",
            "udm-frontends",
            "udm-object",
            "udm-runtime",
            "udm-targets",
            "udm-tls",
            "udm-wire",
        ],
    ),
    (
        "udm",
        &[
            "udm-backends",
            "udm-bench",
            "udm-control",
            "udm-core",
            "udm-dm",
            "udm-frontends",
            "udm-object",
            "udm-runtime",
            "udm-tls",
            "udm-wire",
        ],
    ),
];

/// Imports of tests only: front ends are tested over devices, tables with targets, and the cost of
/// a table over null devices.
const TEST_IMPORTS: &[(&str, &[&str])] = &[
    ("udm-backends", &["udm-dm", "udm-targets"]),
    ("udm-dm", &["udm-targets"]),
    ("udm-frontends", &["udm-backends"]),
    ("udm", &["udm-buf"]),
];

/// Files with `unsafe`: memory of requests, its partition into two vectors, copies of memory that
/// others may change, the ring that gives memory to the kernel, the C interface, and the memory that
/// a benchmark shares with a server. Paths or prefixes of paths.
const UNSAFE: &[&str] = &[
    "crates/udm-bench/src/vhost_user/queue.rs",
    "crates/udm-buf/src/lib.rs",
    "crates/udm-buf/src/lost_pages.rs",
    "crates/udm-buf/src/partition.rs",
    "crates/udm-buf/src/shared.rs",
    "crates/udm-capi/src/abi.rs",
    "crates/udm-capi/src/raw.rs",
    "crates/udm-runtime/src/ring/sys.rs",
    "crates/udm-runtime/src/ring/ublk_control.rs",
    "crates/udm-runtime/src/ring/ublk_device.rs",
];

/// Files that may use standard error: the log, whose thread may block and fail; and code that only
/// checks for a terminal or passes standard error to a child. Anywhere else a pipe without a reader
/// would block the server, and a full disk would end it.
const STANDARD_ERROR: &[&str] = &[
    "crates/udm/src/log/",
    // Before a server runs.
    "crates/udm/src/main.rs",
    "crates/udm/src/bench/progress.rs",
    "crates/udm/src/cow/compact.rs",
    "crates/udm/src/log_writes/check.rs",
    "crates/udm/src/progress.rs",
    // Separate programs and tests.
    "crates/udm-sim/src/",
    "crates/udm-backends/src/file/tests.rs",
];

/// Maximum number of lines of a source file. The aim is 200 to 350.
const LINES_MAX: usize = 500;

/// The source files of all crates, `crates/NAME/src/**/*.rs`, by their path from the root.
fn sources() -> BTreeMap<String, String> {
    let files = files("src");
    assert!(files.len() > 50, "only {} source files found", files.len());
    files
}

/// The documents: those of the root, of docs/ and of docs/internals/, by their path from the root.
fn pages() -> BTreeMap<String, String> {
    let root = root();
    let mut pages = BTreeMap::new();
    for folder in ["", "docs", "docs/internals"] {
        for entry in fs::read_dir(root.join(folder)).expect("a folder of documents") {
            let path = entry.expect("an entry").path();
            if path.extension().is_some_and(|extension| extension == "md") {
                let name = path.strip_prefix(&root).expect("below the root").display().to_string();
                pages.insert(name, fs::read_to_string(&path).expect("a document"));
            }
        }
    }
    assert!(pages.len() > 15, "only {} documents found", pages.len());
    pages
}

/// The Rust files in a folder of each crate, by their path from the root.
fn files(of: &str) -> BTreeMap<String, String> {
    let root = root();
    let mut files = BTreeMap::new();
    let crates = fs::read_dir(root.join("crates")).expect("crates");
    let mut folders: Vec<PathBuf> = crates.map(|entry| entry.expect("an entry").path().join(of)).collect();
    while let Some(folder) = folders.pop() {
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for entry in entries {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(&root).expect("below the root").display().to_string();
                files.insert(name, fs::read_to_string(&path).expect("a source file"));
            }
        }
    }
    files
}

/// The words of the code of a file, with their line numbers. Each punctuation character except `_`
/// is a word.
fn code_words(text: &str) -> impl Iterator<Item = (usize, String)> + '_ {
    text.lines().enumerate().flat_map(|(i, line)| {
        let code = line.split("//").next().unwrap_or_default();
        let mut words: Vec<String> = Vec::new();
        let mut joined = false;
        for c in code.chars() {
            let in_word = c.is_alphanumeric() || c == '_';
            match words.last_mut() {
                Some(word) if in_word && joined => word.push(c),
                _ if c.is_whitespace() => {}
                _ => words.push(c.to_string()),
            }
            joined = in_word;
        }
        words.into_iter().map(move |word| (i + 1, word))
    })
}

#[test]
fn imports_run_one_way() {
    let metadata = metadata(&["--no-deps", "--offline"]).expect("cargo metadata");
    let listed = |list: &[(&str, &[&str])], name: &str| -> Vec<String> {
        let row = list.iter().find(|(listed, _)| *listed == name);
        row.map(|(_, imports)| imports.iter().map(|&import| import.to_owned()).collect()).unwrap_or_default()
    };
    let fuzzers = fs::read_to_string(root().join("fuzz/Cargo.lock")).expect("the fuzzers' lock");
    let mut broken = Vec::new();
    for package in metadata["packages"].as_array().expect("packages") {
        let name = text(package, "name");
        if !IMPORTS.iter().any(|(listed, _)| *listed == name) {
            broken.push(format!("{name}: not in the list of crates"));
            continue;
        }
        let (mut imports, mut tests) = (Vec::new(), Vec::new());
        for dependency in package["dependencies"].as_array().expect("dependencies") {
            let import = text(dependency, "name").to_owned();
            match text(dependency, "kind") {
                _ if import != "udm" && !import.starts_with("udm-") => {}
                "dev" => tests.push(import),
                _ => imports.push(import),
            }
        }
        let (may, tests_may) = (listed(IMPORTS, name), listed(TEST_IMPORTS, name));
        tests.retain(|import| !may.contains(import) && !tests_may.contains(import));
        broken.extend(tests.iter().map(|import| format!("{name} imports {import} in its tests")));
        // The fuzzers are not in the workspace, so no build updates their lock file.
        let locked = fuzzers.split("\n\n").find(|p| p.contains(&format!("\nname = \"{name}\"\n")));
        for import in imports {
            if locked.is_some_and(|locked| !locked.contains(&format!("\"{import}\""))) {
                broken.push(format!("{name} imports {import}: fuzz/Cargo.lock does not have it"));
            }
            if !may.contains(&import) {
                broken.push(format!("{name} imports {import}"));
            }
        }
    }
    none("imports that the architecture does not have", &broken);
}

#[test]
fn unsafe_stands_where_it_is_allowed() {
    let mut broken = Vec::new();
    for (file, text) in sources() {
        if UNSAFE.iter().any(|allowed| file.starts_with(allowed)) {
            continue;
        }
        let words: Vec<_> = code_words(&text).collect();
        for pair in words.windows(2) {
            // These words follow `unsafe` in code, but not in strings.
            if pair[0].1 == "unsafe"
                && ["{", "(", "fn", "impl", "trait", "extern"].contains(&pair[1].1.as_str())
            {
                broken.push(format!("{file}:{}", pair[0].0));
            }
        }
    }
    none("unsafe outside the modules that may have it", &broken);
}

#[test]
fn only_the_log_writes_to_standard_error() {
    let mut broken = Vec::new();
    for (file, text) in sources() {
        if STANDARD_ERROR.iter().any(|allowed| file.starts_with(allowed)) {
            continue;
        }
        let words: Vec<_> = code_words(&text).collect();
        for three in words.windows(3) {
            let [before, (line, word), after] = three else { continue };
            let prints = ["print", "println", "eprint", "eprintln"].contains(&word.as_str());
            // `.stderr(...)` sets the standard error of a child.
            if prints && after.1 == "!" || word == "stderr" && after.1 == "(" && before.1 != "." {
                broken.push(format!("{file}:{line}: {word}"));
            }
        }
    }
    none("writes that panic or block when standard error can't be written", &broken);
}

#[test]
fn files_stay_short() {
    let long = sources()
        .into_iter()
        .map(|(file, text)| (file, text.lines().count()))
        .filter(|(_, n)| *n > LINES_MAX);
    none("source files above 500 lines", &long.map(|(file, n)| format!("{file}: {n}")).collect::<Vec<_>>());
}

#[test]
fn files_say_what_they_are() {
    let silent = sources().into_iter().filter(|(_, text)| !text.starts_with("//! "));
    none("source files that do not begin with //!", &silent.map(|(file, _)| file).collect::<Vec<_>>());
}

/// Maximum columns of a comment line.
const COMMENT_MAX: usize = 100;

/// True if a comment line is text, not part of a table, a drawing, or an example between fences.
fn is_text(comment: &str) -> bool {
    let drawn = comment.starts_with(['|', '[']) || comment.contains(['┌', '│', '└', '─', '→', '►']);
    let aligned = comment.split(". ").any(|part| part.trim_start().contains("  "));
    !drawn && !aligned
}

#[test]
fn comments_are_wrapped() {
    let mut long = Vec::new();
    for (file, text) in sources() {
        let mut fenced = false;
        for (number, line) in text.lines().enumerate() {
            let Some(comment) = line.trim_start().strip_prefix("//") else { continue };
            let comment = comment.trim_start_matches(['/', '!']).trim_start();
            fenced ^= comment.starts_with("```");
            // A word that is longer than a line cannot be broken.
            let breaks = comment.contains(' ') && !comment.contains("://");
            if line.chars().count() > COMMENT_MAX && !fenced && is_text(comment) && breaks {
                long.push(format!("{file}:{}", number + 1));
            }
        }
    }
    none("comments of more than 100 columns", &long);
}

/// Phrases of a private language, with the plain words for them.
const PHRASES: &[(&str, &str)] = &[
    ("anew", "again"),
    ("whom", "the name of the actor"),
    ("be had", "available"),
    ("becomes of", "what happens"),
    ("became of", "what happened"),
    ("is home", "has completed"),
    ("come home", "complete"),
    ("comes home", "completes"),
    ("came home", "completed"),
    ("goes home", "completes"),
    ("goes round", "is retried"),
    ("called off", "cancelled"),
    ("calls off", "cancels"),
    ("one a core", "one per core"),
    ("a core each", "one per core"),
    ("once a batch", "once per batch"),
    ("once a turn", "once per turn"),
    ("behind that", "after that"),
    ("behind each other", "one after the other"),
];

/// True if `text` has the words of `phrase`, whole and in a row.
fn has_phrase(text: &str, phrase: &str) -> bool {
    let is_word = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    text.match_indices(phrase).any(|(at, _)| {
        !is_word(text[..at].chars().next_back()) && !is_word(text[at + phrase.len()..].chars().next())
    })
}

#[test]
fn comments_and_documents_are_in_plain_words() {
    let mut found = Vec::new();
    let comment = |line: &str| line.trim_start().starts_with("//").then(|| line.to_lowercase());
    let pages = pages().into_iter().map(|(file, text)| (file, text.to_lowercase()));
    let sources = sources().into_iter().chain(files("tests")).map(|(file, text)| {
        let lines: Vec<_> = text.lines().map(|line| comment(line).unwrap_or_default()).collect();
        (file, lines.join("\n"))
    });
    for (file, text) in pages.chain(sources) {
        for (number, line) in text.lines().enumerate() {
            let phrases = PHRASES.iter().filter(|(phrase, _)| has_phrase(line, phrase));
            found.extend(
                phrases.map(|(phrase, plain)| format!("{file}:{}: \"{phrase}\": say: {plain}", number + 1)),
            );
        }
    }
    none("phrases that a reader has to decode", &found);
}

/// The links `[`test`](../path)` of a line, as a name and a path from the root.
fn links(line: &str) -> Vec<(&str, &str)> {
    let links = line.split("[`").skip(1);
    links
        .filter_map(|rest| rest.split_once("`](../")?.0.split("::").last().zip(rest.split(['(', ')']).nth(1)))
        .collect()
}

/// What changes the machine is announced where its user reads of it.
#[test]
fn readme_says_that_make_test_installs() {
    let read = |name: &str| fs::read_to_string(root().join(name)).expect("a file of the root");
    let readme = read("README.md");
    let line = readme.lines().find(|line| line.starts_with("make test ")).expect("a line for it");
    assert_eq!(line.contains("it installs their clients"), read("Makefile").contains("apt-get install"));
}

#[test]
fn promises_have_tests() {
    let page = fs::read_to_string(root().join("docs/reliability.md")).expect("the page of promises");
    let is_promise = |line: &&str| line.starts_with("| ") && !line.starts_with("| promise");
    let promises: Vec<&str> = page.lines().filter(is_promise).collect();
    assert!(promises.len() > 20, "only {} promises", promises.len());
    let mut broken = Vec::new();
    for promise in promises {
        let tests = links(promise);
        if tests.is_empty() {
            broken.push(format!("without a test: {promise}"));
        }
        let gone = tests.iter().filter(|(name, path)| !has_test(path, name));
        broken.extend(gone.map(|(name, path)| format!("no test {name} in {path}")));
    }
    none("promises of docs/reliability.md", &broken);
}

/// True if the file has a test of this name: a function, or a name in the list of its program.
fn has_test(path: &str, name: &str) -> bool {
    let text = fs::read_to_string(root().join(path.trim_start_matches("../"))).unwrap_or_default();
    [format!("fn {name}("), format!("\"{name}\"")].iter().any(|form| text.contains(form))
}

/// The row in the name of a test: a letter and two digits, before the first `_`.
fn row_of(test: &str) -> Option<&str> {
    let (row, _) = test.split_once('_')?;
    let is_row = row.len() == 3 && row.starts_with(char::is_alphabetic);
    (is_row && row[1..].bytes().all(|byte| byte.is_ascii_digit())).then_some(row)
}

#[test]
fn rows_of_the_kernel_have_tests() {
    let page = fs::read_to_string(root().join("docs/internals/kernel-rows.md")).expect("the page of rows");
    let (mut rows, mut named, mut broken) = (0, Vec::new(), Vec::new());
    for line in page.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| row")) {
        let row = line[2..5].to_lowercase();
        let tests = links(line);
        rows += 1;
        if tests.is_empty() {
            broken.push(format!("without a test: {row}"));
        }
        for (name, path) in tests {
            if row_of(name) != Some(&*row) || !has_test(path, name) {
                broken.push(format!("{row}: no test {name} in {path}"));
            }
            named.push(name.to_owned());
        }
    }
    assert!(rows >= 183, "{rows} rows");
    for (file, text) in files("tests") {
        let tests = text.split("#[test]\nfn ").skip(1).filter_map(|rest| rest.split('(').next());
        let missing = tests.filter(|test| row_of(test).is_some() && !named.iter().any(|name| name == test));
        broken.extend(missing.map(|test| format!("{file}: {test} is not in the list")));
    }
    none("rows of docs/internals/kernel-rows.md", &broken);
}

#[test]
fn lanes_have_no_locks() {
    let mut broken = Vec::new();
    for (file, text) in sources().into_iter().filter(|(file, _)| file.ends_with("/lane.rs")) {
        let locks = code_words(&text).filter(|(_, w)| ["Mutex", "RwLock", "Condvar"].contains(&w.as_str()));
        broken.extend(locks.map(|(line, word)| format!("{file}:{line}: {word}")));
    }
    none("locks in the data path", &broken);
}
