//! `queue-length`: the path with the fewest bios in flight.

use super::load::{LoadLane, Loaded, Loads, Rule, Slot};
use super::{ArgFault, Selector, SelectorLane, SelectorType};
use std::sync::Arc;
use udm_core::{Bio, CoreId, Sectors};

pub(super) const TYPE: SelectorType =
    SelectorType { name: "queue-length", new: |_| Ok(Box::<QueueLength>::default()) };

#[derive(Default)]
pub(in crate::multipath) struct QueueLength {
    repeat_counts: Vec<u32>,
    loads: Loads,
}

impl Selector for QueueLength {
    fn name(&self) -> &'static str {
        TYPE.name
    }

    fn add_path(&mut self, args: &[String], _cores: usize) -> Result<(), ArgFault> {
        self.repeat_counts.push(match args {
            [] => 1,
            [word] => super::repeat_count(TYPE.name, word)?,
            _ => return Err(ArgFault { text: "incorrect number of arguments", arg: 1 }),
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
        SelectorLane::QueueLength(LoadLane::new(self))
    }
}

impl Loaded for QueueLength {
    type Rule = QueueLength;

    fn loads(&self) -> &Loads {
        &self.loads
    }

    fn throughput(&self, _path: usize) -> u32 {
        1
    }
}

impl Rule for QueueLength {
    fn weight(_bio: &Bio) -> u64 {
        1
    }

    fn total(bios: usize, _sectors: Sectors) -> u64 {
        bios as u64
    }

    fn better(a: &Slot, b: &Slot, _n: u64) -> bool {
        a.load_then_age() < b.load_then_age()
    }
}
