//! The admin and I/O queues of a host against a scripted controller: authentication in both
//! directions, resets of other controllers, and controllers that lie in both.

use proptest::prelude::*;
use std::sync::Arc;
use udm_wire::nvme::host::{
    AdminEvent, HostAdmin, HostDigests, HostError, HostOptions, HostSecrets, IoQueueSetup, ResetOutcome,
};
use udm_wire::nvme::{
    AuthenticationCommand, AuthenticationFailure, AuthenticationMessage, CONNECT_AUTHENTICATION_REQUIRED,
    CONNECT_SECURE_CHANNEL_REQUIRED, Completion, ControllerInstance, ControllerKind, CrossControllerReset,
    CrossControllerResetEntry, CrossControllerResetStatus, DataPdu, DhchapChallenge, DhchapHash,
    DhchapSecret, DhchapTranscript, FabricsCommand, FenceCapabilities, IdentifyController, IdentifyNamespace,
    InitializeResponse, LogPage, LogPageRequest, NvmeCommand, NvmeStatus, OPCODE_FABRICS, PduLimits,
    QueueCounts, SQE_SIZE, encode_c2h_data, encode_capsule_response, encode_cross_controller_reset_log,
    encode_namespace_descriptors, property, verify_dhchap_response,
};

const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:1";
const SUBSYSTEM: &str = "nqn.2026-11.org.example:disks";
/// Secrets as `nvme gen-dhchap-key` makes them.
const SECRET: &str = "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:";
const OTHER: &str = "DHHC-1:02:d4gmzh5i0I3npDMWAmJX/nAvAw7ioKmS2w44ceutFeObYDFG/r6zOB3UW0FLzevsI7XDJg==:";
/// Number of the controller.
const ID: u16 = 7;
/// The controller that is lost.
const LOST: ControllerInstance = ControllerInstance { id: 5, uniquifier: 3, random: 0x1234_5678_9abc_def0 };

fn secret(text: &str) -> DhchapSecret {
    DhchapSecret::parse(text).unwrap()
}

fn options(secrets: Option<(&str, Option<&str>)>) -> HostOptions {
    let secrets = secrets
        .map(|(host, controller)| Arc::new(HostSecrets::new(secret(host), controller.map(secret), [9; 32])));
    HostOptions {
        host: HOST.into(),
        host_id: [1; 16],
        subsystem: SUBSYSTEM.into(),
        nsid: 1,
        digests: HostDigests::default(),
        kato_ms: 5000,
        queues: 4,
        secrets,
    }
}

const LIMITS: PduLimits =
    PduLimits { header_digest: false, data_digest: false, capsule_data_max: 8192, data_max: 8192 };

/// A change of a message that the controller sends, for controllers that lie.
type Lie = fn(&mut AuthenticationMessage);

/// A controller that knows `secrets`, if it asks for authentication.
struct Controller {
    asks: bool,
    host: DhchapSecret,
    controller: Option<DhchapSecret>,
    hash: DhchapHash,
    has_second_group: bool,
    lie: Lie,
    transaction: u16,
    challenge: Vec<u8>,
    next: Option<AuthenticationMessage>,
    /// The host has sent Success2, or needs not.
    is_authenticated: bool,
    /// The host has sent Failure2.
    is_refused: bool,
    resets_max: u8,
    /// Commands that wait for the test: resets, and event requests.
    waiting: Vec<NvmeCommand>,
    log: Vec<CrossControllerResetEntry>,
    mask: u32,
}

impl Controller {
    fn new() -> Controller {
        Controller {
            asks: false,
            host: secret(SECRET),
            controller: None,
            hash: DhchapHash::Sha256,
            has_second_group: false,
            lie: |_| {},
            transaction: 0,
            challenge: Vec::new(),
            next: None,
            is_authenticated: false,
            is_refused: false,
            resets_max: 4,
            waiting: Vec::new(),
            log: Vec::new(),
            mask: 0,
        }
    }

    fn authenticating(controller: Option<&str>, hash: DhchapHash, lie: Lie) -> Controller {
        Controller { asks: true, controller: controller.map(secret), hash, lie, ..Controller::new() }
    }

