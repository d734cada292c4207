//! Requests that begin and end at any byte, and maps of allocated ranges, with clients that send
//! such requests by themselves.

use crate::log::{MountGuard, shell};
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

/// nbdfuse with parallel requests of `dd bs=1`, and qemu-io, over a table with a target border
/// inside a request.
pub fn requests_at_any_byte() -> Result<(), Failed> {
    let folder = MountGuard(TempDir::new().unwrap());
    let place = folder.0.path();
    shell(place, SCRIPT).unwrap_or_else(|output| panic!("{output}"));
    let (image, source) =
        (fs::read(place.join("disk.img")).unwrap(), fs::read(place.join("source")).unwrap());
    // The table begins at sector 8 of the image.
    let at = |from: usize, len: usize| &image[4096 + from..][..len];
    assert_eq!((at(0, 3), at(3, 5), at(8, 100)), (&[0; 3][..], &[1; 5][..], &[0; 100][..]));
    assert_eq!((at(511_899, 1), at(511_900, 300), at(512_200, 1)), (&[0][..], &[2; 300][..], &[0][..]));
    assert!(at(20_777, 3000) == source && at(20_776, 1) == [0] && at(23_777, 1) == [0]);
    Ok(())
}

const MAPS: &str = r#"
set -e; truncate -s 8M disk.img; truncate -s 8M striped.img
for at in 1 77 300 1601 5000; do printf data | dd of=striped.img bs=1 seek=$((at * 1024)) conv=notrunc 2>/dev/null; done
printf data | dd of=disk.img bs=1 seek=1050000 conv=notrunc 2>/dev/null; ln disk.img same.img
$udm serve --unix - --device d='0 8192 linear disk.img 0
8192 2048 zero' --device s='0 12288 striped 3 16 striped.img 0 striped.img 4096 striped.img 8192' \
  --device mp='0 16384 multipath 0 0 1 1 round-robin 0 2 1 disk.img 1 same.img 1' --device m='0 16384 linear mem:8M 0' --run 'set -e
  nbdinfo --map $uri_d; echo; nbdinfo --map --totals $uri_mp; echo
  qemu-io -f raw -c "write 1M 4k" "$uri_m" >/dev/null; nbdinfo --map=base:allocation $uri_m; echo
  nbdinfo $uri_m | grep -A1 contexts; qemu-img map --output=json -f raw "$uri_mp" | grep -c "\"data\": true"
  for of in d s mp; do eval uri=\$uri_$of; nbdcopy $uri $of.sparse; nbdcopy --connections=1 $uri - | cmp - $of.sparse
    qemu-img convert -f raw -O raw "$uri" $of.converted; cmp $of.sparse $of.converted; done
  cmp mp.sparse disk.img; echo $(($(stat -c %b s.sparse) < 1000 && $(stat -c %b mp.converted) < 1000))'
"#;

/// Holes of files, of fresh memory and of zero targets are visible through tables, and no range
/// with data is reported as a hole.
pub fn what_is_allocated() -> Result<(), Failed> {
    let folder = TempDir::new().unwrap();
    let output = shell(folder.path(), MAPS).unwrap_or_else(|output| panic!("{output}"));
    let words = output.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
    let output = words.filter(|line| !line.starts_with("udm: ")).collect::<Vec<_>>().join("\n");
    let expected = "0 1048576 3 hole,zero\n1048576 4096 0 data\n1052672 4190208 3 hole,zero\n\n\
                    4096 0.0% 0 data\n8384512 100.0% 3 hole,zero\n\n\
                    0 1048576 3 hole,zero\n1048576 262144 0 data\n1310720 7077888 3 hole,zero\n\n\
                    contexts:\nbase:allocation\n1\n1";
    assert_eq!(output, expected);
    Ok(())
}
