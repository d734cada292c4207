//! The rule of moves with simulated cores and clients: hot clients are separated in any order of
//! arrival, and then stay.

use super::*;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// A client that would use `wants` of a CPU if it had one alone.
#[derive(Clone, Copy)]
struct HotClient {
    wants: u32,
    core: usize,
    moved: u32,
    /// Time of its last move, and how long it stays after it, in ns.
    since: u64,
    stay: u64,
}

impl HotClient {
    fn new(wants: u32, core: usize) -> HotClient {
        HotClient { wants, core, moved: 0, since: 0, stay: 0 }
    }
}

/// Measured loads of a window: if the clients want more than a core has, each gets its share.
fn measure(clients: &[HotClient], cores: usize, rng: &mut SmallRng) -> (Vec<CoreLoad>, Vec<u64>) {
    let wanted: Vec<u32> =
        (0..cores).map(|core| clients.iter().filter(|c| c.core == core).map(|c| c.wants).sum()).collect();
    // A tenth to either side: machines are noisy.
    let weights: Vec<u64> =
        clients.iter().map(|c| u64::from(c.wants) * rng.random_range(900..1100)).collect();
    let loads = (0..cores).map(|core| {
        let spent = (wanted[core] * rng.random_range(900..1100) / 1000).min(FULL);
        let total: u64 = (0..clients.len()).filter(|&i| clients[i].core == core).map(|i| weights[i]).sum();
        let mut load = CoreLoad { spent, active: 0 };
        let active = |i: &usize| clients[*i].core == core && load.share(weights[*i], total) >= GAIN;
        load.active = (0..clients.len()).filter(active).count() as u32;
        load
    });
    (loads.collect(), weights)
}

/// Runs windows with at most one move each. Returns the number of moves and the window of the last
/// one.
fn balance(clients: &mut [HotClient], cores: usize, windows: usize, rng: &mut SmallRng) -> (u32, usize) {
    let (mut moves, mut last) = (0, 0);
    let mut streaks = vec![0; cores];
    for window in 0..windows {
        let (loads, weights) = measure(clients, cores, rng);
        for core in 0..cores {
            let mine: Vec<usize> = (0..clients.len()).filter(|&i| clients[i].core == core).collect();
            let others: Vec<_> =
                (0..cores).filter(|&c| c != core).map(|c| (CoreId(c as u16), loads[c])).collect();
            let now = window as u64 * WINDOW.0;
            let total = mine.iter().map(|&i| weights[i]).sum();
            let may = |i: usize| clients[i].since + clients[i].stay <= now;
            let weights: Vec<u64> = mine.iter().map(|&i| if may(i) { weights[i] } else { 0 }).collect();
            let found = choose_client_to_move(loads[core], &others, &weights, total);
            streaks[core] = if found.is_some() { streaks[core] + 1 } else { 0 };
            if let Some((client, to)) = found.filter(|_| streaks[core] >= STREAK) {
                let client = &mut clients[mine[client]];
                (client.core, client.moved) = (to.index(), client.moved + 1);
                client.stay = min_stay_after_move(Nanos(client.stay), Nanos(now - client.since)).0;
                client.since = now;
                (moves, last) = (moves + 1, window);
                streaks.fill(0);
                break;
            }
        }
    }
    (moves, last)
}

fn on(clients: &[HotClient], core: usize) -> usize {
    clients.iter().filter(|c| c.core == core).count()
}

#[test]
fn two_hot_clients_part() {
    for wants in [FULL / 5, FULL / 2, FULL] {
        for cores in 2..6 {
            for at in 0..cores {
                let mut rng = SmallRng::seed_from_u64(at as u64);
                let mut clients = vec![HotClient::new(wants, at); 2];
                // Fourteen clients that are almost idle.
                clients.extend((0..14).map(|i| HotClient::new(1, i % cores)));
                let (moves, last) = balance(&mut clients, cores, 500, &mut rng);
                assert_ne!(clients[0].core, clients[1].core);
                assert!(moves == 1 && last < 20, "{wants} on core {at} of {cores}: {moves} moves");
            }
        }
    }
}

#[test]
fn many_hot_clients_spread_and_then_stay() {
    for seed in 0..80 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let cores = rng.random_range(2..9);
        let n = rng.random_range(1..20);
        let mut clients: Vec<HotClient> =
            (0..n).map(|_| HotClient::new(FULL, rng.random_range(0..cores))).collect();
        let (_, last) = balance(&mut clients, cores, 600, &mut rng);
        let counts: Vec<usize> = (0..cores).map(|core| on(&clients, core)).collect();
        let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
        assert!(most - least <= 1, "seed {seed}: {counts:?}");
        assert!(last < 400, "seed {seed}: moves until window {last}");
    }
}

/// With clients of all kinds and badly measured loads, no client moves back and forth for long. No
/// core has two hot clients while another is idle.
#[test]
fn nobody_goes_back_and_forth() {
    for seed in 0..80 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let cores = rng.random_range(2..9);
        let clients = (0..rng.random_range(1..24)).map(|_| {
            let wants = [5, 60, 200, 400, 700, FULL][rng.random_range(0..6)];
            HotClient::new(wants, rng.random_range(0..cores))
        });
        let mut clients: Vec<HotClient> = clients.collect();
        // A minute.
        let (moves, _) = balance(&mut clients, cores, 6000, &mut rng);
        let most = clients.iter().map(|c| c.moved).max().unwrap();
        assert!(most <= 7, "seed {seed}: {moves} moves, {most} of one");
        let idle = (0..cores).any(|core| clients.iter().all(|c| c.core != core || c.wants < 60));
        let pair =
            (0..cores).any(|core| clients.iter().filter(|c| c.core == core && c.wants >= 400).count() > 1);
        assert!(!(idle && pair), "seed {seed}");
    }
}

#[test]
fn what_is_old_says_nothing() {
    let published = PublishedLoad::default();
    let now = Nanos(5_000_000_000);
    assert_eq!(published.get(now), CoreLoad::default());
    let load = CoreLoad { spent: FULL, active: 4095 };
    published.set(now, load);
    assert_eq!(published.get(now + WINDOW), load);
    assert_eq!(published.get(now + STALE + WINDOW), CoreLoad::default());
}

#[test]
fn one_move_at_a_time() {
    let next = ConnectionMoveThrottle::default();
    let now = Nanos(1_000_000_000);
    assert!(next.claim(now) && !next.claim(now) && !next.claim(now + WINDOW));
    assert!(next.claim(now + REST));
}
