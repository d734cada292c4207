//! Making, suspending and resuming devices.
//!
//! What is let go, a table that was replaced or the device itself, is closed on a thread of its
//! own: closing files can take long, and neither a core nor the control thread waits for it. The
//! verb does, so that what it closed is closed when it is done.

use super::call_off::{CallOff, Waiting};
use super::snapshot::{Attaching, bring_back};
use super::turns::{TRIES_MAX, Turns};
use super::{show, tables};
use crate::error::VerbError;
use crate::http::api;
use crate::registry::{Folder, Mapped, Registry, RequestQueues};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::sync::{Notify, oneshot};
use udm_core::bugs::{self, Bug};
use udm_core::errno::{EBUSY, EINTR, ENXIO};
use udm_dm::{Changes, MappedDevice, NewsKind, Refused, Table, TargetError, Wake};

/// Makes a device. With a table it is loaded and resumed, and when that fails the device is gone
/// again, as with dmsetup; without one it has none. Relative paths in the table count from our own
/// folder; building it may block on what it opens.
///
/// # Errors
/// EINVAL for a bad name, EBUSY for one that is taken, the table's own otherwise.
pub async fn create(
    registry: &Arc<Registry>,
    name: &str,
    uuid: Option<&str>,
    table: Option<&str>,
) -> Result<(), VerbError> {
    create_until(registry, name, uuid, table, &Folder::own(), &CallOff::default()).await.map(drop)
}

/// As [`create`], with paths from another folder; what it has made, as it was then. Where it waits
/// for other devices or for a store, until it is called off.
///
/// # Errors
/// As [`create`]'s, and what it was called off with.
pub async fn create_until(
    registry: &Arc<Registry>,
    name: &str,
    uuid: Option<&str>,
    table: Option<&str>,
    folder: &Folder,
    off: &CallOff,
) -> Result<api::Device, VerbError> {
    let called = Called { name, uuid, ..Called::default() };
    create_with(registry, called, |_| Ok(table.map(String::from)), folder, off).await
}

/// What a device that is to be made is called.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Called<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its uuid, if it has one.
    pub uuid: Option<&'a str>,
    /// Its minor number; without one it is the lowest that is free.
    pub minor: Option<u32>,
    /// Clients may not write.
    pub read_only: bool,
    /// Its queue, where it is request-based.
    pub requests: RequestQueues,
}

/// As [`create_until`], with the table that `table` says of the device, which is there already and
/// has none.
///
/// # Errors
/// As [`create_until`]'s, and `table`'s; ENXIO for a number that is taken, EINVAL for one that is
/// beyond the kernel's.
pub async fn create_with(
    registry: &Arc<Registry>,
    called: Called<'_>,
    table: impl FnOnce(&Arc<Mapped>) -> Result<Option<String>, VerbError>,
    folder: &Folder,
    off: &CallOff,
) -> Result<api::Device, VerbError> {
    make(registry, called, table, folder, off).await.map(|made| made.is)
}

/// A device that was made.
pub(crate) struct Created {
    /// The device, which others may have changed since.
    pub mapped: Arc<Mapped>,
    /// The table that it was given.
    pub table: Option<Arc<Table>>,
    is: api::Device,
}

/// As [`create_with`].
pub(crate) async fn make(
    registry: &Arc<Registry>,
    called: Called<'_>,
    table: impl FnOnce(&Arc<Mapped>) -> Result<Option<String>, VerbError>,
    folder: &Folder,
    off: &CallOff,
) -> Result<Created, VerbError> {
    let Called { name, uuid, minor, read_only, requests } = called;
    let made = registry.make(name, uuid, minor).map_err(|e| VerbError::new(name, e))?;
    made.mapped.read_only.store(read_only, Ordering::Relaxed);
    if let Some(by) = registry.queue_by(requests) {
        made.mapped.device.queue_by(by);
    }
    let one = [(name.to_owned(), Arc::clone(&made.mapped))];
    let table = match table(&made.mapped) {
        Err(error) if bugs::on(Bug::RefusedPathKept) => {
            let _ = std::mem::ManuallyDrop::new(made);
            return Err(error);
        }
        table => table?,
    };
    if let Some(table) = table {
        tables::load_into(registry, &made.mapped, name, &table, folder, off)?;
        in_turn(registry, &one, Waiting::Create, off, resume_among).await?;
    }
    if let Err(error) = export(registry, &made.mapped) {
        let _ = in_turn(registry, &one, Waiting::Remove, off, leave_among).await;
        return Err(error);
    }
    // Somebody may rename or remove it as soon as it is complete.
    let is = show::describe(registry, &made.mapped);
    let (mapped, table) = (Arc::clone(&made.mapped), made.mapped.device.live());
    made.complete();
    Ok(Created { mapped, table, is })
}

