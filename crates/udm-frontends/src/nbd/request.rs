//! Checks of requests against their export, before any part reaches the device.

use super::export_geometry::ExportGeometry;
use std::ops::Range;
use udm_core::{BioFlags, Op};
use udm_wire::nbd::{CommandFlags, EINVAL, ENOSPC, EPERM, ExportFlags, NbdCommand, NbdRequestHeader};

/// Block size of a device in bytes, a power of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DeviceBlockSize {
    pub(super) size: u32,
}

impl DeviceBlockSize {
    /// Returns the blocks that `range`, in bytes, touches.
    pub(super) fn around(&self, range: &Range<u64>) -> Range<u64> {
        let size = u64::from(self.size);
        range.start & !(size - 1)..range.end.next_multiple_of(size)
    }

    /// Returns the blocks that `range` covers completely. If there are none, returns an empty range
    /// inside it or at its start.
    pub(super) fn inside(&self, range: &Range<u64>) -> Range<u64> {
        let size = u64::from(self.size);
        let start = range.start.next_multiple_of(size);
        start..(range.end & !(size - 1)).max(start)
    }
}

/// How to execute a valid request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestPlan {
    /// One bio.
    Bio(Op, BioFlags),
    /// Reads in pieces, whose data is dropped.
    Cache,
    /// A block-status query to the device.
    BlockStatusQuery,
    /// Nothing: a trim of less than a block. Succeeds.
    Nothing,
}

/// Checks `request` against its export.
///
/// # Errors
/// The NBD error of the answer. The payload of a refused write must be skipped.
pub(super) fn check_request(
    request: &NbdRequestHeader,
    export: &ExportGeometry,
    structured: bool,
    contexts: bool,
) -> Result<RequestPlan, u32> {
    let plan = match request.command {
        NbdCommand::Read => RequestPlan::Bio(Op::Read, BioFlags::empty()),
        NbdCommand::Write if request.flags.contains(CommandFlags::FUA) => {
            RequestPlan::Bio(Op::Write, BioFlags::FUA)
        }
        NbdCommand::Write => RequestPlan::Bio(Op::Write, BioFlags::empty()),
        NbdCommand::Flush => RequestPlan::Bio(Op::Flush, BioFlags::empty()),
        NbdCommand::Trim => RequestPlan::Bio(Op::Discard, BioFlags::empty()),
        NbdCommand::WriteZeroes if request.flags.contains(CommandFlags::NO_HOLE) => {
            RequestPlan::Bio(Op::WriteZeroes, BioFlags::NOUNMAP)
        }
        NbdCommand::WriteZeroes => RequestPlan::Bio(Op::WriteZeroes, BioFlags::empty()),
        NbdCommand::Cache => RequestPlan::Cache,
        NbdCommand::BlockStatus if contexts => RequestPlan::BlockStatusQuery,
        NbdCommand::Disconnect | NbdCommand::BlockStatus | NbdCommand::Other(_) => return Err(EINVAL),
    };
    if !request.flags_fit() || (request.flags.contains(CommandFlags::DF) && !structured) {
        return Err(EINVAL);
    }
    if request.command == NbdCommand::Flush {
        return if request.offset == 0 && request.len == 0 { Ok(plan) } else { Err(EINVAL) };
    }
    if request.len == 0 {
        // proto.md leaves this open. An empty request is probably a mistake of the client, so it is
        // refused, as by nbdkit.
        return Err(EINVAL);
    }
    let writes = matches!(request.command, NbdCommand::Write | NbdCommand::WriteZeroes | NbdCommand::Trim);
    if writes && export.flags.contains(ExportFlags::READ_ONLY) {
        return Err(EPERM);
    }
    if request.command == NbdCommand::Trim && !export.flags.contains(ExportFlags::SEND_TRIM) {
        return Err(EINVAL);
    }
    let carries = matches!(request.command, NbdCommand::Read | NbdCommand::Write);
    if carries && request.len > export.blocks.maximum {
        return Err(EINVAL);
    }
    let end = request.offset.checked_add(request.len.into());
    if end.is_none_or(|end| end > export.size) {
        // proto.md: ENOSPC for writes after the end, EINVAL for other requests.
        let puts = matches!(request.command, NbdCommand::Write | NbdCommand::WriteZeroes);
        return Err(if puts { ENOSPC } else { EINVAL });
    }
    let range = request.offset..request.offset + u64::from(request.len);
    let nothing = request.command == NbdCommand::Trim && export.block.inside(&range).is_empty();
    Ok(if nothing { RequestPlan::Nothing } else { plan })
}

#[cfg(test)]
mod tests {
    use super::*;
    use udm_wire::nbd::BlockSizes;

    fn geometry() -> ExportGeometry {
        let blocks = BlockSizes { minimum: 1, preferred: 4096, maximum: 64 << 20 };
        let flags = ExportFlags::HAS_FLAGS | ExportFlags::SEND_TRIM;
        ExportGeometry {
            size: 96 << 20,
            block: DeviceBlockSize { size: 512 },
            blocks,
            flags,
            data_max: 1 << 20,
            discard_max: 1 << 20,
            zeroes_max: 1 << 20,
        }
    }

    fn request(command: NbdCommand, flags: CommandFlags, offset: u64, len: u32) -> NbdRequestHeader {
        NbdRequestHeader { flags, command, cookie: 1, offset, len }
    }

