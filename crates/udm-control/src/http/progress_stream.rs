//! A stream that notes when its peer reads.
//!
//! A long answer may be read slowly. While the peer reads, the connection does not count as quiet.

use super::connections::ControlConnectionSlot;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// The stream of a connection.
pub(super) struct ProgressTrackingStream<S> {
    stream: S,
    slot: Arc<ControlConnectionSlot>,
}

impl<S> ProgressTrackingStream<S> {
    pub fn new(stream: S, slot: Arc<ControlConnectionSlot>) -> ProgressTrackingStream<S> {
        ProgressTrackingStream { stream, slot }
    }

    fn wrote(&self, done: io::Result<usize>) -> Poll<io::Result<usize>> {
        if done.as_ref().is_ok_and(|&bytes| bytes > 0) {
            self.slot.mark_progress();
        }
        Poll::Ready(done)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ProgressTrackingStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ProgressTrackingStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let done = ready!(Pin::new(&mut self.stream).poll_write(cx, bytes));
        self.wrote(done)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let done = ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, bytes));
        self.wrote(done)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
