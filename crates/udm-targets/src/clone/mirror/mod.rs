//! `mirror`: two devices with the same data, as the kernel's dm-mirror that pvmove uses. `udm move`
//! loads it while a disk moves to another device.
//!
//! ```text
//! mirror core <#log args> <region size> [sync|nosync] 2 <source> <offset> <destination> <offset>
//!        [<#features> handle_errors|keep_log]
//! mirror disk <#log args> <log device> <region size> [sync|nosync] 2 ...
//!
//!  read  ──────────────────────────► source
//!  write ── copied? ── yes ─► source, then destination ─► done
//!              └────── no ──► copy the region, then as above
//! ```
//!
//! The copies are those of a clone: the same regions, claims, engine and task. With the `core` log
//! a new table copies all again, because nothing says which writes reached one device only when the
//! last server ended. With a `disk` log it copies what the log says.
//!
//! * [`args`]: the line. [`state`]: the phase and the errors. [`lane`]: the data path; [`steps`]
//!   and [`completions`]: the way of a write. [`write_locks`]: the order of writes of one place.
//!   [`log`]: the write-intent log. [`target`]: the control half.
//!
//! The rules:
//!
//! * **The source is complete** at every moment: a write, flush or discard completes when the
//!   source has it, and the destination too unless that has failed. So a mirror can be replaced by
//!   its source at any time.
//! * **A write goes to the source first,** and then, as the same request, to the destination. So
//!   its data is not copied, and no read returns data that only the destination has.
//! * **Writes of one place** are one after the other, so both devices have the same last one.
//! * **A region is copied once.** A write of a region that is not copied waits for its copy, as in
//!   a clone. So no copy overwrites a write. If the copy fails, the write goes to the source alone,
//!   while it holds the claim of the region.
//! * **If a write of a copied region fails on the destination,** the mirror is *degraded*: from
//!   then on nothing is sent to the destination, and the client sees no error. A degraded mirror
//!   stays so.
//! * **If a write of a copied region fails on the source,** its client sees the error. The mirror
//!   is degraded too, because nobody knows what the source has now: a new table copies the region
//!   again, if its log says so, or all.
//! * **A switch** ([`udm_dm::target::MirrorTargetQueries::begin_switch`]) begins when all regions
//!   are copied, and only if the mirror is not degraded. From then on a write needs both devices,
//!   so either of them can take the place of the mirror.
//! * **A request of zeroes** is a write: it waits for all regions that it touches. A destination
//!   that has no such request gets a write of zeroes.

mod args;
mod completions;
mod lane;
mod log;
mod state;
mod steps;
pub mod target;
mod write_locks;
