//! Objects of web servers as read-only devices: servers that lie, refuse, stall and disappear.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};
use support::nbd::Client;
use support::web_server::{Lie, WebServer};
use support::{Server, has, text, udm, until};
use tempfile::TempDir;
use udm_wire::nbd::NbdCommand as Nbd;

const MIB: usize = 1 << 20;

/// Bytes that differ at each offset.
fn content(len: usize, seed: u32) -> Vec<u8> {
    let word = |n: u32| (n ^ seed).wrapping_mul(0x9e37_79b1).rotate_left(15).to_le_bytes();
    (0..len.div_ceil(4) as u32).flat_map(word).take(len).collect()
}

/// Reads; returns the error and the data.
fn read(client: &mut Client, offset: u64, len: u64) -> (u32, Vec<u8>) {
    client.ask(Nbd::Read, offset, len);
    let (_, error, data) = client.answer().unwrap();
    (error, data)
}

/// A read that must have the right data.
fn reads_right(client: &mut Client, object: &[u8], offset: u64, len: u64) {
    let (error, data) = read(client, offset, len);
    assert_eq!(error, 0, "{offset}");
    assert!(data == object[offset as usize..(offset + len) as usize], "wrong data at {offset}");
}

fn refused(device: &str) -> String {
    let out = udm(&["serve", "--unix", "-", "--cores", "0", "--device", device]).output().unwrap();
    assert_eq!(out.status.code(), Some(1));
    let error = text(&out.stderr);
    assert_eq!(error.lines().filter(|line| line.contains("udm: ")).count(), 1, "{error}");
    error
}

#[test]
fn an_object_is_a_read_only_device() {
    let object = content(3 * MIB + 512, 1);
    let web = WebServer::start(object.clone());
    let server = Server::start_with(&[&format!("d={}", web.uri(""))], &["--cores", "0,1"]);
    let mut client = Client::connect(&server.nbd, "d");
    for (offset, len) in [(0, 512), (65_024, 1024), (3 << 20, 512), (1 << 20, 2 << 20), (512, 130_560)] {
        reads_right(&mut client, &object, offset, len);
    }
    assert_eq!(client.one(Nbd::Write, 0, 512), 1, "EPERM");
    let requests = web.take_requests();
    assert!(requests.iter().skip(1).all(|seen| seen.if_match.as_deref() == Some("\"one\"")));
    assert!(requests.iter().all(|seen| seen.path == "/images/disk%20one.img"), "{requests:?}");
    if has("nbdcopy") {
        let got = server.folder.path().join("got");
        let uri = format!("nbd+unix:///d?socket={}", server.nbd.display());
        assert!(Command::new("nbdcopy").arg(uri).arg(&got).status().unwrap().success());
        assert!(fs::read(got).unwrap() == object, "nbdcopy got other data");
    }
    assert!(web.most_at_once() <= 16, "{} requests at a time", web.most_at_once());
}

/// Adjacent reads are one request, and a stream is read ahead.
#[test]
fn ranges_are_joined_and_read_ahead() {
    let object = content(8 * MIB, 2);
    let web = WebServer::start(object.clone());
    let server = Server::start(&[&format!("d={}", web.uri(""))]);
    let mut client = Client::connect(&server.nbd, "d");
    web.set_delay(Duration::from_millis(20));
    web.take_requests();
    // 64 reads in flight of one MiB together.
    for n in 0..64 {
        client.ask(Nbd::Read, n * 16_384, 16_384);
    }
    (0..64).for_each(|_| assert_eq!(client.answer().unwrap().1, 0));
    let requests = web.take_requests().len();
    assert!(requests <= 8, "{requests} requests for 1 MiB");
    // One read after the other: 4 MiB in 4 KiB.
    for n in 0..1024 {
        reads_right(&mut client, &object, (4 << 20) + n * 4096, 4096);
    }
    let requests = web.take_requests();
    assert!(requests.len() <= 12, "{} requests for 1024 reads", requests.len());
    // Reads far from each other read nothing ahead.
    for n in [3, 1, 2] {
        reads_right(&mut client, &object, n << 20, 512);
    }
    let requests = web.take_requests();
    assert!(requests.iter().all(|seen| seen.range.1 - seen.range.0 == 65_536), "{requests:?}");
}

