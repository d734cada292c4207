//! Commands as a host sends them.

use crate::nvme::fabrics::CONNECT_DATA_SIZE;
use crate::nvme::{
    ConnectCommand, ControllerInstance, DATASET_RANGE_SIZE, IDENTIFY_SIZE, NvmeCommand,
    OPCODE_CROSS_CONTROLLER_RESET, OPCODE_FABRICS, SQE_SIZE,
};

/// Where the data of a command goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum HostData {
    /// There is none.
    #[default]
    None,
    /// The controller sends this many bytes, at least 1.
    Read(u32),
    /// This many bytes follow in the capsule, at least 1.
    InCapsule(u32),
    /// The controller asks for this many bytes by R2T, at least 1.
    Write(u32),
}

/// A command of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct HostCommand {
    opcode: u8,
    nsid: u32,
    dwords: [u32; 6],
    /// The data.
    pub data: HostData,
    connect: Option<ConnectCommand>,
}

impl HostCommand {
    /// A command with an opcode, a namespace and nothing else.
    const fn plain(opcode: u8, nsid: u32, dwords: [u32; 6], data: HostData) -> HostCommand {
        HostCommand { opcode, nsid, dwords, data, connect: None }
    }

    /// Makes completed writes durable.
    #[must_use]
    pub const fn flush(nsid: u32) -> HostCommand {
        HostCommand::plain(0x00, nsid, [0; 6], HostData::None)
    }

    /// Reads or writes `blocks` blocks, 1 to 65536, from `start` on. `data` tells which.
    #[must_use]
    pub const fn read_write(nsid: u32, start: u64, blocks: u32, fua: bool, data: HostData) -> HostCommand {
        let opcode = if matches!(data, HostData::Read(_)) { 0x02 } else { 0x01 };
        let flags = (blocks - 1) | (fua as u32) << 30;
        HostCommand::plain(opcode, nsid, [start as u32, (start >> 32) as u32, flags, 0, 0, 0], data)
    }

    /// Fills `blocks` blocks, 1 to 65536, with zeroes. With `deallocate` they may be deallocated.
    #[must_use]
    pub const fn write_zeroes(
        nsid: u32,
        start: u64,
        blocks: u32,
        fua: bool,
        deallocate: bool,
    ) -> HostCommand {
        let flags = (blocks - 1) | (fua as u32) << 30 | (deallocate as u32) << 25;
        let dwords = [start as u32, (start >> 32) as u32, flags, 0, 0, 0];
        HostCommand::plain(0x08, nsid, dwords, HostData::None)
    }

    /// Deallocates one range, which [`encode_dataset_range`] describes. It is in the capsule if the
    /// controller takes `capsule_data_max` bytes there.
    #[must_use]
    pub const fn deallocate(nsid: u32, capsule_data_max: u32) -> HostCommand {
        let len = DATASET_RANGE_SIZE as u32;
        let data = if len <= capsule_data_max { HostData::InCapsule(len) } else { HostData::Write(len) };
        HostCommand::plain(0x09, nsid, [0, 1 << 2, 0, 0, 0, 0], data)
    }

    /// Reads structure `structure` (*Base* figure 273) of Identify.
    #[must_use]
    pub const fn identify(structure: u8, nsid: u32) -> HostCommand {
        let data = HostData::Read(IDENTIFY_SIZE as u32);
        HostCommand::plain(0x06, nsid, [structure as u32, 0, 0, 0, 0, 0], data)
    }

    /// Reads the first `len` bytes, a multiple of 4, of a log page.
    #[must_use]
    pub const fn log_page(page: u8, specific: u8, len: u32) -> HostCommand {
        let dwords = len / 4 - 1;
        let first = page as u32 | (specific as u32) << 8 | (dwords & 0xffff) << 16;
        HostCommand::plain(0x02, u32::MAX, [first, dwords >> 16, 0, 0, 0, 0], HostData::Read(len))
    }

    /// Sets feature `feature` to `value`.
    #[must_use]
    pub const fn set_features(feature: u8, value: u32) -> HostCommand {
        HostCommand::plain(0x09, 0, [feature as u32, value, 0, 0, 0, 0], HostData::None)
    }

    /// Waits for an event.
    #[must_use]
    pub const fn async_event_request() -> HostCommand {
        HostCommand::plain(0x0c, 0, [0; 6], HostData::None)
    }

    /// Restarts the keep-alive timer.
    #[must_use]
    pub const fn keep_alive() -> HostCommand {
        HostCommand::plain(0x18, 0, [0; 6], HostData::None)
    }

    /// Reads a property; with `is_long`, one of 8 bytes.
    #[must_use]
    pub const fn property_get(offset: u32, is_long: bool) -> HostCommand {
        HostCommand::plain(OPCODE_FABRICS, 0x04, [is_long as u32, offset, 0, 0, 0, 0], HostData::None)
    }

    /// Sets a property of 4 bytes.
    #[must_use]
    pub const fn property_set(offset: u32, value: u32) -> HostCommand {
        HostCommand::plain(OPCODE_FABRICS, 0x00, [0, offset, value, 0, 0, 0], HostData::None)
    }

    /// Asks for a reset of another controller (*Base* 2.3, figure 522).
    #[must_use]
    pub const fn cross_controller_reset(impacted: &ControllerInstance) -> HostCommand {
        let ControllerInstance { id, uniquifier, random } = *impacted;
        let first = id as u32 | (uniquifier as u32) << 16;
        let dwords = [first, 0, random as u32, (random >> 32) as u32, 0, 0];
        HostCommand::plain(OPCODE_CROSS_CONTROLLER_RESET, 0, dwords, HostData::None)
    }

