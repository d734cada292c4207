//! Clients of the devices: they find a device by name, write, read, and disconnect.

use super::model::{DiskOrSnapshot, ReadMismatch};
use super::world::{ServerLifecycleWorld, ServerPhase};
use crate::cores::TaskPurpose;
use crate::machine::Machine;
use crate::model::Violation;
use crate::stamp;
use crate::turn::MachineWorld;
use udm_core::{Bio, BioFlags, Buf, DeviceId, Nanos, Op, Sector, Sectors, Segments};
use udm_frontends::nbd::ExportRef;

/// Maximum number of requests of a client in flight.
const DEPTH: usize = 4;

/// Longest request in sectors.
const LONGEST: u64 = 12;

/// A client of a device.
pub(super) struct DeviceClient {
    /// Number of the client, which is the device number of its lane.
    pub(super) number: usize,
    pub(super) core: usize,
    pub(super) device: DeviceId,
    /// Reference to the export, held while the client is connected.
    pub(super) _export: ExportRef,
    pub(super) of: DiskOrSnapshot,
    /// Size of the device when the client connected.
    pub(super) sectors: u64,
    /// True if the device has changed, so requests may fail.
    pub(super) excused: bool,
    /// Next sector to read, if the client reads the whole device once.
    pub(super) check: Option<u64>,
    /// Ranges of the requests in flight.
    pub(super) busy: Vec<(u64, u64)>,
}

impl ServerLifecycleWorld {
    /// Connects a client to the device called `name`.
    pub(super) fn come(&mut self, name: &str, checks: bool) -> Result<(), Violation> {
        let Some(server) = &self.server else { return Ok(()) };
        let Some(export) = server.exports.acquire(name) else { return Ok(()) };
        let device = export.device().id();
        let seen = self.view.iter().find(|seen| seen.id == device);
        let Some((of, sectors)) = seen.and_then(|seen| Some((self.served(seen)?, seen.sectors))) else {
            return Ok(());
        };
        // Each disk and each snapshot has at most one client, because several would need fences
        // between their requests.
        if self.clients.iter().any(|client| client.of == of) {
            return Ok(());
        }
        let core = self.work.below(self.machine.cores.len() as u64) as usize;
        self.counts.clients += 1;
        let number = self.counts.clients as usize;
        let opened = self.machine.open(core, number, |cx| export.device().open(cx));
        self.machine.say(format!("client {number} comes to {name}, {of:?}: {:?}", opened.as_ref().err()));
        if opened.is_ok() {
            let check = checks.then_some(0);
            let sectors = sectors.min(self.model.image(of).sectors());
            let busy = Vec::new();
            self.clients.push(DeviceClient {
                number,
                core,
                device,
                _export: export,
                of,
                sectors,
                excused: false,
                check,
                busy,
            });
        }
        Ok(())
    }

    /// Disconnects client `at` if it has nothing in flight. Returns false if it stays.
    pub(super) fn go(&mut self, at: usize) -> bool {
        let DeviceClient { number, core, .. } = self.clients[at];
        if !self.machine.close(core, number) {
            return false;
        }
        self.machine.say(format!("client {number} goes"));
        drop(self.clients.swap_remove(at));
        true
    }

    /// Draws the next request of client `at`.
    fn request(&mut self, at: usize) -> Result<Option<Box<Bio>>, Violation> {
        let client = &mut self.clients[at];
        let mut bio = Bio::new();
        if let Some(next) = client.check {
            if next >= client.sectors || self.phase == ServerPhase::Dying {
                return Ok(None);
            }
            let len = LONGEST.min(client.sectors - next);
            client.check = Some(next + len);
            (bio.op, bio.sector, bio.sectors) = (Op::Read, Sector(next), Sectors(len));
        } else if self.work.one_in(16) {
            bio.op = Op::Flush;
            return Ok(Some(bio));
        } else {
            let len = 1 + self.work.below(LONGEST.min(client.sectors));
            let sector = self.work.below(client.sectors - len + 1);
            let op = if self.work.one_in(2) { Op::Write } else { Op::Read };
            (bio.op, bio.sector, bio.sectors) = (op, Sector(sector), Sectors(len));
        }
        let (from, len) = (bio.sector.0, bio.sectors.0);
        if client.busy.iter().any(|(other, others)| from < other + others && *other < from + len) {
            if let Some(next) = &mut client.check {
                *next = from;
            }
            return Ok(None);
        }
        client.busy.push((from, len));
        bio.data = Segments::from(Buf::zeroed(Sectors(len).bytes() as usize));
        if bio.op == Op::Write {
            if self.work.one_in(4) {
                bio.flags |= BioFlags::FUA;
            }
            let of = client.of;
            self.model.write_begins(of)?;
            let first = self.model.stamps(len);
            stamp::fill_sectors_with_stamps(&mut bio.data, 0..len, |i| first + i);
            self.model.image(of).begin(from, len, first);
            let number = self.clients[at].number;
            self.machine.say(format!("client {number} writes {from}+{len} with {first:#x}"));
        }
        Ok(Some(bio))
    }

