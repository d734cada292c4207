//! The properties of `udm_frontends::vhost_user::fuzz` with generated input.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use udm_frontends::vhost_user::fuzz::{fuzz_descriptor_chains, fuzz_session};
use udm_wire::virtio::ring::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE};

/// Messages that set a session up, as input of `fuzz_session`: number, flags, index, values, kinds
/// of descriptors.
const SETUP: &[&[u8]] = &[
    // SET_PROTOCOL_FEATURES and SET_FEATURES: all that are offered.
    &[16, 0, 0, 0],
    &[2, 1, 0, 0],
    // ADD_MEM_REG: 16 KiB.
    &[37, 1, 0, 0, 2, 0, 0, 0],
    // GET_INFLIGHT_FD and SET_INFLIGHT_FD: two rings of 64.
    &[31, 0, 4, 1, 2],
    &[32, 1, 4, 1, 2, 0],
    // SET_BACKEND_REQ_FD, SET_CONFIG (write cache off), SET_STATUS 15.
    &[21, 1, 0, 2],
    &[25, 1, 0, 32, 1, 0],
    &[39, 1, 0, 2],
    // Ring 0: size 64, base 1, addresses, call, kick, enable.
    &[8, 1, 0, 4],
    &[10, 1, 0, 1],
    &[9, 1, 0, 0, 32, 16],
    &[13, 1, 0, 1, 2],
    &[12, 1, 0, 1, 2],
    &[18, 1, 0, 1],
];

/// Messages that change a session.
const CHANGES: &[&[u8]] = &[
    // SET_FEATURES without packed rings, and without protocol features; SET_VRING_ENABLE 0.
    &[2, 1, 0, 4],
    &[2, 1, 0, 0x40],
    &[18, 1, 0, 0],
    // SET_MEM_TABLE: the same memory, and none; REM_MEM_REG.
    &[5, 1, 0, 1, 0, 2, 0, 0, 0],
    &[5, 1, 0, 0],
    &[38, 1, 0, 0, 2, 0, 0],
    // GET_VRING_BASE, SET_VRING_CALL without a descriptor, other addresses.
    &[11, 0, 0, 0],
    &[13, 1, 0, 0],
    &[9, 1, 0, 64, 96, 80],
    // SET_STATUS 0, RESET_DEVICE, SET_CONFIG (write cache on).
    &[39, 1, 0, 0],
    &[34, 1, 0],
    &[25, 1, 0, 32, 1, 1],
];

/// The setup in its usual order, with some messages changed, left out, repeated or moved.
fn setups() -> impl Strategy<Value = Vec<u8>> {
    let message = prop_oneof![
        2 => select(SETUP).prop_map(<[u8]>::to_vec),
        2 => select(CHANGES).prop_map(<[u8]>::to_vec),
        1 => vec(any::<u8>(), 1..12),
    ];
    (vec((any::<Index>(), message), 0..12), any::<bool>(), any::<bool>()).prop_map(
        |(changes, replaces, packed)| {
            let mut messages: Vec<Vec<u8>> = SETUP.iter().map(|message| message.to_vec()).collect();
            if !packed {
                messages[1][3] = 4;
            }
            for (at, message) in changes {
                let at = at.index(messages.len());
                if replaces {
                    messages[at] = message;
                } else {
                    messages.insert(at, message);
                }
            }
            messages.concat()
        },
    )
}

/// A descriptor: mostly in memory, and of any flags.
fn descriptor() -> impl Strategy<Value = Vec<u8>> {
    let address = select(&[0x1000u64, 0x1064, 0x2ff0, 0x3800, 0x4ff8, 0x5000, 0, u64::MAX - 7][..]);
    let len = select(&[16u32, 1, 0, 512, 32, 4096, 20_000, u32::MAX][..]);
    let flags =
        select(&[DESC_F_NEXT, DESC_F_NEXT, DESC_F_NEXT | DESC_F_WRITE, DESC_F_WRITE, DESC_F_INDIRECT, 7][..]);
    (address, len, flags, 0u16..20).prop_map(|(address, len, flags, next)| {
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        bytes
    })
}

