//! Both sides of a session, connected in memory, with the certificates of `tests/data`.

use std::fs;
use std::path::PathBuf;
use udm_tls::{TlsClientConfig, TlsServerConfig, TlsSession, TlsSessionError};

fn data(folder: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(folder)
}

fn server(folder: &str, verifies_peer: bool) -> TlsSession {
    TlsServerConfig::load(&data(folder), verifies_peer).unwrap().session().unwrap()
}

fn client(folder: &str, name: &str) -> TlsSession {
    TlsClientConfig::load(&data(folder), name).unwrap().session().unwrap()
}

/// Passes all output of `from` on, `step` bytes at a time, and returns the plaintext that arrives.
fn pass(from: &mut TlsSession, to: &mut TlsSession, step: usize) -> Result<Vec<u8>, TlsSessionError> {
    let (mut bytes, mut plaintext) = (Vec::new(), Vec::new());
    from.take_output(&mut bytes);
    for mut part in bytes.chunks(step) {
        while !part.is_empty() {
            to.receive(&mut part)?;
            let mut room = [0; 1000];
            while to.has_plaintext() {
                let n = to.read(&mut room);
                assert!(n > 0);
                plaintext.extend_from_slice(&room[..n]);
            }
        }
    }
    Ok(plaintext)
}

/// Performs the handshake. Both sides have ended it, or the error of one is returned.
fn shake(client: &mut TlsSession, server: &mut TlsSession, step: usize) -> Result<(), TlsSessionError> {
    for _ in 0..4 {
        // A server that refuses sends an alert, which the client reports next.
        let refused = pass(client, server, step).err();
        pass(server, client, step)?;
        if let Some(refused) = refused {
            return Err(refused);
        }
    }
    assert!(!client.is_handshaking() && !server.is_handshaking());
    Ok(())
}

#[test]
fn data_passes_both_ways_however_it_is_cut() {
    let long: Vec<u8> = (0..100_000u32).map(|i| (i * 7 % 251) as u8).collect();
    for step in [1, 5, 1000, 1 << 20] {
        let (mut client, mut server) = (client("", "localhost"), server("", false));
        shake(&mut client, &mut server, step).unwrap();
        client.write(b"request");
        assert_eq!(pass(&mut client, &mut server, step).unwrap(), b"request");
        server.write(&long);
        assert!(server.has_output());
        assert_eq!(pass(&mut server, &mut client, step).unwrap(), long);
        server.close();
        assert_eq!(pass(&mut server, &mut client, step).unwrap(), b"");
        assert!(server.peer_names().is_empty(), "the client was not asked for a certificate");
    }
}

#[test]
fn a_client_is_known_by_the_names_of_its_certificate() {
    let (mut client, mut server) = (client("", "::1"), server("", true));
    shake(&mut client, &mut server, 1 << 20).unwrap();
    let names = ["alice", "alice.example", "alice@example.org", "spiffe://example.org/alice"];
    assert_eq!(server.peer_names(), names);
    assert_eq!(client.peer_names(), ["disks", "localhost", "disks.example", "127.0.0.1", "::1"]);
}

#[test]
fn peers_that_prove_nothing_are_refused() {
    let refused = |client: &mut TlsSession, server: &mut TlsSession| {
        shake(client, server, 1 << 20).unwrap_err().to_string()
    };
    let mut wrong_name = client("", "other.example");
    assert!(refused(&mut wrong_name, &mut server("", false)).contains("not valid for name"));
    let why = refused(&mut client("", "localhost"), &mut server("expired", false));
    assert!(why.contains("xpired"), "{why}");
    let why = refused(&mut client("", "localhost"), &mut server("stranger", false));
    assert!(why.contains("UnknownIssuer"), "{why}");
    // A client without a certificate, one of another authority, and a revoked one: the server
    // refuses, and the client is told.
    let why = refused(&mut client("renewed", "localhost"), &mut server("", true));
    assert!(why.contains("ertificate"), "{why}");
    let why = refused(&mut client("bob", "localhost"), &mut server("revoked", true));
    assert!(why.contains("evoked"), "{why}");
    shake(&mut client("bob", "localhost"), &mut server("", true), 1 << 20).unwrap();
}

