//! The responses of DH-HMAC-CHAP with the null Diffie-Hellman group (*Base* 8.3.4.5.5 and .6): each
//! side proves that it knows a secret, without sending it.

use super::{DhchapHash, DhchapSecret};
use ring::hmac;

/// The parameters of one authentication that go into a response.
#[derive(Clone, Copy, Debug)]
pub struct DhchapTranscript<'a> {
    /// The hash that both sides have agreed on.
    pub hash: DhchapHash,
    /// Number of the transaction.
    pub transaction: u16,
    /// Sequence number of the challenge.
    pub sequence: u32,
    /// The challenge, with the size of the hash.
    pub challenge: &'a [u8],
    /// Name of the host.
    pub host: &'a str,
    /// Name of the subsystem.
    pub subsystem: &'a str,
}

impl DhchapTranscript<'_> {
    /// The response of a host to the challenge of a controller.
    #[must_use]
    pub fn host_response(&self, secret: &DhchapSecret) -> Vec<u8> {
        self.response(&secret.key(self.host), "HostHost", [self.host, self.subsystem])
    }

    /// The response of a controller to the challenge of a host.
    #[must_use]
    pub fn controller_response(&self, secret: &DhchapSecret) -> Vec<u8> {
        self.response(&secret.key(self.subsystem), "Controller", [self.subsystem, self.host])
    }

    fn response(&self, key: &[u8], role: &str, names: [&str; 2]) -> Vec<u8> {
        let mut context = hmac::Context::with_key(&hmac::Key::new(self.hash.algorithm(), key));
        context.update(self.challenge);
        context.update(&self.sequence.to_le_bytes());
        context.update(&self.transaction.to_le_bytes());
        // No secure channel concatenation.
        context.update(&[0]);
        context.update(role.as_bytes());
        context.update(names[0].as_bytes());
        context.update(&[0]);
        context.update(names[1].as_bytes());
        context.sign().as_ref().to_vec()
    }
}

/// True if the two responses are equal. The time does not depend on where they differ.
#[must_use]
pub fn verify_dhchap_response(expected: &[u8], response: &[u8]) -> bool {
    let difference = expected.iter().zip(response).fold(0, |all, (a, b)| all | (a ^ b));
    expected.len() == response.len() && std::hint::black_box(difference) == 0
}
