//! Changes of state as server-sent events, as long as somebody reads them.
//!
//! Contract: a stream reads the changes at the pace of its client ([`EventSubscription`]) and keeps nothing
//! for it but a few. It has one of the places of those who wait for events, and its seat is not
//! given to a newcomer; a client that reads nothing for [`super::server::QUIET_MAX`] loses it.

use super::api;
use super::concurrency::{AppState, WAITS_MAX};
use super::connections::{ConnectionSlot, StreamGuard};
use super::error::ErrorResponse;
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

/// How often a stream says that it is there, when nothing changes.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Changes that are taken at once.
const BATCH: usize = 64;

/// Where a client goes on, by the name of its header.
const LAST_EVENT_ID: &str = "last-event-id";

/// A client that listens.
struct EventClient {
    listening: EventSubscription,
    ready: VecDeque<Arc<api::Event>>,
    /// It has been told where it begins.
    greeted: bool,
    _seat: Option<StreamGuard>,
    _place: OwnedSemaphorePermit,
}

pub(super) async fn events(
    State(shared): State<AppState>,
    request: Request,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, ErrorResponse> {
    let Ok(place) = Arc::clone(&shared.gates.waits).try_acquire_owned() else {
        let why = format!("{WAITS_MAX} clients wait for events already");
        return Err(VerbError::new("events", TargetError::errno(EBUSY).because(why)).into());
    };
    let after = match request.headers().get(LAST_EVENT_ID) {
        None => None,
        Some(id) => {
            let number = id.to_str().ok().and_then(|id| id.parse().ok());
            let bad = || ErrorResponse::request(StatusCode::BAD_REQUEST, "Last-Event-ID: a number is wanted");
            Some(number.ok_or_else(bad)?)
        }
    };
    let seat = request.extensions().get::<Arc<ConnectionSlot>>().map(ConnectionSlot::listens);
    // A server that begins later has greater numbers, as long as there are fewer than one a
    // microsecond; and they fit into what a script takes for a whole number.
    let listening = shared.registry.listen(shared.began.ms() * 1000, after);
    let client =
        EventClient { listening, ready: VecDeque::new(), greeted: false, _seat: seat, _place: place };
    Ok(Sse::new(unfold(client, |mut client| async move {
        let event = client.next().await;
        Some((Ok(event), client))
    })))
}

impl EventClient {
    /// What it is sent next.
    async fn next(&mut self) -> Event {
        if !std::mem::replace(&mut self.greeted, true) {
            // Whoever breaks off before the first change knows where to go on.
            return Event::default().id(self.listening.seen().to_string()).comment("udm");
        }
        let feed = self.listening.feed();
        loop {
            if let Some(event) = self.ready.pop_front() {
                // Without a name: a page hears all kinds by one listener, new ones too.
                let sent = Event::default().id(event.id.to_string());
                return sent.json_data(&*event).expect("plain structs can be written");
            }
            let mut next = std::pin::pin!(feed.next());
            // What comes from here on is heard.
            next.as_mut().enable();
            self.ready.extend(self.listening.read(BATCH));
            if self.ready.is_empty() && tokio::time::timeout(KEEP_ALIVE, next).await.is_err() {
                return Event::default().comment("");
            }
        }
    }
}
