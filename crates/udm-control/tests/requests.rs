//! The properties of `udm_control::http::fuzz` with generated input: plausible bodies, some with a
//! changed byte, and sequences of requests.

use proptest::collection::vec;
use proptest::prelude::*;
use udm_control::http::fuzz;

/// Pieces of bodies.
const PIECES: &[&str] = &[
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    "null",
    "true",
    "0",
    "-1",
    "1e400",
    "18446744073709551616",
    "\"",
    "\\u0000",
    "\\ud800",
    "\"name\"",
    "\"table\"",
    "\"message\"",
    "\"sector\"",
    "\"noflush\"",
    "\u{7f}",
    "\u{202e}",
];

/// Pieces of tables, as in a JSON string.
const TABLE: &[&str] = &[
    "0 8 ",
    "8 8 ",
    "0 18446744073709551615 ",
    "linear ",
    "striped 2 8 ",
    "zero",
    "error",
    "multipath 0 0 1 1 round-robin 0 1 1 ",
    "multipath 1 queue_if_no_path 0 0 0",
    "delay ",
    "flakey ",
    "dust ",
    "log-writes ",
    "mem:8K 0 ",
    "null:size=1M 0 ",
    "nbd://h/x 0 ",
    "@m 0 ",
    "@l 0 ",
    "@new 0 ",
    "254:0 0 ",
    "nowhere 0 ",
    "1 1 ",
    "\\n",
    "\\t",
    "\\u0000",
    "\\u001b[2J",
    "\\\\",
    "\\u2028",
];

/// Pieces of messages.
const MESSAGES: &[&str] = &[
    "fail_path ",
    "reinstate_path ",
    "disable_group ",
    "switch_group ",
    "queue_if_no_path",
    "fail_if_no_path",
    "mem:4K",
    "253:0",
    "253:1",
    "1",
    "2",
    "4096",
    "@m",
    " ",
    "\\n",
    "\\u001b",
    "\\\\",
];

fn concat(of: &'static [&'static str], max: usize) -> impl Strategy<Value = String> {
    vec(prop::sample::select(of), 0..max).prop_map(|pieces| pieces.concat())
}

/// A body that is valid except for the content of its strings.
fn good_body() -> impl Strategy<Value = String> {
    let name = prop::sample::select(vec!["new", "m", "a/b", "", "..", "x\\n", "\\u0000"]);
    let sector = prop_oneof![Just(0), 0..10u64, any::<u64>()];
    prop_oneof![
        (name, concat(TABLE, 8))
            .prop_map(|(name, table)| format!(r#"{{"name":"{name}","table":"{table}"}}"#)),
        concat(TABLE, 8).prop_map(|table| format!(r#"{{"table":"{table}"}}"#)),
        (sector, concat(MESSAGES, 5))
            .prop_map(|(sector, message)| format!(r#"{{"sector":{sector},"message":"{message}"}}"#)),
        any::<bool>().prop_map(|noflush| format!(r#"{{"noflush":{noflush}}}"#)),
        Just(String::new()),
    ]
}

/// Valid bodies, near misses and garbage.
fn any_body() -> impl Strategy<Value = Vec<u8>> {
    let changed = (good_body(), any::<prop::sample::Index>(), any::<u8>()).prop_map(|(body, at, byte)| {
        let mut body = body.into_bytes();
        if !body.is_empty() {
            let at = at.index(body.len());
            body[at] = byte;
        }
        body
    });
    prop_oneof![
        4 => good_body().prop_map(String::into_bytes),
        2 => changed,
        1 => concat(PIECES, 12).prop_map(String::into_bytes),
        1 => vec(any::<u8>(), 0..64),
    ]
}

/// A request in the form of `fuzz::fuzz_requests`, including its NUL.
fn request() -> impl Strategy<Value = Vec<u8>> {
    let methods = vec!["GET", "PUT", "POST", "DELETE", "HEAD", "OPTIONS", "CONNECT", "X"];
    let path = prop_oneof![
        "/[a-z0-9%/?=&{}.*:@+~-]{0,40}",
        "/v1/devices/(m|l|%[0-9a-f]{2}|[^\u{0}\n/]{1,3})(/(table|status|message|[a-z]{1,3}))?",
        "/v1/devices/(m|l)/(table|status)\\?(inactive=[0-9-]{1,3}|[a-z=&%]{0,9})",
        "[^\u{0}\n]{0,20}",
    ];
    let raw = (prop::sample::select(methods), path, any_body())
        .prop_map(|(method, path, body)| [format!("{method} {path}\n").into_bytes(), body].concat());
    // Numbers of routes and names from 1 on, below the capital letters.
    let routed = (1..64u8, 1..64u8, any_body()).prop_map(|(route, name, body)| {
        let mut request = vec![route, name];
        request.extend(body);
        request
    });
    prop_oneof![1 => raw, 3 => routed].prop_map(|mut request| {
        request.push(0);
        request
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn bodies_read_back(data in any_body()) {
        fuzz::fuzz_request_body_round_trip(&data);
    }

    #[test]
    fn any_body_at_every_route(data in any_body()) {
        fuzz::fuzz_body_on_all_routes(&data);
    }

    #[test]
    fn sequences_of_requests(data in vec(request(), 0..12)) {
        fuzz::fuzz_requests(&data.concat());
    }
}