    /// Answers what the host has sent.
    fn answer(&mut self, mut sent: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        while let Some(&[kind, _, header, data, ..]) = sent.first_chunk::<8>() {
            let length = u32::from_le_bytes(sent[4..8].try_into().unwrap()) as usize;
            let (pdu, rest) = sent.split_at(length);
            sent = rest;
            if kind == 0 {
                let response = InitializeResponse {
                    controller_alignment: 0,
                    header_digest: false,
                    data_digest: false,
                    max_h2c_data: 4096,
                };
                out.extend(response.encode());
                continue;
            }
            assert_eq!((kind, header), (4, 72), "a command");
            let mut command = [0; SQE_SIZE];
            command.copy_from_slice(&pdu[8..72]);
            let payload = if data == 0 { &[] } else { &pdu[usize::from(data)..] };
            self.command(&NvmeCommand::from_bytes(command), payload, &mut out);
        }
        out
    }

    fn command(&mut self, command: &NvmeCommand, payload: &[u8], out: &mut Vec<u8>) {
        let mut result = 0;
        let mut data: Option<Vec<u8>> = None;
        match command.opcode() {
            OPCODE_FABRICS => match FabricsCommand::decode(command) {
                FabricsCommand::Connect(_) => {
                    result = u64::from(ID) | if self.asks { CONNECT_AUTHENTICATION_REQUIRED } else { 0 };
                }
                FabricsCommand::PropertyGet(get) if get.offset == property::CAPABILITIES => result = 127,
                FabricsCommand::PropertyGet(_) => result = 1,
                FabricsCommand::PropertySet(_) => {}
                FabricsCommand::AuthenticationSend(AuthenticationCommand { is_dhchap, len }) => {
                    assert!(is_dhchap && len as usize == payload.len());
                    self.message(payload);
                }
                FabricsCommand::AuthenticationReceive(receive) => {
                    let mut message = self.next.take().expect("a message for the host");
                    (self.lie)(&mut message);
                    let mut bytes = message.encode(self.transaction);
                    bytes.resize(receive.len as usize, 0);
                    data = Some(bytes);
                }
                other => panic!("{other:?}"),
            },
            0x06 => data = Some(self.identify(command.dword(10) as u8)),
            0x09 if command.dword(10) as u8 == 7 => result = QueueCounts::encode(4).into(),
            0x09 => self.mask = command.dword(11),
            0x02 => {
                let request = LogPageRequest::decode(command);
                assert_eq!((request.page, request.specific), (LogPage::CrossControllerReset, 1));
                let mut page = encode_cross_controller_reset_log(&self.log);
                page.resize(request.len as usize, 0);
                data = Some(page);
            }
            0x0c | 0x38 => return self.waiting.push(*command),
            other => panic!("opcode {other:#x}"),
        }
        if let Some(data) = data {
            let pdu = DataPdu { command: command.id(), tag: 0, offset: 0, len: data.len() as u32 };
            let mut header = [0; 128];
            let len = encode_c2h_data(&mut header, &pdu, false, 0, &LIMITS);
            out.extend_from_slice(&header[..len]);
            out.extend(data);
        }
        out.extend(completion(command.id(), NvmeStatus::SUCCESS, result));
    }

    fn identify(&self, structure: u8) -> Vec<u8> {
        match structure {
            0 => IdentifyNamespace {
                blocks: 1000,
                block_log2: 9,
                preferred_write: 1,
                optimal_write: 0,
                is_thin: false,
                is_read_only: false,
                ana_group: 0,
                nguid: [3; 16],
            }
            .encode()
            .to_vec(),
            1 => IdentifyController {
                kind: ControllerKind::Io,
                serial: "1",
                model: "m",
                firmware: "1",
                subsystem: SUBSYSTEM,
                id: ID,
                version: 0x0002_0000,
                transfer_max_log2: 8,
                capsule_data_max: 16 << 10,
                commands_max: 128,
                namespaces_max: 1024,
                event_requests_max: 4,
                ana_transition_max: 10,
                ana_groups: 1,
                keep_alive_granularity: 1,
                fence: FenceCapabilities {
                    instance: Some(ControllerInstance { id: ID, uniquifier: 1, random: 77 }),
                    resets_max: self.resets_max,
                    quiesce_time_ms: 30_000,
                },
            }
            .encode()
            .to_vec(),
            _ => encode_namespace_descriptors(&[3; 16], &[4; 16]).to_vec(),
        }
    }

