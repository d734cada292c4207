//! What is one for all names of a disk.
//!
//! Several devices can be names of one disk: hard links of a file, two nodes of a block device.
//! Whoever must know of the others that use the disk finds them in its [`SharedDiskState`], whatever name
//! each of them took: a value that they share ([`SharedDiskState::get_or_default`]), and who has the disk alone
//! ([`SharedDiskState::claim`]).

use crate::{DevNo, Device, DeviceId, DiskLock};
use std::any::{Any, TypeId};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// What the devices share that are names of one disk. It is looked at when a table is loaded or
/// changes, never by a request.
#[derive(Debug, Default)]
pub struct SharedDiskState {
    users: Mutex<Vec<Weak<Claimant>>>,
    values: Mutex<Vec<(TypeId, Weak<dyn Any + Send + Sync>)>>,
    /// What keeps other programs away, while somebody here has it alone.
    lock: Mutex<Option<Weak<dyn Any + Send + Sync>>>,
    /// Everybody may have it alone.
    is_stateless: bool,
}

/// For whom a disk is claimed.
#[derive(Clone, Debug)]
pub enum Exclusivity {
    /// The device whose table it is.
    Device,
    /// Whoever brings the same key, besides that device: what one has written there makes sense to
    /// the others.
    With(ClaimKey),
}

/// What those who may have a disk together have in common: a value that they all hold. A claim
/// holds it too.
#[derive(Clone)]
pub struct ClaimKey(Arc<dyn Any + Send + Sync>);

impl ClaimKey {
    /// The key of all who hold `value`.
    #[must_use]
    pub fn of<T: Any + Send + Sync>(value: &Arc<T>) -> ClaimKey {
        ClaimKey(Arc::<T>::clone(value))
    }
}

impl PartialEq for ClaimKey {
    fn eq(&self, other: &ClaimKey) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.0), Arc::as_ptr(&other.0))
    }
}

impl fmt::Debug for ClaimKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClaimKey({:p})", Arc::as_ptr(&self.0))
    }
}

/// Who uses a disk alone.
#[derive(Debug)]
struct Claimant {
    id: DeviceId,
    number: DevNo,
    key: Option<ClaimKey>,
}

impl Claimant {
    fn is_compatible(&self, other: &Claimant) -> bool {
        self.id == other.id || self.key.is_some() && self.key == other.key
    }
}

/// The disk is the holder's alone, until it is dropped.
pub struct DiskClaim {
    _user: Arc<Claimant>,
    _lock: Option<DiskLock>,
}

impl fmt::Debug for DiskClaim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Claim")
    }
}

/// Who has a disk that was to be claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimConflict {
    /// A device of this program, by its number.
    Device(DevNo),
    /// Another program.
    OtherProgram,
}

impl fmt::Display for ClaimConflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ClaimConflict::Device(number) => number.fmt(f),
            ClaimConflict::OtherProgram => f.write_str("another program"),
        }
    }
}

impl SharedDiskState {
    /// Of a disk that keeps nothing: nobody needs it alone, and every claim is granted.
    #[must_use]
    pub fn stateless() -> SharedDiskState {
        SharedDiskState { is_stateless: true, ..SharedDiskState::default() }
    }

    /// The value of type `T` that all names of the disk share. It is made by the first who asks,
    /// and is there for as long as somebody holds it. `T::default` must not ask for another.
    #[must_use]
    pub fn get_or_default<T: Any + Send + Sync + Default>(&self) -> Arc<T> {
        let mut values = lock(&self.values);
        values.retain(|(_, value)| value.strong_count() > 0);
        let known = values.iter().find(|(id, _)| *id == TypeId::of::<T>());
        let known = known.and_then(|(_, value)| value.upgrade()?.downcast::<T>().ok());
        known.unwrap_or_else(|| {
            let value = Arc::new(T::default());
            let shared: Arc<dyn Any + Send + Sync> = Arc::<T>::clone(&value);
            values.push((TypeId::of::<T>(), Arc::downgrade(&shared)));
            value
        })
    }

    /// The disk for the device `id` alone, whose number is `number`, and with `alone` for others.
    /// One that has it may have it again, so that its next table can take it over. `disk` is one of
    /// its names: other programs are kept from having it alone, too.
    ///
    /// # Errors
    /// Who has it and would not share it.
    pub fn claim(
        &self,
        id: DeviceId,
        number: DevNo,
        alone: &Exclusivity,
        disk: &dyn Device,
    ) -> Result<DiskClaim, ClaimConflict> {
        let key = match alone {
            Exclusivity::Device => None,
            Exclusivity::With(key) => Some(key.clone()),
        };
        let user = Arc::new(Claimant { id, number, key });
        let mut users = lock(&self.users);
        // Those that are let go of behind the lock may be the last to hold a key.
        let mut known = Vec::with_capacity(users.len());
        users.retain(|user| user.upgrade().map(|user| known.push(user)).is_some());
        let other = known.iter().find(|other| !self.is_stateless && !user.is_compatible(other));
        if let Some(other) = other {
            let taken = ClaimConflict::Device(other.number);
            drop(users);
            return Err(taken);
        }
        let lock = self.lock(disk)?;
        users.push(Arc::downgrade(&user));
        drop(users);
        Ok(DiskClaim { _user: user, _lock: lock })
    }

