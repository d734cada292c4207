//! Control commands: `struct ublksrv_ctrl_cmd` and `struct ublksrv_ctrl_dev_info`.

use super::{READ, READ_WRITE, UblkFeatures, ioctl_number, read_int, write_ints};

/// Bytes of an encoded control command.
pub const CONTROL_SIZE: usize = 32;
/// Bytes of an encoded [`UblkDeviceInfo`].
pub const DEVICE_INFO_SIZE: usize = 64;

/// A control command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UblkControlCommand {
    /// Create `/dev/ublkcN` from a [`UblkDeviceInfo`], which comes back as the driver changed it.
    AddDevice,
    /// Remove it, and wait until its number is free.
    DeleteDevice,
    /// Create `/dev/ublkbN`. Waits until the server has fetched with all tags of all queues. The
    /// data is the process ID of the server.
    StartDevice,
    /// Remove `/dev/ublkbN`. Requests fail from now on.
    StopDevice,
    /// The same, but EBUSY if the block device is open. Needs [`UblkFeatures::SAFE_STOP_DEV`].
    TryStopDevice,
    /// Set the parameters, before the start.
    SetParams,
    /// Read the parameters.
    GetParams,
    /// Prepare the device for a new server; EBUSY while the old one ends.
    StartRecovery,
    /// Give the device to the new server. Waits and has data like `StartDevice`.
    EndRecovery,
    /// Read the [`UblkDeviceInfo`]. The buffer begins with the path of the device.
    GetDeviceInfo,
    /// Read the features of the driver: 8 bytes (Linux 6.5).
    GetFeatures,
    /// Change the size to the data, in sectors. Needs [`UblkFeatures::UPDATE_SIZE`].
    UpdateSize,
}

impl UblkControlCommand {
    /// The number of the command for the kernel.
    #[must_use]
    pub const fn code(self) -> u32 {
        let (direction, number) = match self {
            Self::AddDevice => (READ_WRITE, 0x04),
            Self::DeleteDevice => (READ_WRITE, 0x05),
            Self::StartDevice => (READ_WRITE, 0x06),
            Self::StopDevice => (READ_WRITE, 0x07),
            Self::SetParams => (READ_WRITE, 0x08),
            Self::GetParams => (READ, 0x09),
            Self::StartRecovery => (READ_WRITE, 0x10),
            Self::EndRecovery => (READ_WRITE, 0x11),
            Self::GetDeviceInfo => (READ, 0x12),
            Self::GetFeatures => (READ, 0x13),
            Self::UpdateSize => (READ_WRITE, 0x15),
            Self::TryStopDevice => (READ_WRITE, 0x17),
        };
        ioctl_number(direction, number, CONTROL_SIZE)
    }

    /// The command in words, for messages.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            Self::AddDevice => "add device",
            Self::DeleteDevice => "delete device",
            Self::StartDevice => "start device",
            Self::StopDevice | Self::TryStopDevice => "stop device",
            Self::SetParams => "set parameters",
            Self::GetParams => "get parameters",
            Self::StartRecovery => "start recovery",
            Self::EndRecovery => "end recovery",
            Self::GetDeviceInfo => "get device info",
            Self::GetFeatures => "get features",
            Self::UpdateSize => "update size",
        }
    }
}

/// The fields of a control command but its buffer: the owner of the buffer writes its address at
/// [`UblkControlHeader::ADDRESS`] and its length at [`UblkControlHeader::LENGTH`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UblkControlHeader {
    /// Number of the device; `u32::MAX` for a new device with any number.
    pub device: u32,
    /// Data of the command.
    pub data: u64,
    /// Length of the path at the start of the buffer, with its NUL: the kernel checks the
    /// permissions of the path. Needed for devices of users without privileges.
    pub path_len: u16,
}

impl UblkControlHeader {
    /// Byte offset of the length of the buffer (16 bits).
    pub const LENGTH: usize = 6;
    /// Byte offset of the address of the buffer (64 bits).
    pub const ADDRESS: usize = 8;