/// A ring with available entries, and a table of indirect descriptors at the first address.
fn rings() -> impl Strategy<Value = Vec<u8>> {
    let table = || vec(descriptor(), 0..20);
    (any::<[u8; 4]>(), table(), vec(0u16..20, 0..20), 0u16..24, table()).prop_map(
        |(head, descriptors, entries, count, indirect)| {
            let mut ring = descriptors.concat();
            ring.resize(2048, 0);
            let next = u16::from_le_bytes([head[2], head[3]]);
            ring.extend([0, 0]);
            ring.extend(next.wrapping_add(count).to_le_bytes());
            // The entries repeat, whatever the size of the ring is.
            let entries: Vec<u8> = entries.iter().flat_map(|entry| entry.to_le_bytes()).collect();
            ring.extend(entries.iter().cycle().take(256));
            ring.resize(8192, 0);
            [&head[..], &ring, &indirect.concat()].concat()
        },
    )
}

/// Sessions that were not the same in another process.
#[test]
fn sessions_that_differed_once() {
    let setup = SETUP.concat();
    let with = |messages: &[&[u8]]| [&setup[..], &messages.concat()].concat();
    let legacy: &[u8] = &[2, 1, 0, 0x40];
    // No features are negotiated yet: the rings must wait until they are enabled.
    fuzz_session(&[1]);
    // Features that enable all rings come after the kick descriptor; a ring is disabled after that.
    fuzz_session(&with(&[legacy]));
    fuzz_session(&with(&[legacy, &[18, 1, 0, 0]]));
    // The driver has reset the device: its rings must not be used until they are enabled again.
    fuzz_session(&with(&[&[39, 1, 0, 0]]));
    // The size of a ring comes last.
    let size = SETUP.iter().position(|message| message[0] == 8).unwrap();
    let others = [&SETUP[..size], &SETUP[size + 1..]].concat();
    fuzz_session(&[others.concat(), SETUP[size].to_vec()].concat());
}

/// A packed ring whose chains begin at its first descriptor, with or without an empty record, and a
/// table of indirect descriptors.
fn packed_rings() -> impl Strategy<Value = Vec<u8>> {
    let available = prop_oneof![4 => Just(1u16 << 7), 1 => Just(1 << 15), 1 => Just(0)];
    let ring = vec((descriptor(), available, any::<u16>()), 0..20);
    (any::<u8>(), 0u8..8, ring, vec(descriptor(), 0..20)).prop_map(|(size, kind, ring, indirect)| {
        let mut bytes = vec![size, kind | 2, 0, 0x80];
        for (descriptor, available, id) in ring {
            let flags = u16::from_le_bytes([descriptor[12], descriptor[13]]) | available;
            bytes.extend(&descriptor[..12]);
            bytes.extend(id.to_le_bytes());
            bytes.extend(flags.to_le_bytes());
        }
        bytes.resize(4 + 8192, 0);
        // A record would be there.
        let table = if kind & 4 == 0 { indirect.concat() } else { Vec::new() };
        bytes.extend(table);
        bytes
    })
}

proptest! {
    #[test]
    fn packed_chains_are_checked(data in packed_rings()) {
        fuzz_descriptor_chains(&data);
    }

    #[test]
    fn any_bytes_are_a_session(data in vec(any::<u8>(), 0..200)) {
        fuzz_session(&data);
    }

    #[test]
    fn sessions_are_set_up_again(data in setups()) {
        fuzz_session(&data);
    }

    #[test]
    fn any_bytes_are_a_ring(data in vec(any::<u8>(), 0..3000)) {
        fuzz_descriptor_chains(&data);
    }

    #[test]
    fn chains_are_checked(data in rings()) {
        fuzz_descriptor_chains(&data);
    }
}
