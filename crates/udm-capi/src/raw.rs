//! Reads what pointers of C lead to, and lends its memory to requests.
//!
//! Whether a pointer leads to what it should is for the caller to know: the header says so. What
//! can be told from outside is refused here: none where one is needed, one that is not aligned, a
//! length that is beyond a limit.

use crate::error::Error;
use crate::types::{
    UDM_DISCARD, UDM_FLUSH, UDM_FUA, UDM_IOV_MAX, UDM_LENGTH_MAX, UDM_NOUNMAP, UDM_READ, UDM_TEXT_MAX,
    UDM_WRITE, UDM_WRITE_ZEROES, udm_request,
};
use std::ffi::{c_char, c_void};
use std::ptr::NonNull;
use udm_core::{Bio, BioFlags, Buf, Op, SECTOR_SIZE, Sector, Sectors, Segments};

fn invalid(text: impl Into<String>) -> Error {
    Error::new(libc::EINVAL, text)
}

fn no_memory(what: &str) -> Error {
    Error::new(libc::EFAULT, format!("{what}: no pointer"))
}

/// The string at `at`, which is `what`.
///
/// # Safety
/// It is NULL, or leads to a string with a NUL at its end that stays as it is for as long as `'a`.
pub(crate) unsafe fn text<'a>(at: *const c_char, what: &str) -> Result<&'a str, Error> {
    if at.is_null() {
        return Err(no_memory(what));
    }
    // SAFETY: there is a string, as the caller says, and it is read up to its end at the most.
    let len = unsafe { libc::strnlen(at, UDM_TEXT_MAX as usize + 1) };
    if len > UDM_TEXT_MAX as usize {
        return Err(Error::new(libc::E2BIG, format!("{what}: longer than {UDM_TEXT_MAX} bytes")));
    }
    // SAFETY: so many bytes are there.
    let bytes = unsafe { std::slice::from_raw_parts(at.cast::<u8>(), len) };
    std::str::from_utf8(bytes).map_err(|_| invalid(format!("{what}: not UTF-8")))
}

/// The `len` elements at `at`, which are `what`.
///
/// # Safety
/// It is NULL, or leads to so many elements that stay as they are for as long as `'a`.
pub(crate) unsafe fn list<'a, T>(at: *const T, len: usize, what: &str) -> Result<&'a [T], Error> {
    if len == 0 {
        return Ok(&[]);
    }
    if at.is_null() {
        return Err(no_memory(what));
    }
    if !at.is_aligned() || len > isize::MAX as usize / size_of::<T>().max(1) {
        return Err(invalid(format!("{what}: not aligned, or too many")));
    }
    // SAFETY: it is aligned, and the elements are there, as the caller says.
    Ok(unsafe { std::slice::from_raw_parts(at, len) })
}

/// Room of the caller's for `len` elements, which are written one by one.
pub(crate) struct OutBuffer<T>(*mut T, usize);

impl<T> OutBuffer<T> {
    /// # Safety
    /// `at` is NULL, or leads to room for so many that nobody else touches while this is there.
    pub(crate) unsafe fn new(at: *mut T, len: usize, what: &str) -> Result<OutBuffer<T>, Error> {
        match len {
            0 => Ok(OutBuffer(at, 0)),
            _ if at.is_null() => Err(no_memory(what)),
            _ if !at.is_aligned() => Err(invalid(format!("{what}: not aligned"))),
            len => Ok(OutBuffer(at, len)),
        }
    }

    pub(crate) fn write_at(&mut self, i: usize, value: T) {
        assert!(i < self.1, "beyond the caller's room");
        // SAFETY: the place is in the room.
        let place = unsafe { self.0.add(i) };
        // SAFETY: it is the caller's, who lets it be written, and aligned as the first is.
        unsafe { place.write(value) };
    }
}

