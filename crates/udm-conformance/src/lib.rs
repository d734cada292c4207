//! The conformance suite: rules for all backends, targets and front ends, written once and run by
//! name on all of them.
//!
//! * A *case* ([`CASES`]) is a rule: a function over a [`DeviceTestRig`], with its source and its
//!   requirements. If a device lacks a requirement, there is no test. The list of skipped tests
//!   gives the reason.
//! * A *device under test* ([`DEVICES_UNDER_TEST`]) is one line of a list.
//! * A *world* ([`WorldKind`]) is a way of using the device: cores stepped by hand, cores with
//!   rings, an NBD server, or a virtual machine. A stepped world detects lanes that wait without
//!   asking for a poll.
//! * The limits of the device determine the result of each request ([`DeviceFacts::verdict`]), so a
//!   case sends valid and invalid requests.
//!
//! The devices below the targets are strict disks (`disk`). They panic on requests that no layer
//! may send, complete in any order, lose their cache when power is cut, and fail or wait on demand.
//! In every case, each completed bio is compared with its submitted state.
//!
//! The crate is only for tests; no other crate imports it.
#![forbid(unsafe_code)]

mod cases;
mod content_model;
mod device_facts;
mod devices_under_test;
mod disk;
mod fixture;
mod lane_driver;
mod object_server;
mod qcow2_image;
mod request;
mod test_rig;
mod test_server;
mod world;

pub use cases::{CASES, ConformanceCase, Requirement};
pub use content_model::{ContentModel, InitialContent, STAMP, fill_buffer_with_stamps};
pub use device_facts::{DeviceFacts, ExpectedResult, RequestCheckingLayer};
pub use devices_under_test::{CreatedDevice, DEVICES_UNDER_TEST, DeviceUnderTest};
pub use disk::{SharedDiskMedium, StrictMemoryDisk};
pub use fixture::{UnderlyingDevices, run_system_program};
pub use lane_driver::LaneDriver;
pub use request::{TestRequest, TestRequestResult};
pub use test_rig::DeviceTestRig;
pub use world::{CoresWithoutDevices, DeviceWorld, HANG, WorldKind};
