//! The subsystem: its names, its namespaces and its controllers.

use super::NvmeServerOptions;
use super::ana::PortAnaStates;
use super::association::{Association, AssociationOrigin};
use super::authentication::{NvmeSecrets, QueueAuthentication};
use super::host_counters::HostIoCounters;
use super::identity::{namespace_uuid, serial_number};
use super::peers::{NvmePeers, instance_tag};
use crate::nbd::{Export, ExportRef, Exports};
use ring::hmac;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use udm_core::{CoreId, DeviceId};
use udm_runtime::ProcessCores;
use udm_wire::nvme::{
    ConnectCommand, ConnectData, ConnectError, ControllerInstance, ControllerKind, DISCOVERY_NQN,
    DiscoveryEntry, NvmeStatus,
};

/// Largest number of a namespace.
pub(super) const NAMESPACES_MAX: u32 = 1024;

/// A subsystem whose namespaces are the exports of a server.
pub(super) struct Subsystem {
    pub(super) nqn: String,
    pub(super) serial: String,
    /// Time in milliseconds after which hosts expect that the requests of a lost controller are at
    /// no device (CQT).
    pub(super) quiesce_time_ms: u16,
    /// Source of random numbers of controllers: whoever does not read them cannot guess them.
    instance_key: [u8; 32],
    /// Secrets of hosts; if there are some, a host without one may not connect.
    secrets: NvmeSecrets,
    /// Number of queues whose requests needed longer than the quiesce time.
    late_quiesces: AtomicU64,
    /// I/O counters of hosts.
    pub(super) host_counters: HostIoCounters,
    /// Names of the hosts that may connect; `None` for all.
    allowed_hosts: Option<Vec<String>>,
    /// Topic of [`SubsystemChanged`].
    pub(super) topic: DeviceId,
    pub(super) exports: Arc<Exports>,
    core_set: Arc<ProcessCores>,
    /// Limit of associations. A host needs one per path.
    associations_max: usize,
    /// Other servers of this subsystem, if they are known.
    pub(super) peers: Option<Arc<dyn NvmePeers>>,
    state: Mutex<SubsystemState>,
}

pub(super) struct SubsystemState {
    namespaces: BTreeMap<u32, Namespace>,
    /// Number of the last new namespace.
    last_namespace: u32,
    /// Exports that were removed from the list, with the numbers that they had.
    retired: Vec<(Weak<Export>, u32)>,
    associations: BTreeMap<u16, Arc<Association>>,
    /// Number of the last new controller, and those that they may have.
    last_controller: u16,
    controllers: RangeInclusive<u16>,
    /// By port.
    pub(super) ana: Vec<PortAnaStates>,
    /// Number of random values so far.
    randoms: u64,
}

/// An export as a namespace.
#[derive(Clone)]
pub(super) struct Namespace {
    pub(super) export: Arc<Export>,
    pub(super) uuid: [u8; 16],
    /// Number of changes of its size and limits.
    pub(super) changes: u64,
}

/// Message to admin queues: a controller is forgotten.
pub(super) struct ControllerForgotten;

/// Message to queues: namespaces, their sizes or ANA states may have changed.
pub(super) struct SubsystemChanged;

impl Subsystem {
    /// A subsystem with these options and so many ports.
    pub(super) fn new(
        options: NvmeServerOptions,
        ports: usize,
        exports: &Arc<Exports>,
        core_set: &Arc<ProcessCores>,
    ) -> Subsystem {
        let nqn = options.subsystem;
        let subsystem = Subsystem {
            serial: serial_number(&nqn),
            nqn,
            quiesce_time_ms: options.quiesce_time_ms,
            instance_key: options.instance_key,
            secrets: options.secrets,
            late_quiesces: AtomicU64::new(0),
            host_counters: HostIoCounters::default(),
            allowed_hosts: options.allowed_hosts,
            topic: DeviceId::new(),
            exports: Arc::clone(exports),
            core_set: Arc::clone(core_set),
            associations_max: options.limits.controllers_max.clamp(1, options.controllers.len().max(1)),
            peers: options.peers,
            state: Mutex::new(SubsystemState {
                namespaces: BTreeMap::new(),
                last_namespace: 0,
                retired: Vec::new(),
                associations: BTreeMap::new(),
                last_controller: options.last_controller,
                controllers: options.controllers,
                ana: std::iter::repeat_with(PortAnaStates::default).take(ports).collect(),
                randoms: 0,
            }),
        };
        subsystem.refresh(None);
        subsystem
    }

