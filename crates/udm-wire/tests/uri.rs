//! Names of devices: every form, its canonical form, and the errors that users see.

use std::path::PathBuf;
use udm_core::Nanos;
use udm_wire::uri::{
    DeviceUri, FileUri, HedgeSetting, ImageFormat, IoSchedulerName, NbdAddress, NbdTlsParams, NbdUri,
    NullParams, ObjectScheme, ObjectUri, QueueParams, ReplyDeadlineSetting, ServerStoppedProof,
    SilentServerPolicy, parse_device_uri,
};

fn file(path: &str, direct: Option<bool>, readonly: bool) -> DeviceUri {
    DeviceUri::File(FileUri { direct, readonly, ..FileUri::new(PathBuf::from(path)) })
}

fn tcp(host: &str, port: u16, export: &str) -> DeviceUri {
    DeviceUri::Nbd(NbdUri::new(NbdAddress::Tcp { host: host.into(), port }, export))
}

fn unix(socket: &str, export: &str) -> DeviceUri {
    DeviceUri::Nbd(NbdUri::new(NbdAddress::Unix(socket.into()), export))
}

fn with_tls(device: DeviceUri, certificates: &str, hostname: Option<&str>) -> DeviceUri {
    let DeviceUri::Nbd(uri) = device else { panic!("an NBD URI") };
    let (certificates, hostname) = (certificates.into(), hostname.map(str::to_owned));
    DeviceUri::Nbd(NbdUri { tls: Some(NbdTlsParams { certificates, hostname }), ..uri })
}

fn silent(device: DeviceUri, deadline: u64, fence: ServerStoppedProof) -> DeviceUri {
    let DeviceUri::Nbd(uri) = device else { panic!("an NBD URI") };
    let deadline = ReplyDeadlineSetting::After(Nanos::from_millis(deadline));
    DeviceUri::Nbd(NbdUri { silence: SilentServerPolicy { deadline, fence }, ..uri })
}

fn endless(device: DeviceUri) -> DeviceUri {
    let DeviceUri::Nbd(uri) = device else { panic!("an NBD URI") };
    DeviceUri::Nbd(NbdUri {
        silence: SilentServerPolicy { deadline: ReplyDeadlineSetting::Never, ..uri.silence },
        ..uri
    })
}

/// Over TCP, no message arrives if the other machine fails, so there is a default deadline.
fn image(path: &str, allow_backing: bool) -> DeviceUri {
    let format = ImageFormat::Qcow2 { allow_backing };
    DeviceUri::File(FileUri { readonly: true, format, ..FileUri::new(PathBuf::from(path)) })
}

fn object(scheme: ObjectScheme, authority: &str, key: &str) -> DeviceUri {
    let (authority, key) = (authority.to_owned(), key.to_owned());
    let deadline = ReplyDeadlineSetting::Default;
    DeviceUri::Object(ObjectUri {
        scheme,
        authority,
        key,
        deadline,
        etag: None,
        hedge: HedgeSetting::Auto,
        insecure: false,
        is_qcow2: false,
        queue: None,
    })
}

fn in_qcow2(host: &str, key: &str) -> DeviceUri {
    let DeviceUri::Object(uri) = object(ObjectScheme::Https, host, key) else { panic!("{host}") };
    DeviceUri::Object(ObjectUri { is_qcow2: true, ..uri })
}

fn timed(uri: DeviceUri, seconds: u64) -> DeviceUri {
    let DeviceUri::Object(uri) = uri else { panic!("{uri}") };
    let deadline = ReplyDeadlineSetting::After(Nanos::from_millis(seconds * 1000));
    DeviceUri::Object(ObjectUri { deadline, ..uri })
}

fn pinned(etag: &str, hedge: HedgeSetting) -> DeviceUri {
    let DeviceUri::Object(uri) = object(ObjectScheme::S3, "b", "k") else { panic!("{etag}") };
    DeviceUri::Object(ObjectUri { etag: Some(etag.into()), hedge, ..uri })
}

