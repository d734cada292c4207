//! NVMe qualified names: the names of subsystems and hosts (*Base* 4.5).

/// The name of the discovery subsystem of every target (*Base* 3.1.2.3).
pub const DISCOVERY_NQN: &str = "nqn.2014-08.org.nvmexpress.discovery";

/// The longest name in bytes, without the terminating null.
pub const NQN_MAX: usize = 223;

/// Error: a name that no subsystem and no host can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NqnError {
    /// Too long, or empty.
    #[error("a name has 1 to 223 bytes")]
    Length,
    /// Not UTF-8, or with control characters.
    #[error("a name is UTF-8 without control characters")]
    Text,
    /// Not `nqn.`.
    #[error("a name begins with nqn.YYYY-MM.")]
    Prefix,
}

/// Checks a name: length, characters, and the beginning `nqn.YYYY-MM.`.
///
/// # Errors
/// The name is not valid.
pub fn check_nqn(name: &str) -> Result<(), NqnError> {
    if name.is_empty() || name.len() > NQN_MAX {
        return Err(NqnError::Length);
    }
    if name.chars().any(char::is_control) {
        return Err(NqnError::Text);
    }
    let date = name.strip_prefix("nqn.").and_then(|rest| rest.as_bytes().first_chunk::<8>());
    let is_date = |date: &[u8; 8]| {
        date.iter().enumerate().all(|(at, byte)| match at {
            4 => *byte == b'-',
            7 => *byte == b'.',
            _ => byte.is_ascii_digit(),
        })
    };
    if date.is_some_and(is_date) { Ok(()) } else { Err(NqnError::Prefix) }
}

/// Decodes a name in a field of 256 bytes: it ends with a null.
///
/// # Errors
/// The name is not valid.
pub(super) fn decode_nqn(field: &[u8]) -> Result<String, NqnError> {
    let len = field.iter().position(|byte| *byte == 0).ok_or(NqnError::Length)?;
    let name = std::str::from_utf8(&field[..len]).map_err(|_| NqnError::Text)?;
    check_nqn(name)?;
    Ok(name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        for good in [DISCOVERY_NQN, "nqn.2014-08.org.nvmexpress:uuid:f81d4fae-7dec-11d0-a765-00a0c91e6bf6"] {
            assert_eq!(check_nqn(good), Ok(()));
        }
        assert_eq!(check_nqn(""), Err(NqnError::Length));
        assert_eq!(check_nqn(&format!("nqn.2014-08.{}", "a".repeat(211))), Ok(()));
        assert_eq!(check_nqn(&format!("nqn.2014-08.{}", "a".repeat(212))), Err(NqnError::Length));
        assert_eq!(check_nqn("nqn.2014-08.a\n"), Err(NqnError::Text));
        for bad in ["disk", "nqn.", "nqn.2014-8.org.x", "nqn.20a4-08.x", "NQN.2014-08.x"] {
            assert_eq!(check_nqn(bad), Err(NqnError::Prefix), "{bad}");
        }
        assert_eq!(decode_nqn(&[b'n'; 256]), Err(NqnError::Length), "no null");
        assert_eq!(decode_nqn(b"nqn.2014-08.\xff\0"), Err(NqnError::Text));
        assert_eq!(decode_nqn(b"nqn.2014-08.x\0garbage").as_deref(), Ok("nqn.2014-08.x"));
    }
}
