//! The environment of a case: a device in a world, with a model of its content.

use crate::devices_under_test::{CreatedDevice, DeviceUnderTest};
use crate::world::{DeviceWorld, WorldKind};
use crate::{
    ContentModel, DeviceFacts, ExpectedResult, RequestCheckingLayer, TestRequest, TestRequestResult,
    fill_buffer_with_stamps,
};
use crate::{STAMP, fixture::UnderlyingDevices};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use std::sync::{Arc, Weak};
use udm_core::{Device, Op, SECTOR_SIZE, Status};
use udm_dm::MappedDevice;

/// A device under test in a world, with a model of its content.
pub struct DeviceTestRig {
    /// The device in use.
    pub world: Box<dyn DeviceWorld>,
    /// The kind of the world.
    pub kind: WorldKind,
    /// The properties of the device.
    pub facts: DeviceFacts,
    /// The expected content.
    pub model: ContentModel,
    /// Random numbers that are the same in each run of a case.
    pub rng: SmallRng,
    /// The devices below.
    pub ground: UnderlyingDevices,
    /// The mapped device, if the device under test is one.
    pub mapped: Option<Arc<MappedDevice>>,
    device: Weak<dyn Device>,
    generation: u64,
}

/// The seed of the random numbers: `UDM_CONFORMANCE_SEED`, or 1.
fn read_seed_from_env() -> u64 {
    std::env::var("UDM_CONFORMANCE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1)
}

impl DeviceTestRig {
    /// Makes `subject` in a world of `kind`.
    #[must_use]
    pub fn new(subject: &DeviceUnderTest, kind: WorldKind) -> DeviceTestRig {
        DeviceTestRig::over(subject.make(kind), kind)
    }

    /// Opens a device that exists in a world of `kind`.
    #[must_use]
    pub fn over(made: CreatedDevice, kind: WorldKind) -> DeviceTestRig {
        let CreatedDevice { ground, device, mapped, facts } = made;
        let model = ContentModel::new(facts.fresh);
        let world = kind.open(&device, facts);
        let facts = world.facts().clone();
        let device = Arc::downgrade(&device);
        let rng = SmallRng::seed_from_u64(read_seed_from_env());
        DeviceTestRig { world, kind, facts, model, rng, ground, mapped, device, generation: 0 }
    }

    /// Closes the device and checks that nothing is left of it.
    pub fn end(mut self) {
        self.world.close();
        let DeviceTestRig { world, ground, mapped, device, .. } = self;
        drop(world);
        ground.assert_unused();
        drop((mapped, ground));
        assert_eq!(device.strong_count(), 0, "the device outlives those that used it");
    }

    /// Sends a message to the first target of the mapped device. The answer must be empty.
    pub fn message(&mut self, words: &str) {
        let device = self.mapped.clone().expect("a mapped device");
        let words: Vec<String> = words.split_whitespace().map(String::from).collect();
        let answer = device.message(0, &words, &mut self.ground, &*self.world.cores());
        assert_eq!(answer.map_err(|e| e.to_string()), Ok(String::new()), "{words:?}");
    }

    /// Whether requests are checked by `boundary`.
    #[must_use]
    pub fn is(&self, boundary: RequestCheckingLayer) -> bool {
        self.facts.boundary == boundary
    }

    /// A write with a new generation.
    pub fn write(&mut self, sector: u64, sectors: u64) -> TestRequest {
        self.generation += 1;
        TestRequest::write(sector, sectors, self.generation)
    }

    /// A request of any kind. A write gets a new generation.
    pub fn request(&mut self, op: Op, sector: u64, sectors: u64) -> TestRequest {
        if op == Op::Write { self.write(sector, sectors) } else { TestRequest::new(op, sector, sectors) }
    }

    /// Runs `requests` on `handle` at the same time and waits for them. They must not overlap.
    /// Checks each result and the data of reads, and updates the model.
    pub fn run(&mut self, handle: usize, requests: Vec<TestRequest>) -> Vec<TestRequestResult> {
        self.world.submit(handle, requests.clone());
        let answers = self.world.collect(handle);
        assert_eq!(answers.len(), requests.len(), "each request has one answer");
        for (request, answer) in requests.into_iter().zip(&answers) {
            self.set_verdict(&request, answer);
        }
        answers
    }

    /// Runs one request and returns its errno.
    pub fn one(&mut self, handle: usize, request: TestRequest) -> i32 {
        self.run(handle, vec![request])[0].errno
    }

    /// Runs `requests` on `handle`. The requests for which `hit` is true must fail with `errno`,
    /// and all others must be served.
    pub fn run_with_failures(
        &mut self,
        handle: usize,
        requests: &[TestRequest],
        errno: i32,
        hit: impl Fn(&TestRequest) -> bool,
    ) {
        self.world.submit(handle, requests.to_vec());
        for (request, answer) in requests.iter().zip(self.world.collect(handle)) {
            if hit(request) {
                assert_eq!(answer.errno, errno, "{request:?}");
                self.model.may_have_written(request);
            } else {
                self.set_verdict(request, &answer);
            }
        }
    }

    /// Checks an answer against the facts and the model, and updates the model.
    pub fn set_verdict(&mut self, request: &TestRequest, answer: &TestRequestResult) {
        let verdict = self.facts.verdict(request);
        let good = match &verdict {
            ExpectedResult::Served => answer.errno == 0,
            ExpectedResult::May(errors) => answer.errno == 0 || errors.contains(&answer.errno),
            ExpectedResult::Refused(errors) => errors.contains(&answer.errno),
            ExpectedResult::Unasked => panic!("nobody may ask for {request:?}"),
        };
        assert!(good, "{request:?} ended with errno {}, expected {verdict:?}", answer.errno);
        if answer.errno == 0 && request.sectors > 0 {
            self.check_read(request, answer);
            self.model.done(request);
        }
    }

    /// Compares the data of a read with the model.
    pub fn check_read(&self, request: &TestRequest, answer: &TestRequestResult) {
        if request.op == Op::Read {
            assert_eq!(answer.data.len(), request.data_len(), "{request:?}");
            let checked = self.model.check(request.sector, &answer.data, self.facts.atom);
            checked.unwrap_or_else(|what| panic!("{request:?} returned wrong data: {what}"));
        }
    }

    /// Reads a range and some blocks around it, and compares the data with the model.
    pub fn verify(&mut self, handle: usize, sector: u64, sectors: u64) {
        let (block, size) = (self.facts.block(), self.facts.size());
        let from = sector.saturating_sub(block * 3) / block * block;
        let to = (sector + sectors + block * 3).next_multiple_of(block).min(size / block * block);
        let longest = self.facts.limits.max_sectors.0.min(1024) / block * block;
        let mut at = from;
        while at < to {
            let n = longest.min(to - at);
            self.run(handle, vec![TestRequest::read(at, n)]);
            at += n;
        }
    }

    /// As [`DeviceTestRig::verify`], for the whole device or its first 4 MiB.
    pub fn verify_all(&mut self, handle: usize) {
        self.verify(handle, 0, self.facts.size().min(8192));
    }

    /// The longest read or write that a case may use, in sectors.
    #[must_use]
    pub fn longest(&self) -> u64 {
        let longest = match self.facts.boundary {
            // A table splits requests, so they may exceed its limits.
            RequestCheckingLayer::Table => 1024,
            _ => self.facts.limits.max_sectors.0.min(1024),
        };
        longest / self.facts.block() * self.facts.block()
    }

    /// The sectors for ranges: the device, or its first 2 MiB, in whole blocks.
    #[must_use]
    pub fn room(&self) -> u64 {
        self.facts.size().min(4096) / self.facts.block() * self.facts.block()
    }

    /// Makes the sector at `sector` that `request` wrote last fail with `status`.
    pub fn inject_error(&self, request: &TestRequest, sector: u64, status: Status) {
        let mut bytes = [0; SECTOR_SIZE as usize];
        fill_buffer_with_stamps(sector * SECTOR_SIZE, request.generation, &mut bytes);
        self.ground.inject_error(bytes[..STAMP].try_into().expect("a stamp"), status);
    }
}