#[test]
fn deadline_defaults_per_transport() {
    for (word, seconds) in [
        ("nbd://h/", Some(60)),
        ("nbd://h/?deadline=2s", Some(2)),
        ("nbd://h/?deadline=none", None),
        ("nbd+unix:///?socket=/s", None),
        ("nbd+unix:///?socket=/s&deadline=none", None),
        ("nbd+unix:///?socket=/s&deadline=2s", Some(2)),
    ] {
        let Ok(DeviceUri::Nbd(uri)) = parse_device_uri(word) else { panic!("{word}: an NBD URI") };
        assert_eq!(uri.deadline(), seconds.map(|s| Nanos::from_millis(s * 1000)), "{word}");
    }
}

#[test]
fn every_form_and_its_canonical_spelling() {
    for (word, device, canonical) in [
        ("/dev/nvme0n1", file("/dev/nvme0n1", None, false), "/dev/nvme0n1"),
        (
            "/dev/disk/by-path/pci-0000:00:1f.2?x=1%20",
            file("/dev/disk/by-path/pci-0000:00:1f.2?x=1%20", None, false),
            "/dev/disk/by-path/pci-0000:00:1f.2?x=1%20",
        ),
        ("./a:b", file("./a:b", None, false), "./a:b"),
        ("disk.img", file("disk.img", None, false), "file:disk.img"),
        ("file:disk.img", file("disk.img", None, false), "file:disk.img"),
        (
            "file:disk.img?direct=on&readonly=on",
            file("disk.img", Some(true), true),
            "file:disk.img?direct=on&readonly=on",
        ),
        (
            "file:/srv/a%20b%3F?readonly=1&direct=off",
            file("/srv/a b?", Some(false), true),
            "file:/srv/a%20b%3F?direct=off&readonly=on",
        ),
        ("file:/dev/sda?exclusive=on", file("/dev/sda", None, false), "/dev/sda"),
        (
            "file:/dev/sda?exclusive=off",
            DeviceUri::File(FileUri { exclusive: false, ..FileUri::new("/dev/sda".into()) }),
            "file:/dev/sda?exclusive=off",
        ),
        (
            "file:a.cow?grow_max=1T&grow=65536k",
            DeviceUri::File(FileUri {
                grow: Some(64 << 20),
                grow_max: Some(1 << 40),
                ..FileUri::new("a.cow".into())
            }),
            "file:a.cow?grow=64M&grow_max=1T",
        ),
        ("file:a.qcow2?readonly=on&format=qcow2", image("a.qcow2", false), "file:a.qcow2?format=qcow2"),
        (
            "file:/a%3F.qcow2?backing=allow&format=qcow2",
            image("/a?.qcow2", true),
            "file:/a%3F.qcow2?format=qcow2&backing=allow",
        ),
        ("file:a?format=raw", file("a", None, false), "file:a"),
        ("https://Host:443/a/b.img", object(ObjectScheme::Https, "host", "a/b.img"), "https://host/a/b.img"),
        (
            "http://127.0.0.1:8080/x",
            object(ObjectScheme::Http, "127.0.0.1:8080", "x"),
            "http://127.0.0.1:8080/x",
        ),
        ("http://[::1]/x", object(ObjectScheme::Http, "[::1]", "x"), "http://[::1]/x"),
        ("s3://my-bucket/a%20b", object(ObjectScheme::S3, "my-bucket", "a b"), "s3://my-bucket/a%20b"),
        ("https://h/a.qcow2?format=qcow2", in_qcow2("h", "a.qcow2"), "https://h/a.qcow2?format=qcow2"),
        (
            "s3://b/k?etag=%22a-7=%22&hedge=1000ms",
            pinned("a-7=", HedgeSetting::After(Nanos::from_millis(1000))),
            "s3://b/k?etag=a-7%3D&hedge=1s",
        ),
        ("s3://b/k?hedge=off&etag=0x8D", pinned("0x8D", HedgeSetting::Off), "s3://b/k?etag=0x8D&hedge=off"),
        ("s3://b/k?etag=a%26b&hedge=auto", pinned("a&b", HedgeSetting::Auto), "s3://b/k?etag=a%26b"),
        ("gs://b/k?deadline=60s", timed(object(ObjectScheme::Gs, "b", "k"), 60), "gs://b/k?deadline=1m"),
        ("mem:1G", DeviceUri::Mem { size: 1 << 30, queue: None }, "mem:1G"),
        ("mem:1024MiB", DeviceUri::Mem { size: 1 << 30, queue: None }, "mem:1G"),
        (
            "mem:1G,queue_depth=4,scheduler=mq-deadline,nr_requests=1",
            DeviceUri::Mem {
                size: 1 << 30,
                queue: Some(QueueParams {
                    scheduler: IoSchedulerName::MqDeadline,
                    queue_depth: 4,
                    nr_requests: 4,
                    ..QueueParams::default()
                }),
            },
            "mem:1G,scheduler=mq-deadline,queue_depth=4,nr_requests=4",
        ),
        (
            "file:/dev/sda?nomerges=0",
            DeviceUri::File(FileUri {
                queue: Some(QueueParams::default()),
                ..FileUri::new("/dev/sda".into())
            }),
            "file:/dev/sda?scheduler=none",
        ),
        (
            "nbd://h/?deadline=none&nr_hw_queues=1",
            DeviceUri::Nbd(NbdUri {
                queue: Some(QueueParams { nr_hw_queues: 1, ..QueueParams::default() }),
                ..match endless(tcp("h", 10809, "")) {
                    DeviceUri::Nbd(nbd) => nbd,
                    other => panic!("{other}"),
                }
            }),
            "nbd://h/?deadline=none&nr_hw_queues=1",
        ),
        (
            "nbds+unix:///x?tls-hostname=disks.example&tls-certificates=%2Fetc/udm&socket=/s",
            with_tls(unix("/s", "x"), "/etc/udm", Some("disks.example")),
            "nbds+unix:///x?socket=/s&tls-certificates=/etc/udm&tls-hostname=disks.example",
        ),
        (
            "nbds://[::1]:2000/?tls-certificates=c&deadline=2s",
            silent(with_tls(tcp("::1", 2000, ""), "c", None), 2000, ServerStoppedProof::Closed),
            "nbds://[::1]:2000/?tls-certificates=c&deadline=2s",
        ),
        ("pattern:1536", DeviceUri::Pattern { size: 1536 }, "pattern:1536"),
        ("@mp", DeviceUri::Mapped("mp".into()), "@mp"),
        ("@a b", DeviceUri::Mapped("a b".into()), "@a b"),
        ("8:16", DeviceUri::Number { major: 8, minor: 16 }, "8:16"),
        ("nbd://host:10809/export", tcp("host", 10809, "export"), "nbd://host/export"),
        ("nbd://localhost", tcp("localhost", 10809, ""), "nbd://localhost/"),
        ("nbd:///x", tcp("localhost", 10809, "x"), "nbd://localhost/x"),
        ("nbd://[::1]:2000/a%2Fb", tcp("::1", 2000, "a/b"), "nbd://[::1]:2000/a/b"),
        ("nbd://[2001:0db8::1]", tcp("2001:db8::1", 10809, ""), "nbd://[2001:db8::1]/"),
        ("nbd://example.com//disk", tcp("example.com", 10809, "/disk"), "nbd://example.com//disk"),
        (
            "nbd://example.com/hello%20world",
            tcp("example.com", 10809, "hello world"),
            "nbd://example.com/hello%20world",
        ),
        ("nbd+unix:///disk?socket=sock", unix("sock", "disk"), "nbd+unix:///disk?socket=sock"),
        ("nbd+unix:///?socket=/tmp/a%26b", unix("/tmp/a&b", ""), "nbd+unix:///?socket=/tmp/a%26b"),
        ("nbd+unix://?socket=/tmp/a", unix("/tmp/a", ""), "nbd+unix:///?socket=/tmp/a"),
        (
            "nbd+unix:///x?fence=closed&deadline=1500ms&socket=/tmp/a",
            silent(unix("/tmp/a", "x"), 1500, ServerStoppedProof::Closed),
            "nbd+unix:///x?socket=/tmp/a&deadline=1500ms",
        ),
        (
            "nbd+unix:///?socket=/tmp/a&deadline=2000ms&fence=exec:/sbin/off%20a",
            silent(unix("/tmp/a", ""), 2000, ServerStoppedProof::Exec("/sbin/off a".into())),
            "nbd+unix:///?socket=/tmp/a&deadline=2s&fence=exec:/sbin/off%20a",
        ),
        (
            "nbd://h/?fence=wait:90s&deadline=24h",
            silent(tcp("h", 10809, ""), 24 * 3_600_000, ServerStoppedProof::Wait(Nanos::from_millis(90_000))),
            "nbd://h/?deadline=24h&fence=wait:90s",
        ),
        (
            "nbd://h/?deadline=120s",
            silent(tcp("h", 10809, ""), 120_000, ServerStoppedProof::Closed),
            "nbd://h/?deadline=2m",
        ),
        ("nbd://h/?deadline=none", endless(tcp("h", 10809, "")), "nbd://h/?deadline=none"),
    ] {
        assert_eq!(parse_device_uri(word).as_ref(), Ok(&device), "{word}");
        assert_eq!(device.to_string(), canonical, "{word}");
        assert_eq!(parse_device_uri(canonical).as_ref(), Ok(&device), "{canonical}");
    }
}

