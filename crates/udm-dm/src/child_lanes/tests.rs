//! Children keep their counts right with any number of children and any order of completions.

use super::*;
use proptest::prelude::*;
use std::cell::RefCell;
use std::rc::Rc;
use udm_core::{CoreId, CoreLaneState, Nanos};

/// How often each child was polled, and how many bios each child gives back per poll.
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

fn children(count: usize) -> (ChildLanes, Rc<RefCell<PollCounts>>) {
    let seen = Rc::new(RefCell::new(PollCounts { polls: vec![0; count], room: vec![0; count] }));
    let lane =
        |index| Box::new(SlowLane { index, held: Batch::new(), seen: Rc::clone(&seen) }) as Box<dyn Lane>;
    (ChildLanes::new((0..count).map(lane)), seen)
}

/// Polls once, with separate batches if `apart`. Returns the number of bios that came back from
/// each child.
fn poll(children: &mut ChildLanes, apart: bool, cx: &mut Cx<'_>) -> Vec<usize> {
    let (mut back, mut done) = (vec![0; children.len()], Batch::new());
    if apart && let Some(polled) = children.poll_separately(cx) {
        for child in (0..children.len()).filter(|child| polled >> child & 1 == 1) {
            back[child] = children.completions(child).len();
            done.append(children.completions(child));
            assert_eq!(children.taken(child, back[child]), children.in_flight_on(child));
        }
        let came_back = !done.is_empty();
        children.finish_separate_poll(polled, came_back, &mut done, cx);
        return back;
    }
    if let Some(ChildPollResult { child, from, .. }) = children.poll_busy(&mut done, cx) {
        back[child] = done.len() - from;
        return back;
    }
    let mut round = children.poll();
    while let Some(ChildPollResult { child, from, .. }) = children.poll_next(&mut round, &mut done, cx) {
        back[child] += done.len() - from;
    }
    children.poll_idle(&round, &mut done, cx);
    back
}

proptest! {
    /// Each child gives back the bios that it got. A child with bios in flight is polled once per
    /// poll. All children are polled if nothing came back.
    #[test]
    fn what_is_given_comes_back(
        count in prop_oneof![1..6usize, 60..70usize, 120..200usize],
        turns in prop::collection::vec(prop::collection::vec((any::<usize>(), 0..3usize), 0..6), 1..20),
        apart: bool,
    ) {
        let (mut children, seen) = children(count);
        let mut core = CoreLaneState::new(CoreId(0), 1, 1, None);
        let mut in_flight = vec![0; count];
        for turn in turns {
            let mut cx = core.cx(Nanos(1));
            for (child, bios) in turn {
                (0..bios).for_each(|_| children.push(child % count, Bio::new()));
                in_flight[child % count] += bios;
                seen.borrow_mut().room[child % count] = bios;
            }
            children.send(&mut cx);
            let before = seen.borrow().polls.clone();
            let back = poll(&mut children, apart, &mut cx);
            let none = back.iter().all(|&bios| bios == 0);
            for child in 0..count {
                let polled = seen.borrow().polls[child] - before[child];
                prop_assert_eq!(polled, usize::from(in_flight[child] > 0 || none), "child {}", child);
                prop_assert_eq!(back[child], in_flight[child].min(seen.borrow().room[child]));
                in_flight[child] -= back[child];
            }
            prop_assert_eq!(children.is_empty(), in_flight.iter().all(|&bios| bios == 0));
        }
    }
}

#[test]
fn idle_legs_have_a_turn_now_and_then() {
    for count in [2, 64, 65, 129] {
        let (mut children, seen) = children(count);
        let mut core = CoreLaneState::new(CoreId(0), 1, 1, None);
        seen.borrow_mut().room[count - 1] = 1;
        for _ in 0..IDLE_EVERY {
            let mut cx = core.cx(Nanos(1));
            children.submit(count - 1, &mut vec![Bio::new()], &mut cx);
            assert_eq!(poll(&mut children, false, &mut cx)[count - 1], 1);
        }
        assert_eq!(seen.borrow().polls[0], 1, "of {count}");
    }
}
