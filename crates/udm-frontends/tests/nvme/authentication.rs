//! Hosts that must prove that they know a secret.

use super::host::{Answer, Connection, command, connect_command, connect_data, identify, property_set};
use super::{HOST, SIZE, SUBSYSTEM, TargetFixture, options};
use crate::disk::{CompletionOrder, TestDisk};
use std::time::Duration;
use udm_frontends::nvme::{NvmeHostSecrets, NvmeSecrets};
use udm_wire::nvme::{
    AuthenticationCommand, AuthenticationFailure, AuthenticationMessage, CONNECT_AUTHENTICATION_REQUIRED,
    DISCOVERY_NQN, DhchapHash, DhchapNegotiation, DhchapReply, DhchapSecret, DhchapTranscript, NvmeStatus,
};

const SECRET: &str = "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:";
const CONTROLLER_SECRET: &str = "DHHC-1:01:vYcm5QemILkz5zSIeZidb4nPGcxongu2l/OaWMRgM9iIk/2A:";

fn secret(text: &str) -> DhchapSecret {
    DhchapSecret::parse(text).unwrap()
}

/// A target with secrets for one host, which has `handshake_max` to authenticate itself.
fn target(controller: Option<&str>, handshake_max: Duration) -> TargetFixture {
    let secrets = NvmeHostSecrets { host: secret(SECRET), controller: controller.map(secret) };
    let mut options = options();
    options.secrets = NvmeSecrets::from([(HOST.to_owned(), secrets)]);
    options.limits.handshake_max = handshake_max;
    TargetFixture::with(TestDisk::new(SIZE, CompletionOrder::AtOnce), options)
}

/// Connects a queue that needs an authentication. Returns it and the number of its controller.
fn connect(target: &TargetFixture, queue: u16, controller: u16) -> (Connection, u16) {
    let mut connection = target.connection();
    connection.initialize(false);
    let completion = connection.connect(&connect_command(queue), &connect_data(controller));
    assert!(completion.status.is_ok(), "{completion:?}");
    assert_eq!(completion.result & CONNECT_AUTHENTICATION_REQUIRED, CONNECT_AUTHENTICATION_REQUIRED);
    (connection, completion.result as u16)
}

fn send(connection: &mut Connection, message: &AuthenticationMessage) {
    let bytes = message.encode(5);
    connection.command(AuthenticationCommand::encode_send(0, bytes.len() as u32), &bytes);
    assert!(connection.answer().status().is_ok());
}

fn receive(connection: &mut Connection) -> AuthenticationMessage {
    let bytes = connection.read(AuthenticationCommand::encode_receive(0, 512)).unwrap();
    let (transaction, message) = AuthenticationMessage::decode(&bytes).unwrap();
    assert_eq!(transaction, 5);
    message
}

fn negotiation(hash: DhchapHash) -> AuthenticationMessage {
    AuthenticationMessage::Negotiate(DhchapNegotiation {
        no_concatenation: true,
        has_dhchap: true,
        hashes: vec![hash],
        has_null_group: true,
        has_ffdhe2048: false,
    })
}

/// Authenticates a queue with this secret up to the answer, which is returned.
fn authenticate(
    connection: &mut Connection,
    hash: DhchapHash,
    secret: &DhchapSecret,
    own_challenge: Option<(u32, Vec<u8>)>,
) -> AuthenticationMessage {
    send(connection, &negotiation(hash));
    let AuthenticationMessage::Challenge(asked) = receive(connection) else { panic!("expected a challenge") };
    assert_eq!((asked.hash, asked.challenge.len()), (hash, hash.size()));
    let transcript = DhchapTranscript {
        hash,
        transaction: 5,
        sequence: asked.sequence,
        challenge: &asked.challenge,
        host: HOST,
        subsystem: SUBSYSTEM,
    };
    let reply = DhchapReply { response: transcript.host_response(secret), challenge: own_challenge };
    send(connection, &AuthenticationMessage::Reply(reply));
    receive(connection)
}

/// A queue executes nothing before its host is authenticated; each queue needs it, with any hash.
#[test]
fn a_host_authenticates_each_queue() {
    let target = target(None, Duration::from_secs(30));
    for hash in [DhchapHash::Sha256, DhchapHash::Sha384, DhchapHash::Sha512] {
        let (mut admin, controller) = connect(&target, 0, 0xffff);
        let required = NvmeStatus::AUTHENTICATION_REQUIRED.permanent();
        assert_eq!(admin.ask(property_set(0x14, 0x0046_0001)).status, required);
        assert_eq!(admin.read(identify(1, 0)), Err(required));
        let answer = authenticate(&mut admin, hash, &secret(SECRET), None);
        assert_eq!(answer, AuthenticationMessage::Success1(hash, None));
        assert!(admin.ask(property_set(0x14, 0x0046_0001)).status.is_ok());
        assert!(admin.read(identify(1, 0)).is_ok());
        let (mut queue, _) = connect(&target, 1, controller);
        assert_eq!(queue.ask(command(0x00, 1, &[])).status, required);
        authenticate(&mut queue, hash, &secret(SECRET), None);
        assert!(queue.ask(command(0x00, 1, &[])).status.is_ok());
        // It may do it again while it uses the queue.
        let answer = authenticate(&mut queue, hash, &secret(SECRET), None);
        assert_eq!(answer, AuthenticationMessage::Success1(hash, None));
        assert!(queue.ask(command(0x00, 1, &[])).status.is_ok());
    }
    target.end();
}

