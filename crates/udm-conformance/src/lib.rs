//!
//!
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
mod request;
mod test_rig;
mod test_server;
mod world;

pub use cases::{CASES, ConformanceCase, Requirement};
pub use content_model::{ContentModel, InitialContent, STAMP, stamp};
pub use device_facts::{CheckingLayer, DeviceFacts, ExpectedResult};
pub use devices_under_test::{CreatedDevice, DEVICES_UNDER_TEST, DeviceUnderTest};
pub use disk::{DiskMedium, StrictDisk};
pub use fixture::{Fixture, run};
pub use lane_driver::LaneDriver;
pub use request::{Answer, Request};
pub use test_rig::TestRig;
pub use world::{DeviceWorld, HANG, NoCores, WorldKind};
