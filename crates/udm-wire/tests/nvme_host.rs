//! The host's end of NVMe/TCP queues against the controller's encoders, and against controllers
//! that violate the protocol.

use proptest::prelude::*;
use udm_wire::fuzz::{fuzz_nvme_host_exchange, fuzz_nvme_host_pdu};
use udm_wire::nvme::host::{
    AdminEvent, HostAdmin, HostCommand, HostData, HostDigests, HostEvent, HostOptions, HostProtocolError,
    HostQueue,
};
use udm_wire::nvme::{
    Completion, DataPdu, InitializeResponse, NvmeCommand, NvmeStatus, PduLimits, data_digest,
    encode_c2h_data, encode_capsule_response, encode_r2t,
};

const READ: u32 = 8192;
const WRITE: u32 = 8192;

fn limits(digests: HostDigests) -> PduLimits {
    PduLimits {
        header_digest: digests.header,
        data_digest: digests.data,
        capsule_data_max: 8192,
        data_max: 65536,
    }
}

fn response(digests: HostDigests) -> InitializeResponse {
    InitializeResponse {
        controller_alignment: 0,
        header_digest: digests.header,
        data_digest: digests.data,
        max_h2c_data: 4096,
    }
}

/// A queue with a read (0) and a write (1) in flight.
fn queue(digests: HostDigests) -> HostQueue {
    let mut queue = HostQueue::new(digests, 4);
    queue.take(&mut &response(digests).encode()[..]).unwrap();
    let mut out = [0; 128];
    let read = HostCommand::read_write(1, 0, READ / 512, false, HostData::Read(READ));
    let write = HostCommand::read_write(1, 0, WRITE / 512, false, HostData::Write(WRITE));
    queue.put_command(&mut out, 0, &read);
    queue.put_command(&mut out, 1, &write);
    queue
}

fn data_pdu(command: u16, offset: u32, data: &[u8], is_success: bool, digests: HostDigests) -> Vec<u8> {
    let (mut out, limits) = ([0; 128], limits(digests));
    let pdu = DataPdu { command, tag: 0, offset, len: data.len() as u32 };
    let len = encode_c2h_data(&mut out, &pdu, is_success, 0, &limits);
    let mut bytes = out[..len].to_vec();
    bytes.extend_from_slice(data);
    if digests.data {
        bytes.extend_from_slice(&data_digest([data]));
    }
    bytes
}

/// As [`data_pdu`], not the last one of its command.
fn part(command: u16, offset: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = data_pdu(command, offset, data, false, HostDigests::default());
    bytes[1] &= !(1 << 2);
    bytes
}

fn r2t(command: u16, offset: u32, len: u32) -> Vec<u8> {
    let mut out = [0; 128];
    let pdu = DataPdu { command, tag: 7, offset, len };
    let n = encode_r2t(&mut out, &pdu, &limits(HostDigests::default()));
    out[..n].to_vec()
}

fn completion(id: u16, status: NvmeStatus, digests: HostDigests) -> Vec<u8> {
    let mut out = [0; 128];
    let completion = Completion { result: 0, sq_head: 0, id, status };
    let n = encode_capsule_response(&mut out, &completion, &limits(digests));
    out[..n].to_vec()
}

