//! State shared by all names of a disk.
//!
//! Several devices can be names of one disk: hard links of a file, two nodes of a block device. The
//! [`SharedDiskState`] of the disk is the same for all its names. It holds shared values
//! ([`SharedDiskState::get_or_default`]) and exclusive claims ([`SharedDiskState::claim`]).

use crate::{DevNo, Device, DeviceId, InterProcessDiskLock};
use std::any::{Any, TypeId};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// State shared by all devices that are names of one disk. Used when a table is loaded or changes,
/// never per request.
#[derive(Debug, Default)]
pub struct SharedDiskState {
    users: Mutex<Vec<Weak<Claimant>>>,
    values: Mutex<Vec<(TypeId, Weak<dyn Any + Send + Sync>)>>,
    /// The lock against other programs, while a claim of this program exists.
    lock: Mutex<Option<Weak<dyn Any + Send + Sync>>>,
    /// If true, every claim is granted.
    is_stateless: bool,
}

/// Who may use a claimed disk.
#[derive(Clone, Debug)]
pub enum ClaimSharingPolicy {
    /// Only the device whose table claims the disk.
    Device,
    /// That device, and all devices with the same key: they understand each other's data on the
    /// disk.
    With(SharedClaimKey),
}

/// A key of devices that may share an exclusive claim: all share one `Arc`. A claim keeps it alive.
#[derive(Clone)]
pub struct SharedClaimKey(Arc<dyn Any + Send + Sync>);

impl SharedClaimKey {
    /// Creates the key of all holders of `value`.
    #[must_use]
    pub fn of<T: Any + Send + Sync>(value: &Arc<T>) -> SharedClaimKey {
        SharedClaimKey(Arc::<T>::clone(value))
    }
}

impl PartialEq for SharedClaimKey {
    fn eq(&self, other: &SharedClaimKey) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.0), Arc::as_ptr(&other.0))
    }
}

impl fmt::Debug for SharedClaimKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClaimKey({:p})", Arc::as_ptr(&self.0))
    }
}

/// A device with an exclusive claim.
#[derive(Debug)]
struct Claimant {
    id: DeviceId,
    number: DevNo,
    key: Option<SharedClaimKey>,
}

impl Claimant {
    fn is_compatible(&self, other: &Claimant) -> bool {
        self.id == other.id || self.key.is_some() && self.key == other.key
    }
}

/// An exclusive claim on a disk, until it is dropped.
pub struct DiskClaim {
    _user: Arc<Claimant>,
    _lock: Option<InterProcessDiskLock>,
}

impl fmt::Debug for DiskClaim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DiskClaim")
    }
}

/// The present user of a disk whose claim was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConflictingDiskUser {
    /// A device of this program, by number.
    Device(DevNo),
    /// Another program.
    OtherProgram,
}

impl fmt::Display for ConflictingDiskUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConflictingDiskUser::Device(number) => number.fmt(f),
            ConflictingDiskUser::OtherProgram => f.write_str("another program"),
        }
    }
}

impl SharedDiskState {
    /// State of a disk that stores nothing: every claim is granted.
    #[must_use]
    pub fn stateless() -> SharedDiskState {
        SharedDiskState { is_stateless: true, ..SharedDiskState::default() }
    }

