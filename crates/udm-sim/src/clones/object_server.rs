//! A server with one object, that stalls, lies, refuses and disappears.

use super::world::SOURCE;
use crate::disk::SimDisk;
use crate::environment::Env;
use crate::rng::SimRng;
use crate::stamp::fill_sector_with_stamp;
use std::ops::Range;
use udm_core::{Nanos, SECTOR_SIZE};
use udm_object::ReadFailure;
use udm_object::range_read::{ObjectVersion, RangeAnswerHead};

/// Statuses of servers in trouble, and of those that refuse.
const BUSY: [u16; 4] = [429, 500, 503, 504];
const REFUSED: [u16; 4] = [401, 403, 404, 416];

/// What a server answers.
pub(super) enum ServerAnswer {
    /// Nothing, until the client gives up.
    Silence,
    /// A status that is not 206, or no connection.
    Failure(ReadFailure),
    /// 206.
    Data { head: RangeAnswerHead, body: Vec<u8> },
}

/// The server of the object.
pub(super) struct ObjectServer {
    len: u64,
    latency: u64,
    /// One of this many answers is bad; 0 for none.
    bad_one_in: u64,
    /// One of this many requests finds the object replaced; 0 for none.
    replaced_one_in: u64,
    /// It answers nothing before this time.
    away_until: Nanos,
    /// The object was replaced.
    is_replaced: bool,
    pub lies: u64,
    pub replacements: u64,
}

impl ObjectServer {
    /// Draws a server of an object of `len` bytes.
    pub(super) fn draw(build: &mut SimRng, len: u64, fails: bool) -> ObjectServer {
        ObjectServer {
            len,
            latency: build.pick(&[20_000, 200_000, 2_000_000]),
            bad_one_in: if fails { build.pick(&[5, 20, 100]) } else { 0 },
            replaced_one_in: if fails { build.pick(&[0, 0, 100]) } else { 0 },
            away_until: Nanos(0),
            is_replaced: false,
            lies: 0,
            replacements: 0,
        }
    }

    /// The version with which the clone began.
    pub(super) fn version(&self) -> ObjectVersion {
        ObjectVersion { len: self.len, etag: "\"one\"".into() }
    }

    /// All is well again, with the first version.
    pub(super) fn heal(&mut self) {
        (self.away_until, self.is_replaced) = (Nanos(0), false);
    }

    /// Draws the answer to a request, and when it arrives.
    pub(super) fn answer(&mut self, range: &Range<u64>, env: &mut Env) -> (Nanos, ServerAnswer) {
        let at = Nanos(env.now.0 + 1 + env.chance.span(self.latency));
        if env.calm || env.dead {
            self.heal();
            return (at, self.data(range.clone(), env));
        }
        if env.now < self.away_until {
            return (Nanos::NEVER, ServerAnswer::Silence);
        }
        self.is_replaced |= env.chance.one_in(self.replaced_one_in);
        if self.is_replaced {
            self.lies += 1;
            return (at, self.other_version(range, env));
        }
        if !env.chance.one_in(self.bad_one_in) {
            // One answer in some is slow, but right.
            let slow = if env.chance.one_in(20) { env.chance.below(50_000_000) } else { 0 };
            return (at + Nanos(slow), self.data(range.clone(), env));
        }
        self.lies += 1;
        self.bad_answer(range, at, env)
    }

    fn bad_answer(&mut self, range: &Range<u64>, at: Nanos, env: &mut Env) -> (Nanos, ServerAnswer) {
        let status = |status| ServerAnswer::Failure(ReadFailure::of_answer(status).expect("a status"));
        let answer = match env.chance.below(10) {
            0 => {
                self.away_until = env.now + Nanos(env.chance.below(3_000_000_000));
                return (Nanos::NEVER, ServerAnswer::Silence);
            }
            1 => return (Nanos::NEVER, ServerAnswer::Silence),
            2..4 => status(env.chance.pick(&BUSY)),
            4 => status(env.chance.pick(&REFUSED)),
            5 => ServerAnswer::Failure(ReadFailure::Unavailable("no answer: connection refused".into())),
            // Another range, which the head says.
            6 => {
                let by = env.chance.pick(&[1, SECTOR_SIZE]);
                let start = range.start.saturating_sub(by);
                self.data(start..start + (range.end - range.start), env)
            }
            lie => {
                let answer = self.data(range.clone(), env);
                let ServerAnswer::Data { head, mut body } = answer else { return (at, answer) };
                match lie {
                    7 | 8 => body.truncate(env.chance.below(body.len() as u64) as usize),
                    _ => body.push(9),
                }
                ServerAnswer::Data { head, body }
            }
        };
        (at, answer)
    }

    /// The bytes of a range, which may lie between sectors.
    fn data(&self, range: Range<u64>, env: &Env) -> ServerAnswer {
        self.content(range, "\"one\"", |sector| env.disks[SOURCE].read(sector))
    }

    /// An answer after the object was replaced.
    fn other_version(&mut self, range: &Range<u64>, env: &mut Env) -> ServerAnswer {
        self.replacements += 1;
        if env.chance.one_in(2) {
            return ServerAnswer::Failure(ReadFailure::of_answer(412).expect("a status"));
        }
        // This one ignores `If-Match`.
        self.content(range.clone(), "\"two\"", |sector| SimDisk::first_stamp(SOURCE, sector) ^ 1 << 50)
    }

    fn content(&self, range: Range<u64>, etag: &str, stamp: impl Fn(u64) -> u64) -> ServerAnswer {
        let sectors = range.start / SECTOR_SIZE..range.end.div_ceil(SECTOR_SIZE);
        let first = sectors.start * SECTOR_SIZE;
        let mut bytes = vec![0; ((sectors.end - sectors.start) * SECTOR_SIZE) as usize];
        for (sector, piece) in sectors.zip(bytes.chunks_mut(SECTOR_SIZE as usize)) {
            fill_sector_with_stamp(piece, stamp(sector));
        }
        let body = bytes[(range.start - first) as usize..(range.end - first) as usize].to_vec();
        let head = RangeAnswerHead { etag: Some(etag.into()), object_len: self.len, range };
        ServerAnswer::Data { head, body }
    }
}