#[test]
fn refusals_say_what_would_be_right() {
    for (word, want) in [
        ("", "no path of a device"),
        ("@", "@\"\": no name of a device"),
        ("@a/b", "@\"a/b\": a device name contains no \"/\""),
        ("@control", "@\"control\": device name cannot be \"control\", \".\", or \"..\""),
        ("8:4294967296", "\"8:4294967296\": no such device number"),
        ("http://x/", "http: the name of an object has 1 to 4096 bytes, no control characters"),
        (
            "https://u:secret@h/x",
            "https: a URI has no user and no password: tables are shown in status lines",
        ),
        (
            "https://h/x?X-Amz-Signature=1",
            "https: unknown parameter \"X-Amz-Signature\"; there are deadline, etag, hedge, insecure, format and those of a queue (a signed URL is refused, because tables are shown in status lines)",
        ),
        (
            "http://h/x",
            "http: data without encryption can be changed on its way: use https:, or insecure=on if the network is trusted",
        ),
        ("https://h/a/../x", "https: the name of an object has no empty part and no part \".\" or \"..\""),
        ("s3://b:1/x", "s3: \"b:1\" is not a bucket or container"),
        ("https://h:0/x", "https: port \"0\" is not in 1..65535"),
        ("s3://b/x?format=vmdk", "s3: format=\"vmdk\" is neither raw nor qcow2"),
        ("s3://b/x?insecure=on", "s3: insecure=on is for http: only"),
        (
            "s3://b/x?etag=W/%22a%22",
            "s3: etag: \"W/\\\"a\\\"\" is a weak ETag, which does not tell versions apart",
        ),
        (
            "s3://b/x?etag=",
            "s3: etag: \"\" is not an ETag: 1 to 256 printable characters without space or quote",
        ),
        (
            "s3://b/x?hedge=0ms",
            "s3: hedge: \"0ms\" is not a time from 1ms to 24h (a number, then ms, s, m or h)",
        ),
        (
            "file:a?format=vmdk",
            "file: format=\"vmdk\" is neither raw nor qcow2 (nbd: serves others, by qemu-nbd)",
        ),
        ("file:a?backing=allow", "file: backing needs format=qcow2"),
        ("file:a?format=qcow2&backing=yes", "file: backing=\"yes\" is neither allow nor deny"),
        (
            "file:a?format=qcow2&grow=1M",
            "file: an image in qcow2 is read-only; a snapshot over it takes writes",
        ),
        (
            "file:a?format=qcow2&readonly=off",
            "file: an image in qcow2 is read-only; a snapshot over it takes writes",
        ),
        (
            "ftp://x/",
            "\"ftp\": unknown kind of device; expected a path, @name, file:, nbd:, nvme+tcp:, null:, mem:, pattern:, https:, \
             s3:, gs: or az:",
        ),
        ("file:", "no path of a device"),
        ("file:a?direct=maybe", "file: direct=\"maybe\" is neither on nor off"),
        (
            "file:a?cache=none",
            "file: unknown option \"cache\"; expected one of direct, readonly, exclusive, grow, grow_max, format, backing, scheduler, nr_hw_queues, \
             queue_depth, nr_requests, nomerges, max_sectors_kb, max_segments, read_expire, write_expire, writes_starved, \
             fifo_batch, front_merges",
        ),
        ("file:a?grow=0", "file: grow is above 0"),
        ("file:a?grow=1x", "file: grow: \"1x\" is not a size: a number, then K, M, G, T, P or E"),
        ("file:a?grow=1M&grow=1M", "file: grow is given twice"),
        ("file:a?grow_max=1M", "file: grow_max (the maximum size) needs grow (the step)"),
        ("file:a?direct=on&direct=on", "file: direct is given twice"),
        ("file:a%zz", "file: a % that two hexadecimal digits do not follow"),
        ("file:a%ff", "file: percent-encoded bytes that are not UTF-8"),
        ("file:a%00", "\"a\\0\": a NUL character"),
        ("mem:", "mem: \"\" is not a size: a number, then K, M, G, T, P or E"),
        ("mem:0", "mem: a device of no size"),
        ("pattern:16E", "pattern: \"16E\" is too large a size"),
        ("nbd:host:10809", "nbd: \"//\" must follow"),
        ("nbds://host/", "nbds: TLS needs tls-certificates=FOLDER with ca-cert.pem"),
        ("nbds+unix:///?socket=/s", "nbds+unix: TLS needs tls-certificates=FOLDER with ca-cert.pem"),
        ("nbd://host/?tls-certificates=/c", "nbd: a parameter tls-... needs nbds: or nbds+unix:"),
        ("nbds://host/?tls-certificates=", "nbds: tls-certificates has no folder"),
        ("nbds://host/?tls-certificates=/c&tls-hostname=a:1", "nbds: \"a:1\" is not a host name"),
        ("nbd://user@host/", "nbd: udm sends no user: a server knows its client by the certificate"),
        ("nbd://host:0/", "nbd: port \"0\" is not in 1..65535"),
        ("nbd://host:65536/", "nbd: port \"65536\" is not in 1..65535"),
        ("nbd://host:+1/", "nbd: \"+1\" is not a port"),
        ("nbd://[::1/", "nbd: a [ without its ]"),
        ("nbd://[x]/", "nbd: \"x\" is not an IPv6 address"),
        ("nbd://[::1]x/", "nbd: \"x\" after a host"),
        ("nbd://ho st/", "nbd: \"ho st\" is not a host name"),
        (
            "nbd://host/?tls-type=x509",
            "nbd: unknown parameter \"tls-type\"; of TLS there are tls-certificates and tls-hostname",
        ),
        (
            "nbd://host/?foo=1",
            "nbd: unknown parameter \"foo\"; there are socket, deadline, fence, multi-conn, tls-certificates, tls-hostname, scheduler, nr_hw_queues, queue_depth, \
             nr_requests, nomerges, max_sectors_kb, max_segments, read_expire, write_expire, writes_starved, fifo_batch, \
             front_merges",
        ),
        ("file:a?scheduler=bfq", "file: scheduler=\"bfq\" is neither none nor mq-deadline"),
        ("file:a?queue_depth=0", "file: queue_depth=\"0\" is not a number in 1..10240"),
        ("file:a?nomerges=1&nomerges=1", "file: nomerges is given twice"),
        ("mem:1M,max_sectors_kb=3", "mem: max_sectors_kb is 0, or at least 4"),
        ("mem:1M,queue_depth=+1", "mem: queue_depth=\"+1\" is not a number in 1..10240"),
        (
            "mem:1M,",
            "mem: unknown parameter \"\"; expected one of scheduler, nr_hw_queues, queue_depth, nr_requests, nomerges, \
          max_sectors_kb, max_segments, read_expire, write_expire, writes_starved, fifo_batch, front_merges",
        ),
        ("null:queue_depth=4", "null: a null device has hw_queue_depth for queue_depth"),
        ("nbd://host/?deadline=1s&deadline=1s", "nbd: deadline is given twice"),
        (
            "nbd://host/?deadline=500",
            "nbd: deadline: \"500\" is not a time from 1ms to 24h (a number, then ms, s, m or h)",
        ),
        (
            "nbd://host/?deadline=0ms",
            "nbd: deadline: \"0ms\" is not a time from 1ms to 24h (a number, then ms, s, m or h)",
        ),
        (
            "nbd://host/?fence=wait:25h",
            "nbd: fence=wait: \"25h\" is not a time from 1ms to 24h (a number, then ms, s, m or h)",
        ),
        (
            "nbd://host/?fence=wait:18446744073709551615s",
            "nbd: fence=wait: \"18446744073709551615s\" is not a time from 1ms to 24h (a number, then ms, s, m or h)",
        ),
        ("nbd://host/?fence=kill", "nbd: fence=\"kill\" is not closed, wait:TIME or exec:PATH"),
        ("nbd://host/?fence=exec:off", "nbd: fence=exec: \"off\" is not the absolute path of a command"),
        ("nbd://host/?fence=exec:/a%00", "nbd: fence=exec: \"/a\\0\" is not the absolute path of a command"),
        ("nbd://host/?socket=/a", "nbd: a socket belongs to nbd+unix or nbds+unix"),
        ("nbd://host/a#b", "nbd: an NBD URI has no fragment; write %23 for #"),
        ("nbd://host/%00", "nbd: an export's name has at most 4096 bytes and no NUL"),
        ("nbd+unix:///a", "nbd+unix: ?socket=PATH must follow"),
        ("nbd+unix:///?socket=", "nbd+unix: socket has no path"),
        ("nbd+unix:///?socket=/a&socket=/b", "nbd+unix: socket is given twice"),
        ("nbd+unix:///?socket=%00abstract", "nbd+unix: udm uses no sockets in the abstract name space"),
        (
            "nbd+unix://host/?socket=/a",
            "nbd+unix: \"host\" is not part of a Unix socket's URI; expected nbd+unix:///EXPORT?socket=PATH",
        ),
    ] {
        assert_eq!(parse_device_uri(word).unwrap_err().to_string(), want, "{word}");
    }
    for word in [
        format!("@{}", "n".repeat(128)),
        format!("/{}", "p".repeat(4095)),
        "x".repeat(20_000),
        format!("nbd://h/{}", "e".repeat(4097)),
        format!("nbd+unix:///?socket=/{}", "s".repeat(107)),
        format!("nbd://{}", "h".repeat(254)),
    ] {
        let error = parse_device_uri(&word).unwrap_err().to_string();
        assert!(error.len() < 200, "{error}");
    }
}

