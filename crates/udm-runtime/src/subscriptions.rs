//! Subscriptions of a core's front ends to messages.

use std::collections::HashMap;
use udm_core::DeviceId;

/// The front ends of a core by the topics to which they subscribe. The cost of a message depends
/// only on its subscribers.
#[derive(Default)]
pub(crate) struct MessageTopicSubscribers(HashMap<DeviceId, Vec<usize>>);

impl MessageTopicSubscribers {
    /// Subscribes front end `key` to `topic`. Repeated calls have no effect.
    pub(crate) fn subscribe(&mut self, topic: DeviceId, key: usize, of_front: &mut Vec<DeviceId>) {
        if !of_front.contains(&topic) {
            of_front.push(topic);
            self.0.entry(topic).or_default().push(key);
        }
    }

    /// Ends a subscription.
    pub(crate) fn unsubscribe(&mut self, topic: DeviceId, key: usize, of_front: &mut Vec<DeviceId>) {
        if let Some(at) = of_front.iter().position(|other| *other == topic) {
            of_front.swap_remove(at);
            self.remove(topic, key);
        }
    }

    /// Ends all subscriptions of a closed front end, which are `of_front`.
    pub(crate) fn forget(&mut self, key: usize, of_front: &[DeviceId]) {
        of_front.iter().for_each(|topic| self.remove(*topic, key));
    }

    fn remove(&mut self, topic: DeviceId, key: usize) {
        let Some(listeners) = self.0.get_mut(&topic) else { return };
        // Searches from the end, since recent subscribers often leave first.
        if let Some(at) = listeners.iter().rposition(|other| *other == key) {
            listeners.swap_remove(at);
        }
        if listeners.is_empty() {
            self.0.remove(&topic);
        }
    }

    /// Subscribers of `topic`.
    pub(crate) fn listeners(&self, topic: DeviceId) -> &[usize] {
        self.0.get(&topic).map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_reach_those_who_listen() {
        let mut topics = MessageTopicSubscribers::default();
        let [a, b] = [DeviceId::new(), DeviceId::new()];
        let mut of: Vec<Vec<DeviceId>> = vec![Vec::new(); 3];
        for (topic, key) in [(a, 0), (a, 1), (b, 1), (b, 2), (a, 1)] {
            topics.subscribe(topic, key, &mut of[key]);
        }
        assert_eq!((topics.listeners(a), topics.listeners(b)), (&[0, 1][..], &[1, 2][..]));
        topics.unsubscribe(a, 0, &mut of[0]);
        topics.unsubscribe(b, 0, &mut of[0]);
        assert_eq!((topics.listeners(a), topics.listeners(b)), (&[1][..], &[1, 2][..]));
        topics.forget(1, &of[1]);
        assert_eq!((topics.listeners(a), topics.listeners(b)), (&[][..], &[2][..]));
        topics.unsubscribe(b, 2, &mut of[2]);
        assert!(topics.0.is_empty(), "topics without subscribers are removed");
    }
}
