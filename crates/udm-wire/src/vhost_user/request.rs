//! Requests of a front end.

use super::{
    CONFIG_PAYLOAD_MAX, TABLE_REGIONS_MAX, VhostUserError, VhostUserMessageHeader, VhostUserProtocolFeatures,
};
use crate::virtio::VirtioFeatures;

/// Bit of a `SET_VRING_{KICK,CALL,ERR}` payload: no descriptor is sent.
const VRING_NO_FD: u64 = 1 << 8;
const VRING_INDEX: u64 = 0xff;

/// A region of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestMemoryRegion {
    /// First address in the guest.
    pub guest_address: u64,
    /// Length in bytes.
    pub size: u64,
    /// First address in the front end's process. Rings are named by such addresses.
    pub user_address: u64,
    /// Offset of the region in its file.
    pub file_offset: u64,
}

/// The regions of a SET_MEM_TABLE, in order; one file descriptor belongs to each.
pub type GuestMemoryTable = Vec<GuestMemoryRegion>;

/// A number for one ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VringState {
    /// Number of the ring.
    pub index: u32,
    /// A size, an index, or 0 and 1 for disabled and enabled.
    pub value: u32,
}

/// Addresses of a ring in the front end's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VringAddresses {
    /// Number of the ring.
    pub index: u32,
    /// The descriptor table.
    pub descriptors: u64,
    /// The used ring.
    pub used: u64,
    /// The available ring.
    pub avail: u64,
}

/// A file descriptor for a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VringFd {
    /// Number of the ring.
    pub index: u32,
    /// The message has a descriptor; otherwise the ring is polled, or is not notified.
    pub has_fd: bool,
}

/// A range of the configuration space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigSpaceRange {
    /// Offset of the first byte.
    pub offset: u32,
    /// The flags of the front end, which a reply repeats.
    pub flags: u32,
    /// The bytes: the new ones of SET_CONFIG, and as many as GET_CONFIG asks for.
    pub bytes: Vec<u8>,
}

impl ConfigSpaceRange {
    /// Encodes the payload of the reply to GET_CONFIG.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(12 + self.bytes.len());
        out.extend(self.offset.to_ne_bytes());
        out.extend((self.bytes.len() as u32).to_ne_bytes());
        out.extend(self.flags.to_ne_bytes());
        out.extend(&self.bytes);
        out
    }
}

/// The memory in which requests in flight are recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InflightArea {
    /// Bytes of the area.
    pub size: u64,
    /// Offset of the area in its file.
    pub offset: u64,
    /// Number of rings.
    pub queues: u16,
    /// Size of each ring.
    pub ring_size: u16,
}

impl InflightArea {
    /// Encodes the payload of the reply to GET_INFLIGHT_FD.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(24);
        out.extend(self.size.to_ne_bytes());
        out.extend(self.offset.to_ne_bytes());
        out.extend(self.queues.to_ne_bytes());
        out.extend(self.ring_size.to_ne_bytes());
        out.extend([0; 4]);
        out
    }
}

/// A request of the front end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VhostUserRequest {
    /// Queries the virtio features that the device offers. Reply: u64.
    GetFeatures,
    /// These virtio features are used.
    SetFeatures(VirtioFeatures),
    /// The front end owns the session.
    SetOwner,
    /// Obsolete; disables all rings.
    ResetOwner,
    /// The guest's memory; a descriptor a region.
    SetMemTable(GuestMemoryTable),
    /// Number of entries of a ring.
    SetVringNum(VringState),
    /// Addresses of a ring.
    SetVringAddr(VringAddresses),
    /// Index at which the ring continues.
    SetVringBase(VringState),
    /// Stop the ring. Reply: the index at which it continues.
    GetVringBase(u32),
    /// The eventfd by which the guest announces entries. It starts the ring.
    SetVringKick(VringFd),
    /// The eventfd by which the guest is notified.
    SetVringCall(VringFd),
    /// The eventfd by which errors of the ring are announced.
    SetVringErr(VringFd),
    /// Which protocol features exist? Reply: u64.
    GetProtocolFeatures,
    /// These protocol features are used.
    SetProtocolFeatures(VhostUserProtocolFeatures),
    /// How many rings are possible? Reply: u64.
    GetQueueNum,
    /// Enables or disables a ring.
    SetVringEnable(VringState),
    /// The channel for requests of the back end, as a descriptor.
    SetBackendReqFd,
    /// Reads the configuration space. Reply: the range.
    GetConfig(ConfigSpaceRange),
    /// Writes the configuration space.
    SetConfig(ConfigSpaceRange),
    /// Create the memory for requests in flight. Reply: the area and a descriptor.
    GetInflightFd(InflightArea),
    /// The memory for requests in flight, as a descriptor.
    SetInflightFd(InflightArea),
    /// Disables all rings and resets the device.
    ResetDevice,
    /// How many memory regions are possible? Reply: u64.
    GetMaxMemSlots,
    /// Adds a region, with its descriptor.
    AddMemReg(GuestMemoryRegion),
    /// Removes a region.
    RemMemReg(GuestMemoryRegion),
    /// The status of the device, as the guest has set it.
    SetStatus(u8),
    /// Reads the status of the device. Reply: u64.
    GetStatus,
    /// A request that this back end does not support.
    Unsupported(u32),
}