#[test]
fn certificates_are_read_again() {
    let folder = tempfile::TempDir::new().unwrap();
    let copy = |from: &str| {
        for name in ["ca-cert.pem", "server-cert.pem", "server-key.pem"] {
            fs::copy(data(from).join(name), folder.path().join(name)).unwrap();
        }
    };
    copy("");
    let config = TlsServerConfig::load(folder.path(), false).unwrap();
    let name = || {
        let (mut client, mut server) = (client("", "localhost"), config.session().unwrap());
        shake(&mut client, &mut server, 1 << 20).unwrap();
        client.peer_names().remove(0)
    };
    assert_eq!(name(), "disks");
    copy("renewed");
    assert_eq!(name(), "disks", "not before they are asked for");
    config.reload().unwrap();
    assert_eq!(name(), "renewed");
    fs::write(folder.path().join("server-key.pem"), "nothing").unwrap();
    assert!(config.reload().unwrap_err().to_string().contains("server-key.pem"));
    assert_eq!(name(), "renewed", "the old ones stay in use");
}

#[test]
fn bad_files_are_named() {
    let folder = tempfile::TempDir::new().unwrap();
    let put = |name: &str, from: &str| fs::copy(data(from), folder.path().join(name)).unwrap();
    let server = |verifies_peer| TlsServerConfig::load(folder.path(), verifies_peer).unwrap_err().to_string();
    let client = |name| TlsClientConfig::load(folder.path(), name).unwrap_err().to_string();
    assert!(server(false).contains("server-cert.pem: No such file"));
    put("server-cert.pem", "server-cert.pem");
    assert!(server(false).contains("server-key.pem: No such file"));
    put("server-key.pem", "renewed/server-key.pem");
    assert!(server(false).contains("server-cert.pem and server-key.pem"), "{}", server(false));
    put("server-key.pem", "server-cert.pem");
    assert!(server(false).contains("server-key.pem: it has no such PEM section"), "{}", server(false));
    put("server-key.pem", "server-key.pem");
    assert!(server(true).contains("ca-cert.pem: No such file"));
    assert!(client("localhost").contains("ca-cert.pem: No such file"));
    put("ca-cert.pem", "server-key.pem");
    assert!(client("localhost").contains("ca-cert.pem: it has no certificate"), "{}", client("localhost"));
    put("ca-cert.pem", "ca-cert.pem");
    assert!(client("no host").contains("\"no host\" is no host name"));
    fs::write(folder.path().join("ca-crl.pem"), "").unwrap();
    assert!(server(true).contains("ca-crl.pem: it has no"), "{}", server(true));
    fs::remove_file(folder.path().join("ca-crl.pem")).unwrap();
    std::os::unix::fs::symlink("nowhere", folder.path().join("ca-crl.pem")).unwrap();
    assert!(server(true).contains("ca-crl.pem: No such file"), "{}", server(true));
    fs::remove_file(folder.path().join("ca-crl.pem")).unwrap();
    put("client-cert.pem", "client-cert.pem");
    assert!(client("localhost").contains("client-key.pem: No such file"));
    put("ca-crl.pem", "ca-cert.pem");
    put("client-key.pem", "client-key.pem");
    fs::write(folder.path().join("ca-crl.pem"), "-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n")
        .unwrap();
    assert!(!client("localhost").contains('\n'));
}

/// Bytes that are no TLS, or are changed on the way, end the session with an error.
#[test]
fn changed_bytes_end_the_session() {
    // Type and version of a record are the same for all, and not compared.
    for at in 3..600 {
        let (mut client, mut server) = (client("", "localhost"), server("", false));
        shake(&mut client, &mut server, 1 << 20).unwrap();
        client.write(&[7; 500]);
        let mut bytes = Vec::new();
        client.take_output(&mut bytes);
        if at < bytes.len() {
            bytes[at] ^= 1;
        }
        let mut room = [0; 600];
        let mut input = &bytes[..];
        let (result, read) = (server.receive(&mut input), server.read(&mut room));
        // A length that is changed makes the record incomplete or wrong.
        assert!(read == 0 || at >= bytes.len(), "byte {at}: {result:?}");
    }
    for seed in 0..500u32 {
        let mut server = server("", true);
        let noise: Vec<u8> =
            (0..300u32).map(|i| (seed.wrapping_mul(2_654_435_761) ^ (i * i * 31)) as u8).collect();
        let mut input = &noise[..];
        let _ = server.receive(&mut input);
        assert!(!server.has_plaintext() && server.is_handshaking());
    }
}
