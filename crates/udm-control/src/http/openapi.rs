//! The OpenAPI 3.1 description, generated from the list of routes.

use super::routes::{self, ResponseKind, Route};
use crate::api;
use schemars::SchemaGenerator;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

/// The OpenAPI document.
pub(super) fn build_openapi_document() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|s| s.definitions_path = "/components/schemas".into());
    let mut schemas = settings.into_generator();
    let mut paths = Map::new();
    for route in routes::all_http_routes() {
        let path = paths.entry(&*route.path).or_insert_with(|| json!({}));
        path[route.method.as_str().to_ascii_lowercase()] = build_openapi_operation(&route, &mut schemas);
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "udm control socket",
            "summary": "The device mapper in user space: devices, tables, messages",
            "version": env!("CARGO_PKG_VERSION"),
            "license": { "name": "Apache-2.0 OR MIT", "identifier": "Apache-2.0 OR MIT" },
        },
        "servers": [{ "url": "http://udm", "description": "Over the Unix socket; the host name is ignored" }],
        "paths": paths,
        "components": { "schemas": schemas.take_definitions(true) },
    })
}

fn build_openapi_operation(route: &Route, schemas: &mut SchemaGenerator) -> Value {
    let mut parameters = Vec::new();
    if route.path.contains("{name}") {
        parameters.push(json!({
            "name": "name", "in": "path", "required": true, "schema": { "type": "string" },
            "description": "The device: its name, its uuid or its number",
        }));
    }
    if let Some(query) = route.query {
        let query = query(schemas);
        for (name, member) in query.get("properties").and_then(Value::as_object).into_iter().flatten() {
            // The type is a list of the type and "null", since each parameter is optional.
            parameters.push(json!({
                "name": name, "in": "query", "schema": { "type": member["type"][0] },
                "description": member["description"],
            }));
        }
    }
    let success = match route.reply {
        ResponseKind::Json(reply) => {
            json!({ "description": "Done", "content": { "application/json": { "schema": reply(schemas) } } })
        }
        ResponseKind::Events(data) => {
            let schema = json!({
                "type": "string",
                "description": "Events of the HTML standard; the data of each is of this schema",
                "contentMediaType": "application/json",
                "contentSchema": data(schemas),
            });
            json!({ "description": "Until the client hangs up", "content": { "text/event-stream": { "schema": schema } } })
        }
        ResponseKind::Other(content_type, kind) => {
            json!({ "description": "Done", "content": { content_type: { "schema": { "type": kind } } } })
        }
        ResponseKind::Nothing => json!({ "description": "Done" }),
    };
    let error = json!({
        "description": "Refused",
        "content": { "application/json": { "schema": schemas.subschema_for::<api::ApiError>() } },
    });
    let mut operation = json!({
        "operationId": route.id,
        "summary": route.summary,
        "responses": { route.success().to_string(): success, "default": error },
    });
    if !parameters.is_empty() {
        operation["parameters"] = parameters.into();
    }
    if let Some(body) = route.body {
        operation["requestBody"] = json!({
            "required": true,
            "content": { "application/json": { "schema": body(schemas) } },
        });
    }
    operation
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Every `$ref` has its target, every `{name}` its parameter, every operation its own id.
    #[test]
    fn the_document_is_whole() {
        let document = build_openapi_document();
        let text = document.to_string();
        let schemas = document["components"]["schemas"].as_object().unwrap();
        for part in text.split("\"$ref\":\"#/components/schemas/").skip(1) {
            let name = part.split('"').next().unwrap();
            assert!(schemas.contains_key(name), "{name}");
        }
        assert!(schemas.values().all(|s| s["properties"].is_object() && s["description"] != ""));
        let mut ids = BTreeSet::new();
        for (path, methods) in document["paths"].as_object().unwrap() {
            for (method, operation) in methods.as_object().unwrap() {
                assert!(ids.insert(operation["operationId"].as_str().unwrap()), "{method} {path}");
                let named =
                    operation["parameters"].as_array().is_some_and(|p| p.iter().any(|p| p["in"] == "path"));
                assert_eq!(named, path.contains('{'), "{method} {path}");
                assert!(operation["responses"].as_object().unwrap().len() == 2);
            }
        }
        assert_eq!(ids.len(), routes::all_http_routes().len());
    }

    #[test]
    fn requests_are_closed_and_replies_open() {
        let document = build_openapi_document();
        let schemas = &document["components"]["schemas"];
        assert_eq!(schemas["CreateDeviceRequest"]["additionalProperties"], false);
        assert_eq!(schemas["CreateDeviceRequest"]["required"], json!(["name"]));
        assert!(schemas["DeviceDescription"].get("additionalProperties").is_none());
    }
}
