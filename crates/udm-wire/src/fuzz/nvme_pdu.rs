//! NVMe/TCP: PDUs of a host, and the commands and names in them.

use super::assert_one_line_error;
use crate::nvme::{
    AuthenticationMessage, ConnectData, CrossControllerReset, DataPdu, DhchapSecret, FabricsCommand,
    IdentifyTarget, InitializeRequest, LogPageRequest, NvmeCommand, PduHeader, PduLimits, PduType, RwRequest,
    check_nqn, decode_cross_controller_reset_log, encode_capsule_command, encode_cross_controller_reset_log,
    encode_h2c_data,
};

/// PDUs of an NVMe/TCP host: the first one, headers under all digests, commands, and Connect data.
pub fn fuzz_nvme_pdu(data: &[u8]) {
    if let Some(bytes) = data.first_chunk() {
        match InitializeRequest::decode(bytes) {
            Err(error) => assert_one_line_error(&error),
            Ok(request) => assert_eq!(InitializeRequest::decode(&request.encode()), Ok(request)),
        }
    }
    for digests in 0..4 {
        let limits = PduLimits {
            header_digest: digests & 1 != 0,
            data_digest: digests & 2 != 0,
            capsule_data_max: 8192,
            data_max: 65536,
        };
        let Some(common) = data.first_chunk() else { return };
        match PduHeader::decode(common, &limits) {
            Err(error) => assert_one_line_error(&error),
            Ok(pdu) => check_pdu(data, &pdu, &limits),
        }
    }
    if let Ok((transaction, message)) = AuthenticationMessage::decode(data) {
        let again = AuthenticationMessage::decode(&message.encode(transaction));
        assert_eq!(again, Ok((transaction, message)));
    }
    if let Ok(text) = std::str::from_utf8(data)
        && let Err(error) = DhchapSecret::parse(text)
    {
        assert_one_line_error(&error);
    }
    let resets = decode_cross_controller_reset_log(data);
    assert_eq!(decode_cross_controller_reset_log(&encode_cross_controller_reset_log(&resets)), resets);
    if let Some(bytes) = data.first_chunk() {
        match ConnectData::decode(bytes) {
            Err(error) => assert_one_line_error(&error),
            Ok(connect) => {
                assert!(check_nqn(&connect.subsystem).is_ok() && check_nqn(&connect.host).is_ok());
                assert_eq!(ConnectData::decode(&connect.encode()), Ok(connect));
            }
        }
    }
}

fn check_pdu(data: &[u8], pdu: &PduHeader, limits: &PduLimits) {
    let max = match pdu.kind {
        PduType::NvmeCommand => limits.capsule_data_max,
        _ => limits.data_max,
    };
    assert!(pdu.data_len <= max && pdu.header_len <= 255);
    if data.len() < pdu.header_len {
        return;
    }
    let mut out = [0; 128];
    match pdu.kind {
        PduType::NvmeCommand => {
            let Some(bytes) = data[PduHeader::SIZE..].first_chunk() else { return };
            let command = NvmeCommand::from_bytes(*bytes);
            let _ =
                (command.data_pointer(), FabricsCommand::decode(&command), IdentifyTarget::decode(&command));
            assert!((1..=65536).contains(&RwRequest::decode(&command).blocks));
            assert!(LogPageRequest::decode(&command).len.is_multiple_of(4));
            let reset = CrossControllerReset::decode(&command);
            assert_eq!(CrossControllerReset::decode(&reset.encode(1)), reset);
            let len = (pdu.data_len > 0).then_some(pdu.data_len);
            encode_capsule_command(&mut out, &command, len, limits);
        }
        PduType::HostData => {
            let fields = DataPdu { len: pdu.data_len, ..DataPdu::decode(data) };
            encode_h2c_data(&mut out, &fields, pdu.is_last, limits);
        }
        _ => return,
    }
    // Only padding and flags without a meaning may differ.
    let again = out.first_chunk().map(|common| PduHeader::decode(common, limits));
    let Some(Ok(again)) = again else { panic!("a header that cannot be read back: {again:?}") };
    assert_eq!((again.kind, again.data_len), (pdu.kind, pdu.data_len));
}