    fn message(&mut self, bytes: &[u8]) {
        let (transaction, message) = AuthenticationMessage::decode(bytes).unwrap();
        self.next = match message {
            AuthenticationMessage::Negotiate(offer) => {
                assert!(offer.no_concatenation && offer.has_null_group && offer.hashes.contains(&self.hash));
                self.has_second_group = offer.has_ffdhe2048;
                (self.transaction, self.challenge) = (transaction, vec![0x5a; self.hash.size()]);
                let challenge = self.challenge.clone();
                Some(AuthenticationMessage::Challenge(DhchapChallenge {
                    hash: self.hash,
                    sequence: 77,
                    challenge,
                }))
            }
            AuthenticationMessage::Reply(reply) => {
                assert_eq!(transaction, self.transaction);
                let asked = DhchapTranscript {
                    hash: self.hash,
                    transaction,
                    sequence: 77,
                    challenge: &self.challenge,
                    host: HOST,
                    subsystem: SUBSYSTEM,
                };
                let response = reply.challenge.as_ref().map(|(sequence, challenge)| {
                    let asked = DhchapTranscript { sequence: *sequence, challenge, ..asked };
                    asked.controller_response(self.controller.as_ref().unwrap_or(&self.host))
                });
                self.is_authenticated = response.is_none();
                Some(if verify_dhchap_response(&asked.host_response(&self.host), &reply.response) {
                    AuthenticationMessage::Success1(self.hash, response)
                } else {
                    AuthenticationMessage::Failure1(AuthenticationFailure::Failed)
                })
            }
            AuthenticationMessage::Success2 => {
                self.is_authenticated = true;
                None
            }
            AuthenticationMessage::Failure2(_) => {
                self.is_refused = true;
                None
            }
            other => panic!("{other:?}"),
        };
    }
}

fn completion(id: u16, status: NvmeStatus, result: u64) -> Vec<u8> {
    let mut out = [0; 128];
    let len = encode_capsule_response(&mut out, &Completion { result, sq_head: 0, id, status }, &LIMITS);
    out[..len].to_vec()
}

/// Runs both sides until neither has anything to say.
fn run(admin: &mut HostAdmin, controller: &mut Controller) -> Result<Vec<AdminEvent>, HostError> {
    let mut events = Vec::new();
    loop {
        let sent = admin.take_out();
        if sent.is_empty() {
            return Ok(events);
        }
        let bytes = controller.answer(&sent);
        let mut input = &bytes[..];
        while let Some(event) = admin.take(&mut input)? {
            events.push(event);
        }
    }
}

/// Gives `bytes` to the host, and runs.
fn give(
    admin: &mut HostAdmin,
    controller: &mut Controller,
    bytes: &[u8],
) -> Result<Vec<AdminEvent>, HostError> {
    let (mut events, mut input) = (Vec::new(), bytes);
    while let Some(event) = admin.take(&mut input)? {
        events.push(event);
    }
    events.extend(run(admin, controller)?);
    Ok(events)
}