/// Puts it on the list of what clients find, when there is one.
pub(super) fn export(registry: &Registry, mapped: &Mapped) -> Result<(), VerbError> {
    let Some(exporter) = registry.exporter() else { return Ok(()) };
    let name = mapped.device.name();
    let put = exporter.put(&name, mapped);
    put.map_err(|e| VerbError::new(name, TargetError::new(e.to_string())))
}

/// Parks new requests and waits until those in flight are done; with `noflush`, until targets have
/// handed back what they hold. Of several devices all are suspended or none: there is an instant at
/// which none of them has a request in flight. A device that is suspended already stays so.
///
/// # Errors
/// ENXIO when there is no such device, EINTR when a resume or a removal came meanwhile, a device's
/// own otherwise.
pub async fn suspend(registry: &Arc<Registry>, names: &[&str], noflush: bool) -> Result<(), VerbError> {
    suspend_until(registry, names, noflush, &CallOff::default()).await
}

/// As [`suspend`], until it is called off.
///
/// # Errors
/// As [`suspend`]'s, and what it was called off with: the devices are active then.
pub async fn suspend_until(
    registry: &Arc<Registry>,
    names: &[&str],
    noflush: bool,
    off: &CallOff,
) -> Result<(), VerbError> {
    suspend_these(registry, &find(registry, names)?, noflush, off).await
}

/// As [`suspend_until`], of devices that were found before, each with what it is called in errors.
pub(super) async fn suspend_these(
    registry: &Registry,
    several: &[(String, Arc<Mapped>)],
    noflush: bool,
    off: &CallOff,
) -> Result<(), VerbError> {
    in_turn(registry, several, Waiting::Suspend, off, |devices, _, wake| {
        Changes::suspend(devices, noflush, wake)
    })
    .await
}

/// Swaps the loaded table in, where there is one, and lets requests go. Of several devices all take
/// their new tables or none, while none has a request in flight. A suspend that still waits is
/// called off.
///
/// # Errors
/// ENXIO when there is no such device; a table's own when the cores can't use it: the old ones are
/// live and running then.
pub async fn resume(registry: &Arc<Registry>, names: &[&str]) -> Result<(), VerbError> {
    resume_until(registry, names, &CallOff::default()).await
}

/// As [`resume`], until it is called off.
///
/// # Errors
/// As [`resume`]'s, and what it was called off with: the tables that were live are live and running
/// then.
pub async fn resume_until(registry: &Arc<Registry>, names: &[&str], off: &CallOff) -> Result<(), VerbError> {
    resume_these(registry, &find(registry, names)?, off).await
}

/// As [`resume_until`], of devices that were found before, each with what it is called in errors.
pub(crate) async fn resume_these(
    registry: &Registry,
    several: &[(String, Arc<Mapped>)],
    off: &CallOff,
) -> Result<(), VerbError> {
    for (_, mapped) in several {
        mapped.pending.call_off(Waiting::Suspend, "called off by a resume");
    }
    in_turn(registry, several, Waiting::Resume, off, resume_among).await
}

/// Gives a device that is active, and whose inactive slot is empty, another table: all of that, or
/// nothing. What others do to it meanwhile is left to them; the table, which is live then.
pub(crate) async fn reload(
    registry: &Registry,
    mapped: &Arc<Mapped>,
    name: &str,
    text: &str,
    folder: &Folder,
    off: &CallOff,
) -> Result<Arc<Table>, VerbError> {
    let is_free = || {
        let info = mapped.device.info();
        if !registry.is_there(mapped) {
            return Err(TargetError::errno(ENXIO).because("it has been removed meanwhile"));
        }
        if info.suspended {
            return Err(busy("it is suspended: resume it first"));
        }
        if info.inactive {
            return Err(busy("a table waits in its inactive slot: resume or clear it first"));
        }
        Ok(())
    };
    is_free().map_err(|e| VerbError::new(name, e))?;
    let loaded = tables::load_if(registry, mapped, name, text, folder, off, |_| is_free())?;
    let one = [(name.to_owned(), Arc::clone(mapped))];
    let ours = [Loaded { place: 0, mapped, table: &loaded }];
    let done = in_turn(registry, &one, Waiting::Resume, off, |devices, turns, wake| {
        let _linked = registry.linking();
        resume_loaded(&ours, devices, turns, wake)
    })
    .await;
    let is_live = || mapped.device.live().is_some_and(|live| Arc::ptr_eq(&live, &loaded));
    match done {
        // Somebody else has put it to use.
        Err(_) if is_live() => Ok(loaded),
        Err(error) => {
            if !bugs::on(Bug::RefusedTableKept) {
                mapped.device.clear_own(&loaded);
            }
            Err(error)
        }
        Ok(()) => Ok(loaded),
    }
}