fn null(words: &str) -> Result<NullParams, String> {
    match parse_device_uri(&format!("null:{words}")) {
        Ok(DeviceUri::Null(params)) => Ok(params),
        other => Err(other.unwrap_err().to_string()),
    }
}

/// The kernel's results of writing these values (configfs, Linux 6.12), for the parameters that udm
/// has. The kernel stores `queue_mode=3` unchanged and treats it as 2. It stores
/// `hw_queue_depth=20000` unchanged and reduces it when the tags are created.
#[test]
fn null_parameters_are_clamped_as_in_the_kernel() {
    let get = |words: &str| null(words).unwrap();
    assert_eq!(get("queue_mode=0").queue_mode, 2);
    assert_eq!(
        null("queue_mode=1").unwrap_err(),
        "null: queue_mode=1 (single queue) is not supported; use 2 (multi-queue)"
    );
    assert_eq!(get("queue_mode=3").queue_mode, 2);
    assert_eq!(get("irqmode=3").irqmode, 2);
    assert_eq!(null("blocksize=256").unwrap_err(), "null: blocksize=256 is not 512, 1024, 2048 or 4096");
    assert_eq!(get("blocksize=1024").bs, 1024);
    assert_eq!(get("bs=4k").bs, 4096);
    assert!(null("blocksize=8192").is_err() && null("blocksize=1000").is_err());
    assert_eq!(get("submit_queues=0").submit_queues, 1);
    assert_eq!(get("submit_queues=99").submit_queues, 99);
    assert_eq!(null("hw_queue_depth=0").unwrap_err(), "null: hw_queue_depth must be at least 1");
    assert_eq!(get("hw_queue_depth=20000").hw_queue_depth, 10240);
    assert_eq!(get("cache_size=5M").cache_size, 0, "needs memory_backed");
    assert_eq!(get("memory_backed=1,cache_size=5M").cache_size, 5 << 20);
    assert_eq!(
        null("cache_size=5").unwrap_err(),
        "null: cache_size=5 is not whole MiB; write 5M to mean MiB"
    );
    assert_eq!(null("cache_size=1536K").unwrap_err(), "null: cache_size=1536K is not whole MiB");
    assert!(!get("discard=1").discard, "needs memory_backed");
    assert!(get("discard=1,memory_backed=1").discard, "in any order");
    assert_eq!(null("max_sectors=4").unwrap_err(), "null: max_sectors must be at least 8");
    assert_eq!(get("max_sectors=8").max_sectors, Some(8));
    assert_eq!(get("max_sectors=0").max_sectors, None);
}