    pub(super) fn state(&self) -> MutexGuard<'_, SubsystemState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Compares the namespaces with the list of exports, and notes that `changed` may have another
    /// size. Then all queues look again.
    pub(super) fn refresh(&self, changed: Option<DeviceId>) {
        {
            let mut state = self.state();
            // Read under the lock: an older list must not replace a newer one.
            let all = self.exports.all().into_iter();
            let exports: Vec<_> = all.filter(|one| one.is_for_all_clients()).collect();
            state.retire_namespaces(&exports);
            for export in exports {
                let known = state.namespaces.values_mut().find(|old| Arc::ptr_eq(&old.export, &export));
                match known {
                    Some(old) if Some(export.device().id()) == changed => old.changes += 1,
                    Some(_) => {}
                    None => state.add_namespace(export, &self.nqn),
                }
            }
        }
        self.notify();
    }

    pub(super) fn notify(&self) {
        for core in 0..self.core_set.len() {
            self.core_set.send_message(CoreId(core as u16), self.topic, Box::new(SubsystemChanged));
        }
    }

    /// The namespace of this number.
    pub(super) fn namespace(&self, nsid: u32) -> Option<Namespace> {
        self.state().namespaces.get(&nsid).cloned()
    }

    /// Numbers of all namespaces, and how often each has changed.
    pub(super) fn namespaces(&self) -> BTreeMap<u32, u64> {
        self.state().namespaces.iter().map(|(nsid, namespace)| (*nsid, namespace.changes)).collect()
    }

    /// Opens a namespace: it counts a user of the export. An export may be for some clients only
    /// by now, although the list of namespaces has not followed yet.
    pub(super) fn open_namespace(&self, nsid: u32) -> Option<ExportRef> {
        let namespace = self.namespace(nsid).filter(|one| one.export.is_for_all_clients())?;
        self.exports.acquire_export(&namespace.export)
    }

    /// Connects an admin queue: creates a controller.
    ///
    /// # Errors
    /// The status for the host.
    pub(super) fn connect_admin(
        &self,
        command: &ConnectCommand,
        data: ConnectData,
        origin: AssociationOrigin,
    ) -> Result<Arc<Association>, ConnectError> {
        let kind = self.subsystem_kind(&data)?;
        if data.controller != u16::MAX {
            let what = "this target creates controllers: expected controller 0xffff";
            return Err(ConnectError::data(ConnectData::CONTROLLER_AT, what));
        }
        debug_assert_eq!(command.queue, 0);
        let mut state = self.state();
        let busy = ConnectError {
            status: NvmeStatus::CONNECT_CONTROLLER_BUSY,
            ..ConnectError::command(0, "there are too many controllers, in all or of this address")
        };
        let network = origin.peer.network();
        let of_peer = state.associations.values().filter(|one| one.origin.peer.network() == network).count();
        let peer_max = (self.associations_max * 3 / 4).max(1);
        if state.associations.len() >= self.associations_max || of_peer >= peer_max {
            return Err(busy);
        }
        let id = state.next_controller();
        let association = Association::new(id, kind, data.host, data.host_id, origin, &self.core_set);
        let association = Arc::new(association);
        state.associations.insert(id, Arc::clone(&association));
        Ok(association)
    }

