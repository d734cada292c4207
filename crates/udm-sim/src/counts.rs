//! Counts of what runs did: how those of several are added up, what never came, and words for it.

use crate::plan::{Disturbance, ExcludedDisturbances};

/// What is known of several runs from what is known of each.
pub trait Accumulate {
    /// Adds what another run did.
    fn add(&mut self, more: &Self);
}

impl Accumulate for u64 {
    fn add(&mut self, more: &u64) {
        *self += more;
    }
}

impl<const N: usize> Accumulate for [u64; N] {
    fn add(&mut self, more: &[u64; N]) {
        self.iter_mut().zip(more).for_each(|(all, more)| *all += more);
    }
}

/// The largest of all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Maximum(pub u64);

impl Maximum {
    /// Takes notice of `n`.
    pub fn see(&mut self, n: u64) {
        self.0 = self.0.max(n);
    }
}

impl Accumulate for Maximum {
    fn add(&mut self, more: &Maximum) {
        self.see(more.0);
    }
}

/// A hash of the hashes of all, in their order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunHash(pub u64);

impl Accumulate for RunHash {
    fn add(&mut self, more: &RunHash) {
        self.0 = self.0.rotate_left(1) ^ more.0;
    }
}

/// Makes a struct of counts, which is one itself.
macro_rules! counts {
    ($(#[$about:meta])* pub struct $name:ident { $($(#[$doc:meta])* pub $field:ident: $of:ty,)* }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, Default)]
        pub struct $name {
            $($(#[$doc])* pub $field: $of,)*
        }

        impl $crate::counts::Accumulate for $name {
            fn add(&mut self, more: &$name) {
                $($crate::counts::Accumulate::add(&mut self.$field, &more.$field);)*
            }
        }
    };
}

pub(crate) use counts;

/// Of kinds of trouble, each with the class that brings it and how often it came: those that were
/// not left out and never came all the same. The runs were too short for them.
pub(crate) fn uncovered<C: Into<Option<Disturbance>>>(
    all: impl IntoIterator<Item = (&'static str, C, u64)>,
    without: ExcludedDisturbances,
) -> Vec<&'static str> {
    let is_out = |class: C| class.into().is_some_and(|class| without.has(class));
    all.into_iter().filter_map(|(name, class, n)| (n == 0 && !is_out(class)).then_some(name)).collect()
}

/// Each with its number, for a person.
pub(crate) fn list<N: std::fmt::Display>(all: impl IntoIterator<Item = (N, u64)>) -> String {
    all.into_iter().map(|(name, n)| format!("{} {name}", count(n))).collect::<Vec<_>>().join(", ")
}

/// As [`list`], of kinds of trouble.
pub(crate) fn format_disturbance_counts<C>(all: impl IntoIterator<Item = (&'static str, C, u64)>) -> String {
    list(all.into_iter().map(|(name, _, n)| (name, n)))
}

/// A number for a person.
#[must_use]
pub fn count(n: u64) -> String {
    match n {
        0..10_000 => n.to_string(),
        10_000..10_000_000 => format!("{:.1} k", n as f64 / 1e3),
        _ => format!("{:.1} M", n as f64 / 1e6),
    }
}
