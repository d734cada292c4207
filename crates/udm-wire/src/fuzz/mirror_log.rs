//! Properties of the logs of mirrors.

use super::assert_one_line_error;
use crate::mirror_log::{HEADERS_LEN, MirrorLogHeader, MirrorLogLayout};

/// Logs of mirrors: headers that are read back encode to the same header, and any bytes are a map
/// of the right size without regions that do not exist.
pub fn fuzz_mirror_log(data: &[u8]) {
    let Some(headers) = data.first_chunk::<HEADERS_LEN>() else { return };
    match MirrorLogHeader::decode(headers) {
        Err(error) => assert_one_line_error(&error),
        Ok(None) => assert!(headers.iter().all(|byte| *byte == 0)),
        Ok(Some(header)) => {
            header.owner.iter().flat_map(|owner| &owner.legs).for_each(assert_one_line_error);
            let again = MirrorLogHeader::decode(&header.encode());
            assert_eq!(again, Ok(Some(header)));
        }
    }
    for regions in [1, 63, 64, 3968, 3969, 9000] {
        let (layout, mut words) = (MirrorLogLayout::new(regions), 0);
        for has_own in [true, false] {
            layout.decode(data, has_own, |word| {
                words += 1;
                let left = regions + 64 - (words - 1) % regions.div_ceil(64) * 64 - 64;
                assert!(left >= 64 || word >> left == 0);
            });
        }
        assert_eq!(words, 2 * regions.div_ceil(64));
    }
}
