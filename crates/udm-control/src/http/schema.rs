//! JSON schemas of the types that cross the control socket.
//!
//! Contract: [`api!`] makes a struct, its serde code and its schema from one definition, so that `/openapi.json` cannot drift from what the
//! server takes and gives. It covers plain structs with named fields; nothing else crosses the socket.

use serde_json::{Map, Value, json};

/// A type that knows its JSON schema.
pub trait Schema {
    /// False when the member may be left out.
    const REQUIRED: bool = true;

    /// The schema. Structs put theirs into `components` under their name and answer with a reference.
    fn schema(components: &mut Map<String, Value>) -> Value;
}

impl Schema for String {
    fn schema(_: &mut Map<String, Value>) -> Value {
        json!({ "type": "string" })
    }
}

impl Schema for bool {
    fn schema(_: &mut Map<String, Value>) -> Value {
        json!({ "type": "boolean" })
    }
}

impl Schema for u32 {
    fn schema(_: &mut Map<String, Value>) -> Value {
        json!({ "type": "integer", "format": "int64", "minimum": 0, "maximum": u32::MAX })
    }
}

impl Schema for u64 {
    fn schema(_: &mut Map<String, Value>) -> Value {
        json!({ "type": "integer", "minimum": 0 })
    }
}

impl<T: Schema> Schema for Vec<T> {
    fn schema(components: &mut Map<String, Value>) -> Value {
        json!({ "type": "array", "items": T::schema(components) })
    }
}

impl<T: Schema> Schema for Option<T> {
    const REQUIRED: bool = false;

    fn schema(components: &mut Map<String, Value>) -> Value {
        json!({ "anyOf": [T::schema(components), { "type": "null" }] })
    }
}

/// One member: its schema with its description. A reference takes a description beside it since OpenAPI 3.1.
pub(crate) fn member<T: Schema>(doc: &str, components: &mut Map<String, Value>) -> Value {
    let mut schema = T::schema(components);
    schema["description"] = doc.trim().into();
    schema
}

/// Joins the lines of a doc comment.
pub(crate) fn doc(lines: &[&str]) -> String {
    lines.iter().map(|l| l.trim()).collect::<Vec<_>>().join(" ")
}

/// Defines structs with serde code and schema. `request` structs refuse members that they do not know; `reply` structs are read leniently, so
/// that an older client understands a newer server.
macro_rules! api {
    (@derive request $($item:tt)*) => {
        #[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        $($item)*
    };
    (@derive reply $($item:tt)*) => {
        #[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        $($item)*
    };
    (@open request) => { false };
    (@open reply) => { true };
    ($( $(#[doc = $doc:literal])* $kind:ident $name:ident { $( $(#[doc = $fdoc:literal])* $field:ident: $ty:ty, )* } )*) => { $(
        api! { @derive $kind
            $(#[doc = $doc])*
            pub struct $name { $( $(#[doc = $fdoc])* pub $field: $ty, )* }
        }

        impl $crate::http::schema::Schema for $name {
            fn schema(components: &mut serde_json::Map<String, serde_json::Value>) -> serde_json::Value {
                use $crate::http::schema::{Schema, doc, member};
                let name = stringify!($name);
                if !components.contains_key(name) {
                    // Put in first: a type that holds itself finds its place taken.
                    components.insert(name.into(), serde_json::Value::Null);
                    let mut properties = serde_json::Map::new();
                    let mut required: Vec<&str> = Vec::new();
                    $(
                        let schema = member::<$ty>(&doc(&[$($fdoc),*]), components);
                        properties.insert(stringify!($field).into(), schema);
                        if <$ty as Schema>::REQUIRED {
                            required.push(stringify!($field));
                        }
                    )*
                    components.insert(name.into(), serde_json::json!({
                        "type": "object",
                        "description": doc(&[$($doc),*]),
                        "properties": properties,
                        "required": required,
                        "additionalProperties": api!(@open $kind),
                    }));
                }
                serde_json::json!({ "$ref": format!("#/components/schemas/{name}") })
            }
        }
    )* };
}
pub(crate) use api;
