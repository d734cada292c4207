//! The group that a lane uses, and the usable paths as this lane knows them.
//!
//! A lane refreshes its view only if the shared word differs from the last one it saw. If the
//! generation changed, the lane updates its selectors, in the order in which paths were reinstated.
//! Then it chooses a group and publishes the choice in the shared word. If the word changed in
//! between, the choice was based on old state, and the lane starts again.

use super::selector::SelectorLane;
use super::state::{
    MultipathState, PackedMultipathState, PathStateSnapshot, PriorityGroupUsability, choose_group,
};
use std::ops::Range;
use udm_core::{Bio, Cx, Sectors};

/// The index for "no group".
const NO_GROUP: usize = usize::MAX;

/// A group on this core.
pub(super) struct GroupLane {
    /// Indexes of the group's paths in the device.
    pub(super) paths: Range<usize>,
    pub(super) selector: SelectorLane,
}

/// The state of a path as this lane last saw it.
#[derive(Clone, Copy)]
struct LastSeenPathState {
    usable: bool,
    stamp: u64,
}

/// A lane's groups, and its view of the shared state.
pub(super) struct LanePriorityGroups {
    seen: PackedMultipathState,
    /// The group in use; [`NO_GROUP`] for none.
    group: usize,
    groups: Vec<GroupLane>,
    views: Vec<PriorityGroupUsability>,
    known: Vec<LastSeenPathState>,
    /// Scratch: the paths of a group.
    now: Vec<PathStateSnapshot>,
    /// Scratch: sequence number of the reinstatement, group, path.
    returned: Vec<(u64, usize, usize)>,
    /// This lane failed a path and has not raised the event counter yet.
    pub(super) path_failed: bool,
}

impl LanePriorityGroups {
    /// The router of a new lane: all paths are usable, as in a table just loaded.
    pub(super) fn new(
        shared: &MultipathState,
        groups: impl Iterator<Item = (usize, SelectorLane)>,
    ) -> LanePriorityGroups {
        let mut start = 0;
        let groups: Vec<_> = groups
            .map(|(count, selector)| {
                let paths = start..start + count;
                start = paths.end;
                GroupLane { paths, selector }
            })
            .collect();
        debug_assert_eq!((groups.len(), start), (shared.group_count(), shared.path_count()));
        LanePriorityGroups {
            seen: shared.word().unseen(),
            group: NO_GROUP,
            views: groups
                .iter()
                .map(|g| PriorityGroupUsability { usable: g.paths.len(), bypassed: false })
                .collect(),
            known: vec![LastSeenPathState { usable: true, stamp: 0 }; start],
            now: Vec::new(),
            returned: Vec::with_capacity(start),
            groups,
            path_failed: false,
        }
    }

    /// For each path, its group and its position in the group.
    pub(super) fn path_positions(&self) -> Vec<(u32, u32)> {
        let path_positions = |(g, group): (usize, &GroupLane)| {
            (0..group.paths.len()).map(move |place| (g as u32, place as u32)).collect::<Vec<_>>()
        };
        self.groups.iter().enumerate().flat_map(path_positions).collect()
    }

    /// The word of the last [`LanePriorityGroups::look`].
    pub(super) fn seen(&self) -> PackedMultipathState {
        self.seen
    }

    /// The group in use as of the last [`LanePriorityGroups::look`]; `None` if no path is usable.
    pub(super) fn group(&mut self) -> Option<&mut GroupLane> {
        self.groups.get_mut(self.group)
    }

    /// Reports a poll of path `place` of `group` to its selector: `back` completed, with `sectors`
    /// in total.
    #[inline(always)]
    pub(super) fn polled(
        &mut self,
        (group, place): (u32, u32),
        back: &[Box<Bio>],
        sectors: Sectors,
        cx: &Cx<'_>,
    ) {
        self.groups[group as usize].selector.polled(place as usize, back, sectors, cx);
    }

    /// Updates the lane's view of the paths and chooses the group.
    #[cold]
    pub(super) fn look(&mut self, shared: &MultipathState) {
        loop {
            let word = shared.word();
            if word.generation() != self.seen.generation() {
                self.refresh(shared);
            }
            let (settled, group) = choose_group(word, &self.views);
            if shared.commit(word, settled) {
                self.seen = settled;
                self.group = group.unwrap_or(NO_GROUP);
                return;
            }
            // The paths are known as of this word. The next round refreshes them only if its
            // generation differs.
            self.seen = word;
        }
    }

    /// Passes changes of paths to the selectors. A path that failed and returned between two calls
    /// loses its position in the selector's order, as if the lane had seen the failure.
    fn refresh(&mut self, shared: &MultipathState) {
        for (g, group) in self.groups.iter_mut().enumerate() {
            self.views[g].bypassed = shared.is_bypassed(g);
            // Each path is read once. An ejected path is used if the group has no other.
            self.now.clear();
            self.now.extend(group.paths.clone().map(|index| shared.path(index)));
            let choice = self.now.iter().any(|path| path.is_in_use());
            for (index, now) in group.paths.clone().zip(&self.now) {
                let slow = now.ejected && choice;
                let (out, known) = (now.failed || slow, &mut self.known[index]);
                if known.usable && (out || now.stamp != known.stamp) {
                    group.selector.fail(index - group.paths.start);
                    self.views[g].usable -= 1;
                    known.usable = false;
                }
                if !out && !known.usable {
                    self.returned.push((now.stamp, g, index));
                }
                known.stamp = now.stamp;
            }
        }
        self.returned.sort_unstable();
        for (_, g, index) in self.returned.drain(..) {
            let group = &mut self.groups[g];
            group.selector.reinstate(index - group.paths.start);
            self.views[g].usable += 1;
            self.known[index].usable = true;
        }
    }
}