#[test]
fn what_is_wrong_with_a_server_is_said_when_a_table_is_loaded() {
    for (lie, why) in [
        (Lie::WholeObject, "the server ignores ranges, which udm needs (answer 200 to a range)"),
        (Lie::NoEtag, "the server sends no ETag, so a change would not be noticed"),
        (Lie::WeakEtag, "the server has only a weak ETag"),
        (Lie::Status(403), "the server answers 403 Forbidden: check the credentials and permissions"),
        (Lie::Status(404), "the server answers 404 Not Found: there is no such object"),
        (Lie::Status(503), "the server answers 503 Service Unavailable, for 500ms"),
        (Lie::Stall, "no answer, for 500ms"),
        (
            Lie::Redirect,
            "the server answers 302 Found to \"http://elsewhere/x\": name the object by that URL",
        ),
    ] {
        let web = WebServer::start(content(MIB, 3));
        web.lie(Some(lie));
        let error = refused(&format!("d={}", web.uri("?deadline=500ms")));
        assert!(error.contains(why), "{lie:?}: {error}");
        assert!(!error.contains("secret"), "{error}");
    }
    let empty = WebServer::start(Vec::new());
    assert!(
        refused(&format!("d={}", empty.uri(""))).contains("416 Range Not Satisfiable: the object is empty")
    );
    // Nothing listens there.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let error = refused(&format!("d=http://127.0.0.1:{port}/x?deadline=300ms"));
    assert!(error.contains("no answer: \"Connection refused"), "{error}");
}

/// A wrong answer is an error, and the right one later is data. No lie reaches a reader.
#[test]
fn lies_are_errors_and_never_data() {
    let object = content(2 * MIB, 4);
    for lie in [
        Lie::ShortBody,
        Lie::CutBody,
        Lie::LongBody,
        Lie::WrongRange,
        Lie::WholeObject,
        Lie::Status(403),
        Lie::Status(404),
        Lie::Status(429),
        Lie::Status(503),
        Lie::Stall,
        Lie::StallInBody,
        Lie::NoEtag,
        Lie::Close,
    ] {
        let web = WebServer::start(object.clone());
        let server = Server::start(&[&format!("d={}", web.uri("?deadline=600ms"))]);
        let mut client = Client::connect(&server.nbd, "d");
        reads_right(&mut client, &object, 0, 4096);
        web.lie(Some(lie));
        let begin = Instant::now();
        let (error, _) = read(&mut client, MIB as u64, 4096);
        assert!(error != 0, "{lie:?} was accepted");
        assert!(begin.elapsed() < Duration::from_secs(3), "{lie:?} took {:?}", begin.elapsed());
        web.lie(None);
        reads_right(&mut client, &object, MIB as u64, 4096);
        let log = until("two lines of log", || {
            let log = server.log();
            (log.contains("reads fail: ") && log.contains("reads succeed again")).then_some(log)
        });
        assert_eq!(log.lines().filter(|line| line.contains("reads ")).count(), 2, "{lie:?}: {log}");
    }
}

/// Once the object has changed, all reads of new blocks fail, even if the server shows the old one
/// again.
#[test]
fn a_changed_object_is_never_mixed() {
    for lie in [None, Some(Lie::OtherEtag), Some(Lie::OtherLength)] {
        let object = content(2 * MIB, 5);
        let web = WebServer::start(object.clone());
        let server = Server::start(&[&format!("d={}", web.uri("?deadline=600ms"))]);
        let mut client = Client::connect(&server.nbd, "d");
        reads_right(&mut client, &object, 0, 4096);
        match lie {
            None => web.set_object(content(2 * MIB, 6), "\"two\""),
            lie => web.lie(lie),
        }
        assert!(read(&mut client, MIB as u64, 4096).0 != 0, "{lie:?}");
        web.lie(None);
        web.set_object(object, "\"one\"");
        assert!(read(&mut client, MIB as u64, 4096).0 != 0, "{lie:?}: it may have changed in between");
        let log = until("a line of log", || Some(server.log()).filter(|log| log.contains("reads fail")));
        assert!(log.contains("the object has changed"), "{log}");
        assert_eq!(log.matches("reads fail").count(), 1, "{log}");
    }
}

