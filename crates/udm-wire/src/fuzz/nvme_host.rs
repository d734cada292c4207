//! NVMe/TCP: all bytes of a hostile controller to this host.

use super::assert_one_line_error;
use crate::nvme::host::{
    AdminEvent, ControllerFacts, HostAdmin, HostCommand, HostData, HostDigests, HostEvent, HostOptions,
    HostQueue, IoQueueSetup, NamespaceFacts, find_ana_state,
};
use crate::nvme::{IDENTIFY_SIZE, InitializeResponse};

const READ: u32 = 4096;
const WRITE: u32 = 8192;

fn options(digests: HostDigests) -> HostOptions {
    HostOptions {
        host: "nqn.2014-08.host".into(),
        host_id: [1; 16],
        subsystem: "nqn.2014-08.x".into(),
        nsid: 1,
        digests,
        kato_ms: 5000,
        queues: 4,
        secrets: None,
    }
}

/// The events of a queue with three commands in flight, and the data of its read. The bytes come in
/// pieces of `step` bytes.
fn feed_queue(digests: HostDigests, data: &[u8], step: usize) -> (Vec<String>, Vec<u8>) {
    let mut queue = HostQueue::new(digests, 3);
    let HostDigests { header: header_digest, data: data_digest } = digests;
    let (controller_alignment, max_h2c_data) = (0, 4096);
    let response = InitializeResponse { controller_alignment, header_digest, data_digest, max_h2c_data };
    assert_eq!(queue.take(&mut &response.encode()[..]), Ok(Some(HostEvent::Initialized)));
    let mut header = [0; 128];
    let read = HostCommand::read_write(1, 0, READ / 512, false, HostData::Read(READ));
    let write = HostCommand::read_write(1, 0, WRITE / 512, true, HostData::Write(WRITE));
    for (id, command) in [(0, read), (1, write), (2, HostCommand::flush(1))] {
        queue.put_command(&mut header, id, &command);
    }
    let (mut events, mut content, mut received, mut requested) = (Vec::new(), vec![0; READ as usize], 0, 0);
    for mut input in data.chunks(step) {
        loop {
            match queue.take(&mut input) {
                Err(error) => {
                    assert_one_line_error(&error);
                    events.push(error.to_string());
                    return (events, content);
                }
                Ok(None) => break assert!(input.is_empty()),
                Ok(Some(HostEvent::Data { id, at, bytes })) => {
                    assert_eq!((id, at), (0, received), "only a read has data, in order");
                    content[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
                    received += bytes.len() as u32;
                }
                Ok(Some(HostEvent::ReadyToTransfer(range))) => {
                    assert_eq!((range.command, range.offset), (1, requested), "only a write, in order");
                    requested += range.len;
                    assert!(range.len > 0 && requested <= WRITE);
                    queue.put_data(&mut header, &range, true);
                    events.push(format!("{range:?}"));
                }
                Ok(Some(event)) => {
                    if let HostEvent::Completed { id: 0, status, .. } = event {
                        assert!(!status.is_ok() || received == READ, "a read has all its data");
                    }
                    events.push(format!("{event:?}"));
                }
            }
        }
    }
    (events, content)
}

/// All bytes of a controller: on an I/O queue with a read, a write and a flush in flight, on a new
/// admin queue, on a new I/O queue, and as the structures that a host reads. The first byte selects
/// the digests, the second one is the length of the pieces. The pieces must not matter, no command
/// may end twice, and no data may be outside its command.
pub fn fuzz_nvme_host_pdu(data: &[u8]) {
    let Some((&[kind, step], data)) = data.split_first_chunk() else { return };
    let digests = HostDigests { header: kind & 1 != 0, data: kind & 2 != 0 };
    let whole = feed_queue(digests, data, data.len().max(1));
    assert_eq!(feed_queue(digests, data, usize::from(step).max(1)), whole, "pieces do not matter");
    let ended = whole.0.iter().filter(|event| event.starts_with("Completed")).count();
    assert!(ended <= 3, "{:?}", whole.0);
    let mut admin = HostAdmin::new(options(digests));
    let mut input = data;
    loop {
        match admin.take(&mut input) {
            Err(error) => break assert_one_line_error(&error),
            Ok(None) => break,
            Ok(Some(AdminEvent::NotReady)) => admin.ask_status(),
            Ok(Some(_)) => {}
        }
    }
    let (mut setup, mut out) = IoQueueSetup::begin(&options(digests), 1, 1, 8);
    if let Err(error) = setup.take(&options(digests), &mut &data[..], &mut out) {
        assert_one_line_error(&error);
    }
    let mut bytes = [0; IDENTIFY_SIZE];
    let n = data.len().min(IDENTIFY_SIZE);
    bytes[..n].copy_from_slice(&data[..n]);
    let _ = find_ana_state(data, 1);
    match ControllerFacts::decode(&bytes, u16::from_le_bytes([bytes[78], bytes[79]]), u64::from(step) << 48) {
        Err(error) => assert_one_line_error(&error),
        Ok(controller) => {
            assert!(controller.queue_entries >= 2 && controller.transfer_max >= 4096);
            match NamespaceFacts::decode(1, &bytes, &bytes, &controller) {
                Err(error) => assert_one_line_error(&error),
                Ok(namespace) => {
                    let limits = namespace.limits;
                    assert!(limits.logical_block.is_power_of_two() && limits.max_sectors.0 > 0);
                    assert!(limits.physical_block.is_power_of_two() && limits.size.0 > 0);
                }
            }
        }
    }
}
