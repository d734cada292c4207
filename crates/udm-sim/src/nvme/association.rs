//! The steps of an association of a host: connect, work, and the ways in which it is lost.

use super::disk::{BLOCK, bytes_of, stamp};
use super::queue::HostQueue;
use std::collections::BTreeMap;
use udm_core::Nanos;
use udm_wire::nvme::{
    ControllerInstance, CrossControllerReset, NvmeCommand, OPCODE_FABRICS, SQE_SIZE, property,
};

/// What an association does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AssociationStep {
    /// The admin queue connects, and the controller becomes ready.
    Connecting,
    /// The world connects the I/O queue.
    NeedsQueue,
    /// The I/O queue connects.
    ConnectingQueue,
    /// Requests are sent.
    Ready,
    /// The I/O queue is closed; the host waits for the end of the shutdown.
    ShuttingDown,
    /// The host sends nothing more, and waits until it may repeat its writes.
    Lost,
    /// Nothing of it is left.
    Over,
}

/// How far a lost association is fenced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FenceStep {
    /// Another association is to reset it.
    Needed,
    /// This association was asked.
    ResetBy(usize),
    /// Until this time.
    Until(Nanos),
}

/// A command of the admin queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AdminCommand {
    Connect,
    Enable,
    Status,
    Identify,
    Mask,
    Event,
    /// Another log page.
    Page,
    ResetLog,
    KeepAlive,
    /// Resets this association.
    Reset(usize),
    /// A reset that the target must refuse; of this association of another host, if it works.
    ForbiddenReset(Option<usize>),
    Shutdown,
    ShutdownStatus,
}

/// A command of the I/O queue.
#[derive(Clone, Debug)]
pub(super) enum IoCommand {
    Connect,
    Write { block: usize, stamp: u64 },
    Read { block: usize, allowed: Vec<u64> },
}

/// An association.
pub(super) struct HostAssociation {
    /// Index of the host.
    pub(super) host: usize,
    pub(super) step: AssociationStep,
    pub(super) fence: FenceStep,
    pub(super) admin: HostQueue,
    pub(super) io: Option<HostQueue>,
    pub(super) controller: u16,
    pub(super) instance: Option<ControllerInstance>,
    pub(super) quiesce: Nanos,
    pub(super) admin_commands: BTreeMap<u16, AdminCommand>,
    pub(super) io_commands: BTreeMap<u16, IoCommand>,
    pub(super) keep_alive_at: Nanos,
    /// The host neither sends nor reads any more, without a sign to the target.
    pub(super) is_silent: bool,
    /// Another association was asked to reset this one while it worked.
    pub(super) may_be_reset: bool,
    pub(super) next: Nanos,
    stamps: u32,
}

fn command(opcode: u8, kind: u32, dwords: &[u32], len: u32) -> NvmeCommand {
    let mut bytes = [0; SQE_SIZE];
    (bytes[0], bytes[1]) = (opcode, 0x40);
    bytes[4..8].copy_from_slice(&kind.to_le_bytes());
    bytes[32..36].copy_from_slice(&len.to_le_bytes());
    bytes[39] = if len > 0 { 0x5a } else { 0 };
    for (number, dword) in dwords.iter().enumerate() {
        bytes[40 + number * 4..44 + number * 4].copy_from_slice(&dword.to_le_bytes());
    }
    NvmeCommand::from_bytes(bytes)
}

impl HostAssociation {
    pub(super) fn new(host: usize, admin: HostQueue, now: Nanos) -> HostAssociation {
        HostAssociation {
            host,
            step: AssociationStep::Connecting,
            fence: FenceStep::Needed,
            admin,
            io: None,
            controller: 0,
            instance: None,
            quiesce: Nanos(0),
            // The Connect command was the first one.
            admin_commands: BTreeMap::from([(1, AdminCommand::Connect)]),
            io_commands: BTreeMap::new(),
            keep_alive_at: Nanos::NEVER,
            is_silent: false,
            may_be_reset: false,
            next: now,
            stamps: 0,
        }
    }

    /// Sends an admin command.
    pub(super) fn send_admin(&mut self, sent: AdminCommand) {
        let command = match sent {
            AdminCommand::Connect => return,
            AdminCommand::Enable => {
                command(OPCODE_FABRICS, 0, &[0, property::CONFIGURATION, 0x0046_0001, 0], 0)
            }
            AdminCommand::Shutdown => {
                command(OPCODE_FABRICS, 0, &[0, property::CONFIGURATION, 0x0046_4001, 0], 0)
            }
            AdminCommand::Status | AdminCommand::ShutdownStatus => {
                command(OPCODE_FABRICS, 4, &[0, property::STATUS], 0)
            }
            AdminCommand::Identify => command(0x06, 0, &[1], 4096),
            AdminCommand::Mask => command(0x09, 0, &[0x0b, 1 << 8 | 1 << 11 | 1 << 20], 0),
            AdminCommand::Event => command(0x0c, 0, &[], 0),
            AdminCommand::Page => return,
            AdminCommand::ResetLog => return self.read_page(0x1e),
            AdminCommand::KeepAlive => command(0x18, 0, &[], 0),
            AdminCommand::Reset(_) | AdminCommand::ForbiddenReset(_) => return,
        };
        let id = self.admin.send(&command, &[]);
        self.admin_commands.insert(id, sent);
    }

    /// Reads a log page.
    pub(super) fn read_page(&mut self, page: u8) {
        let sent = if page == 0x1e { AdminCommand::ResetLog } else { AdminCommand::Page };
        let id = self.admin.send(&command(0x02, 0, &[u32::from(page) | 127 << 16], 512), &[]);
        self.admin_commands.insert(id, sent);
    }

    /// Asks to reset association `victim`, which is this instance.
    pub(super) fn ask_reset(&mut self, victim: usize, impacted: ControllerInstance) {
        self.send_reset(impacted, AdminCommand::Reset(victim));
    }

    /// Sends a reset of this instance, of which `sent` says what the host expects.
    pub(super) fn send_reset(&mut self, impacted: ControllerInstance, sent: AdminCommand) {
        let id = self.admin.send(&CrossControllerReset { impacted }.encode(0), &[]);
        self.admin_commands.insert(id, sent);
    }

    /// True if the association has asked for this reset, and has no answer.
    pub(super) fn awaits_reset(&self, victim: usize) -> bool {
        self.admin_commands.values().any(|sent| *sent == AdminCommand::Reset(victim))
    }

    /// The stamp of the next write; `number` is that of the association.
    pub(super) fn next_stamp(&mut self, number: usize) -> u64 {
        self.stamps += 1;
        stamp(number, self.stamps)
    }

    /// Sends a write or read of one block of the disk.
    pub(super) fn request(&mut self, at: usize, sent: IoCommand) {
        let Some(io) = &mut self.io else { return };
        let data = match &sent {
            IoCommand::Write { stamp, .. } => bytes_of(*stamp),
            _ => Vec::new(),
        };
        let opcode = if data.is_empty() { 2 } else { 1 };
        let mut bytes = *command(opcode, 1, &[at as u32, 0, 0], BLOCK as u32).bytes();
        if !data.is_empty() {
            bytes[39] = 0x01;
        }
        let id = io.send(&NvmeCommand::from_bytes(bytes), &data);
        self.io_commands.insert(id, sent);
    }

    pub(super) fn queues(&self) -> impl Iterator<Item = &HostQueue> {
        [&self.admin].into_iter().chain(&self.io)
    }

    pub(super) fn is_active(&self) -> bool {
        !matches!(self.step, AssociationStep::Lost | AssociationStep::Over)
    }
}