/// A server that is gone for less than the deadline is waited for.
#[test]
fn a_server_that_comes_back_is_waited_for() {
    let object = content(2 * MIB, 7);
    let web = WebServer::start(object.clone());
    let server = Server::start(&[&format!("d={}", web.uri("?deadline=30s"))]);
    let mut client = Client::connect(&server.nbd, "d");
    web.set_gone(true);
    client.ask(Nbd::Read, 0, 65_536);
    until("the line of log", || server.log().contains("reads fail").then_some(()));
    web.set_gone(false);
    let (_, error, data) = client.answer().unwrap();
    assert!(error == 0 && data == object[..65_536]);
    until("the other line", || server.log().contains("reads succeed again, after ").then_some(()));
    // A rate limit that ends soon is not logged.
    web.lie(Some(Lie::Status(429)));
    client.ask(Nbd::Read, MIB as u64, 512);
    std::thread::sleep(Duration::from_millis(200));
    web.lie(None);
    assert_eq!(client.answer().unwrap().1, 0);
    assert_eq!(server.log().lines().filter(|line| line.contains("reads ")).count(), 2, "{}", server.log());
}

/// Two mirrors as paths: a path that is lost fails, and the other one serves.
#[test]
fn a_mirror_takes_over() {
    let object = content(2 * MIB, 8);
    let [one, other] = [(); 2].map(|()| WebServer::start(object.clone()));
    let uris = [&one, &other].map(|web| web.uri("?deadline=500ms"));
    let table =
        format!("m=0 4096 multipath 0 0 2 1 round-robin 0 1 0 {} round-robin 0 1 0 {}", uris[0], uris[1]);
    let server = Server::start(&[&table]);
    let mut client = Client::connect(&server.nbd, "m");
    reads_right(&mut client, &object, 0, 512);
    assert!(one.take_requests().len() > 1 && other.take_requests().len() == 1);
    one.set_gone(true);
    for n in 1..16 {
        reads_right(&mut client, &object, n * 131_072, 4096);
    }
    assert!(server.says(&["status", "m"]).contains(" F "), "{}", server.says(&["status", "m"]));
    // A mirror with another object is a failed path too.
    one.set_gone(false);
    one.set_object(content(2 * MIB, 9), "\"two\"");
    server.says(&["message", "m", "0", "reinstate_path", &uris[0]]);
    for n in 1..16 {
        reads_right(&mut client, &object, n * 131_072 + 65_536, 4096);
    }
}

/// A qcow2 image, half of it compressed, behind a URL.
#[test]
fn a_qcow2_image_is_read_from_a_server() {
    if !["qemu-img", "qemu-io"].iter().all(|program| has(program)) {
        return;
    }
    let folder = TempDir::new().unwrap();
    let run = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let out = Command::new(words[0]).args(&words[1..]).current_dir(folder.path()).output().unwrap();
        assert!(out.status.success(), "{line}: {}", text(&out.stderr));
    };
    // Words that compress, with gaps.
    let mut disk: Vec<u8> = (0..4 * MIB).map(|n| (n / 99) as u8).collect();
    disk[MIB..2 * MIB].fill(0);
    fs::write(folder.path().join("raw"), &disk).unwrap();
    run("qemu-img convert -c -f raw -O qcow2 raw disk.qcow2");
    let out = Command::new("qemu-io")
        .args(["-f", "qcow2", "-c", "write -P 7 2M 300k", "disk.qcow2"])
        .current_dir(folder.path())
        .output()
        .unwrap();
    assert!(out.status.success());
    disk[2 * MIB..2 * MIB + 300 * 1024].fill(7);
    let web = WebServer::start(fs::read(folder.path().join("disk.qcow2")).unwrap());
    let server = Server::start(&[&format!("d={}", web.uri("?format=qcow2&deadline=600ms"))]);
    let mut client = Client::connect(&server.nbd, "d");
    for n in 0..64 {
        reads_right(&mut client, &disk, n * 65_536 + 512, 64_512);
    }
    reads_right(&mut client, &disk, 0, 4 << 20);
    // A server that is gone is an error, for compressed clusters too.
    let server = Server::start(&[&format!("d={}", web.uri("?format=qcow2&deadline=600ms"))]);
    let mut client = Client::connect(&server.nbd, "d");
    web.set_gone(true);
    assert!(read(&mut client, 0, 512).0 != 0 && read(&mut client, 2 << 20, 512).0 != 0);
    // Other files are not looked for.
    run("qemu-img create -q -f qcow2 -F qcow2 -b disk.qcow2 over.qcow2");
    let web = WebServer::start(fs::read(folder.path().join("over.qcow2")).unwrap());
    let error = refused(&format!("d={}", web.uri("?format=qcow2")));
    assert!(error.contains("an image that needs other files, which only an image in a file may"), "{error}");
    let web = WebServer::start(disk);
    let error = refused(&format!("d={}", web.uri("?format=qcow2")));
    assert!(error.contains("not a qcow2 image (format=raw serves"), "{error}");
}

