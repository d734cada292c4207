//! Bugs of the NVMe/TCP target and initiator.

macro_rules! nvme_bugs {
    ({$($all:tt)*} $($next:ident)*) => {
        collect_bugs! { {
            $($all)*
            /// A write that an NVMe controller may still carry out is sent elsewhere at once.
            NvmeRetryBeforeFence: NvmeClient,
            /// A completion of no command in flight is ignored by an NVMe initiator.
            NvmeUnknownIdIgnored: NvmeClient,
            /// A read completes although the digest of its data is wrong.
            NvmeDataDigestBelieved: NvmeClient,
            /// A read completes with success although data is missing.
            NvmeShortReadTaken: NvmeClient,
            /// An ANA change while another page is read is forgotten.
            NvmeAnaEventLost: NvmeClient,
            /// A namespace event while another page is read does not make the initiator read its log.
            NvmeChangedLogNotRead: NvmeClient,
            /// A controller that returns with another namespace is accepted.
            NvmeOtherNamespaceTaken: NvmeClient,
            /// A discard has its range in the capsule, whatever the controller takes there.
            NvmeRangeInCapsule: NvmeClient,
            /// Only the first PDU of the data of an R2T is sent.
            NvmeRestOfDataNotSent: NvmeClient,
            /// A command that is to be repeated after a delay is not repeated.
            NvmeDelayedLost: NvmeClient,
            /// A reset of another controller is complete although its requests are at a device.
            NvmeResetAnsweredEarly: Nvme,
            /// A shutdown is complete although writes are at a device.
            NvmeShutdownAnsweredEarly: Nvme,
            /// The end of an association does not reach its I/O queues.
            NvmeEndUnheard: Nvme,
            /// The end of a reset that took long raises no event.
            NvmeResetEventForgotten: Nvme,
            /// A command is answered twice: with its data, and with a response.
            NvmeAnsweredTwice: Nvme,
            /// Data with a wrong digest is written.
            NvmeDigestNotChecked: NvmeClient,
            /// A change of an ANA state raises no event.
            NvmeAnaEventNotRaised: NvmeClient,
            /// A host has read a page, and its event is not reported any more.
            NvmeEventStaysSilent: NvmeClient,
            /// A write is answered when its data has come, before it is at the disk.
            NvmeWriteAnsweredEarly: NvmeClient,
            /// A Keep Alive without an answer does not end the association.
            NvmeKeepAliveUnwatched: NvmeClient,
            /// Requests are sent in every ANA state.
            NvmeAnaStateIgnored: NvmeClient,
            /// An initiator does not check the digests of headers.
            NvmeHostHeaderDigestIgnored: NvmeClient,
            /// An initiator follows an R2T outside the data of its command.
            NvmeR2tBelieved: NvmeClient,
            /// A controller that asks for authentication again is used further.
            NvmeReauthenticationIgnored: NvmeClient,
            /// Writes wait although the lost controller was reset.
            NvmeResetIgnored: NvmeClient,
            /// A reset in progress counts as done.
            NvmeResetInProgressBelieved: NvmeClient,
            /// An initiator does not record the new size of a namespace.
            NvmeResizeIgnored: NvmeClient,
            /// An initiator waits for one event only.
            NvmeEventNotRearmed: NvmeClient,
            /// A new size of a namespace raises no event.
            NvmeNamespaceEventNotRaised: NvmeClient,
            /// A silent host is not given up.
            NvmeKeepAliveNotChecked: Nvme,
            /// A host resets a controller of another host.
            NvmeResetOfOtherHost: Nvme,
            /// A controller that the target has never had counts as reset.
            NvmeForeignInstanceReset: Nvme,
            /// A queue is connected twice.
            NvmeQueueConnectedTwice: Nvme,
            /// A host connects a queue of a controller of another host.
            NvmeQueueOfOtherHost: Nvme,
        } $($next)* }
    };
}
