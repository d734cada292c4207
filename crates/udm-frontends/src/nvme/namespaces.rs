//! The namespaces that a queue has opened.

use super::host_counters::NamespaceIoCounters;
use super::queue::NvmeQueue;
use crate::nbd::ExportRef;
use crate::nbd::export_geometry::max_export_request_bytes;
use udm_core::{Limits, SECTOR_SIZE};
use udm_runtime::{BioTaskLaneId, FrontCx};
use udm_wire::nvme::{AnaState, NvmeStatus};

/// A namespace that is open on this core.
pub(super) struct OpenNamespace {
    export: ExportRef,
    pub(super) lane: BioTaskLaneId,
    pub(super) geometry: NamespaceGeometry,
    pub(super) io_counters: NamespaceIoCounters,
    /// Commands of this queue that are at the device.
    pub(super) in_flight: usize,
    /// Requests of the export fail.
    pub(super) is_failing: bool,
    /// The namespace is not on the list any more.
    is_gone: bool,
    /// State on the port of the association.
    pub(super) ana_state: AnaState,
}

/// Size and limits of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NamespaceGeometry {
    /// Block size in bytes, as a power of two.
    pub(super) block_log2: u8,
    /// Size in blocks.
    pub(super) blocks: u64,
    pub(super) is_read_only: bool,
    /// The longest read or write of the device in bytes; whole blocks.
    pub(super) data_max: u32,
    /// The longest discard of the device in bytes; whole blocks.
    pub(super) discard_max: u32,
    /// The longest write-zeroes of the device in bytes; whole blocks.
    pub(super) zeroes_max: u32,
    /// The device discards blocks.
    pub(super) can_discard: bool,
}

impl NamespaceGeometry {
    pub(super) fn new(limits: &Limits, read_only: bool) -> NamespaceGeometry {
        let block = limits.logical_block;
        NamespaceGeometry {
            block_log2: block.ilog2() as u8,
            blocks: limits.size.0 / (u64::from(block) / SECTOR_SIZE),
            is_read_only: read_only || limits.read_only,
            data_max: max_export_request_bytes(limits.max_sectors, block),
            discard_max: max_export_request_bytes(limits.max_discard, block),
            zeroes_max: max_export_request_bytes(limits.max_write_zeroes, block),
            can_discard: limits.max_discard.0 > 0,
        }
    }
}

fn geometry_of(export: &ExportRef) -> NamespaceGeometry {
    NamespaceGeometry::new(&export.device().limits(), export.is_read_only())
}

impl NvmeQueue {
    /// Opens a namespace, unless it is open.
    ///
    /// # Errors
    /// There is no such namespace, or its device cannot be opened.
    pub(super) fn open_namespace(&mut self, nsid: u32, cx: &mut FrontCx<'_, '_>) -> Result<(), NvmeStatus> {
        match self.namespaces.get(&nsid) {
            Some(open) if open.is_gone => return Err(NvmeStatus::INVALID_NAMESPACE.permanent()),
            Some(_) => return Ok(()),
            None => {}
        }
        let export = self.server.subsystem.open_namespace(nsid);
        let export = export.ok_or(NvmeStatus::INVALID_NAMESPACE.permanent())?;
        let lane = cx.open(export.device()).map_err(|error| {
            tracing::warn!("nvme: {}: its device cannot be opened: {error}", export.name());
            NvmeStatus::INTERNAL_PATH_ERROR
        })?;
        cx.subscribe(export.device().id());
        let host = self.server.subsystem.host_counters.of(&self.link.association.host);
        let open = OpenNamespace {
            lane,
            geometry: geometry_of(&export),
            io_counters: NamespaceIoCounters::new(export.io_counters_on(cx.core()), host, cx.core()),
            in_flight: 0,
            is_failing: export.is_failing(),
            is_gone: false,
            ana_state: self.server.subsystem.ana_state(self.link.association.origin.port, &export.name()),
            export,
        };
        self.namespaces.insert(nsid, open);
        Ok(())
    }

    /// Looks at namespaces, sizes and states that may have changed.
    pub(super) fn look_at_subsystem(&mut self, cx: &mut FrontCx<'_, '_>) {
        let port = self.link.association.origin.port;
        for (nsid, open) in &mut self.namespaces {
            let namespace = self.server.subsystem.namespace(*nsid);
            let is_same = namespace.is_some_and(|one| std::ptr::eq(&*one.export, &*open.export));
            open.is_gone = !is_same;
            open.ana_state = self.server.subsystem.ana_state(port, &open.export.name());
            open.refresh();
        }
        self.close_gone_namespaces(cx);
        self.look_for_events();
    }

    /// Closes namespaces that are not on the list any more and have no commands.
    pub(super) fn close_gone_namespaces(&mut self, cx: &mut FrontCx<'_, '_>) {
        let is_closed = |open: &OpenNamespace| open.is_gone && open.in_flight == 0;
        while let Some((nsid, _)) = self.namespaces.iter().find(|(_, open)| is_closed(open)) {
            let nsid = *nsid;
            self.namespaces.remove(&nsid).into_iter().for_each(|open| open.close(cx));
        }
    }

    pub(super) fn close_namespaces(&mut self, cx: &mut FrontCx<'_, '_>) {
        std::mem::take(&mut self.namespaces).into_values().for_each(|open| open.close(cx));
    }

    /// Looks whether the requests of exports must fail; those in flight fail at once.
    pub(super) fn look_at_failing_exports(&mut self, cx: &mut FrontCx<'_, '_>) {
        for open in self.namespaces.values_mut() {
            open.is_failing = open.export.is_failing();
        }
        self.fail_commands(cx);
    }
}

impl OpenNamespace {
    /// Looks at the size and limits of the device.
    pub(super) fn refresh(&mut self) {
        self.geometry = geometry_of(&self.export);
    }

    fn close(self, cx: &mut FrontCx<'_, '_>) {
        debug_assert_eq!(self.in_flight, 0);
        cx.unsubscribe(self.export.device().id());
        cx.close(self.lane);
    }
}
