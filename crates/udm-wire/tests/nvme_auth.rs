//! DH-HMAC-CHAP: known answers, and messages of Linux.

use udm_wire::nvme::{
    AuthenticationCommand, AuthenticationFailure, AuthenticationMessage, DataPointer, DhchapChallenge,
    DhchapHash, DhchapNegotiation, DhchapReply, DhchapSecret, DhchapSecretError, DhchapTranscript,
    FabricsCommand, verify_dhchap_response,
};

const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-555555555555";
const SUBSYSTEM: &str = "nqn.2026-11.org.example:disks";

/// Secrets that nvme-cli has made: the example of the specification, that of nvme-cli's manual, and
/// two of public test suites. For each hash, the first bytes of the responses of host and
/// controller, which Python's `hmac` has computed from the text of the specification.
const KNOWN: [(&str, [[&str; 2]; 3]); 4] = [
    (
        "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:",
        [
            ["ef466bfb631191679705881316ea87bc", "20f8a201ce5f633e779a8267d8fd3332"],
            ["bc5cc55f2fd68e09528fa6fa894ec9db", "3275749e99b0cfb5725e3ff18e746a9d"],
            ["d8beae95a39d62e041c981ce63a1d1da", "3ac1746348a8e536ce2341a6921e55be"],
        ],
    ),
    (
        "DHHC-1:02:d4gmzh5i0I3npDMWAmJX/nAvAw7ioKmS2w44ceutFeObYDFG/r6zOB3UW0FLzevsI7XDJg==:",
        [
            ["04be2d8d67c7b69972fe653c7702ad07", "8dad2105f1271e541b5fe18f042ec2cd"],
            ["1650107c40ab4e1612e53050e9d7e11e", "3bf35afa4c4503419a1e16c7b27a3f4c"],
            ["570d042f198f0e8efb53aef82ef6a4f4", "faf735eb29f51dcf862a7e5b4b870816"],
        ],
    ),
    (
        "DHHC-1:03:6EKZcEL86u4vzTE8sCETvskE3pLKE+qOorl9QxrRfLvfOEQ5GvqCzM41U8fFVAz1cs+T14PjSpd1J641rfeCC1x2VNg=:",
        [
            ["b34be97bb499f6e98d658e79fcbf4f37", "4baf265b9b10ad4466618e8d5e863afd"],
            ["67ac19e2451d82a9207bc9ea0b376f4e", "f77c916ee12ae611ef252b036ffbb253"],
            ["a2f8ab6ce4ba32bb7747fd461b5bb101", "182506dd8b5d8aec069ccdc621403bb6"],
        ],
    ),
    (
        "DHHC-1:01:vYcm5QemILkz5zSIeZidb4nPGcxongu2l/OaWMRgM9iIk/2A:",
        [
            ["e2edca7e8b56c7cca1b25f9cb3b2b1c4", "5e5850d6fb0e08da391ec5c59ecd250d"],
            ["a40781f104252544358fe970b53ee849", "1525a545b727237bb47f2c80619a7ac2"],
            ["ed665e63e520ba6d6367f89f6646784f", "ee8adf68cf83bdea4541453125fe4af0"],
        ],
    ),
];

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn known_answers() {
    for (text, responses) in KNOWN {
        let secret = DhchapSecret::parse(text).unwrap();
        for (hash, expected) in
            [DhchapHash::Sha256, DhchapHash::Sha384, DhchapHash::Sha512].into_iter().zip(responses)
        {
            let challenge: Vec<u8> = (0..hash.size() as u8).collect();
            let (transaction, sequence) = (0x55aa, 0x0102_0304);
            let (challenge, host, subsystem) = (&challenge[..], HOST, SUBSYSTEM);
            let transcript = DhchapTranscript { hash, transaction, sequence, challenge, host, subsystem };
            let [of_host, of_controller] =
                [transcript.host_response(&secret), transcript.controller_response(&secret)];
            assert_eq!((of_host.len(), of_controller.len()), (hash.size(), hash.size()));
            assert_eq!([&hex(&of_host)[..32], &hex(&of_controller)[..32]], expected, "{text} {hash:?}");
            assert!(verify_dhchap_response(&of_host, &of_host));
            assert!(!verify_dhchap_response(&of_host, &of_controller));
            assert!(!verify_dhchap_response(&of_host, &of_host[1..]));
            assert!(!verify_dhchap_response(&of_host, &[]));
        }
    }
}

