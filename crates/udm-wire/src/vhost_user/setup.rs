//! Requests that set a session up, encoded: a server hands its sessions over in this form.

use super::{VhostUserRequest, VringState, encode_message};

/// Encodes a request that changes the state of a session and has no reply of its own, with its
/// header. `None` for other requests, and for those of several regions (`SET_MEM_TABLE`): each
/// region has a request of its own.
#[must_use]
pub fn encode_setup_request(request: &VhostUserRequest) -> Option<Vec<u8>> {
    use VhostUserRequest as R;
    let words = |words: &[u64]| words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<u8>>();
    let state = |VringState { index, value }: VringState| [index.to_ne_bytes(), value.to_ne_bytes()].concat();
    let (number, payload) = match request {
        R::SetFeatures(features) => (2, words(&[features.bits()])),
        R::SetVringNum(of) => (8, state(*of)),
        R::SetVringAddr(of) => {
            let mut payload = state(VringState { index: of.index, value: 0 });
            payload.extend(words(&[of.descriptors, of.used, of.avail, 0]));
            (9, payload)
        }
        R::SetVringBase(of) => (10, state(*of)),
        R::SetVringKick(of) if of.has_fd => (12, words(&[of.index.into()])),
        R::SetVringCall(of) if of.has_fd => (13, words(&[of.index.into()])),
        R::SetProtocolFeatures(features) => (16, words(&[features.bits()])),
        R::SetVringEnable(of) => (18, state(*of)),
        R::SetBackendReqFd => (21, Vec::new()),
        R::SetConfig(range) => (25, range.encode()),
        R::SetInflightFd(area) => (32, area.encode()),
        R::AddMemReg(of) => (37, words(&[0, of.guest_address, of.size, of.user_address, of.file_offset])),
        R::SetStatus(status) => (39, words(&[(*status).into()])),
        _ => return None,
    };
    Some(encode_message(number, false, &payload))
}

#[cfg(test)]
mod tests {
    use super::super::{
        ConfigSpaceRange, GuestMemoryRegion, HEADER_SIZE, InflightArea, VhostUserMessageHeader,
        VhostUserProtocolFeatures, VringAddresses, VringFd,
    };
    use super::*;
    use crate::virtio::VirtioFeatures;

    #[test]
    fn what_is_encoded_is_decoded_again() {
        use VhostUserRequest as R;
        let state = VringState { index: 3, value: 256 };
        let with_fd = VringFd { index: 63, has_fd: true };
        let region =
            GuestMemoryRegion { guest_address: 1, size: 4096, user_address: 1 << 40, file_offset: 8192 };
        let requests = [
            R::SetFeatures(VirtioFeatures::from_bits_retain(1 << 32 | 5)),
            R::SetVringNum(state),
            R::SetVringAddr(VringAddresses { index: 7, descriptors: 1 << 33, used: 2, avail: 3 }),
            R::SetVringBase(state),
            R::SetVringKick(with_fd),
            R::SetVringCall(with_fd),
            R::SetProtocolFeatures(VhostUserProtocolFeatures::all()),
            R::SetVringEnable(state),
            R::SetBackendReqFd,
            R::SetConfig(ConfigSpaceRange { offset: 32, flags: 0, bytes: vec![1] }),
            R::SetInflightFd(InflightArea { size: 4096, offset: 0, queues: 4, ring_size: 128 }),
            R::AddMemReg(region),
            R::SetStatus(15),
        ];
        for request in requests {
            let message = encode_setup_request(&request).unwrap();
            let (header, payload) = message.split_first_chunk::<HEADER_SIZE>().unwrap();
            let header = VhostUserMessageHeader::decode(header).unwrap();
            let decoded = VhostUserRequest::decode(&header, payload, request.descriptors());
            assert_eq!(decoded, Ok(request));
        }
        let no_fd = R::SetVringKick(VringFd { index: 0, has_fd: false });
        assert_eq!((encode_setup_request(&R::GetFeatures), encode_setup_request(&no_fd)), (None, None));
    }
}
