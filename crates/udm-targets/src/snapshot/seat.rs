//! A table's place in a snapshot's life.
//!
//! *Loaded*, with what the store holds read; *active* from its first resume on; *spent* when
//! another table has taken the snapshot over, or it went before it could be.
//!
//! A store has one owner: the table whose snapshot is active, and nobody else writes it or goes by
//! what is in it. A second table with the same origin and store is a *destination*: it takes the
//! snapshot over from the first, its *source*, when it is resumed, with all that is in memory. The
//! source must stand still then; it is what the same device had before, or another device that is
//! suspended. If two tables were loaded for one handover, the first is the source of the second.
//!
//! A table that was loaded while nobody had the store has read it. If another has had the store in
//! use since, that is not what is there, and the table is refused ([`Reading`]); so is one of two
//! that become live in one change.

use super::args::{self, Features, Line};
use super::family::{Family, Reading};
use super::load;
use super::state::Snapshot;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use udm_core::bugs::{self, Bug};
use udm_core::errno::{EBUSY, EINVAL};
use udm_core::{Alone, ClaimKey, Content, DevNo, Device, DeviceId, Extents, Sector, Sectors};
use udm_dm::target::{DeviceRef, Notify, TargetArgs, Used};
use udm_dm::{MappedDevice, SnapshotReport, SnapshotState, TargetError};

/// How far a table with a snapshot has come.
#[derive(Clone)]
pub(super) enum Role {
    /// It has not been resumed.
    Loaded,
    /// The same, and it will take its snapshot over from whoever has that.
    Destination,
    /// It is in use.
    Active,
    /// Its snapshot was taken over, or went before it could be.
    Spent,
}

/// What a snapshot's table is there for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// To keep an instant.
    Keep,
    /// To bring what it holds back into the origin.
    Merge,
}

/// See the module's documentation.
pub(super) struct Seat {
    pub line: Line,
    pub len: Sectors,
    pub family: Arc<Family>,
    pub snapshot: Arc<Snapshot>,
    purpose: Purpose,
    /// What was read of the store; `None` for a destination.
    reading: Option<Arc<Reading>>,
    /// It was asked last whether it can become live.
    is_asked: AtomicBool,
    role: Mutex<Role>,
    /// What lanes see of a role that is spent.
    pub spent: Arc<AtomicBool>,
    notify: Mutex<Option<Arc<dyn Notify>>>,
}

impl Seat {
    /// For the table line in `args`.
    ///
    /// # Errors
    /// The kernel's, in its order; where the kernel hides the reason behind a general text, it
    /// follows.
    pub(super) fn take(purpose: Purpose, args: &mut TargetArgs<'_>) -> Result<Arc<Seat>, TargetError> {
        let line = args::parse(args)?;
        if purpose == Purpose::Merge && !line.persistent {
            return Err(TargetError::new("Snapshot exception store does not support snapshot-merge.").at(2));
        }
        let family = Family::of(&line.origin);
        args::check_apart(&line, args.len, &family.nodes(None))?;
        let reading = family.read(&line.store);
        let others = family.on_store(&line.store);
        let source = others.iter().find(|other| matches!(*other.role(), Role::Active));
        // One that waits in the device of its source is replaced, as any table that waits.
        let waits = |other: &&Arc<Seat>| matches!(*other.role(), Role::Destination);
        let id = |seat: &Arc<Seat>| seat.device().map(|device| device.id());
        // One that is in no device yet may be for the same: who comes first is found out then.
        let elsewhere = |other: &Arc<Seat>| id(other).is_some() && source.map(id) != Some(id(other));
        let third = others.iter().filter(waits).any(elsewhere);
        let (snapshot, role) = match source {
            // Those that are loaded and were never resumed have nothing that is not in the store.
            None => (open(&line, &family, args)?, Role::Loaded),
            Some(_) if third => return Err(no_pair().at(1)),
            Some(source) => (source.hand_over(&line, args.len, purpose)?, Role::Destination),
        };
        let merges = |other: &Arc<Seat>| other.purpose == Purpose::Merge && !other.is_spent();
        let others = family.seats();
        if purpose == Purpose::Merge && others.iter().any(|one| merges(one) && !one.is_on(&line.store)) {
            return Err(TargetError::new("A snapshot is already merging."));
        }
        let seat = Arc::new(Seat {
            line,
            len: args.len,
            family,
            snapshot,
            purpose,
            reading: matches!(role, Role::Loaded).then_some(reading),
            is_asked: AtomicBool::new(false),
            role: Mutex::new(role),
            spent: Arc::default(),
            notify: Mutex::default(),
        });
        seat.family.join(&seat);
        Ok(seat)
    }

