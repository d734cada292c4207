//! Turns of front ends: they set connections up, change them, and end them.

use super::machine::{InflightMemory, Machine, RingGuest};
use super::memory::{ExtraRegionState, MachineMemory};
use super::messages::{self, FrontEndConnection, FrontEndReply, FrontEndStep, number};
use super::ring::create_eventfd;
use super::world::VhostUserWorld;
use crate::environment::lock_environment;
use crate::model::Violation;
use crate::plan::DisturbanceClass;
use crate::rng::SimRng;
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use udm_buf::SharedMemoryMap;
use udm_core::Nanos;
use udm_frontends::vhost_user::SteppedVhostUserSession;
use udm_wire::virtio::VirtioFeatures;

/// Mean pause between two turns of a front end that is set up, in ns.
const PAUSE: u64 = 3_000_000;

/// Offset of the write cache in a reply to GET_CONFIG of that byte.
const CONFIG_BYTE: usize = 12;

/// Reserved bit of a descriptor message: there is no descriptor.
const NO_FD: u64 = 1 << 8;

impl VhostUserWorld {
    /// A turn of the front end of machine `m`.
    pub(super) fn front_end_turn(&mut self, m: usize) -> Result<(), Violation> {
        let now = self.set_turn(None);
        let machine = &mut self.machines[m];
        let Some(connection) = &mut machine.connection else {
            machine.next = now + Nanos(1 + self.work.span(20_000));
            return self.connect(m);
        };
        let is_set_up = !connection.awaits() && connection.script.is_empty();
        machine.next = now + Nanos(1 + self.work.span(if is_set_up { PAUSE } else { 20_000 }));
        if connection.awaits() {
            return match connection.receive()? {
                Some(reply) => self.take_reply(m, reply),
                // The session has ended; the world notices.
                None => Ok(()),
            };
        }
        match connection.script.pop_front() {
            Some(step) => self.send(m, step),
            None if self.is_resting => Ok(()),
            None => self.disturb_machine(m),
        }
    }

    fn connect(&mut self, m: usize) -> Result<(), Violation> {
        let failed = |e: std::io::Error| e.to_string();
        let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
        let (ours, theirs) = pair.map_err(|e| e.to_string())?;
        let (cores, exports) = (&self.core_set, &self.exports);
        let run = super::run::run_world_during_wait;
        let session = SteppedVhostUserSession::new(theirs, cores, exports, &format!("d{m}"), run);
        let Some(session) = session.map_err(failed)? else { return Ok(()) };
        self.say(format!("machine {m} connects"));
        self.counts.connections += 1;
        let machine = &mut self.machines[m];
        machine.session = Some(Box::new(session));
        if std::mem::take(&mut machine.is_rebooting) {
            self.reset_guests(m, false);
        }
        let machine = &mut self.machines[m];
        let is_packed = machine.features.contains(VirtioFeatures::RING_PACKED);
        self.counts.kinds[usize::from(is_packed)] += 1;
        let mut connection = FrontEndConnection::new(ours);
        connection.script.extend(machine.set_up(&mut self.work));
        machine.connection = Some(connection);
        Ok(())
    }

    /// The guests begin with empty rings. None of their requests is in flight any more.
    pub(super) fn reset_guests(&mut self, m: usize, keeps_record: bool) {
        self.say(format!("machine {m} begins again"));
        self.counts.resets += 1;
        let machine = &mut self.machines[m];
        for guest in &mut machine.guests {
            match guest {
                RingGuest::Orderly(guest) => {
                    for request in guest.reset(&machine.memory) {
                        self.model.abandon(&request, self.step);
                    }
                }
                RingGuest::Hostile(guest) => guest.reset(&machine.memory),
            }
        }
        let record = machine.inflight.take().filter(|_| keeps_record);
        let was_packed = machine.features.contains(VirtioFeatures::RING_PACKED);
        machine.is_rebooting = false;
        machine.wants_through = false;
        let offered = self.offered[m];
        machine.draw_features(offered, &mut self.work);
        // The record of a packed ring is longer.
        let is_packed = machine.features.contains(VirtioFeatures::RING_PACKED);
        machine.inflight = record.filter(|_| was_packed || !is_packed);
    }

