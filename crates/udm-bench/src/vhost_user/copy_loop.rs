//! The minimum cost of a server in another thread: two rings of requests, and a loop that copies.
//!
//! A request carries its buffer. The loop takes all requests that have arrived, copies a block into
//! the buffer of each read and out of the buffer of each write, and returns them. Either thread
//! sleeps if its ring is empty. There are no descriptors, offsets, errors or notifications to
//! negotiate, so any server that moves the data costs at least as much.

use super::poll_for;
use crate::connection::{ConnectionRequest, RequestConnection, WAIT};
use anyhow::{Result, bail, ensure};
use crossbeam_queue::ArrayQueue;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, fence};
use std::sync::{Arc, OnceLock};
use std::thread::{self, Thread};
use std::time::Duration;
use udm_core::Op;

/// A request with its data.
struct CarriedRequest {
    op: Op,
    cookie: u64,
    buffer: Box<[u8]>,
}

/// A ring in one direction. Its reader sleeps if it is empty.
struct CopyRing {
    requests: ArrayQueue<CarriedRequest>,
    /// The reader, once it has slept.
    reader: OnceLock<Thread>,
    asleep: AtomicBool,
    /// The writer has ended.
    closed: AtomicBool,
}

impl CopyRing {
    fn new(depth: u32) -> Arc<CopyRing> {
        Arc::new(CopyRing {
            requests: ArrayQueue::new(depth as usize),
            reader: OnceLock::new(),
            asleep: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        })
    }

    /// Wakes the reader if it sleeps. Called once per batch.
    fn wake(&self) {
        // Pairs with the fence in `wait`: either this sees the flag, or the reader sees the
        // request.
        fence(SeqCst);
        if self.asleep.load(Relaxed) {
            self.reader.get().expect("set before the flag").unpark();
        }
    }

    /// Sleeps until a request arrives, at most for `most`.
    fn wait(&self, most: Duration) {
        self.reader.get_or_init(thread::current);
        self.asleep.store(true, Release);
        fence(SeqCst);
        if self.requests.is_empty() && !self.closed.load(Relaxed) {
            thread::park_timeout(most);
        }
        self.asleep.store(false, Relaxed);
    }
}

/// The side of the load.
pub struct CopyLoopConnection {
    to_server: Arc<CopyRing>,
    from_server: Arc<CopyRing>,
    /// The buffers of requests that are not in flight, by cookie.
    buffers: Vec<Option<Box<[u8]>>>,
    /// Requests have been added since the last flush.
    added: bool,
    poll: bool,
}

/// The side of the loop.
pub struct CopyLoopServer {
    to_server: Arc<CopyRing>,
    from_server: Arc<CopyRing>,
    block: Box<[u8]>,
}

impl CopyLoopConnection {
    /// Creates both sides for `depth` requests of `block` bytes. The side of the load may `poll`
    /// instead of sleeping.
    pub fn new(depth: u32, block: usize, poll: bool) -> (CopyLoopConnection, CopyLoopServer) {
        let (to_server, from_server) = (CopyRing::new(depth), CopyRing::new(depth));
        let buffers = (0..depth).map(|_| Some(vec![1; block].into_boxed_slice())).collect();
        let block = vec![1; block].into_boxed_slice();
        let server = CopyLoopServer {
            to_server: Arc::clone(&to_server),
            from_server: Arc::clone(&from_server),
            block,
        };
        (CopyLoopConnection { to_server, from_server, buffers, added: false, poll }, server)
    }

    fn reap(&mut self, done: &mut impl FnMut(u64, i32)) -> bool {
        let mut some = false;
        while let Some(CarriedRequest { cookie, buffer, .. }) = self.from_server.requests.pop() {
            self.buffers[cookie as usize] = Some(buffer);
            done(cookie, 0);
            some = true;
        }
        some
    }
}

impl Drop for CopyLoopConnection {
    fn drop(&mut self) {
        self.to_server.closed.store(true, Release);
        self.to_server.wake();
    }
}

impl RequestConnection for CopyLoopConnection {
    fn has_room(&self) -> bool {
        true
    }

    fn put(&mut self, request: ConnectionRequest) -> Result<()> {
        let ConnectionRequest { op, cookie, .. } = request;
        let Some(buffer) = self.buffers[cookie as usize].take() else { bail!("a cookie is used twice") };
        let full = self.to_server.requests.push(CarriedRequest { op, cookie, buffer }).is_err();
        ensure!(!full, "more requests than the queue depth");
        self.added = true;
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        if std::mem::take(&mut self.added) {
            self.to_server.wake();
        }
        Ok(())
    }

    fn replies(
        &mut self,
        most: Option<Duration>,
        _: impl Fn(u64) -> Option<(Op, u32)>,
        mut done: impl FnMut(u64, i32),
    ) -> Result<()> {
        if self.reap(&mut done) {
            return Ok(());
        }
        if self.poll {
            return poll_for(most, || self.reap(&mut done));
        }
        self.from_server.wait(most.map_or(WAIT, |most| most.min(WAIT)));
        self.reap(&mut done);
        Ok(())
    }
}

impl CopyLoopServer {
    /// Serves until the connection is dropped.
    pub fn serve(mut self) {
        loop {
            let mut some = false;
            while let Some(mut request) = self.to_server.requests.pop() {
                match request.op {
                    Op::Read => request.buffer.copy_from_slice(&self.block),
                    Op::Write => self.block.copy_from_slice(&request.buffer),
                    _ => {}
                }
                // The ring has room for all requests in flight.
                drop(self.from_server.requests.push(request));
                some = true;
            }
            if some {
                self.from_server.wake();
            } else if self.to_server.closed.load(Acquire) {
                return;
            } else {
                self.to_server.wait(WAIT);
            }
        }
    }
}