    /// Connects an I/O queue to its controller.
    ///
    /// # Errors
    /// The status for the host.
    pub(super) fn connect_io(
        &self,
        command: &ConnectCommand,
        data: &ConnectData,
    ) -> Result<Arc<Association>, ConnectError> {
        let kind = self.subsystem_kind(data)?;
        let association = self.association(data.controller);
        let known = association.filter(|one| !one.is_ended() && one.kind == kind);
        let at = ConnectData::CONTROLLER_AT;
        let association = known.ok_or(ConnectError::data(at, "there is no such controller"))?;
        if association.host != data.host || association.host_id != data.host_id {
            let at = ConnectData::HOST_AT;
            return Err(ConnectError::data(at, "the controller belongs to another host"));
        }
        if kind == ControllerKind::Discovery {
            return Err(ConnectError::command(42, "a discovery controller has no I/O queues"));
        }
        if !association.is_enabled() {
            let sequence = NvmeStatus::COMMAND_SEQUENCE_ERROR.permanent();
            let error = ConnectError::command(42, "the controller is not enabled");
            return Err(ConnectError { status: sequence, ..error });
        }
        if !association.connect_queue(command.queue) {
            return Err(ConnectError::command(42, "the queue is connected already, or there are too many"));
        }
        Ok(association)
    }

    /// The kind of the subsystem that a host asks for.
    fn subsystem_kind(&self, data: &ConnectData) -> Result<ControllerKind, ConnectError> {
        let invalid_host = ConnectError {
            status: NvmeStatus::CONNECT_INVALID_HOST.permanent(),
            ..ConnectError::data(ConnectData::HOST_AT, "the host is not allowed")
        };
        let is_allowed =
            |host: &str| self.allowed_hosts.as_ref().is_none_or(|all| all.iter().any(|one| one == host));
        match &data.subsystem[..] {
            DISCOVERY_NQN => Ok(ControllerKind::Discovery),
            name if name != self.nqn => {
                Err(ConnectError::data(ConnectData::SUBSYSTEM_AT, "there is no such subsystem"))
            }
            _ if !is_allowed(&data.host) => Err(invalid_host),
            _ if !self.secrets.is_empty() && !self.secrets.contains_key(&data.host) => Err(invalid_host),
            _ => Ok(ControllerKind::Io),
        }
    }

    /// Forgets a controller, all of whose queues are disconnected: nothing of it is at a device.
    /// Admin queues may wait for this.
    pub(super) fn forget_association(&self, association: &Association) {
        self.state().associations.remove(&association.id);
        association.set_forgotten();
        self.notify_resets();
    }

    /// Makes admin queues look at the resets that they were asked for.
    pub(super) fn notify_resets(&self) {
        for core in 0..self.core_set.len() {
            self.core_set.send_message(CoreId(core as u16), self.topic, Box::new(ControllerForgotten));
        }
    }

    /// The random number of the next instance of a controller. Its upper half says that the
    /// controller is one of this server, so that another server of the same subsystem does not take
    /// it for one that is gone.
    pub(super) fn next_instance_random(&self) -> u64 {
        let random = self.keyed_hash(self.count_random());
        let random = u32::from_le_bytes(*random.first_chunk().expect("64 bytes"));
        u64::from(instance_tag(&self.instance_key)) << 32 | u64::from(random)
    }

    /// True if `instance` is one that this server has made.
    pub(super) fn is_own_instance(&self, instance: &ControllerInstance) -> bool {
        (instance.random >> 32) as u32 == instance_tag(&self.instance_key)
    }

    /// The sequence number, which is not 0, and the bytes of a challenge.
    pub(super) fn next_challenge(&self, len: usize) -> (u32, Vec<u8>) {
        let count = self.count_random();
        let hash = self.keyed_hash(count);
        ((count as u32).max(1), hash[..len].to_vec())
    }

    /// The authentication that a queue of `association` needs; `None` for none.
    pub(super) fn authentication(&self, association: &Association) -> Option<QueueAuthentication> {
        let is_io = association.kind == ControllerKind::Io;
        self.secrets.get(&association.host).filter(|_| is_io).cloned().map(QueueAuthentication::new)
    }

    fn count_random(&self) -> u64 {
        let mut state = self.state();
        state.randoms += 1;
        state.randoms
    }

    /// 64 bytes that only this server can compute.
    fn keyed_hash(&self, value: u64) -> [u8; 64] {
        keyed_hash(&self.instance_key, value)
    }

    pub(super) fn count_late_quiesce(&self) {
        self.late_quiesces.fetch_add(1, Ordering::Relaxed);
    }