/// Python's server has no ranges.
#[test]
fn a_server_without_ranges_is_refused() {
    if !has("python3") {
        return;
    }
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("disk.img"), content(MIB, 10)).unwrap();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut python = Command::new("python3");
    python.args(["-m", "http.server", "--bind", "127.0.0.1", &port.to_string()]).current_dir(folder.path());
    python.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    let _python = support::ChildGuard(python.spawn().unwrap());
    until("python's server", || std::net::TcpStream::connect(("127.0.0.1", port)).ok());
    let error = refused(&format!("d=http://127.0.0.1:{port}/disk.img"));
    assert!(error.contains("the server ignores ranges"), "{error}");
}

/// S3 with a server of its protocol: the request is signed, and no secret is shown.
#[test]
fn a_bucket_is_read_with_the_credentials_of_the_environment() {
    let object = content(MIB, 11);
    let web = WebServer::start(object.clone());
    let mut command = udm(&["serve"]);
    for (name, value) in BTreeMap::from([
        ("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE"),
        ("AWS_SECRET_ACCESS_KEY", "very-secret"),
        ("AWS_REGION", "eu-central-1"),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_ENDPOINT", &format!("http://127.0.0.1:{}", web.port())),
    ]) {
        command.env(name, value);
    }
    let server = Server::start_by(command, &["d=s3://images/vm/disk.img"], &[]);
    let mut client = Client::connect(&server.nbd, "d");
    reads_right(&mut client, &object, 4096, 8192);
    let requests = web.take_requests();
    assert!(requests.iter().all(|seen| seen.path == "/images/vm/disk.img"), "{requests:?}");
    let is_signed = |key: &str, requests: &[support::web_server::SeenRequest]| {
        let start = format!("AWS4-HMAC-SHA256 Credential={key}/");
        requests.iter().all(|seen| seen.authorization.as_ref().is_some_and(|sent| sent.starts_with(&start)))
    };
    assert!(is_signed("AKIAEXAMPLE", &requests), "{requests:?}");
    web.lie(Some(Lie::Status(403)));
    assert!(read(&mut client, 524_288, 512).0 != 0);
    until("the line of log", || server.log().contains("reads fail").then_some(()));
    let shown = server.log() + &server.says(&["status"]) + &server.says(&["table", "d"]);
    assert!(!shown.contains("very-secret") && !shown.contains("AKIAEXAMPLE"), "{shown}");
    // The file of the AWS tools. It is below the folder that a restricted server may read.
    web.lie(None);
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("credentials");
    fs::write(&file, "[ci]\naws_access_key_id = FILEKEY\naws_secret_access_key = from-file\n").unwrap();
    let mut command = udm(&["serve"]);
    command.env("AWS_SHARED_CREDENTIALS_FILE", &file).env("AWS_PROFILE", "ci");
    command.env("AWS_REGION", "eu-central-1").env("AWS_ALLOW_HTTP", "true");
    command.env("AWS_ENDPOINT", format!("http://127.0.0.1:{}", web.port()));
    web.take_requests();
    let server = Server::start_by(command, &["d=s3://images/vm/disk.img"], &[]);
    reads_right(&mut Client::connect(&server.nbd, "d"), &object, 0, 4096);
    let requests = web.take_requests();
    assert!(!requests.is_empty() && is_signed("FILEKEY", &requests), "{requests:?}");
}