/// Reads fields of a payload whose length was checked.
struct VhostUserFieldReader<'a>(&'a [u8]);

impl VhostUserFieldReader<'_> {
    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let (front, rest) = self.0.split_at(N);
        self.0 = rest;
        let mut out = [0; N];
        out.copy_from_slice(front);
        out
    }

    fn u64(&mut self) -> u64 {
        u64::from_ne_bytes(self.bytes())
    }

    fn u32(&mut self) -> u32 {
        u32::from_ne_bytes(self.bytes())
    }

    fn u16(&mut self) -> u16 {
        u16::from_ne_bytes(self.bytes())
    }

    fn region(&mut self) -> GuestMemoryRegion {
        GuestMemoryRegion {
            guest_address: self.u64(),
            size: self.u64(),
            user_address: self.u64(),
            file_offset: self.u64(),
        }
    }
}

impl VhostUserRequest {
    /// Decodes a request with its `payload` and the number of descriptors that came with it.
    ///
    /// # Errors
    /// The payload or the number of descriptors is wrong, or a value is out of range.
    pub fn decode(
        header: &VhostUserMessageHeader,
        payload: &[u8],
        fds: usize,
    ) -> Result<VhostUserRequest, VhostUserError> {
        use VhostUserRequest as R;
        let name = request_name(header.request);
        if header.is_reply {
            return Err(VhostUserError::Value { name, why: "it is marked as a reply" });
        }
        let sized = |expected: usize| {
            let size = payload.len();
            if size == expected {
                Ok(VhostUserFieldReader(payload))
            } else {
                Err(VhostUserError::Size { name, size, expected })
            }
        };
        let state = || sized(8).map(|mut p| VringState { index: p.u32(), value: p.u32() });
        let vring_fd = || -> Result<VringFd, VhostUserError> {
            let value = sized(8)?.u64();
            let has_fd = value & VRING_NO_FD == 0;
            Ok(VringFd { index: (value & VRING_INDEX) as u32, has_fd })
        };
        let config = || -> Result<ConfigSpaceRange, VhostUserError> {
            if payload.len() < 12 {
                return Err(VhostUserError::Size { name, size: payload.len(), expected: 12 });
            }
            let mut p = VhostUserFieldReader(payload);
            let (offset, size, flags) = (p.u32(), p.u32() as usize, p.u32());
            if size != p.0.len() || size > CONFIG_PAYLOAD_MAX {
                return Err(VhostUserError::Value {
                    name,
                    why: "its size is not that of its bytes, up to 256",
                });
            }
            Ok(ConfigSpaceRange { offset, flags, bytes: p.0.to_vec() })
        };
        let inflight = || {
            // The structure has 20 bytes; most front ends also send its 4 bytes of padding.
            let p = if payload.len() == 20 { Ok(VhostUserFieldReader(payload)) } else { sized(24) };
            p.map(|mut p| InflightArea {
                size: p.u64(),
                offset: p.u64(),
                queues: p.u16(),
                ring_size: p.u16(),
            })
        };
        let region = || -> Result<GuestMemoryRegion, VhostUserError> {
            let mut p = sized(40)?;
            p.u64();
            Ok(p.region())
        };
        let request = match header.request {
            1 => R::GetFeatures,
            2 => R::SetFeatures(VirtioFeatures::from_bits_retain(sized(8)?.u64())),
            3 => R::SetOwner,
            4 => R::ResetOwner,
            5 => R::SetMemTable(decode_region_table(name, payload)?),
            8 => R::SetVringNum(state()?),
            9 => {
                let mut p = sized(40)?;
                let (index, _flags) = (p.u32(), p.u32());
                R::SetVringAddr(VringAddresses { index, descriptors: p.u64(), used: p.u64(), avail: p.u64() })
            }
            10 => R::SetVringBase(state()?),
            11 => R::GetVringBase(state()?.index),
            12 => R::SetVringKick(vring_fd()?),
            13 => R::SetVringCall(vring_fd()?),
            14 => R::SetVringErr(vring_fd()?),
            15 => R::GetProtocolFeatures,
            16 => R::SetProtocolFeatures(VhostUserProtocolFeatures::from_bits_retain(sized(8)?.u64())),
            17 => R::GetQueueNum,
            18 => R::SetVringEnable(state()?),
            21 => R::SetBackendReqFd,
            24 => R::GetConfig(config()?),
            25 => R::SetConfig(config()?),
            31 => R::GetInflightFd(inflight()?),
            32 => R::SetInflightFd(inflight()?),
            34 => R::ResetDevice,
            36 => R::GetMaxMemSlots,
            37 => R::AddMemReg(region()?),
            38 => R::RemMemReg(region()?),
            39 => {
                let value = sized(8)?.u64();
                let too_large = |_| VhostUserError::Value { name, why: "the status has more than 8 bits" };
                R::SetStatus(u8::try_from(value).map_err(too_large)?)
            }
            40 => R::GetStatus,
            other => R::Unsupported(other),
        };
        let expected = request.descriptors();
        // A front end may send the descriptor of a removed region too.
        let may_have = matches!(request, R::RemMemReg(_)) && fds == 1;
        if fds != expected && !may_have && !matches!(request, R::Unsupported(_)) {
            return Err(VhostUserError::Descriptors { name, fds, expected });
        }
        Ok(request)
    }

