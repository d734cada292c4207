//! The order of `mq-deadline`, as in the kernel's `dd_dispatch_request`.

use super::*;

/// A queue whose only tag is in use, so that new requests wait. The request with the tag is a batch
/// of one.
fn waiting(words: &str) -> TestCores {
    let mut world = TestCores::new(1, &format!("queue_depth=1,scheduler=mq-deadline,nomerges=2,{words}"));
    world.submit(0, vec![read(1000, 1)]);
    world
}

/// Completes all requests and returns their order: the sectors, with `w` for a write.
fn order(world: &mut TestCores) -> String {
    let mut went = Vec::new();
    world.end(0, Status::Ok);
    while !world.at_disk().is_empty() {
        let (sector, op) = with_test_disk_state(|state| (state.bios[0].1.sector, state.bios[0].1.op));
        went.push(format!("{}{}", if op == Op::Write { "w" } else { "" }, sector.0));
        world.end(0, Status::Ok);
    }
    went.join(" ")
}

#[test]
fn by_sector_from_where_the_last_one_was() {
    let mut world = waiting("nr_requests=99");
    world.submit(0, [50, 10, 30].map(|sector| read(sector, 1)).into());
    assert_eq!(order(&mut world), "50 10 30", "no request follows 1000, so the oldest begins a batch");
    let mut world = waiting("nr_requests=99");
    world.submit(0, [50, 1010, 30, 1005].map(|sector| read(sector, 1)).into());
    assert_eq!(order(&mut world), "1005 1010 50 30");
}

#[test]
fn a_batch_is_of_one_direction_and_no_longer_than_it_may_be() {
    let mut world = waiting("nr_requests=99,fifo_batch=3,writes_starved=2");
    world.submit(0, (0..9).map(|n| write(n, 1, 1)).collect());
    world.submit(0, (100..112).map(|n| read(n, 1)).collect());
    // No request follows 1000, so its batch is over.
    assert_eq!(
        order(&mut world),
        "100 101 102 103 104 105 w0 w1 w2 106 107 108 109 110 111 w3 w4 w5 w6 w7 w8",
        "two batches of reads, one of writes"
    );
}

#[test]
fn writes_have_their_turn_however_many_reads_come() {
    for starved in 0..4_u64 {
        let mut world = waiting(&format!("nr_requests=99,fifo_batch=1,writes_starved={starved}"));
        world.submit(0, (0..4).map(|n| write(n, 1, 1)).collect());
        world.submit(0, (100..130).map(|n| read(n, 1)).collect());
        let order = order(&mut world);
        let writes: Vec<_> = order
            .split(' ')
            .enumerate()
            .filter(|(_, what)| what.starts_with('w'))
            .map(|(at, _)| at)
            .collect();
        let turn = starved as usize + 1;
        assert_eq!(writes, (1..=4).map(|n| n * turn - 1).collect::<Vec<_>>(), "{order}");
    }
}

/// A request at a low sector would starve while new ones arrive after the last sector; its deadline
/// prevents this.
#[test]
fn what_is_due_goes_first() {
    for (age, want) in [(499, "1001 1002 1003 5"), (500, "5 1001 1002 1003")] {
        let mut world = waiting("nr_requests=99,fifo_batch=1,read_expire=500");
        world.submit(0, vec![read(5, 1)]);
        world.now = Nanos(1 + age * 1_000_000);
        world.submit(0, (1001..1004).map(|n| read(n, 1)).collect());
        assert_eq!(order(&mut world), want, "{age} ms old");
    }
}

/// Two requests joined by a third have the deadline and position of the older (kernel
/// `dd_merged_requests`). The joined request is found at both ends.
#[test]
fn what_is_joined_is_due_when_its_oldest_part_is() {
    for (age, want) in [(499, "1001 4"), (500, "4 1001")] {
        let words = "queue_depth=1,scheduler=mq-deadline,nr_requests=99,fifo_batch=1,read_expire=500";
        let mut world = TestCores::new(1, words);
        world.submit(0, vec![read(1000, 1)]);
        world.submit(0, vec![read(7, 1)]);
        world.now = Nanos(1 + 300 * 1_000_000);
        world.submit(0, vec![read(5, 1)]);
        for sector in [6, 8, 4] {
            world.submit(0, vec![read(sector, 1)]);
        }
        world.now = Nanos(1 + age * 1_000_000);
        world.submit(0, vec![read(1001, 1)]);
        assert_eq!(order(&mut world), want, "{age} ms old");
    }
}

#[test]
fn flushes_go_first() {
    let mut world = waiting("nr_requests=99");
    world.submit(0, vec![read(5, 1), write(7, 1, 1)]);
    let mut flush = Bio::new();
    flush.op = Op::Flush;
    world.submit(0, vec![flush]);
    world.end(0, Status::Ok);
    assert_eq!(with_test_disk_state(|state| state.bios[0].1.op), Op::Flush);
    order(&mut world);
}

/// Requests beyond `nr_requests` are not sorted yet.
#[test]
fn no_more_is_sorted_than_nr_requests() {
    let mut world = waiting("nr_requests=4");
    world.submit(0, [60, 70, 80, 90, 100, 62].map(|sector| read(sector, 1)).into());
    assert_eq!(order(&mut world), "60 70 80 90 100 62");
}
