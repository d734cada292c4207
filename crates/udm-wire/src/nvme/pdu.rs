//! Protocol data units: the header of each kind, and its checks (*TCP* 3.6).

use super::{Completion, NvmeCommand, SQE_SIZE, header_digest};
use crate::bytes::{u16_at, u32_at};

/// The longest header in bytes, with its digest: that of a command capsule.
pub const MAX_HEADER: usize = 8 + SQE_SIZE + 4;

/// Bytes of `ICReq` and `ICResp`.
const INITIALIZE_SIZE: usize = 128;
/// Bytes of the headers of data PDUs, R2T, responses and termination requests.
const SHORT_SIZE: usize = 24;
/// Bytes of the header of a command capsule.
const CAPSULE_SIZE: usize = 8 + SQE_SIZE;
/// The most bytes of a wrong PDU that a termination request carries.
const TERM_DATA_MAX: usize = 128;

const FLAG_HEADER_DIGEST: u8 = 1 << 0;
const FLAG_DATA_DIGEST: u8 = 1 << 1;
const FLAG_LAST: u8 = 1 << 2;
const FLAG_SUCCESS: u8 = 1 << 3;

/// Kind of a PDU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PduType {
    /// The host begins a connection.
    InitializeRequest = 0x00,
    /// The controller's answer.
    InitializeResponse = 0x01,
    /// The host reports a fatal error.
    HostTermRequest = 0x02,
    /// The controller reports a fatal error.
    ControllerTermRequest = 0x03,
    /// A command, and perhaps its data.
    NvmeCommand = 0x04,
    /// A completion.
    ResponseCapsule = 0x05,
    /// Data of a write.
    HostData = 0x06,
    /// Data of a read.
    ControllerData = 0x07,
    /// The controller is ready for data of a write.
    ReadyToTransfer = 0x09,
}

impl PduType {
    fn from_number(number: u8) -> Option<PduType> {
        Some(match number {
            0x00 => PduType::InitializeRequest,
            0x01 => PduType::InitializeResponse,
            0x02 => PduType::HostTermRequest,
            0x03 => PduType::ControllerTermRequest,
            0x04 => PduType::NvmeCommand,
            0x05 => PduType::ResponseCapsule,
            0x06 => PduType::HostData,
            0x07 => PduType::ControllerData,
            0x09 => PduType::ReadyToTransfer,
            _ => return None,
        })
    }

    const fn header_size(self) -> usize {
        match self {
            PduType::InitializeRequest | PduType::InitializeResponse => INITIALIZE_SIZE,
            PduType::NvmeCommand => CAPSULE_SIZE,
            _ => SHORT_SIZE,
        }
    }

    const fn may_have_data(self) -> bool {
        matches!(self, PduType::NvmeCommand | PduType::HostData | PduType::ControllerData)
    }

    const fn has_digests(self) -> bool {
        self.may_have_data() || matches!(self, PduType::ResponseCapsule | PduType::ReadyToTransfer)
    }
}

/// Limits and digests of a connection, which its first two PDUs have set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PduLimits {
    /// Headers have digests.
    pub header_digest: bool,
    /// Data has digests.
    pub data_digest: bool,
    /// The longest data in a command capsule, in bytes.
    pub capsule_data_max: u32,
    /// The longest data in a data PDU, in bytes.
    pub data_max: u32,
}

/// Fatal errors (*TCP* 3.6.2.4): the connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum FatalError {
    /// A field of a header is wrong.
    InvalidHeaderField = 1,
    /// A PDU came at a wrong time.
    SequenceError = 2,
    /// A header digest is wrong.
    HeaderDigestError = 3,
    /// Data is outside the range that was asked for.
    DataOutOfRange = 4,
    /// More data than allowed.
    DataLimitExceeded = 5,
    /// A parameter is not supported.
    UnsupportedParameter = 6,
}

/// Error: a header that ends the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{what} (byte {at} of the PDU)")]
pub struct PduHeaderError {
    /// For the termination request.
    pub error: FatalError,
    /// Offset of the wrong field.
    pub at: u32,
    /// Description for users.
    pub what: &'static str,
}

impl PduHeaderError {
    const fn field(at: u32, what: &'static str) -> PduHeaderError {
        PduHeaderError { error: FatalError::InvalidHeaderField, at, what }
    }
}

/// The common header of a PDU, checked (*TCP* 3.6.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PduHeader {
    /// Kind of the PDU.
    pub kind: PduType,
    /// The last data PDU of a transfer.
    pub is_last: bool,
    /// The command has succeeded, and no response follows.
    pub is_success: bool,
    /// Bytes before the data: header, digest and padding.
    pub header_len: usize,
    /// Bytes of data, within the limits of the connection; excludes the digest.
    pub data_len: u32,
    /// A digest follows the data.
    pub has_data_digest: bool,
}

