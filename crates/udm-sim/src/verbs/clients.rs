//! Clients of the devices: they find a device by name as NBD clients do, read, and disconnect.

use super::model::LastRegistryActor;
use super::world::RegistryWorld;
use crate::cores::TaskPurpose;
use crate::machine::Machine;
use crate::model::Violation;
use crate::turn::MachineWorld;
use udm_core::{Bio, BioFlags, Buf, DeviceId, Nanos, Op, Sector, Sectors, Segments};
use udm_frontends::nbd::ExportRef;

/// Maximum number of requests of a client in flight.
const DEPTH: usize = 4;

/// A client of a device.
pub(super) struct DeviceReadClient {
    /// Number of the client, which is the device number of its lane.
    pub(super) number: usize,
    pub(super) core: usize,
    pub(super) device: DeviceId,
    pub(super) export: ExportRef,
}

impl RegistryWorld {
    /// Connects a client.
    pub(super) fn come(&mut self) -> Result<(), Violation> {
        let name = self.work.pick(&super::generator::NAMES);
        let found = self.exports.acquire(name);
        let seen = self.model.view.meant(name);
        let (is, must) = (found.as_ref().map(|export| export.device().id()), seen.map(|seen| seen.id));
        if is != must {
            return Err(format!("a client finds {is:?} as {name}, expected {must:?}"));
        }
        let (Some(export), Some(device)) = (found, is) else { return Ok(()) };
        let core = self.work.below(self.machine.cores.len() as u64) as usize;
        self.counts.clients += 1;
        let number = self.counts.clients as usize;
        let opened = self.machine.open(core, number, |cx| export.device().open(cx));
        self.machine.say(format!("client {number} comes to {name}: {:?}", opened.as_ref().err()));
        match opened {
            Ok(()) => self.clients.push(DeviceReadClient { number, core, device, export }),
            Err(_) => drop(export),
        }
        self.look(LastRegistryActor::Other)
    }

    /// Disconnects client `at`, if it has nothing in flight.
    pub(super) fn go(&mut self, at: usize) -> Result<(), Violation> {
        let DeviceReadClient { number, core, .. } = self.clients[at];
        if !self.machine.close(core, number) {
            return Ok(());
        }
        self.machine.say(format!("client {number} goes"));
        drop(self.clients.swap_remove(at));
        self.look(LastRegistryActor::Other)
    }
}

impl MachineWorld for RegistryWorld {
    fn machine(&mut self) -> &mut Machine {
        &mut self.machine
    }

    fn is_internal_io(purpose: TaskPurpose) -> bool {
        purpose == TaskPurpose::PathCheck
    }

    fn waiting(&self) -> String {
        self.waits()
    }

    fn gather(&mut self, c: usize, i: usize, now: Nanos) {
        let open = &mut self.machine.cores[c].open[i];
        let Some(client) = self.clients.iter().find(|client| client.number == open.device) else { return };
        let size = client.export.device().limits().size.0;
        for _ in 0..self.work.below((DEPTH - open.in_flight.min(DEPTH)) as u64 + 1) {
            let mut bio = Bio::new();
            if self.work.one_in(8) {
                bio.op = Op::Flush;
            } else {
                (bio.op, bio.sector, bio.sectors) = (Op::Read, Sector(self.work.below(size)), Sectors(1));
                bio.data = Segments::from(Buf::zeroed(512));
            }
            bio.start();
            (bio.started, bio.owner) = (now, open.owner);
            self.machine.batch.push(bio);
        }
        open.in_flight += self.machine.batch.len();
    }

    fn take_back(&mut self, c: usize, i: usize, _: Nanos) -> Result<(), Violation> {
        let open = &mut self.machine.cores[c].open[i];
        let client = self.clients.iter().find(|client| client.number == open.device);
        let seen = client.and_then(|client| self.model.view.get(client.device));
        while let Some(mut bio) = self.machine.done.pop() {
            bio.finish();
            if open.in_flight == 0 {
                return Err(format!("client {} was given back more than it asked for", open.device));
            }
            open.in_flight -= 1;
            self.counts.requests += 1;
            let patient = !bio.flags.intersects(BioFlags::RAHEAD | BioFlags::NOWAIT);
            let file = self.model.config.under.as_ref();
            let rests = |id| {
                !self.jobs.iter().any(|job| job.is_about(id)) && !file.is_some_and(|file| file.rests(id))
            };
            if let Some(seen) = seen.filter(|seen| seen.suspended && patient && rests(seen.id)) {
                return Err(format!("a request came back while {} is suspended", seen.name));
            }
        }
        Ok(())
    }
}
