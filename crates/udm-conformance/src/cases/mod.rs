//! The list of cases, with the requirements of each.

mod changes;
mod concurrency;
mod data;
mod errors;
mod flags;
mod life;
mod load;
mod paths;
mod random;
mod ranges;
mod zeroes;

use crate::devices_under_test::CreatedDevice;
use crate::{DeviceTestRig, InitialContent, RequestCheckingLayer, WorldKind};
use udm_core::Op;

/// A case: one rule.
pub struct ConformanceCase {
    /// The name, used in the names of tests.
    pub name: &'static str,
    /// The requirements on the device.
    pub needs: &'static [Requirement],
    /// Checks the rule.
    pub run: fn(&mut DeviceTestRig),
}

/// A requirement of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requirement {
    /// The device stores data.
    Stores,
    /// The device is read-only.
    ReadOnly,
    /// The device supports discards.
    Discard,
    /// The device is writable and does not support discards.
    NoDiscard,
    /// The device supports write-zeroes.
    Zeroes,
    /// The device is writable and does not support write-zeroes.
    NoZeroes,
    /// Blocks of more than 512 bytes.
    LargeBlocks,
    /// More than 2^32 bytes.
    Huge,
    /// The device is over disks that fail and wait on demand.
    Disks,
    /// The power of the devices below can be cut.
    Power,
    /// The device is a mapped device.
    Mapped,
    /// The device is used by its lanes, so requests can have any flag.
    Lanes,
    /// The device is used by clients of a server.
    Server,
    /// A layer above the device checks requests.
    Checks,
    /// The device chooses among paths to one disk in memory.
    Paths,
    /// The device passes path errors up: its table has no multipath, log-writes or dust.
    NoPaths,
}

impl Requirement {
    /// The reason why `made` does not meet the requirement in a world of `kind`; `None` if it does.
    #[must_use]
    pub fn unmet_requirement(self, made: &CreatedDevice, kind: WorldKind) -> Option<&'static str> {
        let facts = &made.facts;
        let writes = !facts.limits.read_only;
        let (has, why) = match self {
            Requirement::Stores => (facts.fresh == InitialContent::Zeroes && writes, "it stores no data"),
            Requirement::ReadOnly => (!writes, "it is writable"),
            Requirement::Discard => (facts.can(Op::Discard), "it does not support discards"),
            Requirement::NoDiscard => (writes && !facts.can(Op::Discard), "it supports discards"),
            Requirement::Zeroes => (facts.can(Op::WriteZeroes), "it does not support write-zeroes"),
            Requirement::NoZeroes => (writes && !facts.can(Op::WriteZeroes), "it supports write-zeroes"),
            Requirement::LargeBlocks => (facts.block() > 1, "its blocks have 512 bytes"),
            Requirement::Huge => (facts.size() > 1 << 23, "it is small"),
            Requirement::Disks => (made.ground.has_disks(), "it is not over disks in memory"),
            Requirement::Power => (made.ground.has_power(), "its power can't be cut"),
            Requirement::Mapped => (made.mapped.is_some(), "it is not a mapped device"),
            Requirement::Lanes => (!kind.is_served(), "a client of a server cannot express it"),
            Requirement::Server => (kind.is_served(), "it has no server"),
            Requirement::Checks => (
                facts.boundary != RequestCheckingLayer::Backend || kind.is_served(),
                "only the layer above checks requests",
            ),
            Requirement::Paths => (made.ground.paths().len() > 1, "it has no paths to choose from"),
            Requirement::NoPaths => {
                let paths = made.mapped.as_ref().is_some_and(|device| {
                    let text = device.table_text(false);
                    text.contains("multipath") || text.contains("log-writes") || text.contains("dust")
                });
                (!paths, "its table does not pass path errors up")
            }
        };
        (!has).then_some(why)
    }
}

impl ConformanceCase {
    /// The reason why the case does not apply to `made` in a world of `kind`; `None` if it does.
    #[must_use]
    pub fn unmet_requirement(&self, made: &CreatedDevice, kind: WorldKind) -> Option<&'static str> {
        self.needs.iter().find_map(|need| need.unmet_requirement(made, kind))
    }
}

const fn new_conformance_case(
    name: &'static str,
    needs: &'static [Requirement],
    run: fn(&mut DeviceTestRig),
) -> ConformanceCase {
    ConformanceCase { name, needs, run }
}