/// As read back from the kernel, except that `max_sectors` is 255 there.
#[test]
fn b01_null_device_defaults() {
    let plain = null("").unwrap();
    assert_eq!((plain.size, plain.bs), (250 << 30, 512));
    assert_eq!((plain.queue_mode, plain.irqmode, plain.completion_nsec), (2, 1, 10_000));
    assert_eq!((plain.submit_queues, plain.hw_queue_depth, plain.max_sectors), (1, 64, None));
    assert_eq!((plain.memory_backed, plain.discard, plain.cache_size, plain.fua), (false, false, 0, true));
    assert!(plain.faults.is_none() && !plain.no_sched);
}

#[test]
fn null_parameters() {
    assert_eq!(null("").unwrap(), NullParams::default());
    assert_eq!(null("").unwrap().size, 250 << 30);
    let all =
        null("size=4G,submit_queues=2,hw_queue_depth=4096,queue_mode=2,irqmode=1,completion_nsec=1").unwrap();
    assert_eq!((all.size, all.submit_queues, all.hw_queue_depth, all.completion_nsec), (4 << 30, 2, 4096, 1));
    assert_eq!(
        DeviceUri::Null(all).to_string(),
        "null:size=4G,submit_queues=2,hw_queue_depth=4096,completion_nsec=1"
    );
    assert_eq!(null("gb=4").unwrap().size, 4 << 30);
    assert_eq!(null("size=1G,gb=4").unwrap_err(), "null: size is given twice");
    assert_eq!(null("size=256,bs=512").unwrap_err(), "null: size 256 is less than a block of 512");
    assert_eq!(null("fua=2").unwrap_err(), "null: fua=\"2\" is neither 0 nor 1");
    assert_eq!(null("irqmode=").unwrap_err(), "null: irqmode=\"\" is not a number in 0..4294967295");
    assert_eq!(null("size=1G,").unwrap_err(), "null: an empty parameter; NAME=VALUE,NAME=VALUE");
    for (name, why) in
        [("zoned", "zoned is null_blk's and not udm's"), ("zoned2", "unknown parameter \"zoned2\"")]
    {
        let refused = null(&format!("{name}=1")).unwrap_err();
        assert!(
            refused
                .starts_with(&format!("null: {why}; expected one of badblocks, blocking, blocksize (bs), ")),
            "{refused}"
        );
        assert!(refused.contains("submit_queues") && !refused.contains('\n'));
    }
}