    /// The snapshot, for a destination with this line.
    fn hand_over(&self, line: &Line, len: Sectors, purpose: Purpose) -> Result<Arc<Snapshot>, TargetError> {
        let refuse = |reason: &str| {
            Err(TargetError::new("Couldn't create exception store").because(reason.to_owned()).at(2))
        };
        let most = self.snapshot.map.capacity() * u64::from(self.snapshot.chunk.sectors());
        if len.0 > most {
            let why = format!(
                "the snapshot that it takes over can have {most} sectors at the most: remove that one, and load \
                 this table anew"
            );
            return refuse(&why);
        }
        match (self.snapshot.commits.is_some() == line.persistent, self.purpose, purpose) {
            (false, ..) => refuse("the snapshot that it takes over has a store of the other type"),
            (_, Purpose::Merge, Purpose::Keep) => refuse("it is being merged"),
            _ => Ok(Arc::clone(&self.snapshot)),
        }
    }

    /// True when its store is this one.
    pub(super) fn is_on(&self, store: &DeviceRef) -> bool {
        args::is_same(&self.line.store, store)
    }

    fn role(&self) -> MutexGuard<'_, Role> {
        self.role.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why a table that was loaded while nobody had its store can't have it, if it can't.
    fn check_store(&self) -> Result<(), TargetError> {
        if bugs::on(Bug::StoreTakenTwice) {
            return Ok(());
        }
        let mut others = self.family.on_store(&self.line.store);
        others.retain(|other| !std::ptr::eq(&**other, self));
        if others.iter().any(|other| matches!(*other.role(), Role::Active)) {
            return Err(no_pair());
        }
        // One of the same change, or of another that is under way.
        let comes = |other: &Arc<Seat>| {
            other.is_asked.load(Ordering::Relaxed)
                && other.device().is_some_and(|device| device.is_changing())
        };
        if others.iter().any(comes) {
            return Err(no_pair().because("another table with this store becomes live at the same time"));
        }
        if self.reading.as_ref().is_some_and(|reading| reading.is_stale()) {
            let why = "another table has had its store in use since it was loaded: load it again";
            return Err(no_pair().because(why));
        }
        Ok(())
    }

    /// The table that has the snapshot of a destination.
    fn source(&self) -> Option<Arc<Seat>> {
        let has_it = |other: &Arc<Seat>| {
            Arc::ptr_eq(&other.snapshot, &self.snapshot) && matches!(*other.role(), Role::Active)
        };
        self.family.seats().into_iter().find(has_it)
    }

    /// True when its device has ended without a word.
    pub(super) fn is_orphan(&self) -> bool {
        self.notify().is_some_and(|notify| notify.mapped().is_none())
    }

    /// True when the snapshot is not its any more.
    pub(super) fn is_spent(&self) -> bool {
        matches!(*self.role(), Role::Spent)
    }

    fn spend(&self) {
        *self.role() = Role::Spent;
        self.spent.store(true, Ordering::Relaxed);
    }

    fn is_destination_of(&self, source: &Seat) -> bool {
        matches!(*self.role(), Role::Destination) && Arc::ptr_eq(&self.snapshot, &source.snapshot)
    }