    /// True if the request is answered with a value. Such an answer cannot report a failure.
    #[must_use]
    pub fn has_own_reply(&self) -> bool {
        use VhostUserRequest as R;
        matches!(
            self,
            R::GetFeatures
                | R::GetVringBase(_)
                | R::GetProtocolFeatures
                | R::GetQueueNum
                | R::GetConfig(_)
                | R::GetInflightFd(_)
                | R::GetMaxMemSlots
                | R::GetStatus
        )
    }

    /// Number of file descriptors that come with the request.
    #[must_use]
    pub fn descriptors(&self) -> usize {
        match self {
            VhostUserRequest::SetMemTable(regions) => regions.len(),
            VhostUserRequest::SetVringKick(fd)
            | VhostUserRequest::SetVringCall(fd)
            | VhostUserRequest::SetVringErr(fd) => usize::from(fd.has_fd),
            VhostUserRequest::SetBackendReqFd
            | VhostUserRequest::SetInflightFd(_)
            | VhostUserRequest::AddMemReg(_) => 1,
            _ => 0,
        }
    }
}

fn decode_region_table(name: &'static str, payload: &[u8]) -> Result<GuestMemoryTable, VhostUserError> {
    if payload.len() < 8 {
        return Err(VhostUserError::Size { name, size: payload.len(), expected: 8 });
    }
    let mut p = VhostUserFieldReader(payload);
    let count = p.u32() as usize;
    p.u32();
    if count > TABLE_REGIONS_MAX {
        return Err(VhostUserError::Value { name, why: "it has more than 8 regions" });
    }
    // Some front ends always send the whole structure.
    let expected = 8 + 32 * count;
    if payload.len() < expected {
        return Err(VhostUserError::Size { name, size: payload.len(), expected });
    }
    Ok((0..count).map(|_| p.region()).collect())
}

