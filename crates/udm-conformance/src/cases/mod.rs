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

use crate::subjects::Made;
use crate::{Boundary, Fresh, Kind, Rig};
use udm_core::Op;

/// A rule.
pub struct Case {
    /// Its name in the names of tests.
    pub name: &'static str,
    /// What it needs of the subject.
    pub needs: &'static [Need],
    /// Checks it.
    pub run: fn(&mut Rig),
}

/// What a case may need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// What is written can be read.
    Stores,
    /// It takes no writes.
    ReadOnly,
    /// It takes discards.
    Discard,
    /// It takes writes and no discards.
    NoDiscard,
    /// It takes write-zeroes.
    Zeroes,
    /// It takes writes and no write-zeroes.
    NoZeroes,
    /// Blocks above 512 bytes.
    LargeBlocks,
    /// More than 2^32 bytes.
    Huge,
    /// Below are disks that fail and wait on demand.
    Disks,
    /// The power of what is below can be cut.
    Power,
    /// It is a mapped device.
    Mapped,
    /// It is used by its lanes, where every flag of a bio can be said.
    Lanes,
    /// It is an NBD server.
    Server,
    /// Who stands in front checks what comes in.
    Checks,
    /// It chooses among paths to one disk in memory.
    Paths,
    /// A path error is not tried again elsewhere, and nothing of its own is below it.
    NoPaths,
}

impl Need {
    /// Why `made` has not got it in a world of `kind`; `None` when it has.
    #[must_use]
    pub fn missing(self, made: &Made, kind: Kind) -> Option<&'static str> {
        let facts = &made.facts;
        let writes = !facts.limits.read_only;
        let (has, why) = match self {
            Need::Stores => (facts.fresh == Fresh::Zeroes && writes, "it keeps nothing"),
            Need::ReadOnly => (!writes, "it takes writes"),
            Need::Discard => (facts.can(Op::Discard), "it takes no discards"),
            Need::NoDiscard => (writes && !facts.can(Op::Discard), "it takes discards"),
            Need::Zeroes => (facts.can(Op::WriteZeroes), "it takes no write-zeroes"),
            Need::NoZeroes => (writes && !facts.can(Op::WriteZeroes), "it takes write-zeroes"),
            Need::LargeBlocks => (facts.block() > 1, "its blocks are sectors"),
            Need::Huge => (facts.size() > 1 << 23, "it is small"),
            Need::Disks => (made.ground.has_disks(), "it is not over disks in memory"),
            Need::Power => (made.ground.has_power(), "its power can't be cut"),
            Need::Mapped => (made.mapped.is_some(), "it is no mapped device"),
            Need::Lanes => (!kind.is_served(), "NBD has no word for it"),
            Need::Server => (kind.is_served(), "it is no server"),
            Need::Checks => {
                (facts.boundary != Boundary::Backend || kind.is_served(), "the layer above checks")
            }
            Need::Paths => (made.ground.paths().len() > 1, "it has no paths to choose from"),
            Need::NoPaths => {
                let paths = made.mapped.as_ref().is_some_and(|device| {
                    let text = device.table_text(false);
                    text.contains("multipath") || text.contains("log-writes") || text.contains("dust")
                });
                (!paths, "it tries elsewhere")
            }
        };
        (!has).then_some(why)
    }
}

impl Case {
    /// Why it does not apply to `made` in a world of `kind`; `None` when it does.
    #[must_use]
    pub fn missing(&self, made: &Made, kind: Kind) -> Option<&'static str> {
        self.needs.iter().find_map(|need| need.missing(made, kind))
    }
}

const fn case(name: &'static str, needs: &'static [Need], run: fn(&mut Rig)) -> Case {
    Case { name, needs, run }
}

