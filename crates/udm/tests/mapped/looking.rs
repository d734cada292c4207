//! `udm multipath`: the output of multipath-tools for a device whose paths fail and return.

use crate::support::nbd::Client;
use crate::support::servers::Nbdkit;
use crate::support::{Server, has, until};
use serde_json::{Value, json};
use std::fs;

const CONF: &str = r#"defaults {
    polling_interval 1
    failback immediate
    prio weightedpath
    prio_args "devname */a 50 devname * 10"
}
"#;

/// Two servers of one file; the first has the higher priority. It is killed and started again. The
/// tree shows each state, and the first group is active at the end.
#[test]
fn a_path_is_seen_to_fail_and_to_come_back() {
    if !has("nbdkit") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (disk, conf) = (folder.path().join("disk"), folder.path().join("mp.conf"));
    fs::write(&disk, vec![0; 1 << 20]).unwrap();
    fs::write(&conf, CONF).unwrap();
    let (path, conf) = (disk.display().to_string(), conf.display().to_string());
    let [mut a, b] = ["a", "b"].map(|name| Nbdkit::start(folder.path().join(name), &["file", &path]));
    let table = format!(
        "m=0 2048 multipath 1 queue_if_no_path 0 2 1 service-time 0 1 2 {} 1 1 queue-length 0 1 1 {} 1",
        a.uri(),
        b.uri()
    );
    let server = Server::start_with(&[&table, "z=0 8 zero"], &["--multipath-conf", &conf]);
    let mut client = Client::connect(&server.nbd, "m");
    let (first, second) = (a.uri(), b.uri());
    let mut comes_to = |a: [&str; 2], b: [&str; 2]| {
        let want = format!(
            "m dm-0 ##,##\nsize=1.0M features='1 queue_if_no_path' hwhandler='0' wp=rw\n\
             |-+- policy='service-time 0' {}\n| `- #:#:#:# {first} 253:0 {}\n\
             `-+- policy='queue-length 0' {}\n  `- #:#:#:# {second} 253:1 {}\n",
            a[0], a[1], b[0], b[1]
        );
        until(&want, || {
            // A request makes the next group the active one.
            assert_eq!(client.read(0), 0);
            (server.says(&["multipath", "-ll"]) == want).then_some(())
        });
    };
    comes_to(
        ["prio=50 status=active", "active ready running"],
        ["prio=10 status=enabled", "active ready running"],
    );
    a.kill();
    comes_to(
        ["prio=0 status=enabled", "failed faulty running"],
        ["prio=10 status=active", "active ready  running"],
    );
    let paths = server.says(&["multipath", "show", "paths", "format", "%D %t %T|%p|%m"]);
    assert_eq!(
        paths,
        "dev_t dm_st  chk_st|pri|multipath\n253:0 failed faulty|50 |m\n253:1 active ready |10 |m\n"
    );
    assert_eq!(
        server.says(&["multipath", "show", "maps", "raw", "format", "%n %S %N %t"]),
        "m 1.0M 1 active\n"
    );
    a.again();
    comes_to(
        ["prio=50 status=active", "active ready running"],
        ["prio=10 status=enabled", "active ready running"],
    );

    assert_eq!(server.says(&["multipath", "-ll", "m"]), server.says(&["multipath", "show", "topology"]));
    assert_eq!(server.says(&["multipath", "show", "maps"]), "name sysfs uuid\nm    dm-0  m\n");
    let json: Value = serde_json::from_str(&server.says(&["multipath", "show", "paths", "--json"])).unwrap();
    let path = &json["paths"][0];
    assert_eq!(
        (&path["dev"], &path["dm_st"], &path["chk_st"], &path["pri"]),
        (&json!(first), &json!("active"), &json!("ready"), &json!(50))
    );
    assert!(path["failures"].as_u64() > Some(0), "{json}");
    let json: Value = serde_json::from_str(&server.says(&["multipath", "show", "maps", "json"])).unwrap();
    assert_eq!(json["maps"][0]["path_groups"][1]["paths"][0]["dev_t"], json!("253:1"), "{json}");
}

