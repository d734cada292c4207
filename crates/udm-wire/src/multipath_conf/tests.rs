//! Parses files in the syntax of multipath-tools, and checks their errors.

use super::*;

const SECOND: u64 = 1_000_000_000;

/// A file like the examples of multipath-tools, with keys that udm does not know.
const CONF: &str = r#"
# comment
defaults {
	polling_interval 	10
	max_polling_interval	40
	path_selector		"service-time 0"
	no_path_retry		fail   ! to the end of the line
	failback		immediate
	user_friendly_names	yes
	frobnicate		9
}
blacklist {
	devnode "^sd[a-z]"
	device {
		vendor "2.5"" SSD {"
	}
}
overrides {
	no_path_retry 12
	protocol {
		type "scsi:fcp"
	}
	checker_timeout 7
}
multipaths {
	multipath {
		wwid	3600508b4000156d700012000000b0000
		alias	yellow
		no_path_retry queue
		prio weightedpath
		prio_args "devname sd.* 50 devname *b?? 10"
		marginal_path_double_failed_time 60
		marginal_path_err_sample_time 120
		marginal_path_err_rate_threshold 10
		marginal_path_err_recheck_gap_time 300
	}
	multipath {
		alias red
		failback 15
		prio "path_latency"
		prio_args "io_num=50 base_num=1.5"
	}
}
"#;

#[test]
fn a_device_has_its_own_then_overrides_then_defaults() {
    let conf = MultipathConf::parse(CONF).unwrap();
    let of = |name, uuid| conf.settings(name, uuid, None);
    let other = of("other", None);
    assert_eq!(
        (other.polling_interval, other.max_polling_interval, other.checker_timeout),
        (Nanos(10 * SECOND), Nanos(40 * SECOND), Nanos(7 * SECOND))
    );
    assert_eq!((other.no_path_retry, other.failback), (Some(NoPathRetry::Checks(12)), Failback::Immediate));
    assert_eq!((other.prio, other.marginal), (PathPrioritizer::Const, None));
    assert_eq!(other.grouping, MultipathTableOptions::default());
    let yellow = of("yellow", None);
    assert_eq!(yellow, of("x", Some("3600508b4000156d700012000000b0000")), "by its wwid");
    assert_eq!(yellow.no_path_retry, Some(NoPathRetry::Queue));
    assert_eq!(yellow.prio, PathPrioritizer::Weighted(vec![("sd*".into(), 50), ("*b??".into(), 10)]));
    let marginal = yellow.marginal.unwrap();
    assert_eq!((marginal.err_rate_threshold, marginal.err_sample_time), (10, Nanos(120 * SECOND)));
    let red = of("red", None);
    assert_eq!(red.failback, Failback::After(Nanos(15 * SECOND)));
    assert_eq!(red.prio, PathPrioritizer::Latency { checks: 50, base: 1.5 });
}

#[test]
fn how_a_device_is_made_from_paths() {
    let of = |lines: &str| {
        let conf = MultipathConf::parse(&format!("defaults {{\n{lines}\n}}\n"))?;
        Ok::<_, String>((conf.settings("mp", None, None).grouping, conf.warnings.len()))
    };
    let text = "path_grouping_policy multibus\npath_selector \"historical-service-time 1 900\"\n\
                features \"2 queue_mode bio\"";
    let (grouping, warnings) = of(text).unwrap();
    assert_eq!((grouping.policy, warnings), (GroupingPolicy::Multibus, 0));
    assert_eq!(grouping.selector, "historical-service-time 1 900");
    assert_eq!(grouping.features, ["queue_mode", "bio"]);
    assert_eq!(of("features 0").unwrap(), (MultipathTableOptions::default(), 0));
    assert_eq!((of("rr_min_io_rq 100").unwrap().0.min_io, of("").unwrap().0.min_io), (100, 1));
    assert_eq!(of("rr_min_io 100").unwrap(), (MultipathTableOptions::default(), 1), "of another time");
    assert_eq!(of("path_grouping_policy group_by_tpg").unwrap(), (MultipathTableOptions::default(), 1));
    for (line, why) in [
        (
            "path_grouping_policy most",
            "path_grouping_policy: expected failover, multibus or group_by_prio, not \"most\"",
        ),
        ("rr_min_io_rq 0", "rr_min_io_rq: expected a number from 1 to 4294967295, not \"0\""),
        ("path_selector round-robin", "path_selector: expected a count and as many words, not \"\""),
        ("path_selector \"round-robin 1\"", "path_selector: expected a count and as many words, not \"1\""),
        (
            "features \"1 queue_mode bio\"",
            "features: expected a count and as many words, not \"1 queue_mode bio\"",
        ),
    ] {
        assert_eq!(of(line).unwrap_err(), format!("line 2: {why}"));
    }
}

#[test]
fn what_is_passed_over_is_said_with_its_line() {
    let conf = MultipathConf::parse(CONF).unwrap();
    assert_eq!(
        conf.warnings,
        [
            "line 9: user_friendly_names yes is ignored: the creator of a device chooses its name",
            "line 10: frobnicate is not a key that udm knows",
            "line 12: blacklist: udm ignores this section",
            "line 20: protocol: udm ignores this section",
        ]
    );
    let many = format!("defaults {{\n{}}}", "x 1\n".repeat(150));
    let warnings = MultipathConf::parse(&many).unwrap().warnings;
    assert_eq!((warnings.len(), warnings[100].as_str()), (101, "50 more keys are ignored"));
}

