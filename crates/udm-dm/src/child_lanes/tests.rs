//! Legs keep their counts right with any number of legs and any order of completions.

use super::*;
use proptest::prelude::*;
use std::cell::RefCell;
use std::rc::Rc;
use udm_core::{CoreId, CoreState, Nanos};

/// How often each leg was polled, and how many bios each leg gives back per poll.
#[derive(Default)]
struct PollCounts {
    polls: Vec<usize>,
    room: Vec<usize>,
}

struct SlowLane {
    index: usize,
    held: Batch,
    seen: Rc<RefCell<PollCounts>>,
}

impl Lane for SlowLane {
    fn submit(&mut self, batch: &mut Batch, _: &mut Cx<'_>) {
        self.held.append(batch);
    }

    fn poll(&mut self, done: &mut Batch, _: &mut Cx<'_>) {
        let mut seen = self.seen.borrow_mut();
        seen.polls[self.index] += 1;
        let count = seen.room[self.index].min(self.held.len());
        done.extend(self.held.drain(..count));
    }
}

fn legs(count: usize) -> (ChildLanes, Rc<RefCell<PollCounts>>) {
    let seen = Rc::new(RefCell::new(PollCounts { polls: vec![0; count], room: vec![0; count] }));
    let lane =
        |index| Box::new(SlowLane { index, held: Batch::new(), seen: Rc::clone(&seen) }) as Box<dyn Lane>;
    (ChildLanes::new((0..count).map(lane)), seen)
}

/// Polls once, with separate batches if `apart`. Returns the number of bios that came back from
/// each leg.
fn poll(legs: &mut ChildLanes, apart: bool, cx: &mut Cx<'_>) -> Vec<usize> {
    let (mut back, mut done) = (vec![0; legs.len()], Batch::new());
    if apart && let Some(polled) = legs.poll_separately(cx) {
        for leg in (0..legs.len()).filter(|leg| polled >> leg & 1 == 1) {
            back[leg] = legs.back(leg).len();
            done.append(legs.back(leg));
            assert_eq!(legs.taken(leg, back[leg]), legs.in_flight_on(leg));
        }
        let came_back = !done.is_empty();
        legs.finish_separate_poll(polled, came_back, &mut done, cx);
        return back;
    }
    if let Some(PolledChild { leg, from, .. }) = legs.poll_busy(&mut done, cx) {
        back[leg] = done.len() - from;
        return back;
    }
    let mut round = legs.poll();
    while let Some(PolledChild { leg, from, .. }) = legs.poll_next(&mut round, &mut done, cx) {
        back[leg] += done.len() - from;
    }
    legs.poll_idle(&round, &mut done, cx);
    back
}

proptest! {
    /// Each leg gives back the bios that it got. A leg with bios in flight is polled once per poll.
    /// All legs are polled if nothing came back.
    #[test]
    fn what_is_given_comes_back(
        count in prop_oneof![1..6usize, 60..70usize, 120..200usize],
        turns in prop::collection::vec(prop::collection::vec((any::<usize>(), 0..3usize), 0..6), 1..20),
        apart: bool,
    ) {
        let (mut legs, seen) = legs(count);
        let mut core = CoreState::new(CoreId(0), 1, 1, None);
        let mut in_flight = vec![0; count];
        for turn in turns {
            let mut cx = core.cx(Nanos(1));
            for (leg, bios) in turn {
                (0..bios).for_each(|_| legs.push(leg % count, Bio::new()));
                in_flight[leg % count] += bios;
                seen.borrow_mut().room[leg % count] = bios;
            }
            legs.send(&mut cx);
            let before = seen.borrow().polls.clone();
            let back = poll(&mut legs, apart, &mut cx);
            let none = back.iter().all(|&bios| bios == 0);
            for leg in 0..count {
                let polled = seen.borrow().polls[leg] - before[leg];
                prop_assert_eq!(polled, usize::from(in_flight[leg] > 0 || none), "leg {}", leg);
                prop_assert_eq!(back[leg], in_flight[leg].min(seen.borrow().room[leg]));
                in_flight[leg] -= back[leg];
            }
            prop_assert_eq!(legs.is_empty(), in_flight.iter().all(|&bios| bios == 0));
        }
    }
}

#[test]
fn idle_legs_have_a_turn_now_and_then() {
    for count in [2, 64, 65, 129] {
        let (mut legs, seen) = legs(count);
        let mut core = CoreState::new(CoreId(0), 1, 1, None);
        seen.borrow_mut().room[count - 1] = 1;
        for _ in 0..IDLE_EVERY {
            let mut cx = core.cx(Nanos(1));
            legs.submit(count - 1, &mut vec![Bio::new()], &mut cx);
            assert_eq!(poll(&mut legs, false, &mut cx)[count - 1], 1);
        }
        assert_eq!(seen.borrow().polls[0], 1, "of {count}");
    }
}
