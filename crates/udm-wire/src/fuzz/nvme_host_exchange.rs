//! NVMe/TCP: a controller that answers each command of this host, with wrong data, statuses and
//! results, during the authentication, the setup, and resets of other controllers.

use super::assert_one_line_error;
use crate::nvme::host::{
    AdminEvent, HostAdmin, HostDigests, HostOptions, HostSecrets, IoQueueSetup, ResetOutcome,
};
use crate::nvme::{
    AuthenticationMessage, CONNECT_AUTHENTICATION_REQUIRED, Completion, ControllerInstance, ControllerKind,
    CrossControllerResetEntry, CrossControllerResetStatus, DataPdu, DhchapChallenge, DhchapHash,
    DhchapSecret, FabricsCommand, FenceCapabilities, IDENTIFY_SIZE, IdentifyController, IdentifyNamespace,
    InitializeResponse, NvmeCommand, NvmeStatus, OPCODE_CROSS_CONTROLLER_RESET, OPCODE_FABRICS, PduLimits,
    SQE_SIZE, encode_c2h_data, encode_capsule_response, encode_cross_controller_reset_log,
    encode_namespace_descriptors,
};
use std::sync::Arc;

const SUBSYSTEM: &str = "nqn.2014-08.x";
const ID: u16 = 7;
/// Actions of the host and answers of the controller at most.
const STEPS_MAX: usize = 400;
const LIMITS: PduLimits =
    PduLimits { header_digest: false, data_digest: false, capsule_data_max: 8192, data_max: 8192 };

/// A secret as of nvme gen-dhchap-key.
const SECRET: &str = "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:";

/// The decisions of the controller; zeroes after the last one.
struct Decisions<'a>(&'a [u8]);

impl Decisions<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    /// Changes some bytes of `data`.
    fn change(&mut self, data: &mut [u8]) {
        for _ in 0..self.byte() % 8 {
            let at = usize::from(self.u16());
            let (value, len) = (self.byte(), data.len().max(1));
            data.iter_mut().skip(at % len).take(1).for_each(|byte| *byte = value);
        }
    }
}

struct Controller<'a> {
    decisions: Decisions<'a>,
    transaction: u16,
    has_challenged: bool,
    /// Event requests that wait.
    events: Vec<u16>,
}

impl Controller<'_> {
    fn answer(&mut self, mut sent: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        while let Some(head) = sent.first_chunk::<8>() {
            let len = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
            let (pdu, rest) = sent.split_at(len);
            sent = rest;
            if head[0] == 0 {
                out.extend(
                    InitializeResponse {
                        controller_alignment: 0,
                        header_digest: false,
                        data_digest: false,
                        max_h2c_data: 4096,
                    }
                    .encode(),
                );
                continue;
            }
            let mut command = [0; SQE_SIZE];
            command.copy_from_slice(&pdu[8..72]);
            self.command(&NvmeCommand::from_bytes(command), &pdu[72..], &mut out);
        }
        out
    }

    fn command(&mut self, command: &NvmeCommand, payload: &[u8], out: &mut Vec<u8>) {
        if command.opcode() == 0x0c {
            return self.events.push(command.id());
        }
        let len = u32::from_le_bytes([32, 33, 34, 35].map(|at: usize| command.bytes()[at])) as usize;
        let (data, mut result) = self.data(command, payload, len);
        let status = match self.decisions.byte() {
            status if status < 240 => NvmeStatus::SUCCESS,
            _ => NvmeStatus(self.decisions.u16()),
        };
        if self.decisions.byte() > 240 {
            result ^= u64::from(self.decisions.u16()) << (self.decisions.byte() % 48);
        }
        if let Some(mut data) = data {
            data.resize(len, 0);
            self.decisions.change(&mut data);
            let pdu = DataPdu { command: command.id(), tag: 0, offset: 0, len: len as u32 };
            let mut header = [0; 128];
            let n = encode_c2h_data(&mut header, &pdu, false, 0, &LIMITS);
            out.extend_from_slice(&header[..n]);
            out.extend(data);
        }
        complete(command.id(), status, result, out);
    }

    /// What a good controller sends, and its result.
    fn data(&mut self, command: &NvmeCommand, payload: &[u8], len: usize) -> (Option<Vec<u8>>, u64) {
        match (command.opcode(), command.dword(10) as u8) {
            (OPCODE_FABRICS, _) => match FabricsCommand::decode(command) {
                FabricsCommand::Connect(_) => (None, CONNECT_AUTHENTICATION_REQUIRED | u64::from(ID)),
                FabricsCommand::AuthenticationSend(_) => {
                    self.has_challenged = payload.first() == Some(&1);
                    self.transaction = payload.get(4..6).map_or(0, |id| u16::from_le_bytes([id[0], id[1]]));
                    (None, 0)
                }
                FabricsCommand::AuthenticationReceive(_) => (Some(self.message()), 0),
                FabricsCommand::PropertyGet(_) => (None, 127),
                _ => (None, 0),
            },
            (OPCODE_CROSS_CONTROLLER_RESET, _) => (None, u64::from(self.decisions.byte() & 1)),
            (0x06, 1) => (Some(identify_controller().to_vec()), 0),
            (0x06, 0) => (Some(identify_namespace().to_vec()), 0),
            (0x06, _) => (Some(encode_namespace_descriptors(&[3; 16], &[4; 16]).to_vec()), 0),
            (0x02, 0x1e) => {
                let status = match self.decisions.byte() % 3 {
                    0 => CrossControllerResetStatus::InProgress,
                    1 => CrossControllerResetStatus::Succeeded,
                    _ => CrossControllerResetStatus::Failed,
                };
                let impacted = u16::from(self.decisions.byte() % 8);
                let entry = CrossControllerResetEntry { impacted, uniquifier: 1, source: ID, status };
                (Some(encode_cross_controller_reset_log(&[entry])), 0)
            }
            (0x02, _) => (Some(vec![0; len]), 0),
            _ => (None, 0x0003_0003),
        }
    }

    fn message(&mut self) -> Vec<u8> {
        let hash = DhchapHash::from_number(self.decisions.byte() % 4).unwrap_or(DhchapHash::Sha256);
        let challenge = DhchapChallenge { hash, sequence: 1, challenge: vec![5; hash.size()] };
        let message = match self.has_challenged {
            false => AuthenticationMessage::Challenge(challenge),
            true => AuthenticationMessage::Success1(
                hash,
                (self.decisions.byte() & 1 != 0).then(|| vec![1; hash.size()]),
            ),
        };
        message.encode(self.transaction)
    }
}

