//! Tests of the packed ring with a driver that writes its descriptors.

use super::*;
use crate::vhost_user::memory::tests::memfd;
use std::sync::Arc;
use udm_buf::SharedMemoryMap;
use udm_wire::vhost_user::InflightArea;
use udm_wire::virtio::packed::{EVENT_F_DISABLE, EventSuppression};
use udm_wire::virtio::ring::DESC_F_NEXT;

const SIZE: u16 = 4;
/// Offsets of the event suppression structures and of the record.
const EVENTS: [usize; 2] = [1024, 1028];
const RECORD: usize = 4096;

/// The memory of a driver, and where it continues.
struct Driver {
    map: Arc<SharedMemoryMap>,
    next: PackedPosition,
}

impl Driver {
    fn new() -> Driver {
        let map = Arc::new(SharedMemoryMap::of_guest_memory(memfd(8192), 0, 8192).unwrap());
        Driver { map, next: PackedPosition::START }
    }

    fn ring(&self) -> PackedRing {
        let parts = [0, EVENTS[0], EVENTS[1]].map(|at| (self.map.clone(), at));
        PackedRing::new(SIZE, parts, true, PackedPosition::START)
    }

    /// A ring with a record, which begins at an offset of the mapping.
    fn recorded_ring(&self) -> PackedRing {
        let area = InflightArea { size: 8192, offset: 0, queues: 64, ring_size: SIZE };
        let index = RECORD / 192;
        let record = PackedInflightRecord::new(&self.map, &area, index, SIZE).unwrap();
        let mut ring = self.ring();
        assert!(ring.continue_with(record));
        ring
    }

    fn set(&self, index: u16, word: usize, value: u64) {
        self.map.words()[2 * usize::from(index) + word].store(value.to_le(), Ordering::Relaxed);
    }

    fn get(&self, index: u16) -> PackedDescriptor {
        let words = [0, 1].map(|word| {
            let at = 2 * usize::from(index) + word;
            u64::from_le(self.map.words()[at].load(Ordering::Relaxed))
        });
        PackedDescriptor::from_words(words)
    }

    /// Adds a chain of `num` descriptors with this ID in the last one.
    fn add(&mut self, num: u16, id: u16) {
        for ahead in (0..num).rev() {
            let at = self.next.advanced(ahead, SIZE);
            let (is_last, address) = (ahead + 1 == num, u64::from(id) << 8 | u64::from(ahead));
            let flags = at.available_flags() | if is_last { 0 } else { DESC_F_NEXT };
            let id = if is_last { id } else { !id };
            self.set(at.index, 0, address);
            self.set(at.index, 1, PackedDescriptor { address, len: 1, id, flags }.second_word());
        }
        self.next = self.next.advanced(num, SIZE);
    }
}

fn complete(ring: &mut PackedRing, slots: &[u16]) -> bool {
    slots.iter().for_each(|slot| ring.push_used(*slot, 5));
    ring.publish().unwrap()
}

#[test]
fn chains_complete_in_any_order_over_the_end_of_the_ring() {
    let mut driver = Driver::new();
    let mut ring = driver.ring();
    assert!(ring.is_unused() && ring.take() == Ok(None) && ring.publish().is_none());
    driver.add(2, 0xbeef);
    driver.add(1, 7);
    let [a, b] = [0; 2].map(|_| ring.take().unwrap().unwrap());
    assert!(a != b && ring.take() == Ok(None));
    // Two descriptors were taken from position 0 on, and the ID is that of the last one.
    complete(&mut ring, &[b]);
    let used = driver.get(0);
    assert_eq!((used.id, used.len), (7, 5));
    assert!(PackedPosition::START.is_used(used.flags) && used.is_writable());
    complete(&mut ring, &[a]);
    assert_eq!(driver.get(1).id, 0xbeef);
    assert_eq!(ring.base(), 0x8003_8003);
    // Over the end: the wrap counter changes.
    driver.add(3, 1);
    let c = ring.take().unwrap().unwrap();
    complete(&mut ring, &[c]);
    assert!(PackedPosition { index: 3, wrap: true }.is_used(driver.get(3).flags));
    assert_eq!(ring.base(), 0x0002_0002);
    assert!(!ring.request_notification() && !ring.is_unused());
    assert_eq!(driver.map.u32_at(EVENTS[1]).load(Ordering::Relaxed), 0x0002_0002);
    driver.add(1, 9);
    assert!(ring.request_notification());
    ring.suppress_notifications();
    assert_eq!(driver.map.u32_at(EVENTS[1]).load(Ordering::Relaxed) >> 16, EVENT_F_DISABLE.into());
}

#[test]
fn a_batch_asks_once_if_the_guest_wants_a_notification() {
    let mut driver = Driver::new();
    let mut ring = driver.ring();
    (0..3).for_each(|id| driver.add(1, id));
    let slots: Vec<u16> = std::iter::from_fn(|| ring.take().unwrap()).collect();
    let position = PackedPosition { index: 1, wrap: true };
    let event = EventSuppression { position, flags: 2 };
    driver.map.u32_at(EVENTS[0]).store(event.to_word().to_le(), Ordering::Relaxed);
    assert!(!complete(&mut ring, &slots[..1]) && complete(&mut ring, &slots[1..]));
}