/// Writes `text` into the caller's room, as far as it goes, with a NUL at its end where there is
/// any; how long it is whole.
pub(crate) fn copy_string(text: &str, room: &mut OutBuffer<c_char>) -> Result<i32, Error> {
    let most = room.1.saturating_sub(1);
    let given = text.bytes().take(most).enumerate();
    let end = given.map(|(i, byte)| room.write_at(i, byte as c_char)).count();
    if room.1 > 0 {
        room.write_at(end, 0);
    }
    i32::try_from(text.len()).map_err(|_| Error::new(libc::E2BIG, "the answer is too long"))
}

/// Makes `bio` what `request` asks for. Its memory is lent until the bio is home.
///
/// # Safety
/// What the buffers of the request lead to is there, and nobody else writes it, or reads what a
/// read fills, until then.
pub(crate) unsafe fn fill_bio(bio: &mut Bio, request: &udm_request) -> Result<(), Error> {
    let op = match request.op {
        UDM_READ => Op::Read,
        UDM_WRITE => Op::Write,
        UDM_FLUSH => Op::Flush,
        UDM_DISCARD => Op::Discard,
        UDM_WRITE_ZEROES => Op::WriteZeroes,
        other => return Err(invalid(format!("request: there is no operation {other}"))),
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
        return Err(invalid("request: flags that its operation does not have"));
    }
    if op == Op::Flush && (request.sector != 0 || request.sectors != 0) {
        return Err(invalid("request: a flush has no range"));
    }
    let (buffer, iov) = (!request.buffer.is_null(), !request.iov.is_null() || request.iov_count > 0);
    if op.has_data() {
        if request.sectors > UDM_LENGTH_MAX / SECTOR_SIZE {
            return Err(invalid(format!("request: longer than {UDM_LENGTH_MAX} bytes")));
        }
        let len = (request.sectors * SECTOR_SIZE) as usize;
        match (buffer, iov) {
            // SAFETY: as the caller says.
            (true, false) => unsafe { reborrow(&mut bio.data, request.buffer, len) },
            // SAFETY: as the caller says.
            (false, true) => unsafe { borrow_iovec(&mut bio.data, request, len) }?,
            (false, false) => return Err(no_memory("request: buffer")),
            (true, true) => return Err(invalid("request: a buffer and a list of buffers")),
        }
    } else if buffer || iov {
        return Err(invalid("request: a buffer that its operation does not have"));
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

/// Makes `data` the `len` bytes at `at`. What it was of is used again, so a warm core allocates
/// nothing.
///
/// # Safety
/// As of [`Buf::borrowed`]; `at` is not NULL.
unsafe fn reborrow(data: &mut Segments, at: *mut c_void, len: usize) {
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

/// Gives the memory of a bio that is home back to the caller.
///
/// # Panics
/// When a lane has kept a piece of it.
pub(crate) fn take_back_buffers(bio: &mut Bio) {
    for piece in bio.data.iter_mut() {
        // SAFETY: there are no bytes that anybody could touch.
        assert!(unsafe { piece.reborrow(NonNull::dangling(), 0) }, "a lane has kept a request's memory");
    }
}

/// Makes `data` what the list of a request leads to, which has to be `len` bytes.
///
/// # Safety
/// As of [`fill_bio`].
unsafe fn borrow_iovec(data: &mut Segments, request: &udm_request, len: usize) -> Result<(), Error> {
    if request.iov_count > UDM_IOV_MAX {
        return Err(invalid(format!("request: more than {UDM_IOV_MAX} buffers")));
    }
    // SAFETY: as the caller says.
    let parts = unsafe { list(request.iov, request.iov_count as usize, "request: iov") }?;
    let all = parts.iter().try_fold(0usize, |sum, part| sum.checked_add(part.iov_len));
    if all != Some(len) {
        return Err(invalid("request: its buffers are not as long as its range"));
    }
    let mut borrowed = Segments::new();
    for part in parts.iter().filter(|part| part.iov_len > 0) {
        let at = NonNull::new(part.iov_base.cast::<u8>()).ok_or_else(|| no_memory("request: iov_base"))?;
        // SAFETY: as the caller says; it is no longer than the range, which is within the limit.
        borrowed.push(unsafe { Buf::borrowed(at, part.iov_len) });
    }
    *data = borrowed;
    Ok(())
}
