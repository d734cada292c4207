//! The parts of a request: one per extent of the map that it touches.

use std::collections::VecDeque;
use udm_core::{Bio, SECTOR_SIZE, Sector, Sectors, Segments, Status};
use udm_wire::qcow2::{DiskExtentMap, DiskRange};

/// A request in parts. Its data is cut into the parts, and joined again in order.
#[derive(Default)]
pub(super) struct RequestInParts {
    bio: Option<Box<Bio>>,
    /// First sector without a part.
    next: Sector,
    /// The data of each part from the start; `None` while the part is in flight.
    parts: Vec<Option<Segments>>,
    in_flight: usize,
    status: Status,
}

/// A part of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PartKey {
    request: u32,
    part: u32,
}

impl PartKey {
    pub(super) fn to_u64(self) -> u64 {
        u64::from(self.request) << 32 | u64::from(self.part)
    }

    pub(super) fn from_u64(key: u64) -> PartKey {
        PartKey { request: (key >> 32) as u32, part: key as u32 }
    }

    pub(super) fn request(self) -> usize {
        self.request as usize
    }
}

/// The requests of a lane; finished ones are reused.
#[derive(Default)]
pub(super) struct RequestTable {
    requests: Vec<RequestInParts>,
    free: Vec<usize>,
    /// Requests with sectors that have no part yet.
    pub(super) unfinished: VecDeque<usize>,
}

impl RequestTable {
    /// Adds a valid read.
    pub(super) fn add(&mut self, bio: Box<Bio>) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.requests.push(RequestInParts::default());
            self.requests.len() - 1
        });
        let request = &mut self.requests[index];
        (request.next, request.status, request.in_flight) = (bio.sector, Status::Ok, 0);
        request.bio = Some(bio);
        self.unfinished.push_back(index);
    }

    /// The extent of the next part of a request, cut to its range; `None` if it has no more.
    pub(super) fn next_range(&self, index: usize, map: &DiskExtentMap) -> Option<DiskRange> {
        let request = &self.requests[index];
        let end = request.bio.as_ref().expect("a request in use").end();
        (request.next < end).then(|| {
            let range = map.range(request.next);
            DiskRange { len: range.len.min(Sectors(end.0 - request.next.0)), ..range }
        })
    }

    /// Cuts the next `len` sectors off the data. Returns the part, its data, and the request.
    pub(super) fn start_part(&mut self, index: usize, len: Sectors) -> (PartKey, Segments, &Bio) {
        let request = &mut self.requests[index];
        let bio = request.bio.as_mut().expect("a request in use");
        request.next += len;
        let data = match request.next == bio.end() {
            true => std::mem::take(&mut bio.data),
            false => bio.data.split_to((len.0 * SECTOR_SIZE) as usize),
        };
        let key = PartKey { request: index as u32, part: request.parts.len() as u32 };
        request.parts.push(None);
        request.in_flight += 1;
        (key, data, bio)
    }

    /// Ends a part. Returns the request if it is complete.
    pub(super) fn end_part(&mut self, key: PartKey, data: Segments, status: Status) -> Option<Box<Bio>> {
        let request = &mut self.requests[key.request()];
        request.parts[key.part as usize] = Some(data);
        request.in_flight -= 1;
        if request.status.is_ok() {
            request.status = status;
        }
        let is_cut = request.bio.as_ref().is_some_and(|bio| request.next == bio.end());
        if request.in_flight > 0 || !is_cut {
            return None;
        }
        let mut bio = request.bio.take()?;
        for part in request.parts.drain(..).flatten() {
            match bio.data.is_empty() {
                true => bio.data = part,
                false => bio.data.append(part),
            }
        }
        bio.end_with(request.status);
        self.free.push(key.request());
        Some(bio)
    }
}
