//! What a device may be called.

use crate::error::TargetError;

/// The longest name in bytes (kernel `DM_NAME_LEN`, less its NUL).
const NAME_MAX: usize = 127;
/// The longest uuid in bytes (kernel `DM_UUID_LEN`, less its NUL).
const UUID_MAX: usize = 128;

pub(super) fn check_name(name: &str) -> Result<(), TargetError> {
    let text = match name {
        "" => "Name not supplied when creating device".to_owned(),
        "control" | "." | ".." => r#"device name cannot be "control", ".", or ".."#.to_owned() + "\"",
        _ if name.contains('/') => format!(r#"Name "{name}" invalid. It contains "/"."#),
        _ if name.len() > NAME_MAX => format!(r#"Name "{name}" too long."#),
        _ if name.chars().any(char::is_control) => {
            "Name invalid. It contains a control character.".to_owned()
        }
        _ => return Ok(()),
    };
    Err(TargetError::new(text))
}

pub(super) fn check_uuid(uuid: &str) -> Result<(), TargetError> {
    let text = if uuid.is_empty() {
        "UUID is empty."
    } else if uuid.len() > UUID_MAX {
        "UUID too long."
    } else if uuid.chars().any(char::is_control) {
        "UUID invalid. It contains a control character."
    } else {
        return Ok(());
    };
    Err(TargetError::new(text))
}