/// Faults as they are written, and as they are printed.
#[test]
fn b03_bad_blocks_and_other_faults() {
    for (said, shown) in [
        ("badblocks=+0-7,badblocks=-0-3", ",badblocks=+4-7"),
        ("badblocks=+0-7,badblocks=-3-4", ",badblocks=+0-2,badblocks=+5-7"),
        ("badblocks=+9-9,badblocks=+0-3,badblocks=+4-8", ",badblocks=+0-9"),
        ("badblocks=+5-20,badblocks=+1-30,badblocks=-0-99", ""),
        ("badblocks=+0-18446744073709551615", ",badblocks=+0-18446744073709551615"),
        ("mbps=100", ",mbps=100"),
        ("mbps=99999", ",mbps=40960"),
        ("mbps=0", ""),
        ("timeout=1,50,0,-1,bs=4k", ",timeout=1,50,0,-1"),
        ("requeue=10,100,5,3,init_hctx=1,1,0,0", ",requeue=10,100,5,3,init_hctx=1,1,0,0"),
        ("no_sched=1", ",no_sched=1"),
    ] {
        let text = DeviceUri::Null(null(&format!("size=1M,{said}")).unwrap()).to_string();
        let block = if said.contains("bs=4k") { ",blocksize=4096" } else { "" };
        assert_eq!(text, format!("null:size=1M{block}{shown}"));
        assert_eq!(parse_device_uri(&text).unwrap().to_string(), text);
    }
    for (said, why) in [
        ("badblocks=+10-5", "badblocks=\"+10-5\" is neither +FIRST-LAST, to add sectors, nor -FIRST-LAST"),
        ("badblocks=5-6", "badblocks=\"5-6\" is neither +FIRST-LAST, to add sectors, nor -FIRST-LAST"),
        ("badblocks=bogus", "badblocks=\"bogus\" is neither +FIRST-LAST, to add sectors, nor -FIRST-LAST"),
        ("badblocks=+1", "badblocks=\"+1\" is neither +FIRST-LAST, to add sectors, nor -FIRST-LAST"),
        ("badblocks=", "badblocks=\"\" is neither +FIRST-LAST, to add sectors, nor -FIRST-LAST"),
        ("timeout=1,50", "timeout=\"1,50\" is not INTERVAL,PROBABILITY,SPACE,TIMES"),
        ("timeout=1,50,0,-2", "timeout=\"1,50,0,-2\" is not INTERVAL,PROBABILITY,SPACE,TIMES"),
        ("requeue=1,50,0,1,2", "requeue=\"1,50,0,1,2\" is not INTERVAL,PROBABILITY,SPACE,TIMES"),
        ("requeue=yes", "requeue=\"yes\" is not INTERVAL,PROBABILITY,SPACE,TIMES"),
        ("mbps=fast", "mbps=\"fast\" is not a number of MiB a second"),
        ("timeout=1,1,0,0,timeout=1,1,0,0", "timeout is given twice"),
        ("no_sched=1,scheduler=mq-deadline", "no_sched=1 forbids a scheduler"),
        ("blocking=2", "blocking=\"2\" is neither 0 nor 1"),
        ("home_node=-2", "home_node=\"-2\" is not a number in 0..4294967295"),
    ] {
        assert_eq!(null(said).unwrap_err(), format!("null: {why}"));
    }
    let many: Vec<_> = (0..513).map(|i| format!("badblocks=+{0}-{0}", 2 * i)).collect();
    assert_eq!(null(&many.join(",")).unwrap_err(), "null: badblocks: there are more than 512 ranges");
}

/// Devices that share tags have a queue, with the numbers of the shared tags.
#[test]
fn shared_tags_ask_for_a_queue() {
    let params = null("size=1M,shared_tags=1,hw_queue_depth=8").unwrap();
    assert_eq!(params.to_string(), "null:size=1M,hw_queue_depth=8,shared_tags=1,scheduler=none");
    let queue = params.queue.clone().unwrap();
    assert_eq!((queue.nr_hw_queues, queue.queue_depth), (1, 8));
    assert_eq!(null(&params.to_string()["null:".len()..]).unwrap(), params);
    assert_eq!(null("size=1M,shared_tags=0").unwrap().queue, None);
}

/// Parameters that have no meaning without a kernel are accepted in their range, and change
/// nothing.
#[test]
fn null_parameters_without_effect() {
    let words =
        "blocking=1,home_node=-1,poll_queues=3,shared_tag_bitmap=1,use_per_node_hctx=0,virt_boundary=1";
    assert_eq!(null(words).unwrap(), NullParams::default());
    assert_eq!(null("home_node=4294967295").unwrap(), NullParams::default());
}
