//! Extended headers with libnbd, if it has them (1.18 and later).

use crate::log::shell;
use libtest_mimic::Failed;
use std::fs;
use tempfile::TempDir;

/// Exits with 0 if libnbd in Python has extended headers.
pub const HAS_EXTENDED_HEADERS: &str =
    "python3 -c 'import nbd; nbd.NBD().get_extended_headers_negotiated' 2>/dev/null";

const CLIENT: &str = r#"
import sys, nbd
def client(uri):
    h = nbd.NBD()
    h.add_meta_context("base:allocation")
    # Requests that the library would refuse by itself are sent.
    h.set_strict_mode(h.get_strict_mode() & ~nbd.STRICT_BOUNDS)
    h.connect_uri(uri)
    assert h.get_extended_headers_negotiated()
    return h
def refused(call, *args):
    try: call(*args)
    except nbd.Error as error: return error.errno
    raise AssertionError("it was not refused")
def runs(h, len, at):
    found = []
    h.block_status_64(len, at, lambda context, offset, extents, error: found.extend(extents) or 0)
    return found
TIB = 1 << 40
h = client(sys.argv[1])
assert h.can_block_status_payload() and h.can_df()
h.pwrite(b"x" * 1000, 513, nbd.CMD_FLAG_FUA)
assert h.pread(1002, 512) == b"\0" + b"x" * 1000 + b"\0"
h.flush()
h.zero(4 * TIB, 1000)
assert h.pread(1, 999) == b"x" and h.pread(1000, 1000) == bytes(1000)
h.trim(5 * TIB, 4096)
h.cache(4096, 0)
assert sum(len for len, flags in runs(h, 6 * TIB, 0)) == 6 * TIB
assert runs(h, TIB, 4 * TIB) == [(TIB, 3)]
found = []
h.block_status_filter(6 * TIB, 0, ["base:allocation"], lambda c, o, extents, e: found.append(c) or 0)
assert found == ["base:allocation"]
assert refused(h.zero, 6 * TIB, 1) == "ENOSPC" and refused(h.trim, 7 * TIB, 0) == "EINVAL"
assert refused(runs, h, 7 * TIB, 0) == "EINVAL"
h.shutdown()
h = client(sys.argv[2])
assert runs(h, 8 * TIB, 0) == [(8 * TIB, 3)]
h.zero((32 << 30) + 7, TIB)
h.cache((4 << 30) + 1, TIB)
h.shutdown()
print("as expected")
"#;

const SCRIPT: &str = r#"
set -e; truncate -s 6T disk.img
$udm serve --unix - --device d=disk.img --device z='0 17179869184 zero' --run 'set -e
  python3 client.py $uri_d $uri_z; nbdinfo --map $uri_z
  nbdcopy --destination-is-zero $uri_d copy.img; cmp -n 8192 disk.img copy.img; stat -c %s copy.img'
"#;

/// Requests over terabytes, and copies that use them.
pub fn requests_over_terabytes() -> Result<(), Failed> {
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("client.py"), CLIENT).unwrap();
    let output = shell(folder.path(), SCRIPT).unwrap_or_else(|output| panic!("{output}"));
    let words = output.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
    let lines: Vec<_> = words.filter(|line| !line.starts_with("udm: ")).collect();
    assert_eq!(lines, ["as expected", "0 8796093022208 3 hole,zero", "6597069766656"], "{output}");
    Ok(())
}
