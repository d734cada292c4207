//! Rows about the device mapper itself.

use crate::rig::SnapshotRig;
use udm_core::Status;
use udm_core::errno::EINVAL;

/// The kernel detects this at the resume, and leaves the device suspended.
#[test]
fn k04_a_later_table_is_checked_at_its_load() {
    let mut host = SnapshotRig::recorded(2);
    host.create("d", "0 16 linear O 0").unwrap();
    let error = host.load("d", "0 131073 linear O 0").unwrap_err();
    assert_eq!(
        (error.errno, &*error.text),
        (EINVAL, "O too small for target: start=0, len=131073, dev_size=131072")
    );
    assert!(!host.device("d").is_suspended());
    assert_eq!((host.table_of("d").as_str(), host.inactive_table_of("d").as_str()), ("1:0 0", ""));
    host.resume(&["d"]).unwrap();
    assert_eq!(host.letters("d", 2), "ab");
}

#[test]
fn t01_a_stripe_that_fails_is_marked_and_raises_an_event() {
    let mut host = SnapshotRig::recorded(1);
    host.create("bad", "0 8 error").unwrap();
    host.create("st", "0 16 striped 2 8 @bad 0 O 0").unwrap();
    assert_eq!(host.read("st", 0, 8), Err(Status::IoErr));
    assert!(host.status("st").ends_with(" 1 DA"), "{}", host.status("st"));
    assert_eq!(host.events("st"), 1);
    assert_eq!(host.read("st", 8, 1).unwrap(), [b'a'; 512]);
}

/// Otherwise a copy would need another copy, or overwrite its own source.
#[test]
fn g13_a_store_does_not_lie_on_its_own_origin() {
    let same = "COW device cannot be the same as origin device";
    let mut host = SnapshotRig::recorded(1);
    host.create("od", "0 131072 snapshot-origin O").unwrap();
    host.create("part", "0 1024 linear O 0").unwrap();
    host.create("above", "0 1024 linear @od 512").unwrap();
    host.create("over", "0 131072 linear W 0").unwrap();
    let refused = |host: &mut SnapshotRig, table: &str, who: &str| {
        let error = host.create("s", table).expect_err(table);
        assert_eq!((error.errno, error.text.split_once(": ").unwrap().1), (EINVAL, same), "{table}");
        assert!(error.reason.contains(who), "{table}: {error}");
    };
    for store in ["@od", "@part", "@above"] {
        for kind in ["snapshot", "snapshot-merge"] {
            refused(
                &mut host,
                &format!("0 131072 {kind} O {store} P 8"),
                &format!("{store} lies on its own origin"),
            );
        }
    }
    // The store may be on a part of the origin beyond the snapshot, unless writes there are copied.
    refused(&mut host, "0 512 snapshot O @above P 8", "lies on its own origin");
    refused(&mut host, "0 131072 snapshot @over W P 8", "the origin @over lies on it");
    assert_eq!(host.get_disk("W").bytes(0, 1), [0; 512], "nothing was written");
    host.create("rest", "0 65536 linear O 65536").unwrap();
    host.create("s", "0 65536 snapshot O @rest P 8").unwrap();
    assert_eq!(host.status("s"), "16/65536 16");
    // Two parts of one disk are independent.
    let (low, high) = ("0 1024 linear W 0", "0 1024 linear W 1024");
    host.create("low", low).unwrap();
    host.create("high", high).unwrap();
    host.create("s2", "0 1024 snapshot @low @high P 8").unwrap();
}

/// The snapshot's own device cannot be its store, whatever its current table is.
#[test]
fn g13_a_snapshot_is_not_its_own_store() {
    let mut host = SnapshotRig::recorded(1);
    host.create("s", "0 131072 linear W 0").unwrap();
    host.create("t", "0 131072 linear @s 0").unwrap();
    for store in ["@s", "@t"] {
        let error = host.load("s", &format!("0 131072 snapshot O {store} P 8")).unwrap_err();
        assert_eq!((error.errno, &*error.text), (EINVAL, "snapshot: Device lookup failed"), "{error}");
    }
}
