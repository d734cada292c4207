//! The verbs: dmsetup's operations on devices, with the kernel's semantics and errors.
//!
//! Contract: verbs need no reactor, so the simulator runs them too. Devices are locked in the order
//! of their numbers (`device_locks`). `cancel` defines how a verb is cancelled.

mod begin_transition;
mod cancel;
mod change;
pub mod clone;
mod device_locks;
mod events;
mod front_ends;
pub mod handover;
mod handover_counters;
mod handover_nvme;
mod handover_paths;
mod handover_state;
mod lane_guard;
pub mod moves;
mod multipath;
mod nvme;
#[cfg(test)]
mod partners_tests;
mod power;
mod queue;
mod reload;
mod remove;
mod rename;
mod show;
pub mod snapshot;
mod tables;
mod throttle;
mod ublk;
mod vhost_user;
mod wait;

pub(crate) use cancel::PendingVerbs;
pub use cancel::{CancelToken, interrupted_error};
pub(crate) use change::{CreatedDevice, create_device};
pub use change::{
    DeviceSpec, cancel_all_pending_verbs, create_device_cancellable, create_device_with_table_fn,
    create_mapped_device, resume_devices_cancellable, resume_mapped_devices, suspend_devices_cancellable,
    suspend_mapped_devices,
};
pub use events::wait_device_event;
pub use multipath::{PathGroupingOptions, create_multipath_cancellable};
pub use nvme::{list_nvme_paths, list_nvme_subsystems, reset_nvme_controller, set_nvme_ana_state};
pub use power::set_disk_power;
pub use queue::change_queue_settings;
pub(crate) use reload::reload_live_table;
pub use remove::{RemoveOptions, remove_device_cancellable, remove_mapped_device, run_deferred_removals};
pub use rename::rename_mapped_device;
pub(crate) use show::{OPS, device_and_paths};
pub use show::{
    all_device_tables, all_table_statuses, describe_device_by_name, list_mapped_devices, server_versions,
    table_by_device_name, table_status_by_device_name,
};
pub(crate) use snapshot::SnapshotCreationInfo;
pub(crate) use tables::parse_table_or_device_word;
pub use tables::{
    TABLE_MAX, clear_inactive_table, fail_or_reinstate_path, load_inactive_table, load_table_cancellable,
    resolve_device, send_message_with_base_dir, send_target_message,
};
pub use throttle::throttle_device;
pub(crate) use throttle::{apply_throttle_settings, throttle_settings};
pub use ublk::{add_ublk_disk, list_ublk_disks, remove_ublk_disk};
pub use vhost_user::{add_vhost_user_socket, list_vhost_user_sockets, remove_vhost_user_socket};
pub use wait::{block_on_verb, block_on_verb_with_idle_fn};
