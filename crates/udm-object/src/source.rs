//! One object as it was when it was opened, and ranges of it.

use crate::failure::{ReadFailure, classify};
use crate::hedge::HedgePolicy;
use crate::range_read::{ObjectVersion, RangeAnswerHead, RangeBody, RangeRead, ReadStep, silence_max};
use crate::store::ObjectLocation;
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use object_store::{GetOptions, GetRange, ObjectStore};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use udm_backends::KnownObject;
use udm_core::errno::{EIO, ENODEV, ETIMEDOUT};
use udm_core::{DeviceControlError, Nanos};
use udm_wire::uri::{ObjectUri, TimeSpan};
use udm_wire::words::quote_for_error_line;

/// Maximum number of ranges of one object that are requested at a time.
pub(crate) const FETCHES_MAX: usize = 16;

/// A server that is unavailable for a shorter time is not logged: object stores limit the rate of
/// requests by 429 and 503.
const LOST_AFTER: Nanos = Nanos::from_millis(1000);

/// The longest wait for a server when a device is opened, as for NBD servers.
const OPEN_MAX: Nanos = Nanos::from_millis(10_000);

/// The longest sleep at a time.
const SLEEP_MAX: Duration = Duration::from_secs(3600);

/// An object: its length and ETag, and the state of its reads.
pub(crate) struct ObjectSource {
    name: String,
    location: ObjectLocation,
    deadline: Option<Nanos>,
    /// The ETag that the URI names, with its quotes.
    pinned: Option<String>,
    version: ObjectVersion,
    hedges: Mutex<HedgePolicy>,
    /// The origin of times of reads.
    clock: Instant,
    /// Length and ETag come from an earlier process.
    is_known: bool,
    /// Set if the object has changed: all later reads fail with this.
    changed: OnceLock<ReadFailure>,
    /// Since when all reads have failed.
    failing: Mutex<Option<Instant>>,
    /// Number of requests so far.
    requests: AtomicU64,
}

impl ObjectSource {
    /// An object that was not looked at yet.
    pub(crate) fn new(uri: &ObjectUri, location: ObjectLocation) -> Result<ObjectSource, DeviceControlError> {
        Ok(ObjectSource {
            name: uri.to_string(),
            location,
            deadline: uri.deadline(),
            pinned: uri.etag.as_ref().map(|etag| format!("\"{etag}\"")),
            version: ObjectVersion { len: 0, etag: String::new() },
            hedges: Mutex::new(HedgePolicy::new(uri.hedge)),
            clock: Instant::now(),
            is_known: false,
            changed: OnceLock::new(),
            failing: Mutex::default(),
            requests: AtomicU64::new(0),
        })
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.version.len
    }

    /// The object is the version `known`: its server is not asked now.
    pub(crate) fn known_as(self, known: KnownObject) -> ObjectSource {
        let version = ObjectVersion { len: known.len, etag: known.etag };
        ObjectSource { version, is_known: true, ..self }
    }

    /// The version of the object.
    pub(crate) fn as_known(&self) -> KnownObject {
        let ObjectVersion { len, etag } = self.version.clone();
        KnownObject { uri: self.name.clone(), len, etag }
    }

    /// True if the version comes from an earlier process.
    pub(crate) fn is_known(&self) -> bool {
        self.is_known
    }

    fn now(&self) -> Nanos {
        self.time_of(Instant::now())
    }

    fn time_of(&self, instant: Instant) -> Nanos {
        Nanos(instant.saturating_duration_since(self.clock).as_nanos() as u64)
    }

    fn hedges(&self) -> MutexGuard<'_, HedgePolicy> {
        self.hedges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for the first byte, which shows the length, the ETag, and that the server knows ranges.
    ///
    /// # Errors
    /// In one line that names the object.
    pub(crate) async fn open(mut self) -> Result<ObjectSource, DeviceControlError> {
        let fail = |errno, why: &str| DeviceControlError::new(errno, format!("{}: {why}", self.name));
        let other_version = |pinned: &str, found: &str| {
            fail(ENODEV, &format!("the version with etag={pinned} is not there{found}"))
        };
        let time = self.deadline.unwrap_or(OPEN_MAX).min(OPEN_MAX);
        let read = self.request(0..1, None, Some(self.now() + time)).await;
        let (head, _) = read.map_err(|failure| match (&failure, &self.pinned) {
            (ReadFailure::Unavailable(why), _) => fail(ETIMEDOUT, &format!("{why}, for {}", TimeSpan(time))),
            (ReadFailure::Refused(why), _) => fail(EIO, why),
            (ReadFailure::Changed(_), Some(pinned)) => other_version(pinned, " (412)"),
            (ReadFailure::Changed(why), None) => fail(ENODEV, why),
        })?;
        let etag = match head.etag {
            Some(etag) if etag.starts_with("W/") => {
                return Err(fail(EIO, "the server has only a weak ETag, so a change would not be noticed"));
            }
            Some(etag) => etag,
            None => return Err(fail(EIO, "the server sends no ETag, so a change would not be noticed")),
        };
        if let Some(pinned) = self.pinned.as_ref().filter(|pinned| **pinned != etag) {
            return Err(other_version(pinned, &format!(", but {}", quote_for_error_line(&etag))));
        }
        self.version = ObjectVersion { len: head.object_len, etag };
        Ok(self)
    }

