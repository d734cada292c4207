//! Measures a vhost-user-blk server: 4 KiB random reads by one ring, at a fixed depth.
//! usage: vhost_user_load PATH DEPTH SECONDS
//!
//! The driver looks at the used ring while it waits, so it uses a CPU of its own. Prints requests
//! per second, and the kicks and notifications per request.

#[path = "../tests/vhost_user/driver.rs"]
#[allow(dead_code, reason = "the tests use all of it")]
mod driver;

use driver::{DATA, MEMORY, TestMachine};
use std::path::Path;
use std::time::{Duration, Instant};
use udm_wire::virtio::VirtioFeatures;

const BLOCK: usize = 4096;

fn main() {
    let words: Vec<String> = std::env::args().collect();
    let [_, path, depth, seconds] = words.as_slice() else { panic!("expected PATH DEPTH SECONDS") };
    let depth: usize = depth.parse().expect("a depth");
    let limit = Duration::from_secs_f64(seconds.parse().expect("seconds"));
    let mut machine = TestMachine::new(Path::new(path), 1);
    machine.polls = true;
    machine.start(VirtioFeatures::EVENT_IDX | VirtioFeatures::INDIRECT_DESC);
    let capacity = u64::from_le_bytes(machine.config()[..8].try_into().expect("8 bytes"));
    let (mut done, mut kicks, mut state) = (0u64, 0u64, 1u64);
    let mut add = |machine: &mut TestMachine| {
        // An xorshift generator.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let at = DATA + (state as usize % ((MEMORY - DATA) / BLOCK)) * BLOCK;
        machine.add(0, 0, state % (capacity / 8) * 8, &[], &[(at, BLOCK)]);
    };
    let begin = Instant::now();
    let old = machine.avail(0);
    (0..depth).for_each(|_| add(&mut machine));
    kicks += u64::from(machine.kick(0, old));
    while begin.elapsed() < limit {
        let old = machine.avail(0);
        while machine.take_used(0).is_some() {
            done += 1;
            add(&mut machine);
        }
        if machine.avail(0) != old {
            kicks += u64::from(machine.kick(0, old));
        } else {
            std::hint::spin_loop();
        }
    }
    let rate = done as f64 / begin.elapsed().as_secs_f64();
    #[expect(clippy::print_stdout, reason = "the result of the program")]
    let print = |line: String| println!("{line}");
    print(format!("{rate:.0} requests/s, {:.4} kicks a request", kicks as f64 / done as f64));
}