/// Damaged secrets are refused, and no error and no debug output has a part of the secret.
#[test]
fn wrong_secrets() {
    let good = KNOWN[0].0;
    assert!(DhchapSecret::parse(&format!("{good}\n")).is_ok());
    assert_eq!(format!("{:?}", DhchapSecret::parse(good).unwrap()), "DhchapSecret(32 bytes)");
    let digits = &good[10..];
    for (text, error) in [
        (String::new(), DhchapSecretError::Form),
        (format!("DHHC-2:00:{digits}"), DhchapSecretError::Form),
        (format!("DHHC-1:04:{digits}"), DhchapSecretError::Form),
        (good.trim_end_matches(':').to_owned(), DhchapSecretError::Form),
        (good.replace('6', "!"), DhchapSecretError::Form),
        (good.replace("ia6z", "ia6y"), DhchapSecretError::Checksum),
        ("DHHC-1:00:AAAAAAAAAAAAAAAAAAAAAAAAAAA=:".to_owned(), DhchapSecretError::Length(16)),
        ("DHHC-1:00::".to_owned(), DhchapSecretError::Length(0)),
        ("DHHC-1:00:AAAA:".to_owned(), DhchapSecretError::Length(0)),
    ] {
        assert_eq!(DhchapSecret::parse(&text), Err(error), "{text}");
        assert!(!error.to_string().contains(&digits[..8]));
    }
}

#[test]
fn messages() {
    let challenge = |hash: DhchapHash| (0..hash.size() as u8).collect::<Vec<_>>();
    let hash = DhchapHash::Sha384;
    for message in [
        AuthenticationMessage::Negotiate(DhchapNegotiation {
            no_concatenation: true,
            has_dhchap: true,
            hashes: vec![DhchapHash::Sha512, DhchapHash::Sha256],
            has_null_group: true,
            has_ffdhe2048: false,
        }),
        AuthenticationMessage::Challenge(DhchapChallenge { hash, sequence: 7, challenge: challenge(hash) }),
        AuthenticationMessage::Reply(DhchapReply { response: challenge(hash), challenge: None }),
        AuthenticationMessage::Reply(DhchapReply {
            response: challenge(hash),
            challenge: Some((9, vec![5; 48])),
        }),
        AuthenticationMessage::Success1(hash, None),
        AuthenticationMessage::Success1(hash, Some(challenge(hash))),
        AuthenticationMessage::Success2,
        AuthenticationMessage::Failure1(AuthenticationFailure::HashNotUsable),
        AuthenticationMessage::Failure2(AuthenticationFailure::Failed),
    ] {
        let bytes = message.encode(0x1234);
        assert_eq!(bytes[4..6], [0x34, 0x12]);
        let is_failure = |id| bytes[..2] == [0, id];
        assert_eq!(is_failure(0xf1), matches!(message, AuthenticationMessage::Failure1(_)));
        assert_eq!(is_failure(0xf0), matches!(message, AuthenticationMessage::Failure2(_)));
        for len in 0..bytes.len() {
            if let Ok((_, other)) = AuthenticationMessage::decode(&bytes[..len]) {
                // Only fields that say nothing are missing.
                assert_eq!(other, message, "{len} bytes of {message:?}");
            }
        }
        assert_eq!(AuthenticationMessage::decode(&bytes), Ok((0x1234, message)));
    }
    for wrong in [&[1, 9, 0, 0, 0, 0, 0, 0][..], &[1, 1, 0, 0, 0, 0, 32, 0, 1, 1, 0, 0, 1, 0, 0, 0], &[0; 7]]
    {
        assert!(AuthenticationMessage::decode(wrong).is_err());
    }
}

/// The first message of Linux 6.12: three hashes and six groups, of which the null group is one.
#[test]
fn the_negotiation_of_linux() {
    let mut bytes = vec![0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 3, 6, 1, 2, 3];
    bytes.resize(8 + 34, 0);
    bytes.extend_from_slice(&[0, 1, 2, 3, 4, 5]);
    bytes.resize(8 + 64, 0);
    let expected = DhchapNegotiation {
        no_concatenation: true,
        has_dhchap: true,
        hashes: vec![DhchapHash::Sha256, DhchapHash::Sha384, DhchapHash::Sha512],
        has_null_group: true,
        has_ffdhe2048: true,
    };
    assert_eq!(AuthenticationMessage::decode(&bytes), Ok((1, AuthenticationMessage::Negotiate(expected))));
    let send = AuthenticationCommand::encode_send(3, 72);
    assert_eq!(send.bytes()[41..48], [1, 1, 0xe9, 72, 0, 0, 0]);
    assert_eq!(send.data_pointer(), DataPointer::InCapsule { offset: 0, len: 72 });
    let expected = AuthenticationCommand { is_dhchap: true, len: 72 };
    assert_eq!(FabricsCommand::decode(&send), FabricsCommand::AuthenticationSend(expected));
    let receive = AuthenticationCommand::encode_receive(3, 72);
    assert_eq!(FabricsCommand::decode(&receive), FabricsCommand::AuthenticationReceive(expected));
    assert_eq!(receive.data_pointer(), DataPointer::Transport { len: 72 });
}