    /// Encodes the command without a buffer.
    #[must_use]
    pub fn encode(&self) -> [u8; CONTROL_SIZE] {
        let mut out = [0; CONTROL_SIZE];
        write_ints!(out, 0 => self.device, 4 => u16::MAX, 16 => self.data, 24 => self.path_len);
        out
    }
}

/// The state of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum UblkDeviceState {
    /// There is no block device.
    #[default]
    Dead,
    /// A server answers requests.
    Live,
    /// The server has ended; requests wait for the next one.
    Quiesced,
    /// The server has ended; requests fail until the next one.
    FailIo,
    /// A state of a newer kernel.
    Unknown(u16),
}

impl UblkDeviceState {
    const fn from_number(number: u16) -> UblkDeviceState {
        match number {
            0 => Self::Dead,
            1 => Self::Live,
            2 => Self::Quiesced,
            3 => Self::FailIo,
            other => Self::Unknown(other),
        }
    }

    const fn number(self) -> u16 {
        match self {
            Self::Dead => 0,
            Self::Live => 1,
            Self::Quiesced => 2,
            Self::FailIo => 3,
            Self::Unknown(other) => other,
        }
    }
}

/// A mark in a device's info that says which server of udm made the device, and for which name. The
/// driver keeps it and does not look at it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UblkOwner {
    /// 24 bits from the server's state folder.
    pub server: u32,
    /// 24 bits from the name of the device.
    pub name: u32,
}

/// The first 16 bits of udm's mark.
const OWNER_MAGIC: u64 = 0x7564;

impl UblkOwner {
    /// The mark of the device `name` of the servers with the state folder `folder`.
    #[must_use]
    pub fn new(folder: &[u8], name: &str) -> UblkOwner {
        UblkOwner { server: hash_24(folder), name: hash_24(name.as_bytes()) }
    }

    /// Encodes the mark.
    #[must_use]
    pub const fn encode(self) -> u64 {
        OWNER_MAGIC << 48 | (self.server as u64) << 24 | self.name as u64
    }

    /// Decodes a mark; `None` if it is not one of udm.
    #[must_use]
    pub const fn decode(mark: u64) -> Option<UblkOwner> {
        const MASK: u64 = (1 << 24) - 1;
        if mark >> 48 != OWNER_MAGIC {
            return None;
        }
        Some(UblkOwner { server: (mark >> 24 & MASK) as u32, name: (mark & MASK) as u32 })
    }
}

/// FNV-1a with 64 bits, folded to 24.
fn hash_24(bytes: &[u8]) -> u32 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325, step);
    ((hash ^ hash >> 24 ^ hash >> 48) & 0xff_ffff) as u32
}

/// A device, as it is created and as the driver describes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UblkDeviceInfo {
    /// Number of queues; the driver makes at most one per CPU.
    pub queues: u16,
    /// Requests per queue.
    pub depth: u16,
    /// State, from the driver.
    pub state: UblkDeviceState,
    /// The longest data of a request in bytes; the driver rounds it to pages.
    pub io_bytes_max: u32,
    /// Number of the device.
    pub number: u32,
    /// Process ID of the server, from the driver.
    pub server_pid: i32,
    /// Flags; the driver clears those that it does not support.
    pub flags: UblkFeatures,
    /// The server's own mark ([`UblkOwner`]).
    pub mark: u64,
    /// User who created the device, from the driver.
    pub owner_uid: u32,
}

impl UblkDeviceInfo {
    /// Encodes the info.
    #[must_use]
    pub fn encode(&self) -> [u8; DEVICE_INFO_SIZE] {
        let mut out = [0; DEVICE_INFO_SIZE];
        write_ints!(
            out,
            0 => self.queues,
            2 => self.depth,
            4 => self.state.number(),
            8 => self.io_bytes_max,
            12 => self.number,
            16 => self.server_pid,
            24 => self.flags.bits(),
            32 => self.mark,
            40 => self.owner_uid,
        );
        out
    }