/// All cases.
pub const CASES: &[Case] = &[
    case("ranges::every_start_and_length", &[Need::Stores], ranges::every_start_and_length),
    case("ranges::beyond_the_end", &[], ranges::beyond_the_end),
    case("ranges::that_wrap", &[], ranges::that_wrap),
    case("ranges::far_out", &[Need::Huge], ranges::far_out),
    case("ranges::not_aligned", &[Need::LargeBlocks, Need::Checks], ranges::not_aligned),
    case("ranges::empty", &[Need::Checks], ranges::empty),
    case("ranges::longest", &[], ranges::longest),
    case("data::at_its_place", &[Need::Stores], data::at_its_place),
    case("data::in_pieces", &[], data::in_pieces),
    case("data::on_other_handles", &[Need::Stores], data::on_other_handles),
    case("data::of_nobody", &[], data::of_nobody),
    case("data::after_random_requests", &[Need::Stores], data::after_random_requests),
    case("flags::all_on_every_operation", &[Need::Lanes], flags::all_on_every_operation),
    case("flags::fua_over_the_wire", &[Need::Server, Need::Stores], flags::fua_over_the_wire),
    case("flags::flush_is_durable", &[Need::Stores, Need::Power], flags::flush_is_durable),
    case(
        "flags::flush_covers_other_handles",
        &[Need::Stores, Need::Power],
        flags::flush_covers_other_handles,
    ),
    case("flags::fua_is_durable", &[Need::Stores, Need::Power], flags::fua_is_durable),
    case("flags::preflush_is_durable", &[Need::Stores, Need::Power, Need::Lanes], flags::preflush_is_durable),
    case("zeroes::read_as_zeroes", &[Need::Stores, Need::Zeroes], zeroes::read_as_zeroes),
    case("zeroes::without_the_ability", &[Need::Stores, Need::NoZeroes], zeroes::without_the_ability),
    case("discard::then_write_and_read", &[Need::Stores, Need::Discard], zeroes::discard_then_write),
    case("discard::leaves_its_neighbours", &[Need::Stores, Need::Discard], zeroes::discard_odd_ends),
    case("discard::without_the_ability", &[Need::NoDiscard], zeroes::discard_without),
    case("errors::read_only", &[Need::ReadOnly], errors::read_only),
    case("errors::bad_sectors", &[Need::Stores, Need::Disks], errors::bad_sectors),
    case("errors::go_up_as_they_are", &[Need::Stores, Need::Disks, Need::Lanes], errors::go_up_as_they_are),
    case("errors::of_a_path", &[Need::Stores, Need::Disks, Need::Lanes, Need::NoPaths], errors::of_a_path),
    case("paths::one_fails_after_the_other", &[Need::Stores, Need::Paths], paths::one_fails_after_the_other),
    case("paths::all_fail", &[Need::Stores, Need::Paths], paths::all_fail),
    case("paths::requests_wait_for_one", &[Need::Stores, Need::Paths], paths::requests_wait_for_one),
    case("concurrency::many_in_flight", &[Need::Stores], concurrency::many_in_flight),
    case("concurrency::overlapping_writes", &[Need::Stores], concurrency::overlapping_writes),
    case("concurrency::flushes_among_writes", &[], concurrency::flushes_among_writes),
    case("concurrency::one_large_batch", &[], concurrency::one_large_batch),
    case("life::at_rest", &[], life::at_rest),
    case("life::closed_and_opened", &[], life::closed_and_opened),
    case("life::ends_under_load", &[Need::Server], life::ends_under_load),
    case("life::clients_vanish", &[Need::Server, Need::Stores], life::clients_vanish),
    case("changes::suspend_under_load", &[Need::Mapped], changes::suspend_under_load),
    case("changes::reload_under_load", &[Need::Mapped], changes::reload_under_load),
    case("changes::another_table", &[Need::Mapped], changes::another_table),
    case("changes::suspended_requests_wait", &[Need::Mapped], changes::suspended_requests_wait),
    case("changes::suspend_waits_for_the_disk", &[Need::Mapped, Need::Disks], changes::suspend_waits),
    case("changes::called_off", &[Need::Mapped, Need::Disks], changes::called_off),
    case("changes::in_any_order", &[Need::Mapped], random::in_any_order),
    case("changes::closed_while_suspended", &[Need::Mapped, Need::Server], changes::closed_while_suspended),
];