    fn send(&mut self, m: usize, step: FrontEndStep) -> Result<(), Violation> {
        let (number, payload, fds, is_wild) = match step {
            FrontEndStep::Send { number, payload, fds, is_wild } => (number, payload, fds, is_wild),
            FrontEndStep::SendInflight => {
                let Some(inflight) = &self.machines[m].inflight else { return Ok(()) };
                let fds = vec![inflight.file.clone()];
                (number::SET_INFLIGHT_FD, inflight.area.encode(), fds, false)
            }
            FrontEndStep::SendBase(index) => {
                let base = self.machines[m].bases[index];
                (number::SET_VRING_BASE, messages::ring_state(index, base), vec![], false)
            }
            FrontEndStep::ClearRing(index) => {
                let machine = &mut self.machines[m];
                if let RingGuest::Hostile(guest) = &mut machine.guests[index] {
                    guest.reset(&machine.memory);
                    machine.bases[index] = guest.ring.first_base();
                }
                return Ok(());
            }
            FrontEndStep::ResetGuests => {
                // The back end has reset the device, so it has cleared the record too.
                let keeps_record = self.work.one_in(2);
                self.reset_guests(m, keeps_record);
                let script = self.machines[m].start_device(false, &mut self.work);
                if let Some(connection) = &mut self.machines[m].connection {
                    connection.script.extend(script);
                }
                return Ok(());
            }
            FrontEndStep::OpenExtra(is_open) => {
                self.machines[m].open_extra(is_open);
                return Ok(());
            }
            FrontEndStep::CheckExtra => return self.machines[m].check_removed_region(),
            FrontEndStep::Close { in_order } => {
                let bases = self.machines[m].bases.clone();
                self.leave(m);
                if in_order {
                    self.machines[m].bases = bases;
                    self.machines[m].inflight.take_if(|_| self.work.one_in(2));
                }
                return Ok(());
            }
        };
        let cuts = !self.is_resting && !self.plan.without.has(DisturbanceClass::Cuts);
        let is_cut = cuts && self.work.one_in(400) && self.machines[m].has_record;
        let machine = &mut self.machines[m];
        let Some(connection) = &mut machine.connection else { return Ok(()) };
        let is_switch = number == number::SET_CONFIG && payload.last() == Some(&1);
        if is_switch || (number == number::SET_CONFIG && machine.through_since != Some(0)) {
            machine.through_since = None;
        }
        let is_start = [number::SET_VRING_KICK, number::SET_VRING_ENABLE].contains(&number);
        if machine.is_hostile && is_start {
            machine.lines_allowed += 1;
        }
        machine.may_fail |= is_wild;
        if is_cut {
            let part = self.work.between(1, 11 + payload.len() as u64) as usize;
            connection.send(number, payload, &fds, is_wild, part)?;
            self.counts.cut += 1;
            self.leave(m);
            return Ok(());
        }
        connection.send(number, payload, &fds, is_wild, usize::MAX)?;
        machine.unread += 1;
        self.say(format!("machine {m} sends {number}"));
        if number == number::SET_PROTOCOL_FEATURES {
            let machine = &mut self.machines[m];
            if let Some(connection) = &mut machine.connection {
                connection.acks = machine.negotiates_acks;
            }
        }
        Ok(())
    }

    /// The front end closes its connection.
    pub(super) fn leave(&mut self, m: usize) {
        self.say(format!("machine {m} leaves"));
        self.counts.lost += 1;
        let machine = &mut self.machines[m];
        machine.connection = None;
        (machine.has_left, machine.may_fail) = (true, true);
        // As a front end does it that has not asked for them. With a record they mean nothing.
        machine.bases = machine.used_bases();
    }

    fn take_reply(&mut self, m: usize, reply: FrontEndReply) -> Result<(), Violation> {
        let machine = &mut self.machines[m];
        match reply.number {
            number::GET_FEATURES => {
                let offered = VirtioFeatures::from_bits_retain(reply.value());
                if !offered.contains(machine.features) {
                    return Err(format!(
                        "machine {m} is offered {offered:?}, and uses {:?}",
                        machine.features
                    ));
                }
            }
            number::GET_VRING_BASE => return self.take_base(m, &reply),
            number::GET_CONFIG => {
                let is_through = reply.payload.get(CONFIG_BYTE) == Some(&0);
                if is_through != machine.wants_through {
                    return Err(format!("machine {m}: the write cache is not as it was set"));
                }
                if is_through && machine.through_since != Some(0) {
                    machine.through_since = Some(2 * self.step);
                }
            }
            number::GET_INFLIGHT_FD => {
                let (Some(area), Some(file)) = (messages::decode_area(&reply), reply.fd) else {
                    return Err("there is no memory for requests in flight in the reply".into());
                };
                let map = SharedMemoryMap::of_guest_memory(&file, area.offset, area.size as usize);
                let map = map.map_err(|e| e.to_string())?;
                machine.inflight = Some(InflightMemory { file: Arc::new(file), area, map });
            }
            number::GET_PROTOCOL_FEATURES | number::GET_STATUS => {}
            _ if reply.value() == 0 || reply.is_wild => {}
            refused => return Err(format!("message {refused} of machine {m} was refused")),
        }
        Ok(())
    }

