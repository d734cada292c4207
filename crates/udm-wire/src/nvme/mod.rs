//! NVMe over TCP: the bytes between a host and a controller.
//!
//! Sources: the NVM Express base specification 2.0 (commands, data structures, statuses, fabrics
//! commands), the NVM command set specification 1.0 (reads, writes, deallocation) and the NVMe/TCP
//! transport specification 1.0 (PDUs, digests). Comments name their sections as *Base*, *NVM* and
//! *TCP*. All integers are little-endian.
//!
//! * `pdu`: the units of the TCP stream and their headers. A length from outside is checked against
//!   a bound before anyone allocates memory for it.
//! * `command`: commands and completions, which capsules carry.
//! * `status`: result of a command.
//! * `fabrics`: `Connect` and the properties of a controller.
//! * `identify`, `log_page`, `feature`: what a host reads about a controller and its namespaces.
//! * `auth`: DH-HMAC-CHAP, both sides.
//! * `cross_controller_reset`: how a host fences the requests of a controller that it has lost.
//! * `nvm`: the arguments of reads, writes and deallocations.
//! * `digest`: CRC-32C.
//! * [`host`]: the side of a host, for udm as an initiator.

mod auth;
mod command;
mod cross_controller_reset;
mod digest;
mod fabrics;
mod feature;
pub mod host;
mod identify;
mod log_page;
mod nqn;
mod nvm;
mod pdu;
mod peer_record;
mod status;

pub use auth::{
    AUTHENTICATION_MESSAGE_MAX, AuthenticationCommand, AuthenticationFailure, AuthenticationMessage,
    AuthenticationMessageError, DhchapChallenge, DhchapHash, DhchapNegotiation, DhchapReply, DhchapSecret,
    DhchapSecretError, DhchapTranscript, verify_dhchap_response,
};
pub use command::{AdminOpcode, Completion, DataPointer, NvmOpcode, NvmeCommand, OPCODE_FABRICS, SQE_SIZE};
pub use cross_controller_reset::{
    CROSS_CONTROLLER_RESET_LOG_MAX, ControllerInstance, CrossControllerReset, CrossControllerResetEntry,
    CrossControllerResetStatus, FenceCapabilities, OPCODE_CROSS_CONTROLLER_RESET,
    decode_cross_controller_reset_log, encode_cross_controller_reset_log,
};
pub use digest::{data_digest, header_digest, verify_header_digest};
pub use fabrics::{
    CONNECT_AUTHENTICATION_REQUIRED, CONNECT_DATA_SIZE, CONNECT_SECURE_CHANNEL_REQUIRED, ConnectCommand,
    ConnectData, ConnectError, ControllerCapabilities, ControllerConfiguration, ControllerStatus,
    FabricsCommand, PropertyGet, PropertySet, ShutdownStatus, property,
};
pub use feature::{AsyncEvent, AsyncEventMask, FeatureId, QueueCounts};
pub use identify::{
    AnaState, ControllerKind, IDENTIFY_SIZE, IdentifyController, IdentifyNamespace, IdentifyTarget,
    encode_active_namespaces, encode_namespace_descriptors,
};
pub use log_page::{
    AnaGroup, DiscoveryEntry, LOG_PAGE_MAX, LogPage, LogPageRequest, encode_ana_log,
    encode_changed_namespaces, encode_discovery_log, encode_firmware_log, encode_health_log,
};
pub use nqn::{DISCOVERY_NQN, NQN_MAX, NqnError, check_nqn};
pub use nvm::{
    DATASET_RANGE_SIZE, DATASET_RANGES_MAX, DatasetRange, DatasetRequest, RwFlags, RwRequest,
    WriteZeroesFlags,
};
pub use pdu::{
    DataPdu, FatalError, InitializeRequest, InitializeResponse, MAX_HEADER, PduHeader, PduHeaderError,
    PduLimits, PduType, TermRequest, encode_c2h_data, encode_capsule_command, encode_capsule_response,
    encode_h2c_data, encode_r2t,
};
pub use peer_record::{CONTROLLER_MAX, PEER_RECORD_MAX, PeerRecord, PeerRecordError};
pub use status::NvmeStatus;
