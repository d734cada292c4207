//! A cluster whose places are taken and left: nobody waits for one that is empty, and nobody loses
//! what is for the core that has it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use udm_core::{Ack, CoreId, Cores, DeviceId, Drain, LaneCommand};
use udm_runtime::{CoreOptions, CoreSet, LocalCore};

fn options() -> CoreOptions {
    CoreOptions { ring_optional: true, ..CoreOptions::default() }
}

fn wait(what: &str, is_so: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

fn suspend(ack: &Ack) -> LaneCommand {
    LaneCommand::Suspend { how: Drain::Flush, ack: ack.clone() }
}

#[test]
fn a_detached_core_acks_at_once() {
    let cluster = CoreSet::with_task_core(3).unwrap();
    let answered = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&answered);
    let ack = Ack::new(move || told.store(true, Ordering::SeqCst));
    cluster.broadcast(DeviceId::new(), suspend(&ack));
    drop(ack);
    assert!(answered.load(Ordering::SeqCst), "somebody waits for a place that nobody has");
}

/// Threads take places and leave them while another sends to all: each letter is answered, and a
/// core that is there gets those that are sent while it is.
#[test]
fn cores_attach_and_detach_among_messages() {
    const CORES: usize = 3;
    const LETTERS: usize = 300_000;
    let cluster = CoreSet::with_task_core(CORES).unwrap();
    let (over, answered) = (AtomicBool::new(false), Arc::new(AtomicUsize::new(0)));
    thread::scope(|scope| {
        for core in 0..CORES {
            let (cluster, over) = (&cluster, &over);
            scope.spawn(move || {
                let device = DeviceId::new();
                while !over.load(Ordering::Relaxed) {
                    let mut local = LocalCore::attach(cluster, CoreId(core as u16), options()).unwrap();
                    let port = local.turn(|cx| cx.open_inbox(device));
                    // Its own letter comes, whoever throws away what was for the core before it.
                    cluster.broadcast(device, LaneCommand::Kick);
                    // A turn takes in so many letters at the most, and others may be before it.
                    let taken = (0..1000).any(|_| {
                        local.turn(|_| ());
                        port.has_messages()
                    });
                    assert!(taken, "a letter for a core that is there was thrown away");
                    drop(port);
                    local.detach();
                }
            });
        }
        for _ in 0..LETTERS {
            let answered = Arc::clone(&answered);
            let ack = Ack::new(move || {
                answered.fetch_add(1, Ordering::Relaxed);
            });
            cluster.broadcast(DeviceId::new(), suspend(&ack));
        }
        over.store(true, Ordering::Relaxed);
    });
    wait("letters that nobody answers", || answered.load(Ordering::Relaxed) == LETTERS);
}