/// The name of a request, for errors.
fn request_name(request: u32) -> &'static str {
    match request {
        1 => "GET_FEATURES",
        2 => "SET_FEATURES",
        3 => "SET_OWNER",
        4 => "RESET_OWNER",
        5 => "SET_MEM_TABLE",
        8 => "SET_VRING_NUM",
        9 => "SET_VRING_ADDR",
        10 => "SET_VRING_BASE",
        11 => "GET_VRING_BASE",
        12 => "SET_VRING_KICK",
        13 => "SET_VRING_CALL",
        14 => "SET_VRING_ERR",
        15 => "GET_PROTOCOL_FEATURES",
        16 => "SET_PROTOCOL_FEATURES",
        17 => "GET_QUEUE_NUM",
        18 => "SET_VRING_ENABLE",
        21 => "SET_BACKEND_REQ_FD",
        24 => "GET_CONFIG",
        25 => "SET_CONFIG",
        31 => "GET_INFLIGHT_FD",
        32 => "SET_INFLIGHT_FD",
        34 => "RESET_DEVICE",
        36 => "GET_MAX_MEM_SLOTS",
        37 => "ADD_MEM_REG",
        38 => "REM_MEM_REG",
        39 => "SET_STATUS",
        40 => "GET_STATUS",
        _ => "request",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vhost_user::{HEADER_SIZE, encode_message, encode_reply};

    fn decode(request: u32, payload: &[u8], fds: usize) -> Result<VhostUserRequest, VhostUserError> {
        let bytes = encode_message(request, false, payload);
        let header = VhostUserMessageHeader::decode(bytes[..HEADER_SIZE].try_into().unwrap())?;
        VhostUserRequest::decode(&header, &bytes[HEADER_SIZE..], fds)
    }

    fn words(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    #[test]
    fn requests_are_decoded() {
        assert_eq!(decode(1, &[], 0), Ok(VhostUserRequest::GetFeatures));
        let table = decode(5, &words(&[1, 0x1000, 0x2000, 0x3000, 0x4000]), 1);
        let region = GuestMemoryRegion {
            guest_address: 0x1000,
            size: 0x2000,
            user_address: 0x3000,
            file_offset: 0x4000,
        };
        assert_eq!(table, Ok(VhostUserRequest::SetMemTable(vec![region])));
        let kick = VhostUserRequest::SetVringKick(VringFd { index: 3, has_fd: true });
        assert_eq!(decode(12, &words(&[3]), 1), Ok(kick));
        let no_call = VhostUserRequest::SetVringCall(VringFd { index: 1, has_fd: false });
        assert_eq!(decode(13, &words(&[0x101]), 0), Ok(no_call));
        let num = VringState { index: 2, value: 256 };
        assert_eq!(decode(8, &words(&[256 << 32 | 2]), 0), Ok(VhostUserRequest::SetVringNum(num)));
        assert_eq!(
            decode(37, &words(&[0, 0x1000, 0x2000, 0x3000, 0x4000]), 1),
            Ok(VhostUserRequest::AddMemReg(region))
        );
        let mut config = Vec::new();
        [0u32, 8, 1].iter().for_each(|word| config.extend(word.to_ne_bytes()));
        config.extend([0; 8]);
        let range = ConfigSpaceRange { offset: 0, flags: 1, bytes: vec![0; 8] };
        assert_eq!(range.encode(), config);
        assert_eq!(decode(24, &config, 0), Ok(VhostUserRequest::GetConfig(range)));
        let area = InflightArea { size: 4096, offset: 0, queues: 2, ring_size: 128 };
        assert_eq!(decode(31, &area.encode(), 0), Ok(VhostUserRequest::GetInflightFd(area)));
        assert_eq!(decode(31, &area.encode()[..20], 0), Ok(VhostUserRequest::GetInflightFd(area)));
        assert_eq!(decode(99, &[1, 2, 3], 5), Ok(VhostUserRequest::Unsupported(99)));
    }

    #[test]
    fn what_contradicts_the_protocol_is_refused() {
        let refused = |request, payload: &[u8], fds| decode(request, payload, fds).unwrap_err().to_string();
        assert_eq!(refused(2, &[0; 7], 0), "vhost-user SET_FEATURES has 7 bytes: expected 8");
        assert_eq!(
            refused(5, &words(&[1, 0, 0, 0, 0]), 0),
            "vhost-user SET_MEM_TABLE has 0 file descriptors: expected 1"
        );
        assert_eq!(refused(5, &words(&[9]), 0), "vhost-user SET_MEM_TABLE: it has more than 8 regions");
        assert_eq!(
            refused(5, &words(&[2, 0, 0, 0, 0]), 2),
            "vhost-user SET_MEM_TABLE has 40 bytes: expected 72"
        );
        assert_eq!(
            refused(12, &words(&[0x100]), 1),
            "vhost-user SET_VRING_KICK has 1 file descriptors: expected 0"
        );
        assert_eq!(refused(24, &[0; 11], 0), "vhost-user GET_CONFIG has 11 bytes: expected 12");
        assert!(refused(24, &[1; 12], 0).contains("its size"));
        assert_eq!(refused(39, &words(&[256]), 0), "vhost-user SET_STATUS: the status has more than 8 bits");
        let header = |bytes: &[u8]| VhostUserMessageHeader::decode(bytes[..HEADER_SIZE].try_into().unwrap());
        let mut bytes = encode_reply(1, &[]);
        let reply = VhostUserRequest::decode(&header(&bytes).unwrap(), &[], 0);
        assert_eq!(reply.unwrap_err().to_string(), "vhost-user GET_FEATURES: it is marked as a reply");
        assert!(header(&bytes).is_ok_and(|header| header.is_reply && !header.needs_reply));
        bytes[8..].copy_from_slice(&513u32.to_ne_bytes());
        assert_eq!(
            header(&bytes).unwrap_err().to_string(),
            "vhost-user message 1 has 513 bytes: at most 512 are possible"
        );
        bytes[4..8].copy_from_slice(&2u32.to_ne_bytes());
        assert_eq!(header(&bytes).unwrap_err().to_string(), "vhost-user message 1 has version 2: expected 1");
    }
}
