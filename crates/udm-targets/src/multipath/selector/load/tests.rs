//! A batch gets the same choices as its bios one by one.

use super::super::{
    SharedPathSelector, queue_length::QueueLength, record_path_choices, service_time::ServiceTime,
};
use super::*;
use proptest::prelude::*;
use udm_core::{Batch, Sector};

fn selector<S: SharedPathSelector + Default>(args: &[String]) -> Arc<S> {
    let mut selector = S::default();
    for arg in args {
        let args: Vec<String> = arg.split_whitespace().map(String::from).collect();
        assert!(selector.add_path(&args, 1).is_ok());
    }
    Arc::new(selector)
}

fn bios(sectors: &[u64]) -> Batch {
    sectors.iter().map(|&n| Bio::read(Sector(0), Sectors(n), Default::default())).collect()
}

/// One lane gets batches of bios with these lengths as a whole, another lane the same bios one by
/// one. Between batches the bios of a path complete, and paths fail and return.
fn same<S: LoadBasedSelector>(selector: &Arc<S>, batches: &[Vec<u64>], changes: &[usize]) {
    let mut lanes = [(); 2].map(|()| LoadBasedSelectorLane::new(Arc::clone(selector)));
    let paths = lanes[0].slots.len();
    for (batch, change) in batches.iter().zip(changes.iter().cycle()) {
        let mut bios = bios(batch);
        let one_by_one: Vec<usize> = bios.iter_mut().map(|bio| lanes[1].choose(bio)).collect();
        let chosen: Vec<usize> =
            record_path_choices(&mut lanes[0], bios).into_iter().map(|(path, _)| path).collect();
        assert_eq!(chosen, one_by_one);
        let path = change % paths;
        // The bios of one path complete, or those of all.
        let come_back = if change / paths % 4 == 3 { 0..paths } else { path..path + 1 };
        for lane in &mut lanes {
            for path in come_back.clone() {
                let back: Vec<_> = batch.iter().zip(&chosen).filter(|(_, to)| **to == path).collect();
                lane.came_back(path, back.len(), Sectors(back.iter().map(|(sectors, _)| **sectors).sum()));
            }
            let usable = lane.usable().count();
            match (change / paths % 4, lane.slots[path].unusable_bit) {
                (1, 0) if usable > 1 => lane.fail(path),
                (2, PathLoad::UNUSABLE) => lane.reinstate(path),
                _ => {}
            }
        }
    }
}

fn batches() -> impl Strategy<Value = Vec<Vec<u64>>> {
    let equal = (0..3u64, 1..40usize).prop_map(|(sectors, count)| vec![sectors * 8; count]);
    let mixed = prop::collection::vec(0..64u64, 1..40);
    prop::collection::vec(prop_oneof![equal, mixed], 1..12)
}

proptest! {
    #[test]
    fn a_batch_is_no_different(
        batches in batches(),
        changes in prop::collection::vec(any::<usize>(), 1..12),
        throughputs in prop::collection::vec(0..4u32, 1..6),
        even: bool,
    ) {
        let arg = |t: &u32| if even { "1 1".to_string() } else { format!("1 {t}") };
        let args: Vec<String> = throughputs.iter().map(arg).collect();
        same(&selector::<ServiceTime>(&args), &batches, &changes);
        let args = vec![String::new(); throughputs.len()];
        same(&selector::<QueueLength>(&args), &batches, &changes);
    }
}

/// Paths with the same load take turns until a bio of another weight comes.
#[test]
fn a_ring_begins_and_ends() {
    let selector = selector::<ServiceTime>(&[String::new(), String::new(), String::new()]);
    let mut lane = LoadBasedSelectorLane::new(Arc::clone(&selector));
    let rings = [(vec![8; 4], true), (vec![8; 6], true), (vec![16, 8], false), (vec![8; 3], true)].map(
        |(batch, want)| {
            let paths: Vec<_> = record_path_choices(&mut lane, bios(&batch))
                .into_iter()
                .map(|(path, bio)| (path, bio.sectors))
                .collect();
            for (path, sectors) in paths {
                lane.came_back(path, 1, sectors);
            }
            (lane.is_rotating, want)
        },
    );
    assert!(rings.iter().all(|(is_rotating, want)| is_rotating == want), "{rings:?}");
}
