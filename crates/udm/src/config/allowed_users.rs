//! The users and machines in the key `allow` of a device: `user:NAME` becomes `user:NUMBER`.

use nix::unistd::User;
use udm_frontends::nbd::{MACHINE_PREFIX, USER_PREFIX};

/// The entries of `allow`, with users by their numbers.
///
/// # Errors
/// There is no such user, or a context ID that is no number.
pub(super) fn resolve_allowed_users(allow: Vec<String>) -> Result<Vec<String>, String> {
    allow.into_iter().map(resolve_user).collect()
}

fn resolve_user(entry: String) -> Result<String, String> {
    if let Some(cid) = entry.strip_prefix(MACHINE_PREFIX)
        && cid.parse::<u32>().is_err()
    {
        return Err(format!("allow: vsock:{cid}: a machine is named by its context ID, a number"));
    }
    let Some(user) = entry.strip_prefix(USER_PREFIX) else { return Ok(entry) };
    if user.parse::<u32>().is_ok() {
        return Ok(entry);
    }
    match User::from_name(user) {
        Ok(Some(found)) => Ok(format!("{USER_PREFIX}{}", found.uid)),
        Ok(None) => Err(format!("allow: there is no user {user:?}")),
        Err(error) => Err(format!("allow: user {user:?}: {}", error.desc())),
    }
}

/// True for an entry that is a name in a certificate.
pub(super) fn is_certificate_name(entry: &str) -> bool {
    ![USER_PREFIX, MACHINE_PREFIX].iter().any(|prefix| entry.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_become_numbers() {
        let given = ["alice", "user:root", "user:4711", "vsock:3"].map(str::to_owned).to_vec();
        assert_eq!(
            resolve_allowed_users(given),
            Ok(["alice", "user:0", "user:4711", "vsock:3"].map(str::to_owned).to_vec())
        );
        for (bad, said) in [
            ("vsock:vm1", "allow: vsock:vm1: a machine is named by its context ID, a number"),
            ("user:", "allow: there is no user \"\""),
            ("user:no-such-user", "allow: there is no user \"no-such-user\""),
        ] {
            assert_eq!(resolve_allowed_users(vec![bad.to_owned()]), Err(said.to_owned()));
        }
        assert!(is_certificate_name("alice") && !is_certificate_name("user:0"));
        assert!(!is_certificate_name("vsock:3"));
    }
}
