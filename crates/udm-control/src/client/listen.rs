//! The event stream of a client.

use super::{ControlClient, ControlClientError};
use crate::api::{self, verbs};
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::{Request, StatusCode};
use std::ops::ControlFlow;
use std::time::Duration;

/// Maximum length of a line in bytes.
const LINE_MAX: usize = 1 << 20;

/// Maximum silence of a server, three times its keep-alive interval.
const QUIET_MAX: Duration = Duration::from_secs(30);

/// Parses server-sent events.
#[derive(Default)]
struct SseParser(Vec<u8>);

impl SseParser {
    /// The events whose data lines are complete with `more`. Other lines of an event repeat its
    /// data, and comments are keep-alives.
    fn take(&mut self, more: &[u8]) -> Result<Vec<api::DeviceEventDescription>, String> {
        self.0.extend_from_slice(more);
        let mut events = Vec::new();
        let mut taken = 0;
        while let Some(end) = self.0[taken..].iter().position(|byte| *byte == b'\n') {
            let line = &self.0[taken..taken + end];
            taken += end + 1;
            if let Some(data) = line.strip_prefix(b"data:") {
                let event = serde_json::from_slice(data).map_err(|e| format!("unexpected event: {e}"))?;
                events.push(event);
            }
        }
        self.0.drain(..taken);
        if self.0.len() > LINE_MAX { Err("an event is too long".into()) } else { Ok(events) }
    }
}

impl ControlClient {
    /// Calls `hear` for the events of all devices, from now on or after event `after`, until `hear`
    /// breaks or `enough` completes.
    ///
    /// # Errors
    /// See [`ControlClientError`]; the end of the server is one.
    pub fn listen<T>(
        &self,
        after: Option<u64>,
        hear: impl FnMut(api::DeviceEventDescription) -> ControlFlow<T>,
        enough: impl Future<Output = T>,
    ) -> Result<T, ControlClientError> {
        let mut request = self.request(verbs::LISTEN, Vec::new())?;
        if let Some(after) = after {
            request.headers_mut().insert("last-event-id", after.into());
        }
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|e| self.broken(&e))?;
        runtime.block_on(async {
            tokio::select! {
                done = self.hear(request, hear) => done,
                done = enough => Ok(done),
            }
        })
    }

    async fn hear<T>(
        &self,
        request: Request<Full<Bytes>>,
        mut hear: impl FnMut(api::DeviceEventDescription) -> ControlFlow<T>,
    ) -> Result<T, ControlClientError> {
        let silent = || self.broken(&"the server does not answer: is it stopped, or stuck?");
        let (answer, _driver) = self.ask(request).await?;
        let status = answer.status();
        let mut body = answer.into_body();
        if status != StatusCode::OK {
            let bytes = body.collect().await.map_err(|e| self.broken(&e))?.to_bytes();
            return Err(self.refused(status, &bytes));
        }
        let mut lines = SseParser::default();
        loop {
            let next = tokio::time::timeout(QUIET_MAX, body.frame()).await;
            let ended = || self.broken(&"the server has ended");
            let frame = next.map_err(|_| silent())?.ok_or_else(ended)?.map_err(|_| ended())?;
            let Ok(bytes) = frame.into_data() else { continue };
            for event in lines.take(&bytes).map_err(|why| self.broken(&why))? {
                if let ControlFlow::Break(done) = hear(event) {
                    return Ok(done);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_in_any_pieces() {
        let event = |id| api::DeviceEventDescription {
            id,
            line: "a: b".into(),
            ..api::DeviceEventDescription::default()
        };
        let data = |id| format!("id:{id}\nevent:x\ndata:{}\n\n", serde_json::to_string(&event(id)).unwrap());
        let text = format!("id:6\n:udm\n\n{}:\n\n{}", data(7), data(8));
        let wanted = [event(7), event(8)];
        for length in 1..text.len() {
            let mut lines = SseParser::default();
            let pieces = text.as_bytes().chunks(length);
            let events: Vec<api::DeviceEventDescription> =
                pieces.flat_map(|piece| lines.take(piece).unwrap()).collect();
            assert_eq!(events, wanted, "pieces of {length}");
        }
        assert!(SseParser::default().take(b"data:{}\n").is_err());
        assert!(SseParser::default().take(&vec![b'x'; LINE_MAX + 1]).is_err());
    }
}