    /// Sends a message of the authentication, of `len` bytes in the capsule.
    #[must_use]
    pub const fn authentication_send(len: u32) -> HostCommand {
        HostCommand::authentication(0x05, len, HostData::InCapsule(len))
    }

    /// Receives a message of the authentication of at most `len` bytes. The controller fills the
    /// rest with zeroes.
    #[must_use]
    pub const fn authentication_receive(len: u32) -> HostCommand {
        HostCommand::authentication(0x06, len, HostData::Read(len))
    }

    const fn authentication(kind: u32, len: u32, data: HostData) -> HostCommand {
        // SPSP0 and SPSP1 are 1, SECP is that of DH-HMAC-CHAP (*Base* 6.1).
        const PROTOCOL: u32 = 0xe9 << 24 | 1 << 16 | 1 << 8;
        HostCommand::plain(OPCODE_FABRICS, kind, [PROTOCOL, len, 0, 0, 0, 0], data)
    }

    /// Connects a queue. Its data is in the capsule.
    #[must_use]
    pub fn connect(command: ConnectCommand) -> HostCommand {
        let data = HostData::InCapsule(CONNECT_DATA_SIZE as u32);
        HostCommand { opcode: OPCODE_FABRICS, data, connect: Some(command), ..HostCommand::default() }
    }

    /// The 64 bytes with the identifier `id`.
    #[must_use]
    pub fn encode(&self, id: u16) -> NvmeCommand {
        if let Some(connect) = &self.connect {
            return connect.encode(id);
        }
        let mut bytes = [0; SQE_SIZE];
        // SGLs are used.
        (bytes[0], bytes[1]) = (self.opcode, 0x40);
        bytes[2..4].copy_from_slice(&id.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.nsid.to_le_bytes());
        let (kind, len) = match self.data {
            HostData::None => (0x5a, 0),
            HostData::Read(len) | HostData::Write(len) => (0x5a, len),
            HostData::InCapsule(len) => (0x01, len),
        };
        bytes[32..36].copy_from_slice(&len.to_le_bytes());
        bytes[39] = kind;
        for (at, dword) in self.dwords.iter().enumerate() {
            bytes[40 + at * 4..44 + at * 4].copy_from_slice(&dword.to_le_bytes());
        }
        NvmeCommand::from_bytes(bytes)
    }
}

/// The data of [`HostCommand::deallocate`].
#[must_use]
pub fn encode_dataset_range(start: u64, blocks: u32) -> [u8; DATASET_RANGE_SIZE] {
    let mut bytes = [0; DATASET_RANGE_SIZE];
    bytes[4..8].copy_from_slice(&blocks.to_le_bytes());
    bytes[8..].copy_from_slice(&start.to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nvme::{
        AuthenticationCommand, CrossControllerReset, DataPointer, DatasetRange, DatasetRequest,
        FabricsCommand, LogPage, LogPageRequest, PropertyGet, RwFlags, RwRequest, property,
    };

    /// The controller's decoders read each command as the host means it.
    #[test]
    fn commands_read_back() {
        let write = HostCommand::read_write(3, 1 << 33, 65536, true, HostData::Write(32 << 20)).encode(7);
        assert_eq!((write.opcode(), write.id(), write.nsid()), (1, 7, 3));
        assert_eq!(write.data_pointer(), DataPointer::Transport { len: 32 << 20 });
        let range = RwRequest::decode(&write);
        assert_eq!((range.start, range.blocks), (1 << 33, 65536));
        assert!(range.flags().contains(RwFlags::FUA));
        let read = HostCommand::read_write(1, 8, 1, false, HostData::Read(512)).encode(0);
        assert_eq!((read.opcode(), RwRequest::decode(&read).blocks), (2, 1));
        let log = HostCommand::log_page(0x0c, 1, 4096).encode(1);
        let LogPageRequest { page, specific, retains_event, len, offset } = LogPageRequest::decode(&log);
        assert_eq!((page, specific, retains_event, len, offset), (LogPage::Ana, 1, false, 4096, 0));
        let get = HostCommand::property_get(property::CAPABILITIES, true).encode(1);
        let want = PropertyGet { offset: property::CAPABILITIES, is_long: true };
        assert_eq!(FabricsCommand::decode(&get), FabricsCommand::PropertyGet(want));
        let impacted = ControllerInstance { id: 0x1234, uniquifier: 0x56, random: 0x789a_bcde_f012_3456 };
        let reset = CrossControllerReset { impacted };
        assert_eq!(HostCommand::cross_controller_reset(&impacted).encode(3).opcode(), 0x38);
        let decoded = CrossControllerReset::decode(&HostCommand::cross_controller_reset(&impacted).encode(3));
        assert_eq!(decoded, reset);
        let send = HostCommand::authentication_send(72).encode(5);
        assert_eq!(send.bytes(), AuthenticationCommand::encode_send(5, 72).bytes());
        let receive = HostCommand::authentication_receive(1024).encode(6);
        assert_eq!(receive.bytes(), AuthenticationCommand::encode_receive(6, 1024).bytes());
        // A controller without data in capsules asks for the range.
        for (max, pointer) in [
            (16, DataPointer::InCapsule { offset: 0, len: 16 }),
            (15, DataPointer::Transport { len: 16 }),
            (0, DataPointer::Transport { len: 16 }),
        ] {
            let discard = HostCommand::deallocate(1, max).encode(1);
            assert_eq!(DatasetRequest::decode(&discard), DatasetRequest { ranges: 1, deallocates: true });
            assert_eq!(discard.data_pointer(), pointer);
        }
        let range = DatasetRange { start: 9, blocks: 8 };
        assert_eq!(DatasetRange::decode(&encode_dataset_range(9, 8)), range);
    }
}
