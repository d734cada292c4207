//! What users see of a target: its subsystem, namespaces and controllers.

use super::listener::NvmeServer;
use super::namespaces::NamespaceGeometry;
use std::net::{IpAddr, SocketAddr};
use udm_wire::nvme::{AnaState, ControllerKind};

/// A subsystem with its ports, namespaces and controllers. They are recent, but not of one instant.
#[derive(Clone, Debug)]
pub struct NvmeSubsystemDescription {
    /// Name.
    pub nqn: String,
    /// Serial number.
    pub serial: String,
    /// Addresses on which it listens.
    pub ports: Vec<SocketAddr>,
    /// By number.
    pub namespaces: Vec<NvmeNamespaceDescription>,
    /// By number.
    pub controllers: Vec<NvmeControllerDescription>,
}

/// A namespace.
#[derive(Clone, Debug)]
pub struct NvmeNamespaceDescription {
    /// Number.
    pub nsid: u32,
    /// Identifier: its NGUID and its UUID.
    pub uuid: [u8; 16],
    /// Name of the device.
    pub device: String,
    /// Size in bytes.
    pub size: u64,
    /// Block size in bytes.
    pub block: u32,
    /// Hosts cannot write.
    pub is_read_only: bool,
    /// ANA states, by port.
    pub ana_states: Vec<AnaState>,
}

/// A controller, which exists for one host.
#[derive(Clone, Debug)]
pub struct NvmeControllerDescription {
    /// Number.
    pub id: u16,
    /// Name of the host, which the host says.
    pub host: String,
    /// Address of the host, if the system knows it.
    pub address: Option<IpAddr>,
    /// Index of the port to which the host has connected.
    pub port: usize,
    /// It belongs to the discovery subsystem.
    pub is_discovery: bool,
    /// The host has enabled it.
    pub is_enabled: bool,
    /// Its admin queue is gone; it waits for its requests at the devices.
    pub is_ended: bool,
    /// Number of connected I/O queues, and of those that wait for their requests.
    pub io_queues: usize,
}

impl NvmeServer {
    /// The subsystem with its namespaces and controllers.
    #[must_use]
    pub fn describe(&self) -> NvmeSubsystemDescription {
        let subsystem = self.subsystem_state();
        let ports = self.bound().to_vec();
        let namespaces = subsystem.all_namespaces().into_iter().map(|(nsid, namespace)| {
            let export = &namespace.export;
            let geometry = NamespaceGeometry::new(&export.device().limits(), export.is_read_only());
            NvmeNamespaceDescription {
                nsid,
                uuid: namespace.uuid,
                device: export.name().to_string(),
                ana_states: (0..ports.len()).map(|port| subsystem.ana_state(port, &export.name())).collect(),
                size: geometry.blocks << geometry.block_log2,
                block: 1 << geometry.block_log2,
                is_read_only: geometry.is_read_only,
            }
        });
        let controllers = subsystem.all_associations().into_iter().map(|one| NvmeControllerDescription {
            id: one.id,
            host: one.host.clone(),
            address: one.origin.peer.address(),
            port: one.origin.port,
            is_discovery: one.kind == ControllerKind::Discovery,
            is_enabled: one.is_enabled(),
            is_ended: one.is_ended(),
            io_queues: one.connected_io_queues(),
        });
        NvmeSubsystemDescription {
            nqn: subsystem.nqn.clone(),
            serial: subsystem.serial.clone(),
            namespaces: namespaces.collect(),
            ports: ports.clone(),
            controllers: controllers.collect(),
        }
    }
}