/// Takes all events; returns the content of the read, and the ended commands.
fn run(queue: &mut HostQueue, bytes: &[u8], step: usize) -> Result<(Vec<u8>, Vec<u16>), HostProtocolError> {
    let (mut content, mut ended) = (vec![0; READ as usize], Vec::new());
    for mut input in bytes.chunks(step) {
        while let Some(event) = queue.take(&mut input)? {
            match event {
                HostEvent::Data { at, bytes, .. } => {
                    content[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
                }
                HostEvent::Completed { id, .. } => ended.push(id),
                HostEvent::ReadyToTransfer(_) | HostEvent::Initialized => {}
            }
        }
    }
    Ok((content, ended))
}

proptest! {
    /// Data arrives whatever its cuts and digests are.
    #[test]
    fn a_read_arrives(header: bool, data: bool, is_success: bool, step in 1_usize..300, seed: u8) {
        let digests = HostDigests { header, data };
        let content: Vec<u8> = (0..READ).map(|at| (at as u8).wrapping_mul(seed) ^ (at >> 8) as u8).collect();
        let mut bytes = data_pdu(0, 0, &content, is_success, digests);
        if !is_success {
            bytes.extend(completion(0, NvmeStatus::SUCCESS, digests));
        }
        let (got, ended) = run(&mut queue(digests), &bytes, step).unwrap();
        prop_assert_eq!(got, content);
        prop_assert_eq!(ended, vec![0]);
    }

    /// A flipped bit is found by the digests, or stops the queue from going on.
    #[test]
    fn no_flipped_bit_is_taken(at in 0_usize..8192 + 24 + 8, bit in 0_u8..8) {
        let digests = HostDigests { header: true, data: true };
        let content = vec![0x5a; READ as usize];
        let mut bytes = data_pdu(0, 0, &content, true, digests);
        bytes[at] ^= 1 << bit;
        let found = run(&mut queue(digests), &bytes, 4096);
        prop_assert!(!matches!(&found, Ok((_, ended)) if !ended.is_empty()), "{:?}", found.map(|found| found.1));
    }

    /// Random bytes after a valid first PDU of any kind.
    #[test]
    fn hostile_bytes(kind in 0_u8..12, step: u8, mut bytes in prop::collection::vec(any::<u8>(), 0..6000)) {
        if let Some([pdu, _, len, ..]) = bytes.first_chunk_mut::<8>() {
            (*pdu, *len) = (kind, 24);
        }
        fuzz_nvme_host_pdu(&[&[kind, step][..], &bytes].concat());
    }
}

proptest! {
    /// A controller that answers each command, mostly well, and lies now and then.
    #[test]
    fn lying_answers(wants_proof: bool, lies in prop::collection::vec(any::<u8>(), 0..800), rare in 0_u8..3) {
        // Most decisions are good ones, so that the host gets far.
        let is_rare = |at: usize| rare == 0 || at.is_multiple_of(usize::from(rare) * 7);
        let decide = |(at, byte): (usize, &u8)| if is_rare(at) { *byte } else { byte % 8 };
        let decisions: Vec<u8> = lies.iter().enumerate().map(decide).collect();
        fuzz_nvme_host_exchange(&[&[u8::from(wants_proof)][..], &decisions].concat());
    }
}

/// Each violation ends the connection, with a line that says what is wrong.
#[test]
fn violations_are_found() {
    let (none, block) = (HostDigests::default(), [1; 4096]);
    let ok = NvmeStatus::SUCCESS;
    let cases: [(&str, Vec<u8>); 15] = [
        ("identifier", data_pdu(3, 0, &block, false, none)),
        ("outside the range", part(0, 4096, &block)),
        ("outside the range", [part(0, 0, &block), part(0, 0, &block)].concat()),
        ("outside the range", part(0, 0, &[1; 8193])),
        ("outside the range", part(1, 0, &block)),
        ("success before", data_pdu(0, 0, &block, true, none)),
        ("the last data, and some is missing", data_pdu(0, 0, &block, false, none)),
        ("data is missing", completion(0, ok, none)),
        ("data is missing", completion(1, ok, none)),
        ("identifier", [completion(0, NvmeStatus::INVALID_FIELD, none), completion(0, ok, none)].concat()),
        ("R2T outside", r2t(1, 0, WRITE + 1)),
        ("R2T outside", r2t(1, 4096, 4096)),
        ("R2T outside", r2t(1, 0, 0)),
        ("R2T before", [r2t(1, 0, 4096), r2t(1, 4096, 4096)].concat()),
        ("before the data of its R2T", [r2t(1, 0, WRITE), completion(1, ok, none)].concat()),
    ];
    for (why, bytes) in cases {
        let error = run(&mut queue(none), &bytes, 100).unwrap_err().to_string();
        assert!(error.contains(why), "{why}: {error}");
    }
    let error = run(&mut queue(none), &r2t(0, 0, 512), 100).unwrap_err().to_string();
    assert!(error.contains("R2T outside"), "a read: {error}");
}

/// A controller that does not agree to the digests, or wants what udm does not send, is refused.
#[test]
fn the_first_response_is_checked() {
    let both = HostDigests { header: true, data: true };
    for (response, why) in [
        (InitializeResponse { data_digest: false, ..response(both) }, "digests"),
        (InitializeResponse { max_h2c_data: 4095, ..response(both) }, "parameters"),
        (InitializeResponse { controller_alignment: 3, ..response(both) }, "aligned"),
        (InitializeResponse { controller_alignment: 32, ..response(both) }, "parameters"),
    ] {
        let error = HostQueue::new(both, 1).take(&mut &response.encode()[..]).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}

/// A controller without data digests, whose answers a test can delay.
struct Controller {
    admin: HostAdmin,
    /// The event requests that wait, and the log pages that were read.
    event_requests: Vec<u16>,
    pages: Vec<u8>,
    is_ready: bool,
}

impl Controller {
    fn new() -> Controller {
        let options = HostOptions {
            host: "nqn.2014-08.org.example:host".into(),
            host_id: [1; 16],
            subsystem: "nqn.2014-08.org.example:disks".into(),
            nsid: 1,
            digests: HostDigests::default(),
            kato_ms: 5000,
            queues: 2,
            secrets: None,
        };
        let admin = HostAdmin::new(options);
        Controller { admin, event_requests: Vec::new(), pages: Vec::new(), is_ready: false }
    }

    /// Data of Identify: the controller (1), the namespace (0), or the list of its identifiers (3).
    fn identify(structure: u8) -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        match structure {
            0 => {
                bytes[0] = 64;
                bytes[130] = 9;
            }
            1 => {
                (bytes[78], bytes[93], bytes[111], bytes[320]) = (1, 1, 1, 1);
                (bytes[514], bytes[536], bytes[1792], bytes[1796]) = (32, 1, 4, 1);
            }
            _ => {}
        }
        bytes
    }

    /// Takes the commands of the host. Returns the answers, except to event requests.
    fn answers(&mut self) -> Vec<u8> {
        let (out, mut answers) = (self.admin.take_out(), Vec::new());
        let mut rest = &out[..];
        if rest.len() == 128 && rest[0] == 0 {
            return response(HostDigests::default()).encode().to_vec();
        }
        while !rest.is_empty() {
            let len = u32::from_le_bytes(rest[4..8].try_into().unwrap()) as usize;
            let command = NvmeCommand::from_bytes(rest[8..72].try_into().unwrap());
            let (id, argument) = (command.id(), command.dword(10) as u8);
            let data = |bytes: &[u8]| data_pdu(id, 0, bytes, true, HostDigests::default());
            match command.opcode() {
                0x0c => self.event_requests.push(id),
                0x06 => answers.extend(data(&Controller::identify(argument))),
                0x02 => {
                    self.pages.push(argument);
                    answers.extend(data(&[0; 4096]));
                }
                // Connect says controller 1, CSTS ready, and CAP 32 entries.
                _ => {
                    let [connect, status] = [command.bytes()[4] == 1, command.bytes()[44] == 0x1c];
                    answers.extend(completion_with(id, if connect || status { 1 } else { 31 }));
                }
            }
            rest = &rest[len..];
        }
        answers
    }

    fn give(&mut self, bytes: &[u8]) {
        let mut input = bytes;
        while let Some(event) = self.admin.take(&mut input).unwrap() {
            self.is_ready |= matches!(event, AdminEvent::Ready(_));
        }
    }

    /// Answers commands until the host sends none.
    fn settle(&mut self) {
        for _ in 0..40 {
            let answers = self.answers();
            self.give(&answers);
        }
    }

    /// Reports that the namespace has changed.
    fn report_change(&mut self) -> bool {
        let Some(id) = self.event_requests.pop() else { return false };
        self.give(&completion_with(id, 2 | 0x04 << 16));
        true
    }
}

fn completion_with(id: u16, result: u64) -> Vec<u8> {
    let mut out = [0; 128];
    let completion = Completion { result, sq_head: 0, id, status: NvmeStatus::SUCCESS };
    let n = encode_capsule_response(&mut out, &completion, &limits(HostDigests::default()));
    out[..n].to_vec()
}

/// A controller reports no other change before the host has read the log of the last one. So the
/// host reads the log after each event, also after one that comes while it reads the namespace.
#[test]
fn each_namespace_event_is_followed_by_a_read_of_its_log() {
    let mut controller = Controller::new();
    controller.settle();
    assert!(controller.is_ready && controller.pages.is_empty());
    assert!(controller.report_change());
    // The host reads the log, whose answer is delayed; it waits for another event meanwhile.
    let delayed = controller.answers();
    assert_eq!(controller.pages, [0x04]);
    assert!(controller.report_change());
    controller.give(&delayed);
    controller.settle();
    assert_eq!(controller.pages, [0x04, 0x04]);
}
