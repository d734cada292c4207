//! The handshake phase of a connection.

use super::{AcceptedNbdConnection, ConnectionPhase, ConnectionTls};
use crate::nbd::handshake::{HandshakeStepOutcome, NegotiatedSession};
use crate::nbd::stats::TlsConnectionGuard;
use udm_core::errno::EBUSY;
use udm_core::{DeviceControlError, Nanos};
use udm_runtime::FrontCx;

/// Limit of output in bytes that waits for a send. More input is handled after it has left.
const OUT_MAX: usize = 64 << 10;

/// Limit of handshake steps per turn: a step may read all checkpoints of a device, or list some
/// exports.
const STEPS_A_TURN: usize = 8;

impl AcceptedNbdConnection {
    pub(super) fn run_handshake(&mut self, cx: &mut FrontCx<'_, '_>) {
        if !self.tx.is_idle() {
            return;
        }
        self.begin_tls(cx);
        if let Some(tls) = &self.tls {
            if tls.is_handshaking() {
                return;
            }
            if let ConnectionPhase::Handshake(handshake) = &mut self.phase {
                handshake.set_client_names(|| tls.peer_names());
            }
        }
        let (mut out, mut steps) = (Vec::new(), 0);
        while let ConnectionPhase::Handshake(handshake) = &mut self.phase
            && out.len() < OUT_MAX
        {
            steps += 1;
            if steps > STEPS_A_TURN {
                cx.schedule(cx.me());
                break;
            }
            let mut input = self.rx.unread();
            let before = input.len();
            let (device, admission_slot, options) =
                (&mut self.device, &mut self.admission_slot, &self.options);
            let step = handshake.step(&mut input, &mut out, &self.exports, &mut |export| {
                let users = export.users() - 1;
                if users >= options.device_connections_max.max(1) {
                    let text =
                        format!("{users} clients use it, or have left requests in it: no room for more");
                    return Err(DeviceControlError::new(EBUSY, text));
                }
                let slot = cx.open(export.device())?;
                if let Err(text) = admission_slot.serve(export.device().id(), options) {
                    cx.close(slot);
                    return Err(DeviceControlError::new(EBUSY, text));
                }
                *device = Some(slot);
                Ok(())
            });
            let taken = before - input.len();
            self.rx.consume(taken);
            match step {
                HandshakeStepOutcome::Answered => {}
                HandshakeStepOutcome::StartTls(session) => {
                    if self.rx.unread().is_empty() {
                        self.next_tls = Some(Box::new(ConnectionTls::new(*session)));
                    } else {
                        // Somebody between may have added them.
                        tracing::warn!(
                            "nbd: the client {} is disconnected: it sent bytes after STARTTLS in plain",
                            self.admission_slot.peer()
                        );
                        out.clear();
                        self.phase = ConnectionPhase::Dead;
                    }
                    break;
                }
                HandshakeStepOutcome::More => break,
                HandshakeStepOutcome::Close => self.phase = ConnectionPhase::Draining,
                HandshakeStepOutcome::Begin(session) => self.begin(session, cx),
            }
        }
        self.tx.push_raw(&out);
    }

    fn begin(&mut self, session: NegotiatedSession, cx: &mut FrontCx<'_, '_>) {
        self.client = session.client;
        self.export = Some((session.export, session.geometry));
        self.attend(cx);
        self.header_style = session.header_style;
        self.contexts = session.contexts;
        self.tx.use_header_style(session.header_style);
        if let Some(tls) = &mut self.tls {
            tls.count(TlsConnectionGuard::new(self.admission_slot.counters()));
        }
        self.phase = ConnectionPhase::Serving;
        self.deadline = Nanos::NEVER;
        // The list may have changed before the subscription.
        self.disconnect_if_not_allowed();
    }
}