    fn notify(&self) -> Option<Arc<dyn Notify>> {
        self.notify.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// True while its device is the snapshot.
    pub(super) fn is_keeper(&self) -> bool {
        self.purpose == Purpose::Keep && matches!(*self.role(), Role::Active)
    }

    /// The name of its device.
    pub(super) fn name(&self) -> Option<String> {
        Some(self.notify()?.device())
    }

    /// The device whose table this is.
    fn device(&self) -> Option<Arc<MappedDevice>> {
        self.notify()?.mapped()
    }

    /// What `table` prints behind the type.
    pub(super) fn table(&self) -> String {
        let Line { origin, store, features, .. } = &self.line;
        let kind = self.line.kind();
        // What it takes over it has when it does (kernel).
        let chunk = match *self.role() {
            Role::Destination => 0,
            _ => self.snapshot.chunk.sectors(),
        };
        let words = match features {
            Features { discard_passdown_origin: true, .. } => " 2 discard_zeroes_cow discard_passdown_origin",
            Features { discard_zeroes_cow: true, .. } => " 1 discard_zeroes_cow",
            _ => "",
        };
        format!("{} {} {kind} {chunk}{words}", origin.number, store.number)
    }

    /// What the control side is told of it, with what is in use.
    pub(super) fn report(&self, state: SnapshotState, usage: (u64, u64, u64)) -> SnapshotReport {
        let (used, total, metadata) = usage;
        SnapshotReport {
            origin: self.line.origin.clone(),
            store: self.line.store.clone(),
            kind: self.line.kind(),
            chunk: Sectors(u64::from(self.snapshot.chunk.sectors())),
            used: Sectors(used),
            total: Sectors(total),
            growth: self.snapshot.growth.wanted(),
            metadata: Sectors(metadata),
            state: if self.is_lost() { SnapshotState::Invalid } else { state },
        }
    }

    /// True when nothing of it can be read any more.
    pub(super) fn is_lost(&self) -> bool {
        self.is_spent() || !self.snapshot.is_valid()
    }

    /// The devices below.
    pub(super) fn devices(&self) -> Vec<Used> {
        let alone = Some(Alone::With(ClaimKey::of(&self.family)));
        let size = self.line.store.device.limits().size;
        let store = Used { alone, ..Used::new(&self.line.store, Sector(0), size) };
        vec![Used::new(&self.line.origin, Sector(0), self.len), store]
    }

    /// What the sectors from `from` on hold: what is in the store is data, the rest is the
    /// origin's.
    pub(super) fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        let (snapshot, origin) = (&self.snapshot, &self.line.origin.device);
        let (mut at, end) = (from.0, from.0 + len.0);
        while at < end && !out.is_full() {
            let kept = snapshot.map.next_kept(snapshot.chunk_of(at), snapshot.chunk_of(end - 1) + 1);
            let kept = kept.map_or(u64::MAX, |(chunk, _)| snapshot.start_of(chunk)).clamp(at, end);
            if kept > at {
                origin.extents(Sector(at), Sectors(kept - at), out);
            }
            at = snapshot.start_of(snapshot.chunk_of(kept) + 1).min(end);
            out.push(Sectors(at - kept), Content::Data);
        }
    }

    pub(super) fn attach(&self, notify: Arc<dyn Notify>) {
        *self.notify.lock().unwrap_or_else(PoisonError::into_inner) = Some(notify);
    }

    /// The devices with lanes of the origin, besides its own.
    pub(super) fn partners(&self) -> Vec<Arc<MappedDevice>> {
        if bugs::on(Bug::OriginNotRenewed) {
            return Vec::new();
        }
        let own = self.device().map(|device| device.id());
        self.family.nodes(own)
    }