fn complete(id: u16, status: NvmeStatus, result: u64, out: &mut Vec<u8>) {
    let mut header = [0; 128];
    let len = encode_capsule_response(&mut header, &Completion { result, sq_head: 0, id, status }, &LIMITS);
    out.extend_from_slice(&header[..len]);
}

fn identify_controller() -> [u8; IDENTIFY_SIZE] {
    IdentifyController {
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
        fence: FenceCapabilities { instance: None, resets_max: 4, quiesce_time_ms: 0 },
    }
    .encode()
}

fn identify_namespace() -> [u8; IDENTIFY_SIZE] {
    IdentifyNamespace {
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
}

/// A controller that answers each command of an admin queue and of an I/O queue, as `data` decides.
/// The host asks it for resets of others. Each error is one line; a reset ends at most once, and
/// only one that was asked for; a host that wants a proof gets no queue from a controller without
/// the secret.
pub fn fuzz_nvme_host_exchange(data: &[u8]) {
    let mut decisions = Decisions(data);
    let wants_proof = decisions.byte() & 1 != 0;
    let secret = || DhchapSecret::parse(SECRET).expect("a valid secret");
    let options = HostOptions {
        host: "nqn.2014-08.host".into(),
        host_id: [1; 16],
        subsystem: SUBSYSTEM.into(),
        nsid: 1,
        digests: HostDigests::default(),
        kato_ms: 5000,
        queues: 4,
        secrets: Some(Arc::new(HostSecrets::new(secret(), wants_proof.then(secret), [7; 32]))),
    };
    let mut controller = Controller { decisions, transaction: 0, has_challenged: false, events: Vec::new() };
    run_io_queue(&options, &mut controller, wants_proof);
    run_admin_queue(&options, &mut controller, wants_proof);
}

fn run_io_queue(options: &HostOptions, controller: &mut Controller<'_>, wants_proof: bool) {
    let (mut setup, mut out) = IoQueueSetup::begin(options, ID, 1, 8);
    for _ in 0..STEPS_MAX {
        let bytes = controller.answer(&std::mem::take(&mut out));
        match setup.take(options, &mut &bytes[..], &mut out) {
            Err(error) => return assert_one_line_error(&error),
            Ok(Some(_)) => return assert!(!wants_proof, "the controller has not proved itself"),
            Ok(None) => {}
        }
    }
}

fn run_admin_queue(options: &HostOptions, controller: &mut Controller<'_>, wants_proof: bool) {
    let mut admin = HostAdmin::new(options.clone());
    let (mut asked, mut number) = (Vec::new(), 0);
    for _ in 0..STEPS_MAX {
        let mut bytes = controller.answer(&admin.take_out());
        if controller.decisions.0.is_empty() && bytes.is_empty() {
            return;
        }
        if bytes.is_empty() {
            match controller.decisions.byte() % 5 {
                0 => _ = admin.keep_alive(),
                1 => admin.refresh_ana(),
                2 => {
                    let id = u16::from(controller.decisions.byte() % 8);
                    number += 1;
                    let impacted = ControllerInstance { id, uniquifier: 1, random: number };
                    if admin.reset_controller(impacted) {
                        asked.push(impacted);
                    }
                }
                3 => admin.follow_resets(),
                _ => {
                    let log = u64::from(controller.decisions.byte());
                    if let Some(id) = controller.events.pop() {
                        complete(id, NvmeStatus::SUCCESS, 2 | log << 16, &mut bytes);
                    }
                }
            }
        }
        let mut input = &bytes[..];
        loop {
            match admin.take(&mut input) {
                Err(error) => return assert_one_line_error(&error),
                Ok(None) => break,
                Ok(Some(AdminEvent::Ready(_))) => assert!(!wants_proof, "no proof was given"),
                Ok(Some(AdminEvent::NotReady)) => admin.ask_status(),
                Ok(Some(AdminEvent::ResetEnded(impacted, outcome))) => {
                    let at = asked.iter().position(|one| *one == impacted);
                    asked.swap_remove(at.expect("a reset that was asked for ends once"));
                    assert!(outcome != ResetOutcome::Refused(NvmeStatus::SUCCESS));
                }
                Ok(Some(_)) => {}
            }
        }
        assert_eq!(admin.unfinished_resets(), asked.len());
    }
}