    /// Reads a range that is within the object. `since` is the time from which its deadline counts.
    ///
    /// # Errors
    /// The last failure; the log has it if it is the first one.
    pub(crate) async fn read(&self, range: Range<u64>, since: Instant) -> Result<Bytes, ReadFailure> {
        if let Some(changed) = self.changed.get() {
            return Err(changed.clone());
        }
        let until = self.deadline.map(|deadline| self.time_of(since) + deadline);
        let result = self.request(range, Some(&self.version), until).await;
        match &result {
            Ok(_) => self.note_success(),
            Err(failure) => {
                self.note_failure(failure);
                if let ReadFailure::Changed(_) = failure {
                    let _ = self.changed.set(failure.clone());
                }
            }
        }
        result.map(|(_, bytes)| bytes)
    }

    /// Sends requests of a range until one has an answer, is refused, or `until` has passed.
    /// Without a `version` any is accepted.
    async fn request(
        &self,
        range: Range<u64>,
        version: Option<&ObjectVersion>,
        until: Option<Nanos>,
    ) -> Result<(RangeAnswerHead, Bytes), ReadFailure> {
        let (len, jitter) = (range.end - range.start, self.requests.load(Relaxed));
        let mut read = RangeRead::new(len, self.now(), until, jitter);
        // Those that are left at the end are abandoned: their connections are closed.
        let mut attempts = FuturesUnordered::new();
        loop {
            let step = read.step(self.now(), &mut self.hedges());
            let until = match step {
                ReadStep::Send => {
                    attempts.push(self.attempt(range.clone(), version));
                    continue;
                }
                ReadStep::Wait(until) => until,
                ReadStep::Fail(failure) => return Err(failure),
            };
            let left = Duration::from_nanos(until.since(self.now()).0).min(SLEEP_MAX);
            tokio::select! {
                Some(result) = attempts.next() => {
                    read.answer(self.now(), result.as_ref().map(|_| ()), &mut self.hedges());
                    match result {
                        Ok(answer) => return Ok(answer),
                        Err(failure) if version.is_some() && self.is_long_since(&read) => {
                            self.note_failure(&failure);
                        }
                        Err(_) => {}
                    }
                }
                () = tokio::time::sleep(left) => {}
            }
        }
    }

    /// True if a read that an unavailable server delays is worth a line in the log.
    fn is_long_since(&self, read: &RangeRead) -> bool {
        self.now().since(read.began()) >= LOST_AFTER
    }

    /// One request of a range, with all checks of the answer.
    async fn attempt(
        &self,
        range: Range<u64>,
        version: Option<&ObjectVersion>,
    ) -> Result<(RangeAnswerHead, Bytes), ReadFailure> {
        self.requests.fetch_add(1, Relaxed);
        let silence = Duration::from_nanos(silence_max(self.deadline).0);
        let silent = |_| ReadFailure::Unavailable("no answer".into());
        let options = GetOptions {
            range: Some(GetRange::Bounded(range.clone())),
            if_match: version.map(|version| version.etag.clone()).or_else(|| self.pinned.clone()),
            ..GetOptions::default()
        };
        let ObjectLocation { store, path } = &self.location;
        let answer = tokio::time::timeout(silence, store.get_opts(path, options)).await.map_err(silent)?;
        let answer = answer.map_err(|error| classify(&error))?;
        let head = RangeAnswerHead {
            etag: answer.meta.e_tag.clone(),
            object_len: answer.meta.size,
            range: answer.range.clone(),
        };
        if let Some(version) = version {
            version.check(&head)?;
        }
        let mut body = RangeBody::begin(&range, &head)?;
        let mut stream = answer.into_stream();
        while let Some(part) = tokio::time::timeout(silence, stream.next()).await.map_err(silent)? {
            body.add(&part.map_err(|error| classify(&error))?)?;
        }
        Ok((head, body.end()?))
    }

    fn note_failure(&self, failure: &ReadFailure) {
        let mut failing = self.failing.lock().unwrap_or_else(PoisonError::into_inner);
        if failing.is_some() {
            return;
        }
        *failing = Some(Instant::now());
        tracing::warn!("{}: reads fail: {}", self.name, failure.text());
    }

    fn note_success(&self) {
        let mut failing = self.failing.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(since) = failing.take() {
            tracing::warn!(
                "{}: reads succeed again, after {:.1} s",
                self.name,
                since.elapsed().as_secs_f64()
            );
        }
    }
}
