//! The one list of routes: the server and `/openapi.json` both use it.

use super::concurrency::AppState;
use super::handlers;
use crate::api;
use crate::metrics;
use axum::handler::Handler;
use axum::http::Method;
use axum::routing::{MethodFilter, MethodRouter, on};
use schemars::{JsonSchema, Schema, SchemaGenerator};

/// Generates the schema of a body.
pub(super) type SchemaFn = fn(&mut SchemaGenerator) -> Schema;

/// A query parameter.
pub(super) struct QueryParam {
    pub name: &'static str,
    /// "integer", "string" or "boolean".
    pub kind: &'static str,
    pub description: &'static str,
}

/// `?inactive=1`.
const SLOT: &[QueryParam] =
    &[QueryParam { name: "inactive", kind: "integer", description: "1 for the table in the inactive slot" }];

/// Parameters of a page of changed ranges.
const PAGE: &[QueryParam] = &[
    QueryParam { name: "against", kind: "string", description: "Another snapshot; by default the origin" },
    QueryParam {
        name: "from",
        kind: "integer",
        description: "The byte at which the page begins, by default 0",
    },
    QueryParam { name: "max", kind: "integer", description: "Maximum number of ranges, up to 16384" },
];

const TIMEOUT: QueryParam = QueryParam {
    name: "timeout_ms",
    kind: "integer",
    description: "Cancel after this many milliseconds; nothing is removed then",
};

/// Parameters of a removal.
const REMOVAL: &[QueryParam] = &[
    QueryParam {
        name: "force",
        kind: "boolean",
        description: "First replace its table by one that fails all requests, even if the removal fails then",
    },
    QueryParam {
        name: "deferred",
        kind: "boolean",
        description: "If it is open, remove it after its last close",
    },
    TIMEOUT,
];

/// Parameters of a reconfigure.
const FILE: &[QueryParam] =
    &[QueryParam { name: "dry_run", kind: "boolean", description: "Only report what would be done" }];

/// Parameters of the removal of a snapshot.
const KEEP: &[QueryParam] = &[
    QueryParam { name: "keep_store", kind: "boolean", description: "Keep the store that was created for it" },
    TIMEOUT,
];

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

/// One method of one path.
pub(super) struct Route {
    /// GET, POST, PUT or DELETE.
    pub method: Method,
    /// The path, with `{name}` for a device.
    pub path: &'static str,
    /// Stable name for generated clients.
    pub id: &'static str,
    /// Short description.
    pub summary: &'static str,
    /// Query parameters.
    pub query: &'static [QueryParam],
    /// Schema of the request body.
    pub body: Option<SchemaFn>,
    /// Response on success.
    pub reply: ResponseKind,
    /// The handler.
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
            "Creates snapshots at one instant, all or none",
            s::create,
        )
        .takes::<api::CreateSnapshots>()
        .gives::<api::SnapshotList>(),
        Route::new(get.clone(), one, "getSnapshot", "One snapshot", s::one).gives::<api::Snapshot>(),
        Route::new(delete, one, "removeSnapshot", "Removes a snapshot that is not in use", s::remove)
            .query(KEEP),
        Route::new(
            post,
            "/v1/snapshots/{name}/merge",
            "mergeSnapshot",
            "Starts merging a snapshot into its origin, which reads as the snapshot from then on",
            s::merge,
        )
        .gives::<api::Snapshot>(),
        Route::new(
            get,
            "/v1/snapshots/{name}/changes",
            "getChanges",
            "The ranges in which a snapshot may differ from its origin or another snapshot",
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
            "Creates a device, loads its table and resumes it",
            h::create,
        )
        .takes::<api::Create>()
        .gives::<api::Device>(),
        Route::new(
            post.clone(),
            "/v1/multipath",
            "createMultipath",
            "Creates a multipath device from its paths, and resumes it",
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
            "Removes a device that is not in use",
            h::remove,
        )
        .query(REMOVAL),
        Route::new(
            post.clone(),
            "/v1/devices/{name}/rename",
            "renameDevice",
            "Gives a device another name, or a uuid; clients and tables that use it are not disturbed",
            h::rename,
        )
        .takes::<api::Rename>(),
        Route::new(
            post.clone(),
            "/v1/devices/{name}/wait",
            "waitEvent",
            "Waits for an event of a device, and describes it then; its removal is an event, too",
            h::wait,
        )
        .takes::<api::Wait>()
        .gives::<api::Device>(),
        Route::new(
            get.clone(),
            "/v1/devices/{name}/status",
            "getStatus",
            "The status of a device's table",
            h::status,
        )
        .query(SLOT)
        .gives::<api::Status>(),
        Route::new(get.clone(), "/v1/devices/{name}/table", "getTable", "A device's table", h::table)
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
            "Reinstates a path, or fails it until a command or message reinstates it",
            h::command_path,
        )
        .takes::<api::CommandPath>(),
        Route::new(
            post.clone(),
            "/v1/devices/{name}/queue",
            "changeQueue",
            "Changes settings of a device's queues: its own and those of the disks of its table; requests continue",
            h::change_queue,
        )
        .takes::<api::ChangeQueue>()
        .gives::<api::Device>(),
        Route::new(
            post.clone(),
            "/v1/devices/{name}/power",
            "turnPower",
            "Turns the power of disks that a device's table uses on or off",
            h::turn_power,
        )
        .takes::<api::TurnPower>()
        .gives::<api::Device>(),
        Route::new(
            post.clone(),
            "/v1/devices/{name}/suspend",
            "suspendDevice",
            "Holds back new requests and waits for those in flight",
            h::suspend,
        )
        .takes::<api::Suspend>(),
        Route::new(
            post.clone(),
            "/v1/devices/{name}/resume",
            "resumeDevice",
            "Makes a loaded table live and lets requests continue",
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
            "Stream of events, without end; with the header Last-Event-ID it continues after that event",
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
        Route::new(get.clone(), "/v1/exports", "listExports", "The exports that clients can connect to", h::exports)
            .gives::<api::ExportList>(),
        Route::new(
            Method::POST,
            "/v1/reconfigure",
            "reconfigure",
            "Reads the server's configuration file again and applies it; each device changes completely or not at all",
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
            "The counters of the server, its cores and its devices",
            h::stats,
        )
        .gives::<api::Stats>(),
        Route::new(get.clone(), "/metrics", "metrics", "The same numbers for Prometheus", h::metrics)
            .gives_other(metrics::CONTENT_TYPE, "string"),
        Route::new(get, "/openapi.json", "openapi", "This description", h::openapi)
            .gives_other("application/json", "object"),
    ]
}