    /// Decodes an info.
    #[must_use]
    pub fn decode(bytes: &[u8; DEVICE_INFO_SIZE]) -> UblkDeviceInfo {
        UblkDeviceInfo {
            queues: read_int!(u16, bytes, 0),
            depth: read_int!(u16, bytes, 2),
            state: UblkDeviceState::from_number(read_int!(u16, bytes, 4)),
            io_bytes_max: read_int!(u32, bytes, 8),
            number: read_int!(u32, bytes, 12),
            server_pid: read_int!(i32, bytes, 16),
            flags: UblkFeatures::from_bits_retain(read_int!(u64, bytes, 24)),
            mark: read_int!(u64, bytes, 32),
            owner_uid: read_int!(u32, bytes, 40),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_have_the_numbers_of_the_header_file() {
        use UblkControlCommand as C;
        let expected = [
            (C::AddDevice, 0xc020_7504),
            (C::DeleteDevice, 0xc020_7505),
            (C::StartDevice, 0xc020_7506),
            (C::StopDevice, 0xc020_7507),
            (C::SetParams, 0xc020_7508),
            (C::GetParams, 0x8020_7509),
            (C::StartRecovery, 0xc020_7510),
            (C::EndRecovery, 0xc020_7511),
            (C::GetDeviceInfo, 0x8020_7512),
            (C::GetFeatures, 0x8020_7513),
            (C::UpdateSize, 0xc020_7515),
            (C::TryStopDevice, 0xc020_7517),
        ];
        for (command, code) in expected {
            assert_eq!(command.code(), code, "{command:?}");
        }
    }

    #[test]
    fn a_control_command_has_the_layout_of_the_kernel() {
        let header = UblkControlHeader { device: 0x0403_0201, data: 0x1817_1615_1413_1211, path_len: 0x2221 };
        let expected = [
            [1, 2, 3, 4, 0xff, 0xff, 0, 0], // dev_id, queue_id, len
            [0; 8],                         // addr
            [0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18],
            [0x21, 0x22, 0, 0, 0, 0, 0, 0], // dev_path_len, pad, reserved
        ];
        assert_eq!(header.encode(), expected.as_flattened());
    }

    #[test]
    fn a_device_info_has_the_layout_of_the_kernel() {
        let info = UblkDeviceInfo {
            queues: 0x0201,
            depth: 0x0403,
            state: UblkDeviceState::Quiesced,
            io_bytes_max: 0x1413_1211,
            number: 0x1817_1615,
            server_pid: 0x2423_2221,
            flags: UblkFeatures::from_bits_retain(0x3837_3635_3433_3231),
            mark: 0x4847_4645_4443_4241,
            owner_uid: 0x5453_5251,
        };
        let expected = [
            [1, 2, 3, 4, 2, 0, 0, 0], // nr_hw_queues, queue_depth, state, pad0
            [0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18], // max_io_buf_bytes, dev_id
            [0x21, 0x22, 0x23, 0x24, 0, 0, 0, 0], // ublksrv_pid, pad1
            [0x31, 0x32, 0x33, 0x34, 0x35, 0x36, 0x37, 0x38], // flags
            [0x41, 0x42, 0x43, 0x44, 0x45, 0x46, 0x47, 0x48], // ublksrv_flags
            [0x51, 0x52, 0x53, 0x54, 0, 0, 0, 0], // owner_uid, owner_gid
            [0; 8],
            [0; 8],
        ];
        assert_eq!(info.encode(), expected.as_flattened());
        assert_eq!(UblkDeviceInfo::decode(&info.encode()), info);
    }

    #[test]
    fn a_mark_says_which_server_and_which_name() {
        let mark = UblkOwner::new(b"/var/lib/udm", "disk");
        assert_eq!(UblkOwner::decode(mark.encode()), Some(mark));
        assert_eq!(mark.encode() >> 48, 0x7564);
        for other in [UblkOwner::new(b"/var/lib/udn", "disk"), UblkOwner::new(b"/var/lib/udm", "disl")] {
            assert_ne!(other, mark);
        }
        // Other servers leave the field empty, or have flags of their own in the low bits.
        assert_eq!(UblkOwner::decode(0), None);
        assert_eq!(UblkOwner::decode(3), None);
    }
}
