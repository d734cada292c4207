//! One object as it was when it was opened, and ranges of it.

use crate::failure::{ReadFailure, classify};
use crate::store::ObjectLocation;
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use object_store::{GetOptions, GetRange, ObjectMeta, ObjectStore};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use udm_backends::KnownObject;
use udm_core::DeviceControlError;
use udm_core::errno::{EIO, ENODEV, ETIMEDOUT};
use udm_wire::uri::{ObjectUri, TimeSpan};

/// Maximum number of ranges of one object that are requested at a time.
pub(crate) const FETCHES_MAX: usize = 16;

/// Pauses between attempts double from the first to the longest.
const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// A server that sends nothing for this long gets another request. A shorter deadline shortens it,
/// so that there are several attempts.
const SILENCE_MAX: Duration = Duration::from_secs(10);
const ATTEMPTS_MIN: u32 = 3;

/// A server that is unavailable for a shorter time is not logged: object stores limit the rate of
/// requests by 429 and 503.
const LOST_AFTER: Duration = Duration::from_secs(1);

/// The longest wait for a server when a device is opened, as for NBD servers.
const OPEN_MAX: Duration = Duration::from_secs(10);

/// An object: its length and ETag, and the state of its reads.
pub(crate) struct ObjectSource {
    name: String,
    location: ObjectLocation,
    deadline: Option<Duration>,
    len: u64,
    etag: String,
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
            deadline: uri.deadline().map(|deadline| Duration::from_nanos(deadline.0)),
            len: 0,
            etag: String::new(),
            is_known: false,
            changed: OnceLock::new(),
            failing: Mutex::default(),
            requests: AtomicU64::new(0),
        })
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// The object is the version `known`: its server is not asked now.
    pub(crate) fn known_as(self, known: KnownObject) -> ObjectSource {
        ObjectSource { len: known.len, etag: known.etag, is_known: true, ..self }
    }

    /// The version of the object.
    pub(crate) fn as_known(&self) -> KnownObject {
        KnownObject { uri: self.name.clone(), len: self.len, etag: self.etag.clone() }
    }

    /// True if the version comes from an earlier process.
    pub(crate) fn is_known(&self) -> bool {
        self.is_known
    }

    /// Asks for the first byte, which shows the length, the ETag, and that the server knows ranges.
    ///
    /// # Errors
    /// In one line that names the object.
    pub(crate) async fn open(mut self) -> Result<ObjectSource, DeviceControlError> {
        let fail = |errno, why: &str| DeviceControlError::new(errno, format!("{}: {why}", self.name));
        let until = Instant::now() + self.deadline.unwrap_or(OPEN_MAX).min(OPEN_MAX);
        let (meta, _) = self.retry(Some(until), 0..1, false).await.map_err(|failure| match &failure {
            ReadFailure::Unavailable(why) => {
                let time = self.deadline.unwrap_or(OPEN_MAX).min(OPEN_MAX);
                let time = TimeSpan(udm_core::Nanos(time.as_nanos() as u64));
                fail(ETIMEDOUT, &format!("{why}, for {time}"))
            }
            ReadFailure::Refused(why) => fail(EIO, why),
            ReadFailure::Changed(why) => fail(ENODEV, why),
        })?;
        let etag = match meta.e_tag {
            Some(etag) if etag.starts_with("W/") => {
                return Err(fail(EIO, "the server has only a weak ETag, so a change would not be noticed"));
            }
            Some(etag) => etag,
            None => return Err(fail(EIO, "the server sends no ETag, so a change would not be noticed")),
        };
        (self.len, self.etag) = (meta.size, etag);
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
        let result = self.retry(self.deadline.map(|deadline| since + deadline), range, true).await;
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

    /// Repeats attempts until one succeeds, is refused, or `until` has passed.
    async fn retry(
        &self,
        until: Option<Instant>,
        range: Range<u64>,
        is_opened: bool,
    ) -> Result<(ObjectMeta, Bytes), ReadFailure> {
        let left = || until.map(|until| until.saturating_duration_since(Instant::now()));
        let silence = self.deadline.map_or(SILENCE_MAX, |deadline| deadline / ATTEMPTS_MIN).min(SILENCE_MAX);
        let begin = Instant::now();
        let mut pause = PAUSE_FIRST;
        let mut last = ReadFailure::Unavailable("no answer".into());
        loop {
            let time = left();
            if time == Some(Duration::ZERO) {
                return Err(last);
            }
            let attempt = self.attempt(range.clone(), is_opened, silence);
            let result = match time {
                Some(time) => match tokio::time::timeout(time, attempt).await {
                    Ok(result) => result,
                    Err(_) => return Err(last),
                },
                None => attempt.await,
            };
            last = match result {
                Err(failure @ ReadFailure::Unavailable(_)) => failure,
                other => return other,
            };
            if is_opened && begin.elapsed() >= LOST_AFTER {
                self.note_failure(&last);
            }
            // The pauses of several readers must not coincide.
            let jitter = self.requests.load(Relaxed) % 16;
            let wait = pause.mul_f64(0.75 + jitter as f64 / 32.0);
            tokio::time::sleep(left().map_or(wait, |left| wait.min(left))).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// One request of a range, with all checks of the answer.
    async fn attempt(
        &self,
        range: Range<u64>,
        is_opened: bool,
        silence: Duration,
    ) -> Result<(ObjectMeta, Bytes), ReadFailure> {
        self.requests.fetch_add(1, Relaxed);
        let silent = |_| ReadFailure::Unavailable("no answer".into());
        let options = GetOptions {
            range: Some(GetRange::Bounded(range.clone())),
            if_match: is_opened.then(|| self.etag.clone()),
            ..GetOptions::default()
        };
        let ObjectLocation { store, path } = &self.location;
        let answer = tokio::time::timeout(silence, store.get_opts(path, options)).await.map_err(silent)?;
        let answer = answer.map_err(|error| classify(&error))?;
        let meta = answer.meta.clone();
        if is_opened {
            self.check_same(&meta)?;
        }
        let wanted = (range.end - range.start) as usize;
        let mut body = BytesMut::with_capacity(wanted);
        let mut stream = answer.into_stream();
        while let Some(part) = tokio::time::timeout(silence, stream.next()).await.map_err(silent)? {
            let part = part.map_err(|error| classify(&error))?;
            if body.len() + part.len() > wanted {
                return Err(ReadFailure::Refused(format!("a wrong answer: more than {wanted} bytes")));
            }
            body.extend_from_slice(&part);
        }
        if body.len() < wanted {
            let text = format!("a wrong answer: {} bytes instead of {wanted}", body.len());
            return Err(ReadFailure::Refused(text));
        }
        Ok((meta, body.freeze()))
    }

    /// Compares an answer with the object as it was opened: a server may ignore `If-Match`.
    fn check_same(&self, meta: &ObjectMeta) -> Result<(), ReadFailure> {
        if meta.size != self.len {
            let text = format!("the object has changed: {} bytes instead of {}", meta.size, self.len);
            return Err(ReadFailure::Changed(text));
        }
        match &meta.e_tag {
            Some(etag) if *etag == self.etag => Ok(()),
            Some(_) => Err(ReadFailure::Changed("the object has changed: another ETag".into())),
            None => Err(ReadFailure::Refused("a wrong answer: no ETag".into())),
        }
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
