//! Secrets in the text form of nvme-cli: `DHHC-1:HH:BASE64:`.
//!
//! `HH` is the hash by which the secret is transformed before use: 00 for none, 01 to 03 for
//! SHA-256, SHA-384 and SHA-512. The base64 text is the secret of 32, 48 or 64 bytes and its CRC-32
//! (*Base* 8.3.4.5.8). As in Linux since 6.7, any length goes with any hash.

use ring::hmac;
use std::fmt;

/// A hash of HMAC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum DhchapHash {
    /// SHA-256.
    Sha256 = 1,
    /// SHA-384.
    Sha384 = 2,
    /// SHA-512.
    Sha512 = 3,
}

impl DhchapHash {
    /// The hash of this number.
    #[must_use]
    pub const fn from_number(number: u8) -> Option<DhchapHash> {
        match number {
            1 => Some(DhchapHash::Sha256),
            2 => Some(DhchapHash::Sha384),
            3 => Some(DhchapHash::Sha512),
            _ => None,
        }
    }

    /// Bytes of a challenge and of a response.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            DhchapHash::Sha256 => 32,
            DhchapHash::Sha384 => 48,
            DhchapHash::Sha512 => 64,
        }
    }

    pub(super) fn algorithm(self) -> hmac::Algorithm {
        match self {
            DhchapHash::Sha256 => hmac::HMAC_SHA256,
            DhchapHash::Sha384 => hmac::HMAC_SHA384,
            DhchapHash::Sha512 => hmac::HMAC_SHA512,
        }
    }
}

/// Error: a text is no secret. It does not contain the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DhchapSecretError {
    /// The text has another form.
    #[error("expected a line DHHC-1:HH:BASE64: with HH from 00 to 03, as of nvme gen-dhchap-key")]
    Form,
    /// The length is wrong.
    #[error("the secret has {0} bytes, expected 32, 48 or 64: nvme gen-dhchap-key makes one")]
    Length(usize),
    /// The CRC-32 does not match.
    #[error("the checksum is wrong: the secret is damaged or incomplete")]
    Checksum,
}

/// A secret of a host or of a subsystem. It is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct DhchapSecret {
    bytes: Vec<u8>,
    transform: Option<DhchapHash>,
}

impl fmt::Debug for DhchapSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DhchapSecret({} bytes)", self.bytes.len())
    }
}

impl DhchapSecret {
    /// The secret in `text`, which may end with white space.
    ///
    /// # Errors
    /// It is none; the error does not contain the text.
    pub fn parse(text: &str) -> Result<DhchapSecret, DhchapSecretError> {
        let rest = text.trim().strip_prefix("DHHC-1:").ok_or(DhchapSecretError::Form)?;
        let (hash, rest) = rest.split_once(':').ok_or(DhchapSecretError::Form)?;
        let transform = match hash {
            "00" => None,
            "01" => Some(DhchapHash::Sha256),
            "02" => Some(DhchapHash::Sha384),
            "03" => Some(DhchapHash::Sha512),
            _ => return Err(DhchapSecretError::Form),
        };
        let base64 = rest.strip_suffix(':').ok_or(DhchapSecretError::Form)?;
        let mut bytes = decode_base64(base64).ok_or(DhchapSecretError::Form)?;
        let len = bytes.len().saturating_sub(4);
        if ![32, 48, 64].contains(&len) {
            return Err(DhchapSecretError::Length(len));
        }
        let checksum = bytes.split_off(len);
        if crc32(&bytes).to_le_bytes() != checksum[..] {
            return Err(DhchapSecretError::Checksum);
        }
        Ok(DhchapSecret { bytes, transform })
    }

    /// The key of a host or subsystem of this name.
    pub(super) fn key(&self, nqn: &str) -> Vec<u8> {
        let Some(hash) = self.transform else { return self.bytes.clone() };
        let mut context = hmac::Context::with_key(&hmac::Key::new(hash.algorithm(), &self.bytes));
        context.update(nqn.as_bytes());
        context.update(b"NVMe-over-Fabrics");
        context.sign().as_ref().to_vec()
    }
}

/// The bytes of a base64 text with padding (RFC 4648, 4).
fn decode_base64(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_end_matches('=');
    let padding = text.len() - digits.len();
    if !text.len().is_multiple_of(4) || padding > 2 {
        return None;
    }
    let value = |digit: u8| {
        Some(match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        })
    };
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    for group in digits.as_bytes().chunks(4) {
        let mut bits = 0;
        for digit in group {
            bits = bits << 6 | u32::from(value(*digit)?);
        }
        bits <<= 6 * (4 - group.len());
        // A group of n digits has n - 1 bytes.
        bytes.extend_from_slice(&bits.to_be_bytes()[1..group.len()]);
    }
    Some(bytes)
}

/// CRC-32 of IEEE 802.3, as of zlib. Secrets are short, so a bit at a time will do.
fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, byte: &u8| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| crc >> 1 ^ if crc & 1 != 0 { 0xedb8_8320 } else { 0 })
    };
    !bytes.iter().fold(u32::MAX, step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_and_base64() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926, "the check value of CRC-32");
        for (text, bytes) in
            [("", &b""[..]), ("Zg==", b"f"), ("Zm8=", b"fo"), ("Zm9v", b"foo"), ("Zm9vYg==", b"foob")]
        {
            assert_eq!(decode_base64(text).as_deref(), Some(bytes), "RFC 4648, 10");
        }
        for text in ["Z", "Zg", "Zg=", "Z===", "Zm9v====", "Zm 9", "Zm9\u{e9}"] {
            assert_eq!(decode_base64(text), None, "{text:?}");
        }
    }
}
