//! `round-robin`: each path in turn, whatever its load.
//!
//! A reinstated path goes to the front of the order and gets the next bio. Cores share nothing:
//! each core rotates on its own, from a start that depends on the core. So on c cores the numbers
//! of bios of two paths differ by at most c.

use super::rotation::PathRotation;
use super::{
    BatchPathDispatch, PathArgError, PathSelectorLaneOps, SelectorLane, SelectorType, SharedPathSelector,
};
use std::sync::Arc;
use udm_core::{Bio, CoreId};

pub(super) const TYPE: SelectorType =
    SelectorType { name: "round-robin", new: |_| Ok(Box::<RoundRobin>::default()) };

#[derive(Default)]
struct RoundRobin {
    repeat_counts: Vec<u32>,
}

impl SharedPathSelector for RoundRobin {
    fn name(&self) -> &'static str {
        TYPE.name
    }

    fn add_path(&mut self, args: &[String], _cores: usize) -> Result<(), PathArgError> {
        self.repeat_counts.push(match args {
            [] => 1,
            [word] => super::parse_repeat_count(TYPE.name, word)?,
            _ => return Err(PathArgError { text: "incorrect number of arguments", arg: 1 }),
        });
        Ok(())
    }

    fn path_arg_count(&self) -> usize {
        1
    }

    fn path_args(&self, path: usize) -> String {
        self.repeat_counts[path].to_string()
    }

    fn lane(self: Arc<Self>, core: CoreId) -> SelectorLane {
        SelectorLane::by_turns(self.repeat_counts.len(), core)
    }
}

/// The usable paths.
pub(in crate::multipath) struct RoundRobinLane(PathRotation);

impl SelectorLane {
    /// A round-robin lane over `paths` paths, with a start that depends on the core.
    pub(in crate::multipath) fn by_turns(paths: usize, core: CoreId) -> SelectorLane {
        SelectorLane::RoundRobin(RoundRobinLane(PathRotation::new(0..paths as u32, core.index() % paths)))
    }
}

impl PathSelectorLaneOps for RoundRobinLane {
    fn fail(&mut self, path: usize) {
        self.0.rotate_to_front().retain(|&p| p as usize != path);
    }

    fn reinstate(&mut self, path: usize) {
        self.0.rotate_to_front().insert(0, path as u32);
    }

    #[inline]
    fn choose(&mut self, _bio: &mut Bio) -> usize {
        self.0.next()
    }

    #[inline]
    fn choose_all(&mut self, mut bios: impl BatchPathDispatch) {
        let _ = self.0.deal(&mut bios, |_| true);
    }
}
