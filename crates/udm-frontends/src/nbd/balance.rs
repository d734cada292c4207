//! Balances clients over cores by the CPU time that they use. Idle clients do not count.
//!
//! A core measures its CPU time in *windows*, as a part of a CPU, and the share of each client. The
//! next activity after the end of a window closes it, so an idle core measures nothing. A core
//! publishes one word per window. If a client would do better on another core in several windows in
//! a row, it moves there ([`choose_client_to_move`] is the rule). Clients do not move back and
//! forth, for these reasons:
//! * A move must gain by a good margin, in [`STREAK`] windows.
//! * A server makes one move at a time, and the next one after [`REST`] at the earliest, when all
//!   cores have measured again.
//! * A client that has moved stays for a time. This time doubles with each move, unless the client
//!   has stayed much longer than it had to ([`min_stay_after_move`]).

use super::stats::ServerCounters;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use udm_core::{CoreId, Nanos};
use udm_runtime::{FrontCx, FrontKey};

/// Length of a window.
const WINDOW: Nanos = Nanos(10_000_000);
/// Age after which a published load is stale: the core has done nothing since.
const STALE: Nanos = Nanos(100_000_000);
/// Windows in a row in which a move must gain.
const STREAK: u32 = 3;
/// Minimum time between two moves of a server.
const REST: Nanos = Nanos(50_000_000);
/// Time that a client stays after its first move, or after a cancelled move.
pub(super) const STAY: Nanos = Nanos(1_000_000_000);
const STAY_MAX: Nanos = Nanos(300_000_000_000);

/// Load of a whole CPU.
const FULL: u32 = 1024;
/// Load from which a core counts as saturated.
const SATURATED: u32 = FULL * 7 / 8;
/// Minimum decrease of the load of the busier core by a move, and minimum load of an *active*
/// client.
const GAIN: u32 = FULL / 16;

/// Cost of a request besides its data, in bytes that the core could have moved instead.
const REQUEST: u64 = 8 << 10;

/// Load of a core and its number of active clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct CoreLoad {
    spent: u32,
    active: u32,
}

impl CoreLoad {
    /// Returns the load of a client with this `weight`, of `total`.
    fn share(self, weight: u64, total: u64) -> u32 {
        (u64::from(self.spent) * weight / total.max(1)) as u32
    }
}

/// Chooses a client on a core of load `mine` to move to one of `others`. `mine` is divided among
/// the clients by `weights`; a client of weight 0 stays.
///
/// If the other core has capacity, the move must decrease the load of the busier core by [`GAIN`].
/// If both cores are saturated, their loads are equal whatever their clients need. Then the other
/// core must have two active clients less.
fn choose_client_to_move(
    mine: CoreLoad,
    others: &[(CoreId, CoreLoad)],
    weights: &[u64],
    total: u64,
) -> Option<(usize, CoreId)> {
    let moves = others.iter().flat_map(|&(core, other)| {
        let costs = weights.iter().map(|&weight| mine.share(weight, total)).enumerate();
        costs.filter(|&(_, cost)| cost >= GAIN).map(move |(client, cost)| (client, cost, core, other))
    });
    let fits =
        moves.clone().filter(|&(_, cost, _, other)| other.spent + cost <= SATURATED || other.spent < GAIN);
    let after = |cost: u32, other: CoreLoad| (mine.spent - cost).max(other.spent + cost);
    let best = fits.min_by_key(|&(_, cost, _, other)| after(cost, other));
    if let Some((client, _, core, _)) =
        best.filter(|&(_, cost, _, other)| after(cost, other) + GAIN <= mine.spent)
    {
        return Some((client, core));
    }
    let crowded = moves.filter(|(_, _, _, other)| mine.spent >= SATURATED && other.active + 2 <= mine.active);
    crowded.min_by_key(|(_, _, _, other)| other.active).map(|(client, _, core, _)| (client, core))
}

/// Returns how long a client stays after its next move. It had to stay for `stay` after the last
/// one, and has stayed for `stayed`.
pub(super) fn min_stay_after_move(stay: Nanos, stayed: Nanos) -> Nanos {
    let settled = stayed.0 / 16 > stay.0;
    if settled || stay == Nanos(0) { STAY } else { Nanos((2 * stay.0).min(STAY_MAX.0)) }
}

/// Load of a core, published for the other cores.
#[derive(Debug, Default)]
pub(super) struct PublishedLoad(AtomicU64);

impl PublishedLoad {
    /// Stores the time in milliseconds, then 12 bits for each number.
    fn set(&self, now: Nanos, load: CoreLoad) {
        let (spent, active) = (load.spent.min(FULL), load.active.min(0xfff));
        self.0
            .store((now.0 / 1_000_000) << 24 | u64::from(spent) << 12 | u64::from(active), Ordering::Relaxed);
    }

    fn get(&self, now: Nanos) -> CoreLoad {
        let word = self.0.load(Ordering::Relaxed);
        let at = Nanos((word >> 24) * 1_000_000);
        let fresh = at + STALE > now;
        let part = |shift: u32| (word >> shift & 0xfff) as u32;
        if fresh { CoreLoad { spent: part(12), active: part(0) } } else { CoreLoad::default() }
    }
}

/// Earliest time of the next move of a server.
#[derive(Debug, Default)]
pub(super) struct ConnectionMoveThrottle(AtomicU64);