    /// The last that can fail before it becomes live in `device`.
    pub(super) fn preresume(&self, device: DeviceId) -> Result<(), TargetError> {
        let role = self.role().clone();
        let elsewhere = |seat: &Seat| seat.device().filter(|holder| holder.id() != device);
        match role {
            Role::Destination => {
                let holder = self.source().and_then(|source| elsewhere(&source));
                if holder.is_some_and(|holder| !holder.is_suspended()) {
                    let text = "Unable to perform snapshot handover until source is suspended.";
                    return Err(TargetError::new(text).with_errno(EINVAL));
                }
            }
            Role::Active => {
                let others = self.family.seats();
                if others.iter().any(|other| other.is_destination_of(self) && elsewhere(other).is_some()) {
                    let text = "Unable to resume snapshot source until handover completes.";
                    return Err(TargetError::new(text).with_errno(EINVAL));
                }
            }
            Role::Loaded => {
                let _one_at_a_time = self.family.asking();
                self.check_store()?;
                self.is_asked.store(true, Ordering::Relaxed);
                if self.purpose == Purpose::Keep {
                    self.family.list(&self.snapshot);
                }
            }
            Role::Spent => {}
        }
        Ok(())
    }

    /// It is live, and everything stands still.
    pub(super) fn resume(&self) {
        let role = self.role().clone();
        match role {
            Role::Destination => match self.source() {
                Some(source) => source.spend(),
                None => {
                    tracing::error!("Cancelling snapshot handover.");
                    return self.spend();
                }
            },
            Role::Loaded | Role::Active => {}
            Role::Spent => return,
        }
        *self.role() = Role::Active;
        if let Some(reading) = &self.reading {
            self.family.uses(&self.line.store, reading);
        }
        if let Some(notify) = self.notify() {
            self.snapshot.attach(notify);
        }
        self.snapshot.set_len(self.len, self.line.origin.device.limits().size);
        self.snapshot.set_active(self.purpose == Purpose::Keep);
        match self.purpose {
            Purpose::Keep => self.family.list(&self.snapshot),
            Purpose::Merge => self.family.unlist(&self.snapshot),
        }
    }

    /// Its table is live no more, and everything stands still.
    pub(super) fn gone(&self) {
        // One that is taken over goes on in the next table of its device.
        let own = self.device().map(|device| device.id());
        let is_own = |other: &Seat| own.is_some() && other.device().map(|device| device.id()) == own;
        let taken = self.family.seats().iter().any(|other| other.is_destination_of(self) && is_own(other));
        if !taken {
            self.removed();
        }
    }

    /// The same, and no table of its device takes the snapshot over.
    pub(super) fn removed(&self) {
        if matches!(*self.role(), Role::Active) {
            self.snapshot.set_active(false);
            self.family.unlist(&self.snapshot);
            self.spend();
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        // Listed ahead of a resume that did not come.
        if matches!(self.role.get_mut().unwrap_or_else(PoisonError::into_inner), Role::Loaded) {
            self.family.unlist(&self.snapshot);
        }
    }
}

fn no_pair() -> TargetError {
    TargetError::new("Snapshot cow pairing for exception table handover failed").with_errno(EINVAL)
}

/// Opens the store. Nobody else may have it: it is read, and written to where it is blank.
fn open(line: &Line, family: &Arc<Family>, args: &TargetArgs<'_>) -> Result<Arc<Snapshot>, TargetError> {
    let alone = Alone::With(ClaimKey::of(family));
    let number = DevNo { major: 0, minor: 0 };
    let store = &*line.store.device;
    let claim = store.commons().map(|commons| commons.claim(DeviceId::new(), number, &alone, store));
    let _claim = claim.transpose().map_err(|taken| {
        let reason = format!("{taken} has {} alone", line.store.name);
        TargetError::new("Cannot get COW device").with_errno(EBUSY).because(reason).at(1)
    })?;
    let mark = args.resolver.mark(&line.store).filter(|_| line.persistent);
    let (chunk, loaded) = load::load(line, args.len, args.io, mark.as_deref())?;
    Ok(Snapshot::new(&line.origin, line.store.clone(), chunk, loaded, mark))
}
