//! What is one for all names of a disk.
//!
//! Several devices can be names of one disk: hard links of a file, two nodes of a block device.
//! Whoever must know of the others that use the disk finds them in its [`Commons`], whatever name
//! each of them took.

use crate::{DevNo, DeviceId};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// What the devices share that are names of one disk. It is looked at when a table is loaded, never
/// by a request.
#[derive(Debug, Default)]
pub struct Commons {
    user: Mutex<Weak<User>>,
}

/// Who uses a disk alone.
#[derive(Debug)]
struct User {
    id: DeviceId,
    number: DevNo,
}

/// The disk is the holder's alone, until it is dropped.
#[derive(Debug)]
pub struct Claim(Arc<User>);

impl Claim {
    /// True when both are of one disk.
    #[must_use]
    pub fn is_same(&self, other: &Claim) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Commons {
    /// The disk for the device `id` alone, whose number is `number`. One that has it may have it
    /// again, so that its next table can take it over.
    ///
    /// # Errors
    /// The number of the device that has it.
    pub fn claim(&self, id: DeviceId, number: DevNo) -> Result<Claim, DevNo> {
        let mut known = self.user.lock().unwrap_or_else(PoisonError::into_inner);
        match known.upgrade() {
            Some(user) if user.id == id => Ok(Claim(user)),
            Some(user) => Err(user.number),
            None => {
                let user = Arc::new(User { id, number });
                *known = Arc::downgrade(&user);
                Ok(Claim(user))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_device_has_a_disk_until_it_lets_go() {
        let disk = Commons::default();
        let (one, other) = (DeviceId::new(), DeviceId::new());
        let (first, second) = (DevNo { major: 254, minor: 1 }, DevNo { major: 254, minor: 2 });
        let claim = disk.claim(one, first).unwrap();
        assert_eq!(disk.claim(other, second).unwrap_err(), first);
        let again = disk.claim(one, first).unwrap();
        assert!(again.is_same(&claim));
        drop(claim);
        assert_eq!(disk.claim(other, second).unwrap_err(), first, "one is left");
        drop(again);
        assert!(Commons::default().claim(other, second).is_ok());
        assert!(
            !disk.claim(other, second).unwrap().is_same(&Commons::default().claim(other, second).unwrap())
        );
    }
}
