//! The messages of DH-HMAC-CHAP (*Base* 8.3.4.5, figures 654 to 667) and the commands that carry
//! them (*Base* 6.1 and 6.2).

use super::DhchapHash;
use crate::bytes::{u16_at, u32_at};
use crate::nvme::{NvmeCommand, OPCODE_FABRICS, SQE_SIZE};

/// The longest message in bytes that udm reads or writes: longer ones have a Diffie-Hellman value.
pub const AUTHENTICATION_MESSAGE_MAX: usize = 1024;

/// SECP of DH-HMAC-CHAP, with both SPSP fields 1.
const SECURITY_PROTOCOL: u8 = 0xe9;

const COMMON: u8 = 0;
const DHCHAP: u8 = 1;

/// Identifiers of the failure messages (Linux `NVME_AUTH_DHCHAP_MESSAGE_FAILURE1`): that of the
/// host is the lower one.
const FAILURE_2: u8 = 0xf0;
const FAILURE_1: u8 = 0xf1;

/// Identifiers of Diffie-Hellman groups.
const GROUP_NULL: u8 = 0;
const GROUP_FFDHE2048: u8 = 1;

/// An Authentication Send or Receive command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuthenticationCommand {
    /// The protocol is DH-HMAC-CHAP.
    pub is_dhchap: bool,
    /// Length of the message, or of the buffer for it.
    pub len: u32,
}

impl AuthenticationCommand {
    pub(in crate::nvme) fn decode(command: &NvmeCommand) -> AuthenticationCommand {
        let bytes = command.bytes();
        AuthenticationCommand {
            is_dhchap: bytes[41..44] == [1, 1, SECURITY_PROTOCOL],
            len: u32_at(bytes, 44),
        }
    }

    /// A command to send a message of `len` bytes in the capsule.
    #[must_use]
    pub fn encode_send(id: u16, len: u32) -> NvmeCommand {
        AuthenticationCommand::encode(id, 0x05, 0x01, len)
    }

    /// A command to receive a message of up to `len` bytes.
    #[must_use]
    pub fn encode_receive(id: u16, len: u32) -> NvmeCommand {
        AuthenticationCommand::encode(id, 0x06, 0x5a, len)
    }

    fn encode(id: u16, kind: u8, pointer: u8, len: u32) -> NvmeCommand {
        let mut bytes = [0; SQE_SIZE];
        (bytes[0], bytes[1], bytes[4], bytes[39]) = (OPCODE_FABRICS, 0x40, kind, pointer);
        bytes[2..4].copy_from_slice(&id.to_le_bytes());
        bytes[32..36].copy_from_slice(&len.to_le_bytes());
        bytes[41..44].copy_from_slice(&[1, 1, SECURITY_PROTOCOL]);
        bytes[44..48].copy_from_slice(&len.to_le_bytes());
        NvmeCommand::from_bytes(bytes)
    }
}

/// Why an authentication fails: the explanation of a failure message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum AuthenticationFailure {
    /// A response is wrong.
    Failed = 1,
    /// No protocol is usable.
    ProtocolNotUsable = 2,
    /// A secure channel is asked for, or is missing.
    ConcatenationMismatch = 3,
    /// No hash is usable.
    HashNotUsable = 4,
    /// No Diffie-Hellman group is usable.
    GroupNotUsable = 5,
    /// A field of a message is wrong.
    IncorrectPayload = 6,
    /// A message came at the wrong time.
    IncorrectMessage = 7,
}

impl AuthenticationFailure {
    const fn from_number(number: u8) -> AuthenticationFailure {
        match number {
            2 => AuthenticationFailure::ProtocolNotUsable,
            3 => AuthenticationFailure::ConcatenationMismatch,
            4 => AuthenticationFailure::HashNotUsable,
            5 => AuthenticationFailure::GroupNotUsable,
            6 => AuthenticationFailure::IncorrectPayload,
            7 => AuthenticationFailure::IncorrectMessage,
            _ => AuthenticationFailure::Failed,
        }
    }
}

/// What a host proposes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DhchapNegotiation {
    /// It wants no secure channel.
    pub no_concatenation: bool,
    /// It knows DH-HMAC-CHAP.
    pub has_dhchap: bool,
    /// Its hashes that udm knows, in its order.
    pub hashes: Vec<DhchapHash>,
    /// It knows the null Diffie-Hellman group.
    pub has_null_group: bool,
    /// It names the group ffdhe2048 too. The target of Linux 6.12 refuses a host that names only
    /// the group that it wants to use.
    pub has_ffdhe2048: bool,
}

