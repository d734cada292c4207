//! Who may connect to the NBD server's Unix socket.

mod support;

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use support::{Server, text, udm};

#[test]
fn the_socket_is_open_to_those_who_are_named() {
    let own = rustix::process::getgid().as_raw().to_string();
    for (options, mode) in [
        (&[][..], 0o600),
        (&["--group", own.as_str()], 0o660),
        (&["--unix-mode", "666"], 0o666),
        (&["--unix-mode", "0640", "--group", own.as_str()], 0o640),
    ] {
        let server = Server::start_with(&["d=0 8 zero"], options);
        let socket = std::fs::metadata(&server.nbd).unwrap();
        assert_eq!(socket.permissions().mode() & 0o777, mode, "{options:?}");
        assert_eq!(socket.gid().to_string(), own);
        let control = std::fs::metadata(&server.socket).unwrap();
        assert_eq!(control.permissions().mode() & 0o777, 0o600, "{options:?}");
    }
}

#[test]
fn what_opens_no_socket_is_refused() {
    let folder = tempfile::TempDir::new().unwrap();
    let refused = |options: &[&str]| {
        let mut command = udm(&["serve", "--device", "d=0 8 zero", "--unix"]);
        command.arg(folder.path().join("n")).arg("--socket").arg(folder.path().join("c")).args(options);
        let out = command.env("UDM_STATE", folder.path().join("state")).output().unwrap();
        assert!(!out.status.success(), "{options:?}");
        text(&out.stderr)
    };
    for mode in ["60", "1666", "rw", "466"] {
        let why = refused(&["--unix-mode", mode]);
        assert!(why.contains("expected an octal number from 600 to 777"), "{why}");
    }
    let why = refused(&["--group", "no-such-group"]);
    assert_eq!(why, "udm: serve: group: there is no group no-such-group\n");
}
