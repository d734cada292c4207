//! `udm multipath create`: a device from its paths.

use crate::support::nbd::Client;
use crate::support::servers::Nbdkit;
use crate::support::{Server, has, until};
use std::fs;

/// Two servers of one file become a device, with each policy, and with the settings of
/// multipath.conf.
#[test]
fn paths_become_a_device_by_policy() {
    if !has("nbdkit") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (disk, conf) = (folder.path().join("disk"), folder.path().join("mp.conf"));
    fs::write(&disk, vec![3; 1 << 20]).unwrap();
    let text = "multipaths {\n multipath {\n alias mine\n path_grouping_policy multibus\n\
                path_selector \"queue-length 0\"\n no_path_retry queue\n }\n}\n";
    fs::write(&conf, text).unwrap();
    let [a, b] =
        ["a", "b"].map(|name| Nbdkit::start(folder.path().join(name), &["file", disk.to_str().unwrap()]));
    let server = Server::start_with(&["d=0 8 zero"], &["--multipath-conf", conf.to_str().unwrap()]);
    let uris = [a.uri(), b.uri()];
    let [a, b] = [&*uris[0], &*uris[1]];
    let rows: [(&str, &[&str], &str); 5] = [
        ("plain", &[], "0 0 2 1 service-time 0 1 2 A 1 1 service-time 0 1 2 B 1 1"),
        ("mine", &[], "1 queue_if_no_path 0 1 1 queue-length 0 2 1 A 1 B 1"),
        (
            "mine",
            &["--policy", "failover"],
            "1 queue_if_no_path 0 2 1 queue-length 0 1 1 A 1 queue-length 0 1 1 B 1",
        ),
        ("bus", &["--policy", "multibus"], "0 0 1 1 service-time 0 2 2 A 1 1 B 1 1"),
        (
            "prio",
            &["--policy", "group_by_prio", "--prio", "weightedpath", "--prio-args", "devname */b 50"],
            "0 0 2 1 service-time 0 1 2 B 1 1 service-time 0 1 2 A 1 1",
        ),
    ];
    for (name, args, want) in rows {
        let output = server.says(&[&["multipath", "create", name, a, b], args].concat());
        assert_eq!(output, "", "as udm create");
        let numbers = |table: &str| table.replace('A', "253:0").replace('B', "253:1");
        let table = server.says(&["table", name]);
        assert_eq!(table.trim_end(), format!("0 2048 multipath {}", numbers(want)));
        let mut client = Client::connect(&server.nbd, name);
        assert_eq!((client.write(0), client.read(0)), (0, 0));
        drop(client);
        if name == "prio" {
            let paths = server.says(&["multipath", "show", "paths", "raw", "format", "%D %p"]);
            assert_eq!(paths, "253:1 50\n253:0 0\n", "the priorities hold from then on");
        }
        until("a device that nobody has open", || {
            server.verb(&["remove", name]).status.success().then_some(())
        });
    }
    let created = server.says(&["multipath", "create", "j", "--json", "--uuid", "u", a]);
    let created: serde_json::Value = serde_json::from_str(&created).unwrap();
    assert_eq!(
        (&created["name"], &created["uuid"], &created["size_bytes"]),
        (&"j".into(), &"u".into(), &(1 << 20).into())
    );
}

/// Paths that do not lead to one disk are refused in one line, and no device is left.
#[test]
fn what_is_not_one_disk_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let [a, b, short] = ["a.img", "b.img", "short.img"].map(|name| folder.path().join(name));
    fs::write(&a, vec![3; 1 << 20]).unwrap();
    fs::hard_link(&a, &b).unwrap();
    fs::write(&short, vec![3; 512 << 10]).unwrap();
    let [a, b, short] = [&a, &b, &short].map(|path| path.to_str().unwrap());
    let server = Server::start(&["d=0 8 zero"]);
    let rows: [(&[&str], String); 8] = [
        (
            &[a, b, short],
            format!("udm: m: {a} has 1048576 bytes and {short} 524288: they are not paths to one disk\n"),
        ),
        (&[a, b, a], format!("udm: m: {a} and {a} are the same path\n")),
        (&[a, "/none"], "udm: m: /none: No such file or directory\n".into()),
        (
            &[a, "--prio", "alua"],
            "udm: m: prio \"alua\": only const, weightedpath and path_latency are supported\n".into(),
        ),
        (
            &[a, "--prio", "weightedpath", "--prio-args", "devname"],
            "udm: m: prio_args: expected a pattern and a priority after devname\n".into(),
        ),
        (
            &[a, "--prio", "weightedpath"],
            "udm: m: prio weightedpath needs prio_args: patterns and priorities\n".into(),
        ),
        (&[a, "@m"], "udm: m: @m is this device itself\n".into()),
        (
            &[a, "--policy", "group_by_prio", "--prio", "path_latency"],
            "udm: m: group_by_prio needs priorities that are known at creation\n".into(),
        ),
    ];
    for (args, output) in rows {
        assert_eq!(server.refuses(&[&["multipath", "create", "m"], args].concat()), output);
        assert_eq!(server.says(&["ls"]), "d\t(254:0)\n");
    }
    server.says(&["multipath", "create", "m", a, b]);
    assert!(server.says(&["table", "m"]).contains("multipath 0 0 2 1 service-time 0 1 2 253:"));
}
