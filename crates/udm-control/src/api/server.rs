//! The server itself: exports, versions, errors.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// An export and its addresses.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NbdExportDescription {
    /// Name of the export, which is the device's name.
    pub name: String,
    /// Size of the export.
    pub size_bytes: u64,
    /// True if writes are refused.
    pub read_only: bool,
    /// The NBD URIs of the export.
    pub uris: Vec<String>,
}

/// All exports.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ExportList {
    /// The exports.
    pub exports: Vec<NbdExportDescription>,
}

/// A type of target.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TargetVersion {
    /// Name of the type, as in tables.
    pub name: String,
    /// Version of the target, as in the kernel.
    pub version: String,
}

/// Versions of the server.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ServerVersions {
    /// Version of udm.
    pub version: String,
    /// Version of the kernel's device mapper whose behaviour the server follows.
    pub driver_version: String,
    /// The types of target that the server has.
    pub targets: Vec<TargetVersion>,
}

/// A request to replace the server by another program.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct UpgradeServerRequest {
    /// Absolute path of the program; without it, the server's own, as its file is now.
    pub program: Option<String>,
    /// Close connections that use TLS, which cannot be handed over. Otherwise they refuse the
    /// upgrade.
    #[serde(default)]
    pub disconnect_tls: bool,
}

/// Result of an upgrade.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct UpgradeReport {
    /// Process ID of the new server.
    pub pid: u32,
    /// Version of the new server.
    pub version: String,
    /// Number of devices that were handed over.
    pub devices: u64,
    /// Number of NBD clients that were handed over.
    pub clients: u64,
    /// How long no request was served, in nanoseconds.
    pub pause_ns: u64,
}

/// Why a request was refused.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ApiError {
    /// The complete error in one line.
    pub error: String,
    /// The errno.
    pub errno: u32,
    /// The kernel's text, if the kernel has one.
    pub text: String,
    /// The precise reason, if the kernel's text does not give it.
    pub reason: String,
    /// Line of the fault in the table, from 1.
    pub line: Option<u64>,
    /// First character of the fault in that line, from 1.
    pub column: Option<u64>,
    /// Number of characters of the fault.
    pub width: Option<u64>,
}
