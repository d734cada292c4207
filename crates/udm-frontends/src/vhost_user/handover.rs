//! A front end that moves to another process, without effects that it can see.
//!
//! The session ends as usual: its queues complete what is in flight, and each ring has an index at
//! which it continues. Then the connection, with the messages that set the session up, is a plain
//! value. The other process handles these messages as if the front end had sent them, without
//! replies, and continues with the connection.

use super::inflight_memory::InflightMemory;
use super::session::VhostUserSession;
use std::io;
use std::os::fd::OwnedFd;
use udm_wire::vhost_user::{
    ConfigSpaceRange, HEADER_SIZE, VhostUserMessageHeader, VhostUserRequest, VringFd, VringState,
    encode_setup_request,
};
use udm_wire::virtio::VirtioFeatures;
use udm_wire::virtio::blk::BLK_CONFIG_WRITEBACK;

/// A message with its descriptors.
#[derive(Debug)]
pub struct VhostUserSetupMessage {
    /// Header and payload.
    pub bytes: Vec<u8>,
    /// The descriptors that came with it: at most one.
    pub fds: Vec<OwnedFd>,
}

/// A connected front end that no server has: none of its requests is in flight.
#[derive(Debug)]
pub struct DetachedVhostUserFrontEnd {
    /// The connected socket.
    pub socket: OwnedFd,
    /// The messages that set the session up.
    pub messages: Vec<VhostUserSetupMessage>,
}

impl VhostUserSetupMessage {
    /// Decodes the message.
    fn decode(&self) -> io::Result<VhostUserRequest> {
        let invalid = |error| io::Error::new(io::ErrorKind::InvalidData, error);
        let (header, payload) =
            self.bytes.split_first_chunk::<HEADER_SIZE>().ok_or(io::ErrorKind::InvalidData)?;
        let header = VhostUserMessageHeader::decode(header).map_err(invalid)?;
        VhostUserRequest::decode(&header, payload, self.fds.len()).map_err(invalid)
    }
}

impl DetachedVhostUserFrontEnd {
    /// True if its rings are packed, which a server must know.
    #[must_use]
    pub fn has_packed_rings(&self) -> bool {
        self.messages.iter().any(|message| match message.decode() {
            Ok(VhostUserRequest::SetFeatures(features)) => features.contains(VirtioFeatures::RING_PACKED),
            _ => false,
        })
    }
}

impl VhostUserSession {
    /// Detaches the front end after the end of the session.
    ///
    /// # Errors
    /// There are no descriptors.
    pub(super) fn detach(self) -> io::Result<DetachedVhostUserFrontEnd> {
        let mut messages = Vec::new();
        let mut add = |request: VhostUserRequest, fd: Option<&OwnedFd>| {
            let fds = fd.map(OwnedFd::try_clone).transpose()?.into_iter().collect();
            let bytes = encode_setup_request(&request).unwrap_or_default();
            debug_assert!(!bytes.is_empty(), "{request:?}");
            messages.push(VhostUserSetupMessage { bytes, fds });
            Ok::<_, io::Error>(())
        };
        add(VhostUserRequest::SetProtocolFeatures(self.protocol), None)?;
        // Without protocol features, the message enables all rings. It may not have come yet.
        let enables_all =
            !self.features.is_empty() && !self.features.contains(VirtioFeatures::VHOST_PROTOCOL_FEATURES);
        if !self.features.is_empty() {
            add(VhostUserRequest::SetFeatures(self.features), None)?;
        }
        for (region, file) in self.memory.files() {
            add(VhostUserRequest::AddMemReg(region), Some(file))?;
        }
        if let Some(InflightMemory { file, area, .. }) = &self.inflight {
            add(VhostUserRequest::SetInflightFd(*area), Some(file))?;
        }
        if let Some(back_channel) = &self.back_channel {
            add(VhostUserRequest::SetBackendReqFd, Some(back_channel))?;
        }
        if !self.writeback {
            let offset = BLK_CONFIG_WRITEBACK as u32;
            add(VhostUserRequest::SetConfig(ConfigSpaceRange { offset, flags: 0, bytes: vec![0] }), None)?;
        }
        for (index, ring) in (0..).zip(&self.rings) {
            let state = |value: u32| VringState { index, value };
            let with_fd = VringFd { index, has_fd: true };
            if enables_all && !ring.is_enabled {
                add(VhostUserRequest::SetVringEnable(state(0)), None)?;
            }
            if let Some(size) = ring.size {
                add(VhostUserRequest::SetVringNum(state(size.into())), None)?;
            }
            if let Some(addresses) = ring.addresses {
                add(VhostUserRequest::SetVringAddr(addresses), None)?;
            }
            if ring.base != 0 {
                add(VhostUserRequest::SetVringBase(state(ring.base)), None)?;
            }
            if let Some(call) = &ring.call {
                add(VhostUserRequest::SetVringCall(with_fd), Some(call))?;
            }
            if let Some(kick) = &ring.kick {
                add(VhostUserRequest::SetVringKick(with_fd), Some(kick))?;
            }
            if ring.is_enabled && !enables_all {
                add(VhostUserRequest::SetVringEnable(state(1)), None)?;
            }
        }
        if self.status != 0 {
            add(VhostUserRequest::SetStatus(self.status), None)?;
        }
        Ok(DetachedVhostUserFrontEnd { socket: self.channel.socket, messages })
    }

    /// Handles the messages of a front end that another process has detached.
    ///
    /// # Errors
    /// A message cannot be handled here.
    pub(super) fn set_up(&mut self, messages: Vec<VhostUserSetupMessage>) -> io::Result<()> {
        for message in messages {
            self.execute(message.decode()?, message.fds)?;
        }
        Ok(())
    }
}