impl PduHeader {
    /// Bytes of the common header.
    pub const SIZE: usize = 8;

    /// The common header in `bytes`, for a connection with these limits.
    ///
    /// # Errors
    /// A field is wrong, or a length exceeds the limits.
    pub fn decode(bytes: &[u8; PduHeader::SIZE], limits: &PduLimits) -> Result<PduHeader, PduHeaderError> {
        let [number, flags, header_len, data_offset, ..] = *bytes;
        let total = u64::from(u32_at(bytes, 4));
        let kind = PduType::from_number(number).ok_or(PduHeaderError::field(0, "unknown type"))?;
        if usize::from(header_len) != kind.header_size() {
            return Err(PduHeaderError::field(2, "wrong header length"));
        }
        if matches!(kind, PduType::HostTermRequest | PduType::ControllerTermRequest) {
            let data_len = total.checked_sub(SHORT_SIZE as u64).filter(|len| *len <= TERM_DATA_MAX as u64);
            let data_len = data_len.ok_or(PduHeaderError::field(4, "wrong length"))? as u32;
            return Ok(PduHeader {
                kind,
                is_last: false,
                is_success: false,
                header_len: SHORT_SIZE,
                data_len,
                has_data_digest: false,
            });
        }
        let has_header_digest = limits.header_digest && kind.has_digests();
        if (flags & FLAG_HEADER_DIGEST != 0) != has_header_digest {
            return Err(PduHeaderError::field(1, "header digest not as agreed"));
        }
        let headers = kind.header_size() + if has_header_digest { 4 } else { 0 };
        let is_last = flags & FLAG_LAST != 0;
        let is_success = flags & FLAG_SUCCESS != 0;
        if total == headers as u64 && !matches!(kind, PduType::HostData | PduType::ControllerData) {
            let header_len = headers;
            return Ok(PduHeader {
                kind,
                is_last,
                is_success,
                header_len,
                data_len: 0,
                has_data_digest: false,
            });
        }
        if !kind.may_have_data() {
            return Err(PduHeaderError::field(4, "wrong length"));
        }
        if (flags & FLAG_DATA_DIGEST != 0) != limits.data_digest {
            return Err(PduHeaderError::field(1, "data digest not as agreed"));
        }
        let header_len = usize::from(data_offset);
        if header_len < headers || !header_len.is_multiple_of(4) {
            return Err(PduHeaderError::field(3, "wrong data offset"));
        }
        let digest = if limits.data_digest { 4 } else { 0 };
        let data_len = total.checked_sub(header_len as u64 + digest).filter(|len| *len > 0);
        let data_len = data_len.ok_or(PduHeaderError::field(4, "wrong length"))?;
        let max = if kind == PduType::NvmeCommand { limits.capsule_data_max } else { limits.data_max };
        if data_len > u64::from(max) {
            let error = FatalError::DataLimitExceeded;
            return Err(PduHeaderError { error, at: 4, what: "more data than allowed" });
        }
        let data_len = data_len as u32;
        Ok(PduHeader { kind, is_last, is_success, header_len, data_len, has_data_digest: limits.data_digest })
    }
}

/// `ICReq`: the host begins a connection (*TCP* 3.6.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InitializeRequest {
    /// Format of the PDUs; 0.
    pub version: u16,
    /// The controller aligns data to multiples of `4 * (host_alignment + 1)` bytes; at most 31.
    pub host_alignment: u8,
    /// The host asks for header digests.
    pub header_digest: bool,
    /// The host asks for data digests.
    pub data_digest: bool,
    /// Limit of outstanding R2T of a command, minus 1.
    pub max_r2t: u32,
}

impl InitializeRequest {
    /// Bytes of the PDU.
    pub const SIZE: usize = INITIALIZE_SIZE;

