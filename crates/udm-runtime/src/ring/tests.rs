//! Tests of the ring with real sockets, pipes and files.

use super::*;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;
use udm_core::{Buf, Segments};

fn pair() -> (Arc<OwnedFd>, Arc<OwnedFd>) {
    let (a, b) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    (Arc::new(a), Arc::new(b))
}

fn text(s: &str) -> Segments {
    let mut b = Buf::zeroed(s.len());
    b.copy_from_slice(s.as_bytes());
    b.into()
}

fn wait_for(ring: &Ring, user: &RingUser, n: usize) -> Vec<RingCompletion> {
    let mut out = Vec::new();
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(20) {
        user.take(&mut out);
        if out.len() >= n {
            break;
        }
        ring.wait(Some(Duration::from_millis(10)));
    }
    out
}

#[test]
fn gathered_send_and_scattered_receive() {
    let ring = Ring::new().unwrap();
    let user = ring.user();
    let (a, b) = pair();
    let mut data = text("hello ");
    data.push(Buf::zeroed(1));
    data.append(text("world"));
    user.push(1, RingOp::Send { fd: a, data, whole: true });
    let mut room = Segments::from(Buf::zeroed(3));
    room.push(Buf::zeroed(100));
    user.push(2, RingOp::Recv { fd: b, data: room });
    let mut done = wait_for(&ring, &user, 2);
    done.sort_by_key(|d| d.tag);
    assert_eq!(done[0].result, Ok(12));
    assert_eq!(done[1].result, Ok(12));
    let mut out = [0; 12];
    done[1].data.copy_to(&mut out);
    assert_eq!(&out, b"hello \0world");
    assert_eq!(user.in_flight(), 0);
}

#[test]
fn a_dropped_user_leaks_nothing() {
    let ring = Ring::new().unwrap();
    let (a, b) = pair();
    {
        let user = ring.user();
        user.push(1, RingOp::Recv { fd: b, data: Buf::zeroed(100).into() });
        ring.enter();
    }
    assert_eq!(ring.0.borrow().entries.len(), 1, "the memory stays until the kernel is done");
    let other = ring.user();
    other.push(2, RingOp::Send { fd: a, data: text("x"), whole: true });
    for _ in 0..100 {
        ring.wait(Some(Duration::from_millis(10)));
        if ring.0.borrow().entries.is_empty() {
            break;
        }
    }
    assert!(ring.0.borrow().entries.is_empty());
    assert_eq!(ring.0.borrow().users.len(), 1);
}

#[test]
fn dropping_the_ring_cancels_operations() {
    let ring = Ring::new().unwrap();
    let (_a, b) = pair();
    let user = ring.user();
    user.push(1, RingOp::Recv { fd: b, data: Buf::zeroed(100).into() });
    ring.enter();
    drop(user);
    drop(ring);
}

#[test]
fn more_operations_than_queue_entries() {
    let ring = Ring::new().unwrap();
    let user = ring.user();
    let file = Arc::new(OwnedFd::from(tempfile::tempfile().unwrap()));
    let n = u64::from(ENTRIES) * 3;
    for i in 0..n {
        user.push(i, RingOp::Write { fd: file.clone(), offset: i * 4, data: text("abcd"), dsync: false });
    }
    let done = wait_for(&ring, &user, n as usize);
    assert_eq!(done.len() as u64, n);
    assert!(done.iter().all(|d| d.result == Ok(4)));
}

/// A core that never sleeps only checks and enters the ring. Completions that found the queue full
/// wait in the kernel, and nothing else reports them.
#[test]
fn a_full_completion_queue_is_emptied_without_sleeping() {
    let ring = Ring::new().unwrap();
    let user = ring.user();
    let file = Arc::new(OwnedFd::from(tempfile::tempfile().unwrap()));
    let n = u64::from(ENTRIES) * 20;
    for i in 0..n {
        let data = Buf::zeroed(1).into();
        user.push(i, RingOp::Read { fd: file.clone(), offset: 0, data, cached: false });
    }
    // Submits all at once, more than the completion queue has room for.
    ring.enter();
    let begin = Instant::now();
    let mut out = Vec::new();
    while (out.len() as u64) < n && begin.elapsed() < Duration::from_secs(20) {
        if ring.has_work() {
            ring.enter();
        }
        user.take(&mut out);
    }
    assert_eq!(out.len() as u64, n);
}

#[test]
fn errors_keep_their_errno() {
    let ring = Ring::new().unwrap();
    let user = ring.user();
    let (r, _w) = rustix::pipe::pipe().unwrap();
    user.push(9, RingOp::Fsync { fd: Arc::new(r), data_only: true });
    let done = wait_for(&ring, &user, 1);
    assert_eq!(done[0].result, Err(22));
}

/// If the user defers sends and the socket has room, one submit completes a send.
#[test]
fn a_send_that_leaves_at_once_needs_no_completion() {
    let ring = Ring::new().unwrap();
    let user = ring.user();
    let (a, b) = pair();
    user.push(1, RingOp::Send { fd: a, data: text("hello"), whole: true });
    assert!(
        !ring.0.borrow().kernel.supports_quick_send() || ring.has_waiter(),
        "the user has not deferred its sends"
    );
    user.set_defer_sends(true);
    assert!(!ring.has_waiter());
    let mut out = Vec::new();
    user.take(&mut out);
    assert!(out.is_empty());
    ring.enter();
    user.take(&mut out);
    assert_eq!((out.len(), out[0].tag, out[0].result, user.in_flight()), (1, 1, Ok(5), 0));
    let mut got = [0; 8];
    assert_eq!(rustix::io::read(&*b, &mut got).unwrap(), 5);
    assert_eq!(ring.0.borrow_mut().entries.len(), 0);
}