fn busy(why: &str) -> TargetError {
    TargetError::errno(EBUSY).because(why)
}

/// The devices of `names`.
fn find(registry: &Registry, names: &[&str]) -> Result<Vec<(String, Arc<Mapped>)>, VerbError> {
    names.iter().map(|name| Ok(((*name).to_owned(), registry.find(name)?))).collect()
}

/// Calls off every verb that waits: the server ends.
pub fn call_off_all(registry: &Registry) {
    registry.config().inspect(|config| config.end());
    for mapped in registry.everything() {
        for who in [Waiting::Create, Waiting::Suspend, Waiting::Resume, Waiting::Remove] {
            mapped.pending.call_off(who, "the server ends");
        }
    }
}

/// [`Changes::resume`] of devices whose turn it is.
pub(super) fn resume_among(
    devices: &[Arc<MappedDevice>],
    turns: &Turns<'_>,
    wake: &Wake,
) -> Result<Changes, Refused> {
    Changes::resume_among(devices, true, wake, |device| turns.has(device))
}

/// A table that a verb has loaded, and is about to make live.
pub(super) struct Loaded<'a> {
    /// The place of its device among those of the change.
    pub place: usize,
    /// The device.
    pub mapped: &'a Mapped,
    /// The table.
    pub table: &'a Arc<Table>,
}

impl Loaded<'_> {
    /// Checks that nobody has suspended the device meanwhile, or put another table into its slot.
    fn is_as_it_was(&self) -> Result<(), TargetError> {
        let device = &self.mapped.device;
        let is_own = |table: Option<Arc<Table>>| table.is_some_and(|table| Arc::ptr_eq(&table, self.table));
        if device.is_suspended() {
            return Err(busy("it is suspended: resume it first"));
        }
        // Somebody else may have resumed it.
        match is_own(device.inactive().or_else(|| device.live())) {
            true => Ok(()),
            false => Err(busy("somebody else has loaded or cleared a table meanwhile")),
        }
    }
}