    /// Returns the value of type `T` that all names of the disk share. The first call creates it;
    /// it lives as long as a caller holds it. `T::default` must not call this function.
    #[must_use]
    pub fn get_or_default<T: Any + Send + Sync + Default>(&self) -> Arc<T> {
        let mut values = lock_ignoring_poison(&self.values);
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

    /// Claims the disk exclusively for the device `id` with the number `number`, shared as `alone`
    /// says. A device that has a claim can get another, so that its next table can take over the
    /// disk. `disk` is one of the disk's names: the claim also locks out other programs.
    ///
    /// # Errors
    /// The present user, if it does not share the disk.
    pub fn claim(
        &self,
        id: DeviceId,
        number: DevNo,
        alone: &ClaimSharingPolicy,
        disk: &dyn Device,
    ) -> Result<DiskClaim, ConflictingDiskUser> {
        let key = match alone {
            ClaimSharingPolicy::Device => None,
            ClaimSharingPolicy::With(key) => Some(key.clone()),
        };
        let user = Arc::new(Claimant { id, number, key });
        // Declared before the guard, so dropped after it: the last reference to a claimant drops
        // its key, and the drop of a key may take locks.
        let mut known = Vec::new();
        let mut users = lock_ignoring_poison(&self.users);
        users.retain(|user| user.upgrade().map(|user| known.push(user)).is_some());
        let other = known.iter().find(|other| !self.is_stateless && !user.is_compatible(other));
        if let Some(other) = other {
            return Err(ConflictingDiskUser::Device(other.number));
        }
        let lock = self.lock(disk)?;
        users.push(Arc::downgrade(&user));
        Ok(DiskClaim { _user: user, _lock: lock })
    }

    /// Returns the lock that all claims share, and takes it if necessary.
    fn lock(&self, disk: &dyn Device) -> Result<Option<InterProcessDiskLock>, ConflictingDiskUser> {
        let mut known = lock_ignoring_poison(&self.lock);
        if let Some(held) = known.as_ref().and_then(Weak::upgrade) {
            return Ok(Some(held));
        }
        let held = disk.lock().map_err(|_| ConflictingDiskUser::OtherProgram)?;
        *known = held.as_ref().map(Arc::downgrade);
        Ok(held)
    }
}

fn lock_ignoring_poison<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cx, DeviceControlError, Lane, Limits, Sectors};

    /// A name of a disk without a lock.
    struct NoDisk;

    impl Device for NoDisk {
        fn id(&self) -> DeviceId {
            DeviceId::new()
        }

        fn open(&self, _: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
            Err(DeviceControlError::new(crate::errno::ENXIO, "no disk"))
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
        let claim = disk.claim(one, FIRST, &ClaimSharingPolicy::Device, &NoDisk).unwrap();
        assert_eq!(
            disk.claim(other, SECOND, &ClaimSharingPolicy::Device, &NoDisk).unwrap_err(),
            ConflictingDiskUser::Device(FIRST)
        );
        let again = disk.claim(one, FIRST, &ClaimSharingPolicy::Device, &NoDisk).unwrap();
        drop(claim);
        assert_eq!(
            disk.claim(other, SECOND, &ClaimSharingPolicy::Device, &NoDisk).unwrap_err(),
            ConflictingDiskUser::Device(FIRST),
            "one is left"
        );
        drop(again);
        assert!(disk.claim(other, SECOND, &ClaimSharingPolicy::Device, &NoDisk).is_ok());
        let nothing = SharedDiskState::stateless();
        let _all = [(one, FIRST), (other, SECOND)].map(|(id, number)| {
            nothing
                .claim(id, number, &ClaimSharingPolicy::Device, &NoDisk)
                .expect("a stateless disk grants all claims")
        });
    }

    #[test]
    fn those_with_one_key_have_a_disk_together() {
        let disk = SharedDiskState::default();
        let [one, two, stranger] = [(); 3].map(|()| DeviceId::new());
        let key = || ClaimSharingPolicy::With(SharedClaimKey::of(&Arc::new(7)));
        let with = key();
        let first = disk.claim(one, FIRST, &with, &NoDisk).unwrap();
        let second = disk.claim(two, SECOND, &with, &NoDisk).unwrap();
        for alone in [ClaimSharingPolicy::Device, key()] {
            assert_eq!(
                disk.claim(stranger, SECOND, &alone, &NoDisk).unwrap_err(),
                ConflictingDiskUser::Device(FIRST)
            );
        }
        drop(first);
        assert_eq!(
            disk.claim(one, FIRST, &ClaimSharingPolicy::Device, &NoDisk).unwrap_err(),
            ConflictingDiskUser::Device(SECOND),
            "it has let go"
        );
        // A device's next table may use the disk for something else, once the device is the only
        // user.
        let other = disk.claim(two, SECOND, &key(), &NoDisk).unwrap();
        assert_eq!(disk.claim(one, FIRST, &with, &NoDisk).unwrap_err(), ConflictingDiskUser::Device(SECOND));
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