/// All cases.
pub const CASES: &[ConformanceCase] = &[
    new_conformance_case(
        "ranges::every_start_and_length",
        &[Requirement::Stores],
        ranges::every_start_and_length,
    ),
    new_conformance_case("ranges::beyond_the_end", &[], ranges::beyond_the_end),
    new_conformance_case("ranges::wrapping_range_is_refused", &[], ranges::wrapping_range_is_refused),
    new_conformance_case(
        "ranges::sector_offsets_have_64_bits",
        &[Requirement::Huge],
        ranges::sector_offsets_have_64_bits,
    ),
    new_conformance_case(
        "ranges::unaligned_request_is_refused",
        &[Requirement::LargeBlocks, Requirement::Checks],
        ranges::unaligned_request_is_refused,
    ),
    new_conformance_case(
        "ranges::empty_range_is_einval",
        &[Requirement::Checks],
        ranges::empty_range_is_einval,
    ),
    new_conformance_case("ranges::longest_request_is_served", &[], ranges::longest_request_is_served),
    new_conformance_case(
        "data::data_is_read_where_written",
        &[Requirement::Stores],
        data::data_is_read_where_written,
    ),
    new_conformance_case("data::odd_data_pieces_are_served", &[], data::odd_data_pieces_are_served),
    new_conformance_case(
        "data::all_handles_see_writes",
        &[Requirement::Stores],
        data::all_handles_see_writes,
    ),
    new_conformance_case("data::unwritten_read_leaks_no_data", &[], data::unwritten_read_leaks_no_data),
    new_conformance_case(
        "data::random_requests_match_model",
        &[Requirement::Stores],
        data::random_requests_match_model,
    ),
    new_conformance_case(
        "flags::any_bio_flags_are_accepted",
        &[Requirement::Lanes],
        flags::any_bio_flags_are_accepted,
    ),
    new_conformance_case(
        "flags::clients_may_ask_for_fua",
        &[Requirement::Server, Requirement::Stores],
        flags::clients_may_ask_for_fua,
    ),
    new_conformance_case(
        "flags::flush_is_durable",
        &[Requirement::Stores, Requirement::Power],
        flags::flush_is_durable,
    ),
    new_conformance_case(
        "flags::flush_covers_other_handles",
        &[Requirement::Stores, Requirement::Power],
        flags::flush_covers_other_handles,
    ),
    new_conformance_case(
        "flags::fua_is_durable",
        &[Requirement::Stores, Requirement::Power],
        flags::fua_is_durable,
    ),
    new_conformance_case(
        "flags::preflush_is_durable",
        &[Requirement::Stores, Requirement::Power, Requirement::Lanes],
        flags::preflush_is_durable,
    ),
    new_conformance_case(
        "zeroes::write_zeroes_read_as_zeroes",
        &[Requirement::Stores, Requirement::Zeroes],
        zeroes::write_zeroes_read_as_zeroes,
    ),
    new_conformance_case(
        "zeroes::unsupported_write_zeroes_refused",
        &[Requirement::Stores, Requirement::NoZeroes],
        zeroes::unsupported_write_zeroes_refused,
    ),
    new_conformance_case(
        "discard::then_write_and_read",
        &[Requirement::Stores, Requirement::Discard],
        zeroes::discard_then_write,
    ),
    new_conformance_case(
        "discard::leaves_its_neighbours",
        &[Requirement::Stores, Requirement::Discard],
        zeroes::discard_odd_ends,
    ),
    new_conformance_case(
        "discard::without_the_ability",
        &[Requirement::NoDiscard],
        zeroes::unsupported_discard_refused,
    ),
    new_conformance_case(
        "errors::read_only_device_refuses_writes",
        &[Requirement::ReadOnly],
        errors::read_only_device_refuses_writes,
    ),
    new_conformance_case(
        "errors::bad_sector_fails_its_requests",
        &[Requirement::Stores, Requirement::Disks],
        errors::bad_sector_fails_its_requests,
    ),
    new_conformance_case(
        "errors::non_path_errors_pass_unchanged",
        &[Requirement::Stores, Requirement::Disks, Requirement::Lanes],
        errors::non_path_errors_pass_unchanged,
    ),
    new_conformance_case(
        "errors::path_errors_pass_unchanged",
        &[Requirement::Stores, Requirement::Disks, Requirement::Lanes, Requirement::NoPaths],
        errors::path_errors_pass_unchanged,
    ),
    new_conformance_case(
        "paths::path_failures_fail_no_request",
        &[Requirement::Stores, Requirement::Paths],
        paths::path_failures_fail_no_request,
    ),
    new_conformance_case(
        "paths::requests_fail_without_paths",
        &[Requirement::Stores, Requirement::Paths],
        paths::requests_fail_without_paths,
    ),
    new_conformance_case(
        "paths::requests_wait_for_path",
        &[Requirement::Stores, Requirement::Paths],
        paths::requests_wait_for_path,
    ),
    new_conformance_case("concurrency::many_in_flight", &[Requirement::Stores], concurrency::many_in_flight),
    new_conformance_case(
        "concurrency::overlapping_writes",
        &[Requirement::Stores],
        concurrency::overlapping_writes,
    ),
    new_conformance_case("concurrency::flushes_among_writes", &[], concurrency::flushes_among_writes),
    new_conformance_case("concurrency::one_large_batch", &[], concurrency::one_large_batch),
    new_conformance_case("life::idle_lane_requests_no_wakeup", &[], life::idle_lane_requests_no_wakeup),
    new_conformance_case("life::data_survives_reopen", &[], life::data_survives_reopen),
    new_conformance_case(
        "life::server_stop_answers_requests",
        &[Requirement::Server],
        life::server_stop_answers_requests,
    ),
    new_conformance_case(
        "life::disconnects_tear_no_write",
        &[Requirement::Server, Requirement::Stores],
        life::disconnects_tear_no_write,
    ),
    new_conformance_case("changes::suspend_under_load", &[Requirement::Mapped], changes::suspend_under_load),
    new_conformance_case("changes::reload_under_load", &[Requirement::Mapped], changes::reload_under_load),
    new_conformance_case(
        "changes::loaded_table_takes_effect",
        &[Requirement::Mapped],
        changes::loaded_table_takes_effect,
    ),
    new_conformance_case(
        "changes::suspended_requests_wait",
        &[Requirement::Mapped],
        changes::suspended_requests_wait,
    ),
    new_conformance_case(
        "changes::suspend_waits_for_the_disk",
        &[Requirement::Mapped, Requirement::Disks],
        changes::suspend_waits,
    ),
    new_conformance_case(
        "changes::suspend_can_be_cancelled",
        &[Requirement::Mapped, Requirement::Disks],
        changes::suspend_can_be_cancelled,
    ),
    new_conformance_case(
        "changes::in_any_order",
        &[Requirement::Mapped],
        random::random_changes_lose_no_request,
    ),
    new_conformance_case(
        "changes::closed_while_suspended",
        &[Requirement::Mapped, Requirement::Server],
        changes::closed_while_suspended,
    ),
];
