//! The host's side of DH-HMAC-CHAP on one queue (*Base* 8.3.4.5), after its Connect command: the
//! host proves that it knows its secret, and asks the controller for a proof if it has a secret of
//! the controller.
//!
//! The owner sends each command that it is told to send, and returns the data of its answer.

use super::command::HostCommand;
use super::error::HostError;
use super::options::{HostOptions, HostSecrets};
use crate::nvme::{
    AUTHENTICATION_MESSAGE_MAX, AuthenticationFailure, AuthenticationMessage, DhchapChallenge, DhchapHash,
    DhchapNegotiation, DhchapReply, DhchapTranscript, verify_dhchap_response,
};
use std::sync::Arc;

/// What the owner does next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum AuthenticationStep {
    /// It sends this command, with the message as data in its capsule.
    Send(HostCommand, Vec<u8>),
    /// It sends this command, whose answer has a message.
    Receive(HostCommand),
    /// The queue may be used.
    Done,
}

/// The command in flight, and what is expected of the controller.
enum Stage {
    Negotiating,
    AwaitingChallenge,
    /// With the response that the controller must give, if one is asked for.
    Replying(Option<Vec<u8>>),
    AwaitingSuccess(Option<Vec<u8>>),
    Confirming,
    Refusing,
}

/// An authentication of a queue.
pub(super) struct HostAuthentication {
    secrets: Arc<HostSecrets>,
    number: u64,
    stage: Stage,
}

impl HostAuthentication {
    /// Begins, and returns the first step too.
    pub(super) fn begin(secrets: &Arc<HostSecrets>) -> (HostAuthentication, AuthenticationStep) {
        let number = secrets.next_authentication();
        let begun = HostAuthentication { secrets: Arc::clone(secrets), number, stage: Stage::Negotiating };
        let offer = AuthenticationMessage::Negotiate(DhchapNegotiation {
            no_concatenation: true,
            has_dhchap: true,
            hashes: vec![DhchapHash::Sha256, DhchapHash::Sha384, DhchapHash::Sha512],
            has_null_group: true,
            has_ffdhe2048: secrets.names_more_groups(),
        });
        let step = begun.send(&offer);
        (begun, step)
    }

    /// The number of the transaction, by which messages belong together.
    fn transaction(&self) -> u16 {
        self.number as u16
    }

    fn send(&self, message: &AuthenticationMessage) -> AuthenticationStep {
        let bytes = message.encode(self.transaction());
        AuthenticationStep::Send(HostCommand::authentication_send(bytes.len() as u32), bytes)
    }

    /// Handles the successful completion of the last command, which had this data.
    ///
    /// # Errors
    /// The authentication has failed: the connection must be closed.
    pub(super) fn next(
        &mut self,
        options: &HostOptions,
        data: &[u8],
    ) -> Result<AuthenticationStep, HostError> {
        const RECEIVE: HostCommand = HostCommand::authentication_receive(AUTHENTICATION_MESSAGE_MAX as u32);
        match std::mem::replace(&mut self.stage, Stage::Refusing) {
            Stage::Negotiating => {
                self.stage = Stage::AwaitingChallenge;
                Ok(AuthenticationStep::Receive(RECEIVE))
            }
            Stage::AwaitingChallenge => match self.decode(options, data)? {
                AuthenticationMessage::Challenge(challenge) => Ok(self.reply(options, &challenge)),
                _ => Err(authentication_error("expected a challenge")),
            },
            Stage::Replying(expected) => {
                self.stage = Stage::AwaitingSuccess(expected);
                Ok(AuthenticationStep::Receive(RECEIVE))
            }
            Stage::AwaitingSuccess(expected) => match self.decode(options, data)? {
                AuthenticationMessage::Success1(_, response) => Ok(self.check(expected, response)),
                _ => Err(authentication_error("expected success")),
            },
            Stage::Confirming => Ok(AuthenticationStep::Done),
            Stage::Refusing => {
                Err(authentication_error("the controller does not know the secret of dhchap-ctrl-secret"))
            }
        }
    }

    /// The message in `data`, if it belongs to this authentication.
    fn decode(&self, options: &HostOptions, data: &[u8]) -> Result<AuthenticationMessage, HostError> {
        let decoded = AuthenticationMessage::decode(data);
        let (transaction, message) = decoded.map_err(|error| authentication_error(&error.to_string()))?;
        if transaction != self.transaction() {
            return Err(authentication_error("a message has the number of another transaction"));
        }
        if let AuthenticationMessage::Failure1(failure) = message {
            let host = &options.host;
            return Err(match failure {
                AuthenticationFailure::Failed => HostError::Unusable(format!(
                    "the controller does not accept the secret of dhchap-secret for host {host}"
                )),
                AuthenticationFailure::GroupNotUsable => {
                    self.secrets.name_more_groups();
                    authentication_error(
                        "the controller wants a Diffie-Hellman group; udm has the null group only",
                    )
                }
                AuthenticationFailure::HashNotUsable => {
                    authentication_error("the controller wants another hash")
                }
                other => authentication_error(&format!("the controller ends it: {other:?}")),
            });
        }
        Ok(message)
    }

    /// The response to `challenge`, and the own challenge.
    fn reply(&mut self, options: &HostOptions, challenge: &DhchapChallenge) -> AuthenticationStep {
        let HostOptions { host, subsystem, .. } = options;
        let (transaction, hash, sequence) = (self.transaction(), challenge.hash, challenge.sequence);
        let asked = DhchapTranscript {
            hash,
            transaction,
            sequence,
            challenge: &challenge.challenge,
            host,
            subsystem,
        };
        let response = asked.host_response(&self.secrets.host);
        let own = self.secrets.controller.as_ref().map(|secret| {
            // 0 is not a sequence number.
            let (own, sequence) = (self.secrets.challenge(self.number, hash), (self.number as u32).max(1));
            let expected =
                DhchapTranscript { sequence, challenge: &own, ..asked }.controller_response(secret);
            ((sequence, own), expected)
        });
        let (challenge, expected) = own.unzip();
        self.stage = Stage::Replying(expected);
        self.send(&AuthenticationMessage::Reply(DhchapReply { response, challenge }))
    }

    /// Compares the response of the controller with the expected one, if there is one.
    fn check(&mut self, expected: Option<Vec<u8>>, response: Option<Vec<u8>>) -> AuthenticationStep {
        let Some(expected) = expected else { return AuthenticationStep::Done };
        if response.is_some_and(|response| verify_dhchap_response(&expected, &response)) {
            self.stage = Stage::Confirming;
            return self.send(&AuthenticationMessage::Success2);
        }
        self.stage = Stage::Refusing;
        self.send(&AuthenticationMessage::Failure2(AuthenticationFailure::Failed))
    }
}

fn authentication_error(why: &str) -> HostError {
    HostError::Unusable(format!("authentication: {why}"))
}