    /// Number of queues whose requests needed longer than the quiesce time.
    pub(super) fn late_quiesces(&self) -> u64 {
        self.late_quiesces.load(Ordering::Relaxed)
    }

    /// The association of this number.
    pub(super) fn association(&self, id: u16) -> Option<Arc<Association>> {
        self.state().associations.get(&id).cloned()
    }

    /// All associations, by number.
    pub(super) fn all_associations(&self) -> Vec<Arc<Association>> {
        self.state().associations.values().cloned().collect()
    }

    /// All namespaces, by number.
    pub(super) fn all_namespaces(&self) -> BTreeMap<u32, Namespace> {
        self.state().namespaces.clone()
    }

    /// The subsystems that `host` may use, as found at the address `at`.
    pub(super) fn discovery_entries(&self, host: &str, at: SocketAddr) -> Vec<DiscoveryEntry> {
        let entry = |is_discovery, subsystem: &str| DiscoveryEntry {
            is_discovery,
            port_id: 1,
            address: at,
            subsystem: subsystem.to_owned(),
            admin_queue_max: super::QUEUE_ENTRIES_MAX,
        };
        let mut entries = vec![entry(true, DISCOVERY_NQN)];
        if self.allowed_hosts.as_ref().is_none_or(|all| all.iter().any(|one| one == host)) {
            entries.push(entry(false, &self.nqn));
        }
        entries
    }
}

/// 64 bytes made of `value` that only the owner of `key` can compute.
pub(super) fn keyed_hash(key: &[u8; 32], value: u64) -> [u8; 64] {
    let key = hmac::Key::new(hmac::HMAC_SHA512, key);
    let tag = hmac::sign(&key, &value.to_le_bytes());
    *tag.as_ref().first_chunk().expect("64 bytes")
}

impl SubsystemState {
    /// The names of the namespaces' devices, by number.
    pub(super) fn device_names(&self) -> impl Iterator<Item = (u32, String)> + '_ {
        self.namespaces.iter().map(|(nsid, namespace)| (*nsid, namespace.export.name().to_string()))
    }

    /// Removes the namespaces that are not among `exports`.
    fn retire_namespaces(&mut self, exports: &[Arc<Export>]) {
        self.retired.retain(|(export, _)| export.strong_count() > 0);
        let SubsystemState { namespaces, retired, .. } = self;
        namespaces.retain(|nsid, old| {
            let is_listed = exports.iter().any(|export| Arc::ptr_eq(export, &old.export));
            if !is_listed {
                retired.push((Arc::downgrade(&old.export), *nsid));
            }
            is_listed
        });
    }

    /// Adds a namespace with the next number, or with the one that it had before its removal from
    /// the list. Other numbers are used again only when all were used, so that a host does not take
    /// a new disk for an old one.
    fn add_namespace(&mut self, export: Arc<Export>, subsystem: &str) {
        let is_free = |nsid: &u32| !self.namespaces.contains_key(nsid);
        let old = self.retired.iter().find(|(old, _)| std::ptr::eq(old.as_ptr(), Arc::as_ptr(&export)));
        let mut next = (1..=NAMESPACES_MAX).map(|step| (self.last_namespace + step - 1) % NAMESPACES_MAX + 1);
        let Some(nsid) = old.map(|(_, nsid)| *nsid).filter(is_free).or_else(|| next.find(is_free)) else {
            return tracing::warn!(
                "nvme: {}: a subsystem has at most {NAMESPACES_MAX} namespaces",
                export.name()
            );
        };
        if old.is_none() {
            self.last_namespace = nsid;
        }
        let uuid = namespace_uuid(&export, subsystem);
        self.namespaces.insert(nsid, Namespace { export, uuid, changes: 0 });
    }

    /// The next free number of a controller.
    fn next_controller(&mut self) -> u16 {
        let (first, last) = self.controllers.clone().into_inner();
        loop {
            let next = self.last_controller.wrapping_add(1);
            self.last_controller = if self.controllers.contains(&next) { next } else { first };
            debug_assert!(self.associations.len() <= usize::from(last - first));
            if !self.associations.contains_key(&self.last_controller) {
                return self.last_controller;
            }
        }
    }
}
