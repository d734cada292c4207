//! Reads memory behind C pointers, and lends it to requests.
//!
//! The caller must pass valid pointers, as the header says. Detectable errors are refused here: a
//! missing pointer, a misaligned one, a length above a limit.

use crate::error::ErrnoWithText;
use crate::types::{
    UDM_DISCARD, UDM_FLUSH, UDM_FUA, UDM_IOV_MAX, UDM_LENGTH_MAX, UDM_NOUNMAP, UDM_READ, UDM_TEXT_MAX,
    UDM_WRITE, UDM_WRITE_ZEROES, udm_request,
};
use std::ffi::{c_char, c_void};
use std::ptr::NonNull;
use udm_core::{Bio, BioFlags, Buf, Op, SECTOR_SIZE, Sector, Sectors, Segments};

fn einval_error(text: impl Into<String>) -> ErrnoWithText {
    ErrnoWithText::new(libc::EINVAL, text)
}

fn null_pointer_error(what: &str) -> ErrnoWithText {
    ErrnoWithText::new(libc::EFAULT, format!("{what}: no pointer"))
}

/// The string at `at`; errors call it `what`.
///
/// # Safety
/// `at` is NULL, or points to a string that ends with a NUL and does not change during `'a`.
pub(crate) unsafe fn str_from_c_string<'a>(at: *const c_char, what: &str) -> Result<&'a str, ErrnoWithText> {
    if at.is_null() {
        return Err(null_pointer_error(what));
    }
    // SAFETY: the caller passes a string, which is read at most up to its NUL.
    let len = unsafe { libc::strnlen(at, UDM_TEXT_MAX as usize + 1) };
    if len > UDM_TEXT_MAX as usize {
        return Err(ErrnoWithText::new(libc::E2BIG, format!("{what}: longer than {UDM_TEXT_MAX} bytes")));
    }
    // SAFETY: `strnlen` found `len` bytes before the NUL.
    let bytes = unsafe { std::slice::from_raw_parts(at.cast::<u8>(), len) };
    std::str::from_utf8(bytes).map_err(|_| einval_error(format!("{what}: not UTF-8")))
}

/// The `len` elements at `at`; errors call them `what`.
///
/// # Safety
/// `at` is NULL, or points to `len` elements that do not change during `'a`.
pub(crate) unsafe fn slice_from_c_array<'a, T>(
    at: *const T,
    len: usize,
    what: &str,
) -> Result<&'a [T], ErrnoWithText> {
    if len == 0 {
        return Ok(&[]);
    }
    if at.is_null() {
        return Err(null_pointer_error(what));
    }
    if !at.is_aligned() || len > isize::MAX as usize / size_of::<T>().max(1) {
        return Err(einval_error(format!("{what}: not aligned, or too many")));
    }
    // SAFETY: the pointer is aligned, and the caller passes `len` elements.
    Ok(unsafe { std::slice::from_raw_parts(at, len) })
}

/// The caller's output array of `len` elements, which are written one by one.
pub(crate) struct OutBuffer<T>(*mut T, usize);

impl<T> OutBuffer<T> {
    /// # Safety
    /// `at` is NULL, or points to space for `len` elements that nothing else accesses while this
    /// exists.
    pub(crate) unsafe fn new(at: *mut T, len: usize, what: &str) -> Result<OutBuffer<T>, ErrnoWithText> {
        match len {
            0 => Ok(OutBuffer(at, 0)),
            _ if at.is_null() => Err(null_pointer_error(what)),
            _ if !at.is_aligned() => Err(einval_error(format!("{what}: not aligned"))),
            len => Ok(OutBuffer(at, len)),
        }
    }

    pub(crate) fn write_at(&mut self, i: usize, value: T) {
        assert!(i < self.1, "beyond the caller's array");
        // SAFETY: the element is inside the array.
        let place = unsafe { self.0.add(i) };
        // SAFETY: the caller allows writes to the array, and the element is aligned like the first
        // one.
        unsafe { place.write(value) };
    }
}

/// Copies `text` into the caller's array, truncated, with a NUL at the end if the array has any
/// space. Returns the length of the whole text.
pub(crate) fn copy_string(text: &str, room: &mut OutBuffer<c_char>) -> Result<i32, ErrnoWithText> {
    let most = room.1.saturating_sub(1);
    let given = text.bytes().take(most).enumerate();
    let end = given.map(|(i, byte)| room.write_at(i, byte as c_char)).count();
    if room.1 > 0 {
        room.write_at(end, 0);
    }
    i32::try_from(text.len()).map_err(|_| ErrnoWithText::new(libc::E2BIG, "the answer is too long"))
}