/// A challenge of a controller, with the null Diffie-Hellman group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DhchapChallenge {
    /// The hash.
    pub hash: DhchapHash,
    /// Sequence number, not 0.
    pub sequence: u32,
    /// The challenge, with the size of the hash.
    pub challenge: Vec<u8>,
}

/// The response of a host, and perhaps its own challenge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DhchapReply {
    /// The response; its length is the size of the hash.
    pub response: Vec<u8>,
    /// A challenge for the controller with its sequence number.
    pub challenge: Option<(u32, Vec<u8>)>,
}

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuthenticationMessage {
    /// Of a host: what it can do.
    Negotiate(DhchapNegotiation),
    /// Of a controller.
    Challenge(DhchapChallenge),
    /// Of a host.
    Reply(DhchapReply),
    /// Of a controller: the response was right. With its own response, if the host has asked.
    Success1(DhchapHash, Option<Vec<u8>>),
    /// Of a host: the response of the controller was right.
    Success2,
    /// Of a controller.
    Failure1(AuthenticationFailure),
    /// Of a host.
    Failure2(AuthenticationFailure),
}

/// Error: bytes are no message of DH-HMAC-CHAP with the null group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a message of the authentication is wrong: {what}")]
pub struct AuthenticationMessageError {
    what: &'static str,
}

const fn wrong_message(what: &'static str) -> AuthenticationMessageError {
    AuthenticationMessageError { what }
}

impl AuthenticationMessage {
    /// The message in `bytes`, with the number of its transaction. Bytes after it are ignored.
    ///
    /// # Errors
    /// They are none.
    pub fn decode(bytes: &[u8]) -> Result<(u16, AuthenticationMessage), AuthenticationMessageError> {
        let head = bytes.first_chunk::<8>().ok_or(wrong_message("it is too short"))?;
        let part = |at: usize, len: usize| bytes.get(at..at + len).ok_or(wrong_message("it is too short"));
        let message = match (head[0], head[1]) {
            (COMMON, 0x00) => AuthenticationMessage::Negotiate(decode_negotiation(head, part)?),
            (COMMON, FAILURE_1) => {
                AuthenticationMessage::Failure1(AuthenticationFailure::from_number(head[7]))
            }
            (COMMON, FAILURE_2) => {
                AuthenticationMessage::Failure2(AuthenticationFailure::from_number(head[7]))
            }
            (DHCHAP, 0x01) => {
                let fields = part(0, 16)?;
                let hash = DhchapHash::from_number(fields[8]).ok_or(wrong_message("unknown hash"))?;
                if fields[9] != GROUP_NULL || u16_at(fields, 10) != 0 {
                    return Err(wrong_message(
                        "it is for a Diffie-Hellman group, and udm has the null group only",
                    ));
                }
                if usize::from(fields[6]) != hash.size() {
                    return Err(wrong_message("wrong challenge"));
                }
                let challenge = part(16, hash.size())?.to_vec();
                AuthenticationMessage::Challenge(DhchapChallenge {
                    hash,
                    sequence: u32_at(fields, 12),
                    challenge,
                })
            }
            (DHCHAP, 0x02) => {
                let fields = part(0, 16)?;
                let len = usize::from(fields[6]);
                if u16_at(fields, 10) != 0 {
                    return Err(wrong_message("a Diffie-Hellman value that was not asked for"));
                }
                let response = part(16, len)?.to_vec();
                let challenge = match fields[8] {
                    0 => None,
                    _ => Some((u32_at(fields, 12), part(16 + len, len)?.to_vec())),
                };
                AuthenticationMessage::Reply(DhchapReply { response, challenge })
            }
            (DHCHAP, 0x03) => {
                let fields = part(0, 16)?;
                let sizes = [DhchapHash::Sha256, DhchapHash::Sha384, DhchapHash::Sha512];
                let hash = sizes.into_iter().find(|hash| hash.size() == usize::from(fields[6]));
                let hash = hash.ok_or(wrong_message("wrong length of a response"))?;
                let response = match fields[8] {
                    0 => None,
                    _ => Some(part(16, hash.size())?.to_vec()),
                };
                AuthenticationMessage::Success1(hash, response)
            }
            (DHCHAP, 0x04) => AuthenticationMessage::Success2,
            _ => return Err(wrong_message("unknown message")),
        };
        Ok((u16_at(head, 4), message))
    }

