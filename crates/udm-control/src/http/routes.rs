//! The one list of routes: what is served is what `/openapi.json` says.

use super::api;
use super::concurrency::AppState;
use super::handlers;
use crate::metrics;
use axum::handler::Handler;
use axum::http::Method;
use axum::routing::{MethodFilter, MethodRouter, on};
use schemars::{JsonSchema, Schema, SchemaGenerator};

/// Makes the schema of a body.
pub(super) type SchemaFn = fn(&mut SchemaGenerator) -> Schema;

/// A parameter behind `?`.
pub(super) struct QueryParam {
    pub name: &'static str,
    /// "integer", "string" or "boolean".
    pub kind: &'static str,
    pub description: &'static str,
}

/// `?inactive=1`.
const SLOT: &[QueryParam] =
    &[QueryParam { name: "inactive", kind: "integer", description: "1 for the table in the inactive slot" }];

/// Of what differs.
const PAGE: &[QueryParam] = &[
    QueryParam { name: "against", kind: "string", description: "Another snapshot; without it the origin" },
    QueryParam {
        name: "from",
        kind: "integer",
        description: "The byte at which the page begins, 0 without it",
    },
    QueryParam { name: "max", kind: "integer", description: "Ranges at the most, up to 16384" },
];

const TIMEOUT: QueryParam = QueryParam {
    name: "timeout_ms",
    kind: "integer",
    description: "Call it off when it takes longer: everything is as it was then",
};

/// Of a removal.
const REMOVAL: &[QueryParam] = &[
    QueryParam {
        name: "force",
        kind: "boolean",
        description: "Replace its table by one that fails all requests first, whether it can be removed then or not",
    },
    QueryParam {
        name: "deferred",
        kind: "boolean",
        description: "If it is open, remove it when it is not any more",
    },
    TIMEOUT,
];

/// Of the server's file.
const FILE: &[QueryParam] =
    &[QueryParam { name: "dry_run", kind: "boolean", description: "Say what would be done, and do nothing" }];

/// Of a removal of a snapshot.
const KEEP: &[QueryParam] = &[
    QueryParam { name: "keep_store", kind: "boolean", description: "Leave the store that was made for it" },
    TIMEOUT,
];

/// What a route gives back.
#[derive(Clone, Copy)]
pub(super) enum ResponseKind {
    /// 204.
    Nothing,
    /// JSON.
    Json(SchemaFn),
    /// Server-sent events, the data of each in JSON.
    Events(SchemaFn),
    /// Something of this type, and of this kind in JSON schema's words.
    Other(&'static str, &'static str),
}

/// One method of one path.
pub(super) struct Route {
    /// GET, POST, PUT or DELETE.
    pub method: Method,
    /// The path, with `{name}` where a device is named.
    pub path: &'static str,
    /// A stable name for generated clients.
    pub id: &'static str,
    /// What it does, in one line.
    pub summary: &'static str,
    /// What it takes behind `?`.
    pub query: &'static [QueryParam],
    /// What it takes.
    pub body: Option<SchemaFn>,
    /// What it gives back.
    pub reply: ResponseKind,
    /// What serves it.
    pub serve: MethodRouter<AppState>,
}

impl Route {
    fn new<H, T>(
        method: Method,
        path: &'static str,
        id: &'static str,
        summary: &'static str,
        handler: H,
    ) -> Route
    where
        H: Handler<T, AppState>,
        T: 'static,
    {
        let filter = MethodFilter::try_from(method.clone()).expect("a plain method");
        let serve = on(filter, handler);
        Route { method, path, id, summary, query: &[], body: None, reply: ResponseKind::Nothing, serve }
    }

    fn query(self, query: &'static [QueryParam]) -> Route {
        Route { query, ..self }
    }

    fn takes<T: JsonSchema>(self) -> Route {
        Route { body: Some(SchemaGenerator::subschema_for::<T>), ..self }
    }

    fn gives<T: JsonSchema>(self) -> Route {
        Route { reply: ResponseKind::Json(SchemaGenerator::subschema_for::<T>), ..self }
    }