    /// The request in `bytes`.
    ///
    /// # Errors
    /// A field is wrong, or a parameter is not supported.
    pub fn decode(bytes: &[u8; INITIALIZE_SIZE]) -> Result<InitializeRequest, PduHeaderError> {
        if bytes[0] != PduType::InitializeRequest as u8 {
            let error = FatalError::SequenceError;
            return Err(PduHeaderError { error, at: 0, what: "expected ICReq" });
        }
        if bytes[2] as usize != INITIALIZE_SIZE || u32_at(bytes, 4) as usize != INITIALIZE_SIZE {
            return Err(PduHeaderError::field(2, "wrong length of ICReq"));
        }
        let unsupported = |at, what| PduHeaderError { error: FatalError::UnsupportedParameter, at, what };
        if u16_at(bytes, 8) != 0 {
            return Err(unsupported(8, "unknown PDU format version"));
        }
        if bytes[10] > 31 {
            return Err(PduHeaderError::field(10, "wrong host data alignment"));
        }
        Ok(InitializeRequest {
            version: 0,
            host_alignment: bytes[10],
            header_digest: bytes[11] & 1 != 0,
            data_digest: bytes[11] & 2 != 0,
            max_r2t: u32_at(bytes, 12),
        })
    }

    /// The PDU.
    #[must_use]
    pub fn encode(&self) -> [u8; INITIALIZE_SIZE] {
        let digests = u8::from(self.header_digest) | u8::from(self.data_digest) << 1;
        let mut bytes =
            encode_initialize_pdu(PduType::InitializeRequest, self.version, self.host_alignment, digests);
        bytes[12..16].copy_from_slice(&self.max_r2t.to_le_bytes());
        bytes
    }
}

/// `ICResp`: the controller's answer (*TCP* 3.6.2.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InitializeResponse {
    /// The host aligns data to multiples of `4 * (controller_alignment + 1)` bytes; at most 31.
    pub controller_alignment: u8,
    /// Headers have digests.
    pub header_digest: bool,
    /// Data has digests.
    pub data_digest: bool,
    /// The longest data of an H2CData PDU in bytes: at least 4096, a multiple of 4.
    pub max_h2c_data: u32,
}

impl InitializeResponse {
    /// The PDU.
    #[must_use]
    pub fn encode(&self) -> [u8; INITIALIZE_SIZE] {
        let digests = u8::from(self.header_digest) | u8::from(self.data_digest) << 1;
        let mut bytes =
            encode_initialize_pdu(PduType::InitializeResponse, 0, self.controller_alignment, digests);
        bytes[12..16].copy_from_slice(&self.max_h2c_data.to_le_bytes());
        bytes
    }

    /// The response in `bytes`; `None` if it is none, or of another format.
    #[must_use]
    pub fn decode(bytes: &[u8; INITIALIZE_SIZE]) -> Option<InitializeResponse> {
        let response = InitializeResponse {
            controller_alignment: bytes[10],
            header_digest: bytes[11] & 1 != 0,
            data_digest: bytes[11] & 2 != 0,
            max_h2c_data: u32_at(bytes, 12),
        };
        (response.encode() == *bytes).then_some(response)
    }
}

fn encode_initialize_pdu(kind: PduType, version: u16, alignment: u8, digests: u8) -> [u8; INITIALIZE_SIZE] {
    let mut bytes = [0; INITIALIZE_SIZE];
    (bytes[0], bytes[2]) = (kind as u8, INITIALIZE_SIZE as u8);
    bytes[4..8].copy_from_slice(&(INITIALIZE_SIZE as u32).to_le_bytes());
    bytes[8..10].copy_from_slice(&version.to_le_bytes());
    (bytes[10], bytes[11]) = (alignment, digests);
    bytes
}

/// `H2CTermReq` or `C2HTermReq`: a fatal error (*TCP* 3.6.2.4, 3.6.2.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TermRequest {
    /// The error, as a number: hosts may know more.
    pub error: u16,
    /// Offset of the wrong field.
    pub at: u32,
}

impl TermRequest {
    /// The controller's PDU, with the first bytes of the wrong one.
    #[must_use]
    pub fn encode_c2h(&self, wrong: &[u8]) -> Vec<u8> {
        let wrong = &wrong[..wrong.len().min(TERM_DATA_MAX)];
        let mut bytes = vec![0; SHORT_SIZE];
        (bytes[0], bytes[2]) = (PduType::ControllerTermRequest as u8, SHORT_SIZE as u8);
        bytes[4..8].copy_from_slice(&((SHORT_SIZE + wrong.len()) as u32).to_le_bytes());
        bytes[8..10].copy_from_slice(&self.error.to_le_bytes());
        bytes[10..14].copy_from_slice(&self.at.to_le_bytes());
        bytes.extend_from_slice(wrong);
        bytes
    }

    /// The request in the header of a PDU.
    ///
    /// # Panics
    /// If the header is too short.
    #[must_use]
    pub fn decode(header: &[u8]) -> TermRequest {
        TermRequest { error: u16_at(header, 8), at: u32_at(header, 10) }
    }
}