    /// Checks a completed request of client `at`.
    fn came_back(&mut self, at: usize, bio: &Bio) -> Result<(), Violation> {
        let client = &mut self.clients[at];
        self.counts.requests += 1;
        let (number, of, excused) = (client.number, client.of, client.excused);
        let (from, len, ok) = (bio.sector.0, bio.sectors.0, bio.status.is_ok());
        if bio.op != Op::Flush {
            client.busy.retain(|range| *range != (from, len));
        }
        if self.phase == ServerPhase::Dying {
            return Ok(());
        }
        if !ok && !excused {
            let status = bio.status;
            return Err(format!(
                "a {:?} of {from}+{len} of client {number}, of {of:?}, ends with {status:?}",
                bio.op
            ));
        }
        match bio.op {
            Op::Write => self.model.image(of).end(from, len, ok),
            Op::Read if ok => {
                let mut wrong = None;
                let (image, counts) = (self.model.image(of), &mut self.counts);
                stamp::for_each_sector_stamp(&bio.data, |i, stamp| {
                    counts.sectors += 1;
                    let read = image.read(from + i, stamp.unwrap_or(u64::MAX));
                    if let Err(ReadMismatch { sector, found, can }) = read {
                        wrong.get_or_insert(format!(
                            "client {number} reads {found:#x} in sector {sector} of {of:?}, which is one of {can:x?}"
                        ));
                    }
                });
                wrong.map_or(Ok(()), Err)?;
            }
            _ => {}
        }
        Ok(())
    }
}

impl MachineWorld for ServerLifecycleWorld {
    fn machine(&mut self) -> &mut Machine {
        &mut self.machine
    }

    /// Requests of loads and merges go to the disks like all others.
    fn is_internal_io(_: TaskPurpose) -> bool {
        false
    }

    fn waiting(&self) -> String {
        self.waits()
    }

    fn gather(&mut self, c: usize, i: usize, now: Nanos) {
        let open = &self.machine.cores[c].open[i];
        let (number, owner, in_flight) = (open.device, open.owner, open.in_flight);
        let Some(at) = self.clients.iter().position(|client| client.number == number) else { return };
        let asks = self.phase == ServerPhase::Serving && (!self.resting || self.clients[at].check.is_some());
        if !asks {
            return;
        }
        for _ in 0..self.work.below((DEPTH - in_flight.min(DEPTH)) as u64 + 1) {
            match self.request(at) {
                Ok(Some(mut bio)) => {
                    bio.start();
                    (bio.started, bio.owner) = (now, owner);
                    self.machine.batch.push(bio);
                }
                Ok(None) => {}
                Err(wrong) => {
                    self.wrong.get_or_insert(wrong);
                }
            }
        }
        self.machine.cores[c].open[i].in_flight += self.machine.batch.len();
    }

    fn take_back(&mut self, c: usize, i: usize, _: Nanos) -> Result<(), Violation> {
        while let Some(mut bio) = self.machine.done.pop() {
            bio.finish();
            let open = &mut self.machine.cores[c].open[i];
            let number = open.device;
            if open.in_flight == 0 {
                return Err(format!("client {number} got more completions than it sent requests"));
            }
            open.in_flight -= 1;
            if let Some(at) = self.clients.iter().position(|client| client.number == number)
                && let Err(wrong) = self.came_back(at, &bio)
            {
                // The other bios of the batch must be taken all the same.
                self.wrong.get_or_insert(wrong);
            }
        }
        Ok(())
    }
}