    fn gives_events<T: JsonSchema>(self) -> Route {
        Route { reply: ResponseKind::Events(SchemaGenerator::subschema_for::<T>), ..self }
    }

    fn gives_other(self, content_type: &'static str, kind: &'static str) -> Route {
        Route { reply: ResponseKind::Other(content_type, kind), ..self }
    }

    /// The status of success.
    pub fn success(&self) -> u16 {
        match self.reply {
            ResponseKind::Nothing => 204,
            ResponseKind::Json(_) | ResponseKind::Events(_) | ResponseKind::Other(..) => 200,
        }
    }
}

/// Every route.
pub(super) fn all() -> Vec<Route> {
    let mut all = devices();
    all.extend(snapshots());
    all
}

fn snapshots() -> Vec<Route> {
    use super::snapshots as s;
    let (get, post, delete) = (Method::GET, Method::POST, Method::DELETE);
    let one = "/v1/snapshots/{name}";
    vec![
        Route::new(get.clone(), "/v1/snapshots", "listSnapshots", "All snapshots", s::list)
            .gives::<api::SnapshotList>(),
        Route::new(
            post.clone(),
            "/v1/snapshots",
            "createSnapshots",
            "Makes snapshots at one instant, all or none",
            s::create,
        )
        .takes::<api::CreateSnapshots>()
        .gives::<api::SnapshotList>(),
        Route::new(get.clone(), one, "getSnapshot", "One snapshot", s::one).gives::<api::Snapshot>(),
        Route::new(delete, one, "removeSnapshot", "Removes a snapshot that nobody uses", s::remove)
            .query(KEEP),
        Route::new(
            post,
            "/v1/snapshots/{name}/merge",
            "mergeSnapshot",
            "Begins to bring a snapshot back into its origin, which reads as the snapshot from then on",
            s::merge,
        )
        .gives::<api::Snapshot>(),
        Route::new(
            get,
            "/v1/snapshots/{name}/changes",
            "getChanges",
            "Where a snapshot and its origin, or another snapshot, may differ",
            s::changes,
        )
        .query(PAGE)
        .gives::<api::Changes>(),
    ]
}

