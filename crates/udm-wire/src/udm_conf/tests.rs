//! Files that are read, and those that are refused.

use super::*;

const GOOD: &str = r#"
# Two disks.
[serve]
unix = "/run/udm/nbd.sock"
port = 10_809
path-deadline = 0.5
readonly = false
export = ["b", "a"]

[devices.b]
table-file = "tables/b.table"
uuid = "u"
readonly = true
description = "database of tenant 7, ask Ännchen"
allow = ["alice", "spiffe://example.org/bob"]
throttle = "iops=5 wbps=1M:2M"

[throttle-groups]
"tenant 7" = "bps=1G"

[devices."a b"]
table = """
0 8 linear mem:1M 0
8 8 error
"""
throttle-group = "tenant 7"
"#;

#[test]
fn a_good_file() {
    let conf = UdmConf::parse(GOOD).unwrap();
    let serve: Vec<_> = conf.serve.iter().map(|key| (key.name.as_str(), key.value.clone())).collect();
    let text = |text: &str| ServeOptionValue::Text(text.into());
    assert_eq!(
        serve,
        [
            ("unix", text("/run/udm/nbd.sock")),
            ("port", text("10809")),
            ("path-deadline", text("0.5")),
            ("readonly", ServeOptionValue::Flag(false)),
            ("export", ServeOptionValue::List(vec!["b".into(), "a".into()])),
        ]
    );
    assert_eq!(&GOOD[conf.serve[1].value_at.clone()], "10_809");
    let [b, a] = &conf.devices[..] else { panic!("{:?}", conf.devices) };
    assert_eq!((b.name.as_str(), b.uuid.as_deref(), b.read_only), ("b", Some("u"), true));
    assert_eq!((&*b.description, &*a.description), ("database of tenant 7, ask Ännchen", ""));
    assert_eq!(b.allow, Some(vec!["alice".into(), "spiffe://example.org/bob".into()]));
    assert_eq!((&b.table, &a.allow), (&TableSource::File("tables/b.table".into()), &None));
    assert_eq!((a.name.as_str(), a.uuid.as_deref(), a.read_only), ("a b", None, false));
    assert_eq!(a.table, TableSource::Text("0 8 linear mem:1M 0\n8 8 error\n".into()));
    assert_eq!(b.throttle, "iops=5 wbps=1M:2M".parse().map(DeviceThrottleConf::Limits).ok());
    let Some(DeviceThrottleConf::Group(group, at)) = &a.throttle else { panic!("{:?}", a.throttle) };
    assert_eq!((group.as_str(), &GOOD[at.clone()]), ("tenant 7", "\"tenant 7\""));
    let [group] = &conf.throttle_groups[..] else { panic!("{:?}", conf.throttle_groups) };
    assert_eq!((group.name.as_str(), group.limits.to_string()), ("tenant 7", "bps=1G".into()));
    assert_eq!(UdmConf::parse(""), Ok(UdmConf::default()));
}

#[test]
fn what_is_wrong_is_shown_where_it_is() {
    let said = |text: &str| UdmConf::parse(text).unwrap_err().with_source_line("f", text);
    assert_eq!(
        said("[serve]\n\n[devices.a]\n  tabel = \"0 8 error\"\n"),
        "f:4:3: devices.a: tabel: unknown: there are table, table-file, uuid, readonly, description, allow, throttle, throttle-group, hydrate-first\n  tabel = \"0 8 error\"\n  ^^^^^"
    );
    assert_eq!(
        said("[device.a]\n").lines().next().unwrap(),
        "f:1:2: device: unknown: there are [serve], [devices.NAME] and [throttle-groups]"
    );
    for (text, head) in [
        ("serve = 1", "f:1:1: serve: expected a table: [serve]"),
        ("devices = []", "f:1:1: devices: expected a table: [devices]"),
        ("[devices]\na = 1", "f:2:1: devices.a: expected a table: [devices.a]"),
        ("[devices.a]\nuuid = \"u\"", "f:1:10: devices.a: table, or table-file, is missing"),
        ("[devices.a]\ntable = 1", "f:2:9: devices.a: table: expected a string"),
        ("[devices.a]\ntable-file = \"\"", "f:2:14: devices.a: table-file: empty"),
        (
            "[devices.a]\ntable = \"0 8 error\"\ntable-file = \"x\"",
            "f:3:1: devices.a: expected one of table and table-file",
        ),
        (
            "[devices.a]\ntable = \"0 8 error\"\nuuid = \"\"",
            "f:3:8: devices.a: uuid: expected 1 to 128 bytes",
        ),
        (
            "[devices.a]\ntable = \"0 8 error\"\nreadonly = \"yes\"",
            "f:3:12: devices.a: readonly: expected true or false",
        ),
        (
            "[devices.a]\ntable = \"0 8 error\"\ndescription = \"two\\nlines\"",
            "f:3:15: devices.a: description: expected at most 4096 bytes without control characters",
        ),
        (
            "[devices.a]\ntable = \"0 8 error\"\ndescription = 7",
            "f:3:15: devices.a: description: expected a string",
        ),
        (
            "[devices.a]\ntable = \"0 8 error\"\nallow = \"alice\"",
            "f:3:9: devices.a: allow: expected a list of names",
        ),
        (
            "[devices.a]\ntable = \"0 8 error\"\nallow = []",
            "f:3:9: devices.a: allow: expected 1 to 1024 names",
        ),
        (
            "[devices.a]\ntable = \"0 8 error\"\nallow = [\"\"]",
            "f:3:9: devices.a: allow: a name has 1 to 512 bytes and no NUL",
        ),
        ("[serve]\nunix = nbd.sock", "f:2:8: text as a value stands in quotes: \"nbd.sock\""),
        (
            "[devices.\"a/b\"]\ntable = \"0 8 error\"",
            "f:1:10: devices.a/b: not a name of a device: expected 1 to 127 bytes without a slash",
        ),
        (
            "[serve]\nport = 1979-05-27",
            "f:2:8: serve: port: expected a string, a number, true, false, or a list of strings and numbers",
        ),
    ] {
        assert_eq!(said(text).lines().next().unwrap(), head, "{text}");
    }
    // The reason is in the TOML parser's words; udm adds the position.
    for (text, at) in
        [("[serve", "f:1:"), ("[serve]\nport =\n", "f:2:"), ("[devices.a]\n[devices.a]", "f:2:")]
    {
        assert!(said(text).starts_with(at), "{}", said(text));
    }
    let table = said("[devices.a]\ntable = \"\"\"\n0 8 error\n8 x error\n\"\"\"");
    assert!(table.starts_with("f:4:3: devices.a: table: ") && table.ends_with("\n8 x error\n  ^"), "{table}");
    // If the text contains an escape, it differs from the table.
    let table = said("[devices.a]\ntable = \"0\\u0020x error\"");
    assert!(table.starts_with("f:2:9: devices.a: table: "), "{table}");
}
