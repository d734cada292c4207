//! `snapshot-origin` and `snapshot`: the content of a device at one instant, kept while it changes.
//!
//! ```text
//! snapshot-origin <origin>
//! snapshot <origin> <store> <P|PO|N> <chunk> [<#features> <feature>...]
//!
//!  write of the origin           ┌──────── engine, one per lane ───────┐
//!  lacks chunks ─► claim ─► reserve room ─► read origin once ─► write each store
//!                                                                     │
//!    origin may change ◄─ settle ◄─ readers are past ◄─ publish ◄─ [flush, records]
//! ```
//!
//! A snapshot reads as its origin did at its first resume, and can be written. The *store* (the
//! kernel's COW device) holds the differing chunks: `P` on disk in the kernel's layout
//! ([`udm_wire::cow`]), `N` while the table exists. Writes through a `snapshot-origin` copy first;
//! other writes go unnoticed.
//!
//! The parts, in the order in which a table and then a request meet them:
//!
//! * [`target`], [`origin`]: the two targets. [`args`]: the line of a snapshot.
//! * [`load`]: reads and checks a store. [`binding`]: the table that owns it.
//! * [`origin_snapshots`]: an origin and its snapshots. [`state`], [`settings`]: one snapshot.
//! * [`origin_lane`], [`lane`]: the data paths of an origin and of a snapshot.
//! * [`exception_map`]: which chunks the store holds, and where.
//! * [`readers`]: reads of the origin that no write may overtake.
//! * [`redirected_bios`]: bios with another sector, and how to restore them.
//! * [`copy_engine`]: copies and records of a lane. [`copy_jobs`]: the runs that it copies.
//! * [`store_allocator`], [`growth`]: room in the store. [`raw_device`]: a table over a store.
//! * [`record_commits`]: records of copied chunks, in order.
//! * [`checkpoints`]: the changes since an instant. [`merge`]: the way back into the origin.
//!
//! The rules; those of readers, room and owner are in their files:
//!
//! * **Map** ([`exception_map`]): the state of each chunk. A write that finds a chunk *free* claims
//!   it by compare-and-swap and copies it with its own lanes. A request that finds it *pending*
//!   waits in its own lane until the snapshot wakes it. Settled chunks are counted, so a write of
//!   an origin whose chunks are all copied looks for none.
//! * **Origin** ([`origin_snapshots`], [`origin_lane`]): its lanes serve the snapshots that exist
//!   when they are opened. A change that adds or ends a snapshot renews them, so an origin without
//!   snapshots is linear, and no request checks for new snapshots. A write is not cut at chunks.
//! * **Records** ([`record_commits`]): one lane at a time writes the records of all cores, in the
//!   order in which chunks were reserved, after one flush. Data is durable before its record, and
//!   the record before the write completes. That flush also makes the preceding records durable, so
//!   a group costs one. Without newer copies the records are written with FUA.
//! * **Growth** ([`growth`]): a lane that leaves less than half a step asks the device for more
//!   (`Device::grow`), which answers from a thread. Writes without room wait meanwhile. The policy
//!   for full stores applies after a last attempt. The flush before the next record makes the new
//!   length durable.
//! * **A lost copy** ends the snapshot and nothing else. The origin's write waits until the store
//!   is marked, or, if its disk is gone, until a [`InvalidStoreMark`](udm_dm::InvalidStoreMark)
//!   outside is durable. Otherwise the disk could return with a valid header. Reads in flight check
//!   the state when they complete, so none returns new data of the origin.
//! * **A truncated store** is found by a read of its last block, at most one per 100 ms and lane.
//!   Only devices that can shrink are checked (`Device::may_shrink`). A write of a file's last
//!   block checks first, so it does not extend the file again.
//!
//! docs/targets.md lists what udm does beyond the kernel.

mod args;
mod binding;
mod checkpoints;
mod copy_engine;
mod copy_jobs;
mod exception_map;
mod growth;
mod lane;
mod load;
pub mod merge;
pub mod origin;
mod origin_lane;
mod origin_snapshots;
pub(crate) mod raw_device;
mod readers;
mod record_commits;
pub(crate) mod redirected_bios;
mod settings;
mod state;
mod store_allocator;
pub mod target;
