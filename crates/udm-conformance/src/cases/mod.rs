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
use crate::{CheckingLayer, InitialContent, TestRig, WorldKind};
use udm_core::Op;

/// A case: one rule.
pub struct ConformanceCase {
    /// The name, used in the names of tests.
    pub name: &'static str,
    /// The requirements on the device.
    pub needs: &'static [Requirement],
    /// Checks the rule.
    pub run: fn(&mut TestRig),
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
    /// The device is used by clients of an NBD server.
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
            Requirement::ReadOnly => (!writes, "it takes writes"),
            Requirement::Discard => (facts.can(Op::Discard), "it takes no discards"),
            Requirement::NoDiscard => (writes && !facts.can(Op::Discard), "it takes discards"),
            Requirement::Zeroes => (facts.can(Op::WriteZeroes), "it takes no write-zeroes"),
            Requirement::NoZeroes => (writes && !facts.can(Op::WriteZeroes), "it takes write-zeroes"),
            Requirement::LargeBlocks => (facts.block() > 1, "its blocks have 512 bytes"),
            Requirement::Huge => (facts.size() > 1 << 23, "it is small"),
            Requirement::Disks => (made.ground.has_disks(), "it is not over disks in memory"),
            Requirement::Power => (made.ground.has_power(), "its power can't be cut"),
            Requirement::Mapped => (made.mapped.is_some(), "it is not a mapped device"),
            Requirement::Lanes => (!kind.is_served(), "NBD cannot express it"),
            Requirement::Server => (kind.is_served(), "it is not served over NBD"),
            Requirement::Checks => {
                (facts.boundary != CheckingLayer::Backend || kind.is_served(), "the layer above checks")
            }
            Requirement::Paths => (made.ground.paths().len() > 1, "it has no paths to choose from"),
            Requirement::NoPaths => {
                let paths = made.mapped.as_ref().is_some_and(|device| {
                    let text = device.table_text(false);
                    text.contains("multipath") || text.contains("log-writes") || text.contains("dust")
                });
                (!paths, "it retries elsewhere")
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

const fn case(name: &'static str, needs: &'static [Requirement], run: fn(&mut TestRig)) -> ConformanceCase {
    ConformanceCase { name, needs, run }
}

/// All cases.
pub const CASES: &[ConformanceCase] = &[
    case("ranges::every_start_and_length", &[Requirement::Stores], ranges::every_start_and_length),
    case("ranges::beyond_the_end", &[], ranges::beyond_the_end),
    case("ranges::that_wrap", &[], ranges::that_wrap),
    case("ranges::far_out", &[Requirement::Huge], ranges::far_out),
    case("ranges::not_aligned", &[Requirement::LargeBlocks, Requirement::Checks], ranges::not_aligned),
    case("ranges::empty", &[Requirement::Checks], ranges::empty),
    case("ranges::longest", &[], ranges::longest),
    case("data::at_its_place", &[Requirement::Stores], data::at_its_place),
    case("data::in_pieces", &[], data::in_pieces),
    case("data::on_other_handles", &[Requirement::Stores], data::on_other_handles),
    case("data::of_nobody", &[], data::of_nobody),
    case("data::after_random_requests", &[Requirement::Stores], data::after_random_requests),
    case("flags::all_on_every_operation", &[Requirement::Lanes], flags::all_on_every_operation),
    case("flags::fua_over_the_wire", &[Requirement::Server, Requirement::Stores], flags::fua_over_the_wire),
    case("flags::flush_is_durable", &[Requirement::Stores, Requirement::Power], flags::flush_is_durable),
    case(
        "flags::flush_covers_other_handles",
        &[Requirement::Stores, Requirement::Power],
        flags::flush_covers_other_handles,
    ),
    case("flags::fua_is_durable", &[Requirement::Stores, Requirement::Power], flags::fua_is_durable),
    case(
        "flags::preflush_is_durable",
        &[Requirement::Stores, Requirement::Power, Requirement::Lanes],
        flags::preflush_is_durable,
    ),
    case("zeroes::read_as_zeroes", &[Requirement::Stores, Requirement::Zeroes], zeroes::read_as_zeroes),
    case(
        "zeroes::without_the_ability",
        &[Requirement::Stores, Requirement::NoZeroes],
        zeroes::without_the_ability,
    ),
    case(
        "discard::then_write_and_read",
        &[Requirement::Stores, Requirement::Discard],
        zeroes::discard_then_write,
    ),
    case(
        "discard::leaves_its_neighbours",
        &[Requirement::Stores, Requirement::Discard],
        zeroes::discard_odd_ends,
    ),
    case("discard::without_the_ability", &[Requirement::NoDiscard], zeroes::discard_without),
    case("errors::read_only", &[Requirement::ReadOnly], errors::read_only),
    case("errors::bad_sectors", &[Requirement::Stores, Requirement::Disks], errors::bad_sectors),
    case(
        "errors::go_up_as_they_are",
        &[Requirement::Stores, Requirement::Disks, Requirement::Lanes],
        errors::go_up_as_they_are,
    ),
    case(
        "errors::of_a_path",
        &[Requirement::Stores, Requirement::Disks, Requirement::Lanes, Requirement::NoPaths],
        errors::of_a_path,
    ),
    case(
        "paths::one_fails_after_the_other",
        &[Requirement::Stores, Requirement::Paths],
        paths::one_fails_after_the_other,
    ),
    case("paths::all_fail", &[Requirement::Stores, Requirement::Paths], paths::all_fail),
    case(
        "paths::requests_wait_for_one",
        &[Requirement::Stores, Requirement::Paths],
        paths::requests_wait_for_one,
    ),
    case("concurrency::many_in_flight", &[Requirement::Stores], concurrency::many_in_flight),
    case("concurrency::overlapping_writes", &[Requirement::Stores], concurrency::overlapping_writes),
    case("concurrency::flushes_among_writes", &[], concurrency::flushes_among_writes),
    case("concurrency::one_large_batch", &[], concurrency::one_large_batch),
    case("life::at_rest", &[], life::at_rest),
    case("life::closed_and_opened", &[], life::closed_and_opened),
    case("life::ends_under_load", &[Requirement::Server], life::ends_under_load),
    case("life::clients_vanish", &[Requirement::Server, Requirement::Stores], life::clients_vanish),
    case("changes::suspend_under_load", &[Requirement::Mapped], changes::suspend_under_load),
    case("changes::reload_under_load", &[Requirement::Mapped], changes::reload_under_load),
    case("changes::another_table", &[Requirement::Mapped], changes::another_table),
    case("changes::suspended_requests_wait", &[Requirement::Mapped], changes::suspended_requests_wait),
    case(
        "changes::suspend_waits_for_the_disk",
        &[Requirement::Mapped, Requirement::Disks],
        changes::suspend_waits,
    ),
    case("changes::called_off", &[Requirement::Mapped, Requirement::Disks], changes::called_off),
    case("changes::in_any_order", &[Requirement::Mapped], random::in_any_order),
    case(
        "changes::closed_while_suspended",
        &[Requirement::Mapped, Requirement::Server],
        changes::closed_while_suspended,
    ),
];
