//! The event stream as server-sent events.
//!
//! Contract: a stream reads the events at the pace of its client ([`EventSubscription`]) and
//! buffers only a few. It counts against the limit of clients that wait for events, and keeps its
//! connection slot. If a client reads nothing for [`super::server::QUIET_MAX`], its connection is
//! closed.

use super::concurrency::{AppState, WAITS_MAX};
use super::connections::{ControlConnectionSlot, EventStreamSlotGuard};
use super::error::ErrorResponse;
use crate::api;
use crate::error::VerbError;
use crate::registry::EventSubscription;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Sse;
use axum::response::sse::Event;
use futures_util::stream::{Stream, unfold};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::OwnedSemaphorePermit;
use udm_core::errno::EBUSY;
use udm_dm::TargetError;

/// Interval of keep-alive comments while there are no events.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Maximum number of events read at once.
const BATCH: usize = 64;

/// Header with the last event that the client received.
const LAST_EVENT_ID: &str = "last-event-id";

/// A client that reads the event stream.
struct EventClient {
    listening: EventSubscription,
    ready: VecDeque<Arc<api::DeviceEventDescription>>,
    /// True after the first comment, which has the start number.
    has_started: bool,
    _stream: Option<EventStreamSlotGuard>,
    _place: OwnedSemaphorePermit,
}

pub(super) async fn handle_event_stream(
    State(shared): State<AppState>,
    request: Request,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, ErrorResponse> {
    let Ok(place) = Arc::clone(&shared.limits.waits).try_acquire_owned() else {
        let why = format!("{WAITS_MAX} clients wait for events already");
        return Err(VerbError::new("events", TargetError::errno(EBUSY).because(why)).into());
    };
    let after = match request.headers().get(LAST_EVENT_ID) {
        None => None,
        Some(id) => {
            let number = id.to_str().ok().and_then(|id| id.parse().ok());
            let bad = || ErrorResponse::request(StatusCode::BAD_REQUEST, "Last-Event-ID: expected a number");
            Some(number.ok_or_else(bad)?)
        }
    };
    let stream =
        request.extensions().get::<Arc<ControlConnectionSlot>>().map(ControlConnectionSlot::begin_stream);
    // A server that starts later has greater numbers, as long as there is less than one event per
    // microsecond. The numbers fit into the integers of JavaScript.
    let listening = shared.registry.listen(shared.began.ms() * 1000, after);
    let client =
        EventClient { listening, ready: VecDeque::new(), has_started: false, _stream: stream, _place: place };
    Ok(Sse::new(unfold(client, |mut client| async move {
        let event = client.next().await;
        Some((Ok(event), client))
    })))
}

impl EventClient {
    /// The next event or comment for the client.
    async fn next(&mut self) -> Event {
        if !std::mem::replace(&mut self.has_started, true) {
            // A client that disconnects before the first event knows where to continue.
            return Event::default().id(self.listening.seen().to_string()).comment("udm");
        }
        let events = self.listening.stream();
        loop {
            if let Some(event) = self.ready.pop_front() {
                // Sent without an event name, so a web page receives all kinds with one handler.
                let sent = Event::default().id(event.id.to_string());
                return sent.json_data(&*event).expect("plain structs can be written");
            }
            let mut next = std::pin::pin!(events.next());
            // Events are noticed from here on.
            next.as_mut().enable();
            self.ready.extend(self.listening.read(BATCH));
            if self.ready.is_empty() && tokio::time::timeout(KEEP_ALIVE, next).await.is_err() {
                return Event::default().comment("");
            }
        }
    }
}