/// The controller proves itself too, and the queue works after the host has confirmed it.
#[test]
fn the_controller_authenticates_itself() {
    let target = target(Some(CONTROLLER_SECRET), Duration::from_secs(30));
    let (mut admin, _) = connect(&target, 0, 0xffff);
    let (hash, challenge) = (DhchapHash::Sha256, vec![9; 32]);
    let answer = authenticate(&mut admin, hash, &secret(SECRET), Some((77, challenge.clone())));
    let transcript = DhchapTranscript {
        hash,
        transaction: 5,
        sequence: 77,
        challenge: &challenge,
        host: HOST,
        subsystem: SUBSYSTEM,
    };
    let response = transcript.controller_response(&secret(CONTROLLER_SECRET));
    assert_eq!(answer, AuthenticationMessage::Success1(hash, Some(response)));
    let required = NvmeStatus::AUTHENTICATION_REQUIRED.permanent();
    assert_eq!(admin.read(identify(1, 0)), Err(required), "not confirmed");
    send(&mut admin, &AuthenticationMessage::Success2);
    assert!(admin.ask(property_set(0x14, 0x0046_0001)).status.is_ok());
    drop(admin);
    target.end();
}

/// Wrong hosts get a reason, and their connection is closed.
#[test]
fn hosts_that_do_not_know_the_secret() {
    let target = target(None, Duration::from_secs(30));
    let failed = |failure| AuthenticationMessage::Failure1(failure);
    let hash = DhchapHash::Sha256;
    let (mut admin, _) = connect(&target, 0, 0xffff);
    let answer = authenticate(&mut admin, hash, &secret(CONTROLLER_SECRET), None);
    assert_eq!((answer, admin.answer()), (failed(AuthenticationFailure::Failed), Answer::End));
    let (mut admin, _) = connect(&target, 0, 0xffff);
    let answer = authenticate(&mut admin, hash, &secret(SECRET), Some((1, vec![1; 32])));
    assert_eq!(
        (answer, admin.answer()),
        (failed(AuthenticationFailure::Failed), Answer::End),
        "no own secret"
    );
    let proposal = |no_concatenation, has_null_group, hashes: &[DhchapHash]| {
        let hashes = hashes.to_vec();
        AuthenticationMessage::Negotiate(DhchapNegotiation {
            no_concatenation,
            has_dhchap: true,
            hashes,
            has_null_group,
            has_ffdhe2048: false,
        })
    };
    let empty = DhchapReply { response: vec![0; 32], challenge: None };
    for (message, failure) in [
        (proposal(false, true, &[hash]), AuthenticationFailure::ConcatenationMismatch),
        (proposal(true, false, &[hash]), AuthenticationFailure::GroupNotUsable),
        (proposal(true, true, &[]), AuthenticationFailure::HashNotUsable),
        (AuthenticationMessage::Reply(empty.clone()), AuthenticationFailure::IncorrectMessage),
        (AuthenticationMessage::Success2, AuthenticationFailure::IncorrectMessage),
    ] {
        let (mut admin, _) = connect(&target, 0, 0xffff);
        send(&mut admin, &message);
        let bytes = admin.read(AuthenticationCommand::encode_receive(0, 512)).unwrap();
        assert_eq!(AuthenticationMessage::decode(&bytes).unwrap().1, failed(failure));
        assert_eq!(admin.answer(), Answer::End);
    }
    // A reply before the challenge was read, and noise.
    let (mut admin, _) = connect(&target, 0, 0xffff);
    send(&mut admin, &negotiation(hash));
    send(&mut admin, &AuthenticationMessage::Reply(empty));
    assert_eq!(receive(&mut admin), failed(AuthenticationFailure::IncorrectMessage));
    let (mut admin, _) = connect(&target, 0, 0xffff);
    admin.command(AuthenticationCommand::encode_send(0, 3), &[1, 2, 3, 0]);
    let _ = admin.answer();
    admin.command(AuthenticationCommand::encode_send(0, 4), &[1, 2, 3, 0]);
    assert!(admin.answer().status().is_ok());
    assert!(admin.read(AuthenticationCommand::encode_receive(0, 512)).is_ok());
    assert_eq!(admin.answer(), Answer::End);
    // A host without a secret does not connect; the discovery subsystem needs none.
    let mut other = target.connection();
    other.initialize(false);
    let mut data = connect_data(0xffff);
    data.host = "nqn.2014-08.org.example:other".into();
    let invalid_host = NvmeStatus::CONNECT_INVALID_HOST.permanent();
    assert_eq!(other.connect(&connect_command(0), &data).status, invalid_host);
    let mut other = target.connection();
    other.initialize(false);
    data.subsystem = DISCOVERY_NQN.into();
    let completion = other.connect(&connect_command(0), &data);
    assert!(completion.status.is_ok() && completion.result & CONNECT_AUTHENTICATION_REQUIRED == 0);
    drop((admin, other));
    target.end();
}

/// A host that does not authenticate itself in time is disconnected.
#[test]
fn an_authentication_has_a_time_limit() {
    let target = target(None, Duration::from_millis(300));
    let (mut admin, _) = connect(&target, 0, 0xffff);
    assert_eq!(admin.answer(), Answer::End);
    let (mut admin, _) = connect(&target, 0, 0xffff);
    authenticate(&mut admin, DhchapHash::Sha256, &secret(SECRET), None);
    std::thread::sleep(Duration::from_millis(500));
    assert!(admin.ask(property_set(0x14, 0x0046_0001)).status.is_ok());
    drop(admin);
    target.end();
}
