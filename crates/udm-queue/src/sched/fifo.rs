//! The scheduler `none`: first in, first out. A new request is merged with one of the latest
//! waiting requests if possible.

use crate::merge::{Merger, Request};
use std::collections::VecDeque;
use udm_core::{Batch, Bio, Cx};

/// The scheduler `none`.
#[derive(Default)]
pub(crate) struct FifoScheduler(VecDeque<Request>);

impl FifoScheduler {
    #[inline]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn add(&mut self, bio: Box<Bio>, merger: &mut Merger, _cx: &Cx<'_>) {
        let touches = |request: &&mut Request| {
            (request.end() == bio.sector || bio.end() == request.sector())
                && merger.can_merge(&request.bio, &bio)
        };
        let lookback = merger.lookback();
        let found = self.0.iter_mut().rev().take(lookback).find(touches);
        match found {
            Some(request) => merger.merge(request, bio),
            None => self.0.push_back(Merger::single(bio)),
        }
    }

    pub fn next(&mut self, _merger: &mut Merger, _cx: &Cx<'_>) -> Option<Request> {
        self.0.pop_front()
    }

    pub fn hand_back(&mut self, merger: &mut Merger, back: &mut Batch) {
        self.0.drain(..).for_each(|request| merger.split(request, back));
    }
}