/// Google's and Azure's stores with servers of their protocols.
#[test]
fn buckets_of_google_and_azure_are_read() {
    let object = content(MIB, 12);
    let web = WebServer::start(object.clone());
    let endpoint = format!("http://127.0.0.1:{}", web.port());
    let google = [("GOOGLE_BASE_URL", endpoint.as_str()), ("GOOGLE_SKIP_SIGNATURE", "true")];
    let azure = [
        ("AZURE_STORAGE_ENDPOINT", endpoint.as_str()),
        ("AZURE_ALLOW_HTTP", "true"),
        ("AZURE_STORAGE_ACCOUNT_NAME", "account"),
        ("AZURE_STORAGE_ACCOUNT_KEY", "dmVyeS1zZWNyZXQ="),
    ];
    // Google's client encodes the whole key.
    for (device, path, environment) in [
        ("d=gs://images/vm/disk.img", "/images/vm%2Fdisk%2Eimg", &google[..]),
        ("d=az://images/vm/disk.img", "/images/vm/disk.img", &azure),
    ] {
        let mut command = udm(&["serve"]);
        command.envs(environment.iter().copied());
        let server = Server::start_by(command, &[device], &[]);
        let mut client = Client::connect(&server.nbd, "d");
        reads_right(&mut client, &object, 4096, 8192);
        let requests = web.take_requests();
        assert!(requests.len() >= 2, "{device}: {requests:?}");
        assert!(requests.iter().all(|seen| seen.path == path), "{device}: {requests:?}");
        let matched = requests.iter().skip(1).all(|seen| seen.if_match.as_deref() == Some("\"one\""));
        assert!(matched, "{device}: {requests:?}");
        let signed = |seen: &support::web_server::SeenRequest| {
            seen.authorization.as_ref().is_some_and(|sent| sent.starts_with("SharedKey account:"))
        };
        assert_eq!(requests.iter().all(signed), device.contains("az:"), "{device}: {requests:?}");
        // A change and a refusal are told as for other servers.
        web.lie(Some(Lie::Status(404)));
        assert!(read(&mut client, 524_288, 512).0 != 0);
        web.lie(None);
        reads_right(&mut client, &object, 262_144, 512);
        web.set_object(content(MIB, 13), "\"two\"");
        assert!(read(&mut client, 786_432, 512).0 != 0);
        let log = until("the line of log", || {
            Some(server.log()).filter(|log| log.contains("404 Not Found") && log.contains("has changed"))
        });
        assert!(!log.contains("dmVyeS1zZWNyZXQ"), "{log}");
        web.set_object(object.clone(), "\"one\"");
        web.take_requests();
    }
}

/// The user names the version.
#[test]
fn a_pinned_version_is_read_or_none() {
    let object = content(MIB, 14);
    let web = WebServer::start(object.clone());
    let server = Server::start(&[&format!("d={}", web.uri("?etag=one"))]);
    let mut client = Client::connect(&server.nbd, "d");
    reads_right(&mut client, &object, 4096, 8192);
    let requests = web.take_requests();
    assert!(requests.iter().all(|seen| seen.if_match.as_deref() == Some("\"one\"")), "{requests:?}");
    let error = refused(&format!("d={}", web.uri("?etag=two")));
    assert!(error.contains("the version with etag=\"two\" is not there (412)"), "{error}");
    // A server that ignores `If-Match`.
    web.lie(Some(Lie::OtherEtag));
    let error = refused(&format!("d={}", web.uri("?etag=one")));
    assert!(error.contains("the version with etag=\"one\" is not there, but "), "{error}");
}

/// A request that is slow gets a second one, and the read does not wait for the first.
#[test]
fn a_slow_request_is_hedged() {
    let object = content(8 * MIB, 15);
    let web = WebServer::start(object.clone());
    let server = Server::start(&[&format!("d={}", web.uri("?hedge=500ms&deadline=none"))]);
    let mut client = Client::connect(&server.nbd, "d");
    // Twenty requests earn a hedge, and a slow machine may use some. Backwards, so nothing is read
    // ahead.
    for block in (8..128).rev() {
        reads_right(&mut client, &object, block * 65_536, 512);
    }
    web.take_requests();
    web.hold_next();
    let begin = Instant::now();
    reads_right(&mut client, &object, 0, 512);
    // Without a hedge, another request is sent after 10 s of silence.
    assert!(begin.elapsed() < Duration::from_secs(8), "it took {:?}", begin.elapsed());
    let requests = web.take_requests();
    assert_eq!(requests.len(), 2, "{requests:?}");
    assert_eq!(requests[0].range, requests[1].range);
    web.release();
}