    /// The lock that all claims share.
    fn lock(&self, disk: &dyn Device) -> Result<Option<DiskLock>, ClaimConflict> {
        let mut known = lock(&self.lock);
        if let Some(held) = known.as_ref().and_then(Weak::upgrade) {
            return Ok(Some(held));
        }
        let held = disk.lock().map_err(|_| ClaimConflict::OtherProgram)?;
        *known = held.as_ref().map(Arc::downgrade);
        Ok(held)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cx, Lane, Limits, OpenError, Sectors};

    /// A name of a disk that nobody locks.
    struct NoDisk;

    impl Device for NoDisk {
        fn id(&self) -> DeviceId {
            DeviceId::new()
        }

        fn open(&self, _: &mut Cx<'_>) -> Result<Box<dyn Lane>, OpenError> {
            Err(OpenError::new(crate::errno::ENXIO, "no disk"))
        }

        fn limits(&self) -> Limits {
            Limits::new(Sectors::ZERO)
        }
    }

    const FIRST: DevNo = DevNo { major: 254, minor: 1 };
    const SECOND: DevNo = DevNo { major: 254, minor: 2 };

    #[test]
    fn one_device_has_a_disk_until_it_lets_go() {
        let disk = SharedDiskState::default();
        let (one, other) = (DeviceId::new(), DeviceId::new());
        let claim = disk.claim(one, FIRST, &Exclusivity::Device, &NoDisk).unwrap();
        assert_eq!(
            disk.claim(other, SECOND, &Exclusivity::Device, &NoDisk).unwrap_err(),
            ClaimConflict::Device(FIRST)
        );
        let again = disk.claim(one, FIRST, &Exclusivity::Device, &NoDisk).unwrap();
        drop(claim);
        assert_eq!(
            disk.claim(other, SECOND, &Exclusivity::Device, &NoDisk).unwrap_err(),
            ClaimConflict::Device(FIRST),
            "one is left"
        );
        drop(again);
        assert!(disk.claim(other, SECOND, &Exclusivity::Device, &NoDisk).is_ok());
        let nothing = SharedDiskState::stateless();
        let _all = [(one, FIRST), (other, SECOND)].map(|(id, number)| {
            nothing
                .claim(id, number, &Exclusivity::Device, &NoDisk)
                .expect("what keeps nothing is everybody's")
        });
    }

    #[test]
    fn those_with_one_key_have_a_disk_together() {
        let disk = SharedDiskState::default();
        let [one, two, stranger] = [(); 3].map(|()| DeviceId::new());
        let key = || Exclusivity::With(ClaimKey::of(&Arc::new(7)));
        let with = key();
        let first = disk.claim(one, FIRST, &with, &NoDisk).unwrap();
        let second = disk.claim(two, SECOND, &with, &NoDisk).unwrap();
        for alone in [Exclusivity::Device, key()] {
            assert_eq!(
                disk.claim(stranger, SECOND, &alone, &NoDisk).unwrap_err(),
                ClaimConflict::Device(FIRST)
            );
        }
        drop(first);
        assert_eq!(
            disk.claim(one, FIRST, &Exclusivity::Device, &NoDisk).unwrap_err(),
            ClaimConflict::Device(SECOND),
            "it has let go"
        );
        // A device's next table may use the disk for something else, once it has it for itself.
        let other = disk.claim(two, SECOND, &key(), &NoDisk).unwrap();
        assert_eq!(disk.claim(one, FIRST, &with, &NoDisk).unwrap_err(), ClaimConflict::Device(SECOND));
        drop(second);
        assert!(disk.claim(one, FIRST, &with, &NoDisk).is_err());
        drop(other);
        assert!(disk.claim(one, FIRST, &with, &NoDisk).is_ok());
    }

    #[test]
    fn a_value_is_shared_for_as_long_as_somebody_holds_it() {
        #[derive(Default)]
        struct Shared(Mutex<u32>);
        let disk = SharedDiskState::default();
        let value = disk.get_or_default::<Shared>();
        *value.0.lock().unwrap() = 7;
        assert!(Arc::ptr_eq(&value, &disk.get_or_default()));
        assert_eq!(*disk.get_or_default::<Mutex<u32>>().lock().unwrap(), 0, "of another type");
        assert_eq!(
            *SharedDiskState::default().get_or_default::<Shared>().0.lock().unwrap(),
            0,
            "of another disk"
        );
        drop(value);
        assert_eq!(*disk.get_or_default::<Shared>().0.lock().unwrap(), 0, "a new one");
    }
}
