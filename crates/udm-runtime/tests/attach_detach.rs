//! Threads attach to and detach from cores: a detached core delays nothing, and an attached core
//! loses no message.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use udm_core::{AckOnLastDrop, CoreCommandSender, CoreId, DeviceId, DrainMode, LaneCommand};
use udm_runtime::{CoreOptions, LocalCore, ProcessCores};

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

fn suspend(ack: &AckOnLastDrop) -> LaneCommand {
    LaneCommand::Suspend { how: DrainMode::Flush, ack: ack.clone() }
}

#[test]
fn a_detached_core_acks_at_once() {
    let core_set = ProcessCores::with_task_core(3).unwrap();
    let answered = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&answered);
    let ack = AckOnLastDrop::new(move || flag.store(true, Ordering::SeqCst));
    core_set.broadcast(DeviceId::new(), suspend(&ack));
    drop(ack);
    assert!(answered.load(Ordering::SeqCst), "a detached core delays the ack");
}

/// Threads attach and detach while another thread broadcasts. Each message is acknowledged, and an
/// attached core gets the messages sent meanwhile.
#[test]
fn cores_attach_and_detach_among_messages() {
    const CORES: usize = 3;
    const LETTERS: usize = 300_000;
    let core_set = ProcessCores::with_task_core(CORES).unwrap();
    let (over, answered) = (AtomicBool::new(false), Arc::new(AtomicUsize::new(0)));
    thread::scope(|scope| {
        for core in 0..CORES {
            let (core_set, over) = (&core_set, &over);
            scope.spawn(move || {
                let device = DeviceId::new();
                while !over.load(Ordering::Relaxed) {
                    let mut local = LocalCore::attach(core_set, CoreId(core as u16), options()).unwrap();
                    let inbox = local.turn(|cx| cx.open_inbox(device));
                    // A message of the new core arrives, though late senders may drop messages of
                    // the detached core.
                    core_set.broadcast(device, LaneCommand::Kick);
                    // A turn handles a limited number of messages, and others may be queued before
                    // this one.
                    let taken = (0..1000).any(|_| {
                        local.turn(|_| ());
                        inbox.has_messages()
                    });
                    assert!(taken, "a message to an attached core was dropped");
                    drop(inbox);
                    local.detach();
                }
            });
        }
        for _ in 0..LETTERS {
            let answered = Arc::clone(&answered);
            let ack = AckOnLastDrop::new(move || {
                answered.fetch_add(1, Ordering::Relaxed);
            });
            core_set.broadcast(DeviceId::new(), suspend(&ack));
        }
        over.store(true, Ordering::Relaxed);
    });
    wait("messages without an ack", || answered.load(Ordering::Relaxed) == LETTERS);
}
