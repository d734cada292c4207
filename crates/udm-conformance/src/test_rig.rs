//! What a case holds: a subject in a world, with a model of what is on it.

use crate::devices_under_test::{CreatedDevice, DeviceUnderTest};
use crate::world::{DeviceWorld, WorldKind};
use crate::{Answer, CheckingLayer, ContentModel, DeviceFacts, ExpectedResult, Request, stamp};
use crate::{STAMP, fixture::Fixture};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use std::sync::{Arc, Weak};
use udm_core::{Device, Op, SECTOR_SIZE, Status};
use udm_dm::MappedDevice;

/// See the module.
pub struct TestRig {
    /// The subject in use.
    pub world: Box<dyn DeviceWorld>,
    /// Which world.
    pub kind: WorldKind,
    /// What the subject says of itself.
    pub facts: DeviceFacts,
    /// What must be on it.
    pub model: ContentModel,
    /// The same for each run of a case.
    pub rng: SmallRng,
    /// What lies below.
    pub ground: Fixture,
    /// The mapped device, when the subject is one.
    pub mapped: Option<Arc<MappedDevice>>,
    device: Weak<dyn Device>,
    generation: u64,
}

/// Where a case draws its chance from: 1, or `UDM_CONFORMANCE_SEED`.
fn seed() -> u64 {
    std::env::var("UDM_CONFORMANCE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1)
}

impl TestRig {
    /// `subject` in a world of `kind`.
    #[must_use]
    pub fn new(subject: &DeviceUnderTest, kind: WorldKind) -> TestRig {
        TestRig::over(subject.make(kind), kind)
    }

    /// What was made, in a world of `kind`.
    #[must_use]
    pub fn over(made: CreatedDevice, kind: WorldKind) -> TestRig {
        let CreatedDevice { ground, device, mapped, facts } = made;
        let model = ContentModel::new(facts.fresh);
        let world = kind.open(&device, facts);
        let facts = world.facts().clone();
        let device = Arc::downgrade(&device);
        let rng = SmallRng::seed_from_u64(seed());
        TestRig { world, kind, facts, model, rng, ground, mapped, device, generation: 0 }
    }

    /// Ends it: nothing may be left of it.
    pub fn end(mut self) {
        self.world.close();
        let TestRig { world, ground, mapped, device, .. } = self;
        drop(world);
        ground.assert_unused();
        drop((mapped, ground));
        assert_eq!(device.strong_count(), 0, "the device outlives those that used it");
    }

    /// Sends a message to the first target of the mapped device; the answer is empty.
    pub fn message(&mut self, words: &str) {
        let device = self.mapped.clone().expect("a mapped device");
        let words: Vec<String> = words.split_whitespace().map(String::from).collect();
        let answer = device.message(0, &words, &mut self.ground, &*self.world.cores());
        assert_eq!(answer.map_err(|e| e.to_string()), Ok(String::new()), "{words:?}");
    }

    /// The boundary of the subject.
    #[must_use]
    pub fn is(&self, boundary: CheckingLayer) -> bool {
        self.facts.boundary == boundary
    }

    /// A write with a generation of its own.
    pub fn write(&mut self, sector: u64, sectors: u64) -> Request {
        self.generation += 1;
        Request::write(sector, sectors, self.generation)
    }

    /// A request of any kind; a write gets a generation of its own.
    pub fn request(&mut self, op: Op, sector: u64, sectors: u64) -> Request {
        if op == Op::Write { self.write(sector, sectors) } else { Request::new(op, sector, sectors) }
    }

    /// Runs `requests` on `handle` at once and waits for them. They must not overlap. Each ends as
    /// the facts demand, reads bring what the model has, and the model follows.
    pub fn run(&mut self, handle: usize, requests: Vec<Request>) -> Vec<Answer> {
        self.world.submit(handle, requests.clone());
        let answers = self.world.collect(handle);
        assert_eq!(answers.len(), requests.len(), "each request has one answer");
        for (request, answer) in requests.into_iter().zip(&answers) {
            self.judge(&request, answer);
        }
        answers
    }

    /// Runs one request; its errno.
    pub fn one(&mut self, handle: usize, request: Request) -> i32 {
        self.run(handle, vec![request])[0].errno
    }

    /// Runs `requests` on `handle`, of which exactly those for which `hit` says so fail with
    /// `errno`; the others are served.
    pub fn run_with_failures(
        &mut self,
        handle: usize,
        requests: &[Request],
        errno: i32,
        hit: impl Fn(&Request) -> bool,
    ) {
        self.world.submit(handle, requests.to_vec());
        for (request, answer) in requests.iter().zip(self.world.collect(handle)) {
            if hit(request) {
                assert_eq!(answer.errno, errno, "{request:?}");
                self.model.may_have_written(request);
            } else {
                self.judge(request, &answer);
            }
        }
    }

    /// Checks an answer against the facts and the model, and the model follows.
    pub fn judge(&mut self, request: &Request, answer: &Answer) {
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

    /// Compares what a read brought with the model.
    pub fn check_read(&self, request: &Request, answer: &Answer) {
        if request.op == Op::Read {
            assert_eq!(answer.data.len(), request.data_len(), "{request:?}");
            let checked = self.model.check(request.sector, &answer.data, self.facts.atom);
            checked.unwrap_or_else(|what| panic!("{request:?} brought something else: {what}"));
        }
    }

    /// Reads a range, in blocks around it too, and compares it with the model.
    pub fn verify(&mut self, handle: usize, sector: u64, sectors: u64) {
        let (block, size) = (self.facts.block(), self.facts.size());
        let from = sector.saturating_sub(block * 3) / block * block;
        let to = (sector + sectors + block * 3).next_multiple_of(block).min(size / block * block);
        let longest = self.facts.limits.max_sectors.0.min(1024) / block * block;
        let mut at = from;
        while at < to {
            let n = longest.min(to - at);
            self.run(handle, vec![Request::read(at, n)]);
            at += n;
        }
    }

    /// As [`TestRig::verify`], for the whole device when it is not too large for that.
    pub fn verify_all(&mut self, handle: usize) {
        self.verify(handle, 0, self.facts.size().min(8192));
    }

    /// The longest read or write that a case may use, in sectors.
    #[must_use]
    pub fn longest(&self) -> u64 {
        let longest = match self.facts.boundary {
            // A table splits; so may be asked for more than its limits say.
            CheckingLayer::Table => 1024,
            _ => self.facts.limits.max_sectors.0.min(1024),
        };
        longest / self.facts.block() * self.facts.block()
    }

    /// Sectors from which to take ranges: the device, or its first 2 MiB, in whole blocks.
    #[must_use]
    pub fn room(&self) -> u64 {
        self.facts.size().min(4096) / self.facts.block() * self.facts.block()
    }

    /// Spoils the sector that was written last with `request` at `sector`: what touches it fails
    /// with `status`.
    pub fn inject_error(&self, request: &Request, sector: u64, status: Status) {
        let mut bytes = [0; SECTOR_SIZE as usize];
        stamp(sector * SECTOR_SIZE, request.generation, &mut bytes);
        self.ground.inject_error(bytes[..STAMP].try_into().expect("a stamp"), status);
    }
}
