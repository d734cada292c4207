//! The handlers of the verbs. The router, `/openapi.json` and the fuzzers use this list.

use super::concurrency::AppState;
use super::{clones, config, events, handlers as h, moves, nvme, snapshots as s, ublk, vhost_user};
use crate::api::verbs::{self, ApiVerbEndpoint};
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

fn route_verb_to_handler<Q, B, R, H, T>(verb: ApiVerbEndpoint<Q, B, R>, handler: H) -> Route
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
        query: schema_unless_unit_type::<Q>(Q::json_schema),
        body: schema_unless_unit_type::<B>(SchemaGenerator::subschema_for::<B>),
        rewrite_body: reserialize_json_body::<B>,
        reply: schema_unless_unit_type::<R>(SchemaGenerator::subschema_for::<R>)
            .map_or(ResponseKind::Nothing, ResponseKind::Json),
        serve: on(filter, handler),
    }
}

/// `schema`, except for `()`, which means that the verb has nothing of this kind.
fn schema_unless_unit_type<T: 'static>(schema: SchemaFn) -> Option<SchemaFn> {
    (TypeId::of::<T>() != TypeId::of::<()>()).then_some(schema)
}

fn reserialize_json_body<T: Serialize + DeserializeOwned>(json: &[u8]) -> Option<Vec<u8>> {
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
pub(super) fn all_http_routes() -> Vec<Route> {
    vec![
        route_verb_to_handler(verbs::LIST_DEVICES, h::handle_list_devices),
        route_verb_to_handler(verbs::CREATE_DEVICE, h::handle_create_device),
        route_verb_to_handler(verbs::CREATE_MULTIPATH, h::handle_create_multipath),
        route_verb_to_handler(verbs::GET_DEVICE, h::handle_get_device),
        route_verb_to_handler(verbs::REMOVE_DEVICE, h::handle_remove_device),
        route_verb_to_handler(verbs::RENAME_DEVICE, h::handle_rename_device),
        route_verb_to_handler(verbs::WAIT_EVENT, h::handle_wait_device_event),
        route_verb_to_handler(verbs::GET_STATUS, h::handle_get_table_status),
        route_verb_to_handler(verbs::GET_TABLE, h::handle_get_table),
        route_verb_to_handler(verbs::LOAD_TABLE, h::handle_load_table),
        route_verb_to_handler(verbs::CLEAR_TABLE, h::handle_clear_inactive_table),
        route_verb_to_handler(verbs::SEND_MESSAGE, h::handle_send_target_message),
        route_verb_to_handler(verbs::COMMAND_PATH, h::handle_fail_or_reinstate_path),
        route_verb_to_handler(verbs::CHANGE_QUEUE, h::handle_change_queue_settings),
        route_verb_to_handler(verbs::TURN_POWER, h::handle_set_disk_power),
        route_verb_to_handler(verbs::THROTTLE_DEVICE, h::handle_throttle_device),
        route_verb_to_handler(verbs::LIST_NVME, nvme::handle_list_nvme_subsystems),
        route_verb_to_handler(verbs::SET_NVME_ANA, nvme::handle_set_nvme_ana_state),
        route_verb_to_handler(verbs::RESET_NVME_CONTROLLER, nvme::handle_reset_nvme_controller),
        route_verb_to_handler(verbs::LIST_VHOST_USER, vhost_user::handle_list_vhost_user_sockets),
        route_verb_to_handler(verbs::ADD_VHOST_USER, vhost_user::handle_add_vhost_user_socket),
        route_verb_to_handler(verbs::REMOVE_VHOST_USER, vhost_user::handle_remove_vhost_user_socket),
        route_verb_to_handler(verbs::LIST_UBLK, ublk::handle_list_ublk_disks),
        route_verb_to_handler(verbs::ADD_UBLK, ublk::handle_add_ublk_disk),
        route_verb_to_handler(verbs::REMOVE_UBLK, ublk::handle_remove_ublk_disk),
        route_verb_to_handler(verbs::SUSPEND_DEVICE, h::handle_suspend_device),
        route_verb_to_handler(verbs::RESUME_DEVICE, h::handle_resume_device),
        route_verb_to_handler(verbs::SUSPEND_TOGETHER, h::handle_suspend_devices),
        route_verb_to_handler(verbs::RESUME_TOGETHER, h::handle_resume_devices),
        route_verb_to_handler(verbs::LISTEN, events::handle_event_stream).events(),
        route_verb_to_handler(verbs::LIST_TABLES, h::handle_list_tables),
        route_verb_to_handler(verbs::LIST_STATUSES, h::handle_list_table_statuses),
        route_verb_to_handler(verbs::LIST_EXPORTS, h::handle_list_exports),
        route_verb_to_handler(verbs::RECONFIGURE, config::handle_reconfigure_server),
        route_verb_to_handler(verbs::UPGRADE, h::handle_upgrade_server),
        route_verb_to_handler(verbs::GET_VERSION, h::handle_get_version),
        route_verb_to_handler(verbs::GET_STATS, h::handle_get_stats),
        route_verb_to_handler(verbs::METRICS, h::metrics).document(metrics::CONTENT_TYPE, "string"),
        route_verb_to_handler(verbs::OPENAPI, h::handle_get_openapi).document("application/json", "object"),
        route_verb_to_handler(verbs::LIST_SNAPSHOTS, s::handle_list_snapshots),
        route_verb_to_handler(verbs::CREATE_SNAPSHOTS, s::handle_create_snapshots),
        route_verb_to_handler(verbs::GET_SNAPSHOT, s::handle_get_snapshot),
        route_verb_to_handler(verbs::REMOVE_SNAPSHOT, s::handle_remove_snapshot),
        route_verb_to_handler(verbs::MERGE_SNAPSHOT, s::handle_merge_snapshot),
        route_verb_to_handler(verbs::LIST_CLONES, clones::handle_list_clones),
        route_verb_to_handler(verbs::CREATE_CLONE, clones::handle_create_clone),
        route_verb_to_handler(verbs::GET_CLONE, clones::handle_get_clone),
        route_verb_to_handler(verbs::GET_CLONE_PROFILE, clones::handle_get_clone_profile),
        route_verb_to_handler(verbs::FINISH_CLONE, clones::handle_finish_clone),
        route_verb_to_handler(verbs::FORGET_CLONE, clones::handle_forget_clone),
        route_verb_to_handler(verbs::LIST_MOVES, moves::handle_list_moves),
        route_verb_to_handler(verbs::GET_MOVE, moves::handle_get_move),
        route_verb_to_handler(verbs::START_MOVE, moves::handle_start_move),
        route_verb_to_handler(verbs::PAUSE_MOVE, moves::handle_pause_move),
        route_verb_to_handler(verbs::STOP_MOVE, moves::handle_stop_move),
        route_verb_to_handler(verbs::FORGET_OLD_PLACE, moves::handle_forget_old_place),
        route_verb_to_handler(verbs::GET_CHANGES, s::handle_get_changed_ranges),
    ]
}