    /// Takes the index at which a stopped ring continues. All its requests are complete.
    fn take_base(&mut self, m: usize, reply: &FrontEndReply) -> Result<(), Violation> {
        let machine = &mut self.machines[m];
        let [index, base] = reply.pair();
        let asked = reply.asked.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes));
        let Some(guest) = machine.guests.get(index as usize).filter(|_| asked == Some(index)) else {
            return Err(format!("ring {asked:?} was stopped, and the reply names {index}"));
        };
        let used = guest.ring().used_base(&machine.memory);
        if matches!(guest, RingGuest::Orderly(_)) && base != used {
            return Err(format!("ring {index} of machine {m} stops at {base:#x}, and {used:#x} are used"));
        }
        machine.bases[index as usize] = base;
        Ok(())
    }

    /// A change of the connection of machine `m`, which is set up.
    fn disturb_machine(&mut self, m: usize) -> Result<(), Violation> {
        let without = self.plan.without;
        let on = |class| !without.has(class);
        let machine = &self.machines[m];
        let ring = self.work.below(machine.guests.len() as u64) as usize;
        let has_cache = machine.features.contains(VirtioFeatures::BLK_FLUSH);
        let steps: Vec<FrontEndStep> = match self.work.below(20) {
            0..3 if on(DisturbanceClass::Reopen) => self.restart_ring(m, ring),
            3 if on(DisturbanceClass::Reopen) => {
                // The ring of a hostile guest may have been given bad addresses.
                let is_wild = machine.is_hostile && ring == 0;
                let enable = |on| {
                    let (number, payload) = (number::SET_VRING_ENABLE, messages::ring_state(ring, on));
                    FrontEndStep::Send { number, payload, fds: vec![], is_wild }
                };
                vec![enable(0), enable(1)]
            }
            4..6 => self.change_memory(m)?,
            6 | 7 => {
                let call = create_eventfd().map_err(|e| e.to_string())?;
                self.machines[m].guests[ring].ring_mut().call = call.clone();
                vec![messages::with_fd(number::SET_VRING_CALL, (ring as u64).to_ne_bytes().to_vec(), &call)]
            }
            8 | 9 if has_cache && on(DisturbanceClass::Flush) => {
                let through = !machine.wants_through;
                self.machines[m].wants_through = through;
                let switch = messages::write_cache(number::SET_CONFIG, !through);
                vec![switch, messages::write_cache(number::GET_CONFIG, false)]
            }
            10 | 11 if on(DisturbanceClass::Lost) => {
                self.machines[m].is_rebooting = !machine.has_record;
                vec![FrontEndStep::Close { in_order: false }]
            }
            12 if on(DisturbanceClass::Reopen) => self.leave_in_order(m),
            13 if on(DisturbanceClass::Reopen) => {
                let (number, payload) = match self.work.one_in(2) {
                    true => (number::RESET_DEVICE, vec![]),
                    false => (number::SET_STATUS, 0u64.to_ne_bytes().to_vec()),
                };
                // The second reply comes when the reset is complete.
                let reset = [messages::plain(number, payload), messages::plain(number::GET_STATUS, vec![])];
                self.machines[m].is_rebooting = true;
                reset.into_iter().chain([FrontEndStep::ResetGuests]).collect()
            }
            14..20 if machine.is_hostile && on(DisturbanceClass::Nonsense) => {
                self.counts.nonsense += 1;
                let steps = draw_nonsense(machine, &mut self.work)?;
                let restart = if self.work.one_in(2) { self.restart_ring(m, 0) } else { vec![] };
                steps.into_iter().chain(restart).collect()
            }
            _ => vec![],
        };
        if let Some(connection) = &mut self.machines[m].connection {
            connection.script.extend(steps);
        }
        Ok(())
    }

    /// Stops a ring and starts it again.
    pub(super) fn restart_ring(&mut self, m: usize, index: usize) -> Vec<FrontEndStep> {
        self.counts.restarts += 1;
        let stop = messages::plain(number::GET_VRING_BASE, messages::ring_state(index, 0));
        let start = self.machines[m].start_ring(index, &mut self.work);
        [stop, FrontEndStep::ClearRing(index)].into_iter().chain(start).collect()
    }

    /// Stops all rings and disconnects. The next connection may have a new record.
    fn leave_in_order(&mut self, m: usize) -> Vec<FrontEndStep> {
        let stop = |index| messages::plain(number::GET_VRING_BASE, messages::ring_state(index, 0));
        let rings = self.machines[m].guests.len();
        (0..rings).map(stop).chain([FrontEndStep::Close { in_order: true }]).collect()
    }

    /// Adds a region, or removes it.
    fn change_memory(&mut self, m: usize) -> Result<Vec<FrontEndStep>, Violation> {
        let machine = &mut self.machines[m];
        let payload = [vec![0; 8], messages::encode_memory_region(&MachineMemory::extra_region())].concat();
        // Its reply comes when the change is complete, also without acknowledgements.
        let sync = messages::plain(number::GET_STATUS, vec![]);
        match machine.memory.extra_state() {
            None | Some(ExtraRegionState::Removed) if machine.uses_extra() => Ok(vec![]),
            None | Some(ExtraRegionState::Removed) => {
                let file = machine.memory.create_extra().map_err(|e| e.to_string())?;
                let add = messages::with_fd(number::ADD_MEM_REG, payload, &file);
                Ok(vec![add, sync, FrontEndStep::OpenExtra(true)])
            }
            Some(_) => {
                self.counts.memory_changes += 1;
                let remove = messages::plain(number::REM_MEM_REG, payload);
                Ok(vec![FrontEndStep::OpenExtra(false), remove, sync, FrontEndStep::CheckExtra])
            }
        }
    }

    /// Faults of disks so far.
    pub(super) fn faults(&self) -> u64 {
        lock_environment(&self.env).faults
    }
}

