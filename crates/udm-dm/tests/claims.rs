//! Disks that a target needs alone, with the log of log-writes as example.

mod mapped_fixture;

use mapped_fixture::Fixture;
use udm_core::errno::EBUSY;
use udm_dm::TargetError;

fn refusal_text(result: Result<(), TargetError>) -> String {
    let error = result.unwrap_err();
    assert_eq!((error.errno, error.line), (EBUSY, Some(0)), "{error}");
    error.to_string()
}

#[test]
fn a_log_has_one_device() {
    let mut rig = Fixture::new();
    for name in ["/a", "/b", "/log", "/other"] {
        rig.disk(name, 64);
    }
    let (one, two) = (rig.make("one"), rig.make("two"));
    rig.load(&one, "0 8 log-writes /a /log").unwrap();
    let text = "log-writes: Device lookup failed (254:5 uses /log exclusively): Device or resource busy";
    assert_eq!(refusal_text(rig.load(&two, "0 8 log-writes /b /log")), text);
    assert!(two.inactive().is_none());
    // The disk may be used by targets that do not need it alone. The owner may load it again.
    rig.load(&two, "0 8 linear /log 0").unwrap();
    rig.resume(&one, &mut []).unwrap();
    rig.load(&one, "0 8 log-writes /b /log").unwrap();
    rig.resume(&one, &mut []).unwrap();
    refusal_text(rig.load(&two, "0 8 log-writes /a /log"));
    // Both the inactive and the live table hold their claims.
    rig.load(&one, "0 8 log-writes /b /other").unwrap();
    refusal_text(rig.load(&two, "0 8 log-writes /a /log"));
    refusal_text(rig.load(&two, "0 8 log-writes /a /other"));
    one.clear();
    rig.load(&two, "0 8 log-writes /a /other").unwrap();
    refusal_text(rig.load(&one, "0 8 log-writes /b /other"));
    refusal_text(rig.load(&two, "0 8 log-writes /a /log"));
    // The device is removed, which releases all its claims.
    let nothing = rig.disk("/nothing", 8);
    rig.resolver.add("@one", one.number(), nothing);
    drop(one);
    rig.load(&two, "0 8 log-writes /a /log").unwrap();
}

#[test]
fn two_lines_are_two_logs() {
    let mut rig = Fixture::new();
    for name in ["/a", "/log", "/other"] {
        rig.disk(name, 64);
    }
    let device = rig.make("one");
    let error = rig.load(&device, "0 8 log-writes /a /log\n8 8 log-writes /a /log").unwrap_err();
    assert_eq!((error.errno, error.line), (EBUSY, Some(1)), "{error}");
    rig.load(&device, "0 8 log-writes /a /log\n8 8 log-writes /a /other").unwrap();
}

/// A mapped device is claimed as itself.
#[test]
fn a_mapped_device_can_be_a_log() {
    let mut rig = Fixture::new();
    for name in ["/a", "/b", "/log"] {
        rig.disk(name, 64);
    }
    rig.live("log", "0 64 linear /log 0");
    let (one, two) = (rig.make("one"), rig.make("two"));
    rig.load(&one, "0 8 log-writes /a @log").unwrap();
    refusal_text(rig.load(&two, "0 8 log-writes /b @log"));
}
