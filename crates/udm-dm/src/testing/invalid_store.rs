//! Marks of invalid stores in memory. They become durable at once, or when the test allows it.

use super::lock_test_mutex;
use crate::invalid_store::InvalidStoreMark;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

type StoreMarkDurableFn = Box<dyn FnOnce(Result<(), String>) + Send>;

/// The marks of all stores, by name. Clones share the same marks.
#[derive(Clone, Default)]
pub struct TestStoreMarks(Arc<Mutex<TestStoreMarksState>>);

#[derive(Default)]
struct TestStoreMarksState {
    why: BTreeMap<String, String>,
    slow: bool,
    waiting: Vec<StoreMarkDurableFn>,
}

impl TestStoreMarks {
    /// The mark of the store `name`.
    #[must_use]
    pub fn of(&self, name: &str) -> Arc<dyn InvalidStoreMark> {
        Arc::new(TestInvalidStoreMark { marks: self.clone(), name: name.into() })
    }

    /// From now on, marks wait for [`TestStoreMarks::end`].
    pub fn wait(&self) {
        lock_test_mutex(&self.0).slow = true;
    }

    /// Completes all waiting marks with the result `kept`.
    pub fn end(&self, kept: &Result<(), String>) {
        let waiting = std::mem::take(&mut lock_test_mutex(&self.0).waiting);
        waiting.into_iter().for_each(|done| done(kept.clone()));
    }
}

struct TestInvalidStoreMark {
    marks: TestStoreMarks,
    name: String,
}

impl InvalidStoreMark for TestInvalidStoreMark {
    fn why(&self) -> Option<String> {
        lock_test_mutex(&self.marks.0).why.get(&self.name).cloned()
    }

    fn set(&self, why: &str, done: StoreMarkDurableFn) {
        let mut marks = lock_test_mutex(&self.marks.0);
        marks.why.insert(self.name.clone(), why.into());
        if marks.slow {
            return marks.waiting.push(done);
        }
        drop(marks);
        done(Ok(()));
    }

    fn clear(&self) -> Result<(), String> {
        lock_test_mutex(&self.marks.0).why.remove(&self.name);
        Ok(())
    }
}
