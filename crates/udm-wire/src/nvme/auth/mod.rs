//! DH-HMAC-CHAP: a host proves that it knows its secret, and the controller perhaps too (*Base*
//! 8.3.4, formerly 8.13).
//!
//! * `secret`: a secret in the text form of nvme-cli. `response`: what each side computes.
//! * `message`: the messages of Authentication Send and Receive.
//!
//! The sequence: *negotiate* (host) → *challenge* → *reply* (host) → *success 1* → *success 2*
//! (host, if it has asked the controller for a response). Either side may send a failure. Only the
//! null Diffie-Hellman group is supported, so an eavesdropper may try secrets at leisure: use
//! random ones, as nvme-cli generates them.

mod message;
mod response;
mod secret;

pub use message::{
    AUTHENTICATION_MESSAGE_MAX, AuthenticationCommand, AuthenticationFailure, AuthenticationMessage,
    AuthenticationMessageError, DhchapChallenge, DhchapNegotiation, DhchapReply,
};
pub use response::{DhchapTranscript, verify_dhchap_response};
pub use secret::{DhchapHash, DhchapSecret, DhchapSecretError};