/// Fills `bio` from `request`. The caller's memory is lent until the bio completes.
///
/// # Safety
/// Until then, the buffers of the request stay valid. Nothing else writes them, or reads a buffer
/// that a read fills.
pub(crate) unsafe fn fill_bio(bio: &mut Bio, request: &udm_request) -> Result<(), ErrnoWithText> {
    let op = match request.op {
        UDM_READ => Op::Read,
        UDM_WRITE => Op::Write,
        UDM_FLUSH => Op::Flush,
        UDM_DISCARD => Op::Discard,
        UDM_WRITE_ZEROES => Op::WriteZeroes,
        other => return Err(einval_error(format!("request: there is no operation {other}"))),
    };
    let mut flags = BioFlags::empty();
    if request.flags & UDM_FUA != 0 && matches!(op, Op::Write | Op::WriteZeroes) {
        flags |= BioFlags::FUA;
    }
    if request.flags & UDM_NOUNMAP != 0 && op == Op::WriteZeroes {
        flags |= BioFlags::NOUNMAP;
    }
    let known = u32::from(flags.contains(BioFlags::FUA)) * UDM_FUA
        + u32::from(flags.contains(BioFlags::NOUNMAP)) * UDM_NOUNMAP;
    if request.flags != known || request.reserved != 0 {
        return Err(einval_error(
            "request: flags that are not valid for its operation, or reserved is not 0",
        ));
    }
    if op == Op::Flush && (request.sector != 0 || request.sectors != 0) {
        return Err(einval_error("request: a flush has no range"));
    }
    let (buffer, iov) = (!request.buffer.is_null(), !request.iov.is_null() || request.iov_count > 0);
    if op.has_data() {
        if request.sectors > UDM_LENGTH_MAX / SECTOR_SIZE {
            return Err(einval_error(format!("request: longer than {UDM_LENGTH_MAX} bytes")));
        }
        let len = (request.sectors * SECTOR_SIZE) as usize;
        match (buffer, iov) {
            // SAFETY: as the caller says.
            (true, false) => unsafe { point_segments_at_memory(&mut bio.data, request.buffer, len) },
            // SAFETY: as the caller says.
            (false, true) => unsafe { borrow_iovec(&mut bio.data, request, len) }?,
            (false, false) => return Err(null_pointer_error("request: buffer")),
            (true, true) => return Err(einval_error("request: buffer and iov are both set")),
        }
    } else if buffer || iov {
        return Err(einval_error("request: its operation has no data, but buffer or iov is set"));
    } else {
        bio.data = Segments::new();
    }
    bio.op = op;
    bio.flags = flags;
    bio.sector = Sector(request.sector);
    bio.sectors = Sectors(request.sectors);
    bio.cookie = request.cookie;
    Ok(())
}

/// Points `data` at the `len` bytes at `at`. Reuses its allocation, so a warm core allocates
/// nothing.
///
/// # Safety
/// As of [`Buf::borrowed`]; `at` is not NULL.
unsafe fn point_segments_at_memory(data: &mut Segments, at: *mut c_void, len: usize) {
    let Some(at) = NonNull::new(at.cast::<u8>()) else { return };
    let mut pieces = data.iter_mut();
    if let (Some(first), None) = (pieces.next(), pieces.next())
        // SAFETY: as the caller says.
        && unsafe { first.reborrow(at, len) }
    {
        return;
    }
    // SAFETY: as the caller says.
    *data = unsafe { Buf::borrowed(at, len) }.into();
}

/// Returns the memory of a completed bio to the caller.
///
/// # Panics
/// If a lane has kept a reference to it.
pub(crate) fn take_back_buffers(bio: &mut Bio) {
    for piece in bio.data.iter_mut() {
        // SAFETY: the new range is empty, so no byte is accessed.
        assert!(unsafe { piece.reborrow(NonNull::dangling(), 0) }, "a lane has kept a request's memory");
    }
}

/// Points `data` at the buffers in the list of a request, which must have `len` bytes in total.
///
/// # Safety
/// As of [`fill_bio`].
unsafe fn borrow_iovec(data: &mut Segments, request: &udm_request, len: usize) -> Result<(), ErrnoWithText> {
    if request.iov_count > UDM_IOV_MAX {
        return Err(einval_error(format!("request: more than {UDM_IOV_MAX} buffers")));
    }
    // SAFETY: as the caller says.
    let parts = unsafe { slice_from_c_array(request.iov, request.iov_count as usize, "request: iov") }?;
    let all = parts.iter().try_fold(0usize, |sum, part| sum.checked_add(part.iov_len));
    if all != Some(len) {
        return Err(einval_error("request: its buffers and its range differ in length"));
    }
    let mut borrowed = Segments::new();
    for part in parts.iter().filter(|part| part.iov_len > 0) {
        let at = NonNull::new(part.iov_base.cast::<u8>())
            .ok_or_else(|| null_pointer_error("request: iov_base"))?;
        // SAFETY: as the caller says; the buffer is not longer than the range, which is within the
        // limit.
        borrowed.push(unsafe { Buf::borrowed(at, part.iov_len) });
    }
    *data = borrowed;
    Ok(())
}
