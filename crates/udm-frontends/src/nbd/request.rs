//! Checks of requests against their export, before any part reaches the device.

use super::export_geometry::ExportGeometry;
use std::ops::Range;
use udm_core::{BioFlags, Op};
use udm_wire::nbd::{
    BlockStatusPayload, CommandFlags, EINVAL, ENOSPC, EPERM, ExportFlags, NbdCommand, NbdHeaderStyle,
    NbdRequestHeader,
};

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
    /// A block-status query about some of the chosen contexts, which the payload names.
    BlockStatusPayload,
    /// Nothing: a trim of less than a block. Succeeds.
    Nothing,
}

/// Checks `request` against its export. The client has chosen `contexts` metadata contexts.
///
/// # Errors
/// The NBD error of the answer. The payload of a refused request must be skipped.
pub(super) fn check_request(
    request: &NbdRequestHeader,
    export: &ExportGeometry,
    style: NbdHeaderStyle,
    contexts: usize,
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
        NbdCommand::BlockStatus if contexts > 0 && request.flags.contains(CommandFlags::PAYLOAD_LEN) => {
            RequestPlan::BlockStatusPayload
        }
        NbdCommand::BlockStatus if contexts > 0 => RequestPlan::BlockStatusQuery,
        NbdCommand::Disconnect | NbdCommand::BlockStatus | NbdCommand::Other(_) => return Err(EINVAL),
    };
    if !request.flags_fit(style) || (request.flags.contains(CommandFlags::DF) && !style.has_chunks()) {
        return Err(EINVAL);
    }
    if plan == RequestPlan::BlockStatusPayload {
        // The length is that of the payload. The range is checked when it has arrived.
        let sizes = BlockStatusPayload::size(1) as u64..=BlockStatusPayload::size(contexts) as u64;
        return if sizes.contains(&request.len) { Ok(plan) } else { Err(EINVAL) };
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
    if carries && request.len > export.blocks.maximum.into() {
        return Err(EINVAL);
    }
    let end = request.offset.checked_add(request.len);
    if end.is_none_or(|end| end > export.size) {
        // proto.md: ENOSPC for writes after the end, EINVAL for other requests.
        let puts = matches!(request.command, NbdCommand::Write | NbdCommand::WriteZeroes);
        return Err(if puts { ENOSPC } else { EINVAL });
    }
    let range = request.offset..request.offset + request.len;
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

    const SIMPLE: NbdHeaderStyle = NbdHeaderStyle::Simple;
    const STRUCTURED: NbdHeaderStyle = NbdHeaderStyle::Structured;
    const EXTENDED: NbdHeaderStyle = NbdHeaderStyle::Extended;

    fn request(command: NbdCommand, flags: CommandFlags, offset: u64, len: u64) -> NbdRequestHeader {
        NbdRequestHeader { flags, command, cookie: 1, offset, len }
    }

    fn verdict(command: NbdCommand, offset: u64, len: u64) -> Result<RequestPlan, u32> {
        check_request(&request(command, CommandFlags::empty(), offset, len), &geometry(), SIMPLE, 0)
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
        let fits = |c, f, style| check_request(&request(c, f, 0, 512), &g, style, 0);
        assert_eq!(
            fits(NbdCommand::Write, CommandFlags::FUA, SIMPLE),
            Ok(RequestPlan::Bio(Op::Write, BioFlags::FUA))
        );
        assert_eq!(fits(NbdCommand::Read, CommandFlags::DF, SIMPLE), Err(EINVAL));
        assert!(fits(NbdCommand::Read, CommandFlags::DF, STRUCTURED).is_ok());
        assert_eq!(
            fits(NbdCommand::WriteZeroes, CommandFlags::NO_HOLE, SIMPLE),
            Ok(RequestPlan::Bio(Op::WriteZeroes, BioFlags::NOUNMAP))
        );
        assert_eq!(fits(NbdCommand::Trim, CommandFlags::NO_HOLE, SIMPLE), Err(EINVAL));
        assert_eq!(fits(NbdCommand::Write, CommandFlags::PAYLOAD_LEN, STRUCTURED), Err(EINVAL));
        assert_eq!(fits(NbdCommand::BlockStatus, CommandFlags::empty(), STRUCTURED), Err(EINVAL));
        let status = request(NbdCommand::BlockStatus, CommandFlags::REQ_ONE, 1, 512);
        assert_eq!(check_request(&status, &g, STRUCTURED, 1), Ok(RequestPlan::BlockStatusQuery));
        assert_eq!(check_request(&NbdRequestHeader { len: 0, ..status }, &g, STRUCTURED, 1), Err(EINVAL));
        assert_eq!(
            check_request(&NbdRequestHeader { offset: 96 << 20, ..status }, &g, STRUCTURED, 1),
            Err(EINVAL)
        );
        assert_eq!(fits(NbdCommand::Other(99), CommandFlags::empty(), STRUCTURED), Err(EINVAL));
        assert_eq!(
            fits(NbdCommand::Flush, CommandFlags::empty(), STRUCTURED),
            Err(EINVAL),
            "a flush has no range"
        );
    }

    #[test]
    fn extended_requests_with_and_without_a_payload() {
        let end = 96 << 20;
        let verdict = |command, flags, offset, len| {
            check_request(&request(command, flags, offset, len), &geometry(), EXTENDED, 2)
        };
        let (none, payload) = (CommandFlags::empty(), CommandFlags::PAYLOAD_LEN);
        let write = RequestPlan::Bio(Op::Write, BioFlags::empty());
        assert_eq!(verdict(NbdCommand::Write, payload, 0, 512), Ok(write));
        assert_eq!(verdict(NbdCommand::Write, payload, end, 512), Err(ENOSPC));
        for (flags, len) in [(none, 512), (payload, 0), (payload, (64 << 20) + 1), (payload, 1 << 33)] {
            assert_eq!(verdict(NbdCommand::Write, flags, 0, len), Err(EINVAL), "{flags:?} {len}");
        }
        use NbdCommand::{BlockStatus, Cache, Flush, Other, Read, Trim, WriteZeroes};
        for command in [Read, Trim, WriteZeroes, Cache, Flush, Other(99)] {
            assert_eq!(verdict(command, payload, 0, 512), Err(EINVAL), "{command:?}");
        }
        for command in [Trim, WriteZeroes, Cache, BlockStatus, Read] {
            let beyond = if command == WriteZeroes { ENOSPC } else { EINVAL };
            for (offset, len) in [(0, 1 << 33), (512, u64::MAX), (u64::MAX, u64::MAX)] {
                let expected = if command == Read { EINVAL } else { beyond };
                assert_eq!(verdict(command, none, offset, len), Err(expected), "{command:?} {len}");
            }
        }
        let large = ExportGeometry { size: 8 << 40, ..geometry() };
        for command in [Trim, WriteZeroes, Cache, BlockStatus] {
            let verdict = |style| check_request(&request(command, none, 1 << 40, 6 << 40), &large, style, 1);
            assert!(verdict(EXTENDED).is_ok(), "{command:?}");
        }
        let read = request(Read, none, 0, (64 << 20) + 1);
        assert_eq!(check_request(&read, &large, EXTENDED, 0), Err(EINVAL), "reads keep their limit");
    }

    #[test]
    fn a_block_status_names_as_many_contexts_as_there_are() {
        let verdict = |len, style, contexts| {
            let status = request(NbdCommand::BlockStatus, CommandFlags::PAYLOAD_LEN, u64::MAX, len);
            check_request(&status, &geometry(), style, contexts)
        };
        for len in [12, 14, 16] {
            assert_eq!(verdict(len, EXTENDED, 2), Ok(RequestPlan::BlockStatusPayload), "{len} bytes");
        }
        for len in [0, 8, 11, 17, 20, 1 << 40] {
            assert_eq!(verdict(len, EXTENDED, 2), Err(EINVAL), "{len} bytes");
        }
        assert_eq!(verdict(12, EXTENDED, 0), Err(EINVAL), "no context was chosen");
        assert_eq!(verdict(12, STRUCTURED, 2), Err(EINVAL));
    }

    #[test]
    fn a_trim_must_have_been_offered() {
        let trim = request(NbdCommand::Trim, CommandFlags::empty(), 0, 512);
        assert!(check_request(&trim, &geometry(), SIMPLE, 0).is_ok());
        let g = ExportGeometry { flags: ExportFlags::HAS_FLAGS, ..geometry() };
        assert_eq!(check_request(&trim, &g, SIMPLE, 0), Err(EINVAL));
    }

    #[test]
    fn a_read_only_export_takes_no_writes() {
        let flags = ExportFlags::HAS_FLAGS | ExportFlags::READ_ONLY;
        let g = ExportGeometry { flags, ..geometry() };
        for command in [NbdCommand::Write, NbdCommand::Trim, NbdCommand::WriteZeroes] {
            assert_eq!(
                check_request(&request(command, CommandFlags::empty(), 0, 512), &g, SIMPLE, 0),
                Err(EPERM)
            );
        }
        for command in [NbdCommand::Read, NbdCommand::Cache] {
            assert!(check_request(&request(command, CommandFlags::empty(), 0, 512), &g, SIMPLE, 0).is_ok());
        }
        assert!(
            check_request(&request(NbdCommand::Flush, CommandFlags::empty(), 0, 0), &g, SIMPLE, 0).is_ok()
        );
    }
}