    /// The bytes of the message in this transaction.
    #[must_use]
    pub fn encode(&self, transaction: u16) -> Vec<u8> {
        let mut bytes = vec![0; 16];
        let (kind, id) = match self {
            AuthenticationMessage::Negotiate(_) => (COMMON, 0x00),
            AuthenticationMessage::Challenge(_) => (DHCHAP, 0x01),
            AuthenticationMessage::Reply(_) => (DHCHAP, 0x02),
            AuthenticationMessage::Success1(..) => (DHCHAP, 0x03),
            AuthenticationMessage::Success2 => (DHCHAP, 0x04),
            AuthenticationMessage::Failure1(_) => (COMMON, FAILURE_1),
            AuthenticationMessage::Failure2(_) => (COMMON, FAILURE_2),
        };
        (bytes[0], bytes[1]) = (kind, id);
        bytes[4..6].copy_from_slice(&transaction.to_le_bytes());
        match self {
            AuthenticationMessage::Negotiate(negotiation) => encode_negotiation(negotiation, &mut bytes),
            AuthenticationMessage::Challenge(challenge) => {
                (bytes[6], bytes[8]) = (challenge.hash.size() as u8, challenge.hash as u8);
                bytes[12..16].copy_from_slice(&challenge.sequence.to_le_bytes());
                bytes.extend_from_slice(&challenge.challenge);
            }
            AuthenticationMessage::Reply(reply) => {
                bytes[6] = reply.response.len() as u8;
                bytes.extend_from_slice(&reply.response);
                match &reply.challenge {
                    Some((sequence, challenge)) => {
                        bytes[8] = 1;
                        bytes[12..16].copy_from_slice(&sequence.to_le_bytes());
                        bytes.extend_from_slice(challenge);
                    }
                    None => bytes.resize(16 + 2 * reply.response.len(), 0),
                }
            }
            AuthenticationMessage::Success1(hash, response) => {
                (bytes[6], bytes[8]) = (hash.size() as u8, u8::from(response.is_some()));
                bytes.extend_from_slice(response.as_deref().unwrap_or_default());
            }
            AuthenticationMessage::Success2 => {}
            AuthenticationMessage::Failure1(failure) | AuthenticationMessage::Failure2(failure) => {
                // The reason is always: the authentication failed.
                (bytes[6], bytes[7]) = (1, *failure as u8);
                bytes.truncate(8);
            }
        }
        bytes
    }
}

fn decode_negotiation<'a>(
    head: &[u8; 8],
    part: impl Fn(usize, usize) -> Result<&'a [u8], AuthenticationMessageError>,
) -> Result<DhchapNegotiation, AuthenticationMessageError> {
    let mut negotiation = DhchapNegotiation {
        no_concatenation: head[6] == 0,
        has_dhchap: false,
        hashes: Vec::new(),
        has_null_group: false,
        has_ffdhe2048: false,
    };
    for number in 0..usize::from(head[7]) {
        let protocol = part(8 + number * 64, 64)?;
        let (hashes, groups) = (usize::from(protocol[2]), usize::from(protocol[3]));
        // 30 places for hashes, then 30 for groups.
        if protocol[0] != 1 || hashes > 30 || groups > 30 {
            continue;
        }
        negotiation.has_dhchap = true;
        negotiation.hashes =
            protocol[4..4 + hashes].iter().copied().filter_map(DhchapHash::from_number).collect();
        negotiation.has_null_group = protocol[34..34 + groups].contains(&GROUP_NULL);
        negotiation.has_ffdhe2048 = protocol[34..34 + groups].contains(&GROUP_FFDHE2048);
        break;
    }
    Ok(negotiation)
}

fn encode_negotiation(negotiation: &DhchapNegotiation, bytes: &mut Vec<u8>) {
    (bytes[6], bytes[7]) = (u8::from(!negotiation.no_concatenation), u8::from(negotiation.has_dhchap));
    bytes.truncate(8);
    if !negotiation.has_dhchap {
        return;
    }
    let mut protocol = [0; 64];
    (protocol[0], protocol[2]) = (1, negotiation.hashes.len() as u8);
    for (number, hash) in negotiation.hashes.iter().take(30).enumerate() {
        protocol[4 + number] = *hash as u8;
    }
    let groups = [(negotiation.has_null_group, GROUP_NULL), (negotiation.has_ffdhe2048, GROUP_FFDHE2048)];
    for (at, (_, group)) in groups.iter().filter(|(is_named, _)| *is_named).enumerate() {
        (protocol[3], protocol[34 + at]) = (at as u8 + 1, *group);
    }
    bytes.extend_from_slice(&protocol);
}