#[test]
fn a_guest_that_adds_too_much_is_found_out() {
    let mut driver = Driver::new();
    let mut ring = driver.ring();
    driver.add(3, 0);
    ring.take().unwrap();
    // One descriptor is left, and then none.
    driver.add(2, 1);
    assert_eq!(ring.take(), Err(BrokenRingError::TooManyDescriptors));
    let mut ring = driver.ring();
    for index in 0..SIZE {
        driver.set(index, 1, u64::from(DESC_F_AVAIL | DESC_F_NEXT) << 48);
    }
    assert_eq!(ring.take(), Err(BrokenRingError::TooManyDescriptors), "a circle");
}

/// A back end that is killed before, within and after the publication of a batch.
#[test]
fn a_new_back_end_continues_where_the_last_one_was_killed() {
    let mut driver = Driver::new();
    let mut ring = driver.recorded_ring();
    for (num, id) in [(1, 10), (2, 11), (1, 12)] {
        driver.add(num, id);
        let slot = ring.take().unwrap().unwrap();
        ring.begin(slot);
    }
    let image = |map: &SharedMemoryMap| -> Vec<u64> {
        map.words().iter().map(|word| word.load(Ordering::Relaxed)).collect()
    };
    let before = image(&driver.map);
    // The chains 12 and 11 complete; the first descriptor that is written is number 0.
    complete(&mut ring, &[3, 1]);
    let after = image(&driver.map);
    let restore = |image: &[u64]| {
        driver.map.words().iter().zip(image).for_each(|(word, of)| word.store(*of, Ordering::Relaxed));
    };
    let left = |driver: &Driver| {
        let mut ring = driver.recorded_ring();
        let count = ring.left_in_flight();
        let mut ids = Vec::new();
        while let Some(slot) = ring.resubmit() {
            ids.push((ring.chains[usize::from(slot)].id, ring.descriptors_taken[0].address >> 8));
        }
        assert_eq!(ids.len(), count);
        (ids.into_iter().map(|(id, _)| id).collect::<Vec<u16>>(), ring.base())
    };
    assert_eq!(left(&driver), (vec![10], 0x8003_0000), "after it");
    restore(&before);
    assert_eq!(left(&driver), (vec![10, 11, 12], 0x8000_0000), "before it");
    // Within it: the record has both positions, and the batch but for its first descriptor.
    let within = |is_published: bool| {
        restore(&after);
        let words = driver.map.words();
        let start = (RECORD / 192) * 192 / 8;
        let [old, new] = [&before, &after].map(|image| [image[start + 1], image[start + 2]]);
        let bytes = |word: u64| word.to_ne_bytes();
        let mut lists = bytes(new[0]);
        lists[6..].copy_from_slice(&bytes(old[0])[6..]);
        let mut positions = bytes(new[1]);
        positions[2..4].copy_from_slice(&bytes(old[1])[2..4]);
        positions[5] = bytes(old[1])[5];
        words[start + 1].store(u64::from_ne_bytes(lists), Ordering::Relaxed);
        words[start + 2].store(u64::from_ne_bytes(positions), Ordering::Relaxed);
        for entry in [1, 3] {
            let at = RECORD / 192 * 192 + 32 + 32 * entry;
            driver.map.u8_at(at).store(1, Ordering::Relaxed);
        }
        if !is_published {
            words[1].store(before[1], Ordering::Relaxed);
        }
        left(&driver)
    };
    assert_eq!(within(true), (vec![10], 0x8003_0000));
    assert_eq!(within(false), (vec![10, 11, 12], 0x8000_0000));
    // The driver does not see the descriptor that the last back end had written.
    let next = PackedPosition { index: 1, wrap: true };
    assert!(!next.is_used(driver.get(1).flags) && next.is_available(driver.get(1).flags));
}

#[test]
fn a_damaged_record_is_refused() {
    let mut driver = Driver::new();
    let mut ring = driver.recorded_ring();
    driver.add(1, 0);
    let slot = ring.take().unwrap().unwrap();
    ring.begin(slot);
    // The entry is neither in flight nor free.
    driver.map.u8_at(RECORD / 192 * 192 + 32).store(0, Ordering::Relaxed);
    let area = InflightArea { size: 8192, offset: 0, queues: 64, ring_size: SIZE };
    let record = PackedInflightRecord::new(&driver.map, &area, RECORD / 192, SIZE).unwrap();
    assert!(!driver.ring().continue_with(record));
    let fits = |queues, index, size| {
        let area = InflightArea { queues, ..area };
        PackedInflightRecord::new(&driver.map, &area, index, size).is_some()
    };
    assert!(fits(64, 41, 4) && !fits(64, 42, 4), "the area ends");
    assert!(!fits(41, 41, 4) && !fits(64, 0, 5) && !fits(64, usize::MAX, 4));
}