/// Messages that no front end sends. They do not name the ring of the orderly guest.
fn draw_nonsense(machine: &Machine, chance: &mut SimRng) -> Result<Vec<FrontEndStep>, Violation> {
    let block = machine.guests[0].ring().block;
    let user = machine.memory.user_address(block);
    let eventfd = |count, flags| -> Result<Arc<OwnedFd>, Violation> {
        let fd = eventfd(0, flags).map_err(|e| e.to_string())?;
        rustix::io::write(&fd, &u64::to_ne_bytes(count)).map_err(|e| e.to_string())?;
        Ok(Arc::new(fd))
    };
    let any = |n: u64, chance: &mut SimRng| (0..n).map(|_| chance.any() as u8).collect::<Vec<u8>>();
    let ring = 0u64.to_ne_bytes().to_vec();
    Ok(match chance.below(12) {
        0 => {
            let len = chance.below(40);
            vec![messages::wild(50 + chance.below(50) as u32, any(len, chance), vec![])]
        }
        1 => vec![messages::wild(number::SET_VRING_NUM, any(7, chance), vec![])],
        2 => {
            let size = chance.pick(&[0, 3, 2048, u32::MAX, 1, 2]);
            vec![messages::wild(number::SET_VRING_NUM, messages::ring_state(0, size), vec![])]
        }
        3 => {
            vec![messages::wild(number::SET_VRING_BASE, messages::ring_state(0, chance.any() as u32), vec![])]
        }
        4 | 5 => {
            // A ring in no memory, one that is not aligned, and one that exceeds the memory.
            let at = chance.pick(&[1 << 30, user + 1, user + 4, u64::MAX - 100, user + (96 << 10) - 64]);
            let stop = messages::plain(number::GET_VRING_BASE, messages::ring_state(0, 0));
            let payload = messages::ring_addresses(0, [at; 3]);
            let kick = machine.guests[0].ring().kick.clone();
            vec![
                stop,
                messages::wild(number::SET_VRING_ADDR, payload, vec![]),
                messages::wild(number::SET_VRING_KICK, ring, vec![kick]),
            ]
        }
        6 => vec![messages::wild(number::ADD_MEM_REG, any(40, chance), vec![])],
        7 => vec![messages::wild(number::SET_MEM_TABLE, any(72, chance), vec![])],
        8 => vec![messages::wild(number::SET_VRING_KICK, NO_FD.to_ne_bytes().to_vec(), vec![])],
        9 => {
            // A notification that blocks.
            let full = eventfd(u64::MAX - 1, EventfdFlags::CLOEXEC)?;
            vec![messages::wild(number::SET_VRING_CALL, ring, vec![full])]
        }
        10 => {
            let (kick, other) = rustix::pipe::pipe().map_err(|e| e.to_string())?;
            rustix::io::write(&other, &[1, 2, 3]).map_err(|e| e.to_string())?;
            vec![messages::wild(number::SET_VRING_KICK, ring, vec![Arc::new(kick)])]
        }
        _ => vec![messages::wild(
            number::SET_VRING_ENABLE,
            messages::ring_state(64 + chance.below(1000) as usize, 1),
            vec![],
        )],
    })
}
