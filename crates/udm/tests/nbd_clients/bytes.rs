//! Requests that begin and end at any byte, from clients that make them by themselves.

use crate::log::{Mounts, shell};
use libtest_mimic::Failed;
use std::fs;
use tempfile::TempDir;

const SCRIPT: &str = r#"
set -e; truncate -s 1M disk.img; touch nbd; head -c 3000 /dev/urandom > source
$udm serve --device d='0 1000 linear disk.img 8
1000 1000 linear disk.img 1008' --run 'set -e
  qemu-io -f raw -c "write -P 1 3 5" -c "read -P 1 3 5" -c "read -P 0 8 504" -c "write -f -P 2 511900 300" \
    -c "read -P 2 511900 300" -c "write -z 10001 6000" -c "discard 100001 9000" -c "read -P 0 0 3" -c flush "$uri"
  nbdfuse nbd "$uri" & until [ -s nbd ]; do sleep 0.1; done
  dd if=source of=nbd bs=1 seek=20777 conv=notrunc,fsync 2>/dev/null
  dd if=nbd bs=1 skip=20777 count=3000 2>/dev/null | cmp - source
  fusermount3 -u nbd; wait'
"#;

/// Plain nbdfuse with `dd bs=1` in parallel requests of its own, and qemu-io, over a table whose targets meet within a request.
pub fn requests_at_any_byte() -> Result<(), Failed> {
    let folder = Mounts(TempDir::new().unwrap());
    let place = folder.0.path();
    shell(place, SCRIPT).unwrap_or_else(|said| panic!("{said}"));
    let (image, source) =
        (fs::read(place.join("disk.img")).unwrap(), fs::read(place.join("source")).unwrap());
    // The table begins at sector 8 of the image.
    let at = |from: usize, len: usize| &image[4096 + from..][..len];
    assert_eq!((at(0, 3), at(3, 5), at(8, 100)), (&[0; 3][..], &[1; 5][..], &[0; 100][..]));
    assert_eq!((at(511_899, 1), at(511_900, 300), at(512_200, 1)), (&[0][..], &[2; 300][..], &[0][..]));
    assert!(at(20_777, 3000) == source && at(20_776, 1) == [0] && at(23_777, 1) == [0]);
    Ok(())
}
