//! The handlers of the verbs. The router, `/openapi.json` and the fuzzers use this list.

use super::concurrency::AppState;
use super::{config, events, handlers as h, snapshots as s};
use crate::api::verbs::{self, Verb};
use crate::metrics;
use axum::handler::Handler;
use axum::http::Method;
use axum::routing::{MethodFilter, MethodRouter, on};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::any::TypeId;
use std::borrow::Cow;

/// Generates a schema.
pub(super) type SchemaFn = fn(&mut SchemaGenerator) -> Schema;

/// Kind of response of a route.
#[derive(Clone, Copy)]
pub(super) enum ResponseKind {
    /// 204.
    Nothing,
    /// JSON.
    Json(SchemaFn),
    /// Server-sent events with JSON data.
    Events(SchemaFn),
    /// A content type, and its type in JSON schema.
    Other(&'static str, &'static str),
}

/// A verb with its handler.
pub(super) struct Route {
    /// GET, POST, PUT or DELETE.
    pub method: Method,
    /// The path, with `{name}` for a device.
    pub path: Cow<'static, str>,
    /// Stable name for generated clients.
    pub id: &'static str,
    /// Short description.
    pub summary: &'static str,
    /// Schema of an object of the query parameters.
    pub query: Option<SchemaFn>,
    /// Schema of the request body.
    pub body: Option<SchemaFn>,
    /// Reads a request body and writes it as JSON again; `None` if it can't be read.
    pub rewrite_body: fn(&[u8]) -> Option<Vec<u8>>,
    /// Response on success.
    pub reply: ResponseKind,
    /// The handler.
    pub serve: MethodRouter<AppState>,
}

fn route<Q, B, R, H, T>(verb: Verb<Q, B, R>, handler: H) -> Route
where
    Q: JsonSchema + 'static,
    B: JsonSchema + Serialize + DeserializeOwned + 'static,
    R: JsonSchema + 'static,
    H: Handler<T, AppState>,
    T: 'static,
{
    let filter = MethodFilter::try_from(verb.method.clone()).expect("a plain method");
    Route {
        method: verb.method,
        path: verb.path,
        id: verb.id,
        summary: verb.summary,
        query: unless_unit::<Q>(Q::json_schema),
        body: unless_unit::<B>(SchemaGenerator::subschema_for::<B>),
        rewrite_body: rewrite::<B>,
        reply: unless_unit::<R>(SchemaGenerator::subschema_for::<R>)
            .map_or(ResponseKind::Nothing, ResponseKind::Json),
        serve: on(filter, handler),
    }
}

/// `schema`, except for `()`, which means that the verb has nothing of this kind.
fn unless_unit<T: 'static>(schema: SchemaFn) -> Option<SchemaFn> {
    (TypeId::of::<T>() != TypeId::of::<()>()).then_some(schema)
}

fn rewrite<T: Serialize + DeserializeOwned>(json: &[u8]) -> Option<Vec<u8>> {
    let body: T = serde_json::from_slice(json).ok()?;
    Some(serde_json::to_vec(&body).expect("plain structs can be written"))
}

impl Route {
    /// The reply is a stream of events with its type as data.
    fn events(self) -> Route {
        let ResponseKind::Json(schema) = self.reply else { return self };
        Route { reply: ResponseKind::Events(schema), ..self }
    }

    /// The reply is a document of another kind.
    fn document(self, content_type: &'static str, kind: &'static str) -> Route {
        Route { reply: ResponseKind::Other(content_type, kind), ..self }
    }

    /// HTTP status on success.
    pub fn success(&self) -> u16 {
        match self.reply {
            ResponseKind::Nothing => 204,
            ResponseKind::Json(_) | ResponseKind::Events(_) | ResponseKind::Other(..) => 200,
        }
    }
}

/// All routes.
pub(super) fn all() -> Vec<Route> {
    vec![
        route(verbs::LIST_DEVICES, h::list),
        route(verbs::CREATE_DEVICE, h::create),
        route(verbs::CREATE_MULTIPATH, h::create_multipath),
        route(verbs::GET_DEVICE, h::info),
        route(verbs::REMOVE_DEVICE, h::remove),
        route(verbs::RENAME_DEVICE, h::rename),
        route(verbs::WAIT_EVENT, h::wait),
        route(verbs::GET_STATUS, h::status),
        route(verbs::GET_TABLE, h::table),
        route(verbs::LOAD_TABLE, h::load),
        route(verbs::CLEAR_TABLE, h::clear),
        route(verbs::SEND_MESSAGE, h::message),
        route(verbs::COMMAND_PATH, h::command_path),
        route(verbs::CHANGE_QUEUE, h::change_queue),
        route(verbs::TURN_POWER, h::turn_power),
        route(verbs::SUSPEND_DEVICE, h::suspend),
        route(verbs::RESUME_DEVICE, h::resume),
        route(verbs::SUSPEND_TOGETHER, h::suspend_together),
        route(verbs::RESUME_TOGETHER, h::resume_together),
        route(verbs::LISTEN, events::events).events(),
        route(verbs::LIST_TABLES, h::tables),
        route(verbs::LIST_STATUSES, h::statuses),
        route(verbs::LIST_EXPORTS, h::exports),
        route(verbs::RECONFIGURE, config::reconfigure),
        route(verbs::GET_VERSION, h::version),
        route(verbs::GET_STATS, h::stats),
        route(verbs::METRICS, h::metrics).document(metrics::CONTENT_TYPE, "string"),
        route(verbs::OPENAPI, h::openapi).document("application/json", "object"),
        route(verbs::LIST_SNAPSHOTS, s::list),
        route(verbs::CREATE_SNAPSHOTS, s::create),
        route(verbs::GET_SNAPSHOT, s::one),
        route(verbs::REMOVE_SNAPSHOT, s::remove),
        route(verbs::MERGE_SNAPSHOT, s::merge),
        route(verbs::GET_CHANGES, s::changes),
    ]
}
