//! Which clients may use a device.

use super::admission::Peer;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// The prefix of an entry that names a user of this system by its number, as in `user:1000`.
pub const USER_PREFIX: &str = "user:";

/// The prefix of an entry that names a virtual machine by its context ID of vsock, as in `vsock:3`.
/// All other entries are names in certificates.
pub const MACHINE_PREFIX: &str = "vsock:";

/// The clients that may choose the exports of a device, by names in their certificates, by users of
/// Unix sockets and by machines of vsock. Read when a client asks for an export and after a change,
/// and never on the data path.
#[derive(Debug, Default)]
pub struct AllowedClients(Mutex<AllowList>);

/// Where the entries are.
#[derive(Debug)]
enum AllowList {
    /// Here; `None` for all clients.
    Own(Option<Arc<[String]>>),
    /// They are those of another device.
    Of(Arc<AllowedClients>),
}

impl Default for AllowList {
    fn default() -> AllowList {
        AllowList::Own(None)
    }
}

/// What is known of a client.
#[derive(Debug, Default)]
pub(super) struct NbdClientIdentity {
    /// The names in its verified certificate; `None` before they are known.
    names: Option<Vec<String>>,
    peer: Peer,
}

impl NbdClientIdentity {
    /// A client at the other end of a connection.
    pub(super) fn of_peer(peer: Peer) -> NbdClientIdentity {
        NbdClientIdentity { names: None, peer }
    }

    /// Sets the names in the verified certificate, if they are not set yet.
    pub(super) fn set_names(&mut self, names: impl FnOnce() -> Vec<String>) {
        self.names.get_or_insert_with(names);
    }

    /// True if the entry `allowed` means this client.
    fn is(&self, allowed: &str) -> bool {
        // A certificate with such a name does not make a user or a machine.
        if let Some(user) = allowed.strip_prefix(USER_PREFIX) {
            return user.parse().is_ok_and(|user| self.peer == Peer::User(user));
        }
        if let Some(cid) = allowed.strip_prefix(MACHINE_PREFIX) {
            return cid.parse().is_ok_and(|cid| self.peer == Peer::Machine(cid));
        }
        self.names.iter().flatten().any(|name| name == allowed)
    }
}

impl fmt::Display for NbdClientIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.names.iter().flatten().next() {
            Some(name) => write!(f, "{name:?} {}", self.peer),
            None => self.peer.fmt(f),
        }
    }
}

impl AllowedClients {
    /// The entries; `None` for all clients.
    #[must_use]
    pub fn get(&self) -> Option<Arc<[String]>> {
        let other = match &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            AllowList::Own(allowed) => return allowed.clone(),
            AllowList::Of(other) => Arc::clone(other),
        };
        other.get()
    }

    /// Sets the entries. [`Exports::allowed_clients_changed`](super::Exports) disconnects clients
    /// that are not allowed any more.
    pub fn set(&self, allowed: Option<Arc<[String]>>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = AllowList::Own(allowed);
    }

    /// Has the entries of `other` from now on, also when they change. `other` follows nobody who
    /// follows this.
    pub fn follow(&self, other: &Arc<AllowedClients>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = AllowList::Of(Arc::clone(other));
    }

    /// True if a change of `changed` changes the entries of this.
    pub(super) fn depends_on(&self, changed: &AllowedClients) -> bool {
        let other = match &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            AllowList::Own(_) => return std::ptr::eq(self, changed),
            AllowList::Of(other) => Arc::clone(other),
        };
        std::ptr::eq(self, changed) || other.depends_on(changed)
    }

    /// True if `client` may use the device.
    pub(super) fn admits(&self, client: &NbdClientIdentity) -> bool {
        self.get().is_none_or(|allowed| allowed.iter().any(|one| client.is(one)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A user is what the kernel says; a certificate that has the name of a user is another client.
    #[test]
    fn users_and_certificates_are_different_names() {
        let allowed = AllowedClients::default();
        let bob = || {
            let mut client = NbdClientIdentity::of_peer(Peer::Address([127, 0, 0, 1].into()));
            client.set_names(|| vec!["bob".into(), "user:1000".into()]);
            client
        };
        let user = |number| NbdClientIdentity::of_peer(Peer::User(number));
        assert!(allowed.admits(&bob()) && allowed.admits(&user(7)), "without a list");
        allowed.set(Some(["user:1000".to_owned()].into()));
        assert!(allowed.admits(&user(1000)));
        assert!(
            !allowed.admits(&user(100))
                && !allowed.admits(&bob())
                && !allowed.admits(&NbdClientIdentity::default())
        );
        allowed.set(Some(["alice".to_owned(), "bob".to_owned()].into()));
        assert!(allowed.admits(&bob()) && !allowed.admits(&user(1000)));
        assert_eq!(
            [bob(), user(7), NbdClientIdentity::default()].map(|client| client.to_string()),
            ["\"bob\" at 127.0.0.1", "of user 7", "without an address"]
        );
    }
}