/// With more sends than the socket has room for, each completes, fully or short, in order. The test
/// sends the rest of short ones; no byte is lost or repeated.
#[test]
fn sends_to_a_full_socket_wait_for_room() {
    let ring = Ring::new().unwrap();
    let user = ring.user();
    user.set_defer_sends(true);
    let (a, b) = pair();
    let (mut sent, mut received, mut n) = (Vec::new(), Vec::new(), 0u32);
    let mut rest: Option<Segments> = None;
    let mut blocked = 0;
    while n < 200 || user.in_flight() > 0 || rest.is_some() {
        if user.in_flight() == 0 {
            let data = rest.take().unwrap_or_else(|| {
                n += 1;
                let mut data = Segments::from(Buf::zeroed(8_000));
                data.push(Buf::zeroed(2_000));
                let bytes: Vec<u8> = (0..10_000u32).map(|i| (i / 4 + n) as u8).collect();
                data.copy_from(&bytes);
                sent.extend_from_slice(&bytes);
                data
            });
            user.push(u64::from(n), RingOp::Send { fd: a.clone(), data, whole: true });
        }
        ring.enter();
        let mut out = Vec::new();
        user.take(&mut out);
        if let Some(mut done) = out.pop() {
            let bytes = done.result.unwrap() as usize;
            drop(done.data.split_to(bytes));
            rest = (!done.data.is_empty()).then_some(done.data);
        } else {
            // The send waits for room.
            blocked += 1;
            let mut buf = [0; 30_000];
            let got = rustix::io::read(&*b, &mut buf).unwrap();
            received.extend_from_slice(&buf[..got]);
            ring.wait(Some(Duration::from_millis(10)));
        }
    }
    drop(a);
    let mut buf = [0; 30_000];
    while let Ok(got @ 1..) = rustix::io::read(&*b, &mut buf) {
        received.extend_from_slice(&buf[..got]);
        if received.len() == sent.len() {
            break;
        }
    }
    assert!(blocked > 0, "the socket was never full");
    assert!(received == sent);
}

#[test]
fn a_send_to_a_closed_socket_fails() {
    let ring = Ring::new().unwrap();
    let user = ring.user();
    user.set_defer_sends(true);
    let (a, b) = pair();
    drop(b);
    for tag in [1, 2] {
        user.push(tag, RingOp::Send { fd: a.clone(), data: text("x"), whole: true });
    }
    user.push(3, RingOp::Send { fd: a, data: text("y"), whole: true });
    let done = wait_for(&ring, &user, 3);
    let mut tags: Vec<_> = done.iter().map(|d| (d.tag, d.result)).collect();
    tags.sort_unstable();
    assert_eq!(tags, [(1, Err(errno::EPIPE)), (2, Err(errno::EPIPE)), (3, Err(errno::EPIPE))]);
    assert!(ring.0.borrow().quick.is_empty());
}

/// Quick sends that have completed but were not reaped do not delay the drop.
#[test]
fn a_ring_with_quick_sends_is_dropped() {
    let ring = Ring::new().unwrap();
    let user = ring.user();
    let (a, _b) = pair();
    user.push(1, RingOp::Send { fd: a, data: text("x"), whole: true });
    drop(user);
    let begin = Instant::now();
    drop(ring);
    assert!(
        begin.elapsed() < Duration::from_secs(4),
        "the drop waited for a completion that the kernel does not post"
    );
}

/// A cancelled operation completes once, with ECANCELED or with the data that arrived before. The
/// cancel itself reports no completion.
#[test]
fn cancelled_operations_complete() {
    let ring = Ring::new().unwrap();
    let user = ring.user();
    let (a, b) = pair();
    let recv = |tag| user.push(tag, RingOp::Recv { fd: b.clone(), data: Buf::zeroed(100).into() });
    for submitted in [true, false] {
        recv(1);
        if submitted {
            ring.enter();
        }
        user.cancel(1);
        user.cancel(7);
        let done = wait_for(&ring, &user, 1);
        assert_eq!((done.len(), done[0].tag, &done[0].result), (1, 1, &Err(errno::ECANCELED)));
        assert_eq!((done[0].data.len(), user.in_flight()), (100, 0));
    }
    // Data that arrived before is not lost.
    user.push(2, RingOp::Send { fd: a.clone(), data: text("hello"), whole: true });
    recv(1);
    user.cancel(1);
    let mut done = wait_for(&ring, &user, 2);
    done.sort_by_key(|d| d.tag);
    if done[0].result == Err(errno::ECANCELED) {
        recv(1);
        done = wait_for(&ring, &user, 1);
    }
    assert_eq!(done[0].result, Ok(5));
    // An operation that did not fit the queue never reaches the kernel.
    for tag in 0..2 * u64::from(ENTRIES) {
        recv(tag);
    }
    (0..2 * u64::from(ENTRIES)).for_each(|tag| user.cancel(tag));
    let done = wait_for(&ring, &user, 2 * ENTRIES as usize);
    assert_eq!(done.len(), 2 * ENTRIES as usize);
    assert!(done.iter().all(|d| d.result == Err(errno::ECANCELED)));
}