/// As [`resume_among`], if all that the verb has `loaded` is still there. To be called with the
/// registry's `linking` lock held, so that nobody loads meanwhile.
pub(super) fn resume_loaded(
    loaded: &[Loaded<'_>],
    devices: &[Arc<MappedDevice>],
    turns: &Turns<'_>,
    wake: &Wake,
) -> Result<Changes, Refused> {
    for one in loaded {
        one.is_as_it_was().map_err(|why| (one.place, why))?;
    }
    resume_among(devices, turns, wake)
}

/// [`Changes::leave`] of devices whose turn it is.
pub(super) fn leave_among(
    devices: &[Arc<MappedDevice>],
    turns: &Turns<'_>,
    wake: &Wake,
) -> Result<Changes, Refused> {
    Changes::leave_among(devices, wake, |device| turns.has(device))
}

/// A change of devices that others may change too: one after the other.
pub(super) async fn in_turn(
    registry: &Registry,
    several: &[(String, Arc<Mapped>)],
    who: Waiting,
    off: &CallOff,
    mut begin: impl FnMut(&[Arc<MappedDevice>], &Turns<'_>, &Wake) -> Result<Changes, Refused>,
) -> Result<(), VerbError> {
    let mut entered: Vec<_> = several.iter().map(|(_, mapped)| mapped.pending.enter(who, off)).collect();
    let devices: Vec<_> = several.iter().map(|(_, mapped)| Arc::clone(&mapped.device)).collect();
    let blame = |(place, error): Refused| VerbError::new(&several[place].0, error);
    let merges = bring_back(registry, several, who, off).await?;
    for _ in 0..TRIES_MAX {
        let turns = Turns::take(registry, several, who, off).await?;
        let attaching = Attaching::begin(registry, several, who, off).await?;
        // A wake-up that comes before we wait for it is kept, so none is lost between a step and
        // its wait.
        let answered = Arc::new(Notify::new());
        let wake: Wake = {
            let answered = Arc::clone(&answered);
            Arc::new(move || answered.notify_one())
        };
        let moves: Vec<bool> = several.iter().map(|(_, mapped)| is_change(mapped, who)).collect();
        let mut changes = match begin(&devices, &turns, &wake) {
            Ok(changes) => changes,
            Err(refused) => {
                attaching.undo().await;
                return Err(blame(refused));
            }
        };
        if !attaching.still_holds(&devices) {
            // Somebody has loaded another table meanwhile.
            drop(changes);
            attaching.undo().await;
            continue;
        }
        let check = attaching.check_at_rest();
        if check.is_some() {
            changes.pause_at_rest();
        }
        let done = step(registry, &turns.off(off), &answered, &mut changes, check).await;
        let outrun = changes.outrun();
        if done.is_ok() && !outrun {
            attaching.settle(several).await;
            registry.merges.go_on(&merges);
            // Before anybody else has a turn.
            let moved = several.iter().zip(moves).filter(|(_, moves)| *moves).map(|((_, mapped), _)| mapped);
            moved.for_each(|mapped| tell(registry, mapped, who));
        } else {
            attaching.undo().await;
        }
        drop(turns);
        if !outrun {
            entered.clear();
        }
        let tables = changes.take_let_go();
        if !tables.is_empty() {
            let_go(registry, tables, off).await;
        }
        if !outrun {
            return done.map_err(blame);
        }
    }
    let error = TargetError::errno(EBUSY).because("others change what lies on the same disk all the time");
    Err(blame((0, error)))
}

/// True when a device is another behind a suspend or a resume. What comes or goes says so itself.
fn is_change(mapped: &Mapped, who: Waiting) -> bool {
    let info = mapped.device.info();
    match who {
        Waiting::Suspend => !info.suspended,
        Waiting::Resume => info.suspended || info.inactive,
        Waiting::Create | Waiting::Remove => false,
    }
}

/// Has who listens told of a change that is done.
fn tell(registry: &Registry, mapped: &Arc<Mapped>, who: Waiting) {
    let (kind, line) = match who {
        Waiting::Suspend => (NewsKind::Suspended, "suspended"),
        Waiting::Resume => (NewsKind::Resumed, "resumed"),
        Waiting::Create | Waiting::Remove => return,
    };
    if !registry.is_making(mapped) {
        mapped.tell(kind, line);
    }
}

/// Takes the steps of a change, one whenever the cores have answered, until it is over or called
/// off. With a `check` it goes on from its pause if that says so.
async fn step(
    registry: &Registry,
    off: &CallOff,
    answered: &Notify,
    changes: &mut Changes,
    check: Option<impl Future<Output = Result<(), Refused>>>,
) -> Result<(), Refused> {
    let mut called = None;
    let mut check = std::pin::pin!(check);
    loop {
        if let Some(done) = changes.step(registry.cores()) {
            // Too late, it is done; or it failed for a reason of its own.
            let interrupted = |(_, e): &Refused| e.errno == EINTR;
            let why = called.filter(|_| done.as_ref().is_err_and(interrupted));
            return why.map_or(done, |why| Err((0, why)));
        }
        let checked = async {
            match check.as_mut().as_pin_mut().filter(|_| changes.is_paused()) {
                Some(check) => check.await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = answered.notified() => {}
            checked = checked => changes.go_on(checked, registry.cores()),
            why = off.called(), if called.is_none() => {
                changes.cancel(registry.cores());
                called = Some(why);
            }
        }
    }
}

/// Drops `what` on a thread of its own and waits for that, until called off.
pub(super) async fn let_go<T: Send + 'static>(registry: &Registry, what: T, off: &CallOff) {
    let (gone, wait) = oneshot::channel();
    registry.outside().beside(Box::new(move || {
        drop(what);
        let _ = gone.send(());
    }));
    if bugs::on(Bug::LetGoUnwaited) {
        return;
    }
    // Without a thread to be had it is dropped by now, and so is `gone`.
    tokio::select! {
        biased;
        _ = wait => {}
        _ = off.called() => {}
    }
}
