//! Authentication of a host on a queue: DH-HMAC-CHAP with the null Diffie-Hellman group.
//!
//! If the target has secrets, each queue executes nothing but the commands of the authentication
//! until its host has proved that it knows its secret. If it fails, the queue is closed. The host
//! may ask the controller for a proof too, if it has a secret for this host.

use super::queue::{NvmeQueue, QueuePhase};
use ring::rand::{SecureRandom, SystemRandom};
use std::collections::BTreeMap;
use std::io;
use udm_core::{Nanos, Segments};
use udm_wire::nvme::{
    AUTHENTICATION_MESSAGE_MAX, AuthenticationCommand, AuthenticationFailure, AuthenticationMessage,
    DataPointer, DhchapChallenge, DhchapReply, DhchapSecret, DhchapTranscript, FabricsCommand, NvmeCommand,
    NvmeStatus, OPCODE_FABRICS, verify_dhchap_response,
};

/// The secrets for one host.
#[derive(Clone, Debug)]
pub struct NvmeHostSecrets {
    /// The host proves that it knows this.
    pub host: DhchapSecret,
    /// The target proves to this host that it knows this, if the host asks.
    pub controller: Option<DhchapSecret>,
}

/// Secrets by the name of the host.
pub type NvmeSecrets = BTreeMap<String, NvmeHostSecrets>;

/// Random bytes of the system, for [`super::NvmeServerOptions::instance_key`].
///
/// # Errors
/// The system has none.
pub fn random_instance_key() -> io::Result<[u8; 32]> {
    let mut key = [0; 32];
    SystemRandom::new().fill(&mut key).map_err(|_| io::Error::other("the system has no random bytes"))?;
    Ok(key)
}

/// The authentication on a queue.
pub(super) struct QueueAuthentication {
    secrets: NvmeHostSecrets,
    is_done: bool,
    /// Number of the transaction, which the host has chosen.
    transaction: u16,
    /// The challenge that the host has to answer.
    challenge: Option<DhchapChallenge>,
    /// The message that the host receives next.
    outgoing: Option<AuthenticationMessage>,
    /// The host has to confirm the response of the controller.
    awaits_confirmation: bool,
    /// Time limit for the authentication.
    until: Nanos,
}

impl QueueAuthentication {
    pub(super) fn new(secrets: NvmeHostSecrets) -> QueueAuthentication {
        QueueAuthentication {
            secrets,
            is_done: false,
            transaction: 0,
            challenge: None,
            outgoing: None,
            awaits_confirmation: false,
            until: Nanos::NEVER,
        }
    }

    pub(super) fn begin(&mut self, until: Nanos) {
        self.until = until;
    }

    /// The time at which the host is given up; never once it is authenticated.
    fn until(&self) -> Nanos {
        if self.is_done { Nanos::NEVER } else { self.until }
    }

    /// Handles the answer of a host to the challenge.
    fn reply_arrived(
        &mut self,
        transaction: u16,
        reply: DhchapReply,
        names: [&str; 2],
    ) -> Result<AuthenticationMessage, AuthenticationFailure> {
        let asked = self.challenge.take().filter(|_| self.outgoing.is_none());
        let asked = asked.ok_or(AuthenticationFailure::IncorrectMessage)?;
        if transaction != self.transaction {
            return Err(AuthenticationFailure::IncorrectPayload);
        }
        let [host, subsystem] = names;
        let (hash, sequence, challenge) = (asked.hash, asked.sequence, &asked.challenge[..]);
        let transcript = DhchapTranscript { hash, transaction, sequence, challenge, host, subsystem };
        if !verify_dhchap_response(&transcript.host_response(&self.secrets.host), &reply.response) {
            return Err(AuthenticationFailure::Failed);
        }
        let Some((sequence, challenge)) = reply.challenge else {
            return Ok(AuthenticationMessage::Success1(hash, None));
        };
        // A host that sends the challenge back would get an answer that is not its own work.
        let is_reflected = challenge == asked.challenge;
        let secret = self.secrets.controller.as_ref().filter(|_| !is_reflected);
        let secret = secret.ok_or(AuthenticationFailure::Failed)?;
        let transcript = DhchapTranscript { sequence, challenge: &challenge, ..transcript };
        self.awaits_confirmation = true;
        Ok(AuthenticationMessage::Success1(hash, Some(transcript.controller_response(secret))))
    }
}

impl NvmeQueue {
    /// True if `command` belongs to the authentication of the queue, or must wait for it.
    pub(super) fn is_for_authentication(&self, command: &NvmeCommand) -> bool {
        let Some(authentication) = &self.authentication else { return false };
        !authentication.is_done || is_authentication_command(command)
    }

    /// The time at which a host that does not authenticate itself is given up.
    pub(super) fn authentication_until(&self) -> Nanos {
        self.authentication.as_ref().map_or(Nanos::NEVER, QueueAuthentication::until)
    }

    /// True if the host must not use the queue yet, or not any more.
    pub(super) fn lacks_authentication(&self) -> bool {
        self.authentication.as_ref().is_some_and(|authentication| !authentication.is_done)
    }