/// The part of a data PDU's header after the common one (*TCP* 3.6.2.8, 3.6.2.9), and of an R2T.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataPdu {
    /// The host's identifier of the command.
    pub command: u16,
    /// The controller's identifier of the transfer; 0 in C2HData.
    pub tag: u16,
    /// Offset in the data of the command.
    pub offset: u32,
    /// Length in bytes.
    pub len: u32,
}

impl DataPdu {
    /// The fields in the header of a data PDU or R2T.
    ///
    /// # Panics
    /// If the header is too short.
    #[must_use]
    pub fn decode(header: &[u8]) -> DataPdu {
        DataPdu {
            command: u16_at(header, 8),
            tag: u16_at(header, 10),
            offset: u32_at(header, 12),
            len: u32_at(header, 16),
        }
    }

    fn put(&self, bytes: &mut [u8]) {
        bytes[8..10].copy_from_slice(&self.command.to_le_bytes());
        bytes[10..12].copy_from_slice(&self.tag.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.offset.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.len.to_le_bytes());
    }
}

/// Writes a header to the front of `out`, completed with lengths, flags, digest and padding;
/// returns its length. `data` is the length of the data if the PDU has some.
fn finish_pdu_header(
    out: &mut [u8],
    kind: PduType,
    flags: u8,
    data: Option<u32>,
    alignment: u8,
    limits: &PduLimits,
) -> usize {
    let headers = kind.header_size() + if limits.header_digest { 4 } else { 0 };
    let (mut len, mut flags, mut total) = (headers, flags, headers as u32);
    if let Some(data) = data {
        len = headers.next_multiple_of(4 * (usize::from(alignment) + 1));
        total = len as u32 + data + if limits.data_digest { 4 } else { 0 };
        flags |= if limits.data_digest { FLAG_DATA_DIGEST } else { 0 };
    }
    flags |= if limits.header_digest { FLAG_HEADER_DIGEST } else { 0 };
    let data_offset = if data.is_some() { len as u8 } else { 0 };
    out[..4].copy_from_slice(&[kind as u8, flags, kind.header_size() as u8, data_offset]);
    out[4..8].copy_from_slice(&total.to_le_bytes());
    if limits.header_digest {
        let digest = header_digest(&out[..kind.header_size()]);
        out[kind.header_size()..headers].copy_from_slice(&digest);
    }
    out[headers..len].fill(0);
    len
}

/// Writes a completion (*TCP* 3.6.2.7) to the front of `out`; returns its length.
pub fn encode_capsule_response(out: &mut [u8; 128], completion: &Completion, limits: &PduLimits) -> usize {
    out[8..SHORT_SIZE].copy_from_slice(&completion.encode());
    finish_pdu_header(out, PduType::ResponseCapsule, 0, None, 0, limits)
}

/// Writes the header of data for the host to the front of `out`; returns its length. It is the last
/// one of its command. With `is_success`, it is also the completion.
pub fn encode_c2h_data(
    out: &mut [u8; 128],
    data: &DataPdu,
    is_success: bool,
    host_alignment: u8,
    limits: &PduLimits,
) -> usize {
    out[..SHORT_SIZE].fill(0);
    data.put(out);
    let flags = FLAG_LAST | if is_success { FLAG_SUCCESS } else { 0 };
    finish_pdu_header(out, PduType::ControllerData, flags, Some(data.len), host_alignment, limits)
}

/// Writes an R2T (*TCP* 3.6.2.10) to the front of `out`; returns its length.
pub fn encode_r2t(out: &mut [u8; 128], data: &DataPdu, limits: &PduLimits) -> usize {
    out[..SHORT_SIZE].fill(0);
    data.put(out);
    finish_pdu_header(out, PduType::ReadyToTransfer, 0, None, 0, limits)
}

/// As a host: writes the header of a command capsule to the front of `out`; returns its length.
/// `data` is the number of bytes that follow in the capsule.
pub fn encode_capsule_command(
    out: &mut [u8; 128],
    command: &NvmeCommand,
    data: Option<u32>,
    limits: &PduLimits,
) -> usize {
    out[8..CAPSULE_SIZE].copy_from_slice(command.bytes());
    finish_pdu_header(out, PduType::NvmeCommand, 0, data, 0, limits)
}

/// As a host: writes the header of data for the controller to the front of `out`; returns its
/// length.
pub fn encode_h2c_data(out: &mut [u8; 128], data: &DataPdu, is_last: bool, limits: &PduLimits) -> usize {
    out[..SHORT_SIZE].fill(0);
    data.put(out);
    let flags = if is_last { FLAG_LAST } else { 0 };
    finish_pdu_header(out, PduType::HostData, flags, Some(data.len), 0, limits)
}
