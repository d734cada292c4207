//! The metadata contexts that the server has, and what clients ask for them: the one list of both.

use udm_core::Content;
use udm_wire::nbd::{CONTEXT_ALLOCATION, STATE_HOLE, STATE_ZERO};

/// A metadata context. What it says of blocks comes from [`udm_core::Device::extents`].
pub(super) struct Context {
    /// Its number on the wire.
    pub(super) id: u32,
    pub(super) name: &'static str,
    /// The flags of a run of sectors.
    pub(super) flags: fn(Content) -> u32,
}

/// Every context.
pub(super) const CONTEXTS: &[Context] = &[Context {
    id: 1,
    name: CONTEXT_ALLOCATION,
    flags: |content| match content {
        Content::Data => 0,
        Content::Hole => STATE_HOLE | STATE_ZERO,
    },
}];

/// The contexts that one of `queries` names. To list, no query at all is a query for all of them,
/// and a namespace (`base:`) for those in it.
pub(super) fn matching(queries: &[String], list: bool) -> impl Iterator<Item = &'static Context> + '_ {
    CONTEXTS.iter().filter(move |context| {
        let namespace = context.name.split_inclusive(':').next();
        let fits = |query: &String| query == context.name || list && namespace == Some(query.as_str());
        list && queries.is_empty() || queries.iter().any(fits)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries() {
        let n = |queries: &[&str], list| {
            let queries: Vec<String> = queries.iter().map(|q| (*q).to_owned()).collect();
            matching(&queries, list).count()
        };
        assert_eq!((n(&[], true), n(&[], false)), (1, 0));
        assert_eq!((n(&["base:"], true), n(&["base:"], false)), (1, 0));
        assert_eq!(
            (n(&["base:allocation"], true), n(&["base:allocation", "base:allocation"], false)),
            (1, 1)
        );
        assert_eq!((n(&["base", "", "qemu:", "base:allocation2"], true)), 0);
    }
}