    fn verdict(command: NbdCommand, offset: u64, len: u32) -> Result<RequestPlan, u32> {
        check_request(&request(command, CommandFlags::empty(), offset, len), &geometry(), false, false)
    }

    #[test]
    fn blocks() {
        let b = DeviceBlockSize { size: 512 };
        for (range, around, inside) in [
            (0..512, 0..512, 0..512),
            (1..512, 0..512, 512..512),
            (1..1025, 0..1536, 512..1024),
            (513..514, 512..1024, 1024..1024),
            (512..1025, 512..1536, 512..1024),
        ] {
            assert_eq!((b.around(&range), b.inside(&range)), (around, inside), "{range:?}");
        }
    }

    #[test]
    fn ranges() {
        use NbdCommand::{Cache, Read, Trim, Write, WriteZeroes};
        let end = 96 << 20;
        for command in [Read, Write, Trim, WriteZeroes, Cache] {
            let beyond = if matches!(command, Write | WriteZeroes) { ENOSPC } else { EINVAL };
            assert!(verdict(command, end - 512, 512).is_ok());
            assert_eq!((verdict(command, end, 0), verdict(command, 0, 0)), (Err(EINVAL), Err(EINVAL)));
            assert_eq!(verdict(command, end, 512), Err(beyond));
            assert_eq!(verdict(command, end - 512, 1024), Err(beyond));
            assert_eq!(verdict(command, u64::MAX - 511, 512), Err(beyond));
            assert_eq!(verdict(command, end - 511, 512), Err(beyond));
            let nothing = verdict(command, 0, 511) == Ok(RequestPlan::Nothing);
            assert_eq!(nothing, command == Trim, "a trim takes whole blocks");
            assert!(verdict(command, 1, 1023).is_ok_and(|plan| plan != RequestPlan::Nothing));
        }
        assert!(verdict(Read, 0, 64 << 20).is_ok());
        assert_eq!(verdict(Read, 0, (64 << 20) + 512), Err(EINVAL));
        assert_eq!(verdict(Write, 0, (64 << 20) + 512), Err(EINVAL));
        assert!(verdict(WriteZeroes, 0, 96 << 20).is_ok(), "no data, no limit");
    }

    #[test]
    fn flags_and_commands() {
        let g = geometry();
        let fits = |c, f, structured| check_request(&request(c, f, 0, 512), &g, structured, false);
        assert_eq!(
            fits(NbdCommand::Write, CommandFlags::FUA, false),
            Ok(RequestPlan::Bio(Op::Write, BioFlags::FUA))
        );
        assert_eq!(fits(NbdCommand::Read, CommandFlags::DF, false), Err(EINVAL));
        assert!(fits(NbdCommand::Read, CommandFlags::DF, true).is_ok());
        assert_eq!(
            fits(NbdCommand::WriteZeroes, CommandFlags::NO_HOLE, false),
            Ok(RequestPlan::Bio(Op::WriteZeroes, BioFlags::NOUNMAP))
        );
        assert_eq!(fits(NbdCommand::Trim, CommandFlags::NO_HOLE, false), Err(EINVAL));
        assert_eq!(fits(NbdCommand::Write, CommandFlags::PAYLOAD_LEN, true), Err(EINVAL));
        assert_eq!(fits(NbdCommand::BlockStatus, CommandFlags::empty(), true), Err(EINVAL));
        let status = request(NbdCommand::BlockStatus, CommandFlags::REQ_ONE, 1, 512);
        assert_eq!(check_request(&status, &g, true, true), Ok(RequestPlan::BlockStatusQuery));
        assert_eq!(check_request(&NbdRequestHeader { len: 0, ..status }, &g, true, true), Err(EINVAL));
        assert_eq!(
            check_request(&NbdRequestHeader { offset: 96 << 20, ..status }, &g, true, true),
            Err(EINVAL)
        );
        assert_eq!(fits(NbdCommand::Other(99), CommandFlags::empty(), true), Err(EINVAL));
        assert_eq!(fits(NbdCommand::Flush, CommandFlags::empty(), true), Err(EINVAL), "a flush has no range");
    }

    #[test]
    fn a_trim_must_have_been_offered() {
        let trim = request(NbdCommand::Trim, CommandFlags::empty(), 0, 512);
        assert!(check_request(&trim, &geometry(), false, false).is_ok());
        let g = ExportGeometry { flags: ExportFlags::HAS_FLAGS, ..geometry() };
        assert_eq!(check_request(&trim, &g, false, false), Err(EINVAL));
    }

    #[test]
    fn a_read_only_export_takes_no_writes() {
        let flags = ExportFlags::HAS_FLAGS | ExportFlags::READ_ONLY;
        let g = ExportGeometry { flags, ..geometry() };
        for command in [NbdCommand::Write, NbdCommand::Trim, NbdCommand::WriteZeroes] {
            assert_eq!(
                check_request(&request(command, CommandFlags::empty(), 0, 512), &g, false, false),
                Err(EPERM)
            );
        }
        for command in [NbdCommand::Read, NbdCommand::Cache] {
            assert!(
                check_request(&request(command, CommandFlags::empty(), 0, 512), &g, false, false).is_ok()
            );
        }
        assert!(
            check_request(&request(NbdCommand::Flush, CommandFlags::empty(), 0, 0), &g, false, false).is_ok()
        );
    }
}
