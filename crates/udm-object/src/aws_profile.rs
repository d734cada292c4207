//! Keys in the shared credentials file of the AWS tools: `~/.aws/credentials`.

use std::fs;
use std::path::PathBuf;

/// The largest file that is read, in bytes.
const FILE_MAX: u64 = 1 << 20;

/// The keys of a profile. They are secret, so only tests can print them.
#[derive(Default, PartialEq, Eq)]
#[cfg_attr(test, derive(Debug))]
pub(crate) struct ProfileKeys {
    pub(crate) access_key_id: String,
    pub(crate) secret_access_key: String,
    pub(crate) session_token: Option<String>,
}

impl ProfileKeys {
    /// The keys of the profile `AWS_PROFILE` (default: `default`) in the file
    /// `AWS_SHARED_CREDENTIALS_FILE` (default: `~/.aws/credentials`). `None` if the environment has
    /// other credentials, which go first, or the file has no keys.
    pub(crate) fn from_environment() -> Option<ProfileKeys> {
        let others = ["AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE"];
        if others.iter().any(|name| std::env::var_os(name).is_some()) {
            return None;
        }
        let file = match std::env::var_os("AWS_SHARED_CREDENTIALS_FILE") {
            Some(file) => PathBuf::from(file),
            None => PathBuf::from(std::env::var_os("HOME")?).join(".aws/credentials"),
        };
        let is_file = fs::metadata(&file).is_ok_and(|found| found.is_file() && found.len() <= FILE_MAX);
        let text = is_file.then(|| fs::read_to_string(&file).ok())??;
        let profile = std::env::var("AWS_PROFILE").unwrap_or_else(|_| "default".into());
        ProfileKeys::parse(&text, &profile)
    }

    /// Finds the keys of `profile` in the text of a file.
    fn parse(text: &str, profile: &str) -> Option<ProfileKeys> {
        let mut keys = ProfileKeys::default();
        let mut is_profile = false;
        for line in text.lines().map(str::trim) {
            if let Some(section) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
                is_profile = section.trim() == profile;
                continue;
            }
            let Some((name, value)) = line.split_once('=').filter(|_| is_profile) else { continue };
            let value = value.trim().to_owned();
            match name.trim() {
                "aws_access_key_id" => keys.access_key_id = value,
                "aws_secret_access_key" => keys.secret_access_key = value,
                "aws_session_token" => keys.session_token = Some(value),
                _ => {}
            }
        }
        (!keys.access_key_id.is_empty() && !keys.secret_access_key.is_empty()).then_some(keys)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_keys_of_a_profile_are_found() {
        let text = "# mine\n[default]\naws_access_key_id = A\naws_secret_access_key=B=\n\n[ other ]\n\
                    aws_access_key_id=C\naws_secret_access_key=D\naws_session_token = T\n[half]\n\
                    aws_access_key_id=E\n";
        let keys = |id: &str, secret: &str, token: Option<&str>| ProfileKeys {
            access_key_id: id.into(),
            secret_access_key: secret.into(),
            session_token: token.map(str::to_owned),
        };
        assert_eq!(ProfileKeys::parse(text, "default"), Some(keys("A", "B=", None)));
        assert_eq!(ProfileKeys::parse(text, "other"), Some(keys("C", "D", Some("T"))));
        assert_eq!(ProfileKeys::parse(text, "half"), None);
        assert_eq!(ProfileKeys::parse(text, "none"), None);
    }
}
