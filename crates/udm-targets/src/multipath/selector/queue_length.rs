//! `queue-length`: the path with the fewest bios in flight.

use super::load::{LoadBasedSelector, LoadBasedSelectorLane, PathLoad, PathLoadComparison, SharedPathLoads};
use super::{PathArgError, SelectorLane, SelectorType, SharedPathSelector};
use std::sync::Arc;
use udm_core::{Bio, CoreId, Sectors};

pub(super) const TYPE: SelectorType =
    SelectorType { name: "queue-length", new: |_| Ok(Box::<QueueLength>::default()) };

#[derive(Default)]
pub(in crate::multipath) struct QueueLength {
    repeat_counts: Vec<u32>,
    loads: SharedPathLoads,
}

impl SharedPathSelector for QueueLength {
    fn name(&self) -> &'static str {
        TYPE.name
    }

    fn add_path(&mut self, args: &[String], _cores: usize) -> Result<(), PathArgError> {
        self.repeat_counts.push(match args {
            [] => 1,
            [word] => super::parse_repeat_count(TYPE.name, word)?,
            _ => return Err(PathArgError { text: "incorrect number of arguments", arg: 1 }),
        });
        self.loads.add_path();
        Ok(())
    }

    fn path_arg_count(&self) -> usize {
        1
    }

    fn path_args(&self, path: usize) -> String {
        self.repeat_counts[path].to_string()
    }

    fn path_info_count(&self) -> usize {
        1
    }

    fn path_info(&self, path: usize) -> String {
        self.loads.get(path).to_string()
    }

    fn lane(self: Arc<Self>, _core: CoreId) -> SelectorLane {
        SelectorLane::QueueLength(LoadBasedSelectorLane::new(self))
    }
}

impl LoadBasedSelector for QueueLength {
    type LoadRule = QueueLength;

    fn loads(&self) -> &SharedPathLoads {
        &self.loads
    }

    fn throughput(&self, _path: usize) -> u32 {
        1
    }
}

impl PathLoadComparison for QueueLength {
    fn weight(_bio: &Bio) -> u64 {
        1
    }

    fn total(bios: usize, _sectors: Sectors) -> u64 {
        bios as u64
    }

    fn better(a: &PathLoad, b: &PathLoad, _n: u64) -> bool {
        a.load_then_age() < b.load_then_age()
    }
}
