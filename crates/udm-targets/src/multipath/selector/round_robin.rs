//! `round-robin`: each path in turn, whatever its load.
//!
//! A path that is reinstated goes to the front of the order: the very next bio is its. Nothing is shared: each core rotates on its own,
//! from a start that differs by core. Over any number of bios on c cores the numbers of bios of two paths differ by at most c.

use super::{ArgFault, Selector, SelectorLane, SelectorType};
use std::sync::Arc;
use udm_core::{Batch, CoreId, Nanos};

pub(super) const TYPE: SelectorType =
    SelectorType { name: "round-robin", new: |_| Some(Box::<RoundRobin>::default()) };

#[derive(Default)]
struct RoundRobin {
    repeat_counts: Vec<u32>,
}

impl Selector for RoundRobin {
    fn name(&self) -> &'static str {
        TYPE.name
    }

    fn add_path(&mut self, args: &[String], _cores: usize) -> Result<(), ArgFault> {
        self.repeat_counts.push(match args {
            [] => 1,
            [word] => super::repeat_count(TYPE.name, word)?,
            _ => return Err(ArgFault { text: "incorrect number of arguments", arg: 1 }),
        });
        Ok(())
    }

    fn path_arg_count(&self) -> usize {
        1
    }

    fn path_args(&self, path: usize) -> String {
        self.repeat_counts[path].to_string()
    }

    fn lane(self: Arc<Self>, core: CoreId) -> Box<dyn SelectorLane> {
        let paths = self.repeat_counts.len();
        let order = (0..paths as u32).collect();
        Box::new(Lane { order, head: core.index() % paths })
    }
}

/// The order of the usable paths is a ring that starts at `head`.
struct Lane {
    order: Vec<u32>,
    head: usize,
}

impl Lane {
    /// Turns the ring so that it starts at the front of the vector.
    fn straighten(&mut self) {
        self.order.rotate_left(self.head);
        self.head = 0;
    }
}

impl SelectorLane for Lane {
    fn fail(&mut self, path: usize) {
        self.straighten();
        self.order.retain(|&p| p as usize != path);
    }

    fn reinstate(&mut self, path: usize) {
        self.straighten();
        self.order.insert(0, path as u32);
    }

    fn select(&mut self, batch: &mut Batch, outs: &mut [Batch], chosen: &mut Vec<u32>, _now: Nanos) {
        if let [only] = self.order[..] {
            outs[only as usize].append(batch);
            chosen.push(only);
            return;
        }
        let (before, from_head) = self.order.split_at(self.head);
        chosen.extend(from_head.iter().chain(before).take(batch.len()));
        let (order, mut head) = (&self.order[..], self.head);
        for bio in batch.drain(..) {
            outs[order[head] as usize].push(bio);
            head = if head + 1 == order.len() { 0 } else { head + 1 };
        }
        self.head = head;
    }
}
