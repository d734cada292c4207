//! `clone`: a device that reads as its source at once, and is copied to its destination behind.
//!
//! ```text
//! clone <metadata> <destination> <source> <region size>
//!       [<#features> [no_hydration] [no_discard_passdown]
//!       [<#core args> [hydration_threshold N] [hydration_batch_size N] [hydrate_first RUNS]]]
//!
//!  read  ── hydrated? ── yes ─► destination       task: the next regions, in the background
//!              └──────── no ──► source                       │ read the source
//!  write ── hydrated? ── yes ─► destination                  ▼ write the destination
//!              └──────── no ──► hydrate the region ─► bit ─► [flush, metadata]
//! ```
//!
//! A *region* is hydrated if its data is in the destination. The source is only read. The words are
//! those of the kernel's dm-clone; the metadata is udm's own ([`udm_wire::clone_metadata`]).
//!
//! The parts, in the order in which a table and then a request meet them:
//!
//! * [`target`]: the control half. [`args`]: its line. [`settings`]: the values of its messages.
//! * [`load`]: reads and checks the metadata. [`state`]: what the cores share.
//! * [`regions`]: which regions are hydrated, and which are being hydrated. [`changes`]: which
//!   changes the metadata has.
//! * [`zero_regions`]: which regions need no copy, because both devices have a hole there.
//! * [`first_reads`]: which regions clients needed from the source, in their order.
//! * [`lane`]: the data path. [`task`]: hydration in the background.
//! * [`engine`]: the copies and the metadata commits of a lane or of the task.
//!
//! The rules:
//!
//! * **A region** is hydrated by the core that claims it, by compare-and-swap. A bit is set after
//!   the data is in the destination, and is never cleared. So a request that finds the bit needs no
//!   claim, and a read that went to the source before needs no tracking: the source never changes.
//! * **A write** of a whole region copies nothing; its bit is set when it completes. A write of a
//!   part waits until its region was copied. If a copy fails, the writes that wait for it fail, and
//!   the next write tries again.
//! * **A discard** claims each region that it covers as a copy does. The kernel does not, so a copy
//!   in flight can overwrite a write that follows the discard.
//! * **A commit** ([`engine`]) takes the changed blocks of the bitmap, flushes the destination,
//!   writes the blocks to the metadata and flushes them. A flush or FUA write completes after a
//!   commit that began later than the bits that it relies on. Commits of all cores are one at a
//!   time; a core that waits for one is woken.
//! * **A failed commit** makes the metadata read-only, as in the kernel: regions are no longer
//!   hydrated, and a write of an unhydrated region fails. If the metadata cannot even be read,
//!   every request fails. Unlike the kernel, bits that were set stay set, so no read returns older
//!   data. A table that is loaded again begins with writable metadata.
//! * **Clients come first.** The task looks at the number of client requests in flight. While there
//!   are any, it starts one batch per 10 ms.
//! * **A suspend** waits for copies in flight, also those of the task, and for a last commit.

mod args;
mod changes;
mod engine;
mod first_reads;
mod lane;
mod load;
pub mod mirror;
mod regions;
mod settings;
mod state;
pub mod target;
mod task;
mod zero_regions;