fn devices() -> Vec<Route> {
    use handlers as h;
    let (get, post, put, delete) = (Method::GET, Method::POST, Method::PUT, Method::DELETE);
    vec![
        Route::new(get.clone(), "/v1/devices", "listDevices", "All mapped devices", h::list)
            .gives::<api::DeviceList>(),
        Route::new(
            post.clone(),
            "/v1/devices",
            "createDevice",
            "Makes a device, loads its table and resumes it",
            h::create,
        )
        .takes::<api::Create>()
        .gives::<api::Device>(),
        Route::new(
            post.clone(),
            "/v1/multipath",
            "createMultipath",
            "Makes a multipath device from its paths, and resumes it",
            h::create_multipath,
        )
        .takes::<api::CreateMultipath>()
        .gives::<api::Device>(),
        Route::new(get.clone(), "/v1/devices/{name}", "getDevice", "One device", h::info)
            .gives::<api::Device>(),
        Route::new(
            delete.clone(),
            "/v1/devices/{name}",
            "removeDevice",
            "Removes a device that nobody uses",
            h::remove,
        )
        .query(REMOVAL),
        Route::new(
            post.clone(),
            "/v1/devices/{name}/rename",
            "renameDevice",
            "Gives it another name, or its uuid; whatever uses it goes on",
            h::rename,
        )
        .takes::<api::Rename>(),
        Route::new(
            post.clone(),
            "/v1/devices/{name}/wait",
            "waitEvent",
            "Waits for an event, and describes the device then; its removal is one, too",
            h::wait,
        )
        .takes::<api::Wait>()
        .gives::<api::Device>(),
        Route::new(
            get.clone(),
            "/v1/devices/{name}/status",
            "getStatus",
            "The status of its table",
            h::status,
        )
        .query(SLOT)
        .gives::<api::Status>(),
        Route::new(get.clone(), "/v1/devices/{name}/table", "getTable", "Its table", h::table)
            .query(SLOT)
            .gives::<api::Table>(),
        Route::new(
            put,
            "/v1/devices/{name}/table",
            "loadTable",
            "Loads a table into the inactive slot",
            h::load,
        )
        .takes::<api::Load>(),
        Route::new(delete, "/v1/devices/{name}/table", "clearTable", "Empties the inactive slot", h::clear),
        Route::new(
            post.clone(),
            "/v1/devices/{name}/message",
            "sendMessage",
            "Sends a message to a target",
            h::message,
        )
        .takes::<api::Message>()
        .gives::<api::Answer>(),
        Route::new(
            post.clone(),
            "/v1/devices/{name}/path",
            "commandPath",
            "Fails a path until it is reinstated by command or message, or reinstates it",
            h::command_path,
        )
        .takes::<api::CommandPath>(),
        Route::new(
            post.clone(),
            "/v1/devices/{name}/queue",
            "changeQueue",
            "Changes settings of the queues in front of what its table uses, and of its own, while requests are under way",
            h::change_queue,
        )
        .takes::<api::ChangeQueue>()
        .gives::<api::Device>(),
        Route::new(
            post.clone(),
            "/v1/devices/{name}/power",
            "turnPower",
            "Turns the power of disks that its table uses on or off",
            h::turn_power,
        )
        .takes::<api::TurnPower>()
        .gives::<api::Device>(),
        Route::new(
            post.clone(),
            "/v1/devices/{name}/suspend",
            "suspendDevice",
            "Parks new requests and waits for those in flight",
            h::suspend,
        )
        .takes::<api::Suspend>(),
        Route::new(
            post.clone(),
            "/v1/devices/{name}/resume",
            "resumeDevice",
            "Swaps a loaded table in and lets requests go",
            h::resume,
        )
        .takes::<api::Resume>(),
        Route::new(
            post.clone(),
            "/v1/suspend",
            "suspendTogether",
            "Suspends several devices, all or none: at one instant none has a request in flight",
            h::suspend_together,
        )
        .takes::<api::SuspendTogether>(),
        Route::new(
            post,
            "/v1/resume",
            "resumeTogether",
            "Resumes several devices, all with their loaded tables or none",
            h::resume_together,
        )
        .takes::<api::ResumeTogether>(),
        Route::new(
            get.clone(),
            "/v1/events",
            "listen",
            "Changes of state as they come, without an end; behind the header Last-Event-ID those since",
            super::events::events,
        )
        .gives_events::<api::Event>(),
        Route::new(get.clone(), "/v1/tables", "listTables", "The tables of all devices", h::tables)
            .query(SLOT)
            .gives::<api::TableList>(),
        Route::new(
            get.clone(),
            "/v1/statuses",
            "listStatuses",
            "The status of the tables of all devices",
            h::statuses,
        )
        .query(SLOT)
        .gives::<api::StatusList>(),
        Route::new(get.clone(), "/v1/exports", "listExports", "What clients can connect to", h::exports)
            .gives::<api::ExportList>(),
        Route::new(
            Method::POST,
            "/v1/reconfigure",
            "reconfigure",
            "Reads the file that the server was started with again, and does what it says, each device all or nothing",
            super::config::reconfigure,
        )
        .query(FILE)
        .gives::<api::Reconfigured>(),
        Route::new(get.clone(), "/v1/version", "getVersion", "The server and its targets", h::version)
            .gives::<api::Version>(),
        Route::new(
            get.clone(),
            "/v1/stats",
            "getStats",
            "What there is and what it has done, in numbers",
            h::stats,
        )
        .gives::<api::Stats>(),
        Route::new(get.clone(), "/metrics", "metrics", "The same numbers for Prometheus", h::metrics)
            .gives_other(metrics::CONTENT_TYPE, "string"),
        Route::new(get, "/openapi.json", "openapi", "This description", h::openapi)
            .gives_other("application/json", "object"),
    ]
}