/// Both paths fail, and the first group returns last. The output shows in multipathd's format the
/// time until requests fail, and the time until failback.
#[test]
fn what_is_left_of_the_time_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let conf = folder.path().join("mp.conf");
    let text = "defaults {\n polling_interval 1\n no_path_retry 1000\n failback 1000\n prio weightedpath\n\
                 prio_args \"devname a 50\"\n}\n";
    fs::write(&conf, text).unwrap();
    let table = "m=0 2048 multipath 2 queue_mode bio 0 2 1 round-robin 0 1 1 @a 1 round-robin 0 1 1 @b 1";
    let devices = ["a=0 2048 linear mem:1M 0", "b=0 2048 linear mem:1M 0", table];
    let server = Server::start_with(&devices, &["--multipath-conf", &conf.display().to_string()]);
    let mut client = Client::connect(&server.nbd, "m");
    assert_eq!(client.read(0), 0);
    let shows = |format: &str| server.says(&["multipath", "show", "maps", "raw", "format", format]);
    let maintenance = || {
        let status = server.says(&["status", "m", "--json"]);
        let json: Value = serde_json::from_str(&status).unwrap();
        json.pointer("/path_maintenance").or_else(|| json.pointer("/0/path_maintenance")).unwrap().clone()
    };
    assert_eq!(
        server.says(&["multipath", "show", "maps", "status"]),
        "name failback queueing paths dm-st  write_prot\nm    -        1000 chk 2     active rw\n"
    );
    let plain = json!({
        "no_path_retry": "1000", "queueing": true, "queueing_left_ns": null,
        "failback": "1000", "failback_group": null, "failback_left_ns": null, "group_by_hand": null,
    });
    assert_eq!(maintenance(), plain);
    for path in ["a", "b"] {
        server.says(&["multipath", "fail", "path", path]);
    }
    let left = |value: &Value| value.as_u64().is_some_and(|ns| (1..=1_000_000_000_000).contains(&ns));
    until("time that runs", || left(&maintenance()["queueing_left_ns"]).then_some(()));
    let shown = shows("%Q");
    let seconds = shown.strip_suffix(" sec\n").unwrap_or_else(|| panic!("{shown}"));
    assert!((1..=1000).contains(&seconds.parse::<u64>().unwrap()), "{shown}");
    // The second group returns and is used; then the first.
    server.says(&["multipath", "reinstate", "path", "b"]);
    assert_eq!(client.read(0), 0);
    assert_eq!(shows("%Q"), "1000 chk\n");
    server.says(&["multipath", "reinstate", "path", "a"]);
    until("a plan", || (maintenance()["failback_group"] == 1).then_some(()));
    assert!(left(&maintenance()["failback_left_ns"]), "{}", maintenance());
    let shown = shows("%F");
    assert!(shown.starts_with('X') && shown.ends_with("/1000\n"), "{shown}");
}

/// A device without checks: unknown fields are shown as unknown. Messages are shown too.
#[test]
fn what_is_not_known_and_what_is_not_there() {
    let table = "m=0 2048 multipath 2 queue_mode bio 0 1 1 round-robin 0 2 1 @a 1 @b 1";
    let server = Server::start(&["a=0 2048 linear mem:1M 0", "b=0 2048 linear mem:1M 0", table]);
    server.says(&["multipath", "fail", "path", "b"]);
    server.says(&["suspend", "m"]);
    let raw = |kind: &str, format: &str| server.says(&["multipath", "show", kind, "raw", "format", format]);
    assert_eq!(raw("paths", "%d %t,%T,%p,%0"), "a active,undef,-1,0\nb failed,undef,-1,1\n");
    assert_eq!(raw("maps", "%n %t %N %0 %f"), "m suspend 1 1 3 retain_attached_hw_handler queue_mode bio\n");
    let refusals: [(&[&str], &str); 5] = [
        (&["-ll", "a"], "udm: a: it is not a multipath device\n"),
        (&["-ll", "none"], "udm: none: no device of that name: No such device or address\n"),
        (&["show", "paths", "format", "%q"], "udm: multipath: %q is not supported\n"),
        (&["show", "topology", "format", "%n"], "udm: multipath show topology: it has no format\n"),
        (
            &["show", "maps", "raw", "%n"],
            "udm: multipath show: what may follow is json, format FORMAT, or raw format FORMAT\n",
        ),
    ];
    for (args, output) in refusals {
        assert_eq!(server.refuses(&[&["multipath"], args].concat()), output);
    }
    server.says(&["resume", "m"]);
    server.says(&["multipath", "reinstate", "path", "254:1"]);
    server.says(&["multipath", "fail", "path", "254:0"]);
    assert_eq!(raw("paths", "%D %t"), "254:0 failed\n254:1 active\n");
    let none = "udm: /dev/none: no multipath device has this path\n";
    assert_eq!(server.refuses(&["multipath", "fail", "path", "/dev/none"]), none);
    // With one group, only that group can be switched to.
    server.says(&["multipath", "switch", "map", "m", "group", "1"]);
    server.refuses(&["multipath", "switch", "map", "m", "group", "2"]);
    server.says(&["remove", "m"]);
    assert_eq!(server.says(&["multipath", "-ll"]), "");
}
