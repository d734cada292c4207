//! Mapped devices: a name, a number, two slots for tables, and lanes that change tables without
//! losing a request.
//!
//! The parts, in the order in which a request and then a change meet them:
//!
//! * [`queue`]: the request queue of a request-based device.
//! * [`lane`]: the data path of one core.
//! * [`host`]: events and names, as the targets below report and read them.
//! * [`device`]: the control half: slots, state, events. [`names`]: its names and their rules.
//! * [`message`]: a message to one target.
//! * [`throttle`]: its limits of requests and bytes per second.
//! * [`stack`]: the limits of stacks, checked at each load.
//! * [`device_set`]: the change of several devices. [`partners`]: their partners.
//! * [`transition`]: the change of one device, step by step. [`phase`]: the steps.
//!
//! The life of a device is the kernel's (dm-ioctl.c `table_load`, `table_clear`, `do_suspend`,
//! `do_resume`; dm.c `dm_submit_bio`):
//!
//! | event | live | inactive | state |
//! |---|---|---|---|
//! | load | | the new one | |
//! | clear | | none | |
//! | suspend | | | suspended |
//! | resume with an inactive table | the former inactive one | none | active |
//! | resume without | | | active |
//! | resume that fails | | | active; suspended if the live table cannot continue |
//! | another change meanwhile | EBUSY | | |
//!
//! | a request | without a live table | with one |
//! |---|---|---|
//! | active | EIO | goes to the table |
//! | suspended | waits; NOWAIT: EAGAIN; read-ahead: EIO | the same |
//!
//! `tests/life.rs` has every transition.
//!
//! **A reload never touches the data path.** Each step is a message to all cores with an `Ack`:
//! *prepare* opens the new lanes beside the old ones, *suspend* holds back new bios until none is
//! in flight, *resume* uses the new lanes. An error in *prepare* cancels the change while the old
//! table runs. The kernel swaps first and finds the error later; the extra phase costs control time
//! only.
//!
//! **Retired lanes.** A lane of an old table may still have own work (`OwnWork::Required`). It gets
//! no bios and is polled until the work is done. The old table is held until all cores have dropped
//! its lanes, and the control half closes its files. A core never closes a file; if it drops the
//! last reference, it starts a thread.
//!
//! **Several devices change together**, all or none. All prepare from the bottom of the stack, so
//! each table sees the coming limits below. All suspend from the top, since bios in flight need the
//! devices below. At one instant none has a request in flight; then tables are swapped. Two
//! disjoint sets can wait for each other, if each has a device above one of the other. As in the
//! kernel, they wait until one is cancelled.
//!
//! **Partners** (`Target::partners`) are devices whose lanes read the state of a target when they
//! begin, such as an origin and its snapshots. They are *renewed* in the same change: new lanes of
//! their live table replace the old ones. So the data path never checks for new snapshots. If a new
//! partner appears during the change, its lanes may have old state; the change is cancelled and
//! retried. One process-wide lock keeps a table from becoming live between this check and the
//! hooks.

mod device;
mod device_set;
mod host;
mod lane;
mod message;
mod names;
mod partners;
mod phase;
mod queue;
mod stack;
mod throttle;
mod transition;

pub use device::{DeviceInfo, MappedDevice, TransitionWakeFn};
pub use device_set::{DeviceSetTransition, IndexedDeviceError};
pub use names::DeviceNameReader;
pub use queue::QueueFactory;
pub use stack::{DEPTH_MAX, LANES_MAX, device_stack_contains};
pub use transition::DeviceTransition;
