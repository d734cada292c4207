//! The clocks of simulated cores: a core reads them through functions, so they stand where
//! functions find them, one pair a thread.

use std::cell::Cell;
use udm_core::Nanos;
use udm_runtime::CoreClock;

thread_local! {
    static NOW: Cell<Nanos> = const { Cell::new(Nanos(0)) };
    static SPENT: Cell<Nanos> = const { Cell::new(Nanos(0)) };
}

/// What cores are given.
pub(crate) const TIME: CoreClock = CoreClock { now, spent };

/// Sets the time, and the CPU time of the core whose turn it is.
pub(crate) fn set(time: Nanos, of_core: Nanos) {
    NOW.set(time);
    SPENT.set(of_core);
}

pub(crate) fn now() -> Nanos {
    NOW.get()
}

fn spent() -> Nanos {
    SPENT.get()
}