    /// Executes a command of the authentication, and refuses others.
    pub(super) fn authentication_command(&mut self, command: &NvmeCommand, data: Option<Segments>) {
        let mut message = vec![0; data.as_ref().map_or(0, Segments::len).min(AUTHENTICATION_MESSAGE_MAX)];
        data.iter().for_each(|data| _ = data.copy_to_at(0, &mut message));
        data.into_iter().for_each(|data| crate::nbd::return_buffers_to_pool(data, &mut self.writes));
        let is_fabrics = command.opcode() == OPCODE_FABRICS;
        let decoded = is_fabrics.then(|| FabricsCommand::decode(command));
        let result = match decoded {
            Some(FabricsCommand::AuthenticationSend(send)) => self.message_arrived(command, send, &message),
            Some(FabricsCommand::AuthenticationReceive(receive)) => self.send_message(command, receive),
            _ => Err(NvmeStatus::AUTHENTICATION_REQUIRED.permanent()),
        };
        if let Err(status) = result {
            self.respond(command.id(), status, 0);
        }
    }

    fn message_arrived(
        &mut self,
        command: &NvmeCommand,
        send: AuthenticationCommand,
        bytes: &[u8],
    ) -> Result<(), NvmeStatus> {
        if !send.is_dhchap || send.len as usize > bytes.len() {
            return Err(NvmeStatus::INVALID_FIELD.permanent());
        }
        let Ok((transaction, message)) = AuthenticationMessage::decode(&bytes[..send.len as usize]) else {
            self.queue_message(Err(AuthenticationFailure::IncorrectPayload));
            self.respond(command.id(), NvmeStatus::SUCCESS, 0);
            return Ok(());
        };
        let association = &self.link.association;
        let subsystem = &self.server.subsystem;
        let authentication = self.authentication.as_mut().expect("the caller has looked");
        let outgoing = match message {
            AuthenticationMessage::Negotiate(negotiation) => {
                let hash = negotiation.hashes.first().copied();
                authentication.transaction = transaction;
                authentication.awaits_confirmation = false;
                authentication.outgoing = None;
                match hash {
                    _ if !negotiation.has_dhchap => Err(AuthenticationFailure::ProtocolNotUsable),
                    _ if !negotiation.no_concatenation => Err(AuthenticationFailure::ConcatenationMismatch),
                    _ if !negotiation.has_null_group => Err(AuthenticationFailure::GroupNotUsable),
                    None => Err(AuthenticationFailure::HashNotUsable),
                    Some(hash) => {
                        let (sequence, challenge) = subsystem.next_challenge(hash.size());
                        let challenge = DhchapChallenge { hash, sequence, challenge };
                        authentication.challenge = Some(challenge.clone());
                        Ok(Some(AuthenticationMessage::Challenge(challenge)))
                    }
                }
            }
            AuthenticationMessage::Reply(reply) => {
                let names = [&association.host[..], &subsystem.nqn];
                authentication.reply_arrived(transaction, reply, names).map(Some)
            }
            AuthenticationMessage::Success2 if authentication.awaits_confirmation => {
                authentication.awaits_confirmation = false;
                authentication.is_done = true;
                Ok(None)
            }
            AuthenticationMessage::Failure2(_) => {
                tracing::warn!("nvme: {}: the host does not accept this controller", association.host);
                self.respond(command.id(), NvmeStatus::SUCCESS, 0);
                self.phase = QueuePhase::Draining;
                authentication_failed(self);
                return Ok(());
            }
            _ => Err(AuthenticationFailure::IncorrectMessage),
        };
        self.queue_message(outgoing);
        self.respond(command.id(), NvmeStatus::SUCCESS, 0);
        Ok(())
    }

    fn queue_message(&mut self, outgoing: Result<Option<AuthenticationMessage>, AuthenticationFailure>) {
        let host = self.link.association.host.clone();
        let authentication = self.authentication.as_mut().expect("the caller has looked");
        authentication.outgoing = match outgoing {
            Ok(message) => message,
            Err(failure) => {
                tracing::warn!("nvme: {host}: the host is not authenticated: {failure:?}");
                authentication.challenge = None;
                authentication.is_done = false;
                Some(AuthenticationMessage::Failure1(failure))
            }
        };
    }

    fn send_message(
        &mut self,
        command: &NvmeCommand,
        receive: AuthenticationCommand,
    ) -> Result<(), NvmeStatus> {
        let authentication = self.authentication.as_mut().expect("the caller has looked");
        let len = match command.data_pointer() {
            DataPointer::Transport { len } => len.min(receive.len) as usize,
            _ => return Err(NvmeStatus::SGL_DESCRIPTOR_TYPE_INVALID.permanent()),
        };
        let failure = AuthenticationMessage::Failure1(AuthenticationFailure::IncorrectMessage);
        let message = authentication.outgoing.as_ref().unwrap_or(&failure);
        let mut bytes = message.encode(authentication.transaction);
        if !receive.is_dhchap || len < bytes.len() {
            return Err(NvmeStatus::INVALID_FIELD.permanent());
        }
        bytes.resize(len.min(AUTHENTICATION_MESSAGE_MAX), 0);
        let is_failure = matches!(message, AuthenticationMessage::Failure1(_));
        authentication.is_done |= matches!(message, AuthenticationMessage::Success1(_, None));
        authentication.outgoing = None;
        let mut data = Segments::from(self.reads.get(bytes.len()));
        data.copy_from(&bytes);
        self.respond_with_data(command.id(), data, 0);
        if is_failure {
            // The host gets the message, then the connection is closed.
            self.phase = QueuePhase::Draining;
            authentication_failed(self);
        }
        Ok(())
    }
}

fn authentication_failed(queue: &mut NvmeQueue) {
    if let Some(authentication) = &mut queue.authentication {
        authentication.is_done = false;
    }
}

fn is_authentication_command(command: &NvmeCommand) -> bool {
    command.opcode() == OPCODE_FABRICS
        && matches!(
            FabricsCommand::decode(command),
            FabricsCommand::AuthenticationSend(_) | FabricsCommand::AuthenticationReceive(_)
        )
}
