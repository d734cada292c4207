//! The clocks of simulated cores. A core reads them through plain functions, so they are
//! thread-local variables.

use std::cell::Cell;
use udm_core::Nanos;
use udm_runtime::CoreClockFunctions;

thread_local! {
    static NOW: Cell<Nanos> = const { Cell::new(Nanos(0)) };
    static SPENT: Cell<Nanos> = const { Cell::new(Nanos(0)) };
}

/// Clock functions for the cores.
pub(crate) const TIME: CoreClockFunctions = CoreClockFunctions { now, cpu_time: core_cpu_time };

/// Sets the time, and the CPU time of the core that has the turn.
pub(crate) fn set_simulated_clock(time: Nanos, of_core: Nanos) {
    NOW.set(time);
    SPENT.set(of_core);
}

pub(crate) fn now() -> Nanos {
    NOW.get()
}

fn core_cpu_time() -> Nanos {
    SPENT.get()
}
