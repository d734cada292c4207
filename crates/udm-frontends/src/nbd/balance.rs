//! Which core a client is served on: hot ones spread over the cores by what they cost, and idle
//! ones don't count.
//!
//! A core measures in *windows* what it spends, as a part of a CPU, and how much of it was for each
//! client; the end of a window is noticed by whatever it does next, so a core that does nothing
//! measures nothing. It publishes one word a window. When one of its clients would be better off
//! with another core in several windows in a row, that client goes there ([`choose_move`] is the rule).
//! What keeps clients from going back and forth:
//! * a move has to pay by a good margin, and in [`STREAK`] windows;
//! * there is one move at a time in a server, and [`REST`] later at the earliest the next, when all
//!   cores have measured anew;
//! * who has moved stays for a while, which doubles each time unless it has stayed much longer
//!   meanwhile ([`next_stay`]).

use super::stats::ServerCounters;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use udm_core::{CoreId, Nanos};
use udm_runtime::{FrontCx, FrontKey};

/// The length of a window.
const WINDOW: Nanos = Nanos(10_000_000);
/// What was published so long ago tells of a core that has done nothing since.
const STALE: Nanos = Nanos(100_000_000);
/// Windows in a row in which a move must pay.
const STREAK: u32 = 3;
/// Between two moves of a server.
const REST: Nanos = Nanos(50_000_000);
/// How long a client stays that has moved for the first time, or could not.
pub(super) const STAY: Nanos = Nanos(1_000_000_000);
const STAY_MAX: Nanos = Nanos(300_000_000_000);

/// A whole CPU.
const FULL: u32 = 1024;
/// A core that spends so much has no more to give.
const SATURATED: u32 = FULL * 7 / 8;
/// By how much the busier of two cores must have less to do after a move, and what a client must
/// cost to be *active*.
const GAIN: u32 = FULL / 16;

/// What a request costs a core besides its bytes, in bytes that it could have moved instead.
const REQUEST: u64 = 8 << 10;

/// What a core spends, and for how many active clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct CoreLoad {
    spent: u32,
    active: u32,
}

impl CoreLoad {
    /// The part of it that is for a client of this `weight`, of `total`.
    fn share(self, weight: u64, total: u64) -> u32 {
        (u64::from(self.spent) * weight / total.max(1)) as u32
    }
}

/// Which of the clients on a core of load `mine`, by their weights, should go to which of `others`.
/// Weights say how `mine` divides among them; one of 0 stays.
///
/// Where the other core has room, the load of the busier of the two must become less by [`GAIN`].
/// Where both are saturated their loads say nothing, since clients take what they get: then the
/// other must have two active clients less.
fn choose_move(
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

/// How long a client stays where it goes now that has moved before, to stay for `stay`, and has
/// `stayed` so long.
pub(super) fn next_stay(stay: Nanos, stayed: Nanos) -> Nanos {
    let settled = stayed.0 / 16 > stay.0;
    if settled || stay == Nanos(0) { STAY } else { Nanos((2 * stay.0).min(STAY_MAX.0)) }
}

/// What cores tell each other.
#[derive(Debug, Default)]
pub(super) struct PublishedLoad(AtomicU64);

impl PublishedLoad {
    /// The milliseconds of the time, then 12 bits each.
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

/// When the next move of a server may be.
#[derive(Debug, Default)]
pub(super) struct MoveThrottle(AtomicU64);

impl MoveThrottle {
    /// True for one of those that ask, and for nobody for a while then.
    fn claim(&self, now: Nanos) -> bool {
        let next = self.0.load(Ordering::Relaxed);
        let then = (now + REST).0;
        next <= now.0 && self.0.compare_exchange(next, then, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

/// A core's window.
struct CoreLoadWindow {
    begun: Cell<Nanos>,
    /// What the core had spent then.
    spent: Cell<Nanos>,
    /// Who did something in it.
    clients: RefCell<Vec<(FrontKey, Rc<ClientLoad>)>>,
    streak: Cell<u32>,
    /// Lists for what the other cores said, and for weights.
    others: RefCell<Vec<(CoreId, CoreLoad)>>,
    weights: RefCell<Vec<u64>>,
}

/// A client's part of the window.
#[derive(Default)]
struct ClientLoad {
    weight: Cell<u64>,
    stays_until: Cell<Nanos>,
    to: Cell<Option<CoreId>>,
}

/// A client, as the balance of its core sees it.
pub(super) struct BalancedClient {
    core: Rc<CoreLoadWindow>,
    me: Rc<ClientLoad>,
    /// Since when it is on this core, and for how long it was to stay.
    since: Nanos,
    stay: Nanos,
}

impl BalancedClient {
    /// A client on the core of `cx`, which it does not leave for `stay`.
    pub(super) fn new(cx: &mut FrontCx<'_, '_>, stay: Nanos) -> BalancedClient {
        let (begun, spent) = (cx.now(), cx.spent());
        let core = cx.local(|| CoreLoadWindow {
            begun: Cell::new(begun),
            spent: Cell::new(spent),
            clients: RefCell::default(),
            streak: Cell::new(0),
            others: RefCell::default(),
            weights: RefCell::default(),
        });
        let me = ClientLoad { stays_until: Cell::new(begun + stay), ..ClientLoad::default() };
        BalancedClient { core, me: Rc::new(me), since: begun, stay }
    }

    /// How long it is to stay where it goes `now`.
    pub(super) fn next_stay(&self, now: Nanos) -> Nanos {
        next_stay(self.stay, now.since(self.since))
    }

    /// The core to go to, once.
    pub(super) fn to(&self) -> Option<CoreId> {
        self.me.to.take()
    }

    /// It could not leave.
    pub(super) fn stays(&self, now: Nanos) {
        self.me.stays_until.set(now + STAY);
    }

    /// It has taken in `requests` and moved `bytes`. Looks whether the window is over.
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
    /// Ends the window, and begins the next.
    fn close(&self, counters: &ServerCounters, cx: &mut FrontCx<'_, '_>) {
        let (now, spent) = (cx.now(), cx.spent());
        let length = now.since(self.begun.replace(now));
        let part = spent.since(self.spent.replace(spent)).0 * u64::from(FULL) / length.0.max(1);
        let clients = self.clients.borrow();
        let total: u64 = clients.iter().map(|(_, client)| client.weight.get()).sum();
        let mut mine = CoreLoad { spent: part.min(u64::from(FULL)) as u32, active: 0 };
        let is_active = |client: &ClientLoad| mine.share(client.weight.get(), total) >= GAIN;
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
            let may =
                |client: &ClientLoad| if client.stays_until.get() <= now { client.weight.get() } else { 0 };
            weights.clear();
            weights.extend(clients.iter().map(|(_, client)| may(client)));
            choose_move(mine, &others, &weights, total)
        };
        // A window that has seen a long rest tells little.
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