#[test]
fn a_file_that_is_wrong_is_refused_in_one_line() {
    for (text, why) in [
        ("defaults {", "the last section has no closing brace"),
        ("}", "line 1: a closing brace with nothing open"),
        ("\ndefaults\n{\n}", "line 2: expected a key and a value, or a section with its brace"),
        ("failback manual", "line 1: failback is outside of the sections that have keys"),
        ("defaults {\nfailback \"x", "line 2: a quote that is not closed"),
        (
            "defaults {\nfailback soon\n}",
            "line 2: failback: expected manual, immediate, followover or a number of seconds, not \"soon\"",
        ),
        (
            "defaults {\nno_path_retry -1\n}",
            "line 2: no_path_retry: expected fail, queue or a number of checks, not \"-1\"",
        ),
        (
            "defaults {\npolling_interval 0\n}",
            "line 2: polling_interval: expected a number from 1 to 3600, not \"0\"",
        ),
        (
            "defaults {\nprio_args \"devname x\"\n}",
            "line 2: prio_args: expected a pattern and a priority after devname",
        ),
        (
            "defaults {\nprio_args \"devname sd[ab] 1\"\n}",
            "line 2: prio_args: expected a pattern of text, * and ?, not \"sd[ab]\"",
        ),
        ("defaults {\nfailback manual }", "line 2: expected a key and a value, or a section with its brace"),
        (
            "defaults {\nfailback }",
            "line 2: an opening brace follows the name of a section, a closing brace is alone on its line",
        ),
    ] {
        assert_eq!(MultipathConf::parse(text).unwrap_err(), why, "{text}");
    }
    assert!(MultipathConf::parse(&" ".repeat(CONF_MAX + 1)).is_err());
    let many = format!("multipaths {{\n{}}}", "multipath {\n}\n".repeat(MAPS_MAX + 1));
    assert!(MultipathConf::parse(&many).unwrap_err().contains("more than 4096"));
}

/// As in multipathd, the first word is the value. If it is invalid, the key is ignored and the file
/// is not refused.
#[test]
fn a_value_without_its_quotes_is_a_warning() {
    let text = "defaults {\nfailback immediate now\npath_selector round-robin 0\nfeatures 1 queue_if_no_path\n}\n\
                multipaths {\nmultipath {\nalias m of mine\nprio_args \"preferredip\"\n}\n}";
    let conf = MultipathConf::parse(text).unwrap();
    let quotes = "a value of several words is written in double quotes";
    assert_eq!(
        conf.warnings,
        [
            format!("line 2: failback immediate: ignored from now on: {quotes}"),
            format!("line 3: path_selector round-robin is ignored: {quotes}"),
            format!("line 4: features 1 is ignored: {quotes}"),
            format!("line 8: alias m: ignored from of on: {quotes}"),
            "line 9: prio_args preferredip is ignored: devname PATTERN PRIORITY, io_num=N and base_num=N are known"
                .into(),
        ]
    );
    let settings = conf.settings("m", None, None);
    assert_eq!(settings.failback, Failback::Immediate);
    assert_eq!(settings.grouping, MultipathTableOptions::default());
    // On the command line, the same arguments are an error.
    let said = PathPrioritizer::named("weightedpath", Some("preferredip")).unwrap_err();
    assert!(said.starts_with("prio_args \"preferredip\": devname PATTERN"), "{said}");
}

/// Some of the four `marginal_path` keys alone have no effect. One warning lists the missing keys.
#[test]
fn some_of_the_marginal_keys_are_a_warning() {
    let [a, b, c, d] = [
        "marginal_path_double_failed_time 60",
        "marginal_path_err_sample_time 120",
        "marginal_path_err_rate_threshold 10",
        "marginal_path_err_recheck_gap_time 50",
    ];
    let warnings = |defaults: &[&str], own: &[&str]| {
        let (defaults, own) = (defaults.join("\n"), own.join("\n"));
        let text = format!(
            "defaults {{\n{defaults}\n}}\nmultipaths {{\nmultipath {{\nalias m\n{own}\n}}\nmultipath {{\nalias n\n{own}\n}}\n}}"
        );
        MultipathConf::parse(&text).unwrap().warnings
    };
    let none: [String; 0] = [];
    assert_eq!(warnings(&[], &[]), none);
    assert_eq!(warnings(&[a, b, c, d], &[b]), none);
    assert_eq!(warnings(&[], &[a, b, c, d]), none);
    let end = "missing: without all four marginal_path keys no path is held back";
    assert_eq!(
        warnings(&[b], &[]),
        [format!(
            "marginal_path_double_failed_time, marginal_path_err_rate_threshold and marginal_path_err_recheck_gap_time are {end}"
        )]
    );
    assert_eq!(warnings(&[a, b, d], &[c]), [format!("marginal_path_err_rate_threshold is {end}")]);
    let own = format!("multipath \"m\": marginal_path_err_recheck_gap_time is {end}");
    assert_eq!(warnings(&[], &[a, b, c]), [own]);
}

#[test]
fn without_a_word_checks_are_as_often_as_asked_for() {
    let five = MultipathConf::default().settings("d", None, None);
    assert_eq!(five, MultipathSettings::every(5));
    assert_eq!(five.max_polling_interval, Nanos(20 * SECOND));
    let conf = MultipathConf::parse("defaults {\nmax_polling_interval 2\n}").unwrap();
    let settings = conf.settings("d", None, Some(3));
    assert_eq!(settings.max_polling_interval, Nanos(3 * SECOND), "never less than the first");
}

#[test]
fn patterns() {
    for (pattern, name, want) in [
        ("*", "", true),
        ("sd*", "sda", true),
        ("sd*", "nvme", false),
        ("*a*b", "xaxbxb", true),
        ("*a*b", "xaxbx", false),
        ("a?c", "abc", true),
        ("a?c", "ac", false),
        ("", "", true),
        ("", "x", false),
    ] {
        assert_eq!(matches_pattern(pattern, name), want, "{pattern} {name}");
    }
}