impl ConnectionMoveThrottle {
    /// Returns true for one caller, and then for none until [`REST`] has passed.
    fn claim(&self, now: Nanos) -> bool {
        let next = self.0.load(Ordering::Relaxed);
        let then = (now + REST).0;
        next <= now.0 && self.0.compare_exchange(next, then, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

/// The current window of a core.
struct CoreLoadWindow {
    begun: Cell<Nanos>,
    /// CPU time of the core at the start of the window.
    spent: Cell<Nanos>,
    /// Clients that were active in the window.
    clients: RefCell<Vec<(FrontKey, Rc<ClientLoadBalanceState>)>>,
    streak: Cell<u32>,
    /// Vectors for the loads of other cores and for weights, kept for reuse.
    others: RefCell<Vec<(CoreId, CoreLoad)>>,
    weights: RefCell<Vec<u64>>,
}

/// A client's data for the balance of its core.
#[derive(Default)]
struct ClientLoadBalanceState {
    weight: Cell<u64>,
    stays_until: Cell<Nanos>,
    to: Cell<Option<CoreId>>,
}

/// A client's handle to the balance of its core.
pub(super) struct ClientLoadBalanceHandle {
    core: Rc<CoreLoadWindow>,
    me: Rc<ClientLoadBalanceState>,
    /// Time at which the client came to this core, and how long it had to stay.
    since: Nanos,
    stay: Nanos,
}

impl ClientLoadBalanceHandle {
    /// Adds a client to the core of `cx`, which it does not leave for `stay`.
    pub(super) fn new(cx: &mut FrontCx<'_, '_>, stay: Nanos) -> ClientLoadBalanceHandle {
        let (begun, spent) = (cx.now(), cx.cpu_time());
        let core = cx.local(|| CoreLoadWindow {
            begun: Cell::new(begun),
            spent: Cell::new(spent),
            clients: RefCell::default(),
            streak: Cell::new(0),
            others: RefCell::default(),
            weights: RefCell::default(),
        });
        let me = ClientLoadBalanceState {
            stays_until: Cell::new(begun + stay),
            ..ClientLoadBalanceState::default()
        };
        ClientLoadBalanceHandle { core, me: Rc::new(me), since: begun, stay }
    }

    /// Returns how long the client stays after a move at `now`.
    pub(super) fn next_stay(&self, now: Nanos) -> Nanos {
        min_stay_after_move(self.stay, now.since(self.since))
    }

    /// Takes the core to which the client should move, if any.
    pub(super) fn to(&self) -> Option<CoreId> {
        self.me.to.take()
    }

    /// Records that the move was cancelled.
    pub(super) fn stays(&self, now: Nanos) {
        self.me.stays_until.set(now + STAY);
    }

    /// Records `requests` received and `bytes` moved. Closes the window if it has ended.
    pub(super) fn record(
        &self,
        requests: u64,
        bytes: u64,
        counters: &ServerCounters,
        cx: &mut FrontCx<'_, '_>,
    ) {
        let record = requests * REQUEST + bytes;
        if record == 0 {
            return;
        }
        let before = self.me.weight.get();
        self.me.weight.set(before + record);
        if before == 0 {
            self.core.clients.borrow_mut().push((cx.me(), self.me.clone()));
        }
        if self.core.begun.get() + WINDOW <= cx.now() {
            self.core.close(counters, cx);
        }
    }
}

impl CoreLoadWindow {
    /// Closes the window and begins the next.
    fn close(&self, counters: &ServerCounters, cx: &mut FrontCx<'_, '_>) {
        let (now, spent) = (cx.now(), cx.cpu_time());
        let length = now.since(self.begun.replace(now));
        let part = spent.since(self.spent.replace(spent)).0 * u64::from(FULL) / length.0.max(1);
        let clients = self.clients.borrow();
        let total: u64 = clients.iter().map(|(_, client)| client.weight.get()).sum();
        let mut mine = CoreLoad { spent: part.min(u64::from(FULL)) as u32, active: 0 };
        let is_active = |client: &ClientLoadBalanceState| mine.share(client.weight.get(), total) >= GAIN;
        mine.active = clients.iter().filter(|(_, client)| is_active(client)).count() as u32;
        let me = cx.core();
        counters.cores[me.index()].load.set(now, mine);

        let found = if mine.active < 2 {
            None
        } else {
            let (mut others, mut weights) = (self.others.borrow_mut(), self.weights.borrow_mut());
            others.clear();
            others.extend(
                (0..counters.cores.len())
                    .filter(|&core| core != me.index())
                    .map(|core| (CoreId(core as u16), counters.cores[core].load.get(now))),
            );
            let may = |client: &ClientLoadBalanceState| {
                if client.stays_until.get() <= now { client.weight.get() } else { 0 }
            };
            weights.clear();
            weights.extend(clients.iter().map(|(_, client)| may(client)));
            choose_client_to_move(mine, &others, &weights, total)
        };
        // A window with a long idle time does not count.
        let counts = found.is_some() && length < STALE;
        self.streak.set(if counts { self.streak.get() + 1 } else { 0 });
        if let Some((client, to)) = found
            && self.streak.get() >= STREAK
            && counters.next_move.claim(now)
        {
            self.streak.set(0);
            let (front, client) = &clients[client];
            client.to.set(Some(to));
            cx.schedule(*front);
        }
        clients.iter().for_each(|(_, client)| client.weight.set(0));
        drop(clients);
        self.clients.borrow_mut().clear();
    }
}

#[cfg(test)]
#[path = "balance_tests.rs"]
mod tests;