fn io_queue(options: &HostOptions, controller: &mut Controller) -> Result<bool, HostError> {
    let (mut setup, mut out) = IoQueueSetup::begin(options, ID, 1, 8);
    while !out.is_empty() {
        let bytes = controller.answer(&std::mem::take(&mut out));
        if setup.take(options, &mut &bytes[..], &mut out)?.is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

const HASHES: [DhchapHash; 3] = [DhchapHash::Sha256, DhchapHash::Sha384, DhchapHash::Sha512];

/// Both queues authenticate the host, and the controller if the host asks, with each hash.
#[test]
fn both_directions() {
    for hash in HASHES {
        for proof in [None, Some(OTHER)] {
            let options = options(Some((SECRET, proof)));
            let mut controller = Controller::authenticating(proof, hash, |_| {});
            let events = run(&mut HostAdmin::new(options.clone()), &mut controller).unwrap();
            assert!(matches!(&events[..], [AdminEvent::Ready(_)]), "{events:?}");
            assert!(controller.is_authenticated);
            controller.is_authenticated = false;
            assert_eq!(io_queue(&options, &mut controller), Ok(true));
            assert!(controller.is_authenticated && !controller.is_refused);
        }
    }
}

/// Secrets that are missing or wrong, and controllers that lie, end in one line that says why.
#[test]
fn wrong_secrets_and_lies() {
    let lies: [(Lie, &str); 7] = [
        (|message| *message = AuthenticationMessage::Success2, "expected"),
        (|message| *message = AuthenticationMessage::Failure1(AuthenticationFailure::HashNotUsable), "hash"),
        (
            |message| *message = AuthenticationMessage::Failure1(AuthenticationFailure::GroupNotUsable),
            "group",
        ),
        // Success without a proof, or before the host has answered.
        (
            |message| {
                if let AuthenticationMessage::Success1(_, response) = message {
                    *response = None;
                }
            },
            "does not know",
        ),
        (
            |message| *message = AuthenticationMessage::Success1(DhchapHash::Sha256, None),
            "expected a challenge",
        ),
        (
            |message| {
                if let AuthenticationMessage::Success1(_, Some(response)) = message {
                    response[31] ^= 1;
                }
            },
            "does not know",
        ),
        (
            |message| {
                if let AuthenticationMessage::Success1(hash, _) = message {
                    *message = AuthenticationMessage::Success1(*hash, Some(vec![0; 32]));
                }
            },
            "does not know",
        ),
    ];
    for (lie, why) in lies {
        let options = options(Some((SECRET, Some(OTHER))));
        let mut controller = Controller::authenticating(Some(OTHER), DhchapHash::Sha256, lie);
        let error = run(&mut HostAdmin::new(options.clone()), &mut controller).unwrap_err().to_string();
        assert!(error.contains(why) && !error.contains('\n'), "{why}: {error}");
        assert!(!controller.is_authenticated, "{why}");
        let mut controller = Controller::authenticating(Some(OTHER), DhchapHash::Sha256, lie);
        assert!(io_queue(&options, &mut controller).unwrap_err().to_string().contains(why));
    }
    for (secrets, asks, why) in [
        (None, true, "give dhchap-secret=FILE"),
        (Some((OTHER, None)), true, "does not accept the secret of dhchap-secret"),
        (Some((SECRET, Some(SECRET))), true, "does not know the secret of dhchap-ctrl-secret"),
        (Some((SECRET, Some(OTHER))), false, "cannot prove"),
    ] {
        let mut controller = Controller::authenticating(Some(OTHER), DhchapHash::Sha512, |_| {});
        controller.asks = asks;
        let error = run(&mut HostAdmin::new(options(secrets)), &mut controller).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    // A secret that nobody asks for is not used.
    let mut controller = Controller::new();
    assert_eq!(run(&mut HostAdmin::new(options(Some((SECRET, None)))), &mut controller).unwrap().len(), 1);
    let tls = CONNECT_SECURE_CHANNEL_REQUIRED | u64::from(ID);
    let mut admin = HostAdmin::new(options(Some((SECRET, None))));
    let connect = Controller::new().answer(&admin.take_out());
    admin.take(&mut &connect[..]).unwrap();
    let error = admin.take(&mut &completion(0, NvmeStatus::SUCCESS, tls)[..]).unwrap_err().to_string();
    assert!(error.contains("TLS"), "{error}");
}

/// A controller that refuses a host with the null group only, as that of Linux, gets a second group
/// the next time. One that chooses this group is refused.
#[test]
fn a_second_group_is_named() {
    let options = options(Some((SECRET, None)));
    let lie: Lie =
        |message| *message = AuthenticationMessage::Failure1(AuthenticationFailure::GroupNotUsable);
    let mut controller = Controller::authenticating(None, DhchapHash::Sha256, lie);
    run(&mut HostAdmin::new(options.clone()), &mut controller).unwrap_err();
    assert!(!controller.has_second_group && options.secrets.as_ref().unwrap().names_more_groups());
    let mut controller = Controller::authenticating(None, DhchapHash::Sha256, |_| {});
    run(&mut HostAdmin::new(options.clone()), &mut controller).unwrap();
    assert!(controller.is_authenticated && controller.has_second_group);
    let challenge = DhchapChallenge { hash: DhchapHash::Sha256, sequence: 1, challenge: vec![1; 32] };
    let mut bytes = AuthenticationMessage::Challenge(challenge).encode(1);
    bytes[9] = 1;
    let error = AuthenticationMessage::decode(&bytes).unwrap_err().to_string();
    assert!(error.contains("null group only"), "{error}");
}

/// No challenge of the host comes twice, so a recorded answer of the controller is of no use.
#[test]
fn challenges_differ() {
    let options = options(Some((SECRET, Some(OTHER))));
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..100 {
        let mut controller = Controller::authenticating(Some(OTHER), DhchapHash::Sha256, |_| {});
        let mut admin = HostAdmin::new(options.clone());
        let mut reply = None;
        while reply.is_none() {
            let sent = admin.take_out();
            let find = |bytes: &[u8]| match AuthenticationMessage::decode(bytes) {
                Ok((_, AuthenticationMessage::Reply(reply))) => reply.challenge,
                _ => None,
            };
            reply = sent.get(72..).and_then(find);
            admin.take(&mut &controller.answer(&sent)[..]).unwrap();
        }
        assert!(seen.insert(reply.unwrap().1), "a challenge came twice");
    }
}

/// A host that is ready, and its controller.
fn ready() -> (HostAdmin, Controller) {
    let (mut admin, mut controller) = (HostAdmin::new(options(None)), Controller::new());
    run(&mut admin, &mut controller).unwrap();
    assert_eq!(controller.mask, 1 << 8 | 1 << 11 | 1 << 20);
    (admin, controller)
}

/// The identifier of the reset that waits.
fn reset_id(controller: &mut Controller, impacted: ControllerInstance) -> u16 {
    let at = controller.waiting.iter().position(|command| command.opcode() == 0x38).expect("a reset");
    let command = controller.waiting.remove(at);
    assert_eq!(CrossControllerReset::decode(&command), CrossControllerReset { impacted });
    command.id()
}

fn entry(status: CrossControllerResetStatus) -> CrossControllerResetEntry {
    CrossControllerResetEntry { impacted: LOST.id, uniquifier: LOST.uniquifier, source: ID, status }
}

/// A reset that is done at once, one that is refused, and one whose end an event tells.
#[test]
fn resets_end() {
    let (mut admin, mut controller) = ready();
    let mut reset = |admin: &mut HostAdmin, status, result| {
        assert!(admin.reset_controller(LOST));
        assert_eq!(run(admin, &mut controller).unwrap(), []);
        let id = reset_id(&mut controller, LOST);
        give(admin, &mut controller, &completion(id, status, result)).unwrap()
    };
    let done = || AdminEvent::ResetEnded(LOST, ResetOutcome::Succeeded);
    assert_eq!(reset(&mut admin, NvmeStatus::SUCCESS, CrossControllerReset::DONE), [done()]);
    let refused = NvmeStatus::INVALID_FIELD.permanent();
    let is_refused = AdminEvent::ResetEnded(LOST, ResetOutcome::Refused(refused));
    assert_eq!(reset(&mut admin, refused, CrossControllerReset::DONE), [is_refused]);
    assert_eq!(reset(&mut admin, NvmeStatus::SUCCESS, 0), []);
    assert_eq!(admin.unfinished_resets(), 1);
    for (status, events) in [
        (CrossControllerResetStatus::InProgress, vec![]),
        (CrossControllerResetStatus::Succeeded, vec![done()]),
    ] {
        controller.log = vec![entry(status)];
        let at = controller.waiting.iter().position(|command| command.opcode() == 0x0c).unwrap();
        let event = completion(controller.waiting.remove(at).id(), NvmeStatus::SUCCESS, 0x001e_f402);
        assert_eq!(give(&mut admin, &mut controller, &event).unwrap(), events);
    }
    assert_eq!(admin.unfinished_resets(), 0);
    // Without an event, the owner asks.
    assert!(admin.reset_controller(LOST));
    run(&mut admin, &mut controller).unwrap();
    let id = reset_id(&mut controller, LOST);
    controller.log = vec![entry(CrossControllerResetStatus::Failed)];
    assert_eq!(give(&mut admin, &mut controller, &completion(id, NvmeStatus::SUCCESS, 0)).unwrap(), []);
    admin.follow_resets();
    let failed = AdminEvent::ResetEnded(LOST, ResetOutcome::Failed);
    assert_eq!(run(&mut admin, &mut controller).unwrap(), [failed]);
    admin.follow_resets();
    assert!(admin.take_out().is_empty(), "nothing is in progress");
}

/// A log page that names others than the reset that was asked for, or contradicts itself, fences
/// nothing.
#[test]
fn a_log_that_lies() {
    let ok = entry(CrossControllerResetStatus::Succeeded);
    for log in [
        vec![],
        vec![CrossControllerResetEntry { impacted: LOST.id + 1, ..ok }],
        vec![CrossControllerResetEntry { uniquifier: LOST.uniquifier - 1, ..ok }],
        vec![CrossControllerResetEntry { source: ID + 1, ..ok }],
    ] {
        let (mut admin, mut controller) = ready();
        admin.reset_controller(LOST);
        run(&mut admin, &mut controller).unwrap();
        let id = reset_id(&mut controller, LOST);
        controller.log = log;
        assert_eq!(give(&mut admin, &mut controller, &completion(id, NvmeStatus::SUCCESS, 0)).unwrap(), []);
        admin.follow_resets();
        assert_eq!(run(&mut admin, &mut controller).unwrap(), []);
        controller.log = vec![ok, entry(CrossControllerResetStatus::Failed), ok];
        admin.follow_resets();
        let failed = AdminEvent::ResetEnded(LOST, ResetOutcome::Failed);
        assert_eq!(run(&mut admin, &mut controller).unwrap(), [failed]);
    }
}

/// A controller that cannot reset others is not asked, nor is one asked to reset itself, and no
/// more resets are in progress than it allows.
#[test]
fn limits_of_resets() {
    let (mut admin, mut controller) = (HostAdmin::new(options(None)), Controller::new());
    assert!(!admin.reset_controller(LOST), "not set up");
    controller.resets_max = 0;
    run(&mut admin, &mut controller).unwrap();
    assert!(!admin.reset_controller(LOST));
    let (mut admin, mut controller) = ready();
    assert!(!admin.reset_controller(ControllerInstance { id: ID, ..LOST }));
    let lost = [0, 1, 2, 3, 4, 5].map(|at| ControllerInstance { id: 20 + at, ..LOST });
    assert!(lost.iter().all(|one| admin.reset_controller(*one)));
    for one in &lost[..4] {
        run(&mut admin, &mut controller).unwrap();
        let id = reset_id(&mut controller, *one);
        give(&mut admin, &mut controller, &completion(id, NvmeStatus::SUCCESS, 0)).unwrap();
    }
    let is_reset = |command: &NvmeCommand| command.opcode() == 0x38;
    assert!(!controller.waiting.iter().any(is_reset) && admin.unfinished_resets() == 6);
    let entry = CrossControllerResetEntry { impacted: 21, ..entry(CrossControllerResetStatus::Succeeded) };
    controller.log = vec![entry];
    admin.follow_resets();
    let done = AdminEvent::ResetEnded(lost[1], ResetOutcome::Succeeded);
    assert_eq!(run(&mut admin, &mut controller).unwrap(), [done]);
    reset_id(&mut controller, lost[4]);
}

proptest! {
    /// A log page of any bytes ends the reset only by an entry of this reset.
    #[test]
    fn any_log(entries in prop::collection::vec((4_u16..7, 2_u8..5, 6_u16..9, 0_u8..4), 0..40), count: u16) {
        let (mut admin, mut controller) = ready();
        admin.reset_controller(LOST);
        run(&mut admin, &mut controller).unwrap();
        let id = reset_id(&mut controller, LOST);
        give(&mut admin, &mut controller, &completion(id, NvmeStatus::SUCCESS, 0)).unwrap();
        admin.follow_resets();
        let read = admin.take_out();
        prop_assert_eq!(read.len(), 72);
        let mut page = vec![0; 4096];
        page[..2].copy_from_slice(&count.to_le_bytes());
        for (at, (impacted, uniquifier, source, status)) in entries.iter().enumerate() {
            let out = &mut page[8 + at * 8..][..8];
            out[..2].copy_from_slice(&impacted.to_le_bytes());
            out[2] = *uniquifier;
            out[4..6].copy_from_slice(&source.to_le_bytes());
            out[6] = *status;
        }
        let read_id = u16::from_le_bytes([read[10], read[11]]);
        let pdu = DataPdu { command: read_id, tag: 0, offset: 0, len: 4096 };
        let mut header = [0; 128];
        let len = encode_c2h_data(&mut header, &pdu, false, 0, &LIMITS);
        let bytes = [&header[..len], &page, &completion(read_id, NvmeStatus::SUCCESS, 0)].concat();
        let events = give(&mut admin, &mut controller, &bytes).unwrap();
        let own = entries.iter().take(count.into());
        let own: Vec<u8> = own
            .filter(|(impacted, uniquifier, source, _)| (*impacted, *uniquifier, *source) == (5, 3, ID))
            .map(|entry| entry.3)
            .filter(|status| *status != 0)
            .collect();
        let outcome = match &own[..] {
            [] => None,
            all if all.iter().all(|status| *status == 1) => Some(ResetOutcome::Succeeded),
            _ => Some(ResetOutcome::Failed),
        };
        let expected: Vec<_> = outcome.map(|outcome| AdminEvent::ResetEnded(LOST, outcome)).into_iter().collect();
        prop_assert_eq!(events, expected);
    }
}
